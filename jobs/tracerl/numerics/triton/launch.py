"""What the kernels are launched with: rows of any leading shape, tensor scales as numbers, tiles, marks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.bits import check_packed, check_width, packed_size
from tracerl.numerics.blocks import NVFP4, Convention, Quantized, Rounding, TensorScale, check
from tracerl.numerics.elements import E2M1, E4M3
from tracerl.numerics.flags import NO_SCALE, Mark, refuse
from tracerl.numerics.guidance import Guide, check_guide
from tracerl.numerics.triton import kernels

_ORDERS = {
    Order.RECIPROCAL: kernels.RECIPROCAL,
    Order.FOUR_OVER_SIX: kernels.FOUR_OVER_SIX,
    Order.TORCHAO: kernels.TORCHAO,
    Order.MODELOPT: kernels.MODELOPT,
    Order.COMPRESSED_TENSORS: kernels.COMPRESSED_TENSORS,
}
_BLOCK = NVFP4.block


class Cut(NamedTuple):
    """Into what a kernel's work is cut, as an H200 was quickest with."""

    blocks: int
    """Blocks of a tile."""
    warps: int
    """Warps of a program."""
    programs: int | None
    """Programs a multiprocessor, each of many tiles; None: a program is a tile."""


NEAREST = Cut(256, 4, None)
PARITIES = Cut(256, 4, 6)
GUIDED = Cut(64, 2, 64)

_UNFUSED = {"enable_fp_fusion": False}
"""No product and sum become one instruction that rounds once."""
_COLUMNS = 65_535
"""Programs along a row: CUDA starts no more along a grid's second axis."""
_ELEMENTS = 2048
"""Elements of a program of the kernels without blocks."""


# -- rounding to nearest ----------------------------------------------------------------------------------


def quantize(x: Tensor, tensor_scale: TensorScale, order: Order, site: str) -> Quantized:
    """Give codes and scales."""
    q = _empty(x, tensor_scale, site)
    _nearest(x, tensor_scale, order, site, codes=q.codes, scales=q.scales)
    return q


def quantize_dequantize(
    x: Tensor, tensor_scale: TensorScale, order: Order, site: str
) -> tuple[Quantized, Tensor]:
    """Give codes and scales, and what they stand for in x's dtype."""
    q, values = _empty(x, tensor_scale, site), _like(x)
    _nearest(x, tensor_scale, order, site, values=values, codes=q.codes, scales=q.scales)
    return q, values


def fake_quantize(x: Tensor, tensor_scale: TensorScale, order: Order, site: str) -> Tensor:
    """Give dequantised values in x's dtype, without gradient."""
    check(x, NVFP4, tensor_scale, site)
    values = _like(x)
    _nearest(x, tensor_scale, order, site, values=values)
    return values


