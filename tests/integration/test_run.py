"""`tracerl run` and `compare` with real processes: done, killed, stopped, resumed, and nothing left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from tracerl.api.constants import METRICS
from tracerl.engines.hf import read_tensors

SECONDS = 90.0
"""Deadline of each wait: far more than it takes even on a busy machine."""
pytestmark = pytest.mark.timeout(600)

JOB = {
    "apiVersion": "tracerl.dev/v1alpha1",
    "kind": "TraceRLJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"uri": "builtin://tiny-moe"},
        "task": {"name": "builtin/chain_sum", "heldOutPrompts": 4},
        "algorithm": {
            "steps": 2,
            "promptsPerStep": 2,
            "samplesPerPrompt": 2,
            "maxResponseTokens": 4,
            "evaluation": {"prompts": 4},
        },
        "method": {"name": "TRACE"},
        "rollout": {"maxRunningRequests": 8, "kvCacheTokens": 1024},
        "transport": {"ring": {"size": "2Mi"}},
    },
}


class Command:
    """A running `tracerl`."""

    def __init__(self, where: Path, *arguments: str, through: Sequence[str] = ()) -> None:
        self.where = where
        self.process = subprocess.Popen(
            [*through, sys.executable, "-m", "tracerl", *arguments],
            cwd=where,
            env={**os.environ, "TRACERL_CACHE": str(where / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            out, error = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, error

    def until(self, condition, what: str, seconds: float = SECONDS):
        """Wait for a condition while the command runs; returns what it found."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"it ended before {what}: {self.finish()}"
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            time.sleep(0.1)
        return found


