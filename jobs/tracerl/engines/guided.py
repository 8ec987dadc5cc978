"""Four-bit emulation in a trainer's forward pass: which treatment each site gets, and from which record.

Of no engine: `MicroBatch` holds a batch and its records in one stream of rows, `Treatments` applies the plan
of the job's method to the values that an engine has at a site, and counts what it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tracerl.api.job import Quantization
from tracerl.engines.base import EngineStats, SiteCounts, Trajectory
from tracerl.engines.device import GpuTime, Uploads
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import (
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


@dataclass(frozen=True)
class _Audit:
    """Rows whose whole codes are known: `rows` int64 [A] of the batch's stream, in the order of `stream`."""

    stream: RecordStream
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Recorded:
    """What the rollout recorded of values [n, width] of a site."""

    guide: Guide | None = None
    """Of all n rows; None: they follow no record."""
    audited: Tensor | None = None
    """int64 [A]: rows whose whole codes are known; None: nothing is compared."""
    whole: Guide | None = None
    """Whole codes and scales of these."""


class MicroBatch:
    """A batch of trajectories as one stream of rows, trajectory by trajectory, with its records.

    It may hold none, on a rank that only takes part in what others compute. It is copied to the device of
    `uploads` beside what is computed there; what is computed after `arrive` finds it there.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        table: SiteTable,
        audit_table: SiteTable,
        uploads: Uploads,
    ) -> None:
        batch = len(trajectories)
        tokens_B = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.int64)
        prompt_B = torch.tensor([t.prompt_tokens for t in trajectories], dtype=torch.int64)
        response_B, end_B = tokens_B - prompt_B, tokens_B.cumsum(0)
        every = torch.cat([tokens_B[:0], *(t.tokens for t in trajectories)])
        # The last token of a trajectory predicts nothing that was sampled, so it is not taken in.
        taken = torch.ones_like(every, dtype=torch.bool)
        taken[end_B - 1] = False
        self.lengths: list[int] = (tokens_B - 1).tolist()
        self.tokens_N: Tensor = uploads.put(every[taken])
        self.records = RecordStream(table, [t.records for t in trajectories], self.lengths, uploads.put)
        self.audit = self._audit(trajectories, audit_table, uploads)

        self.size = (batch, max(response_B.tolist(), default=0))
        self._uploads, self._trajectories = uploads, list(trajectories)
        trajectory_M = torch.arange(batch).repeat_interleave(response_B)
        step_M = torch.arange(len(trajectory_M)) - (response_B.cumsum(0) - response_B)[trajectory_M]
        target_M = (end_B - response_B)[trajectory_M] + step_M
        self.targets_M: Tensor = uploads.put(every[target_M])
        # Rows lack one token of every trajectory before, and predict the token after their own.
        self.predicting_M: Tensor = uploads.put(target_M - trajectory_M - 1)
        """int64 [M]: rows that predict a response token, trajectory by trajectory."""
        self.places_M: Tensor = uploads.put(trajectory_M * self.size[1] + step_M)
        """int64 [M]: where their log-probs go in [B, R], flattened."""

    def arrive(self) -> None:
        """Let what is computed from now on wait until it is there."""
        self._uploads.join()

    def holds(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether it was made of these trajectories with these records."""
        return len(trajectories) == len(self._trajectories) and all(
            one.id == other.id
            and one.tokens is other.tokens
            and one.records is other.records
            and one.audit is other.audit
            for one, other in zip(trajectories, self._trajectories, strict=True)
        )

    def _audit(self, trajectories: Sequence[Trajectory], table: SiteTable, uploads: Uploads) -> _Audit | None:
        audited = [i for i, t in enumerate(trajectories) if t.audit is not None]
        if not audited:
            return None
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        lengths = [self.lengths[i] for i in audited]
        stream = RecordStream(table, [trajectories[i].audit for i in audited], lengths, uploads.put)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in audited])
        return _Audit(stream, uploads.put(rows))


