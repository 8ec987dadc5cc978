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

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
_EXPONENT = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
_CODES = tl.constexpr(299)
"""What `_code` gives for 0."""


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
def _together(x):
    """Neighbouring 16-bit values [B, N] in words int32 [B, N / 2], as they are loaded; FP32 as it is."""
    if x.dtype.primitive_bitwidth == 16:
        even, odd = tl.split(
            x.to(tl.int16, bitcast=True).to(tl.int32).reshape(x.shape[0], x.shape[1] // 2, 2)
        )
        x = (even & 0xFFFF) | odd << 16
    return x


@triton.jit
def _apart(x, DTYPE: tl.constexpr):
    """Undo `_together`, to FP32."""
    if DTYPE == tl.bfloat16:
        even, odd = _float(x << 16), _float(x & -0x10000)
    elif DTYPE == tl.float16:
        even = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if DTYPE.primitive_bitwidth == 16:
        x = tl.join(even, odd).reshape(x.shape[0], x.shape[1] * 2)
    return x


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Round FP32 x >= 0 to another dtype and back."""
    if DTYPE == tl.bfloat16:
        x = _float((_bits(x) + 0x7FFF + ((_bits(x) >> 16) & 1)) & -0x10000)
    elif DTYPE == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _inverse(x, PLAIN: tl.constexpr):
    """1 / x rounded to nearest; `PLAIN`: of x from 2^-126 to below 2^126, or of 0, which gives Inf or NaN."""
    if _INTERPRETED or not PLAIN:
        y = tl.div_rn(1.0, x)
    else:
        # What `rcp.rn` is compiled to in that range, without a branch to what is done outside.
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 r, e;
            rcp.approx.ftz.f32 r, $1;
            neg.f32 e, $1;
            fma.rn.f32 e, e, r, 0f3F800000;
            fma.rn.f32 $0, r, e, r;
            }""",
            "=r,r", [x], tl.float32, True, 1,
        )  # fmt: skip
    return y


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
def _factor(scale, back, ORDER: tl.constexpr, PLAIN: tl.constexpr):
    """What an order multiplies values by under scales [B], or divides them by, as `blocks`."""
    if ORDER == RECIPROCAL:
        factor = tl.minimum(_inverse(scale * back, PLAIN), _LARGEST_FP32)
    elif ORDER == FOUR_OVER_SIX:
        factor = tl.where(scale == 0, 0.0, tl.minimum(_inverse(back * scale, PLAIN), _LARGEST_FP32))
    elif ORDER == TORCHAO:
        factor = tl.div_rn(back, scale)
    elif ORDER == MODELOPT:
        factor = scale * back
    else:
        factor = tl.div_rn(scale, back)
    return factor


@triton.jit
def _scaled(x, factor, ORDER: tl.constexpr, SIGNS: tl.constexpr):
    """Values [B, 8] under factors [B]; of all packages, torchao alone gives -0 its sign.

    Without `SIGNS`, products too small for FP32 may be -0 as well.
    """
    if ORDER == TORCHAO:
        y = x * factor[:, None]
    elif ORDER < MODELOPT and SIGNS:
        y = x * factor[:, None] + 0.0
    elif ORDER < MODELOPT:
        y = tl.fma(x, tl.broadcast_to(factor[:, None], x.shape), 0.0)
    else:
        y = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape)) + 0.0
    return y


@triton.jit
def _saturated(y, SIGNED: tl.constexpr):
    """Values or magnitudes, at most 6."""
    if SIGNED:
        v = tl.clamp(y, -6.0, 6.0)
    else:
        v = tl.minimum(tl.abs(y), 6.0)
    return v


@triton.jit
def _nearest(v):
    """Round FP32 -6 <= v <= 6 to E2M1.

    Gives the octave of v, at least 1; the pattern of a sum whose lowest bit is the code's; and the value.
    """
    octave = _float(tl.maximum(_bits(v) & _EXPONENT, 0x3F800000))
    shifted = tl.fma(octave, 6291456.0, v)  # 1.5 * 2^22: the sum stays in its octave whichever sign v has
    return octave, _bits(shifted), tl.fma(octave, -6291456.0, shifted)


@triton.jit
def _code(shifted):
    """Code of a magnitude by its sum, and `_CODES`: steps in the octave, and two for every octave below."""
    return shifted + (shifted >> 22)


