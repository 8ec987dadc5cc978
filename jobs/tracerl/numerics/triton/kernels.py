"""The kernels: the FP32 arithmetic of `blocks` and `guidance`, operation by operation, on tiles of blocks.

A tile is B blocks, some rows times some blocks of each, as two tiles [B, 8], their halves. A thread then has
whole blocks of 16-bit values, eight to a load, and computes their scales alone.

Nothing may be fused or approximated: launches set `enable_fp_fusion=False`, divisions are `div_rn`, and
`tl.fma` stands where its product is exact. Hopper has no instruction for E2M1, so codes come out of FP32
patterns. The kernels wait for memory only while they stay below some thirty instructions a value.
"""

# A kernel's arguments are positional, its constants are no class's, and its ifs are static.
# ruff: noqa: PLR0917, SIM108, SIM300

from __future__ import annotations

import triton
import triton.language as tl

RECIPROCAL = tl.constexpr(0)
FOUR_OVER_SIX = tl.constexpr(1)
TORCHAO = tl.constexpr(2)
MODELOPT = tl.constexpr(3)
COMPRESSED_TENSORS = tl.constexpr(4)

NON_FINITE = tl.constexpr(0)
"""Byte of a site's mark that is set where it holds NaN or Inf."""
NO_SCALE = tl.constexpr(1)
"""Byte of a site's mark that is set where its record holds a whole scale that is not a finite one."""

_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
_EXPONENT = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(v):
    """Round FP32 v >= 0 to E4M3: its value, and its code as int32."""
    v = tl.minimum(v, 448.0)
    octave = tl.maximum(_bits(v) & _EXPONENT, 0x3C800000)  # at least 2^-6
    shift = _float(octave) * 1048576.0
    shifted = v + shift
    # The last bit of the sum weighs one step, so its mantissa is how many steps v has in its octave.
    code = (_bits(shifted) & 0x7FFFFF) + (octave >> 20) - 968
    return shifted - shift, code


@triton.jit
def _e4m3_value(code):
    """Value of an E4M3 code 0 to 126, by an FP32 of the same exponent and mantissa bits, mostly subnormal."""
    return _float(code << 20) * 1.329227995784916e36  # 2^120


# Casts between BF16 and FP32 are made of integers, as the interpreter rounds to zero and loses subnormals.


