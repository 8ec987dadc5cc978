"""Packing against Python's big integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.numerics import pack_bits, unpack_bits

WIDTHS = [0, 1, 2, 3, 4, 8]


def packed_by_hand(values: list[int], bits: int) -> list[int]:
    """A row as one little-endian integer with value i at bit i * bits."""
    number = sum((v % 2**bits) << (i * bits) for i, v in enumerate(values))
    return list(number.to_bytes(-(-len(values) * bits // 8), "little"))


@given(st.lists(st.lists(st.integers(0, 255), min_size=21, max_size=21), max_size=3), st.integers(0, 21))
@settings(deadline=None)  # a busy machine is not slow code
def test_rows_of_any_length(rows: list[list[int]], n: int) -> None:
    values = torch.tensor([row[:n] for row in rows], dtype=torch.uint8).reshape(len(rows), n)
    for bits in WIDTHS:
        packed = pack_bits(values, bits)
        assert packed.tolist() == [packed_by_hand(row[:n], bits) for row in rows]
        assert torch.equal(unpack_bits(packed, bits, n), values & (2**bits - 1))


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_byte_and_place(bits: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(8, 1)
    for i in range(8):
        values[i] = values[i].roll(i)
    packed = pack_bits(values.view(2, 4, 256), bits)
    assert packed.view(8, -1).tolist() == [packed_by_hand(row, bits) for row in values.tolist()]
    assert torch.equal(unpack_bits(packed, bits, 256), values.view(2, 4, 256) & (2**bits - 1))


def test_the_documented_layout() -> None:
    assert pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [1, 1]
    assert pack_bits(torch.tensor([0x3, 0xA], dtype=torch.uint8), 4).tolist() == [0xA3]


@pytest.mark.parametrize("bits", WIDTHS)
def test_views_into_larger_tensors(bits: int) -> None:
    values = torch.randint(0, 256, (6, 50), dtype=torch.uint8)
    for view in (values[1:, 3:], values[:, ::2], values.T, values.view(-1)[1:25]):
        packed = pack_bits(view, bits)
        assert torch.equal(packed, pack_bits(view.clone(), bits))
        row = torch.empty(*packed.shape[:-1], packed.shape[-1] + 3, dtype=torch.uint8)
        row[..., 3:] = packed
        assert torch.equal(unpack_bits(row[..., 3:], bits, view.shape[-1]), view & (2**bits - 1))


def test_errors_say_what_was_given() -> None:
    with pytest.raises(ValueError, match="9 values of 3 bits are 4 bytes a row; 3 were given"):
        unpack_bits(torch.zeros(2, 3, dtype=torch.uint8), 3, 9)
    with pytest.raises(ValueError, match="5 bits"):
        pack_bits(torch.zeros(2, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        pack_bits(torch.zeros(2, dtype=torch.int64), 1)