class Treatments:
    """The treatments of one forward pass over one micro-batch.

    An engine that holds some rows of the stream names them by `rows`, int64, in the order of its values;
    None means all, in their order. With `check` a value that is not finite raises `NonFiniteError` with the
    name of its site, also where nothing is quantised.
    """

    def __init__(
        self,
        plan: MethodPlan,
        quantization: Quantization,
        batch: MicroBatch,
        stats: EngineStats,
        *,
        guided: bool,
        version: int,
        check: bool = False,
        guided_time: GpuTime | None = None,
    ) -> None:
        """`guided_time` counts what guided rounding takes of a GPU, instead of `stats`."""
        self._guided_time = guided_time
        self._plan, self._batch, self._stats = plan, batch, stats
        self._guided = guided and plan.guided
        self._format, self._order = BLOCK_FORMATS[quantization.format], quantization.order
        self._version, self._check = version, check
        self._repeating = False

    def repeat(self) -> None:
        """From now on values are those of the first pass again (activation recompute): nothing counts."""
        self._repeating, self._stats = True, EngineStats()

    @property
    def _oldest(self) -> int | None:
        """The oldest version of rows that are followed; None when the method follows all."""
        limit = self._plan.max_guided_version_diff
        return None if limit is None else self._version - limit

    @cached_property
    def _follow(self) -> Tensor | None:
        """Rows young enough to be followed, bool [N]; None when the method follows all."""
        return None if self._oldest is None else self._batch.records.versions >= self._oldest

    def touches(self, kind: SiteKind, layers: Iterable[int]) -> bool:
        """Whether `treat` may change, count or check anything at this kind of site in any of the layers."""
        if self._check:
            return True
        return any(
            self._plan.site(layer, kind).trainer is not Treatment.UNQUANTIZED
            or (
                self._batch.audit is not None and self._batch.audit.stream.table.find(layer, kind) is not None
            )
            for layer in layers
        )

    @property
    def audits(self) -> bool:
        """Whether whole codes are known of any trajectory."""
        return self._batch.audit is not None

    def exact_from(self) -> Tensor | None:
        """First position that each row attends exactly, int64 [N]; None when all are attended quantised.

        Of a row without a record that is the one behind it: it attends what is stored.
        """
        table = self._batch.records.table
        site = next((site for site in table.sites if site.kind is SiteKind.EXACT_FROM), None)
        if site is None:
            return None
        starts, present = self._batch.records.exact_from(site)
        rows = [torch.arange(1, length + 1) for length in self._batch.lengths]
        after = torch.cat([starts[:0].cpu(), *rows]).to(starts.device)
        return torch.where(present, starts, after)

    def routes(self, layer: int, live: Callable[[], Tensor], rows: Tensor | None = None) -> Tensor:
        """Recorded experts (R3) int64 [rows, top_k] where there is a record, those of `live` elsewhere."""
        site = self._batch.records.table.find(layer, SiteKind.ROUTES)
        if site is None:
            return live()
        started = time.perf_counter()
        recorded, present = self._batch.records.routes(site)
        if rows is None:
            missing = self._batch.records.absent(site)
        else:
            recorded, present = recorded[rows], present[rows]
            missing = len(present) - int(present.sum())
        self._stats.routes_rows += len(present)
        self._stats.routes_missing += missing
        if missing:
            recorded = torch.where(present[:, None], recorded, live())
        self._stats.unpack_seconds += time.perf_counter() - started
        return recorded

    def treat(self, layer: int, kind: SiteKind, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Do to the values [rows, width] of a site what the plan says; the gradient passes straight through.

        Raises `NonFiniteError` naming the site.
        """
        return self.apply(layer, kind, x, self.recorded(layer, kind, rows))

    def recorded(self, layer: int, kind: SiteKind, rows: Tensor | None = None) -> Recorded:
        """What `apply` needs to know of rows of the batch's stream at a site."""
        guide: Guide | None = None
        if self._plan.site(layer, kind).trainer is Treatment.GUIDED and self._guided:
            guide = self._guide(layer, kind, rows)
        audit = self._batch.audit
        site = None if audit is None else audit.stream.table.find(layer, kind)
        if audit is None or site is None or self._repeating or self._guided is not self._plan.guided:
            return Recorded(guide)
        whole = audit.stream.guide(site)
        assert whole.present is not None
        known, mine = whole.present, audit.rows
        if rows is not None:
            mine, held = _places_of(mine, rows)
            known = known & held
        return Recorded(guide, mine[known], rows_of(whole, known))

    def apply(self, layer: int, kind: SiteKind, x: Tensor, recorded: Recorded) -> Tensor:
        """`treat` with records that are at hand, of values [n, width] or of equal parts of them."""
        treatment, guide = self._plan.site(layer, kind).trainer, recorded.guide
        name = f"layer {layer} {kind}"
        if self._check and not bool(x.isfinite().all()):
            raise NonFiniteError(name)
        if recorded.audited is not None and len(recorded.audited):
            self._count(layer, kind, x.detach(), recorded)
        if treatment is Treatment.UNQUANTIZED:
            return x
        if guide is None:
            return fake_quantize(x, self._format, order=self._order, site=name)
        how: dict[str, Any] = {"order": self._order, "band": self._plan.band, "site": name}
        if self._guided_time is not None:
            with self._guided_time.timed():
                return guided_fake_quantize(x, guide, self._format, **how)
        started = time.perf_counter()
        out = guided_fake_quantize(x, guide, self._format, **how)
        self._stats.guided_seconds += time.perf_counter() - started
        return out

    def _guide(self, layer: int, kind: SiteKind, rows: Tensor | None) -> Guide:
        started = time.perf_counter()
        records = self._batch.records
        site = records.table.find(layer, kind)
        assert site is not None, "the plan guides recorded sites only"
        guide = records.guide(site, self._follow)
        if rows is not None:
            guide = rows_of(guide, rows)
        assert guide.present is not None
        missing = (
            records.absent(site, self._oldest)
            if rows is None
            else len(guide.present) - int(guide.present.sum())
        )
        self._stats.guided_rows += len(guide.present)
        self._stats.guided_missing += missing
        self._stats.unpack_seconds += time.perf_counter() - started
        return guide

    def _count(self, layer: int, kind: SiteKind, x: Tensor, recorded: Recorded) -> None:
        """Compare codes of the audited rows with the rollout's."""
        mine, whole, guide = recorded.audited, recorded.whole, recorded.guide
        assert mine is not None
        assert whole is not None
        name = f"layer {layer} {kind}"
        x = x[mine]
        rollout = Quantized(
            unpack_bits(whole.codes, 4, x.shape[1]), whole.scales, TensorScale.one(), self._format
        )
        own = quantize(x, self._format, order=self._order, site=name)
        used = own
        counts = self._stats.sites.setdefault((layer, kind.value), SiteCounts())
        if guide is not None:
            part = rows_of(guide, mine)
            used = guided_quantize(x, part, self._format, order=self._order, band=self._plan.band, site=name)
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


def pass_mask(starts_BS: Tensor) -> Tensor:
    """What a row must not attend of the quantised keys and of the exact ones, bool [B, S, 2 * S].

    Row i attends key j <= i exactly where j >= starts[i], as its own forward pass computed both, and as it is
    stored, quantised, where j is earlier.
    """
    length = starts_BS.shape[1]
    position = torch.arange(length, device=starts_BS.device)
    future = position > position[:, None]
    own = position >= starts_BS[:, :, None]
    return torch.cat([future | own, future | ~own], dim=2)


def rows_of(guide: Guide, rows: Tensor) -> Guide:
    """Give the guide of some rows of a tensor [N, K]."""
    scale = guide.tensor_scale
    return replace(
        guide,
        codes=guide.codes[rows],
        scales=guide.scales[rows],
        tensor_scale=replace(scale, value=scale.value[rows]) if scale.value.ndim else scale,
        zero_blocks=None if guide.zero_blocks is None else guide.zero_blocks[rows],
        present=None if guide.present is None else guide.present[rows],
    )


def _places_of(wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where in `rows` each of `wanted` is (int64, 0 where it is not), and whether it is there (bool)."""
    size = int(torch.cat([wanted, rows]).max()) + 1 if len(wanted) + len(rows) else 0
    place = torch.full((size,), -1, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(len(rows), device=rows.device)
    found = place[wanted]
    return found.clamp(min=0), found >= 0
