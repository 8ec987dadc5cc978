"""The bytes of an object: golden file, a reader made from the specification alone, and damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.transport.objects.format import (
    FOOTER_BYTES,
    IndexedFrame,
    ObjectBuilder,
    ObjectError,
    ObjectIndex,
    ReferenceChange,
    decode_index,
    encode_index,
)

GOLDEN = Path(__file__).parent / "golden/object-v1.trecs"
FRAMES = [b"first frame", b"", bytes(range(200)), b"\xff" * 64]


def build(frames: list[bytes], number: int = 7, changes: tuple[ReferenceChange, ...] = ()) -> bytes:
    builder = ObjectBuilder(16_384)
    indexed = []
    for position, frame in enumerate(frames):
        digest = f"{xxhash.xxh3_64_intdigest(frame):016x}"
        indexed.append(
            IndexedFrame(builder.add(memoryview(frame)), len(frame), digest, position % 2, 1 + position)
        )
    index = ObjectIndex(
        job_uid="job-uid",
        run_id="run/ü",
        store="rollout-0",
        writer="00c0ffee",
        number=number,
        trajectories=["t-0", "rollout-0/17"],
        frames=indexed,
        changes=list(changes),
    )
    return bytes(builder.seal(index))


def read_by_the_page(data: bytes) -> tuple[dict[str, object], list[bytes]]:
    """Read as docs/reference/object-format.md says, with nothing of the product."""
    digest, offset, length, version, reserved, magic = struct.unpack("<QQIHH8s", data[-32:])
    assert (version, reserved, magic) == (1, 0, b"TRACEOBJ")
    assert offset % 64 == 0
    assert offset + length + 32 == len(data)
    text = data[offset : offset + length]
    assert xxhash.xxh3_64_intdigest(text) == digest
    index = json.loads(text.decode("utf-8"))
    frames = []
    for start, size, frame_digest, trajectory, references in index["frames"]:
        assert start % 64 == 0
        assert trajectory < len(index["trajectories"])
        assert references >= 1
        frames.append(data[start : start + size])
        assert xxhash.xxh3_64_hexdigest(frames[-1]) == frame_digest
    return index, frames


def test_the_golden_file_is_what_is_written_and_what_the_page_says() -> None:
    data = build(FRAMES, changes=(ReferenceChange(3, 128, -2), ReferenceChange(6, 0, 1)))
    assert data == GOLDEN.read_bytes()
    index, frames = read_by_the_page(data)
    assert frames == FRAMES
    assert index.pop("frames")
    assert index == {
        "job_uid": "job-uid",
        "run_id": "run/ü",
        "store": "rollout-0",
        "writer": "00c0ffee",
        "number": 7,
        "trajectories": ["t-0", "rollout-0/17"],
        "changes": [[3, 128, -2], [6, 0, 1]],
    }
    decoded = decode_index(data, len(data))
    assert [data[frame.offset : frame.offset + frame.length] for frame in decoded.frames] == FRAMES
    assert encode_index(decoded, 448) == data[448:]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_any_frames_come_back(frames: list[bytes]) -> None:
    data = build(frames)
    assert read_by_the_page(data)[1] == frames
    index = decode_index(data, len(data))
    assert [data[frame.offset : frame.offset + frame.length] for frame in index.frames] == frames


def test_an_index_longer_than_the_tail_is_fetched_once() -> None:
    data = build([bytes([value]) * 3 for value in range(100)])
    fetched = []

    def fetch(start: int, stop: int) -> bytes:
        fetched.append((start, stop))
        return data[start:stop]

    assert decode_index(data[-64:], len(data), fetch) == decode_index(data, len(data))
    assert fetched == [(6400, len(data))]
    with pytest.raises(ObjectError, match="before the bytes given"):
        decode_index(data[-64:], len(data))
    with pytest.raises(ObjectError, match="fewer than"):
        decode_index(data[-64:], len(data), lambda start, stop: data[start : stop - 1])


def test_nothing_that_was_cut_off_passes_for_a_whole_object() -> None:
    """A frame may itself be an object, whose footer then lies at the cut."""
    inner = build([b"x" * 64])
    data = build([b"y", inner, inner])
    for stop in range(len(data)):
        with pytest.raises(ObjectError):
            decode_index(data[:stop], stop)
    for start in range(1, len(data)):
        with pytest.raises(ObjectError):
            decode_index(data[start:], len(data) - start)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_of_index_or_footer_is_found(data: st.DataObject) -> None:
    whole = bytearray(GOLDEN.read_bytes())
    place = data.draw(st.integers(448, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ObjectError):
        decode_index(bytes(whole), len(whole))


def index_bytes(**changes: object) -> bytes:
    document = json.loads(build([b"a", b"b"])[128:-FOOTER_BYTES]) | changes
    text = json.dumps(document).encode()
    return (
        bytes(128)
        + text
        + struct.pack("<QQIHH8s", xxhash.xxh3_64_intdigest(text), 128, len(text), 1, 0, b"TRACEOBJ")
    )


FRAME = [0, 1, "0" * 16, 0, 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": 1}, "Extra inputs"),
        ({"frames": [[1, 1, "0" * 16, 0, 1]]}, "is not aligned"),
        ({"frames": [FRAME, FRAME]}, "overlaps"),
        ({"frames": [[0, 129, "0" * 16, 0, 1]]}, "after its index began"),
        ({"frames": [[0, 1, "0" * 15, 0, 1]]}, "frames.0.2"),
        ({"frames": [[0, 1, "0" * 16, 2, 1]]}, "belongs to no trajectory"),
        ({"frames": [[0, 1, "0" * 16, 0, 0]]}, "frames.0.4"),
        ({"frames": [[0, -1, "0" * 16, 0, 1]]}, "frames.0.1"),
        ({"frames": [[0, True, "0" * 16, 0, 1]]}, "frames.0.1"),
        ({"frames": 3}, "frames"),
        ({"writer": "../../x"}, "writer"),
        ({"number": -1}, "number"),
        ({"changes": [[7, 0, 1]]}, "not sealed before"),
        ({"store": None}, "store"),
    ],
)
def test_an_index_that_says_nonsense_is_refused(changes: dict[str, object], said: str) -> None:
    data = index_bytes(**changes)
    with pytest.raises(ObjectError, match=said) as caught:
        decode_index(data, len(data))
    assert caught.value.reason == "layout"
    assert "\n" not in str(caught.value)


def test_what_is_wrong_is_said_in_a_word() -> None:
    whole = build([b"a"])
    cases = {
        "truncated": [b"", whole[-31:], whole[1:]],
        "magic": [whole[:-1], bytes(100)],
        "version": [whole[:-12] + b"\x02\x00" + whole[-10:]],
        "layout": [whole[:-10] + b"\x01\x00" + whole[-8:]],
        "checksum": [whole[:70] + b"\0" + whole[71:]],
    }
    for reason, examples in cases.items():
        for data in examples:
            with pytest.raises(ObjectError) as caught:
                decode_index(data, len(data))
            assert caught.value.reason == reason, data
