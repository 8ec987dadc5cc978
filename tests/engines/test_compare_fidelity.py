"""SGLang rolls out, Megatron trains, with the same weights: what must hold between the real two.

Figures of every arm are committed in benchmarks/results/engines-fidelity.json, by `fidelity.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from fidelity import (
    PASS_TOKENS,
    SHAPE,
    as_recorded_for,
    gaps,
    generate,
    random_prompts,
    rollout,
    table_of,
    trainer_of,
    weights,
)

from tracerl.engines.base import Batch
from tracerl.engines.sglang.weights import expert_hash
from tracerl.records.sites import SiteKind

torch.set_num_threads(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


async def test_fp32_is_equal_before_and_after_an_update(directory: Path) -> None:
    """No code and no scale differs at any site of any layer, weights included, and log-probs are equal."""
    with rollout(directory, "Float32") as (resolved, url):
        pushed = weights()
        trainer = None
        for version in range(2):
            made = await generate(resolved, url, pushed, version)
            if trainer is None:
                trainer = trainer_of(made, "TRACE")
                trainer.set_learning_rate(1e-3)
            assert made.expert_weights == expert_hash(SHAPE, pushed, made.spec.quantization)
            trajectories = as_recorded_for(trainer, made)
            logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=version)
            assert gaps(logp, trajectories).max() <= 1e-5
            stats = trainer.stats()
            assert (stats.routes_missing, stats.guided_missing) == (0, 0)
            assert len(stats.sites) == 4 * SHAPE.layers
            for counts in stats.sites.values():
                assert counts.values > 0
                assert (counts.guided_mismatched, counts.scales_wrong) == (0, 0)
            trainer.accumulate(
                Batch(trajectories), lambda logp: -logp.mean(), guided=True, temperature=1.0, version=version
            )
            assert 0 < trainer.update() < float("inf")
            trainer.stats()
            before, pushed = pushed, dict(trainer.export())
            assert any(not torch.equal(pushed[name], before[name].float()) for name in pushed)
        # A record that lies one row off cannot hide.
        assert trainer is not None
        wrong = []
        for one in trajectories:
            assert one.records is not None
            rolled = dataclasses.replace(one.records, rows=one.records.rows.roll(1, 0))
            wrong.append(dataclasses.replace(one, records=rolled))
        logp = trainer.forward(Batch(wrong), guided=True, temperature=1.0, version=1)
        assert gaps(logp, wrong).mean() > 0.1


@pytest.mark.full
async def test_a_prefill_that_attends_its_own_keys_exactly(directory: Path) -> None:
    """Prompts of three passes, most of them with a prefix that another request's passes have filled."""
    prompts = random_prompts(3 * PASS_TOKENS - 5, common=PASS_TOKENS + 3)
    with rollout(directory, "Float32, exact prefill") as (resolved, url):
        made = await generate(resolved, url, weights(), 0, prompts, alone=1)
    layouts = set()
    for one in made.trajectories:
        assert one.records is not None
        site = next(site for site in one.records.table.sites if site.kind is SiteKind.EXACT_FROM)
        offset = one.records.table.offset(site)
        starts = one.records.rows[:, offset : offset + 4].contiguous().view(torch.int32).flatten().tolist()
        layouts.add(tuple(starts[: one.prompt_tokens]))
        # A pass starts at its first row, and what is decoded attends what is stored.
        assert all(
            start <= row and starts[start] == start for row, start in enumerate(starts[: len(prompts[0])])
        )
        assert starts[one.prompt_tokens :] == [*range(one.prompt_tokens + 1, len(starts) + 1)]
    assert all(len(set(layout)) >= 3 for layout in layouts)
    assert len(layouts) >= 2

    trainer = trainer_of(made, "TRACE")
    trajectories = as_recorded_for(trainer, made)
    logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=0)
    assert gaps(logp, trajectories).max() <= 1e-5
    stats = trainer.stats()
    assert (stats.routes_missing, stats.guided_missing) == (0, 0)
    for counts in stats.sites.values():
        assert (counts.guided_mismatched, counts.scales_wrong) == (0, 0)
    # What a trainer that attends quantised keys everywhere is off by.
    other = trainer_of(made, "TRACE", "Quantized")
    trajectories = as_recorded_for(other, made)
    logp = other.forward(Batch(trajectories), guided=True, temperature=1.0, version=0)
    assert gaps(logp, trajectories).mean() > 1e-2


async def test_bf16_gaps_are_in_the_papers_order(directory: Path) -> None:
    """TRACE brings the two at least as close as they are without quantisation; QAT is ten times further."""
    table = {}
    for name in ("unquantised", "all quantised"):
        with rollout(directory / name.replace(" ", "-"), name) as (resolved, url):
            made = await generate(resolved, url, weights(), 0)
            assert made.expert_weights == (
                None if name == "unquantised" else expert_hash(SHAPE, weights(), made.spec.quantization)
            )
            table[name] = table_of(name, made)
    plain, quantised = table["unquantised"]["unquantised"], table["all quantised"]
    assert quantised["TRACE"]["meanGap"] <= plain["meanGap"]
    assert quantised["TRACE"]["meanGap"] <= quantised["RTN"]["meanGap"] / 10
    assert quantised["RTN"]["meanGap"] < quantised["trainer unquantised"]["meanGap"]
    assert quantised["TRACE"]["scalesWrong"] == 0
    for layers in quantised["TRACE"]["codeMismatchByLayer"].values():
        assert max(layers) == 0
    assert quantised["RTN"]["codeMismatchByLayer"]["ExpertInput"][-1] > 0.05
