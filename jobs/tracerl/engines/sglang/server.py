"""SGLang behind `rollout_http`: the engine's processes, and what became of requests' records in them.

The front, the tokenizer manager and this module share one event loop; schedulers are SGLang's own processes,
in which `plugin` records. An answer is complete when every scheduler said that its frames can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tracerl.api.constants import Reason, Role
from tracerl.api.errors import InputError, JobError, first_line
from tracerl.api.job import NumericsBackend, Rollout
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.metrics import sink_values
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
    still_running,
)
from tracerl.engines.sglang.channel import SOCKET_VARIABLE, PluginError, ServerEnd
from tracerl.engines.sglang.plugin import JOB_VARIABLE, NAME_VARIABLE, RECORD, failure_file
from tracerl.engines.sglang.seams import CALLED, HOOKED, check_seams, check_version
from tracerl.engines.sglang.settings import engine_arguments
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import site_table

if TYPE_CHECKING:
    # prometheus_client looks for the directory of `_prepare_environment` when it is imported.
    from tracerl.transport.exposition import Values

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_HELLO_SECONDS = 30.0
"""For what schedulers sent before they said that they are ready."""
_ABORTED = {"type": "abort", "message": "the request was aborted"}


class _Update:
    """An open weight update."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.resume = False
        """Whether generation is to go on when it ends."""


