"""What SGLang loads in each of its processes: hooks that quantise, record, and replace weights as a whole.

`register` is the entry point ``sglang.srt.plugins: tracerl``. Outside a rollout it does nothing. SGLang logs
what a plugin raises and goes on; so the server waits for a hello that only a scheduler whose hooks all took
sends, and a scheduler that finds one missing ends itself.

Hooks run on the scheduler's thread. K and V are quantised before the attention layer sees them, so that the
tokens of the same pass attend quantised keys and values too, as the trainer's do. With ``prefillAttends:
Exact`` a prefill attends its own as they are, and they are stored quantised after that.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracerl.api.errors import InputError, JobError, first_line
from tracerl.api.job import NumericsBackend, PrefillAttends
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.capture import Captured, SiteCapture, held_sites
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.hf import read_tensors
from tracerl.engines.metrics import sink_state
from tracerl.engines.rollout_http import NOT_BEGUN
from tracerl.engines.sglang import native, seams
from tracerl.engines.sglang.channel import PluginEnd, socket_path
from tracerl.engines.sglang.experts import experts_forward
from tracerl.engines.sglang.native import NativeCapture
from tracerl.engines.sglang.ranks import any_rank, first_problem
from tracerl.engines.sglang.recorder import NO_VERSION, Recorder, SlotRows, Slots
from tracerl.engines.sglang.sampling import multinomial_with_seed
from tracerl.engines.sglang.weights import ModelWeights
from tracerl.methods import Treatment, plan
from tracerl.numerics import NonFiniteError
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import SiteKind, SiteTable, audit_table, site_table
from tracerl.transport.base import TransportError
from tracerl.transport.sources import open_sink

_log = logging.getLogger(__name__)

JOB_VARIABLE = "TRACERL_JOB"
"""Path of the resolved job."""
NAME_VARIABLE = "TRACERL_ROLLOUT"
"""Name of this rollout among the job's endpoints."""
RECORD = "tracerl_record"
"""Name of a request's parameter: false where nothing is recorded of it."""
_SCHEDULER = "sglang.srt.managers.scheduler"
# Record rows that wait for the writer; above it nothing new is admitted.
_WAITING_BYTES = 64 * 2**20


def register() -> None:
    """Hook SGLang in a process of a rollout; the entry point that SGLang calls."""
    path = socket_path()
    # The detokenizer computes nothing and imports little: hooks would only slow its start.
    if path is None or _SCHEDULER not in sys.modules:
        return
    seams.check_version()
    seams.check_seams(seams.HOOKED + seams.CALLED)
    resolved = ResolvedJob.read(Path(os.environ[JOB_VARIABLE]))
    Plugin(resolved, os.environ[NAME_VARIABLE], path).hook()


