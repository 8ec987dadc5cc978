"""Partial reading: the selected sites are bit-equal to those of the whole frames, and little else is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_builders import (
    JOB,
    RUN,
    TRAJECTORY,
    Store,
    make_header,
    make_shape,
    make_spec,
    random_rows,
    write_frames,
)

from tracerl.api.errors import TraceRLError
from tracerl.api.frames import Handle
from tracerl.records.frame import Frame, FrameError, encode_frame, read_header
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble
from tracerl.records.partial import PartialFrame, Selection
from tracerl.records.sites import SiteKind, SiteSlice, SiteTable, audit_table, site_table

TABLE = site_table(make_shape(4), make_spec())
AUDIT = audit_table(make_shape(2), make_spec(secondInput="Recorded"))


def read(selection: Selection, data: bytes) -> tuple[Frame, int]:
    """Read a frame in as many rounds as it takes; returns it and the bytes that were read."""
    part = PartialFrame(selection, len(data))
    rounds = 0
    while part.ranges:
        rounds += 1
        part.take([memoryview(data)[start:stop] for start, stop in part.ranges])
    assert rounds <= 3
    assert part.frame is not None
    return part.frame, part.bytes


def pair(
    store: Store, entries: Sequence[RecordEntry], selection: Selection, tokens: int
) -> TrajectoryRecords:
    opened: dict[Handle, Frame] = {}
    errors: dict[Handle, TraceRLError] = {}
    for entry in entries:
        try:
            opened[entry.handle], _ = read(selection, store.frames[entry.handle])
        except FrameError as error:
            errors[entry.handle] = error

    def fetch(handle: Handle) -> memoryview:
        raise errors[handle]

    return assemble(
        entries,
        fetch,
        selection.table,
        tokens=tokens,
        prompt_tokens=2,
        token_versions=[3] * (tokens - 2),
        job_uid=JOB,
        run_id=RUN,
        trajectory=TRAJECTORY,
        opened=opened,
    )


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    table = draw(st.sampled_from([TABLE, AUDIT]))
    chosen = draw(st.sets(st.integers(0, len(table.sites) - 1), min_size=1))
    slices = []
    for index in sorted(chosen):
        start = draw(st.integers(0, table.sites[index].groups - 1))
        slices.append(SiteSlice(index, start, draw(st.integers(start + 1, table.sites[index].groups))))
    return Selection(table, slices)


@settings(max_examples=80, deadline=None)
@given(selections(), st.integers(1, 5), st.integers(0, 2**16))
def test_what_is_selected_is_bit_equal(selection: Selection, parts: int, seed: int) -> None:
    table, store, rows = selection.whole, Store(), random_rows(selection.whole, 11, seed)
    entries = write_frames(store, table, rows, [3] * 11, parts=parts, chunk=6)
    records = pair(store, entries, selection, 12)
    assert records.missing == {}
    assert records.present.shape == (11, len(selection.table.sites))
    assert torch.equal(records.rows, torch.from_numpy(expected(selection, rows)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_only_rows_that_one_needs_are_read_and_missed(data: st.DataObject) -> None:
    """Some frames are gone: against a look at every row, site and group of the table."""
    sites = data.draw(selections())
    table, n = sites.whole, 11
    masks = {
        kind: np.array(data.draw(st.lists(st.booleans(), min_size=n + 2, max_size=n + 2)))
        for kind in SiteKind
    }
    selection = Selection(table, sites.slices, lambda kind, _: masks[kind])
    share = selection.share(n, n)
    assert share is not None
    assert selection.share(n, None) is sites.share(n, n) is None
    store, rows = Store(), random_rows(table, n, data.draw(st.integers(0, 2**16)))
    parts, chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    entries = write_frames(store, table, rows, [3] * n, parts=parts, chunk=chunk)
    gone = data.draw(st.sets(st.sampled_from(entries)))

    kept, opened = [], {}
    lacking = np.zeros((n, len(sites.slices)), bool)
    for entry in entries:
        held = {
            (index, group)
            for index, start, stop in table.select(entry.part, entry.parts)
            for group in range(start, stop)
        }
        of_it = [
            number
            for number, (index, start, stop) in enumerate(sites.slices)
            if any((index, group) in held for group in range(start, stop))
        ]
        span = range(entry.start, entry.stop)
        wanted = {
            table.sites[sites.slices[number].site].kind
            for number in of_it
            for row in span
            if masks[table.sites[sites.slices[number].site].kind][row]
        }
        kinds = share.kinds(entry.start, entry.stop)
        assert selection.holds(entry.part, entry.parts, kinds) is bool(wanted)
        if entry in gone:
            lacking[entry.start : entry.stop, of_it] = True
        if wanted:
            kept.append(entry)
        if wanted and entry not in gone:
            part = PartialFrame(selection, len(store.frames[entry.handle]), entry.part, entry.parts, kinds)
            while part.ranges:
                part.take([memoryview(store.frames[entry.handle])[a:b] for a, b in part.ranges])
            assert part.frame is not None
            assert {selection.table.sites[piece.site].kind for piece in part.frame.info.slices} == wanted
            opened[entry.handle] = part.frame

    def fetch(handle: Handle) -> memoryview:
        raise FrameError("missing", f"{handle} is gone")

    needed = np.stack([masks[site.kind][:n] for site in selection.table.sites], axis=1)
    assert np.array_equal(share.of(selection.table), needed)
    records = assemble(
        kept,
        fetch,
        selection.table,
        tokens=n + 1,
        prompt_tokens=2,
        token_versions=[3] * (n - 1),
        job_uid=JOB,
        run_id=RUN,
        trajectory=TRAJECTORY,
        opened=opened,
        needed=needed,
    )
    missing = (needed & lacking).any(axis=1)
    assert np.array_equal(records.faults > 0, missing)
    assert records.missing == ({"missing": missing.sum()} if missing.any() else {})
    present = records.present.numpy()
    assert present[needed & ~lacking].all()
    assert not present[lacking].any()
    right = expected(sites, rows)
    for number, site in enumerate(selection.table.sites):
        columns = slice(selection.table.columns[number], selection.table.columns[number + 1])
        found = records.rows.numpy()[:, columns]
        assert np.array_equal(found, np.where(present[:, [number]], right[:, columns], 0)), site.name


def expected(selection: Selection, rows: np.ndarray) -> np.ndarray:
    """Bits of the selected groups, through Python integers."""
    table, columns = selection.whole, []
    for site, selected in zip(selection.table.sites, selection.slices, strict=True):
        whole = table.sites[selected.site]
        first = table.offset(whole)
        if site == whole:
            columns.append(rows[:, first : first + whole.row_bytes])
            continue
        for size, bits, out in (
            (whole.code_bytes, whole.dim // whole.groups * whole.code_bits, site.code_bytes),
            (whole.scale_bytes, whole.blocks // whole.groups * whole.scale_bits, site.scale_bytes),
        ):
            numbers = [int.from_bytes(row[first : first + size].tobytes(), "little") for row in rows]
            mask = (1 << bits * (selected.stop - selected.start)) - 1
            cut = [(number >> bits * selected.start & mask).to_bytes(out, "little") for number in numbers]
            columns.append(np.array([list(data) for data in cut], np.uint8).reshape(-1, out))
            first += size
    return np.concatenate(columns, axis=1)


def layer(table: SiteTable, number: int) -> Selection:
    slices = [SiteSlice(i, 0, s.groups) for i, s in enumerate(table.sites) if s.layer == number]
    return Selection(table, slices)


def test_only_the_sections_are_read() -> None:
    selection = layer(TABLE, 3)
    assert selection.sparse()
    rows = random_rows(TABLE, 400)
    quantised = [index for index, site in enumerate(TABLE.sites) if site.blocks]
    zero = np.array([[row, index, 0] for row in range(0, 400, 2) for index in quantised])
    mine = [piece.site for piece in selection.slices if TABLE.sites[piece.site].blocks]
    for zero_blocks in (zero[:0], zero):
        data = encode_frame(make_header(TABLE, 0, 400), TABLE, rows, zero_blocks)
        frame, size = read(selection, data)
        # The preamble, twice where the guess was too short, and the sections.
        preamble = 2 * selection.preamble_guess + 12 * len(zero_blocks)
        assert size <= 400 * selection.table.row_bytes + preamble
        assert len(frame.zero_blocks) == np.isin(zero_blocks[:, 1], mine).sum()
    # What needs most of a frame reads it at once.
    most = Selection(TABLE, TABLE.whole[1:])
    assert not most.sparse()
    frame, size = read(most, data)
    assert size == len(data)


def test_zero_blocks_of_selected_groups() -> None:
    key = next(i for i, site in enumerate(TABLE.sites) if site.kind is SiteKind.KEY)
    assert (TABLE.sites[key].groups, TABLE.sites[key].blocks) == (4, 4)
    selection = Selection(TABLE, [SiteSlice(key, 1, 3)])
    zero = np.array([[0, key, 0], [1, key, 1], [2, key, 2], [3, key, 3], [4, key + 1, 1]])
    data = encode_frame(make_header(TABLE, 0, 6), TABLE, random_rows(TABLE, 6), zero)
    frame, _ = read(selection, data)
    assert frame.zero_blocks.tolist() == [[1, 0, 0], [2, 0, 1]]


def test_a_rank_that_selects_nothing_of_a_part_misses_nothing() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    entries = write_frames(store, TABLE, rows, [3] * 8, parts=2)
    routes = [SiteSlice(i, 0, 1) for i, site in enumerate(TABLE.sites) if site.kind is SiteKind.ROUTES]
    records = pair(store, entries, Selection(TABLE, routes), 9)
    assert records.missing == {}
    assert records.present.all()
    only = [entry for entry in entries if entry.part == 1]
    assert pair(store, only, Selection(TABLE, routes), 9).missing == {"missing": 8}


def test_damage_of_what_is_read_is_found() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    (entry,) = write_frames(store, TABLE, rows, [3] * 8)
    data = store.frames[entry.handle]
    selection = layer(TABLE, 3)
    clean = pair(store, [entry], selection, 9)
    info = read_header(data)
    sections = [range(s.offset, s.offset + s.length) for s in selection.sections(info)]
    for at in range(0, len(data), 3):
        store.frames[entry.handle] = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        records = pair(store, [entry], selection, 9)
        if at < info.preamble_bytes or any(at in section for section in sections):
            assert records.missing.total() == 8
            assert not records.rows.any()
        else:
            assert torch.equal(records.rows, clean.rows)
    for length in (0, 5, 150, 400, len(data) - 1):
        store.frames[entry.handle] = data[:length]
        assert pair(store, [entry], selection, 9).missing == {"checksum": 8}


def test_slices_that_no_table_has() -> None:
    for slices in ([], [SiteSlice(1, 0, 1), SiteSlice(0, 0, 1)], [SiteSlice(0, 1, 1)], [SiteSlice(99, 0, 1)]):
        with pytest.raises(ValueError, match=r"slices|groups|sections"):
            Selection(TABLE, slices)
