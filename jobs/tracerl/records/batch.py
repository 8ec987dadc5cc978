"""Batching: the records of a micro-batch's trajectories as padded tensors, one site at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracerl.api.job import TensorScaleRule
from tracerl.numerics import Guide, TensorScale
from tracerl.records.pairing import TrajectoryRecords
from tracerl.records.rows import unpack_routes
from tracerl.records.sites import Site


def batch_guide(
    records: Sequence[TrajectoryRecords | None],
    site: Site,
    rows: int,
    device: torch.device | str = "cpu",
    *,
    mask: Tensor | None = None,
) -> Guide:
    """Collate one site into a guide of shape [B, rows, ...].

    A row is present when its trajectory recorded it; padding and missing rows are not. `mask` bool [B, rows]
    takes further rows out, such as those that are too old to follow. ValueError when a trajectory has more
    than `rows` rows, or for Routes; KeyError when the site is not in the table of a trajectory.
    """
    if not site.tensor_scale_convention:
        raise ValueError(f"{site.name} is not quantised, so it has no guide")
    collation = _Collation(records, site, rows)
    packed = collation.packed
    codes, scales, tensor_scales = np.split(
        packed, [site.code_bytes, site.code_bytes + site.scale_bytes], axis=1
    )
    present = collation.pad(collation.present)
    if mask is not None:
        present &= mask.to(present.device)
    tensor_scale = torch.tensor(site.tensor_scale_value)
    if site.tensor_scale != TensorScaleRule.FIXED:
        if site.tensor_scale == TensorScaleRule.PER_TOKEN:
            values = np.ascontiguousarray(tensor_scales).view("<f4")
        else:
            values = collation.tensor_scales[:, None]
        # Absent rows round under the trainer's own scale; 1 keeps their arithmetic finite until then.
        tensor_scale = collation.pad(np.where(collation.present[:, None], values, np.float32(1)), fill=1)
    zero_blocks = collation.zero_blocks(site)
    return Guide(
        codes=collation.pad(codes).to(device),
        scales=collation.pad(scales).to(device),
        code_bits=site.code_bits,
        scale_bits=site.scale_bits,
        tensor_scale=TensorScale(tensor_scale.to(device), site.tensor_scale_convention),
        zero_blocks=None if zero_blocks is None else zero_blocks.to(device),
        present=present.to(device),
    )


def batch_routes(
    records: Sequence[TrajectoryRecords | None],
    site: Site,
    rows: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Collate the expert choices of a Routes site: ids int64 [B, rows, top_k], and present bool [B, rows].

    Ids of absent rows are 0 and mean nothing. ValueError when a trajectory has more than `rows` rows;
    KeyError when the site is not in the table of a trajectory.
    """
    collation = _Collation(records, site, rows)
    ids = unpack_routes(site, collation.pad(collation.packed).to(device))
    return ids, collation.pad(collation.present).to(device)


class _Collation:
    """One site's rows of all trajectories, one after the other, and where they go in [B, rows].

    packed uint8 [total, row_bytes]; present bool [total]. Python works once a trajectory, never once a row.
    """

    def __init__(self, records: Sequence[TrajectoryRecords | None], site: Site, rows: int) -> None:
        self._shape = (len(records), rows)
        self._kept = [(b, record) for b, record in enumerate(records) if record is not None]
        lengths = np.zeros(len(records), np.int64)
        packed, present = [np.zeros((0, site.row_bytes), np.uint8)], [np.zeros(0, np.bool_)]
        table = None
        for b, record in self._kept:
            if record.n_rows > rows:
                raise ValueError(f"a trajectory has {record.n_rows} rows, more than the {rows} of the batch")
            if record.table is not table:  # one table object serves all trajectories of an engine
                table = record.table
                self._index = table.index(site)
                columns = slice(table.columns[self._index], table.columns[self._index + 1])
            lengths[b] = record.n_rows
            packed.append(record.rows.numpy()[:, columns])
            present.append(record.present.numpy()[:, self._index])
        self.packed: NDArray[np.uint8] = np.concatenate(packed)
        self.present: NDArray[np.bool_] = np.concatenate(present)
        self._place = np.arange(rows) < lengths[:, None]

    def pad(self, values: NDArray[np.generic], fill: int = 0) -> Tensor:
        """Spread [total, ...] to [B, rows, ...]."""
        out = np.full((*self._shape, *values.shape[1:]), fill, values.dtype)
        out[self._place] = values
        return torch.from_numpy(out)

    @property
    def tensor_scales(self) -> NDArray[np.float32]:
        """PerVersion scales [total], 0 where absent."""
        scales = [r.tensor_scales for _, r in self._kept if r.tensor_scales is not None]
        return np.concatenate([np.zeros(0, np.float32), *(s.numpy()[:, self._index] for s in scales)])

    def zero_blocks(self, site: Site) -> Tensor | None:
        """Zero blocks as bool [B, rows, blocks], None when there are none."""
        found = [(b, r.zero_blocks.numpy()) for b, r in self._kept if len(r.zero_blocks)]
        found = [(b, blocks[blocks[:, 1] == self._index]) for b, blocks in found]
        if not any(len(blocks) for _, blocks in found):
            return None
        out = torch.zeros((*self._shape, site.blocks), dtype=torch.bool)
        for b, blocks in found:
            out[b, blocks[:, 0], blocks[:, 2]] = True
        return out
