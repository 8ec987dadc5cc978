"""Codes on their way through a rollout's model: quantised at the sites of the plan, packed as the table says.

`SiteCapture` is fed by whatever hooks an engine has, once a site and forward pass, and gives the rows of the
pass; `merge_rows` decides which of two rows counts after a sequence was prefilled again. On a CPU sites are
packed together after the pass (`_HostPacker`); on a GPU by the kernels that round them, into one buffer that
is copied to the host while the next pass is computed (`_DevicePacker`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracerl.api.job import Quantization, Reprefill, RoundingOrder
from tracerl.engines.device import stream_on, timing_event
from tracerl.engines.frames import NO_ZERO_BLOCKS, ZeroBlocks
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import (
    BlockFormat,
    NonFiniteError,
    NonFiniteFlags,
    Quantized,
    fake_quantize,
    quantize,
    quantize_dequantize,
    quantize_into_rows,
)
from tracerl.records.rows import pack_routes, pack_rows, pack_starts, route_bytes
from tracerl.records.sites import BLOCK_FORMATS, Site, SiteKind, SiteTable

_NO_ROW_BYTES = torch.empty((0,), dtype=torch.uint8)


@dataclass(frozen=True)
class Captured:
    """Rows uint8 [N, bytes a row] of one forward pass; zero blocks count rows within it."""

    rows: Tensor
    zero_blocks: ZeroBlocks

    def arrived(self) -> Captured:
        """Give the rows, which are here."""
        return self


@dataclass(frozen=True)
class Arriving:
    """Rows of one forward pass on their way to the host: `host` is there when `copied` has happened."""

    host: Tensor
    """uint8 [N, bytes a row + bytes of zero blocks], pinned."""
    copied: torch.cuda.Event | None
    width: int
    """Bytes a row."""
    places: npt.NDArray[np.int64]
    """int64 [bits of zero blocks, 2]: (site index, block) of each bit."""

    def arrived(self) -> Captured:
        """Wait for the rows, and give them."""
        if self.copied is not None:
            self.copied.synchronize()
        rows, bits = self.host[:, : self.width], self.host.numpy()[:, self.width :]
        zero = NO_ZERO_BLOCKS
        if bits.any():
            row, bit = np.unpackbits(bits, axis=1, bitorder="little").nonzero()
            zero = np.concatenate([row[:, None], self.places[bit]], axis=1)
        return Captured(rows, zero)


@dataclass(frozen=True)
class HeldSite:
    """A site as one tensor-parallel rank has it: fewer heads, and only if it writes any of them."""

    index: int
    """Position in the table."""
    site: Site
    """With the rank's own dim and groups."""
    first_block: int
    """Its first block, counted in the whole site."""


