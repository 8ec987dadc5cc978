"""Quantising into the rows of a record: packed low code bits of a site, then its packed scale bits."""

from __future__ import annotations

from torch import Tensor

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.bits import pack_bits, packed_size
from tracerl.numerics.blocks import NVFP4, ONE, BlockFormat, Quantized, TensorScale, kernels, nearest
from tracerl.numerics.guidance import CODE_BITS, SCALE_BITS


def quantize_into_rows(
    x: Tensor,
    rows: Tensor,
    at: int,
    *,
    code_bits: int,
    scale_bits: int,
    zero_bits: Tensor,
    values: Tensor | None = None,
    fmt: BlockFormat = NVFP4,
    tensor_scale: TensorScale = ONE,
    order: Order = Order.RECIPROCAL,
    site: str = "",
) -> None:
    """Quantise, rounding to nearest, and write what a record keeps of it, and what it stands for.

    Args:
        x: BF16, FP16 or FP32 [N, K], K a multiple of the block.
        rows: u8 [N, bytes a row]. The columns from `at` on are written: ceil(K * code_bits / 8) bytes of code
            bits, then ceil(K / block * scale_bits / 8) bytes of scale bits.
        at: Where in a row the site begins.
        code_bits: 0, 1, 2 or 4.
        scale_bits: 0, 1, 2, 3 or 8.
        zero_bits: u8 [N, ceil(K / block / 8)], written: `pack_bits` of which block scales are zero.
        values: Like x and contiguous, written: the dequantised values, without gradient. None: not wanted.
        fmt: The block format.
        tensor_scale: The scale above the block scales.
        order: Whose FP32 arithmetic.
        site: Name of the tensor in errors.

    Raises:
        NonFiniteError: x holds NaN or Inf; on CUDA see `NonFiniteFlags`.
        ValueError: x, the tensor scale, or what is written to does not fit.
    """
    _check(
        x,
        rows,
        at,
        fmt=fmt,
        code_bits=code_bits,
        scale_bits=scale_bits,
        zero_bits=zero_bits,
        values=values,
        site=site,
    )
    if triton := kernels(x, fmt):
        triton.quantize_into_rows(
            x,
            rows,
            at,
            code_bits=code_bits,
            scale_bits=scale_bits,
            zero_bits=zero_bits,
            values=values,
            tensor_scale=tensor_scale,
            order=order,
            site=site,
        )
        return
    rounding = nearest(x, fmt, tensor_scale, order, site)
    if values is None:
        found = rounding.to_codes()
    else:
        found, dequantised = rounding.to_both()
        values.copy_(dequantised)
    _write(found, rows[:, at:], code_bits, scale_bits, zero_bits)


def _write(q: Quantized, rows: Tensor, code_bits: int, scale_bits: int, zero_bits: Tensor) -> None:
    codes, scales = pack_bits(q.codes, code_bits), pack_bits(q.scales, scale_bits)
    rows[:, : codes.shape[1]] = codes
    rows[:, codes.shape[1] : codes.shape[1] + scales.shape[1]] = scales
    zero_bits.copy_(pack_bits((q.scales < q.fmt.smallest_scale_code).byte(), 1))


def _check(
    x: Tensor,
    rows: Tensor,
    at: int,
    *,
    fmt: BlockFormat,
    code_bits: int,
    scale_bits: int,
    zero_bits: Tensor,
    values: Tensor | None,
    site: str,
) -> None:
    where = site or "a tensor to record"
    if x.ndim != 2:
        raise ValueError(f"{where} has shape {list(x.shape)}; give [N, K]")
    if code_bits not in CODE_BITS or scale_bits not in SCALE_BITS:
        raise ValueError(
            f"{where} is to be recorded with {code_bits} code and {scale_bits} scale bits; "
            f"use one of {CODE_BITS} and one of {SCALE_BITS}"
        )
    n, blocks = x.shape[0], x.shape[1] // fmt.block
    end = at + packed_size(x.shape[1], code_bits) + packed_size(blocks, scale_bits)
    if rows.ndim != 2 or len(rows) != n or not 0 <= at <= end <= rows.shape[1]:
        raise ValueError(
            f"{where} of shape {list(x.shape)} takes bytes {at} to {end} of {n} rows; "
            f"rows of shape {list(rows.shape)} were given"
        )
    if zero_bits.shape != (n, packed_size(blocks, 1)):
        raise ValueError(
            f"{where} of shape {list(x.shape)} has {packed_size(blocks, 1)} bytes of zero blocks a row; "
            f"shape {list(zero_bits.shape)} was given"
        )
    if rows.stride(1) != 1 or zero_bits.stride(1) != 1:
        raise ValueError(f"{where} is recorded in rows whose bytes are neighbours; give such rows")
    if values is not None and (
        values.shape != x.shape or values.dtype != x.dtype or not values.is_contiguous()
    ):
        raise ValueError(
            f"{where} is {x.dtype} {list(x.shape)} and its values go to {values.dtype} {list(values.shape)}; "
            "give a contiguous tensor of its dtype and shape"
        )
