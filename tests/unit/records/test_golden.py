"""The wire format by committed bytes, against a reader written from record-format.md alone.

To write the golden files of a new format version: ``python tests/unit/records/test_golden.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from record_builders import make_header, make_shape, make_spec

from tracerl.numerics import NVFP4, Quantized, TensorScale
from tracerl.records.frame import decode_frame, encode_frame
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import SiteTable, site_table

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[3] / "docs/reference/record-format.md"

# The values behind the worked example of the document.
ROUTES_0 = [[1, 6], [0, 7]]
ROUTES_1 = [[3, 2], [5, 4]]
CODES = [[int(i % 3 == 0) for i in range(32)], [i % 2 for i in range(32)]]
SCALES = [[0x35, 0x3A], [0x30, 0x00]]


def example_table() -> SiteTable:
    return site_table(make_shape(2), make_spec(targets=["RoutedExperts"]))


def prefix_table() -> SiteTable:
    return site_table(make_shape(2), make_spec(replay=False, targets=["KVCache"], tensorScale="PerVersion"))


def golden_files() -> dict[str, bytes]:
    table = example_table()
    first, expert_input, second = table.sites
    quantized = Quantized(
        torch.tensor(CODES, dtype=torch.uint8),
        torch.tensor(SCALES, dtype=torch.uint8),
        TensorScale(torch.tensor(1.0), "encode"),
        NVFP4,
    )
    packed, zero = pack_rows(expert_input, quantized)
    columns = (
        pack_routes(first, torch.tensor(ROUTES_0)),
        packed,
        pack_routes(second, torch.tensor(ROUTES_1)),
    )
    zero_blocks = np.array([[row, 1, block] for row, block in zero.tolist()])
    frame = encode_frame(make_header(table, 5, 7), table, torch.cat(columns, 1).numpy(), zero_blocks)

    kv = prefix_table()
    header = make_header(kv, 0, 3, part=1, parts=2, trajectory="", prefix="rollout-0/17", version=4)
    rows = np.arange(3 * 10, dtype=np.uint8).reshape(3, 10) & 0x3F
    part = encode_frame(header, kv, rows, slices=kv.select(1, 2), tensor_scales={0: 0.75, 1: 1.5})
    return {"frame-v1.trec": frame, "frame-v1.table.json": table.canonical_json, "prefix-v1.trec": part}


def read_by_document(data: bytes) -> dict[str, Any]:
    """Read a frame as the document says, knowing nothing of the package."""
    assert data[:8] == b"TRACEREC"
    assert struct.unpack_from("<H", data, 8) == (1,)
    flags, header_bytes, length = struct.unpack_from("<HIQ", data, 10)
    part, parts, row_start, row_stop, version, count, zero_count, reserved = struct.unpack_from(
        "<8I", data, 24
    )
    (zero_hash,) = struct.unpack_from("<Q", data, 56)
    digest = data[64:96].hex()
    sizes = struct.unpack_from("<3H", data, 96)
    assert (reserved, struct.unpack_from("<H", data, 102)) == (0, (0,))
    assert length == len(data)
    names, at = [], 104
    for size in sizes:
        names.append(data[at : at + size].decode())
        at += size
    while at % 8:
        assert data[at] == 0
        at += 1
    sections = []
    for _ in range(count):
        site, start, stop, offset, size, digest_of, scale, zero = struct.unpack_from("<IHHQQQfI", data, at)
        payload = data[offset : offset + size]
        assert (zero, len(payload), xxhash.xxh3_64_intdigest(payload)) == (0, size, digest_of)
        width = size // (row_stop - row_start)
        rows = [payload[i : i + width].hex() for i in range(0, size, width)]
        sections.append({"site": site, "groups": (start, stop), "scale": scale, "rows": rows})
        at += 40
    assert struct.unpack_from("<Q", data, at) == (xxhash.xxh3_64_intdigest(data[:at]),)
    assert at + 8 == header_bytes
    zeros = data[header_bytes : header_bytes + 12 * zero_count]
    assert xxhash.xxh3_64_intdigest(zeros) == zero_hash
    return {
        "flags": flags,
        "part": (part, parts),
        "rows": (row_start, row_stop),
        "version": version,
        "digest": digest,
        "names": names,
        "sections": sections,
        "zero_blocks": [list(entry) for entry in struct.iter_unpack("<3I", zeros)],
    }


def bits(values: list[int], width: int) -> str:
    """Little-endian bit string of one row, as hex of whole bytes."""
    number = sum((value & ((1 << width) - 1)) << (i * width) for i, value in enumerate(values))
    return number.to_bytes((len(values) * width + 7) // 8, "little").hex()


def test_the_example_means_what_the_document_says() -> None:
    frame = read_by_document((GOLDEN / "frame-v1.trec").read_bytes())
    assert frame == {
        "flags": 0,
        "part": (0, 1),
        "rows": (5, 7),
        "version": 3,
        "digest": hashlib.sha256((GOLDEN / "frame-v1.table.json").read_bytes()).hexdigest(),
        "names": ["job-uid", "run-1", "t-0"],
        "sections": [
            {"site": 0, "groups": (0, 1), "scale": 0.0, "rows": [bytes(ids).hex() for ids in ROUTES_0]},
            {
                "site": 1,
                "groups": (0, 1),
                "scale": 1.0,
                "rows": [
                    bits(codes, 1) + bits(scales, 3) for codes, scales in zip(CODES, SCALES, strict=True)
                ],
            },
            {"site": 2, "groups": (0, 1), "scale": 0.0, "rows": [bytes(ids).hex() for ids in ROUTES_1]},
        ],
        "zero_blocks": [[1, 1, 1]],
    }


def test_a_part_of_a_prefix() -> None:
    frame = read_by_document((GOLDEN / "prefix-v1.trec").read_bytes())
    assert (frame["flags"], frame["part"], frame["rows"], frame["version"]) == (2, (1, 2), (0, 3), 4)
    assert frame["names"] == ["job-uid", "run-1", "rollout-0/17"]
    assert [(s["site"], s["groups"], s["scale"]) for s in frame["sections"]] == [
        (0, (2, 4), 0.75),
        (1, (2, 4), 1.5),
    ]
    assert [s["rows"] for s in frame["sections"]] == [
        ["0001020304", "0a0b0c0d0e", "1415161718"],
        ["0506070809", "0f10111213", "191a1b1c1d"],
    ]


@pytest.mark.parametrize("name", ["frame-v1.trec", "frame-v1.table.json", "prefix-v1.trec"])
def test_the_writer_still_writes_these_bytes(name: str) -> None:
    assert golden_files()[name].hex() == (GOLDEN / name).read_bytes().hex()


@pytest.mark.parametrize(
    ("name", "table"), [("frame-v1.trec", example_table()), ("prefix-v1.trec", prefix_table())]
)
def test_the_reader_agrees_and_encodes_the_same_bytes_again(name: str, table: SiteTable) -> None:
    data = (GOLDEN / name).read_bytes()
    expected = read_by_document(data)
    frame = decode_frame(data, table)
    header = frame.header
    assert [header.job_uid, header.run_id, header.prefix or header.trajectory] == expected["names"]
    assert ((header.part, header.parts), (header.row_start, header.row_stop)) == (
        expected["part"],
        expected["rows"],
    )
    assert (header.version, header.table_digest) == (expected["version"], expected["digest"])
    assert frame.zero_blocks.tolist() == expected["zero_blocks"]
    for section, payload, wanted in zip(
        frame.info.sections, frame.payloads, expected["sections"], strict=True
    ):
        assert (section.slice.site, section.tensor_scale) == (wanted["site"], wanted["scale"])
        assert (section.slice.start, section.slice.stop) == wanted["groups"]
        assert [row.tobytes().hex() for row in payload] == wanted["rows"]
    again = encode_frame(
        header,
        table,
        np.concatenate(frame.payloads, axis=1),
        frame.zero_blocks,
        slices=[section.slice for section in frame.info.sections],
        tensor_scales={
            section.slice.site: section.tensor_scale
            for section in frame.info.sections
            if table.sites[section.slice.site].tensor_scale == "PerVersion"
        },
    )
    assert again.hex() == data.hex()


def test_the_documents_hex_is_the_golden_file() -> None:
    text = DOCUMENT.read_text()
    dump = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", text, re.MULTILINE)
    data = bytes.fromhex("".join(line for _, line in dump))
    assert data.hex() == (GOLDEN / "frame-v1.trec").read_bytes().hex()
    assert [int(offset, 16) for offset, _ in dump] == list(range(0, len(data), 16))
    table = re.search(r"```json\n(.*?)\n```", text, re.DOTALL)
    assert table is not None
    assert table.group(1).encode() == (GOLDEN / "frame-v1.table.json").read_bytes()
    assert json.loads(table.group(1))["version"] == 1


if __name__ == "__main__":
    for file, content in golden_files().items():
        (GOLDEN / file).write_bytes(content)
