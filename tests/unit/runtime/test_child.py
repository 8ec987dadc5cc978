"""The frame around every process: its exit code, the sentence for the user, and its log."""

import re
import resource
import subprocess
import sys

import pytest
from live_processes import wait_until
from test_rundir import job

from tracerl.runtime import rundir
from tracerl.runtime.processes import Children, ProcessSpec

LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

MAIN = """
import errno, sys, logging, os, signal, time, warnings
from pathlib import Path
from tracerl.api.errors import InputError, JobError
from tracerl.runtime.child import run_process
def work(resolved):
    {}
sys.exit(run_process(Path(sys.argv[1]), "trainer-0", work))
"""


@pytest.fixture
def ended(tmp_path):
    """Run `work` as trainer-0 of a resolved job; returns how it ended and its log."""
    resolved = rundir.start_run(job(), tmp_path)
    log = resolved.layout.log("trainer-0")

    def run(work, path=resolved.layout.job):
        import threading

        arguments = [sys.executable, "-c", MAIN.format(work), str(path)]
        with Children(grace_seconds=5, hurry=threading.Event()) as children:
            children.start(ProcessSpec("trainer-0", "trainer", arguments, log, {}))
            found = []
            wait_until(lambda: found.extend(children.ended()) or found, "it ends")
        return found[0], log.read_text()

    return run


@pytest.mark.parametrize(
    ("work", "status", "reason", "message"),
    [
        ("pass", 0, None, None),
        ("raise InputError('no such model')", 2, "InvalidSpec", "no such model"),
        ("raise JobError('NonFinite', 'a NaN in layer 1')", 1, "NonFinite", "a NaN in layer 1"),
        ("{}['x']", 70, "Unexpected", "trainer-0 failed unexpectedly (KeyError: 'x')"),
        (
            "raise RuntimeError('first\\nsecond')",
            70,
            "Unexpected",
            "trainer-0 failed unexpectedly (RuntimeError: first)",
        ),
        ("raise JobError('Long', 'ä' * 10_000)", 1, "Long", "ä" * 2_000),
        (
            "raise OSError(errno.EMFILE, 'Too many open files')",
            1,
            "Configuration",
            f"trainer-0 may not open more than {LIMIT} files; raise that with ulimit -n",
        ),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, None, None),
    ],
)
def test_how_a_process_ends(ended, work, status, reason, message):
    end, log = ended(work)
    assert end.status == status
    assert (end.note and end.note.reason, end.note and end.note.message) == (reason, message)
    assert ("Traceback" in log) == (status == 70 or "files" in str(message))


def test_a_log_has_one_line_a_record(ended):
    """Also of a traceback and of a warning."""
    _, log = ended("warnings.warn('two\\nlines'); logging.getLogger('x').info('a\\nb'); 1 / 0")
    lines = log.splitlines()
    assert len(lines) == 5
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ [\w.]+ .", line) for line in lines)
    assert lines[2].endswith(r" INFO x a\nb")
    assert r"Traceback (most recent call last):\n" in lines[3]


def test_a_document_that_is_no_resolved_job(ended, tmp_path):
    (tmp_path / "other.yaml").write_text("a: 1")
    end, _ = ended("pass", tmp_path / "other.yaml")
    assert (end.status, end.note.reason) == (2, "InvalidSpec")
    assert "other.yaml is not a resolved job" in end.note.message


@pytest.fixture
def alone(tmp_path):
    """Start `work` as trainer-0 without a parent that looks after it, as in a container."""
    started = []

    def start(work):
        resolved = rundir.start_run(job(), tmp_path)
        arguments = [sys.executable, "-c", MAIN.format(work), str(resolved.layout.job)]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("action", "status", "said"),
    [
        ("pass", 143, "trainer-0 ends at SIGTERM"),
        # What is to be done last takes the place of what was to be done before.
        ("from tracerl.runtime.child import at_sigterm; at_sigterm(lambda: os._exit(7))", 7, ""),
    ],
)
def test_sigterm_without_a_parent(alone, action, status, said):
    """Though the kernel would ignore it for the first process of a container, and the main thread is busy."""
    busy = "import ctypes; [ctypes.CDLL(None).sleep(60) for _ in range(9)]"
    process = alone(f"{action}; print('ready', flush=True); {busy}")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert process.returncode == status
    assert said in log
