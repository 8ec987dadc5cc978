"""The warm-up: it lowers the loss, is computed once, and its cache is rebuilt when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_harness import make_job, trainer

from tracerl.api.errors import JobError
from tracerl.engines.base import TrainerEngine
from tracerl.rl.tasks import load_task
from tracerl.rl.tokenizer import load_tokenizer
from tracerl.rl.warmup import WarmupResult, learning_rate_share, warm_up

TASK = {
    "uri": None,
    "reward": None,
    "source": None,
    "name": "builtin/chain_sum",
    "parameters": {"max_terms": 2, "max_digits": 1},
    "answerFormat": "Reversed",
}


class Done:
    def __init__(self, directory: Path, **sections: dict[str, Any]) -> None:
        sections = {
            "task": TASK,
            "warmup": {"steps": 30, "batchSize": 32, "learningRate": "0.02"},
            **sections,
        }
        spec = make_job(directory, **sections).job.spec
        self.engine: TrainerEngine = trainer(make_job(directory, **sections))
        self.losses: list[float | None] = []
        self.said: list[str] = []
        task = load_task(spec.task, order_seed=spec.algorithm.seed, scratch=directory)
        self.result: WarmupResult = warm_up(
            self.engine,
            spec,
            task,
            load_tokenizer(spec.model),
            cache=directory / "cache",
            progress=lambda done, total, loss: self.losses.append(loss),
            report=self.said.append,
        )
        task.close()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.export())


def entries(directory: Path) -> list[Path]:
    return sorted((directory / "cache" / "warmup").iterdir())


def same(a: Done, b: Done) -> bool:
    return all(torch.equal(tensor, b.weights[name]) for name, tensor in a.weights.items())


def test_computed_once_whatever_the_method(tmp_path: Path) -> None:
    first = Done(tmp_path)
    # None says that it begins.
    before, *losses = first.losses
    assert before is None
    assert losses[-1] < 0.8 * losses[0]
    assert (first.result.steps, first.result.cached) == (30, False)
    for method in ("QAT", "BF16"):
        again = Done(tmp_path, method={"name": method})
        assert (again.result.cached, again.losses) == (True, [])
        assert same(first, again)
    assert len(entries(tmp_path)) == 1
    # RL starts with a fresh optimizer either way: the same first update.
    states = [done.engine.state() for done in (first, Done(tmp_path))]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    "changed",
    [
        {"warmup": {"steps": 1, "batchSize": 32, "learningRate": "0.02", "seed": 2}},
        {"warmup": {"steps": 2, "batchSize": 32, "learningRate": "0.02"}},
        {"task": {**TASK, "answerFormat": "Plain"}},
        {"task": {**TASK, "seed": 18}},
        {"trainer": {"optimizer": {"beta2": "0.99"}}},
    ],
)
def test_what_the_weights_depend_on_is_in_the_key(tmp_path: Path, changed: dict[str, Any]) -> None:
    small = {"warmup": {"steps": 1, "batchSize": 32, "learningRate": "0.02"}}
    Done(tmp_path, **small)
    assert not Done(tmp_path, **{**small, **changed}).result.cached
    assert len(entries(tmp_path)) == 2


def test_a_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    small = {"warmup": {"steps": 2, "batchSize": 32, "learningRate": "0.02"}}
    first = Done(tmp_path, **small)
    (state,) = entries(tmp_path)[0].rglob("state.safetensors")
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    again = Done(tmp_path, **small)
    assert not again.result.cached
    assert same(first, again)
    assert len(again.said) == 1
    assert again.said[0].startswith(f"the cached warm-up {state.parent} is damaged (")
    assert again.said[0].endswith("; it is computed again")
    assert Done(tmp_path, **small).result.cached


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    done = Done(tmp_path, warmup={"steps": 1, "batchSize": 4, "learningRate": "0.02"})
    assert not done.result.cached
    assert len(done.said) == 1
    assert done.said[0].startswith(f"the warm-up was not cached: {tmp_path / 'cache'}")
    assert done.said[0].endswith(")")


def test_leftovers_that_cannot_be_removed_do_not_hide_the_cache(tmp_path: Path) -> None:
    small = {"warmup": {"steps": 1, "batchSize": 4, "learningRate": "0.02"}}
    Done(tmp_path, **small)
    # A file where a directory is expected fails to be removed, as everything does in a read-only cache.
    (entries(tmp_path)[0] / ".step-000001.partial").write_text("")
    again = Done(tmp_path, **small)
    assert again.result.cached
    assert again.said == []


def test_no_answers_to_warm_up_on(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "1 + 2 ="}')
    task = {"uri": str(tmp_path / "x.jsonl"), "reward": "json:dumps", "source": None, "heldOutPrompts": 1}
    with pytest.raises(JobError, match=r"line \d of .* has no answer to warm up on; set warmup.steps to 0"):
        Done(tmp_path, task=task)


def test_learning_rate() -> None:
    assert [learning_rate_share(step, 100) for step in (0, 9, 19, 20, 99)] == [0.05, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate_share(0, 1) == 1.0
