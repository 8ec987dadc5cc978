"""Every order equals its public package bit for bit: codes, scale bytes, packed bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inputs import K, hard, ordinary
from torch import Tensor

from peers import NVFP4_PEERS, both, comparable, mx_fouroversix, mx_torchao
from tracerl.numerics import (
    MXFP4,
    Order,
    Quantized,
    dequantize,
    pack_bits,
    quantize,
    unpack_bits,
)

ORDERS = list(NVFP4_PEERS)
ROWS = 1200  # 1.2 M values


def assert_equal(x: Tensor, ours: Quantized, theirs: Quantized, order: str) -> Tensor:
    compared = comparable(x, theirs, order)
    blocks = compared.view(len(x), -1, 16).any(-1)
    assert torch.equal(ours.scales[blocks], theirs.scales[blocks])
    assert torch.equal(ours.codes[compared], theirs.codes[compared])
    zero = (theirs.scales == 0).repeat_interleave(16, -1)
    assert (dequantize(ours)[zero] == 0).all()
    assert dequantize(ours).isfinite().all()
    return compared


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "amax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_million_values(order: str, dtype: torch.dtype, fixed: bool) -> None:
    x = ordinary(ROWS, seed=1).to(dtype)
    ours, theirs = both(x, order, fixed)
    compared = assert_equal(x, ours, theirs, order)
    assert compared.sum() > 1_000_000
    if order != "FourOverSix":
        assert compared.all()
        assert torch.equal(pack_bits(ours.codes, 4), pack_bits(theirs.codes, 4))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "amax"])
@pytest.mark.parametrize("order", ORDERS)
def test_hard_blocks(order: str, fixed: bool) -> None:
    kinds = hard()
    if fixed:
        assert_equal(kinds, *both(kinds, order, fixed), order)
    else:
        compared = [assert_equal(x, *both(x, order, fixed), order).any() for x in kinds.unsqueeze(1)]
        assert sum(compared) >= 18


def test_fouroversix_does_not_saturate() -> None:
    """The one place where an order leaves its package: we saturate, as all others and the hardware do."""
    x = torch.full(
        (1, K), 1.49 * 6 * 2.0**-9
    ).bfloat16()  # scale 1.49 * 2^-9 rounds to 2^-9, so values scale to 8.9
    ours, theirs = both(x, "FourOverSix", fixed=True)
    assert (ours.scales == 1).all()
    assert (theirs.scales == 1).all()
    assert (theirs.codes == 8).all(), "fouroversix saturates now: compare it everywhere"
    assert (ours.codes == 7).all()


@pytest.mark.parametrize(("peer", "order"), [(mx_torchao, "TorchAO"), (mx_fouroversix, "FourOverSix")])
def test_mxfp4(peer: Callable[[Tensor], tuple[Tensor, Tensor]], order: str) -> None:
    x = ordinary(ROWS, seed=2)
    packed, scales = peer(x.clone())
    ours = quantize(x, MXFP4, order=Order(order))
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes, unpack_bits(packed, 4, K))
