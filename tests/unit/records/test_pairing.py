"""Pairing: which rows a trajectory gets, and what is counted for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    handle_of,
    make_header,
    make_shape,
    make_spec,
    random_rows,
    slice_rows,
    write_frames,
)

from tracerl.api.frames import Handle
from tracerl.api.job import Reprefill
from tracerl.records.frame import FrameError, encode_frame
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble, read_entries
from tracerl.records.sites import SiteKind, SiteTable, audit_table, site_table

TABLE = site_table(make_shape(2), make_spec())


def pair(
    store: Store,
    entries: Sequence[RecordEntry],
    versions: Sequence[int],
    prompt: int,
    table: SiteTable = TABLE,
    **changes: Any,
) -> TrajectoryRecords:
    arguments = {"job_uid": JOB, "run_id": RUN, "trajectory": TRAJECTORY, **changes}
    return assemble(
        entries,
        store.get,
        table,
        tokens=prompt + len(versions),
        prompt_tokens=prompt,
        token_versions=versions,
        **arguments,
    )


def whole(records: TrajectoryRecords) -> list[bool]:
    return records.present.all(dim=1).tolist()


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("table", [TABLE, audit_table(make_shape(2), make_spec(secondInput="Recorded"))])
def test_frames_of_all_parts_give_the_rows_back(table: SiteTable, parts: int) -> None:
    store, rows = Store(), random_rows(table, 19, seed=parts)
    entries = write_frames(store, table, rows, [3] * 19, parts=parts)
    records = pair(store, entries[::-1], [3] * 15, 5, table)
    assert torch.equal(records.rows, torch.from_numpy(rows))
    assert records.present.all()
    assert (records.n_rows, records.missing, records.mixed) == (19, {}, 0)
    assert records.versions.tolist() == [3] * 19
    assert records.bytes == sum(len(frame) for frame in store.frames.values())


def test_a_generated_row_has_the_version_that_sampled_its_next_token() -> None:
    # Prompt of 3; tokens 3 and 4 sampled under 7, tokens 5 and 6 under 8: rows 0..3 need 7, rows 4, 5 need 8.
    rows = random_rows(TABLE, 6)
    right = [7, 7, 7, 7, 8, 8]
    store = Store()
    records = pair(store, write_frames(store, TABLE, rows, right), [7, 7, 8, 8], 3)
    assert (records.versions.tolist(), records.missing, records.mixed) == (right, {}, 4)
    for row in range(6):
        wrong = list(right)
        wrong[row] = 15 - wrong[row]
        store = Store()
        records = pair(store, write_frames(store, TABLE, rows, wrong), [7, 7, 8, 8], 3)
        assert records.missing == {"version": 1}
        assert whole(records) == [other != row for other in range(6)]
        assert records.versions[row] == -1
        assert not records.rows[row].any()


def test_rows_that_later_tokens_attended() -> None:
    rows = random_rows(TABLE, 6)
    store = Store()
    entries = write_frames(store, TABLE, rows, [8] * 6)
    attended = pair(store, entries, [7, 7, 8, 8], 3, reprefill=Reprefill.AS_ATTENDED)
    assert (attended.versions.tolist(), attended.missing, attended.mixed) == ([8] * 6, {}, 4)
    sampled = pair(store, entries, [7, 7, 8, 8], 3, reprefill=Reprefill.AS_SAMPLED)
    assert (sampled.missing, sampled.mixed) == ({"version": 4}, 4)


def test_what_is_not_missing() -> None:
    # No response token: an aborted sample needs no rows. One token in all: there is no row.
    for versions, prompt, rows in (([], 5, 4), ([], 0, 0), ([2], 0, 0), ([2], 1, 1)):
        records = pair(Store(), [], versions, prompt)
        wanted = {"missing": rows} if versions and rows else {}
        assert (records.n_rows, records.missing) == (rows, wanted)
        assert not records.present.any()
    # A job that records nothing misses nothing.
    empty = site_table(make_shape(2), make_spec(method="BF16", replay=False))
    records = pair(Store(), [], [1, 1], 2, empty)
    assert (records.present.shape, records.missing) == ((3, 0), {})


def test_frames_of_the_other_table_are_left_alone() -> None:
    audit = audit_table(make_shape(2), make_spec())
    store = Store()
    rows, audit_rows = random_rows(TABLE, 9), random_rows(audit, 9, seed=1)
    entries = write_frames(store, TABLE, rows, [3] * 9)
    light = len(b"".join(store.frames.values()))
    entries += write_frames(store, audit, audit_rows, [3] * 9)
    records, audited = pair(store, entries, [3] * 5, 5), pair(store, entries, [3] * 5, 5, audit)
    assert (records.missing, records.bytes) == ({}, light)
    assert audited.missing == {}
    assert torch.equal(records.rows, torch.from_numpy(rows))
    assert torch.equal(audited.rows, torch.from_numpy(audit_rows))
    flag = [RecordEntry(e.handle, e.part, e.parts, e.start, e.stop, not e.audit) for e in entries]
    assert pair(store, flag, [3] * 5, 5).missing == {"site_table": 9}


def test_a_cached_prefix_is_shared_by_trajectories() -> None:
    store, rows = Store(), random_rows(TABLE, 12)
    prefix = make_header(TABLE, 0, 6, trajectory="", prefix="rollout-0/17")
    shared = store.put(encode_frame(prefix, TABLE, rows[:6], np.array([[2, 1, 0], [5, 1, 1]])))
    for name, used, total in (("a", 6, 12), ("b", 4, 9)):
        own = encode_frame(make_header(TABLE, used, total, trajectory=name), TABLE, rows[used:total])
        entries = [RecordEntry(shared, 0, 1, 0, used), RecordEntry(store.put(own), 0, 1, used, total)]
        records = pair(store, entries, [3] * 3, total - 2, trajectory=name)
        assert records.missing == {}
        assert torch.equal(records.rows, torch.from_numpy(rows[:total]))
        assert records.zero_blocks.tolist() == [[2, 1, 0], [5, 1, 1]][: 2 if used == 6 else 1]


def test_zero_blocks_count_rows_of_the_trajectory() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    entries = []
    for start, stop, zero in ((0, 5, [[1, 1, 1], [4, 2, 3]]), (5, 8, [[0, 1, 0]])):
        data = encode_frame(make_header(TABLE, start, stop), TABLE, rows[start:stop], np.array(zero))
        entries.append(RecordEntry(store.put(data), 0, 1, start, stop))
    assert pair(store, entries, [3] * 4, 5).zero_blocks.tolist() == [[1, 1, 1], [4, 2, 3], [5, 1, 0]]
    assert pair(store, entries[1:], [3] * 4, 5).zero_blocks.tolist() == [[5, 1, 0]]


def test_a_missing_part_leaves_the_other_sites() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    entries = write_frames(store, TABLE, rows, [3] * 8, parts=2)
    records = pair(store, [entry for entry in entries if entry.part == 0], [3] * 4, 5)
    assert records.missing == {"missing": 8}
    for index, site in enumerate(TABLE.sites):
        whole_site = site.kind not in {SiteKind.KEY, SiteKind.VALUE}
        assert bool(records.present[:, index].all()) is whole_site
        at = TABLE.offset(site)
        got, wanted = records.rows[:, at : at + site.row_bytes], rows[:, at : at + site.row_bytes]
        assert np.array_equal(got.numpy(), wanted if whole_site else np.zeros_like(wanted))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job_uid": "other"}, "missing"),
        ({"run_id": "other"}, "missing"),
        ({"trajectory": "other"}, "missing"),
        ({"version": 4}, "version"),
        ({"row_start": 1, "row_stop": 9}, "shape"),
        ({"part": 0, "parts": 2}, "shape"),
    ],
)
def test_an_intact_frame_of_something_else(changes: dict[str, Any], reason: str) -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    header = make_header(TABLE, **{"start": 0, "stop": 8, **changes})
    entry = RecordEntry(store.put(encode_frame(header, TABLE, rows)), 0, 1, 0, 8)
    records = pair(store, [entry], [3] * 4, 5)
    assert records.missing == {reason: 8}
    assert not records.present.any()
    assert not records.rows.any()


@pytest.mark.parametrize(
    ("start", "stop", "counted"),
    [(-1, 8, 8), (0, 9, 8), (5, 5, 0), (6, 2, 0), (8, 10**30, 0), (4, 10**30, 4)],
)
def test_an_entry_with_an_impossible_range(start: int, stop: int, counted: int) -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    handle = store.put(encode_frame(make_header(TABLE, 0, 8), TABLE, rows))
    records = pair(store, [RecordEntry(handle, 0, 1, start, stop)], [3] * 4, 5)
    assert records.missing["shape"] == counted
    assert sum(records.missing.values()) == 8


def test_rows_that_two_frames_claim_count_for_neither() -> None:
    store = Store()
    for other in (random_rows(TABLE, 8), random_rows(TABLE, 8, seed=1)):
        first = store.put(encode_frame(make_header(TABLE, 0, 8), TABLE, random_rows(TABLE, 8)))
        second = store.put(encode_frame(make_header(TABLE, 4, 8), TABLE, other[4:]))
        entries = [RecordEntry(first, 0, 1, 0, 8), RecordEntry(second, 0, 1, 4, 8)]
        records = pair(store, entries, [3] * 4, 5)
        assert records.missing == {"shape": 4}
        assert whole(records) == [True] * 4 + [False] * 4
    assert pair(store, [entries[0]] * 300, [3] * 4, 5).missing == {"shape": 8}


@pytest.mark.parametrize("seed", [0, 1])
def test_groups_that_two_parts_claim_count_for_neither(seed: int) -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    entries = write_frames(store, TABLE, rows, [3] * 8, parts=2)
    # A third part of three has heads that part 1 of 2 has as well; its values are equal or not.
    other = slice_rows(TABLE, random_rows(TABLE, 8, seed=seed), 2, 3)
    slices = TABLE.select(2, 3)
    data = encode_frame(make_header(TABLE, 0, 8, part=2, parts=3), TABLE, other, slices=slices)
    records = pair(store, [*entries, RecordEntry(store.put(data), 2, 3, 0, 8)], [3] * 4, 5)
    assert records.missing == {"shape": 8}
    claimed = {piece.site for piece in slices}
    assert records.present[0].tolist() == [index not in claimed for index in range(len(TABLE.sites))]


def test_a_zero_block_goes_with_its_row() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    key = next(i for i, site in enumerate(TABLE.sites) if site.kind is SiteKind.KEY)
    slices = TABLE.select(0, 2)
    held = slice_rows(TABLE, rows, 0, 2)
    zero = np.array([[1, 1, 0], [1, key, 0]])
    data = encode_frame(make_header(TABLE, 0, 8, parts=2), TABLE, held, zero, slices=slices)
    records = pair(store, [RecordEntry(store.put(data), 0, 2, 0, 8)], [3] * 4, 5)
    assert records.present[1, 1]
    assert not records.present[1, key]
    assert records.zero_blocks.tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_slice_with_head_0_brings_the_tensor_scale_of_the_token(order: tuple[int, ...]) -> None:
    table = site_table(make_shape(2), make_spec(replay=False, targets=["KVCache"], tensorScale="PerToken"))
    store, rows = Store(), random_rows(table, 8)
    other = rows.copy()
    for site in table.sites:
        other[:, table.offset(site) + site.row_bytes - 4 :][:, :4] = np.frombuffer(b"\0\0\x80\x3f", np.uint8)
    entries = []
    for part, held in ((0, rows), (1, other)):
        header, slices = make_header(table, 0, 8, part=part, parts=2), table.select(part, 2)
        data = encode_frame(header, table, slice_rows(table, held, part, 2), slices=slices)
        entries.append(RecordEntry(store.put(data), part, 2, 0, 8))
    records = pair(store, [entries[i] for i in order], [3] * 4, 5, table)
    assert records.missing == {}
    assert torch.equal(records.rows, torch.from_numpy(rows))


def test_the_first_fault_of_a_row_is_counted_and_only_once() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    good = store.put(encode_frame(make_header(TABLE, 0, 8), TABLE, rows))
    entries = [
        RecordEntry(Handle("not a handle"), 0, 1, 0, 8),
        RecordEntry(good, 0, 2, 2, 6),
        RecordEntry(good, 0, 1, 4, 8),
    ]
    records = pair(store, entries, [3] * 4, 5)
    assert records.missing == {"missing": 4}  # the other four rows are there all the same
    assert whole(records) == [False] * 4 + [True] * 4


def test_values_that_no_writer_can_mean_are_refused() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    routes = TABLE.find(0, SiteKind.ROUTES)
    assert routes is not None
    rows[3, TABLE.offset(routes)] = routes.experts
    entries = write_frames(store, TABLE, rows, [3] * 8)
    records = pair(store, entries, [3] * 4, 5)
    assert records.missing == {"shape": 1}
    assert records.present[3].tolist() == [False, True, True, True, True]


def test_tensor_scales_of_versions_and_tokens() -> None:
    table = site_table(make_shape(2), make_spec(replay=False, targets=["KVCache"], tensorScale="PerVersion"))
    store, rows = Store(), random_rows(table, 6)
    entries = []
    for start, stop, version, scale in ((0, 4, 7, 0.5), (4, 6, 8, 2.0)):
        for part in range(2):
            header = make_header(table, start, stop, version=version, part=part, parts=2)
            held = slice_rows(table, rows, part, 2)[start:stop]
            data = encode_frame(
                header, table, held, slices=table.select(part, 2), tensor_scales={0: scale, 1: 3 * scale}
            )
            entries.append(RecordEntry(store.put(data), part, 2, start, stop))
    records = pair(store, entries, [7, 7, 8, 8], 3, table)
    assert records.missing == {}
    assert records.tensor_scales is not None
    assert records.tensor_scales.tolist() == [[0.5, 1.5]] * 4 + [[2.0, 6.0]] * 2
    # Two parts that name different scales for one row cannot both be right.
    data = encode_frame(
        make_header(table, 4, 6, version=8, part=1, parts=2),
        table,
        slice_rows(table, rows, 1, 2)[4:6],
        slices=table.select(1, 2),
        tensor_scales={0: 2.5, 1: 6.0},
    )
    entries[-1] = RecordEntry(store.put(data), 1, 2, 4, 6)
    records = pair(store, entries, [7, 7, 8, 8], 3, table)
    assert records.missing == {"shape": 2}
    assert records.present.tolist() == [[True, True]] * 4 + [[False, True]] * 2


def test_a_fetch_that_fails_is_a_missing_record() -> None:
    store, rows = Store(), random_rows(TABLE, 8)
    entries = write_frames(store, TABLE, rows, [3] * 8, chunk=4)
    del store.frames[entries[0].handle]
    assert pair(store, entries, [3] * 4, 5).missing == {"missing": 4}


@pytest.mark.parametrize(
    ("tokens", "prompt", "versions"), [(5, 2, [1]), (5, 6, []), (5, 4, [-1]), (5, 4, [2**31])]
)
def test_counts_that_contradict_each_other_are_the_callers_fault(
    tokens: int, prompt: int, versions: list[int]
) -> None:
    with pytest.raises(ValueError, match="version"):
        assemble(
            [],
            Store().get,
            TABLE,
            tokens=tokens,
            prompt_tokens=prompt,
            token_versions=versions,
            job_uid=JOB,
            run_id=RUN,
            trajectory=TRAJECTORY,
        )


def test_entries_travel_as_json() -> None:
    entry = RecordEntry(handle_of(b"x", "a/b c.trec"), 1, 2, 3, 4, audit=True)
    assert read_entries([entry.to_json()]) == [entry]
    assert RecordEntry.from_json({k: v for k, v in entry.to_json().items() if k != "audit"}).audit is False


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = ("handle", "part", "parts", "start", "stop", "audit")


@settings(max_examples=200, deadline=None)
@given(
    json_values | st.lists(json_values | st.fixed_dictionaries({}, optional=dict.fromkeys(keys, json_values)))
)
def test_garbage_in_the_list_is_left_out(items: Any) -> None:
    for entry in read_entries(items):
        assert isinstance(entry.handle, str)
        assert all(type(n) is int for n in (entry.part, entry.parts, entry.start, entry.stop))
    records = pair(Store(), read_entries(items), [3] * 4, 5)
    assert sum(records.missing.values()) == records.n_rows == 8
    if not isinstance(items, list):
        with pytest.raises(FrameError):
            RecordEntry.from_json(items)
