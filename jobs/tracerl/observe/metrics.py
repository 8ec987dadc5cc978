"""The trainer's `/metrics`: the last step record, and counters over the steps of this process.

Names, types and labels come from `tracerl.api.constants.METRICS` alone; this module only says where in a step
record each value is. Counters start from 0 with the process, as Prometheus expects: steps behind a checkpoint
that are done again are counted again, for they are work that was done. What a run reached is in gauges.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tracerl.api.constants import METRICS, Role
from tracerl.api.job import TraceRLJob
from tracerl.rl.steprecord import Gap, StartRecord, StepRecord
from tracerl.transport.exposition import CONTENT_TYPE, Samples, by_labels, families, text
from tracerl.transport.listen import HttpServer, Strangers

T = TypeVar("T")

_CORR = "tracerl_rollout_corr_"
_CORR_METRICS = tuple(spec.name for spec in METRICS if spec.name.startswith(_CORR))


def _one(value: float | None) -> Samples:
    return {} if value is None else {"": value}


def _gaps(step: StepRecord) -> Iterator[tuple[str, Gap]]:
    yield "guided", step.gap_guided
    if step.gap_unguided is not None:
        yield "unguided", step.gap_unguided


def _gap(step: StepRecord) -> Samples:
    return {
        (forward, stat): value
        for forward, gap in _gaps(step)
        for stat, value in (("mean", gap.mean), ("max", gap.max))
    }


def _gap_by_position(step: StepRecord) -> Samples:
    return {
        (forward, position_label(bucket.start, bucket.stop)): bucket.mean
        for forward, gap in _gaps(step)
        for bucket in gap.by_position
    }


def position_label(start: int, stop: int) -> str:
    """Positions start..stop-1 as text, for example 0 or 4-7."""
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


class _Codes(NamedTuple):
    """Audited codes of one site in one forward."""

    values: int
    mismatched: int
    adjacent: int


def _codes(step: StepRecord) -> Iterator[tuple[tuple[str, ...], _Codes]]:
    for site in step.mismatch:
        where = str(site.layer), site.kind
        yield (*where, "unguided"), _Codes(site.rtn_values, site.rtn_mismatched, site.rtn_adjacent)
        yield (*where, "guided"), _Codes(site.guided_values, site.guided_mismatched, site.guided_adjacent)


def _mismatch(step: StepRecord) -> Samples:
    return {labels: one.mismatched / one.values for labels, one in _codes(step) if one.values}


def _adjacent(step: StepRecord) -> Samples:
    return {labels: one.adjacent / one.mismatched for labels, one in _codes(step) if one.mismatched}


def _wrong_scales(step: StepRecord) -> Samples:
    return {
        (str(site.layer), site.kind): site.scales_wrong / site.scales for site in step.mismatch if site.scales
    }


def _mean_and_max(counts: Mapping[int, int]) -> Samples:
    total = sum(counts.values())
    if not total:
        return {}
    return {
        "mean": sum(versions * count for versions, count in counts.items()) / total,
        "max": max(versions for versions, count in counts.items() if count),
    }


def _share(part: int, whole: int) -> Samples:
    return _one(part / whole if whole else None)


_GAUGES: dict[str, Callable[[StepRecord], Samples]] = {
    "tracerl_step": lambda step: _one(step.step),
    "tracerl_steps": lambda step: _one(step.steps),
    "tracerl_policy_version": lambda step: _one(step.version),
    "tracerl_reward_mean": lambda step: _one(step.reward.mean),
    "tracerl_groups_without_signal_ratio": lambda step: _share(
        step.reward.groups_without_signal, step.reward.groups
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
    "tracerl_records_bytes_per_token": lambda step: _one(step.records.bytes_per_token),
    "tracerl_record_version_lag": lambda step: _mean_and_max(step.staleness.tokens),
    "tracerl_step_seconds": lambda step: _one(step.seconds.total),
    "tracerl_step_part_seconds": lambda step: step.seconds.model_dump(exclude={"total"}),
    "tracerl_step_overhead_ratio": lambda step: _one(step.overhead.ratio),
    "tracerl_step_overhead_part_ratio": lambda step: step.overhead.part_ratios,
    "tracerl_staleness_versions": lambda step: _mean_and_max(step.staleness.trajectories),
}
"""What the last step shows."""

_COUNTERS: dict[str, Callable[[StepRecord], Samples]] = {
    "tracerl_records_bytes_total": lambda step: {
        "record": step.records.bytes,
        "audit": step.records.audit_bytes,
    },
    "tracerl_records_rows_total": lambda step: _one(step.records.rows),
    "tracerl_records_missing_total": lambda step: step.records.missing_by_reason,
    "tracerl_records_read_bytes_total": lambda step: step.transport.read_bytes if step.transport else {},
    "tracerl_records_read_seconds_total": lambda step: step.transport.read_seconds if step.transport else {},
    "tracerl_step_overhead_seconds_total": lambda step: step.overhead.parts,
    "tracerl_step_critical_path_seconds_total": lambda step: _one(step.overhead.critical_path),
    "tracerl_trained_tokens_total": lambda step: _one(step.response_tokens),
    "tracerl_groups_dropped_total": lambda step: _one(step.staleness.groups_dropped),
}
"""What every step adds."""


class StepExporter(Collector):
    """Collects the metrics of step records for a Prometheus registry; its methods are thread-safe."""

    def __init__(self, job: TraceRLJob) -> None:
        self._lock = threading.Lock()
        spec = job.spec
        info = (spec.method.name.value, spec.quantization.format.value, version("tracerl"))
        self._restarts = 0
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            spec.name: {} for spec in METRICS if spec.source is Role.TRAINER
        } | {
            "tracerl_info": {info: 1.0},
            "tracerl_staleness_limit_versions": {(): spec.algorithm.max_version_diff},
        }

    def start(self, record: StartRecord) -> None:
        """Take in what was there before this process: what it counts begins after that."""
        with self._lock:
            self._restarts = record.restarts

    def observe(self, step: StepRecord) -> None:
        """Take in the record of one step."""
        with self._lock:
            for name, read in _GAUGES.items():
                self._show(name, read(step))
            for name in _CORR_METRICS:
                self._show(name, _one(step.rollout_corr.get(name.removeprefix(_CORR))))
            if step.held_out_reward is not None:  # the last evaluation stays until there is another
                self._show("tracerl_evaluation_reward_mean", _one(step.held_out_reward))
            if step.baseline is not None and (found := step.baseline.so_far) is not None:
                bounds = {"estimate": found.ratio, "low": found.low, "high": found.high}
                self._show("tracerl_baseline_overhead_ratio", bounds)
                self._show("tracerl_baseline_pairs", _one(found.pairs))
            for name, read in _COUNTERS.items():
                totals = self._values[name]
                for labels, value in by_labels(read(step)).items():
                    totals[labels] = totals.get(labels, 0.0) + value
            self._show("tracerl_restarts_total", {Role.ROLLOUT: step.restarts - self._restarts})

    def _show(self, name: str, samples: Samples) -> None:
        self._values[name] = by_labels(samples)

    def collect(self) -> Iterator[Metric]:
        """One family a trainer metric of METRICS, those without a value yet without samples."""
        with self._lock:
            made = list(families(Role.TRAINER, self._values))
        yield from made


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
        self._exporter = exporter
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
        return web.Response(body=text(self._exporter), headers={"Content-Type": CONTENT_TYPE})

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
