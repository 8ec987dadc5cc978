"""What the rollout records: packing against the single-site functions, rows after a re-prefill, frames."""

import threading

import numpy as np
import pytest
import torch
from engine_stores import JOB, RUN, WAIT_SECONDS, ObjectStore, RingStore
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.job import PrefillAttends, Reprefill, Spec
from tracerl.api.model import ModelShape
from tracerl.engines.capture import Captured, MergeRule, Rows, SiteCapture, held_sites, merge_rows
from tracerl.engines.frames import (
    NO_ZERO_BLOCKS,
    Destination,
    FrameRows,
    FrameWriter,
    TrajectoryFrames,
    frame_ranges,
)
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.methods import plan
from tracerl.numerics import NonFiniteError, dequantize, quantize
from tracerl.records.frame import decode_frame
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import SiteKind, audit_table, site_table

SHAPE = ModelShape.uniform(
    3, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=20, context=40
)
WIDTHS = {
    SiteKind.EXPERT_INPUT: 32,
    SiteKind.KEY: 16,
    SiteKind.VALUE: 16,
    SiteKind.FC2_INPUT: 32,
    SiteKind.ROUTES: 4,
}


def spec_of(method="TRACE", layers="All", second="Recorded", **trace):
    return Spec.model_validate(
        {
            "model": {"uri": "builtin://tiny-moe"},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2},
            "quantization": {"secondInput": second},
            "method": {"name": method}
            | ({"trace": {"layers": {"policy": layers}} | trace} if method == "TRACE" else {}),
        }
    )


def run_hooks(hooks, values):
    """Call the hooks of all layers as a model does; what they give by (layer, kind)."""
    out = {}
    for layer in range(SHAPE.layers):
        x = {kind: values[layer, kind] for kind in WIDTHS}
        k, v = hooks.key_value(layer, x[SiteKind.KEY], x[SiteKind.VALUE])
        out |= {
            (layer, SiteKind.KEY): k,
            (layer, SiteKind.VALUE): v,
            (layer, SiteKind.ROUTES): hooks.routes(layer, x[SiteKind.ROUTES]),
            (layer, SiteKind.EXPERT_INPUT): hooks.expert_input(layer, x[SiteKind.EXPERT_INPUT]),
            (layer, SiteKind.FC2_INPUT): hooks.fc2_input(layer, x[SiteKind.FC2_INPUT]),
        }
    return out


@pytest.mark.parametrize("spec", [spec_of(), spec_of(layers="LastHalf"), spec_of(codeBits=4, scaleBits=8)])
def test_rows_are_what_each_site_packs_alone(spec):
    table, audit = site_table(SHAPE, spec), audit_table(SHAPE, spec)
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, table, audit)
    generator = torch.Generator().manual_seed(0)
    n, audited = 7, torch.tensor([1, 4])
    values = {}
    for layer in range(SHAPE.layers):
        for kind, width in WIDTHS.items():
            x = torch.randn(n, width, generator=generator)
            if kind is not SiteKind.ROUTES:
                x[2, 16 * (width > 16) :] = 0  # a zero block
            values[layer, kind] = x

    hooks.begin(audited)
    for (layer, kind), out in run_hooks(hooks, values).items():
        x = values[layer, kind]
        if kind is SiteKind.ROUTES:
            assert torch.equal(out, x.topk(2).indices)
        else:
            assert torch.equal(out, dequantize(quantize(x)))
    record, audit_rows = hooks.finish(n)

    for got, rows, sites in ((record, torch.arange(n), table), (audit_rows, audited, audit)):
        zero = []
        for index, site in enumerate(sites.sites):
            x = values[site.layer, site.kind][rows]
            if site.kind is SiteKind.ROUTES:
                want = pack_routes(site, x.topk(2).indices)
            else:
                want, found = pack_rows(site, quantize(x))
                zero += [(row, index, block) for row, block in found.tolist()]
            columns = slice(sites.offset(site), sites.offset(site) + site.row_bytes)
            assert torch.equal(got.rows[:, columns], want), site.name
        assert sorted(map(tuple, got.zero_blocks.tolist())) == sorted(zero)
        assert got.rows.shape == (len(rows), sites.row_bytes)
    assert len(audit_rows.zero_blocks) == 0
    assert len(record.zero_blocks) == len([s for s in table.sites if s.kind is not SiteKind.ROUTES])


