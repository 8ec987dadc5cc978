"""The one list of names that several parts share: conditions, reasons, labels, annotations and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod
from typing import Literal, Self

from tracerl.api.job import GROUP


class _Documented(StrEnum):
    """A string enum whose members carry the sentence that the reference page shows."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


class ConditionType(_Documented):
    """Types of `status.conditions`."""

    READY = "Ready", "Rollout and trainer of every node run and show the same site table."
    SUSPENDED = (
        "Suspended",
        "The job holds no machines: it was asked to stop and has released them, or its queue has not "
        "admitted it.",
    )
    COMPLETE = "Complete", "All steps are done; terminal."
    FAILED = "Failed", "The job ended without being complete; terminal. The reason says why."


class Reason(_Documented):
    """Reasons of conditions and of events; those of Failed are also the `reason` of a `JobError`."""

    RUNNING = "Running", "All parts run."
    STARTING = "Starting", "Parts are being started."
    COMPLETED = "Completed", "All steps are done."
    SUSPENDED_BY_SPEC = "SuspendedBySpec", "spec.suspend is true."
    RESUMED = "Resumed", "spec.suspend is false."
    QUEUED = "Queued", "Kueue has not admitted the job yet, or took its machines back."
    INVALID_SPEC = "InvalidSpec", "The manifest breaks a rule that needs the model or the machine."
    CONFIGURATION = (
        "Configuration",
        "Something outside the manifest is missing or wrong; the message says what.",
    )
    UNSCHEDULABLE = "Unschedulable", "No node has what a pod asks for; the message says what is short."
    MODEL_LOAD = "ModelLoad", "The model or the tokenizer could not be read."
    TASK_LOAD = "TaskLoad", "The prompts or the reward function could not be read."
    REWARD_FAILED = "RewardFailed", "The reward function raised, took too long or returned no finite number."
    PROMPT_TOO_LONG = "PromptTooLong", "A prompt has more tokens than algorithm.maxPromptTokens."
    NON_FINITE = (
        "NonFinite",
        "A NaN or an infinity reached a quantiser, a loss or a gradient; the message names it.",
    )
    SITE_TABLE_MISMATCH = "SiteTableMismatch", "Rollout and trainer would record different sites."
    RECORDS_MISSING = "RecordsMissing", "The share of missing record rows passed records.maxMissingRatio."
    TRANSPORT_FAILED = (
        "TransportFailed",
        "Record frames could not be written or read, for example a full disk.",
    )
    RECORD_STORE_RESTARTED = (
        "RecordStoreRestarted",
        "A record store came back empty; what it held is generated again. Event.",
    )
    RECORD_STORE_FULL = (
        "RecordStoreFull",
        "A record store has little room, so no new prompts are submitted until frames are released. Event.",
    )
    ROLLOUT_FAILED = "RolloutFailed", "A rollout answered with an error that a restart does not cure."
    WEIGHT_SYNC_FAILED = "WeightSyncFailed", "Weights could not be pushed to a rollout."
    RESTARTED = "Restarted", "A process was killed and is started again; event of who started it."
    ROLLOUT_RESTARTED = (
        "RolloutRestarted",
        "A rollout came back and has the weights again; what it was generating is generated again. Event.",
    )
    CHECKPOINT_DAMAGED = "CheckpointDamaged", "A checkpoint was not whole; the one before it is used. Event."
    WARMUP_CACHE = (
        "WarmupCache",
        "Warmed-up weights could not be read from or written to the cache; they are computed. Event.",
    )
    TRAINER_LOST = "TrainerLost", "Another trainer process is gone or did not answer in time."
    RESTARTS_EXHAUSTED = "RestartsExhausted", "More restarts were needed than failurePolicy.maxRestarts."
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The job ran longer than spec.activeDeadlineSeconds."
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "A checkpoint could not be written or does not belong to this job.",
    )
    RUN_LOG_FAILED = "RunLogFailed", "The run log could not be written, for example because the disk is full."
    EXPECTATION_BROKEN = "ExpectationBroken", "A figure of spec.expect was not reached."
    UNEXPECTED = "Unexpected", "An error that nobody foresaw; the log has the details."
    INTERRUPTED = "Interrupted", "The job was stopped from outside, for example by Ctrl-C."


