"""Loading records: what trajectories get, what is fetched how often, and what is counted."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from rl_harness import SHAPE, make_job

from tracerl.api.frames import Handle
from tracerl.api.job import Reprefill, Retention
from tracerl.api.model import ModelShape
from tracerl.engines.base import Trajectory
from tracerl.engines.megatron.slicing import Place, selection_of
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry, assemble
from tracerl.records.partial import Selection
from tracerl.records.sites import SiteKind, SiteSlice, SiteTable, audit_table, site_table
from tracerl.rl.loading import RecordLoader
from tracerl.transport.base import Borrowed, FrameSource, LoanError, TransportError, Wanted
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource

JOB, RUN, VERSION, PROMPT = "job", "run", 3, 4
_NUMBERS = itertools.count()


class Watched:
    """A source that remembers what was borrowed, and fails as a whole when told to."""

    def __init__(self, source: FrameSource) -> None:
        self.source = source
        self.asked: list[Wanted] = []
        self.error: TransportError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        if self.error is not None:
            raise self.error
        self.gate.wait(30)
        self.asked += wanted
        return self.source.borrow(wanted)

    def times(self, trajectory: Trajectory) -> int:
        """How often its own frame was fetched."""
        return [handle for handle, _ in self.asked].count(trajectory.entries[-1].handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def trajectory_of(id: str, rows: int, prompt: int, entries: list[RecordEntry]) -> Trajectory:
    """A trajectory of so many rows, all of one version; its tokens are all alike."""
    response = rows + 1 - prompt
    return Trajectory(
        id=id,
        tokens=torch.zeros(rows + 1, dtype=torch.int64),
        prompt_tokens=prompt,
        logp_rollout=torch.zeros(response),
        token_versions=[VERSION] * response,
        entries=entries,
    )


class World:
    """A rollout's sink and a trainer's source in the same memory."""

    def __init__(self, tmp_path: Path, shape: ModelShape = SHAPE, **sections: dict[str, Any]) -> None:
        spec = make_job(tmp_path, **sections).job.spec
        self.table, self.audit = site_table(shape, spec), audit_table(shape, spec)
        uri = f"memory://loading-{next(_NUMBERS)}"
        self.sink = ObjectSink(
            open_filesystem(uri),
            store="rollout-0",
            job_uid=JOB,
            run_id=RUN,
            batch_bytes=2**20,
            batch_seconds=0.0,
        )
        self.source = Watched(
            ObjectSource(open_filesystem(uri), job_uid=JOB, run_id=RUN, retention=Retention.TRAINED)
        )
        self.rows: dict[str, np.ndarray] = {}
        self.audit_rows: dict[str, np.ndarray] = {}
        self.sizes: dict[Handle, int] = {}
        self.loaders: list[RecordLoader] = []

    def frame(
        self, table: SiteTable, rows: np.ndarray, start: int, *, part: int | None = None, **subject: str
    ) -> Handle:
        """Write a frame of all sites, or `part` of two."""
        header = FrameHeader(
            job_uid=JOB,
            run_id=RUN,
            **{"trajectory": "", **subject},
            part=part or 0,
            parts=1 if part is None else 2,
            row_start=start,
            row_stop=start + len(rows),
            version=VERSION,
            table_digest=table.digest,
            audit=table.audit,
        )
        slices = None if part is None else table.select(part, 2)
        data = encode_frame(header, table, rows, slices=slices)
        handle = self.sink.put(data, header.key)
        self.sizes[handle] = len(data)
        return handle

    def group(self, name: str, samples: int, *, rows: int = 12, audited: bool = False) -> list[Trajectory]:
        """Samples that share the rows of their prompt; the first of them may be audited."""
        prefix = random_rows(self.table, PROMPT - 1, f"{name}-prefix")
        shared = self.frame(self.table, prefix, 0, prefix=f"rollout-0/{name}")
        found = []
        for number in range(samples):
            id = f"{name}-{number}"
            own = random_rows(self.table, rows - len(prefix), id)
            self.rows[id] = np.concatenate([prefix, own])
            entries = [
                RecordEntry(shared, 0, 1, 0, len(prefix)),
                RecordEntry(self.frame(self.table, own, len(prefix), trajectory=id), 0, 1, len(prefix), rows),
            ]
            if number:
                self.sink.retain([shared])
            elif audited:
                self.audit_rows[id] = random_rows(self.audit, rows, f"{id}-audit")
                whole = self.frame(self.audit, self.audit_rows[id], 0, trajectory=id)
                entries.insert(0, RecordEntry(whole, 0, 1, 0, rows, audit=True))
            found.append(trajectory_of(id, rows, PROMPT, entries))
        self.settle()
        return found

    def settle(self) -> None:
        """Wait until all frames can be read."""
        settled = threading.Event()
        self.sink.settle(settled.set)
        assert settled.wait(30)

    def loader(self, **settings: Any) -> RecordLoader:
        loader = RecordLoader(
            self.source,
            self.table,
            self.audit,
            job_uid=JOB,
            run_id=RUN,
            reprefill=Reprefill.AS_SAMPLED,
            **settings,
        )
        self.loaders.append(loader)
        return loader

    def check(self, loaded: Sequence[Trajectory]) -> None:
        """Compare with what was recorded."""
        for trajectory in loaded:
            assert trajectory.records is not None
            assert trajectory.records.present.all()
            assert np.array_equal(trajectory.records.rows.numpy(), self.rows[trajectory.id])
            if trajectory.id in self.audit_rows:
                assert trajectory.audit is not None
                assert np.array_equal(trajectory.audit.rows.numpy(), self.audit_rows[trajectory.id])
            else:
                assert trajectory.audit is None

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        self.sink.close()
        self.source.close()


def random_rows(table: SiteTable, n: int, seed: str) -> np.ndarray:
    rng = np.random.default_rng(list(seed.encode()))
    rows = rng.integers(0, 256, (n, table.row_bytes), dtype=np.uint8) & 0x7E
    for site in table.sites:
        if site.kind is SiteKind.ROUTES:
            at = table.offset(site)
            rows[:, at : at + site.row_bytes] %= site.experts
    return rows


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_trajectory_gets_what_was_recorded_and_counts_once(world: World) -> None:
    group, other = world.group("a", 3, audited=True), world.group("b", 1)
    loader = world.loader()
    world.check(loader.load(group))
    world.check(loader.load([*group[1:], *other]))
    assert all(t.records is None and t.audit is None for t in group)
    counts = loader.take_counts()
    assert (counts.rows, counts.missing, counts.frames) == (48, {}, 9)
    audits = [e.handle for t in group for e in t.entries if e.audit]
    assert counts.audit_bytes == sum(world.sizes[handle] for handle in audits)
    # The prompt of the three samples travelled once.
    assert counts.bytes + counts.audit_bytes == sum(world.sizes.values())
    assert counts.fetch_seconds > 0
    assert counts.unpack_seconds > 0
    assert sorted(handle for handle, _ in world.source.asked) == sorted(world.sizes)
    world.check(loader.load(group))
    assert loader.take_counts().frames == 0


def test_a_shared_prefix_is_fetched_once_over_several_loads(world: World) -> None:
    group = world.group("a", 4)
    loader = world.loader()
    for trajectory in group:
        world.check(loader.load([trajectory]))
    assert len(world.source.asked) == 5
    assert loader.take_counts().bytes == sum(world.sizes.values())


def test_what_does_not_fit_is_fetched_again_and_not_counted_again(world: World) -> None:
    group = world.group("a", 3)
    loader = world.loader(cache_bytes=1)
    for _ in range(2):
        for trajectory in group:
            world.check(loader.load([trajectory]))
    assert all(world.source.times(trajectory) == 2 for trajectory in group)
    counts = loader.take_counts()
    assert (counts.rows, counts.frames) == (36, 6)


def test_lost_frames_are_missing_and_counted_whenever_they_are_lost(world: World) -> None:
    first, second = world.group("a", 2)
    world.source.release([first.entries[-1].handle])
    until(lambda: world.source.present([first.entries[-1].handle]) == [False])
    loader = world.loader(cache_bytes=1)
    (loaded,) = loader.load([first])
    assert loaded.records is not None
    assert loaded.records.missing == {"missing": 9}
    assert not loaded.records.present[3:].any()
    world.check(loader.load([second]))
    # Lost between two passes of a step.
    world.source.release([second.entries[-1].handle])
    until(lambda: world.source.present([second.entries[-1].handle]) == [False])
    for _ in range(2):
        (loaded,) = loader.load([second])
        assert loaded.records is not None
        assert loaded.records.missing == {"missing": 9}
    counts = loader.take_counts()
    assert (counts.rows, counts.missing) == (24, {"missing": 18})


def test_entries_that_name_no_frame(world: World) -> None:
    (trajectory,) = world.group("a", 1)
    own = trajectory.entries[-1]
    trajectory.entries[-1] = RecordEntry(Handle("nonsense"), 0, 1, own.start, own.stop)
    (loaded,) = world.loader().load([trajectory])
    assert loaded.records is not None
    assert loaded.records.missing == {"missing": 9}


def test_the_next_micro_batch_is_loaded_while_one_is_used(world: World) -> None:
    batches = [world.group(name, 2) for name in "abc"]
    loader = world.loader()
    loader.announce([*batches, []])
    until(lambda: world.source.times(batches[0][1]) == 1)
    for number, batch in enumerate(batches):
        world.check(loader.load(batch))
        if number < 2:
            until(lambda after=batches[number + 1]: world.source.times(after[1]) == 1)
            assert all(world.source.times(t) == 0 for later in batches[number + 2 :] for t in later)
    # The second pass needs nothing.
    for batch in batches:
        world.check(loader.load(batch))
    assert all(world.source.times(t) == 1 for batch in batches for t in batch)
    assert loader.take_counts().rows == 72
    # What is not announced any more is let go.
    loader.announce([batches[0]])
    world.check(loader.load(batches[0]))
    assert world.source.times(batches[0][0]) == 1
    loader.announce([])
    world.check(loader.load(batches[0]))
    assert world.source.times(batches[0][0]) == 2


def test_what_comes_next_is_there_without_a_wait_or_a_count_once_it_is_loaded(world: World) -> None:
    batches = [world.group(name, 2) for name in "ab"]
    loader = world.loader()
    assert loader.upcoming(batches[0]) == loader.upcoming([]) == []
    loader.announce(batches)
    world.check(loader.load(batches[0]))
    until(lambda: len(loader.upcoming(batches[0])) == 2)
    upcoming = loader.upcoming(batches[0])
    world.check(upcoming)
    assert loader.take_counts().rows == 24
    loaded = loader.load(batches[1])
    assert [one.records for one in loaded] == [one.records for one in upcoming]
    assert all(one.records is other.records for one, other in zip(loaded, upcoming, strict=True))
    assert loader.take_counts().rows == 24
    # Behind the last one comes the first of the next pass.
    assert [one.id for one in loader.upcoming(batches[1])] == [one.id for one in batches[0]]


def test_prefetching_ends_where_half_of_the_cache_is_full(world: World) -> None:
    groups = [world.group(str(number), 1) for number in range(8)]
    one = sum(world.sizes[entry.handle] for entry in groups[0][0].entries)
    loader = world.loader(cache_bytes=6 * one)
    world.source.gate.clear()
    for group in groups:
        loader.prefetch(group)
    world.source.gate.set()
    until(lambda: len(world.source.asked) >= 6)
    # What comes next has room all the same, and comes before what waits.
    loader.announce([groups[7]])
    until(lambda: world.source.times(groups[7][0]) == 1)
    for group in groups:
        world.check(loader.load(group))
    assert all(world.source.times(group[0]) == 1 for group in groups)


def test_a_trajectory_that_is_dropped_leaves_nothing(world: World) -> None:
    kept, dropped = world.group("a", 2)
    loader = world.loader()
    world.source.gate.clear()
    loader.prefetch([kept, dropped])
    loader.drop([dropped.id])
    world.source.gate.set()
    world.check(loader.load([kept]))
    assert loader.take_counts().frames == 2
    world.check(loader.load([dropped]))


def test_a_source_that_is_of_no_use(world: World) -> None:
    group = world.group("a", 2)
    loader = world.loader()
    world.source.error = TransportError("failed", "no store answers; see their logs")
    loader.prefetch(group)
    with pytest.raises(TransportError, match="no store answers"):
        loader.load(group)
    world.source.error = None
    world.check(loader.load(group))


class Fickle:
    """A source whose first loans end badly: when `change` is called, other bytes are in place of theirs."""

    def __init__(self, source: FrameSource, bad: int) -> None:
        self.source, self.bad = source, bad
        self.loans = 0
        self._lent: list[bytearray] = []

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        self.loans += 1
        with self.source.borrow(wanted) as borrowed:
            pieces = [
                piece if isinstance(piece, TransportError) else [bytearray(view) for view in piece]
                for piece in borrowed.pieces
            ]
        self._lent = [data for piece in pieces if isinstance(piece, list) for data in piece]
        lent = [
            piece if isinstance(piece, TransportError) else [memoryview(data).toreadonly() for data in piece]
            for piece in pieces
        ]
        return Borrowed(lent, self._end if self.loans <= self.bad else None)

    def change(self) -> None:
        for data in self._lent if self.loans <= self.bad else ():
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)

    def _end(self) -> None:
        raise LoanError("the connection to store-0 was lost; read them again")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("bad", [1, 2, 3, 9])
def test_what_was_read_while_a_loan_ended_is_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch, after: int, bad: int
) -> None:
    """Wherever the bytes change: no row is wrong, and none is missing that its store has, but after `bad`."""
    group = world.group("a", 3)
    fickle = Fickle(world.source, bad)
    world.source = fickle  # type: ignore[assignment]
    paired = itertools.count(1)

    def pairing(*arguments: Any, **more: Any) -> Any:
        if after == 0:
            fickle.change()
        result = assemble(*arguments, **more)
        if next(paired) % 3 == after % 3:
            fickle.change()
        return result

    monkeypatch.setattr("tracerl.rl.loading.assemble", pairing)
    loader = world.loader()
    loaded = loader.load(group)
    if bad < 3:
        world.check(loaded)
    else:
        assert [trajectory.records.missing for trajectory in loaded] == [{"missing": 12}] * 3
        assert not any(trajectory.records.present.any() for trajectory in loaded)
    assert fickle.loans == min(bad + 1, 3)
    # Nothing of it was kept for others.
    fickle.bad = 0
    loader.drop([trajectory.id for trajectory in group])
    world.check(loader.load(group))


def test_a_rank_that_needs_one_layer_reads_little_else(world: World) -> None:
    group = world.group("a", 2, rows=200, audited=True)
    slices = [SiteSlice(i, 0, s.groups) for i, s in enumerate(world.table.sites) if s.layer == 0]
    selection = Selection(world.table, slices)
    assert selection.sparse()
    loader = world.loader(selections=(selection, None))
    columns = np.concatenate(
        [np.arange(world.table.offset(s), world.table.offset(s) + s.row_bytes) for s in selected(selection)]
    )
    for trajectory in loader.load(group):
        assert trajectory.records is not None
        assert trajectory.records.table is selection.table
        assert trajectory.records.missing == {}
        assert np.array_equal(trajectory.records.rows.numpy(), world.rows[trajectory.id][:, columns])
    counts = loader.take_counts()
    own = [t.entries[-1].handle for t in group]
    assert 0 < counts.bytes < 0.7 * sum(world.sizes[handle] for handle in own)
    # A frame that was damaged on its way is missing alone.
    lost = group[0].entries[-1]
    group[0].entries[-1] = RecordEntry(Handle(lost.handle.replace("len=", "len=1")), 0, 1, 3, 200)
    loader.drop([t.id for t in group])
    damaged, whole = loader.load(group)
    assert damaged.records is not None
    assert whole.records is not None
    assert damaged.records.missing.total() == 197
    assert whole.records.missing == {}


HEADS = ModelShape.uniform(
    2,
    hidden=32,
    heads=4,
    kv_heads=4,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_hidden=16,
    vocab=64,
    context=256,
)


WIDE = ModelShape.uniform(
    2,
    hidden=2048,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_hidden=16,
    vocab=64,
    context=256,
)


def in_frames(world: World, lengths: dict[str, int], size: int) -> list[Trajectory]:
    """Trajectories in frames of `size` rows, the first of which they share."""
    prefix = random_rows(world.table, size, "prefix")
    shared = world.frame(world.table, prefix, 0, prefix="rollout-0/prompt")
    found = []
    for id, rows in lengths.items():
        world.rows[id] = np.concatenate([prefix, random_rows(world.table, rows - size, id)])
        entries = [RecordEntry(shared, 0, 1, 0, size)]
        for start in range(size, rows, size):
            part = world.rows[id][start : start + size]
            handle = world.frame(world.table, part, start, trajectory=id)
            entries.append(RecordEntry(handle, 0, 1, start, start + len(part)))
        found.append(trajectory_of(id, rows, size, entries))
    world.settle()
    return found


def context_rows(longest: int, rank: int) -> set[int]:
    """Rows of one of two context-parallel ranks, which hold the outer and the inner quarters."""
    quarter = -(-longest // 4)
    inner = set(range(quarter, 3 * quarter))
    return inner if rank else set(range(4 * quarter)) - inner


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_reads_frames_of_its_rows(tmp_path: Path, rank: int) -> None:
    """Of trajectories of two lengths, whose padding changes from one pass to the next; counted in bytes."""
    world = World(tmp_path, WIDE)
    trajectories = in_frames(world, {"a": 200, "b": 120}, 16)
    selection = selection_of(world.table, WIDE.layers, Place(context=2, context_rank=rank))
    loader = world.loader(selections=(selection, None))
    seen = before = 0
    for longest in (200, 260, 260, 200):
        mine = context_rows(longest, rank)
        wanted = {
            entry.handle
            for trajectory in trajectories
            for entry in trajectory.entries
            if mine & set(range(entry.start, entry.stop))
        }
        batch = [replace(trajectory, longest=longest) for trajectory in trajectories]
        loader.announce([batch])
        for loaded in loader.load(batch):
            assert loaded.records is not None
            assert loaded.records.missing == {}
            rows = sorted(row for row in mine if row < loaded.records.n_rows)
            assert loaded.records.present[rows].all()
            assert np.array_equal(loaded.records.rows.numpy()[rows], world.rows[loaded.id][rows])
            assert not loaded.records.present.all()
        asked = [handle for handle, _ in world.source.asked[seen:]]
        counts = loader.take_counts()
        if not seen:
            assert sorted(asked) == sorted(wanted)
            assert (counts.rows, counts.missing, counts.frames) == (320, {}, 13 + 8)
            assert counts.bytes == sum(world.sizes[handle] for handle in wanted)
        else:
            # Padded as before, all is there; what they share is kept whatever the padding is.
            assert set(asked) <= wanted
            assert bool(asked) is (longest != before)
            assert (counts.rows, counts.bytes) == (0, 0)
        seen, before = len(world.source.asked), longest
    world.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_reads_its_half_and_keys_and_values_of_the_other(
    tmp_path: Path, rank: int
) -> None:
    """Sequence parallelism: of the experts' input and routes a half of the rows, in bytes of sections."""
    world = World(tmp_path, WIDE)
    [trajectory] = in_frames(world, {"a": 200}, 20)
    selection = selection_of(world.table, WIDE.layers, Place(tensor=2, tensor_rank=rank))
    assert selection is not None
    loader = world.loader(selections=(selection, None))
    [loaded] = loader.load([replace(trajectory, longest=200)])
    assert loaded.records is not None
    assert loaded.records.missing == {}
    mine = slice(100 * rank, 100 * rank + 100)
    size = 0
    attended = {SiteKind.KEY, SiteKind.VALUE}
    for number, site in enumerate(selection.table.sites):
        present = np.zeros(200, bool)
        present[slice(None) if site.kind in attended else mine] = True
        assert np.array_equal(loaded.records.present[:, number], present)
    # Both heads are in one frame: their sections are read whole.
    for entry in trajectory.entries:
        if 100 * rank <= entry.start < 100 * rank + 100:
            size += world.sizes[entry.handle]
        else:
            sections = sum(site.row_bytes for site in world.table.sites if site.kind in attended)
            size += selection.preamble_guess + 20 * sections
    counts = loader.take_counts()
    assert counts.bytes == size < 0.7 * sum(world.sizes.values())
    world.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_frame_is_missing_where_its_rows_are_needed(tmp_path: Path, rank: int) -> None:
    world = World(tmp_path, WIDE)
    [trajectory] = in_frames(world, {"a": 200}, 20)
    lost = trajectory.entries[3]
    trajectory.entries[3] = replace(lost, handle=Handle(lost.handle.replace("-0/", "-9/")))
    assert trajectory.entries[3] != lost
    selection = selection_of(world.table, WIDE.layers, Place(context=2, context_rank=rank))
    loader = world.loader(selections=(selection, None))
    # Rows 60 to 79 are of rank 1, and of 276 rows' padding those from 69 on.
    loader.load([replace(trajectory, longest=200)])
    counts = loader.take_counts()
    assert counts.missing == ({"missing": 20} if rank else {})
    runs = {"a": [(60, 80)]} if rank else {}
    assert {id: [run[:2] for run in found] for id, found in counts.missing_rows.items()} == runs
    loader.load([replace(trajectory, longest=276)])
    counts = loader.take_counts()
    assert counts.missing == ({} if rank else {"missing": 9})
    assert [run[:2] for run in counts.missing_rows.get("a", [])] == ([] if rank else [(60, 69)])
    world.close()


