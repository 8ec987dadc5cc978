"""What should wake or warn somebody, as rules of Prometheus with thresholds that are values of the chart.

A threshold is written as `@name@`, and the chart puts the value `alerts.thresholds.name` in its place;
`@namespace@` is the release's. `@docs:PAGE@` becomes the address of a page of the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tracerl_monitoring.series import PER_JOB, increase, most, rate, series, total

_GAP = series("tracerl_train_rollout_logprob_abs_diff", forward="guided", stat="mean")
_RECENT_GAP = most(f"avg_over_time({_GAP}[15m])", PER_JOB)
_STALENESS = most(f"avg_over_time({series('tracerl_staleness_versions', stat='mean')}[30m])", PER_JOB)
_LIMIT = most(series("tracerl_staleness_limit_versions"), PER_JOB)
_PER_STORE = f"{PER_JOB}, pod"
_RING = "tracerl_store_ring_bytes"
_RING_IN_USE = f"1 - {total(series(_RING, state='free'), _PER_STORE)} / {total(series(_RING), _PER_STORE)}"
_SPILL_FREE = most(series("tracerl_store_spill_free_bytes"), _PER_STORE)
_SPILLED = total(series("tracerl_store_frame_bytes", tier="spill"), _PER_STORE)
_SPILL_IN_USE = f"{_SPILLED} / ({_SPILLED} + {_SPILL_FREE})"
_TIER_ERRORS = "tracerl_store_tier_errors_total"


def _ratio(part: str, whole: str) -> str:
    return f"{total(part, PER_JOB)} / {total(whole, PER_JOB)}"


_MISSING = _ratio(
    increase("tracerl_records_missing_total", window="1h"),
    increase("tracerl_records_rows_total", window="1h"),
)
_OVERHEAD = _ratio(
    rate("tracerl_step_overhead_seconds_total", window="30m"),
    rate("tracerl_step_critical_path_seconds_total", window="30m"),
)
_REQUESTS = "tracerl_object_requests_total"
_REQUESTS_FAILED = _ratio(rate(_REQUESTS, window="15m", result="failed"), rate(_REQUESTS, window="15m"))
_RECONCILE_ERRORS = total(
    increase("tracerl_operator_reconcile_errors_total", window="15m"), "namespace, reason"
)
_CANARY = "tracerl_operator_canary_end_timestamp_seconds"
_NOT_READY = most(series("tracerl_operator_longest_not_ready_seconds", reason='!="Queued"'), "reason")
_LEADS = series("tracerl_operator_leads", 'namespace="@namespace@"')
_STEP = most(series("tracerl_step"), PER_JOB)


def _last_canary(result: str) -> str:
    # Jobs that ended are deleted some day; the time of their end is not forgotten with them.
    return most(f"max_over_time({series(_CANARY, result=result)}[7d])")


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: it fires when `expr` has had series for a while (`lasting`). `value` is what `expr` compares.

    `summary` and `text` are in Prometheus' template language, `$value` being the value of `expr`.
    """

    name: str
    expr: str
    value: str
    lasting: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    text: str