def quantize_into_rows(
    x: Tensor,
    rows: Tensor,
    at: int,
    *,
    code_bits: int,
    scale_bits: int,
    zero_bits: Tensor,
    tensor_scale: TensorScale,
    order: Order,
    site: str,
    values: Tensor | None = None,
) -> None:
    """Write packed codes and scales of x [N, K] into rows u8 [N, …] from column `at` on, and what else."""
    check(x, NVFP4, tensor_scale, site)
    code_end = at + packed_size(x.shape[-1], code_bits)
    scale_end = code_end + packed_size(x.shape[-1] // _BLOCK, scale_bits)
    codes, scales = rows[:, at:code_end], rows[:, code_end:scale_end]
    pairs = _pairs(x, tensor_scale) if code_bits == 1 and values is None else None
    if pairs is not None:
        _parities(
            x,
            pairs,
            tensor_scale,
            order,
            site,
            codes=codes,
            scales=scales,
            scale_bits=scale_bits,
            zero_bits=zero_bits,
        )
        return
    _nearest(
        x,
        tensor_scale,
        order,
        site,
        values=values,
        codes=codes,
        code_bits=code_bits,
        scales=scales,
        scale_bits=scale_bits,
        zero_bits=zero_bits,
    )


def _nearest(
    x: Tensor,
    tensor_scale: TensorScale,
    order: Order,
    site: str,
    *,
    values: Tensor | None = None,
    codes: Tensor | None = None,
    code_bits: int = 8,
    scales: Tensor | None = None,
    scale_bits: int = 8,
    zero_bits: Tensor | None = None,
) -> None:
    """Write what is not None: `codes` and `scales` at 8 bits one a byte and contiguous, else packed rows."""
    tile = _tile(x, NEAREST)
    if tile is None:
        return
    mark = Mark(site, x.device)
    with _on(x):
        kernels.quantize_kernel[tile.grid](
            tile.rows,
            tile.rows.stride(0),
            tile.r,
            tile.n,
            *_numbers(tensor_scale, order, tile.rows),
            values,
            codes,
            0 if codes is None else 16 * tile.n if code_bits == 8 else codes.stride(0),
            scales,
            0 if scales is None else tile.n if scales.ndim == 1 else scales.stride(-2),
            zero_bits,
            0 if zero_bits is None else zero_bits.stride(0),
            mark.marks.view(torch.uint8),
            mark.slot,
            ORDER=_ORDERS[order],
            PER_ROW=tensor_scale.value.ndim > 0 or tensor_scale.value.is_cuda,
            CODE_BITS=0 if codes is None else code_bits,
            SCALE_BITS=0 if scales is None else scale_bits,
            SPLITS=_splits(x),
            **tile.options,
        )
    mark.settle()


def _pairs(x: Tensor, scale: TensorScale) -> Tensor | None:
    """Give neighbouring values together, int32 [N, K / 2], where `parity_kernel` can have them."""
    if x.dtype.itemsize != 2 or not x.numel() or scale.value.ndim or scale.value.is_cuda:
        return None
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4 or (x.is_cuda and not _has_pairs(x.device)):
        return None
    return x.detach().view(torch.int32)


@cache
def _has_pairs(device: torch.device) -> bool:
    """Whether a GPU compares two 16-bit integers at once."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _parities(
    x: Tensor,
    pairs: Tensor,
    tensor_scale: TensorScale,
    order: Order,
    site: str,
    *,
    codes: Tensor,
    scales: Tensor,
    scale_bits: int,
    zero_bits: Tensor,
) -> None:
    """Write packed low bits of codes, scales, and zero blocks."""
    tile = _tile(x, PARITIES)
    assert tile is not None  # as x has values
    mark = Mark(site, x.device)
    with _on(x):
        kernels.parity_kernel[tile.grid](
            pairs,
            pairs.stride(0),
            tile.r,
            tile.n,
            _scalars(tensor_scale, order)[0],
            _steps(tensor_scale.value.item(), tensor_scale.convention, order, x.dtype, x.device),
            codes,
            codes.stride(0),
            scales,
            scales.stride(0),
            zero_bits,
            zero_bits.stride(0),
            mark.marks.view(torch.uint8),
            mark.slot,
            ORDER=_ORDERS[order],
            FLOAT16=x.dtype == torch.float16,
            SCALE_BITS=scale_bits,
            **tile.options,
        )
    mark.settle()


@lru_cache(maxsize=256)
def _steps(
    scale: float, convention: Convention, order: Order, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Give the smallest magnitude of every code: int32 [128, 8], by scale code and by the code less one.

    Both halves of a word hold its 16-bit pattern. It is found by bisection with the reference's arithmetic,
    as codes grow with magnitudes. The last row and column are of no code.
    """
    tensor_scale = TensorScale(torch.tensor(scale), convention)
    scales = E4M3.decode(torch.arange(E4M3.largest_code + 1, dtype=torch.uint8)).view(-1, 1, 1)
    wanted = torch.arange(1, E2M1.largest_code + 1)
    largest = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16))
    # How many magnitudes have a lower code: bit by bit, asking the last of so many.
    lower = torch.zeros(len(scales), 1, len(wanted), dtype=torch.int32)
    for bit in reversed(range(15)):
        last = (lower + (1 << bit) - 1).clamp_(max=largest).to(torch.int16).view(dtype)
        rounding = Rounding(last.shape, last, NVFP4, order, tensor_scale, scales, lambda y, _: E2M1.round(y))
        lower += (rounding.to_codes().codes < wanted) * (1 << bit)
    steps = torch.zeros(128, 8, dtype=torch.int32)
    steps[: len(scales), : len(wanted)] = lower[:, 0] * 0x10001
    return steps.to(device)


