"""Block scaling: from a tensor to element codes and back, in the exact arithmetic of public packages.

The values of a block, consecutive along the last axis, share one scale; NVFP4 has an FP32 scale above those.
The FP32 operations round, so their order decides codes near a tie: `Order` names it, and each order equals a
public package bit for bit. Axes: r rows, n blocks of a row, b values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.elements import E2M1, E4M3, E8M0, ElementFormat, PowerOfTwoFormat
from tracerl.numerics.flags import NON_FINITE, named, refuse

CHUNK = 1 << 17
"""Values that go through all steps together, so that their FP32 intermediates stay in a core's cache."""
CHUNK_ON_DEVICE = 1 << 26
"""The same on a GPU, where few kernels and bounded memory count."""

LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled format."""

    name: str
    element: ElementFormat
    scale: ElementFormat | PowerOfTwoFormat
    block: int
    """Values that share a scale."""

    @property
    def smallest_scale_code(self) -> int:
        """Code of the smallest scale that is not zero."""
        return 0 if self.scale is E8M0 else 1


NVFP4 = BlockFormat("NVFP4", E2M1, E4M3, 16)
MXFP4 = BlockFormat("MXFP4", E2M1, E8M0, 32)

Convention = Literal["amax", "encode", "decode"]

TENSOR_RANGE = E2M1.largest * E4M3.largest
"""2688, the largest magnitude that a tensor scale of 1 can hold."""


@dataclass(frozen=True, eq=False)
class TensorScale:
    """The FP32 scale above the block scales, in the convention of whoever made it.

    `amax` is the largest magnitude (Transformer Engine, fouroversix), `encode` is 2688 / amax (FlashInfer,
    compressed-tensors), `decode` is amax / 2688 (torchao, ModelOpt). FP32 reciprocals are not exact, so a
    scale is converted only where a formula asks for the other one. An `amax` or `decode` of 0 belongs to a
    tensor of zeros and counts as a scale of 1.
    """

    value: Tensor
    """FP32 and finite: a scalar, or [..., 1] with one a row."""
    convention: Convention

    @classmethod
    def one(cls) -> TensorScale:
        """Give the scale that changes nothing."""
        return cls(torch.ones(()), "encode")

    def encode(self) -> Tensor:
        """Give what values are multiplied by before they are quantised."""
        return self._encode

    def decode(self) -> Tensor:
        """Give what codes times block scales are multiplied by."""
        return self._decode

    # Kept, since one scale mostly serves many calls, whose cost for few rows is their number of operations.
    @cached_property
    def _encode(self) -> Tensor:
        match self.convention:
            case "encode":
                return self.value
            case "decode":
                return self._or_one(self.value.reciprocal())
            case "amax":
                return self._or_one(_scalar(self.value, TENSOR_RANGE) / self.value)

    @cached_property
    def _decode(self) -> Tensor:
        match self.convention:
            case "encode":
                return self.value.reciprocal()
            case "decode":
                return self._or_one(self.value)
            case "amax":
                return self._or_one(self.value / _scalar(self.value, TENSOR_RANGE))

    def by_row(self, device: torch.device) -> TensorScale:
        """Give the same scale as a scalar or [r, 1, 1]."""
        if not self.value.ndim and self.value.device == device:
            return self
        value = self.value.to(device)
        return TensorScale(value.reshape(-1, 1, 1) if value.ndim else value, self.convention)

    def _or_one(self, scale: Tensor) -> Tensor:
        # Transformer Engine clamps as well: 2688 / amax overflows for an amax below 8e-36.
        return torch.where(self.value == 0, 1.0, scale.clamp(max=LARGEST_FP32))


ONE = TensorScale.one()


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and scales of a tensor [..., K]."""

    codes: Tensor
    """u8 [..., K], one code a byte."""
    scales: Tensor
    """u8 [..., K / block]."""
    tensor_scale: TensorScale
    fmt: BlockFormat


