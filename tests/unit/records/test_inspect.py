"""Looking at stored frames: descriptions as plain JSON values, and counts of what is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from record_builders import Store, make_shape, make_spec, random_rows, write_frames

from tracerl.api.errors import InputError
from tracerl.records.inspect import inspect_frames, verify_frames
from tracerl.records.sites import site_table
from tracerl.transport.find import find_frames

GOLDEN = Path(__file__).parent / "golden"
TABLE = site_table(make_shape(2), make_spec())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = Store()
    write_frames(store, TABLE, random_rows(TABLE, 11), [3] * 11, chunk=4)
    for index, data in enumerate(store.frames.values()):
        folder = tmp_path / "run" / f"rollout-{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.trec").write_bytes(data)
    (tmp_path / "run" / "rollout-0" / "9.trec.tmp").write_bytes(b"half a fra")
    return tmp_path


def test_a_frame_is_described_by_plain_values() -> None:
    table = site_table(make_shape(2), make_spec(targets=["RoutedExperts"]))
    path = str(GOLDEN / "frame-v1.trec")
    (described,) = inspect_frames(find_frames([path]), table)
    assert json.loads(json.dumps(described)) == described
    sections = described.pop("sections")
    assert described == {
        "path": path,
        "bytes": 308,
        "jobUID": "job-uid",
        "runID": "run-1",
        "trajectory": "t-0",
        "part": 0,
        "parts": 1,
        "rows": [5, 7],
        "version": 3,
        "siteTable": table.digest,
        "audit": False,
        "headerBytes": 248,
        "payloadBytes": 18,
        "bytesPerRow": 9,
        "zeroBlocks": 1,
    }
    assert sections[1] == {
        "site": 1,
        "layer": 1,
        "kind": "ExpertInput",
        "groups": [0, 1],
        "offset": 0x120,
        "bytes": 10,
        "bytesPerRow": 5,
        "xxh3": "2147f3a1a5c8755e",
        "tensorScale": 1.0,
    }
    (prefix,) = inspect_frames(find_frames([f"file://{GOLDEN}/prefix-v1.trec"]), table)
    assert (prefix["prefix"], prefix["part"], prefix["parts"]) == ("rollout-0/17", 1, 2)
    assert "layer" not in prefix["sections"][0]  # of another table


def test_a_directory_is_searched_and_half_written_files_are_no_frames(directory: Path) -> None:
    assert [frame["rows"] for frame in inspect_frames(find_frames([str(directory)]))] == [
        [0, 4],
        [8, 11],
        [4, 8],
    ]
    result = verify_frames(find_frames([str(directory)]), TABLE)
    assert (result.frames, result.whole, result.rows, result.faults) == (3, 3, 11, {})


def test_faults_are_counted_by_reason(directory: Path) -> None:
    first, second, third = sorted(directory.rglob("*.trec"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes().replace(b"TRACEREC\x01", b"TRACEREC\x02"))
    result = verify_frames(find_frames([str(first), str(second), str(third)]))
    assert (result.frames, result.whole, result.rows) == (3, 1, 4)
    assert result.faults == {"checksum": 1, "version": 1}
    assert [(path, reason) for path, reason, _ in result.messages] == [
        (str(first), "checksum"),
        (str(second), "version"),
    ]
    other = site_table(make_shape(3), make_spec())
    assert verify_frames(find_frames([str(third)]), other).faults == {"site_table": 1}
    described = list(inspect_frames(find_frames([str(first)])))
    assert described == [
        {
            "path": str(first),
            "bytes": first.stat().st_size,
            "reason": "checksum",
            "message": result.messages[0][2],
        }
    ]


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("{}/nothing", "does not exist"),
        ("file://{}/nothing", "does not exist"),
        ("{}", r"holds no record frames .*spec\.transport\.object\.retention=Job"),
        ("nosuch://x", "cannot be read"),
    ],
)
def test_where_there_are_no_frames(tmp_path: Path, location: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        verify_frames(find_frames([location.format(tmp_path)]))


@pytest.mark.parametrize("given", ["run", "run/", "./run", "{}/run", "file://{}/run"])
def test_paths_begin_as_they_were_given(directory: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(directory)
    given = given.format(directory)
    found = [frame["path"] for frame in inspect_frames(find_frames([given]))]
    names = ("rollout-0/0.trec", "rollout-0/2.trec", "rollout-1/1.trec")
    assert found == [f"{given.rstrip('/')}/{name}" for name in names]


@pytest.mark.parametrize("location", ["", "zip://*::file://{}/run/rollout-0/0.trec"])
def test_what_cannot_be_opened(directory: Path, location: str) -> None:
    with pytest.raises(InputError, match=r"empty path|cannot be read \(File is not a zip file\)"):
        verify_frames(find_frames([location.format(directory)]))


def test_an_entry_that_cannot_be_read_is_counted_and_the_others_are_checked(directory: Path) -> None:
    """A link to itself stands for what is listed and cannot be read, also by root."""
    loop = directory / "run/rollout-0/1.trec"
    loop.symlink_to(loop)
    result = verify_frames(find_frames([str(directory)]))
    assert (result.frames, result.whole, result.rows) == (4, 3, 11)
    assert result.messages == [
        (str(loop), "unreadable", "it cannot be read (too many levels of symbolic links)")
    ]
    described = [frame for frame in inspect_frames(find_frames([str(directory)])) if "reason" in frame]
    assert described == [
        {"path": str(loop), "bytes": 0, "reason": "unreadable", "message": result.messages[0][2]}
    ]


def test_a_directory_that_cannot_be_listed_is_counted(directory: Path) -> None:
    closed = directory / "run/rollout-1"
    closed.chmod(0)
    if os.access(closed, os.R_OK):
        pytest.skip("root may list every directory")
    result = verify_frames(find_frames([str(directory)]))
    closed.chmod(0o700)
    assert [(path, reason) for path, reason, _ in result.messages] == [(str(closed), "unreadable")]
