"""The scheduler: the same tokens and rows whatever else runs, under pressure, updates, aborts and faults."""

import random
from collections import Counter
from concurrent.futures import Future
from threading import Event

import pytest
import torch
from engine_stores import WAIT_SECONDS, ObjectStore, RingStore
from rollout_builders import SHAPE, Rollout, spec_of, weights_of

from tracerl.api.errors import InputError
from tracerl.engines.reference.capture import CaptureHooks
from tracerl.engines.reference.model import MoEModel, WholeSequences
from tracerl.engines.reference.scheduler import Broken
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.records.frame import decode_frame
from tracerl.records.sites import SiteKind


@pytest.fixture
def rollout(tmp_path):
    made = []

    def make(spec=None, **options):
        made.append(Rollout(tmp_path / f"store-{len(made)}", spec or spec_of(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def asks(count, *, seed=0, new=(1, 20), longest=16):
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(SHAPE.vocab) for _ in range(rng.randint(1, longest))],
            "new": rng.randint(*new),
            "seed": 1000 + index,
            "id": f"t{index}",
            "temperature": rng.choice([1.0, 0.7, 0.0]),
        }
        for index in range(count)
    ]


def handles_of(done):
    return {entry.handle for out in done for entry in out.entries}


def same(first, second):
    assert [done.tokens for done in first] == [done.tokens for done in second]
    for one, two in zip(first, second, strict=True):
        assert one.finish_reason == two.finish_reason
        assert one.logp == pytest.approx(two.logp, abs=1e-5, rel=0)


@pytest.mark.parametrize("method", ["BF16", "TRACE"])
def test_tokens_do_not_depend_on_what_else_runs(rollout, method):
    wanted = asks(12)
    wanted[5] |= {"prompt": wanted[4]["prompt"]}  # shares its prefill when they come together
    together = rollout(spec_of(method)).generate(*wanted)
    alone = rollout(spec_of(method))
    same(together, [alone.generate(one)[0] for one in wanted])
    few_slots = rollout(spec_of(method), slots=3)
    backwards = few_slots.generate(*wanted[::-1])[::-1]
    same(together, backwards)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("BF16"),
        spec_of("QAT"),
        spec_of("TRACE", secondInput="Recorded"),
        spec_of("TRACE", records={"auditEvery": 1}),
    ],
    ids=["BF16", "QAT", "TRACE", "audit"],
)
def test_incremental_decoding_equals_the_whole_sequence_path(rollout, spec):
    """In FP32 one forward over what was generated gives the same log-probs and bit for bit the same rows."""
    one = rollout(spec)
    wanted = asks(8)
    done = one.generate(*wanted)
    sequences = [ask["prompt"] + out.tokens for ask, out in zip(wanted, done, strict=True)]
    lengths = [len(tokens) - 1 for tokens in sequences]
    stream = torch.tensor([token for tokens in sequences for token in tokens[:-1]])
    audit = one.audit_table if spec.records.audit_every else None
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, one.table, audit)
    with torch.inference_mode():
        hooks.begin(torch.arange(len(stream)))
        logits = one.model.logits(one.model(stream, WholeSequences(SHAPE, lengths), hooks))
        record, audit_rows = hooks.finish(len(stream))
    for index, (ask, out) in enumerate(zip(wanted, done, strict=True)):
        start = sum(lengths[:index])
        first = start + len(ask["prompt"]) - 1
        scaled = logits[first : start + lengths[index]] / (ask["temperature"] or 1.0)
        logp = scaled.log_softmax(-1).gather(1, torch.tensor(out.tokens)[:, None])[:, 0]
        assert out.logp == pytest.approx(logp.tolist(), abs=1e-5, rel=0)
        rows = slice(start, start + lengths[index])
        found = one.assemble(ask["id"], ask["prompt"], out)
        assert found.missing == {}
        assert torch.equal(found.rows, record.rows[rows])
        if audit is not None:
            audited = one.assemble(ask["id"], ask["prompt"], out, audit=True)
            assert audited.missing == {}
            assert torch.equal(audited.rows, audit_rows.rows[rows])


