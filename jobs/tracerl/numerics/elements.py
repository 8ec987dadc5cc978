"""Element casts: formats as data, rounded to by exact FP32 arithmetic.

The grid of a minifloat is uniform inside an octave. `ElementFormat.round` adds and subtracts a constant whose
last bit weighs one grid step, so the FP32 adder itself rounds to nearest, ties to even; on such a grid that
is ties to the even code. Nothing is rounded twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

MAGNITUDE = 0x7FFF_FFFF
"""Mask of an FP32 pattern without its sign."""


@dataclass(frozen=True)
class ElementFormat:
    """A minifloat: sign, exponent and mantissa bits, subnormals, no infinities."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    """Code of the largest finite magnitude, to which larger values saturate."""

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """Give the values of the codes 0 to `largest_code`: they grow with the code."""
        mantissas = 1 << self.mantissa_bits
        values = []
        for code in range(self.largest_code + 1):
            exponent, mantissa = divmod(code, mantissas)
            significand = mantissa + (mantissas if exponent else 0)
            values.append(significand * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits))
        return tuple(values)

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return self.magnitudes[-1]

    @property
    def sign(self) -> int:
        """Sign bit of a code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def spacing(self, y: Tensor) -> Tensor:
        """Give the distance between the two magnitudes around each |y|; FP32 [...] to FP32 [...]."""
        return self._octave(y).mul_(2.0**-self.mantissa_bits)

    def round(self, y: Tensor) -> Tensor:
        """Round to the nearest value of the format, ties to the even code, saturating.

        Args:
            y: FP32 [...], not NaN.

        Returns:
            FP32 [...], values of the format. A zero may have lost its sign.
        """
        values = y.clamp(-self.largest, self.largest)
        # 1.5 and not 1: the sum stays in one octave whichever sign y has.
        shift = self._octave(values).mul_(1.5 * 2.0 ** (23 - self.mantissa_bits))
        return values.add_(shift).sub_(shift)

    def encode(self, values: Tensor) -> Tensor:
        """Give the codes of values of the format (as `round` returns them); FP32 [...] to u8 [...]."""
        pattern = (values.view(torch.int32) >> (23 - self.mantissa_bits)).bitwise_and_(self._patterns - 1)
        return _codes_by_pattern(self, values.device).index_select(0, pattern.view(-1)).view(values.shape)

    def decode(self, codes: Tensor) -> Tensor:
        """Give the values of codes; u8 [...] to FP32 [...], NaN where a code has no finite value."""
        return _values_by_code(self, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def _octave(self, y: Tensor) -> Tensor:
        """Give the power of two at or below |y|, but at least the smallest normal magnitude."""
        smallest_normal = (127 + 1 - self.bias) << 23
        return (y.view(torch.int32) & 0x7F80_0000).clamp_(min=smallest_normal).view(torch.float32)

    @property
    def _patterns(self) -> int:
        """Number of FP32 patterns cut to sign, exponent and this format's mantissa bits."""
        return 1 << (9 + self.mantissa_bits)


@cache
def _codes_by_pattern(fmt: ElementFormat, device: torch.device) -> Tensor:
    """Give the code of every cut FP32 pattern; patterns of other values give 0."""
    patterns = torch.tensor(fmt.magnitudes).view(torch.int32) >> (23 - fmt.mantissa_bits)
    codes = torch.arange(len(fmt.magnitudes), dtype=torch.uint8)
    table = torch.zeros(2, fmt._patterns // 2, dtype=torch.uint8)
    table[0, patterns], table[1, patterns] = codes, codes + fmt.sign
    return table.flatten().to(device)


@cache
def _values_by_code(fmt: ElementFormat, device: torch.device) -> Tensor:
    values = torch.full((fmt.sign,), torch.nan)
    values[: fmt.largest_code + 1] = torch.tensor(fmt.magnitudes)
    return torch.cat([values, -values]).to(device)


_LEAST_E8M0 = 0x40_0000
"""FP32 pattern of 2^-127, which is subnormal there."""


@dataclass(frozen=True)
class PowerOfTwoFormat:
    """E8M0, the scale of MX formats: 2^(code - 127), without sign or zero; code 255 is NaN."""

    name: str
    largest_code: int

    def round(self, y: Tensor) -> Tensor:
        """Round up to a power of two (rule RCEIL), zero to 2^-127; FP32 [...] to FP32 [...]."""
        pattern = y.view(torch.int32)
        up = (pattern + 0x7F_FFFF).bitwise_and_(0x7F80_0000)
        return torch.where(pattern <= _LEAST_E8M0, _LEAST_E8M0, up).view(torch.float32)

    def encode(self, values: Tensor) -> Tensor:
        """Give the codes of powers of two; FP32 [...] to u8 [...]."""
        return (values.view(torch.int32) >> 23).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Give the values of codes; u8 [...] to FP32 [...]."""
        return (codes.int() << 23).clamp_(min=_LEAST_E8M0).view(torch.float32)


E2M1 = ElementFormat("E2M1", exponent_bits=2, mantissa_bits=1, bias=1, largest_code=7)
E4M3 = ElementFormat("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, largest_code=126)
E8M0 = PowerOfTwoFormat("E8M0", largest_code=254)