@triton.jit
def _e2m1_value(pattern):
    """Value of an E2M1 code in bits 22 to 24, as `_e4m3_value`; bit 31 is its sign."""
    return _float(pattern) * 8.507059173023462e37  # 2^126


@triton.jit
def _subnormal(v):
    """Patterns of FP32 v * 2^-126, rounded down and up: for 0 <= v <= 6 bits 22 to 24 are E2M1's code."""
    if _INTERPRETED:  # which rounds to nearest only
        nearest = v * 1.1754943508222875e-38
        back = nearest * 8.507059173023462e37
        down, up = _bits(nearest) - (back > v), _bits(nearest) + (back < v)
    else:
        down = tl.inline_asm_elementwise("mul.rz.f32 $0, $1, 0f00800000;", "=r,r", [v], tl.int32, True, 1)
        up = tl.inline_asm_elementwise("mul.rp.f32 $0, $1, 0f00800000;", "=r,r", [v], tl.int32, True, 1)
    return down, up


@triton.jit
def _to_bit(v, bit, early, guided):
    """Round to the end of the bracket whose code has the recorded low bit, or to nearest if not `guided`.

    From 2 to 2.25 and from 4 to 4.5 that is the lower end, as the nearest odd magnitude is below the bracket.
    `bit`, `early`: int32, whose bits 22 and 20 are the recorded one, and others anything. Where not guided
    they are 1: even codes then move on behind the middle of their bracket, and odd ones from it on.
    """
    down, up = _subnormal(v)
    early &= (down >> 4) & tl.where(guided, 0x100000, 0)[:, None]
    kept = down + tl.where(guided, 0, 0x200000)[:, None]
    moved = up + tl.where(guided, 0x3FFFFF, 0x1FFFFF)[:, None] - early
    pattern = tl.where(((down ^ bit) & 0x400000) != 0, moved, kept)
    return _e2m1_value(pattern & 0x1C00000)


@triton.jit
def _in_band(beyond, octave, band):
    """Whether values that far from the nearest are near enough to the middle of their bracket."""
    # By half the octave, which is the width of the bracket.
    return 0.5 - tl.abs(beyond) * _float(0x7F800000 - _bits(octave)) <= band


