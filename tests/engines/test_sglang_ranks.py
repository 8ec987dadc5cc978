"""Two tensor-parallel ranks of one SGLang rollout, over gloo: processes with a part of the records each.

What is recorded is compared with the reference trainer, one process with the same weights in FP32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest
from conftest import TWO_RANKS as SHAPE
from conftest import Rollout, generate, reader_of, sampling, weights_of

from tracerl.engines.client import Broadcaster, RolloutError
from tracerl.engines.hf import write_model
from tracerl.records.frame import read_header
from tracerl.records.sites import SiteKind, site_table

PROMPTS = [[3 + 5 * i % 50, 7, 11 + i, 20, 9, 40 - i][: 2 + i % 5] for i in range(12)]


@pytest.fixture(scope="module")
def rollout(rollout_of: Callable[..., Rollout], tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    """Every layer recorded, whole codes of every second trajectory, and too few KV slots for all prompts."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SHAPE, weights_of(0, shape=SHAPE).items())
    return rollout_of(
        model={"uri": directory.as_uri(), "dtype": "Float32"},
        quantization={"secondInput": "RTN"},
        records={"chunkTokens": 7, "auditEvery": 2},
        rollout={
            "engine": "SGLang",
            "kvCacheTokens": 640,
            "maxRunningRequests": 12,
            "parallelism": {"tensor": 2},
        },
    )


async def test_both_parts_make_the_records_of_one_computation(rollout: Rollout) -> None:
    """Twelve sequences in too little KV memory: some are retracted and prefilled again, on both alike."""
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        before = rollout.frames_held()
        done = await generate(client, PROMPTS, sampling(12, 90), "ranks")
        audited = [any(entry.audit for entry in one.records) for one in done]
        assert sum(audited) == 6
        trajectories = [
            rollout.trajectory(prompt, one, audited=audit)
            for prompt, one, audit in zip(PROMPTS, done, audited, strict=True)
        ]
        for trajectory in trajectories:
            assert trajectory.records is not None
            assert trajectory.records.missing == {}
            assert bool(trajectory.records.present.all())
        stats = rollout.compare(trajectories, 1, version)
        assert len(stats.sites) == 3 * SHAPE.layers
        for counts in stats.sites.values():
            assert counts.values > 0
            assert (counts.guided_mismatched, counts.scales_wrong) == (0, 0)
            assert counts.rtn_mismatched <= counts.values / 1000
        assert 'tracerl_rollout_retracted_total{reason="memory"} 0.0' not in await client.metrics()
        rollout.release(done)
        await rollout.until_held(before)


async def test_a_rank_writes_its_heads_and_the_first_what_all_hold(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1, shape=SHAPE))
        (one,) = await generate(client, PROMPTS[4:5], sampling(1, 20), "parts")
        table = site_table(SHAPE, rollout.spec)
        read = reader_of(rollout.source)
        for part in (0, 1):
            entries = [entry for entry in one.records if entry.part == part and not entry.audit]
            rows = len(PROMPTS[4]) + len(one.tokens) - 1
            assert [row for entry in entries for row in range(entry.start, entry.stop)] == [*range(rows)]
            held = {
                (table.sites[piece.site].kind, piece.start, piece.stop)
                for entry in entries
                for piece in read_header(read(entry.handle)).slices
            }
            heads = {(kind, part, part + 1) for kind in (SiteKind.KEY, SiteKind.VALUE)}
            replicated = {(SiteKind.EXPERT_INPUT, 0, 1), (SiteKind.ROUTES, 0, 1)}
            assert held == (heads | replicated if part == 0 else heads)
        rollout.release([one])


async def test_what_is_not_to_be_recorded_is_not(rollout: Rollout) -> None:
    """The same tokens, beside a request with records and alone; who records takes none of its cache."""
    prompt = PROMPTS[4] * 4
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        before = rollout.frames_held()
        (bare,) = await client.generate_batch([prompt], sampling(1, 20), ids=["bare"], record=False)
        assert rollout.frames_held() == before
        (first, again), (beside,) = await asyncio.gather(
            client.generate_batch([prompt] * 2, sampling(2, 20), ids=["first", "again"]),
            client.generate_batch([prompt], sampling(1, 20), ids=["beside"], record=False),
        )
        assert bare.tokens == beside.tokens == first.tokens
        assert bare.records == beside.records == []
        assert bare.seconds == {}
        for one in (first, again):
            rollout.compare([rollout.trajectory(prompt, one)], 1, version)
        # The server's own process only waits for the schedulers, which compute.
        spent = (await client.info()).cpu_seconds
        own = psutil.Process(rollout.server.process.pid).cpu_times()
        assert spent is not None
        assert spent > own.user + own.system
        rollout.release([first, again])


async def test_every_rank_takes_weights_by_broadcast(rollout: Rollout) -> None:
    async with rollout.client() as client:
        assert (await client.info()).ranks == 2
        await rollout.push(client, weights_of(1, shape=SHAPE))
        broadcaster = await Broadcaster.open([client], address="127.0.0.1", name="weights-ranks")
        rollout.version += 1
        await client.pause_generation("retract")
        await broadcaster.push(weights_of(3, shape=SHAPE).items(), rollout.version)
        await client.continue_generation()
        done = await generate(client, PROMPTS[:3], sampling(3, 30), "broadcast")
        trajectories = [rollout.trajectory(prompt, one) for prompt, one in zip(PROMPTS, done, strict=False)]
        rollout.compare(trajectories, 3, rollout.version)
        rollout.release(done)


async def test_a_bad_update_is_refused_by_all_ranks(rollout: Rollout) -> None:
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        partial = weights_of(2, shape=SHAPE)
        del partial["model.layers.1.self_attn.k_norm.weight"]
        await client.pause_generation("retract")
        directory = rollout.write(partial)
        await client.begin_weight_update()
        await client.update_weights_from_disk(str(directory), rollout.version)
        with pytest.raises(RolloutError, match=r"k_norm.weight is missing"):
            await client.end_weight_update(rollout.version)
        assert (await client.info()).weight_version == version
        version = await rollout.push(client, weights_of(5, shape=SHAPE))
        (one,) = await generate(client, PROMPTS[:1], sampling(1, 30), "after")
        rollout.compare([rollout.trajectory(PROMPTS[0], one)], 5, version)
        rollout.release([one])


async def test_without_one_of_its_ranks_the_rollout_ends(rollout: Rollout) -> None:
    """The last test of this module: nothing answers after it."""
    server = rollout.server.process
    children = psutil.Process(server.pid).children(recursive=True)
    ranks = {name: child for child in children if "scheduler_TP" in (name := child.cmdline()[0])}
    assert sorted(ranks) == ["sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    ranks["sglang::scheduler_TP1"].kill()
    assert server.wait(60) != 0
    while any(is_alive(child) for child in children):
        await asyncio.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; what nobody waits for stays in the list of processes."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
