"""GRPO's advantages and the clipped loss, against numbers worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracerl.rl.grpo import clipped_loss, group_advantages


def test_advantages_by_hand() -> None:
    # Sample standard deviations: group 1 (mean .25) sqrt(.75 / 3) = .5, group 2 (mean 2.5) sqrt(5 / 3).
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    deviation = math.sqrt(5 / 3)
    expected = torch.tensor(
        [[1.5, -0.5, -0.5, -0.5], [-1.5 / deviation, -0.5 / deviation, 0.5 / deviation, 1.5 / deviation]]
    )
    torch.testing.assert_close(group_advantages(rewards, normalize=True), expected, rtol=3e-6, atol=0)
    centred = torch.tensor([[0.75, -0.25, -0.25, -0.25], [-1.5, -0.5, 0.5, 1.5]])
    assert torch.equal(group_advantages(rewards, normalize=False), centred)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, samples: int, normalize: bool) -> None:
    rewards = torch.full((1, samples), reward)
    assert not group_advantages(rewards, normalize=normalize).any()


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(torch.tensor([rewards]), normalize=True)[0]
    # A group that is equal but for float32's last digits is divided by 1e-6 alone.
    assert abs(float(advantages.sum())) < 1e-3 * max(1.0, float(advantages.abs().max()))
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in itertools.pairwise(order))


def test_loss_by_hand() -> None:
    # Ratios by token: 1.5 and .5 with A = 2; 1.5 and .5 with A = -1; the last column is padding.
    log = math.log
    new = torch.tensor([[log(1.5), log(0.5), 9.0], [log(1.5), log(0.5), 9.0]], requires_grad=True)
    old = torch.zeros(2, 3)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    weights = torch.tensor([[1.0, 0.5, 7.0], [2.0, 1.0, 7.0]])
    loss, sums = clipped_loss(
        new, old, torch.tensor([2.0, -1.0]), weights, mask, clip_low=0.2, clip_high=0.28, tokens=4
    )
    # -w min(r A, clip(r, .8, 1.28) A): A = 2: -1 * 2.56, -.5 * 1.0; A = -1: +2 * 1.5, +1 * .8
    assert loss.item() == pytest.approx((-2.56 - 0.5 + 3.0 + 0.8) / 4, abs=1e-6)
    loss.backward()
    # Clipped tokens (1.5 with A = 2, .5 with A = -1) have no gradient; the others -w r A / 4.
    expected = torch.tensor([[0.0, -0.5 * 0.5 * 2 / 4, 0.0], [2 * 1.5 / 4, 0.0, 0.0]])
    torch.testing.assert_close(new.grad, expected)
    assert (sums.tokens, sums.clipped) == (4, 2)
    assert sums.loss == pytest.approx(4 * loss.item())
    assert sums.ratio == pytest.approx(4.0)
    assert sums.ratio_max == pytest.approx(1.5)
    assert sums.kl == pytest.approx(2 * (0.5 - log(1.5)) + 2 * (-0.5 - log(0.5)), abs=1e-6)


def test_micro_batches_add_up_to_one_mean_over_tokens() -> None:
    generator = torch.Generator().manual_seed(5)
    new, old = (torch.randn(6, 4, generator=generator) * 0.3 for _ in range(2))
    advantages = torch.randn(6, generator=generator)
    weights = torch.rand(6, 4, generator=generator)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    count = int(mask.sum())
    clip = {"clip_low": 0.2, "clip_high": 0.2, "tokens": count}
    whole, _ = clipped_loss(new, old, advantages, weights, mask, **clip)
    parts = [
        clipped_loss(new[rows], old[rows], advantages[rows], weights[rows], mask[rows], **clip)[0]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_weights_carry_no_gradient() -> None:
    new = torch.zeros(1, 1, requires_grad=True)
    weights = torch.ones(1, 1, requires_grad=True)
    loss, _ = clipped_loss(
        new, torch.zeros(1, 1), torch.ones(1), weights, torch.ones(1, 1, dtype=torch.bool),
        clip_low=0.2, clip_high=0.2, tokens=1,
    )  # fmt: skip
    loss.backward()
    assert weights.grad is None
    assert new.grad is not None