@triton.jit
def _as_float32(x):
    if x.dtype == tl.bfloat16:
        x = _float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Round FP32 x >= 0 to another dtype and back."""
    if DTYPE == tl.bfloat16:
        x = _float((_bits(x) + 0x7FFF + ((_bits(x) >> 16) & 1)) & -0x10000)
    elif DTYPE == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _block_scale(amax, up, ORDER: tl.constexpr, DTYPE: tl.constexpr):
    """Scale of blocks as `blocks.block_scales`: value and code."""
    if ORDER == RECIPROCAL:
        scale, code = _e4m3(amax * up)
    elif ORDER == FOUR_OVER_SIX:
        scale, code = _e4m3(tl.div_rn(amax, 6.0) * up)
    elif ORDER == TORCHAO:
        scale, code = _e4m3(tl.maximum(tl.div_rn(tl.div_rn(amax, 6.0), up), 0.015625))
    elif ORDER == MODELOPT:
        wanted = tl.div_rn(amax, up)
        scale, code = _e4m3(tl.maximum(tl.where(wanted == 0, 1.0, wanted), 0.001953125))
    else:
        scale, code = _e4m3(_rounded(tl.div_rn(amax, 6.0), DTYPE) * up)
        scale, code = tl.where(code == 0, 0.125, scale), tl.where(code == 0, 32, code)
    return scale, code


@triton.jit
def _factor(scale, back, ORDER: tl.constexpr):
    """What an order multiplies values by under scales [B], or divides them by, as `blocks`."""
    if ORDER == RECIPROCAL:
        factor = tl.minimum(tl.div_rn(1.0, scale * back), _LARGEST_FP32)
    elif ORDER == FOUR_OVER_SIX:
        factor = tl.where(scale == 0, 0.0, tl.minimum(tl.div_rn(1.0, back * scale), _LARGEST_FP32))
    elif ORDER == TORCHAO:
        factor = tl.div_rn(back, scale)
    elif ORDER == MODELOPT:
        factor = scale * back
    else:
        factor = tl.div_rn(scale, back)
    return factor


@triton.jit
def _scaled(x, factor, ORDER: tl.constexpr):
    """Values [B, 8] under factors [B]."""
    if ORDER < MODELOPT:
        y = x * factor[:, None]
    else:
        y = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
    return y


@triton.jit
def _nearest(v):
    """Round FP32 magnitudes v <= 6 to E2M1.

    Gives the octave of v, at least 1; the pattern of a sum whose lowest bits are the code's; and the value.
    """
    octave = _float(tl.maximum(_bits(v) & _EXPONENT, 0x3F800000))
    shifted = tl.fma(octave, 4194304.0, v)
    return octave, _bits(shifted), tl.fma(octave, -4194304.0, shifted)


@triton.jit
def _code(shifted):
    """Code of a magnitude: its steps in the octave, and two for every octave below."""
    return (shifted + (shifted >> 22) - 298) & 7


@triton.jit
def _moved(
    v, octave, shifted, nearest, y, record, guided, band, BITS: tl.constexpr, BANDED: tl.constexpr
):  # fmt: skip
    """Give `nearest`, or the other end of the bracket where guidance takes that.

    `record`: int32, low bits of the rollout's codes, or whole codes at 4 bits; at 1 bit with any bits above.
    """
    beyond = v - nearest
    eighth = octave * tl.where(guided, 0.0625, 0.0)[:, None]  # of a step; none moves what is not guided
    if BITS == 1:
        # To the end whose low bit is the recorded one; but from 2 to 2.25 and from 4 to 4.5 always the lower,
        # as the nearest odd magnitude is below the bracket. Bits are moved to where they make 2.0 or 0.
        low = shifted << 30
        threshold = eighth * _float(_bits(v) & ~low & 0x40000000)
        # As unsigned patterns the negative are above all thresholds.
        moves = _bits(beyond).to(tl.uint32, bitcast=True) > _bits(threshold).to(tl.uint32, bitcast=True)
        quarter = eighth * _float((low ^ (record << 30)) & 0x40000000)
    else:
        if BITS == 2:
            # The two magnitudes with these low bits; the middle still belongs to the smaller one.
            low = record.to(tl.float32) * 0.5
            high = tl.where(record == 3, 6.0, (record + 2).to(tl.float32))
            up = (v < low) | ((v > (low + high) * 0.5) & (v < high))
        else:
            magnitude = _float((record & 7) << 22) * 8.507059173023462e37  # 2^126, as `_e4m3_value`
            up = (((record << 28) ^ _bits(y)) >= 0) & (magnitude > v)
        moves = ((beyond > 0) & up) | ((beyond < 0) & ~up)
        quarter = eighth * 2.0
    if BANDED:
        # By half the octave, which is the width of the bracket.
        moves &= 0.5 - tl.abs(beyond) * _float(0x7F800000 - _bits(octave)) <= band
    quarter = tl.where(moves, _float(_bits(quarter) | (_bits(beyond) & _SIGN)), 0.0)
    return tl.fma(quarter, 4.0, nearest)


@triton.jit
def _amax(low, high, SPLITS: tl.constexpr):
    """Largest magnitude [B] of halves [B, 8], NaN above all; `SPLITS`: halvings that stay inside a thread."""
    a = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
    for _ in tl.static_range(SPLITS):
        even, odd = tl.split(a.reshape(a.shape[0], a.shape[1] // 2, 2))
        a = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    # As patterns, which integers order like the floats, and NaN above.
    return _float(tl.max(_bits(a) & 0x7FFFFFFF, 1))


@triton.jit
def _places(r, n, NB: tl.constexpr, B: tl.constexpr):
    """Row, block in the row, and whether both are there: of the tile's blocks, [B] each."""
    i = tl.arange(0, B)
    row = tl.program_id(0) * (B // NB) + i // NB
    block = tl.program_id(1) * NB + i % NB
    return row, block, (row < r) & (block < n)


@triton.jit
def _offsets(row, row_stride, block, WIDTH: tl.constexpr):
    """Offsets [B, WIDTH] of the elements of blocks."""
    start = row.to(tl.int64) * row_stride + block * WIDTH
    return start[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _put(out, row_stride, row, block, there, low, high, WHOLE: tl.constexpr):
    """Store halves [B, N] of blocks: in one piece, which fills the memory's sectors, or one by one."""
    N: tl.constexpr = low.shape[1]
    if WHOLE:
        both = tl.join(low, high).permute(0, 2, 1).reshape(low.shape[0], 2 * N)
        tl.store(out + _offsets(row, row_stride, block, 2 * N), both, mask=there[:, None])
    else:
        at = out + (row.to(tl.int64) * row_stride + block * (2 * N))[:, None] + tl.arange(0, N)[None, :]
        tl.store(at, low, mask=there[:, None])
        tl.store(at + N, high, mask=there[:, None])


@triton.jit
def _packed(values, BITS: tl.constexpr):
    """Pack the low `BITS` bits of values int32 [B, N] into bytes, u8 [B, N * BITS / 8]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    i = tl.arange(0, PER_BYTE) * BITS
    fields = (values & ((1 << BITS) - 1)).reshape(values.shape[0], values.shape[1] // PER_BYTE, PER_BYTE)
    return tl.sum(fields << i[None, None, :], 2).to(tl.uint8)


@triton.jit
def _store_block_bits(out, row_stride, r, n, values, NB: tl.constexpr, BITS: tl.constexpr):
    """Pack the low `BITS` bits, at most 4, of values int32 [B], one a block, row by row into whole bytes."""
    GROUP: tl.constexpr = NB if NB < 8 else 8
    GROUPS: tl.constexpr = values.shape[0] // GROUP
    i = tl.arange(0, GROUP) * BITS
    fields = (values & ((1 << BITS) - 1)).reshape(GROUPS, GROUP) << i[None, :]
    word = tl.sum(fields, 1)
    j = tl.arange(0, GROUP if GROUP > BITS else triton.next_power_of_2(BITS))
    g = tl.arange(0, GROUPS)
    row = tl.program_id(0) * (GROUPS * GROUP // NB) + g // (NB // GROUP)
    byte = (tl.program_id(1) * (NB // GROUP) + g % (NB // GROUP))[:, None] * BITS + j[None, :]
    there = (row < r)[:, None] & (j < BITS)[None, :] & (byte < (n * BITS + 7) // 8)
    at = (row.to(tl.int64) * row_stride)[:, None] + byte
    tl.store(out + at, (word[:, None] >> (8 * j)[None, :]).to(tl.uint8), mask=there)


@triton.jit
def _halves(x, row_stride, row, block, there):
    """Both halves [B, 8] of blocks, as FP32."""
    at = x + (row.to(tl.int64) * row_stride + block * 16)[:, None] + tl.arange(0, 8)[None, :]
    low = tl.load(at, mask=there[:, None])
    high = tl.load(at + 8, mask=there[:, None])
    return _as_float32(low), _as_float32(high)


@triton.jit
def _mark(marks, slot, wrong, BYTE: tl.constexpr):
    """Set a byte of the site's mark, u8 [sites, 4], if any of wrong [B] is true."""
    at = marks + slot * 4 + BYTE + tl.zeros_like(wrong.to(tl.int32))
    tl.store(at, tl.full(wrong.shape, 1, tl.uint8), mask=wrong)


@triton.jit
def _tensor_scales(up, back, decode, row, there, PER_ROW: tl.constexpr):
    """The tensor scale's three numbers: [B] of each block's row, or the scalars that they are."""
    if PER_ROW:
        up = tl.load(up + row, mask=there, other=1.0)
        back = tl.load(back + row, mask=there, other=1.0)
        decode = tl.load(decode + row, mask=there, other=1.0)
    return up, back, decode


@triton.jit
def _values(magnitude, y, factor, ORDER: tl.constexpr, CODES: tl.constexpr):
    """Dequantised values of magnitudes FP32 [B, 8], with y's sign, by factors [B]."""
    if CODES and ORDER != TORCHAO:
        y += 0.0
    return _float(_bits(magnitude) | (_bits(y) & _SIGN)) * factor[:, None]


@triton.jit
def _bytes(shifted, y, ORDER: tl.constexpr, BITS: tl.constexpr):
    """Codes of sums, one a byte at 8 bits, else packed."""
    if ORDER != TORCHAO:  # of all packages, it alone gives -0 its sign
        y += 0.0
    if BITS == 1:
        packed = _packed(shifted, 1)
    elif BITS == 2:
        packed = _packed(_code(shifted), 2)
    elif BITS == 4:
        packed = _packed(_code(shifted) | (_bits(y) >> 28) & 8, 4)
    else:
        packed = (_code(shifted) | (_bits(y) >> 28) & 8).to(tl.uint8)
    return packed


@triton.jit
def _store(
    x, values, codes, codes_stride, row, block, there, n, factor,
    y_0, magnitude_0, shifted_0, y_1, magnitude_1, shifted_1,
    ORDER: tl.constexpr, CODE_BITS: tl.constexpr,
):  # fmt: skip
    """Store what is wanted of blocks: magnitudes FP32 times `factor` [B], and codes; half by half."""
    CODES: tl.constexpr = codes is not None
    # Triton 3.6 misplaces some codes of 32-bit blocks that are put together (seen at 2 and 4 guided bits).
    WHOLE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    if values is not None:
        out_0 = _values(magnitude_0, y_0, factor, ORDER, CODES).to(x.dtype.element_ty)
        out_1 = _values(magnitude_1, y_1, factor, ORDER, CODES).to(x.dtype.element_ty)
        _put(values, n * 16, row, block, there, out_0, out_1, WHOLE)
    if CODE_BITS > 0:
        bytes_0, bytes_1 = _bytes(shifted_0, y_0, ORDER, CODE_BITS), _bytes(shifted_1, y_1, ORDER, CODE_BITS)
        _put(codes, codes_stride, row, block, there, bytes_0, bytes_1, WHOLE)


@triton.jit
def _store_scales(
    scales, scales_stride, row, block, there, r, n, codes, NB: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Store scale codes int32 [B], or their low bits."""
    if BITS == 8:
        tl.store(scales + row.to(tl.int64) * scales_stride + block, codes.to(tl.uint8), mask=there)
    elif BITS > 0:
        _store_block_bits(scales, scales_stride, r, n, tl.where(there, codes, 0), NB, BITS)


@triton.jit(do_not_specialize=["r", "slot"])
def quantize_kernel(
    x,  # [r, n * 16]
    x_stride,
    r,
    n,
    up,
    back,
    decode,
    values,  # [r, n * 16] in x's dtype, contiguous, or None
    codes,  # u8 [r, n * 16], contiguous, or packed bytes of rows; or None
    codes_stride,
    scales,  # u8 [r, n], or packed bytes of rows; or None
    scales_stride,
    zero_bits,  # u8 [r, ceil(n / 8)], or None
    zero_stride,
    marks,
    slot,
    ORDER: tl.constexpr,
    PER_ROW: tl.constexpr,
    CODE_BITS: tl.constexpr,  # 0: none, 1, 2, 4: packed, 8: one a byte
    SCALE_BITS: tl.constexpr,  # 0: none, 1, 2, 3: packed, 8: one a byte
    NB: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Round to nearest: any of dequantised values, codes and scales, packed or not, and zero blocks."""
    row, block, there = _places(r, n, NB, B)
    low, high = _halves(x, x_stride, row, block, there)
    up, back, decode = _tensor_scales(up, back, decode, row, there, PER_ROW)
    amax = _amax(low, high, SPLITS)
    _mark(marks, slot, (_bits(amax) >= 0x7F800000) & there, NON_FINITE)
    scale, scale_code = _block_scale(amax, up, ORDER, x.dtype.element_ty)
    factor = _factor(scale, back, ORDER)
    y_0, y_1 = _scaled(low, factor, ORDER), _scaled(high, factor, ORDER)
    _, shifted_0, nearest_0 = _nearest(tl.minimum(tl.abs(y_0), 6.0))
    _, shifted_1, nearest_1 = _nearest(tl.minimum(tl.abs(y_1), 6.0))
    _store(
        x, values, codes, codes_stride, row, block, there, n, scale * decode,
        y_0, nearest_0, shifted_0, y_1, nearest_1, shifted_1, ORDER, CODE_BITS,
    )  # fmt: skip
    _store_scales(scales, scales_stride, row, block, there, r, n, scale_code, NB, SCALE_BITS)
    if zero_bits is not None:
        zero = ((scale_code == 0) & there).to(tl.int32)
        _store_block_bits(zero_bits, zero_stride, r, n, zero, NB, 1)


@triton.jit
def _rebuild(own, low, BITS: tl.constexpr):
    """Scale code nearest `own` whose low bits are `low`, of two the larger; int32, within 1 to 126."""
    STEP: tl.constexpr = 1 << BITS
    BELOW: tl.constexpr = STEP // 2 - 1
    code = own + ((low - own + BELOW) & (STEP - 1)) - BELOW
    code = tl.where(code > 126, code - STEP, code)
    return tl.where(code < 1, code + STEP, code)


@triton.jit
def _field(packed, row_stride, row, i, size, there, BITS: tl.constexpr):
    """Value i of rows of `size` packed bytes, as int32."""
    bit = i * BITS
    packed += row.to(tl.int64) * row_stride
    word = tl.load(packed + (bit >> 3), mask=there, other=0).to(tl.int32)
    if 8 % BITS != 0:  # what the last byte is followed by is not looked at
        behind = tl.minimum((bit >> 3) + 1, size - 1)
        word |= tl.load(packed + behind, mask=there, other=0).to(tl.int32) << 8
    return (word >> (bit & 7)) & ((1 << BITS) - 1)


@triton.jit
def _toward(
    y, start, there, guided, band, BITS: tl.constexpr, BANDED: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Round scaled values FP32 [B, 8] toward records u8 that begin at `start` [B]: sums, magnitudes."""
    v = tl.minimum(tl.abs(y), 6.0)
    octave, shifted, nearest = _nearest(v)
    if BITS > 0:
        BYTES: tl.constexpr = y.shape[1] * BITS // 8
        at = start[:, None] + tl.arange(0, BYTES)[None, :]
        packed = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
        i = tl.arange(0, 8 // BITS) * BITS
        record = (packed[:, :, None] >> i[None, None, :]).reshape(y.shape[0], y.shape[1])
        if BITS > 1:
            record &= (1 << BITS) - 1
        nearest = _moved(v, octave, shifted, nearest, y, record, guided, band, BITS, BANDED)
        if CODES:
            _, shifted, _ = _nearest(nearest)
    return shifted, nearest


@triton.jit(do_not_specialize=["r", "slot"])
def guided_kernel(
    x,  # [r, n * 16]
    x_stride,
    r,
    n,
    up,
    back,
    decode,
    record,  # u8 [r, 2 * n * GUIDE_BITS]
    record_stride,
    low_scales,  # u8 [r, ceil(n * GUIDE_SCALE_BITS / 8)]
    low_scales_stride,
    zero_blocks,  # u8 [r, n], or None
    zero_stride,
    present,  # u8 [r], or None
    present_stride,
    band,
    values,  # [r, n * 16] in x's dtype, contiguous, or None
    codes,  # u8 [r, n * 16], contiguous, or None
    scales,  # u8 [r, n], contiguous, or None
    marks,
    slot,
    ORDER: tl.constexpr,
    PER_ROW: tl.constexpr,
    GUIDE_BITS: tl.constexpr,  # 0, 1, 2, 4
    GUIDE_SCALE_BITS: tl.constexpr,  # 0, 1, 2, 3, 8
    BANDED: tl.constexpr,
    NB: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Round toward a record: dequantised values, or codes and scales."""
    row, block, there = _places(r, n, NB, B)
    low, high = _halves(x, x_stride, row, block, there)
    up, back, decode = _tensor_scales(up, back, decode, row, there, PER_ROW)
    amax = _amax(low, high, SPLITS)
    _mark(marks, slot, (_bits(amax) >= 0x7F800000) & there, NON_FINITE)
    scale, scale_code = _block_scale(amax, up, ORDER, x.dtype.element_ty)

    guided = there
    if present is not None:
        guided &= tl.load(present + row.to(tl.int64) * present_stride, mask=there, other=0) != 0
    if zero_blocks is not None:
        guided &= tl.load(zero_blocks + row.to(tl.int64) * zero_stride + block, mask=there, other=1) == 0
    if GUIDE_SCALE_BITS > 0:
        size = (n * GUIDE_SCALE_BITS + 7) // 8
        recorded = _field(low_scales, low_scales_stride, row, block, size, there, GUIDE_SCALE_BITS)
        if GUIDE_SCALE_BITS == 8:
            _mark(marks, slot, (recorded > 126) & there, NO_SCALE)
            guided &= recorded > 0
        else:
            recorded = _rebuild(scale_code, recorded, GUIDE_SCALE_BITS)
        scale_code = tl.where(guided, recorded, scale_code)
        scale = _e4m3_value(scale_code)
    else:
        guided &= scale_code > 0

    factor = _factor(scale, back, ORDER)
    CODE_BITS: tl.constexpr = 8 if codes is not None else 0
    y_0, y_1 = _scaled(low, factor, ORDER), _scaled(high, factor, ORDER)
    start = record + row.to(tl.int64) * record_stride + block * (2 * GUIDE_BITS)
    shifted_0, taken_0 = _toward(y_0, start, there, guided, band, GUIDE_BITS, BANDED, codes is not None)
    start += GUIDE_BITS
    shifted_1, taken_1 = _toward(y_1, start, there, guided, band, GUIDE_BITS, BANDED, codes is not None)
    _store(
        x, values, codes, n * 16, row, block, there, n, scale * decode,
        y_0, taken_0, shifted_0, y_1, taken_1, shifted_1, ORDER, CODE_BITS,
    )  # fmt: skip
    _store_scales(scales, n, row, block, there, r, n, scale_code, NB, CODE_BITS)


@triton.jit
def pack_kernel(values, row_stride, r, n, out, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Pack the low `BITS` bits, at most 4, of u8 [r, n] into contiguous rows; 8 values a group."""
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = g // groups, g % groups
    i = tl.arange(0, 8)
    column = (group * 8)[:, None] + i[None, :]
    at = (row.to(tl.int64) * row_stride)[:, None] + column
    loaded = tl.load(values + at, mask=(row < r)[:, None] & (column < n), other=0).to(tl.int32)
    word = tl.sum((loaded & ((1 << BITS) - 1)) << (i * BITS)[None, :], 1)
    j = tl.arange(0, triton.next_power_of_2(BITS))
    size = (n * BITS + 7) // 8
    byte = (group * BITS)[:, None] + j[None, :]
    there = (row < r)[:, None] & (j < BITS)[None, :] & (byte < size)
    out += (row.to(tl.int64) * size)[:, None] + byte
    tl.store(out, (word[:, None] >> (8 * j)[None, :]).to(tl.uint8), mask=there)


@triton.jit
def unpack_kernel(packed, row_stride, r, n, out, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Undo `pack_kernel`."""
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = g // groups, g % groups
    j = tl.arange(0, triton.next_power_of_2(BITS))
    byte = (group * BITS)[:, None] + j[None, :]
    there = (row < r)[:, None] & (j < BITS)[None, :] & (byte < (n * BITS + 7) // 8)
    at = packed + (row.to(tl.int64) * row_stride)[:, None] + byte
    word = tl.sum(tl.load(at, mask=there, other=0).to(tl.int32) << (8 * j)[None, :], 1)
    i = tl.arange(0, 8)
    column = (group * 8)[:, None] + i[None, :]
    values = (word[:, None] >> (i * BITS)[None, :]) & ((1 << BITS) - 1)
    out += (row.to(tl.int64) * n)[:, None] + column
    tl.store(out, values.to(tl.uint8), mask=(row < r)[:, None] & (column < n))


@triton.jit
def rebuild_kernel(own, low, out, n, BITS: tl.constexpr, N: tl.constexpr):
    """Rebuild n scale codes."""
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = i < n
    codes = tl.load(own + i, mask=mask, other=1).to(tl.int32)
    recorded = tl.load(low + i, mask=mask, other=1).to(tl.int32)
    tl.store(out + i, _rebuild(codes, recorded, BITS).to(tl.uint8), mask=mask)
