"""The rollout server over real sockets, by its client and by hand."""

import asyncio
import contextlib
import gzip
import json
import signal
import stat
import time
from collections import Counter
from urllib.parse import urlsplit

import aiohttp
import pytest
import torch
from rollout_servers import NODE, SHAPE, WAIT_SECONDS, Server, Store, reader_of, resolve, write_weights

from tracerl.api.constants import METRICS, Reason, Role
from tracerl.engines.client import (
    Broadcaster,
    InstanceChangedError,
    RolloutClient,
    RolloutError,
    RolloutUnreachableError,
    Sampling,
    push_from_disk,
)
from tracerl.engines.hf import write_model
from tracerl.records.pairing import assemble
from tracerl.records.sites import site_table
from tracerl.transport.base import TransportError
from tracerl.transport.sources import open_source

# One server for the module: starting one costs seconds of CPU.
pytestmark = pytest.mark.xdist_group("rollout-server")

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    resolved = resolve(
        tmp_path_factory.mktemp("rollout") / "run",
        records={"chunkTokens": 16, "auditEvery": 2},
        rollout={"kvCacheTokens": 8192},
    )
    server = Server(resolved)
    yield server
    server.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return [(root / str(seed), write_weights(root / str(seed), seed)) for seed in (0, 1)]


@pytest.fixture
def frames(server):
    source = open_source(server.resolved, "run-1", NODE)
    yield source
    source.close()


def client_of(server, **options):
    token = options.pop("token", "s3cret")
    return RolloutClient(server.url, token, **({"run_id": "run-1"} | options))


@pytest.fixture
async def client(server, weights):
    """A client of a server that has weights of seed 0."""
    async with client_of(server) as client:
        await client.connect()
        await client.continue_generation()
        await push_from_disk([client], str(weights[0][0]), 0)
        yield client


async def until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


async def metric(client, name):
    for line in (await client.metrics()).splitlines():
        if line.startswith(name + " ") or line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} is not there")


async def queue_is(client, count):
    return await metric(client, "tracerl_rollout_queued_requests") == count


def greedy(new):
    return Sampling(max_new_tokens=new, temperature=0.0)


async def test_nothing_is_generated_before_weights_were_pushed(server, weights):
    """Runs first: the server has just been started."""
    async with client_of(server) as client:
        assert await client.health()
        info = await client.connect()
        assert (info.instance_id, info.weight_version, info.engine) == (server.instance_id, None, "reference")
        assert info.site_table == site_table(SHAPE, server.resolved.job.spec).digest
        with pytest.raises(RolloutError, match="push version 0"):
            await client.generate([1], greedy(1), id="early")
        for update in (
            client.update_weights_from_disk(str(weights[0][0]), 0),
            client.update_weights_from_distributed(["a"], ["float32"], [[1]], group="g", version=0),
            client.end_weight_update(0),
        ):
            with pytest.raises(RolloutError, match="begin first") as caught:
                await update
            assert caught.value.reason == Reason.WEIGHT_SYNC_FAILED
        await client.begin_weight_update()
        with pytest.raises(RolloutError, match="is missing"):
            await client.end_weight_update(0)
        with pytest.raises(RolloutError, match="is not there"):
            await client.update_weights_from_disk(str(weights[0][0] / "nowhere"), 0)
        await client.update_weights_from_disk(str(weights[0][0]), 0)
        with pytest.raises(RolloutError, match="are of version 0, not 1"):
            await client.end_weight_update(1)
        assert (await client.info()).weight_version is None
        await client.end_weight_update(0)
        assert (await client.info()).weight_version == 0
        assert len((await client.generate([1], greedy(3), id="first")).tokens) == 3


