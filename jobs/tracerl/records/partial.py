"""Partial reading: of a frame, only the sections that one reader needs.

A rank that computes some layers, or some heads of them, selects their sites from the job's table. What it
reads looks like frames of a smaller table that holds nothing else, so pairing counts what this rank misses
and knows nothing of the rest. Sections are read and verified whole; header and zero blocks always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from tracerl.records.sites import Site, SiteSlice, SiteTable

_NAMES_BYTES = 256
_ZERO_BLOCKS_BYTES = 512


class Selection:
    """Sites of a table, whole or some groups of them, as a table of their own.

    ValueError when the slices are none, not in the order of their sites, or not in the table.
    """

    def __init__(self, whole: SiteTable, slices: Sequence[SiteSlice]) -> None:
        whole.layout(tuple(slices))
        self.whole, self.slices = whole, tuple(slices)
        self._places = {piece.site: (index, piece) for index, piece in enumerate(slices)}
        sites = [(whole.sites[piece.site], piece.stop - piece.start) for piece in slices]
        self.table = SiteTable(
            tuple(replace(site, dim=site.dim // site.groups * held, groups=held) for site, held in sites),
            whole.audit,
        )
        """The selected sites; a site of which some groups are selected has those alone."""

    def sparse(self, part: int = 0, parts: int = 1) -> bool:
        """Whether a second round, for the sections alone, saves an eighth or more of a part's bytes.

        A section is read whole: of heads that one rank of the rollout wrote together, all or none.
        """
        written = self.whole.select(part, parts) if 0 <= part < parts else ()
        if not written:
            return False
        sizes = dict(zip(written, self.whole.layout(written).widths, strict=True))
        needed = sum(size for piece, size in sizes.items() if self._common(piece) is not None)
        return 8 * needed <= 7 * sum(sizes.values())

    @property
    def preamble_guess(self) -> int:
        """Bytes that hold the preamble of nearly every frame."""
        return frame_bytes(self.whole, 0, self.whole.whole, names=_NAMES_BYTES) + _ZERO_BLOCKS_BYTES

    def sections(self, info: FrameInfo) -> list[Section]:
        """Sections of a frame that hold anything selected."""
        return [section for section in info.sections if self._common(section.slice) is not None]

    def frame(
        self, info: FrameInfo, payloads: Sequence[NDArray[np.uint8]], zero_blocks: NDArray[np.int64]
    ) -> Frame:
        """Make the frame of `table` of what was read: `payloads` are those of `sections(info)`."""
        kept, cut = [], []
        for section, payload in zip(self.sections(info), payloads, strict=True):
            common = self._common(section.slice)
            assert common is not None
            index, selected = self._places[common.site]
            own = SiteSlice(index, common.start - selected.start, common.stop - selected.start)
            kept.append((own, section.offset, section.length, section.tensor_scale))
            site = self.whole.sites[common.site]
            cut.append(payload if common == section.slice else _cut(site, section.slice, common, payload))
        places = Places(*zip(*kept, strict=True)) if kept else Places((), (), (), ())
        hashes = tuple(section.xxh3 for section in self.sections(info))
        own_info = replace(info, places=places, hashes=hashes)
        return Frame(own_info, tuple(cut), self._own_zero_blocks(zero_blocks))

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

    def __init__(self, selection: Selection, length: int, part: int = 0, parts: int = 1) -> None:
        """`length` is the frame's, from its handle; `part` of `parts` as its entry says."""
        self._selection, self._length = selection, length
        self._info: FrameInfo | None = None
        self._zero_blocks = np.zeros((0, 3), np.int64)
        first = selection.preamble_guess if selection.sparse(part, parts) else length
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
            self._info = info
            wanted = self._selection.sections(info)
            self.ranges = tuple((section.offset, section.offset + section.length) for section in wanted)
            if len(head) < self._length and self.ranges:
                return
            pieces = [head[start:stop] for start, stop in self.ranges]
        self.ranges = ()
        info = self._info
        payloads = [
            section_payload(info, section, piece).copy()
            for section, piece in zip(self._selection.sections(info), pieces, strict=True)
        ]
        self.frame = self._selection.frame(info, payloads, self._zero_blocks)


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
