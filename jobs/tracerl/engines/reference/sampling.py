"""Sampling that depends on a request alone: noise is a function of (seed, position), never of the batch.

A token is drawn by inverting the distribution function at one uniform number. The number for position p of
a request with seed s is output p + 1 of SplitMix64 seeded with s (Steele, Lea and Flood, OOPSLA 2014), so
that a request which was retracted and prefilled again, or which ran beside others, draws the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Output `index` + 1 of the SplitMix64 generator seeded with `seed`, both u64 [n]."""
    z = seed + (index + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    out: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out


def uniform(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> Tensor:
    """One float64 in [0, 1) for every (seed u64 [n], position i64 [n]), on a grid of 2^-53."""
    bits = splitmix64(seed, position.astype(np.uint64)) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def sample(
    logits_NV: Tensor, temperature_N: Tensor, noise_N: Tensor, *, greedy: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (token i64 [n], log-probability f32 [n] under the row's temperature).

    `logits_NV` f32 [n, vocab]; `temperature_N` f32 [n], 0 takes the most probable token (its log-probability
    is then that of temperature 1); `noise_N` f64 [n] from `uniform`. `greedy` False: no temperature is 0.
    """
    greedy_N = temperature_N == 0
    logp_NV = torch.log_softmax(logits_NV / torch.where(greedy_N, 1.0, temperature_N)[:, None], dim=-1)
    # Float64, because FP32 partial sums over a large vocabulary lose the tail.
    cdf_NV = torch.cumsum(logp_NV.exp(), dim=-1, dtype=torch.float64)
    total_N = cdf_NV[:, -1]
    # Below the total even after rounding, so that the first entry above it exists and has a probability > 0.
    target_N = torch.minimum(noise_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    token_N = torch.searchsorted(cdf_NV, target_N[:, None], right=True)[:, 0]
    if greedy:
        token_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), token_N)
    # NaN logits make NaN sums, above which no entry is; the caller sees the NaN log-probability.
    token_N = token_N.clamp_(max=logits_NV.shape[-1] - 1)
    return token_N, logp_NV.gather(-1, token_N[:, None])[:, 0]
