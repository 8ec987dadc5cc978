"""Four-bit emulation in the trainer's forward pass: which treatment each site gets, and from which record.

`MicroBatch` holds a batch and its records in the model's own row order, `TrainerHooks` applies the plan of
the job's method to one forward pass. `quantise_experts` is shared with the rollout, so that both sides
compute with the same weight codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tracerl.api.job import Quantization
from tracerl.api.model import ModelShape
from tracerl.engines.base import EngineStats, SiteCounts, Trajectory
from tracerl.engines.reference.model import Layer, MoEModel, PlainHooks
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import (
    NVFP4,
    Guide,
    NonFiniteError,
    Quantized,
    TensorScale,
    compare,
    fake_quantize,
    guided_fake_quantize,
    guided_quantize,
    quantize,
    unpack_bits,
)
from tracerl.records.batch import RecordStream
from tracerl.records.sites import BLOCK_FORMATS, SiteKind, SiteTable


@torch.no_grad()
def quantise_experts(model: MoEModel, treatment: Treatment, quantization: Quantization) -> None:
    """Replace the experts' matrices, as they were exported, by what their FP4 codes stand for.

    Blocks lie along the axis that is summed over. In NVFP4 every expert has one FP32 scale for gate and up
    together (kernels multiply both at once) and one for down, from their largest magnitudes; both sides see
    the same exported values, so both find the same scales. Raises `NonFiniteError` naming layer and matrix.
    """
    if treatment is Treatment.UNQUANTIZED:
        return
    fmt = BLOCK_FORMATS[quantization.format]
    for index, module in enumerate(model.layers):
        layer: Layer = module  # type: ignore[assignment]
        for name, weight_Erc in (("gate_up", layer.gate_up), ("down", layer.down)):
            scale = TensorScale.one()
            if fmt is NVFP4:
                amax_E = weight_Erc.abs().amax(dim=(1, 2)).float()
                scale = TensorScale(amax_E.view(-1, 1, 1).expand(-1, weight_Erc.shape[1], 1), "amax")
            weight_Erc.copy_(
                fake_quantize(
                    weight_Erc.detach(),
                    fmt,
                    tensor_scale=scale,
                    order=quantization.order,
                    site=f"layer {index} experts' {name} weights",
                )
            )


@dataclass(frozen=True)
class _Audit:
    """Rows whose whole codes are known: `rows` int64 [A] of the batch's stream, in the order of `stream`."""

    stream: RecordStream
    rows: Tensor


