"""Keys of a row's own pass attended exactly, in the Megatron trainer, where the answer is known otherwise."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_rollout import roll_out, spec_of
from megatron_worker import needed, run_processes
from torch import Tensor

from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.records.sites import SiteKind, SiteTable, site_table

torch.set_num_threads(1)

SMALL = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)


def trainer_of(
    weights: dict[str, Tensor] | None = None, sizes: dict[str, int] | None = None, **quantization: object
) -> MegatronTrainer:
    spec = spec_of("QAT", quantization=quantization, trainer={"parallelism": sizes or {}})
    return MegatronTrainer(SMALL, spec, weights)


def with_starts(one: Trajectory, table: SiteTable, starts: list[int] | None) -> Trajectory:
    """The trajectory as a rollout that records ExactFrom would hand it in; None: these are missing."""
    records = one.records
    assert records is not None
    site = next(site for site in table.sites if site.kind is SiteKind.EXACT_FROM)
    index, offset = table.index(site), table.offset(site)
    column = torch.tensor(starts or [0] * records.n_rows, dtype=torch.int32).view(torch.uint8).view(-1, 4)
    known = torch.full((records.n_rows, 1), starts is not None)
    rows = torch.cat([records.rows[:, :offset], column, records.rows[:, offset:]], dim=1)
    present = torch.cat([records.present[:, :index], known, records.present[:, index:]], dim=1)
    return dataclasses.replace(
        one, records=dataclasses.replace(records, table=table, rows=rows, present=present)
    )


def outcome(trainer: MegatronTrainer, trajectories: list[Trajectory]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the first moments of one update, which are the gradients times a constant."""
    trainer.set_learning_rate(1e-3)
    logp = trainer.accumulate(
        Batch(trajectories), lambda logp: -logp.sum() / 100, guided=True, temperature=1.0, version=0
    )
    trainer.update()
    return logp, {name: value for name, value in trainer.state().items() if name.startswith("exp_avg/")}


@pytest.mark.parametrize(
    ("starts", "others"),
    [
        ("whole", {"targets": ["RoutedExperts"]}),  # one pass over everything never reads what is stored
        ("decoded", {}),
        ("missing", {}),
    ],
)
def test_passes_of_which_the_answer_is_known(starts: str, others: dict[str, object]) -> None:
    exact = trainer_of(prefillAttends="Exact")
    weights = dict(exact.export())
    other = trainer_of(weights, **others)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(SMALL.vocab, (n,), generator=generator).tolist() for n in (3, 9, 1, 6)]
    rolled = roll_out(SMALL, other.spec, weights, prompts, [5, 2, 12, 7])
    table = site_table(SMALL, exact.spec)
    given = []
    for one in rolled:
        n = len(one.tokens) - 1
        found = {"whole": [0] * n, "decoded": [row + 1 for row in range(n)], "missing": None}[starts]
        given.append(with_starts(one, table, found))
    (logp, gradients), (wanted, expected) = outcome(exact, given), outcome(other, rolled)
    torch.testing.assert_close(logp, wanted, atol=1e-5, rtol=0)
    assert gradients.keys() == expected.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-3)
    # Attention that takes no notice of passes would be seen.
    if starts == "whole":
        quantised = trainer_of(weights)
        logp, _ = outcome(quantised, rolled)
        assert (logp - wanted).abs().max() > 1e-4


def stage(weights: dict[str, Tensor], given: list[Trajectory], rank: int, _: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer = trainer_of(weights, {"pipeline": 2}, prefillAttends="Exact")
    longest = max(len(one.tokens) for one in given) - 1
    logp, gradients = outcome(trainer, [needed(one, trainer.selections, longest) for one in given])
    return {"logp": logp, "gradients": gradients}


def test_every_pipeline_stage_attends_exactly_from_where_it_is_recorded(tmp_path: Path) -> None:
    """Each reads its layers' sites and this one, which is of all layers."""
    exact = trainer_of(prefillAttends="Exact")
    weights = {name: tensor.clone() for name, tensor in exact.export()}
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(SMALL.vocab, (n,), generator=generator).tolist() for n in (3, 8, 1)]
    rolled = roll_out(SMALL, trainer_of(weights).spec, weights, prompts, [5, 2, 9])
    table = site_table(SMALL, exact.spec)
    given = [
        with_starts(one, table, [min(row + 1, one.prompt_tokens // 2) for row in range(len(one.tokens) - 1)])
        for one in rolled
    ]
    logp, gradients = outcome(exact, given)
    first, second = run_processes(partial(stage, weights, given), tmp_path, processes=2)
    for found in (first, second):
        torch.testing.assert_close(found["logp"], logp, atol=1e-5, rtol=0)
    apart = first["gradients"] | second["gradients"]
    assert len(apart) == len(first["gradients"]) + len(second["gradients"])
    assert apart.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(apart[name], value, atol=1e-6, rtol=1e-3)
