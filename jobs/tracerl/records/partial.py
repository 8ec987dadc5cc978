"""Partial reading: of a trajectory's frames, only the sections that one reader needs.

A rank that computes some layers, or some heads of them, selects their sites from the job's table. What it
reads looks like frames of a smaller table that holds nothing else, so pairing counts what this rank misses
and knows nothing of the rest. A rank that computes some rows needs those frames alone that hold any of them,
and of these the sites that it computes there. Sections are read and verified whole; header and zero blocks
always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tracerl.records.frame import (
    Frame,
    FrameError,
    FrameInfo,
    Places,
    Section,
    check_table,
    frame_bytes,
    preamble_length,
    read_header,
    read_zero_blocks,
    section_payload,
)
from tracerl.records.sites import Site, SiteKind, SiteSlice, SiteTable

_NAMES_BYTES = 256
_ZERO_BLOCKS_BYTES = 512
EVERY_KIND = frozenset(SiteKind)
RowsOf = Callable[[SiteKind, int], NDArray[np.bool_]]
"""Which positions a reader needs of a kind of site, bool [at least n], in sequences that are padded together,
the longest of which has n rows."""


@dataclass(frozen=True)
class Share:
    """Which rows of one trajectory a reader needs."""

    rows: Mapping[SiteKind, NDArray[np.bool_]]
    """By kind of site, bool [rows of the trajectory]."""

    def kinds(self, start: int, stop: int) -> frozenset[SiteKind]:
        """Kinds of sites of which any of the rows start..stop-1 is needed."""
        span = slice(max(start, 0), max(stop, 0))
        return frozenset(kind for kind, needed in self.rows.items() if needed[span].any())

    def of(self, table: SiteTable) -> NDArray[np.bool_]:
        """The same by site of a table of these kinds, bool [rows, sites]."""
        return np.stack([self.rows[site.kind] for site in table.sites], axis=1)


class Selection:
    """Sites of a table, whole or some groups of them, as a table of their own; of all rows, or of `rows`.

    ValueError when the slices are none, not in the order of their sites, or not in the table.
    """

    def __init__(self, whole: SiteTable, slices: Sequence[SiteSlice], rows: RowsOf | None = None) -> None:
        whole.layout(tuple(slices))
        self.whole, self.slices, self.rows = whole, tuple(slices), rows
        self._places = {piece.site: (index, piece) for index, piece in enumerate(slices)}
        sites = [(whole.sites[piece.site], piece.stop - piece.start) for piece in slices]
        self.table = SiteTable(
            tuple(replace(site, dim=site.dim // site.groups * held, groups=held) for site, held in sites),
            whole.audit,
        )
        """The selected sites; a site of which some groups are selected has those alone."""

    def share(self, rows: int, longest: int | None) -> Share | None:
        """Which rows of a trajectory of `rows` are needed, of `longest` in its micro-batch; None: all are.

        So it is when the longest is not known.
        """
        if self.rows is None or longest is None:
            return None
        return Share({kind: self.rows(kind, longest)[:rows] for kind in {s.kind for s in self.table.sites}})

    def holds(self, part: int, parts: int, kinds: frozenset[SiteKind]) -> bool:
        """Whether a part has anything selected of `kinds`; of one that cannot be only its frame tells."""
        written = self._written(part, parts)
        return not written or any(self._needed(piece, kinds) for piece in written)

    def sparse(self, part: int = 0, parts: int = 1, kinds: frozenset[SiteKind] = EVERY_KIND) -> bool:
        """Whether a second round, for the sections alone, saves an eighth or more of a part's bytes.

        A section is read whole: of heads that one rank of the rollout wrote together, all or none.
        """
        written = self._written(part, parts)
        if not written:
            return False
        sizes = dict(zip(written, self.whole.layout(written).widths, strict=True))
        needed = sum(size for piece, size in sizes.items() if self._needed(piece, kinds))
        return 8 * needed <= 7 * sum(sizes.values())

    @property
    def preamble_guess(self) -> int:
        """Bytes that hold the preamble of nearly every frame."""
        return frame_bytes(self.whole, 0, self.whole.whole, names=_NAMES_BYTES) + _ZERO_BLOCKS_BYTES

    def sections(self, info: FrameInfo, kinds: frozenset[SiteKind] = EVERY_KIND) -> list[Section]:
        """Sections of a frame that hold anything selected of `kinds`."""
        return [section for section in info.sections if self._needed(section.slice, kinds)]

    def frame(
        self,
        info: FrameInfo,
        sections: Sequence[Section],
        payloads: Sequence[NDArray[np.uint8]],
        zero_blocks: NDArray[np.int64],
    ) -> Frame:
        """Make the frame of `table` of the sections that were read, each of which holds anything selected."""
        kept, cut = [], []
        for section, payload in zip(sections, payloads, strict=True):
            common = self._common(section.slice)
            assert common is not None
            index, selected = self._places[common.site]
            own = SiteSlice(index, common.start - selected.start, common.stop - selected.start)
            kept.append((own, section.offset, section.length, section.tensor_scale))
            site = self.whole.sites[common.site]
            cut.append(payload if common == section.slice else _cut(site, section.slice, common, payload))
        places = Places(*zip(*kept, strict=True)) if kept else Places((), (), (), ())
        hashes = tuple(section.xxh3 for section in sections)
        own_info = replace(info, places=places, hashes=hashes)
        return Frame(own_info, tuple(cut), self._own_zero_blocks(zero_blocks))

    def _written(self, part: int, parts: int) -> tuple[SiteSlice, ...]:
        return self.whole.select(part, parts) if 0 <= part < parts else ()

    def _needed(self, piece: SiteSlice, kinds: frozenset[SiteKind]) -> bool:
        return self._common(piece) is not None and self.whole.sites[piece.site].kind in kinds

    def _common(self, piece: SiteSlice) -> SiteSlice | None:
        """Selected groups among those of a slice."""
        if piece.site not in self._places:
            return None
        _, selected = self._places[piece.site]
        start, stop = max(piece.start, selected.start), min(piece.stop, selected.stop)
        return SiteSlice(piece.site, start, stop) if start < stop else None

    def _own_zero_blocks(self, zero_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        found = [np.zeros((0, 3), np.int64)]
        for number, (index, selected) in self._places.items():
            site = self.whole.sites[number]
            a_group = site.blocks // site.groups
            first, last = a_group * selected.start, a_group * selected.stop
            block = zero_blocks[:, 2]
            own = zero_blocks[(zero_blocks[:, 1] == number) & (block >= first) & (block < last)]
            found.append(own + np.array([0, index - number, -first]))
        return np.concatenate(found)


class PartialFrame:
    """One frame being read: fetch `ranges`, give them to `take`, until there are none; then `frame` is it."""

    def __init__(
        self,
        selection: Selection,
        length: int,
        part: int = 0,
        parts: int = 1,
        kinds: frozenset[SiteKind] = EVERY_KIND,
    ) -> None:
        """`length` is the frame's, from its handle; `part` of `parts` as its entry says; sites of `kinds`."""
        self._selection, self._length, self._kinds = selection, length, kinds
        self._info: FrameInfo | None = None
        self._sections: list[Section] = []
        self._zero_blocks = np.zeros((0, 3), np.int64)
        first = selection.preamble_guess if selection.sparse(part, parts, kinds) else length
        self.ranges: tuple[tuple[int, int], ...] = ((0, min(first, length)),)
        """What to fetch next: bytes (start, stop)."""
        self.bytes = 0
        """Bytes taken so far."""
        self.frame: Frame | None = None
        """The frame, of the selection's table, which holds copies of what was taken."""

    def take(self, pieces: Sequence[memoryview]) -> None:
        """Take the bytes of `ranges`. FrameError, as of `decode_frame`, when they are not the frame's."""
        self.bytes += sum(len(piece) for piece in pieces)
        if self._info is None:
            head = pieces[0]
            needed = preamble_length(head)
            if len(head) < needed <= self._length and self.ranges[0][1] < needed:
                self.ranges = ((0, needed),)
                return
            info = read_header(head)
            if info.length != self._length:
                raise FrameError("checksum", f"the frame has {self._length} of its {info.length} bytes")
            check_table(info, self._selection.whole)
            self._zero_blocks = read_zero_blocks(info, head, self._selection.whole)
            self._info, self._sections = info, self._selection.sections(info, self._kinds)
            self.ranges = tuple((one.offset, one.offset + one.length) for one in self._sections)
            if len(head) < self._length and self.ranges:
                return
            pieces = [head[start:stop] for start, stop in self.ranges]
        self.ranges = ()
        info = self._info
        payloads = [
            section_payload(info, section, piece).copy()
            for section, piece in zip(self._sections, pieces, strict=True)
        ]
        self.frame = self._selection.frame(info, self._sections, payloads, self._zero_blocks)


def _cut(site: Site, held: SiteSlice, wanted: SiteSlice, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Take groups out of the rows of more of them [n, slice bytes]; their bits need not start a byte."""
    codes, scales, _ = site.slice_bytes(held.start, held.stop)
    width = site.dim // site.groups
    fields = (
        (0, codes, width * site.code_bits),
        (codes, codes + scales, width // site.block * site.scale_bits),
    )
    parts = []
    for start, stop, bits_a_group in fields:
        bits = np.unpackbits(payload[:, start:stop], axis=1, bitorder="little")
        first, last = (bits_a_group * (group - held.start) for group in (wanted.start, wanted.stop))
        parts.append(np.packbits(bits[:, first:last], axis=1, bitorder="little"))
    return np.concatenate([*parts, payload[:, codes + scales :]], axis=1)
