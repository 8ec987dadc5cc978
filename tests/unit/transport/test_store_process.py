"""Store processes as a run starts them, and what trainers and rollouts open by the resolved job."""

from __future__ import annotations

import logging
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from record_stores import (
    RUN_ID,
    TOKEN,
    ProcessStore,
    files_below,
    frames_of,
    key,
    resolve,
    right,
    shared_directory,
    wait_until,
    wanted,
)

from tracerl.api.constants import METRICS, Role
from tracerl.api.frames import Handle
from tracerl.api.resolved import Endpoint, ResolvedJob
from tracerl.transport import sources
from tracerl.transport.base import TransportError
from tracerl.transport.sources import RecordSources, open_sink, open_source

_SEED = 31


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    with shared_directory() as directory:
        yield directory


def put(resolved: ResolvedJob, rollout: str, count: int = 8, *, run_id: str = RUN_ID) -> list[Handle]:
    sink = open_sink(resolved, rollout, run_id)
    frames = frames_of(_SEED, [1_000 + row for row in range(count)])
    keys = [key(f"{rollout}-{row % 2}", run_id, row) for row in range(count)]
    handles = [sink.put(*pair, timeout=30) for pair in zip(frames, keys, strict=True)]
    sink.close()
    return handles


def faults(source: RecordSources, handles: list[Handle]) -> set[str]:
    """Why frames of which none can be read cannot be."""
    with source.borrow(wanted(handles)) as borrowed:
        assert all(isinstance(piece, TransportError) for piece in borrowed.pieces)
        return {piece.fault for piece in borrowed.pieces}


def all_right(source: RecordSources, handles: list[Handle]) -> bool:
    with source.borrow(wanted(handles)) as borrowed:
        return all(
            not isinstance(piece, TransportError) and right(handle, piece)
            for handle, piece in zip(handles, borrowed.pieces, strict=True)
        )


