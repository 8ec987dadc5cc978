"""Names, sizes and initial values of weights that engines share."""

import pytest
import torch

from tracerl.api.errors import InputError
from tracerl.api.job import Quantization
from tracerl.api.model import BUILTIN_MODELS
from tracerl.engines.expert_weights import fake_quantise_expert_weights, quantise_expert_weights
from tracerl.engines.hf import check_weights, hf_shapes, initial_weights
from tracerl.engines.reference.model import MoEModel
from tracerl.engines.reference.weights import hf_views
from tracerl.numerics import dequantize

TINY = BUILTIN_MODELS["tiny-moe"]


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_reference_models_tensors(tied):
    shape = TINY.model_copy(update={"tie_embeddings": tied})
    parameters = {name: p.detach() for name, p in MoEModel(shape).named_parameters()}
    views = hf_views(shape, parameters)
    assert hf_shapes(shape) == {name: tuple(view.shape) for name, view in views.items()}
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in parameters.values())


def test_initial_values_depend_on_the_seed_alone():
    first, again, other = (dict(initial_weights(TINY, seed)) for seed in (1, 1, 2))
    assert set(first) == set(hf_shapes(TINY))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert tensor.ndim == 1 or not torch.equal(tensor, other[name])
    check_weights(hf_shapes(TINY), first, "the weights")
    spread = first["model.layers.0.mlp.gate.weight"].std() * TINY.hidden**0.5
    assert spread == pytest.approx(1, abs=0.1)


def test_what_is_not_all_weights_is_one_sentence():
    weights = dict(initial_weights(TINY, 1))
    norm = "model.norm.weight"
    for change, sentence in (
        ({"model.more.weight": torch.ones(1)}, r"has no tensor model\.more\.weight"),
        ({norm: torch.ones(3)}, r"has shape \[3\], but .* \[96\]"),
        ({norm: torch.ones(96, dtype=torch.int64)}, "holds int64"),
        ({norm: torch.full((96,), torch.nan)}, "holds NaN or Inf"),
    ):
        with pytest.raises(InputError, match=f"^the file: .*{sentence}"):
            check_weights(hf_shapes(TINY), weights | change, "the file")
    del weights[norm], weights["lm_head.weight"]
    with pytest.raises(InputError, match=r"model\.norm\.weight and 1 more is missing"):
        check_weights(hf_shapes(TINY), weights, "the file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_quantised_one_by_one(dtype):
    """Whatever lies beside them; a part of a matrix needs the largest magnitude of the whole."""
    weights = (torch.randn(3, 32, 64) * torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)).to(dtype)
    weights[:, 31, 5] = weights.abs().amax(dim=(1, 2)) * 1.5
    how = {"quantization": Quantization(), "site": "experts"}
    q = quantise_expert_weights(weights, **how)
    assert torch.equal(fake_quantise_expert_weights(weights, **how), dequantize(q, dtype))
    for expert in range(3):
        alone = quantise_expert_weights(weights[expert : expert + 1], **how)
        assert torch.equal(alone.codes[0], q.codes[expert])
        assert torch.equal(alone.scales[0], q.scales[expert])
    half = quantise_expert_weights(weights[:, :16], amax_E=weights.abs().amax(dim=(1, 2)).float(), **how)
    assert torch.equal(half.codes, q.codes[:, :16])
    assert torch.equal(half.scales, q.scales[:, :16])
    assert not torch.equal(quantise_expert_weights(weights[:, :16], **how).scales, half.scales)