def test_where_a_row_attends_exactly_is_recorded_once_and_the_first_pass_counts():
    spec = spec_of(layers="LastHalf")
    quantization = spec.quantization.model_copy(update={"prefill_attends": PrefillAttends.EXACT})
    spec = spec.model_copy(update={"quantization": quantization})
    table = site_table(SHAPE, spec)
    site = table.find(0, SiteKind.EXACT_FROM)
    columns = slice(table.offset(site), table.offset(site) + 4)
    passes = []
    for starts in ([0, 0, 3, 4], [0, 1, 1, 70_000]):
        capture = SiteCapture(SHAPE.layers, plan(spec, SHAPE), spec.quantization, table, None)
        for layer in range(SHAPE.layers):
            x = torch.ones(4, 32)
            capture.routes(layer, torch.zeros(4, 2, dtype=torch.int64))
            capture.expert_input(layer, x)
            capture.key_value(layer, x[:, :16], x[:, :16])
            capture.fc2_input(layer, x)
        capture.exact_from(0, torch.tensor(starts))
        rows = capture.finish(4)[0].rows.numpy()
        assert rows[:, columns].tobytes() == np.array(starts, "<u4").tobytes()
        passes.append(Rows(rows, np.zeros(4, np.int32), NO_ZERO_BLOCKS))
    # Prefilled again under the same version, a row counts as it was first, like what it fed its layers.
    merged = merge_rows(MergeRule.of(held_sites(table), Reprefill.AS_SAMPLED), *passes, version=0)
    assert np.array_equal(merged.rows[:, columns], passes[0].rows[:, columns])


def test_nothing_is_recorded_or_rounded_where_the_method_does_not():
    spec = spec_of("BF16")
    spec = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"routing_replay": False})})
    table = site_table(SHAPE, spec)
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, table, None)
    hooks.begin(None)
    x = torch.randn(3, 32)
    assert hooks.expert_input(0, x) is x
    assert hooks.fc2_input is None
    record, audit = hooks.finish(3)
    assert record.rows.shape == (3, 0)
    assert audit is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["Key", "Value"])
def test_a_value_that_is_not_finite_names_its_site(bad, kind):
    spec = spec_of()
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, site_table(SHAPE, spec), None)
    good, x = torch.zeros(4, 16), torch.zeros(4, 16)
    x[3, 5] = bad
    hooks.begin(None)
    with pytest.raises(NonFiniteError, match=f"layer 2 {kind}"):
        hooks.key_value(2, *((x, good) if kind == "Key" else (good, x)))


# -- rows after a re-prefill ------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Prefills of one sequence: (tokens so far, version) with both growing."""
    length, version, out = draw(st.integers(1, 4)), 0, []
    for _ in range(draw(st.integers(2, 5))):
        out.append((length, version))
        length += draw(st.integers(1, 6))
        version += draw(st.integers(0, 1))
    return out


