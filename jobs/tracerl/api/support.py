"""What the resource allows and this version does not run yet: one table, shortened as parts arrive.

Everything here is refused when a job starts, and by `tracerl validate`, with the value that does run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.alias_generators import to_snake

from tracerl.api.errors import Fault
from tracerl.api.job import (
    CheckpointState,
    Format,
    NumericsBackend,
    PrefillAttends,
    RolloutEngine,
    SecondInput,
    Staleness,
    Target,
    TensorScaleRule,
    TrainerEngine,
)
from tracerl.api.rules import MODEL_SCHEMES, Check, Facts, Level, Rule, scheme


@dataclass(frozen=True, slots=True)
class Only:
    """The values of a field that this version runs, and why no others.

    With an `engine`, only where the role that the path names uses that engine.
    """

    path: str
    values: tuple[object, ...]
    why: str
    engine: RolloutEngine | TrainerEngine | None = None


_ONE_PROCESS = "it is one process"
_WHOLE_MODEL = "every trainer process holds the whole model"
_WHOLE_ROWS = "every trainer process computes whole trajectories"
_ROLLOUT, _TRAINER = RolloutEngine.REFERENCE, TrainerEngine.REFERENCE

SUPPORTED: tuple[Only, ...] = (
    Only(
        "spec.trainer.engine", (TrainerEngine.REFERENCE, TrainerEngine.MEGATRON), "it has no adapter of verl"
    ),
    Only("spec.rollout.nodesPerReplica", (1,), "a rollout server is of one node"),
    Only("spec.rollout.gpusPerNode", (0, 1), _ONE_PROCESS, _ROLLOUT),
    Only("spec.trainer.gpusPerNode", (0, 1), _ONE_PROCESS, _TRAINER),
    Only("spec.rollout.parallelism.tensor", (1,), _ONE_PROCESS, _ROLLOUT),
    Only("spec.rollout.parallelism.expert", (1,), _ONE_PROCESS, _ROLLOUT),
    Only("spec.rollout.parallelism.data", (1,), _ONE_PROCESS, _ROLLOUT),
    Only("spec.trainer.parallelism.tensor", (1,), _WHOLE_MODEL, _TRAINER),
    Only("spec.trainer.parallelism.pipeline", (1,), _WHOLE_MODEL, _TRAINER),
    Only("spec.trainer.parallelism.context", (1,), _WHOLE_ROWS, _TRAINER),
    Only("spec.trainer.parallelism.expert", (1,), _WHOLE_MODEL, _TRAINER),
    Only("spec.trainer.checkpoint.state", (CheckpointState.FULL,), _WHOLE_MODEL, _TRAINER),
    Only("spec.quantization.format", (Format.NVFP4,), "it computes NVFP4 alone"),
    Only("spec.quantization.tensorScale", (TensorScaleRule.FIXED,), "it has fixed tensor scales alone"),
)

MODEL_SCHEMES_NOW = ("builtin", "file")


def _value(facts: Facts, path: str) -> object:
    value: object = facts
    for part in path.split("."):
        value = getattr(value, to_snake(part))
    return value


def _refuse_other(only: Only) -> Check:
    def check(facts: Facts) -> Iterator[Fault]:
        value = _value(facts, only.path)
        role = ".".join(only.path.split(".")[:2])
        if value in only.values or (only.engine and _value(facts, f"{role}.engine") is not only.engine):
            return
        with_ = f" with {only.engine}" if only.engine else ""
        problem = f"is {_yaml(value)}, which this version does not run{with_} ({only.why})"
        yield Fault(only.path, problem, f"write {' or '.join(_yaml(one) for one in only.values)}")

    return check


def _refuse_remote_model(facts: Facts) -> Iterator[Fault]:
    found = scheme(facts.spec.model.uri)
    if found in MODEL_SCHEMES and found not in MODEL_SCHEMES_NOW:
        problem = f"is {found}://, which this version does not read"
        remedy = "write builtin://NAME, or file:///PATH of a downloaded model"
        yield Fault("spec.model.uri", problem, remedy)


def _refuse_dense_layers(facts: Facts) -> Iterator[Fault]:
    shape = facts.shape
    if shape is not None and len(shape.moe_layers) < shape.layers:
        dense = shape.layers - len(shape.moe_layers)
        problem = f"is a model with {dense} dense layers, which this version does not compute"
        yield Fault("spec.model.uri", problem, "use a model whose layers are all mixtures of experts")


BASELINE_PAIRS = 3
"""Fewer pairs of steps have an interval that says nothing."""


def _refuse_baseline(facts: Facts) -> Iterator[Fault]:
    spec, every = facts.spec, facts.spec.observe.baseline_every
    if not every:
        return
    algorithm, rollout, trainer = spec.algorithm, spec.rollout, spec.trainer
    path = "spec.observe.baselineEvery"
    # Step 1 never has one.
    pairs = algorithm.steps // every - (every == 1)
    if pairs < BASELINE_PAIRS:
        problem = f"is {every}, which compares {pairs} of {algorithm.steps} steps, too few for an interval"
        enough = BASELINE_PAIRS * every + (every == 1)
        few = algorithm.steps <= BASELINE_PAIRS
        remedy = f"spec.algorithm.steps: {enough}" if few else f"at most {algorithm.steps // BASELINE_PAIRS}"
        yield Fault(path, problem, f"write {remedy}, or 0")
    needs = (
        (algorithm.max_version_diff == 0, "spec.algorithm.maxVersionDiff: 0", "steps that do not overlap"),
        (algorithm.staleness is Staleness.WAIT, "spec.algorithm.staleness: Wait", "the same prompts twice"),
        (spec.records.audit_every == 0, "spec.records.auditEvery: 0", "steps without audits"),
        (
            rollout.numerics is NumericsBackend.EMULATED,
            "spec.rollout.numerics: Emulated",
            "a rollout that can leave records out",
        ),
        (
            rollout.engine is _ROLLOUT or rollout.gpus_per_node == 0,
            "spec.rollout.gpusPerNode: 0",
            "a rollout that says what it took of a GPU",
        ),
        (trainer.engine is _TRAINER, "spec.trainer.engine: Reference", "a trainer that is one process"),
        (trainer.parallelism.data == 1, "spec.trainer.parallelism.data: 1", "a trainer that is one process"),
        (
            (rollout.gpus_per_node > 0) == (trainer.gpus_per_node > 0),
            "spec.trainer.gpusPerNode as the rollout's",
            "GPUs on both sides or on none",
        ),
    )
    for met, wanted, why in needs:
        if not met:
            yield Fault(path, f"is {every}, and comparing steps needs {why}", f"write 0, or {wanted}")


def _refuse_exact_prefill(facts: Facts) -> Iterator[Fault]:
    rollout, trainer = facts.spec.rollout, facts.spec.trainer
    if facts.spec.quantization.prefill_attends is not PrefillAttends.EXACT or (
        rollout.engine is RolloutEngine.SGLANG
        and rollout.numerics is NumericsBackend.EMULATED
        and trainer.engine is TrainerEngine.MEGATRON
        and trainer.parallelism.context == 1
    ):
        return
    problem = (
        "is Exact, which this version runs only with SGLang's Emulated numerics and Megatron without context "
        "parallelism"
    )
    yield Fault("spec.quantization.prefillAttends", problem, "write Quantized, or choose these engines")


def _refuse_unseen_codes(facts: Facts) -> Iterator[Fault]:
    spec, rollout, sizes = facts.spec, facts.spec.rollout, facts.spec.rollout.parallelism
    if rollout.engine is not RolloutEngine.SGLANG:
        return
    experts = Target.ROUTED_EXPERTS in spec.quantization.targets
    second = spec.quantization.second_input if experts else SecondInput.BF16
    if rollout.numerics is NumericsBackend.EMULATED and second is not SecondInput.BF16 and sizes.expert > 1:
        problem = f"is {sizes.expert}, but a quantised second input is emulated where all experts are"
        remedy = "write 1, or spec.quantization.secondInput: BF16"
        yield Fault("spec.rollout.parallelism.expert", problem, remedy)
    for name, size in (("tensor", sizes.tensor), ("data", sizes.data)):
        if second is SecondInput.RECORDED and size > 1:
            problem = f"is {size}, so that every rank would have a part of the recorded second input"
            remedy = "write 1, or spec.quantization.secondInput: RTN"
            yield Fault(f"spec.rollout.parallelism.{name}", problem, remedy)
    if rollout.numerics is NumericsBackend.NATIVE:
        emulated = "or spec.rollout.numerics: Emulated"
        if sizes.data > 1:
            problem = f"is {sizes.data}, but the codes of one rank's rows cannot be told from the others'"
            yield Fault("spec.rollout.parallelism.data", problem, f"write 1, {emulated}")
        if second is SecondInput.RECORDED:
            problem = "is Recorded, but FP4 kernels do not show their second input"
            yield Fault("spec.quantization.secondInput", problem, f"write RTN, {emulated}")
        if spec.records.audit_every:
            problem = f"is {spec.records.audit_every}, but whole codes of all layers stay on the device"
            yield Fault("spec.records.auditEvery", problem, f"write 0, {emulated}")


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _name(only: Only) -> str:
    name = "version-" + to_snake(only.path.removeprefix("spec.")).replace(".", "-").replace("_", "-")
    return f"{name}-{only.engine.lower()}" if only.engine else name


def _text(only: Only) -> str:
    values = " or ".join(f"`{_yaml(value)}`" for value in only.values)
    return f"{f'With {only.engine}: ' if only.engine else ''}{values} only: {only.why}."


SUPPORT_RULES: tuple[Rule, ...] = (
    *(Rule(_name(only), Level.START, (only.path,), _text(only), _refuse_other(only)) for only in SUPPORTED),
    Rule(
        "version-quantization-prefill-attends",
        Level.START,
        ("spec.quantization.prefillAttends",),
        "`Exact` only with rollout engine SGLang, `numerics: Emulated`, trainer engine Megatron and no "
        "context parallelism: the Reference engines attend what is stored, and so do SGLang's NVFP4 kernels.",
        _refuse_exact_prefill,
    ),
    Rule(
        "version-codes-of-sglang",
        Level.START,
        (
            "spec.rollout.parallelism",
            "spec.rollout.numerics",
            "spec.quantization.secondInput",
            "spec.records.auditEvery",
        ),
        "With SGLang: `Emulated` has experts apart only with `secondInput: BF16`, and records a second input "
        "in one rank alone; `Native` records none, audits nothing, and has no DP attention.",
        _refuse_unseen_codes,
    ),
    Rule(
        "version-model-uri",
        Level.START,
        ("spec.model.uri",),
        "`builtin://NAME` and `file:///PATH` only.",
        _refuse_remote_model,
    ),
    Rule(
        "version-baseline",
        Level.START,
        ("spec.observe.baselineEvery",),
        f"Synchronous jobs (`maxVersionDiff: 0`, `staleness: Wait`) of at least {BASELINE_PAIRS} such steps, "
        "without audits, with GPUs on both sides or on none, whose rollout is Reference, or SGLang Emulated "
        "without GPUs, and whose trainer is Reference and one process.",
        _refuse_baseline,
    ),
    Rule(
        "version-dense-layers",
        Level.START,
        ("spec.model.uri",),
        "Models whose layers are all mixtures of experts.",
        _refuse_dense_layers,
    ),
)