def test_tensor_parallel_ranks_read_their_heads_and_no_others(tmp_path: Path) -> None:
    """Of a rollout of two ranks, which wrote two heads of four each; of audits too; counted in bytes."""
    world = World(tmp_path, HEADS, method={"name": "TRACE", "trace": {"layers": {"policy": "All"}}})
    [trajectory] = world.group("a", 1, rows=203)
    rows = {table: random_rows(table, 203, f"whole-{table.audit}") for table in (world.table, world.audit)}
    trajectory.entries = [
        RecordEntry(
            world.frame(table, half(table, every, part), 0, part=part, trajectory="a-0"), part, 2, 0, 203
        )
        for table, every in rows.items()
        for part in range(2)
    ]
    trajectory.entries = [replace(entry, audit=number > 1) for number, entry in enumerate(trajectory.entries)]
    world.settle()
    for rank in range(2):
        place = Place(tensor=2, tensor_rank=rank)
        mine, audited = (selection_of(table, HEADS.layers, place) for table in rows)
        loader = world.loader(selections=(mine, audited))
        [loaded] = loader.load([trajectory])
        counts = loader.take_counts()
        for found, size in ((loaded.records, counts.bytes), (loaded.audit, counts.audit_bytes)):
            assert found is not None
            assert found.missing == {}
            assert found.present.all()
            whole = world.audit if found is loaded.audit else world.table
            # Both heads of keys and values are in the frame of one part; all else is in part 0.
            expected = [half(whole, rows[whole], 0), half(whole, rows[whole], 1)]
            shared = [
                rows[whole][:, whole.offset(site) :][:, : site.row_bytes]
                for site in whole.sites
                if site.kind not in {SiteKind.KEY, SiteKind.VALUE}
            ]
            own = expected[rank].shape[1] + (sum(part.shape[1] for part in shared) if rank else 0)
            assert found.rows.shape[1] == own
            for site in found.table.sites:
                got = found.rows[:, found.table.offset(site) :][:, : site.row_bytes].numpy()
                index = whole.sites.index(
                    next(s for s in whole.sites if (s.layer, s.kind) == (site.layer, site.kind))
                )
                assert np.array_equal(got, piece(whole, rows[whole], index, rank))
            frames = 2 * Selection(whole, whole.whole).preamble_guess
            # Heads of the other rank lie beside what is shared, or in a frame of which the start is read.
            assert 203 * own < size < 203 * own + frames
    world.close()