def quantize(
    x: Tensor,
    fmt: BlockFormat = NVFP4,
    *,
    tensor_scale: TensorScale = ONE,
    order: Order = Order.RECIPROCAL,
    site: str = "",
) -> Quantized:
    """Quantise, rounding to nearest.

    Args:
        x: BF16, FP16 or FP32 [..., K], K a multiple of the block.
        fmt: The block format.
        tensor_scale: The scale above the block scales; MXFP4 has none.
        order: Whose FP32 arithmetic; for MXFP4 all are one, but for the sign of -0.
        site: Name of the tensor in errors.

    Returns:
        Codes and scales, without gradient.

    Raises:
        NonFiniteError: x holds NaN or Inf; on CUDA see `NonFiniteFlags`.
        ValueError: x or the tensor scale does not fit the format.
    """
    if triton := kernels(x, fmt):
        quantized: Quantized = triton.quantize(x, tensor_scale, order, site)
        return quantized
    return nearest(x, fmt, tensor_scale, order, site).to_codes()


def kernels(x: Tensor, fmt: BlockFormat) -> ModuleType | None:
    """Give `tracerl.numerics.triton` where it computes the format: NVFP4 of CUDA tensors."""
    if not x.is_cuda or fmt is not NVFP4:
        return None
    from tracerl.numerics import triton  # noqa: PLC0415  of no use without a GPU

    return triton


def quantize_dequantize(
    x: Tensor,
    fmt: BlockFormat = NVFP4,
    *,
    tensor_scale: TensorScale = ONE,
    order: Order = Order.RECIPROCAL,
    site: str = "",
) -> tuple[Quantized, Tensor]:
    """Give ``q = quantize(x, ...)`` and ``dequantize(q, x.dtype)``, bit for bit, for less than both calls.

    Arguments and errors are those of `quantize`; neither result has a gradient.
    """
    if triton := kernels(x, fmt):
        both: tuple[Quantized, Tensor] = triton.quantize_dequantize(x, tensor_scale, order, site)
        return both
    return nearest(x, fmt, tensor_scale, order, site).to_both()


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give the values that codes and scales stand for: code * (block scale * tensor scale), [..., K]."""
    shape = (q.codes.shape[:-1].numel(), q.scales.shape[-1])
    codes = q.codes.reshape(*shape, q.fmt.block)
    factor = q.fmt.scale.decode(q.scales).view(*shape, 1)
    factor = factor * q.tensor_scale.by_row(codes.device).decode()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for part in _parts(codes):
        out[part] = q.fmt.element.decode(codes[part]).mul_(factor[part])
    return out.view(q.codes.shape)


@dataclass(frozen=True, eq=False)
class Rounding:
    """A tensor, its scales and a rounding rule: what codes and dequantised values are both made from."""

    shape: torch.Size
    """Shape of the tensor, [..., K]."""
    rows: Tensor
    """BF16, FP16 or FP32 [r, n, b]."""
    fmt: BlockFormat
    order: Order
    tensor_scale: TensorScale
    scales: Tensor
    """FP32 [r, n, 1], values of the scale format."""
    rule: Callable[[Tensor, slice], Tensor]
    """Rounds FP32 [., n, b], the scaled values of some rows, to values of the element format."""

    def to_codes(self) -> Quantized:
        """Give codes and scales."""
        codes = torch.empty(self.rows.shape, dtype=torch.uint8, device=self.rows.device)
        for part, y, values in self._chunks():
            codes[part] = self.fmt.element.encode(self._signed(y, values))
        return self._quantized(codes)

    def to_values(self) -> Tensor:
        """Give dequantised values in the tensor's dtype: `dequantize(to_codes())` without the codes."""
        out = torch.empty(self.rows.shape, dtype=self.rows.dtype, device=self.rows.device)
        decode = self.scales * self.tensor_scale.by_row(self.rows.device).decode()
        for part, _, values in self._chunks():
            out[part] = values.mul_(decode[part])
        return out.view(self.shape)

    def to_both(self) -> tuple[Quantized, Tensor]:
        """Give codes and scales, and what they stand for in the tensor's dtype."""
        codes = torch.empty(self.rows.shape, dtype=torch.uint8, device=self.rows.device)
        out = torch.empty(self.rows.shape, dtype=self.rows.dtype, device=self.rows.device)
        decode = self.scales * self.tensor_scale.by_row(self.rows.device).decode()
        for part, y, values in self._chunks():
            signed = self._signed(y, values)
            codes[part] = self.fmt.element.encode(signed)
            out[part] = signed.mul_(decode[part])
        return self._quantized(codes), out.view(self.shape)

    def _signed(self, y: Tensor, values: Tensor) -> Tensor:
        """Give `values` the signs that codes have; overwrites both."""
        # Of all packages, torchao alone gives -0 its sign; adding +0 takes it away.
        return values.copysign_(y if self.order is Order.TORCHAO else y.add_(0.0))

    def _quantized(self, codes: Tensor) -> Quantized:
        scales = self.fmt.scale.encode(self.scales).view(*self.shape[:-1], self.rows.shape[1])
        return Quantized(codes.view(self.shape), scales, self.tensor_scale, self.fmt)

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Give some rows at a time: which, their scaled values, and those rounded."""
        factor = _scale_factor(self.scales, self.fmt, self.tensor_scale.by_row(self.rows.device), self.order)
        divide = self.fmt.scale is E8M0 or self.order in (Order.MODELOPT, Order.COMPRESSED_TENSORS)
        for part in _parts(self.rows):
            x = self.rows[part].float()
            y = x / factor[part] if divide else x * factor[part]
            yield part, y, self.rule(y, part)


def nearest(x: Tensor, fmt: BlockFormat, tensor_scale: TensorScale, order: Order, site: str) -> Rounding:
    """Round to nearest under the tensor's own block scales; arguments and errors as in `quantize`."""
    rows = as_rows(x, fmt, tensor_scale, site)
    scales = block_scales(rows, fmt, tensor_scale.by_row(x.device), order, site)
    return Rounding(x.shape, rows, fmt, order, tensor_scale, scales, lambda y, _: fmt.element.round(y))


