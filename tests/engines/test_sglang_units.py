"""DP attention: two units of one SGLang rollout have requests of their own, and the experts have all rows.

What is recorded is compared with the reference trainer, one process with the same weights in FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from conftest import TWO_RANKS as SHAPE
from conftest import Rollout, generate, reader_of, sampling, weights_of
from ending import until_ended

from tracerl.engines.client import Broadcaster, RolloutError
from tracerl.engines.hf import write_model
from tracerl.records.frame import read_header
from tracerl.records.sites import site_table

PROMPTS = [[3 + 5 * i % 50, 7, 11 + i, 20, 9, 40 - i][: 2 + i % 5] for i in range(13)]


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
            "parallelism": {"data": 2},
        },
    )


async def test_every_unit_makes_the_records_of_its_requests(rollout: Rollout) -> None:
    """Thirteen sequences: units of unlike sizes, retracted and prefilled again when memory is short."""
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        before = rollout.frames_held()
        done = await generate(client, PROMPTS, sampling(13, 90), "units")
        audited = [any(entry.audit for entry in one.records) for one in done]
        # Each unit audits every second one that it sees.
        assert sum(audited) == 7
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


async def test_a_frame_has_all_sites_and_its_rows_once(rollout: Rollout) -> None:
    """One request alone: the other unit takes part in its passes without a row of its own."""
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1, shape=SHAPE))
        (one,) = await generate(client, PROMPTS[4:5], sampling(1, 20), "alone")
        table = site_table(SHAPE, rollout.spec)
        read = reader_of(rollout.source)
        entries = [entry for entry in one.records if not entry.audit]
        assert {(entry.part, entry.parts) for entry in entries} == {(0, 1)}
        rows = len(PROMPTS[4]) + len(one.tokens) - 1
        assert [row for entry in entries for row in range(entry.start, entry.stop)] == [*range(rows)]
        for entry in entries:
            pieces = read_header(read(entry.handle)).slices
            assert [(piece.site, piece.start, piece.stop) for piece in pieces] == [
                (index, 0, site.groups) for index, site in enumerate(table.sites)
            ]
        rollout.release([one])


async def test_a_shared_prompt_is_computed_once_a_unit(rollout: Rollout) -> None:
    prompt = PROMPTS[4] * 5
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        (bare,) = await client.generate_batch([prompt], sampling(1, 20), ids=["bare"], record=False)
        assert bare.records == []
        done = await generate(client, [prompt] * 2, sampling(2, 20), "first")
        done += await generate(client, [prompt] * 6, sampling(6, 20), "shared")
        assert done[0].tokens == bare.tokens
        rollout.compare([rollout.trajectory(prompt, one) for one in done], 1, version)
        first = [
            entry.handle for one in done for entry in one.records if entry.start == 0 and not entry.audit
        ]
        assert (len(first), len(set(first))) == (8, 2)
        rollout.release(done)


async def test_every_rank_takes_weights_by_broadcast(rollout: Rollout) -> None:
    async with rollout.client() as client:
        assert (await client.info()).ranks == 2
        await rollout.push(client, weights_of(1, shape=SHAPE))
        broadcaster = await Broadcaster.open([client], address="127.0.0.1", name="weights-units")
        rollout.version += 1
        await client.pause_generation("retract")
        await broadcaster.push(weights_of(3, shape=SHAPE).items(), rollout.version)
        await client.continue_generation()
        done = await generate(client, PROMPTS[:3], sampling(3, 30), "broadcast")
        trajectories = [rollout.trajectory(prompt, one) for prompt, one in zip(PROMPTS, done, strict=False)]
        rollout.compare(trajectories, 3, rollout.version)
        rollout.release(done)


async def test_a_bad_update_is_refused_once_for_all(rollout: Rollout) -> None:
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1, shape=SHAPE))
        await client.pause_generation("retract")
        partial = weights_of(2, shape=SHAPE)
        del partial["lm_head.weight"]
        directory = rollout.write(partial)
        await client.begin_weight_update()
        await client.update_weights_from_disk(str(directory), rollout.version)
        with pytest.raises(RolloutError, match=r"lm_head\.weight") as caught:
            await client.end_weight_update(rollout.version)
        assert str(caught.value).count("lm_head.weight") == 1
        assert (await client.info()).weight_version == version


async def test_without_one_of_its_units_the_rollout_ends(rollout: Rollout) -> None:
    """The last test of this module: nothing answers after it."""
    server = rollout.server.process
    children = psutil.Process(server.pid).children(recursive=True)
    ranks = {name: child for child in children if "scheduler" in (name := child.cmdline()[0])}
    assert len(ranks) == 2
    ranks[max(ranks)].kill()
    assert server.wait(60) != 0
    await until_ended(children)