@triton.jit
def _moved(
    v, octave, nearest, record, guided, band, BITS: tl.constexpr, BANDED: tl.constexpr
):  # fmt: skip
    """Give `nearest`, or the other end of the bracket where guidance by 2 or 4 bits takes that.

    `record`: int32, the rollout's low bits or whole codes, below whatever else; v is signed at 4 bits.
    """
    beyond = v - nearest
    if BITS == 2:
        # Of the two magnitudes with these low bits; the middle still belongs to the smaller one.
        low = (record << 22) & 0xC00000
        high = low | 0x1000000
        middle = (_float(low) + _float(high)) * 4.253529586511731e37  # 2^125
        reference = _e2m1_value(tl.where(v > middle, high, low))
    else:
        reference = _e2m1_value(((record << 22) & 0x1C00000) | ((record << 28) & _SIGN))
    # A bracket toward the reference, if that is on v's side of `nearest`.
    width = octave * tl.where(guided, 0.5, 0.0)[:, None]
    step = tl.clamp(reference - nearest, -width, width)
    moves = (_bits(beyond) ^ (_bits(step) & _SIGN)) > 0
    if BANDED:
        moves &= _in_band(beyond, octave, band)
    return nearest + tl.where(moves, step, 0.0)


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
def _places(tile, r, n, NB: tl.constexpr, B: tl.constexpr):
    """Row, block in the row, and whether both are there: of the tile's blocks, [B] each."""
    i = tl.arange(0, B)
    row = tile * (B // NB) + i // NB
    block = tl.program_id(1) * NB + i % NB
    return row, block, (row < r) & (block < n)


@triton.jit
def _below(rows, row_stride, tiles, NB: tl.constexpr, B: tl.constexpr):
    """Rows so many tiles below: what a tile adds to that is then the same for all."""
    return rows + tl.cast(tiles * (B // NB), tl.int64) * row_stride


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
def _fields(values, PER_BYTE: tl.constexpr):
    """Put those of int32 [B, N] 4 bits apart that begin the halves of a byte, those behind, and so on.

    Gives [B, bytes, places in a half]. Four bits hold a code, so nothing is cut off before it is shifted.
    """
    N: tl.constexpr = values.shape[1] // PER_BYTE
    half = tl.arange(0, 2) * 4
    return tl.sum(values.reshape(values.shape[0], N, 2, PER_BYTE // 2) << half[None, None, :, None], 2)


@triton.jit
def _packed(shifted, y, BITS: tl.constexpr):
    """Pack the low `BITS` bits of the codes of sums int32 [B, N] into bytes, u8 [B, N * BITS / 8]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    if BITS == 1:
        fields = _fields(shifted, PER_BYTE) & 0x11
    else:
        fields = _fields(_code(shifted), PER_BYTE) - _CODES * 17
        if BITS == 2:
            fields &= 0x33
        else:
            signs = _fields((_bits(y) >> 28) & 8, PER_BYTE)
            fields = (fields & 0x77) | signs
    i = tl.arange(0, PER_BYTE // 2) * BITS
    return tl.sum(fields << i[None, None, :], 2).to(tl.uint8)


@triton.jit
def _store_block_bits(
    out, out_stride, last, last_stride, tile, r, n, values, NB: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Store the bits of blocks, int32 [B] each, row by row in whole bytes.

    The low `BITS` of them, at most 3, are packed into `out`, the one above into `last`, unless that is None.
    """
    GROUP: tl.constexpr = NB if NB < 8 else 8
    GROUPS: tl.constexpr = values.shape[0] // GROUP
    i = tl.arange(0, GROUP)
    # The bytes of eight blocks in one word: first those of `out`.
    fields = (values & ((1 << BITS) - 1)).reshape(GROUPS, GROUP) << (i * BITS)[None, :]
    if last is not None:
        fields |= ((values >> BITS) & 1).reshape(GROUPS, GROUP) << (8 * BITS + i)[None, :]
    word = tl.sum(fields, 1)
    BYTES: tl.constexpr = triton.next_power_of_2(BITS + 1)
    j = tl.arange(0, GROUP if GROUP > BYTES else BYTES)
    g = tl.arange(0, GROUPS)
    row = (tile * (GROUPS * GROUP // NB) + g // (NB // GROUP))[:, None]
    group = (tl.program_id(1) * (NB // GROUP) + g % (NB // GROUP))[:, None]
    packed = (word[:, None] >> (8 * j)[None, :]).to(tl.uint8)
    if BITS > 0:
        at = group * BITS + j[None, :]
        there = (row < r) & (j < BITS)[None, :] & (at < (n * BITS + 7) // 8)
        tl.store(out + row.to(tl.int64) * out_stride + at, packed, mask=there)
    if last is not None:
        at = group + (j - BITS)[None, :]
        there = (row < r) & (j == BITS)[None, :] & (at < (n + 7) // 8)
        tl.store(last + row.to(tl.int64) * last_stride + at, packed, mask=there)


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
def _values(taken, y, factor, SIGNED: tl.constexpr):
    """Dequantised values of E2M1's FP32 [B, 8], with y's sign if they have none, by factors [B]."""
    if not SIGNED:
        taken = _float(_bits(taken) | (_bits(y) & _SIGN))
    return taken * factor[:, None]


@triton.jit
def _bytes(shifted, y, BITS: tl.constexpr):
    """Codes of sums, one a byte at 8 bits, else packed."""
    if BITS == 8:
        codes = ((_code(shifted) - _CODES) & 7 | (_bits(y) >> 28) & 8).to(tl.uint8)
    else:
        codes = _packed(shifted, y, BITS)
    return codes


@triton.jit
def _store(
    x, values, codes, codes_stride, row, block, there, n, factor,
    y_0, taken_0, shifted_0, y_1, taken_1, shifted_1, SIGNED: tl.constexpr, CODE_BITS: tl.constexpr,
):  # fmt: skip
    """Store what is wanted of blocks: magnitudes FP32 times `factor` [B], and codes; half by half."""
    # Triton 3.6 misplaces some codes of 32-bit blocks that are put together (seen at 2 and 4 guided bits).
    WHOLE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    if values is not None:
        out_0 = _values(taken_0, y_0, factor, SIGNED).to(x.dtype.element_ty)
        out_1 = _values(taken_1, y_1, factor, SIGNED).to(x.dtype.element_ty)
        _put(values, n * 16, row, block, there, out_0, out_1, WHOLE)
    if CODE_BITS > 0:
        bytes_0, bytes_1 = _bytes(shifted_0, y_0, CODE_BITS), _bytes(shifted_1, y_1, CODE_BITS)
        _put(codes, codes_stride, row, block, there, bytes_0, bytes_1, WHOLE)


@triton.jit
def _store_scales(scales, row_stride, row, block, there, codes):
    """Store whole scale codes int32 [B]."""
    tl.store(scales + row.to(tl.int64) * row_stride + block, codes.to(tl.uint8), mask=there)


@triton.jit
def _store_of_blocks(
    scales, scales_stride, zero_bits, zero_stride, tile, row, block, there, r, n, codes,
    SCALE_BITS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Store what is wanted of scale codes int32 [B]: whole, or their low bits; and which are zero."""
    PACKED_BITS: tl.constexpr = SCALE_BITS % 8
    if SCALE_BITS == 8:
        _store_scales(scales, scales_stride, row, block, there, codes)
    if PACKED_BITS > 0 or zero_bits is not None:
        zero = tl.where(codes == 0, 1 << PACKED_BITS, 0)
        bits = tl.where(there, codes & ((1 << PACKED_BITS) - 1) | zero, 0)
        _store_block_bits(
            scales, scales_stride, zero_bits, zero_stride, tile, r, n, bits, NB, PACKED_BITS
        )  # fmt: skip


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
    row, block, there = _places(tl.program_id(0), r, n, NB, B)
    low, high = _halves(x, x_stride, row, block, there)
    up, back, decode = _tensor_scales(up, back, decode, row, there, PER_ROW)
    amax = _amax(low, high, SPLITS)
    _mark(marks, slot, (_bits(amax) >= 0x7F800000) & there, NON_FINITE)
    scale, scale_code = _block_scale(amax, up, ORDER, x.dtype.element_ty)
    factor = _factor(scale, back, ORDER, False)
    SIGNS: tl.constexpr = CODE_BITS % 4 == 0 and CODE_BITS > 0
    y_0, y_1 = _scaled(low, factor, ORDER, SIGNS), _scaled(high, factor, ORDER, SIGNS)
    SIGNED: tl.constexpr = codes is None
    _, shifted_0, nearest_0 = _nearest(_saturated(y_0, SIGNED))
    _, shifted_1, nearest_1 = _nearest(_saturated(y_1, SIGNED))
    _store(
        x, values, codes, codes_stride, row, block, there, n, scale * decode,
        y_0, nearest_0, shifted_0, y_1, nearest_1, shifted_1, SIGNED, CODE_BITS,
    )  # fmt: skip
    _store_of_blocks(
        scales, scales_stride, zero_bits, zero_stride, tl.program_id(0), row, block, there, r, n, scale_code,
        SCALE_BITS, NB,
    )  # fmt: skip


@triton.jit
def _larger(a, b):
    """The larger of both pairs of u16 that a word holds."""
    if _INTERPRETED:
        a, b = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
        pair = tl.maximum(a >> 16, b >> 16) << 16 | tl.maximum(a & 0xFFFF, b & 0xFFFF)
        pair = pair.to(tl.int32, bitcast=True)
    else:
        pair = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    return pair


@triton.jit
def _parities(pairs, step_1, step_2, step_3, step_4, step_5, step_6, step_7):
    """Low bits of the codes of pairs int32 [B, N], as the highest bit of each half.

    A step [B] is the smallest magnitude of its code, in both halves of a word. Each half of `pairs` has its
    highest bit set, so that it alone is lost where the difference is negative, and every code but 0 turns it.
    """
    odd = (pairs - step_1[:, None]) ^ (pairs - step_2[:, None]) ^ (pairs - step_3[:, None])
    odd ^= (pairs - step_4[:, None]) ^ (pairs - step_5[:, None])
    return odd ^ (pairs - step_6[:, None]) ^ (pairs - step_7[:, None])


@triton.jit
def _pairs(x, x_stride, tile, r, n, NB: tl.constexpr, B: tl.constexpr):
    """Both halves int32 [B, 4] of blocks."""
    row, block, there = _places(tile, r, n, NB, B)
    at = x + (row.to(tl.int64) * x_stride + block * 8)[:, None] + tl.arange(0, 4)[None, :]
    low = tl.load(at, mask=there[:, None], other=0)
    high = tl.load(at + 4, mask=there[:, None], other=0)
    return low, high


@triton.jit
def _parity_tile(
    low, high, tile, r, n, up, steps, codes, codes_stride, scales, scales_stride, zero_bits, zero_stride,
    marks, slot, ORDER: tl.constexpr, FLOAT16: tl.constexpr, SCALE_BITS: tl.constexpr, NB: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Pack one tile of `parity_kernel`."""
    DTYPE: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    row, block, there = _places(tile, r, n, NB, B)
    low, high = low | -0x7FFF8000, high | -0x7FFF8000
    a = _larger(low, high).reshape(B, 2, 2)
    a, b = tl.split(a)
    a, b = tl.split(_larger(a, b))
    pair = _larger(a, b)
    pattern = tl.maximum((pair >> 16) & 0x7FFF, pair & 0x7FFF).to(tl.int16)
    amax = _as_float32(pattern.to(DTYPE, bitcast=True))
    _mark(marks, slot, (_bits(amax) >= 0x7F800000) & there, NON_FINITE)
    _, scale_code = _block_scale(amax, up, ORDER, DTYPE)

    entry = steps + ((scale_code & 127) * 8)[:, None] + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.load(entry).reshape(B, 2, 2))
    step_1, step_3 = tl.split(even)
    step_2, step_4 = tl.split(odd)
    even, odd = tl.split(tl.load(entry + 4).reshape(B, 2, 2))
    step_5, step_7 = tl.split(even)
    step_6, _ = tl.split(odd)
    low = _parities(low, step_1, step_2, step_3, step_4, step_5, step_6, step_7)
    high = _parities(high, step_1, step_2, step_3, step_4, step_5, step_6, step_7)
    # The first of each pair two bits apart in the lower half of a word, the second in the higher.
    i = tl.arange(0, 4)[None, :] * 2
    low = (low & -0x7FFF8000).to(tl.uint32, bitcast=True) >> (15 - i)
    high = (high & -0x7FFF8000).to(tl.uint32, bitcast=True) >> (7 - i)
    word = tl.sum((low | high).to(tl.int32, bitcast=True), 1)
    word = word & 0x5555 | word >> 15 & 0xAAAA
    first, second = word.to(tl.uint8)[:, None], (word >> 8).to(tl.uint8)[:, None]
    _put(codes, codes_stride, row, block, there, first, second, True)
    _store_of_blocks(
        scales, scales_stride, zero_bits, zero_stride, tile, row, block, there, r, n, scale_code,
        SCALE_BITS, NB,
    )  # fmt: skip


@triton.jit(do_not_specialize=["r", "slot"])
def parity_kernel(
    x,  # int32 [r, n * 8]: pairs of BF16, or of FP16
    x_stride,
    r,
    n,
    up,
    steps,  # int32 [128, 8]: by scale code
    codes,  # u8 [r, n * 2]: packed
    codes_stride,
    scales,
    scales_stride,
    zero_bits,
    zero_stride,
    marks,
    slot,
    ORDER: tl.constexpr,
    FLOAT16: tl.constexpr,  # else BF16
    SCALE_BITS: tl.constexpr,
    NB: tl.constexpr,
    B: tl.constexpr,
):
    """`quantize_kernel` for one bit of the codes and no values: no value is scaled or rounded.

    Under one tensor scale the scale code decides which 16-bit magnitudes get which code.
    """
    tile = tl.program_id(0)
    low, high = _pairs(x, x_stride, tile, r, n, NB, B)
    for _ in tl.range(tile, tl.cdiv(r, B // NB), tl.num_programs(0), num_stages=1):
        # The next tile's values are on their way while this one's are computed with.
        next_tile = tile + tl.num_programs(0)
        next_low, next_high = _pairs(x, x_stride, next_tile, r, n, NB, B)
        _parity_tile(
            low, high, tile, r, n, up, steps, codes, codes_stride, scales, scales_stride, zero_bits,
            zero_stride, marks, slot, ORDER, FLOAT16, SCALE_BITS, NB, B,
        )  # fmt: skip
        tile, low, high = next_tile, next_low, next_high


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
def _toward(y, packed, guided, band, BITS: tl.constexpr, BANDED: tl.constexpr, CODES: tl.constexpr):
    """Round scaled values FP32 [B, 8] toward records u8 [B, BITS], if any: sums, magnitudes."""
    v = _saturated(y, BITS % 4 == 0)
    octave, shifted, nearest = _nearest(v)
    if BITS > 0:
        i = (tl.arange(0, 8 // BITS) * BITS)[None, None, :]
        packed = packed[:, :, None]
        if BITS == 1:
            packed |= tl.where(guided, 0, 0xFF)[:, None, None]
            taken = _to_bit(
                v, (packed << 22 - i).reshape(y.shape), (packed << 20 - i).reshape(y.shape), guided
            )
            if BANDED:
                taken = tl.where(_in_band(v - nearest, octave, band), taken, nearest)
            nearest = taken
        else:
            record = (packed >> i).reshape(y.shape)
            nearest = _moved(v, octave, nearest, record, guided, band, BITS, BANDED)
    if CODES:
        _, shifted, _ = _nearest(tl.abs(nearest))
    return shifted, nearest


@triton.jit
def _guide(
    x, x_stride, r, n, record, record_stride, low_scales, low_scales_stride, zero_blocks, zero_stride,
    present, present_stride, tile, BITS: tl.constexpr, SCALE_BITS: tl.constexpr, NB: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Load what a tile is computed from: halves, if guided, scales' bits, and codes' bytes by halves."""
    _, block, there = _places(tile, r, n, NB, B)
    row = tl.arange(0, B) // NB
    at = x + (row.to(tl.int64) * x_stride + block * 16)[:, None] + tl.arange(0, 8)[None, :]
    low = tl.load(at, mask=there[:, None])
    high = tl.load(at + 8, mask=there[:, None])
    guided = there
    if present is not None:
        guided &= tl.load(present + row.to(tl.int64) * present_stride, mask=there, other=0) != 0
    if zero_blocks is not None:
        guided &= tl.load(zero_blocks + row.to(tl.int64) * zero_stride + block, mask=there, other=1) == 0
    recorded = tl.zeros([B], tl.int32)
    if SCALE_BITS > 0:
        size = (n * SCALE_BITS + 7) // 8
        recorded = _field(low_scales, low_scales_stride, row, block, size, there, SCALE_BITS)
    BYTES: tl.constexpr = BITS if BITS > 0 else 1
    packed_0, packed_1 = tl.zeros([B, BYTES], tl.int32), tl.zeros([B, BYTES], tl.int32)
    if BITS > 0:
        start = record + row.to(tl.int64) * record_stride + block * (2 * BITS)
        at = start[:, None] + tl.arange(0, BITS)[None, :]
        packed_0 = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
        packed_1 = tl.load(at + BITS, mask=there[:, None], other=0).to(tl.int32)
    return _together(low), _together(high), guided, recorded, packed_0, packed_1


@triton.jit
def _guided_tile(
    low, high, guided, recorded, packed_0, packed_1, x, r, n, up, back, decode, band, values, codes, scales,
    marks, slot, tile, ORDER: tl.constexpr, PER_ROW: tl.constexpr, PLAIN: tl.constexpr,
    GUIDE_BITS: tl.constexpr, GUIDE_SCALE_BITS: tl.constexpr, BANDED: tl.constexpr, NB: tl.constexpr,
    B: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Round one tile of `guided_kernel`."""
    row, block, there = _places(tile, r, n, NB, B)
    low, high = _apart(low, x.dtype.element_ty), _apart(high, x.dtype.element_ty)
    up, back, decode = _tensor_scales(up, back, decode, row, there, PER_ROW)
    amax = _amax(low, high, SPLITS)
    _mark(marks, slot, (_bits(amax) >= 0x7F800000) & there, NON_FINITE)
    scale, scale_code = _block_scale(amax, up, ORDER, x.dtype.element_ty)
    if GUIDE_SCALE_BITS > 0:
        if GUIDE_SCALE_BITS == 8:
            _mark(marks, slot, (recorded > 126) & there, NO_SCALE)
            guided &= recorded > 0
        else:
            recorded = _rebuild(scale_code, recorded, GUIDE_SCALE_BITS)
        scale_code = tl.where(guided, recorded, scale_code)
        scale = _e4m3_value(scale_code)
    else:
        guided &= scale_code > 0

    factor = _factor(scale, back, ORDER, PLAIN)
    if PLAIN:
        # That is 0, as factors are positive: but it keeps ptxas from shifting all bits long before they are
        # needed, for which registers lack.
        nothing = (_bits(factor) >> 31)[:, None]
        packed_0 |= nothing
        packed_1 |= nothing
    CODES: tl.constexpr = codes is not None
    CODE_BITS: tl.constexpr = 8 if CODES else 0
    y_0, y_1 = _scaled(low, factor, ORDER, CODES), _scaled(high, factor, ORDER, CODES)
    shifted_0, taken_0 = _toward(y_0, packed_0, guided, band, GUIDE_BITS, BANDED, CODES)
    shifted_1, taken_1 = _toward(y_1, packed_1, guided, band, GUIDE_BITS, BANDED, CODES)
    row = tl.arange(0, B) // NB
    _store(
        x, values, codes, n * 16, row, block, there, n, scale * decode,
        y_0, taken_0, shifted_0, y_1, taken_1, shifted_1, GUIDE_BITS % 4 == 0 and not CODES, CODE_BITS,
    )  # fmt: skip
    if scales is not None:
        _store_scales(scales, n, row, block, there, scale_code)


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
    PLAIN: tl.constexpr,  # whether `back` is from 2^-100 to 2^100
    GUIDE_BITS: tl.constexpr,  # 0, 1, 2, 4
    GUIDE_SCALE_BITS: tl.constexpr,  # 0, 1, 2, 3, 8
    BANDED: tl.constexpr,
    NB: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Round toward a record: dequantised values, or codes and scales."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    x = _below(x, x_stride, tile, NB, B)
    record = _below(record, record_stride, tile, NB, B)
    low_scales = _below(low_scales, low_scales_stride, tile, NB, B)
    if zero_blocks is not None:
        zero_blocks = _below(zero_blocks, zero_stride, tile, NB, B)
    if present is not None:
        present = _below(present, present_stride, tile, NB, B)
    if values is not None:
        values = _below(values, n * 16, tile, NB, B)
    if codes is not None:
        codes = _below(codes, n * 16, tile, NB, B)
    if scales is not None:
        scales = _below(scales, n, tile, NB, B)
    low, high, guided, recorded, packed_0, packed_1 = _guide(
        x, x_stride, r, n, record, record_stride, low_scales, low_scales_stride, zero_blocks, zero_stride,
        present, present_stride, tile, GUIDE_BITS, GUIDE_SCALE_BITS, NB, B,
    )  # fmt: skip
    for _ in tl.range(tile, tl.cdiv(r, B // NB), tiles, num_stages=1):
        # What the next tile needs is on its way while this one is computed.
        x = _below(x, x_stride, tiles, NB, B)
        record = _below(record, record_stride, tiles, NB, B)
        low_scales = _below(low_scales, low_scales_stride, tiles, NB, B)
        if zero_blocks is not None:
            zero_blocks = _below(zero_blocks, zero_stride, tiles, NB, B)
        if present is not None:
            present = _below(present, present_stride, tiles, NB, B)
        next_low, next_high, next_guided, next_recorded, next_0, next_1 = _guide(
            x, x_stride, r, n, record, record_stride, low_scales, low_scales_stride, zero_blocks, zero_stride,
            present, present_stride, tile + tiles, GUIDE_BITS, GUIDE_SCALE_BITS, NB, B,
        )  # fmt: skip
        _guided_tile(
            low, high, guided, recorded, packed_0, packed_1, x, r, n, up, back, decode, band, values, codes,
            scales, marks, slot, tile, ORDER, PER_ROW, PLAIN, GUIDE_BITS, GUIDE_SCALE_BITS, BANDED, NB, B,
            SPLITS,
        )  # fmt: skip
        if values is not None:
            values = _below(values, n * 16, tiles, NB, B)
        if codes is not None:
            codes = _below(codes, n * 16, tiles, NB, B)
        if scales is not None:
            scales = _below(scales, n, tiles, NB, B)
        low, high, guided, recorded = next_low, next_high, next_guided, next_recorded
        tile, packed_0, packed_1 = tile + tiles, next_0, next_1


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
