"""Rules that span fields. Each has a name, a level, a sentence for the reference page, and a check.

Rules on one field are its type in `tracerl.api.job`; what this version cannot run yet is in
`tracerl.api.support`. A check is a generator over what breaks the rule. It never sees a value that did not
parse: reading one ends the check (see `tracerl.api.load`), so that a typing mistake is reported once and not
again by every rule that needs the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_snake

from tracerl.api.errors import Fault
from tracerl.api.job import (
    CheckpointState,
    Colocation,
    Fabric,
    Format,
    LayerPolicy,
    MethodName,
    NumericsBackend,
    PrefillAttends,
    Retention,
    RolloutEngine,
    SecondInput,
    Spec,
    Spill,
    Target,
    TensorScaleRule,
    TrainerEngine,
    WeightSync,
    quantity_bytes,
)
from tracerl.api.machine import Machine
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.api.ring import segment_size
from tracerl.api.suggest import nearest


class Level(StrEnum):
    """Where a rule can be checked."""

    API = "API"
    """From the manifest alone, so that `kubectl apply` can refuse."""
    VALIDATE = "Validate"
    """With the model's configuration, or with maps of free values, which an API server does not look into."""
    START = "Start"
    """By this version on the machine where the job starts."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule may read; `shape` is None where the model is not at hand, `machine` on a cluster."""

    spec: Spec
    shape: ModelShape | None = None
    machine: Machine | None = None


