"""The supervisor with real children: completion, the restart budget, failures in one sentence, stopping."""

import os
import signal
import time
from dataclasses import replace

import pytest
from live_processes import SECONDS, processes_of, wait_until

from tracerl.api.errors import InputError, JobError
from tracerl.runtime.processes import StopSignals
from tracerl.runtime.supervise import Supervisor

IDLE = "time.sleep(1000)"
# Counts its starts in a file named like itself and dies until it was started often enough.
DIES = """
count = here / {name!r}
starts = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(starts))
if starts <= {times}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def supervise(script, tmp_path):
    """Run a rollout and trainers made of code; returns the ending and what was announced."""

    def run(rollout, *trainers, max_restarts=2, deadline_seconds=None, follow=lambda: None):
        announced = []
        supervisor = Supervisor(
            processes=[
                script("rollout-0", rollout),
                *(script(f"trainer-{rank}", code) for rank, code in enumerate(trainers)),
            ],
            leader="trainer-0",
            max_restarts=max_restarts,
            deadline_seconds=deadline_seconds,
            resume_command="tracerl run job.yaml --resume",
            follow=follow,
            announce=announced.append,
        )
        try:
            with StopSignals() as signals:
                return supervisor.run(signals), announced
        finally:
            assert not processes_of(str(tmp_path))

    return run


def test_complete_when_the_leader_is_done(supervise):
    ending, announced = supervise(IDLE, "sys.exit(0)")
    assert (ending.state, ending.restarts, announced) == ("Complete", {}, [])


@pytest.mark.parametrize("role", ["rollout-0", "trainer-0"])
def test_a_killed_process_is_started_again_within_the_budget(supervise, tmp_path, role):
    done_when = "while not (here / 'go').exists(): time.sleep(0.01)\n"
    last = {"rollout-0": "(here / 'go').touch(); time.sleep(1000)", "trainer-0": ""}
    codes = {"rollout-0": IDLE, "trainer-0": done_when if role == "rollout-0" else ""}
    codes[role] = DIES.format(name=role, times=2) + last[role]
    ending, announced = supervise(codes["rollout-0"], codes["trainer-0"])
    assert (ending.state, ending.restarts) == ("Complete", {role: 2})
    killed = f"{role} was killed (SIGKILL, as the kernel does when memory is short)"
    assert announced == [f"{killed}; starting it again ({n} of 2)" for n in (1, 2)]


@pytest.mark.parametrize("role", ["rollout-0", "trainer-0"])
@pytest.mark.parametrize("budget", [0, 1])
def test_beyond_the_budget_the_job_fails_with_one_sentence(supervise, tmp_path, role, budget):
    codes = {"rollout-0": IDLE, "trainer-0": IDLE, role: DIES.format(name=role, times=99)}
    with pytest.raises(JobError) as caught:
        supervise(codes["rollout-0"], codes["trainer-0"], max_restarts=budget)
    assert caught.value.reason == "RestartsExhausted"
    assert str(caught.value) == (
        f"{role} was killed (SIGKILL, as the kernel does when memory is short), {budget} restarts were made "
        f"and failurePolicy.maxRestarts is {budget}; see {tmp_path}/logs/{role}.log, then continue with "
        "tracerl run job.yaml --resume"
    )
    assert (tmp_path / role).read_text() == str(budget + 1)


def test_a_rollout_that_ends_by_itself_counts_as_a_restart(supervise):
    with pytest.raises(JobError, match="rollout-0 ended with exit code 0, 1 restarts were made"):
        supervise("", IDLE, max_restarts=1)


def _ends(code, note):
    return f'os.write(int(os.environ["TRACERL_NOTE_FD"]), {note!r}); sys.exit({code})'


@pytest.mark.parametrize(
    ("end", "error", "sentence"),
    [
        ((1, b'{"reason": "NonFinite", "message": "a NaN"}'), JobError("NonFinite", ""), "a NaN"),
        ((2, b'{"reason": "InvalidSpec", "message": "bad model"}'), InputError(""), "bad model"),
        (
            (70, b'{"reason": "Unexpected", "message": "KeyError: x"}'),
            JobError("Unexpected", ""),
            "KeyError: x; see {log}",
        ),
        (
            (70, b""),
            JobError("Unexpected", ""),
            "trainer-0 ended with exit code 70 and no explanation; see {log}",
        ),
    ],
)
def test_an_exit_code_fails_the_job_at_once(supervise, tmp_path, end, error, sentence):
    with pytest.raises(type(error)) as caught:
        supervise(IDLE, _ends(*end))
    assert str(caught.value) == sentence.format(log=tmp_path / "logs/trainer-0.log")
    assert getattr(caught.value, "reason", None) == getattr(error, "reason", None)


def test_the_rollouts_sentence_fails_the_job_too(supervise):
    with pytest.raises(InputError, match=r"^no such model$"):
        supervise(_ends(2, b'{"reason": "InvalidSpec", "message": "no such model"}'), IDLE)


def test_stores_and_rollouts_are_started_again_alone_and_have_a_budget_each(script, tmp_path):
    """Whoever is left goes on: it was started once."""
    once = "(here / f'{name}-starts').open('a').write('x'); time.sleep(1000)"
    done = "while not (here / 'store-1').exists() or (here / 'store-1').read_text() != '3': time.sleep(0.01)"
    codes = {
        "store-0": f"name = 'store-0'; {once}",
        "store-1": DIES.format(name="store-1", times=2) + IDLE,
        "rollout-0": DIES.format(name="rollout-0", times=2) + IDLE,
        "rollout-1": f"name = 'rollout-1'; {once}",
        "trainer-0": done + "\nwhile (here / 'rollout-0').read_text() != '3': time.sleep(0.01)",
    }
    supervisor = Supervisor(
        processes=[replace(script(name, code), group=name) for name, code in codes.items()],
        leader="trainer-0",
        max_restarts=2,
        deadline_seconds=None,
        resume_command="",
        follow=lambda: None,
        announce=(announced := []).append,
    )
    with StopSignals() as signals:
        ending = supervisor.run(signals)
    assert (ending.state, ending.restarts) == ("Complete", {"store-1": 2, "rollout-0": 2})
    assert all(line.endswith(("it again (1 of 2)", "it again (2 of 2)")) for line in announced)
    assert [(tmp_path / f"{name}-starts").read_text() for name in ("store-0", "rollout-1")] == ["x", "x"]


LOST = _ends(1, b'{"reason": "TrainerLost", "message": "trainer-1 is gone"}')
# Counts its starts, meets the other trainer there, and is done when it was started before.
MEETS = """
own, other = here / {own!r}, here / {other!r}
own.open("a").write("x")
while not other.exists() or len(other.read_text()) < len(own.read_text()):
    time.sleep(0.01)