def held_sites(table: SiteTable, part: int = 0, parts: int = 1) -> list[HeldSite]:
    """Give the sites that rank `part` of `parts` writes, in the order of the table."""
    held = []
    for piece in table.select(part, parts) if table.sites else ():
        whole = table.sites[piece.site]
        groups, width = piece.stop - piece.start, whole.dim // whole.groups
        site = replace(whole, dim=groups * width, groups=groups)
        held.append(HeldSite(piece.site, site, piece.start * width // whole.block if whole.block else 0))
    return held


class _Packer(Protocol):
    """Makes rows of what `_SiteUse`s of one table hand in during a forward pass."""

    capture_seconds: float
    """What recording took in addition to rounding, over all passes."""
    together: bool
    """Whether two sites are better handed in together."""

    def begin(self) -> None:
        """Forget what a pass before has left."""
        ...

    def quantise(self, sites: Sequence[int], x: Tensor, name: str) -> Tensor:
        """Round values, of several sites one below the other, and keep their codes."""
        ...

    def keep(self, site: int, values: Tensor) -> None:
        """Keep values [rows, dim] of a site as they are: to be quantised, expert ids, or positions."""
        ...

    def pack(self, rows: int) -> Captured | Arriving:
        """Rows of the pass, of which there are so many."""
        ...


class _HostPacker:
    """Collects the values of a table's sites during one forward pass and packs alike sites together.

    One call for all layers instead of one a layer: with the few rows of a decode step, calls take the time.
    """

    together = True

    def __init__(
        self, held: Sequence[HeldSite], fmt: BlockFormat, order: RoundingOrder, share: float = 0.0
    ) -> None:
        """`share`: of `quantise`, what rounding alone would not take."""
        self._format, self._order, self._share = fmt, order, share
        self.capture_seconds = 0.0
        self._places = np.array([[one.index, one.first_block] for one in held], np.int64).reshape(-1, 2)
        groups: dict[Site, list[int]] = {}
        for index, one in enumerate(held):
            # Keys and values of one width pack alike.
            kind = SiteKind.KEY if one.site.kind is SiteKind.VALUE else one.site.kind
            groups.setdefault(replace(one.site, layer=0, kind=kind), []).append(index)
        self._groups = list(groups.items())
        self.values: list[Quantized | Tensor | None] = [None] * len(held)
        """By site: its codes, or the values [rows, dim] that codes are made of yet; ids; positions."""

    def begin(self) -> None:
        self.values = [None] * len(self.values)

    def quantise(self, sites: Sequence[int], x: Tensor, name: str) -> Tensor:
        started = time.thread_time()
        quantized, out = quantize_dequantize(x, self._format, order=self._order, site=name)
        if len(sites) == 1:
            self.values[sites[0]] = quantized
        else:
            codes, scales = quantized.codes.chunk(len(sites)), quantized.scales.chunk(len(sites))
            for site, part, scale in zip(sites, codes, scales, strict=True):
                self.values[site] = replace(quantized, codes=part, scales=scale)
        self.capture_seconds += self._share * (time.thread_time() - started)
        return out

    def keep(self, site: int, values: Tensor) -> None:
        self.values[site] = values

    def pack(self, rows: int) -> Captured:
        pieces: list[Tensor] = [_NO_ROW_BYTES] * len(self.values)
        zero: list[ZeroBlocks] = []
        for site, members in self._groups:
            values = [self.values[index] for index in members]
            tensors = [value for value in values if isinstance(value, Tensor)]
            if site.kind is SiteKind.ROUTES:
                packed = pack_routes(site, torch.cat(tensors))
            elif site.kind is SiteKind.EXACT_FROM:
                packed = pack_starts(site, torch.cat(tensors))
            else:
                if tensors:
                    whole = quantize(torch.cat(tensors), self._format, order=self._order)
                else:
                    whole = _joined([value for value in values if isinstance(value, Quantized)])
                packed, found = pack_rows(site, whole)
                if len(found):
                    place, block = found.cpu().numpy().T
                    index, first = self._places[np.array(members)[place // rows]].T
                    zero.append(np.stack([place % rows, index, first + block], axis=1))
            for index, piece in zip(members, packed.view(len(members), rows, -1).unbind(), strict=True):
                pieces[index] = piece
        self.begin()
        out = torch.cat(pieces, dim=1).cpu() if pieces else torch.empty((rows, 0), dtype=torch.uint8)
        return Captured(out, by_row(np.concatenate(zero)) if zero else NO_ZERO_BLOCKS)


class _DevicePacker:
    """Rows of a table in a buffer on the device, which the kernels that round write into.

    The buffer of the first `rows` rows stays where it is, so that passes of a CUDA graph may write into it.
    """

    together = False

    def __init__(
        self, held: Sequence[HeldSite], order: RoundingOrder, rows: int, device: torch.device
    ) -> None:
        self._sites, self._order, self._device = [one.site for one in held], order, device
        self._at = np.cumsum([0, *(site.row_bytes for site in self._sites)]).tolist()
        zero = [-(-site.blocks // 8) for site in self._sites]
        self._width = self._at[-1]
        self._zero_at = (self._width + np.cumsum([0, *zero])).tolist()
        self._places = np.array(
            [
                (one.index, one.first_block + block)
                for one, size in zip(held, zero, strict=True)
                for block in range(8 * size)
            ],
            np.int64,
        ).reshape(-1, 2)
        self._lasting = torch.zeros((rows, self._zero_at[-1]), dtype=torch.uint8, device=device)
        self._buffer = self._lasting
        self._stream = stream_on(device)
        self._copied: torch.cuda.Event | None = None
        self.capture_seconds = 0.0
        self._seconds_a_row = self._measure() if self._stream else 0.0

    def begin(self) -> None:
        self._buffer = self._lasting
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def quantise(self, sites: Sequence[int], x: Tensor, name: str) -> Tensor:
        [index] = sites
        return self._into(self._rows(len(x)), index, x, name)

    def _into(self, rows: Tensor, index: int, x: Tensor, name: str) -> Tensor:
        site, values = self._sites[index], torch.empty_like(x, memory_format=torch.contiguous_format)
        quantize_into_rows(
            x,
            rows,
            self._at[index],
            code_bits=site.code_bits,
            scale_bits=site.scale_bits,
            zero_bits=rows[:, self._zero_at[index] : self._zero_at[index + 1]],
            values=values,
            order=self._order,
            site=name,
        )
        return values

    def keep(self, site: int, values: Tensor) -> None:
        pack = pack_starts if self._sites[site].kind is SiteKind.EXACT_FROM else route_bytes
        rows = self._rows(len(values))
        rows[:, self._at[site] : self._at[site + 1]] = pack(self._sites[site], values)

    def pack(self, rows: int) -> Arriving:
        self.capture_seconds += rows * self._seconds_a_row
        return self.send(rows)

    def send(self, rows: int) -> Arriving:
        """Copy the first rows of the buffer to the host, beside what is computed next."""
        there = self._rows(rows)
        if self._stream is None:
            return Arriving(there.clone(), None, self._width, self._places)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Of torch's pool of pinned memory: other memory than what the pass before is still read from.
            host = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(there, non_blocking=True)
            there.record_stream(self._stream)
            self._copied = self._stream.record_event()
        return Arriving(host, self._copied, self._width, self._places)

    def _rows(self, rows: int) -> Tensor:
        if rows > len(self._buffer):
            self._buffer = self._lasting.new_empty((rows, self._zero_at[-1]))
        return self._buffer[:rows]

    def _measure(self) -> float:
        """Seconds that recording a row of all sites takes in addition to rounding it, on this GPU."""
        rows, total, known = 4096, 0.0, dict[tuple[int, int, int], float]()
        buffer = self._lasting.new_empty((rows, self._zero_at[-1]))
        with NonFiniteFlags(self._device):
            for index, site in enumerate(self._sites):
                if not site.blocks:
                    continue
                kind = site.dim, site.code_bits, site.scale_bits
                if kind not in known:
                    x = torch.ones((rows, site.dim), dtype=torch.bfloat16, device=self._device)
                    recording = gpu_seconds(partial(self._into, buffer, index, x, ""))
                    known[kind] = recording - gpu_seconds(partial(fake_quantize, x, order=self._order))
                total += max(0.0, known[kind])
        return total / rows


def gpu_seconds(function: Callable[[], object], *, repeats: int = 20) -> float:
    """What a call takes of the current GPU, in the middle of `repeats` after the first ones."""
    for _ in range(3):
        function()
    pairs = []
    for _ in range(repeats):
        start, end = timing_event(), timing_event()
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return float(sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2]) / 1000


def _joined(parts: Sequence[Quantized]) -> Quantized:
    """Rows of one tensor scale and format one below the other."""
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Quantized(codes, scales, parts[0].tensor_scale, parts[0].fmt)


def by_row(zero_blocks: ZeroBlocks) -> ZeroBlocks:
    """Sort by row, leaving the order within one as it is."""
    return zero_blocks[np.argsort(zero_blocks[:, 0], kind="stable")]


@dataclass(frozen=True)
class _SiteUse:
    """What the rollout does at one site: `record` and `audit` are indices into the two tables."""

    name: str
    quantized: bool
    record: int | None
    audit: int | None


class SiteCapture:
    """Rounds to nearest where the method says so; keeps codes, scales and expert ids of recorded sites."""

    def __init__(
        self,
        layers: int,
        plan: MethodPlan,
        quantization: Quantization,
        table: SiteTable,
        audit_table: SiteTable | None,
        *,
        part: int = 0,
        parts: int = 1,
        device: torch.device | str = "cpu",
        rows: int = 0,
    ) -> None:
        """`audit_table` None: no trajectory is audited. `part` of `parts`: see `held_sites`.

        On a GPU `device`, passes of up to `rows` rows are recorded in memory that stays where it is.
        """
        self._format = BLOCK_FORMATS[quantization.format]
        self._order = quantization.order
        held = held_sites(table, part, parts)
        audited = [] if audit_table is None else held_sites(audit_table, part, parts)
        self._record: _Packer
        if torch.device(device).type == "cpu":
            share = _share_of_recording(self._format, self._order)
            self._record = _HostPacker(held, self._format, self._order, share)
        else:
            self._record = _DevicePacker(held, self._order, rows, torch.device(device))
        self._audit = None if audit_table is None else _HostPacker(audited, self._format, self._order)
        self._audited: Tensor | slice | None = None
        self._recording = True
        self.pack_seconds = 0.0
        record_at = {(one.site.layer, one.site.kind): index for index, one in enumerate(held)}
        audit_at = {(one.site.layer, one.site.kind): index for index, one in enumerate(audited)}
        self._uses = {
            (layer, kind): _SiteUse(
                name=f"layer {layer} {kind}",
                quantized=plan.site(layer, kind).rollout is Treatment.RTN,
                record=record_at.get((layer, kind)),
                audit=audit_at.get((layer, kind)),
            )
            for layer in range(layers)
            for kind in SiteKind
        }
        self.rounds_fc2 = any(self._uses[layer, SiteKind.FC2_INPUT].quantized for layer in range(layers))
        """Whether the experts' second input is quantised."""

    def begin(self, audited: Tensor | slice | None, *, recording: bool = True) -> None:
        """Start forward passes; `audited` are the rows that are audited, int64 [A] or a slice.

        Without `recording`, values are rounded and nothing is kept: no `finish` follows.
        """
        self._audited = audited if self._audit is not None else None
        self._recording = recording
        self._record.begin()

    @property
    def capture_seconds(self) -> float:
        """What recording took in addition to rounding, over all passes."""
        return self._record.capture_seconds

    def finish(self, rows: int) -> tuple[Captured | Arriving, Captured | None]:
        """Rows [rows, …] of the site table and, when rows are audited, [A, …] of the audit table."""
        started = time.thread_time()
        record = self._record.pack(rows)
        audit = None
        if self._audit is not None and self._audited is not None:
            some = self._audited
            audit = self._audit.pack(len(range(rows)[some]) if isinstance(some, slice) else len(some))
        self.pack_seconds += time.thread_time() - started
        return record, audit

    def reset(self) -> None:
        """Forget what a forward pass that failed has left."""
        for packer in (self._record, self._audit):
            if packer is not None:
                packer.begin()

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Quantise the routed experts' input."""
        return self._round(self._uses[layer, SiteKind.EXPERT_INPUT], x)

    def key_value(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise keys and values, in one call: what a method does with the ones it does with the others."""
        key, value = self._uses[layer, SiteKind.KEY], self._uses[layer, SiteKind.VALUE]
        if not key.quantized:
            return k, v
        if not self._record.together:
            return self._round(key, k), self._round(value, v)
        try:
            out_k, out_v = self._quantise((key, value), torch.cat([k, v])).chunk(2)
        except NonFiniteError:  # which of the two?
            return self._round(key, k), self._round(value, v)
        self._keep_audited(key, k)
        self._keep_audited(value, v)
        return out_k, out_v

    def fc2_input(self, layer: int, x: Tensor) -> Tensor:
        """Quantise the experts' second input [N, top_k * expert_hidden], slots in the order of the ids."""
        return self._round(self._uses[layer, SiteKind.FC2_INPUT], x)

    def round(self, layer: int, kind: SiteKind, x: Tensor) -> Tensor:
        """Quantise rows that another rank records."""
        use = self._uses[layer, kind]
        return fake_quantize(x, self._format, order=self._order, site=use.name) if use.quantized else x

    def routes(self, layer: int, ids: Tensor) -> None:
        """Keep the experts [N, top_k] that were chosen."""
        use = self._uses[layer, SiteKind.ROUTES]
        if use.record is not None and self._recording:
            self._record.keep(use.record, ids)

    def exact_from(self, layer: int, starts: Tensor) -> None:
        """Keep the first position [N] that each row attends exactly."""
        use = self._uses[layer, SiteKind.EXACT_FROM]
        if use.record is not None:
            self._record.keep(use.record, starts.unsqueeze(1))

    def _round(self, use: _SiteUse, x: Tensor) -> Tensor:
        if not use.quantized:
            return x
        out = self._quantise((use,), x)
        self._keep_audited(use, x)
        return out

    def _quantise(self, uses: Sequence[_SiteUse], x: Tensor) -> Tensor:
        """Round the values of sites, one below the other in x, and keep the codes if they are recorded."""
        recorded = [use.record for use in uses if use.record is not None]
        if not recorded or not self._recording:
            return fake_quantize(x, self._format, order=self._order, site=uses[0].name)
        return self._record.quantise(recorded, x, uses[0].name)

    def _keep_audited(self, use: _SiteUse, x: Tensor) -> None:
        if self._audit is not None and self._audited is not None and use.audit is not None:
            # Blocks do not look beyond their row, so a few rows alone give the codes that they had among all.
            self._audit.keep(use.audit, x[self._audited])


def _share_of_recording(fmt: BlockFormat, order: RoundingOrder) -> float:
    """Share of quantising to codes and back that rounding alone would not take, on this machine now.

    The rollout rounds with or without records, so only this share is their cost.
    """
    x = torch.linspace(-3, 3, 64 * 1024).view(-1, 16 * fmt.block)

    def seconds(function: Callable[[], object]) -> float:
        started = time.thread_time()
        function()
        return time.thread_time() - started

    # In turns, so that a machine that is busy for a while slows down both.
    pairs = [
        (
            seconds(lambda: fake_quantize(x, fmt, order=order)),
            seconds(lambda: quantize_dequantize(x, fmt, order=order)),
        )
        for _ in range(20)
    ]
    rounding, recording = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return max(0.0, 1 - rounding / recording)


# -- rows that were computed twice ------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeRule:
    """Which of two rows counts, byte by byte, after a sequence was prefilled again."""

    reprefill: Reprefill
    kv_column: npt.NDArray[np.bool_]
    """bool [bytes a row]: whether the byte is of keys or values."""
    kv_site: Mapping[int, bool]
    """By position in the table."""

    @classmethod
    def of(cls, held: Sequence[HeldSite], reprefill: Reprefill) -> MergeRule:
        """Make the rule for rows of these sites."""
        kv = [one.site.kind in {SiteKind.KEY, SiteKind.VALUE} for one in held]
        widths = [one.site.row_bytes for one in held]
        columns = np.repeat(np.array(kv, np.bool_), widths)
        return cls(reprefill, columns, {one.index: flag for one, flag in zip(held, kv, strict=True)})


@dataclass(frozen=True)
class Rows:
    """Rows uint8 [n, bytes a row] with their versions int32 [n] and zero blocks."""

    rows: npt.NDArray[np.uint8]
    versions: npt.NDArray[np.int32]
    zero_blocks: ZeroBlocks


def merge_rows(rule: MergeRule, saved: Rows, new: Rows, version: int) -> Rows:
    """Merge what a sequence had before with the same n rows prefilled again by `version`.

    Rows that `version` computed before: inputs keep the first row, keys and values the last, which is the
    one that later tokens attend. Rows of older versions: kept (AsSampled) or replaced (AsAttended).
    """
    n = len(saved.rows)
    again = saved.versions == version
    kept = ~again if rule.reprefill is Reprefill.AS_SAMPLED else np.zeros(n, np.bool_)
    from_saved = kept[:, None] | (again[:, None] & ~rule.kv_column)
    rows = np.where(from_saved, saved.rows, new.rows)
    versions = np.where(kept, saved.versions, new.versions)

    def chosen(zero: ZeroBlocks, *, of_saved: bool) -> ZeroBlocks:
        if not len(zero):
            return zero
        is_kv = np.array([rule.kv_site[site] for site in zero[:, 1].tolist()], np.bool_)
        wanted: ZeroBlocks = zero[(kept[zero[:, 0]] | (again[zero[:, 0]] & ~is_kv)) == of_saved]
        return wanted

    parts = (chosen(saved.zero_blocks, of_saved=True), chosen(new.zero_blocks, of_saved=False))
    return Rows(rows, versions, by_row(np.concatenate(parts)))
