"""Batching: the records of several trajectories as one stream of rows, and guides and routes of its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tracerl.api.job import TensorScaleRule
from tracerl.numerics import Guide, TensorScale
from tracerl.records.pairing import TrajectoryRecords
from tracerl.records.rows import unpack_routes, unpack_starts
from tracerl.records.sites import Site, SiteTable


def _stay(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


class RecordStream:
    """Records of trajectories one after the other: N rows in all, `lengths[i]` of them of trajectory i.

    Rows of a trajectory without a usable record (None, another table, another number of rows) are absent.
    Records are looked up and never used up, so a forward pass may be repeated.
    """

    def __init__(
        self,
        table: SiteTable,
        records: Sequence[TrajectoryRecords | None],
        lengths: Sequence[int],
        put: Callable[..., Tensor] = _stay,
    ) -> None:
        """`put` takes tensors of the host and gives them where the stream is wanted, one behind the other."""
        self.table = table
        usable = [
            record
            if record is not None and record.n_rows == n and record.table.digest == table.digest
            else None
            for record, n in zip(records, lengths, strict=True)
        ]
        sites = len(table.sites)

        def parts(of: Callable[[TrajectoryRecords], Tensor], absent: Callable[[int], Tensor]) -> list[Tensor]:
            known = (absent(n) if r is None else of(r) for r, n in zip(usable, lengths, strict=True))
            return [absent(0), *known]

        # By far the most bytes: put as they are, without a copy of all on the host.
        self.rows: Tensor = put(
            *parts(lambda r: r.rows, lambda n: torch.zeros((n, table.row_bytes), dtype=torch.uint8))
        )
        """uint8 [N, row_bytes]."""
        self.host_present: Tensor = torch.cat(
            parts(lambda r: r.present, lambda n: torch.zeros((n, sites), dtype=torch.bool))
        )
        """bool [N, sites], on the host: to count without waiting for a device."""
        self.present: Tensor = put(self.host_present)
        """bool [N, sites]."""
        self.host_versions: Tensor = torch.cat(
            parts(lambda r: r.versions, lambda n: torch.full((n,), -1, dtype=torch.int32))
        )
        """int32 [N], -1 where no site is present; on the host."""
        self.versions: Tensor = put(self.host_versions)
        """int32 [N]."""
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        shifted = [
            r.zero_blocks + torch.tensor([start, 0, 0])
            for r, start in zip(usable, starts, strict=False)
            if r is not None and len(r.zero_blocks)
        ]
        self._zero_blocks: dict[int, Tensor] = {}
        """By place in the table: bool [N, blocks]."""
        if shifted:
            zero_blocks = torch.cat(shifted)
            for index in sorted(set(zero_blocks[:, 1].tolist())):
                found = zero_blocks[zero_blocks[:, 1] == index]
                zero = torch.zeros((len(self.rows), table.sites[index].blocks), dtype=torch.bool)
                zero[found[:, 0], found[:, 2]] = True
                self._zero_blocks[index] = put(zero)
        self._scales: Tensor | None = None
        if any(site.tensor_scale == TensorScaleRule.PER_VERSION for site in table.sites):
            self._scales = put(*parts(_version_scales, lambda n: torch.zeros((n, sites))))

    def bytes_of(self, site: Site) -> Tensor:
        """Packed bytes of one site, uint8 [N, site.row_bytes], a view."""
        offset = self.table.offset(site)
        return self.rows[:, offset : offset + site.row_bytes]

    def present_at(self, site: Site) -> Tensor:
        """Which rows hold the site, bool [N]."""
        return self.present[:, self.table.index(site)]

    def absent(self, site: Site, oldest: int | None = None) -> int:
        """How many rows do not hold the site, or are older than `oldest`; waits for no device."""
        usable = self.host_present[:, self.table.index(site)]
        if oldest is not None:
            usable = usable & (self.host_versions >= oldest)
        return len(usable) - int(usable.sum())

    def guide(self, site: Site, follow: Tensor | None = None) -> Guide:
        """Guide [N, …] of a quantised site; `follow` bool [N] takes further rows out, such as too old ones.

        ValueError for Routes; KeyError when the site is not in the table.
        """
        if not site.tensor_scale_convention:
            raise ValueError(f"{site.name} is not quantised, so it has no guide")
        present = self.present_at(site)
        packed, scales_at = self.bytes_of(site), site.code_bytes + site.scale_bytes
        return Guide(
            codes=packed[:, : site.code_bytes],
            scales=packed[:, site.code_bytes : scales_at],
            code_bits=site.code_bits,
            scale_bits=site.scale_bits,
            tensor_scale=TensorScale(
                self._tensor_scales(site, packed[:, scales_at:], present), site.tensor_scale_convention
            ),
            zero_blocks=self._zero_blocks.get(self.table.index(site)),
            present=present if follow is None else present & follow,
        )

    def routes(self, site: Site) -> tuple[Tensor, Tensor]:
        """Expert choices of a Routes site: ids int64 [N, top_k], and which are present, bool [N]."""
        return unpack_routes(site, self.bytes_of(site)), self.present_at(site)

    def exact_from(self, site: Site) -> tuple[Tensor, Tensor]:
        """Positions of an ExactFrom site, int64 [N], and which are present, bool [N]."""
        return unpack_starts(self.bytes_of(site)), self.present_at(site)

    def _tensor_scales(self, site: Site, recorded: Tensor, present: Tensor) -> Tensor:
        if site.tensor_scale == TensorScaleRule.FIXED:
            return torch.tensor(site.tensor_scale_value)
        if site.tensor_scale == TensorScaleRule.PER_TOKEN:
            found = recorded.contiguous().view(torch.float32)
        else:
            assert self._scales is not None
            found = self._scales[:, self.table.index(site), None]
        # Absent rows round under the trainer's own scale; 1 keeps their arithmetic finite until then.
        return torch.where(present[:, None], found, 1.0)


def _version_scales(records: TrajectoryRecords) -> Tensor:
    assert records.tensor_scales is not None
    return records.tensor_scales