if len(own.read_text()) == 2:
    sys.exit(0)
"""


@pytest.mark.parametrize("notices", [True, False])
@pytest.mark.parametrize("killed", [0, 1])
def test_trainers_are_started_again_together(supervise, tmp_path, killed, notices):
    """Whether or not the other one ends by itself because of it."""
    codes = [MEETS.format(own=f"starts-{rank}", other=f"starts-{1 - rank}") for rank in (0, 1)]
    codes[killed] += "(here / 'killed').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    codes[1 - killed] += "while not (here / 'killed').exists(): time.sleep(0.01)\n" + (
        LOST if notices else IDLE
    )
    ending, announced = supervise(IDLE, *codes)
    assert (ending.state, sum(ending.restarts.values()), len(announced)) == ("Complete", 1, 1)
    assert announced[0].endswith("; starting all 2 trainers again (1 of 2)")
    assert {(tmp_path / f"starts-{rank}").read_text() for rank in (0, 1)} == {"xx"}


def test_trainers_have_one_budget(supervise):
    first = DIES.format(name="count-0", times=1) + IDLE
    second = "while (here / 'count-0').read_text() != '2': time.sleep(0.01)\n"
    second = "while not (here / 'count-0').exists(): time.sleep(0.01)\n" + second
    with pytest.raises(JobError, match=r"trainer-1 was killed .* 1 restarts were made .*maxRestarts is 1"):
        supervise(IDLE, first, second + DIES.format(name="count-1", times=1), max_restarts=1)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_trainer_that_failed_explains_it(supervise, failing):
    """Not the one that only misses it."""
    codes = [LOST, LOST]
    codes[failing] = _ends(1, b'{"reason": "NonFinite", "message": "a NaN"}')
    with pytest.raises(JobError, match=r"^a NaN$"):
        supervise(IDLE, *codes)


def test_a_trainer_that_was_let_go_is_not_started_again(supervise):
    """The leader is done only after the other one was reaped."""
    wait = "while not (here / 'other').exists(): time.sleep(0.01)\n"
    gone = "while pathlib.Path('/proc', (here / 'other').read_text()).exists(): time.sleep(0.01)"
    leave = "(here / 'new').write_text(str(os.getpid())); (here / 'new').rename(here / 'other')"
    ending, announced = supervise(IDLE, wait + gone, leave)
    assert (ending.state, ending.restarts, announced) == ("Complete", {}, [])


def test_the_deadline_fails_the_job(supervise):
    with pytest.raises(JobError, match=r"ran longer than spec.activeDeadlineSeconds \(1 s\)") as caught:
        supervise(IDLE, IDLE, deadline_seconds=1)
    assert caught.value.reason == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_a_signal_stops_everything_and_says_how_to_go_on(supervise, number, word):
    ending, _ = supervise(IDLE, IDLE, follow=lambda: os.kill(os.getpid(), number))
    assert ending.state == "Stopped"
    assert ending.message == f"stopped ({word}); to go on: tracerl run job.yaml --resume"


def test_a_second_signal_does_not_wait(supervise, tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (here / 'ready').touch(); " + IDLE

    def twice():
        if (tmp_path / "ready").exists():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    ending, _ = supervise(stubborn, IDLE, follow=twice)
    assert ending.state == "Stopped"


def test_it_stops_when_nobody_reads_its_output(supervise):
    def gone():
        raise BrokenPipeError

    ending, _ = supervise(IDLE, IDLE, follow=gone)
    assert ending.state == "Stopped"


PARENT = """
import sys
from pathlib import Path
from tracerl.runtime.processes import ProcessSpec, StopSignals
from tracerl.runtime.supervise import Supervisor
here = Path(sys.argv[1])
def process(name, more):
    code = f'''
import signal, sys, threading, time
{more}
from tracerl.runtime.child import end_with_parent
end_with_parent()
open(sys.argv[1] + "/{name}.ready", "w")
time.sleep(1000)
'''
    return ProcessSpec(name, name, [sys.executable, "-c", code, str(here)], here / f"{name}.log", {})
ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
Supervisor(
    processes=[process("rollout-0", ignore), process("trainer-0", "")], leader="trainer-0", max_restarts=0,
    deadline_seconds=None, resume_command="", follow=lambda: None, announce=print,
).run(StopSignals())
"""


def test_children_die_with_a_parent_that_is_killed(script, tmp_path):
    """Also a child that ignores SIGTERM, as one that is stuck in a kernel would."""
    import subprocess
    import sys

    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        for name in ("rollout-0", "trainer-0"):
            wait_until((tmp_path / f"{name}.ready").exists, f"{name} runs")
        assert len(processes_of(str(tmp_path))) == 3
    finally:
        parent.kill()
        parent.wait(SECONDS)
    began = time.monotonic()
    wait_until(lambda: not processes_of(str(tmp_path)), "the children are gone")
    assert time.monotonic() - began < SECONDS