def test_generation_ends_at_the_first_of_several_stop_tokens_or_the_limit(rollout):
    one = rollout()
    ask = {"prompt": [1, 2, 3], "new": 30, "seed": 5}
    free = one.generate(ask)[0]
    assert free.finish_reason == {"type": "length", "length": 30}
    stops = (free.tokens[20], free.tokens[11], SHAPE.vocab + 5)
    end = min(free.tokens.index(stops[0]), free.tokens.index(stops[1]))
    other = {"prompt": [4], "new": 2, "stop": (1,)}  # beside it, with fewer stop tokens
    ended = one.generate(ask | {"stop": stops}, other)[0]
    assert ended.tokens == free.tokens[: end + 1]
    assert ended.finish_reason == {"type": "stop", "matched": free.tokens[end]}


def test_greedy_takes_the_most_probable_token(rollout):
    one = rollout(spec_of("BF16"))
    out = one.generate({"prompt": [7, 8], "new": 10, "temperature": 0.0})[0]
    tokens = [7, 8]
    with torch.inference_mode():
        for chosen in out.tokens:
            hooks = CaptureHooks(SHAPE, plan(one.spec, SHAPE), one.spec.quantization, one.table, None)
            hooks.begin(None)
            hidden = one.model(torch.tensor(tokens), WholeSequences(SHAPE, [len(tokens)]), hooks)
            assert int(one.model.logits(hidden[-1:]).argmax()) == chosen
            tokens.append(chosen)


def test_memory_pressure_retracts_the_newest_and_changes_nothing(rollout):
    spec = spec_of(records={"chunkTokens": 4, "auditEvery": 2})
    wanted = asks(10, new=(10, 30))
    plenty = rollout(spec).generate(*wanted)
    tight = rollout(spec, kv_tokens=70)
    done = tight.generate(*wanted)
    stats = tight.scheduler.stats
    assert stats.retracted["memory"] > 0
    assert stats.reprefilled_rows["memory"] > 0
    assert stats.reprefilled_rows["weights"] == 0
    same(done, plenty)
    for index, (ask, out) in enumerate(zip(wanted, done, strict=True)):
        found = tight.assemble(ask["id"], ask["prompt"], out)
        assert found.missing == {}
        assert [version for version, *_ in out.spans] == [0]
        # The entries cover every row once, in order.
        mine = [entry for entry in out.entries if not entry.audit]
        assert [entry.start for entry in mine] == [0, *(entry.stop for entry in mine[:-1])]
        assert mine[-1].stop == found.n_rows
        assert any(entry.audit for entry in out.entries) == (index % 2 == 0)
        if index % 2 == 0:
            assert tight.assemble(ask["id"], ask["prompt"], out, audit=True).missing == {}
    # What was superseded was released: only the frames that somebody was told of are left.
    assert tight.store.frames() == len(handles_of(done))


def test_short_requests_are_not_starved_and_order_is_kept(rollout):
    one = rollout(kv_tokens=64, slots=2)
    pending = one.start(*asks(30, new=(1, 4)))
    assert len(pending.wait()) == 30
    assert one.scheduler.cached_tokens == one.scheduler.running == one.scheduler.queued == 0


# -- weight updates ---------------------------------------------------------------------------------------


def start_and(one, wanted, action):
    """Start requests; run `action` between two steps once each has some tokens; its result comes second."""
    before = one.scheduler.stats.generated_tokens
    result = Future()

    def look():
        if one.scheduler.stats.generated_tokens < before + 3 * len(wanted):
            one.scheduler.call(look)
        else:
            result.set_result(action())

    pending = one.start(*wanted)
    one.scheduler.call(look)
    return pending, result.result(WAIT_SECONDS)


