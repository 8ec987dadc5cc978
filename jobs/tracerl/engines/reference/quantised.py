"""Four-bit emulation in the reference model: the treatments of `engines.guided` as its hooks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracerl.api.job import Quantization
from tracerl.api.model import ModelShape
from tracerl.engines.expert_weights import DOWN, GATE_UP, fake_quantise_expert_weights, weights_site
from tracerl.engines.guided import Treatments
from tracerl.engines.reference.model import Layer, MoEModel, PlainHooks
from tracerl.methods import Treatment
from tracerl.records.sites import SiteKind


@torch.no_grad()
def quantise_experts(model: MoEModel, treatment: Treatment, quantization: Quantization) -> None:
    """Replace the experts' matrices, as they were exported, by what their FP4 codes stand for.

    Raises `NonFiniteError` naming layer and matrix.
    """
    if treatment is Treatment.UNQUANTIZED:
        return
    for index, module in enumerate(model.layers):
        layer: Layer = module  # type: ignore[assignment]
        for name, weight_Erc in ((GATE_UP, layer.gate_up), (DOWN, layer.down)):
            site = weights_site(index, name)
            weight_Erc.copy_(fake_quantise_expert_weights(weight_Erc, quantization, site=site))


class TrainerHooks(PlainHooks):
    """The treatments of one forward pass over one micro-batch, whose rows are the model's."""

    def __init__(self, shape: ModelShape, treatments: Treatments) -> None:
        super().__init__(shape)
        self._treatments = treatments
        layers = range(shape.layers)
        self._fc2 = treatments.touches(SiteKind.FC2_INPUT, layers)

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        """Recorded experts (R3) where there is a record, the live router's elsewhere."""
        live = super().routes
        return self._treatments.routes(layer, lambda: live(layer, logits))

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Treat the routed experts' input."""
        return self._treatments.treat(layer, SiteKind.EXPERT_INPUT, x)

    def key(self, layer: int, k: Tensor) -> Tensor:
        """Treat keys."""
        return self._treatments.treat(layer, SiteKind.KEY, k)

    def value(self, layer: int, v: Tensor) -> Tensor:
        """Treat values."""
        return self._treatments.treat(layer, SiteKind.VALUE, v)

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Treat the experts' second input, where the method does anything with it."""
        return self._treat_fc2 if self._fc2 else None

    def _treat_fc2(self, layer: int, x: Tensor) -> Tensor:
        return self._treatments.treat(layer, SiteKind.FC2_INPUT, x)
