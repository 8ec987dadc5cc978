"""Where the objects of a job are."""

from __future__ import annotations

from tracerl.api.resolved import ResolvedJob
from tracerl.transport.objects.filesystem import FileSystem, open_filesystem, read_credentials


def open_objects(resolved: ResolvedJob) -> FileSystem:
    """Open the job's directory for objects. TransportError when its URL or its credentials are of no use."""
    spec = resolved.job.spec.transport
    return open_filesystem(
        resolved.records_uri,
        endpoint_url=spec.object.endpoint_url,
        credentials=resolved.credentials_dir,
        deadline_seconds=spec.deadline_seconds,
    )


def s3_options(resolved: ResolvedJob) -> dict[str, str]:
    """Give fsspec's options for the s3:// URLs that a job reads its task from.

    They are the endpoint and the credentials of ``spec.output`` where that is in S3, else those of
    ``spec.transport.object`` where that is; else none, which leaves it to the environment. TransportError
    when a secret does not hold them.
    """
    spec = resolved.job.spec
    for place, directory, field in (
        (spec.output, resolved.output_credentials_dir, "spec.output"),
        (spec.transport.object, resolved.credentials_dir, "spec.transport.object"),
    ):
        if place.uri is not None and place.uri.startswith("s3://"):
            endpoint = {} if place.endpoint_url is None else {"endpoint_url": place.endpoint_url}
            return {**read_credentials(directory, field), **endpoint}
    return {}
