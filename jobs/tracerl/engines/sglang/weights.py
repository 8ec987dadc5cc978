"""Weights of an SGLang model: replaced as a whole, and the experts' quantised as the method says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tracerl.api.errors import InputError
from tracerl.api.job import Quantization
from tracerl.api.model import ModelShape
from tracerl.engines.expert_weights import DOWN, GATE_UP, quantise_expert_weights, weights_site
from tracerl.engines.hf import check_weights, hf_shapes
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import NonFiniteError, dequantize


class ModelWeights:
    """What a scheduler does with the weights of its model."""

    def __init__(
        self, shape: ModelShape, method: MethodPlan, quantization: Quantization, expert_layer: type[nn.Module]
    ) -> None:
        """`expert_layer` is SGLang's class of routed experts."""
        self._sizes, self._quantization = hf_shapes(shape), quantization
        self._width = shape.expert_hidden
        self._quantise = method.weights_rollout is not Treatment.UNQUANTIZED
        self._expert_layer = expert_layer

    def load(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take weights by Hugging Face's names; after an InputError the model is as it was."""
        check_weights(self._sizes, tensors, "the new weights")
        # What SGLang pads experts with holds whatever it started with: dummy weights.
        for module in model.modules():
            if isinstance(module, self._expert_layer):
                layer: Any = module
                layer.w13_weight.data.zero_()
                layer.w2_weight.data.zero_()
        model.load_weights(tensors.items())

    @torch.no_grad()
    def quantise_experts(self, model: nn.Module) -> str | None:
        """Replace the experts' matrices by what their codes stand for; give a hash of codes and scales.

        The hash (xxh3, 32 hex digits) is that of `expert_hash`; None where weights stay as they are. Ranks
        hold different rows of gate and up, and different columns of down, so that scales are agreed on.
        """
        if not self._quantise:
            return None
        digest = xxhash.xxh3_128()
        for module in model.modules():
            if not isinstance(module, self._expert_layer):
                continue
            layer: Any = module
            for name, matrix in ((GATE_UP, layer.w13_weight), (DOWN, layer.w2_weight)):
                amax_E = matrix.data.abs().amax(dim=(1, 2)).float()
                if layer.moe_tp_size > 1:
                    torch.distributed.all_reduce(
                        amax_E, torch.distributed.ReduceOp.MAX, group=_tensor_group()
                    )
                site = weights_site(layer.layer_id, name)
                try:
                    quantized = quantise_expert_weights(
                        matrix.data, self._quantization, site=site, amax_E=amax_E
                    )
                except NonFiniteError as error:
                    raise InputError(str(error)) from None
                matrix.data.copy_(dequantize(quantized, matrix.dtype))
                width = self._width // layer.moe_tp_size
                codes, scales = quantized.codes, quantized.scales
                if name == GATE_UP:
                    codes, scales = (_without_padding(part, width) for part in (codes, scales))
                else:
                    codes, scales = (
                        codes[..., :width],
                        scales[..., : scales.shape[-1] * width // codes.shape[-1]],
                    )
                add_to_hash(digest, codes, scales, amax_E)
        return digest.hexdigest()


def _without_padding(part: Tensor, width: int) -> Tensor:
    """Rows of gate and of up without those that SGLang added."""
    return torch.cat([half[:, :width] for half in part.chunk(2, dim=1)], dim=1)


def add_to_hash(digest: xxhash.xxh3_128, codes: Tensor, scales: Tensor, amax_E: Tensor) -> None:
    """Add one matrix of one layer's experts: codes and scales as bytes, then the float32 magnitudes."""
    for part in (codes, scales, amax_E.view(torch.uint8)):
        digest.update(part.contiguous().cpu().numpy().data)


def expert_hash(shape: ModelShape, tensors: Mapping[str, Tensor], quantization: Quantization) -> str:
    """Give the hash that a rollout of one rank has for these exported weights; a trainer may compare."""
    digest = xxhash.xxh3_128()
    for index in shape.moe_layers:
        prefix = f"model.layers.{index}.mlp.experts."
        gate_up = torch.stack(
            [
                torch.cat([tensors[f"{prefix}{e}.{half}_proj.weight"] for half in ("gate", "up")])
                for e in range(shape.experts)
            ]
        )
        down = torch.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in range(shape.experts)])
        for name, matrix in ((GATE_UP, gate_up), (DOWN, down)):
            quantized = quantise_expert_weights(matrix, quantization, site=weights_site(index, name))
            amax_E = matrix.abs().amax(dim=(1, 2)).float()
            add_to_hash(digest, quantized.codes, quantized.scales, amax_E)
    return digest.hexdigest()


def _tensor_group() -> Any:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    return get_parallel().moe_tp_group.device_group