# -- rounding toward a record -----------------------------------------------------------------------------


def guided_quantize(x: Tensor, guide: Guide, order: Order, band: float | None, site: str) -> Quantized:
    """Give codes, and the scales under which they were chosen."""
    check_guide(x, guide, NVFP4, band, site)
    q = _empty(x, guide.tensor_scale, site)
    _guided(x, guide, order, band, site, codes=q.codes, scales=q.scales)
    return q


def guided_fake_quantize(x: Tensor, guide: Guide, order: Order, band: float | None, site: str) -> Tensor:
    """Give dequantised values in x's dtype, without gradient."""
    check_guide(x, guide, NVFP4, band, site)
    check(x, NVFP4, guide.tensor_scale, site)
    values = _like(x)
    _guided(x, guide, order, band, site, values=values)
    return values


def _guided(
    x: Tensor,
    guide: Guide,
    order: Order,
    band: float | None,
    site: str,
    *,
    values: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    tile = _tile(x, GUIDED)
    if tile is None:
        return
    mark = Mark(site, x.device)
    record, low_scales = _rows(guide.codes, tile.r), _rows(guide.scales, tile.r)
    zero_blocks = None if guide.zero_blocks is None else _rows(guide.zero_blocks, tile.r).view(torch.uint8)
    present = None if guide.present is None else guide.present.reshape(-1).view(torch.uint8)
    scale = guide.tensor_scale
    numbers = _numbers(scale, order, tile.rows)
    plain = isinstance(numbers[1], float) and 2.0**-100 <= numbers[1] <= 2.0**100
    with _on(x):
        kernels.guided_kernel[tile.grid](
            tile.rows,
            tile.rows.stride(0),
            tile.r,
            tile.n,
            *numbers,
            record,
            record.stride(0),
            low_scales,
            low_scales.stride(0),
            zero_blocks,
            0 if zero_blocks is None else zero_blocks.stride(0),
            present,
            0 if present is None else present.stride(0),
            0.5 if band is None else float(band),
            values,
            codes,
            scales,
            mark.marks.view(torch.uint8),
            mark.slot,
            ORDER=_ORDERS[order],
            PER_ROW=scale.value.ndim > 0 or scale.value.is_cuda,
            PLAIN=plain,
            GUIDE_BITS=guide.code_bits,
            GUIDE_SCALE_BITS=guide.scale_bits,
            BANDED=band is not None,
            SPLITS=_splits(x),
            **tile.options,
        )
    mark.settle()


# -- what records are made of -----------------------------------------------------------------------------


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack the low bits of u8 [..., n] values."""
    check_width(values, bits)
    n = values.shape[-1]
    out = values.new_empty(*values.shape[:-1], packed_size(n, bits))
    if bits == 8:
        return values
    if out.numel():
        rows = _rows(values, values.shape[:-1].numel())
        groups = -(-n // 8)
        with _on(values):
            kernels.pack_kernel[(-(-len(rows) * groups // (_ELEMENTS // 8)),)](
                rows, rows.stride(0), len(rows), n, out, groups, BITS=bits, GROUPS=_ELEMENTS // 8, **_UNFUSED
            )
    return out


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Undo `pack_bits`, to u8 [..., n]."""
    check_packed(packed, bits, n)
    if bits == 8:
        return packed
    if bits == 0:
        return packed.new_zeros(*packed.shape[:-1], n)
    out = packed.new_empty(*packed.shape[:-1], n)
    if out.numel():
        rows = _rows(packed, packed.shape[:-1].numel())
        groups = -(-n // 8)
        with _on(packed):
            kernels.unpack_kernel[(-(-len(rows) * groups // (_ELEMENTS // 8)),)](
                rows, rows.stride(0), len(rows), n, out, groups, BITS=bits, GROUPS=_ELEMENTS // 8, **_UNFUSED
            )
    return out


def rebuild_scales(own: Tensor, low_bits: Tensor, bits: int, site: str) -> Tensor:
    """Give the rollout's scale codes u8 [...]."""
    if bits == 0:
        return own
    if bits == 8:
        if low_bits.numel():
            refuse(low_bits.max() > NVFP4.scale.largest_code, NO_SCALE, site)
        return low_bits
    own, low_bits = own.contiguous(), low_bits.contiguous()
    out = torch.empty_like(own)
    if out.numel():
        with _on(own):
            kernels.rebuild_kernel[(-(-out.numel() // _ELEMENTS),)](
                own, low_bits, out, out.numel(), BITS=bits, N=_ELEMENTS, **_UNFUSED
            )
    return out


# -- launching --------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """How a tensor is cut: `rows` [r, n * 16] with neighbouring values, into programs of `grid`."""

    rows: Tensor
    r: int
    n: int
    grid: tuple[int, int]
    options: dict[str, int | bool]


def _tile(x: Tensor, cut: Cut) -> _Tile | None:
    """Cut x into tiles; None when it is empty."""
    if not x.numel():
        return None
    rows = _rows(x.detach(), x.shape[:-1].numel())
    r, n = len(rows), x.shape[-1] // _BLOCK
    # Blocks of a row that are together: eight packed scales end at whole bytes.
    together = min(n & -n, 32)
    if together < 8:
        together = 8 if n > 8 else 1 << (n - 1).bit_length()
    while n > _COLUMNS * together and together < cut.blocks:
        together *= 2
    down, across = -(-r * together // cut.blocks), -(-n // together)
    if cut.programs is not None and x.is_cuda:
        down = min(down, -(-cut.programs * _multiprocessors(x.device) // across))
    options = {"NB": together, "B": cut.blocks, "num_warps": cut.warps, **_UNFUSED}
    return _Tile(rows, r, n, (down, across), options)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(x: Tensor) -> int:
    """Give how often halves of blocks are halved inside a thread."""
    return 2 if x.dtype == torch.float32 else 3


def _rows(x: Tensor, r: int) -> Tensor:
    """Give [r, K] with neighbouring values, a view wherever strides allow."""
    rows = x if x.ndim == 2 else x.reshape(r, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _empty(x: Tensor, tensor_scale: TensorScale, site: str) -> Quantized:
    """Give room for codes and scales."""
    check(x, NVFP4, tensor_scale, site)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = codes.new_empty(*x.shape[:-1], x.shape[-1] // _BLOCK)
    return Quantized(codes, scales, tensor_scale, NVFP4)


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _numbers(scale: TensorScale, order: Order, rows: Tensor) -> tuple[float | Tensor, ...]:
    """Give what the kernels compute with: three scalars of a scale on the CPU, else FP32 [r] each."""
    if not scale.value.ndim and not scale.value.is_cuda:
        return _scalars(scale, order)
    by_row = TensorScale(scale.value.to(rows.device).reshape(-1), scale.convention)
    return tuple(number.expand(len(rows)).contiguous() for number in _formulas(by_row, order))


@lru_cache(maxsize=256)
def _scalars(scale: TensorScale, order: Order) -> tuple[float, ...]:
    return tuple(number.item() for number in _formulas(scale, order))


def _formulas(scale: TensorScale, order: Order) -> tuple[Tensor, Tensor, Tensor]:
    """Give what scales are made with, what values are scaled with, and `decode`; as in `blocks`."""
    six = torch.full((), E2M1.largest, device=scale.value.device)
    match order:
        case Order.RECIPROCAL:
            up, back = scale.encode() * six.reciprocal(), scale.encode().reciprocal()
        case Order.FOUR_OVER_SIX:
            up, back = scale.encode(), scale.encode().reciprocal()
        case Order.TORCHAO:
            up, back = scale.decode(), scale.decode().reciprocal()
        case Order.MODELOPT:
            up, back = six * scale.decode(), scale.decode()
        case Order.COMPRESSED_TENSORS:
            up, back = scale.encode(), scale.encode()
    return up, back, scale.decode()
