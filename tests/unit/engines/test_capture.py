"""What the rollout records: packing against the single-site functions, rows after a re-prefill, frames."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.job import Reprefill, Spec
from tracerl.api.model import ModelShape
from tracerl.engines.reference.capture import (
    NO_ZERO_BLOCKS,
    Captured,
    CaptureHooks,
    Destination,
    FrameRows,
    FrameWriter,
    RowBuffer,
    TrajectoryFrames,
    frame_ranges,
)
from tracerl.methods import plan
from tracerl.numerics import NonFiniteError, dequantize, quantize
from tracerl.records.frame import decode_frame
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import SiteKind, audit_table, site_table
from tracerl.transport.directory import DirectoryTransport

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


def call(hooks, kind, layer, x):
    if kind is SiteKind.FC2_INPUT:
        return hooks.fc2_input(layer, x)
    name = {SiteKind.EXPERT_INPUT: "expert_input", SiteKind.KEY: "key", SiteKind.VALUE: "value"}.get(
        kind, "routes"
    )
    return getattr(hooks, name)(layer, x)


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
    for (layer, kind), x in values.items():
        out = call(hooks, kind, layer, x)
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
def test_a_value_that_is_not_finite_names_its_site(bad):
    spec = spec_of()
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, site_table(SHAPE, spec), None)
    x = torch.zeros(4, 16)
    x[3, 5] = bad
    hooks.begin(None)
    with pytest.raises(NonFiniteError, match="layer 2 Value"):
        hooks.value(2, x)


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


def test_frames_arrive_in_order_and_are_released(tmp_path):
    table = site_table(SHAPE, spec_of())
    transport = DirectoryTransport(tmp_path.as_uri(), store="rollout-0", job_uid="u", run_id="r")
    writer = FrameWriter(limit_bytes=1)
    writer.direct(Destination(transport, "u", "r", keep=False))
    frames = TrajectoryFrames("t")
    rows = np.random.default_rng(0).integers(0, 256, (5, table.row_bytes), dtype=np.uint8)
    zero = np.array([[1, 0, 1]])
    writer.put([FrameRows(frames, table, start=0, version=3, rows=rows[:2], zero_blocks=zero)])
    writer.put([FrameRows(frames, table, start=2, version=4, rows=rows[2:], zero_blocks=NO_ZERO_BLOCKS)])
    drain(writer)
    assert not writer.full
    assert [(e.start, e.stop, e.part, e.parts, e.audit) for e in frames.entries] == [
        (0, 2, 0, 1, False),
        (2, 5, 0, 1, False),
    ]
    first, second = (decode_frame(transport.get(entry.handle), table) for entry in frames.entries)
    assert (first.header.trajectory, first.header.version, second.header.version) == ("t", 3, 4)
    assert first.zero_blocks.tolist() == [[1, 0, 1]]
    assert np.array_equal(np.concatenate([*second.payloads], axis=1), rows[2:])
    assert writer.held_bytes() == writer.written_bytes["record"] > 0
    writer.forget(frames)
    drain(writer)
    assert (frames.entries, writer.held_bytes()) == ([], 0)
    writer.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [True, False])
def test_unreleased_frames_outlive_the_writer_only_when_they_are_to_be_kept(tmp_path, keep):
    table = site_table(SHAPE, spec_of())
    transport = DirectoryTransport(tmp_path.as_uri(), store="rollout-0", job_uid="u", run_id="r")
    writer = FrameWriter(limit_bytes=1)
    writer.direct(Destination(transport, "u", "r", keep=keep))
    rows = np.zeros((1, table.row_bytes), np.uint8)
    writer.put(
        [FrameRows(TrajectoryFrames("t"), table, start=0, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS)]
    )
    writer.close()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == keep


def test_a_frame_that_cannot_be_put_is_dropped_counted_and_said_once(tmp_path, caplog):
    table = site_table(SHAPE, spec_of())
    (tmp_path / "records").mkdir()
    transport = DirectoryTransport(
        (tmp_path / "records").as_uri(), store="rollout-0", job_uid="u", run_id="r"
    )
    writer = FrameWriter(limit_bytes=10**6)
    writer.direct(Destination(transport, "u", "r", keep=False))
    rows = np.zeros((1, table.row_bytes), np.uint8)
    (tmp_path / "records").rmdir()
    (tmp_path / "records").write_text("in the way")
    frames = TrajectoryFrames("t")
    for start in range(3):
        writer.put([FrameRows(frames, table, start=start, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS)])
    drain(writer)
    assert frames.entries == []
    assert sum(writer.dropped.values()) == 3
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1
    (tmp_path / "records").unlink()
    writer.put([FrameRows(frames, table, start=3, version=0, rows=rows, zero_blocks=NO_ZERO_BLOCKS)])
    drain(writer)
    assert [entry.start for entry in frames.entries] == [3]
    writer.close()
