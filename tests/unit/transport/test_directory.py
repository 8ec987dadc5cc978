"""The directory transport, on a real directory and on fsspec's memory filesystem."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.frames import FrameKey, Handle, format_handle, parse_handle
from tracerl.transport.base import Transport, TransportError, Usage
from tracerl.transport.directory import DirectoryTransport

JOB, RUN = "0b7c-uid", "run/1"
FRAME = bytes(range(256)) * 5


def key(trajectory: str = "t-0", **changes: Any) -> FrameKey:
    values = {
        "part": 0,
        "parts": 1,
        "row_start": 0,
        "row_stop": 9,
        "version": 3,
        "job_uid": JOB,
        "run_id": RUN,
    }
    return FrameKey(trajectory=trajectory, **{**values, **changes})


Open = Callable[..., DirectoryTransport]


@pytest.fixture(params=["file", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/rec ords" if request.param == "file" else f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def open_store(uri: str) -> Open:
    def make(store: str = "rollout-0", job_uid: str = JOB, run_id: str = RUN) -> DirectoryTransport:
        return DirectoryTransport(uri, store=store, job_uid=job_uid, run_id=run_id)

    return make


def files(uri: str) -> list[str]:
    filesystem, root = fsspec.core.url_to_fs(uri)
    return [path.removeprefix(root) for path in filesystem.find(root, withdirs=True) if path != root]


def fault(call: Callable[[], Any]) -> str:
    with pytest.raises(TransportError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value.reason == "TransportFailed"
    return caught.value.fault


def test_another_process_gets_what_was_put(open_store: Open) -> None:
    rollout: Transport = open_store()
    trainer: Transport = open_store("trainer-0")
    handle = rollout.put(FRAME, key())
    parts = parse_handle(handle)
    assert (parts.store, parts.length, parts.xxh3) == ("rollout-0", 1280, xxhash.xxh3_64_intdigest(FRAME))
    assert bytes(trainer.get(handle)) == FRAME
    assert bytes(trainer.get(handle, [(3, 5), (0, 1), (7, 7), (1279, 1280)])) == b"\x03\x04\x00\xff"
    assert bytes(trainer.get(handle, [])) == b""
    assert bytes(rollout.get(rollout.put(memoryview(b""), key()))) == b""
    for outside in [(-1, 3), (4, 3), (0, 1281)]:
        with pytest.raises(ValueError, match="is not a range"):
            trainer.get(handle, [outside])


def test_release_deletes_the_frame_and_empty_directories(uri: str, open_store: Open) -> None:
    rollout, trainer = open_store(), open_store("trainer-0")
    first, second = (rollout.put(FRAME, key(name)) for name in ("a", "b"))
    trainer.release(first)
    assert fault(lambda: trainer.get(first)) == "missing"
    assert bytes(trainer.get(second)) == FRAME
    trainer.release(first)  # an aborted trajectory may be released again
    assert rollout.usage().frames_held == 1
    rollout.release(second)
    assert files(uri) == []
    assert bytes(trainer.get(rollout.put(FRAME, key()))) == FRAME  # directories come back


def test_a_retained_frame_needs_one_more_release(uri: str, open_store: Open) -> None:
    rollout, trainer = open_store(), open_store("trainer-0")
    handle = rollout.put(FRAME, key("rollout-0/17"))
    rollout.retain(handle)
    trainer.retain(handle)
    for _ in range(2):
        trainer.release(handle)
        assert bytes(trainer.get(handle)) == FRAME
        assert rollout.usage().bytes_held == 1280  # references are not frames
    rollout.release(handle)
    assert files(uri) == []
    assert fault(lambda: rollout.retain(handle)) == "missing"
    assert files(uri) == []


def test_usage_counts_what_is_held_and_what_went_through(open_store: Open) -> None:
    rollout, trainer = open_store(), open_store("trainer-0")
    handles = [rollout.put(FRAME[:size], key(str(size))) for size in (100, 20, 3)]
    trainer.get(handles[0])
    trainer.get(handles[1], [(0, 5), (7, 9)])
    trainer.release(handles[0])
    assert rollout.usage() == Usage(23, 2, 123, 3, 0, 0)
    assert trainer.usage() == Usage(0, 0, 0, 0, 107, 2)


def test_close_removes_what_this_store_holds(uri: str, open_store: Open) -> None:
    first, second = open_store("rollout-0"), open_store("rollout-1")
    kept = second.put(FRAME, key())
    first.retain(first.put(FRAME, key()))
    first.close()
    assert bytes(second.get(kept)) == FRAME
    second.close()
    assert files(uri) == []
    second.close()


def test_frames_of_another_job_or_run_are_refused(open_store: Open) -> None:
    rollout = open_store()
    handle = rollout.put(FRAME, key())
    for other in (open_store(job_uid="another"), open_store(run_id="run-2")):
        assert fault(partial(other.put, FRAME, key())) == "foreign"
        assert fault(partial(other.get, handle)) == "missing"
        other.release(handle)
        other.close()
    assert fault(lambda: rollout.put(FRAME, key(job_uid="another"))) == "foreign"
    assert bytes(rollout.get(handle)) == FRAME


def test_a_file_that_something_else_changed(uri: str, open_store: Open) -> None:
    store = open_store()
    handle = store.put(FRAME, key())
    filesystem, root = fsspec.core.url_to_fs(uri)
    (path,) = [path for path in filesystem.find(root) if path.endswith(".trec")]
    filesystem.pipe_file(path, FRAME[:-1])
    assert fault(lambda: store.get(handle)) == "damaged"
    assert fault(lambda: store.get(handle, [(1270, 1280)])) == "damaged"


HOSTILE = [
    "",
    ".",
    "..",
    "/",
    "../../x",
    "a/b",
    "a\nb",
    "%2e%2e",
    "*?[a]",
    "ü" * 300,
    "\0",
    "~",
    ".trec",
    "x.tmp",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_names_stay_inside_the_store(uri: str, name: str) -> None:
    job, run = f"j{name}"[:20], f"r{name}"[:20]
    store = DirectoryTransport(uri, store=f"s{name}"[:20], job_uid=job, run_id=run)
    handle = store.put(FRAME, key(name, job_uid=job, run_id=run))
    assert bytes(store.get(handle)) == FRAME
    store.release(handle)
    assert files(uri) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rec://",
        "http://x",
        "rec://s/n?len=1",
        format_handle("..", "secret.trec", 6, 0),
        format_handle(".", "secret.trec", 6, 0),
        format_handle("rollout-0", "../secret.trec", 6, 0),
        format_handle("rollout-0", "/etc/passwd", 6, 0),
        format_handle("rollout-0", "secret", 6, 0),
        format_handle("rollout-0", "\0.trec", 6, 0),
        format_handle("rollout-0", "x" * 5000 + ".trec", 6, 0),
    ],
)
def test_handles_that_name_no_frame(uri: str, open_store: Open, text: str) -> None:
    store = open_store()
    store.put(FRAME, key())
    filesystem, root = fsspec.core.url_to_fs(uri)
    for folder in (root, f"{root}/{JOB}", f"{root}/{JOB}/run%2F1"):
        filesystem.pipe_file(f"{folder}/secret.trec", b"secret")
        filesystem.pipe_file(f"{folder}/secret", b"secret")
    before = files(uri)
    for call in (store.get, store.retain):
        assert fault(partial(call, Handle(text))) in {"missing", "failed"}
    with contextlib.suppress(TransportError):
        store.release(Handle(text))
    assert files(uri) == before


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "retain", "release", "get"]), st.integers(0, 3)), max_size=25)
)
def test_like_a_dictionary_with_reference_counts(steps: list[tuple[str, int]]) -> None:
    uri = f"memory://{secrets.token_hex(8)}"
    store = DirectoryTransport(uri, store="s", job_uid=JOB, run_id=RUN)
    handles: list[Handle] = []
    counts: dict[Handle, int] = {}
    for what, which in steps:
        if what == "put" or not handles:
            handle = store.put(f"frame {len(handles)}".encode(), key())
            handles.append(handle)
            counts[handle] = 1
            continue
        handle = handles[-1 - which % len(handles)]
        if what == "release":
            store.release(handle)
            counts[handle] = max(counts[handle] - 1, 0)
        elif counts[handle] == 0:
            assert fault(partial(store.get if what == "get" else store.retain, handle)) == "missing"
        elif what == "retain":
            store.retain(handle)
            counts[handle] += 1
        else:
            assert bytes(store.get(handle)) == f"frame {handles.index(handle)}".encode()
    assert store.usage().frames_held == sum(count > 0 for count in counts.values())
    for handle, count in counts.items():
        for _ in range(count):
            store.release(handle)
    assert files(uri) == []


def test_many_threads_put_get_and_release_at_once(uri: str, open_store: Open) -> None:
    rollout, trainer = open_store(), open_store("trainer-0")

    def travel(number: int) -> None:
        data = number.to_bytes(4, "big") * (number + 1)
        handle = rollout.put(data, key(str(number)))
        rollout.retain(handle)
        assert bytes(trainer.get(handle)) == data
        trainer.release(handle)
        trainer.release(handle)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(travel, range(120)))
    usage = rollout.usage()
    assert (usage.frames_held, usage.frames_put) == (0, 120)
    assert usage.bytes_put == trainer.usage().bytes_got == sum(4 * (n + 1) for n in range(120))
    assert len({path for path in files(uri) if path.endswith(".trec")}) == 0


def test_two_releasers_of_one_frame_take_two_references(open_store: Open) -> None:
    rollout = open_store()
    for _ in range(20):
        handle = rollout.put(FRAME, key())
        for _ in range(3):
            rollout.retain(handle)
        barrier = threading.Barrier(3)

        def release(handle: Handle = handle, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            rollout.release(handle)

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(release) for _ in range(3)]:
                done.result()
        assert bytes(rollout.get(handle)) == FRAME
        rollout.release(handle)
        assert rollout.usage().frames_held == 0


class Raced(LocalFileSystem):
    """A filesystem on which another process is always a moment earlier in deleting the first reference."""

    protocol = "raced"
    lost = 0

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        if ".refs/" in path and self.lost < 1:
            self.lost += 1
            raise FileNotFoundError(path)


def test_a_reference_that_another_releaser_took_is_not_taken_twice(tmp_path: Path) -> None:
    fsspec.register_implementation("raced", Raced, clobber=True)
    store = DirectoryTransport(f"raced://{tmp_path}", store="s", job_uid=JOB, run_id=RUN)
    handle = store.put(FRAME, key())
    store.retain(handle)
    store.retain(handle)
    store.release(handle)  # the other's release and this one: two of three references are gone
    assert bytes(store.get(handle)) == FRAME
    store.release(handle)
    assert fault(lambda: store.get(handle)) == "missing"


def test_a_frame_is_visible_only_when_whole(tmp_path: Path) -> None:
    store = DirectoryTransport(str(tmp_path), store="s", job_uid=JOB, run_id=RUN)
    done = threading.Event()
    torn: list[str] = []

    def look() -> None:
        while not done.is_set():
            for path in tmp_path.rglob("*.trec"):
                data = path.read_bytes()
                if xxhash.xxh3_64_hexdigest(data[8:]).encode() != data[:8].hex().encode():
                    torn.append(path.name)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(60):
        body = secrets.token_bytes(200_000 + number)
        store.put(xxhash.xxh3_64_digest(body) + body, key())
    done.set()
    reader.join()
    assert torn == []
    assert store.usage().frames_held == 60


# -- faults -----------------------------------------------------------------------------------------------


class FullDisk(LocalFileSystem):
    """A local filesystem whose files all end up on the kernel's full device."""

    protocol = "fulldisk"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Path(path).touch()
            return Path("/dev/full").open(mode)
        return super()._open(path, mode=mode, **options)


