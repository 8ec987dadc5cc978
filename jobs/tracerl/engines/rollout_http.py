"""A rollout as an HTTP server: the subset of SGLang's API that the loop uses, whatever engine is behind it.

Every answer but Prometheus' text is JSON; an error is ``{"error": {"message": one sentence, "reason": …}}``.
`/health` is open, everything else takes the run's bearer token. Generation is refused until a trainer pushed
weights: the run of the trainer that pushed last is the run that is served.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.engines.client import INSTANCE_HEADER, RUN_HEADER, SITE_TABLE_HEADER
from tracerl.engines.weight_group import DTYPES
from tracerl.records.pairing import RecordEntry
from tracerl.transport.listen import HttpServer, Strangers

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_BYTES = 64 * 2**20


# -- what an engine does ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A request that came to an end; `finish_reason` as in SGLang: type stop, length or abort."""

    tokens: list[int]
    logp: list[float]
    finish_reason: dict[str, Any]
    spans: list[tuple[int, int, int]]
    """(version, start, end) over `tokens`."""
    entries: list[RecordEntry]
    seconds: dict[str, float]
    """capture, pack, put: CPU time that recording this trajectory took. Threads wait for each other, so wall
    time of one would hold that of the other."""


@dataclass(frozen=True)
class Broken:
    """A request that will never end, because the engine failed or stops."""

    reason: str
    message: str


@dataclass(frozen=True)
class Ask:
    """One sequence to generate."""

    id: str
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    record: bool = True
    """False: leave its records out, where the engine can."""


@dataclass(frozen=True)
class WeightMeeting:
    """Where a weight group meets, and which rank of it this rollout is."""

    address: str
    port: int
    rank: int
    world_size: int
    name: str


@dataclass(frozen=True)
class Shipment:
    """Tensors that are broadcast in a weight group, in this order; `dtypes` as `DTYPES` spells them."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group: str


class RolloutBackend(Protocol):
    """An engine behind the front. Methods that return a sentence say why something was not done."""

    @property
    def failure(self) -> Broken | None:
        """Why the engine will never generate again."""
        ...

    @property
    def version(self) -> int | None:
        """Version of the weights that it generates with; None before version 0."""
        ...

    @property
    def run_id(self) -> str | None:
        """The run that it serves."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and response together, that a request may have."""
        ...

    @property
    def running(self) -> int:
        """Requests that are being generated."""
        ...

    async def generate(self, asks: Sequence[Ask]) -> list[Finished] | Broken:
        """Generate; when cancelled, abort and forget what was recorded."""
        ...

    def abort(self, ids: Sequence[str] | None) -> None:
        """End requests (None: all); their `generate` returns."""
        ...

    async def pause(self, *, abort: bool) -> None:
        """Stop after the current step; what runs is aborted, or retracted with its tokens kept."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def flush(self) -> str | None:
        """Forget cached prefixes."""
        ...

    async def begin_update(self, run: str) -> str | None:
        """Open a weight update by this run, which is served from then on."""
        ...

    async def load_from_disk(self, directory: Path, version: int | None) -> str | None:
        """Take tensors from a directory of *.safetensors into the open update."""
        ...

    async def join_group(self, meeting: WeightMeeting) -> str | None:
        """Join a weight group; returns when all members have met."""
        ...

    async def receive(self, shipment: Shipment, version: int | None) -> str | None:
        """Take the tensors of a broadcast into the open update."""
        ...

    async def end_update(self, version: int) -> str | None:
        """Close the update: check that all weights came and generate with them as `version`."""
        ...

    def details(self) -> dict[str, Any]:
        """What else /get_model_info says."""
        ...

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format; may block."""
        ...


# -- what may be asked ------------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]


class _SamplingParams(_Body):
    temperature: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 128
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] = []
    sampling_seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False


class _Generate(_Body):
    input_ids: list[Annotated[list[_TokenId], Field(min_length=1)]] = Field(min_length=1)
    sampling_params: list[_SamplingParams]
    rid: list[_Id] | None = None
    return_logprob: bool = False
    stream: Literal[False] = False
    record: bool = True


class _Nothing(_Body):
    pass


class _Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Abort(_Body):
    rid: str = ""
    abort_all: bool = False


class _FromDisk(_Body):
    model_path: _Name
    weight_version: _Version | None = None


class _InitGroup(_Body):
    master_address: _Name
    master_port: Annotated[int, Field(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, lt=2**16)]
    group_name: _Name = "weight_update_group"
    backend: Literal["gloo"]


class _FromDistributed(_Body):
    names: list[_Name]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, lt=2**31)]]]
    group_name: _Name = "weight_update_group"
    weight_version: _Version | None = None