def test_pipeline_stages_read_their_layers_and_no_others(tmp_path: Path) -> None:
    """The bytes of all stages are those of the rows once, but for what is in front of them in every frame."""
    world = World(tmp_path, HEADS, method={"name": "TRACE", "trace": {"layers": {"policy": "All"}}})
    [trajectory] = world.group("a", 1, rows=203)
    rows = random_rows(world.table, 203, "whole")
    trajectory.entries = [RecordEntry(world.frame(world.table, rows, 0, trajectory="a-0"), 0, 1, 0, 203)]
    world.settle()
    table, start = world.table, 0
    for rank in range(2):
        selection = selection_of(table, HEADS.layers, Place(pipeline=2, pipeline_rank=rank))
        assert selection is not None
        loader = world.loader(selections=(selection, None))
        [loaded] = loader.load([trajectory])
        assert loaded.records is not None
        assert loaded.records.missing == {}
        assert {site.layer for site in loaded.records.table.sites} == {rank}
        stop = start + loaded.records.rows.shape[1]
        assert np.array_equal(loaded.records.rows.numpy(), rows[:, start:stop])
        own = 203 * (stop - start)
        assert own < loader.take_counts().bytes <= own + selection.preamble_guess
        start = stop
    assert start == rows.shape[1]
    world.close()


