"""Values to quantise: ordinary ones by the million, and blocks that someone could hit."""

from __future__ import annotations

import torch
from torch import Tensor

K = 1024
LARGEST = torch.finfo(torch.bfloat16).max
TINIEST = 2.0**-133
"""Smallest positive BF16, a subnormal."""


def ordinary(rows: int, seed: int) -> Tensor:
    """BF16 [rows, K]: a quarter each normal, of mixed magnitudes by row, by block, and heavy-tailed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, rows // 4, K, generator=generator)
    by_row = torch.randn(rows // 4, 1, generator=generator) * 3
    by_block = torch.randn(rows // 4, K // 16, 1, generator=generator) * 2
    x[1] *= by_row.exp()
    x[2] *= by_block.exp().expand(-1, -1, 16).reshape(rows // 4, K)
    x[3] = x[3] ** 3
    return x.flatten(0, 1).bfloat16()


def hard() -> Tensor:
    """BF16 [rows, K], every row one kind of block, repeated."""
    ramp = torch.linspace(-1, 1, 32)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    ties = torch.cat([torch.tensor([6]), ties, -ties, torch.tensor([0.5])]).repeat(2)
    outlier = ramp.clone() * 1e-3
    outlier[5] = 300.0
    kinds = [
        torch.zeros(32),
        -torch.zeros(32),
        torch.tensor([0.0, -0.0]).repeat(16),
        torch.cat([torch.zeros(31), torch.tensor([TINIEST])]),
        outlier,
        outlier * -1.0,
        ties,
        ties * 2.0**-7,
        ramp * 6 * 2.0**-6,  # scale at the smallest normal E4M3
        *(ramp * 6 * 2.0**-9 * m for m in (7.5, 4.0, 3.0, 1.49, 1.0, 0.76, 0.51)),  # subnormal scales
        *(ramp * 6 * 2.0**-9 * m for m in (0.5, 0.49, 0.01)),  # scales that round to zero
        ramp * 2688,  # the largest scale under a tensor scale of 1
        ramp * 2800,  # beyond it
        ramp * 1e30,
        ramp.sign() * LARGEST,
        torch.cat([torch.full((16,), LARGEST), ramp[:16]]),
        ramp * TINIEST * 100,
        ramp * 1e-38,
    ]
    return torch.stack(kinds).repeat(1, K // 32).bfloat16()