def as_rows(x: Tensor, fmt: BlockFormat, tensor_scale: TensorScale, site: str) -> Tensor:
    """Give x as [r, n, b] without gradient; ValueError when it or its tensor scale does not fit."""
    check(x, fmt, tensor_scale, site)
    if fmt.scale is E8M0 and not bool((tensor_scale.encode() == 1).all()):
        raise ValueError(f"{named(site)} is {fmt.name}, which has no tensor scale; leave it at 1")
    return x.detach().contiguous().view(x.shape[:-1].numel(), x.shape[-1] // fmt.block, fmt.block)


def check(x: Tensor, fmt: BlockFormat, tensor_scale: TensorScale, site: str) -> None:
    """Raise ValueError when the dtype or shape of x, or the shape of its tensor scale, does not fit."""
    if x.dtype not in _PATTERNS:
        raise ValueError(f"{named(site)} is {x.dtype}; cast it to bfloat16, float16 or float32")
    if x.ndim == 0 or x.shape[-1] % fmt.block:
        raise ValueError(
            f"{named(site)} has shape {list(x.shape)}; pad its last axis to a multiple of {fmt.block}, "
            f"the block of {fmt.name}"
        )
    shape = tensor_scale.value.shape
    if shape not in (torch.Size(()), torch.Size((*x.shape[:-1], 1))):
        raise ValueError(
            f"{named(site)} has shape {list(x.shape)} and a tensor scale of shape {list(shape)}; "
            f"give a scalar or shape {[*x.shape[:-1], 1]}"
        )


def block_scales(
    rows: Tensor, fmt: BlockFormat, tensor_scale: TensorScale, order: Order, site: str
) -> Tensor:
    """Give the block scales that an order computes.

    Args:
        rows: BF16, FP16 or FP32 [r, n, b].
        fmt: The block format.
        tensor_scale: A scalar or [r, 1, 1].
        order: Whose FP32 arithmetic.
        site: Name of the tensor in errors.

    Returns:
        FP32 [r, n, 1], values of the scale format; 0 only where the order has no floor.

    Raises:
        NonFiniteError: A value is NaN or Inf.
    """
    amax = _block_amax(rows, site)
    six = _scalar(amax, E2M1.largest)
    if fmt.scale is E8M0:
        return E8M0.round(amax / six)
    match order:
        case Order.RECIPROCAL:
            return E4M3.round(amax * (tensor_scale.encode() * six.reciprocal()))
        case Order.FOUR_OVER_SIX:
            return E4M3.round(amax / six * tensor_scale.encode())
        case Order.TORCHAO:
            return E4M3.round((amax / six / tensor_scale.decode()).clamp_(min=2.0**-6))
        case Order.MODELOPT:
            scales = amax / (six * tensor_scale.decode())
            return E4M3.round(torch.where(scales == 0, 1.0, scales).clamp_(min=2.0**-9))
        case Order.COMPRESSED_TENSORS:  # it divides in the dtype of its input
            scales = E4M3.round((amax / six).to(rows.dtype).float() * tensor_scale.encode())
            return torch.where(scales == 0, 0.125, scales)


def _scale_factor(scales: Tensor, fmt: BlockFormat, tensor_scale: TensorScale, order: Order) -> Tensor:
    """Give what an order multiplies values by, or divides them by, before it rounds them; FP32 [r, n, 1]."""
    if fmt.scale is E8M0:
        return scales
    match order:
        case Order.RECIPROCAL:  # under a scale of 0, FLT_MAX: codes of 6, which stand for 0
            return (scales * tensor_scale.encode().reciprocal()).reciprocal_().clamp_(max=LARGEST_FP32)
        case Order.FOUR_OVER_SIX:  # under a scale of 0, codes of 0
            factor = (tensor_scale.encode().reciprocal() * scales).reciprocal_().clamp_(max=LARGEST_FP32)
            return factor.mul_(scales != 0)
        case Order.TORCHAO:
            return tensor_scale.decode().reciprocal() / scales
        case Order.MODELOPT:
            return scales * tensor_scale.decode()
        case Order.COMPRESSED_TENSORS:
            return scales / tensor_scale.encode()


_PATTERNS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""Integers of the same size as the dtypes that can be quantised."""
_INFINITY = {
    dtype: int(torch.tensor(torch.inf, dtype=dtype).view(pattern)) for dtype, pattern in _PATTERNS.items()
}
"""Pattern of Inf, as such an integer; those of NaN without sign are above it."""


def _block_amax(rows: Tensor, site: str) -> Tensor:
    """Give every block's largest magnitude, [r, n, b] to FP32 [r, n, 1]; NonFiniteError where it is none."""
    # As bit patterns without sign: integers order NaN above Inf above all else, and reduce faster.
    patterns = rows.view(_PATTERNS[rows.dtype])
    amax = patterns.new_empty(*rows.shape[:-1], 1)
    for part in _parts(rows):
        torch.amax(patterns[part] & torch.iinfo(patterns.dtype).max, -1, keepdim=True, out=amax[part])
    if amax.numel():
        refuse(amax.max() >= _INFINITY[rows.dtype], NON_FINITE, site)
    return amax.view(rows.dtype).float()


def _parts(rows: Tensor) -> Iterator[slice]:
    """Cut [r, n, b] into rows of about as many values together as a chunk has."""
    size = max(1, (CHUNK_ON_DEVICE if rows.is_cuda else CHUNK) // max(1, rows.shape[1:].numel()))
    return (slice(start, start + size) for start in range(0, rows.shape[0], size))


def _scalar(like: Tensor, value: float) -> Tensor:
    """Give a scalar tensor: CUDA turns division by a Python number into multiplication by its reciprocal."""
    return _scalar_on(value, like.device)


@cache
def _scalar_on(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)
