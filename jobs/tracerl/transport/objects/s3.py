"""Requests to S3 through the client that s3fs keeps.

Not through the methods of s3fs: those retry by a count of their own, for how long nobody can say.
"""

# The methods are documented in `Backend`.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from botocore.exceptions import (
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from tracerl.transport.base import Buffer
from tracerl.transport.objects.backend import Entry, Leftover, Tail, Verdict

_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_NETWORK_ERRORS = (HTTPClientError, ConnectionError, ResponseParserError, aiohttp.ClientError, OSError)


class S3Backend:
    """See `Backend` and `PartsBackend`."""

    def __init__(
        self, endpoint_url: str | None, credentials: dict[str, str], concurrency: int, field: str
    ) -> None:
        self._field = field
        self._filesystem = S3FileSystem(
            anon=False,
            endpoint_url=endpoint_url,
            skip_instance_cache=True,  # the cache would keep credentials and share closed clients
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "max_pool_connections": concurrency + 4,
                "retries": {"total_max_attempts": 1},
                # Frames carry hashes of their own, checked by their reader. A second and a third hash of
                # every byte cost time, and many S3-compatible servers refuse trailing checksums.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": {"payload_signing_enabled": False},
            },
            **credentials,
        )
        self._opened: Any = None

    async def _client(self) -> Any:
        client = await self._filesystem.set_session()
        if client is not self._opened:
            # By default every upload waits for "100 Continue": a round trip more, for bodies that are small.
            client.meta.events.unregister("before-call.s3", add_expect_header)
            self._opened = client
        return client

    async def put(self, path: str, data: Buffer) -> None:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        await client.put_object(Bucket=bucket, Key=key, Body=_body(data))

    async def begin_upload(self, path: str) -> str:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        answer = await client.create_multipart_upload(Bucket=bucket, Key=key)
        return str(answer["UploadId"])

    async def put_part(self, path: str, upload: str, number: int, data: Buffer) -> str:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        answer = await client.upload_part(
            Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=_body(data)
        )
        return str(answer["ETag"])

    async def end_upload(self, path: str, upload: str, tags: Sequence[str], size: int) -> None:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in enumerate(tags)]
        try:
            await client.complete_multipart_upload(
                Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # A try before this one may have succeeded, and its answer been lost.
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise
            answer = await client.head_object(Bucket=bucket, Key=key)
            if answer["ContentLength"] != size:
                raise error from None

    async def remove(self, leftover: Leftover) -> None:
        bucket, key = _bucket_and_key(leftover.path)
        client = await self._client()
        try:
            await client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=leftover.upload)
        except ClientError as error:
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise

    async def leftovers(self, directory: str) -> list[Leftover]:
        _, prefix = _bucket_and_key(directory)
        return [
            Leftover(path, upload["UploadId"])
            async for path, upload in self._list("list_multipart_uploads", "Uploads", directory)
            # Not every server heeds the prefix.
            if upload["Key"].startswith(f"{prefix}/" if prefix else "")
        ]

    async def get(self, path: str, start: int, stop: int) -> bytes:
        return (await self._ranged(path, f"bytes={start}-{stop - 1}"))[0]

    async def tail(self, path: str, nbytes: int) -> Tail:
        data, span = await self._ranged(path, f"bytes=-{nbytes}")
        # Without a Content-Range the answer is the whole object.
        return Tail(data, len(data) if span is None else int(span.rpartition("/")[2]))

    async def _ranged(self, path: str, span: str) -> tuple[bytes, str | None]:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        answer = await client.get_object(Bucket=bucket, Key=key, Range=span)
        async with answer["Body"] as body:
            return await body.read(), answer.get("ContentRange")

    async def find(self, directory: str) -> list[Entry]:
        objects = self._list("list_objects_v2", "Contents", directory)
        return [Entry(path, found["Size"]) async for path, found in objects]

    async def _list(
        self, operation: str, field: str, directory: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Path of everything below a directory that an operation lists, and what it says of it."""
        bucket, prefix = _bucket_and_key(directory)
        client = await self._client()
        pages = client.get_paginator(operation).paginate(Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
        async for page in pages:
            for found in page.get(field, ()):
                yield f"{bucket}/{found['Key']}", found

    async def delete(self, path: str) -> None:
        bucket, key = _bucket_and_key(path)
        client = await self._client()
        await client.delete_object(Bucket=bucket, Key=key)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def judge(self, error: Exception) -> Verdict:
        # Only codes: a server's message may repeat what it was sent.
        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            words = f"the server answers {status} {code}".rstrip()
            if code == "RequestTimeTooSkewed":
                return Verdict("failed", True, words, "set this machine's clock right")
            if code == "NoSuchBucket":
                return Verdict("failed", False, "the bucket does not exist", "create it, or correct the URL")
            if code in {"NoSuchKey", "404"} or (status == 404 and code != "NoSuchUpload"):
                return Verdict("missing", False, words)
            if status in {401, 403} or code in {"InvalidAccessKeyId", "ExpiredToken", "InvalidToken"}:
                return Verdict(
                    "permission",
                    False,
                    words,
                    "give these credentials the right to read, write, list and delete there",
                )
            if status == 416:
                return Verdict(
                    "damaged",
                    False,
                    "an object is shorter than it was written",
                    "keep what changed it away from the records",
                )
            passes = status >= 500 or status in {0, 200, 408, 429} or code in {"SlowDown", "RequestTimeout"}
            return Verdict("failed", passes, words)
        if isinstance(error, _NO_CREDENTIALS):
            return Verdict(
                "permission",
                False,
                "there are no credentials",
                f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or {self._field}.secretName",
            )
        if isinstance(error, _NETWORK_ERRORS):
            return Verdict("failed", True, f"no answer from the server ({type(error).__name__})")
        return Verdict("failed", False, f"{type(error).__name__}", "check the URL and the endpoint")


def _bucket_and_key(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def _body(data: Buffer) -> bytes | bytearray:
    return bytes(data) if isinstance(data, memoryview) else data