@pytest.fixture
def full_disk() -> None:
    fsspec.register_implementation("fulldisk", FullDisk, clobber=True)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryTransport(f"fulldisk://{tmp_path}", store="s", job_uid=JOB, run_id=RUN)
    with pytest.raises(TransportError, match=r"no space is left; free some, or set") as caught:
        store.put(FRAME * 100, key())
    assert caught.value.fault == "full"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.usage() == Usage(0, 0, 0, 0, 0, 0)


def test_a_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    script = f"""
import resource, signal
from tracerl.api.frames import FrameKey
from tracerl.transport.base import TransportError
from tracerl.transport.directory import DirectoryTransport
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store = DirectoryTransport({str(tmp_path)!r}, store="s", job_uid="j", run_id="r")
try:
    store.put(bytes(5000), FrameKey("j", "r", "t", 0, 1, 0, 9, 3))
except TransportError as error:
    print(error.fault)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "full\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_no_permission_is_one_sentence(tmp_path: Path) -> None:
    store = DirectoryTransport(str(tmp_path / "x"), store="s", job_uid=JOB, run_id=RUN)
    handle = store.put(FRAME, key())
    (frame,) = tmp_path.rglob("*.trec")
    user = os.geteuid()
    tmp_path.chmod(0o755)
    (tmp_path / "x").chmod(0o755)
    frame.chmod(0o000)
    frame.parent.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)  # permissions do not bind root
        for call in (
            lambda: store.put(FRAME, key()),
            lambda: store.get(handle),
            lambda: store.release(handle),
        ):
            assert fault(call) == "permission"
    finally:
        os.seteuid(user)
        frame.parent.chmod(0o755)
    store.release(handle)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for uri in ("nosuch://bucket/x", f"{tmp_path}/file/records"):
        with pytest.raises(TransportError, match=r"[;:] "):
            DirectoryTransport(uri, store="s", job_uid=JOB, run_id=RUN).put(FRAME, key())


class Broken(LocalFileSystem):
    """A filesystem whose client raises types of its own."""

    protocol = "broken"

    def cat_file(self, path: str, **options: Any) -> bytes:
        raise LookupError("region")

    def exists(self, path: str, **options: Any) -> bool:
        raise OSError(errno.EIO, "the cable is cut")


def test_a_clients_own_errors_are_transport_errors(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    store = DirectoryTransport(f"broken://{tmp_path}", store="s", job_uid=JOB, run_id=RUN)
    handle = store.put(FRAME, key())
    with pytest.raises(TransportError, match=r"cannot be read in broken.*region; check that place"):
        store.get(handle)
    with pytest.raises(TransportError, match=r"cannot be retained in broken.*the cable is cut"):
        store.retain(handle)


WRITER = """
import json, os, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from tracerl.api.frames import FrameKey
from tracerl.transport.directory import DirectoryTransport

