"""The seams in Megatron-Core's layers: subclasses that hand the values of a site to the job's treatments.

A `Seat` belongs to a model; `passes` puts what goes through it there, with its treatments. Without any
(warm-up) the layers compute as Megatron's do, but for the place of the gate: it weighs the experts' output,
as in the rollout, so that the input of their second matrix is the value that the rollout quantises.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tracerl.engines.guided import Treatments
from tracerl.engines.megatron.dispatch import Arrivals
from tracerl.engines.megatron.slicing import Held
from tracerl.numerics import NVFP4, NonFiniteError
from tracerl.records.sites import SiteKind


@dataclass(frozen=True)
class Piece:
    """Trajectories that go through the layers at once: where their rows are, and what is done to them."""

    treatments: Treatments | None
    """None in a warm-up."""
    sequence: Held
    """Rows whose residual stream is here: those of ExpertInput, Routes and FC2Input."""
    attended: Held
    """Rows whose keys and values are here."""
    fc2_treated: bool
    fc2_audited: bool
    """Whether whole codes of second inputs are known, on any rank of the group."""
    pass_mask: Tensor | None
    """bool [B, 1, S, 2 * S], where rows attend keys of their own pass exactly; None: all keys quantised."""


@dataclass
class Seat:
    """The forward pass that a model is in."""

    unit: dist.ProcessGroup | None = None
    """Ranks that do it together; None: this one alone."""
    experts: dist.ProcessGroup | None = None
    """Those of them whose experts compute each other's tokens; None for a rank that holds all experts."""
    context: dist.ProcessGroup | None = None
    """Those of them that hold other rows of the same trajectories; None for a rank that holds all rows."""
    piece: Piece | None = None
    """What is in the layers, also in a backward pass that computes them again."""
    failure: NonFiniteError | None = None
    """Why the pass failed on this rank, when others are in it."""

    def treat(self, layer: int, kind: SiteKind, x_SBW: Tensor) -> Tensor:
        """Treat the values of a site, [positions, B, width]."""
        piece = self.piece
        if piece is None or piece.treatments is None:
            return x_SBW
        held = piece.attended if kind in {SiteKind.KEY, SiteKind.VALUE} else piece.sequence
        treated = x_PW = x_SBW.reshape(held.size, -1)
        with self._together():
            rows = piece.treatments.treat(layer, kind, held.take(x_PW), held.rows)
            treated = held.put(x_PW, rows)
        return treated.view(x_SBW.shape)

    def treat_pairs(self, layer: int, inner_MF: Tensor, ids_PK: Tensor, experts: range) -> Tensor:
        """Treat second inputs of the (token, slot) pairs of this rank's `experts`, in their order.

        `ids_PK` int64 are the experts of the tokens that this rank has.
        """
        piece = self.piece
        if piece is None or piece.treatments is None or not piece.fc2_treated:
            return inner_MF
        treatments, held = piece.treatments, piece.sequence
        recorded = treatments.recorded(layer, SiteKind.FC2_INPUT, held.rows)
        width = inner_MF.shape[1]
        arrivals = Arrivals(held, ids_PK, experts, self.experts, width, width // NVFP4.block)
        here = arrivals.records(recorded, audited=piece.fc2_audited)
        treated = inner_MF
        with self._together():
            treated = treatments.apply(layer, SiteKind.FC2_INPUT, inner_MF, here)
        return treated

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Let a pass with other ranks go on after a value was not finite: they wait for this one in it."""
        try:
            yield
        except NonFiniteError as error:
            if self.unit is None:
                raise
            self.failure = self.failure or error

    def routes(self, layer: int, live: Callable[[], Tensor]) -> Tensor:
        """Expert ids int64 [positions * B, top_k]."""
        piece = self.piece
        if piece is None or piece.treatments is None:
            return live()
        held = piece.sequence
        ids_nK = piece.treatments.routes(layer, lambda: held.take(live()), held.rows)
        # Tokens that pad go anywhere: nothing that counts sees them.
        padding_PK = torch.arange(ids_nK.shape[1], device=ids_nK.device).expand(held.size, -1)
        return held.put(padding_PK, ids_nK)


class GuidedAttention(DotProductAttention):  # type: ignore[misc]
    """Core attention that treats keys, after norm and rotation, and values.

    Context-parallel ranks show each other their treated keys and values, so that each attends all rows before
    its own; the mask that a pass brings has its columns in the order of the ranks.
    """

    seat: Seat

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # Megatron's refuses context parallelism, which is this class's own part.
        config = copy.copy(config)
        config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Treat key and value, [positions, B, kv heads here, head_dim], then attend."""
        layer = self.layer_number - 1
        flat, exact = (*key.shape[:2], -1), (key, value)
        key = self.seat.treat(layer, SiteKind.KEY, key.reshape(flat)).view(key.shape)
        value = self.seat.treat(layer, SiteKind.VALUE, value.reshape(flat)).view(value.shape)
        context = self.seat.context
        if context is not None:
            key, value = (gather_from_sequence_parallel_region(x, group=context) for x in (key, value))
        piece = self.seat.piece
        if piece is not None and piece.pass_mask is not None:
            key, value = torch.cat([key, exact[0]]), torch.cat([value, exact[1]])
            attention_mask = piece.pass_mask
        out: Tensor = super().forward(query, key, value, attention_mask, *args, **kwargs)
        return out


class GuidedMoE(MoELayer):  # type: ignore[misc]
    """MoE layer that treats the experts' input once a token, before it is dispatched."""

    seat: Seat

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Treat [positions, B, hidden]; router and shared experts have the value as it was."""
        treated = self.seat.treat(self.layer_number - 1, SiteKind.EXPERT_INPUT, hidden_states)
        out: tuple[Tensor, Tensor] = super().preprocess(treated, probs, routing_map)
        return out

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Round the sum over experts once, to the dtype of the model."""
        out: Tensor = super().postprocess(output.to(self.config.params_dtype), shared_expert_output)
        return out


class GuidedExperts(SequentialMLP):  # type: ignore[misc]
    """Experts whose second input is treated, and whose outputs are weighed and summed in the gates' FP32."""

    seat: Seat
    router: nn.Module
    layer_number: int
    held: range
    """Experts of this rank."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Experts of tokens [M, hidden], in the order of experts; gives [M, hidden] in float32."""
        counts = tokens_per_expert.tolist()
        inner = []
        for expert, x in zip(
            self.local_experts, torch.split(permuted_local_hidden_states, counts), strict=True
        ):
            gate_up, _ = expert.linear_fc1(x)
            gate, up = gate_up.chunk(2, dim=-1)
            inner.append(self.config.activation_func(gate) * up)
        replay: RecordedRoutes = self.router.router_replay  # type: ignore[assignment]
        assert replay.chosen is not None, "the router runs before the experts"
        inner_MF = self.seat.treat_pairs(self.layer_number - 1, torch.cat(inner), replay.chosen, self.held)
        outputs = [
            expert.linear_fc2(x)[0]
            for expert, x in zip(self.local_experts, torch.split(inner_MF, counts), strict=True)
        ]
        return torch.cat(outputs) * permuted_probs.unsqueeze(-1), None


class RecordedRoutes(RouterReplay):  # type: ignore[misc]
    """Router replay (R3) from records, row by row; rows without one use the live router.

    Looked up and never used up, so activation recompute finds the same. It is not in Megatron's global list
    of instances, which would mix the models of a process.
    """

    def __init__(self, layer: int, seat: Seat) -> None:
        self._layer, self._seat = layer, seat
        self.chosen: Tensor | None = None
        """int64 [tokens, top_k] of the last pass."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Give scores and ids [tokens, top_k] of the experts; gradients reach the scores."""
        assert default_compute_topk is not None
        compute = default_compute_topk

        def live() -> Tensor:
            ids = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            # Most probable first, as slots are recorded; 0.19.2 leaves them unsorted without gradients.
            order = scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
            return ids.gather(1, order)

        self.chosen = self._seat.routes(self._layer, live)
        return scores.gather(1, self.chosen), self.chosen


class Norm(nn.RMSNorm):
    """RMS norm of a part of the rows (sequence parallelism), which Megatron's wrapper of it refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron sums the gradients of what carries this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(experts: int, layers: int) -> TransformerBlockSubmodules:
    """Give `layers` Qwen3-MoE layers of Megatron's own spec, from its local modules, with the seams in it."""
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    parts = spec.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = _with_class(attention.core_attention, DotProductAttention, GuidedAttention)
    parts.mlp = _with_class(parts.mlp, MoELayer, GuidedMoE)
    moe = parts.mlp.submodules if isinstance(parts.mlp, ModuleSpec) else parts.mlp.keywords["submodules"]
    moe.experts = _with_class(moe.experts, SequentialMLP, GuidedExperts)
    for owner, name in (
        (parts, "input_layernorm"),
        (parts, "pre_mlp_layernorm"),
        (attention, "q_layernorm"),
        (attention, "k_layernorm"),
    ):
        setattr(owner, name, _with_class(getattr(owner, name), WrappedTorchNorm, Norm))
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


def attach(model: nn.Module, seat: Seat) -> None:
    """Give every seam of a model its seat, and every router its replay."""
    found = 0
    for module in model.modules():
        if isinstance(module, GuidedAttention):
            module.seat = seat
            found += 1
        elif isinstance(module, GuidedMoE):
            module.seat = seat
            module.router.router_replay = RecordedRoutes(module.layer_number - 1, seat)
            experts: GuidedExperts = module.experts
            experts.seat, experts.layer_number = seat, module.layer_number
            first, last = module.local_expert_indices[0], module.local_expert_indices[-1]
            experts.held = range(first, last + 1)
            # Not as a submodule: its parameters are the layer's.
            object.__setattr__(experts, "router", module.router)
            found += 1
    assert found, "the layer spec did not take"


def _with_class(spec: Any, expected: type, cls: type) -> Any:
    """Swap the class of a part of a spec: a ModuleSpec (0.16.1), a partial (0.19.2) or the class itself."""
    if isinstance(spec, ModuleSpec):
        assert spec.module is expected, f"Megatron-Core builds {spec.module} where {expected} is tested"
        return replace(spec, module=cls)
    if isinstance(spec, functools.partial):
        assert spec.func is expected, f"Megatron-Core builds {spec.func} where {expected} is tested"
        return functools.partial(cls, *spec.args, **spec.keywords)
    assert spec is expected, f"Megatron-Core builds {spec} where {expected} is tested"
    return cls