LABEL_JOB_NAME = f"{GROUP}/job-name"
"""Label of every object that belongs to a job: the job's name."""
LABEL_JOB_UID = f"{GROUP}/job-uid"
"""Label of every object that belongs to a job: the job's UID."""
LABEL_ROLE = f"{GROUP}/role"
"""Label of pods: a value of `Role`."""
LABEL_METHOD = f"{GROUP}/method"
"""Label of pods: `spec.method.name`, for relabelling into metrics."""
LABEL_CANARY = f"{GROUP}/canary"
"""Label of jobs: "true" on those whose end the operator shows as that of a canary."""
ANNOTATION_RESOLVED_HASH = f"{GROUP}/resolved-job-sha256"
"""Annotation of pods: sha256 of the resolved job document that they were started with."""


class Role(StrEnum):
    """Who runs a process or shows a metric."""

    ROLLOUT = "rollout"
    STORE = "store"
    TRAINER = "trainer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric as it is exposed. Counters end in `_total`; units are base units and part of the name.

    `labels` have few values each and never hold a trajectory, a pod or a prompt; none is called as what a
    PodMonitor adds. `source` is the role that exposes the metric. `values` has the values of each label, none
    for one of `OPEN_LABELS`.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    source: Role
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def most_series(self) -> int:
        """Most label combinations that a process shows."""
        return prod(
            len(values) or OPEN_LABELS[label].most
            for label, values in zip(self.labels, self.values, strict=True)
        )

    def listed(self) -> Iterator[tuple[str, ...]]:
        """Give all combinations of label values; none where a label is open."""
        return product(*self.values)


@dataclass(frozen=True, slots=True)
class OpenLabel:
    """A label whose values are no list: the most that one process shows, and what bounds them."""

    most: int
    doc: str


OPEN_LABELS: dict[str, OpenLabel] = {
    "method": OpenLabel(1, "The job's own, `spec.method.name`."),
    "format": OpenLabel(1, "The job's own, `spec.quantization.format`."),
    "version": OpenLabel(1, "That of the package."),
    "layer": OpenLabel(128, "Number of a layer of the model; audits alone have it."),
    "position": OpenLabel(24, "Ranges whose bounds are powers of two: 0, 1, 2-3, 4-7, …"),
    "code": OpenLabel(64, "HTTP status, 0 without an answer, other where HTTP has no such status."),
    "reason": OpenLabel(66, "NoAnswer, Unexpected, or Code and an HTTP status."),
    "kind": OpenLabel(32, "Kinds of objects that the operator reads or writes."),
}
"""Every label of which a metric has no list of values."""


_TRAINER, _ROLLOUT, _STORE, _OPERATOR = Role.TRAINER, Role.ROLLOUT, Role.STORE, Role.OPERATOR
_D = "logp_old - logp_rollout of a generated token"

