"""Children: how they end, what they leave, and that nothing of them is left."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from live_processes import processes_of, wait_until

from tracerl.runtime import processes
from tracerl.runtime.processes import NOTE_VARIABLE, Children, Ended, ExitNote, StopSignals
from tracerl_operator.cluster import _note

NOTE = 'os.write(int(os.environ["TRACERL_NOTE_FD"]), {!r})\n'


def children(grace_seconds=10.0, **more):
    return Children(grace_seconds=grace_seconds, hurry=threading.Event(), **more)


def end_of(running) -> Ended:
    found = []
    wait_until(lambda: found.extend(running.ended()) or found, "a child ends")
    return found[0]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("", 0, "a ended with exit code 0"),
        ("sys.exit(3)", 3, "a ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, "a was killed (SIGSEGV)"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            -9,
            "a was killed (SIGKILL, as the kernel does when memory is short)",
        ),
    ],
)
def test_how_a_child_ends(script, code, status, words):
    with children() as running:
        running.start(script("a", code))
        ended = end_of(running)
        assert running.ended() == []
    assert (ended.status, str(ended), ended.note) == (status, words, None)


@pytest.mark.parametrize(
    ("sent", "note"),
    [
        (b'{"reason": "NonFinite", "message": "a NaN in K\xc3\xa4se"}', ("NonFinite", "a NaN in Käse")),
        (b'{"reason": "NonFin', None),
        (b"", None),
    ],
)
def test_a_note_explains_the_end(script, sent, note):
    with children() as running:
        running.start(script("a", NOTE.format(sent) + "sys.exit(1)"))
        ended = end_of(running)
    assert (ended.note and (ended.note.reason, ended.note.message)) == note


@pytest.mark.parametrize(
    "message",
    [
        "short",
        "",
        "日" * 10_000,
        "😀" * 10_000,
        "\0" * 10_000,
        '"\\' * 5_000,
        "a\ud800b",
        "ä" * 1_999 + "\udcff",
    ],
    ids=ascii,
)
def test_every_note_arrives(monkeypatch, message):
    reader, writer = os.pipe()
    monkeypatch.setenv(NOTE_VARIABLE, str(writer))
    ExitNote("NonFinite", message).send()
    os.close(writer)
    note = ExitNote.receive(reader)
    assert note.reason == "NonFinite"
    wanted = re.sub("[\ud800-\udfff]", "?", message)
    assert wanted.startswith(note.message)
    assert len(note.message) >= min(len(wanted), 600)


def test_what_a_child_started_dies_with_it(script, tmp_path):
    sleeper = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(here)])\n'
    with children() as running:
        pid = running.start(script("a", sleeper + "print('ready', flush=True); time.sleep(1000)"))
        wait_until(lambda: "ready" in (tmp_path / "logs/a.log").read_text(), "the child's child runs")
        assert len(processes_of(str(tmp_path))) == 2
        os.kill(pid, signal.SIGKILL)
        assert end_of(running).killed
        wait_until(lambda: not processes_of(str(tmp_path)), "both are gone")


def test_also_what_it_started_in_a_session_of_its_own(script, tmp_path):
    """And what that started, after whoever started it is gone, in a daemon's way."""
    daemon = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleeper = (
        "sleep = [sys.executable, '-c', 'import time; time.sleep(1000)', str(here)]\n"
        f"subprocess.run([sys.executable, '-c', {daemon!r}, *sleep], start_new_session=True)\n"
    )
    with children() as running:
        running.start(script("other", "time.sleep(1000)"))
        running.start(script("a", sleeper + "print('ready', flush=True); time.sleep(1000)"))
        wait_until(lambda: "ready" in (tmp_path / "logs/a.log").read_text(), "the daemon runs")
        assert len(processes_of(str(tmp_path))) == 3
        running.stop(["a"])
        wait_until(lambda: len(processes_of(str(tmp_path))) == 1, "the daemon is gone, the other is not")
    assert not processes_of(str(tmp_path))


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"


