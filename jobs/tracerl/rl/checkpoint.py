"""Checkpoints: the engine's tensors and the loop's counters, whole or not there at all.

`step-000010/` holds tensors, loop.json, and manifest.json with length and XXH3-64 of all others. Tensors are
in state.safetensors or, where ranks write what they hold, in a state-rank-00000.safetensors of each: one that
ranks hold apart has a part in several files, in the order of ranks, and each file says how it is cut. It is
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.engines.base import Cut

_NAME = re.compile(r"step-(\d{6,})")
_TENSORS, _LOOP = "state.safetensors", "loop.json"
_OF_TENSORS = re.compile(r"state(-rank-\d{5})?\.safetensors")
_CUTS = "cuts"
"""Metadata of a file: [axis, parts] of each of its tensors that is a part, as JSON."""
MANIFEST = "manifest.json"
_FORMAT = 1
Measure = list[int | str]
"""[bytes, XXH3-64 as hexadecimal] of a file."""
Measuring = Callable[[Sequence[Path]], list[Measure]]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the engine's tensors by name, and the loop's state as JSON."""

    step: int
    tensors: StoredTensors
    loop: dict[str, Any]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint's files by name, each read when it is asked for, and then as a whole."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open files, those of ranks in their order; ValueError when parts of a tensor do not fit.

        OSError and SafetensorError as of safetensors.
        """
        self.paths = tuple(paths)
        self._cuts: dict[str, Cut] = {}
        self._files: dict[str, list[Any]] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            cuts = json.loads((file.metadata() or {}).get(_CUTS, "{}"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                cut = Cut(*cuts[name]) if name in cuts else Cut(0, 1)
                self._files.setdefault(name, []).append(file)
                if self._cuts.setdefault(name, cut) != cut:
                    raise ValueError(f"its files do not agree how {name} is cut")
        for name, files in self._files.items():
            cut = self._cuts[name]
            others = {
                (*size[: cut.axis], *size[cut.axis + 1 :])
                for size in (file.get_slice(name).get_shape() for file in files)
            }
            if len(files) != cut.parts:
                raise ValueError(f"its files hold {len(files)} parts of {name}, which has {cut.parts}")
            if len(others) != 1:
                raise ValueError(f"the parts of {name} do not fit together")

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; it is a view of its file where that has all of it."""
        parts = [file.get_tensor(name) for file in self._files[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._cuts[name].axis)

    def __iter__(self) -> Iterator[str]:
        """Give all names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Count names."""
        return len(self._files)


def measure_all(paths: Sequence[Path]) -> list[Measure]:
    """Measure files one after the other. OSError."""
    return [measure(path) for path in paths]


def measure(path: Path) -> Measure:
    """Measure a file, read in pieces: a state can be larger than the memory left. OSError."""
    digest, length = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            length += len(piece)
    return [length, digest.hexdigest()]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut] | None = None
) -> Measure:
    """Write a file of tensors to the disk, some of which are parts. OSError, SafetensorError."""
    named = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(named, path, metadata={_CUTS: json.dumps(cuts)} if cuts else None)
    _sync(path)
    return measure(path)


def shard_name(rank: int) -> str:
    """Name of the file of what a rank holds."""
    return f"state-rank-{rank:05d}.safetensors"


def checkpoint_name(step: int) -> str:
    """Name of the directory of a checkpoint."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """Step of the checkpoint in a directory of this name; None when it is not the name of one."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and checkpoint_name(int(found[1])) == name else None


def is_checkpoint_file(name: str) -> bool:
    """Whether a checkpoint may have a file of this name."""
    return name == MANIFEST or _is_content(name)


def checkpoint_files(path: Path) -> list[str]:
    """Names of the files of a saved checkpoint in the order in which they are copied, the manifest last."""
    return [*_read_manifest(path)["files"], MANIFEST]


def damage(path: Path) -> str | None:
    """Say how the checkpoint in a directory is not as its manifest says; None when it is. OSError."""
    try:
        _verify(path, measure_all)
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
        self.write(step, loop, lambda place: {_TENSORS: write_tensors(place / _TENSORS, tensors)})

    def write(self, step: int, loop: dict[str, Any], write: Callable[[Path], Mapping[str, Measure]]) -> None:
        """Write a checkpoint (`save`) whose tensors `write` puts into a directory, and measures by file."""
        target = self._directory / checkpoint_name(step)
        partial = self._directory / f".{target.name}.partial"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            partial.mkdir()
            files = dict(write(partial))
            _write(partial / _LOOP, json.dumps(loop))
            files[_LOOP] = measure(partial / _LOOP)
            _write(partial / MANIFEST, json.dumps({"format": _FORMAT, "step": step, "files": files}))
            _sync(partial)
            # A damaged checkpoint of the same step may be in the way.
            self._set_aside(target)
            partial.rename(target)
            _sync(self._directory)
            for old in self._whole_names()[self._keep :]:
                self._set_aside(self._directory / old)
            self._tidy()
        except JobError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
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
        measuring: Measuring = measure_all,
    ) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None when there is none.

        `report` gets a sentence for each damaged one: `what` it is, and what happens `without` any. Removes
        what a killed process left behind, where it can. `measuring` is `measure_all`, or does as that does.
        JobError when the directory cannot be listed.
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
                return _read(self._directory / name, measuring)
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


def _is_content(name: str) -> bool:
    return name == _LOOP or _OF_TENSORS.fullmatch(name) is not None


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest whose `files` are those of a checkpoint; raises what is wrong with it."""
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {_FORMAT}")
    names = set(manifest["files"])
    if _LOOP not in names or len(names) == 1 or not all(map(_is_content, names)):
        raise ValueError(f"{MANIFEST} does not name {_LOOP} and files of tensors alone")
    return manifest


def _verify(path: Path, measuring: Measuring) -> tuple[int, list[Path]]:
    """Compare a checkpoint with its manifest; raises what is wrong with it.

    Returns its step and the files of tensors, those of ranks in their order.
    """
    manifest = _read_manifest(path)
    files: dict[str, Measure] = manifest["files"]
    paths = [path / name for name in sorted(files)]
    # Before others are asked to measure what is not there, or not all of it.
    sizes = [[file.stat().st_size] for file in paths]
    measures = measuring(paths) if sizes == [files[file.name][:1] for file in paths] else sizes
    for file, found in zip(paths, measures, strict=True):
        if files[file.name] != found:
            raise ValueError(f"{file.name} does not have the length and hash of {MANIFEST}")
    step: int = manifest["step"]
    return step, [file for file in paths if file.name != _LOOP]


def _read(path: Path, measuring: Measuring) -> Checkpoint:
    step, paths = _verify(path, measuring)
    loop = json.loads((path / _LOOP).read_text(encoding="utf-8"))
    if path.name != checkpoint_name(step) or loop["step"] != step:
        raise ValueError(f"{MANIFEST} says step {step}, {_LOOP} {loop['step']}")
    return Checkpoint(step=step, tensors=StoredTensors(paths), loop=loop)


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
