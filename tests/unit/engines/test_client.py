"""The client against servers that misbehave: whatever comes back is a typed error with one sentence."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from tracerl.api.constants import Reason
from tracerl.engines.client import (
    INSTANCE_HEADER,
    RUN_HEADER,
    SITE_TABLE_HEADER,
    InstanceChangedError,
    RolloutClient,
    RolloutError,
    RolloutUnreachableError,
    Sampling,
)

META = {
    "finish_reason": {"type": "stop", "matched": 2},
    "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
    "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
}
GOOD = {"output_ids": [7, 2], "meta_info": META}


@contextlib.asynccontextmanager
async def serving(handler):
    """A real server on a free port that answers every request with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answer(body):
    async def handler(request):
        return web.json_response(body)

    return handler


async def generate(client):
    return await client.generate([1, 2, 3], Sampling(max_new_tokens=5), id="t")


async def test_a_generation_is_read_and_what_is_asked_is_sglangs():
    seen = {}

    async def handler(request):
        seen.update(await request.json(), headers=dict(request.headers))
        return web.json_response([GOOD])

    async with serving(handler) as url, RolloutClient(url, "tok", run_id="r", site_table="d") as client:
        sampling = Sampling(max_new_tokens=5, temperature=0.5, stop_token_ids=(2,), seed=9)
        done = await client.generate([1, 2, 3], sampling, id="t")
    assert (done.id, done.prompt_tokens, done.tokens, done.logp) == ("t", 3, [7, 2], [-0.5, -0.25])
    assert (done.versions, done.finish_reason, done.records, done.seconds) == ([3, 4], "stop", [], {})
    assert seen["headers"]["Authorization"] == "Bearer tok"
    assert (seen["headers"][RUN_HEADER], seen["headers"][SITE_TABLE_HEADER]) == ("r", "d")
    assert (seen["rid"], seen["input_ids"], seen["return_logprob"]) == (["t"], [[1, 2, 3]], True)
    assert seen["sampling_params"] == [
        {"max_new_tokens": 5, "temperature": 0.5, "stop_token_ids": [2], "sampling_seed": 9}
    ]


def without(field):
    return {key: value for key, value in META.items() if key != field}


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        [],
        [GOOD, GOOD],
        [{}],
        [{"output_ids": [7, 2]}],
        [{"output_ids": [7, 3], "meta_info": META}],
        [{"output_ids": ["x", 2], "meta_info": META}],
        *([{"output_ids": [7, 2], "meta_info": without(field)}] for field in META),
        [{"output_ids": [7, 2], "meta_info": META | {"weight_versions": META["weight_versions"][1:]}}],
        [{"output_ids": [7, 2], "meta_info": META | {"weight_versions": META["weight_versions"][:1]}}],
    ],
)
async def test_answers_that_are_not_generations(body):
    async with serving(answer(body)) as url, RolloutClient(url, "tok") as client:
        with pytest.raises(RolloutError, match="is this a rollout server") as caught:
            await generate(client)
    assert "\n" not in str(caught.value)


async def test_errors_carry_the_servers_sentence_and_reason():
    async def handler(request):
        if request.path == "/begin_weight_update":
            return web.json_response({"success": False, "message": "not now"}, status=400)
        if request.path == "/end_weight_update":
            return web.json_response({"success": False, "message": "no"})
        if request.path == "/metrics":
            return web.Response(text="a proxy's page", status=502)
        return web.json_response({"error": {"message": "layer 1", "reason": "NonFinite"}}, status=500)

    async with serving(handler) as url, RolloutClient(url, "tok") as client:
        with pytest.raises(RolloutError, match=r"^layer 1$") as caught:
            await generate(client)
        assert (caught.value.reason, caught.value.status) == (Reason.NON_FINITE, 500)
        with pytest.raises(RolloutError, match="not now") as caught:
            await client.begin_weight_update()
        assert caught.value.reason == Reason.WEIGHT_SYNC_FAILED
        with pytest.raises(RolloutError) as caught:
            await client.end_weight_update(1)
        assert caught.value.reason == Reason.WEIGHT_SYNC_FAILED
        with pytest.raises(RolloutError, match="502: a proxy's page"):
            await client.metrics()
        assert not await client.health()


async def test_only_what_may_be_sent_twice_is_repeated():
    counts = {}

    async def handler(request):
        counts[request.path] = counts.get(request.path, 0) + 1
        if counts[request.path] < 3:
            request.transport.close()
        return web.json_response({"engine": "e", "weight_version": "12"})

    async with serving(handler) as url, RolloutClient(url, "tok") as client:
        info = await client.info()
        assert (info.engine, info.weight_version, info.instance_id, info.site_table) == ("e", 12, None, None)
        with pytest.raises(RolloutUnreachableError):
            await generate(client)
        with pytest.raises(RolloutUnreachableError):
            await client.begin_weight_update()
    assert counts == {"/get_model_info": 3, "/generate": 1, "/begin_weight_update": 1}


async def test_another_instance_is_noticed_until_it_is_adopted():
    instance = ["a"]

    async def handler(request):
        body = {"instanceId": instance[0], "weight_version": None} if request.path != "/generate" else [GOOD]
        return web.json_response(body, headers={INSTANCE_HEADER: instance[0]})

    async with serving(handler) as url, RolloutClient(url, "tok") as client:
        await client.connect()
        assert await client.health()
        await generate(client)
        instance[0] = "b"
        for _ in range(2):
            with pytest.raises(InstanceChangedError):
                await generate(client)
        with pytest.raises(InstanceChangedError):
            await client.health()
        assert (await client.info()).instance_id == "b"
        assert (await client.connect()).weight_version is None
        await generate(client)


async def test_nobody_there():
    async with serving(answer({})) as url:
        pass
    async with RolloutClient(url, "tok") as client:
        assert not await client.health()
        with pytest.raises(RolloutUnreachableError, match="cannot be reached") as caught:
            await generate(client)
    assert "tok" not in f"{caught.value!r} {client!r}"


async def test_a_server_that_never_answers():
    async def handler(request):
        await asyncio.Event().wait()

    async with serving(handler) as url, RolloutClient(url, "tok", generation_seconds=0.05) as client:
        with pytest.raises(RolloutUnreachableError, match=r"no answer within 0\.05 s"):
            await generate(client)