@pytest.mark.parametrize("rule", ["AsSampled", "AsAttended"])
def test_an_update_in_the_middle_gives_right_spans_and_rows(rollout, rule):
    spec = spec_of(records={"chunkTokens": 5, "reprefill": rule, "auditEvery": 3})
    one = rollout(spec)
    wanted = asks(6, new=(40, 45), longest=10)
    pending, _ = start_and(one, wanted, lambda: one.scheduler.pause(abort=False))
    assert one.scheduler.running == 0
    waiting = one.scheduler.queued
    one.push(weights_of(1), 1)
    one.scheduler.call(one.scheduler.resume).result(WAIT_SECONDS)
    done = pending.wait()
    assert one.scheduler.stats.retracted["weights"] == waiting > 0
    assert one.scheduler.stats.reprefilled_rows["weights"] > 0

    changed = 0
    for index, (ask, out) in enumerate(zip(wanted, done, strict=True)):
        assert [start for _, start, _ in out.spans] == [0, *(end for _, _, end in out.spans[:-1])]
        assert out.spans[-1][2] == len(out.tokens)
        found = one.assemble(ask["id"], ask["prompt"], out)
        assert found.missing == {}
        if index % 3 == 0:
            assert one.assemble(ask["id"], ask["prompt"], out, audit=True).missing == {}
        if len(out.spans) == 1:
            continue
        changed += 1
        assert [version for version, *_ in out.spans] == [0, 1]
        last_old = (
            len(ask["prompt"]) + out.spans[0][2] - 1
        )  # rows before it predict tokens sampled by version 0
        want = [0] * last_old + [1] * (found.n_rows - last_old) if rule == "AsSampled" else [1] * found.n_rows
        assert found.versions.tolist() == want
        assert found.mixed == last_old

        # Independent of the scheduler: rows of a version are those of a forward with its weights.
        tokens = torch.tensor(ask["prompt"] + out.tokens)
        rows = {}
        for version in (0, 1):
            other = MoEModel(SHAPE)
            RolloutWeights(other, plan(spec, SHAPE), spec.quantization).load(weights_of(version))
            hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, one.table, None)
            hooks.begin(None)
            with torch.inference_mode():
                logits = other.logits(other(tokens[:-1], WholeSequences(SHAPE, [found.n_rows]), hooks))
                rows[version] = hooks.finish(found.n_rows)[0].rows
            first = len(ask["prompt"]) - 1
            logp = (logits[first:] / (ask["temperature"] or 1.0)).log_softmax(-1)
            logp = logp.gather(1, tokens[first + 1 :, None])[:, 0]
            _, start, end = out.spans[version]
            assert out.logp[start:end] == pytest.approx(logp[start:end].tolist(), abs=1e-5, rel=0)
        want = torch.where(found.versions[:, None] == 0, rows[0], rows[1])
        assert torch.equal(found.rows, want)
    assert changed == waiting


def test_an_update_is_refused_while_requests_run(rollout):
    one = rollout()
    pending, refusal = start_and(one, asks(4, new=(40, 45), longest=5), one.scheduler.begin_update)
    assert "4 requests are being generated; call /pause_generation" in refusal
    assert all(done.spans == [(0, 0, len(done.tokens))] for done in pending.wait())


def test_weights_that_are_incomplete_change_nothing(rollout):
    one = rollout()
    before = one.generate(*asks(3))
    weights = weights_of(1)
    del weights["model.norm.weight"]
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        one.push(weights, 1)
    one.push(weights_of(0), 0)
    same(before, one.generate(*asks(3)))


# -- ends -------------------------------------------------------------------------------------------------


def test_abort_returns_what_there_is_and_releases_the_frames(rollout):
    one = rollout(spec_of(records={"chunkTokens": 2}), slots=2)
    wanted = asks(5, new=(50, 54), longest=4)
    pending, _ = start_and(one, wanted, lambda: one.scheduler.abort(["t1", "t4", "unknown"], deliver=True))
    done = pending.wait()
    assert [out.finish_reason["type"] for out in done] == ["length", "abort", "length", "length", "abort"]
    full = rollout().generate(*wanted)
    for index in (1, 4):
        out = done[index]
        assert out.tokens == full[index].tokens[: len(out.tokens)]
        assert len(out.logp) == len(out.tokens) == (out.spans[-1][2] if out.spans else 0)
        assert out.entries == []
    assert one.store.frames() == len(handles_of(done))


