"""The ratio contract: which forward a weight comes from, its bound, and verl's metrics by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tracerl.api.job import RatioFrom
from tracerl.rl.ratio import gap, importance, rollout_corr, uses_unguided

LOG2, LOG4, LOG8 = math.log(2), math.log(4), math.log(8)


def importance_of(ratio_from: RatioFrom, unguided: Tensor | None, diff: list[int]) -> Tensor:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return importance(
        torch.zeros(1, 3),
        torch.full((1, 3), LOG2),
        unguided,
        torch.tensor([diff]),
        mask,
        ratio_from=ratio_from,
        upper=5.0,
    ).weights


# Guided log-probs give a weight of 2, unguided ones of 4; tokens are 0, 1 and 2 versions old.
@pytest.mark.parametrize(
    ("ratio_from", "weights"),
    [
        (RatioFrom.GUIDED, [2.0, 2.0, 2.0]),
        (RatioFrom.UNGUIDED, [4.0, 4.0, 4.0]),
        (RatioFrom.AUTO, [2.0, 4.0, 4.0]),
        (RatioFrom.EXACT, [1.0, 4.0, 4.0]),
    ],
)
def test_which_forward_the_weight_comes_from(ratio_from: RatioFrom, weights: list[float]) -> None:
    found = importance_of(ratio_from, torch.full((1, 3), LOG4), [0, 1, 2])
    torch.testing.assert_close(found, torch.tensor([weights]))


@pytest.mark.parametrize("ratio_from", list(RatioFrom))
def test_the_unguided_forward_is_needed_exactly_where_it_is_used(ratio_from: RatioFrom) -> None:
    for diff in ([0, 0, 0], [0, 1, 0]):
        if uses_unguided(ratio_from, torch.tensor(diff)).any():
            with pytest.raises(ValueError, match="logp_old_unguided is missing"):
                importance_of(ratio_from, None, diff)
        else:
            importance_of(ratio_from, None, diff)


def test_the_upper_bound_cuts_the_weight_and_not_the_raw_ratio() -> None:
    found = importance(
        torch.zeros(1, 2), torch.tensor([[LOG8, 30.0]]), None, torch.zeros(1, 2, dtype=torch.int64),
        torch.ones(1, 2, dtype=torch.bool), ratio_from=RatioFrom.GUIDED, upper=5.0,
    )  # fmt: skip
    assert found.weights.tolist() == [[5.0, 5.0]]
    # 8 as it is; e^30 by verl's clamp of the log ratio to 20
    torch.testing.assert_close(found.raw, torch.tensor([[8.0, math.exp(20.0)]]))


def test_weights_are_zero_outside_the_mask() -> None:
    mask = torch.tensor([[True, False]])
    found = importance(
        torch.zeros(1, 2), torch.zeros(1, 2), None, torch.zeros(1, 2, dtype=torch.int64), mask,
        ratio_from=RatioFrom.EXACT, upper=5.0,
    )  # fmt: skip
    assert found.weights.tolist() == [[1.0, 0.0]]


def test_gap_by_position() -> None:
    rollout = torch.zeros(2, 9)
    trainer = torch.tensor([[1.0, -2, 3, -4, 5, 0, 0, 0, 9], [3.0, 0, 0, 0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[True] * 9, [True] * 2 + [False] * 7])
    found = gap(trainer, rollout, mask)
    assert (found.mean, found.max, found.tokens) == (27 / 11, 9.0, 11)
    # Buckets 0, 1, 2..3, 4..7, 8: row 2 ends after position 1.
    assert [(b.start, b.stop, b.tokens, b.mean, b.max) for b in found.by_position] == [
        (0, 1, 2, 2.0, 3.0),
        (1, 2, 2, 1.0, 2.0),
        (2, 4, 2, 3.5, 4.0),
        (4, 8, 4, 1.25, 5.0),
        (8, 9, 1, 9.0, 9.0),
    ]


def test_verl_metrics_by_hand() -> None:
    # Sequence 1: d = log 2, -log 2. Sequence 2: d = log 8 (padding behind it must not count).
    rollout = torch.tensor([[-1.0, -2.0], [-3.0, 55.0]])
    trainer = rollout + torch.tensor([[LOG2, -LOG2], [LOG8, 33.0]])
    mask = torch.tensor([[True, True], [True, False]])
    weights = importance(
        rollout, trainer, None, torch.zeros(2, 2, dtype=torch.int64), mask,
        ratio_from=RatioFrom.GUIDED, upper=5.0,
    )  # fmt: skip
    found = rollout_corr(rollout, weights, mask, upper=5.0)
    # Per token: rho = 2, 1/2, 8; w = 2, 1/2, 5. Per sequence: mean lp of the rollout -1.5 and -3,
    # of the trainer -1.5 and -3 + log 8; sum of d 0 and log 8.
    p_diff = [math.exp(-1), math.exp(-2) / 2, 7 * math.exp(-3)]
    mean_w, mean_square = 7.5 / 3, (4 + 0.25 + 25) / 3
    expected = {
        "kl": -LOG8 / 3,
        "k3_kl": ((2 - LOG2 - 1) + (0.5 + LOG2 - 1) + (8 - LOG8 - 1)) / 3,
        "training_ppl": (math.exp(1.5) + math.exp(3) / 8) / 2,
        "training_log_ppl": (1.5 + 3 - LOG8) / 2,
        "rollout_ppl": (math.exp(1.5) + math.exp(3)) / 2,
        "rollout_log_ppl": 2.25,
        "log_ppl_diff": -LOG8 / 2,
        "log_ppl_abs_diff": LOG8 / 2,
        "log_ppl_diff_max": 0.0,
        "log_ppl_diff_min": -LOG8,
        "ppl_ratio": (1 + 1 / 8) / 2,
        "chi2_token": (4 + 0.25 + 64) / 3 - 1,
        "chi2_seq": (1 + 64) / 2 - 1,
        "rollout_is_mean": mean_w,
        "rollout_is_std": math.sqrt(mean_square - mean_w**2),
        "rollout_is_max": 5.0,
        "rollout_is_min": 0.5,
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 0.0,
        "rollout_is_eff_sample_size": mean_w**2 / mean_square,
        "rollout_is_seq_mean": (1.25 + 5) / 2,
        "rollout_is_seq_std": 3.75 / math.sqrt(2),
        "rollout_is_seq_max": 5.0,
        "rollout_is_seq_min": 1.25,
        "rollout_is_seq_max_deviation": 4.0,
        "rollout_is_seq_fraction_high": 0.5,
        "rollout_is_seq_fraction_low": 0.0,
        "token_mult_prob_error": (2 + 2 + 8) / 3,
        "rollout_probs_diff_mean": sum(p_diff) / 3,
        "rollout_probs_diff_max": max(p_diff),
    }
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_verl_metrics_at_their_bounds_by_hand() -> None:
    """One sequence with d = 30 and -log 8: log ratios are cut at 20, weights at 5, and nothing spreads."""
    rollout = torch.tensor([[-31.0, -1.0]])
    trainer = rollout + torch.tensor([[30.0, -LOG8]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = importance(
        rollout, trainer, None, torch.zeros(1, 2, dtype=torch.int64), mask,
        ratio_from=RatioFrom.GUIDED, upper=5.0,
    )  # fmt: skip
    found = rollout_corr(rollout, weights, mask, upper=5.0)
    mean_w = (5 + 1 / 8) / 2
    expected = {
        "kl": (LOG8 - 30) / 2,
        "k3_kl": ((math.exp(30) - 31) + (1 / 8 + LOG8 - 1)) / 2,  # not cut
        "chi2_token": (math.exp(40) + 1 / 64) / 2 - 1,
        "chi2_seq": math.exp(40) - 1,  # of the sum, 30 - log 8, cut at 20
        "rollout_is_mean": mean_w,
        "rollout_is_eff_sample_size": mean_w**2 / ((25 + 1 / 64) / 2),
        "rollout_is_ratio_fraction_high": 0.5,
        "rollout_is_ratio_fraction_low": 0.5,
        "rollout_is_seq_std": 0.0,
        "rollout_is_seq_fraction_high": 1.0,  # by the ratios before the bound: (e^20 + 1/8) / 2
        "rollout_is_seq_fraction_low": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