@given(histories(), st.sampled_from(list(Reprefill)), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rows_after_any_retractions_follow_the_rule(history, rule, seed):
    table = site_table(SHAPE, spec_of())
    rng = np.random.default_rng(seed)
    kv = np.concatenate(
        [np.full(site.row_bytes, site.kind in (SiteKind.KEY, SiteKind.VALUE)) for site in table.sites]
    )
    buffer = RowBuffer(table, slots=3, capacity=SHAPE.context, reprefill=rule)
    want = np.zeros((0, table.row_bytes), np.uint8)
    want_versions: list[int] = []
    want_zero: set[tuple[int, int, int]] = set()
    is_kv = [site.kind in (SiteKind.KEY, SiteKind.VALUE) for site in table.sites]
    blocked = [i for i, site in enumerate(table.sites) if site.blocks]
    saved, stop = None, 0

    def rows_of(count):
        rows = rng.integers(0, 256, (count, table.row_bytes), dtype=np.uint8)
        zero = {
            (int(rng.integers(count)), int(rng.choice(blocked)), 0) for _ in range(int(rng.integers(0, 3)))
        }
        return rows, zero

    for visit, (length, version) in enumerate(history):
        slot = visit % 3
        buffer.open(slot)
        # A prefill computes one row a token; then tokens are decoded until the next retraction.
        stop = history[visit + 1][0] - 1 if visit + 1 < len(history) else length + 1
        for first, last in [(0, length)] + [(row, row + 1) for row in range(length, stop)]:
            rows, zero = rows_of(last - first)
            block_list = np.array(sorted(zero), np.int64).reshape(-1, 3)
            buffer.store(
                torch.full((last - first,), slot),
                torch.arange(first, last),
                Captured(torch.from_numpy(rows), block_list),
                version,
            )
            here = {(row + first, site, block) for row, site, block in zero}
            if first == 0:
                if saved is not None:
                    buffer.restore(slot, saved, version)
                old, old_versions, old_zero = want, want_versions, want_zero
                want, want_versions, want_zero = rows.copy(), [version] * length, set(here)
                for row, before in enumerate(old_versions):
                    mixed = before == version
                    kept = not mixed and rule is Reprefill.AS_SAMPLED
                    if kept:
                        want[row], want_versions[row] = old[row], before
                    elif mixed:
                        want[row, ~kv] = old[row, ~kv]
                    from_old = [kept or (mixed and not is_kv[site]) for site in range(len(table.sites))]
                    want_zero = {z for z in want_zero if z[0] != row or not from_old[z[1]]}
                    want_zero |= {z for z in old_zero if z[0] == row and from_old[z[1]]}
            else:
                want, want_versions = np.concatenate([want, rows]), [*want_versions, version]
                want_zero |= here
        if visit + 1 < len(history):
            saved = buffer.save(slot, stop)
    slot = (len(history) - 1) % 3
    got, got_zero = buffer.take(slot, 0, stop)
    assert np.array_equal(got, want[:stop])
    assert buffer.versions(slot, stop).tolist() == want_versions[:stop]
    assert set(map(tuple, got_zero.tolist())) == want_zero


def test_frames_written_before_a_retraction_hold_only_when_their_rows_are_unchanged():
    table = site_table(SHAPE, spec_of())
    buffer = RowBuffer(table, slots=2, capacity=SHAPE.context, reprefill=Reprefill.AS_SAMPLED)
    rows = torch.randint(0, 256, (6, table.row_bytes), dtype=torch.uint8)
    key = table.offset(next(site for site in table.sites if site.kind is SiteKind.KEY))

    def again(changed, version):
        buffer.open(0)
        buffer.store(torch.zeros(6, dtype=torch.int64), torch.arange(6), Captured(rows, NO_ZERO_BLOCKS), 0)
        buffer.emitted[0] = 4
        saved = buffer.save(0, 6)
        buffer.open(1)
        buffer.store(
            torch.ones(6, dtype=torch.int64), torch.arange(6), Captured(changed, NO_ZERO_BLOCKS), version
        )
        return buffer.restore(1, saved, version), int(buffer.emitted[1])

    other_input, other_key, late_key = rows.clone(), rows.clone(), rows.clone()
    other_input[:, table.offset(table.sites[0])] ^= 1
    other_key[2, key] ^= 1
    late_key[5, key] ^= 1
    assert again(rows, 0) == (True, 4)
    assert again(other_input, 0) == (True, 4)  # inputs keep their first row
    assert again(late_key, 0) == (True, 4)  # not in a frame yet
    assert again(other_key, 0) == (False, 0)  # a frame has the key that is no longer attended
    assert again(other_key, 1) == (True, 4)  # AsSampled keeps rows of the older version


@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=60),
    st.integers(1, 20),
    st.integers(0, 60),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_frame_ranges_cover_rows_once_in_one_version_each(versions, chunk, start, whole):
    versions = np.sort(np.array(versions, np.int32))
    start = min(start, len(versions))
    ranges = frame_ranges(versions, start, chunk, whole_chunks=whole)
    at = start
    for first, stop in ranges:
        assert first == at < stop <= first + chunk
        assert len(set(versions[first:stop].tolist())) == 1
        at = stop
    left = len(versions) - at
    assert left < chunk if whole else left == 0
    if left:
        assert len(set(versions[at:].tolist())) == 1


# -- frames -----------------------------------------------------------------------------------------------


def drain(writer):
    done = threading.Event()
    writer.call(done.set)
    assert done.wait(30)


@pytest.fixture(params=[RingStore, ObjectStore])
def store(request, tmp_path):
    made = request.param(tmp_path / "store")
    yield made
    made.close()


def writer_to(store, **options):
    writer = FrameWriter(**({"limit_bytes": 10**6, "deadline_seconds": WAIT_SECONDS} | options))
    writer.direct(Destination(store.sink, JOB, RUN))
    return writer


def rows_of(table, count, *, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, table.row_bytes), dtype=np.uint8)


def shared_frame(owners, table, rows):
    """Rows of a cached prompt that trajectories share."""
    return FrameRows(owners, table, start=0, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS, prefix="i/7")