class Slow:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2]); self.file.flush()
        print("half", flush=True)
        sys.stdin.read()

class HalfWay(LocalFileSystem):
    protocol = "halfway"
    slow = False
    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode=mode, **options)
        return Slow(file) if self.slow else file

fsspec.register_implementation("halfway", HalfWay)
store = DirectoryTransport("halfway://" + sys.argv[1], store="rollout-0", job_uid="j", run_id="r")
key = FrameKey("j", "r", "t", 0, 1, 0, 9, 3)
print(store.put(b"whole" * 100, key), flush=True)
HalfWay.slow = True
store.put(b"never whole" * 100, key)
"""


def test_a_killed_writer_leaves_one_temporary_file_that_the_next_start_removes(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    handle = Handle(writer.stdout.readline().strip())
    assert writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    left = sorted(path.name.rpartition(".")[2] for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["tmp", "trec"]

    reader = DirectoryTransport(str(tmp_path), store="trainer-0", job_uid="j", run_id="r")
    assert bytes(reader.get(handle)) == b"whole" * 100
    assert len(list(tmp_path.rglob("*.tmp"))) == 1  # a reader does not clean up behind a writer
    again = DirectoryTransport(str(tmp_path), store="rollout-0", job_uid="j", run_id="r")
    assert list(tmp_path.rglob("*.tmp")) == []
    assert (again.usage().frames_held, again.usage().bytes_held) == (1, 500)
    assert bytes(again.get(handle)) == b"whole" * 100
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_entries_travel_as_text(open_store: Open) -> None:
    store = open_store()
    handle = store.put(FRAME, key("a b/ü%"))
    assert bytes(store.get(Handle(json.loads(json.dumps(handle))))) == FRAME
    assert handle.isascii()
