"""Rebuilding of scales from their low bits, over all pairs of the two sides' codes."""

from __future__ import annotations

import pytest
import torch
from rounding_oracle import rebuilt_scale

from tracerl.numerics import MXFP4, Guide, Quantized, TensorScale, guided_quantize, quantize, rebuild_scales
from tracerl.numerics.blocks import NVFP4

ALL = torch.arange(127, dtype=torch.uint8)
OWN, ROLLOUT = (t.flatten() for t in torch.meshgrid(ALL, ALL, indexing="ij"))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_all_pairs(bits: int) -> None:
    rebuilt = rebuild_scales(OWN, ROLLOUT & (2**bits - 1), bits)
    expected = [[rebuilt_scale(own, low, bits) for low in range(2**bits)] for own in range(127)]
    assert torch.equal(
        rebuilt, torch.tensor(expected, dtype=torch.uint8)[OWN.int(), (ROLLOUT & (2**bits - 1)).int()]
    )

    distance = (OWN.int() - ROLLOUT.int()).abs()
    recorded = ROLLOUT > 0  # scales of zero are recorded apart
    reach = 2 ** (bits - 1)
    assert (rebuilt == ROLLOUT)[recorded & (distance <= reach - 1)].all()
    # Exactly one code farther, the larger of two candidates is taken, so only an own code above is wrong.
    tied = recorded & (distance == reach) & (reach <= OWN) & (126 - reach >= OWN)
    assert torch.equal((rebuilt == ROLLOUT)[tied], (ROLLOUT > OWN)[tied])
    # Beyond, wrong without a sign, but for the ends of the range where there is no other candidate.
    inside = (2**bits < OWN) & (126 - 2**bits > OWN)
    assert not (rebuilt == ROLLOUT)[recorded & (distance > reach) & inside].any()
    assert (rebuilt > 0).all()
    assert (rebuilt < 127).all()


def test_whole_and_no_bits() -> None:
    assert torch.equal(rebuild_scales(OWN, ROLLOUT, 8), ROLLOUT)
    assert torch.equal(rebuild_scales(OWN, ROLLOUT, 0), OWN)
    with pytest.raises(ValueError, match="of layer 3 holds a whole block scale that is no finite number"):
        rebuild_scales(OWN[:1], torch.tensor([127], dtype=torch.uint8), 8, site="layer 3")


def test_mx_scales_have_no_zero() -> None:
    own = torch.arange(255, dtype=torch.uint8)
    for shift in range(-3, 4):
        rollout = (own.int() + shift).clamp(0, 254).to(torch.uint8)
        assert torch.equal(rebuild_scales(own, rollout & 7, 3, MXFP4), rollout)


@pytest.mark.parametrize("scale_bits", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("code_bits", [0, 1, 2, 4])
def test_a_zero_block_gives_no_guidance(code_bits: int, scale_bits: int) -> None:
    """All pairs again, end to end: a rollout scale of zero leaves the trainer's own scale and rounding."""
    x = torch.linspace(-1, 1, 16) * 6 * NVFP4.scale.decode(ALL).unsqueeze(-1)
    own = quantize(x)
    assert torch.equal(own.scales.flatten(), ALL)
    rollout = Quantized(torch.full_like(own.codes, 5), torch.zeros_like(own.scales), TensorScale.one(), NVFP4)
    guided = guided_quantize(x, Guide.of(rollout, code_bits, scale_bits))
    assert torch.equal(guided.codes, own.codes)
    assert torch.equal(guided.scales, own.scales)


def test_scales_end_to_end() -> None:
    x = torch.linspace(-1, 1, 16) * 6 * NVFP4.scale.decode(OWN[OWN > 0]).unsqueeze(-1)
    rollout = Quantized(
        torch.zeros(len(x), 16, dtype=torch.uint8), ROLLOUT[OWN > 0].unsqueeze(-1), TensorScale.one(), NVFP4
    )
    recorded = rollout.scales > 0
    guided = guided_quantize(x, Guide.of(rollout, 1, 3))
    assert torch.equal(
        guided.scales[recorded], rebuild_scales(OWN[OWN > 0], ROLLOUT[OWN > 0] & 7, 3)[recorded[:, 0]]
    )
