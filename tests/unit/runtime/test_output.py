"""The copy of a run in an object store, here a directory: what is there at any moment is enough to go on."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from live_processes import wait_until
from test_rundir import job

from tracerl.api.errors import JobError
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import Cut
from tracerl.rl.checkpoint import Checkpoints, Measure, shard_name, write_tensors
from tracerl.runtime import rundir
from tracerl.runtime.output import Output

LEADER = "trainer-0"


class SometimesAway(LocalFileSystem):
    """A directory as a store that answers nothing as long as a file named away lies beside it."""

    protocol = "sometimes"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("sometimes://"))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if Path(path.partition("/store/")[0], "away").exists():
            raise OSError(errno.EIO, "Input/output error")
        return super()._open(path, *arguments, **options)


fsspec.register_implementation("sometimes", SometimesAway)


def write_shards(place: Path, tensors: dict[str, torch.Tensor], shards: int) -> dict[str, Measure]:
    """What `shards` ranks write who hold tensors apart."""
    found = {}
    for rank in range(shards):
        parts = {name: tensor.chunk(shards)[rank] for name, tensor in tensors.items()}
        cuts = dict.fromkeys(parts, Cut(0, shards))
        found[shard_name(rank)] = write_tensors(place / shard_name(rank), parts, cuts)
    return found


class Pod:
    """A pod that works on the run whose results go to `store`, with an empty run directory of its own."""

    def __init__(self, base: Path, name: str, *, keep: int = 2, shards: int = 0) -> None:
        self.shards = shards
        directory, self.store = base / name, base / "store"
        directory.mkdir()
        made = rundir.start_run(job(trainer={"checkpoint": {"keep": keep}}), directory)
        fields = made.model_dump() | {"job_uid": "uid-1", "output_uri": f"sometimes://{self.store}"}
        self.resolved = ResolvedJob.model_validate(fields)
        self.layout, self.away = self.resolved.layout, base / "away"
        self.checkpoints = Checkpoints(self.layout.checkpoints, keep=keep)
        self.layout.log(LEADER).parent.mkdir(exist_ok=True)

    def open(self, **options) -> Output:
        return Output(self.resolved, LEADER, **options)

    def step(self, step: int) -> None:
        """Log a step and save its checkpoint."""
        with self.layout.metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        weight = {"weight": torch.full((300,), float(step))}
        if self.shards:
            self.checkpoints.write(
                step, {"step": step}, lambda place: write_shards(place, weight, self.shards)
            )
        else:
            self.checkpoints.save(step, weight, {"step": step})

    def newest(self) -> int | None:
        found = self.checkpoints.load(pytest.fail)
        assert found is None or torch.equal(found.tensors["weight"], torch.full((300,), float(found.step)))
        return None if found is None else found.step

    def lines(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in self.layout.metrics.read_text().splitlines()]

    def stored(self) -> set[str]:
        return {str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file()}

    def stored_steps(self) -> set[int]:
        return {int(name.split("/")[1][5:]) for name in self.stored() if name.endswith("manifest.json")}


def run(pod: Pod, *steps: int) -> None:
    """Work until these steps are saved and copied."""
    with pod.open() as output:
        output.restore()
        for step in steps:
            pod.step(step)
            output.saved(step)
            wait_until(lambda step=step: step in pod.stored_steps(), f"step {step} is there")
        output.finish()


def test_a_fresh_pod_continues_where_the_one_before_was(tmp_path):
    first, second, third = Pod(tmp_path, "first"), Pod(tmp_path, "second"), Pod(tmp_path, "third")
    first.layout.log(LEADER).write_text("first\n")
    run(first, 5, 10, 15)
    assert first.stored_steps() == {10, 15}
    with second.open() as output:
        output.restore()
        assert second.newest() == 15
        assert [line["step"] for line in second.lines()] == [5, 10, 15]
        assert second.layout.log(LEADER).read_text() == "first\n"
        second.layout.model.mkdir()
        for path in (second.layout.model / "config.json", second.layout.report, second.layout.result):
            path.write_text(path.name)
        output.finish()
    assert second.stored_steps() == {10, 15}
    assert {"job.yaml", "metrics.jsonl", "model/config.json", "report.html", "result.json"} < second.stored()
    run(third, 20)
    assert third.stored_steps() == {15, 20}
    assert [line["step"] for line in third.lines()] == [5, 10, 15, 20]


def test_files_of_ranks_are_copied_and_fetched(tmp_path):
    """By pods of different numbers of ranks, the last of which comes to a step again; old ones go whole."""
    first, second, third = (Pod(tmp_path, str(shards), shards=shards) for shards in (3, 2, 0))
    run(first, 5, 10)
    assert {name for name in first.stored() if "000010" in name} == {
        f"checkpoints/step-000010/{name}"
        for name in (
            "loop.json",
            "manifest.json",
            *(f"state-rank-0000{rank}.safetensors" for rank in range(3)),
        )
    }
    with second.open() as output:
        output.restore()
        assert second.newest() == 10
        output.finish()
    run(second, 10)
    assert sum("000010" in name for name in second.stored()) == 4
    with third.open() as output:
        output.restore()
    assert third.newest() == 10
    run(third, 15, 20)
    assert [name for name in third.stored() if "000005" in name or "000010" in name] == []
    assert third.stored_steps() == {15, 20}


@pytest.mark.parametrize("lost", ["state-rank-00001.safetensors", "manifest.json"])
def test_a_half_checkpoint_of_ranks_is_never_restored(tmp_path, lost):
    first, second = Pod(tmp_path, "first", shards=2), Pod(tmp_path, "second", shards=2)
    run(first, 10, 20)
    (first.store / "checkpoints/step-000020" / lost).unlink()
    with second.open() as output:
        output.restore()
    assert second.newest() == 10
    assert not any("000020" in name for name in second.stored())


def test_a_run_that_is_in_the_directory_is_not_touched(tmp_path):
    first, other = Pod(tmp_path, "first"), Pod(tmp_path, "other")
    run(first, 10)
    other.step(12)
    with other.open() as output:
        output.restore()
    assert other.newest() == 12
    assert [line["step"] for line in other.lines()] == [12]


@pytest.mark.parametrize("lost", ["manifest.json", "state.safetensors", "loop.json"])
def test_a_half_checkpoint_is_never_restored(tmp_path, lost):
    """A pod that was killed while it copied leaves files without the last one; a person may leave worse."""
    first, second = Pod(tmp_path, "first"), Pod(tmp_path, "second")
    run(first, 10, 20)
    (first.store / "checkpoints/step-000020" / lost).unlink()
    with second.open() as output:
        output.restore()
    assert second.newest() == 10
    assert not any("000020" in name for name in second.stored())


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    first, second = Pod(tmp_path, "first"), Pod(tmp_path, "second")
    run(first, 10, 20)
    state = first.store / "checkpoints/step-000020/state.safetensors"
    *kept, last = state.read_bytes()
    state.write_bytes(bytes([*kept, last ^ 1]))
    run(second, 20)
    assert "step 20" in caplog.text
    assert "is damaged (state.safetensors does not have the length and hash" in caplog.text
    assert [line["step"] for line in second.lines()] == [10, 20, 20]
    third = Pod(tmp_path, "third")
    with third.open() as output:
        output.restore()
    assert third.newest() == 20


def test_what_waits_gives_way_to_what_is_newer_and_is_named(tmp_path, caplog):
    """The store is away at first."""
    pod = Pod(tmp_path, "first", keep=1)
    with pod.open() as output, caplog.at_level(logging.INFO):
        output.restore()
        pod.away.touch()
        pod.step(1)
        output.saved(1)
        wait_until(lambda: "trying again" in caplog.text, "it was tried")
        for step in (2, 3):
            pod.step(step)  # removes the one before, which is still to be copied
            output.saved(step)
        pod.away.unlink()
        output.finish()
    assert "the checkpoint of step 2 was not copied" in caplog.text
    assert "the checkpoint of step 1 is in" in caplog.text
    assert pod.stored_steps() == {3}


def test_a_store_that_stays_away_ends_the_job_with_a_sentence(tmp_path):
    pod = Pod(tmp_path, "first")
    with pod.open(deadline_seconds=0.3) as output:
        output.restore()
        pod.step(1)
        output.saved(1)
        wait_until(lambda: 1 in pod.stored_steps(), "step 1 is there")
        pod.away.touch()
        pod.step(2)
        output.saved(2)

        def failed() -> JobError | None:
            try:
                output.check()
            except JobError as error:
                return error
            return None

        wait_until(failed, "it is given up")
        error = failed()
        assert error.reason == "CheckpointFailed"
        assert "the checkpoint of step 2 is not kept: results cannot be written in" in str(error)
        assert "the newest checkpoint there is of step 1" in str(error)
        with pytest.raises(JobError):
            output.finish()


def test_a_store_that_may_not_be_written_fails_before_the_first_step(tmp_path):
    pod = Pod(tmp_path, "first")
    pod.away.touch()
    with pod.open(deadline_seconds=0) as output, pytest.raises(JobError) as caught:
        output.restore()
    assert caught.value.reason == "CheckpointFailed"
    assert f"results cannot be written in sometimes:{pod.store}: input/output error" in str(caught.value)