def test_frames_arrive_in_order_and_are_released(store):
    table = site_table(SHAPE, spec_of())
    writer = writer_to(store, limit_bytes=1)
    frames = TrajectoryFrames("t")
    rows = rows_of(table, 5)
    zero = np.array([[1, 0, 1]])
    writer.put([FrameRows([frames], table, start=0, version=3, rows=rows[:2], zero_blocks=zero)])
    writer.put([FrameRows([frames], table, start=2, version=4, rows=rows[2:], zero_blocks=NO_ZERO_BLOCKS)])
    settled = threading.Event()
    writer.settle(settled.set)
    assert settled.wait(WAIT_SECONDS)
    assert not writer.full
    assert [(e.start, e.stop, e.part, e.parts, e.audit) for e in frames.entries] == [
        (0, 2, 0, 1, False),
        (2, 5, 0, 1, False),
    ]
    first, second = (decode_frame(store.get(entry.handle), table) for entry in frames.entries)
    assert (first.header.trajectory, first.header.version, second.header.version) == ("t", 3, 4)
    assert first.zero_blocks.tolist() == [[1, 0, 1]]
    assert np.array_equal(np.concatenate([*second.payloads], axis=1), rows[2:])
    assert writer.written_bytes["record"] == store.source.usage().frame_bytes > 0
    writer.forget(frames)
    drain(writer)
    assert (frames.entries, store.frames()) == ([], 0)
    writer.close()


def test_a_shared_frame_has_a_reference_for_each_owner(store):
    table = site_table(SHAPE, spec_of())
    writer = writer_to(store)
    owners = [TrajectoryFrames(name) for name in "abc"]
    rows = rows_of(table, 4)
    shared = shared_frame(owners, table, rows)
    own = FrameRows([owners[1]], table, start=4, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS)
    writer.put([shared, own])
    drain(writer)
    assert {owner.entries[0].handle for owner in owners} == {owners[0].entries[0].handle}
    assert [len(owner.entries) for owner in owners] == [1, 2, 1]
    assert store.frames() == 2
    header = decode_frame(store.get(owners[0].entries[0].handle), table).header
    assert (header.prefix, header.trajectory) == ("i/7", "")
    for owner, left in zip(owners, (2, 1, 0), strict=True):
        writer.forget(owner)
        drain(writer)
        assert store.frames() == left
    writer.close()


@pytest.mark.parametrize("restarts", [1, 3])
def test_frames_are_put_again_when_their_store_goes_before_all_owners_have_references(tmp_path, restarts):
    """A trajectory without its prompt's rows would be trained on with rows missing."""
    table = site_table(SHAPE, spec_of())
    store = RingStore(tmp_path / "store")
    left, put_many = [store.restart_server] * restarts, store.sink.put_many

    def put_before_the_restart(frames, *, timeout=None):
        handles = put_many(frames, timeout=timeout)
        if left:
            left.pop()()
        return handles

    store.sink.put_many = put_before_the_restart
    writer = writer_to(store)
    owners = [TrajectoryFrames(name) for name in "ab"]
    rows = rows_of(table, 4)
    shared = shared_frame(owners, table, rows)
    own = FrameRows([owners[0]], table, start=4, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS)
    writer.put([shared, own])
    drain(writer)
    assert (left, writer.dropped) == ([], {})
    assert [[(e.start, e.stop) for e in owner.entries] for owner in owners] == [[(0, 4), (4, 8)], [(0, 4)]]
    for entry in [*owners[0].entries, *owners[1].entries]:
        assert np.array_equal(
            np.concatenate([*decode_frame(store.get(entry.handle), table).payloads], 1), rows
        )
    writer.forget(owners[0])
    drain(writer)
    assert store.frames() == 1
    writer.forget(owners[1])
    drain(writer)
    assert store.frames() == 0
    writer.close()
    store.close()


def test_frames_that_their_store_drops_at_once_are_not_put_for_ever(tmp_path):
    """As it does with those of a run that is not its own any more."""
    table = site_table(SHAPE, spec_of())
    store = RingStore(tmp_path / "store")
    writer = writer_to(store)
    store.start_run("another")
    owners = [TrajectoryFrames(name) for name in "ab"]
    rows = rows_of(table, 4)
    shared = shared_frame(owners, table, rows)
    writer.put([shared])
    drain(writer)
    assert writer.dropped == {"missing": 1}
    assert [owner.entries for owner in owners] == [[], []]
    writer.close()
    store.close()


