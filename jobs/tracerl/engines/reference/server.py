"""The reference rollout as an HTTP server: the subset of SGLang's API that the loop uses, and nothing else.

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
import secrets
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from tracerl.api.constants import METRICS, Reason, Role
from tracerl.api.errors import InputError, JobError
from tracerl.api.job import DType, TraceRLJob
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.engines.client import INSTANCE_HEADER, RUN_HEADER, SITE_TABLE_HEADER
from tracerl.engines.reference.capture import CaptureHooks, Destination, FrameWriter, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.scheduler import Broken, Finished, Request, Scheduler
from tracerl.engines.reference.weights import RolloutWeights, read_tensors
from tracerl.engines.weight_group import DTYPES, WeightGroup
from tracerl.methods import plan
from tracerl.records.sites import audit_table, site_table
from tracerl.transport.base import FrameSink, TransportError, Usage
from tracerl.transport.listen import HttpServer, Strangers
from tracerl.transport.sources import open_sink

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_BYTES = 64 * 2**20
# Record rows that wait for the writer; above it nothing new is admitted.
_WAITING_BYTES = 64 * 2**20
_GROUP_SECONDS = 300.0


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


class _RefusedError(Exception):
    """An answer other than 200: HTTP status and one sentence."""

    def __init__(self, status: int, message: str, reason: str = Reason.ROLLOUT_FAILED) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    def response(self) -> web.Response:
        body = {"error": {"message": str(self), "reason": str(self.reason)}}
        return web.json_response(body, status=self.status)


# -- the server -------------------------------------------------------------------------------------------


@dataclass
class _Update:
    """An open weight update: tensors by name, as they came, and the version that they are said to be."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None


