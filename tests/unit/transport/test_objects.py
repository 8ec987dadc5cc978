"""Frames through objects, on a real directory and on fsspec's memory filesystem."""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule
from object_stores import JOB, RUN, GateFileSystem, Place, gate_uri, key, read, settle

from tracerl.api.frames import Handle, format_handle, parse_handle
from tracerl.api.job import Retention
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.objects.filesystem import Span, open_filesystem
from tracerl.transport.objects.format import decode_index

FRAME = bytes(range(256)) * 5


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    uri = f"file://{tmp_path}/rec ords" if request.param == "file" else f"memory://{secrets.token_hex(8)}"
    with ExitStack() as stack:
        yield Place(uri, stack)


@pytest.fixture
def gate() -> Iterator[Place]:
    with ExitStack() as stack:
        place = Place(gate_uri(), stack)
        stack.callback(GateFileSystem.gate.set)  # before sinks are closed
        yield place


def fault(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(TransportError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return caught.value.fault


def objects(place: Place) -> list[str]:
    return [path for path in place.files() if path.endswith(".trecs")]


# -- reading ----------------------------------------------------------------------------------------------


def test_another_process_reads_what_was_put(place: Place) -> None:
    sink, source = place.sink(), place.source()
    frames = [secrets.token_bytes(size) for size in (0, 1, 63, 64, 65, 1280, 4095, 4096, 4097, 15_000)]
    handles = [sink.put(frame, key()) for frame in frames]
    settle(sink)
    for handle, frame in zip(handles, frames, strict=True):
        parts = parse_handle(handle)
        assert (parts.store, parts.length) == ("rollout-0", len(frame))
        assert parts.xxh3 == xxhash.xxh3_64_intdigest(frame)
    wanted = [Wanted(handle) for handle in handles]
    with source.borrow(wanted) as borrowed:
        assert [[bytes(view) for view in piece] for piece in borrowed.pieces] == [[frame] for frame in frames]
        view = borrowed.pieces[-1][0]
        assert view.readonly
    with pytest.raises(ValueError, match="released"):
        view[0]
    assert source.present(handles) == [True] * len(handles)
    assert 1 < len(objects(place)) < len(frames)  # gathered, and no object much above the batch


def test_ranges_are_read_in_the_order_asked(place: Place) -> None:
    sink, source = place.sink(memory_bytes=2**26), place.source()
    far = secrets.token_bytes(20 * 2**20)  # longer than two parts: read by several requests
    first, second = sink.put(FRAME, key()), sink.put(far, key())
    settle(sink)
    spans = ((3, 5), (0, 1), (7, 7), (1279, 1280), (0, 1280))
    distant = ((len(far) - 3, len(far)), (0, 2), (1_000_000, 1_000_004), (0, len(far)))
    with source.borrow([Wanted(first, spans), Wanted(second, distant), Wanted(first, ())]) as borrowed:
        assert [bytes(view) for view in borrowed.pieces[0]] == [FRAME[a:b] for a, b in spans]
        assert [bytes(view) for view in borrowed.pieces[1]] == [far[a:b] for a, b in distant]
        assert borrowed.pieces[2] == []
    for outside in [(-1, 3), (4, 3), (0, 1281)]:
        with pytest.raises(ValueError, match="is not a range"):
            source.borrow([Wanted(first, (outside,))])


def test_near_ranges_share_a_request(place: Place) -> None:
    sink, source = place.sink(batch_bytes=2**20), place.source()
    handles = [sink.put(FRAME, key()) for _ in range(50)]
    settle(sink)
    before = source._filesystem.counters["requests"]
    source.borrow([Wanted(handle) for handle in handles]).release()
    assert source._filesystem.counters["requests"] == before + 1


def test_put_many_and_errors_of_single_frames(place: Place) -> None:
    sink, source = place.sink(), place.source()
    answers = sink.put_many(
        [(FRAME, key()), (FRAME, key(run_id="other")), (bytes(2**20), key()), (b"x", key())]
    )
    assert [answer.fault if isinstance(answer, TransportError) else "" for answer in answers] == [
        "",
        "foreign",
        "full",
        "",
    ]
    assert sink.max_frame_bytes == 4 * 4096
    settle(sink)
    good = [answer for answer in answers if isinstance(answer, str)]
    gone = format_handle("rollout-0", "00c0ffee-0/0", 5, 0)
    with source.borrow([Wanted(good[0]), Wanted(gone), Wanted(good[1])]) as borrowed:
        assert [
            piece.fault if isinstance(piece, TransportError) else bytes(piece[0]) for piece in borrowed.pieces
        ] == [
            FRAME,
            "missing",
            b"x",
        ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rec://",
        "http://x",
        "rec://s/n?len=1",
        format_handle("..", "00c0ffee-0/0", 6, 0),
        format_handle("rollout-0", "../secret/0", 6, 0),
        format_handle("rollout-0", "00c0ffee-0/../0", 6, 0),
        format_handle("rollout-0", "00c0ffee-0", 6, 0),
        format_handle("rollout-0", "00c0ffee-0/-1", 6, 0),
        format_handle("rollout-0", "00C0FFEE-0/0", 6, 0),
    ],
)
def test_what_names_no_frame_is_missing_and_never_read(place: Place, text: str) -> None:
    sink, source = place.sink(), place.source()
    handle = Handle(text)
    assert fault(read, source, handle) == "missing"
    assert fault(sink.retain, [handle]) == "missing"
    assert source.present([handle]) == [False]
    source.release([handle])
    sink.release([handle])
    assert source.usage().frames == 0


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_ids_that_are_no_names_of_directories(place: Place, name: str) -> None:
    for ids in ({"job_uid": name}, {"run_id": name}):
        for opened in (place.sink, place.source):
            assert fault(opened, **ids) == "failed"
    assert fault(place.sink, name) == "failed"
    with pytest.raises(TransportError, match="cannot name a directory of records; use another"):
        place.sink(name)


@pytest.mark.parametrize(
    "name", ["/", "../../x", "a/b", "a\nb", "%2e%2e", "*?[a]", "ü" * 20, "~", "x.tmp", "a#b?c"]
)
def test_odd_names_stay_inside_their_directory(place: Place, name: str) -> None:
    sink = place.sink(f"s{name}", job_uid=f"j{name}", run_id=f"r{name}")
    source = place.source(job_uid=f"j{name}", run_id=f"r{name}")
    handle = sink.put(FRAME, key(name, job_uid=f"j{name}", run_id=f"r{name}"))
    settle(sink)
    assert read(source, handle) == FRAME
    source.release([handle])
    assert source.usage().frames == 0
    assert place.files() == []


# -- references -------------------------------------------------------------------------------------------


def test_an_object_goes_with_the_last_reference_of_its_last_frame(place: Place) -> None:
    sink, source = place.sink(), place.source()
    first, second, shared = (sink.put(FRAME, key(name)) for name in ("a", "b", "prefix"))
    sink.retain([shared])
    settle(sink)
    assert source.usage().frames == 3
    source.release([first, shared])
    assert (source.usage().frames, len(objects(place))) == (2, 1)
    assert fault(read, source, first) == "missing"
    assert source.present([first, second, shared]) == [False, True, True]
    source.release([second, shared])
    assert (source.usage().frames, objects(place)) == (0, [])
    assert source.present([second]) == [False]
    source.release([second])  # an aborted trajectory may be released again
    source.end_run()
    assert place.files() == []


def test_a_released_frame_stays_gone_while_objects_are_listed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, source = place.sink(), place.source()
    first, _second = (sink.put(FRAME, key(name)) for name in "ab")
    settle(sink)
    assert source.usage().frames == 2
    listed, found = source._filesystem.entries, []

    def entries(directory: str) -> list[Any]:
        # The sweep lists, and a reader comes in between.
        found.append(fault(read, source, first))
        return listed(directory)

    monkeypatch.setattr(source._filesystem, "entries", entries)
    source.release([first])
    assert source.usage().frames == 1
    assert set(found) == {"missing"}


def test_references_after_sealing_are_told_by_a_later_object(place: Place) -> None:
    sink, source = place.sink(), place.source()
    handle, given_up = sink.put(FRAME, key("prefix")), sink.put(FRAME, key("aborted"))
    settle(sink)
    sink.retain([handle])
    sink.release([given_up])
    settle(sink)
    assert len(objects(place)) == 2
    source.release([handle])
    assert source.usage().frames == 1
    assert len(objects(place)) == 1  # the one that only told is counted and gone
    assert read(source, handle) == FRAME
    sink.release([handle])
    settle(sink)
    assert (source.usage().frames, objects(place)) == (0, [])


def test_what_is_released_before_it_is_sealed_is_not_uploaded(place: Place) -> None:
    sink, source = place.sink(batch_seconds=60), place.source()
    handles = [sink.put(FRAME, key(str(number))) for number in range(3)]
    sink.release(handles)
    assert sink.usage().frames == 0
    assert fault(sink.retain, handles[:1]) == "missing"
    settle(sink)
    kept, gone = sink.put(FRAME, key("kept")), sink.put(FRAME, key("gone"))
    assert not {kept, gone} & set(handles)
    sink.release([gone])
    sink.close()
    assert len(objects(place)) == 1
    assert source.usage().frames == 1
    assert read(source, kept) == FRAME
    assert fault(read, source, gone) == "missing"


def test_retain_adds_all_references_or_none(place: Place) -> None:
    sink, source = place.sink(), place.source()
    handle = sink.put(FRAME, key())
    other = place.sink("rollout-1").put(FRAME, key())
    assert fault(sink.retain, [handle, other]) == "missing"
    settle(sink)
    source.release([handle])
    assert objects(place) == [] or source.usage().frames == 0


def test_frames_of_lost_trajectories_are_forgotten_also_those_that_come_later(place: Place) -> None:
    sink, source = place.sink(), place.source()
    kept = sink.put(FRAME, key("kept"))
    sink.put(FRAME, key("lost"))
    settle(sink)
    source.forget(["lost"])
    assert source.usage().frames == 1
    sink.put(FRAME, key("lost"))
    settle(sink)
    assert source.usage().frames == 1
    assert len(objects(place)) == 1
    assert read(source, kept) == FRAME


@pytest.mark.parametrize("retention", [Retention.JOB, Retention.FOREVER])
def test_kept_records_are_never_deleted(place: Place, retention: Retention) -> None:
    sink, source = place.sink(), place.source(retention=retention)
    handle = sink.put(FRAME, key())
    settle(sink)
    source.release([handle])
    source.forget(["t-0"])
    source.end_run()
    place.source(run_id="run-2", retention=retention).start_run()
    assert (source.usage().frames, len(objects(place))) == (1, 1)
    assert read(source, handle) == FRAME


def test_a_new_run_removes_what_earlier_runs_of_its_job_left_and_nothing_else(place: Place) -> None:
    handles = {}
    for job, run in [(JOB, "old"), (JOB, RUN), ("another", "old")]:
        sink = place.sink(job_uid=job, run_id=run)
        handles[job, run] = sink.put(FRAME, key(job_uid=job, run_id=run))
        sink.close()
    filesystem, root = fsspec.core.url_to_fs(place.uri)
    for job, run in handles:
        directory = f"{root}/{job}/{run.replace('/', '%2F')}/rollout-0"
        filesystem.pipe_file(f"{directory}/half.trecs.12345678.tmp", b"half")
    place.source().start_run()
    for (job, run), handle in handles.items():
        source = place.source(job_uid=job, run_id=run)
        if (job, run) == (JOB, "old"):
            assert fault(read, source, handle) == "missing"
        else:
            assert read(source, handle) == FRAME
    assert [path for path in place.files() if "/old/" in path and JOB in path] == []
    assert len([path for path in place.files() if path.endswith(".tmp")]) == 2
    place.sink()  # of the same store: its predecessor is dead
    assert [path.split("/")[1] for path in place.files() if path.endswith(".tmp")] == ["another"]


def test_another_run_or_job_reads_and_deletes_nothing(place: Place) -> None:
    sink = place.sink()
    handle = sink.put(FRAME, key())
    settle(sink)
    for other in (place.source(job_uid="another"), place.source(run_id="run-2")):
        assert fault(read, other, handle) == "missing"
        other.release([handle])
        other.forget(["t-0"])
        other.end_run()
        assert other.usage().frames == 0
    assert fault(sink.put, FRAME, key(job_uid="another")) == "foreign"
    assert read(place.source(), handle) == FRAME


def test_what_is_no_object_is_left_alone(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    sink, source = place.sink(), place.source()
    handle = sink.put(FRAME, key())
    settle(sink)
    filesystem, root = fsspec.core.url_to_fs(place.uri)
    (path,) = objects(place)
    whole = filesystem.cat_file(root + path)
    filesystem.pipe_file(f"{root}{path.rpartition('-')[0]}-9.trecs", whole)
    filesystem.pipe_file(f"{root}{path.rpartition('-')[0]}-8.trecs", whole[:-1])
    assert source.usage().frames == 1
    source.release([handle])
    assert source.usage().frames == 0
    assert [line.rpartition("-")[2] for line in objects(place)] == ["8.trecs", "9.trecs"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == 2  # each said once


def test_a_handle_that_claims_more_than_its_object_holds_spoils_no_other(place: Place) -> None:
    """It comes from another process: near frames are read by one request, which it would make fail."""
    sink, source = place.sink(), place.source()
    handles = [sink.put(FRAME, key()) for _ in range(3)]
    settle(sink)
    forged = []
    for handle, length in zip(handles, (1281, 2**16, 2**20), strict=True):
        parts = parse_handle(handle)
        forged.append(format_handle(parts.store, parts.name, length + 2**16, parts.xxh3))
    wanted = [handle for pair in zip(handles, forged, strict=True) for handle in pair]
    with source.borrow([Wanted(handle) for handle in wanted]) as borrowed:
        found = [
            piece.fault if isinstance(piece, TransportError) else bytes(piece[0]) for piece in borrowed.pieces
        ]
    assert found == [FRAME, "damaged"] * 3


def test_a_handle_that_claims_more_than_any_frame_has_asks_for_nothing(place: Place) -> None:
    """Its reads would be so many that listing them takes all memory."""
    sink, source = place.sink(), place.source()
    handle = sink.put(FRAME, key())
    settle(sink)
    parts = parse_handle(handle)
    forged = format_handle(parts.store, parts.name, 10**18, parts.xxh3)
    assert fault(read, source, forged) == "missing"
    assert source.present([forged]) == [False]
    source.release([forged])
    assert source.usage().frames == 1
    assert read(source, handle) == FRAME


def test_an_object_that_became_shorter_is_damaged(place: Place) -> None:
    sink, source = place.sink(), place.source()
    handle = sink.put(FRAME, key())
    settle(sink)
    filesystem, root = fsspec.core.url_to_fs(place.uri)
    (path,) = objects(place)
    filesystem.pipe_file(root + path, FRAME[:-1])
    assert fault(read, source, handle) == "damaged"
    assert source.present([handle]) == [False]


class References(RuleBasedStateMachine):
    """References of several stores against plain counts, whatever is sealed when."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.place = Place(f"memory://{secrets.token_hex(8)}", self.stack)
        self.sinks = [self.place.sink(f"rollout-{n}", batch_bytes=512, batch_seconds=60) for n in range(2)]
        self.source = self.place.source()
        self.trajectories: dict[Handle, str] = {}
        self.content: dict[Handle, bytes] = {}
        self.expected: dict[Handle, int] = {}
        self.forgotten: set[str] = set()
        self.counter = itertools.count()

    @rule(
        target=handles, store=st.integers(0, 1), size=st.integers(0, 700), trajectory=st.sampled_from("abc")
    )
    def put(self, store: int, size: int, trajectory: str) -> Any:
        frame = secrets.token_bytes(size)
        name = f"{trajectory}{next(self.counter) // 8}"
        handle = self.sinks[store].put(frame, key(name))
        assert handle not in self.expected
        self.expected[handle], self.content[handle] = int(name not in self.forgotten), frame
        self.trajectories[handle] = name
        return multiple((store, handle))

    @rule(target=handles, item=handles)
    def retain(self, item: tuple[int, Handle]) -> Any:
        """Only of what is held: the bundle has an entry for every reference."""
        if not self.expected[item[1]]:
            return multiple()
        self.sinks[item[0]].retain([item[1]])
        self.expected[item[1]] += 1
        return multiple(item)

    @rule(item=consumes(handles))
    def give_up(self, item: tuple[int, Handle]) -> None:
        if self.expected[item[1]]:
            self.sinks[item[0]].release([item[1]])
            self.expected[item[1]] -= 1

    @rule(item=consumes(handles))
    def release_after_delivery(self, item: tuple[int, Handle]) -> None:
        if self.expected[item[1]]:
            for sink in self.sinks:
                self.flush(sink)
            self.source.release([item[1]])
            self.expected[item[1]] -= 1

    @rule(item=handles)
    def forget(self, item: tuple[int, Handle]) -> None:
        for sink in self.sinks:
            self.flush(sink)
        self.forgotten.add(self.trajectories[item[1]])
        self.source.forget([self.trajectories[item[1]]])
        for handle, name in self.trajectories.items():
            if name == self.trajectories[item[1]]:
                self.expected[handle] = 0

    @rule()
    def check(self) -> None:
        for sink in self.sinks:
            self.flush(sink)
        live = [handle for handle, count in self.expected.items() if count > 0]
        usage = self.source.usage()
        assert usage.frames == len(live)
        assert usage.frame_bytes == sum(len(self.content[handle]) for handle in live)
        with self.source.borrow([Wanted(handle) for handle in live]) as borrowed:
            for handle, piece in zip(live, borrowed.pieces, strict=True):
                assert isinstance(piece, list)
                assert piece[0] == self.content[handle]
        gone = [handle for handle, count in self.expected.items() if count <= 0]
        assert self.source.present(gone) == [False] * len(gone)
        if not live:
            assert objects(self.place) == []

    def flush(self, sink: Any) -> None:
        done = threading.Event()
        sink._batch_seconds = 0
        sink.settle(done.set)
        assert done.wait(30)
        sink._batch_seconds = 60

    def teardown(self) -> None:
        self.check()
        self.stack.close()


References.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestReferences = References.TestCase


# -- waiting and failing ----------------------------------------------------------------------------------


def test_settle_calls_when_everything_before_is_readable(gate: Place) -> None:
    sink, source = gate.sink(), gate.source()
    called: list[str] = []
    sink.settle(lambda: called.append("nothing to wait for"))
    assert called == ["nothing to wait for"]
    GateFileSystem.gate.clear()
    handle = sink.put(FRAME, key())
    sink.settle(lambda: called.append(str(source.present([handle]))))
    sink.settle(lambda: called.append("second"))
    assert len(called) == 1
    GateFileSystem.gate.set()
    settle(sink)
    assert sorted(called[1:]) == ["[True]", "second"]


def test_frames_of_many_requests_share_an_object(place: Place) -> None:
    sink = place.sink(batch_seconds=0.2, batch_bytes=2**20)
    done = [threading.Event() for _ in range(10)]
    for event in done:
        sink.put(FRAME, key())
        sink.settle(event.set)
    assert all(event.wait(30) for event in done)
    assert len(objects(place)) < 10


def test_put_waits_while_uploads_do_and_memory_stays_bounded(gate: Place) -> None:
    sink = gate.sink(batch_bytes=4096, memory_bytes=16_384, uploads=2)
    GateFileSystem.gate.clear()
    frame = bytes(4096)
    answers = sink.put_many([(frame, key())] * 100, timeout=0)
    handles = [answer for answer in answers if isinstance(answer, str)]
    assert all(answer.fault == "full" for answer in answers if isinstance(answer, TransportError))
    usage = sink.usage()
    assert usage.held_bytes <= 16_384 + 4096
    assert usage.congested
    assert 0 < usage.frames == len(handles) < 6
    answers = sink.put_many([(frame, key())] * 3, timeout=0.01)
    assert all(isinstance(answer, TransportError) and answer.fault == "full" for answer in answers)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sink.put, frame, key())
        GateFileSystem.gate.set()
        handles.append(waiting.result(30))
    settle(sink)
    source = gate.source()
    assert source.present(handles) == [True] * len(handles)
    assert sink.usage().held_bytes == 0


def test_many_threads_put_and_every_frame_is_its_own(place: Place) -> None:
    sink, source = place.sink(batch_bytes=2048, memory_bytes=8192), place.source()
    frames = [f"{number}".encode() * 50 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda frame: sink.put(frame, key()), frames))
    settle(sink)
    assert len(set(handles)) == 200
    with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
        assert [bytes(piece[0]) for piece in borrowed.pieces] == frames


PASSING = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOSPC, "No space left on device"),
    TimeoutError("timed out"),
    ConnectionResetError("reset"),
    RuntimeError("some library's own"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes_is_tried_again(
    gate: Place, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the wall clock jumps: deadlines do not ask it."""
    clock = itertools.count()
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(clock) * 1e9)
    sink = gate.sink()
    GateFileSystem.errors = iter([error, error])
    handle = sink.put(FRAME, key())
    settle(sink)
    assert read(gate.source(), handle) == FRAME
    counters = sink.usage().counters
    assert (counters["retries"], counters["uploads_ok"], counters.get("lost_frames", 0)) == (2, 1, 0)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tracerl")]
    assert len(said) == 2
    assert "trying again" in said[0]
    assert "answers again" in said[1]


FATAL = [
    (PermissionError(errno.EACCES, "Permission denied"), 1),
    (OSError(errno.EROFS, "Read-only file system"), 1),
    (OSError(errno.EFBIG, "File too large"), 1),
    (NotImplementedError("no writing"), 1),
    (OSError(errno.ENOSPC, "No space left on device"), 100),
]


@pytest.mark.parametrize(("error", "times"), FATAL, ids=repr)
def test_what_does_not_pass_loses_its_frames_and_no_others(
    gate: Place, error: Exception, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = gate.sink(deadline=0.3), gate.source()
    before = sink.put(b"before", key())
    settle(sink)
    sink.retain([before])
    GateFileSystem.errors = iter([error] * times)
    lost = [sink.put(FRAME, key()) for _ in range(2)]
    settle(sink)
    GateFileSystem.errors = iter(())
    counters = sink.usage().counters
    assert (counters["uploads_failed"], counters["lost_frames"], counters["lost_bytes"]) == (1, 2, 2560)
    assert sink.usage().held_bytes == 0
    assert fault(read, source, lost[0]) == "missing"
    assert fault(sink.retain, lost[:1]) == "missing"
    sink.release(lost)
    after = sink.put(b"after", key())
    settle(sink)
    assert read(source, after) == b"after"
    source.release([before, after])
    assert source.usage().frames == 1  # the reference that the lost object was to tell
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "2 frames of an object are lost" in lines[0].getMessage()


def test_an_uploader_survives_what_nobody_foresaw(gate: Place) -> None:
    sink = gate.sink()
    sink._filesystem.write = None  # type: ignore[assignment,method-assign]
    sink.put(FRAME, key())
    settle(sink)
    assert sink.usage().counters["lost_frames"] == 1


def test_close_uploads_what_is_left(place: Place) -> None:
    sink = place.sink(batch_seconds=60)
    handle = sink.put(FRAME, key())
    sink.close()
    sink.close()
    assert fault(sink.put, FRAME, key()) == "failed"
    assert read(place.source(), handle) == FRAME


def test_deleting_goes_on_when_the_store_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        place = Place(f"file://{tmp_path}/records", stack)
        sink, source = place.sink(), place.source()
        handle = sink.put(FRAME, key())
        settle(sink)
        path = tmp_path / "records" / objects(place)[0].lstrip("/")
        data = path.read_bytes()
        path.unlink()
        path.mkdir()  # cannot be deleted as a file
        (path / "x").touch()
        source.release([handle])
        assert source.usage().frames == 0
        (path / "x").unlink()
        path.rmdir()
        path.write_bytes(data)
        assert decode_index(data, len(data)).frames
        assert source.usage().frames == 1  # the reference was of what is gone
        source.release([handle])
        assert source.usage().frames == 0
        assert objects(place) == []


# -- places -----------------------------------------------------------------------------------------------


def test_a_probe_leaves_nothing(place: Place) -> None:
    filesystem = open_filesystem(place.uri)
    filesystem.probe()
    filesystem.close()
    assert place.files() == []


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "x.trecs").mkdir()
    (tmp_path / "x.trecs/in the way").touch()
    filesystem = open_filesystem(f"file://{tmp_path}")
    assert fault(filesystem.write, "x.trecs", b"data") == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["x.trecs"]
    filesystem.close()


def test_reading_more_than_there_is_is_never_short(place: Place) -> None:
    filesystem = open_filesystem(place.uri)
    filesystem.write("a/b", b"12345")
    answers = filesystem.read([Span("a/b", 1, 4), Span("a/b", 3, 6), Span("a/c", 0, 1), Span("a/c", 1, 1)])
    assert [answer.fault if isinstance(answer, TransportError) else answer for answer in answers] == [
        b"234",
        "damaged",
        "missing",
        b"",
    ]
    (tail,) = filesystem.read_tails(["a/b"], 3)
    assert tail == (b"345", 5)
    assert filesystem.entries("") == [("a/b", 5)]
    filesystem.delete(["a/b", "a/c"])
    assert filesystem.entries("a") == filesystem.entries("nowhere") == []
    filesystem.close()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("nosuch://x", "nosuch"),
        ("s3://", "names no bucket"),
        ("s3://user:pass@bucket/x", "holds a user name"),
    ],
)
def test_urls_of_no_use(uri: str, said: str) -> None:
    with pytest.raises(TransportError, match=said) as caught:
        open_filesystem(uri)
    assert "pass" not in str(caught.value)


def test_a_secret_without_its_keys(tmp_path: Path) -> None:
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("a-key-of-mine")
    with pytest.raises(TransportError, match=r"secretName has no key AWS_SECRET_ACCESS_KEY; put") as caught:
        open_filesystem("s3://bucket/x", credentials=tmp_path)
    assert (caught.value.fault, "a-key-of-mine" in str(caught.value)) == ("permission", False)


def test_every_try_is_in_one_bucket_of_its_operation(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path.as_uri())
    filesystem.probe()
    (answer,) = filesystem.read([Span("nowhere", 0, 3)])
    filesystem.close()
    assert isinstance(answer, TransportError)
    counters = filesystem.counters
    tries = {
        one: counters[f"{one}_ok"] + counters[f"{one}_failed"] for one in ("read", "write", "delete", "list")
    }
    assert tries == {"read": 2, "write": 1, "delete": 1, "list": 2}
    assert counters["read_failed"] == 1
    for operation, count in tries.items():
        within = {name: n for name, n in counters.items() if name.startswith(f"{operation}_within_")}
        assert len(within) == 12
        assert sum(within.values()) == count