def test_frames_are_cut_until_they_fit_into_a_segment(tmp_path):
    """Segments have 64 KiB here; rows have some KiB, and the list of zero blocks is 120 KB long."""
    wide = SHAPE.model_copy(update={"hidden": 2**14})
    table = site_table(wide, spec_of())
    rows = rows_of(table, 100)
    zero = np.stack([np.repeat(np.arange(50), 200), np.zeros(10_000, int), np.tile(np.arange(200), 50)], 1)
    store = RingStore(tmp_path / "store")
    writer = writer_to(store)
    frames = TrajectoryFrames("t")
    writer.put([FrameRows([frames], table, start=7, version=0, rows=rows, zero_blocks=zero)])
    drain(writer)
    assert writer.dropped == {}
    assert [entry.start for entry in frames.entries] == [7, *(entry.stop for entry in frames.entries[:-1])]
    assert frames.entries[-1].stop == 107
    found = [decode_frame(store.get(entry.handle), table) for entry in frames.entries]
    assert all(frame.info.length <= store.sink.max_frame_bytes for frame in found)
    assert np.array_equal(np.concatenate([np.concatenate(f.payloads, axis=1) for f in found]), rows)
    again = [f.zero_blocks + np.array([f.header.row_start - 7, 0, 0]) for f in found]
    assert np.array_equal(np.concatenate(again), zero)
    writer.close()
    store.close()


def test_a_full_ring_makes_frames_wait_and_after_the_deadline_they_are_dropped_and_counted(tmp_path, caplog):
    table = site_table(SHAPE, spec_of())
    store = RingStore(tmp_path / "store", ring_bytes=2**17)
    writer = writer_to(store, deadline_seconds=0.05)
    frames = TrajectoryFrames("t")
    one = rows_of(table, 200)
    while not writer.dropped:
        writer.put([FrameRows([frames], table, 0, 0, one, NO_ZERO_BLOCKS)])
        drain(writer)
    assert set(writer.dropped) == {"full"}
    dropped = writer.dropped["full"]
    for _ in range(3):
        writer.put([FrameRows([frames], table, 0, 0, one, NO_ZERO_BLOCKS)])
    drain(writer)
    assert writer.dropped == {"full": dropped + 3}
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1
    kept = len(frames.entries)
    writer.forget(frames)
    writer.put([FrameRows([frames], table, 0, 0, one, NO_ZERO_BLOCKS)])
    drain(writer)
    assert (len(frames.entries), store.frames(), writer.dropped["full"]) == (1, 1, dropped + 3)
    assert kept > 2
    writer.close()
    store.close()


def test_rows_that_wait_for_room_stop_nothing_but_admission(tmp_path):
    """The scheduler's thread hands rows over and goes on, however long the writer waits."""
    table = site_table(SHAPE, spec_of())
    store = RingStore(tmp_path / "store", ring_bytes=2**17)
    writer = writer_to(store, limit_bytes=10**5)
    frames = TrajectoryFrames("t")
    one = rows_of(table, 200)
    for _ in range(40):
        writer.put([FrameRows([frames], table, 0, 0, one, NO_ZERO_BLOCKS)])
    assert writer.full
    done = threading.Event()
    writer.call(done.set)
    while not done.wait(0.01):  # a reader that is slower than the writer
        # One by one: the writer adds to the list meanwhile.
        store.release([frames.entries.pop(0).handle for _ in range(len(frames.entries))])
    assert (writer.full, writer.dropped) == (False, {})
    writer.close()
    store.close()


def test_closing_does_not_wait_for_room(tmp_path):
    table = site_table(SHAPE, spec_of())
    store = RingStore(tmp_path / "store", ring_bytes=2**17)
    writer = writer_to(store, deadline_seconds=3600)
    one = rows_of(table, 200)
    for _ in range(40):
        writer.put([FrameRows([TrajectoryFrames("t")], table, 0, 0, one, NO_ZERO_BLOCKS)])
    writer.close()
    assert sum(writer.dropped.values()) > 0
    store.close()


def test_frames_of_another_run_go_nowhere(store):
    """A sink takes frames of its own run alone, as its destination says."""
    table = site_table(SHAPE, spec_of())
    writer = FrameWriter(limit_bytes=10**6, deadline_seconds=WAIT_SECONDS)
    writer.direct(Destination(store.sink, JOB, "another"))
    frames = TrajectoryFrames("t")
    writer.put([FrameRows([frames], table, 0, 0, rows_of(table, 3), NO_ZERO_BLOCKS)])
    drain(writer)
    assert (frames.entries, writer.dropped) == ([], {"foreign": 1})
    writer.close()
