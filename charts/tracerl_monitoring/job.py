"""One job: how far it is, where its steps' time goes, whether rollout and trainer agree, and its records."""

from __future__ import annotations

from tracerl.api.constants import Role
from tracerl_monitoring.panels import Board, Kind, Panel, Query, Row, Variable
from tracerl_monitoring.rest import with_the_rest
from tracerl_monitoring.series import ONE_JOB, increase, most, quantile, rate, series, total

_GAP = "tracerl_train_rollout_logprob_abs_diff"
_RING = "tracerl_store_ring_bytes"
_OVERHEAD = rate("tracerl_step_overhead_seconds_total", ONE_JOB)
_CRITICAL_PATH = total(rate("tracerl_step_critical_path_seconds_total", ONE_JOB))


def _value(name: str, legend: str = "", **matchers: str) -> Query:
    """Make the query of a gauge that one trainer shows."""
    return Query(most(series(name, ONE_JOB, **matchers)), legend)


def _number(title: str, query: Query, text: str, unit: str = "short") -> Panel:
    return Panel(title, (query,), text, unit=unit, kind=Kind.NUMBER, width=3)


def _mean_time(seconds: str, count: str, by: str) -> str:
    return f"{total(rate(seconds, ONE_JOB), by)} / {total(rate(count, ONE_JOB), by)}"


def _by_layer(forward: str) -> Panel:
    mismatch = series("tracerl_code_mismatch_ratio", ONE_JOB, forward=forward, site='=~"$site"')
    # Layers are text to Prometheus, and 10 would come before 2.
    padded = f'label_replace({most(mismatch, "layer")}, "layer", "0$1", "layer", "([0-9])")'
    return Panel(
        f"Code mismatch by layer, {forward}",
        (Query(f'label_replace({padded}, "layer", "0$1", "layer", "([0-9]{{2}})")', "{{layer}}"),),
        f"Audited values whose code in the {forward} forward is not the rollout's; needs records.auditEvery.",
        unit="percentunit",
        kind=Kind.HEAT_MAP,
        width=12,
    )


