"""The reference rollout: model, scheduler and frame writer of one process, behind `rollout_http`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from aiohttp import web
from torch import Tensor

from tracerl.api.constants import Reason, Role
from tracerl.api.errors import InputError, JobError, first_line
from tracerl.api.job import DType, TraceRLJob
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.device import device_of
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.hf import read_tensors
from tracerl.engines.metrics import sink_state, sink_values
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.scheduler import Request, Scheduler
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.engines.rollout_http import (
    NOT_BEGUN,
    Ask,
    Broken,
    Finished,
    RolloutFront,
    Shipment,
    WeightMeeting,
    no_group,
    no_meeting,
    other_version,
    serve_until_stopped,
)
from tracerl.engines.weight_group import DTYPES, WeightGroup
from tracerl.methods import plan
from tracerl.records.sites import audit_table, site_table
from tracerl.transport.base import FrameSink, TransportError
from tracerl.transport.exposition import Values, exposition
from tracerl.transport.sources import open_sink

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Record rows that wait for the writer; above it nothing new is admitted.
_WAITING_BYTES = 64 * 2**20
_GROUP_SECONDS = 300.0


@dataclass
class _Update:
    """An open weight update: tensors by name, as they came, and the version that they are said to be."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int | None = None


class RolloutServer:
    """One rollout process: the backend of its `front`."""

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
        self._job_uid, self._open_sink = job_uid, open_sink
        method = plan(spec, shape)
        table = site_table(shape, spec)
        self.front = RolloutFront(
            self,
            engine="reference",
            token=token,
            table_digest=table.digest,
            model_uri=spec.model.uri,
            vocab=shape.vocab,
        )
        audit = audit_table(shape, spec) if spec.records.audit_every else None
        tables = [table] + ([audit] if audit is not None and audit.sites else [])
        slots = min(spec.rollout.max_running_requests, spec.rollout.kv_cache_tokens)
        # No longer than the job can ask for: sequences that lie close together are read and written faster.
        wanted = spec.algorithm.max_prompt_tokens + spec.algorithm.max_response_tokens
        capacity = min(wanted, shape.context, spec.rollout.kv_cache_tokens)
        dtype = torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32
        device = device_of(spec.rollout.gpus_per_node, "spec.rollout.gpusPerNode")
        try:
            model = MoEModel(shape, dtype, device)
            # FP32 holds every BF16 value, and spares a conversion of all that is attended in each step.
            cache = KVCache(shape, slots=slots, capacity=capacity, dtype=torch.float32, device=device)
            buffers = [
                RowBuffer(table, slots=slots, capacity=capacity, reprefill=spec.records.reprefill)
                for table in tables
            ]
        except RuntimeError as error:
            raise InputError(
                f"there is no memory for the model and {slots} sequences of {capacity} tokens "
                f"({first_line(error)}); lower spec.rollout.maxRunningRequests or kvCacheTokens"
            ) from None
        hooks = CaptureHooks(
            shape,
            method,
            spec.quantization,
            table,
            tables[1] if len(tables) > 1 else None,
            device=device,
            rows=slots,
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
            instance=self.front.instance_id,
            kv_tokens=spec.rollout.kv_cache_tokens,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=spec.records.audit_every if len(tables) > 1 else 0,
        )
        self.run_id: str | None = None
        """The run that is served."""
        self._update: _Update | None = None
        self._groups: dict[str, WeightGroup] = {}

    @property
    def instance_id(self) -> str:
        """Random id of this server."""
        return self.front.instance_id

    def application(self) -> web.Application:
        """Make the application; it may be served once."""
        return self.front.application()

    def stop(self) -> None:
        """Answer what runs with an error and end the scheduler; blocks for at most one step."""
        self._scheduler.stop()

    def close(self) -> None:
        """Write the frames that wait, as far as there is room, and end the writer."""
        self._writer.close()

    # -- what the front asks ------------------------------------------------------------------------------

    @property
    def failure(self) -> Broken | None:
        """Why nothing will be generated again."""
        return self._scheduler.failure

    @property
    def version(self) -> int | None:
        """Version of the weights; None before version 0."""
        return self._scheduler.version

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request."""
        return self._scheduler.max_tokens

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        return self._scheduler.running

    async def generate(self, asks: Sequence[Ask]) -> list[Finished] | Broken:
        """Generate; when cancelled, abort and forget what was recorded."""
        waiting = _Waiting(asyncio.get_running_loop(), len(asks))
        requests = [
            Request(
                id=ask.id,
                prompt=ask.prompt,
                max_new_tokens=ask.max_new_tokens,
                temperature=ask.temperature,
                seed=secrets.randbits(64) if ask.seed is None else ask.seed,
                stop_token_ids=ask.stop_token_ids,
                deliver=partial(waiting.take, index),
                recorded=ask.record,
            )
            for index, ask in enumerate(asks)
        ]
        try:
            self._scheduler.submit(requests)
            outcomes = await waiting.future
        except asyncio.CancelledError:
            # The client is gone: nobody waits for these tokens, and nobody will release their frames.
            self._scheduler.abort([ask.id for ask in asks], deliver=False)
            self._forget(requests)
            raise
        if isinstance(outcomes, Broken):
            self._forget(requests)
        return outcomes

    def _forget(self, requests: Sequence[Request]) -> None:
        """Release what was recorded about requests whose answer does not arrive, also of finished ones."""

        # After what the scheduler was asked before: by then it hands in no more frames of them.
        def forget() -> None:
            for request in requests:
                self._writer.forget(request.frames)

        self._scheduler.call(forget)

    def abort(self, ids: Sequence[str] | None) -> None:
        """End requests (None: all), which are answered with what they have."""
        self._scheduler.abort(ids, deliver=True)

    async def pause(self, *, abort: bool) -> None:
        """Stop generating after the current step."""
        await self._between_steps(lambda: self._scheduler.pause(abort=abort))

    async def resume(self) -> None:
        """Go on."""
        await self._between_steps(self._scheduler.resume)

    async def flush(self) -> str | None:
        """Do nothing: there is no prefix cache, so what a flush promises holds as soon as nothing runs."""
        return None

    async def begin_update(self, run: str) -> str | None:
        """Open an update by a run; of another than before, everything of that one is forgotten."""
        if run != self.run_id:
            try:
                sink = await asyncio.to_thread(self._open_sink, run)
            except (InputError, TransportError) as error:
                return str(error)
            await self._between_steps(self._scheduler.new_run)
            self._writer.direct(Destination(sink, self._job_uid, run))
            self.run_id = run
            _log.info("serving run %s from now on", run)
        problem = await self._between_steps(self._scheduler.begin_update)
        if problem is None:
            self._update = _Update()
        return problem

    async def load_from_disk(self, directory: Path, version: int | None) -> str | None:
        """Read tensors into the open update."""
        if self._update is None:
            return NOT_BEGUN
        update = self._update
        update.version = version
        try:
            update.tensors |= await _in_thread(lambda: read_tensors(directory))
        except InputError as error:
            return str(error)
        return None

    async def join_group(self, meeting: WeightMeeting) -> str | None:
        """Join a weight group."""

        def join() -> str | None:
            try:
                group = WeightGroup(
                    meeting.address,
                    meeting.port,
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    name=meeting.name,
                    timeout_seconds=_GROUP_SECONDS,
                )
                group.join()
            except RuntimeError as error:
                return no_meeting(meeting, str(error))
            self._groups[meeting.name] = group
            return None

        return await _in_thread(join)

    async def receive(self, shipment: Shipment, version: int | None) -> str | None:
        """Receive tensors into the open update."""
        if self._update is None:
            return NOT_BEGUN
        group = self._groups.get(shipment.group)
        if group is None:
            return no_group(shipment.group)
        update = self._update
        update.version = version

        def receive() -> str | None:
            # All of them, even those that nobody asked for: the sender waits for every receiver.
            for name, dtype, shape in zip(shipment.names, shipment.dtypes, shipment.shapes, strict=True):
                tensor = torch.empty(shape, dtype=DTYPES[dtype])
                try:
                    group.broadcast(tensor)
                except RuntimeError as error:
                    return f"the broadcast of {name} broke ({first_line(error)}); open the group again"
                update.tensors[name] = tensor
            return None

        return await _in_thread(receive)

    async def end_update(self, version: int) -> str | None:
        """Compute with the tensors of the open update as `version`."""
        if self._update is None:
            return NOT_BEGUN
        update = self._update
        if update.version not in {None, version}:
            return other_version(update.version or 0, version)
        try:
            await self._between_steps(
                lambda: self._scheduler.end_update(lambda: self._weights.load(update.tensors), version)
            )
        except InputError as error:
            return str(error)
        self._update = None
        return None

    async def _between_steps(self, function: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._scheduler.call(function))

    def details(self) -> dict[str, Any]:
        """What passes took of the GPU so far."""
        return {"gpuSeconds": self._scheduler.gpu_seconds}

    def metrics(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return exposition(Role.ROLLOUT, _values(self._scheduler, self._writer))


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


def _values(scheduler: Scheduler, writer: FrameWriter) -> Values:
    """Read what `tracerl.api.constants.METRICS` lists for a rollout."""
    stats = scheduler.stats
    return {
        **sink_values(sink_state(writer), writer.dropped),
        "tracerl_records_written_bytes_total": dict(writer.written_bytes),
        "tracerl_generated_tokens_total": {"": stats.generated_tokens},
        "tracerl_rollout_running_requests": {"": scheduler.running},
        "tracerl_rollout_queued_requests": {"": scheduler.queued},
        "tracerl_rollout_kv_cache_tokens": {"": scheduler.cached_tokens},
        "tracerl_rollout_retracted_total": dict(stats.retracted),
        "tracerl_rollout_reprefilled_rows_total": dict(stats.reprefilled_rows),
        "tracerl_rollout_admission_stalls_total": {"": stats.admission_stalls},
        "tracerl_rollout_weight_version": {} if scheduler.version is None else {"": scheduler.version},
    }


# -- the process ------------------------------------------------------------------------------------------


def serve(resolved: ResolvedJob, index: int) -> None:
    """Serve rollout `index` of a resolved job until SIGTERM or SIGINT; the whole of a rollout process.

    Only the shape of ``spec.model.uri`` is read: weights come from the trainer. Raises InputError when the
    job asks for more than there is, and JobError when the model is not on this machine or the port is taken.
    """
    uri = resolved.job.spec.model.uri
    shape = model_shape(uri)
    if shape is None:
        raise JobError(
            Reason.MODEL_LOAD, f"spec.model.uri: {uri} is not on this machine; use file:// or builtin://"
        )
    torch.set_num_threads(resolved.job.spec.rollout.threads)
    server = RolloutServer(
        resolved.job,
        shape,
        job_uid=resolved.job_uid,
        token=resolved.token(),
        open_sink=partial(open_sink, resolved, resolved.endpoints.rollout[index].name),
    )
    asyncio.run(serve_until_stopped(resolved, index, server))
