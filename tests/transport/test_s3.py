"""Objects on a real S3 server, with a proxy in between that breaks things."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy, Request, start_fault_proxy
from s3_server import S3Server

from tracerl.api.frames import FrameKey, Handle
from tracerl.api.job import Retention
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.find import find_frames
from tracerl.transport.objects.filesystem import FileSystem, open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource

JOB, RUN = "job-uid", "run-1"
MIB = 2**20


def key(trajectory: str = "t-0", run_id: str = RUN, job_uid: str = JOB) -> FrameKey:
    return FrameKey(job_uid, run_id, trajectory, 0, 1, 0, 9, 3)


class Bucket:
    """A bucket of its own behind a proxy of its own."""

    def __init__(self, server: S3Server, proxy: FaultProxy, credentials: Path, stack: ExitStack) -> None:
        self.server, self.proxy, self.credentials, self.stack = server, proxy, credentials, stack
        self.name = server.bucket()
        self.client = server.client()

    def open(self, *, name: str | None = None, **options: Any) -> FileSystem:
        values = {"credentials": self.credentials, "deadline_seconds": 60, **options}
        filesystem = open_filesystem(
            f"s3://{name or self.name}/rec ords/", endpoint_url=self.proxy.endpoint_url, **values
        )
        self.stack.callback(filesystem.close)
        return filesystem

    def sink(self, *, run_id: str = RUN, job_uid: str = JOB, **options: Any) -> ObjectSink:
        opened = {name: options.pop(name) for name in ("deadline_seconds", "name") if name in options}
        values = {"batch_bytes": 256 * 1024, "batch_seconds": 0, "store": "rollout-0", **options}
        sink = ObjectSink(self.open(**opened), job_uid=job_uid, run_id=run_id, **values)
        self.stack.callback(sink.close)
        return sink

    def source(self, *, run_id: str = RUN, job_uid: str = JOB, **opened: Any) -> ObjectSource:
        source = ObjectSource(
            self.open(**opened), job_uid=job_uid, run_id=run_id, retention=Retention.TRAINED
        )
        self.stack.callback(source.close)
        return source

    def objects(self) -> list[str]:
        return [found["Key"] for found in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())]

    def uploads(self) -> list[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in answer.get("Uploads", ())]


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> Iterator[Bucket]:
    with ExitStack() as stack:
        proxy = stack.enter_context(start_fault_proxy(s3_server.port))
        yield Bucket(s3_server, proxy, s3_server.credentials(tmp_path / "secret"), stack)
        proxy.rule = lambda _: None


def settle(sink: ObjectSink) -> None:
    done = threading.Event()
    sink.settle(done.set)
    assert done.wait(120)


def read(source: ObjectSource, handles: list[Handle]) -> list[bytes | str]:
    with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
        return [
            piece.fault if isinstance(piece, TransportError) else bytes(piece[0]) for piece in borrowed.pieces
        ]


def sentence(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(TransportError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return caught.value.fault, text


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the product logged as an error."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith("tracerl")
    ]


def test_frames_travel_and_are_deleted(bucket: Bucket) -> None:
    sink, source = bucket.sink(memory_bytes=128 * MIB), bucket.source()
    source.start_run()
    frames = [secrets.token_bytes(size) for size in (0, 1, 64, 100_000, 300_000, 5 * MIB, 20 * MIB + 1, 7)]
    handles = [sink.put(frame, key()) for frame in frames]
    settle(sink)
    assert source.present(handles) == [True] * len(frames)
    assert read(source, handles) == frames
    span = ((3, 5), (20 * MIB - 1, 20 * MIB + 1))
    with source.borrow([Wanted(handles[-2], span)]) as borrowed:
        assert [bytes(view) for view in borrowed.pieces[0]] == [frames[-2][a:b] for a, b in span]
    assert {request.method for request in bucket.proxy.requests} >= {"POST", "PUT", "GET"}  # in parts too
    assert source.usage().frames == len(frames)
    source.release(handles)
    assert source.usage().frames == 0
    assert (bucket.objects(), bucket.uploads()) == ([], [])
    assert read(source, handles[1:2]) == ["missing"]


def test_records_are_found_by_their_url(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = bucket.sink()
    for number in range(3):
        sink.put(bytes([number]) * 100, key())
    sink.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket.server.secret_key)
    found = list(find_frames([f"s3://{bucket.name}/rec ords"]))
    assert [frame.data for frame in found] == [bytes([number]) * 100 for number in range(3)]
    assert [frame.path.partition("#")[2] for frame in found] == ["0", "128", "256"]
    # The same environment serves jobs.
    filesystem = open_filesystem(f"s3://{bucket.name}/rec ords")
    filesystem.probe()
    filesystem.close()


# -- faults that pass -------------------------------------------------------------------------------------


def every(count: int, fault: Fault, *, method: str | None = None) -> Callable[[Request], Fault | None]:
    """`count` of any `count` + 1 requests meet the fault."""
    numbers = itertools.count()

    def rule(request: Request) -> Fault | None:
        if method not in {None, request.method}:
            return None
        return None if next(numbers) % (count + 1) == count else fault

    return rule


PASSING = {
    "500": every(1, Fault(status=500)),
    "503 SlowDown": every(2, Fault(status=503, code="SlowDown")),
    "502 of a load balancer": every(1, Fault(status=502, code="")),
    "429": every(1, Fault(status=429, code="TooManyRequests")),
    "clock that was set wrong": every(1, Fault(status=403, code="RequestTimeTooSkewed")),
    "slow": lambda _: Fault(delay_seconds=0.3),
    "answers lost": every(1, Fault(lose_answer=True)),
    "cut": every(1, Fault(cut_after=0), method="GET"),
    "truncated bodies": every(2, Fault(cut_after=50_000), method="GET"),
}


def test_uploads_that_nobody_heard_of_do_not_stay(bucket: Bucket) -> None:
    """Beginning one succeeds three times, and the first two answers are lost."""
    begun: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.method != "POST" or not request.query.startswith("uploads"):
            return None
        begun.append(request)
        return Fault(lose_answer=True) if len(begun) <= 2 else None

    sink, source = bucket.sink(memory_bytes=128 * MIB), bucket.source()
    bucket.proxy.rule = rule
    frame = secrets.token_bytes(17 * MIB)
    handle = sink.put(frame, key("large"))
    settle(sink)
    assert len(begun) == 3
    assert bucket.uploads() == []
    assert read(source, [handle]) == [frame]


@pytest.mark.parametrize("name", PASSING)
def test_faults_that_pass_change_nothing(
    bucket: Bucket, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with parts of a large object."""
    sink, source = bucket.sink(memory_bytes=128 * MIB), bucket.source()
    bucket.proxy.rule = PASSING[name]
    frames = [secrets.token_bytes(size) for size in (300_000, 1000, 400_000, 17 * MIB)]
    handles = [sink.put(frame, key(str(number))) for number, frame in enumerate(frames)]
    settle(sink)
    assert read(source, handles) == frames
    assert source.usage().frames == 4
    source.release(handles)
    assert source.usage().frames == 0
    bucket.proxy.rule = lambda _: None
    counters = sink.usage().counters
    assert counters.get("lost_frames", 0) == 0
    assert counters["put_frames"] == 4
    assert (bucket.objects(), bucket.uploads()) == ([], [])
    retried = counters["retries"] + source.usage().counters["retries"]
    assert (retried > 0) == (name != "slow")
    assert errors(caplog) == []