def test_pausing_with_abort_ends_everything_and_later_requests_wait(rollout):
    one = rollout(slots=2)
    pending, _ = start_and(one, asks(4, new=(50, 54), longest=4), lambda: one.scheduler.pause(abort=True))
    assert {out.finish_reason["type"] for out in pending.wait()} == {"abort"}
    later = one.start(*asks(2))
    assert one.scheduler.call(lambda: (one.scheduler.queued, one.scheduler.running)).result(WAIT_SECONDS) == (
        2,
        0,
    )
    one.scheduler.call(one.scheduler.resume)
    assert all(out.finish_reason["type"] == "length" for out in later.wait())


def test_a_non_finite_activation_breaks_all_requests_with_the_sites_name(rollout):
    weights = weights_of(0)
    weights["model.layers.1.post_attention_layernorm.weight"][3] = 3e38
    one = rollout(weights=weights)
    outcomes = one.start(*asks(3, new=(5, 9))).wait()
    assert all(isinstance(outcome, Broken) for outcome in outcomes)
    assert {outcome.reason for outcome in outcomes} == {"NonFinite"}
    assert "layer 1 ExpertInput" in outcomes[0].message
    again = one.start(*asks(1)).wait()[0]
    assert again == outcomes[0]


def test_a_non_finite_logit_is_noticed_without_quantisation(rollout):
    weights = weights_of(0)
    weights["model.norm.weight"][:] = 3e38
    outcome = rollout(spec_of("BF16"), weights=weights).start(*asks(1)).wait()[0]
    assert (outcome.reason, "logits" in outcome.message) == ("NonFinite", True)


def test_rows_of_a_shared_prefill_without_a_token_are_handed_to_nobody(rollout):
    """Keys, values and inputs are finite here: only what waits for the device finds the fault."""
    weights = weights_of(0)
    weights["model.norm.weight"][:] = 3e38
    one = rollout(weights=weights)
    outcomes = one.start(*group(3)).wait()
    assert {outcome.reason for outcome in outcomes} == {"NonFinite"}
    settled = Event()
    one.writer.settle(settled.set)
    assert settled.wait(WAIT_SECONDS)
    assert one.writer.written_bytes.total() == 0


def test_stopping_breaks_what_waits(rollout):
    one = rollout()
    one.scheduler.call(lambda: one.scheduler.pause(abort=False)).result(WAIT_SECONDS)
    pending = one.start(*asks(2))
    one.scheduler.stop()
    assert {outcome.reason for outcome in pending.wait()} == {"Interrupted"}


# -- records ----------------------------------------------------------------------------------------------


def test_a_full_writer_stalls_admission_and_loses_nothing(rollout):
    one = rollout(spec_of(records={"chunkTokens": 1}), limit_bytes=0, slots=2)
    wanted = asks(12, new=(5, 9))
    done = one.generate(*wanted)
    assert one.scheduler.stats.admission_stalls > 0
    for ask, out in zip(wanted, done, strict=True):
        assert one.assemble(ask["id"], ask["prompt"], out).missing == {}


def test_frames_that_cannot_be_written_are_missing_rows(rollout):
    one = rollout(spec_of(records={"chunkTokens": 4}), deadline_seconds=0.1)
    one.generate(*asks(3))
    one.store.stop_server()
    ask = asks(1)[0]
    out = one.generate(ask)[0]
    assert out.entries == []
    assert (
        one.assemble(ask["id"], ask["prompt"], out).missing["missing"] == len(ask["prompt"] + out.tokens) - 1
    )
    assert sum(one.writer.dropped.values()) > 0


def test_routes_alone_are_recorded_without_quantisation(rollout):
    one = rollout(spec_of("BF16"))
    assert {site.kind for site in one.table.sites} == {SiteKind.ROUTES}
    ask = asks(1)[0]
    out = one.generate(ask)[0]
    assert one.assemble(ask["id"], ask["prompt"], out).missing == {}
    assert out.seconds["pack"] > 0
    assert out.seconds["put"] > 0


