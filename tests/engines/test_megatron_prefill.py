"""Keys of a row's own pass attended exactly, in the Megatron trainer, where the answer is known otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hand_rollout import roll_out, spec_of
from torch import Tensor

from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.records.sites import SiteKind, SiteTable, site_table

torch.set_num_threads(1)

SMALL = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)


def trainer_of(weights: dict[str, Tensor] | None = None, **quantization: object) -> MegatronTrainer:
    return MegatronTrainer(SMALL, spec_of("QAT", quantization=quantization), weights)


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
