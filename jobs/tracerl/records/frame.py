"""Record frames: bytes of one contiguous row range of one part of a trajectory (or a cached prefix).

The format is specified in ``docs/reference/record-format.md``; this module writes it and reads it, and
nothing else knows about bytes. Every length is checked before it is used, so that bytes of any origin give a
frame or a `FrameError`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tracerl.api.errors import TraceRLError
from tracerl.api.frames import FrameKey
from tracerl.records.sites import Layout, SiteSlice, SiteTable

MAGIC = b"TRACEREC"
FORMAT_VERSION = 1
FLAG_AUDIT = 1
FLAG_PREFIX = 2
_FIXED = struct.Struct("<8sHHIQIIIIIIIIQ32sHHHH")
_HEADER_BYTES_FIELD, _ZERO_BLOCKS_FIELD = 3, 11
_SECTION_FIELDS = "IHHQQQfI"
_SECTION_BYTES = struct.calcsize(f"<{_SECTION_FIELDS}")
# An entry of the section table as a reader takes it apart: its place, the hash, the rest.
_SECTION_PLACE, _SECTION_REST = struct.Struct("<IHHQQ"), struct.Struct("<fI")
_SECTION_PARTS = f"{_SECTION_PLACE.size}sQ{_SECTION_REST.size}s"
_ZERO_BLOCK_BYTES = 12
_HASH_BYTES = 8
_STRING_ALIGNMENT = 8
_SECTION_ALIGNMENT = 16
_ZEROS = bytes(_SECTION_ALIGNMENT)
_MAX_U16 = 2**16 - 1
_MAX_I32 = 2**31 - 1
_MAX_LAYOUTS = 256

Reason = Literal["checksum", "version", "site_table", "shape", "run"]
Buffer = bytes | bytearray | memoryview


class FrameError(TraceRLError):
    """Bytes that are not the frame that is wanted.

    `reason`: ``checksum`` (damaged, truncated or no frame at all), ``version`` (unknown format version),
    ``site_table`` (another table), ``shape`` (intact, but not the layout that the format or the table
    prescribes), ``run`` (another job, run or trajectory).
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Identity of a frame, given by its writer.

    Rows row_start..row_stop-1 (tokens counted from the start of the trajectory) of part `part` of `parts`,
    computed under policy `version`, recorded by the table of `table_digest` (64 hex digits). Exactly one of
    `trajectory` and `prefix` is set; a prefix is named ``<rollout instance>/<cache-fill id>``.
    """

    job_uid: str
    run_id: str
    trajectory: str
    part: int
    parts: int
    row_start: int
    row_stop: int
    version: int
    table_digest: str
    prefix: str | None = None
    audit: bool = False

    @property
    def rows(self) -> int:
        """Rows in the frame."""
        return self.row_stop - self.row_start

    @property
    def key(self) -> FrameKey:
        """Key under which a transport stores the frame; a prefix stands in for the trajectory."""
        return FrameKey(
            job_uid=self.job_uid,
            run_id=self.run_id,
            trajectory=self.trajectory if self.prefix is None else self.prefix,
            part=self.part,
            parts=self.parts,
            row_start=self.row_start,
            row_stop=self.row_stop,
            version=self.version,
        )


class Section(NamedTuple):
    """One section: groups of one site for all rows; `offset` and `length` in bytes from the frame's start."""

    slice: SiteSlice
    offset: int
    length: int
    xxh3: int
    tensor_scale: float