class Plugin:
    """The hooks of one process, and in a scheduler's process what they work with."""

    def __init__(self, resolved: ResolvedJob, name: str, socket: str) -> None:
        """Prepare; nothing is allocated or connected before a scheduler has its model."""
        self._resolved, self._name, self._socket = resolved, name, socket
        self._native = resolved.job.spec.rollout.numerics is NumericsBackend.NATIVE
        self._scheduler_side: _Scheduler | None = None
        self._expert_layer: int | None = None

    def hook(self) -> None:
        """Register all hooks with SGLang, which applies them when all plugins are loaded."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

        hooks: list[tuple[seams.Seam, Callable[..., Any], Any]] = [
            (seams.CAPTURER, self._after_capturer, HookType.AFTER),
            (seams.EXPERTS, self._around_experts, HookType.AROUND),
            (seams.ATTENTION, self._around_attention, HookType.AROUND),
            (seams.FORWARD_END, self._around_forward_end, HookType.AROUND),
            (seams.GATHER, self._after_gather, HookType.AFTER),
            (seams.RUN, self._before_run, HookType.BEFORE),
            (seams.PREFILLED, self._around_results, HookType.AROUND),
            (seams.DECODED, self._around_results, HookType.AROUND),
            (seams.COLLECT, self._after_collect, HookType.AFTER),
            (seams.RELEASE, self._before_release, HookType.BEFORE),
            (seams.PAUSE, self._around_pause, HookType.AROUND),
            (seams.ADMIT, self._around_admit, HookType.AROUND),
            (seams.FLUSH, self._after_flush, HookType.AFTER),
            (seams.BEGIN, self._around_begin, HookType.AROUND),
            (seams.FROM_DISK, self._around_from_disk, HookType.AROUND),
            (seams.FROM_DISTRIBUTED, self._around_from_distributed, HookType.AROUND),
            (seams.END, self._around_end, HookType.AROUND),
            (seams.FUSED_KV, _never, HookType.REPLACE),
        ]
        if not torch.cuda.is_available():
            hooks.append((seams.SEEDED, multinomial_with_seed, HookType.REPLACE))
        if self._native:
            hooks += [
                (native.EXPERT_CODES, self._after_expert_codes, HookType.AFTER),
                (native.KV_STORE, self._before_kv_store, HookType.BEFORE),
                (native.KV_CODES, self._after_kv_codes, HookType.AFTER),
            ]
        for seam, function, kind in hooks:
            HookRegistry.register(seam.target, function, kind)
        if not torch.cuda.is_available():
            _use_plain_host_memory()
            _pad_sequences()

    # -- the model is there -------------------------------------------------------------------------------

    def _after_capturer(self, _result: None, runner: Any) -> None:
        if runner.is_draft_worker:
            raise RuntimeError("speculative decoding cannot be recorded; turn it off")
        try:
            seams.check_hooks(seams.HOOKED)
            seams.check_hooks(() if torch.cuda.is_available() else (seams.SEEDED,))
            seams.check_hooks(native.HOOKED if self._native else ())
            _sample_by_seed(runner)
            self._scheduler_side = _Scheduler(self._resolved, self._name, self._socket, runner)
        except Exception as error:
            # SGLang ends a scheduler that raises here; the server says why.
            failure_file(self._socket).write_text(first_line(error), encoding="utf-8")
            raise

    # -- a forward pass -----------------------------------------------------------------------------------

    def _before_run(self, _scheduler: Any, batch: Any, *_args: Any, **_options: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.begin_pass(batch.reqs)

    def _after_gather(self, _result: None, batch: Any, _runner: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.gather(batch)

    def _around_experts(self, original: Callable[..., Any], layer: Any, dispatch_output: Any) -> Any:
        side = self._scheduler_side
        self._expert_layer = layer.layer_id
        if side is None or self._native:
            return original(layer, dispatch_output=dispatch_output)
        return side.experts(original, layer, dispatch_output)

    def _around_attention(
        self,
        original: Callable[..., Any],
        layer: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        side = self._scheduler_side
        if side is None or self._native or k is None or v is None:
            return original(layer, q, k, v, *args, **options)
        batch = args[0] if args else options["forward_batch"]
        stored = side.key_value(layer.layer_id, k, v)
        if not (side.exact_prefill and batch.forward_mode.is_extend()):
            return original(layer, q, *stored, *args, **options)
        out = original(layer, q, k, v, *args, **options)
        side.store_key_value(layer, batch, *stored)
        return out

    def _around_forward_end(
        self, original: Callable[..., Any], capturer: Any, *, forward_batch: Any, **options: Any
    ) -> Any:
        side = self._scheduler_side
        if side is None:
            return original(capturer, forward_batch=forward_batch, **options)
        return side.forward_end(capturer, forward_batch, **options)

    def _after_expert_codes(self, result: tuple[Tensor, Tensor], *_args: Any, **_options: Any) -> None:
        if self._scheduler_side is not None and self._expert_layer is not None:
            self._scheduler_side.native_capture.expert_input(self._expert_layer, *result)

    def _before_kv_store(self, _pool: Any, _layer: int, global_layer_id: int, *_: Any, **__: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.native_capture.begin_key_value(global_layer_id)

    def _after_kv_codes(self, result: tuple[Tensor, Tensor, Tensor], *_args: Any, **_options: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.native_capture.key_value(result[0], result[1])

    # -- requests -----------------------------------------------------------------------------------------

    def _around_results(self, original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
        side = self._scheduler_side
        if side is None:
            return original(processor, batch, result)
        requests = list(batch.reqs)
        before = [len(request.output_ids) for request in requests]
        answer = original(processor, batch, result)
        for request, count in zip(requests, before, strict=True):
            if len(request.output_ids) > count and not request.finished() and not request.is_retracted:
                side.grow(request, processor.req_to_token_pool)
        return answer

    def _after_collect(self, _result: None, processor: Any, req: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.finish(req, processor.req_to_token_pool)

    def _before_release(self, **options: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.retract(options["req"], options["req_to_token_pool"])

    def _around_pause(self, original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        if self._scheduler_side is not None:
            self._scheduler_side.pausing = True
        try:
            return original(scheduler, recv_req)
        finally:
            if self._scheduler_side is not None:
                self._scheduler_side.pausing = False

    def _around_admit(self, original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
        side = self._scheduler_side
        if side is None or not scheduler.waiting_queue or not side.full():
            return original(scheduler, running_batch)
        # What a scheduler has running goes on; nothing new is prefilled until the writer has caught up.
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return original(scheduler, running_batch)
        finally:
            scheduler.waiting_queue = waiting + scheduler.waiting_queue

    # -- weights ------------------------------------------------------------------------------------------

    def _after_flush(self, flushed: bool, _scheduler: Any, *_args: Any, **_options: Any) -> None:
        if flushed and self._scheduler_side is not None:
            self._scheduler_side.recorder.invalidate()

    def _around_begin(self, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        side = self._scheduler_side
        if side is None:
            return original(updater, recv_req)
        if updater._session is not None:  # a trainer may have died in the middle of an update
            _end_session(updater)
        side.update = _Update({}, None)
        return original(updater, recv_req)

    def _around_from_disk(self, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        side = self._scheduler_side
        if side is None:
            return original(updater, recv_req)
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput  # noqa: PLC0415

        problem = None if side.update is not None else NOT_BEGUN
        if side.update is not None:
            try:
                side.update.tensors |= read_tensors(Path(recv_req.model_path))
                side.update.version = recv_req.weight_version
            except InputError as error:
                problem = str(error)
        problem = first_problem(problem)
        return UpdateWeightFromDiskReqOutput(
            success=problem is None, message=problem or "Success", num_paused_requests=0
        )

    def _around_from_distributed(self, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        side = self._scheduler_side
        if side is None:
            return original(updater, recv_req)
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput  # noqa: PLC0415

        problem = None if side.update is not None else NOT_BEGUN
        if side.update is not None:
            try:
                received = updater.tp_worker.model_runner.weight_updater.receive_weights_from_distributed(
                    names=recv_req.names,
                    dtypes=recv_req.dtypes,
                    shapes=recv_req.shapes,
                    group_name=recv_req.group_name,
                )
                side.update.tensors |= dict(received)
                side.update.version = recv_req.weight_version
            except Exception as error:  # noqa: BLE001  torch raises several kinds when a peer is gone
                problem = f"the broadcast broke ({first_line(error)}); open the group again"
        problem = first_problem(problem)
        return UpdateWeightsFromDistributedReqOutput(success=problem is None, message=problem or "Success")

    def _around_end(self, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        side = self._scheduler_side
        if side is None or side.update is None or updater._session is None:
            return original(updater, recv_req)
        from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput  # noqa: PLC0415

        update, side.update = side.update, None
        problem = side.replace_weights(updater, update)
        if problem is None:
            return original(updater, recv_req)
        _end_session(updater)
        return EndWeightUpdateReqOutput(success=False, message=problem)


@dataclass
class _Update:
    """An open weight update: tensors by name, as they came, and the version that they are said to be."""

    tensors: dict[str, Tensor]
    version: str | None


@dataclass(frozen=True)
class _Gathered:
    """Which rows of a forward pass are whose, where DP attention brings those of all ranks to the experts.

    The others are padding: what it holds means nothing, may be NaN, and is thrown away.
    """

    own: slice
    others: Tensor
    """int64 [rows]"""

    @property
    def count(self) -> int:
        """Rows of this rank; they are the first where rows of other ranks are not."""
        rows: int = self.own.stop - self.own.start
        return rows


class _Output:
    """Rows of a forward pass on their way to the host, with what SGLang itself copies there.

    SGLang calls `map_device_tensors` on its copy stream, and `finalize` when the copies are done.
    """

    def __init__(self, slots: Tensor, captured: list[Captured], finalize: Callable[..., None]) -> None:
        self._slots, self._captured, self._finalize = slots, captured, finalize

    def map_device_tensors(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Start to copy."""
        self._slots = copy(self._slots)
        self._captured = [Captured(copy(one.rows), one.zero_blocks) for one in self._captured]

    def finalize(self) -> None:
        """Store what was copied."""
        self._finalize(self._slots, self._captured)