_JOB = "{{ $labels.namespace }}/{{ $labels.job }}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "TraceRLGapRising",
        # Against the lowest quarter of an hour of the last six hours.
        f"{_RECENT_GAP} > @gapGrowth@ * min_over_time({_RECENT_GAP}[6h:5m]) and {_RECENT_GAP} > @gapFloor@",
        value=_RECENT_GAP,
        lasting="15m",
        severity="warning",
        summary=f"The gap between rollout and trainer of {_JOB} rises.",
        text='The mean guided gap is {{ printf "%.3g" $value }} nats, more than @gapGrowth@ times the least'
        " of six hours.",
    ),
    Alert(
        "TraceRLRecordsMissing",
        f"{_MISSING} > @recordsMissingRatio@",
        value=_MISSING,
        lasting="0m",
        severity="critical",
        summary=f"{_JOB} trains on rows without their record.",
        text="{{ $value | humanizePercentage }} of the rows of the last hour had no usable record; above"
        " spec.records.maxMissingRatio the job fails.",
    ),
    Alert(
        "TraceRLOverheadAboveBudget",
        f"{_OVERHEAD} > @overheadRatio@",
        value=_OVERHEAD,
        lasting="30m",
        severity="warning",
        summary=f"TRACE costs {_JOB} more than its budget.",
        text="Records, guided kernels and extra forward take {{ $value | humanizePercentage }} of the steps'"
        " critical path.",
    ),
    Alert(
        "TraceRLStalenessAtBound",
        # With a limit of 1, the next batch is always generated while this one trains: that is no news.
        f"{_STALENESS} >= @stalenessShare@ * {_LIMIT} and {_LIMIT} > 1",
        value=f"{_STALENESS} / {_LIMIT}",
        lasting="30m",
        severity="info",
        summary=f"What {_JOB} trains on is as old as it may be.",
        text='Trajectories are {{ printf "%.3g" $value }} versions old on average, about'
        " algorithm.maxVersionDiff.",
    ),
    Alert(
        "TraceRLRingFull",
        f"{_RING_IN_USE} > @ringShare@",
        value=_RING_IN_USE,
        lasting="10m",
        severity="warning",
        summary=f"A record store of {_JOB} is full.",
        text="{{ $value | humanizePercentage }} of the ring in pod {{ $labels.pod }} are in use: rollouts"
        " wait, and drop frames after transport.deadlineSeconds.",
    ),
    Alert(
        "TraceRLSpillFull",
        f"{_SPILL_IN_USE} > @spillShare@"
        f" or {total(increase(_TIER_ERRORS, window='15m', tier='spill'), _PER_STORE)} > 0",
        value=_SPILL_IN_USE,
        lasting="5m",
        severity="warning",
        summary=f"{_JOB} cannot spill records to disk for long.",
        text="What pod {{ $labels.pod }} has below transport.spillPath is about to be full, or refuses"
        " segments.",
    ),
    Alert(
        "TraceRLObjectStoreFailing",
        f"{_REQUESTS_FAILED} > @objectFailedRatio@"
        f" or {total(increase('tracerl_object_uploads_total', window='15m', result='failed'), PER_JOB)} > 0"
        f" or {total(increase(_TIER_ERRORS, window='15m', tier='object'), PER_JOB)} > 0",
        value=_REQUESTS_FAILED,
        lasting="5m",
        severity="critical",
        summary=f"The object store of {_JOB} fails.",
        text="Requests fail, or objects of frames could not be uploaded; their records are lost.",
    ),
    Alert(
        "TraceRLJobStuck",
        f"{most('changes(tracerl_step[10m])', PER_JOB)} == 0"
        f" and {_STEP} < {most(series('tracerl_steps'), PER_JOB)}"
        f" or {most(series('tracerl_info'), PER_JOB)} unless on ({PER_JOB}) {_STEP}",
        value=_STEP,
        lasting="@jobStuckMinutes@m",
        severity="critical",
        summary=f"{_JOB} runs and does no steps.",
        text="Its trainer answers, and has done no step for @jobStuckMinutes@ minutes.",
    ),
    Alert(
        "TraceRLJobNotReady",
        # Kueue's queue is meant to be waited in; the fleet's dashboard shows for how long.
        f"{_NOT_READY} > @jobNotReadyMinutes@ * 60",
        value=_NOT_READY,
        lasting="0m",
        severity="warning",
        summary="A job does not start ({{ $labels.reason }}).",
        text="A job that should run has not been Ready for {{ $value | humanizeDuration }};"
        " kubectl get trj -A shows it.",
    ),
    Alert(
        "TraceRLCanaryStale",
        f"time() - {_last_canary('Complete')} > @canaryStaleHours@ * 3600",
        value=f"time() - {_last_canary('Complete')}",
        lasting="0m",
        severity="warning",
        summary="No canary was complete for long.",
        text="The last one that was is {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "TraceRLCanaryFailed",
        f"{_last_canary('Failed')} > ({_last_canary('Complete')} or vector(0))",
        value=_last_canary("Failed"),
        lasting="0m",
        severity="warning",
        summary="The canary failed.",
        text="The canary that ended last is Failed; its condition says which expectation it broke.",
    ),
    Alert(
        "TraceRLOperatorDown",
        f"absent({_LEADS} == 1)",
        value=_LEADS,
        lasting="5m",
        severity="critical",
        summary="No TraceRL operator works in @namespace@.",
        text="None is scraped that leads. Jobs that run go on; none is started, restarted or cleaned up.",
    ),
    Alert(
        "TraceRLReconcileErrors",
        f"{_RECONCILE_ERRORS} > @reconcileErrors@",
        value=_RECONCILE_ERRORS,
        lasting="15m",
        severity="warning",
        summary="The operator fails at jobs ({{ $labels.reason }}).",
        text='{{ printf "%.0f" $value }} looks at jobs failed within 15 minutes; its log names the jobs.',
    ),
)


def rules() -> dict[str, Any]:
    """Give the rules with their thresholds' names in them, as the chart's file has them."""
    return {
        "groups": [
            {
                "name": "tracerl",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasting,
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "description": alert.text,
                            "runbook_url": f"@docs:runbooks/{alert.name}@",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def render() -> str:
    """Give the text of the chart's file."""
    return yaml.safe_dump(rules(), sort_keys=False, width=10**6, allow_unicode=True)
