"""The trainer's `/metrics`: the last step record, and counters over the steps of this process.

Names, types and labels come from `tracerl.api.constants.METRICS` alone; this module only says where in a step
record each value is. Counters start from 0 with the process, as Prometheus expects.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracerl.api.constants import METRICS, MetricSpec, Role
from tracerl.api.job import TraceRLJob
from tracerl.rl.steprecord import Gap, StepRecord
from tracerl.transport.listen import HttpServer, Strangers

T = TypeVar("T")
Sample = tuple[tuple[str, ...], float]
"""Label values in the order of the metric's labels, and the value."""

TRAINER_METRICS: tuple[MetricSpec, ...] = tuple(spec for spec in METRICS if spec.source is Role.TRAINER)
_ROLLOUT_CORR = "tracerl_rollout_corr_"


def _one(value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield (), value


def _gaps(step: StepRecord) -> Iterator[tuple[str, Gap]]:
    yield "guided", step.gap_guided
    if step.gap_unguided is not None:
        yield "unguided", step.gap_unguided


def _gap(step: StepRecord) -> Iterator[Sample]:
    for forward, gap in _gaps(step):
        yield (forward, "mean"), gap.mean
        yield (forward, "max"), gap.max


def _gap_by_position(step: StepRecord) -> Iterator[Sample]:
    for forward, gap in _gaps(step):
        for bucket in gap.by_position:
            yield (forward, position_label(bucket.start, bucket.stop)), bucket.mean


def position_label(start: int, stop: int) -> str:
    """Positions start..stop-1 as text, for example 0 or 4-7."""
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _mismatch(step: StepRecord) -> Iterator[Sample]:
    for site in step.mismatch:
        if site.rtn_values:
            yield (str(site.layer), site.kind, "unguided"), site.rtn_mismatched / site.rtn_values
        if site.guided_values:
            yield (str(site.layer), site.kind, "guided"), site.guided_mismatched / site.guided_values


def _adjacent(step: StepRecord) -> Iterator[Sample]:
    for site in step.mismatch:
        if site.rtn_mismatched:
            yield (str(site.layer), site.kind, "unguided"), site.rtn_adjacent / site.rtn_mismatched
        if site.guided_mismatched:
            yield (str(site.layer), site.kind, "guided"), site.guided_adjacent / site.guided_mismatched


def _wrong_scales(step: StepRecord) -> Iterator[Sample]:
    for site in step.mismatch:
        if site.scales:
            yield (str(site.layer), site.kind), site.scales_wrong / site.scales


def _read_bytes(step: StepRecord) -> Iterator[Sample]:
    for path, count in step.transport.read_bytes.items() if step.transport else ():
        yield (path,), count


def _read_seconds(step: StepRecord) -> Iterator[Sample]:
    for path, seconds in step.transport.read_seconds.items() if step.transport else ():
        yield (path,), seconds


def _mean_and_max(counts: dict[int, int]) -> Iterator[Sample]:
    total = sum(counts.values())
    if total:
        yield ("mean",), sum(versions * count for versions, count in counts.items()) / total
        yield ("max",), max(versions for versions, count in counts.items() if count)


def _parts(step: StepRecord) -> Iterator[Sample]:
    for part, seconds in step.seconds.model_dump(exclude={"total"}).items():
        yield (part,), seconds


def _overhead_parts(step: StepRecord) -> Iterator[Sample]:
    for part in ("capture", "pack", "put", "fetch", "unpack", "guided_kernels", "extra_forward"):
        yield (part,), getattr(step.overhead, part)


# What a step shows (gauges) or adds (counters).
_VALUES: dict[str, Callable[[StepRecord], Iterable[Sample]]] = {
    "tracerl_step": lambda step: _one(step.step),
    "tracerl_steps": lambda step: _one(step.steps),
    "tracerl_policy_version": lambda step: _one(step.version),
    "tracerl_reward_mean": lambda step: _one(step.reward.mean),
    "tracerl_evaluation_reward_mean": lambda step: _one(step.held_out_reward),
    "tracerl_groups_without_signal_ratio": lambda step: _one(
        step.reward.groups_without_signal / step.reward.groups if step.reward.groups else None
    ),
    "tracerl_policy_loss": lambda step: _one(step.policy.loss),
    "tracerl_ppo_clipped_ratio": lambda step: _one(step.policy.clip_fraction),
    "tracerl_gradient_norm": lambda step: _one(step.policy.grad_norm),
    "tracerl_learning_rate": lambda step: _one(step.policy.learning_rate),
    "tracerl_train_rollout_logprob_abs_diff": _gap,
    "tracerl_train_rollout_logprob_abs_diff_by_position": _gap_by_position,
    "tracerl_code_mismatch_ratio": _mismatch,
    "tracerl_code_mismatch_adjacent_ratio": _adjacent,
    "tracerl_rebuilt_scale_error_ratio": _wrong_scales,
    "tracerl_records_bytes_total": lambda step: (
        (("record",), step.records.bytes),
        (("audit",), step.records.audit_bytes),
    ),
    "tracerl_records_bytes_per_token": lambda step: _one(step.records.bytes_per_token),
    "tracerl_records_rows_total": lambda step: _one(step.records.rows),
    "tracerl_records_missing_total": lambda step: (
        ((reason,), count) for reason, count in step.records.missing_by_reason.items()
    ),
    "tracerl_records_read_bytes_total": _read_bytes,
    "tracerl_records_read_seconds_total": _read_seconds,
    "tracerl_record_version_lag": lambda step: _mean_and_max(step.staleness.tokens),
    "tracerl_step_seconds": lambda step: _one(step.seconds.total),
    "tracerl_step_part_seconds": _parts,
    "tracerl_overhead_seconds_total": _overhead_parts,
    "tracerl_overhead_ratio": lambda step: _one(step.overhead.ratio),
    "tracerl_trained_tokens_total": lambda step: _one(step.response_tokens),
    "tracerl_staleness_versions": lambda step: _mean_and_max(step.staleness.trajectories),
    "tracerl_groups_dropped_total": lambda step: _one(step.staleness.groups_dropped),
}


class StepExporter(Collector):
    """Collects the metrics of step records for a Prometheus registry; `observe` is thread-safe."""

    def __init__(self, job: TraceRLJob) -> None:
        self._lock = threading.Lock()
        spec = job.spec
        self._info = (spec.method.name.value, spec.quantization.format.value, version("tracerl"))
        self._step: StepRecord | None = None
        self._evaluation: float | None = None
        self._totals: dict[str, dict[tuple[str, ...], float]] = {}

    def observe(self, step: StepRecord) -> None:
        """Take in the record of one step."""
        with self._lock:
            self._step = step
            if step.held_out_reward is not None:
                self._evaluation = step.held_out_reward
            for spec in TRAINER_METRICS:
                if spec.type == "counter" and spec.name in _VALUES:
                    totals = self._totals.setdefault(spec.name, {})
                    for labels, value in _VALUES[spec.name](step):
                        totals[labels] = totals.get(labels, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """One family a trainer metric of METRICS, those without a value yet without samples."""
        with self._lock:
            families = [self._family(spec) for spec in TRAINER_METRICS]
        yield from families

    def _family(self, spec: MetricSpec) -> Metric:
        # The client appends _total to a counter's name itself.
        family: Metric
        if spec.type == "counter":
            family = CounterMetricFamily(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
        else:
            family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
        for labels, value in self._samples(spec):
            family.add_metric(labels, value)
        return family

    def _samples(self, spec: MetricSpec) -> Iterable[Sample]:
        step = self._step
        if spec.name == "tracerl_info":
            return [(self._info, 1.0)]
        if step is None:
            return []
        if spec.name == "tracerl_restarts_total":
            return [((Role.ROLLOUT.value,), step.restarts)]
        if spec.name == "tracerl_evaluation_reward_mean":
            return _one(self._evaluation)
        if spec.name.startswith(_ROLLOUT_CORR):
            return _one(step.rollout_corr.get(spec.name.removeprefix(_ROLLOUT_CORR)))
        if spec.type == "counter":
            return self._totals[spec.name].items()
        return _VALUES[spec.name](step)


class MetricsServer:
    """HTTP server of `/metrics` and `/health` in a thread of its own; `port` 0 takes a free one.

    `host` None means all interfaces. With a `token`, `/metrics` is for who shows it as bearer token;
    `/health` is open. OSError when the address cannot be bound.
    """

    def __init__(
        self,
        exporter: StepExporter,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(exporter)
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._strangers = Strangers()
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        self._http = HttpServer(application, self._strangers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._thread.start()
        try:
            self.port: int = self._call(self._http.start(host, port))
            """Port that is bound."""
        except BaseException:
            self.close()
            raise

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._authorization is not None and not hmac.compare_digest(given, self._authorization):
            message = "the bearer token is missing or wrong; use the token file of this run\n"
            return web.Response(status=401, text=message)
        self._strangers.admit(request)
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stop and release the port."""
        self._call(self._http.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
