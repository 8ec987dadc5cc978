"""SGLang, a trainer, and the room for frames, each taken away in the middle of something.

Weights and records are of FP32, so that the reference trainer with the weights that were pushed last says of
every row whether it is right. Three servers are started, one after the other, beside one store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import RUN, SHAPE, Rollout, generate, sampling, weights_of
from ending import until_ended

from tracerl.api.frames import FrameKey, Handle
from tracerl.engines.base import Batch
from tracerl.engines.client import (
    Broadcaster,
    Generation,
    RolloutClient,
    RolloutError,
    RolloutUnreachableError,
)
from tracerl.engines.hf import write_model
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.sglang.weights import expert_hash
from tracerl.engines.weight_group import WeightGroup
from tracerl.transport.base import TransportError
from tracerl.transport.sources import open_sink

pytestmark = pytest.mark.full
PROMPTS = [[3 + 5 * i % 50, 7, 11 + i, 20, 9, 40 - i][: 2 + i % 5] for i in range(12)]
DEADLINE_SECONDS = 6
GROUP = "weights-0"

DYING_TRAINER = f"""
import asyncio, os, signal, sys
from conftest import RUN, TOKEN, weights_of
from tracerl.engines.client import RolloutClient
from tracerl.engines.weight_group import WeightGroup

async def main(url, version):
    weights = weights_of(6)
    async with RolloutClient(url, TOKEN, run_id=RUN) as client:
        group = WeightGroup("127.0.0.1", 0, rank=0, world_size=2, name="{GROUP}", timeout_seconds=60)
        await asyncio.gather(
            client.init_weights_update_group("127.0.0.1", group.port, rank=1, world_size=2, name="{GROUP}"),
            asyncio.to_thread(group.join),
        )
        await client.begin_weight_update()
        names, tensors = list(weights), list(weights.values())
        shapes = [list(tensor.shape) for tensor in tensors]
        receiving = asyncio.create_task(
            client.update_weights_from_distributed(
                names, ["float32"] * len(names), shapes, group="{GROUP}", version=version
            )
        )
        for tensor in tensors[: len(tensors) // 2]:
            await asyncio.to_thread(group.broadcast, tensor)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def rollout(rollout_of: Callable[..., Rollout]) -> Rollout:
    return rollout_of(
        transport={"ring": {"size": "1Mi"}, "deadlineSeconds": DEADLINE_SECONDS},
        rollout={"engine": "SGLang", "kvCacheTokens": 2048, "maxRunningRequests": 16},
    )


async def expert_weights(client: RolloutClient) -> str:
    details: dict[str, str] = await client._call("GET", "/get_model_info")
    return details["expertWeights"]


async def right_and_complete(rollout: Rollout, client: RolloutClient, seed: int, name: str) -> None:
    """Assert that the server has the weights of `seed` and nothing else, and records what it does."""
    assert await expert_weights(client) == expert_hash(SHAPE, weights_of(seed), rollout.spec.quantization)
    assert (await client.info()).weight_version == rollout.version
    before = rollout.frames_held()
    done = await generate(client, PROMPTS[:3], sampling(3, 30), name)
    assert {version for one in done for version in one.versions} == {rollout.version}
    check(rollout, PROMPTS[:3], done, seed)
    rollout.release(done)
    await rollout.until_held(before)


def check(rollout: Rollout, prompts: list[list[int]], done: list[Generation], seed: int) -> None:
    trajectories = [rollout.trajectory(prompt, one) for prompt, one in zip(prompts, done, strict=True)]
    for one in trajectories:
        assert one.records is not None
        assert one.records.missing == {}
    rollout.compare(trajectories, seed, done[0].versions[-1])


def dropped_because_full(metrics: str) -> float:
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith('tracerl_records_dropped_total{reason="full"}')
    ] or ["0"]
    return float(line.split()[-1])


