"""Rows by KV slot: what a request's frames hold after its slots were shared, taken away and filled again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_stores import JOB, RUN, RingStore

from tracerl.api.job import Reprefill
from tracerl.engines.capture import Captured, held_sites
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.sglang.recorder import Recorder, SlotRows
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble
from tracerl.records.sites import Site, SiteKind, SiteTable

FIELDS = {
    "format": "NVFP4",
    "block": 16,
    "code_bits": 1,
    "scale_bits": 3,
    "order": "Reciprocal",
    "tie_rule": "NearestEven",
    "scale_rule": "AmaxNearestEven",
    "source_dtype": "Float32",
    "tensor_scale": "Fixed",
    "tensor_scale_value": 1.0,
    "tensor_scale_convention": "encode",
}
TABLE = SiteTable(
    (
        Site(layer=0, kind=SiteKind.EXPERT_INPUT, dim=32, groups=1, **FIELDS),
        Site(layer=0, kind=SiteKind.KEY, dim=32, groups=2, **FIELDS),
    )
)
HALF = TABLE.sites[0].row_bytes
SLOTS = 64


@dataclass
class Harness:
    recorder: Recorder
    store: RingStore
    ended: dict[str, list[RecordEntry]] = field(default_factory=dict)
    happened: threading.Event = field(default_factory=threading.Event)

    def compute(self, slots: list[int], version: int, zero: list[tuple[int, int, int]] | None = None) -> None:
        """A forward pass: each row holds its version and a number of its own in both halves."""
        rows = torch.zeros((len(slots), TABLE.row_bytes), dtype=torch.uint8)
        for index in range(len(slots)):
            self.counter += 1
            rows[index, 0] = rows[index, HALF] = version
            rows[index, 1] = rows[index, HALF + 1] = self.counter
        found = np.array(zero or [], np.int64).reshape(-1, 3)
        self.recorder.store(np.array(slots), [Captured(rows, found)] * self.tables, version, (0.0, 0.0))

    counter: int = 0
    tables: int = 1

    def finish(self, id: str, slots: list[int], version: int, *, prompt: int = 2) -> list[RecordEntry]:
        self.happened.clear()
        self.recorder.finish(id, len(slots) + 1, reads(slots), version, prompt=prompt)
        assert self.happened.wait(20)
        return self.ended[id]

    def assembled(self, id: str, versions: list[int], prompt: int, reprefill: Reprefill) -> TrajectoryRecords:
        return assemble(
            self.ended[id],
            self.store.get,
            TABLE,
            tokens=prompt + len(versions),
            prompt_tokens=prompt,
            token_versions=versions,
            job_uid=JOB,
            run_id=RUN,
            trajectory=id,
            reprefill=reprefill,
        )


def reads(slots: list[int]) -> Callable[[int], np.ndarray]:
    return lambda rows: np.array(slots[:rows], np.int64)


@pytest.fixture(params=[Reprefill.AS_SAMPLED, Reprefill.AS_ATTENDED])
def reprefill(request: pytest.FixtureRequest) -> Reprefill:
    return request.param


@contextlib.contextmanager
def started(directory: Path, reprefill: Reprefill, *, audit_every: int = 0) -> Iterator[Harness]:
    store = RingStore(directory / "store")
    writer = FrameWriter(limit_bytes=2**20, deadline_seconds=10)
    writer.direct(Destination(store.sink, JOB, RUN))

    def finished(id: str, entries: list[RecordEntry], _seconds: dict[str, float]) -> None:
        harness.ended[id] = entries
        harness.happened.set()

    tables = [TABLE, replace(TABLE, audit=True)][: 2 if audit_every else 1]
    recorder = Recorder(
        [SlotRows(table, held_sites(table), SLOTS) for table in tables],
        writer,
        reprefill=reprefill,
        chunk_tokens=4,
        audit_every=audit_every,
        instance="recorder",
        finished=finished,
    )
    harness = Harness(recorder, store, tables=len(tables))
    yield harness
    writer.close()
    store.close()


@pytest.fixture
def harness(tmp_path: Path, reprefill: Reprefill) -> Iterator[Harness]:
    with started(tmp_path, reprefill) as harness:
        yield harness


def test_rows_are_those_of_the_slots(harness: Harness, reprefill: Reprefill) -> None:
    """Two requests share the slots of a prompt; the second computes none of them."""
    harness.compute([3, 4, 5], 7, zero=[(1, 0, 1)])
    harness.compute([10], 7)
    harness.compute([11], 7)
    first = harness.finish("a", [3, 4, 5, 10], 7)
    second = harness.finish("b", [3, 4, 5, 11], 7)
    assert [(entry.start, entry.stop) for entry in first] == [(0, 4)]
    a, b = (harness.assembled(id, [7, 7], 3, reprefill) for id in "ab")
    assert second != first
    assert torch.equal(a.rows[:3], b.rows[:3])
    assert not torch.equal(a.rows[3], b.rows[3])
    assert a.zero_blocks.tolist() == b.zero_blocks.tolist() == [[1, 0, 1]]


def test_a_shared_prompt_is_written_once(harness: Harness, reprefill: Reprefill) -> None:
    """Its frames are named by all requests whose slots hold the very rows, as far as they do."""
    prompt = list(range(20, 40))
    harness.compute(prompt, 1, zero=[(2, 0, 1), (18, 1, 0)])
    harness.compute([1], 1)
    harness.recorder.grow("a", 21, reads(prompt), 1, prompt=20)
    harness.compute([2], 1)
    harness.compute([45, 46], 1)
    a = harness.finish("a", [*prompt, 1], 1, prompt=20)
    b = harness.finish("b", [*prompt, 2], 1, prompt=20)
    shorter = harness.finish("c", [*prompt[:18], 45, 46], 1, prompt=20)
    assert [(entry.start, entry.stop) for entry in b] == [
        (0, 4),
        (4, 8),
        (8, 12),
        (12, 16),
        (16, 20),
        (20, 21),
    ]
    assert [entry.handle for entry in a[:5]] == [entry.handle for entry in b[:5]]
    assert [(entry.start, entry.stop) for entry in shorter][-2:] == [(16, 18), (18, 20)]
    assert [entry.handle for entry in shorter[:5]] == [entry.handle for entry in a[:5]]
    frames = 5 + 2 + 1
    assert harness.store.frames() == frames
    for id in "ab":
        records = harness.assembled(id, [1, 1], 20, reprefill)
        assert records.missing == {}
        assert records.rows[:, 1].tolist() == [*range(1, 21), 21 if id == "a" else 22]
        assert records.zero_blocks.tolist() == [[2, 0, 1], [18, 1, 0]]
    third = harness.assembled("c", [1], 20, reprefill)
    assert third.missing == {}
    assert third.rows[:, 1].tolist() == [*range(1, 19), 23, 24]

    for id in "ab":
        harness.store.release([entry.handle for entry in harness.ended[id]])
    assert harness.store.frames() == 6, "those that the third one names stay"
    harness.store.release([entry.handle for entry in shorter])
    assert harness.store.frames() == 0
    again = harness.finish("d", [*prompt, 2], 1, prompt=20)
    assert harness.assembled("d", [1, 1], 20, reprefill).missing == {}, "what is gone is written again"
    assert {entry.handle for entry in again}.isdisjoint(entry.handle for entry in a)

    harness.compute([25], 1)  # a slot of the prompt is another sequence's now
    other = harness.finish("e", [*prompt, 2], 1, prompt=20)
    assert {entry.handle for entry in other}.isdisjoint(entry.handle for entry in again)
    assert harness.assembled("e", [1, 1], 20, reprefill).rows[5, 1] == 25


def test_whole_chunks_go_while_a_request_grows(harness: Harness, reprefill: Reprefill) -> None:
    slots = list(range(10, 20))
    harness.compute(slots[:3], 1)
    for tokens in range(4, 11):
        harness.recorder.grow("a", tokens, reads(slots), 1, prompt=2)
        harness.compute([slots[tokens - 1]], 1)
    entries = harness.finish("a", slots, 1)
    assert [(entry.start, entry.stop) for entry in entries] == [(0, 4), (4, 8), (8, 10)]
    assert harness.assembled("a", [1] * 8, 3, reprefill).missing == {}


def test_zero_blocks_go_with_their_row_and_no_further(harness: Harness, reprefill: Reprefill) -> None:
    harness.compute([1, 2], 1, zero=[(0, 1, 0), (1, 0, 0), (1, 1, 1)])
    harness.compute([2], 1)  # another request got the slot
    harness.compute([5], 1, zero=[(0, 0, 1)])
    harness.finish("a", [1, 2, 5], 1)
    assert harness.assembled("a", [1, 1], 2, reprefill).zero_blocks.tolist() == [[0, 1, 0], [2, 0, 1]]


def test_memory_pressure_keeps_first_inputs_and_last_keys(harness: Harness, reprefill: Reprefill) -> None:
    before, after = [1, 2, 3], [21, 22, 23, 24]
    harness.compute(before, 1)
    harness.recorder.grow("a", 4, reads(before), 1, prompt=2)
    harness.recorder.retract("a", 4, reads(before), "memory")
    harness.compute(before, 1)  # somebody else's
    harness.compute(after, 1)
    harness.recorder.grow("a", 5, reads(after), 1, prompt=2)
    harness.finish("a", after, 1)
    rows = harness.assembled("a", [1, 1], 3, reprefill).rows
    assert rows[:, 1].tolist() == [1, 2, 3, 10]
    assert rows[:, HALF + 1].tolist() == [7, 8, 9, 10]
    assert harness.recorder.stats.retracted == {"memory": 1}
    assert harness.recorder.stats.reprefilled_rows["memory"] == 3


def test_new_weights_keep_or_replace_old_rows(harness: Harness, reprefill: Reprefill) -> None:
    before, after = [1, 2, 3, 4, 5, 6], [21, 22, 23, 24, 25, 26, 27]
    harness.compute(before, 1)
    harness.recorder.grow("a", 7, reads(before), 1, prompt=2)  # a chunk of four rows is written
    harness.recorder.retract("a", 7, reads(before), "weights")
    harness.recorder.invalidate()
    harness.compute(after, 2)
    harness.recorder.grow("a", 8, reads(after), 2, prompt=2)
    entries = harness.finish("a", after, 2)
    records = harness.assembled("a", [1] * 5 + [2], 2, reprefill)
    assert records.missing == {}
    kept = reprefill is Reprefill.AS_SAMPLED
    assert records.versions.tolist() == ([1] * 6 + [2] if kept else [2] * 7)
    assert records.rows[:, 1].tolist() == ([1, 2, 3, 4, 5, 6, 13] if kept else [7, 8, 9, 10, 11, 12, 13])
    assert sum(len(range(entry.start, entry.stop)) for entry in entries) == 7
    assert harness.store.frames() == len(entries), "frames that no longer hold were released"


def test_a_retraction_in_the_middle_of_a_prefill_loses_nothing(
    harness: Harness, reprefill: Reprefill
) -> None:
    before = [1, 2, 3]
    harness.compute(before, 1)
    harness.recorder.grow("a", 4, reads(before), 1, prompt=2)
    harness.recorder.retract("a", 4, reads(before), "weights")
    harness.recorder.invalidate()
    harness.compute([31, 32], 2)  # a first part of the prompt only
    harness.recorder.retract("a", 4, reads([31, 32, 40]), "weights")
    harness.recorder.invalidate()
    after = [51, 52, 53, 54]
    harness.compute(after, 3)
    harness.recorder.grow("a", 5, reads(after), 3, prompt=2)
    harness.finish("a", after, 3)
    records = harness.assembled("a", [1, 3], 3, reprefill)
    assert records.missing == {}
    assert records.versions.tolist() == ([1, 1, 1, 3] if reprefill is Reprefill.AS_SAMPLED else [3] * 4)


def test_rows_that_were_not_captured_are_missing(harness: Harness, reprefill: Reprefill) -> None:
    harness.compute([1, 2, 3, 4], 1)
    harness.recorder.lose(np.array([2]))
    harness.finish("a", [1, 2, 3, 4], 1)
    records = harness.assembled("a", [1, 1], 3, reprefill)
    assert records.missing == {"missing": 1}
    assert records.present.all(dim=1).tolist() == [True, False, True, True]
    assert harness.recorder.stats.unrecorded_rows == 1


def test_what_nobody_waits_for_is_released(harness: Harness) -> None:
    slots = list(range(10, 20))
    harness.compute(slots, 1)
    harness.recorder.grow("running", 10, reads(slots), 1, prompt=2)
    harness.recorder.forget("running")
    harness.recorder.grow("running", 11, reads(slots), 1, prompt=2)
    harness.recorder.finish("running", 11, reads(slots), 1, prompt=2)
    harness.finish("done", slots, 1)
    harness.recorder.forget("done")
    harness.recorder.forget("unheard")
    harness.recorder.grow("unheard", 11, reads(slots), 1, prompt=2)
    harness.finish("last", slots, 1)
    assert harness.store.frames() == len(harness.ended["last"])
    assert set(harness.ended) == {"done", "last"}


def audited_by_a_rank(directory: Path, given_up: int, new_run: int) -> list[str]:
    """Audited requests of six, of which the second and those of the first run are given up at some moment."""
    slots = list(range(10, 20))
    with started(directory, Reprefill.AS_SAMPLED, audit_every=2) as rank:
        rank.compute(slots, 1)
        for moment in range(3):
            if moment == new_run:
                rank.recorder.new_run()
            if moment < 2:
                rank.recorder.grow("before", 4 + moment, reads(slots), 1, prompt=2)
        rank.recorder.forget("before")
        rank.recorder.invalidate()
        rank.compute(slots, 2)
        rank.finish("a", slots, 2)
        for moment in range(4):
            if moment == given_up:
                rank.recorder.forget("b")
            if moment < 3:
                rank.recorder.grow("b", 4 + moment, reads(slots), 2, prompt=2)
        for id in "cdef":
            rank.finish(id, slots, 2)
        return [id for id, entries in rank.ended.items() if any(entry.audit for entry in entries)]


@pytest.mark.parametrize("given_up", [0, 1, 3])
@pytest.mark.parametrize("new_run", [0, 1, 2])
def test_all_ranks_audit_the_same_requests(tmp_path: Path, given_up: int, new_run: int) -> None:
    """Whatever a rank hears first: that a request was given up, or its rows."""
    assert audited_by_a_rank(tmp_path, given_up, new_run) == ["a", "c", "e"]
