"""A BF16 rollout with everything quantised: its weights, what it says of itself, and how it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SHAPE, TOKEN, Rollout, resolve, sampling, spec_of, start, weights_of
from ending import until_ended

from tracerl.engines.client import RolloutClient, RolloutError, RolloutUnreachableError
from tracerl.engines.sglang.weights import expert_hash

PROMPTS = [[5, 9, 11], [7, 3, 22, 41, 2], [8]]


@pytest.fixture(scope="module")
def rollout(rollout_of: Callable[..., Rollout]) -> Rollout:
    return rollout_of(
        model={"uri": "builtin://tiny-moe", "dtype": "BFloat16"}, quantization={"secondInput": "RTN"}
    )


async def details(client: RolloutClient) -> dict:
    return await client._call("GET", "/get_model_info")


async def test_nothing_is_generated_before_weights_came(rollout: Rollout) -> None:
    async with rollout.client() as client:
        assert (await client.info()).weight_version is None
        with pytest.raises(RolloutError, match="no weights yet"):
            await client.generate([1, 2], sampling(1, 4)[0], id="early")
        with pytest.raises(RolloutError, match="begin first"):
            await client.end_weight_update(0)
        with pytest.raises(RolloutError, match="in_place would mix versions"):
            await client.pause_generation("in_place")  # type: ignore[arg-type]
    async with RolloutClient(rollout.url, "wrong", run_id="run-1") as stranger:
        with pytest.raises(RolloutError, match="bearer token"):
            await stranger.info()
    async with RolloutClient(rollout.url, TOKEN, run_id="run-1", site_table="0" * 64) as other:
        with pytest.raises(RolloutError, match="site table"):
            await other.info()


async def test_expert_weights_equal_the_trainers_byte_for_byte(rollout: Rollout) -> None:
    """Codes, scales and tensor scales after each of two updates, against those of the exported values."""
    async with rollout.client() as client:
        seen = []
        for seed in (1, 2):
            weights = weights_of(seed, torch.bfloat16)
            await rollout.push(client, weights)
            found = (await details(client))["expertWeights"]
            assert found == expert_hash(SHAPE, weights, rollout.spec.quantization)
            seen.append(found)
        assert len(set(seen)) == 2


async def test_health_checks_are_not_recorded(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1, torch.bfloat16))
        before = rollout.source.usage().frames
        done = await client.generate([1, 2, 3], sampling(1, 8)[0], id="HEALTH_CHECK-1")
        assert (len(done.tokens), done.records) == (8, [])
        assert rollout.source.usage().frames == before


async def test_stop_tokens_end_a_sequence_and_belong_to_it(rollout: Rollout) -> None:
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1, torch.bfloat16))
        (greedy,) = await client.generate_batch(PROMPTS[:1], sampling(1, 30, temperature=0), ids=["all"])
        stop = greedy.tokens[6]
        first = greedy.tokens.index(stop)
        params = sampling(1, 30, temperature=0)[0]
        stopped = await client.generate(
            PROMPTS[0], type(params)(30, 0.0, stop_token_ids=(stop,)), id="stopped"
        )
        assert stopped.finish_reason == "stop"
        assert stopped.tokens == greedy.tokens[: first + 1]
        records = rollout.trajectory(PROMPTS[0], stopped).records
        assert records is not None
        assert records.missing == {}
        rollout.source.release([entry.handle for one in (greedy, stopped) for entry in one.records])


async def test_a_killed_scheduler_takes_the_server_with_it(rollout: Rollout) -> None:
    """By a signal, so that it is started again; frames of what was running can still be dropped."""
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1, torch.bfloat16))
        before = rollout.source.usage().frames
        task = asyncio.create_task(
            client.generate_batch(PROMPTS, sampling(3, 100), ids=["lost-0", "lost-1", "lost-2"])
        )
        while rollout.source.usage().frames < before + 4:
            await asyncio.sleep(0.02)
        children = psutil.Process(rollout.server.process.pid).children(recursive=True)
        (scheduler,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
        with pytest.raises(RolloutUnreachableError):
            await task
    assert rollout.server.process.wait(60) < 0
    rollout.source.forget(["lost-0", "lost-1", "lost-2"])
    assert rollout.source.usage().frames == before
    await until_ended(children)


def test_a_server_whose_plugin_is_not_loaded_does_not_start(tmp_path: Path) -> None:
    """The entry point is hidden from SGLang's processes, which then start as if there were no plugin."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "real = m.entry_points\n"
        "m.entry_points = lambda **k: () if k.get('group') == 'sglang.srt.plugins' else real(**k)\n"
    )
    resolved = resolve(tmp_path / "run", spec_of())
    server = start(resolved, "rollout_main", "rollout-0", PYTHONPATH=str(tmp_path))
    assert server.process.wait(400) == 1, server.log()
    # On a CPU SGLang does not even come to the point where the server waits for the plugin's hello.
    assert any(
        sentence in server.log()
        for sentence in ("SGLang did not start", "0 of 1 SGLang schedulers loaded the plugin tracerl")
    )