Check = Callable[[Facts], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule; `fields` are the paths that it is about, `text` what it asks for."""

    name: str
    level: Level
    fields: tuple[str, ...]
    text: str
    check: Check


RULES: list[Rule] = []
"""Every rule of this module in the order of the resource; filled below and never changed afterwards."""


def _rule(level: Level, *fields: str) -> Callable[[Check], Check]:
    """Register a check; its name is the function's, its text the docstring."""

    def register(check: Check) -> Check:
        name = check.__name__.strip("_").replace("_", "-")
        RULES.append(Rule(name, level, fields, (check.__doc__ or "").strip(), check))
        return check

    return register


BLOCK_SIZES = {Format.NVFP4: 16, Format.MXFP4: 32}
"""Values that share a block scale."""
MODEL_SCHEMES = ("builtin", "hf", "s3", "file", "pvc")
OUTPUT_SCHEMES = ("pvc", "s3", "file")
GB200_NODE_GPUS = 4
OWN_FIELDS = {
    "activeDeadlineSeconds": "spec.activeDeadlineSeconds",
    "ttlSecondsAfterFinished": "spec.ttlSecondsAfterFinished",
    "restartPolicy": "spec.failurePolicy.maxRestarts",
    "backoffLimit": "spec.failurePolicy.maxRestarts",
    "suspend": "spec.suspend",
}
"""Fields that a pod template leaves to the job, by where they stand there: its life is its own."""
LOCAL_NODES = 16
LOCAL_RANKS = 64
_CLAIM = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_BUCKET = r"[A-Za-z0-9][\w.-]{1,254}"
_KIB, _MIB = 2**10, 2**20


def scheme(uri: str) -> str | None:
    """Give the scheme of a URL, None for a plain path."""
    match = re.match(r"([a-z][a-z0-9+.-]*)://", uri)
    return match.group(1) if match else None


URLS = (
    "spec.model.uri",
    "spec.model.tokenizerUri",
    "spec.task.uri",
    "spec.task.source.uri",
    "spec.output.uri",
    "spec.transport.object.uri",
)
PLAIN_TEXTS = (
    *URLS,
    "spec.task.source.configMap",
    "spec.output.secretName",
    "spec.output.endpointUrl",
    "spec.rollout.image",
    "spec.trainer.image",
    "spec.transport.spillPath",
    "spec.transport.object.secretName",
    "spec.transport.object.endpointUrl",
)
CREDENTIALS = "(?i)([a-z][a-z0-9+.-]*://[^/?#]*:[^/?#]*@|https?://[^/?#]*@|s3://[^/?#]*[:@])"
"""Where a URL holds credentials, for Python and for CEL; abfs://CONTAINER@ACCOUNT holds none."""
CREDENTIALS_REMEDY = "write the URL without, and give credentials by secretName or AWS_ACCESS_KEY_ID"


def _written(uri: str) -> str:
    """Show a URL that is wrong, but no credentials."""
    return repr(uri[:200]) if re.search(CREDENTIALS, uri) is None else "a URL with credentials"


def _value(spec: Spec, path: str) -> Any:
    """Give the value at a path, None where something above it is null."""
    value: Any = spec
    for part in path.split(".")[1:]:
        value = None if value is None else getattr(value, to_snake(part))
    return value


# -- every field of its kind ------------------------------------------------------------------------------


@_rule(Level.API, *URLS)
def urls_without_credentials(facts: Facts) -> Iterator[Fault]:
    """Credentials in a URL are refused: everybody who sees the job could read them."""
    for path in URLS:
        if re.search(CREDENTIALS, _value(facts.spec, path) or "") is not None:
            problem = "holds credentials, which everybody could read with the job"
            yield Fault(path, problem, CREDENTIALS_REMEDY)


@_rule(Level.API, *PLAIN_TEXTS)
def no_control_characters(facts: Facts) -> Iterator[Fault]:
    """URLs, paths, images and names of secrets and config maps have no control characters."""
    for path in PLAIN_TEXTS:
        if re.search(r"[\x00-\x1f\x7f]", _value(facts.spec, path) or "") is not None:
            yield Fault(path, "holds a control character", "remove it; a line break is one, too")


# -- model, task ------------------------------------------------------------------------------------------


@_rule(Level.API, "spec.model.uri")
def model_scheme(facts: Facts) -> Iterator[Fault]:
    """A model is named by a URL that TraceRL reads."""
    uri = facts.spec.model.uri
    if scheme(uri) not in MODEL_SCHEMES:
        remedy = "write builtin://NAME, hf://ORG/NAME, s3://…, file:///PATH or pvc://CLAIM/PATH"
        yield Fault("spec.model.uri", f"is {_written(uri)}, not a model URL", remedy)


@_rule(Level.VALIDATE, "spec.model.uri")
def builtin_model(facts: Facts) -> Iterator[Fault]:
    """A built-in model exists."""
    uri = facts.spec.model.uri
    if scheme(uri) == "builtin" and (name := uri.removeprefix("builtin://")) not in BUILTIN_MODELS:
        best = nearest(name, BUILTIN_MODELS)
        choice = (
            f"builtin://{best}" if best else " or ".join(f"builtin://{known}" for known in BUILTIN_MODELS)
        )
        yield Fault("spec.model.uri", f"names {name[:80]!r}, which is no built-in model", f"write {choice}")


@_rule(Level.API, "spec.task.name", "spec.task.uri")
def one_task(facts: Facts) -> Iterator[Fault]:
    """A task is either named or read from a URL."""
    task = facts.spec.task
    if task.name is not None and task.uri is not None:
        yield Fault("spec.task", "has both name and uri", "remove one of them")
    if task.name is None and task.uri is None:
        yield Fault(
            "spec.task", "has neither name nor uri", "write name: builtin/chain_sum, or uri and reward"
        )


@_rule(Level.API, "spec.task.name")
def task_name(facts: Facts) -> Iterator[Fault]:
    """A named task is one of reasoning_gym's data sets or a built-in one."""
    name = facts.spec.task.name
    if name is None:
        return
    if name != "builtin/chain_sum" and re.fullmatch(r"reasoning_gym/[a-z0-9_]+", name) is None:
        remedy = "write builtin/chain_sum or reasoning_gym/DATASET, for example reasoning_gym/chain_sum"
        yield Fault("spec.task.name", f"is {name[:80]!r}, not a known task", remedy)


@_rule(Level.VALIDATE, "spec.task.parameters", "spec.task.uri")
def task_parameters(facts: Facts) -> Iterator[Fault]:
    """Parameters are those of a named task."""
    task = facts.spec.task
    if task.uri is not None and task.name is None and task.parameters:
        yield Fault("spec.task.parameters", "are for named tasks", "remove them or write task.name")


@_rule(Level.API, "spec.task.reward", "spec.task.uri", "spec.task.source")
def task_parts(facts: Facts) -> Iterator[Fault]:
    """A task from a URL has a reward function; a named task scores itself."""
    task = facts.spec.task
    if task.uri is not None and task.name is None and task.reward is None:
        yield Fault("spec.task.reward", "is missing with task.uri", "write reward: module:function")
    if task.name is not None and task.uri is None and task.reward is not None:
        remedy = "remove reward, or write task.uri instead of task.name"
        yield Fault("spec.task.reward", "is for tasks from a uri; a named task scores itself", remedy)
    if task.source is not None and task.reward is None and task.uri is None:
        yield Fault("spec.task.source", "holds a reward module, but no reward is named", "remove source")


@_rule(Level.API, "spec.task.source")
def one_reward_source(facts: Facts) -> Iterator[Fault]:
    """A reward module comes from one place."""
    source = facts.spec.task.source
    if source is None:
        return
    if source.config_map is not None and source.uri is not None:
        yield Fault("spec.task.source", "has both configMap and uri", "remove one of them")


@_rule(Level.START, "spec.task.source.configMap", "spec.model.uri")
def local_sources(facts: Facts) -> Iterator[Fault]:
    """On one machine nothing comes from a config map or a volume claim."""
    if facts.machine is None:
        return
    source = facts.spec.task.source
    if source is not None and source.config_map is not None:
        remedy = "write spec.task.source.uri, for example the file's path"
        yield Fault("spec.task.source.configMap", "is there on a cluster only", remedy)
    if scheme(facts.spec.model.uri) == "pvc":
        yield Fault("spec.model.uri", "is a volume claim, which only a cluster has", "write file:///PATH")


@_rule(
    Level.START,
    "spec.placement.fabric",
    "spec.placement.topology.required",
    "spec.placement.topology.preferred",
    "spec.placement.queue",
)
def local_placement(facts: Facts) -> Iterator[Fault]:
    """One machine has no fabric, no topology and no queue."""
    if facts.machine is None:
        return
    placement = facts.spec.placement
    if placement.fabric is Fabric.COMPUTE_DOMAIN:
        problem = "is ComputeDomain, which only a cluster has"
        yield Fault("spec.placement.fabric", problem, "write Auto")
    for path, value in (
        ("topology.required", placement.topology.required),
        ("topology.preferred", placement.topology.preferred),
        ("queue", placement.queue),
    ):
        if value is not None:
            yield Fault(f"spec.placement.{path}", "is there on a cluster only", "remove it")


@_rule(Level.START, "spec.task.uri", "spec.task.source.uri")
def task_files_exist(facts: Facts) -> Iterator[Fault]:
    """What a task reads from this machine exists."""
    if facts.machine is None:
        return
    task = facts.spec.task
    source = None if task.source is None else task.source.uri
    for path, uri in (("spec.task.uri", task.uri), ("spec.task.source.uri", source)):
        # What ~ and :: mean is for fsspec to say, which opens the file.
        if uri is None or scheme(uri) not in {None, "file"} or "::" in uri or uri.startswith("~"):
            continue
        file = uri.removeprefix("file://")
        if not os.path.exists(file):  # noqa: PTH110 (a Path raises where a name is too long)
            where = "" if Path(file).is_absolute() else f" (relative to {Path.cwd()})"
            yield Fault(path, f"is {_written(uri)}, which does not exist{where}", "write the path of a file")


# -- algorithm --------------------------------------------------------------------------------------------


@_rule(Level.API, "spec.algorithm.samplesPerPrompt")
def group_size(facts: Facts) -> Iterator[Fault]:
    """GRPO compares the trajectories of a group, so a group has at least two."""
    if facts.spec.algorithm.samples_per_prompt < 2:
        problem = "is 1, and GRPO compares the trajectories of a group"
        yield Fault("spec.algorithm.samplesPerPrompt", problem, "write 2 or more, for example 8")


@_rule(
    Level.API,
    "spec.algorithm.miniBatches",
    "spec.algorithm.promptsPerStep",
    "spec.algorithm.samplesPerPrompt",
)
def mini_batches_divide(facts: Facts) -> Iterator[Fault]:
    """The trajectories of a step are shared evenly by its mini-batches."""
    algorithm = facts.spec.algorithm
    trajectories = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if trajectories % algorithm.mini_batches:
        fitting = max(n for n in range(1, algorithm.mini_batches) if trajectories % n == 0)
        problem = (
            f"is {algorithm.mini_batches}, which does not divide the {trajectories} trajectories of a step"
        )
        yield Fault("spec.algorithm.miniBatches", problem, f"write a divisor of it, for example {fitting}")


@_rule(Level.API, "spec.algorithm.evaluation.prompts", "spec.task.heldOutPrompts")
def evaluation_prompts(facts: Facts) -> Iterator[Fault]:
    """Evaluation uses held-out prompts only."""
    prompts, held_out = facts.spec.algorithm.evaluation.prompts, facts.spec.task.held_out_prompts
    if prompts > held_out:
        problem = f"is {prompts}, more than the {held_out} of spec.task.heldOutPrompts"
        remedy = f"write at most {held_out}, or raise heldOutPrompts"
        yield Fault("spec.algorithm.evaluation.prompts", problem, remedy)


@_rule(Level.API, "spec.expect.minReward", "spec.expect.minRewardGain", "spec.algorithm.evaluation.prompts")
def expected_reward_is_measured(facts: Facts) -> Iterator[Fault]:
    """An expected reward needs evaluation prompts."""
    expect = facts.spec.expect
    if facts.spec.algorithm.evaluation.prompts == 0:
        for name, value in (("minReward", expect.min_reward), ("minRewardGain", expect.min_reward_gain)):
            if value is not None:
                remedy = "write spec.algorithm.evaluation.prompts: 256, or remove it"
                yield Fault(f"spec.expect.{name}", "is asked of a job without evaluation prompts", remedy)


@_rule(Level.API, "spec.expect.maxGapRatio", "spec.method.name")
def gap_ratio_needs_trace(facts: Facts) -> Iterator[Fault]:
    """A ratio of the guided gap to the unguided gap exists under TRACE only."""
    if facts.spec.expect.max_gap_ratio is not None and facts.spec.method.name is not MethodName.TRACE:
        yield Fault(
            "spec.expect.maxGapRatio", "needs guidance, which only TRACE has", "remove it, or use maxGap"
        )


_LENGTHS = ("spec.algorithm.maxPromptTokens", "spec.algorithm.maxResponseTokens")


@_rule(Level.VALIDATE, *_LENGTHS)
def fits_context(facts: Facts) -> Iterator[Fault]:
    """Prompt and response together fit into the model's context."""
    algorithm, shape = facts.spec.algorithm, facts.shape
    tokens = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    if shape is not None and tokens > shape.context:
        problem = (
            f"and maxPromptTokens are {tokens} tokens together, but the model's context is {shape.context}"
        )
        room = shape.context - algorithm.max_prompt_tokens
        remedy = f"write at most {room}" if room > 0 else f"make both at most {shape.context} together"
        yield Fault("spec.algorithm.maxResponseTokens", problem, remedy)


@_rule(Level.API, *_LENGTHS, "spec.rollout.kvCacheTokens", "spec.trainer.microBatchTokens")
def one_trajectory_fits(facts: Facts) -> Iterator[Fault]:
    """The KV cache and a micro-batch hold at least one trajectory."""
    tokens = facts.spec.algorithm.max_prompt_tokens + facts.spec.algorithm.max_response_tokens
    for path, room in (
        ("spec.rollout.kvCacheTokens", facts.spec.rollout.kv_cache_tokens),
        ("spec.trainer.microBatchTokens", facts.spec.trainer.micro_batch_tokens),
    ):
        if room < tokens:
            problem = f"is {room}, less than one trajectory of maxPromptTokens + maxResponseTokens = {tokens}"
            yield Fault(path, problem, f"write at least {tokens}")


@_rule(Level.VALIDATE, *_LENGTHS, "spec.rollout.kvCacheTokens", "spec.rollout.parallelism.data")
def one_trajectory_fits_a_unit(facts: Facts) -> Iterator[Fault]:
    """With DP attention, each unit's part of the KV cache holds at least one trajectory."""
    rollout, algorithm = facts.spec.rollout, facts.spec.algorithm
    tokens = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    data = rollout.parallelism.data
    if data > 1 and rollout.kv_cache_tokens // data < tokens <= rollout.kv_cache_tokens:
        problem = (
            f"is {rollout.kv_cache_tokens}, of which each of the {data} units of "
            "spec.rollout.parallelism.data has its part, less than one trajectory of maxPromptTokens + "
            f"maxResponseTokens = {tokens}"
        )
        yield Fault("spec.rollout.kvCacheTokens", problem, f"write at least {data * tokens}")


# -- quantization, method ---------------------------------------------------------------------------------


@_rule(Level.API, "spec.quantization.targets")
def targets_once(facts: Facts) -> Iterator[Fault]:
    """A target is named once."""
    targets = facts.spec.quantization.targets
    if len(set(targets)) != len(targets):
        yield Fault("spec.quantization.targets", f"names {targets[0]} twice", "remove one")


@_rule(Level.API, "spec.quantization.secondInput", "spec.quantization.targets", "spec.method.name")
def recorded_second_input(facts: Facts) -> Iterator[Fault]:
    """The second input can be recorded where experts are quantised and the method is TRACE."""
    quantization = facts.spec.quantization
    if quantization.second_input is not SecondInput.RECORDED:
        return
    if facts.spec.method.name is not MethodName.TRACE:
        problem = f"is Recorded, but method {facts.spec.method.name} records nothing"
        yield Fault("spec.quantization.secondInput", problem, "write RTN, or spec.method.name: TRACE")
    if Target.ROUTED_EXPERTS not in quantization.targets:
        problem = "is Recorded, but the experts are not quantised"
        yield Fault("spec.quantization.secondInput", problem, "write RTN, or add RoutedExperts to targets")


@_rule(Level.API, "spec.quantization.tensorScale", "spec.quantization.format")
def mxfp4_has_no_tensor_scale(facts: Facts) -> Iterator[Fault]:
    """MXFP4 has block scales alone."""
    quantization = facts.spec.quantization
    if quantization.format is Format.MXFP4 and quantization.tensor_scale is not TensorScaleRule.FIXED:
        problem = f"is {quantization.tensor_scale}, but MXFP4 has no tensor scale"
        yield Fault("spec.quantization.tensorScale", problem, "write Fixed")


@_rule(
    Level.VALIDATE,
    "spec.quantization.format",
    "spec.quantization.targets",
    "spec.method.name",
    "spec.model.uri",
)
def blocks_divide(facts: Facts) -> Iterator[Fault]:
    """Every quantised dimension is a multiple of the format's block (16 for NVFP4, 32 for MXFP4)."""
    spec, shape = facts.spec, facts.shape
    if shape is None or spec.method.name is MethodName.BF16:
        return
    block = BLOCK_SIZES[spec.quantization.format]
    dimensions: list[tuple[str, int]] = []
    if Target.ROUTED_EXPERTS in spec.quantization.targets:
        dimensions += [("hidden size", shape.hidden), ("expert hidden size", shape.expert_hidden)]
    if Target.KV_CACHE in spec.quantization.targets:
        dimensions += [("head dimension", shape.head_dim)]
    for name, size in dimensions:
        if size % block:
            problem = (
                f"is {spec.quantization.format}, whose block of {block} does not divide "
                f"the model's {name} {size}"
            )
            remedy = (
                "write NVFP4"
                if block == 32 and size % 16 == 0
                else "use another model, or spec.method.name: BF16"
            )
            yield Fault("spec.quantization.format", problem, remedy)


@_rule(Level.API, "spec.method.trace", "spec.method.name")
def trace_block(facts: Facts) -> Iterator[Fault]:
    """Settings of TRACE stand under TRACE only."""
    method = facts.spec.method
    if method.name is not MethodName.TRACE and method.trace is not None:
        problem = f"is set, but the method is {method.name}"
        yield Fault("spec.method.trace", problem, "remove it, or write spec.method.name: TRACE")


@_rule(Level.API, "spec.method.trace.codeBits", "spec.method.trace.scaleBits")
def trace_records_something(facts: Facts) -> Iterator[Fault]:
    """TRACE records at least one bit."""
    trace = facts.spec.method.trace
    if trace is not None and trace.code_bits == 0 and trace.scale_bits == 0:
        remedy = "write codeBits: 1 and scaleBits: 3, or spec.method.name: QAT"
        yield Fault("spec.method.trace", "records nothing with codeBits 0 and scaleBits 0", remedy)


_LAYERS = "spec.method.trace.layers"


@_rule(Level.API, f"{_LAYERS}.policy", f"{_LAYERS}.last", f"{_LAYERS}.indices")
def layer_policy(facts: Facts) -> Iterator[Fault]:
    """Policy Last comes with last, List with distinct indices, the others with neither."""
    trace = facts.spec.method.trace
    if trace is None:
        return
    policy, last, indices = trace.layers.policy, trace.layers.last, trace.layers.indices
    if policy is LayerPolicy.LAST and last is None:
        yield Fault(f"{_LAYERS}.last", "is missing with policy Last", "write the number of last layers")
    if policy is not LayerPolicy.LAST and last is not None:
        yield Fault(
            f"{_LAYERS}.last", f"has no meaning with policy {policy}", "remove it, or write policy: Last"
        )
    if policy is LayerPolicy.LIST and not indices:
        yield Fault(
            f"{_LAYERS}.indices", "is missing with policy List", "write layer indices, counted from 0"
        )
    if policy is not LayerPolicy.LIST and indices is not None:
        problem = f"has no meaning with policy {policy}"
        yield Fault(f"{_LAYERS}.indices", problem, "remove it, or write policy: List")
    if indices is not None and len(set(indices)) != len(indices):
        yield Fault(f"{_LAYERS}.indices", "names a layer twice", "write each index once")


@_rule(Level.VALIDATE, f"{_LAYERS}.last", f"{_LAYERS}.indices", "spec.model.uri")
def layers_exist(facts: Facts) -> Iterator[Fault]:
    """Chosen layers are layers of the model."""
    trace, shape = facts.spec.method.trace, facts.shape
    if trace is None or shape is None:
        return
    if trace.layers.last is not None and trace.layers.last > shape.layers:
        problem = f"is {trace.layers.last}, but the model has {shape.layers} layers"
        yield Fault(f"{_LAYERS}.last", problem, f"write at most {shape.layers}")
    for position, index in enumerate(trace.layers.indices or ()):
        if index >= shape.layers:
            problem = f"is {index}, but the model has {shape.layers} layers"
            yield Fault(f"{_LAYERS}.indices[{position}]", problem, f"write at most {shape.layers - 1}")


@_rule(Level.API, "spec.records.auditEvery", "spec.observe.baselineEvery", "spec.method.name")
def records_need_method(facts: Facts) -> Iterator[Fault]:
    """Audits need quantised values, baselines need records to leave out."""
    spec = facts.spec
    if spec.records.audit_every and spec.method.name is MethodName.BF16:
        yield Fault("spec.records.auditEvery", "has no codes to audit under method BF16", "write 0")
    if spec.observe.baseline_every and spec.method.name is not MethodName.TRACE:
        problem = f"compares with and without records, but method {spec.method.name} has none"
        yield Fault("spec.observe.baselineEvery", problem, "write 0, or spec.method.name: TRACE")


# -- machines ---------------------------------------------------------------------------------------------


@_rule(Level.API, "spec.rollout.numerics", "spec.rollout.gpusPerNode", "spec.rollout.engine")
def native_numerics(facts: Facts) -> Iterator[Fault]:
    """Native FP4 needs SGLang on GPUs; SGLang on a CPU emulates."""
    rollout = facts.spec.rollout
    if rollout.numerics is not NumericsBackend.NATIVE:
        return
    if rollout.engine is RolloutEngine.REFERENCE:
        problem = "is Native, but the Reference engine has no FP4 kernels"
        yield Fault("spec.rollout.numerics", problem, "write Emulated, or spec.rollout.engine: SGLang")
    if rollout.gpus_per_node == 0:
        problem = "is Native, but the rollout has no GPU"
        yield Fault("spec.rollout.numerics", problem, "write Emulated, or spec.rollout.gpusPerNode: 4")


@_rule(Level.VALIDATE, "spec.quantization.prefillAttends", "spec.quantization.targets", "spec.method.name")
def exact_prefill_needs_a_quantised_cache(facts: Facts) -> Iterator[Fault]:
    """Prefill attends exact keys and values only where the cache's are quantised; under BF16 nothing is."""
    spec = facts.spec
    exact = spec.quantization.prefill_attends is PrefillAttends.EXACT
    if exact and spec.method.name is not MethodName.BF16 and Target.KV_CACHE not in spec.quantization.targets:
        problem = "is Exact, but keys and values are not quantised, so it changes nothing"
        remedy = "remove it, or write spec.quantization.targets: [RoutedExperts, KVCache]"
        yield Fault("spec.quantization.prefillAttends", problem, remedy)


@_rule(Level.VALIDATE, "spec.rollout.engineArgs", "spec.trainer.engineArgs")
def reference_has_no_arguments(facts: Facts) -> Iterator[Fault]:
    """The Reference engines take no arguments of their own."""
    if facts.spec.rollout.engine is RolloutEngine.REFERENCE and facts.spec.rollout.engine_args:
        yield Fault("spec.rollout.engineArgs", "are not read by the Reference engine", "remove them")
    if facts.spec.trainer.engine is TrainerEngine.REFERENCE and facts.spec.trainer.engine_args:
        yield Fault("spec.trainer.engineArgs", "are not read by the Reference engine", "remove them")


@_rule(Level.API, "spec.rollout.nodes", "spec.rollout.nodesPerReplica")
def replicas_divide(facts: Facts) -> Iterator[Fault]:
    """Rollout nodes form whole replicas."""
    rollout = facts.spec.rollout
    if rollout.nodes % rollout.nodes_per_replica:
        problem = f"is {rollout.nodes}, which is no multiple of nodesPerReplica {rollout.nodes_per_replica}"
        remedy = f"write a multiple of {rollout.nodes_per_replica}, or another nodesPerReplica"
        yield Fault("spec.rollout.nodes", problem, remedy)


@_rule(Level.API, "spec.rollout.parallelism", "spec.rollout.gpusPerNode", "spec.rollout.nodesPerReplica")
def rollout_parallelism(facts: Facts) -> Iterator[Fault]:
    """A replica's GPUs are tensor x data, and expert divides them; without GPUs sizes are free."""
    rollout = facts.spec.rollout
    gpus = rollout.gpus_per_node * rollout.nodes_per_replica
    ranks = rollout.parallelism.ranks
    if gpus and ranks != gpus:
        problem = f"makes tensor x data = {ranks} ranks, but a replica has {gpus} GPUs"
        remedy = f"write for example tensor: {gpus} and data: 1"
        if rollout.engine is RolloutEngine.REFERENCE:
            # It is one process, so that no other sizes would help.
            remedy = "write tensor: 1, data: 1, spec.rollout.gpusPerNode: 1 and nodesPerReplica: 1"
        yield Fault("spec.rollout.parallelism", problem, remedy)
    elif gpus and gpus % rollout.parallelism.expert:
        problem = f"is {rollout.parallelism.expert}, which does not divide the replica's {gpus} GPUs"
        yield Fault("spec.rollout.parallelism.expert", problem, f"write a divisor of {gpus}")


@_rule(Level.API, "spec.trainer.parallelism", "spec.trainer.gpusPerNode", "spec.trainer.nodes")
def trainer_parallelism(facts: Facts) -> Iterator[Fault]:
    """The trainer's GPUs are tensor x pipeline x context x data, and expert divides a pipeline stage's."""
    trainer = facts.spec.trainer
    sizes, gpus = trainer.parallelism, trainer.gpus_per_node * trainer.nodes
    stage = sizes.tensor * sizes.context * sizes.data
    if gpus and stage * sizes.pipeline != gpus:
        problem = f"makes tensor x pipeline x context x data = {stage * sizes.pipeline} ranks for {gpus} GPUs"
        inner = sizes.tensor * sizes.pipeline * sizes.context
        fitting = (
            f"data: {gpus // inner}"
            if gpus % inner == 0
            else f"tensor: 1, pipeline: 1, context: 1, data: {gpus}"
        )
        remedy = f"write for example {fitting}"
        if trainer.engine is TrainerEngine.REFERENCE:
            # A process of it has one GPU and the whole model.
            remedy = f"write tensor: 1, pipeline: 1, context: 1, data: {trainer.nodes}"
            remedy += " and spec.trainer.gpusPerNode: 1" if trainer.gpus_per_node > 1 else ""
        yield Fault("spec.trainer.parallelism", problem, remedy)
    elif gpus and stage % sizes.expert:
        problem = f"is {sizes.expert}, which does not divide the {stage} GPUs of a pipeline stage"
        yield Fault("spec.trainer.parallelism.expert", problem, f"write a divisor of {stage}")


@_rule(Level.VALIDATE, "spec.trainer.parallelism.expert", "spec.trainer.parallelism")
def experts_divide_ranks(facts: Facts) -> Iterator[Fault]:
    """Without GPUs too, expert divides the ranks of a pipeline stage (tensor x context x data)."""
    trainer = facts.spec.trainer
    sizes = trainer.parallelism
    stage = sizes.tensor * sizes.context * sizes.data
    if trainer.gpus_per_node == 0 and stage % sizes.expert:
        problem = f"is {sizes.expert}, which does not divide the {stage} ranks of a pipeline stage"
        remedy = f"write a divisor of {stage}, or spec.trainer.parallelism.data: {sizes.expert}"
        yield Fault("spec.trainer.parallelism.expert", problem, remedy)


@_rule(Level.API, "spec.trainer.nodes", "spec.trainer.gpusPerNode", "spec.trainer.parallelism")
def ranks_on_every_node(facts: Facts) -> Iterator[Fault]:
    """Without GPUs too, every trainer node has as many ranks as the others."""
    spec, trainer = facts.spec, facts.spec.trainer
    if spec.placement.colocation is not Colocation.NONE and spec.rollout.nodes != trainer.nodes:
        return  # colocated_nodes says how many there should be
    ranks = trainer.parallelism.ranks
    if trainer.gpus_per_node == 0 and ranks % trainer.nodes:
        problem = f"is {trainer.nodes}, which does not divide the {ranks} ranks of spec.trainer.parallelism"
        remedy = f"write for example spec.trainer.parallelism.data: {trainer.nodes}, or fewer nodes"
        yield Fault("spec.trainer.nodes", problem, remedy)


@_rule(Level.START, "spec.rollout.nodes", "spec.trainer.nodes")
def local_nodes(facts: Facts) -> Iterator[Fault]:
    """One machine stands in for at most 16 nodes."""
    if facts.machine is None:
        return
    for path, nodes in (
        ("spec.rollout.nodes", facts.spec.rollout.nodes),
        ("spec.trainer.nodes", facts.spec.trainer.nodes),
    ):
        if nodes > LOCAL_NODES:
            problem = f"is {nodes}, each of them processes of this one machine"
            yield Fault(path, problem, f"write at most {LOCAL_NODES}")


@_rule(Level.START, "spec.rollout.parallelism", "spec.trainer.parallelism")
def local_ranks(facts: Facts) -> Iterator[Fault]:
    """One machine runs at most 64 ranks of a role, each of them a process."""
    if facts.machine is None:
        return
    rollout, trainer = facts.spec.rollout, facts.spec.trainer
    servers = rollout.nodes // rollout.nodes_per_replica
    for path, ranks in (
        ("spec.rollout.parallelism", servers * rollout.parallelism.ranks),
        ("spec.trainer.parallelism", trainer.parallelism.ranks),
    ):
        if ranks > LOCAL_RANKS:
            problem = f"makes {ranks} ranks, each of them a process of this one machine"
            yield Fault(path, problem, f"write sizes that make at most {LOCAL_RANKS}")


@_rule(
    Level.API,
    "spec.trainer.parallelism.data",
    "spec.algorithm.promptsPerStep",
    "spec.algorithm.samplesPerPrompt",
)
def trainers_have_work(facts: Facts) -> Iterator[Fault]:
    """A step has a trajectory for every data-parallel trainer."""
    algorithm, data = facts.spec.algorithm, facts.spec.trainer.parallelism.data
    trajectories = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if data > trajectories:
        problem = f"is {data}, but a step has {trajectories} trajectories (promptsPerStep x samplesPerPrompt)"
        yield Fault("spec.trainer.parallelism.data", problem, f"write at most {trajectories}")


@_rule(Level.VALIDATE, "spec.rollout.parallelism", "spec.trainer.parallelism", "spec.model.uri")
def parallelism_fits_model(facts: Facts) -> Iterator[Fault]:
    """Tensor parallelism divides heads, the trainer's also token ids; expert experts, pipeline layers."""
    shape = facts.shape
    if shape is None:
        return
    rollout, trainer = facts.spec.rollout.parallelism, facts.spec.trainer.parallelism
    # A remedy that another rule would refuse helps nobody.
    ranks, stage = rollout.ranks, trainer.tensor * trainer.context * trainer.data
    shared = _divisor_of(gcd(shape.kv_heads, shape.vocab))
    for path, size, whole, what, remedy in (
        ("spec.rollout.parallelism.tensor", rollout.tensor, shape.heads, "attention heads", _tensor(facts)),
        (
            "spec.rollout.parallelism.expert",
            rollout.expert,
            shape.experts,
            "experts",
            _divisor_of(gcd(shape.experts, ranks)),
        ),
        ("spec.trainer.parallelism.tensor", trainer.tensor, shape.kv_heads, "KV heads", shared),
        ("spec.trainer.parallelism.tensor", trainer.tensor, shape.vocab, "token ids", shared),
        (
            "spec.trainer.parallelism.expert",
            trainer.expert,
            shape.experts,
            "experts",
            _divisor_of(gcd(shape.experts, stage)),
        ),
        (
            "spec.trainer.parallelism.pipeline",
            trainer.pipeline,
            shape.layers,
            "layers",
            _divisor_of(shape.layers),
        ),
    ):
        if whole % size:
            problem = f"is {size}, which does not divide the model's {whole} {what}"
            yield Fault(path, problem, f"write {remedy}")


def _divisor_of(number: int) -> str:
    return "1" if number == 1 else f"a divisor of {number}"


def _shares_kv_heads(shape: ModelShape, ranks: int) -> bool:
    """Whether every rank of a rollout has as many key-value heads as the others, or several have one each."""
    return shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0


def _splits_blocks(facts: Facts, size: int) -> int:
    """How many of `size` ranks share an expert, where some block of it would lie on two of them; or 0."""
    spec, shape, expert = facts.spec, facts.shape, facts.spec.rollout.parallelism.expert
    if (
        shape is None
        or spec.method.name is MethodName.BF16
        or Target.ROUTED_EXPERTS not in spec.quantization.targets
        or size % expert
    ):
        return 0
    blocks, rest = divmod(shape.expert_hidden, BLOCK_SIZES[spec.quantization.format])
    ranks = size // expert
    return ranks if rest == 0 and blocks % ranks else 0


def _tensor(facts: Facts) -> str:
    """Sizes of a rollout's tensor parallelism that all rules about the model take."""
    shape, rollout = facts.shape, facts.spec.rollout
    sizes = rollout.parallelism
    assert shape is not None
    fitting = [
        str(size)
        for size in range(1, shape.heads + 1)
        if shape.heads % size == 0
        and _shares_kv_heads(shape, size)
        and not _splits_blocks(facts, size * sizes.data)
        and size * sizes.data % sizes.expert == 0
    ]
    if not fitting:
        return "1 and spec.rollout.parallelism.expert: 1" + (", and data: 1" if sizes.data > 1 else "")
    either = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
    return f"{either}, and as many spec.rollout.gpusPerNode" if rollout.gpus_per_node else either


@_rule(Level.VALIDATE, "spec.rollout.parallelism.tensor", "spec.model.uri")
def ranks_hold_kv_heads(facts: Facts) -> Iterator[Fault]:
    """Every rank of a rollout has as many key-value heads as the others, or several ranks have one each."""
    if facts.shape is None:
        return
    ranks, heads = facts.spec.rollout.parallelism.tensor, facts.shape.kv_heads
    if not _shares_kv_heads(facts.shape, ranks):
        problem = f"is {ranks}, neither a divisor nor a multiple of the model's {heads} key-value heads"
        yield Fault("spec.rollout.parallelism.tensor", problem, f"write {_tensor(facts)}")


@_rule(Level.VALIDATE, "spec.rollout.parallelism", "spec.rollout.gpusPerNode")
def rollout_experts_divide_ranks(facts: Facts) -> Iterator[Fault]:
    """Without GPUs too, expert divides the ranks of a rollout (tensor x data)."""
    rollout, sizes = facts.spec.rollout, facts.spec.rollout.parallelism
    ranks = sizes.ranks
    if rollout.gpus_per_node == 0 and ranks % sizes.expert:
        problem = f"is {sizes.expert}, which does not divide the rollout's ranks, {ranks}"
        remedy = f"write a divisor of {ranks}, or spec.rollout.parallelism.tensor: {sizes.expert}"
        yield Fault("spec.rollout.parallelism.expert", problem, remedy)


@_rule(
    Level.VALIDATE,
    "spec.rollout.parallelism",
    "spec.quantization.targets",
    "spec.method.name",
    "spec.model.uri",
)
def ranks_hold_whole_blocks(facts: Facts) -> Iterator[Fault]:
    """The ranks that share an expert of a rollout have whole blocks of its hidden size."""
    shape, sizes = facts.shape, facts.spec.rollout.parallelism
    if shape is not None and (ranks := _splits_blocks(facts, sizes.ranks)):
        block = BLOCK_SIZES[facts.spec.quantization.format]
        name, size = ("tensor", sizes.tensor) if sizes.tensor > 1 else ("data", sizes.data)
        problem = (
            f"is {size}, so that {ranks} ranks share an expert, whose hidden size {shape.expert_hidden} is "
            f"{shape.expert_hidden // block} blocks of {block}, and some block would lie on two of them"
        )
        gpus = facts.spec.rollout.gpus_per_node
        others = {
            "parallelism.data": name == "tensor",
            "parallelism.expert": sizes.expert > 1,
            "gpusPerNode": gpus > 1,
        }
        one = "1" + "".join(f" and spec.rollout.{other}: 1" for other, also in others.items() if also)
        remedy = one if sizes.data > 1 else _tensor(facts)
        yield Fault(
            f"spec.rollout.parallelism.{name}",
            problem,
            f"write {remedy}, or spec.quantization.targets: [KVCache]",
        )


@_rule(Level.API, "spec.placement.colocation", "spec.rollout.nodes", "spec.trainer.nodes")
def colocated_nodes(facts: Facts) -> Iterator[Fault]:
    """In Pod and Node every node has a rollout and a trainer, so both have as many nodes."""
    spec = facts.spec
    if spec.placement.colocation is not Colocation.NONE and spec.rollout.nodes != spec.trainer.nodes:
        problem = f"is {spec.trainer.nodes}, but colocation {spec.placement.colocation} pairs it with the"
        write = str(spec.rollout.nodes)
        if spec.trainer.gpus_per_node == 0 and spec.trainer.parallelism.ranks % spec.rollout.nodes:
            write += f" and spec.trainer.parallelism.data: {spec.rollout.nodes}"
        remedy = f"write {write}, or spec.placement.colocation: None"
        yield Fault("spec.trainer.nodes", f"{problem} {spec.rollout.nodes} of the rollout", remedy)


@_rule(Level.API, "spec.placement", "spec.rollout.gpusPerNode", "spec.trainer.gpusPerNode")
def gpu_split(facts: Facts) -> Iterator[Fault]:
    """Colocated roles split a node's GPUs (2+2, 3+1 or 1+3 on a GB200 node of 4); 4+0 stands apart."""
    spec = facts.spec
    rollout, trainer = spec.rollout.gpus_per_node, spec.trainer.gpus_per_node
    where = spec.placement.colocation
    if spec.placement.fabric is Fabric.COMPUTE_DOMAIN:
        both = where is not Colocation.NONE
        for path, count in (("spec.rollout.gpusPerNode", rollout), ("spec.trainer.gpusPerNode", trainer)):
            if count > GB200_NODE_GPUS:
                problem = f"is {count}, but a node of a ComputeDomain has {GB200_NODE_GPUS} GPUs"
                yield Fault(path, problem, f"write at most {GB200_NODE_GPUS}")
        if both and max(rollout, trainer) <= GB200_NODE_GPUS < rollout + trainer:
            total = rollout + trainer
            problem = f"and rollout.gpusPerNode are {total} together, but a node has {GB200_NODE_GPUS} GPUs"
            yield Fault("spec.trainer.gpusPerNode", problem, "split them 2+2, 3+1 or 1+3")
    if where is not Colocation.NONE and (rollout == 0) != (trainer == 0):
        path = "spec.rollout.gpusPerNode" if rollout == 0 else "spec.trainer.gpusPerNode"
        problem = f"is 0, but colocation {where} splits the node's GPUs between rollout and trainer"
        yield Fault(path, problem, "split them 2+2, 3+1 or 1+3, or write spec.placement.colocation: None")


@_rule(Level.START, "spec.rollout.gpusPerNode", "spec.trainer.gpusPerNode", "spec.trainer.nodes")
def gpus_are_there(facts: Facts) -> Iterator[Fault]:
    """The machine has the GPUs of all nodes that it stands in for; Reference rollouts share with trainers."""
    rollout, trainer = facts.spec.rollout, facts.spec.trainer
    shared = rollout.engine is RolloutEngine.REFERENCE and trainer.engine is TrainerEngine.REFERENCE
    wanted = (
        max(rollout.gpus_per_node, trainer.gpus_per_node)
        if shared
        else sum(role.nodes * role.gpus_per_node for role in (rollout, trainer))
    )
    if facts.machine is not None and wanted > facts.machine.gpus:
        path = "spec.rollout.gpusPerNode" if rollout.gpus_per_node else "spec.trainer.gpusPerNode"
        problem = f"and the other role's ask for {wanted} GPUs, but this machine has {facts.machine.gpus}"
        if facts.machine.chosen is not None:
            problem += " in CUDA_VISIBLE_DEVICES"
        yield Fault(path, problem, f"write at most {facts.machine.gpus}{'' if shared else ' together'}")
    elif facts.machine is not None and trainer.nodes * trainer.gpus_per_node > facts.machine.gpus:
        # They add gradients up over NCCL, which refuses two processes of one GPU.
        problem = f"is {trainer.nodes}, each with a GPU of its own, but this machine has {facts.machine.gpus}"
        yield Fault("spec.trainer.nodes", problem, f"write at most {facts.machine.gpus}, or no GPUs")


@_rule(Level.API, "spec.rollout.resources", "spec.trainer.resources")
def gpus_by_field(facts: Facts) -> Iterator[Fault]:
    """GPUs are asked for by gpusPerNode alone."""
    for role, resources in (
        ("rollout", facts.spec.rollout.resources),
        ("trainer", facts.spec.trainer.resources),
    ):
        for part, listed in (("requests", resources.requests), ("limits", resources.limits)):
            if "nvidia.com/gpu" in (listed.model_extra or {}):
                path = f"spec.{role}.resources.{part}"
                yield Fault(path, "asks for nvidia.com/gpu", f"remove it and write spec.{role}.gpusPerNode")


@_rule(Level.API, "spec.rollout.template", "spec.trainer.template")
def template_life(facts: Facts) -> Iterator[Fault]:
    """A pod template patches metadata and spec; life and death of the job are the job's own fields."""
    for role, template in (
        ("rollout", facts.spec.rollout.template),
        ("trainer", facts.spec.trainer.template),
    ):
        path = f"spec.{role}.template"
        inner = template.get("spec")
        places: tuple[tuple[str, Mapping[str, Any]], ...] = (
            (path, template),
            (f"{path}.spec", inner if isinstance(inner, dict) else {}),
        )
        for place, fields in places:
            for key in fields:
                if key in OWN_FIELDS:
                    yield Fault(
                        f"{place}.{key}",
                        "would end the pods behind the job's back",
                        f"write {OWN_FIELDS[key]}",
                    )
                elif place == path and key not in {"metadata", "spec"}:
                    yield Fault(
                        f"{place}.{key}", "is no part of a pod template", "write metadata or spec below it"
                    )


@_rule(Level.API, "spec.placement.topology")
def one_topology(facts: Facts) -> Iterator[Fault]:
    """A topology is required or preferred."""
    topology = facts.spec.placement.topology
    if topology.required is not None and topology.preferred is not None:
        yield Fault("spec.placement.topology", "has both required and preferred", "remove one of them")


@_rule(Level.API, "spec.trainer.weightSync", "spec.trainer.nodes", "spec.rollout.nodes", "spec.output.uri")
def disk_sync_is_shared(facts: Facts) -> Iterator[Fault]:
    """Weights travel by disk between nodes only through a volume that all pods mount."""
    spec = facts.spec
    uri = spec.output.uri
    nodes = max(spec.rollout.nodes, spec.trainer.nodes)
    if spec.trainer.weight_sync is WeightSync.DISK and nodes > 1 and (uri is None or scheme(uri) != "pvc"):
        problem = f"is Disk for {nodes} nodes, which share no directory"
        yield Fault(
            "spec.trainer.weightSync", problem, "write Distributed, or spec.output.uri: pvc://CLAIM/PATH"
        )


@_rule(Level.API, "spec.trainer.checkpoint.state", "spec.trainer.nodes", "spec.output.uri")
def shards_are_shared(facts: Facts) -> Iterator[Fault]:
    """Trainers of several nodes write shards of a checkpoint only into a volume that all of them mount."""
    spec = facts.spec
    uri, nodes = spec.output.uri, spec.trainer.nodes
    sharded = spec.trainer.checkpoint.state is CheckpointState.SHARDED
    if sharded and nodes > 1 and (uri is None or scheme(uri) not in ("pvc", "file")):
        problem = f"is Sharded for trainers of {nodes} nodes, which share no directory"
        yield Fault(
            "spec.trainer.checkpoint.state", problem, "write Full, or spec.output.uri: pvc://CLAIM/PATH"
        )


@_rule(Level.API, "spec.output.uri")
def output_scheme(facts: Facts) -> Iterator[Fault]:
    """Results go to a volume claim, S3 or a directory, and stay below what is named."""
    uri = facts.spec.output.uri
    if uri is None:
        return
    remedy = "write pvc://CLAIM/PATH, s3://BUCKET/PREFIX or file:///PATH"
    found, named = scheme(uri), uri.partition("://")[2].partition("/")[0]
    if found not in OUTPUT_SCHEMES:
        yield Fault("spec.output.uri", f"is {_written(uri)}, not an output URL", remedy)
    elif re.search(CREDENTIALS, uri) is not None:
        return  # urls_without_credentials says it
    elif found == "pvc" and re.fullmatch(_CLAIM, named, re.ASCII) is None:
        yield Fault("spec.output.uri", f"names {named[:80]!r}, which is no claim", "write pvc://CLAIM/PATH")
    elif found == "s3" and re.fullmatch(_BUCKET, named, re.ASCII) is None:
        yield Fault(
            "spec.output.uri", f"names {named[:80]!r}, which is no bucket", "write s3://BUCKET/PREFIX"
        )
    elif found == "file" and named:
        yield Fault("spec.output.uri", f"is {_written(uri)}, not an absolute path", "write file:///PATH")
    elif ".." in uri.split("/"):
        yield Fault("spec.output.uri", f"is {_written(uri)}, which leaves its place by ..", remedy)


@_rule(Level.API, "spec.output.uri", "spec.output.secretName", "spec.output.endpointUrl")
def output_credentials(facts: Facts) -> Iterator[Fault]:
    """An output in S3 alone has a secret, and an endpoint without keys."""
    output = facts.spec.output
    yield from _s3_options("spec.output", output.uri, output.secret_name, output.endpoint_url)


# -- transport --------------------------------------------------------------------------------------------


@_rule(Level.API, "spec.transport.ring.size", "spec.rollout.resources.limits.memory")
def ring_fits_memory(facts: Facts) -> Iterator[Fault]:
    """The ring counts as memory of the rollout, so it is not larger than its limit."""
    limit, ring = facts.spec.rollout.resources.limits.memory, facts.spec.transport.ring.size
    if facts.spec.transport.only_object or limit is None:
        return
    if quantity_bytes(ring) > quantity_bytes(limit):
        problem = f"is {ring}, more than the rollout's memory limit {limit} that it counts in"
        yield Fault("spec.transport.ring.size", problem, f"write at most {limit}, or raise the limit")


@_rule(Level.START, "spec.transport.ring.size", "spec.rollout.nodes")
def ring_fits_machine(facts: Facts) -> Iterator[Fault]:
    """The rings of all nodes that this machine stands in for are not larger than its /dev/shm."""
    transport, machine, nodes = facts.spec.transport, facts.machine, facts.spec.rollout.nodes
    if transport.only_object or machine is None:
        return
    room = machine.shared_memory or 0
    if quantity_bytes(transport.ring.size) * nodes > room:
        times = f" for each of {nodes} nodes" if nodes > 1 else ""
        problem = f"is {transport.ring.size}{times}, but /dev/shm of this machine has {room // _MIB}Mi"
        remedy = f"write at most {room // nodes // _MIB}Mi, mount /dev/shm larger, or write onlyObject: true"
        yield Fault("spec.transport.ring.size", problem, remedy)


@_rule(Level.API, "spec.transport.ring.size")
def ring_has_segments(facts: Facts) -> Iterator[Fault]:
    """A ring has at least 16 segments of 64 KiB: each producer fills one, and those being read stay."""
    transport = facts.spec.transport
    if not transport.only_object and quantity_bytes(transport.ring.size) < _MIB:
        problem = f"is {transport.ring.size}, too little for 16 segments of 64Ki"
        yield Fault(
            "spec.transport.ring.size", problem, "write at least 1Mi, or spec.transport.onlyObject: true"
        )


@_rule(
    Level.VALIDATE,
    "spec.transport.ring.size",
    "spec.model.uri",
    "spec.records.auditEvery",
    "spec.quantization.secondInput",
)
def ring_holds_a_row(facts: Facts) -> Iterator[Fault]:
    """A segment (a power of two, a 32nd of the ring or less, at most 64 MiB) holds a row of all sites."""
    spec, shape = facts.spec, facts.shape
    if shape is None or spec.transport.only_object or quantity_bytes(spec.transport.ring.size) < _MIB:
        return
    ring = quantity_bytes(spec.transport.ring.size)
    # Twice a bound of the row, for the frame's header: all layers, and whole codes where they are audited.
    needed = 2 * _row_bound(spec, shape)
    if needed > 64 * _MIB or needed <= segment_size(ring):
        return
    problem = f"is {spec.transport.ring.size}, whose segments of {segment_size(ring) // _KIB}Ki are too "
    fitting = 32 * (1 << (needed - 1).bit_length()) // _MIB
    yield Fault("spec.transport.ring.size", f"{problem}small for a row", f"write at least {fitting}Mi")


def _row_bound(spec: Spec, shape: ModelShape) -> int:
    trace = spec.method.trace
    code_bits, scale_bits = (trace.code_bits, trace.scale_bits) if trace is not None else (1, 3)
    if spec.records.audit_every:
        code_bits, scale_bits = 4, 8
    recorded = spec.quantization.second_input is SecondInput.RECORDED
    values = shape.hidden + 2 * shape.kv_heads * shape.head_dim + recorded * shape.top_k * shape.expert_hidden
    bits = values * code_bits + values * scale_bits // BLOCK_SIZES[spec.quantization.format]
    return shape.layers * (bits // 8 + 2 * shape.top_k)


@_rule(
    Level.API,
    "spec.transport.onlyObject",
    "spec.transport.spill",
    "spec.transport.spillPath",
)
def nothing_to_spill(facts: Facts) -> Iterator[Fault]:
    """Without a ring nothing spills."""
    transport = facts.spec.transport
    if not transport.only_object:
        return
    if transport.spill is not Spill.NEVER:
        problem = f"is {transport.spill}, but with onlyObject every frame goes to the object store"
        yield Fault("spec.transport.spill", problem, "write Never, or onlyObject: false")
    if transport.spill_path is not None:
        problem = "is set, but with onlyObject there is no ring to spill"
        yield Fault("spec.transport.spillPath", problem, "remove it, or write onlyObject: false")


@_rule(Level.API, "spec.transport.spill", "spec.transport.object.uri")
def spill_has_a_place(facts: Facts) -> Iterator[Fault]:
    """Frames spill to an object store that is named."""
    transport = facts.spec.transport
    if transport.spill is Spill.OBJECT_STORE and not transport.only_object and transport.object.uri is None:
        remedy = "write spec.transport.object.uri: s3://BUCKET/PREFIX, or spill: Never with a spillPath"
        yield Fault("spec.transport.spill", "is ObjectStore, but no object store is named", remedy)


@_rule(
    Level.API,
    "spec.transport.spillPath",
    "spec.transport.spillLimit",
    "spec.transport.ring.size",
)
def spill_directory(facts: Facts) -> Iterator[Fault]:
    """A spill directory is an absolute path, and its limit holds a segment of the ring."""
    transport = facts.spec.transport
    path, limit = transport.spill_path, transport.spill_limit
    if path is not None and not path.startswith("/"):
        remedy = "write the absolute path of a directory on a local disk"
        yield Fault("spec.transport.spillPath", f"is {path[:200]!r}, not an absolute path", remedy)
    if limit is None:
        return
    if path is None:
        problem = "limits spillPath, which is not set"
        yield Fault("spec.transport.spillLimit", problem, "remove it, or write spillPath")
    elif quantity_bytes(limit) < (segment := segment_size(quantity_bytes(transport.ring.size))):
        problem = f"is {limit}, less than one segment of the ring"
        yield Fault("spec.transport.spillLimit", problem, f"write at least {segment // _KIB}Ki")


@_rule(Level.START, "spec.transport.spillPath")
def spill_directory_exists(facts: Facts) -> Iterator[Fault]:
    """A spill directory exists on this machine."""
    path = facts.spec.transport.spill_path
    if facts.machine is None or path is None or not path.startswith("/"):
        return
    if not os.path.isdir(path):  # noqa: PTH112 (a Path raises where a name is too long)
        problem = f"is {path[:200]!r}, no directory of this machine"
        yield Fault("spec.transport.spillPath", problem, "make it, or name one on a local disk")


@_rule(Level.API, "spec.transport.object.retention", "spec.transport.onlyObject")
def retention_of_objects(facts: Facts) -> Iterator[Fault]:
    """Only frames that all go to the object store are kept there; a ring has no room for old ones."""
    transport = facts.spec.transport
    if transport.object.retention is not Retention.TRAINED and not transport.only_object:
        problem = f"is {transport.object.retention}, but frames in a ring go when they are trained"
        yield Fault("spec.transport.object.retention", problem, "write Trained, or onlyObject: true")


@_rule(Level.API, "spec.transport.object.batchSize")
def object_size(facts: Facts) -> Iterator[Fault]:
    """Objects are of 4 KiB to 1 GiB: each is a request, and stays in memory until it is uploaded."""
    size = facts.spec.transport.object.batch_size
    if not 4 * _KIB <= quantity_bytes(size) <= 2**30:
        problem = f"is {size}, no sensible size of an object"
        yield Fault("spec.transport.object.batchSize", problem, "write 4Ki to 1Gi, for example 8Mi")


@_rule(
    Level.API,
    "spec.transport.object.uri",
    "spec.transport.object.secretName",
    "spec.transport.object.endpointUrl",
)
def object_store_url(facts: Facts) -> Iterator[Fault]:
    """An object store is a URL that all processes reach; S3 alone has secrets, and endpoints without keys."""
    store = facts.spec.transport.object
    path = "spec.transport.object.uri"
    uri = store.uri or ""
    found = scheme(uri)
    bucket = uri.removeprefix("s3://").partition("/")[0]
    if store.uri is not None and found is None:
        yield Fault(path, f"is {_written(uri)}, not a URL", "write s3://BUCKET/PREFIX or file:///PATH")
    elif found == "memory":
        remedy = "write s3://BUCKET/PREFIX or file:///PATH"
        yield Fault(path, "is memory of one process, which others do not see", remedy)
    elif found == "file" and not uri.startswith("file:///"):
        yield Fault(path, f"is {_written(uri)}, not an absolute path", "write file:///PATH")
    elif (
        found == "s3"
        and re.fullmatch(_BUCKET, bucket, re.ASCII) is None
        and re.search(CREDENTIALS, uri) is None
    ):
        yield Fault(path, f"names {bucket[:80]!r}, which is no bucket", "write s3://BUCKET/PREFIX")
    yield from _s3_options("spec.transport.object", store.uri, store.secret_name, store.endpoint_url)


def _s3_options(path: str, uri: str | None, secret: str | None, endpoint: str | None) -> Iterator[Fault]:
    """Find what is wrong with the secret and the endpoint of a place whose URL is `path`.uri."""
    if scheme(uri or "") != "s3":
        for name, value in (("secretName", secret), ("endpointUrl", endpoint)):
            if value is not None:
                problem = f"is for S3, but {path.rpartition('.')[2]}.uri is not an s3:// URL"
                yield Fault(f"{path}.{name}", problem, "remove it, or write uri: s3://…")
    elif endpoint is not None and re.match(r"[^/]*//[^/?#]*@", endpoint):
        problem = "holds a user name or a password, which everybody could read with the job"
        yield Fault(f"{path}.endpointUrl", problem, CREDENTIALS_REMEDY)
    elif endpoint is not None and scheme(endpoint) not in {"http", "https"}:
        problem = f"is {endpoint[:200]!r}, not an http or https URL"
        yield Fault(f"{path}.endpointUrl", problem, "write for example http://minio:9000")


@_rule(Level.START, "spec.transport.object.secretName")
def local_credentials(facts: Facts) -> Iterator[Fault]:
    """On one machine credentials come from where AWS's own tools have them, not from a secret."""
    if facts.machine is not None and facts.spec.transport.object.secret_name is not None:
        problem = "is a Secret, which only a cluster has"
        remedy = "remove it and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        yield Fault("spec.transport.object.secretName", problem, remedy)


# -- life -------------------------------------------------------------------------------------------------


@_rule(Level.API, "spec.managedBy")
def managed_by_name(facts: Facts) -> Iterator[Fault]:
    """A controller is named domain/path, as in batch/v1."""
    name = facts.spec.managed_by
    if name is not None and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[\w.~-]+", name, re.ASCII) is None:
        remedy = "write for example kueue.x-k8s.io/multikueue, or remove it"
        yield Fault("spec.managedBy", f"is {name!r}, not domain/path", remedy)


@_rule(Level.START, "spec.suspend")
def not_suspended(facts: Facts) -> Iterator[Fault]:
    """A suspended job does not start on this machine."""
    if facts.machine is not None and facts.spec.suspend:
        yield Fault(
            "spec.suspend", "is true, so nothing would run", "write false, or --set spec.suspend=false"
        )