class _EndUpdate(_Body):
    weight_version: _Version


_B = TypeVar("_B", bound=_Body)


class RefusedError(Exception):
    """An answer other than 200: HTTP status and one sentence."""

    def __init__(self, status: int, message: str, reason: str = Reason.ROLLOUT_FAILED) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    def response(self) -> web.Response:
        """Make the answer."""
        body = {"error": {"message": str(self), "reason": str(self.reason)}}
        return web.json_response(body, status=self.status)


# -- the server -------------------------------------------------------------------------------------------


class RolloutFront:
    """The aiohttp application in front of an engine."""

    def __init__(
        self,
        backend: RolloutBackend,
        *,
        engine: str,
        token: str,
        table_digest: str,
        model_uri: str,
        vocab: int,
    ) -> None:
        """`engine` is its name in /get_model_info; token ids are below `vocab`."""
        self.instance_id = uuid.uuid4().hex
        self.strangers = Strangers()
        self._backend, self._engine = backend, engine
        self._token, self._digest = token.encode(), table_digest
        self._model_uri, self._vocab = model_uri, vocab
        self._active: set[str] = set()

    def application(self) -> web.Application:
        """Make the application; it may be served once."""
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_model_info", self._info)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/metrics", self._metrics)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/update_weights_from_disk": self._from_disk,
            "/init_weights_update_group": self._init_group,
            "/update_weights_from_distributed": self._from_distributed,
            "/end_weight_update": self._end,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        return app

    # -- every request ------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self._check(request)
            response = await handler(request)
        except RefusedError as error:
            response = error.response()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body has more than {_BODY_BYTES >> 20} MiB; send fewer prompts a request"
            response = RefusedError(413, message).response()
        except web.HTTPException as error:
            message = f"there is no {request.method} {request.path[:100]} here ({error.reason}); see the API"
            response = RefusedError(error.status, message).response()
        except Exception:  # noqa: BLE001  a bug, or a vanished peer: the traceback goes to the log alone
            _log.exception("%s failed", request.path[:100])
            response = RefusedError(500, f"{request.path[:100]} failed; see the rollout's log").response()
        response.headers[INSTANCE_HEADER] = self.instance_id
        return response

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise RefusedError(401, "the bearer token is missing or wrong; use the token file of this run")
        self.strangers.admit(request)
        table = request.headers.get(SITE_TABLE_HEADER)
        if table is not None and table != self._digest:
            raise RefusedError(
                409,
                f"the trainer's site table is {table[:12]}… and this rollout's {self._digest[:12]}…; "
                "start both with the same resolved job and the same version of tracerl",
                Reason.SITE_TABLE_MISMATCH,
            )
        run, served = request.headers.get(RUN_HEADER), self._backend.run_id
        if request.path == "/generate" and None not in {run, served} and run != served:
            raise RefusedError(
                409,
                f"this rollout serves run {served}, not {str(run)[:64]}; push that run's weights first",
            )

    async def _health(self, _request: web.Request) -> web.Response:
        if (failure := self._backend.failure) is not None:
            raise RefusedError(503, failure.message, failure.reason)
        return web.json_response({"instanceId": self.instance_id})

    async def _info(self, _request: web.Request) -> web.Response:
        version = self._backend.version
        return web.json_response(
            {
                "model_path": self._model_uri,
                "is_generation": True,
                "engine": self._engine,
                "instanceId": self.instance_id,
                "siteTable": self._digest,
                "weight_version": None if version is None else str(version),
                "max_total_tokens": self._backend.max_tokens,
                "cpuSeconds": time.process_time(),
            }
            | self._backend.details()
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._backend.metrics)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # -- generation ---------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        document = await _read(request)
        single = not _is_batch(document.get("input_ids"))
        body = _parse(_Generate, _as_batch(document) if single else _spread(document))
        ids = body.rid or [uuid.uuid4().hex for _ in body.input_ids]
        self._check_generate(body, ids)
        asks = [
            Ask(
                id=id,
                prompt=prompt,
                max_new_tokens=params.max_new_tokens,
                temperature=params.temperature,
                seed=params.sampling_seed,
                # As in SGLang, ignore_eos turns off every stop token.
                stop_token_ids=() if params.ignore_eos else tuple(params.stop_token_ids),
                record=body.record,
            )
            for id, prompt, params in zip(ids, body.input_ids, body.sampling_params, strict=True)
        ]
        self._active.update(ids)
        try:
            outcomes = await self._backend.generate(asks)
        finally:
            self._active.difference_update(ids)
        if isinstance(outcomes, Broken):
            status = 503 if outcomes.reason == Reason.INTERRUPTED else 500
            raise RefusedError(status, outcomes.message, outcomes.reason)
        version = str(self._backend.version)
        answers = [
            _answer(asked, outcome, version, logprob=body.return_logprob)
            for asked, outcome in zip(asks, outcomes, strict=True)
        ]
        return web.json_response(answers[0] if single else answers)

    def _check_generate(self, body: _Generate, ids: Sequence[str]) -> None:
        if (failure := self._backend.failure) is not None:
            raise RefusedError(500, failure.message, failure.reason)
        if self._backend.version is None:
            raise RefusedError(
                409,
                "this rollout has no weights yet; push version 0 first, starting with begin_weight_update",
            )
        if not len(ids) == len(body.input_ids) == len(body.sampling_params):
            raise RefusedError(
                400,
                f"there are {len(body.input_ids)} input_ids, {len(body.sampling_params)} sampling_params and "
                f"{len(ids)} rid; give one of each a prompt",
            )
        if len(set(ids)) != len(ids) or not self._active.isdisjoint(ids):
            raise RefusedError(400, "a rid is used twice at the same time; give every trajectory its own")
        limit = self._backend.max_tokens
        for index, (prompt, params) in enumerate(zip(body.input_ids, body.sampling_params, strict=True)):
            if len(prompt) + params.max_new_tokens > limit:
                raise RefusedError(
                    400,
                    f"prompt {index} has {len(prompt)} tokens and asks for {params.max_new_tokens} more, but "
                    f"a sequence has {limit} at most: the model's context, rollout.kvCacheTokens, or "
                    "algorithm.maxPromptTokens + maxResponseTokens; ask for less or raise the least of these",
                )
            if max(prompt) >= self._vocab:
                raise RefusedError(
                    400,
                    f"prompt {index} has token {max(prompt)}, but the last one is {self._vocab - 1}; "
                    "use the model's tokenizer",
                )
            if 0 < params.temperature < 0.01:
                raise RefusedError(
                    400,
                    f"temperature {params.temperature} is too close to 0; use 0 for the most probable token",
                )

    async def _abort(self, request: web.Request) -> web.Response:
        body = _parse(_Abort, await _read(request))
        if not body.rid and not body.abort_all:
            raise RefusedError(400, "nothing to abort; give rid or abort_all: true")
        self._backend.abort(None if body.abort_all else [body.rid])
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        body = _parse(_Pause, await _read(request))
        if body.mode == "in_place":
            raise RefusedError(
                400, "in_place would mix versions in one KV cache; pause with mode retract or abort"
            )
        await self._backend.pause(abort=body.mode == "abort")
        return web.json_response({"success": True, "message": "generation is paused"})

    async def _continue(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        await self._backend.resume()
        return web.json_response({"success": True, "message": "generation goes on"})

    async def _flush(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        if running := self._backend.running:
            raise RefusedError(400, f"{running} requests are being generated; pause generation first")
        if (problem := await self._backend.flush()) is not None:
            raise RefusedError(400, problem)
        return web.json_response({"success": True, "message": "nothing is cached"})

    # -- weights ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        run = request.headers.get(RUN_HEADER, "")
        if not 1 <= len(run) <= 64:
            raise RefusedError(
                400,
                f"whose weights are these? Send the run id (1 to 64 characters) in the header {RUN_HEADER}",
            )
        return _done(await self._backend.begin_update(run))

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = _parse(_FromDisk, await _read(request))
        version = _number(body.weight_version)
        return _done(await self._backend.load_from_disk(Path(body.model_path), version))

    async def _init_group(self, request: web.Request) -> web.Response:
        body = _parse(_InitGroup, await _read(request))
        meeting = WeightMeeting(
            body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name
        )
        return _done(await self._backend.join_group(meeting))

    async def _from_distributed(self, request: web.Request) -> web.Response:
        body = _parse(_FromDistributed, await _read(request))
        if not len(body.names) == len(body.dtypes) == len(body.shapes) or not set(body.dtypes) <= set(DTYPES):
            raise RefusedError(400, f"give one name, dtype ({', '.join(DTYPES)}) and shape a tensor")
        shipment = Shipment(body.names, body.dtypes, body.shapes, body.group_name)
        return _done(await self._backend.receive(shipment, _number(body.weight_version)))

    async def _end(self, request: web.Request) -> web.Response:
        body = _parse(_EndUpdate, await _read(request))
        version = int(body.weight_version)
        problem = await self._backend.end_update(version)
        if problem is None:
            _log.info("generating with weights of version %d", version)
        return _done(problem)


NOT_BEGUN = "weights are updated between begin_weight_update and end_weight_update only; begin first"


def no_group(name: str) -> str:
    """Say that a weight group was not joined."""
    return f"there is no weight group {name}; call /init_weights_update_group first"


def no_meeting(meeting: WeightMeeting, error: str) -> str:
    """Say that a weight group cannot be joined; `error` is what its library said."""
    return (
        f"the weight group at {meeting.address}:{meeting.port} cannot be joined "
        f"({error.splitlines()[0] if error else 'no reason given'}); is the trainer still there?"
    )


def still_running(count: int) -> str:
    """Say that an update cannot begin while requests run."""
    return f"{count} requests are being generated; call /pause_generation with mode retract or abort first"


def other_version(got: int, asked: int) -> str:
    """Say that weights of one version were to be closed as another."""
    return f"the weights are of version {got}, not {asked}; begin the update again"


def _done(problem: str | None) -> web.Response:
    """SGLang's answer to weight calls: success and a message; status 400 without success."""
    if problem is None:
        return web.json_response({"success": True, "message": "Success"})
    return web.json_response({"success": False, "message": problem}, status=400)


def _number(version: str | None) -> int | None:
    return None if version is None else int(version)


# -- bodies -----------------------------------------------------------------------------------------------


async def _read(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    try:
        document = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is not JSON; send a JSON object") from None
    if not isinstance(document, dict):
        raise RefusedError(400, "the body is not a JSON object; send one")
    return document


def _parse(model: type[_B], document: Mapping[str, Any]) -> _B:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise RefusedError(400, f"the body is wrong at {where}: {first['msg']}") from None


def _is_batch(input_ids: object) -> bool:
    return isinstance(input_ids, list) and bool(input_ids) and isinstance(input_ids[0], list)


def _as_batch(document: Mapping[str, Any]) -> dict[str, Any]:
    """A request for one prompt as a batch of one."""
    batch = dict(document)
    batch["input_ids"] = [document.get("input_ids")]
    batch["sampling_params"] = [document.get("sampling_params", {})]
    if document.get("rid") is not None:
        batch["rid"] = [document["rid"]]
    return batch


def _spread(document: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose sampling parameters may be one object for all prompts."""
    batch = dict(document)
    params = document.get("sampling_params", {})
    if not isinstance(params, list):
        batch["sampling_params"] = [params] * len(document["input_ids"])
    return batch


def _answer(asked: Ask, outcome: Finished, version: str, *, logprob: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": asked.id,
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": len(outcome.tokens),
        "finish_reason": outcome.finish_reason,
        "weight_version": version,
        "weight_versions": [
            {"version": str(sampled_by), "start": start, "end": end}
            for sampled_by, start, end in outcome.spans
        ],
        "records": [entry.to_json() for entry in outcome.entries],
        "seconds": outcome.seconds,
    }
    if logprob:
        meta["output_token_logprobs"] = [
            [logp, token, None] for logp, token in zip(outcome.logp, outcome.tokens, strict=True)
        ]
    return {"output_ids": outcome.tokens, "meta_info": meta}


# -- the process ------------------------------------------------------------------------------------------


class Server(Protocol):
    """A rollout that can be served: its front, and what ends it."""

    front: RolloutFront

    def stop(self) -> None:
        """Answer what runs with an error and end the engine; may block."""
        ...

    def close(self) -> None:
        """Write the frames that wait, as far as there is room, and let go of everything."""
        ...


async def serve_until_stopped(
    resolved: ResolvedJob, index: int, server: Server, stop: asyncio.Event | None = None
) -> None:
    """Serve rollout `index` of a job until SIGTERM or SIGINT, or until `stop` is set.

    Listens on the port of ``endpoints.rollout[index].url``, or on a free one of 127.0.0.1 that it publishes
    as ``<endpoints.directory>/<name>.json`` until it stops. JobError when the port is taken.
    """
    endpoint = resolved.endpoints.rollout[index]
    stop = stop or asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    http = HttpServer(server.front.application(), server.front.strangers)
    published: Path | None = None
    try:
        host, port = ("127.0.0.1", 0) if endpoint.url is None else (None, urlsplit(endpoint.url).port or 80)
        try:
            port = await http.start(host, port)
        except OSError as error:
            raise JobError(
                Reason.CONFIGURATION,
                f"{endpoint.name} cannot listen on port {port} ({error.strerror}); free it",
            ) from None
        if endpoint.url is None and resolved.endpoints.directory is not None:
            published = resolved.endpoints.directory / f"{endpoint.name}.json"
            url = f"http://127.0.0.1:{port}"
            EndpointFile(url=url, pid=os.getpid(), instance_id=server.front.instance_id).publish(published)
        await stop.wait()
    finally:
        if published is not None:
            published.unlink(missing_ok=True)
        await asyncio.to_thread(server.stop)
        await http.close()
        await asyncio.to_thread(server.close)
