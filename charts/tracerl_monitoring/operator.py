"""The operator: how long it takes to look at a job, what fails, and what it asks of the API server."""

from __future__ import annotations

from tracerl.api.constants import Role
from tracerl_monitoring.panels import Board, Kind, Panel, Query, Row, Variable
from tracerl_monitoring.rest import with_the_rest
from tracerl_monitoring.series import OPERATOR, increase, most, quantile, rate, series, total

_DURATION = "tracerl_operator_reconcile_duration_seconds"
_REQUESTS = "tracerl_operator_api_requests_total"
_LAST_EVENT = series("tracerl_operator_watch_last_event_timestamp_seconds", OPERATOR)

OPERATOR_BOARD = with_the_rest(
    Board(
        name="operator",
        title="TraceRL / Operator",
        text="What looks after the jobs: how quick it is, what fails, and what it asks of the API server.",
        page="how-to/dashboards",
        variables=(
            Variable("operator_namespace", "tracerl_operator_leads", label="namespace", several=True),
        ),
        rows=(
            Row(
                "Now",
                (
                    Panel(
                        "Leads",
                        (Query(series("tracerl_operator_leads", OPERATOR), "{{pod}}"),),
                        "1 where an operator works, 0 where it stands by.",
                        kind=Kind.NUMBER,
                        alerts=("TraceRLOperatorDown",),
                    ),
                    Panel(
                        "Version",
                        (
                            Query(
                                most(series("tracerl_operator_build_info", OPERATOR), "version"),
                                "{{version}}",
                            ),
                        ),
                        "Which versions run.",
                        kind=Kind.NAMES,
                    ),
                    Panel(
                        "Jobs in its queue",
                        (Query(most(series("tracerl_operator_queue_depth", OPERATOR))),),
                        "Jobs that wait to be looked at.",
                        kind=Kind.NUMBER,
                    ),
                ),
            ),
            Row(
                "Looks at jobs",
                (
                    Panel(
                        "Reconcile latency",
                        tuple(
                            Query(quantile(share, _DURATION, OPERATOR), f"p{name}")
                            for share, name in (("0.5", "50"), ("0.9", "90"), ("0.99", "99"))
                        ),
                        "How long it takes to look at a job and to apply what follows.",
                        unit="s",
                    ),
                    Panel(
                        "Looks by result",
                        (Query(total(rate(f"{_DURATION}_count", OPERATOR), "result"), "{{result}}"),),
                        "Looks at a job a second, by what came of them.",
                        unit="cps",
                        kind=Kind.STACK,
                    ),
                    Panel(
                        "Reconcile errors",
                        (
                            Query(
                                total(
                                    increase("tracerl_operator_reconcile_errors_total", OPERATOR), "reason"
                                ),
                                "{{reason}}",
                            ),
                        ),
                        "Looks that failed and are made again: NoAnswer, Code and a status, or Unexpected.",
                        alerts=("TraceRLReconcileErrors",),
                    ),
                    Panel(
                        "Queue depth",
                        (Query(most(series("tracerl_operator_queue_depth", OPERATOR), "pod"), "{{pod}}"),),
                        "Jobs that wait to be looked at.",
                    ),
                    Panel(
                        "Slowest looks by result",
                        (Query(quantile("0.99", _DURATION, OPERATOR, by="result"), "{{result}}"),),
                        "99th percentile of the time of a look, by what came of it.",
                        unit="s",
                    ),
                ),
            ),
            Row(
                "API server",
                (
                    Panel(
                        "Requests by verb",
                        (Query(total(rate(_REQUESTS, OPERATOR), "verb"), "{{verb}}"),),
                        "Requests to the API server a second.",
                        unit="cps",
                        kind=Kind.STACK,
                    ),
                    Panel(
                        "Requests by kind",
                        (Query(total(rate(_REQUESTS, OPERATOR), "kind"), "{{kind}}"),),
                        "Requests to the API server a second, by what they are about.",
                        unit="cps",
                        kind=Kind.STACK,
                    ),
                    Panel(
                        "Requests that failed",
                        (Query(total(rate(_REQUESTS, OPERATOR, code='!~"2.."'), "code"), "{{code}}"),),
                        "By HTTP status; 0 where no answer came. 404 and 409 belong to the usual work.",
                        unit="cps",
                        alerts=("TraceRLReconcileErrors",),
                    ),
                    Panel(
                        "Since a watch brought something",
                        (Query(f"time() - {most(_LAST_EVENT, 'kind')}", "{{kind}}"),),
                        "Long where nothing happens, too: kinds that change all the time say something.",
                        unit="s",
                    ),
                ),
            ),
        ),
    ),
    {Role.OPERATOR},
    OPERATOR,
)