@contextlib.contextmanager
def filled(rollout: Rollout, *, free_segments: int) -> Iterator[None]:
    """A ring that frames of another producer fill, but for a few segments."""
    sink = open_sink(rollout.resolved, "rollout-0", RUN)
    handles: list[Handle] = []

    def put_for_ever() -> None:
        while True:
            key = FrameKey("uid-1", RUN, "filler", 0, 1, len(handles), len(handles) + 1, 0)
            handles.append(sink.put(bytes(sink.max_frame_bytes), key, timeout=0.3))

    try:
        with pytest.raises(TransportError, match=r"spec\.transport\.ring\.size"):
            put_for_ever()
        assert rollout.source.usage().congested
        rollout.source.release(handles[:free_segments])
        yield
    finally:
        rollout.source.release(handles[free_segments:])
        sink.close()


# -- no room ----------------------------------------------------------------------------------------------


async def test_generation_goes_on_while_a_ring_is_full(rollout: Rollout) -> None:
    """All is answered; what found no room is missing and counted, what found some is right."""
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1))
        with filled(rollout, free_segments=2):
            done = await generate(client, PROMPTS, sampling(12, 100), "crowded")
        assert dropped_because_full(await client.metrics()) > 0
        assert all(len(one.tokens) == 100 for one in done)

        trajectories = [rollout.trajectory(prompt, one) for prompt, one in zip(PROMPTS, done, strict=True)]
        rows = present = 0
        for one, got in zip(done, trajectories, strict=True):
            assert got.records is not None
            covered = sum(entry.stop - entry.start for entry in one.records)
            whole = got.records.present.all(dim=1)
            assert int(whole.sum()) == covered
            assert sum(got.records.missing.values()) == got.records.n_rows - covered
            assert set(got.records.missing) <= {"missing"}
            assert set(got.records.versions[whole].tolist()) <= {version}
            rows, present = rows + got.records.n_rows, present + covered
        assert 0 < present < rows
        # In FP32 a trainer rounds rows that are missing as the rollout did: only a wrong row moves log-probs.
        trainer = ReferenceTrainer(SHAPE, rollout.spec, weights_of(1))
        logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=version)
        assert trainer.stats().guided_missing > 0
        for row, got in zip(logp, trajectories, strict=True):
            assert (row[:100] - got.logp_rollout).abs().max() < 5e-3

        rollout.release(done)
        await rollout.until_held(0)
        await right_and_complete(rollout, client, 1, "roomy")


# -- a trainer that dies ----------------------------------------------------------------------------------


async def test_nothing_of_an_update_that_a_trainer_left_open_stays(rollout: Rollout) -> None:
    """It dies between begin and end; another one begins again."""
    async with rollout.client() as client:
        await rollout.push(client, weights_of(1))
    async with rollout.client() as dying:
        await dying.pause_generation("retract")
        await dying.begin_weight_update()
        directory = rollout.write(weights_of(2))
        await dying.update_weights_from_disk(str(directory), rollout.version)
    async with rollout.client() as client:
        # What is asked for meanwhile waits: it is not generated with weights of which nobody knows.
        await client.continue_generation()
        waiting = asyncio.create_task(generate(client, PROMPTS[:2], sampling(2, 20), "waiting"))
        await asyncio.sleep(1)
        assert not waiting.done()

        partial = weights_of(3)
        del partial["model.layers.1.mlp.experts.2.down_proj.weight"]
        with pytest.raises(RolloutError, match=r"experts\.2\.down_proj\.weight is missing"):
            await rollout.push(client, partial)
        assert not waiting.done()

        await rollout.push(client, weights_of(4))
        done = await waiting
        assert {version for one in done for version in one.versions} == {rollout.version}
        check(rollout, PROMPTS[:2], done, 4)
        rollout.release(done)
        await right_and_complete(rollout, client, 4, "begun-again")


async def test_a_trainer_killed_in_the_middle_of_a_broadcast(rollout: Rollout) -> None:
    """By SIGKILL, when half of the tensors have arrived."""
    async with rollout.client() as client:
        before = await rollout.push(client, weights_of(1))
        await client.pause_generation("retract")
        rollout.version += 1
        trainer = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", DYING_TRAINER, rollout.url, str(rollout.version)],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=300,
            check=False,
        )
        assert trainer.returncode == -signal.SIGKILL
        assert (await client.info()).weight_version == before

        broadcaster = await Broadcaster.open([client], address="127.0.0.1", name=GROUP)
        await broadcaster.push(weights_of(5).items(), rollout.version)
        await client.continue_generation()
        await right_and_complete(rollout, client, 5, "after-broadcast")


