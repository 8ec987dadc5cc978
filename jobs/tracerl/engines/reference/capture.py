"""What the reference rollout records: its model's hooks, and rows of running requests by cache slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracerl.api.job import Quantization, Reprefill
from tracerl.api.model import ModelShape
from tracerl.engines.capture import (
    Arriving,
    Captured,
    MergeRule,
    Rows,
    SiteCapture,
    by_row,
    held_sites,
    merge_rows,
)
from tracerl.engines.frames import NO_ZERO_BLOCKS, ZeroBlocks
from tracerl.engines.reference.model import PlainHooks
from tracerl.methods import MethodPlan
from tracerl.records.sites import SiteTable


class CaptureHooks(PlainHooks):
    """The model's hooks, all of them of a `SiteCapture` but the choice of experts."""

    def __init__(
        self,
        shape: ModelShape,
        plan: MethodPlan,
        quantization: Quantization,
        table: SiteTable,
        audit_table: SiteTable | None,
        *,
        device: torch.device | str = "cpu",
        rows: int = 0,
    ) -> None:
        """`audit_table` None: no trajectory is audited. `device`, `rows`: see `SiteCapture`."""
        super().__init__(shape)
        self._capture = SiteCapture(
            shape.layers, plan, quantization, table, audit_table, device=device, rows=rows
        )

    def begin(self, audited: Tensor | None, *, recording: bool = True) -> None:
        """Start a forward pass; `audited` int64 [A] are the rows of the stream that are audited, if any.

        Without `recording`, no `finish` follows.
        """
        self._capture.begin(audited, recording=recording)

    def finish(self, rows: int) -> tuple[Captured | Arriving, Captured | None]:
        """Rows [rows, …] of the site table and, when rows are audited, [A, …] of the audit table."""
        return self._capture.finish(rows)

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Quantise the routed experts' input."""
        return self._capture.expert_input(layer, x)

    def key_value(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise keys and values."""
        return self._capture.key_value(layer, k, v)

    @property
    def capture_seconds(self) -> float:
        """What recording took in addition to rounding, over all passes."""
        return self._capture.capture_seconds

    @property
    def pack_seconds(self) -> float:
        """What packing took, over all passes."""
        return self._capture.pack_seconds

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Quantise the experts' second input, where the method does."""
        return self._capture.fc2_input if self._capture.rounds_fc2 else None

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        """Choose experts."""
        ids = super().routes(layer, logits)
        self._capture.routes(layer, ids)
        return ids


_At = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Slots and positions of the rows of a pass, both [N]."""


@dataclass
class SavedRows:
    """Rows of a request that lost its slot: rows uint8 [n, row_bytes], versions int32 [n]."""

    rows: Tensor
    versions: npt.NDArray[np.int32]
    zero_blocks: ZeroBlocks
    emitted: int
    """Rows 0..emitted-1 are in frames already."""


class RowBuffer:
    """Rows of one site table by cache slot; row t of a slot is the forward pass that took token t in."""

    def __init__(self, table: SiteTable, *, slots: int, capacity: int, reprefill: Reprefill) -> None:
        self.table = table
        # Memory is only used where rows are written: the system hands out zero pages on first touch.
        self._rows = torch.zeros((slots, capacity, table.row_bytes), dtype=torch.uint8)
        self._versions = torch.full((slots, capacity), -1, dtype=torch.int32)
        self._zero: dict[int, list[ZeroBlocks]] = {}
        self._late: tuple[_At, Arriving] | None = None
        """The pass that was stored last, whose rows may still be on their way from the GPU."""
        self._rule = MergeRule.of(held_sites(table), reprefill)
        self.emitted: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        """Rows 0..emitted[slot]-1 are in frames."""

    def open(self, slot: int) -> None:
        """Start a new request in a slot."""
        self._settle()
        self.emitted[slot] = 0
        self._zero.pop(slot, None)

    def store(
        self,
        slot_N: npt.NDArray[np.int64],
        position_N: npt.NDArray[np.int64],
        captured: Captured | Arriving,
        version: int,
    ) -> None:
        """Write one forward pass: row i of `captured` is row position_N[i] of slot_N[i]."""
        self._settle()
        at = slot_N, position_N
        self._versions.numpy()[at] = version
        if isinstance(captured, Arriving):
            self._late = (at, captured)
        else:
            self._write(at, captured)

    def _settle(self) -> None:
        """Write what was still on its way."""
        if self._late is not None:
            (at, arriving), self._late = self._late, None
            self._write(at, arriving.arrived())

    def _write(self, at: _At, captured: Captured) -> None:
        # numpy copies rows whole, torch element by element: a factor of 20 for rows of some KiB.
        if self.table.row_bytes:
            self._rows.numpy()[at] = captured.rows.numpy()
        if len(captured.zero_blocks):
            row = captured.zero_blocks[:, 0]
            found = captured.zero_blocks.copy()
            found[:, 0] = at[1][row]
            slots = at[0][row]
            # The stream keeps a slot's rows together, so equal slots are neighbours.
            cuts = np.flatnonzero(np.diff(slots)) + 1
            for slot, part in zip(slots[np.r_[0, cuts]].tolist(), np.split(found, cuts), strict=True):
                self._zero.setdefault(slot, []).append(part)

    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], rows: int) -> None:
        """Give slots the rows 0..rows-1 of other slots, and what is known about them."""
        self._settle()
        source_C, target_C = torch.from_numpy(source), torch.from_numpy(target)
        self._rows[target_C, :rows] = self._rows[source_C, :rows]
        self._versions[target_C, :rows] = self._versions[source_C, :rows]
        self.emitted[target] = self.emitted[source]
        for at, to in zip(source.tolist(), target.tolist(), strict=True) if self._zero else ():
            self._zero[to] = list(self._zero.get(at, ()))

    def versions(self, slot: int, stop: int) -> npt.NDArray[np.int32]:
        """Version of each row 0..stop-1 of a slot, a view."""
        versions: npt.NDArray[np.int32] = self._versions.numpy()[slot, :stop]
        return versions

    def take(self, slot: int, start: int, stop: int) -> tuple[npt.NDArray[np.uint8], ZeroBlocks]:
        """Copy rows start..stop-1; zero blocks count rows from `start`."""
        self._settle()
        zero = NO_ZERO_BLOCKS
        if slot in self._zero:
            zero = self._zero_of(slot)
            zero = zero[(zero[:, 0] >= start) & (zero[:, 0] < stop)] - np.array([start, 0, 0])
        return self._rows.numpy()[slot, start:stop].copy(), zero

    def save(self, slot: int, rows: int) -> SavedRows:
        """Copy what a request needs to get its rows back after it was prefilled again."""
        self._settle()
        return SavedRows(
            self._rows[slot, :rows].clone(),
            self.versions(slot, rows).copy(),
            self._zero_of(slot),
            int(self.emitted[slot]),
        )

    def restore(self, slot: int, saved: SavedRows, version: int) -> bool:
        """Merge saved rows into those of a new prefill; returns whether the frames written before still hold.

        `merge_rows` says which row counts.
        """
        self._settle()
        n = len(saved.rows)
        new, new_versions = self._rows.numpy()[slot, :n], self.versions(slot, n)
        zero = self._zero_of(slot)
        beyond = zero[zero[:, 0] >= n]
        before = Rows(saved.rows.numpy(), saved.versions, saved.zero_blocks)
        after = Rows(new, new_versions, zero[zero[:, 0] < n])
        merged = merge_rows(self._rule, before, after, version)
        new[:], new_versions[:] = merged.rows, merged.versions
        self._zero[slot] = [by_row(np.concatenate([merged.zero_blocks, beyond]))]

        e = saved.emitted
        same = np.array_equal(new[:e], before.rows[:e]) and np.array_equal(
            new_versions[:e], saved.versions[:e]
        )
        self.emitted[slot] = e if same else 0
        return same

    def _zero_of(self, slot: int) -> ZeroBlocks:
        parts = self._zero.get(slot)
        return np.concatenate(parts) if parts else NO_ZERO_BLOCKS
