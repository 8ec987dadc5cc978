"""Finding frames in files and objects alike, and in the stores of a run that lives."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from object_stores import JOB, RUN, key
from record_stores import TOKEN, ProcessStore, frames_of, resolve, shared_directory
from record_stores import key as store_key

from tracerl import cli
from tracerl.api.errors import InputError
from tracerl.api.frames import RELEASED, FoundFrame, Handle
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.records.inspect import inspect_frames, verify_frames
from tracerl.transport.find import find_frames
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.remote import RemoteSource
from tracerl.transport.sources import open_sink, open_source

GOLDEN = Path(__file__).parents[1] / "records/golden/frame-v1.trec"
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


# -- a run that lives -------------------------------------------------------------------------------------


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    with shared_directory() as directory:
        yield directory


def put(resolved: ResolvedJob, rollout: str, frames: list[bytes], run_id: str = "run-1") -> list[Handle]:
    with closing(open_sink(resolved, rollout, run_id)) as sink:
        keys = [store_key(f"{rollout}-t", run_id, row) for row in range(len(frames))]
        return [sink.put(*pair, timeout=30) for pair in zip(frames, keys, strict=True)]


def frames_of_many_segments(count: int = 200) -> list[bytes]:
    """More than a ring holds, and than is read at a time."""
    return frames_of(29, [60_000] * count)


def tiers(store: ProcessStore) -> set[str]:
    with closing(RemoteSource("store", lambda: store.url, token=TOKEN, run_id="", timeout=30)) as source:
        return {each.tier for page in source.pages() for each in page}


def test_a_living_run_is_looked_into_over_all_stores_tiers_and_runs(
    tmp_path: Path, ring_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    transport = {
        "spillPath": str(tmp_path / "spill"),
        "spillLimit": "512Ki",
        "spill": "ObjectStore",
        "object": {"uri": (run / "records").as_uri()},
    }
    resolved = resolve(run, ring_dir, nodes=2, transport=transport)
    stores = [ProcessStore(resolved, f"store-{number}") for number in range(2)]
    frame = GOLDEN.read_bytes()
    # Long ones that are released leave a few short ones in each segment, wherever it is by then.
    mixed = put(resolved, "rollout-0", ([frame] * 20 + [bytes(60_000)]) * 60)
    with closing(open_source(resolved, "run-1", None)) as source:
        source.release(mixed[20::21])
    handles = [handle for index, handle in enumerate(mixed) if index % 21 != 20]
    handles += put(resolved, "rollout-1", [frame] * 3) + put(resolved, "rollout-1", [frame], "run-2")
    assert tiers(stores[0]) == {"ring", "spill", "object"}

    assert list(find_frames([run.as_uri()])) == [FoundFrame(handle, frame) for handle in handles]
    assert cli.main(["records", "verify", str(run)]) == 0
    said = "1,204 of 1,204 frames are whole: 2,408 rows, 370,832 bytes\n"
    assert capsys.readouterr().out == said
    assert cli.main(["records", "inspect", str(run), str(GOLDEN)]) == 0
    *lines, totals = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [*handles, str(GOLDEN)]
    assert totals == "1,205 frames: 2,410 rows, 371,140 bytes"

    # It took no references, and gave none back.
    with closing(open_source(resolved, "run-1", None)) as source:
        assert source.present(handles) == [True] * len(handles)
        source.release(handles)
        assert source.usage().frames == 0
    assert cli.main(["records", "verify", str(run)]) == 0
    assert capsys.readouterr().out == "0 of 0 frames are whole: 0 rows, 0 bytes\n"
    assert [store.end() for store in stores] == [0, 0]
    with pytest.raises(InputError, match=r"holds no record frames \(they are deleted after use; to keep"):
        list(find_frames([str(run)]))


@pytest.mark.parametrize("run_id", ["run-1", "run-2"])
def test_frames_that_go_between_list_and_read_are_counted_and_no_fault(
    tmp_path: Path, ring_dir: Path, run_id: str
) -> None:
    """They were released, or another run began, with which all went."""
    resolved = resolve(tmp_path / "run", ring_dir, transport={"spillPath": str(tmp_path / "spill")})
    store = ProcessStore(resolved)
    frames = frames_of_many_segments()
    handles = put(resolved, "rollout-0", frames)
    found = find_frames([str(resolved.run_dir)])
    first = next(found)
    with closing(open_source(resolved, run_id, None, starts_run=run_id == "run-2")) as source:
        source.release(handles[:-1])
    listed = [first, *found]
    assert [frame.path for frame in listed] == handles
    batch = 4 * 2**20 // 60_000
    assert [frame.data for frame in listed[:batch]] == frames[:batch]
    assert listed[-1].data == (frames[-1] if run_id == "run-1" else None)
    gone = listed[batch:-1]
    assert {(frame.data, frame.reason) for frame in gone} == {(None, RELEASED)}
    result = verify_frames(gone)
    assert (result.frames, result.faults, result.messages, result.released) == (0, {}, [], len(gone))
    assert {each["reason"] for each in inspect_frames(gone)} == {RELEASED}
    assert store.end() == 0


def test_frames_whose_object_is_gone_are_no_released_ones(tmp_path: Path, ring_dir: Path) -> None:
    transport = {"spill": "ObjectStore", "object": {"uri": (tmp_path / "objects").as_uri()}}
    resolved = resolve(tmp_path / "run", ring_dir, transport=transport)
    store = ProcessStore(resolved)
    handles = put(resolved, "rollout-0", frames_of_many_segments(60))
    first, *_ = (path for path in sorted((tmp_path / "objects").rglob("*")) if path.is_file())
    first.unlink()
    result = verify_frames(find_frames([str(resolved.run_dir)]))
    assert (result.frames, result.released) == (len(handles), 0)
    assert result.faults["unreadable"] > 0
    assert {path for path, reason, _ in result.messages if reason == "unreadable"} < {*handles}
    assert store.end() == 0


def test_released_frames_are_told_apart_from_damaged_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [FoundFrame(str(GOLDEN), GOLDEN.read_bytes()), FoundFrame("rec://…", None, RELEASED, "gone")]
    monkeypatch.setattr("tracerl.transport.find.find_frames", lambda _, **_options: found)
    for verb in ("inspect", "verify"):
        assert cli.main(["records", verb, "run"]) == 0
        out = capsys.readouterr().out
        assert out.endswith("308 bytes; 1 more were released meanwhile\n")
        assert "rec://" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_store_that_ends_meanwhile_is_one_fault(
    tmp_path: Path, ring_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("tracerl.transport.find._STORE_SECONDS", 0.2)
    resolved = resolve(tmp_path / "run", ring_dir, nodes=2, transport={"spillPath": str(tmp_path / "spill")})
    stores = [ProcessStore(resolved, f"store-{node}") for node in range(2)]
    put(resolved, "rollout-0", frames_of_many_segments())
    (other,) = put(resolved, "rollout-1", [b"other"])
    found = find_frames([str(resolved.run_dir)])
    next(found)
    stores[0].end(number)
    (fault, last) = (frame for frame in found if frame.path.startswith("store-0") or frame.path == other)
    assert (fault.path, fault.data, fault.reason) == ("store-0", None, "unreadable")
    assert "what it holds cannot be read: store-0 did not answer for 0.2 s" in fault.message
    assert last == FoundFrame(other, b"other")
    assert TOKEN not in fault.message
    assert stores[1].end() == 0


def test_with_another_token_nothing_is_read_and_none_is_shown(
    tmp_path: Path, ring_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = resolve(tmp_path / "run", ring_dir)
    store = ProcessStore(resolved)
    put(resolved, "rollout-0", [b"a frame"])
    resolved.token_file.write_text("another")
    assert cli.main(["records", "verify", str(resolved.run_dir)]) == 1
    out, error = capsys.readouterr()
    assert "store-0: damaged (unreadable): what it holds cannot be read: store-0: the bearer token is" in out
    assert "another" not in out + error
    assert store.end() == 0


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"url": "nowhere", "pid": 1, "instanceId": "0"}'])
def test_an_endpoint_that_is_none_is_one_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("tracerl.transport.find._STORE_SECONDS", 0.1)
    (tmp_path / "token").write_text("token")
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints/store-0.json").write_bytes(content)
    (fault,) = find_frames([str(tmp_path)])
    assert (fault.path, fault.reason) == ("store-0", "unreadable")
    assert "store-0 did not answer for 0.1 s" in fault.message


@pytest.mark.parametrize("content", ["", "two lines\nof it", "né", "\x00"])
def test_a_token_that_is_none_is_not_shown(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(content)
    EndpointFile(url="http://127.0.0.1:9", pid=1, instance_id="0").publish(
        tmp_path / "endpoints/store-0.json"
    )
    assert cli.main(["records", "verify", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("", f"tracerl: {tmp_path}/token is no token; give the directory of a run\n")


def test_a_token_elsewhere_is_sent_to_nobody(tmp_path: Path) -> None:
    """A directory from somebody else may link to what only this user can read."""
    (tmp_path / "secret").write_text("secret")
    run = tmp_path / "run"
    EndpointFile(url="http://127.0.0.1:9", pid=1, instance_id="0").publish(run / "endpoints/store-0.json")
    (run / "token").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="holds no record frames"):
        list(find_frames([str(run)]))


@pytest.mark.parametrize(
    ("given", "variable", "shown"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:1", "cannot be read at http://127.0.0.1:9 ("),
        (None, "http://127.0.0.1:9", "cannot be read at http://127.0.0.1:9 ("),
        ("nonsense", None, "the endpoint nonsense is no http or https URL; write for example"),
        ("http://[me:SECRET@minio", None, "the endpoint is no URL; write for example"),
        ("ftp://me:SECRET@minio", None, "the endpoint ftp://minio is no http or https URL"),
    ],
)
def test_the_endpoint_of_s3_is_given_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, shown: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", variable)
    with pytest.raises(InputError, match=re.escape(shown)) as caught:
        list(find_frames(["s3://records/x"], endpoint_url=given))
    assert "SECRET" not in str(caught.value)