class RolloutServer:
    """One rollout process: model, scheduler and frame writer behind an aiohttp application."""

    def __init__(
        self,
        job: TraceRLJob,
        shape: ModelShape,
        *,
        job_uid: str,
        token: str,
        open_sink: Callable[[str], FrameSink],
    ) -> None:
        """Take memory and start the threads; InputError when the job asks for more than there is.

        `open_sink` gives the sink of a run id; it may wait, and raises InputError or TransportError.
        """
        spec = job.spec
        self.instance_id = uuid.uuid4().hex
        self._shape, self._job_uid, self._open_sink = shape, job_uid, open_sink
        self._token = token.encode()
        self.strangers = Strangers()
        self._model_uri = spec.model.uri
        method = plan(spec, shape)
        self._table = site_table(shape, spec)
        audit = audit_table(shape, spec) if spec.records.audit_every else None
        tables = [self._table] + ([audit] if audit is not None and audit.sites else [])
        slots = min(spec.rollout.max_running_requests, spec.rollout.kv_cache_tokens)
        # No longer than the job can ask for: sequences that lie close together are read and written faster.
        wanted = spec.algorithm.max_prompt_tokens + spec.algorithm.max_response_tokens
        capacity = min(wanted, shape.context, spec.rollout.kv_cache_tokens)
        dtype = torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32
        try:
            model = MoEModel(shape, dtype)
            # FP32 holds every BF16 value, and spares a conversion of all that is attended in each step.
            cache = KVCache(shape, slots=slots, capacity=capacity, dtype=torch.float32)
            buffers = [
                RowBuffer(table, slots=slots, capacity=capacity, reprefill=spec.records.reprefill)
                for table in tables
            ]
        except RuntimeError as error:
            raise InputError(
                f"there is no memory for the model and {slots} sequences of {capacity} tokens "
                f"({str(error).splitlines()[0]}); lower spec.rollout.maxRunningRequests or kvCacheTokens"
            ) from None
        hooks = CaptureHooks(
            shape, method, spec.quantization, self._table, tables[1] if len(tables) > 1 else None
        )
        self._weights = RolloutWeights(model, method, spec.quantization)
        self._writer = FrameWriter(
            limit_bytes=_WAITING_BYTES, deadline_seconds=spec.transport.deadline_seconds
        )
        self._scheduler = Scheduler(
            model,
            cache,
            hooks,
            buffers,
            self._writer,
            instance=self.instance_id,
            kv_tokens=spec.rollout.kv_cache_tokens,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=spec.records.audit_every if len(tables) > 1 else 0,
        )
        self._run_id: str | None = None
        self._update: _Update | None = None
        self._groups: dict[str, WeightGroup] = {}
        self._active: set[str] = set()
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(self._scheduler, self._writer))

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

    def stop(self) -> None:
        """Answer what runs with an error and end the scheduler; blocks for at most one step."""
        self._scheduler.stop()

    def close(self) -> None:
        """Write the frames that wait, as far as there is room, and end the writer."""
        self._writer.close()

    # -- every request ------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self._check(request)
            response = await handler(request)
        except _RefusedError as error:
            response = error.response()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body has more than {_BODY_BYTES >> 20} MiB; send fewer prompts a request"
            response = _RefusedError(413, message).response()
        except web.HTTPException as error:
            message = f"there is no {request.method} {request.path[:100]} here ({error.reason}); see the API"
            response = _RefusedError(error.status, message).response()
        except Exception:  # noqa: BLE001  a bug, or a vanished peer: the traceback goes to the log alone
            _log.exception("%s failed", request.path[:100])
            response = _RefusedError(500, f"{request.path[:100]} failed; see the rollout's log").response()
        response.headers[INSTANCE_HEADER] = self.instance_id
        return response

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise _RefusedError(401, "the bearer token is missing or wrong; use the token file of this run")
        self.strangers.admit(request)
        table = request.headers.get(SITE_TABLE_HEADER)
        if table is not None and table != self._table.digest:
            raise _RefusedError(
                409,
                f"the trainer's site table is {table[:12]}… and this rollout's {self._table.digest[:12]}…; "
                "start both with the same resolved job and the same version of tracerl",
                Reason.SITE_TABLE_MISMATCH,
            )
        run = request.headers.get(RUN_HEADER)
        if request.path == "/generate" and None not in {run, self._run_id} and run != self._run_id:
            raise _RefusedError(
                409,
                f"this rollout serves run {self._run_id}, not {str(run)[:64]}; push that run's weights first",
            )

    async def _health(self, _request: web.Request) -> web.Response:
        if (failure := self._scheduler.failure) is not None:
            raise _RefusedError(503, failure.message, failure.reason)
        return web.json_response({"instanceId": self.instance_id})

    async def _info(self, _request: web.Request) -> web.Response:
        version = self._scheduler.version
        return web.json_response(
            {
                "model_path": self._model_uri,
                "is_generation": True,
                "engine": "reference",
                "instanceId": self.instance_id,
                "siteTable": self._table.digest,
                "weight_version": None if version is None else str(version),
                "max_total_tokens": self._scheduler.max_tokens,
            }
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # -- generation ---------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        document = await _read(request)
        single = not _is_batch(document.get("input_ids"))
        body = _parse(_Generate, _as_batch(document) if single else _spread(document))
        ids = body.rid or [uuid.uuid4().hex for _ in body.input_ids]
        self._check_generate(body, ids)
        waiting = _Waiting(asyncio.get_running_loop(), len(ids))
        requests = [
            Request(
                id=id,
                prompt=prompt,
                max_new_tokens=params.max_new_tokens,
                temperature=params.temperature,
                seed=secrets.randbits(64) if params.sampling_seed is None else params.sampling_seed,
                # As in SGLang, ignore_eos turns off every stop token.
                stop_token_ids=() if params.ignore_eos else tuple(params.stop_token_ids),
                deliver=partial(waiting.take, index),
            )
            for index, (id, prompt, params) in enumerate(
                zip(ids, body.input_ids, body.sampling_params, strict=True)
            )
        ]
        self._active.update(ids)
        try:
            self._scheduler.submit(requests)
            outcomes = await waiting.future
        except asyncio.CancelledError:
            # The client is gone: nobody waits for these tokens, and nobody will release their frames.
            self._scheduler.abort(ids, deliver=False)
            self._forget(requests)
            raise
        finally:
            self._active.difference_update(ids)
        if isinstance(outcomes, Broken):
            self._forget(requests)
            status = 503 if outcomes.reason == Reason.INTERRUPTED else 500
            raise _RefusedError(status, outcomes.message, outcomes.reason)
        version = str(self._scheduler.version)
        answers = [
            _answer(asked, outcome, version, logprob=body.return_logprob)
            for asked, outcome in zip(requests, outcomes, strict=True)
        ]
        return web.json_response(answers[0] if single else answers)

    def _forget(self, requests: Sequence[Request]) -> None:
        """Release what was recorded about requests whose answer does not arrive, also of finished ones."""

        # After what the scheduler was asked before: by then it hands in no more frames of them.
        def forget() -> None:
            for request in requests:
                self._writer.forget(request.frames)

        self._scheduler.call(forget)

    def _check_generate(self, body: _Generate, ids: Sequence[str]) -> None:
        if (failure := self._scheduler.failure) is not None:
            raise _RefusedError(500, failure.message, failure.reason)
        if self._scheduler.version is None:
            raise _RefusedError(
                409,
                "this rollout has no weights yet; push version 0 first, starting with begin_weight_update",
            )
        if not len(ids) == len(body.input_ids) == len(body.sampling_params):
            raise _RefusedError(
                400,
                f"there are {len(body.input_ids)} input_ids, {len(body.sampling_params)} sampling_params and "
                f"{len(ids)} rid; give one of each a prompt",
            )
        if len(set(ids)) != len(ids) or not self._active.isdisjoint(ids):
            raise _RefusedError(400, "a rid is used twice at the same time; give every trajectory its own")
        limit = self._scheduler.max_tokens
        for index, (prompt, params) in enumerate(zip(body.input_ids, body.sampling_params, strict=True)):
            if len(prompt) + params.max_new_tokens > limit:
                raise _RefusedError(
                    400,
                    f"prompt {index} has {len(prompt)} tokens and asks for {params.max_new_tokens} more, but "
                    f"a sequence has {limit} at most: the model's context, rollout.kvCacheTokens, or "
                    "algorithm.maxPromptTokens + maxResponseTokens; ask for less or raise the least of these",
                )
            if max(prompt) >= self._shape.vocab:
                raise _RefusedError(
                    400,
                    f"prompt {index} has token {max(prompt)}, but the last one is {self._shape.vocab - 1}; "
                    "use the model's tokenizer",
                )
            if 0 < params.temperature < 0.01:
                raise _RefusedError(
                    400,
                    f"temperature {params.temperature} is too close to 0; use 0 for the most probable token",
                )

    async def _abort(self, request: web.Request) -> web.Response:
        body = _parse(_Abort, await _read(request))
        if not body.rid and not body.abort_all:
            raise _RefusedError(400, "nothing to abort; give rid or abort_all: true")
        self._scheduler.abort(None if body.abort_all else [body.rid], deliver=True)
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        body = _parse(_Pause, await _read(request))
        if body.mode == "in_place":
            raise _RefusedError(
                400, "in_place would mix versions in one KV cache; pause with mode retract or abort"
            )
        await self._between_steps(lambda: self._scheduler.pause(abort=body.mode == "abort"))
        return web.json_response({"success": True, "message": "generation is paused"})

    async def _continue(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        await self._between_steps(self._scheduler.resume)
        return web.json_response({"success": True, "message": "generation goes on"})

    async def _flush(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        # There is no prefix cache: what a flush promises holds as soon as nothing runs.
        if running := self._scheduler.running:
            raise _RefusedError(400, f"{running} requests are being generated; pause generation first")
        return web.json_response({"success": True, "message": "nothing is cached"})

    # -- weights ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        _parse(_Nothing, await _read(request))
        run = request.headers.get(RUN_HEADER, "")
        if not 1 <= len(run) <= 64:
            raise _RefusedError(
                400,
                f"whose weights are these? Send the run id (1 to 64 characters) in the header {RUN_HEADER}",
            )
        if run != self._run_id:
            try:
                sink = await asyncio.to_thread(self._open_sink, run)
            except (InputError, TransportError) as error:
                return _done(str(error))
            await self._between_steps(self._scheduler.new_run)
            self._writer.direct(Destination(sink, self._job_uid, run))
            self._run_id = run
            _log.info("serving run %s from now on", run)
        problem = await self._between_steps(self._scheduler.begin_update)
        if problem is None:
            self._update = _Update()
        return _done(problem)

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = _parse(_FromDisk, await _read(request))
        if self._update is None:
            return _done(_NOT_BEGUN)
        update = self._update
        update.version = body.weight_version
        try:
            update.tensors |= await _in_thread(lambda: read_tensors(Path(body.model_path)))
        except InputError as error:
            return _done(str(error))
        return _done(None)

    async def _init_group(self, request: web.Request) -> web.Response:
        body = _parse(_InitGroup, await _read(request))

        def join() -> str | None:
            try:
                group = WeightGroup(
                    body.master_address,
                    body.master_port,
                    rank=body.rank_offset,
                    world_size=body.world_size,
                    name=body.group_name,
                    timeout_seconds=_GROUP_SECONDS,
                )
                group.join()
            except RuntimeError as error:
                return (
                    f"the weight group at {body.master_address}:{body.master_port} cannot be joined "
                    f"({str(error).splitlines()[0]}); is the trainer still there?"
                )
            self._groups[body.group_name] = group
            return None

        return _done(await _in_thread(join))

    async def _from_distributed(self, request: web.Request) -> web.Response:
        body = _parse(_FromDistributed, await _read(request))
        if self._update is None:
            return _done(_NOT_BEGUN)
        group = self._groups.get(body.group_name)
        if group is None:
            return _done(f"there is no weight group {body.group_name}; call /init_weights_update_group first")
        if not len(body.names) == len(body.dtypes) == len(body.shapes) or not set(body.dtypes) <= set(DTYPES):
            raise _RefusedError(400, f"give one name, dtype ({', '.join(DTYPES)}) and shape a tensor")
        update = self._update
        update.version = body.weight_version

        def receive() -> str | None:
            # All of them, even those that nobody asked for: the sender waits for every receiver.
            for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
                tensor = torch.empty(shape, dtype=DTYPES[dtype])
                try:
                    group.broadcast(tensor)
                except RuntimeError as error:
                    return (
                        f"the broadcast of {name} broke ({str(error).splitlines()[0]}); open the group again"
                    )
                update.tensors[name] = tensor
            return None

        return _done(await _in_thread(receive))

    async def _end(self, request: web.Request) -> web.Response:
        body = _parse(_EndUpdate, await _read(request))
        if self._update is None:
            return _done(_NOT_BEGUN)
        update, version = self._update, body.weight_version
        if update.version not in {None, version}:
            return _done(
                f"the weights are of version {update.version}, not {version}; begin the update again"
            )
        try:
            await self._between_steps(
                lambda: self._scheduler.end_update(lambda: self._weights.load(update.tensors), int(version))
            )
        except InputError as error:
            return _done(str(error))
        self._update = None
        _log.info("generating with weights of version %s", version)
        return _done(None)

    async def _between_steps(self, function: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._scheduler.call(function))


_NOT_BEGUN = "weights are updated between begin_weight_update and end_weight_update only; begin first"


def _done(problem: str | None) -> web.Response:
    """SGLang's answer to weight calls: success and a message; status 400 without success."""
    if problem is None:
        return web.json_response({"success": True, "message": "Success"})
    return web.json_response({"success": False, "message": problem}, status=400)


# -- bodies -----------------------------------------------------------------------------------------------


async def _read(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    try:
        document = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise _RefusedError(400, "the body is not JSON; send a JSON object") from None
    if not isinstance(document, dict):
        raise _RefusedError(400, "the body is not a JSON object; send one")
    return document


def _parse(model: type[_B], document: Mapping[str, Any]) -> _B:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise _RefusedError(400, f"the body is wrong at {where}: {first['msg']}") from None


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


def _answer(asked: Request, outcome: Finished, version: str, *, logprob: bool) -> dict[str, Any]:
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


class _Waiting:
    """Collects what becomes of one HTTP request's sequences; wakes its handler once, when all are there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.future: asyncio.Future[list[Finished] | Broken] = loop.create_future()
        self._loop, self._lock = loop, threading.Lock()
        self._outcomes: list[Finished | None] = [None] * count
        self._missing = count

    def take(self, index: int, outcome: Finished | Broken) -> None:
        """Take the outcome of one sequence, on any thread; one that is broken breaks them all."""
        result: list[Finished] | Broken = outcome if isinstance(outcome, Broken) else []
        if isinstance(outcome, Finished):
            with self._lock:
                self._outcomes[index] = outcome
                self._missing -= 1
                if self._missing:
                    return
            result = [outcome for outcome in self._outcomes if outcome is not None]
        self._loop.call_soon_threadsafe(self._answer, result)

    def _answer(self, result: list[Finished] | Broken) -> None:
        if not self.future.done():
            self.future.set_result(result)


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Run something that may block for minutes on a thread that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001  handed to the handler that waits
            problem = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await future


# -- metrics ----------------------------------------------------------------------------------------------


class _Metrics(Collector):
    """The rollout's metrics, read from the scheduler and the writer whenever somebody asks."""

    def __init__(self, scheduler: Scheduler, writer: FrameWriter) -> None:
        self._scheduler, self._writer = scheduler, writer

    def collect(self) -> Iterator[Metric]:
        """Make the metrics that `tracerl.api.constants.METRICS` lists for a rollout."""
        scheduler, writer, stats = self._scheduler, self._writer, self._scheduler.stats
        usage = _usage(writer)
        counted = Counter({} if usage is None else usage.counters)
        values: dict[str, dict[str, float]] = {
            "tracerl_records_held_bytes": {} if usage is None else {"": usage.frame_bytes},
            "tracerl_records_written_bytes_total": {**{"record": 0, "audit": 0}, **writer.written_bytes},
            "tracerl_records_dropped_total": {"lost": counted["lost_frames"], **writer.dropped},
            "tracerl_object_uploads_total": {
                "ok": counted["uploads_ok"],
                "failed": counted["uploads_failed"],
            },
            "tracerl_object_uploaded_bytes_total": {"": counted["uploaded_bytes"]},
            "tracerl_object_retries_total": {"": counted["retries"]},
            "tracerl_generated_tokens_total": {"": stats.generated_tokens},
            "tracerl_rollout_running_requests": {"": scheduler.running},
            "tracerl_rollout_queued_requests": {"": scheduler.queued},
            "tracerl_rollout_kv_cache_tokens": {"": scheduler.cached_tokens},
            "tracerl_rollout_retracted_total": {**{"memory": 0, "weights": 0}, **stats.retracted},
            "tracerl_rollout_reprefilled_rows_total": {
                **{"memory": 0, "weights": 0},
                **stats.reprefilled_rows,
            },
            "tracerl_rollout_admission_stalls_total": {"": stats.admission_stalls},
            "tracerl_rollout_weight_version": {} if scheduler.version is None else {"": scheduler.version},
        }
        for spec in METRICS:
            if spec.source is not Role.ROLLOUT:
                continue
            family = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
            metric = family(spec.name, spec.help, labels=spec.labels)
            for label, value in values[spec.name].items():
                metric.add_metric([label] if spec.labels else [], value)
            yield metric


def _usage(writer: FrameWriter) -> Usage | None:
    try:
        return writer.usage()
    except TransportError:  # not known just now; every other metric is
        return None


# -- the process ------------------------------------------------------------------------------------------


def serve(resolved: ResolvedJob, index: int) -> None:
    """Serve rollout `index` of a resolved job until SIGTERM or SIGINT; the whole of a rollout process.

    Listens on the port of ``endpoints.rollout[index].url``, or on a free one of 127.0.0.1 that it publishes
    as ``<endpoints.directory>/<name>.json`` until it stops. Only the shape of ``spec.model.uri`` is read:
    weights come from the trainer. Raises InputError when the job asks for more than there is, and JobError
    when the model is not on this machine or the port is taken.
    """
    uri = resolved.job.spec.model.uri
    shape = model_shape(uri)
    if shape is None:
        raise JobError(
            Reason.MODEL_LOAD, f"spec.model.uri: {uri} is not on this machine; use file:// or builtin://"
        )
    torch.set_num_threads(resolved.job.spec.rollout.threads)
    asyncio.run(_serve(resolved, index, shape))


async def _serve(resolved: ResolvedJob, index: int, shape: ModelShape) -> None:
    endpoint = resolved.endpoints.rollout[index]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = RolloutServer(
        resolved.job,
        shape,
        job_uid=resolved.job_uid,
        token=resolved.token(),
        open_sink=partial(open_sink, resolved, endpoint.name),
    )
    http = HttpServer(server.application(), server.strangers)
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
            EndpointFile(url=url, pid=os.getpid(), instance_id=server.instance_id).publish(published)
        await stop.wait()
    finally:
        if published is not None:
            published.unlink(missing_ok=True)
        await asyncio.to_thread(server.stop)
        await http.close()
        await asyncio.to_thread(server.close)