def test_an_outage_holds_memory_and_ends_without_a_restart(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = bucket.sink(memory_bytes=MIB), bucket.source()
    before = sink.put(b"before", key())
    settle(sink)
    bucket.proxy.down()
    frame = secrets.token_bytes(100_000)
    answers = sink.put_many([(frame, key())] * 50, timeout=0.5)
    handles = [answer for answer in answers if isinstance(answer, str)]
    assert {answer.fault for answer in answers if isinstance(answer, TransportError)} == {"full"}
    assert sink.usage().held_bytes <= MIB + 256 * 1024
    assert sink.usage().congested
    bucket.proxy.up()
    settle(sink)
    handles.append(sink.put(frame, key()))
    settle(sink)
    assert read(source, handles) == [frame] * len(handles)
    assert read(source, [before]) == [b"before"]
    assert sink.usage().counters.get("lost_frames", 0) == 0
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tracerl")]
    assert 1 <= len([line for line in said if "trying again" in line]) <= 3
    assert any("answers again" in line for line in said)


def test_an_outage_longer_than_the_deadline_loses_what_waited_and_no_more(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = bucket.sink(deadline_seconds=5), bucket.source(deadline_seconds=5)
    frame = secrets.token_bytes(100_000)
    before = sink.put(frame, key())
    settle(sink)
    bucket.proxy.down()
    lost = [sink.put(frame, key()) for _ in range(6)]
    settle(sink)
    counters = sink.usage().counters
    assert (counters["lost_frames"], counters["lost_bytes"]) == (6, 600_000)
    assert sink.usage().held_bytes == 0
    assert read(source, [before]) == ["failed"]
    fault, text = sentence(lambda: source.present([before]))
    assert (fault, "tries" in text) == ("failed", True)
    source.release([before])  # cannot be deleted now
    bucket.proxy.up()
    after = sink.put(frame, key())
    settle(sink)
    assert read(source, [*lost, after]) == ["missing"] * 6 + [frame]
    assert source.usage().frames == 1
    assert len(bucket.objects()) == 1
    assert len(errors(caplog)) == 1


def test_a_wall_clock_that_jumps_moves_no_deadline(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, source = bucket.sink(), bucket.source()
    clock = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1e9 if next(clock) % 2 else 4e9)
    bucket.proxy.rule = every(2, Fault(status=500))
    handle = sink.put(b"frame", key())
    settle(sink)
    assert read(source, [handle]) == [b"frame"]
    assert sink.usage().counters.get("lost_frames", 0) == 0


# -- faults that do not pass ------------------------------------------------------------------------------


def test_403_is_said_in_one_sentence_and_not_tried_again(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = bucket.sink(), bucket.source()
    handle = sink.put(b"frame", key())
    settle(sink)
    bucket.proxy.rule = lambda _: Fault(status=403, code="AccessDenied")
    before = len(bucket.proxy.requests)
    lost = [sink.put(bytes(300_000), key()) for _ in range(3)]
    settle(sink)
    assert len(bucket.proxy.requests) == before + 3
    assert read(source, [handle]) == ["permission"]
    fault, text = sentence(lambda: source.present([handle]))
    assert (fault, "403 AccessDenied; give these credentials the right" in text) == ("permission", True)
    bucket.proxy.rule = lambda _: None
    after = sink.put(b"after", key())
    settle(sink)
    assert read(source, [handle, *lost, after]) == [b"frame", "missing", "missing", "missing", b"after"]
    assert sink.usage().counters["lost_frames"] == 3
    assert len(errors(caplog)) == 1


def test_a_bucket_that_does_not_exist(bucket: Bucket) -> None:
    before = len(bucket.proxy.requests)
    fault, text = sentence(lambda: bucket.sink(name="no-such-bucket"))
    assert (fault, "the bucket does not exist; create it" in text) == ("failed", True)
    assert "s3://no-such-bucket/rec ords/" in text
    assert len(bucket.proxy.requests) == before + 1
    fault, text = sentence(lambda: bucket.open(name="no-such-bucket").probe())
    assert (fault, "does not exist" in text) == ("failed", True)


def test_secrets_are_in_no_message_log_or_repr(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "AWS_ACCESS_KEY_ID").write_text(bucket.server.access_key)
    (wrong / "AWS_SECRET_ACCESS_KEY").write_text("not-the-secret")
    (wrong / "AWS_SESSION_TOKEN").write_text("not-a-token")
    texts = []
    filesystem = bucket.open(credentials=wrong)
    fault, text = sentence(filesystem.probe)
    assert fault == "permission"
    texts += [text, repr(filesystem), repr(vars(filesystem)), repr(vars(filesystem._backend))]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    before = len(bucket.proxy.requests)
    fault, text = sentence(bucket.open(credentials=None).probe)
    assert (fault, "there are no credentials; set AWS_ACCESS_KEY_ID" in text) == ("permission", True)
    assert len(bucket.proxy.requests) == before  # and none was made without
    texts += [text, *(record.getMessage() for record in caplog.records)]
    for secret in (bucket.server.access_key, bucket.server.secret_key, "not-the-secret", "not-a-token"):
        assert not any(secret in each for each in texts)


# -- what dead writers leave ------------------------------------------------------------------------------


def test_only_own_uploads_that_nobody_ends_are_aborted(bucket: Bucket) -> None:
    others = ["rec ords/another/old/rollout-0/x", "rec ords/job-uid-2/x", "elsewhere/x"]
    living = f"rec ords/{JOB}/{RUN}/rollout-1/x"
    old = f"rec ords/{JOB}/old/rollout-0/x"
    own = f"rec ords/{JOB}/{RUN}/rollout-0/x"
    for name in (*others, living, old, own):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=name)
    bucket.client.put_object(Bucket=bucket.name, Key=old, Body=b"x")
    bucket.client.put_object(Bucket=bucket.name, Key=others[0], Body=b"x")
    bucket.source().start_run()
    assert sorted(bucket.uploads()) == sorted([*others, living, own])
    assert bucket.objects() == [others[0]]
    bucket.sink()
    assert sorted(bucket.uploads()) == sorted([*others, living])


WRITER = """
import sys
from pathlib import Path
from tracerl.api.frames import FrameKey
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink

uri, endpoint, credentials = sys.argv[1:]
filesystem = open_filesystem(uri, endpoint_url=endpoint, credentials=Path(credentials))
sink = ObjectSink(filesystem, store="rollout-0", job_uid="job-uid", run_id="run-1",
                  batch_bytes=2**20, batch_seconds=0)
key = FrameKey("job-uid", "run-1", "t-0", 0, 1, 0, 9, 3)
while True:
    for handle in [sink.put(bytes(300_000), key) for _ in range(3)]:
        print(handle, flush=True)
    sink.settle(lambda: print("settled", flush=True))
    sink.put(bytes(4 * 2**20), key)
"""


def test_a_writer_that_is_killed_leaves_whole_objects_only(bucket: Bucket) -> None:
    bucket.proxy.rule = lambda request: Fault(delay_seconds=0.01 * (request.number % 7))
    for _ in range(3):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                WRITER,
                f"s3://{bucket.name}/rec ords/",
                bucket.proxy.endpoint_url,
                str(bucket.credentials),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        assert process.stdout is not None
        lines = []
        while "settled\n" not in lines:
            lines.append(process.stdout.readline())
        process.kill()
        process.wait()
        process.stdout.close()
        settled = [Handle(line.strip()) for line in lines[: lines.index("settled\n")] if line != "settled\n"][
            :3
        ]
        source = bucket.source()
        assert read(source, settled) == [bytes(300_000)] * 3
        assert source.usage().frames >= 3
    bucket.sink().close()
    assert bucket.uploads() == []
    bucket.source().end_run()
    assert bucket.objects() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small filesystem needs root")
def test_a_full_disk_waits_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this root may not mount")
    try:
        options = {"job_uid": JOB, "run_id": RUN}
        filesystem = open_filesystem(tmp_path.as_uri(), deadline_seconds=60)
        sink = ObjectSink(
            filesystem, store="rollout-0", batch_bytes=MIB, batch_seconds=0, memory_bytes=3 * MIB, **options
        )
        source = ObjectSource(open_filesystem(tmp_path.as_uri()), retention=Retention.TRAINED, **options)
        frame = secrets.token_bytes(MIB // 2)
        answers = sink.put_many([(frame, key())] * 40, timeout=0.5)
        handles = [answer for answer in answers if isinstance(answer, str)]
        assert len(handles) < 40
        assert sink.usage().held_bytes <= 4 * MIB
        written = [handle for handle, there in zip(handles, source.present(handles), strict=True) if there]
        assert read(source, written) == [frame] * len(written)
        source.release(written)  # makes room
        settle(sink)
        rest = [handle for handle in handles if handle not in written]
        assert rest
        assert read(source, rest) == [frame] * len(rest)
        assert sink.usage().counters.get("lost_frames", 0) == 0
        sink.close()
        source.release(rest)
        assert source.usage().frames == 0
        source.close()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
