"""Finding stored frames: as files or in objects, on any fsspec URL, and in the stores of a run that lives.

A run that lives is known by what is in its directory alone, the token and the endpoints of stores: nothing
that a directory of somebody else says can make this send another file's content, or the token elsewhere than
to where it lies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from tracerl.api.errors import InputError
from tracerl.api.frames import FRAME_SUFFIX, RELEASED, FoundFrame, Handle, parse_handle
from tracerl.api.resolved import EndpointFile, RunLayout
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.objects.backend import one_line
from tracerl.transport.objects.format import OBJECT_SUFFIX, ObjectError, decode_index
from tracerl.transport.remote import RemoteSource

_SUFFIXES = (FRAME_SUFFIX, OBJECT_SUFFIX)
_STORE_SECONDS: Final = 10.0
"""A store that is silent for so long is given up; one that is started again takes less."""
_READ_BYTES: Final = 4 * 2**20
"""About how much of a store's frames is in memory at a time; one frame may be longer."""


def find_frames(locations: Iterable[str], *, endpoint_url: str | None = None) -> Iterator[FoundFrame]:
    """Yield every frame: a location is a frame, an object of frames, or a directory searched for both.

    Any fsspec URL; credentials are those of the environment, and so is the endpoint of s3:// unless
    `endpoint_url` gives it. Paths begin as the location was given; that of a frame in an object ends in ``#``
    and its offset. In place of what is in the directory of a run that lives, its stores' frames are given, of
    all tiers, as they are now: their paths are their handles, and those that are released before they are
    read have the reason `RELEASED`. InputError when a location does not exist, cannot be opened, or is a
    directory of no such run that holds no frame.
    """
    for location in locations:
        if not location:
            raise InputError("an empty path names no frames; give frames or a directory of them")
        closed: list[FoundFrame] = []
        stores: list[Iterator[FoundFrame]] = []
        try:
            options, at, hint = _endpoint(location, endpoint_url)
            filesystem, root = fsspec.core.url_to_fs(location, **options)
            if isinstance(filesystem, LocalFileSystem):
                stores = _living_stores(RunLayout(Path(root)))
            if stores:
                paths = []
            elif filesystem.isfile(root):
                paths = [root]
            elif not filesystem.exists(root):
                raise InputError(
                    f"{location} does not exist{at}; give frames or a directory of them, which a job keeps "
                    f"with spec.transport.object.retention=Job{hint}"
                )
            else:
                paths = sorted(path for path in filesystem.find(root) if path.endswith(_SUFFIXES))
                closed = _closed_directories(filesystem, root)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  each of fsspec's many file systems has errors of its own
            raise InputError(
                f"{location} cannot be read{at} ({one_line(error)}); give a path or URL of frames{hint}"
            ) from None
        if not (paths or closed or stores):
            raise InputError(
                f"{location} holds no record frames (they are deleted after use; to keep them, set "
                "spec.transport.onlyObject=true and spec.transport.object.retention=Job)"
            )
        for frames in stores:
            yield from frames
        for path in paths:
            shown = _as_given(location, root, path)
            try:
                data = filesystem.cat_file(path)
            except Exception as error:  # noqa: BLE001  as above; the others may be whole
                yield _unreadable(shown, error)
                continue
            if path.endswith(OBJECT_SUFFIX):
                yield from _frames_of_object(shown, data)
            else:
                yield FoundFrame(shown, data)
        for problem in closed:
            yield replace(problem, path=_as_given(location, root, problem.path))


def _endpoint(location: str, given: str | None) -> tuple[dict[str, str], str, str]:
    """Options of fsspec for a location's endpoint, its name in messages, and how to give another one.

    InputError when it is none.
    """
    if fsspec.core.split_protocol(location)[0] not in {"s3", "s3a"}:
        return {}, "", ""
    url = given or os.environ.get("AWS_ENDPOINT_URL")
    if not url:
        return {}, " at AWS", ", and --endpoint-url or AWS_ENDPOINT_URL for another store"
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may hold what the URL holds
        raise InputError("the endpoint is no URL; write for example http://minio:9000") from None
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise InputError(f"the endpoint {shown} is no http or https URL; write for example http://minio:9000")
    return {"endpoint_url": url}, f" at {shown}", ""