def test_leaving_stops_children_gently_and_kills_the_stubborn(script, tmp_path):
    gentle = (
        "signal.signal(signal.SIGTERM, lambda *_: ((here / 'tidied').touch(), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(1000)"
    )
    with children(grace_seconds=0.5) as running:
        running.start(script("gentle", gentle))
        running.start(script("stubborn", STUBBORN))
        for name in ("gentle", "stubborn"):
            wait_until(lambda n=name: "ready" in (tmp_path / f"logs/{n}.log").read_text(), f"{name} runs")
    assert (tmp_path / "tidied").exists()
    assert not processes_of(str(tmp_path))


def test_hurry_does_not_wait_for_the_stubborn(script, tmp_path):
    hurry = threading.Event()
    with Children(grace_seconds=1_000, hurry=hurry) as running:
        running.start(script("stubborn", STUBBORN))
        wait_until(lambda: "ready" in (tmp_path / "logs/stubborn.log").read_text(), "it runs")
        hurry.set()
    assert not processes_of(str(tmp_path))


def test_a_log_is_appended_to(script, tmp_path):
    for word in ("first", "second"):
        with children() as running:
            running.start(script("a", f"print({word!r})"))
            end_of(running)
    assert (tmp_path / "logs/a.log").read_text() == "first\nsecond\n"


def test_no_descriptor_is_left_open(script):
    def count():
        return len([*Path("/proc/self/fd").iterdir()])

    before = count()
    with children() as running:
        for _ in range(3):
            running.start(script("a", NOTE.format(b"x")))
            end_of(running)
        running.start(script("stopped", "time.sleep(1000)"))
        with pytest.raises(OSError, match="No such file"):
            running.start(type(script("b", ""))("b", "b", ["/nowhere/python"], script("b", "").log, {}))
    assert count() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_becomes_a_flag_and_the_second_one_hurry(number):
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.stop.wait(10)
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), number)
        assert signals.hurry.wait(10)
    assert signals.why == ("Ctrl-C" if number is signal.SIGINT else number.name)


def test_an_ignored_signal_stays_ignored():
    """As under nohup, which starts its command with SIGHUP ignored."""
    code = (
        "import os, signal\n"
        "from tracerl.runtime.processes import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print(signals.stop.is_set(), signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\n"
    )
    signal_before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGHUP, signal_before)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("message", ["no room", "ä" * 9_000, "\udcff"])
def test_without_a_parent_the_kubelet_gets_the_note(monkeypatch, tmp_path, message):
    """In the file that it made; the operator reads it from there, of at most 4096 bytes."""
    monkeypatch.delenv(NOTE_VARIABLE, raising=False)
    monkeypatch.setattr(processes, "TERMINATION_LOG", tmp_path / "termination-log")
    ExitNote("CheckpointFailed", message).send()
    assert not (tmp_path / "termination-log").exists(), "not outside of a container"
    (tmp_path / "termination-log").touch()
    ExitNote("CheckpointFailed", message).send()
    written = (tmp_path / "termination-log").read_bytes()
    assert len(written) <= 4096
    reason, said = _note(written.decode(), 1)
    assert reason == "CheckpointFailed"
    assert said[:7] == message[:7].replace("\udcff", "?")


def test_of_a_container_the_first_process_that_ends_says_why(monkeypatch, tmp_path):
    """What another trainer of the pod says of it, that it is gone, would hide the cause."""
    monkeypatch.delenv(NOTE_VARIABLE, raising=False)
    monkeypatch.setattr(processes, "TERMINATION_LOG", tmp_path / "termination-log")
    (tmp_path / "termination-log").touch()
    ExitNote("NonFinite", "layer 3 Key holds NaN or Inf").send()
    ExitNote("TrainerLost", "trainer-1 is gone").send()
    written = (tmp_path / "termination-log").read_text(encoding="utf-8")
    assert _note(written, 1) == ("NonFinite", "layer 3 Key holds NaN or Inf")
