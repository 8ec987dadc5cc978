"""Frames: what is written is read, in parts too, and bytes of any origin give a frame or a FrameError."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from record_builders import make_header, make_shape, make_spec, random_rows, slice_rows

from tracerl.records.frame import (
    FrameError,
    check_table,
    decode_frame,
    encode_frame,
    read_header,
    read_zero_blocks,
    section_payload,
)
from tracerl.records.sites import SiteSlice, SiteTable, audit_table, site_table

TABLE = site_table(make_shape(2), make_spec())
OTHER = site_table(make_shape(3), make_spec())
ZERO = np.array([[2, 1, 1], [0, 1, 0], [2, 1, 1]])


def frame_of(table: SiteTable = TABLE, n: int = 4, zero: Any = ZERO, **changes: Any) -> bytes:
    return encode_frame(make_header(table, 3, 3 + n, **changes), table, random_rows(table, n), zero)


def rehash(data: bytes | bytearray) -> bytes:
    """The same bytes with a header hash that fits them."""
    data = bytearray(data)
    end = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into("<Q", data, end - 8, xxhash.xxh3_64_intdigest(bytes(data[: end - 8])))
    return bytes(data)


TABLES = [
    TABLE,
    site_table(make_shape(3), make_spec(secondInput="Recorded", trace={"codeBits": 2, "scaleBits": 1})),
    site_table(
        make_shape(2, experts=300), make_spec(tensorScale="PerToken", trace={"codeBits": 4, "scaleBits": 8})
    ),
    site_table(make_shape(2), make_spec(method="QAT")),
    audit_table(make_shape(2), make_spec()),
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TABLES),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 2**31 - 10),
    st.text(min_size=1),
)
def test_round_trip(table: SiteTable, n: int, parts: int, start: int, subject: str) -> None:
    try:
        subject.encode()
    except UnicodeEncodeError:
        subject = "lone surrogates are not text"
    rows = random_rows(table, n, seed=n)
    for part in range(parts):
        slices = table.select(part, parts)
        if not slices:
            continue
        header = make_header(
            table, start, start + n, part=part, parts=parts, trajectory="", prefix=subject, version=2**31 - 1
        )
        held = slice_rows(table, rows, part, parts)
        data = encode_frame(header, table, held, slices=slices)
        frame = decode_frame(data, table)
        assert frame.header == header
        assert frame.header.key.trajectory == subject
        assert [section.slice for section in frame.info.sections] == list(slices)
        assert np.array_equal(np.concatenate(frame.payloads, 1), held)
        assert len(frame.zero_blocks) == 0
        assert encode_frame(header, table, np.concatenate(frame.payloads, 1), slices=slices) == data


def test_zero_blocks_are_sorted_and_unique() -> None:
    assert decode_frame(frame_of(), TABLE).zero_blocks.tolist() == [[0, 1, 0], [2, 1, 1]]


def test_views_are_not_copies() -> None:
    data = bytearray(frame_of())
    frame = decode_frame(data)
    before = int(frame.payloads[0][0, 0])
    data[frame.info.sections[0].offset] ^= 1
    assert frame.payloads[0][0, 0] == before ^ 1


def test_a_ranged_reader_verifies_what_it_fetches() -> None:
    data = frame_of()
    info = read_header(data[: struct.unpack_from("<I", data, 12)[0]])
    check_table(info, TABLE)
    assert read_zero_blocks(info, data[: info.preamble_bytes], TABLE).tolist() == [[0, 1, 0], [2, 1, 1]]
    rows = random_rows(TABLE, 4)
    for section, site in zip(info.sections, TABLE.sites, strict=True):
        assert section.offset % 16 == 0
        fetched = data[section.offset : section.offset + section.length]
        at = TABLE.offset(site)
        assert np.array_equal(section_payload(info, section, fetched), rows[:, at : at + site.row_bytes])
        for wrong in (fetched[:-1], bytes([fetched[0] ^ 1]) + fetched[1:]):
            with pytest.raises(FrameError, match="damaged"):
                section_payload(info, section, wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_stop": 3}, "not a range"),
        ({"row_start": -1}, "not a range"),
        ({"part": 1}, "part 1 of 1"),
        ({"version": -1}, "version -1"),
        ({"version": 2**31}, "version 2147483648"),
        ({"trajectory": ""}, "either to a trajectory or to a prefix"),
        ({"prefix": "a/1"}, "either to a trajectory or to a prefix"),
        ({"trajectory": "x" * 65_536}, "65535 bytes"),
        ({"job_uid": ""}, "65535 bytes"),
        ({"audit": True}, "audit"),
        ({"table_digest": OTHER.digest}, "digest"),
        ({"row_stop": 8}, r"rows must be uint8 \[5"),
    ],
)
def test_the_writer_refuses_contradictions(changes: dict[str, Any], message: str) -> None:
    header = dataclasses.replace(make_header(TABLE, 3, 7), **changes)
    with pytest.raises(ValueError, match=message):
        encode_frame(header, TABLE, random_rows(TABLE, 4))


@pytest.mark.parametrize("zero", [[4, 1, 0], [-1, 1, 0], [0, 0, 0], [0, 1, 2], [0, 99, 0]])
def test_the_writer_refuses_zero_blocks_outside(zero: list[int]) -> None:
    with pytest.raises(ValueError, match="zero block"):
        encode_frame(make_header(TABLE, 3, 7), TABLE, random_rows(TABLE, 4), np.array([zero]))


@pytest.mark.parametrize(
    "slices",
    [
        [],
        [SiteSlice(9, 0, 1)],
        [SiteSlice(1, 0, 1), SiteSlice(0, 0, 1)],
        [SiteSlice(2, 0, 5)],
        [SiteSlice(2, 1, 1)],
    ],
)
def test_the_writer_refuses_slices_that_do_not_exist(slices: list[SiteSlice]) -> None:
    with pytest.raises(ValueError, match=r"slices|groups|sections"):
        encode_frame(make_header(TABLE, 3, 7), TABLE, random_rows(TABLE, 4), slices=slices)


@pytest.mark.parametrize("scales", [None, {2: 0.0}, {2: float("nan")}, {2: float("inf"), 3: 1.0}])
def test_the_writer_needs_tensor_scales_of_the_version(scales: dict[int, float] | None) -> None:
    table = site_table(make_shape(2), make_spec(tensorScale="PerVersion"))
    with pytest.raises(ValueError, match="needs its tensor scale"):
        encode_frame(make_header(table, 3, 7), table, random_rows(table, 4), tensor_scales=scales)
    with pytest.raises(ValueError, match="no tensor scale a version"):
        encode_frame(make_header(TABLE, 3, 7), TABLE, random_rows(TABLE, 4), tensor_scales={0: 1.0})


# Offsets of the fixed header's fields in the document, a value that lies, and the reason it is refused for.
LIES = [
    (8, "<H", 2, "version"),
    (10, "<H", 4, "shape"),
    (12, "<I", 2**32 - 1, "checksum"),
    (12, "<I", 8, "checksum"),
    (16, "<Q", 2**64 - 1, "shape"),
    (24, "<I", 1, "shape"),
    (28, "<I", 2**32 - 1, "shape"),
    (28, "<I", 0, "shape"),
    (32, "<I", 7, "shape"),
    (36, "<I", 2**32 - 1, "shape"),
    (40, "<I", 2**32 - 1, "shape"),
    (44, "<I", 2**32 - 1, "checksum"),
    (44, "<I", 0, "checksum"),
    (48, "<I", 2**32 - 1, "shape"),
    (52, "<I", 1, "shape"),
    (96, "<H", 2**16 - 1, "checksum"),
    (102, "<H", 1, "shape"),
]


@pytest.mark.parametrize(("offset", "form", "value", "reason"), LIES)
def test_lying_headers_are_refused_without_allocating(
    offset: int, form: str, value: int, reason: str
) -> None:
    data = bytearray(frame_of())
    struct.pack_into(form, data, offset, value)
    end = min(struct.unpack_from("<I", data, 12)[0], len(data))
    if end >= 112:
        struct.pack_into("<Q", data, end - 8, xxhash.xxh3_64_intdigest(bytes(data[: end - 8])))
    tracemalloc.start()
    with pytest.raises(FrameError) as caught:
        decode_frame(data, TABLE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason == reason
    assert peak < 1_000_000


SECTION_TABLE = 104 + 16  # the names take 15 bytes


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "<I", 1),  # two sections of one site
        (0, "<I", 2**32 - 1),
        (4, "<H", 1),  # an empty slice
        (6, "<H", 2**16 - 1),
        (8, "<Q", 0),
        (8, "<Q", 2**64 - 16),
        (16, "<Q", 2**64 - 4),
        (16, "<Q", 0),
        (32, "<f", float("nan")),
        (32, "<f", 2.0),
        (32, "<f", -1.0),
        (36, "<I", 1),
    ],
)
def test_lying_section_tables_are_refused(offset: int, form: str, value: float) -> None:
    data = bytearray(frame_of())
    struct.pack_into(form, data, SECTION_TABLE + offset, value)
    with pytest.raises(FrameError) as caught:
        decode_frame(rehash(data), TABLE)
    assert caught.value.reason == "shape"


@pytest.mark.parametrize("entry", [(0, 1, 0), (9, 1, 0), (0, 1, 2**32 - 1), (0, 2**32 - 1, 0), (2, 0, 0)])
def test_lying_zero_block_lists_are_refused(entry: tuple[int, int, int]) -> None:
    data = bytearray(frame_of())
    end = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into("<3I", data, end + 12, *entry)  # unsorted twin, or outside the frame
    struct.pack_into("<Q", data, 56, xxhash.xxh3_64_intdigest(bytes(data[end : end + 24])))
    with pytest.raises(FrameError) as caught:
        decode_frame(rehash(data), TABLE)
    assert caught.value.reason == "shape"


def test_names_that_are_not_text_are_refused() -> None:
    data = bytearray(frame_of())
    data[104] = 0xFF
    with pytest.raises(FrameError, match="UTF-8"):
        decode_frame(rehash(data))
    data = bytearray(frame_of())
    data[104 + 15] = 1  # padding of the names
    with pytest.raises(FrameError, match="padding"):
        decode_frame(rehash(data))


def test_a_frame_that_is_shorter_or_longer_than_it_says_is_damaged() -> None:
    data = frame_of()
    for wrong in (*(data[:end] for end in range(len(data))), data + b"\0"):
        with pytest.raises(FrameError) as caught:
            decode_frame(wrong, TABLE)
        assert caught.value.reason == "checksum"


def test_another_table_is_refused_before_anything_of_it_is_believed() -> None:
    with pytest.raises(FrameError) as caught:
        decode_frame(frame_of(), OTHER)
    assert caught.value.reason == "site_table"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_give_a_frame_or_a_frame_error(noise: bytes, with_start: bool) -> None:
    data = frame_of()[:104] + noise if with_start else noise
    with pytest.raises(FrameError):
        decode_frame(data, TABLE)
