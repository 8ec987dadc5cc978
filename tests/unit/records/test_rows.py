"""Packing of one site's rows, against Python integers as bit strings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.numerics import NVFP4, Quantized, TensorScale, quantize
from tracerl.records.rows import (
    impossible,
    pack_routes,
    pack_rows,
    pack_starts,
    unpack_routes,
    unpack_starts,
)
from tracerl.records.sites import Site, SiteKind, SiteTable


def make_site(dim: int, code_bits: int, scale_bits: int, tensor_scale: str = "Fixed") -> Site:
    return Site(
        layer=0,
        kind=SiteKind.EXPERT_INPUT,
        dim=dim,
        groups=1,
        format="NVFP4",
        block=16,
        code_bits=code_bits,
        scale_bits=scale_bits,
        tensor_scale=tensor_scale,
        tensor_scale_value=1.0,
        tensor_scale_convention="encode",
    )


def routes(experts: int, top_k: int) -> Site:
    width = "U8" if experts <= 256 else "U16"
    return Site(layer=0, kind=SiteKind.ROUTES, dim=top_k, groups=1, format=width, experts=experts)


def bit_string(values: list[int], bits: int) -> bytes:
    number = sum((value & ((1 << bits) - 1)) << (i * bits) for i, value in enumerate(values))
    return number.to_bytes((len(values) * bits + 7) // 8, "little")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([0, 1, 2, 3, 8]),
    st.integers(0, 2**32 - 1),
)
def test_rows_are_low_code_bits_then_low_scale_bits(
    blocks: int, n: int, code_bits: int, scale_bits: int, seed: int
) -> None:
    site = make_site(blocks * 16, code_bits, scale_bits)
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, site.dim), generator=rng, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, blocks), generator=rng, dtype=torch.uint8)
    scales[torch.rand((n, blocks), generator=rng) < 0.2] = 0
    rows, zero = pack_rows(site, Quantized(codes, scales, TensorScale.one(), NVFP4))
    wanted = [
        bit_string(c, code_bits) + bit_string(s, scale_bits)
        for c, s in zip(codes.tolist(), scales.tolist(), strict=True)
    ]
    assert rows.shape == (n, site.row_bytes)
    assert [bytes(row) for row in rows.tolist()] == wanted
    assert zero.tolist() == [
        [r, b] for r, row in enumerate(scales.tolist()) for b, s in enumerate(row) if s == 0
    ]


def test_a_real_quantised_tensor_with_a_zero_block() -> None:
    x = torch.linspace(-3, 3, 64).reshape(2, 32)
    x[1, 16:] = 0
    quantized = quantize(x)
    rows, zero = pack_rows(make_site(32, 4, 8), quantized)
    assert zero.tolist() == [[1, 1]]
    assert bytes(rows[0].tolist()) == bit_string(quantized.codes[0].tolist(), 4) + bytes(
        quantized.scales[0].tolist()
    )


def test_per_token_tensor_scale_ends_the_row() -> None:
    scale = torch.tensor([[0.5], [2.0], [3.25]])
    quantized = quantize(torch.randn(3, 16, generator=torch.Generator().manual_seed(1)))
    quantized = Quantized(quantized.codes, quantized.scales, TensorScale(scale, "encode"), NVFP4)
    site = make_site(16, 1, 3, "PerToken")
    rows, _ = pack_rows(site, quantized)
    assert site.row_bytes == 2 + 1 + 4
    assert np.frombuffer(rows[:, 3:].numpy().tobytes(), "<f4").tolist() == [0.5, 2.0, 3.25]


def test_shapes_that_are_not_the_sites_are_refused() -> None:
    quantized = quantize(torch.ones(2, 32))
    with pytest.raises(ValueError, match=r"layer 0 ExpertInput takes codes \[n, 16\]"):
        pack_rows(make_site(16, 1, 3), quantized)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 255, 256, 257, 300, 65_536]), st.integers(1, 8), st.integers(0, 5), st.data())
def test_routes_come_back(experts: int, top_k: int, n: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k)
    ids = torch.tensor(data.draw(st.lists(row, min_size=n, max_size=n)), dtype=torch.int64).reshape(n, top_k)
    site = routes(experts, top_k)
    rows = pack_routes(site, ids)
    dtype = "u1" if experts <= 256 else "<u2"
    assert rows.numpy().tobytes() == ids.numpy().astype(dtype).tobytes()
    assert torch.equal(unpack_routes(site, rows), ids)
    assert unpack_routes(site, rows.unsqueeze(0)).shape == (1, n, top_k)
    assert not impossible(SiteTable((site,)), rows.numpy()).any()


@pytest.mark.parametrize("ids", [[[0, 8]], [[-1, 0]]])
def test_impossible_expert_ids_are_refused(ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.7"):
        pack_routes(routes(8, 2), torch.tensor(ids))


def possible(site: Site, rows: np.ndarray) -> list[bool]:
    """Whether each row is possible, alone and behind the rows of another layer, which are all possible."""
    alone = impossible(SiteTable((site,)), rows)
    other = replace(site, layer=site.layer + 1)
    both = impossible(SiteTable((site, other)), np.concatenate([np.repeat(rows[:1], len(rows), 0), rows], 1))
    assert both[:, 1].tolist() == alone[:, 0].tolist()
    assert not both[:, 0].any()
    return [not wrong for wrong in alone[:, 0].tolist()]


def test_impossible_rows_are_recognised() -> None:
    assert possible(routes(8, 2), np.array([[7, 0], [0, 8]], np.uint8)) == [True, False]
    two_bytes = np.array([[299, 1], [300, 0]], "<u2").view(np.uint8)
    assert possible(routes(300, 2), two_bytes) == [True, False]
    assert possible(routes(256, 2), np.full((1, 2), 255, np.uint8)) == [True]
    assert possible(STARTS, np.array([[0, 0, 0, 0x7F], [0, 0, 0, 0x80]], np.uint8)) == [True, False]


STARTS = Site(layer=0, kind=SiteKind.EXACT_FROM, dim=1, groups=1, format="U32")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_positions_come_back_and_are_little_endian(starts: list[int]) -> None:
    rows = pack_starts(STARTS, torch.tensor(starts, dtype=torch.int64).view(-1, 1))
    assert rows.numpy().tobytes() == np.array(starts, "<u4").tobytes()
    assert unpack_starts(rows).tolist() == starts


@pytest.mark.parametrize("starts", [[[-1]], [[2**31]], [[1, 2]]])
def test_what_is_no_position_is_refused(starts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="layer 0 ExactFrom"):
        pack_starts(STARTS, torch.tensor(starts))
    codes = np.zeros((4, 8), np.uint8)
    scales = np.array([[0x7E], [0x7F], [0x80], [0]], np.uint8)  # largest, NaN, negative, zero
    assert possible(make_site(16, 4, 8), np.concatenate([codes, scales], 1)) == [True, False, False, True]
    values = np.array([[1.0], [0.0], [-1.0], [np.nan], [np.inf]], "<f4").view(np.uint8)
    per_token = np.concatenate([np.zeros((5, 3), np.uint8), values], 1)
    assert possible(make_site(16, 1, 3, "PerToken"), per_token) == [True, False, False, False, False]
