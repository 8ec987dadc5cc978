"""Checkpoints: the engine's tensors and the loop's counters, whole or not there at all.

`step-000010/` holds state.safetensors, loop.json, and manifest.json with length and XXH3-64 of both. It is
written under a name that starts with a dot, synced, and renamed: a process killed at any moment leaves the
last whole checkpoint and leftovers that the next start removes. A checkpoint whose files do not match its
manifest, or whose name, manifest and loop.json tell different steps, is damaged; loading falls back to the
one before it and says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError

_NAME = re.compile(r"step-(\d{6,})")
_TENSORS, _LOOP = "state.safetensors", "loop.json"
MANIFEST = "manifest.json"
FILES = (_TENSORS, _LOOP, MANIFEST)
"""Files of a checkpoint in the order in which they are copied: it is one when the last is there."""
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the engine's tensors by name, and the loop's state as JSON."""

    step: int
    tensors: dict[str, Tensor]
    loop: dict[str, Any]


def checkpoint_name(step: int) -> str:
    """Name of the directory of a checkpoint."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """Step of the checkpoint in a directory of this name; None when it is not the name of one."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and checkpoint_name(int(found[1])) == name else None


def damage(path: Path) -> str | None:
    """Say how the checkpoint in a directory is not as its manifest says; None when it is. OSError."""
    try:
        _verify(path)
    except (ValueError, LookupError, TypeError, RecursionError, FileNotFoundError) as error:
        return str(error)
    return None


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def save(self, step: int, tensors: dict[str, Tensor], loop: dict[str, Any]) -> None:
        """Write a checkpoint and remove those beyond `keep`; JobError when it cannot be written.

        `loop["step"]` is the step too.
        """
        target = self._directory / checkpoint_name(step)
        partial = self._directory / f".{target.name}.partial"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            partial.mkdir()
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial / _TENSORS
            )
            _write(partial / _LOOP, json.dumps(loop))
            files = {name: _measure(partial / name) for name in (_TENSORS, _LOOP)}
            _write(partial / MANIFEST, json.dumps({"format": _FORMAT, "step": step, "files": files}))
            for path in (partial / _TENSORS, partial):
                _sync(path)
            # A damaged checkpoint of the same step may be in the way.
            self._set_aside(target)
            partial.rename(target)
            _sync(self._directory)
            for old in self._whole_names()[self._keep :]:
                self._set_aside(self._directory / old)
            self._tidy()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise JobError(
                Reason.CHECKPOINT_FAILED,
                f"{target} cannot be written ({error}); free some space or give another directory, "
                "and resume from the checkpoint before it",
            ) from error

    def load(
        self,
        report: Callable[[str], None],
        *,
        what: str = "checkpoint",
        without: str = "continuing from the beginning",
    ) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None when there is none.

        `report` gets a sentence for each damaged one: `what` it is, and what happens `without` any. Removes
        what a killed process left behind, where it can. JobError when the directory cannot be listed.
        """
        try:
            if not self._directory.is_dir():
                return None
            names = self._whole_names()
        except OSError as error:
            raise JobError(
                Reason.CHECKPOINT_FAILED,
                f"{self._directory} cannot be listed ({error.strerror}); check its permissions",
            ) from error
        # What cannot be removed is in nobody's way: saving says what it cannot do.
        with contextlib.suppress(OSError):
            self._tidy()
        for position, name in enumerate(names):
            try:
                return _read(self._directory / name)
            except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
                then = "continuing from the one before it" if position + 1 < len(names) else without
                report(f"{what} {self._directory / name} is damaged ({error}); {then}")
        return None

    def _whole_names(self) -> list[str]:
        """Names of the renamed checkpoints, newest first."""
        found = [entry.name for entry in self._directory.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=lambda name: int(name.removeprefix("step-")), reverse=True)

    def _set_aside(self, path: Path) -> None:
        """Take a checkpoint away in one rename, so that half of it never looks like a whole one."""
        if path.exists():
            aside = path.with_name(f".{path.name}.old")
            _remove(aside)
            path.rename(aside)

    def _tidy(self) -> None:
        for entry in self._directory.iterdir():
            if entry.name.startswith(".step-"):
                _remove(entry)


def _verify(path: Path) -> int:
    """Compare a checkpoint with its manifest and return its step; raises what is wrong with it."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {_FORMAT}")
    if set(manifest["files"]) != {_TENSORS, _LOOP}:
        raise ValueError(f"{MANIFEST} does not name {_TENSORS} and {_LOOP} alone")
    for name in (_TENSORS, _LOOP):
        if manifest["files"][name] != _measure(path / name):
            raise ValueError(f"{name} does not have the length and hash of {MANIFEST}")
    step: int = manifest["step"]
    return step


def _read(path: Path) -> Checkpoint:
    step = _verify(path)
    loop = json.loads((path / _LOOP).read_text(encoding="utf-8"))
    if path.name != checkpoint_name(step) or loop["step"] != step:
        raise ValueError(f"{MANIFEST} says step {step}, {_LOOP} {loop['step']}")
    return Checkpoint(step=step, tensors=load_file(path / _TENSORS), loop=loop)


def _measure(path: Path) -> list[int | str]:
    """Return [bytes, XXH3-64 as hexadecimal], read in pieces: a state can be larger than the memory left."""
    digest, length = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            length += len(piece)
    return [length, digest.hexdigest()]


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
