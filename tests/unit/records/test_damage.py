"""No damage changes a result silently: of frames or entries, whatever happens, a row is right or counted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from record_builders import (
    JOB,
    RUN,
    TRAJECTORY,
    Store,
    handle_of,
    make_shape,
    make_spec,
    random_rows,
    write_frames,
)

from tracerl.api.frames import Handle
from tracerl.records.frame import encode_frame, read_header
from tracerl.records.pairing import MISSING_REASONS, RecordEntry, TrajectoryRecords, assemble
from tracerl.records.sites import site_table

TABLE = site_table(make_shape(2), make_spec())
# The same sizes under another contract: nothing but the digest tells them apart.
TWIN = site_table(make_shape(2), make_spec(order="TorchAO"))
PROMPT, VERSIONS = 6, [3] * 9 + [4] * 8
N = PROMPT + len(VERSIONS) - 1
ROW_VERSIONS = [3] * (PROMPT - 1) + VERSIONS


@dataclass
class Case:
    """An intact trajectory: rows, frames by handle, entries; a mutation changes frames or entries."""

    rows: np.ndarray
    store: Store
    entries: list[RecordEntry]


def make_case(parts: int) -> Case:
    store, rows = Store(), random_rows(TABLE, N, seed=parts)
    return Case(rows, store, write_frames(store, TABLE, rows, ROW_VERSIONS, chunk=5, parts=parts))


CASES = {parts: make_case(parts) for parts in (1, 2)}


def pair(store: Store, entries: Sequence[RecordEntry]) -> TrajectoryRecords:
    return assemble(
        entries,
        store.get,
        TABLE,
        tokens=N + 1,
        prompt_tokens=PROMPT,
        token_versions=VERSIONS,
        job_uid=JOB,
        run_id=RUN,
        trajectory=TRAJECTORY,
    )


def check(case: Case, records: TrajectoryRecords) -> None:
    """Whatever is present is bit-equal to what was recorded, and every row is whole or counted once."""
    for index, site in enumerate(TABLE.sites):
        columns = slice(TABLE.offset(site), TABLE.offset(site) + site.row_bytes)
        wanted = np.where(records.present[:, index, None].numpy(), case.rows[:, columns], 0)
        assert np.array_equal(records.rows[:, columns].numpy(), wanted)
    complete = records.present.all(dim=1)
    assert int(complete.sum()) + sum(records.missing.values()) == N
    assert set(records.missing) <= set(MISSING_REASONS)
    assert all(count > 0 for count in records.missing.values())
    known = torch.where(records.present.any(dim=1), torch.tensor(ROW_VERSIONS, dtype=torch.int32), -1)
    assert torch.equal(records.versions, known)


@pytest.mark.parametrize("parts", CASES)
def test_without_damage_every_row_is_there(parts: int) -> None:
    records = pair(CASES[parts].store, CASES[parts].entries)
    check(CASES[parts], records)
    assert records.missing == {}


# -- damaged frames ---------------------------------------------------------------------------------------

Draw = Callable[[int], int]
"""draw(n) is a number below n."""


def flip(data: bytes, other: bytes, draw: Draw) -> bytes:
    out = bytearray(data)
    for _ in range(1 + draw(3)):
        bit = draw(8 * len(out))
        out[bit // 8] ^= 1 << (bit % 8)
    return bytes(out)


def truncate(data: bytes, other: bytes, draw: Draw) -> bytes:
    return data[: draw(len(data))]


def extend(data: bytes, other: bytes, draw: Draw) -> bytes:
    return data + other[: 1 + draw(len(other))]


def erase(data: bytes, other: bytes, draw: Draw) -> bytes:
    start = draw(len(data))
    return data[:start] + bytes(len(data) - start)


def splice(data: bytes, other: bytes, draw: Draw) -> bytes:
    return data[: draw(len(data))] + other[draw(len(other)) :]


def splice_behind_the_header(data: bytes, other: bytes, draw: Draw) -> bytes:
    return data[: read_header(data).header_bytes] + other[read_header(other).header_bytes :]


def swap_frames(data: bytes, other: bytes, draw: Draw) -> bytes:
    return other


def swap_sections(data: bytes, other: bytes, draw: Draw) -> bytes:
    """Exchange the contents of two sections, as far as the shorter one goes."""
    sections, out = read_header(data).sections, bytearray(data)
    a, b = sections[draw(len(sections))], sections[draw(len(sections))]
    size = min(a.length, b.length)
    out[a.offset : a.offset + size] = data[b.offset : b.offset + size]
    out[b.offset : b.offset + size] = data[a.offset : a.offset + size]
    return bytes(out)


def swap_section_entries(data: bytes, other: bytes, draw: Draw) -> bytes:
    """Exchange two entries of the section table, under a header hash that fits."""
    info, out = read_header(data), bytearray(data)
    first = info.header_bytes - 8 - 40 * len(info.sections)
    i, j = (first + 40 * draw(len(info.sections)) for _ in range(2))
    out[i : i + 40], out[j : j + 40] = data[j : j + 40], data[i : i + 40]
    return fit_header_hash(out, info.header_bytes - 8)


def forge(data: bytes, other: bytes, draw: Draw) -> bytes:
    """Flip a bit of the header, under a header hash that fits."""
    end, out = read_header(data).header_bytes - 8, bytearray(data)
    bit = draw(8 * end)
    out[bit // 8] ^= 1 << (bit % 8)
    return fit_header_hash(out, end)


def fit_header_hash(data: bytearray, end: int) -> bytes:
    struct.pack_into("<Q", data, end, xxhash.xxh3_64_intdigest(bytes(data[:end])))
    return bytes(data)


def impostor(data: bytes, other: bytes, draw: Draw) -> bytes:
    """An intact frame of something else, whose rows are not those of this trajectory."""
    header = read_header(data).header
    table = TWIN if (lie := draw(8)) == 0 else TABLE
    n = header.rows
    changes: dict[str, Any] = [
        {"table_digest": TWIN.digest},
        {"job_uid": "another-job"},
        {"run_id": "run-2"},
        {"trajectory": "t-1"},
        {"version": 7 - header.version},
        {"part": header.part + 1, "parts": header.parts + 1},
        {"row_start": header.row_start + 1, "row_stop": header.row_stop + 1},
        {"row_start": header.row_start + 50, "row_stop": header.row_stop + 50},
    ][lie]
    slices = table.select(header.part, header.parts)
    widths = [sum(table.sites[s.site].slice_bytes(s.start, s.stop)) for s in slices]
    rows = np.full((n, sum(widths)), 1 + draw(7), np.uint8)
    return encode_frame(replace(header, **changes), table, rows, slices=slices)


FRAME_DAMAGE = [
    flip,
    truncate,
    extend,
    erase,
    splice,
    splice_behind_the_header,
    swap_frames,
    swap_sections,
    swap_section_entries,
    forge,
    impostor,
]


@settings(max_examples=1_200, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.tuples(st.sampled_from(FRAME_DAMAGE), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_damaged_frames(parts: int, damages: list[tuple[Any, bool]], seed: int) -> None:
    draw = Random(seed).randrange
    case = CASES[parts]
    store, entries = Store(), list(case.entries)
    store.frames = dict(case.store.frames)
    frames = [case.store.frames[entry.handle] for entry in entries]
    for damage, before in damages:
        at = draw(len(entries))
        bad = damage(frames[at], frames[draw(len(frames))], draw)
        # Damaged on the way, the handle is the intact frame's; damaged before, it fits the damage.
        if before:
            entries[at] = replace(entries[at], handle=handle_of(bad, f"damaged-{at}.trec"))
        store.frames[entries[at].handle] = bad
    check(case, pair(store, entries))


def test_damage_of_every_byte_of_a_frame() -> None:
    case = CASES[1]
    entry = case.entries[1]
    whole = case.store.frames[entry.handle]
    for at in range(len(whole)):
        bad = whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]
        store = Store()
        store.frames = dict(case.store.frames)
        damaged = replace(entry, handle=store.put(bad))
        records = pair(store, [damaged if e is entry else e for e in case.entries])
        assert sum(records.missing.values()) == entry.stop - entry.start
        assert set(records.missing) <= {"checksum", "version"}
        assert records.present.all(dim=1).tolist() == [
            not entry.start <= row < entry.stop for row in range(N)
        ]


# -- damaged lists ----------------------------------------------------------------------------------------


def drop(entries: list[RecordEntry], at: int, random: Random) -> None:
    del entries[at]


def repeat(entries: list[RecordEntry], at: int, random: Random) -> None:
    entries.insert(random.randrange(len(entries)), entries[at])


def move(entries: list[RecordEntry], at: int, random: Random) -> None:
    entries.insert(random.randrange(len(entries)), entries.pop(at))


def another_range(entries: list[RecordEntry], at: int, random: Random) -> None:
    start, stop = (random.choice([random.randrange(-2, N + 3), -(2**63), 10**30]) for _ in range(2))
    entries[at] = replace(entries[at], start=start, stop=stop)


def widen(entries: list[RecordEntry], at: int, random: Random) -> None:
    entry = entries[at]
    entries[at] = replace(
        entry, start=entry.start - random.randrange(-2, 3), stop=entry.stop + random.randrange(-2, 3)
    )


def anothers_handle(entries: list[RecordEntry], at: int, random: Random) -> None:
    entries[at] = replace(entries[at], handle=random.choice(entries).handle)


def garbage(entries: list[RecordEntry], at: int, random: Random) -> None:
    handle = entries[at].handle
    noise = "".join(chr(random.randrange(0x110000)) for _ in range(random.randrange(20)))
    text = random.choice(
        [noise, handle[:-1], handle[:-1] + "g", handle.replace("len=", "len=9"), handle + noise]
    )
    entries[at] = replace(entries[at], handle=Handle(text))


def another_part(entries: list[RecordEntry], at: int, random: Random) -> None:
    entries[at] = replace(entries[at], part=random.randrange(-1, 4), parts=random.randrange(-1, 4))


def another_table(entries: list[RecordEntry], at: int, random: Random) -> None:
    entries[at] = replace(entries[at], audit=not entries[at].audit)


LIST_DAMAGE = [
    drop,
    repeat,
    move,
    another_range,
    widen,
    anothers_handle,
    garbage,
    another_part,
    another_table,
]


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.sampled_from(LIST_DAMAGE), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_damaged_lists(parts: int, damages: list[Any], seed: int) -> None:
    random, case = Random(seed), CASES[parts]
    entries = list(case.entries)
    for damage in damages:
        damage(entries, random.randrange(len(entries)), random)
    check(case, pair(case.store, entries))