class _Scheduler:
    """Everything in one scheduler process: capture, rows, frames, weights, and the channel to the server."""

    def __init__(self, resolved: ResolvedJob, name: str, socket: str, runner: Any) -> None:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX  # noqa: PLC0415
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: PLC0415
        from sglang.srt.runtime_context import get_parallel, get_serving  # noqa: PLC0415

        spec = resolved.job.spec
        shape = model_shape(spec.model.uri)
        assert shape is not None, "the server read it before it started SGLang"
        check_model(shape, runner.model_config.hf_text_config)
        self._resolved, self._name = resolved, name
        self._serving, self._health_prefix = get_serving, HEALTH_CHECK_RID_PREFIX
        self._runner, self._expert_width = runner, shape.expert_hidden
        self._rank, self._ranks = get_parallel().tp_rank, get_parallel().tp_size
        self._part, self._parts = get_parallel().attn_tp_rank, get_parallel().attn_tp_size
        self._gathered: _Gathered | None = None
        method = plan(spec, shape)
        table = site_table(shape, spec)
        self._audit = self._audit_table(shape, resolved)
        tables = [table] if self._audit is None else [table, self._audit]
        held = [held_sites(one, self._part, self._parts) for one in tables]
        self._capture: SiteCapture | NativeCapture
        if spec.rollout.numerics is NumericsBackend.NATIVE:
            rows = max(runner.server_args.chunked_prefill_size, runner.max_running_requests)
            self._capture = NativeCapture(held[0], rows, runner.device)
            native.check_input_scales([m for m in runner.model.modules() if isinstance(m, FusedMoE)])
        else:
            self._capture = SiteCapture(
                shape.layers,
                method,
                spec.quantization,
                table,
                self._audit,
                part=self._part,
                parts=self._parts,
            )
        self._recording = True
        self.exact_prefill = (
            spec.quantization.prefill_attends is PrefillAttends.EXACT
            and method.site(shape.full_attention_layers[0], SiteKind.KEY).rollout is not Treatment.UNQUANTIZED
        )
        self._first_attention = shape.full_attention_layers[0]
        self._routed = [
            site.layer for site in table.sites if site.kind is SiteKind.ROUTES and self._part == 0
        ]
        self._writer = FrameWriter(
            limit_bytes=_WAITING_BYTES, deadline_seconds=spec.transport.deadline_seconds
        )
        self._pool = runner.token_to_kv_pool_allocator
        slots = runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size
        self.recorder = Recorder(
            [SlotRows(one, sites, slots) for one, sites in zip(tables, held, strict=True)],
            self._writer,
            reprefill=spec.records.reprefill,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=spec.records.audit_every,
            instance=uuid.uuid4().hex,
            finished=self._finished,
        )
        self._weights = ModelWeights(shape, method, spec.quantization, FusedMoE)
        self.update: _Update | None = None
        self.pausing = False
        self._stalls = 0
        self._expert_hash: str | None = None
        self._broken = self._failing = False
        self._counted = (0.0, 0.0)
        self._activation: Callable[[Tensor], Tensor] | None = None
        self._channel = PluginEnd(socket)
        self._channel.answer(
            {
                "direct": self._direct,
                "new_run": self._new_run,
                "forget": self._forget,
                "stats": self._stats,
                "close": self._close,
            }
        )
        self._channel.send(
            {
                "hello": {
                    "rank": self._rank,
                    "ranks": self._ranks,
                    "table": table.digest,
                    "slots": slots,
                    "bytes": self.recorder.bytes,
                }
            }
        )

    @staticmethod
    def _audit_table(shape: ModelShape, resolved: ResolvedJob) -> SiteTable | None:
        spec = resolved.job.spec
        if not spec.records.audit_every:
            return None
        table = audit_table(shape, spec)
        return table if table.sites else None

    # -- a forward pass -----------------------------------------------------------------------------------

    @property
    def native_capture(self) -> NativeCapture:
        """The capture, in a rollout of the Native back end."""
        assert isinstance(self._capture, NativeCapture), "its hooks are registered for that back end alone"
        return self._capture

    @property
    def _emulated(self) -> SiteCapture:
        assert isinstance(self._capture, SiteCapture), "the Native back end quantises in SGLang's kernels"
        return self._capture

    def begin_pass(self, requests: Sequence[Any]) -> None:
        """Say whose rows the next forward pass computes: those of requests without records are not kept."""
        self._gathered = None
        if isinstance(self._capture, NativeCapture):
            return
        self._recording = any(self._recorded(request) for request in requests)
        audited = slice(None) if self._audit is not None and self._recording else None
        self._capture.begin(audited, recording=self._recording)

    def gather(self, batch: Any) -> None:
        """Say where the rows of the pass lie among those of all ranks, each rank's padded as SGLang says."""
        from sglang.srt.layers.dp_attention import dp_slot_in  # noqa: PLC0415

        counts, padded = batch.original_global_num_tokens_cpu, batch.global_num_tokens_cpu
        starts = itertools.accumulate(padded, initial=0)
        rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        own = rows.pop(dp_slot_in(counts))
        self._gathered = _Gathered(own, torch.cat([torch.arange(one.start, one.stop) for one in rows]))

    def _of_all_ranks(
        self, kind: SiteKind, layer: int, record: Callable[[int, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Quantise what the experts are given: rows that are this rank's own are recorded as well."""
        if self._gathered is None:
            return record(layer, x)
        out, own, others = x.clone(), self._gathered.own, self._gathered.others.to(x.device)
        if self._gathered.count:
            out[own] = record(layer, x[own])
        if len(others):
            out[others] = self._emulated.round(layer, kind, x[others])
        return out

    def experts(self, original: Callable[..., Any], layer: Any, dispatch_output: Any) -> Any:
        """Compute the routed experts on their quantised input, and quantise the second one where wanted."""
        x: Tensor = dispatch_output.hidden_states
        capture, number = self._emulated, layer.layer_id
        x = self._finite(
            lambda x: self._of_all_ranks(SiteKind.EXPERT_INPUT, number, capture.expert_input, x), x
        )
        dispatch_output = dispatch_output._replace(hidden_states=x)
        if not capture.rounds_fc2:
            return original(layer, dispatch_output=dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput  # noqa: PLC0415

        weights, ids, _ = dispatch_output.topk_output
        if self._activation is None:
            from sglang.srt.layers.activation import SiluAndMul  # noqa: PLC0415

            self._activation = SiluAndMul()

        def second_input(x: Tensor) -> Tensor:
            return self._finite(
                lambda x: self._of_all_ranks(SiteKind.FC2_INPUT, number, capture.fc2_input, x), x
            )

        out = experts_forward(
            layer,
            x,
            weights,
            ids,
            width=self._expert_width // layer.moe_tp_size,
            activation=self._activation,
            second_input=second_input,
        )
        return StandardCombineInput(hidden_states=out)

    def key_value(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise keys after norm and rotation, and values."""
        rows = k.shape[0] if self._gathered is None else self._gathered.count
        if rows == 0:
            return k, v
        try:
            out = self._emulated.key_value(layer, k[:rows].reshape(rows, -1), v[:rows].reshape(rows, -1))
        except NonFiniteError as error:
            self._break(error)
            return k, v
        out_k, out_v = (
            torch.cat([part.reshape(whole[:rows].shape), whole[rows:]])
            for part, whole in zip(out, (k, v), strict=True)
        )
        return out_k, out_v

    def store_key_value(self, layer: Any, batch: Any, k: Tensor, v: Tensor) -> None:
        """Put quantised keys and values where a prefill has just stored, and attended, exact ones."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: PLC0415

        rows = k.shape[0]
        self._runner.token_to_kv_pool.set_kv_buffer(
            layer,
            KVWriteLoc.for_batch(batch),
            k.reshape(rows, layer.tp_k_head_num, -1),
            v.reshape(rows, layer.tp_v_head_num, -1),
        )

    def _finite(self, treat: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        try:
            return treat(x)
        except NonFiniteError as error:
            self._break(error)
            return x

    def _break(self, error: JobError) -> None:
        """Tell the server, once, that nothing that is generated counts any more."""
        if not self._broken:
            self._channel.send({"broken": {"reason": error.reason, "message": str(error)}})
        self._broken = True

    def forward_end(
        self,
        capturer: Any,
        batch: Any,
        *,
        can_run_graph: bool,
        cuda_graph_batch: int | None,
        no_copy_to_cpu: bool = False,
    ) -> _Output | None:
        """Pack the rows of a pass; SGLang copies them to the host, or they are stored now."""
        slots = batch.out_cache_loc_virtual
        if slots is None:
            slots = batch.out_cache_loc
        rows = slots.shape[0] if self._gathered is None else self._gathered.count
        slots = slots[:rows]
        if not self._recording:
            self.recorder.leave_out(slots.cpu().numpy().astype(np.int64))
            return None
        version = self._version()
        if self._routed:
            ids = capturer._get_local_slice(batch, can_run_graph, cuda_graph_batch)[:rows]
            for layer in self._routed:
                self._capture.routes(layer, ids[:, layer].clone())
        if self.exact_prefill:
            self._emulated.exact_from(self._first_attention, _exact_from(batch)[:rows])
        captured: list[Captured] | None = None
        if rows:
            try:
                record, audit = self._capture.finish(rows)
                captured = [record.arrived()] if audit is None else [record.arrived(), audit]
            except Exception:  # noqa: BLE001  these rows are missing; what is generated is as it is
                if not self._failing:  # one traceback for a fault that lasts
                    _log.exception("a forward pass of %d rows cannot be recorded", rows)
                self._failing = True
                self._capture.reset()
        took = self._capture.capture_seconds, self._capture.pack_seconds
        capture, pack = took[0] - self._counted[0], took[1] - self._counted[1]
        self._counted = took

        def finalize(slots: Tensor, captured: list[Captured]) -> None:
            started = time.thread_time()
            places = slots.numpy().astype(np.int64)
            if isinstance(self._capture, NativeCapture):
                captured = [self._capture.complete(one) for one in captured]
            stored = (capture + time.thread_time() - started, pack)
            self.recorder.store(places, captured, version, stored)

        if captured is None or version == NO_VERSION or self._broken:
            self.recorder.lose(slots.cpu().numpy().astype(np.int64))
            return None
        output = _Output(slots.clone(), captured, finalize)
        if no_copy_to_cpu:
            return output
        output.map_device_tensors(lambda tensor: tensor.cpu())
        output.finalize()
        return None

    def _version(self) -> int:
        version = self._serving().weight_version
        return int(version) if isinstance(version, str) and version.isdecimal() else NO_VERSION

    # -- requests -----------------------------------------------------------------------------------------

    def _recorded(self, request: Any) -> bool:
        custom = request.sampling_params.custom_params or {}
        return not request.rid.startswith(self._health_prefix) and custom.get(RECORD, True)

    def grow(self, request: Any, pool: Any) -> None:
        """Hand in what a request has more."""
        if self._recorded(request):
            tokens = len(request.origin_input_ids) + len(request.output_ids)
            self.recorder.grow(
                request.rid,
                tokens,
                _slots_of(request, pool),
                self._version(),
                prompt=len(request.origin_input_ids),
            )

    def finish(self, request: Any, pool: Any) -> None:
        """Hand in the rest of a request, or forget what was aborted."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415

        if not self._recorded(request):
            return
        if isinstance(request.finished_reason, FINISH_ABORT):
            self.recorder.forget(request.rid)
            return
        tokens = len(request.origin_input_ids) + len(request.output_ids_through_stop)
        self.recorder.finish(
            request.rid,
            tokens,
            _slots_of(request, pool),
            self._version(),
            prompt=len(request.origin_input_ids),
        )

    def retract(self, request: Any, pool: Any) -> None:
        """Save the rows of a request that loses its slots."""
        if not self._recorded(request) or request.finished():
            return
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        cause = "weights" if self.pausing else "memory"
        self.recorder.retract(request.rid, tokens, _slots_of(request, pool), cause)

    def full(self) -> bool:
        """Tell whether so much waits to be written that nothing new should be generated."""
        if not any_rank(self._writer.full):
            return False
        self._stalls += 1
        return True

    def _finished(self, id: str, entries: list[RecordEntry], seconds: dict[str, float]) -> None:
        self._channel.send(
            {
                "finished": id,
                "entries": [entry.to_json() for entry in entries],
                "seconds": seconds,
            }
        )

    # -- weights ------------------------------------------------------------------------------------------

    def replace_weights(self, updater: Any, update: _Update) -> str | None:
        """Give the model the tensors of an update, or say why not and leave it as it is."""
        from msgspec import structs  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

        model, problem = self._runner.model, None
        try:
            self._weights.load(model, update.tensors)
        except InputError as error:
            problem = str(error)
        problem = first_problem(problem)
        if problem is not None:
            return problem
        self._expert_hash = self._weights.quantise_experts(model)
        updater._session = structs.replace(updater._session, loaded_weights=True)
        updater.record_weight_version_after_update(update.version)
        if not updater.flush_cache(empty_cache=True):
            problem = "requests are still running or queued, so that old keys and values stay; pause first"
        self.recorder.invalidate()
        return first_problem(problem)

    # -- what the server asks -----------------------------------------------------------------------------

    def _direct(self, run: str) -> None:
        try:
            sink = open_sink(self._resolved, self._name, run)
        except (InputError, TransportError) as error:
            raise RuntimeError(str(error)) from None
        self._writer.direct(
            Destination(sink, self._resolved.job_uid, run, part=self._part, parts=self._parts)
        )

    def _new_run(self) -> None:
        self.recorder.new_run()

    def _forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.recorder.forget(id)

    def _stats(self) -> dict[str, Any]:
        stats = self.recorder.stats
        return {
            "part": self._part,
            "retracted": stats.retracted,
            "reprefilled_rows": stats.reprefilled_rows,
            "unrecorded_rows": stats.unrecorded_rows,
            "stalls": self._stalls,
            "kv_tokens": self._pool.size - self._pool.available_size(),
            "written": self._writer.written_bytes,
            "dropped": self._writer.dropped,
            "sink": sink_state(self._writer),
            "expert_hash": self._expert_hash,
        }

    def _close(self) -> None:
        self._writer.close()


def _sample_by_seed(runner: Any) -> None:
    """Let a request's seed and a token's position alone decide what is drawn, whatever runs beside it.

    That is a part of what SGLang calls deterministic inference, which it allows with few attention back ends;
    log-probs then come from log_softmax as well.
    """
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415

    get_context().override("tracerl.sampling", enable_deterministic_inference=True)
    runner.sampler.enable_deterministic = True


def failure_file(socket: str) -> Path:
    """Where a scheduler that cannot start says why."""
    return Path(socket).with_name("failure")


def check_model(shape: ModelShape, config: Any) -> None:
    """Raise RuntimeError when the model that SGLang loaded is not of the job's shape."""
    found = {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
    }
    for name, value in found.items():
        if getattr(shape, name) != value:
            raise RuntimeError(f"SGLang loaded a model with {name} {value}, not {getattr(shape, name)}")


def _slots_of(request: Any, pool: Any) -> Callable[[int], Slots]:
    """Give what reads the slots of a request's first tokens."""

    def slots_of(rows: int) -> Slots:
        slots: Slots = pool.req_to_token[request.kv.req_pool_idx][:rows].cpu().numpy().astype(np.int64)
        return slots

    return slots_of


def _exact_from(batch: Any) -> Tensor:
    """First position that each row of a pass attends exactly, int64 [rows]; the one behind it if none is.

    A prefill computes the keys and values from the end of the cached prefix on itself. A decoded token's are
    stored before it attends, its own among them.
    """
    if batch.forward_mode.is_extend():
        starts: Tensor = batch.extend_prefix_lens.repeat_interleave(batch.extend_seq_lens)
        return starts.long()
    after: Tensor = batch.positions + 1
    return after.long()


def _end_session(updater: Any) -> None:
    """Close SGLang's update session without loading anything."""
    for _, runner in updater._select_runners(updater._session.selector):
        runner.weight_updater.end_weight_update(run_post_load=False)
    updater._session = None


def _never(*_args: Any, **_options: Any) -> bool:
    """Say no: a fused kernel that writes K and V into the cache would write them unquantised."""
    return False


def _pad_sequences() -> None:
    """Let SGLang's attention in plain torch say how long padding is, as its attention for AMX does.

    DP attention asks for it on CPUs, also without graphs.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: PLC0415

    backend: Any = TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda _self: 1


def _use_plain_host_memory() -> None:
    """Let SGLang's capturer allocate plain memory: without a GPU there is nobody to pin it for."""
    from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415

    def allocate(size: Any, dtype: torch.dtype, **_options: Any) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
