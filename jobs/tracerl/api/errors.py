"""Errors that a user sees: one sentence that says what, where, and what to do.

The command line prints `str(error)` and exits; it never shows a traceback for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TraceRLError(Exception):
    """Base of every error that is meant for the user; anything else that escapes is a bug."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a manifest: where, what, and what to write instead.

    `path` is empty where the manifest as a whole is wrong.
    """

    path: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        """Give the line that `tracerl validate` prints."""
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.problem}; {self.remedy}"


class InputError(TraceRLError):
    """The manifest or the command line is wrong (exit code 2); `faults` lists all that was found."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class JobError(TraceRLError):
    """The job failed (exit code 1); `reason` is a value of `tracerl.api.constants.Reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def first_line(error: BaseException) -> str:
    """Give the first line of what an error of another library says, 300 characters at most, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def how_to_install(extra: str) -> str:
    """Say how an environment gets an extra of this package, which is in no package index."""
    return (
        f"run make install in TraceRL's repository (in an environment of your own: pip install '.[{extra}]')"
    )
