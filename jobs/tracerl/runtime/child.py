"""What every process of a run does around its work: log, end with its parent, say why it ended.

Exit codes: 0 done, 1 the job failed, 2 bad input, 70 an error that nobody foresaw, 143 ended by SIGTERM
(without a parent, which sees the signal itself). For 1, 2 and 70 the parent, or on a cluster the kubelet,
gets the sentence for the user; the traceback of 70 is in the log alone.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError, first_line
from tracerl.api.pods import EXIT_FAILED, EXIT_INPUT, EXIT_UNEXPECTED
from tracerl.api.resolved import ResolvedJob
from tracerl.runtime.interface import choose_interface
from tracerl.runtime.processes import NOTE_VARIABLE, PARENT_VARIABLE, ExitNote

EXIT_SIGTERM = 128 + signal.SIGTERM
"""What a shell says of a process that SIGTERM ended."""

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 0.5
_ORPHAN_GRACE_SECONDS = 3.0

log = logging.getLogger(__name__)


class OneLine(logging.Formatter):
    """One line a record, tracebacks included, so that a log can be read line by line by any tool."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname} {name} {message}", style="{")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with line ends written as a backslash and an n."""
        return super().format(record).replace("\n", "\\n")


def log_to_stderr() -> None:
    """Send the log of this process to stderr, from level INFO."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_to_file(path: Path) -> None:
    """Append this process's log to a file as well, which stays when its container is gone. OSError."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(OneLine())
    logging.getLogger().addHandler(handler)


def end_with_parent() -> None:
    """End this process when the parent named in the environment dies.

    The kernel's signal is sent at once but only from the moment it was asked for; polling sees a parent that
    died before. SIGTERM first, so that endpoints and frames are removed; SIGKILL for the whole group when the
    process is stuck.
    """
    parent = int(os.environ[PARENT_VARIABLE])
    os.set_inheritable(int(os.environ[NOTE_VARIABLE]), False)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def at_sigterm(action: Callable[[], None]) -> None:
    """Do this at SIGTERM, on a thread of its own; a later call takes the place of an earlier one.

    The kernel keeps a signal without a handler from the first process of a container, and a handler of Python
    waits until the main thread runs Python again, which may be in a collective operation. Main thread only.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before >= 0:
        os.close(before)

    def wait() -> None:
        # The number of every signal that has a handler arrives, and nothing when the pipe is replaced.
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                action()
        os.close(reader)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def _end_now(name: str) -> None:
    log.info("%s ends at SIGTERM", name)
    os._exit(EXIT_SIGTERM)


def run_process(path: Path, name: str, work: Callable[[ResolvedJob], None]) -> int:
    """Run the work of the process `name` of the job at `path` to its end and return the exit code.

    What SIGTERM does is for `work` to decide; until it does so the signal ends the process.
    """
    log_to_stderr()
    if PARENT_VARIABLE in os.environ:
        end_with_parent()
    else:
        at_sigterm(partial(_end_now, name))
    try:
        job = ResolvedJob.read(path)
        if job.on_cluster:
            choose_interface()
        log.info("%s of job %s starts as process %d", name, job.job.metadata.name, os.getpid())
        work(job)
    except InputError as error:
        return _explain(Reason.INVALID_SPEC, str(error), EXIT_INPUT)
    except JobError as error:
        return _explain(error.reason, str(error), EXIT_FAILED)
    except Exception as error:
        log.exception("%s failed unexpectedly", name)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            sentence = f"{name} may not open more than {limit} files; raise that with ulimit -n"
            return _explain(Reason.CONFIGURATION, sentence, EXIT_FAILED)
        sentence = f"{name} failed unexpectedly ({type(error).__name__}: {first_line(error)})"
        return _explain(Reason.UNEXPECTED, sentence, EXIT_UNEXPECTED)
    log.info("%s ends", name)
    return 0


def _explain(reason: str, message: str, code: int) -> int:
    log.error("%s", message)
    ExitNote(reason, message).send()
    return code
