"""The ratio contract: four log-probs, two ratios, and the measures of the gap between rollout and trainer.

- `logp_rollout`: what the rollout sampled with, under its weights at that time.
- `logp_old_unguided`, `logp_old_guided`: the trainer's weights before the step's first update, rounding to
  nearest and following the record. Without guidance they are one.
- `logp_new_guided`: the forward of `logp_old_guided` with the weights being updated; has the gradient.

The importance weight is min(upper, exp(logp_old_x - logp_rollout)) with x by `ratioFrom`. The PPO ratio is
exp(logp_new_guided - logp_old_guided): like over like, so exactly 1 before the first update. Why the
weight of a stale token must not come from the guided forward: docs/concepts/ratio.md.

All tensors are float32 [B, R], one row a trajectory, one column a generated token, with a bool `mask` of the
same shape that is True where there is a token. Every row has at least one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracerl.api.job import RatioFrom
from tracerl.rl.grpo import LOG_RATIO_BOUND
from tracerl.rl.steprecord import Gap, PositionGap


@dataclass(frozen=True)
class Importance:
    """Importance weights without gradient, and the log-probs of the trainer that they were computed from."""

    weights: Tensor
    raw: Tensor
    """Before the upper bound."""
    logp_old: Tensor
    """logp_old_guided or logp_old_unguided, token by token."""


def uses_unguided(ratio_from: RatioFrom, version_diff: Tensor) -> Tensor:
    """Return True for tokens whose weight needs logp_old_unguided.

    `version_diff` int is the trainer's version minus the version that sampled the token.
    """
    match ratio_from:
        case RatioFrom.GUIDED:
            return torch.zeros_like(version_diff, dtype=torch.bool)
        case RatioFrom.UNGUIDED:
            return torch.ones_like(version_diff, dtype=torch.bool)
        case RatioFrom.AUTO | RatioFrom.EXACT:
            return version_diff != 0


def importance(
    logp_rollout: Tensor,
    logp_old_guided: Tensor,
    logp_old_unguided: Tensor | None,
    version_diff: Tensor,
    mask: Tensor,
    *,
    ratio_from: RatioFrom,
    upper: float,
) -> Importance:
    """Return the importance weights (TIS) of a micro-batch; 0 outside `mask`.

    `logp_old_unguided` may be None only where `uses_unguided` is False for every token of the mask.
    """
    unguided = uses_unguided(ratio_from, version_diff) & mask
    if logp_old_unguided is None:
        if bool(unguided.any()):
            raise ValueError("logp_old_unguided is missing for tokens whose weight comes from it")
        logp_old = logp_old_guided
    else:
        logp_old = torch.where(unguided, logp_old_unguided, logp_old_guided)
    logp_old = logp_old.detach()
    raw = (logp_old - logp_rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if ratio_from is RatioFrom.EXACT:
        raw = torch.where(version_diff == 0, 1.0, raw)
    raw = torch.where(mask, raw, 0.0)
    return Importance(weights=raw.clamp(max=upper), raw=raw, logp_old=logp_old)


def gap(logp_old: Tensor, logp_rollout: Tensor, mask: Tensor) -> Gap:
    """Return |logp_old - logp_rollout| over the mask: mean, max, by position in buckets of powers of two."""
    difference = (logp_old - logp_rollout).abs().double()
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    # Bucket 0 is position 0, bucket k >= 1 is positions 2^(k-1)..2^k - 1.
    bucket = torch.where(positions == 0, 0, positions.clamp(min=1).double().log2().floor().long() + 1)
    by_position = []
    for index in range(int(bucket.max()) + 1):
        values = difference[mask & (bucket == index)]
        if len(values):
            start, stop = (0, 1) if index == 0 else (2 ** (index - 1), 2**index)
            by_position.append(
                PositionGap(
                    start=start,
                    stop=min(stop, mask.shape[1]),
                    tokens=len(values),
                    mean=float(values.mean()),
                    max=float(values.max()),
                )
            )
    values = difference[mask]
    return Gap(
        mean=float(values.mean()),
        max=float(values.max()),
        tokens=len(values),
        by_position=tuple(by_position),
    )


def rollout_corr(
    logp_rollout: Tensor, weights: Importance, mask: Tensor, *, upper: float
) -> dict[str, float]:
    """Return verl's `rollout_corr/*` metrics without the prefix.

    Formulas of verl/trainer/ppo/rollout_corr_helper.py with `rollout_is: token` and one upper bound: the low
    threshold of its fractions is 1 / upper. Two more use names of their own projects: NeMo RL's
    token_mult_prob_error = mean(exp|d|), verl's rollout_probs_diff_{mean,max} in probability, not log-prob.
    """
    old, rollout, keep = weights.logp_old.double(), logp_rollout.double(), mask.double()
    tokens, per_sequence = keep.sum(), keep.sum(dim=1)
    zero = torch.zeros_like(old)

    def mean(values: Tensor) -> Tensor:
        return torch.where(mask, values, zero).sum() / tokens

    def sequence_mean(values: Tensor) -> Tensor:
        return torch.where(mask, values, zero).sum(dim=1) / per_sequence

    d = torch.where(mask, old - rollout, zero)
    rho = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    old_mean, rollout_mean = sequence_mean(old), sequence_mean(rollout)
    log_ppl_diff = rollout_mean - old_mean
    sequence_log_rho = d.sum(dim=1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    w, raw = weights.weights.double(), weights.raw.double()
    w_mean = mean(w)
    w_sequence, raw_sequence = sequence_mean(w), sequence_mean(raw)
    probability_diff = (old.exp() - rollout.exp()).abs()
    found = {
        "kl": mean(-d),
        "k3_kl": mean(d.exp() - d - 1.0),
        "training_ppl": (-old_mean).exp().mean(),
        "training_log_ppl": (-old_mean).mean(),
        "rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_log_ppl": (-rollout_mean).mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "chi2_token": mean(rho.square()) - 1.0,
        "chi2_seq": (2.0 * sequence_log_rho).exp().mean() - 1.0,
        "rollout_is_mean": w_mean,
        "rollout_is_std": (mean(w.square()) - w_mean.square()).clamp(min=0.0).sqrt(),
        "rollout_is_max": w[mask].max(),
        "rollout_is_min": w[mask].min(),
        "rollout_is_ratio_fraction_high": mean((raw > upper).double()),
        "rollout_is_ratio_fraction_low": mean((raw < 1.0 / upper).double()),
        "rollout_is_eff_sample_size": 1.0 / mean((w / w_mean).square()),
        "rollout_is_seq_mean": w_sequence.mean(),
        "rollout_is_seq_std": w_sequence.std() if len(w_sequence) > 1 else zero.sum(),
        "rollout_is_seq_max": w_sequence.max(),
        "rollout_is_seq_min": w_sequence.min(),
        "rollout_is_seq_max_deviation": (w_sequence - 1.0).abs().max(),
        "rollout_is_seq_fraction_high": (raw_sequence > upper).double().mean(),
        "rollout_is_seq_fraction_low": (raw_sequence < 1.0 / upper).double().mean(),
        "token_mult_prob_error": mean(d.abs().exp()),
        "rollout_probs_diff_mean": mean(probability_diff),
        "rollout_probs_diff_max": probability_diff[mask].max(),
    }
    return {name: float(value) for name, value in found.items()}