def half(table: SiteTable, rows: np.ndarray, part: int) -> np.ndarray:
    """What rank `part` of two writes: its heads, and as the first one all that is not of heads."""
    written = [piece(table, rows, index, part) for index, _, _ in table.select(part, 2)]
    return np.concatenate(written, axis=1)


def piece(table: SiteTable, rows: np.ndarray, index: int, part: int) -> np.ndarray:
    """Bytes of a site, of Key and Value those of heads 0 and 1 (part 0), or 2 and 3."""
    site = table.sites[index]
    whole = rows[:, table.columns[index] : table.columns[index + 1]]
    if site.kind not in {SiteKind.KEY, SiteKind.VALUE}:
        return whole
    if table.audit:  # 4 bits a value, 8 a block of 16: 16 + 2 bytes of each two heads
        return np.concatenate([whole[:, 16 * part :][:, :16], whole[:, 32 + 2 * part :][:, :2]], axis=1)
    # 1 bit a value: 4 bytes; 3 bits a block: 6 bits of the 12 behind.
    scales = (whole[:, 8].astype(int) | whole[:, 9].astype(int) << 8) >> 6 * part & 0x3F
    return np.concatenate([whole[:, 4 * part :][:, :4], scales[:, None].astype(np.uint8)], axis=1)


def selected(selection: Selection) -> list[Any]:
    return [selection.whole.sites[piece.site] for piece in selection.slices]


def test_threads_that_load_prefetch_and_drop_at_once(world: World) -> None:
    groups = [world.group(str(number), 3, audited=number % 4 == 0) for number in range(8)]
    every = [trajectory for group in groups for trajectory in group]
    loader = world.loader(cache_bytes=20_000)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(25):
                some = random.sample(every, random.randrange(1, 6))
                match random.randrange(4):
                    case 0:
                        loader.prefetch(some)
                    case 1:
                        loader.drop([trajectory.id for trajectory in some])
                    case _:
                        world.check(loader.load(some))
        except BaseException as error:  # noqa: BLE001  told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
