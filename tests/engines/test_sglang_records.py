"""What an SGLang rollout recorded, against the reference trainer with the same weights in FP32.

In FP32 both sides round every value alike, so a record is right when the trainer's own codes equal it, and
when following it gives the rollout's log-probs to 1e-5. Whatever is misplaced by a row shows in both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
from conftest import SHAPE, Rollout, generate, sampling, weights_of

from tracerl.engines.base import Batch
from tracerl.engines.client import Broadcaster, RolloutClient, RolloutError
from tracerl.engines.reference.trainer import ReferenceTrainer

PROMPTS = [[3 + 5 * i % 50, 7, 11 + i, 20, 9, 40 - i][: 2 + i % 5] for i in range(12)]
HEALTH_CHECK = "HEALTH_CHECK"


@pytest.fixture(scope="module")
def rollout(rollout_of: Callable[..., Rollout]) -> Rollout:
    """Every layer recorded, whole codes of every second trajectory, and too few KV slots for all prompts."""
    rollout = rollout_of(
        records={"chunkTokens": 7, "auditEvery": 2},
        rollout={"engine": "SGLang", "kvCacheTokens": 640, "maxRunningRequests": 12},
    )
    return rollout


async def pushed(rollout: Rollout, client: RolloutClient, seed: int = 1) -> int:
    return await rollout.push(client, weights_of(seed))


async def test_records_are_those_of_the_same_computation(rollout: Rollout) -> None:
    """Twelve sequences in too little KV memory: some are retracted and prefilled again on the way."""
    async with rollout.client() as client:
        version = await pushed(rollout, client)
        before = rollout.frames_held()
        done = await generate(client, PROMPTS, sampling(12, 90), "same")
        audited = [any(entry.audit for entry in one.records) for one in done]
        assert sum(audited) == 6
        trajectories = [
            rollout.trajectory(prompt, one, audited=audit)
            for prompt, one, audit in zip(PROMPTS, done, audited, strict=True)
        ]
        for one, trajectory in zip(done, trajectories, strict=True):
            assert trajectory.records is not None
            assert trajectory.records.missing == {}
            assert bool(trajectory.records.present.all())
            assert {len(range(entry.start, entry.stop)) for entry in one.records} <= set(range(1, 8))
        stats = rollout.compare(trajectories, 1, version)
        assert len(stats.sites) == 4 * SHAPE.layers
        for counts in stats.sites.values():
            assert counts.values > 0
            assert (counts.guided_mismatched, counts.scales_wrong) == (0, 0)
            assert counts.rtn_mismatched <= counts.values / 1000
        text = await client.metrics()
        assert 'tracerl_rollout_retracted_total{reason="memory"} 0.0' not in text
        assert "sglang:generation_tokens_total" in text
        rollout.release(done)
        await rollout.until_held(before)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
async def test_promtool_complains_of_nothing_on_the_page_but_of_metrics_of_sglang(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await pushed(rollout, client)
        text = await client.metrics()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).splitlines()
    assert "sglang:context_len metric names should not contain ':'" in said
    assert [line for line in said if not line.startswith("sglang:")] == []


async def test_a_record_in_the_wrong_place_shows(rollout: Rollout) -> None:
    async with rollout.client() as client:
        version = await pushed(rollout, client)
        (one,) = await generate(client, PROMPTS[4:5], sampling(1, 60), "shifted")
        right = rollout.trajectory(PROMPTS[4], one)
        assert right.records is not None
        rolled = dataclasses.replace(right.records, rows=right.records.rows.roll(1, 0))
        wrong = dataclasses.replace(right, records=rolled)
        trainer = ReferenceTrainer(SHAPE, rollout.spec, weights_of(1))
        gaps = [
            (trainer.forward(Batch([each]), guided=True, temperature=1.0, version=version)[0] - one_logp)
            .abs()
            .mean()
            for each, one_logp in ((right, right.logp_rollout), (wrong, wrong.logp_rollout))
        ]
        assert gaps[0] < 1e-5
        assert gaps[1] > 0.03
        rollout.release([one])


async def test_a_seed_draws_the_same_tokens_whatever_runs_beside_it(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await pushed(rollout, client)
        together = await generate(client, PROMPTS[:5], sampling(5, 40), "together")
        (alone,) = await generate(client, PROMPTS[3:4], sampling(5, 40)[3:4], "alone")
        (other,) = await generate(client, PROMPTS[3:4], sampling(5, 40)[2:3], "other")
        assert alone.tokens == together[3].tokens
        assert other.tokens != together[3].tokens
        rollout.release([*together, alone, other])


async def test_a_cached_prefix_brings_the_rows_that_filled_it(rollout: Rollout) -> None:
    prompt = list(range(5, 27))
    async with rollout.client() as client:
        version = await pushed(rollout, client)
        (first,) = await generate(client, [prompt], sampling(1, 5, temperature=0), "cold")
        (second,) = await generate(client, [prompt], sampling(1, 5, temperature=0), "warm")
        text = await client.metrics()
        assert [line for line in text.splitlines() if line.startswith("sglang:cached_tokens_total")]
        assert second.tokens == first.tokens
        shared = [one.records[0].handle for one in (first, second)]
        assert shared[0] == shared[1], "the prompt's rows are written once"
        cold, warm = (rollout.trajectory(prompt, one) for one in (first, second))
        assert cold.records is not None
        assert warm.records is not None
        assert torch.equal(cold.records.rows, warm.records.rows)
        assert warm.records.missing == {}
        # The cached prefix was not computed again: its rows' capture costs the second request nothing.
        assert second.seconds["capture"] < first.seconds["capture"]
        rollout.compare([cold, warm], 1, version)
        rollout.release([first, second])


async def test_frames_arrive_while_a_sequence_grows(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await pushed(rollout, client)
        before = rollout.frames_held()
        task = asyncio.create_task(generate(client, PROMPTS[:1], sampling(1, 100), "streamed"))
        seen = set()
        while not task.done():
            seen.add(rollout.frames_held() - before)
            await asyncio.sleep(0.01)
        (one,) = await task
        # Most of them were there, one after the other, long before the last.
        assert len(seen & set(range(1, len(one.records) - 2))) > 2
        rollout.release([one])


async def test_sequences_go_on_under_new_weights(rollout: Rollout) -> None:
    """Tokens of two versions: each row is of the version that sampled its next token."""
    async with rollout.client() as client:
        old = await pushed(rollout, client, seed=1)
        task = asyncio.create_task(generate(client, PROMPTS[:4], sampling(4, 100), "mixed"))
        await asyncio.sleep(0.5)
        new = await pushed(rollout, client, seed=2)
        done = await task
        mixed = [one for one in done if len(set(one.versions)) == 2]
        assert mixed, [one.versions for one in done]
        for prompt, one in zip(PROMPTS, done, strict=False):
            assert set(one.versions) <= {old, new}
            assert one.versions == sorted(one.versions)
            records = rollout.trajectory(prompt, one).records
            assert records is not None
            assert records.missing == {}
            expected = [one.versions[0]] * (len(prompt) - 1) + one.versions
            assert records.versions.tolist() == expected
            if one in mixed:
                assert records.mixed > 0
        text = await client.metrics()
        assert 'tracerl_rollout_retracted_total{reason="weights"} 0.0' not in text
        rollout.release(done)


async def test_what_an_update_leaves_behind_is_not_used(rollout: Rollout) -> None:
    """The same prompt before and after an update: nothing of the first comes from the cache in the second."""
    prompt = list(range(30, 50))
    async with rollout.client() as client:
        for seed in (1, 2):
            version = await pushed(rollout, client, seed=seed)
            (one,) = await generate(client, [prompt], sampling(1, 20), f"update-{seed}")
            assert set(one.versions) == {version}
            rollout.compare([rollout.trajectory(prompt, one)], seed, version)
            rollout.release([one])


async def test_aborted_requests_leave_no_frames(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await pushed(rollout, client)
        before = rollout.frames_held()
        task = asyncio.create_task(generate(client, PROMPTS[:3], sampling(3, 100), "aborted"))
        await asyncio.sleep(0.4)
        await client.abort("aborted-1")
        done = await task
        assert [one.finish_reason for one in done] == ["length", "abort", "length"]
        assert len(done[1].tokens) == len(done[1].logp) == len(done[1].versions) < 100
        assert done[1].records == []
        rollout.release(done)
        await rollout.until_held(before)

        task = asyncio.create_task(generate(client, PROMPTS[:3], sampling(3, 100), "cancelled"))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rollout.until_held(before)

        task = asyncio.create_task(generate(client, PROMPTS[:3], sampling(3, 100), "paused"))
        await asyncio.sleep(0.4)
        await client.pause_generation("abort")
        assert {one.finish_reason for one in await task} == {"abort"}
        await client.continue_generation()
        await rollout.until_held(before)


async def test_weights_by_broadcast(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await pushed(rollout, client, seed=1)
        for seed in (3, 4):
            # A trainer that was restarted opens a group of the same name.
            broadcaster = await Broadcaster.open([client], address="127.0.0.1", name="weights-0")
            rollout.version += 1
            await client.pause_generation("retract")
            await broadcaster.push(weights_of(seed).items(), rollout.version)
            await client.continue_generation()
            done = await generate(client, PROMPTS[:3], sampling(3, 30), f"broadcast-{seed}")
            trajectories = [
                rollout.trajectory(prompt, one) for prompt, one in zip(PROMPTS, done, strict=False)
            ]
            rollout.compare(trajectories, seed, rollout.version)
            rollout.release(done)


async def test_a_bad_update_changes_nothing(rollout: Rollout) -> None:
    async with rollout.client() as client:
        version = await pushed(rollout, client, seed=1)
        poisoned, partial = weights_of(2), weights_of(2)
        poisoned["model.layers.2.mlp.experts.3.up_proj.weight"][5, 7] = torch.nan
        del partial["model.layers.1.self_attn.k_norm.weight"]
        await client.pause_generation("retract")
        for weights, message in ((poisoned, "holds NaN or Inf"), (partial, "k_norm.weight is missing")):
            directory = rollout.write(weights)
            await client.begin_weight_update()
            await client.update_weights_from_disk(str(directory), rollout.version)
            with pytest.raises(RolloutError, match=message):
                await client.end_weight_update(rollout.version)
        assert (await client.info()).weight_version == version
        version = await pushed(rollout, client, seed=5)
        (one,) = await generate(client, PROMPTS[:1], sampling(1, 30), "after")
        rollout.compare([rollout.trajectory(PROMPTS[0], one)], 5, version)
        rollout.release([one])
