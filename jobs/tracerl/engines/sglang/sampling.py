"""Drawing a token by a request's seed and the token's position, whatever runs beside it.

SGLang does so where it calls inference deterministic, with a hash that is a CUDA kernel. This is the same
hash and the same rule in plain torch, for CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFF_FFFF


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW


def _mix(h: Tensor, k: Tensor) -> Tensor:
    k = (_rotate((k * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & _LOW


def murmur_hash32(seed_N: Tensor, position_N: Tensor, columns: int) -> Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of (seed, position, column) as 8 + 4 + 4 bytes, int64 [N, columns].

    Products wrap at 64 bits, which leaves their low 32 bits as they should be.
    """
    seed = seed_N.to(torch.int64)[:, None]
    column = torch.arange(columns, device=seed_N.device)[None]
    h = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, position_N.to(torch.int64)[:, None] & _LOW, column):
        h = _mix(h, block)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return h ^ (h >> 16)


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw an index of each row of log-probs [N, V] by the Gumbel rule, in float64; [N, 1]."""
    uniform = murmur_hash32(seed, positions, logprobs.shape[1]).double() / _LOW
    # The ends of the unit interval would draw -inf and inf.
    gumbel = -torch.log(-uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32)))
    return (gumbel + logprobs.double()).argmax(dim=1, keepdim=True)