async def test_a_generation_has_tokens_versions_and_records_that_pair(server, client, frames):
    table = site_table(SHAPE, server.resolved.job.spec)
    sampling = [Sampling(max_new_tokens=40, seed=seed) for seed in range(3)]
    done = await client.generate_batch(PROMPTS, sampling, ids=["a", "b", "c"])
    again = await client.generate(PROMPTS[1], sampling[1], id="b-again")
    assert again.tokens == done[1].tokens
    assert torch.allclose(torch.tensor(again.logp), torch.tensor(done[1].logp), atol=1e-5)
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert (one.prompt_tokens, len(one.tokens), len(one.logp), one.versions) == (
            len(prompt),
            40,
            40,
            [0] * 40,
        )
        assert one.finish_reason == "length"
        found = assemble(
            one.records,
            reader_of(frames),
            table,
            tokens=len(prompt) + 40,
            prompt_tokens=len(prompt),
            token_versions=one.versions,
            job_uid="uid-1",
            run_id="run-1",
            trajectory=one.id,
        )
        assert found.missing == {}
        assert len([entry for entry in one.records if not entry.audit]) == -(-(len(prompt) + 39) // 16)
        assert set(one.seconds) == {"capture", "pack", "put"}
    assert sum(any(entry.audit for entry in one.records) for one in done) in {1, 2}  # every second one
    for one in [*done, again]:
        frames.release([entry.handle for entry in one.records])
    stop = done[0].tokens[5]
    ended = await client.generate(
        PROMPTS[0], Sampling(max_new_tokens=40, seed=0, stop_token_ids=(stop,)), id="stops"
    )
    assert ended.tokens == done[0].tokens[: done[0].tokens.index(stop) + 1]
    assert ended.finish_reason == "stop"
    frames.release([entry.handle for entry in ended.records])


async def test_samples_of_a_prompt_share_what_their_prefill_recorded(server, client, frames):
    before = frames.usage().frames
    sampling = [Sampling(max_new_tokens=6, seed=seed) for seed in range(8)]
    done = await client.generate_batch([PROMPTS[0]] * 8, sampling, ids=[f"s{i}" for i in range(8)])
    owners = Counter(entry.handle for one in done for entry in one.records)
    # Half of them are audited, and have the prompt's records and its whole codes from a prefill of theirs.
    assert sorted(owners.values()) == [1] * 12 + [4] * 3
    assert frames.usage().frames == before + 15
    table = site_table(SHAPE, server.resolved.job.spec)
    for one in done:
        found = assemble(
            one.records,
            reader_of(frames),
            table,
            tokens=len(PROMPTS[0]) + 6,
            prompt_tokens=len(PROMPTS[0]),
            token_versions=one.versions,
            job_uid="uid-1",
            run_id="run-1",
            trajectory=one.id,
        )
        assert found.missing == {}
        frames.release([entry.handle for entry in one.records])
    assert frames.usage().frames == before


async def test_single_requests_have_sglangs_form(server, client):
    body = {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        "return_logprob": True,
    }
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer s3cret"}) as session:
        async with session.post(f"{server.url}/generate", json=body) as response:
            answer = await response.json()
        async with session.post(f"{server.url}/generate", json=body | {"return_logprob": False}) as response:
            plain = await response.json()
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 2
    assert meta["prompt_tokens"] == 2
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logp <= 0 and text is None for logp, _, text in meta["output_token_logprobs"])
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
    assert plain["output_ids"] == answer["output_ids"]
    assert "output_token_logprobs" not in plain["meta_info"]


# -- who may, and what ------------------------------------------------------------------------------------


async def test_every_endpoint_but_health_takes_the_token(server):
    posts = ["generate", "abort_request", "pause_generation", "continue_generation", "flush_cache"]
    posts += ["begin_weight_update", "update_weights_from_disk", "init_weights_update_group"]
    posts += ["update_weights_from_distributed", "end_weight_update"]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/health") as response:
            assert (response.status, await response.json()) == (200, {"instanceId": server.instance_id})
        asked = [("GET", path) for path in ("get_model_info", "model_info", "metrics")]
        for method, path in asked + [("POST", path) for path in posts]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cre\u0167"}):
                async with session.request(method, f"{server.url}/{path}", headers=headers) as response:
                    assert response.status == 401, path
                    assert "token" in (await response.json())["error"]["message"]
    async with client_of(server, token="other") as client:
        with pytest.raises(RolloutError, match="401") as caught:
            await client.info()
    assert "other" not in str(caught.value) + repr(client) + server.log()