class Places(NamedTuple):
    """All of a section table but the hashes, a column each."""

    slices: tuple[SiteSlice, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    tensor_scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """A verified header: identity, where the sections are and what they hold, and where the rest is."""

    header: FrameHeader
    places: Places
    hashes: tuple[int, ...]
    """XXH3-64 of each section."""
    header_bytes: int
    zero_blocks: int
    zero_blocks_xxh3: int
    length: int

    @property
    def slices(self) -> tuple[SiteSlice, ...]:
        """What the sections hold."""
        return self.places.slices

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections."""
        slices, offsets, lengths, scales = self.places
        return tuple(map(Section, slices, offsets, lengths, self.hashes, scales))

    @property
    def preamble_bytes(self) -> int:
        """Bytes of header and zero-block list: what a ranged reader fetches before any section."""
        return self.header_bytes + self.zero_blocks * _ZERO_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Frame:
    """A verified frame. `payloads[i]` is uint8 [rows, bytes a row] of `info.sections[i]`, a view.

    `zero_blocks` int64 [m, 3]: (row within the frame, site index, block within the site), sorted.
    """

    info: FrameInfo
    payloads: tuple[NDArray[np.uint8], ...]
    zero_blocks: NDArray[np.int64]

    @property
    def header(self) -> FrameHeader:
        """Identity of the frame."""
        return self.info.header


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def encode_frame(
    header: FrameHeader,
    table: SiteTable,
    rows: NDArray[np.uint8],
    zero_blocks: NDArray[np.int64] | None = None,
    *,
    slices: Sequence[SiteSlice] | None = None,
    tensor_scales: Mapping[int, float] | None = None,
) -> bytes:
    """Write a frame.

    rows uint8 [n, bytes a row]: the slices' rows side by side (by default all sites of the table), n =
    header.rows >= 1. zero_blocks int64 [m, 3]: (row within `rows`, site index, block within the site), any
    order. tensor_scales: the float32 scale of each PerVersion site by site index. ValueError when the
    arguments contradict each other: that is a fault of the caller.
    """
    chosen = table.whole if slices is None else tuple(slices)
    strings = _check_header(header, table)
    layout = table.layout(chosen)
    widths = layout.widths
    if rows.dtype != np.uint8 or rows.shape != (header.rows, sum(widths)):
        raise ValueError(f"rows must be uint8 [{header.rows}, {sum(widths)}], not {rows.dtype} {rows.shape}")
    exceptions = _zero_block_bytes(zero_blocks, header.rows, chosen, table)
    scales = _section_scales(table, chosen, layout, tensor_scales or {})

    names = b"".join(strings)
    names += bytes(-len(names) % _STRING_ALIGNMENT)
    header_bytes = _FIXED.size + len(names) + _SECTION_BYTES * len(chosen) + _HASH_BYTES

    offset = header_bytes + len(exceptions)
    entries: list[float] = []
    body, column = [exceptions], 0
    for piece, width, scale in zip(chosen, widths, scales, strict=True):
        padding = -offset % _SECTION_ALIGNMENT
        offset += padding
        payload = rows[:, column : column + width].tobytes()
        entries += (*piece, offset, len(payload), xxhash.xxh3_64_intdigest(payload), scale, 0)
        body += (_ZEROS[:padding], payload)
        offset += len(payload)
        column += width

    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        (FLAG_AUDIT if header.audit else 0) | (FLAG_PREFIX if header.prefix is not None else 0),
        header_bytes,
        offset,
        header.part,
        header.parts,
        header.row_start,
        header.row_stop,
        header.version,
        len(chosen),
        len(exceptions) // _ZERO_BLOCK_BYTES,
        0,
        xxhash.xxh3_64_intdigest(exceptions),
        bytes.fromhex(header.table_digest),
        *(len(text) for text in strings),
        0,
    )
    head = fixed + names + struct.pack(f"<{_SECTION_FIELDS * len(chosen)}", *entries)
    return b"".join((head, struct.pack("<Q", xxhash.xxh3_64_intdigest(head)), *body))


def frame_bytes(table: SiteTable, rows: int, slices: Sequence[SiteSlice], *, names: int) -> int:
    """Length of a frame of `rows` rows without zero blocks; its three names take `names` bytes together."""
    length = _FIXED.size + _align(names, _STRING_ALIGNMENT) + _SECTION_BYTES * len(slices) + _HASH_BYTES
    for width in table.layout(tuple(slices)).widths:
        length = _align(length, _SECTION_ALIGNMENT) + rows * width
    return length


def frame_bytes_bound(table: SiteTable, rows: int, zero_blocks: int, *, names: int) -> int:
    """Give a length that no frame of all sites exceeds, for less than the exact one; `names` as above."""
    header = _FIXED.size + names + _STRING_ALIGNMENT + _HASH_BYTES
    sections = (_SECTION_BYTES + _SECTION_ALIGNMENT) * len(table.sites)
    return header + sections + _ZERO_BLOCK_BYTES * zero_blocks + table.row_bytes * rows


def _check_header(header: FrameHeader, table: SiteTable) -> list[bytes]:
    """Check what a writer gives; returns the three names as UTF-8."""
    if header.table_digest != table.digest:
        raise ValueError("header.table_digest is not the digest of the table")
    if header.audit != table.audit:
        raise ValueError("an audit frame takes an audit table, and only that")
    if not 0 <= header.part < header.parts <= _MAX_I32:
        raise ValueError(f"part {header.part} of {header.parts} does not exist")
    if not 0 <= header.row_start < header.row_stop <= _MAX_I32:
        raise ValueError(f"rows {header.row_start}..{header.row_stop} are not a range")
    if not 0 <= header.version <= _MAX_I32:
        raise ValueError(f"version {header.version} is not in 0..{_MAX_I32}")
    if (header.prefix is None) != bool(header.trajectory):
        raise ValueError("a frame belongs either to a trajectory or to a prefix")
    subject = header.trajectory if header.prefix is None else header.prefix
    strings = [header.job_uid.encode(), header.run_id.encode(), subject.encode()]
    for text in strings:
        if not 1 <= len(text) <= _MAX_U16:
            raise ValueError("job UID, run id and trajectory or prefix id take 1 to 65535 bytes each")
    return strings


def _section_scales(
    table: SiteTable, slices: Sequence[SiteSlice], layout: Layout, given: Mapping[int, float]
) -> list[float]:
    scales = []
    for piece, fixed in zip(slices, layout.tensor_scales, strict=True):
        scale = given.get(piece.site)
        if fixed is not None:
            if scale is not None:
                raise ValueError(f"{table.sites[piece.site].name} has no tensor scale a version")
            scale = fixed
        elif scale is None or not 0 < scale < float("inf"):
            raise ValueError(f"{table.sites[piece.site].name} needs its tensor scale, a positive number")
        scales.append(scale)
    return scales


def _zero_block_bytes(
    zero_blocks: NDArray[np.int64] | None, rows: int, slices: Sequence[SiteSlice], table: SiteTable
) -> bytes:
    if zero_blocks is None or not len(zero_blocks):
        return b""
    unique = np.unique(zero_blocks, axis=0)
    if not _zero_blocks_fit(unique, rows, slices, table):
        raise ValueError("a zero block is outside the rows or sections of the frame")
    return unique.astype("<u4").tobytes()


def _zero_blocks_fit(
    zero_blocks: NDArray[np.int64], rows: int, slices: Sequence[SiteSlice], table: SiteTable
) -> bool:
    low = np.zeros(len(table.sites), dtype=np.int64)
    high = np.zeros(len(table.sites), dtype=np.int64)
    for piece in slices:
        site = table.sites[piece.site]
        a_group = site.blocks // site.groups
        low[piece.site], high[piece.site] = a_group * piece.start, a_group * piece.stop
    row, index, block = zero_blocks.T
    if not bool(((row >= 0) & (row < rows) & (index >= 0) & (index < len(table.sites))).all()):
        return False
    return bool(((block >= low[index]) & (block < high[index])).all())


def preamble_length(buffer: Buffer) -> int:
    """Bytes of header and zero-block list, as yet unverified, of which `buffer` holds the start.

    FrameError ``checksum`` when it ends before it says so.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < _FIXED.size:
        raise FrameError("checksum", f"the frame ends inside its header, after {len(view)} bytes")
    fields = _FIXED.unpack_from(view)
    header_bytes: int = fields[_HEADER_BYTES_FIELD]
    zero_blocks: int = fields[_ZERO_BLOCKS_FIELD]
    return header_bytes + zero_blocks * _ZERO_BLOCK_BYTES


def read_header(buffer: Buffer) -> FrameInfo:
    """Read and verify a frame's header; `buffer` may end anywhere after it.

    Raises FrameError: ``checksum`` when the header is not whole and intact, ``version`` for an unknown format
    version, ``shape`` when its fields contradict each other.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < _FIXED.size:
        raise FrameError("checksum", f"the frame ends inside its header, after {len(view)} bytes")
    (
        magic,
        format_version,
        flags,
        header_bytes,
        length,
        part,
        parts,
        row_start,
        row_stop,
        version,
        section_count,
        zero_blocks,
        reserved,
        zero_blocks_xxh3,
        digest,
        *sizes,
        padding,
    ) = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("checksum", "the bytes do not start with a frame's magic")
    if format_version != FORMAT_VERSION:
        raise FrameError("version", f"format version {format_version}; this reader knows {FORMAT_VERSION}")
    names_bytes = _align(sum(sizes), _STRING_ALIGNMENT)
    if header_bytes != _FIXED.size + names_bytes + _SECTION_BYTES * section_count + _HASH_BYTES:
        raise FrameError("checksum", f"the header's length of {header_bytes} bytes is not that of its fields")
    if len(view) < header_bytes:
        raise FrameError("checksum", f"the frame ends inside its header, after {len(view)} bytes")
    head = view[: header_bytes - _HASH_BYTES]
    (stored,) = struct.unpack_from("<Q", view, header_bytes - _HASH_BYTES)
    if xxhash.xxh3_64_intdigest(head) != stored:
        raise FrameError("checksum", "the header's hash does not match")

    if reserved or padding or flags & ~(FLAG_AUDIT | FLAG_PREFIX):
        raise FrameError("shape", "a reserved field of the header is not 0")
    if not part < parts <= _MAX_I32:
        raise FrameError("shape", f"part {part} of {parts} does not exist")
    if not row_start < row_stop <= _MAX_I32:
        raise FrameError("shape", f"rows {row_start}..{row_stop} are not a range")
    if version > _MAX_I32:
        raise FrameError("shape", f"version {version} is above {_MAX_I32}")
    if not section_count:
        raise FrameError("shape", "the frame has no sections")
    job_uid, run_id, subject = _strings(view[_FIXED.size : _FIXED.size + names_bytes], sizes)
    header = FrameHeader(
        job_uid=job_uid,
        run_id=run_id,
        trajectory="" if flags & FLAG_PREFIX else subject,
        part=part,
        parts=parts,
        row_start=row_start,
        row_stop=row_stop,
        version=version,
        table_digest=digest.hex(),
        prefix=subject if flags & FLAG_PREFIX else None,
        audit=bool(flags & FLAG_AUDIT),
    )
    fields = struct.unpack_from(f"<{_SECTION_PARTS * section_count}", view, _FIXED.size + names_bytes)
    places = _places(
        fields[::3],
        fields[2::3],
        rows=row_stop - row_start,
        after=header_bytes + zero_blocks * _ZERO_BLOCK_BYTES,
        length=length,
    )
    return FrameInfo(header, places, fields[1::3], header_bytes, zero_blocks, zero_blocks_xxh3, length)


def _strings(names: memoryview, sizes: Sequence[int]) -> list[str]:
    if any(names[sum(sizes) :]):
        raise FrameError("shape", "the padding after the names is not 0")
    texts, start = [], 0
    for size in sizes:
        try:
            texts.append(str(names[start : start + size], "utf-8"))
        except UnicodeDecodeError:
            raise FrameError("shape", "a name in the header is not UTF-8") from None
        if not size:
            raise FrameError("shape", "a name in the header is empty")
        start += size
    return texts


@lru_cache(maxsize=_MAX_LAYOUTS)
def _places(
    before: tuple[bytes, ...], behind: tuple[bytes, ...], *, rows: int, after: int, length: int
) -> Places:
    """Read and check all of the sections but their hashes; remembered, since most frames look the same.

    before, behind: the bytes of each section's entry before and behind its hash; `after` is where the bytes
    before the first section end, `length` the frame's.
    """
    slices: list[SiteSlice] = []
    offsets, lengths, scales = [], [], []
    last, end = -1, after
    for place, rest in zip(before, behind, strict=True):
        site, start, stop, offset, size = _SECTION_PLACE.unpack(place)
        scale, reserved = _SECTION_REST.unpack(rest)
        if reserved or start >= stop or size % rows or not 0 <= scale < float("inf"):
            raise FrameError("shape", f"section {len(slices)} contradicts itself")
        if site <= last:
            raise FrameError("shape", "sections are not in the order of their sites")
        end = _align(end, _SECTION_ALIGNMENT)
        if offset != end:
            raise FrameError("shape", f"a section lies at byte {offset} instead of {end}")
        slices.append(SiteSlice(site, start, stop))
        offsets.append(offset)
        lengths.append(size)
        scales.append(scale)
        last, end = site, end + size
    if end != length:
        raise FrameError("shape", f"the frame's length is given as {length} instead of {end} bytes")
    return Places(tuple(slices), tuple(offsets), tuple(lengths), tuple(scales))


def check_table(info: FrameInfo, table: SiteTable) -> None:
    """Check that a header fits a site table; FrameError ``site_table`` or ``shape`` when not."""
    if (info.header.table_digest, info.header.audit) != (table.digest, table.audit):
        raise FrameError("site_table", f"the frame's site table is {info.header.table_digest[:12]}…")
    try:
        layout = table.layout(info.slices)
    except ValueError as error:
        raise FrameError("shape", str(error)) from None
    rows = info.header.rows
    for length, width in zip(info.places.lengths, layout.widths, strict=True):
        if length != rows * width:
            raise FrameError("shape", f"{length} bytes are not {rows} rows of {width} bytes")
    if info.places.tensor_scales == layout.tensor_scales:
        return
    for found, scale in zip(info.places.tensor_scales, layout.tensor_scales, strict=True):
        if found != scale and (scale is not None or not 0 < found < float("inf")):
            raise FrameError("shape", f"a section has a tensor scale of {found}")


def section_payload(info: FrameInfo, section: Section, data: Buffer) -> NDArray[np.uint8]:
    """Verify one section fetched by its own (offset, length); returns uint8 [rows, bytes a row], a view."""
    view = memoryview(data).cast("B")
    if len(view) != section.length:
        raise FrameError("checksum", f"the section of site {section.slice.site} is damaged: not whole")
    return _payload(info.header.rows, section.slice, section.xxh3, view)


def _payload(rows: int, piece: SiteSlice, xxh3: int, view: memoryview) -> NDArray[np.uint8]:
    if xxhash.xxh3_64_intdigest(view) != xxh3:
        raise FrameError("checksum", f"the section of site {piece.site} is damaged")
    return np.ndarray((rows, len(view) // rows), np.uint8, view)


def read_zero_blocks(info: FrameInfo, preamble: Buffer, table: SiteTable | None = None) -> NDArray[np.int64]:
    """Verify and read the zero-block list int64 [m, 3]; `preamble` holds at least `preamble_bytes` bytes."""
    data = memoryview(preamble).cast("B")[info.header_bytes : info.preamble_bytes]
    if (
        len(data) != info.zero_blocks * _ZERO_BLOCK_BYTES
        or xxhash.xxh3_64_intdigest(data) != info.zero_blocks_xxh3
    ):
        raise FrameError("checksum", "the list of zero blocks is damaged")
    if not info.zero_blocks:
        return np.zeros((0, 3), np.int64)
    found = np.frombuffer(data, dtype="<u4").reshape(-1, 3).astype(np.int64)
    if len(found) > 1:
        step = np.diff(found, axis=0)
        first = np.take_along_axis(step, (step != 0).argmax(axis=1)[:, None], axis=1)
        if not bool((first > 0).all()):
            raise FrameError("shape", "the list of zero blocks is not sorted")
    if table is not None and not _zero_blocks_fit(found, info.header.rows, info.slices, table):
        raise FrameError("shape", "a zero block is outside the frame")
    return found


def decode_frame(buffer: Buffer, table: SiteTable | None = None) -> Frame:
    """Read and verify a whole frame; with `table`, also that the frame was written under it.

    Raises FrameError (see there) for any bytes that `encode_frame` would not have written.
    """
    view = memoryview(buffer).cast("B")
    info = read_header(view)
    if len(view) != info.length:
        raise FrameError("checksum", f"the frame has {len(view)} of its {info.length} bytes")
    if table is not None:
        check_table(info, table)
    zero_blocks = read_zero_blocks(info, view, table)
    payloads, end, rows = [], info.preamble_bytes, info.header.rows
    slices, offsets, lengths, _ = info.places
    for piece, start, length, xxh3 in zip(slices, offsets, lengths, info.hashes, strict=True):
        if start != end and view[end:start] != _ZEROS[: start - end]:
            raise FrameError("checksum", "the padding before a section is not 0")
        end = start + length
        payloads.append(_payload(rows, piece, xxh3, view[start:end]))
    return Frame(info, tuple(payloads), zero_blocks)