_PROGRESS = Row(
    "Now",
    (
        _number("Steps done", _value("tracerl_step"), "Steps done."),
        _number("Steps wanted", _value("tracerl_steps"), "Steps wanted."),
        _number("Reward", _value("tracerl_reward_mean"), "Mean training reward of the last step."),
        _number("Held-out reward", _value("tracerl_evaluation_reward_mean"), "Mean held-out reward."),
        _number(
            "Tokens a second",
            Query(total(rate("tracerl_generated_tokens_total", ONE_JOB))),
            "Tokens that the rollouts sample.",
        ),
        _number(
            "Gap, guided",
            _value(_GAP, forward="guided", stat="mean"),
            "Mean |difference of log-probs| between trainer and rollout, last step.",
        ),
        _number(
            "Overhead",
            _value("tracerl_step_overhead_ratio"),
            "Records, guided kernels and extra forward over the critical path, last step.",
            "percentunit",
        ),
        _number(
            "Restarts",
            Query(total(series("tracerl_restarts_total", ONE_JOB))),
            "Times that the loop found another rollout in the place of one that it knew.",
        ),
    ),
)
_THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens a second",
            (
                Query(total(rate("tracerl_generated_tokens_total", ONE_JOB)), "sampled"),
                Query(total(rate("tracerl_trained_tokens_total", ONE_JOB)), "trained on"),
            ),
            "Tokens that rollouts sample, and generated tokens that the trainer trains on, once a step.",
            step="1m",
            alerts=("TraceRLJobStuck", "TraceRLJobNotReady"),
        ),
        Panel(
            "Step by part",
            (Query(most(series("tracerl_step_part_seconds", ONE_JOB), "part"), "{{part}}"),),
            "Where the wall time of the last step went.",
            unit="s",
            kind=Kind.STACK,
        ),
        Panel(
            "Step time",
            (_value("tracerl_step_seconds", "step"),),
            "Wall time of the last step.",
            unit="s",
            alerts=("TraceRLJobStuck",),
        ),
        Panel(
            "Overhead of the last step",
            (
                _value("tracerl_step_overhead_ratio", "all"),
                Query(most(series("tracerl_step_overhead_part_ratio", ONE_JOB), "part"), "{{part}}"),
            ),
            "What TRACE adds, over the step's critical path: wall time without evaluation and checkpoint.",
            unit="percentunit",
            alerts=("TraceRLOverheadAboveBudget",),
        ),
        Panel(
            "Overhead by component",
            (
                Query(
                    f"{total(_OVERHEAD, 'part')} / ignoring (part) group_left () {_CRITICAL_PATH}", "{{part}}"
                ),
            ),
            "The timed components over the critical path. Some of them go on beside it, in the rollout.",
            unit="percentunit",
            step="5m",
            alerts=("TraceRLOverheadAboveBudget",),
        ),
        Panel(
            "Overhead by steps without records",
            (Query(most(series("tracerl_baseline_overhead_ratio", ONE_JOB), "bound"), "{{bound}}"),),
            "CPU time that records and guidance cost, by steps that were done without them as well, with the "
            "95 % interval over the run; needs observe.baselineEvery.",
            unit="percentunit",
        ),
        Panel(
            "Steps done without records as well",
            (_value("tracerl_baseline_pairs", "pairs"),),
            "Pairs of steps behind that figure.",
        ),
        Panel(
            "Requests in rollouts",
            (
                Query(total(series("tracerl_rollout_running_requests", ONE_JOB)), "decoded"),
                Query(total(series("tracerl_rollout_queued_requests", ONE_JOB)), "waiting"),
            ),
            "Sequences being decoded, and those that wait.",
        ),
        Panel(
            "Sequences prefilled again",
            (Query(total(increase("tracerl_rollout_retracted_total", ONE_JOB), "reason"), "{{reason}}"),),
            "Because their cache was given away (memory) or weights are newer.",
            step="1m",
        ),
        Panel(
            "Weights",
            (
                _value("tracerl_policy_version", "trainer"),
                Query(f"min({series('tracerl_rollout_weight_version', ONE_JOB)})", "rollout, oldest"),
            ),
            "Policy version of the trainer, and of the rollout that is farthest behind.",
        ),
    ),
)
_LEARNING = Row(
    "Reward",
    (
        Panel(
            "Reward",
            (_value("tracerl_reward_mean", "training"), _value("tracerl_evaluation_reward_mean", "held out")),
            "Mean reward of the last step's trajectories, and of the last evaluation.",
        ),
        Panel(
            "Loss and gradient",
            (_value("tracerl_policy_loss", "policy loss"), _value("tracerl_gradient_norm", "gradient norm")),
            "Clipped GRPO loss, and the global gradient norm before clipping.",
        ),
        Panel(
            "Shares",
            (
                _value("tracerl_ppo_clipped_ratio", "clipped tokens"),
                _value("tracerl_groups_without_signal_ratio", "groups without signal"),
            ),
            "Generated tokens with a clipped ratio; groups whose rewards are all equal.",
            unit="percentunit",
        ),
    ),
)
_TRUST = Row(
    "Does the trainer see the model that generated?",
    (
        Panel(
            "Gap",
            (Query(most(series(_GAP, ONE_JOB, stat="mean"), "forward"), "{{forward}}"),),
            "Mean |difference of log-probs| of generated tokens in nats; unguided is round to nearest.",
            alerts=("TraceRLGapRising",),
        ),
        Panel(
            "Largest gap",
            (Query(most(series(_GAP, ONE_JOB, stat="max"), "forward"), "{{forward}}"),),
            "Of a single token, in nats.",
        ),
        Panel(
            "Gap by position, guided",
            (
                Query(
                    most(series(f"{_GAP}_by_position", ONE_JOB, forward="guided"), "position"), "{{position}}"
                ),
            ),
            "Mean by position in the response, in nats.",
        ),
        Panel(
            "Divergence",
            (_value("tracerl_rollout_corr_kl", "KL"), _value("tracerl_rollout_corr_k3_kl", "k3")),
            "Estimates of the divergence between rollout and trainer, in nats, by verl's formulas.",
        ),
        Panel(
            "Importance weights",
            (
                _value("tracerl_rollout_corr_rollout_is_eff_sample_size", "effective sample size"),
                _value("tracerl_rollout_corr_rollout_is_ratio_fraction_high", "cut to the bound"),
            ),
            "Effective over actual sample size, and tokens whose weight was cut to importanceSampling.upper.",
            unit="percentunit",
        ),
        Panel(
            "Staleness",
            (
                Query(most(series("tracerl_staleness_versions", ONE_JOB), "stat"), "{{stat}}"),
                _value("tracerl_staleness_limit_versions", "limit"),
            ),
            "Trainer's version minus that of a trajectory's oldest token; limit: algorithm.maxVersionDiff.",
            alerts=("TraceRLStalenessAtBound",),
        ),
        _by_layer("guided"),
        _by_layer("unguided"),
    ),
)
_RECORDS = Row(
    "Records",
    (
        Panel(
            "Record rows missing",
            (Query(total(increase("tracerl_records_missing_total", ONE_JOB), "reason"), "{{reason}}"),),
            "Rows that trained without their record, by reason.",
            step="1m",
            alerts=("TraceRLRecordsMissing",),
        ),
        Panel(
            "Frames not written",
            (Query(total(increase("tracerl_records_dropped_total", ONE_JOB), "reason"), "{{reason}}"),),
            "Frames that rollouts dropped, by reason. Their rows are missing later.",
            step="1m",
            alerts=("TraceRLRecordsMissing", "TraceRLRingFull"),
        ),
        Panel(
            "Record bytes",
            (
                Query(total(rate("tracerl_records_written_bytes_total", ONE_JOB)), "written"),
                Query(total(rate("tracerl_records_read_bytes_total", ONE_JOB), "path"), "read, {{path}}"),
            ),
            "Frame bytes a second that rollouts write, and that the trainer reads, by where they were.",
            unit="Bps",
            step="1m",
        ),
        Panel(
            "Ring in use",
            (
                Query(
                    f"1 - {total(series(_RING, ONE_JOB, state='free'), 'pod')}"
                    f" / {total(series(_RING, ONE_JOB), 'pod')}",
                    "{{pod}}",
                ),
            ),
            "Share of each record store's shared memory that is not free. Producers wait where it is all.",
            unit="percentunit",
            alerts=("TraceRLRingFull",),
        ),
        Panel(
            "Frames by where they are",
            (Query(total(series("tracerl_store_frame_bytes", ONE_JOB), "tier"), "{{tier}}"),),
            "Bytes that stores hold: in the ring, spilled to disk, or in the object store.",
            unit="bytes",
            kind=Kind.STACK,
            alerts=("TraceRLRingFull", "TraceRLSpillFull"),
        ),
        Panel(
            "Room for spilling",
            (Query(f"min({series('tracerl_store_spill_free_bytes', ONE_JOB)})", "least"),),
            "What still fits below transport.spillPath, where least does; only with a spillPath.",
            unit="bytes",
            alerts=("TraceRLSpillFull",),
        ),
        Panel(
            "Producers that wait",
            (
                Query(total(increase("tracerl_store_lease_waits_total", ONE_JOB)), "waited"),
                Query(total(increase("tracerl_store_lease_timeouts_total", ONE_JOB)), "in vain"),
                Query(total(increase("tracerl_rollout_admission_stalls_total", ONE_JOB)), "nothing admitted"),
            ),
            "Times that a rollout waited for room in the ring, and what came of it.",
            step="1m",
            alerts=("TraceRLRingFull",),
        ),
        Panel(
            "Time of a byte's read",
            (
                Query(
                    _mean_time(
                        "tracerl_records_read_seconds_total", "tracerl_records_read_bytes_total", "path"
                    ),
                    "{{path}}",
                ),
            ),
            "Seconds that the trainer's reads take for a byte, by where it was.",
            unit="s",
            step="5m",
        ),
    ),
)
_OBJECTS = Row(
    "Object store",
    (
        Panel(
            "S3 latency",
            tuple(
                Query(
                    quantile(share, "tracerl_object_request_duration_seconds", ONE_JOB, by="operation"),
                    f"{{{{operation}}}} {share}",
                )
                for share in ("0.5", "0.99")
            ),
            "Time of a rollout's requests, by operation: half, and 99 of 100, took no longer; without the "
            "wait for their turn.",
            unit="s",
            step="1m",
            alerts=("TraceRLObjectStoreFailing",),
        ),
        Panel(
            "Requests",
            (
                Query(
                    total(rate("tracerl_object_requests_total", ONE_JOB), "operation, result"),
                    "{{operation}} {{result}}",
                ),
            ),
            "Requests of rollouts to the object store a second, each try counted.",
            unit="cps",
            step="1m",
            alerts=("TraceRLObjectStoreFailing",),
        ),
        Panel(
            "Uploads",
            (
                Query(total(increase("tracerl_object_uploads_total", ONE_JOB), "result"), "{{result}}"),
                Query(total(increase("tracerl_object_retries_total", ONE_JOB)), "tried again"),
                Query(
                    total(increase("tracerl_store_tier_errors_total", ONE_JOB, tier="object")),
                    "segments that stores could not move",
                ),
            ),
            "Objects by how their upload ended. The frames of one that failed are lost.",
            step="1m",
            alerts=("TraceRLObjectStoreFailing",),
        ),
    ),
)

JOB_BOARD = with_the_rest(
    Board(
        name="job",
        title="TraceRL / Job",
        text="One job: how far it is, where its time goes, whether both sides agree, and its records.",
        page="how-to/dashboards",
        variables=(
            Variable("namespace", "tracerl_info"),
            Variable("job", "tracerl_info", 'namespace="$namespace"'),
            Variable("site", "tracerl_code_mismatch_ratio", ONE_JOB, several=True),
        ),
        rows=(_PROGRESS, _THROUGHPUT, _LEARNING, _TRUST, _RECORDS, _OBJECTS),
    ),
    {Role.TRAINER, Role.ROLLOUT, Role.STORE},
    ONE_JOB,
)