GOOD = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 1}}
MALFORMED = {
    "not JSON": (b"{", 400),
    "not UTF-8": (b'{"rid": "\xff"}', 400),
    "deep": (b"[" * 100_000, 400),
    "not an object": (b"[1]", 400),
    "huge number": (b'{"input_ids": [' + b"9" * 5000 + b"]}", 400),
    "empty": (b"", 400),
    "no prompt": ({"input_ids": []}, 400),
    "an empty prompt": ({"input_ids": [[]]}, 400),
    "text": ({"text": "hello"}, 400),
    "a string as token": ({"input_ids": ["1"]}, 400),
    "a token below 0": ({"input_ids": [-1]}, 400),
    "a token beyond the vocabulary": ({"input_ids": [64]}, 400),
    "a float as token": ({"input_ids": [1.5]}, 400),
    "mixed prompts": ({"input_ids": [[1], 2]}, 400),
    "an unknown field": (GOOD | {"top_p": 0.9}, 400),
    "an unknown parameter": (GOOD | {"sampling_params": {"top_p": 0.9}}, 400),
    "streaming": (GOOD | {"stream": True}, 400),
    "a negative temperature": (GOOD | {"sampling_params": {"temperature": -1}}, 400),
    "almost no temperature": (GOOD | {"sampling_params": {"temperature": 1e-30}}, 400),
    "a temperature that is no number": (GOOD | {"sampling_params": {"temperature": float("nan")}}, 400),
    "no new token": (GOOD | {"sampling_params": {"max_new_tokens": 0}}, 400),
    "a seed beyond 64 bits": (GOOD | {"sampling_params": {"sampling_seed": 2**64}}, 400),
    "too few parameters": (GOOD | {"input_ids": [[1], [2]], "sampling_params": [{"max_new_tokens": 1}]}, 400),
    "a rid twice": (GOOD | {"input_ids": [[1], [2]], "rid": ["x", "x"]}, 400),
    "a rid too many": (GOOD | {"rid": ["x", "y"]}, 400),
    "an empty rid": (GOOD | {"rid": [""]}, 400),
    "beyond the context": (GOOD | {"sampling_params": {"max_new_tokens": 127}}, 400),
    "an endless prompt": ({"input_ids": [1] * 200, "sampling_params": {"max_new_tokens": 1}}, 400),
    "too large": (b" " * (65 * 2**20), 413),
}


async def test_malformed_requests_get_one_sentence(server, client):
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer s3cret"}) as session:
        for name, (body, status) in MALFORMED.items():
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(f"{server.url}/generate", data=data) as response:
                answer = await response.json()
            message = answer["error"]["message"]
            assert (response.status, "Traceback" in message, "\n" in message) == (status, False, False), (
                name,
                message,
            )
        for path, body in {
            "pause_generation": {"mode": "in_place"},
            "abort_request": {},
            "begin_weight_update": {"x": 1},
            "end_weight_update": {"weight_version": "latest"},
            "update_weights_from_disk": {"model_path": 3},
            "init_weights_update_group": {"master_address": "h", "master_port": 1, "backend": "nccl"},
        }.items():
            async with session.post(f"{server.url}/{path}", json=body) as response:
                assert (response.status, "message" in (await response.json())["error"]) == (400, True), path
        for method, path, status in (("GET", "generate", 405), ("POST", "nothing", 404)):
            async with session.request(method, f"{server.url}/{path}") as response:
                assert (response.status, "message" in (await response.json())["error"]) == (status, True)
    assert (await client.generate([1], greedy(1), id="still-well")).finish_reason == "length"


async def test_peers_without_the_token_hold_up_nobody(server, client):
    port = urlsplit(server.url).port
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    for _, writer in strangers:
        writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: 1000000\r\n")
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer s3cret", "Content-Encoding": "gzip"}
        packed = gzip.compress(json.dumps(GOOD).encode())
        # Decompressing is work that a few bytes can ask for without end.
        async with session.post(f"{server.url}/generate", data=packed, headers=headers) as response:
            assert (response.status, "not JSON" in await response.text()) == (400, True)
        async with session.post(f"{server.url}/generate", data=bytes(2**20)) as response:
            assert response.status == 401
    assert (await client.generate([1], greedy(1), id="amid-strangers")).finish_reason == "length"
    # There is a limit of connections, and those without the token make room.
    # What was sent and is not read yet makes a reset of the end.
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(strangers[0][0].read(1), WAIT_SECONDS) == b""
    for _, writer in strangers:
        writer.close()


async def test_another_site_table_is_refused(server):
    async with client_of(server, site_table="0" * 64) as client:
        with pytest.raises(RolloutError, match="site table") as caught:
            await client.info()
        assert caught.value.reason == Reason.SITE_TABLE_MISMATCH
    async with client_of(server, site_table=site_table(SHAPE, server.resolved.job.spec).digest) as client:
        await client.info()