class MicroBatch:
    """A batch of trajectories in the model's row order, with its records."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        table: SiteTable,
        audit_table: SiteTable,
        device: torch.device | str,
    ) -> None:
        batch = len(trajectories)
        tokens_B = torch.tensor([len(t.tokens) for t in trajectories])
        prompt_B = torch.tensor([t.prompt_tokens for t in trajectories])
        response_B, end_B = tokens_B - prompt_B, tokens_B.cumsum(0)
        every = torch.cat([t.tokens for t in trajectories])
        # The last token of a trajectory predicts nothing that was sampled, so it is not taken in.
        taken = torch.ones_like(every, dtype=torch.bool)
        taken[end_B - 1] = False
        self.lengths: list[int] = (tokens_B - 1).tolist()
        self.tokens_N: Tensor = every[taken].to(device)
        self.records = RecordStream(table, [t.records for t in trajectories], self.lengths, device)
        self.audit = self._audit(trajectories, audit_table, device)

        self.size = (batch, int(response_B.max()))
        trajectory_M = torch.arange(batch).repeat_interleave(response_B)
        step_M = torch.arange(len(trajectory_M)) - (response_B.cumsum(0) - response_B)[trajectory_M]
        target_M = (end_B - response_B)[trajectory_M] + step_M
        self.targets_M: Tensor = every[target_M].to(device)
        # Rows lack one token of every trajectory before, and predict the token after their own.
        self.predicting_M: Tensor = (target_M - trajectory_M - 1).to(device)
        """int64 [M]: rows that predict a response token, trajectory by trajectory."""
        self.places_M: Tensor = (trajectory_M * self.size[1] + step_M).to(device)
        """int64 [M]: where their log-probs go in [B, R], flattened."""

    def _audit(
        self, trajectories: Sequence[Trajectory], table: SiteTable, device: torch.device | str
    ) -> _Audit | None:
        audited = [i for i, t in enumerate(trajectories) if t.audit is not None]
        if not audited:
            return None
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        lengths = [self.lengths[i] for i in audited]
        stream = RecordStream(table, [trajectories[i].audit for i in audited], lengths, device)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in audited])
        return _Audit(stream, rows.to(device))


class TrainerHooks(PlainHooks):
    """The treatments of one forward pass over one micro-batch."""

    def __init__(
        self,
        shape: ModelShape,
        plan: MethodPlan,
        quantization: Quantization,
        batch: MicroBatch,
        stats: EngineStats,
        *,
        guided: bool,
        version: int,
    ) -> None:
        super().__init__(shape)
        self._plan, self._batch, self._stats = plan, batch, stats
        self._guided = guided and plan.guided
        self._format, self._order = BLOCK_FORMATS[quantization.format], quantization.order
        self._version = version

    @cached_property
    def _follow(self) -> Tensor | None:
        """Rows young enough to be followed, bool [N]; None when the method follows all."""
        limit = self._plan.max_guided_version_diff
        return None if limit is None else self._batch.records.versions >= self._version - limit

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        """Recorded experts (R3) where there is a record, the live router's elsewhere."""
        site = self._batch.records.table.find(layer, SiteKind.ROUTES)
        if site is None:
            return super().routes(layer, logits)
        started = time.perf_counter()
        recorded, present = self._batch.records.routes(site)
        missing = len(present) - int(present.sum())
        self._stats.routes_rows += len(present)
        self._stats.routes_missing += missing
        if missing:
            recorded = torch.where(present[:, None], recorded, super().routes(layer, logits))
        self._stats.unpack_seconds += time.perf_counter() - started
        return recorded

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Treat the routed experts' input."""
        return self._treat(layer, SiteKind.EXPERT_INPUT, x)

    def key(self, layer: int, k: Tensor) -> Tensor:
        """Treat keys."""
        return self._treat(layer, SiteKind.KEY, k)

    def value(self, layer: int, v: Tensor) -> Tensor:
        """Treat values."""
        return self._treat(layer, SiteKind.VALUE, v)

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Treat the experts' second input, where the method does anything with it."""
        treated = any(
            self._plan.site(layer, SiteKind.FC2_INPUT).trainer is not Treatment.UNQUANTIZED
            for layer in range(self.shape.layers)
        )
        return self._treat_fc2 if treated else None

    def _treat_fc2(self, layer: int, x: Tensor) -> Tensor:
        return self._treat(layer, SiteKind.FC2_INPUT, x)

    def _treat(self, layer: int, kind: SiteKind, x: Tensor) -> Tensor:
        treatment = self._plan.site(layer, kind).trainer
        name = f"layer {layer} {kind}"
        guide: Guide | None = None
        if treatment is Treatment.GUIDED and self._guided:
            guide = self._guide(layer, kind)
        if self._batch.audit is not None and self._guided is self._plan.guided:
            self._count(layer, kind, x.detach(), guide)
        if treatment is Treatment.UNQUANTIZED:
            return x
        if guide is None:
            return fake_quantize(x, self._format, order=self._order, site=name)
        started = time.perf_counter()
        out = guided_fake_quantize(x, guide, self._format, order=self._order, band=self._plan.band, site=name)
        self._stats.guided_seconds += time.perf_counter() - started
        return out

    def _guide(self, layer: int, kind: SiteKind) -> Guide:
        started = time.perf_counter()
        records = self._batch.records
        site = records.table.find(layer, kind)
        assert site is not None, "the plan guides recorded sites only"
        guide = records.guide(site, self._follow)
        assert guide.present is not None
        self._stats.guided_rows += len(guide.present)
        self._stats.guided_missing += len(guide.present) - int(guide.present.sum())
        self._stats.unpack_seconds += time.perf_counter() - started
        return guide

    def _count(self, layer: int, kind: SiteKind, x: Tensor, guide: Guide | None) -> None:
        """Compare codes of the audited rows with the rollout's."""
        audit = self._batch.audit
        assert audit is not None
        site = audit.stream.table.find(layer, kind)
        if site is None:
            return
        whole = audit.stream.guide(site)
        assert whole.present is not None
        rows, known = audit.rows[whole.present], whole.present
        rollout = Quantized(
            unpack_bits(whole.codes[known], 4, site.dim), whole.scales[known], TensorScale.one(), self._format
        )
        x = x[rows]
        own = quantize(x, self._format, order=self._order, site=site.name)
        used = own
        counts = self._stats.sites.setdefault((layer, kind.value), SiteCounts())
        if guide is not None:
            part = replace(
                guide,
                codes=guide.codes[rows],
                scales=guide.scales[rows],
                zero_blocks=None if guide.zero_blocks is None else guide.zero_blocks[rows],
                present=None if guide.present is None else guide.present[rows],
            )
            used = guided_quantize(
                x, part, self._format, order=self._order, band=self._plan.band, site=site.name
            )
            rebuilt = torch.ones_like(used.scales, dtype=torch.bool)
            if part.present is not None:
                rebuilt &= part.present[:, None]
            if part.zero_blocks is not None:
                rebuilt &= ~part.zero_blocks
            counts.scales += int(rebuilt.sum())
            counts.scales_wrong += int(((used.scales != rollout.scales) & rebuilt).sum())
        found = compare(own, rollout)
        counts.values += found.values
        counts.rtn_mismatched += found.mismatched
        counts.rtn_adjacent += found.adjacent
        if used is not own:
            found = compare(used, rollout)
        counts.guided_mismatched += found.mismatched
        counts.guided_adjacent += found.adjacent


class CheckingHooks(PlainHooks):
    """Other hooks, but the first site whose values are not finite raises `NonFiniteError` with its name."""

    def __init__(self, hooks: TrainerHooks) -> None:
        super().__init__(hooks.shape)
        self._hooks = hooks

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Check the routed experts' input."""
        return self._hooks.expert_input(layer, _finite(x, layer, SiteKind.EXPERT_INPUT))

    def key(self, layer: int, k: Tensor) -> Tensor:
        """Check keys."""
        return self._hooks.key(layer, _finite(k, layer, SiteKind.KEY))

    def value(self, layer: int, v: Tensor) -> Tensor:
        """Check values."""
        return self._hooks.value(layer, _finite(v, layer, SiteKind.VALUE))

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        """Route as the other hooks do."""
        return self._hooks.routes(layer, logits)

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Check the experts' second input."""

        def check(layer: int, x: Tensor) -> Tensor:
            treat = self._hooks.fc2_input
            x = _finite(x, layer, SiteKind.FC2_INPUT)
            return x if treat is None else treat(layer, x)

        return check


def _finite(x: Tensor, layer: int, kind: SiteKind) -> Tensor:
    if not bool(x.isfinite().all()):
        raise NonFiniteError(f"layer {layer} {kind}")
    return x
