"""Blocks that rounding gets wrong first: the kernels are compared on them, on a GPU and interpreted."""

from __future__ import annotations

import torch
from torch import Tensor


def hard_blocks(generator: torch.Generator, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Values [n, k] with blocks of eight kinds in turn: ties, zeros, subnormals, saturated and others."""
    x = torch.randn(n * k // 16, 16, generator=generator) * 2.0 ** torch.randint(
        -3, 4, (n * k // 16, 1), generator=generator
    )
    eighths = torch.randint(-56, 57, (len(x[1::8]), 16), generator=generator) / 8
    eighths[:, 0] = 6  # so that the block scale is a power of two and every tie is one
    x[1::8] = eighths * 2.0 ** torch.randint(-8, 8, (len(eighths), 1), generator=generator)
    x[2::8] = torch.where(torch.rand(x[2::8].shape, generator=generator) < 0.5, 0.0, -0.0)
    x[3::8] *= 2.0 ** torch.randint(-14, 16, (len(x[3::8]), 1), generator=generator)  # both ends of E4M3
    x[4::8] *= 2.0**-128 if dtype != torch.float16 else 2.0**-20  # to subnormals
    x[5::8, 1:] *= 2.0 ** torch.randint(-30, 1, (len(x[5::8]), 15), generator=generator)
    x[6::8] *= 2.0**100 if dtype != torch.float16 else 2.0**10
    about = torch.finfo(dtype)
    x[6::8, 15] = -about.smallest_normal * about.eps  # under their scale no FP32 is so small: -0
    limit = about.max
    return x.clamp_(-limit, limit).to(dtype).view(n, k)