async def test_a_new_run_takes_the_server_over(server, client, weights, frames):
    async with client_of(server, run_id="run-2") as other:
        with pytest.raises(RolloutError, match="serves run run-1"):
            await other.generate([1], greedy(1), id="x")
        await client.pause_generation("retract")
        waiting = asyncio.create_task(client.generate([1, 2], greedy(50), id="of-run-1"))
        await until(lambda: queue_is(client, 1))
        await push_from_disk([other], str(weights[1][0]), 7)
        assert (await waiting).finish_reason == "abort"
        await other.continue_generation()
        one = await other.generate([1], greedy(2), id="x")
        assert one.versions == [7, 7]
        # Frames of a run are not shown to another one.
        with pytest.raises(TransportError) as caught:
            reader_of(frames)(one.records[0].handle)
        assert caught.value.fault == "foreign"
        theirs = open_source(server.resolved, "run-2", NODE)
        assert theirs.present([one.records[0].handle]) == [True]
        theirs.release([entry.handle for entry in one.records])
        theirs.close()
        with pytest.raises(RolloutError, match="serves run run-2"):
            await client.generate([1], greedy(1), id="y")


# -- in the middle of generation --------------------------------------------------------------------------


async def test_an_update_while_generating_gives_both_versions(server, client, weights, frames):
    prompts = [[index + 1, index + 2] for index in range(48)]
    sampling = [Sampling(max_new_tokens=120, seed=index) for index in range(48)]
    before = await metric(client, "tracerl_generated_tokens_total")
    task = asyncio.create_task(
        client.generate_batch(prompts, sampling, ids=[f"u{index}" for index in range(48)])
    )

    async def some_tokens():
        return await metric(client, "tracerl_generated_tokens_total") >= before + 48 * 2

    await until(some_tokens)
    await client.pause_generation("retract")
    await client.flush_cache()
    await push_from_disk([client], str(weights[1][0]), 1)
    assert not task.done()
    await client.continue_generation()
    table = site_table(SHAPE, server.resolved.job.spec)
    for prompt, one in zip(prompts, await task, strict=True):
        assert sorted(one.versions) == one.versions
        assert set(one.versions) == {0, 1}
        found = assemble(
            one.records,
            reader_of(frames),
            table,
            tokens=len(prompt) + 120,
            prompt_tokens=len(prompt),
            token_versions=one.versions,
            job_uid="uid-1",
            run_id="run-1",
            trajectory=one.id,
        )
        assert found.missing == {}
        assert found.versions.tolist() == [0] * (len(prompt) - 1) + one.versions
        frames.release([entry.handle for entry in one.records])


async def test_abort_and_disconnect_end_requests(server, client):
    await client.pause_generation("retract")
    first, second, third = (
        asyncio.create_task(client.generate([1], greedy(30), id=name)) for name in ("one", "two", "three")
    )
    await until(lambda: queue_is(client, 3))
    await client.abort("two")
    assert (await second).finish_reason == "abort"
    assert (await second).tokens == []
    third.cancel()  # closes the connection
    await until(lambda: queue_is(client, 1))
    await client.continue_generation()
    assert (await first).finish_reason == "length"
    running = asyncio.create_task(client.generate_batch([[1], [2]], [greedy(120)] * 2, ids=["x", "y"]))

    async def runs():
        return await metric(client, "tracerl_rollout_running_requests") == 2 or running.done()

    await until(runs)
    await client.abort()
    assert {one.finish_reason for one in await running} <= {"abort", "length"}
    assert await metric(client, "tracerl_rollout_running_requests") == 0


async def test_frames_of_an_answer_that_nobody_takes_are_released(client):
    held = await metric(client, "tracerl_records_held_bytes")
    prompts = [[token] for token in range(48)]
    sampling = [greedy(2)] + [greedy(120)] * 47
    batch = asyncio.create_task(
        client.generate_batch(prompts, sampling, ids=[f"gone-{i}" for i in range(48)])
    )

    async def written():
        return await metric(client, "tracerl_records_held_bytes") > held

    await until(written)  # the first one is done, and the client waits for the others
    assert batch.cancel()

    async def released():
        return await metric(client, "tracerl_records_held_bytes") == held

    await until(released)


