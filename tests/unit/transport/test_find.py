"""Finding frames in files and objects alike."""

from __future__ import annotations

from pathlib import Path

from object_stores import JOB, RUN, key

from tracerl.api.frames import FoundFrame
from tracerl.transport.find import find_frames
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink

FRAMES = [b"first", b"", b"third" * 100]


def write_object(directory: Path) -> Path:
    """One object of three frames, and a fourth that was given up."""
    sink = ObjectSink(
        open_filesystem(directory.as_uri()),
        store="rollout-0",
        job_uid=JOB,
        run_id=RUN,
        batch_bytes=4096,
        batch_seconds=60,
    )
    handles = [sink.put(frame, key()) for frame in (*FRAMES, b"given up")]
    sink.release(handles[-1:])
    sink.close()
    (path,) = directory.rglob("*.trecs")
    return path


def test_frames_of_objects_and_files(tmp_path: Path) -> None:
    path = write_object(tmp_path / "a")
    (tmp_path / "b.trec").write_bytes(b"a file")
    (tmp_path / "a/half.trecs.1234.tmp").write_bytes(b"half")
    in_object = [
        FoundFrame(f"{path}#{offset}", frame) for offset, frame in zip((0, 64, 128), FRAMES, strict=True)
    ]
    assert list(find_frames([str(tmp_path)])) == [*in_object, FoundFrame(f"{tmp_path}/b.trec", b"a file")]
    assert list(find_frames([str(path)])) == in_object
    (first, *_) = find_frames([f"file://{path}"])
    assert first.path == f"file://{path}#0"


def test_damage_is_said_for_the_frame_or_the_object(tmp_path: Path) -> None:
    path = write_object(tmp_path)
    data = bytearray(path.read_bytes())
    data[130] ^= 1
    path.write_bytes(data)
    assert [frame.reason for frame in find_frames([str(tmp_path)])] == ["", "", "checksum"]
    path.write_bytes(data[:-1])
    (found,) = find_frames([str(tmp_path)])
    assert (found.path, found.data, found.reason) == (str(path), None, "magic")
    assert found.message.startswith("it is not a whole object: ")