# verl's rollout_corr/* under our prefix, verl's formulas: d = logp_old - logp_rollout, rho = exp(d), w = the
# importance weight after the bound.
_ROLLOUT_CORR: tuple[tuple[str, str, str], ...] = (
    ("kl", "nats", "mean(-d)."),
    ("k3_kl", "nats", "mean(rho - d - 1)."),
    ("training_ppl", "", "Trainer's perplexity, mean over sequences."),
    ("training_log_ppl", "nats", "Its logarithm, mean over sequences."),
    ("rollout_ppl", "", "Rollout's perplexity, mean over sequences."),
    ("rollout_log_ppl", "nats", "Its logarithm, mean over sequences."),
    ("log_ppl_diff", "nats", "Mean over sequences of mean -d."),
    ("log_ppl_abs_diff", "nats", "Mean over sequences of |mean d|."),
    ("log_ppl_diff_max", "nats", "Largest mean -d of a sequence."),
    ("log_ppl_diff_min", "nats", "Smallest mean -d of a sequence."),
    ("ppl_ratio", "", "Trainer's over rollout's perplexity, mean over sequences."),
    ("chi2_token", "", "mean(rho^2) - 1 over tokens."),
    ("chi2_seq", "", "mean(exp(2 sum d)) - 1 over sequences."),
    ("rollout_is_mean", "", "Mean w, after the bound."),
    ("rollout_is_std", "", "Standard deviation of w, after the bound."),
    ("rollout_is_max", "", "Largest w, after the bound: at most importanceSampling.upper, as in verl."),
    ("rollout_is_min", "", "Smallest w, after the bound."),
    ("rollout_is_ratio_fraction_high", "ratio", "Tokens whose weight was cut to importanceSampling.upper."),
    ("rollout_is_ratio_fraction_low", "ratio", "Tokens whose weight is below 1 / importanceSampling.upper."),
    ("rollout_is_eff_sample_size", "ratio", "1 / mean((w / mean(w))^2): effective over actual sample size."),
    ("rollout_is_seq_mean", "", "Mean over sequences of mean w."),
    ("rollout_is_seq_std", "", "Standard deviation over sequences of mean w."),
    ("rollout_is_seq_max", "", "Largest mean w of a sequence."),
    ("rollout_is_seq_min", "", "Smallest mean w of a sequence."),
    ("rollout_is_seq_max_deviation", "", "Largest |mean w - 1| of a sequence."),
    ("rollout_is_seq_fraction_high", "ratio", "Sequences whose mean weight before the bound is above it."),
    ("rollout_is_seq_fraction_low", "ratio", "Sequences whose mean weight is below 1 / upper."),
    ("token_mult_prob_error", "", "mean(exp|d|), NeMo RL's name."),
    ("rollout_probs_diff_mean", "", "Mean |difference of probabilities|, not of log-probs."),
    ("rollout_probs_diff_max", "", "Largest |difference of probabilities|."),
)

_FORWARDS, _MEAN_AND_MAX = ("guided", "unguided"), ("mean", "max")
_QUANTISED = ("ExpertInput", "Key", "Value", "FC2Input")
_MISSING = ("missing", "checksum", "version", "site_table", "shape")
_READ_PATHS = ("ring", "spill", "http", "object")
_TIERS = ("ring", "spill", "object")
_OPERATIONS, _RESULTS = ("read", "write", "delete", "list"), ("ok", "failed")
_STEP_PARTS = (
    *("generate_wait", "fetch", "load", "unpack", "forward_old_guided", "forward_old_unguided"),
    *("train_forward", "train_backward", "optimizer", "push_weights", "evaluate", "checkpoint"),
)
_OVERHEAD_PARTS = ("capture", "pack", "put", "fetch", "unpack", "guided_kernels", "extra_forward")
_VERBS = ("GET", "LIST", "WATCH", "CREATE", "UPDATE", "APPLY", "PATCH", "DELETE")
_OPEN: tuple[str, ...] = ()

