"""Frames whose every byte is known, and ledgers of who put, read and released which.

A producer writes a line after `put` returned, a reader before and after it releases. Lines are appended by
one system call, so what a killed process had written is whole, but for its last line.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LARGEST = 4 << 20
_NOISE = hashlib.shake_128(b"frames of the kill tests").digest((1 << 20) + LARGEST)


def frame_bytes(trajectory: str, index: int, length: int) -> bytes:
    """The frame that belongs to this name: another name or another length gives other bytes everywhere."""
    name = hashlib.blake2b(f"{trajectory}/{index}/{length}".encode(), digest_size=16).digest()
    start = int.from_bytes(name[:4], "little") % (1 << 20)
    return (name + _NOISE[start : start + max(length - 32, 0)] + name)[:length]


def frame_length(trajectory: str, index: int, largest: int) -> int:
    """A length that looks random: most frames are small, some fill a segment, a few are empty or one byte."""
    draw = int.from_bytes(hashlib.blake2b(f"{trajectory}+{index}".encode(), digest_size=8).digest(), "little")
    kind, rest = draw % 16, draw // 16
    if kind == 0:
        return rest % 3
    if kind == 1:
        return largest - rest % 2
    if kind < 5:
        return rest % (largest + 1)
    return 100 + rest % max(largest // 16, 1)


class Put(NamedTuple):
    """A committed frame, as its producer's ledger has it."""

    trajectory: str
    index: int
    length: int
    handle: str


class Ledger:
    """A file that one process appends to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, *lines: str) -> None:
        """Append lines by one system call."""
        if lines:
            os.write(self._file, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass
class Tail:
    """Reads what was appended to a file since the last look; a line without its end is not there yet."""

    path: Path
    position: int = 0

    def lines(self) -> list[str]:
        """New lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.position += end
        return data[:end].decode().splitlines()


def parse_put(line: str) -> Put | None:
    """Read a producer's line; None for lines of other kinds."""
    kind, _, rest = line.partition(" ")
    if kind != "put":
        return None
    trajectory, index, length, handle = rest.split(" ")
    return Put(trajectory, int(index), int(length), handle)


def instance_of(handle: str) -> str:
    """The start of a store that a handle of the ring belongs to."""
    return handle.split("/")[3]


@dataclass
class Book:
    """All ledgers of a directory together: ``*.puts`` of producers, ``*.reads`` of readers.

    Lines of producers: ``starts TRAJECTORY`` before its first frame, ``put TRAJECTORY INDEX LENGTH HANDLE``.
    Of readers: ``read HANDLE`` whole and right; ``releasing HANDLE``, ``released HANDLE``;
    ``missing HANDLE NS``; ``damaged HANDLE NS`` (the hash differs); ``wrong HANDLE NS`` (the bytes differ).
    Of both: ``error NS SENTENCE``. What is settled is forgotten, so a book stays small however long a test
    runs.
    """

    directory: Path
    trajectories: list[str] = field(default_factory=list)
    open: dict[str, Put] = field(default_factory=dict)
    """Frames that no reader is done with."""
    put: int = 0
    read: int = 0
    released: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    """Frames that were not there, though nobody was releasing them, and when (monotonic, ns)."""
    excused: int = 0
    """Frames that were not there after a reader had been killed while it released them."""
    bad: list[str] = field(default_factory=list)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    lines: Counter[str] = field(default_factory=Counter)
    """Frames put or settled, by the name before the first dot of a ledger's."""
    _releasing: set[str] = field(default_factory=set)
    _early: set[str] = field(default_factory=set)
    """Settled before the line of their put was seen."""
    _tails: dict[Path, Tail] = field(default_factory=dict)

    def look(self) -> Book:
        """Read what is new in all ledgers."""
        for path in sorted(self.directory.glob("*.puts")) + sorted(self.directory.glob("*.reads")):
            for line in self._tails.setdefault(path, Tail(path)).lines():
                self._take(line, path.name)
        return self

    def _take(self, line: str, where: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "put":
            put = parse_put(line)
            assert put is not None
            self.put += 1
            self.lines[where.split(".", maxsplit=1)[0]] += 1
            if put.handle in self.open:
                self.bad.append(f"{where}: a handle was given twice: {put.handle}")
            if put.handle in self._early:
                self._early.discard(put.handle)
            else:
                self.open[put.handle] = put
        elif kind == "starts":
            self.trajectories.append(rest)
        elif kind == "read":
            self.read += 1
        elif kind == "releasing":
            self._releasing.add(rest)
        elif kind == "released":
            self.released += 1
            self._settle(rest, where)
        elif kind == "missing":
            handle, when = rest.split(" ")
            if handle in self._releasing:
                self.excused += 1
            else:
                self.missing[handle] = int(when)
            self._settle(handle, where)
        elif kind in ("damaged", "wrong"):
            self.bad.append(f"{where}: {line}")
        else:
            self.errors.append(f"{where}: {line}")

    def _settle(self, handle: str, where: str) -> None:
        self.lines[where.split(".", maxsplit=1)[0]] += 1
        self._releasing.discard(handle)
        if self.open.pop(handle, None) is None:
            self._early.add(handle)

    def rest(self) -> tuple[dict[str, int], list[Put]]:
        """What a reader that starts now has to read: positions in the producers' ledgers, open frames."""
        puts = {path: tail for path, tail in self._tails.items() if path.suffix == ".puts"}
        return {str(path): tail.position for path, tail in puts.items()}, list(self.open.values())

    def faults(self, killed: dict[str, int]) -> list[str]:
        """What must not be: bytes that differ, frames lost while their store lived.

        `killed` has the instances of stores that were killed and when (monotonic, ns).
        """
        never = time.monotonic_ns() * 2
        lost = (
            f"a committed frame was lost while its store lived: {handle}"
            for handle, when in self.missing.items()
            if when < killed.get(instance_of(handle), never)
        )
        return [*self.bad, *lost]