def _living_stores(layout: RunLayout) -> list[Iterator[FoundFrame]]:
    """The frames of each store that a local run has published; none when it has ended, or is no run."""
    published = sorted(layout.endpoints.glob("store-*.json"), key=lambda path: (len(path.name), path.name))
    if not published or layout.token.is_symlink() or not layout.token.is_file():
        return []
    try:
        token = layout.token.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InputError(
            f"{layout.token} cannot be read ({one_line(error)}); look into records as the user of the run"
        ) from None
    except UnicodeDecodeError:
        token = ""
    if not token.isalnum():  # else an error about the header would show it
        raise InputError(f"{layout.token} is no token; give the directory of a run")
    return [_frames_of_store(path, token) for path in published]


def _frames_of_store(published: Path, token: str) -> Iterator[FoundFrame]:
    """Read a store's frames, some at a time, and let them go at once; references are left as they are."""
    name = published.stem
    connect = partial(RemoteSource, name, partial(_url, published), token=token, timeout=_STORE_SECONDS)
    try:
        with closing(connect(run_id="")) as store:
            for page in store.pages():
                for run_id, frames in groupby(page, attrgetter("run_id")):
                    with closing(connect(run_id=run_id)) as source:
                        for batch in _batches(frame.handle for frame in frames):
                            yield from _read(source, batch)
    except TransportError as error:
        yield FoundFrame(name, None, "unreadable", f"what it holds cannot be read: {error}")


def _url(published: Path) -> str | None:
    try:
        endpoint = EndpointFile.read(published)
    except (OSError, ValueError):  # no store has written that
        return None
    return None if endpoint is None else endpoint.url


def _batches(handles: Iterable[Handle]) -> Iterator[list[Handle]]:
    batch: list[Handle] = []
    size = 0
    for handle in handles:
        length = parse_handle(handle).length
        if batch and size + length > _READ_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(handle)
        size += length
    if batch:
        yield batch


def _read(source: RemoteSource, handles: list[Handle]) -> list[FoundFrame]:
    """Read frames of one run. TransportError when it is the store that does not answer."""
    with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
        found = [_found(*pair) for pair in zip(handles, borrowed.pieces, strict=True)]
    failed = [index for index, frame in enumerate(found) if frame.reason == "unreadable"]
    # What the store still has is lost, not released: an object of its lower tier may be gone, for example.
    present = source.present([handles[index] for index in failed])
    for index, there in zip(failed, present, strict=True):
        if not there:
            found[index] = replace(found[index], reason=RELEASED)
    return found


def _found(handle: Handle, piece: list[memoryview] | TransportError) -> FoundFrame:
    if isinstance(piece, TransportError):
        return FoundFrame(handle, None, "unreadable", str(piece))
    data = bytes(piece[0])
    if xxhash.xxh3_64_intdigest(data) != parse_handle(handle).xxh3:
        return FoundFrame(handle, None, "checksum", "the hash in its handle is of other bytes")
    return FoundFrame(handle, data)


def _frames_of_object(path: str, data: bytes) -> Iterator[FoundFrame]:
    try:
        index = decode_index(data, len(data))
    except ObjectError as error:
        yield FoundFrame(path, None, error.reason, f"it is not a whole object: {error}")
        return
    for frame in index.frames:
        piece = data[frame.offset : frame.offset + frame.length]
        shown = f"{path}#{frame.offset}"
        if f"{xxhash.xxh3_64_intdigest(piece):016x}" == frame.xxh3:
            yield FoundFrame(shown, piece)
        else:
            yield FoundFrame(shown, None, "checksum", "the hash in the object's index is of other bytes")


def _closed_directories(filesystem: Any, root: str) -> list[FoundFrame]:
    """Directories of this machine that `find` passes over in silence because they cannot be listed."""
    failed: list[OSError] = []
    if isinstance(filesystem, LocalFileSystem):
        for _ in os.walk(root, onerror=failed.append):
            pass
    return [_unreadable(str(error.filename), error) for error in failed]


def _unreadable(path: str, error: Exception) -> FoundFrame:
    return FoundFrame(path, None, "unreadable", f"it cannot be read ({one_line(error)})")


def _as_given(location: str, root: str, path: str) -> str:
    """Write the path of a frame below `root` with the location that it was found in."""
    if path == root:
        return location
    if "::" in location or not path.startswith(root):
        return path
    return f"{location.rstrip('/')}/{path.removeprefix(root).lstrip('/')}"