METRICS: tuple[MetricSpec, ...] = (
    # -- progress -----------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_info", "gauge", "", ("method", "format", "version"), "1; what runs.", _TRAINER, (_OPEN,) * 3
    ),
    MetricSpec("tracerl_step", "gauge", "", (), "Steps done.", _TRAINER),
    MetricSpec("tracerl_steps", "gauge", "", (), "Steps wanted.", _TRAINER),
    MetricSpec("tracerl_policy_version", "gauge", "", (), "Version of the trainer's weights.", _TRAINER),
    MetricSpec(
        "tracerl_restarts_total",
        "counter",
        "",
        ("restarted",),
        "Times that the loop found another process of a role in the place of one that it knew.",
        _TRAINER,
        (("rollout",),),
    ),
    # -- reward and loss ----------------------------------------------------------------------------------
    MetricSpec("tracerl_reward_mean", "gauge", "", (), "Mean training reward of the last step.", _TRAINER),
    MetricSpec("tracerl_evaluation_reward_mean", "gauge", "", (), "Mean held-out reward.", _TRAINER),
    MetricSpec(
        "tracerl_groups_without_signal_ratio",
        "gauge",
        "ratio",
        (),
        "Groups of the last step whose rewards are all equal.",
        _TRAINER,
    ),
    MetricSpec("tracerl_policy_loss", "gauge", "", (), "Clipped GRPO loss of the last step.", _TRAINER),
    MetricSpec(
        "tracerl_ppo_clipped_ratio", "gauge", "ratio", (), "Generated tokens with a clipped ratio.", _TRAINER
    ),
    MetricSpec("tracerl_gradient_norm", "gauge", "", (), "Global gradient norm before clipping.", _TRAINER),
    MetricSpec("tracerl_learning_rate", "gauge", "", (), "Learning rate of the last update.", _TRAINER),
    # -- the gap between rollout and trainer --------------------------------------------------------------
    MetricSpec(
        "tracerl_train_rollout_logprob_abs_diff",
        "gauge",
        "nats",
        ("forward", "stat"),
        f"|{_D}| in the last step.",
        _TRAINER,
        (_FORWARDS, _MEAN_AND_MAX),
    ),
    MetricSpec(
        "tracerl_train_rollout_logprob_abs_diff_by_position",
        "gauge",
        "nats",
        ("forward", "position"),
        f"Mean |{_D}| by position in the response; position is one of few ranges.",
        _TRAINER,
        (_FORWARDS, _OPEN),
    ),
    *(
        MetricSpec(f"tracerl_rollout_corr_{key}", "gauge", unit, (), text, _TRAINER)
        for key, unit, text in _ROLLOUT_CORR
    ),
    # -- quantisation -------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_code_mismatch_ratio",
        "gauge",
        "ratio",
        ("layer", "site", "forward"),
        "Audited values whose trainer code differs from the rollout's.",
        _TRAINER,
        (_OPEN, _QUANTISED, _FORWARDS),
    ),
    MetricSpec(
        "tracerl_code_mismatch_adjacent_ratio",
        "gauge",
        "ratio",
        ("layer", "site", "forward"),
        "Mismatched audited values whose code is next to the rollout's.",
        _TRAINER,
        (_OPEN, _QUANTISED, _FORWARDS),
    ),
    MetricSpec(
        "tracerl_rebuilt_scale_error_ratio",
        "gauge",
        "ratio",
        ("layer", "site"),
        "Audited blocks whose rebuilt scale is not the rollout's.",
        _TRAINER,
        (_OPEN, _QUANTISED),
    ),
    # -- records ------------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_records_bytes_total",
        "counter",
        "bytes",
        ("kind",),
        "Frame bytes that steps trained with.",
        _TRAINER,
        (("record", "audit"),),
    ),
    MetricSpec(
        "tracerl_records_bytes_per_token", "gauge", "bytes", (), "Record bytes a row, last step.", _TRAINER
    ),
    MetricSpec(
        "tracerl_records_rows_total", "counter", "rows", (), "Record rows that training asked for.", _TRAINER
    ),
    MetricSpec(
        "tracerl_records_missing_total",
        "counter",
        "rows",
        ("reason",),
        "Rows without a usable record.",
        _TRAINER,
        (_MISSING,),
    ),
    MetricSpec(
        "tracerl_record_version_lag",
        "gauge",
        "versions",
        ("stat",),
        "Trainer's minus record's version.",
        _TRAINER,
        (_MEAN_AND_MAX,),
    ),
    MetricSpec(
        "tracerl_records_read_bytes_total",
        "counter",
        "bytes",
        ("path",),
        "Frame bytes read by where they were, also ahead for later steps.",
        _TRAINER,
        (_READ_PATHS,),
    ),
    MetricSpec(
        "tracerl_records_read_seconds_total",
        "counter",
        "seconds",
        ("path",),
        "Time that reads took by path; reads that overlap count each.",
        _TRAINER,
        (_READ_PATHS,),
    ),
    MetricSpec("tracerl_records_held_bytes", "gauge", "bytes", (), "Frame bytes not yet released.", _ROLLOUT),
    MetricSpec(
        "tracerl_records_written_bytes_total",
        "counter",
        "bytes",
        ("kind",),
        "Frame bytes written.",
        _ROLLOUT,
        (("record", "audit"),),
    ),
    MetricSpec(
        "tracerl_records_dropped_total",
        "counter",
        "frames",
        ("reason",),
        "Frames not written.",
        _ROLLOUT,
        (("full", "failed", "permission", "foreign", "missing", "damaged", "lost"),),
    ),
    MetricSpec(
        "tracerl_object_uploads_total",
        "counter",
        "",
        ("result",),
        "Objects of frames by how their upload ended.",
        _ROLLOUT,
        (_RESULTS,),
    ),
    MetricSpec(
        "tracerl_object_uploaded_bytes_total", "counter", "bytes", (), "Bytes of uploaded objects.", _ROLLOUT
    ),
    MetricSpec(
        "tracerl_object_retries_total",
        "counter",
        "",
        (),
        "Requests to the object store made again.",
        _ROLLOUT,
    ),
    MetricSpec(
        "tracerl_object_requests_total",
        "counter",
        "",
        ("operation", "result"),
        "Requests of a rollout to the object store, each try counted.",
        _ROLLOUT,
        (_OPERATIONS, _RESULTS),
    ),
    MetricSpec(
        "tracerl_object_request_duration_seconds",
        "histogram",
        "seconds",
        ("operation",),
        "Time that each of these requests took, without the wait for its turn.",
        _ROLLOUT,
        (_OPERATIONS,),
    ),
    # -- record store -------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_store_ring_bytes",
        "gauge",
        "bytes",
        ("state",),
        "Shared memory of the ring: free, live (frames) or dead (released, in a segment with live frames).",
        _STORE,
        (("free", "live", "dead"),),
    ),
    MetricSpec(
        "tracerl_store_segments",
        "gauge",
        "",
        ("state",),
        "Segments by state.",
        _STORE,
        (("free", "leased", "closed"),),
    ),
    MetricSpec("tracerl_store_frames", "gauge", "frames", ("tier",), "Frames by tier.", _STORE, (_TIERS,)),
    MetricSpec(
        "tracerl_store_frame_bytes",
        "gauge",
        "bytes",
        ("tier",),
        "Bytes of frames by tier.",
        _STORE,
        (_TIERS,),
    ),
    MetricSpec(
        "tracerl_store_spill_free_bytes",
        "gauge",
        "bytes",
        (),
        "What still fits below spec.transport.spillPath, by its file system and spillLimit.",
        _STORE,
    ),
    MetricSpec("tracerl_store_committed_bytes_total", "counter", "bytes", (), "Frame bytes put.", _STORE),
    MetricSpec("tracerl_store_committed_frames_total", "counter", "frames", (), "Frames put.", _STORE),
    MetricSpec("tracerl_store_released_frames_total", "counter", "frames", (), "Frames released.", _STORE),
    MetricSpec(
        "tracerl_store_read_bytes_total",
        "counter",
        "bytes",
        ("path",),
        "Frame bytes asked for by readers of this node (ring) or of another one (http).",
        _STORE,
        (("ring", "http"),),
    ),
    MetricSpec(
        "tracerl_store_relocated_bytes_total",
        "counter",
        "bytes",
        ("tier",),
        "Frame bytes moved out of the ring.",
        _STORE,
        (("spill", "object"),),
    ),
    MetricSpec(
        "tracerl_store_tier_errors_total",
        "counter",
        "",
        ("tier",),
        "Segments that a tier could not take or give back.",
        _STORE,
        (("spill", "object"),),
    ),
    MetricSpec(
        "tracerl_store_lease_waits_total", "counter", "", (), "Times that a producer waited for room.", _STORE
    ),
    MetricSpec(
        "tracerl_store_lease_timeouts_total", "counter", "", (), "Times that it waited in vain.", _STORE
    ),
    MetricSpec("tracerl_store_pins", "gauge", "frames", (), "Frames being read.", _STORE),
    MetricSpec(
        "tracerl_store_connections",
        "gauge",
        "",
        ("peer",),
        "Connections by who is at the other end.",
        _STORE,
        (("producer", "reader", "control"),),
    ),
    MetricSpec(
        "tracerl_store_refused_total",
        "counter",
        "",
        ("reason",),
        "Peers or requests refused, by what about them was wrong.",
        _STORE,
        (("token", "job", "run", "protocol"),),
    ),
    # -- time ---------------------------------------------------------------------------------------------
    MetricSpec("tracerl_step_seconds", "gauge", "seconds", (), "Wall time of the last step.", _TRAINER),
    MetricSpec(
        "tracerl_step_part_seconds",
        "gauge",
        "seconds",
        ("part",),
        "Wall time of the last step by part.",
        _TRAINER,
        (_STEP_PARTS,),
    ),
    MetricSpec(
        "tracerl_step_overhead_seconds_total",
        "counter",
        "seconds",
        ("part",),
        "What TRACE adds to steps.",
        _TRAINER,
        (_OVERHEAD_PARTS,),
    ),
    MetricSpec(
        "tracerl_step_critical_path_seconds_total",
        "counter",
        "seconds",
        (),
        "Wall time of steps without evaluation and checkpoint: what the overhead is a share of.",
        _TRAINER,
    ),
    MetricSpec(
        "tracerl_step_overhead_ratio",
        "gauge",
        "ratio",
        (),
        "Records, guided kernels and extra forward of the last step over its critical path.",
        _TRAINER,
    ),
    MetricSpec(
        "tracerl_step_overhead_part_ratio",
        "gauge",
        "ratio",
        ("part",),
        "The three parts of tracerl_step_overhead_ratio, which is their sum.",
        _TRAINER,
        (("records", "guided_kernels", "extra_forward"),),
    ),
    MetricSpec(
        "tracerl_baseline_overhead_ratio",
        "gauge",
        "ratio",
        ("bound",),
        "What records cost by steps that were done without them as well, in CPU time (with GPUs: in theirs) "
        "over that of the whole step, with its 95 % interval; absent without spec.observe.baselineEvery.",
        _TRAINER,
        (("estimate", "low", "high"),),
    ),
    MetricSpec("tracerl_baseline_pairs", "gauge", "", (), "Steps behind that figure.", _TRAINER),
    MetricSpec("tracerl_generated_tokens_total", "counter", "tokens", (), "Tokens sampled.", _ROLLOUT),
    MetricSpec(
        "tracerl_trained_tokens_total", "counter", "tokens", (), "Generated tokens trained on.", _TRAINER
    ),
    # -- staleness ----------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_staleness_versions",
        "gauge",
        "versions",
        ("stat",),
        "Trainer's version minus that of the oldest token, of the last step's trajectories.",
        _TRAINER,
        (_MEAN_AND_MAX,),
    ),
    MetricSpec(
        "tracerl_staleness_limit_versions",
        "gauge",
        "versions",
        (),
        "spec.algorithm.maxVersionDiff.",
        _TRAINER,
    ),
    MetricSpec(
        "tracerl_groups_dropped_total",
        "counter",
        "groups",
        (),
        "Groups that became too old and were dropped.",
        _TRAINER,
    ),
    # -- rollout ------------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_rollout_running_requests", "gauge", "requests", (), "Sequences being decoded.", _ROLLOUT
    ),
    MetricSpec("tracerl_rollout_queued_requests", "gauge", "requests", (), "Sequences that wait.", _ROLLOUT),
    MetricSpec("tracerl_rollout_kv_cache_tokens", "gauge", "tokens", (), "Tokens in the KV cache.", _ROLLOUT),
    MetricSpec(
        "tracerl_rollout_retracted_total",
        "counter",
        "requests",
        ("reason",),
        "Sequences prefilled again, since their cache was given away (memory) or weights are newer.",
        _ROLLOUT,
        (("memory", "weights"),),
    ),
    MetricSpec(
        "tracerl_rollout_reprefilled_rows_total",
        "counter",
        "rows",
        ("reason",),
        "Rows computed again under the same weights (memory) or newer ones (weights).",
        _ROLLOUT,
        (("memory", "weights"),),
    ),
    MetricSpec(
        "tracerl_rollout_admission_stalls_total",
        "counter",
        "",
        (),
        "Times that nothing was admitted because frames waited to be written.",
        _ROLLOUT,
    ),
    MetricSpec(
        "tracerl_rollout_weight_version", "gauge", "", (), "Version of the rollout's weights.", _ROLLOUT
    ),
    # -- operator -----------------------------------------------------------------------------------------
    MetricSpec(
        "tracerl_operator_build_info",
        "gauge",
        "",
        ("version",),
        "1; which version runs.",
        _OPERATOR,
        (_OPEN,),
    ),
    MetricSpec(
        "tracerl_operator_leads",
        "gauge",
        "",
        (),
        "1 where this operator works, 0 where it stands by.",
        _OPERATOR,
    ),
    MetricSpec(
        "tracerl_operator_jobs",
        "gauge",
        "",
        ("state",),
        "Jobs by state; Queued: Kueue has not admitted them, Suspended: their spec says so.",
        _OPERATOR,
        (("Ready", "NotReady", "Queued", "Suspended", "Complete", "Failed"),),
    ),
    MetricSpec(
        "tracerl_operator_longest_not_ready_seconds",
        "gauge",
        "seconds",
        ("reason",),
        "Longest time since a job that should run, or waits in a queue, was Ready last, by Ready's reason.",
        _OPERATOR,
        (tuple(Reason),),
    ),
    MetricSpec(
        "tracerl_operator_canary_end_timestamp_seconds",
        "gauge",
        "seconds",
        ("result",),
        f"Unix time of the latest end of a job with the label {LABEL_CANARY}.",
        _OPERATOR,
        (("Complete", "Failed"),),
    ),
    MetricSpec("tracerl_operator_queue_depth", "gauge", "", (), "Jobs that wait to be looked at.", _OPERATOR),
    MetricSpec(
        "tracerl_operator_reconcile_duration_seconds",
        "histogram",
        "seconds",
        ("result",),
        "Looks at a job by what came of them.",
        _OPERATOR,
        (("unchanged", "changed", "refused", "stale", "error", "gone", "foreign"),),
    ),
    MetricSpec(
        "tracerl_operator_reconcile_errors_total",
        "counter",
        "",
        ("reason",),
        "Looks at a job that failed and are made again.",
        _OPERATOR,
        (_OPEN,),
    ),
    MetricSpec(
        "tracerl_operator_watch_last_event_timestamp_seconds",
        "gauge",
        "seconds",
        ("kind",),
        "Unix time of the last event that a watch brought.",
        _OPERATOR,
        (_OPEN,),
    ),
    MetricSpec(
        "tracerl_operator_api_requests_total",
        "counter",
        "",
        ("verb", "kind", "code"),
        "Requests to the API server.",
        _OPERATOR,
        (_VERBS, _OPEN, _OPEN),
    ),
)
"""Every metric of a job's processes and of the operator; exporters, dashboards and the reference read it."""