async def test_the_answer_to_a_trainer_that_is_gone_is_not_given_to_the_next(rollout: Rollout) -> None:
    """The first asks the server to join a group that nobody completes, and dies while the second asks."""
    async with rollout.client() as client:
        await client.pause_generation("retract")
        abandoned = WeightGroup("127.0.0.1", 0, rank=0, world_size=2, name=GROUP, timeout_seconds=60)
        async with rollout.client() as dying:
            joining = asyncio.create_task(
                dying.init_weights_update_group("127.0.0.1", abandoned.port, rank=1, world_size=2, name=GROUP)
            )
            await asyncio.sleep(2)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        opening = asyncio.create_task(Broadcaster.open([client], address="127.0.0.1", name=GROUP))
        await asyncio.sleep(2)
        del abandoned  # its store stops listening
        broadcaster = await opening
        rollout.version += 1
        await broadcaster.push(weights_of(7).items(), rollout.version)
        await client.continue_generation()
        await right_and_complete(rollout, client, 7, "after-joining")


# -- a server that dies -----------------------------------------------------------------------------------


async def killed(rollout: Rollout) -> None:
    """Kill the server's process, and wait for all that it has started."""
    children = psutil.Process(rollout.server.process.pid).children(recursive=True)
    assert any("scheduler" in " ".join(child.cmdline()) for child in children)
    assert await asyncio.to_thread(rollout.server.end, signal.SIGKILL) == -signal.SIGKILL
    await until_ended(children)


async def test_a_server_killed_while_it_generates(rollout: Rollout) -> None:
    """Finished trajectories keep their frames; those of lost ones go when the run says that they are lost."""
    async with rollout.client() as client:
        version = await rollout.push(client, weights_of(1))
        empty = rollout.frames_held()
        kept = await generate(client, PROMPTS[:3], sampling(3, 30), "kept")
        before = rollout.frames_held()
        task = asyncio.create_task(generate(client, PROMPTS[3:7], sampling(4, 100), "lost"))
        while rollout.frames_held() < before + 6:
            assert not task.done()
            await asyncio.sleep(0.01)
        dying = asyncio.create_task(killed(rollout))
        with pytest.raises(RolloutUnreachableError):
            await task
        await dying
    rollout.source.forget([f"lost-{index}" for index in range(4)])
    await rollout.until_held(before)
    assert rollout.store.process.poll() is None
    assert set(kept[0].versions) == {version}
    check(rollout, PROMPTS[:3], kept, 1)
    rollout.release(kept)
    await rollout.until_held(empty)

    rollout.start_server()
    async with rollout.client() as client:
        assert (await client.info()).weight_version is None
        with pytest.raises(RolloutError, match="no weights yet"):
            await generate(client, PROMPTS[:1], sampling(1, 4), "early")
        await rollout.push(client, weights_of(2))
        # The lost ones are generated again, as the loop does it: under new ids.
        again = await generate(client, PROMPTS[3:7], sampling(4, 100), "again")
        check(rollout, PROMPTS[3:7], again, 2)
        rollout.release(again)
        await right_and_complete(rollout, client, 2, "restarted")


async def test_a_server_killed_in_an_update(rollout: Rollout) -> None:
    """With half of the tensors taken: what comes up again has no weights, and takes none but whole ones."""
    async with rollout.client() as client:
        await client.pause_generation("retract")
        await client.begin_weight_update()
        half = dict(list(weights_of(8).items())[::2])
        directory = rollout.resolved.run_dir / "half"
        write_model(directory, SHAPE, half.items())
        await client.update_weights_from_disk(str(directory), rollout.version + 1)
        await killed(rollout)
        with pytest.raises(RolloutUnreachableError):
            await client.end_weight_update(rollout.version + 1)

    rollout.start_server()
    async with rollout.client() as client:
        assert (await client.info()).weight_version is None
        with pytest.raises(RolloutError, match="begin first"):
            await client.end_weight_update(rollout.version + 1)
        with pytest.raises(RolloutError, match="no weights yet"):
            await generate(client, PROMPTS[:1], sampling(1, 4), "early")
        await rollout.push(client, weights_of(9))
        await right_and_complete(rollout, client, 9, "whole")
