"""Where `tracerl` starts: Ctrl-C ends it with a sentence from the first moment on, also in an import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line and return its exit code."""
    # Imports do not always pass a KeyboardInterrupt on. A run, which has much to tidy, takes the signal over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from tracerl.cli import main as command_line  # noqa: PLC0415

    return command_line()


def _stop(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # whatever keeps stdout from being flushed, it ends now
        sys.stdout.flush()
    os.write(2, b"tracerl: stopped (Ctrl-C)\n")
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
