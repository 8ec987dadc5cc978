"""The fleet: all jobs of the chosen namespaces, their queue, what they do a second and what TRACE costs."""

from __future__ import annotations

from tracerl_monitoring.panels import Board, Kind, Panel, Query, Row, Variable
from tracerl_monitoring.series import FLEET, PER_JOB, increase, most, rate, series, total

_NAME = "{{namespace}}/{{job}}"
# Of all operators, of which those that stand by count the same jobs as the one that leads.
_STATES = total(most(series("tracerl_operator_jobs"), "namespace, job, state"), "state")
_WAITS = most(series("tracerl_operator_longest_not_ready_seconds"), "reason")
_TOKENS = rate("tracerl_generated_tokens_total", FLEET)
_OVERHEAD = rate("tracerl_step_overhead_seconds_total", FLEET)
_CRITICAL_PATH = rate("tracerl_step_critical_path_seconds_total", FLEET)
_GUIDED = series("tracerl_train_rollout_logprob_abs_diff", FLEET, forward="guided", stat="mean")
_CANARY = series("tracerl_operator_canary_end_timestamp_seconds", result="Complete")
_JOB_LINK = "/d/tracerl-job?var-namespace=${__data.fields.namespace}&var-job=${__data.fields.job}"


def _of_job(name: str, column: str) -> Query:
    return Query(most(series(name, FLEET), PER_JOB), column)


FLEET_BOARD = Board(
    name="fleet",
    title="TraceRL / Fleet",
    text="All jobs: how many run and wait, what they generate, and what records and guided rounding cost.",
    page="how-to/dashboards",
    variables=(
        Variable("namespace", "tracerl_info", several=True),
        Variable("job", "tracerl_info", 'namespace=~"$namespace"', several=True),
    ),
    rows=(
        Row(
            "Now",
            (
                Panel(
                    "Jobs by state",
                    (Query(_STATES, "{{state}}"),),
                    "Jobs of all namespaces that operators look after. Queued: Kueue has not admitted them.",
                    kind=Kind.NUMBER,
                    width=12,
                ),
                Panel(
                    "Tokens a second",
                    (Query(total(_TOKENS)),),
                    "Tokens that all rollouts sample.",
                    kind=Kind.NUMBER,
                    width=4,
                ),
                Panel(
                    "Overhead",
                    (Query(f"{total(_OVERHEAD)} / {total(_CRITICAL_PATH)}"),),
                    "Records, guided kernels and extra forward as a share of the steps' critical path.",
                    unit="percentunit",
                    kind=Kind.NUMBER,
                    width=4,
                    step="5m",
                    alerts=("TraceRLOverheadAboveBudget",),
                ),
                Panel(
                    "Since a canary was complete",
                    (Query(f"time() - {most(_CANARY)}"),),
                    "Time since a job with the label tracerl.dev/canary was last complete.",
                    unit="s",
                    kind=Kind.NUMBER,
                    width=4,
                    alerts=("TraceRLCanaryStale", "TraceRLCanaryFailed"),
                ),
            ),
        ),
        Row(
            "Jobs and queue",
            (
                Panel(
                    "Jobs by state",
                    (Query(_STATES, "{{state}}"),),
                    "Jobs of all namespaces that the operators look after.",
                    kind=Kind.STACK,
                    width=12,
                ),
                Panel(
                    "Longest wait",
                    (Query(_WAITS, "{{reason}}"),),
                    "How long a job has waited that should run, by the reason of its condition Ready.",
                    unit="s",
                    width=12,
                    alerts=("TraceRLJobNotReady",),
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens a second",
                    (Query(f"topk(20, {total(_TOKENS, PER_JOB)})", _NAME),),
                    "Tokens that a job's rollouts sample; the twenty quickest jobs.",
                ),
                Panel(
                    "Step time",
                    (Query(f"topk(20, {most(series('tracerl_step_seconds', FLEET), PER_JOB)})", _NAME),),
                    "Wall time of a job's last step; the twenty slowest.",
                    unit="s",
                    alerts=("TraceRLJobStuck",),
                ),
                Panel(
                    "Overhead",
                    (
                        Query(
                            f"topk(20, {total(_OVERHEAD, PER_JOB)} / {total(_CRITICAL_PATH, PER_JOB)})", _NAME
                        ),
                    ),
                    "What TRACE adds, as a share of the steps' critical path; the twenty largest.",
                    unit="percentunit",
                    step="5m",
                    alerts=("TraceRLOverheadAboveBudget",),
                ),
            ),
        ),
        Row(
            "Trust",
            (
                Panel(
                    "Gap, guided",
                    (Query(f"topk(20, {most(_GUIDED, PER_JOB)})", _NAME),),
                    "Mean |difference of log-probs| between trainer and rollout; the twenty largest.",
                    alerts=("TraceRLGapRising",),
                ),
                Panel(
                    "Record rows missing",
                    (Query(total(increase("tracerl_records_missing_total", FLEET), PER_JOB), _NAME),),
                    "Rows that trained without their record.",
                    step="5m",
                    alerts=("TraceRLRecordsMissing",),
                ),
                Panel(
                    "Restarts",
                    (Query(total(increase("tracerl_restarts_total", FLEET), PER_JOB), _NAME),),
                    "Times that a job's loop found another rollout in the place of one that it knew.",
                    step="5m",
                ),
            ),
        ),
        Row(
            "Jobs",
            (
                Panel(
                    "Jobs that run",
                    (
                        Query(most(series("tracerl_info", FLEET), f"{PER_JOB}, method, format"), "runs"),
                        _of_job("tracerl_step", "step"),
                        _of_job("tracerl_steps", "of"),
                        _of_job("tracerl_reward_mean", "reward"),
                        Query(most(_GUIDED, PER_JOB), "gap"),
                        _of_job("tracerl_step_overhead_ratio", "overhead"),
                        _of_job("tracerl_step_seconds", "step time"),
                    ),
                    "Jobs whose trainer is scraped, as of their last step; a name leads to its dashboard.",
                    kind=Kind.TABLE,
                    width=24,
                    link=_JOB_LINK,
                    hidden=("Value #A",),
                ),
            ),
        ),
    ),
)
