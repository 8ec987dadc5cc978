"""Fetching the module of a reward function from any fsspec URL: a Python file, a zip file, or a directory.

What comes is code that will run as the user of the job, so nothing here makes it safe; it only must not fill
the disk, and must end up where it is looked for and nowhere else.
"""

from __future__ import annotations

import io
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import fsspec

from tracerl.transport.objects.backend import one_line

_FILE_BYTES = 16 * 2**20
"""Of a file that is fetched, packed or not."""
_ALL_BYTES = 64 * 2**20
"""Of all files together, unpacked."""
_FILES = 1_000


class CodeError(Exception):
    """The code cannot be used; the words go on after its address."""


def fetch_code(uri: str, module: str, target: Path, options: Mapping[str, str]) -> None:
    """Put the code at `uri` into the directory `target`, whose content is replaced.

    A file that is no zip file becomes `module`, whatever its name; a zip file and a directory keep the names
    that they have. `options` are the filesystem's. CodeError.
    """
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        size = 0
        for number, (name, data) in enumerate(_files(uri, module, options), start=1):
            size += len(data)
            if number > _FILES or size > _ALL_BYTES:
                raise CodeError(
                    f"holds more than {_FILES} files or {_ALL_BYTES >> 20} MiB; put only the reward there"
                )
            path = target.joinpath(*_inside(name).parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except CodeError:
        raise
    except zipfile.BadZipFile as error:
        raise CodeError(f"is a damaged zip file ({error}); upload it again") from None
    except Exception as error:  # noqa: BLE001 -- each of fsspec's many file systems has errors of its own
        raise CodeError(
            f"cannot be read ({one_line(error)}); check the address and the credentials"
        ) from None


def _files(uri: str, module: str, options: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Read the files one after another: their names below the target, and their bytes."""
    filesystem, root = fsspec.core.url_to_fs(uri, **options)
    if filesystem.isdir(root):
        for path in sorted(filesystem.find(root)):
            name = path.removeprefix(root.rstrip("/")).lstrip("/")
            if "__pycache__" not in name.split("/"):
                yield name, _read(filesystem, path)
        return
    data = _read(filesystem, root)
    if zipfile.is_zipfile(io.BytesIO(data)):
        yield from _unpacked(data)
        return
    try:
        compile(data, root, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise CodeError(
            f"is neither Python nor a zip file ({str(error).splitlines()[0]}{line}); give a .py or .zip file"
        ) from None
    yield f"{module.replace('.', '/')}.py", data


def _read(filesystem: fsspec.AbstractFileSystem, path: str) -> bytes:
    with filesystem.open(path, "rb") as file:
        data: bytes = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise CodeError(f"holds a file of more than {_FILE_BYTES >> 20} MiB; put only the reward there")
    return data


def _unpacked(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = 0
        for info in archive.infolist():
            if info.is_dir():
                continue
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise CodeError(f"holds {info.filename[:200]!r}, which is no regular file; leave it out")
            if info.flag_bits & 1:
                raise CodeError("is an encrypted zip file; give one that is not")
            size += info.file_size
            if size > _ALL_BYTES:
                raise CodeError(f"holds more than {_ALL_BYTES >> 20} MiB unpacked; put only the reward there")
            yield info.filename, archive.read(info)


def _inside(name: str) -> PurePosixPath:
    """Give a name as a path; CodeError when it would be outside of the directory that it is put in."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise CodeError(f"holds a file named {name[:200]!r}, which leads elsewhere; name it without .. and /")
    return path