# -- prefixes that several trajectories share ---------------------------------------------------------------


def group(count, *, prompt=(3, 1, 4, 1, 5, 9, 2, 6), new=20, first=0):
    return [
        {"prompt": list(prompt), "new": new, "seed": 100 + index, "id": f"g{index}"}
        for index in range(first, first + count)
    ]


def check(one, wanted, done, *, audited=()):
    """Every row is there once, as the trainer finds it; returns the handles by how many name them."""
    for ask, out in zip(wanted, done, strict=True):
        assert one.assemble(ask["id"], ask["prompt"], out).missing == {}
        if ask["id"] in audited:
            assert one.assemble(ask["id"], ask["prompt"], out, audit=True).missing == {}
        for audit in {entry.audit for entry in out.entries}:
            mine = [entry for entry in out.entries if entry.audit is audit]
            assert [entry.start for entry in mine] == [0, *(entry.stop for entry in mine[:-1])]
            assert mine[-1].stop == len(ask["prompt"]) + len(out.tokens) - 1
    return Counter(entry.handle for out in done for entry in out.entries)


def headers(one, done):
    return [[decode_frame(one.store.get(entry.handle)).header for entry in out.entries] for out in done]


def release_all(one, done):
    """Release trajectory by trajectory, as a trainer does; the store is empty after the last one only."""
    held = one.store.frames()
    for index, out in enumerate(done):
        assert one.store.frames() > 0 or not out.entries, index
        one.store.release([entry.handle for entry in out.entries])
    assert (held > 0, one.store.frames()) == (True, 0)


@pytest.mark.parametrize("store", [RingStore, ObjectStore])
@pytest.mark.parametrize("chunk", [3, 512])
def test_samples_of_a_prompt_share_the_frames_of_their_prefill(rollout, store, chunk):
    one = rollout(spec_of(records={"chunkTokens": chunk}), store=store)
    wanted = group(4) + asks(2) + group(3, prompt=(7,), first=4)
    done = one.generate(*wanted)
    shared = check(one, wanted, done)
    prompt = 8
    starts = range(0, prompt, chunk)
    for out, found in zip(done[:4], headers(one, done[:4]), strict=True):
        prefix = [header for header in found if header.prefix is not None]
        assert [(h.prefix, h.row_start, h.row_stop) for h in prefix] == [
            ("instance/0", start, min(start + chunk, prompt)) for start in starts
        ]
        assert [shared[entry.handle] for entry in out.entries[: len(prefix)]] == [4] * len(prefix)
        assert {shared[entry.handle] for entry in out.entries[len(prefix) :]} == {1}
    assert [header.prefix for found in headers(one, done[4:6]) for header in found if header.prefix] == []
    assert {found[0].prefix for found in headers(one, done[6:])} == {"instance/1"}
    # Recorded alone, the same rows: sharing changes where they are and nothing else.
    alone = rollout(spec_of(records={"chunkTokens": chunk}))
    for ask, out in zip(wanted, done, strict=True):
        by_itself = alone.generate(ask)[0]
        assert by_itself.tokens == out.tokens
        both = [r.assemble(ask["id"], ask["prompt"], o) for r, o in ((one, out), (alone, by_itself))]
        assert torch.equal(both[0].rows, both[1].rows)
    release_all(one, done)


def test_a_group_that_ends_with_its_first_token_has_the_shared_frames_alone(rollout):
    one = rollout(spec_of(records={"auditEvery": 1}))
    wanted = group(3, new=1)
    done = one.generate(*wanted)
    assert set(check(one, wanted, done, audited=["g0", "g1", "g2"]).values()) == {3}
    assert one.store.frames() == 2
    release_all(one, done)