class SGLangServer:
    """One rollout: the backend of its `front`."""

    def __init__(self, resolved: ResolvedJob, index: int, shape: ModelShape, directory: Path) -> None:
        """Start SGLang's processes, which takes a minute or two; `directory` is this server's own."""
        spec = resolved.job.spec
        self._table = site_table(shape, spec)
        self.front = RolloutFront(
            self,
            engine="sglang",
            token=resolved.token(),
            table_digest=self._table.digest,
            model_uri=spec.model.uri,
            vocab=shape.vocab,
        )
        wanted = spec.algorithm.max_prompt_tokens + spec.algorithm.max_response_tokens
        sizes = spec.rollout.parallelism
        self.max_tokens = min(wanted, shape.context, spec.rollout.kv_cache_tokens // sizes.data)
        self.run_id: str | None = None
        self.version: int | None = None
        self.failure: Broken | None = None
        self._ranks, self._parts = sizes.ranks, sizes.tensor
        self._native = spec.rollout.numerics is NumericsBackend.NATIVE
        self._active: set[str] = set()
        self._paused = False
        self._update: _Update | None = None
        self._may_generate = asyncio.Event()
        self._may_generate.set()
        self._groups: set[str] = set()
        self._records: dict[str, _Records] = {}
        self._generated = 0
        self._expert_hash: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel = ServerEnd(directory / "recorder")
        self._channel.on_message = self._take
        # As SGLang does when one of its processes ends; it does not watch those of a unit.
        self._channel.on_lost = lambda: os.kill(os.getpid(), signal.SIGQUIT)
        os.environ[SOCKET_VARIABLE] = str(directory / "recorder")
        os.environ[JOB_VARIABLE] = str(directory / "job.yaml")
        os.environ[NAME_VARIABLE] = resolved.endpoints.rollout[index].name
        os.environ["SGLANG_PLUGINS"] = "tracerl"
        resolved.write(directory / "job.yaml")
        arguments = engine_arguments(spec, shape, directory / "model")
        from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415
        from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

        try:
            self._engine = Engine(custom_sigquit_handler=_child_failed, **arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            kill_process_tree(os.getpid(), include_parent=False)
            raise JobError(
                Reason.ROLLOUT_FAILED,
                f"SGLang did not start ({first_line(error)}); see the rollout's log",
            ) from error
        self._manager = self._engine.tokenizer_manager

    async def start(self) -> None:
        """Join SGLang's side to this event loop; JobError when the hooks did not take in every scheduler."""
        self._loop = asyncio.get_running_loop()
        await self._channel.start()
        if not await self._channel.wait_for_hellos(self._ranks, _HELLO_SECONDS):
            raise JobError(
                Reason.ROLLOUT_FAILED,
                f"{len(self._channel.hellos)} of {self._ranks} SGLang schedulers loaded the plugin tracerl, "
                "so that nothing would be recorded; install tracerl with its entry points in SGLang's "
                "environment, and see the rollout's log",
            )
        for hello in self._channel.hellos:
            if hello["table"] != self._table.digest:
                raise JobError(Reason.SITE_TABLE_MISMATCH, "the plugin has another version of tracerl")
            _log.info(
                "SGLang scheduler %d of %d records %d KV slots in %.1f MiB of host memory",
                hello["rank"] + 1,
                hello["ranks"],
                hello["slots"],
                hello["bytes"] / 2**20,
            )
        self._manager.auto_create_handle_loop()

    def stop(self) -> None:
        """Answer what runs with an error, and write the frames that wait."""
        loop = self._loop
        if loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result()

    async def _stop(self) -> None:
        self._fail(Broken(Reason.INTERRUPTED, "the rollout is being stopped"))
        try:
            async with asyncio.timeout(5):
                await self._channel.call("close")
        except (PluginError, TimeoutError, OSError) as error:
            _log.warning("the recorders were not closed (%s)", error)

    def close(self) -> None:
        """End SGLang's processes."""
        self._channel.close()
        children = [process.pid for process in _processes()]
        self._engine.shutdown()
        # Who would have removed what ranks share was killed with them.
        for pid in children:
            for path in Path("/dev/shm").glob(f"sgl_shm_mq_{pid}_*"):  # noqa: S108
                path.unlink(missing_ok=True)

    # -- what schedulers say ------------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        if "broken" in message:
            self._fail(Broken(message["broken"]["reason"], message["broken"]["message"]))
            return
        records = self._records.get(message["finished"])
        if records is None:  # nobody waits for it any more
            self._tell("forget", ids=[message["finished"]])
            return
        records.add(message)

    def _tell(self, method: str, **arguments: Any) -> None:
        """Let schedulers do something without waiting for it."""
        task = asyncio.ensure_future(self._channel.call(method, **arguments))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _fail(self, broken: Broken) -> None:
        self.failure = self.failure or broken
        for records in self._records.values():
            records.done.set()
        self._manager.abort_request(abort_all=True)

    # -- generation ---------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that SGLang is generating."""
        return 0 if self._paused else len(self._active)

    async def generate(self, asks: Sequence[Ask]) -> list[Finished] | Broken:
        """Generate; when cancelled, abort and forget what was recorded."""
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        await self._may_generate.wait()
        ids = [ask.id for ask in asks]
        request = GenerateReqInput(
            rid=ids,
            input_ids=[ask.prompt for ask in asks],
            sampling_params=[_sampling(ask, record=self._records_of(ask)) for ask in asks],
            return_logprob=True,
            # Who records takes no prefix from the cache that was computed without records.
            extra_key=["" if self._records_of(ask) else RECORD for ask in asks],
        )
        self._records.update({id: _Records(self._parts) for id in ids})
        self._active.update(ids)
        try:
            answers: list[dict[str, Any]] = []
            async for answer in self._manager.generate_request(request, None):
                answers = answer
            self._active.difference_update(ids)
            finished = [await self._finished(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
        except asyncio.CancelledError:
            # The client is gone: nobody waits for these tokens, and nobody will release their frames.
            for id in ids:
                self._manager.abort_request(rid=id)
            self._tell("forget", ids=ids)
            raise
        finally:
            self._active.difference_update(ids)
            for id in ids:
                self._records.pop(id, None)
        if self.failure is not None:
            self._tell("forget", ids=ids)
            return self.failure
        self._generated += sum(len(one.tokens) for one in finished)
        return finished

    async def _finished(self, ask: Ask, answer: Mapping[str, Any]) -> Finished:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX  # noqa: PLC0415

        meta = answer["meta_info"]
        reason = meta["finish_reason"] or _ABORTED
        pairs = meta.get("output_token_logprobs") or []
        tokens = [int(pair[1]) for pair in pairs]
        if reason["type"] == "abort":
            self._tell("forget", ids=[ask.id])
            spans = _spans(meta, len(tokens))
            return Finished(tokens, [float(pair[0]) for pair in pairs], dict(_ABORTED), spans, [], {})
        logp = [float(pair[0]) for pair in pairs]
        if not all(math.isfinite(value) for value in logp):
            message = "logits hold NaN or Inf; check the model's weights, or lower the learning rate"
            self._fail(Broken(Reason.NON_FINITE, message))
        records = self._records[ask.id]
        # Nothing is recorded of health checks.
        if self._records_of(ask) and not ask.id.startswith(HEALTH_CHECK_RID_PREFIX):
            await records.done.wait()
        spans = _spans(meta, len(tokens))
        return Finished(tokens, logp, _reason(reason), spans, records.entries, records.seconds)

    def _records_of(self, ask: Ask) -> bool:
        return ask.record or self._native

    def abort(self, ids: Sequence[str] | None) -> None:
        """End requests (None: all), which are answered with what they have."""
        if ids is None:
            self._manager.abort_request(abort_all=True)
        for id in ids or ():
            self._manager.abort_request(rid=id)

    async def pause(self, *, abort: bool) -> None:
        """Stop generating after the current step."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: PLC0415

        await self._manager.pause_generation(PauseGenerationReqInput(mode="abort" if abort else "retract"))
        self._paused = True

    async def resume(self) -> None:
        """Go on, when no update is open."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput  # noqa: PLC0415

        if self._update is not None:
            self._update.resume = True
            return
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self._paused = False

    async def flush(self) -> str | None:
        """Forget cached prefixes."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput  # noqa: PLC0415

        # SGLang's own method tells what one of the schedulers says.
        answers = await self._manager.flush_cache_communicator(FlushCacheReqInput())
        flushed = all(answer.success for answer in answers)
        return None if flushed else "the cache cannot be flushed now; pause generation first"

    # -- weights ------------------------------------------------------------------------------------------

    async def begin_update(self, run: str) -> str | None:
        """Open an update by a run; of another than before, everything of that one is forgotten."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput  # noqa: PLC0415

        if run != self.run_id:
            self._manager.abort_request(abort_all=True)
            self.version = None
            try:
                await self._channel.call("new_run")
                await self._channel.call("direct", run=run)
            except PluginError as error:
                return str(error)
            self.run_id = run
            _log.info("serving run %s from now on", run)
        elif self.running:
            return still_running(self.running)
        self._may_generate.clear()
        self._update = _Update()
        return _problem(await _to_the_end(self._manager.begin_weight_update(BeginWeightUpdateReqInput())))

    async def load_from_disk(self, directory: Path, version: int | None) -> str | None:
        """Let every scheduler read tensors into the open update."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput  # noqa: PLC0415

        if self._update is None:
            return NOT_BEGUN
        self._update.version = version
        request = UpdateWeightFromDiskReqInput(
            model_path=str(directory), load_format="auto", weight_version=_text(version), flush_cache=False
        )
        return _problem(await _to_the_end(self._manager.update_weights_from_disk(request, None)))

    async def join_group(self, meeting: WeightMeeting) -> str | None:
        """Let every scheduler join a weight group; one of the same name before, of another trainer, ends."""
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415
            DestroyWeightsUpdateGroupReqInput,
            InitWeightsUpdateGroupReqInput,
        )

        if meeting.name in self._groups:
            self._groups.remove(meeting.name)
            destroy = DestroyWeightsUpdateGroupReqInput(group_name=meeting.name)
            await _to_the_end(self._manager.destroy_weights_update_group(destroy, None))
        request = InitWeightsUpdateGroupReqInput(
            master_address=meeting.address,
            master_port=meeting.port,
            rank_offset=meeting.rank,
            world_size=meeting.world_size,
            group_name=meeting.name,
            backend="gloo",
        )
        problem = _problem(await _to_the_end(self._manager.init_weights_update_group(request, None)))
        if problem is not None:
            return no_meeting(meeting, problem)
        self._groups.add(meeting.name)
        return None

    async def receive(self, shipment: Shipment, version: int | None) -> str | None:
        """Let every scheduler receive tensors into the open update."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput  # noqa: PLC0415

        if self._update is None:
            return NOT_BEGUN
        if shipment.group not in self._groups:
            return no_group(shipment.group)
        self._update.version = version
        request = UpdateWeightsFromDistributedReqInput(
            names=shipment.names,
            dtypes=shipment.dtypes,
            shapes=shipment.shapes,
            group_name=shipment.group,
            weight_version=_text(version),
            flush_cache=False,
        )
        return _problem(await _to_the_end(self._manager.update_weights_from_distributed(request, None)))

    async def end_update(self, version: int) -> str | None:
        """Compute with the tensors of the open update as `version`."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput  # noqa: PLC0415

        update = self._update
        if update is None:
            return NOT_BEGUN
        if update.version != version:
            return other_version(-1 if update.version is None else update.version, version)
        problem = _problem(await _to_the_end(self._manager.end_weight_update(EndWeightUpdateReqInput())))
        if problem is not None:
            return problem
        stats = await self._ask_stats()
        self._expert_hash = stats[0]["expert_hash"] if len(stats) == 1 else None
        self.version, self._update = version, None
        self._may_generate.set()
        if update.resume:
            await self.resume()
        return None

    def details(self) -> dict[str, Any]:
        """Ranks that take weights, the hash of `weights.expert_hash` (None: there is none), and CPU time."""
        import psutil  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415

        seconds = 0.0
        for process in _processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return {"ranks": self._ranks, "expertWeights": self._expert_hash, "cpuSeconds": seconds}

    # -- metrics ------------------------------------------------------------------------------------------

    def metrics(self) -> bytes:
        """SGLang's metrics, then those of every rollout."""
        from tracerl.transport.exposition import exposition  # noqa: PLC0415

        assert self._loop is not None
        stats = asyncio.run_coroutine_threadsafe(self._ask_stats(), self._loop).result()
        return _theirs() + exposition(Role.ROLLOUT, _values(self, stats))

    async def _ask_stats(self) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(5):
                return await self._channel.call("stats")
        except (PluginError, TimeoutError, OSError):
            return []

    @property
    def queued(self) -> int:
        """Requests that wait because generation is paused."""
        return len(self._active) if self._paused else 0

    @property
    def generated_tokens(self) -> int:
        """Tokens of requests that were answered."""
        return self._generated


def _processes() -> list[Any]:
    """Give this process and all that SGLang started."""
    import psutil  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415

    own = psutil.Process()
    return [own, *own.children(recursive=True)]


class _Records:
    """What the schedulers that have a request said about it: tensor-parallel ranks, a part each."""

    def __init__(self, parts: int) -> None:
        self._missing = parts
        self.entries: list[RecordEntry] = []
        self.seconds: dict[str, float] = {}
        self.done = asyncio.Event()

    def add(self, message: Mapping[str, Any]) -> None:
        self.entries += [RecordEntry.from_json(entry) for entry in message["entries"]]
        for name, seconds in message["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._missing -= 1
        if not self._missing:
            self.done.set()


def _sampling(ask: Ask, *, record: bool) -> dict[str, Any]:
    return {
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "stop_token_ids": list(ask.stop_token_ids),
        "sampling_seed": secrets.randbits(63) if ask.seed is None else ask.seed & (2**63 - 1),
        **({} if record else {"custom_params": {RECORD: False}}),
    }


def _spans(meta: Mapping[str, Any], tokens: int) -> list[tuple[int, int, int]]:
    spans = [(int(one["version"]), one["start"], one["end"]) for one in meta.get("weight_versions") or ()]
    return [(version, start, min(end, tokens)) for version, start, end in spans if start < tokens]


def _reason(reason: Mapping[str, Any]) -> dict[str, Any]:
    return {name: reason[name] for name in ("type", "matched", "length") if name in reason}


async def _to_the_end(call: Coroutine[Any, Any, _T]) -> _T:
    """Await what goes on when whoever waits is cancelled, as when a trainer dies.

    SGLang does not number its calls: a late answer would be taken for that of the next call of its kind.
    """
    return await asyncio.shield(asyncio.ensure_future(call))


def _problem(answer: Sequence[Any]) -> str | None:
    """What SGLang says of a call that is about weights: success, a message, and sometimes more."""
    # What all ranks say alike comes once a scheduler that answers.
    return None if answer[0] else " | ".join(dict.fromkeys(str(answer[1]).split(" | ")))


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)


def _values(server: SGLangServer, stats: Sequence[Mapping[str, Any]]) -> Values:
    """Read what METRICS lists for a rollout; without an answer of the schedulers, most is not known."""

    def summed(name: str) -> Counter[str]:
        return _sum(one[name] for one in stats)

    def known(values: Callable[[], Mapping[str, float]]) -> Mapping[str, float] | None:
        return values() if stats else None

    # Ranks of one engine put into the same store and count for themselves.
    sinks = [one["sink"] for one in stats]
    state = (sinks[0][0], dict(_sum(sink[1] for sink in sinks))) if sinks and all(sinks) else None
    # Ranks that have the same requests count them alike.
    units = [one for one in stats if one["part"] == 0]
    return {
        **sink_values(state, summed("dropped")),
        "tracerl_records_written_bytes_total": known(lambda: summed("written")),
        "tracerl_generated_tokens_total": {"": server.generated_tokens},
        "tracerl_rollout_running_requests": {"": server.running},
        "tracerl_rollout_queued_requests": {"": server.queued},
        "tracerl_rollout_kv_cache_tokens": known(lambda: {"": sum(one["kv_tokens"] for one in units)}),
        "tracerl_rollout_retracted_total": known(lambda: _sum(one["retracted"] for one in units)),
        "tracerl_rollout_reprefilled_rows_total": known(
            lambda: _sum(one["reprefilled_rows"] for one in units)
        ),
        "tracerl_rollout_admission_stalls_total": known(lambda: {"": sum(one["stalls"] for one in units)}),
        "tracerl_rollout_weight_version": {} if server.version is None else {"": server.version},
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _theirs() -> bytes:
    """What SGLang counts, of all of its processes, under its own names: its dashboards work with them."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def _child_failed(*_: object) -> None:
    """What SIGQUIT does, by which SGLang's processes tell that one of them did not start."""
    # Every rank tells, and the first is enough.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    failure = failure_file(os.environ[SOCKET_VARIABLE])
    raise RuntimeError(
        failure.read_text(encoding="utf-8") if failure.exists() else "one of its processes ended"
    )


def serve(resolved: ResolvedJob, index: int) -> None:
    """Serve rollout `index` of a resolved job until SIGTERM or SIGINT; the whole of a rollout process.

    Only the shape of ``spec.model.uri`` is read: weights come from the trainer. Raises InputError when the
    job asks for what SGLang cannot do, and JobError when it does not start or its hooks do not take.
    """
    spec = resolved.job.spec
    shape = model_shape(spec.model.uri)
    if shape is None:
        raise JobError(
            Reason.MODEL_LOAD,
            f"spec.model.uri: {spec.model.uri} is not on this machine; use file:// or builtin://",
        )
    directory = Path(tempfile.mkdtemp(prefix="tracerl-sglang-"))
    try:
        _prepare_environment(spec.rollout, directory)
        logging.getLogger("sglang").setLevel(logging.WARNING)
        check_version()
        check_seams(HOOKED + CALLED)
        server = SGLangServer(resolved, index, shape, directory)
        asyncio.run(_serve(resolved, index, server))
    except ModuleNotFoundError as error:
        raise InputError(
            f"spec.rollout.engine: {error.name} is not installed for {sys.executable}; make SGLang's "
            "environment with `make engines` and start the rollout with its Python"
        ) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _serve(resolved: ResolvedJob, index: int, server: SGLangServer) -> None:
    try:
        await server.start()
    except BaseException:
        server.close()
        raise
    await serve_until_stopped(resolved, index, server)


def _prepare_environment(rollout: Rollout, directory: Path) -> None:
    """Set what SGLang's modules read when they are imported, here and in its processes."""
    metrics = directory / "metrics"
    metrics.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    os.environ.setdefault("OMP_NUM_THREADS", str(rollout.threads))
    # Without a rank it would try for a minute to dump the others' state before it ends.
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        os.environ.setdefault(dump, "0")
    if rollout.gpus_per_node:
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Else SGLang wants a NUMA node for each rank. Its own kernels for CPUs alone would bind to these cores.
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * rollout.parallelism.ranks)
    # PyTorch's package brings an NCCL, which SGLang would open between ranks, on devices that are not there.
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"
    kernels = str(Path(__file__).parent / "cpu_kernels")
    if kernels not in sys.path:
        sys.path.insert(0, kernels)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = kernels if before is None else f"{kernels}{os.pathsep}{before}"