def resident_without_shared(pid: int) -> int:
    """Bytes of memory of a process apart from the ring."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^Rss(?:Anon|File):\s+([0-9]+) kB$", status, re.M))


def test_two_nodes_read_in_place_and_over_the_network(tmp_path: Path, ring_dir: Path) -> None:
    resolved = resolve(tmp_path / "run", ring_dir, nodes=2, transport={"spillPath": str(tmp_path / "spill")})
    stores = [ProcessStore(resolved, f"store-{node}") for node in range(2)]
    sources = [open_source(resolved, RUN_ID, f"node-{node}", starts_run=node == 0) for node in range(2)]
    here, there = put(resolved, "rollout-0"), put(resolved, "rollout-1", 5)
    mixed = [handle for pair in zip(here, reversed(there * 2), strict=False) for handle in pair]
    size = sum(1_000 + row for row in range(8))
    for source in sources:
        assert all_right(source, mixed)
        assert source.present([*mixed, Handle("rec://store-9/0?len=1&xxh3=0000000000000000")]) == [
            *[True] * len(mixed),
            False,
        ]
    counters = sources[0].usage().counters
    assert counters["read_bytes_ring"] == size
    assert counters["read_bytes_http"] == sum(
        int(handle.partition("len=")[2].partition("&")[0]) for handle in mixed if "store-1" in handle
    )
    assert min(counters["read_nanoseconds_ring"], counters["read_nanoseconds_http"]) > 0
    assert sources[1].usage().counters["read_bytes_http"] == size
    usage = sources[0].usage()
    assert (usage.frames, usage.capacity_bytes) == (13, 2 * 2**21)

    # A step's end: handles of both, and trajectories whose handles never arrived.
    sources[0].release([*here[:2], *there[:1]])
    sources[0].forget(["rollout-0-0", "rollout-1-1"])
    left = [handle for row, handle in enumerate(here[2:], 2) if row % 2] + [there[2], there[4]]
    assert [handle for handle in here + there if sources[1].present([handle]) == [True]] == left
    sources[1].release(left)
    assert sources[0].usage().frames == 0

    metrics = urllib.request.Request(f"{stores[1].url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(metrics) as response:
        families = {
            family.name: family for family in text_string_to_metric_families(response.read().decode())
        }
    listed = [spec for spec in METRICS if spec.source is Role.STORE]
    assert {spec.name.removesuffix("_total") for spec in listed} == set(families)
    for spec in listed:
        samples = families[spec.name.removesuffix("_total")].samples
        assert {tuple(sample.labels) for sample in samples} == {spec.labels}
    committed = families["tracerl_store_committed_frames"].samples[0].value
    assert committed == families["tracerl_store_released_frames"].samples[0].value == 5
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{stores[1].url}/metrics")

    maps = Path(f"/proc/{stores[0].process.pid}/maps").read_text()
    assert not [name for name in ("libtorch", "numpy", "pandas") if name in maps]
    assert resident_without_shared(stores[0].process.pid) < 80 * 2**20
    for source in sources:
        source.close()
    assert [store.end() for store in stores] == [0, 0]
    assert not ring_dir.exists()
    assert not [*(tmp_path / "spill").iterdir(), *resolved.layout.endpoints.iterdir()]


def test_a_killed_store_comes_back_empty_and_leaves_nothing(tmp_path: Path, ring_dir: Path) -> None:
    objects = tmp_path / "objects"
    resolved = resolve(
        tmp_path / "run",
        ring_dir,
        transport={
            "spillPath": str(tmp_path / "spill"),
            "spillLimit": "1Mi",
            "spill": "ObjectStore",
            "object": {"uri": objects.as_uri()},
        },
    )
    first = ProcessStore(resolved)
    near, far = open_source(resolved, RUN_ID, "node-0", starts_run=True), open_source(resolved, RUN_ID, None)
    sink = open_sink(resolved, "rollout-0", RUN_ID)
    frames = frames_of(_SEED, [60_000] * 80)
    old = [sink.put(frame, key(row=row), timeout=30) for row, frame in enumerate(frames)]
    wait_until(lambda: near.usage().congested is False)
    assert all_right(near, old)
    assert all_right(far, old)
    assert len(files_below(objects)) > 5
    [left] = (tmp_path / "spill").iterdir()
    first.end(signal.SIGKILL)
    assert left.is_dir()
    assert (ring_dir / "store-0" / "ring").exists()

    second = ProcessStore(resolved)
    assert second.instance_id != first.instance_id
    assert not left.exists()
    # It listens before it has emptied the object store, which may be slow.
    wait_until(lambda: not files_below(objects))
    for source in (near, far):
        assert source.present(old) == [False] * len(old)
        assert faults(source, old[:2]) == {"missing"}
        source.release(old)
    new = [sink.put(frame, key(row=row), timeout=30) for row, frame in enumerate(frames[:4])]
    assert all_right(near, new)
    assert all_right(far, new)
    for client in (sink, near, far):
        client.close()
    assert second.end() == 0
    assert not ring_dir.exists()
    assert not [*(tmp_path / "spill").iterdir()]
    assert not files_below(objects)


def test_the_next_run_starts_without_the_frames_of_the_last(tmp_path: Path, ring_dir: Path) -> None:
    resolved = resolve(tmp_path / "run", ring_dir)
    store = ProcessStore(resolved)
    last = open_source(resolved, "run-1", "node-0", starts_run=True)
    old = put(resolved, "rollout-0", run_id="run-1")
    assert all_right(last, old)
    following = open_source(resolved, "run-2", "node-0", starts_run=True)
    assert following.usage().frames == 0
    late = put(resolved, "rollout-0", 1, run_id="run-1")
    new = put(resolved, "rollout-0", 2, run_id="run-2")
    for source in (last, open_source(resolved, "run-1", None)):
        assert faults(source, [*old, *late, *new]) == {"foreign"}
        source.close()
    assert all_right(following, new)
    following.close()
    assert store.end() == 0


def test_memory_is_bounded_while_nobody_reads(tmp_path: Path, ring_dir: Path) -> None:
    resolved = resolve(tmp_path / "run", ring_dir, transport={"spillPath": str(tmp_path / "spill")})
    store = ProcessStore(resolved)
    sink, source = open_sink(resolved, "rollout-0", RUN_ID), open_source(resolved, RUN_ID, None)
    frame = bytes(64_000)
    handles = [sink.put(frame, key(row=row), timeout=30) for row in range(100)]
    before = resident_without_shared(store.process.pid)
    handles += [sink.put(frame, key(row=row), timeout=30) for row in range(1_000)]
    assert all_right(source, handles[:100])
    assert resident_without_shared(store.process.pid) - before < 16 * 2**20
    source.release(handles)
    wait_until(lambda: not files_below(tmp_path / "spill"))
    assert len([*Path(f"/proc/{store.process.pid}/fd").iterdir()]) < 60
    sink.close()
    source.close()
    assert store.end() == 0


def test_a_second_store_of_the_same_name_is_refused_and_harms_nothing(tmp_path: Path, ring_dir: Path) -> None:
    objects = tmp_path / "objects"
    resolved = resolve(
        tmp_path / "run",
        ring_dir,
        transport={"spill": "ObjectStore", "object": {"uri": objects.as_uri()}},
    )
    store = ProcessStore(resolved)
    sink, source = open_sink(resolved, "rollout-0", RUN_ID), open_source(resolved, RUN_ID, "node-0")
    handles = [sink.put(bytes(60_000), key(row=row), timeout=30) for row in range(50)]
    second = subprocess.run(
        [sys.executable, "-m", "tracerl.runtime.store_main", str(resolved.layout.job), "store-0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert "belongs to a store that is running" in second.stderr
    assert "Traceback" not in second.stderr
    assert all_right(source, handles)
    sink.close()
    source.close()
    assert store.end() == 0


def test_an_object_store_that_is_down_holds_up_no_start(
    tmp_path: Path, ring_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    resolved = resolve(
        tmp_path / "run",
        ring_dir,
        transport={
            "spill": "ObjectStore",
            "object": {"uri": "s3://nowhere/x", "endpointUrl": "http://127.0.0.1:9"},
            "deadlineSeconds": 1,
        },
    )
    store = ProcessStore(resolved)
    # It listens, though it has not given up the object store yet.
    assert "is emptied at the end of this store instead" not in store.log()
    near, far = open_source(resolved, RUN_ID, "node-0", starts_run=True), open_source(resolved, RUN_ID, None)
    handles = put(resolved, "rollout-0")
    assert all_right(near, handles)
    assert all_right(far, handles)
    for source in (near, far):
        source.close()
    store.end(signal.SIGKILL)  # else it would wait for the object store


def test_a_store_may_have_as_many_files_open_as_it_can(tmp_path: Path, ring_dir: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        store = ProcessStore(resolve(tmp_path / "run", ring_dir))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert resource.prlimit(store.process.pid, resource.RLIMIT_NOFILE) == (before[1], before[1])
    assert store.end() == 0


def test_with_only_objects_no_store_is_needed(tmp_path: Path, ring_dir: Path) -> None:
    resolved = resolve(
        tmp_path / "run",
        ring_dir,
        nodes=2,
        transport={
            "onlyObject": True,
            "object": {"uri": (tmp_path / "objects").as_uri(), "batchMilliseconds": 0},
        },
    )
    source = open_source(resolved, RUN_ID, "node-0", starts_run=True)
    handles = put(resolved, "rollout-0") + put(resolved, "rollout-1", 3)
    assert all_right(source, handles)
    counters = source.usage().counters
    assert counters["read_bytes_object"] > 0
    assert counters["read_nanoseconds_object"] > 0
    assert counters["object_retries"] == 0
    source.release(handles)
    wait_until(lambda: source.usage().frames == 0)
    source.close()
    assert not [*ring_dir.iterdir()]


def test_on_a_cluster_a_store_may_appear_later_than_the_deadline(
    tmp_path: Path, ring_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod was placed, and its image pulled, while the trainers' ran already."""
    monkeypatch.setattr(sources, "_PAUSE_SECONDS", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    local = resolve(tmp_path / "run", ring_dir, transport={"deadlineSeconds": 1})
    store = Endpoint(name="store-0", node="node-0", url=url)
    endpoints = local.endpoints.model_copy(update={"directory": None, "store": [store]})
    resolved = local.model_copy(update={"endpoints": endpoints})
    resolved.write(resolved.layout.job)
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.INFO):
        opening = [
            pool.submit(open_source, resolved, RUN_ID, node, starts_run=True) for node in ("node-0", None)
        ]
        wait_until(lambda: caplog.text.count("waiting for the record stores") >= 2)
        arguments = [sys.executable, "-m", "tracerl.runtime.store_main", str(resolved.layout.job), "store-0"]
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        opened = [each.result() for each in opening]
    for source in opened:
        assert source.usage().frames == 0
        source.close()
    process.terminate()
    assert process.wait(30) == 0