async def test_weights_arrive_by_broadcast_between_two_processes(client, weights):
    """The same weights by disk and by gloo give the same greedy tokens."""
    await push_from_disk([client], str(weights[1][0]), 1)
    by_disk = await client.generate([3, 4, 5], greedy(20), id="by-disk")
    await push_from_disk([client], str(weights[0][0]), 2)
    assert (await client.generate([3, 4, 5], greedy(20), id="other")).tokens != by_disk.tokens
    broadcaster = await Broadcaster.open([client], address="127.0.0.1", timeout_seconds=WAIT_SECONDS)
    tensors = weights[1][1]
    with pytest.raises(RolloutError, match="is missing"):
        await broadcaster.push(list(tensors.items())[1:], 3)
    await broadcaster.push([*tensors.items()], 3)
    by_gloo = await client.generate([3, 4, 5], greedy(20), id="by-gloo")
    assert (by_gloo.tokens, by_gloo.versions) == (by_disk.tokens, [3] * 20)
    # BF16, as a trainer that computes in BF16 exports them.
    await broadcaster.push([(name, tensor.bfloat16()) for name, tensor in tensors.items()], 4)
    assert (await client.info()).weight_version == 4


async def test_metrics_are_those_of_the_one_list(client):
    text = await client.metrics()
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    wanted = {
        spec.name.removesuffix("_total") if spec.type == "counter" else spec.name
        for spec in METRICS
        if spec.source is Role.ROLLOUT
    }
    assert {name.removesuffix("_total") for name in shown} == {name.removesuffix("_total") for name in wanted}
    assert await metric(client, "tracerl_generated_tokens_total") > 0


# -- life and death ---------------------------------------------------------------------------------------


async def test_a_killed_server_is_noticed_and_leaves_no_socket(tmp_path, weights):
    resolved = resolve(tmp_path / "run")
    server = Server(resolved)
    async with client_of(server) as client:
        await client.connect()
        await push_from_disk([client], str(weights[0][0]), 0)
        await client.pause_generation("retract")
        lost = asyncio.create_task(client.generate([1], greedy(5), id="lost"))
        await until(lambda: queue_is(client, 1))
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(RolloutUnreachableError):
            await lost
        assert not await client.health()
        sockets = [path for path in (tmp_path / "run").rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
        assert {path.parent.name for path in sockets} == {"store-0"}  # which lives on

        again = Server(resolved, server.store)
        client.url = again.url
        with pytest.raises(InstanceChangedError):
            await client.generate([1], greedy(1), id="x")
        with pytest.raises(InstanceChangedError):
            await client.health()
        assert (await client.connect()).weight_version is None

        # A store that is killed and started again is empty; the rollout finds it and goes on.
        await push_from_disk([client], str(weights[0][0]), 0)
        await client.continue_generation()
        before = await client.generate([1, 2], greedy(4), id="before")
        assert server.store.end(signal.SIGKILL) == -signal.SIGKILL
        store = Store(resolved)
        after = await client.generate([1, 2], greedy(4), id="after")
        frames = open_source(resolved, "run-1", NODE)
        for one, there in ((before, False), (after, True)):
            assert set(frames.present([entry.handle for entry in one.records])) == {there}
        frames.close()

        # The same process shows what an activation that is not finite does: it names the site and stays up.
        tensors = weights[0][1] | {
            "model.layers.2.post_attention_layernorm.weight": torch.full((SHAPE.hidden,), 3e38)
        }
        write_model(tmp_path / "broken", SHAPE, tensors.items())
        await push_from_disk([client], str(tmp_path / "broken"), 0)
        for _ in range(2):
            with pytest.raises(RolloutError, match="layer 2 ExpertInput") as caught:
                await client.generate([1, 2, 3], greedy(4), id="x")
            assert (caught.value.status, caught.value.reason) == (500, Reason.NON_FINITE)
        assert not await client.health()
        assert (await client.info()).weight_version == 0
    assert again.end() == 0
    assert store.end() == 0
    assert not [*resolved.run_dir.glob("rings/*")]


async def test_sigterm_answers_what_waits_and_leaves_nothing(server, client):
    """Runs last: it ends the module's server."""
    await client.generate([1], greedy(20), id="leaves-frames")
    await client.pause_generation("retract")
    waiting = asyncio.create_task(client.generate([1], greedy(5), id="x"))
    await until(lambda: queue_is(client, 1))
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(RolloutError, match="being stopped"):
        await waiting
    assert server.process.wait(WAIT_SECONDS) == 0
    # Generous for a busy machine: what it must not do is wait for idle connections or for a peer.
    assert time.monotonic() - started < 30
    assert not server.published.exists()
    assert "Traceback" not in server.log()
    server.close()
    assert not [*server.resolved.run_dir.glob("rings/*")]