def test_audited_and_other_samples_of_a_prompt_pair(rollout):
    one = rollout(spec_of(records={"auditEvery": 2, "chunkTokens": 5}))
    wanted = group(6)
    done = one.generate(*wanted)
    shared = check(one, wanted, done, audited=["g0", "g2", "g4"])
    assert {entry.audit for entry in done[0].entries} == {True, False}
    assert Counter(shared.values())[3] == 6  # two frames of the prompt in each group, two more of the audit
    release_all(one, done)


@pytest.mark.parametrize("cut", ["one", "all but one"])
def test_an_aborted_sharer_takes_nothing_from_the_others(rollout, cut):
    one = rollout(spec_of(records={"chunkTokens": 4}))
    wanted = group(4, new=40)
    gone = ["g1"] if cut == "one" else ["g0", "g1", "g3"]
    pending, _ = start_and(one, wanted, lambda: one.scheduler.abort(gone, deliver=True))
    done = pending.wait()
    left = [index for index, ask in enumerate(wanted) if ask["id"] not in gone]
    assert all(done[index].entries == [] for index in range(4) if index not in left)
    check(one, [wanted[index] for index in left], [done[index] for index in left])
    assert one.store.frames() == len(handles_of(done))
    release_all(one, [done[index] for index in left])


def test_a_retracted_sharer_keeps_the_prefix_when_its_rows_are_the_same(rollout):
    one = rollout(spec_of(records={"chunkTokens": 4}), kv_tokens=60)
    wanted = group(4, new=20)
    done = one.generate(*wanted)
    assert one.scheduler.stats.retracted["memory"] > 0
    shared = check(one, wanted, done)
    assert Counter(shared.values())[4] == 2  # both frames of the prompt, still
    same(done, rollout().generate(*wanted))
    assert one.store.frames() == len(handles_of(done))
    release_all(one, done)


@pytest.mark.parametrize("rule", ["AsSampled", "AsAttended"])
def test_after_an_update_sharers_have_a_prefix_of_their_version(rollout, rule):
    one = rollout(spec_of(records={"chunkTokens": 4, "reprefill": rule}))
    wanted = group(3, new=40)
    pending, _ = start_and(one, wanted, lambda: one.scheduler.pause(abort=False))
    one.push(weights_of(1), 1)
    late = one.start(*group(2, first=3))
    one.scheduler.call(one.scheduler.resume).result(WAIT_SECONDS)
    done = pending.wait() + late.wait()
    wanted += group(2, first=3)
    check(one, wanted, done)
    found = headers(one, done)
    # Rows that were computed again replace the shared ones with AsAttended alone.
    kept = rule == "AsSampled"
    assert [[(h.prefix, h.version) for h in one_of[:2]] for one_of in found] == (
        [[("instance/0" if kept else None, 0 if kept else 1)] * 2] * 3 + [[("instance/1", 1)] * 2] * 2
    )
    assert one.store.frames() == len(handles_of(done))
    release_all(one, done)


def test_what_is_forgotten_with_a_lost_call_is_no_other_calls(rollout):
    """The ids of a lost call's requests are all that the loop has, and they name prefixes too."""
    one = rollout(spec_of(records={"chunkTokens": 4}))
    wanted = group(3) + group(3, first=3)
    one.scheduler.call(lambda: one.scheduler.pause(abort=False)).result(WAIT_SECONDS)
    lost, kept = one.start(*wanted[:3]), one.start(*wanted[3:])
    one.scheduler.call(one.scheduler.resume)
    lost, kept = lost.wait(), kept.wait()
    assert handles_of(lost).isdisjoint(handles_of(kept))
    one.store.source.forget([ask["id"] for ask in wanted[:3]])
    assert one.store.frames() == len(handles_of(kept))
    check(one, wanted[3:], kept)
    release_all(one, kept)


def test_a_prefix_that_cannot_be_put_is_missing_for_all_its_sharers(rollout):
    one = rollout(deadline_seconds=0.1)
    one.store.stop_server()
    wanted = group(3, new=2)
    done = one.generate(*wanted)
    assert handles_of(done) == set()
    assert sum(one.writer.dropped.values()) == 4  # the prompt once, and what each has alone
