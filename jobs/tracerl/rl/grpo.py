"""GRPO (arXiv 2402.03300): advantages within a group of samples of one prompt, and the clipped loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl."""
LOG_RATIO_BOUND = 20.0
"""verl clamps log ratios to this before it exponentiates: e^20 is 4.9e8."""


def group_advantages(rewards_GN: Tensor, *, normalize: bool) -> Tensor:
    """Return advantages f32 [groups, samples] of rewards [groups, samples].

    A = (R - mean) / (std + 1e-6) with the sample standard deviation (n - 1), or R - mean without `normalize`.
    A group whose rewards are all equal gives exactly 0, not the rounding error of its mean.
    """
    rewards = rewards_GN.double()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + ADVANTAGE_EPSILON)
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(equal, torch.zeros_like(advantages), advantages).float()


@dataclass(frozen=True)
class LossSums:
    """Sums over the generated tokens of a micro-batch; they add up over micro-batches."""

    loss: float
    tokens: int
    clipped: int
    ratio: float
    ratio_max: float
    kl: float
    """Sum of r - 1 - log r."""


def clipped_loss(
    logp_new_guided: Tensor,
    logp_old_guided: Tensor,
    advantages_B: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tokens: float,
) -> tuple[Tensor, LossSums]:
    """Return the clipped PPO loss of a micro-batch, and its sums.

    All of [B, R] but `advantages_B` [B]; `mask` is True for generated tokens, `weights` are importance
    weights and carry no gradient. A token's loss is -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with
    r = exp(logp_new_guided - logp_old_guided); the loss is their sum over `tokens`, the number of generated
    tokens of the whole update, so that micro-batches add up to one mean over tokens.
    """
    log_ratio = torch.where(mask, logp_new_guided - logp_old_guided, 0.0)
    # As in verl: without a bound one token that moved far would make the whole loss infinite.
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    advantages = advantages_B[:, None]
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    token_loss = torch.where(mask, -weights.detach() * objective, 0.0)
    loss = token_loss.sum() / tokens
    with torch.no_grad():
        count = int(mask.sum())
        was_clipped = mask & (clipped_ratio * advantages < ratio * advantages)
        sums = LossSums(
            loss=float(token_loss.sum()),
            tokens=count,
            clipped=int(was_clipped.sum()),
            ratio=float(torch.where(mask, ratio, 0.0).sum()),
            ratio_max=float(ratio[mask].max()) if count else 0.0,
            kl=float(torch.where(mask, ratio - 1.0 - log_ratio, 0.0).sum()),
        )
    return loss, sums
