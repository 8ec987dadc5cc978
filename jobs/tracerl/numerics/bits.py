"""Packing of the low bits of codes, a word of values at a time.

Value i of a row occupies bits i*bits to i*bits + bits-1 of the row's little-endian bit string: at one bit,
value 0 is the lowest bit of byte 0; at four bits, even values are low nibbles. Rows are padded with zeros to
whole bytes.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTHS = (0, 1, 2, 3, 4, 8)


def packed_size(n: int, bits: int) -> int:
    """Give the bytes of a row of n packed values."""
    return -(-n * bits // 8)


def _fields(lanes: int, bits: int) -> int:
    """Give the mask of the low `lanes * bits` bits of every `lanes` bytes of a word."""
    return sum(((1 << lanes * bits) - 1) << start for start in range(0, 64, 8 * lanes))


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack the low bits of each value.

    Args:
        values: u8 [..., n]; bits above the lowest `bits` are dropped.
        bits: 0, 1, 2, 3, 4 or 8.

    Returns:
        u8 [..., ceil(n * bits / 8)].
    """
    check_width(values, bits)
    n = values.shape[-1]
    if values.is_cuda and bits != 8:
        from tracerl.numerics import triton  # noqa: PLC0415  of no use without a GPU

        return triton.pack_bits(values, bits)
    if bits in (0, 8) or values.numel() == 0:
        return values[..., : packed_size(n, bits)]
    values = pad(values, (0, -n % 8)) if n % 8 else values.contiguous()
    words = (values.clone() if values.storage_offset() % 8 else values).view(torch.int64) & _fields(1, bits)
    for factor, mask in _GATHER[bits]:
        words.mul_(factor)
        if mask:
            words.bitwise_and_(mask)
    packed = words.view(torch.uint8).view(*words.shape, 8)[..., 8 - bits :].flatten(-2)
    return packed[..., : packed_size(n, bits)]


def _gather(bits: int) -> list[tuple[int, int]]:
    """Give factors, and masks after them, that bring the low bits of 8 bytes together in the highest bytes.

    A product with 2^s + 1 puts a field s bits higher, where it ends at its neighbour, and keeps that one in
    its place; the mask leaves both together. The terms of a product never overlap, so nothing is carried.
    """
    if bits == 1:  # the sum of shifts by 7, 14, … 56: bit 8 j ends up at 56 + j, and no other one above 55
        return [(0x0102_0408_1020_4080, 0)]
    steps, start = [], 0
    for lanes in (1, 2, 4):
        shift = lanes * (8 - bits)
        start += shift
        steps.append(((1 << shift) + 1, _fields(2 * lanes, bits) << start))
    factor, _ = steps.pop()
    return [*steps, (factor << 8 - bits, 0)]


_GATHER = {bits: _gather(bits) for bits in (1, 2, 3, 4)}


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Undo `pack_bits`.

    Args:
        packed: u8 [..., ceil(n * bits / 8)].
        bits: 0, 1, 2, 3, 4 or 8.
        n: values of a row.

    Returns:
        u8 [..., n], values below 2^bits; zeros at 0 bits.

    Raises:
        ValueError: `packed` has another number of bytes a row.
    """
    check_packed(packed, bits, n)
    if bits == 8:
        return packed
    if packed.is_cuda:
        from tracerl.numerics import triton  # noqa: PLC0415  of no use without a GPU

        return triton.unpack_bits(packed, bits, n)
    if bits == 0 or packed.numel() == 0:
        return packed.new_zeros(*packed.shape[:-1], n)
    together, _ = _UNITS[bits]
    if together > 1:
        packed = pad(packed, (0, -packed.shape[-1] % together))
    index = packed.int().reshape(*packed.shape[:-1], packed.shape[-1] // together, together)
    if together > 1:
        index += 256 * torch.arange(together, dtype=torch.int32, device=packed.device)
    words = _words_by_byte(bits, packed.device).index_select(0, index.flatten()).view(index.shape)
    word = words.sum(-1) if together > 1 else words.squeeze(-1)  # of disjoint bits
    return word.view(torch.uint8)[..., :n]


_UNITS = {1: (1, torch.int64), 2: (1, torch.int32), 3: (3, torch.int64), 4: (1, torch.int16)}
"""By width: bytes that hold whole values, and the word that holds these values one a byte."""


@cache
def _words_by_byte(bits: int, device: torch.device) -> Tensor:
    """Give what byte j of a unit adds to the unit's word when its value is v, at index 256 j + v."""
    together, dtype = _UNITS[bits]
    words = [0] * (256 * together)
    for j, v, bit in product(range(together), range(256), range(8)):
        value, place = divmod(8 * j + bit, bits)
        words[256 * j + v] |= (v >> bit & 1) << (8 * value + place)
    return torch.tensor(words, dtype=dtype, device=device)


def check_packed(packed: Tensor, bits: int, n: int) -> None:
    """Raise ValueError when `packed` is not what `pack_bits` makes of rows of n values."""
    check_width(packed, bits)
    if packed.shape[-1] != packed_size(n, bits):
        raise ValueError(
            f"{n} values of {bits} bits are {packed_size(n, bits)} bytes a row; {packed.shape[-1]} were given"
        )


def check_width(values: Tensor, bits: int) -> None:
    """Raise ValueError when values are no bytes or no such width is packed."""
    if values.dtype != torch.uint8 or bits not in WIDTHS:
        raise ValueError(f"{values.dtype} cannot be packed to {bits} bits; give uint8 and one of {WIDTHS}")