@pytest.fixture
def tracerl(tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    commands = []

    def start(*arguments: str, through: Sequence[str] = ()) -> Command:
        commands.append(Command(tmp_path, *arguments, through=through))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.communicate()
    deadline = time.monotonic() + SECONDS
    while processes_in(tmp_path) or rings_of(tmp_path):
        assert time.monotonic() < deadline, f"still there: {processes_in(tmp_path)}, {rings_of(tmp_path)}"
        time.sleep(0.02)


def processes_in(where: Path) -> dict[int, str]:
    """Processes of the runs below a directory, by their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(where) in line:
                found[int(entry.name)] = line
    return found


def rings_of(where: Path) -> list[Path]:
    """What is in shared memory of the runs below a directory."""
    found = []
    for job in where.rglob("job.yaml"):
        ring_dir = yaml.safe_load(job.read_text()).get("ringDir")
        found += [Path(ring_dir)] if ring_dir and Path(ring_dir).exists() else []
    return found


def read_bytes(run: Path) -> Counter[str]:
    """Frame bytes that the trainers read, by where they were."""
    read: Counter[str] = Counter()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        read.update(json.loads(line)["transport"]["read_bytes"])
    return +read


def role(run: Path, name: str) -> int | None:
    """Process id of a role of a run."""
    for pid, line in processes_in(run).items():
        if f"tracerl.runtime.{name}_main" in line:
            return pid
    return None


def steps(run: Path) -> list[int]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


Scrape = dict[str, dict[tuple[str, ...], float]]
"""Values by metric and label values."""


def scrape(run: Path, process: str) -> Scrape | None:
    """What a process of a run exposes; None while it does not answer."""
    try:
        endpoint = json.loads((run / f"endpoints/{process}-0.json").read_text())
        token = {"Authorization": f"Bearer {(run / 'token').read_text().strip()}"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{endpoint['url']}/metrics", headers=token)
        ) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError:
        return None
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: {
            tuple(sample.labels.values()): sample.value for sample in family.samples
        }
        for family in families
    }


def trained_tokens(run: Path, after: int, last: float) -> int:
    """Generated tokens of steps after+1..last by the run log."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return sum(line["response_tokens"] for line in lines if after < line["step"] <= last)


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def read_tensors_of_last_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    state = load_file(max((run / "checkpoints").glob("step-*")) / "state.safetensors")
    return {
        name.removeprefix("weights/"): value for name, value in state.items() if name.startswith("weights/")
    }


LASTING = {"checkpoints", "events.jsonl", "job.yaml", "lock", "logs", "metrics.jsonl", "result.json"}


def test_a_run_to_its_end_and_then_compared(tracerl, tmp_path):
    run = tmp_path / "both/trace-seed1"
    code, out, error = tracerl("run", "job.yaml", "--out", "both/trace-seed1").finish()
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny: TRACE in both/trace-seed1"
    shown = [line for line in lines if line.startswith("step ")]
    assert len(shown) == 2
    assert re.fullmatch(r"step 2/2  reward \d\.\d{3}  gap \d\.\d{4}  [\d,]+ tok/s  \d+\.\d\d s", shown[1])
    assert "tiny  TRACE" in out
    assert lines[-1] == "report: both/trace-seed1/report.html"
    assert steps(run) == [1, 2]
    assert set(read_bytes(run)) == {"ring"}
    assert json.loads((run / "result.json").read_text())["state"] == "Complete"
    assert json.loads((run / "summary.json").read_text())["steps_done"] == 2
    assert "<html" in (run / "report.html").read_text()
    assert {path.name for path in run.iterdir()} == LASTING | {"model", "report.html", "summary.json"}
    assert "Traceback" not in (run / "logs/trainer-0.log").read_text()
    # What was trained is a model directory like any other: the next job can start from it.
    model = f"spec.model.uri=file://{run / 'model'}"
    code, _, error = tracerl("validate", "job.yaml", "--set", model, "--set", "spec.warmup.steps=0").finish()
    assert (code, error) == (0, "")
    loaded, pushed = read_tensors(run / "model"), read_tensors_of_last_checkpoint(run)
    assert loaded.keys() == pushed.keys()
    assert all(torch.equal(loaded[name], pushed[name].to(loaded[name].dtype)) for name in pushed)

    code, _, error = tracerl("run", "job.yaml", "--out", str(run)).finish()
    assert code == 2
    assert error == (
        f"tracerl: {run} already has a run; continue it with --resume or give another directory with --out\n"
    )

    # What is complete is not run again, by run --resume and by compare.
    written = (run / "metrics.jsonl").stat()
    code, out, error = tracerl("run", "job.yaml", "--out", str(run), "--resume", "--quiet").finish()
    assert (code, out, error) == (0, "", "")
    compare = ["compare", "job.yaml", "--methods", "TRACE,BF16", "--out", "both"]
    for _ in range(2):
        code, out, error = tracerl(*compare).finish()
        assert (code, error) == (0, "")
        assert "run 1 of 2: TRACE, seed 1: complete already\nrun 2 of 2: BF16, seed 1" in out
        assert "Held-out reward" in out
        assert re.search(r"Gap at equal weights +TRACE.* BF16\nMean \(nats\) +[\d.e-]+ +[\d.e-]+\n", out)
        assert out.endswith("report: both/report.html\n")
        assert {path.name for path in (tmp_path / "both").iterdir()} == {
            *("trace-seed1", "bf16-seed1", "report.html")
        }
        assert (run / "metrics.jsonl").stat() == written
        other = (tmp_path / "both/bf16-seed1/metrics.jsonl").stat().st_mtime_ns
    assert (tmp_path / "both/bf16-seed1/metrics.jsonl").stat().st_mtime_ns == other
    for arm in ("trace-seed1", "bf16-seed1"):
        assert json.loads((tmp_path / "both" / arm / "summary.json").read_text())["steps_done"] == 2
        assert (tmp_path / "both" / arm / "report.html").exists()


def test_a_run_that_is_hit_by_everything(tracerl, tmp_path):
    run = tmp_path / "out"
    more = ["--set", "spec.algorithm.steps=100000", "--set", "spec.trainer.checkpoint.every=1"]
    command = tracerl("run", "job.yaml", *more, "--out", "out")

    def past(step):
        return lambda: steps(run)[-1:] > [step]

    command.until(past(1), "the second step")
    assert rings_of(run)
    # Its records can be looked into meanwhile, whichever there are just now.
    code, out, error = tracerl("records", "verify", "out").finish()
    assert (code, error) == (0, "")
    assert re.fullmatch(r"([\d,]+) of \1 frames are whole: .* bytes(; .* released meanwhile)?\n", out)
    names = ("store", "rollout", "trainer")
    counters = [spec for spec in METRICS if spec.type == "counter"]
    for name in names:
        killed = role(run, name)
        before = steps(run)[-1]
        earlier = {each: scrape(run, each) for each in names}
        os.kill(killed, signal.SIGKILL)
        # A step of before the kill may still be written, or be computed again: look past it.
        command.until(lambda n=name, k=killed: role(run, n) not in (None, k), f"the {name} is back")
        # What Prometheus needs: the successor counts from 0, and no other process's counter ever falls.
        first = command.until(lambda n=name: scrape(run, n), f"metrics of the new {name}")
        own = [spec.name for spec in counters if spec.source == name]
        grown = [metric for metric in own if sum(earlier[name][metric].values()) > 0]
        assert grown
        assert all(sum(first[metric].values()) < sum(earlier[name][metric].values()) for metric in grown)
        command.until(past(before + 2), f"steps with the new {name}")
        for each in {*names} - {name}:
            later = scrape(run, each)
            for spec in counters:
                if spec.source == each:
                    was, now = earlier[each][spec.name], later[spec.name]
                    assert was.keys() == now.keys() == {*spec.listed()}
                    assert all(now[labels] >= was[labels] for labels in was), spec.name
    # All that the new trainer did is in its counter, steps that it did again as well.
    (resumed,) = [event["resumed_from"] for event in events(run) if event.get("resumed_from")]
    now = scrape(run, "trainer")
    assert now["tracerl_trained_tokens_total"][()] == trained_tokens(run, resumed, now["tracerl_step"][()])
    restarted = [event["message"] for event in events(run) if event.get("reason") == "Restarted"]
    assert [message.split()[0] for message in restarted] == ["store-0", "rollout-0", "trainer-0"]
    resumed = [event["resumed_from"] for event in events(run) if event["type"] == "start"]
    assert len(resumed) == 2
    assert resumed[1] >= 1
    done = steps(run)
    assert done == [*range(1, len(done) + 1)]

    # A second command in the same directory is refused and disturbs nothing.
    code, _, error = tracerl("run", "job.yaml", *more, "--out", "out", "--resume").finish()
    assert code == 2
    assert f"another tracerl run (process {command.process.pid}) works in {run}" in error

    token = (run / "token").read_text()
    os.kill(command.process.pid, signal.SIGKILL)
    code, out, _ = command.finish()
    assert code == -signal.SIGKILL
    assert out.startswith("tiny: TRACE in out\n")
    # Each restart is one line.
    assert len(re.findall("starting it again", out)) == 3
    assert "was restarted" not in out
    # Steps are shown also after a restart of the trainer, which may replace the file that they are read from.
    after = out.rpartition("starting it again")[2]
    assert len(re.findall(r"^step \d+/100000 ", after, re.M)) > 1

    command = tracerl("run", "job.yaml", *more, "--out", "out", "--resume")
    done = steps(run)[-1]
    command.until(past(done + 1), "a step after the resume")
    assert (run / "token").read_text() != token
    assert len([line for line in processes_in(run).values() if "_main" in line]) == 3
    began = time.monotonic()
    os.kill(command.process.pid, signal.SIGINT)
    code, _, error = command.finish()
    assert time.monotonic() - began < SECONDS / 2
    assert code == 1
    assert error == (
        f"tracerl: stopped (Ctrl-C); to go on: {sys.executable} -m tracerl run job.yaml {' '.join(more)} "
        "--out out --resume\n"
    )
    assert not processes_in(tmp_path)
    assert not rings_of(tmp_path)
    assert tracerl("records", "verify", "out").finish()[:2] == (2, "")
    assert {path.name for path in run.iterdir()} == LASTING
    assert json.loads((run / "result.json").read_text())["state"] == "Stopped"
    assert steps(run) == [*range(1, len(steps(run)) + 1)]


def test_two_nodes_train_as_one_does_and_get_over_the_loss_of_a_trainer(tracerl, tmp_path):
    """Equal figures in FP32 without asynchrony; trajectories go where their records are."""
    more = ["--set", "spec.model.dtype=Float32", "--set", "spec.algorithm.maxVersionDiff=0"]
    more += ["--set", "spec.warmup={steps: 3, batchSize: 4}", "--set", "spec.algorithm.steps=4"]
    more += ["--set", "spec.trainer.checkpoint.every=1"]
    code, _, error = tracerl("run", "job.yaml", *more, "--out", "one").finish()
    assert (code, error) == (0, "")
    run = tmp_path / "two"
    more += ["--set", "spec.rollout.nodes=2"]
    more += ["--set", "spec.trainer.nodes=2", "--set", "spec.trainer.parallelism.data=2"]
    command = tracerl("run", "job.yaml", *more, "--out", "two")
    command.until(lambda: steps(run), "a step")
    (second,) = [pid for pid, line in processes_in(run).items() if line.rstrip().endswith("trainer-1")]
    os.kill(second, signal.SIGKILL)
    code, out, error = command.finish()
    assert (code, error) == (0, "")
    assert "starting all 2 trainers again (1 of 3)" in out
    assert {path.name for path in run.iterdir()} == LASTING | {"model", "report.html", "summary.json"}
    assert steps(run) == steps(tmp_path / "one") == [1, 2, 3, 4]
    assert set(read_bytes(run)) == {"ring"}
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    for one, two in zip(*(map(json.loads, of_run) for of_run in lines), strict=True):
        assert two["reward"] == one["reward"]
        assert two["policy"] == pytest.approx(one["policy"], rel=1e-3, abs=1e-5)
        assert two["gap_unguided"]["mean"] == pytest.approx(one["gap_unguided"]["mean"], rel=0.05, abs=1e-5)


@pytest.mark.parametrize("name", ["store", "rollout"])
def test_a_budget_that_is_used_up_is_one_sentence(tracerl, tmp_path, name):
    run = tmp_path / "out"
    command = tracerl("run", "job.yaml", "--set", "spec.failurePolicy.maxRestarts=0", "--out", "out")
    os.kill(command.until(lambda: role(run, name), f"the {name}"), signal.SIGKILL)
    code, _, error = command.finish()
    assert code == 1
    assert re.fullmatch(rf"tracerl: {name}-0 was killed .* failurePolicy.maxRestarts is 0; see .*\n", error)
    assert not processes_in(tmp_path)
    assert {path.name for path in run.iterdir()} <= LASTING


def test_a_run_that_ended_before_its_first_step_is_started_anew(tracerl, tmp_path):
    """With a manifest that was corrected since."""
    run = tmp_path / "out"
    late = ["--set", "spec.activeDeadlineSeconds=1", "--set", "spec.algorithm.steps=3"]
    code, _, error = tracerl("run", "job.yaml", *late, "--out", "out").finish()
    assert (code, error.count("\n")) == (1, 1)
    assert "longer than spec.activeDeadlineSeconds (1 s)" in error
    code, _, error = tracerl("run", "job.yaml", "--out", "out", "--resume").finish()
    assert code == 2
    assert "spec.algorithm.steps is not what the run in" in error
    assert "start it anew without --resume" in error
    code, out, error = tracerl("run", "job.yaml", "--out", "out").finish()
    assert (code, error) == (0, "")
    assert "the run that was here ended before its first step; starting it anew\n" in out
    assert steps(run) == [1, 2]
    assert len([event for event in events(run) if event["type"] == "start"]) == 1


def test_a_run_without_shared_memory(tracerl, tmp_path):
    """Through objects in a directory, also when the rollout that wrote them is killed."""
    run, objects = tmp_path / "out", tmp_path / "objects"
    more = ["--set", f"spec.transport={{onlyObject: true, object: {{uri: 'file://{objects}'}}}}"]
    more += ["--set", "spec.algorithm.steps=5"]
    command = tracerl("run", "job.yaml", *more, "--out", "out")
    command.until(lambda: steps(run), "a step")
    os.kill(role(run, "rollout"), signal.SIGKILL)
    code, out, error = command.finish()
    assert (code, error) == (0, "")
    assert "rollout-0 was killed" in out
    assert steps(run) == [1, 2, 3, 4, 5]
    assert set(read_bytes(run)) == {"object"}
    assert [*objects.rglob("*")] == []
    assert {path.name for path in run.iterdir()} == LASTING | {"model", "report.html", "summary.json"}


SMALL_SHARED_MEMORY = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("8m", None),
        ("1m", "spec.transport.ring.size: is 2Mi, but /dev/shm of this machine has 1Mi; write at most 1Mi"),
    ],
)
def test_little_shared_memory(tracerl, tmp_path, size, sentence):
    """Room for the ring is enough, also after its store was killed; too little is said before a start.

    The trainer is on a node of its own: it reads over HTTP.
    """
    namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c", SMALL_SHARED_MEMORY, "sh", size]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount in a namespace of its own")
    run = tmp_path / "out"
    more = ["--set", "spec.algorithm.steps=6", "--set", "spec.placement.colocation=None"]
    command = tracerl("run", "job.yaml", *more, "--out", "out", through=namespace)
    if sentence is None:
        command.until(lambda: steps(run), "a step")
        os.kill(role(run, "store"), signal.SIGKILL)
        code, out, error = command.finish()
        assert (code, error) == (0, "")
        assert "store-0 was killed" in out
        assert steps(run) == [1, 2, 3, 4, 5, 6]
        assert set(read_bytes(run)) == {"http"}
    else:
        code, _, error = command.finish()
        assert code == 2
        assert sentence in error
