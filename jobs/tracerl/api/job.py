"""The `TraceRLJob` resource as pydantic models: one source of the CRD, the reference page and defaults.

Field style follows batch/v1: camelCase in YAML, PascalCase enum values, integers where the value is an
integer, decimal strings (``"0.01"``) where it is not, so that no JSON number ever loses a digit between
`kubectl`, the API server and Python. Every model forbids unknown fields. Rules that span fields live in
`tracerl.api.rules`; rules on one field are written here as its type.
"""

from __future__ import annotations

import re
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

GROUP = "tracerl.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TraceRLJob"


class Mutability(StrEnum):
    """When a field may be changed after `kubectl apply` created the job."""

    IMMUTABLE = "Immutable"
    WHILE_SUSPENDED = "WhileSuspended"
    ALWAYS = "Always"


def field(
    default: Any = ...,
    *,
    doc: str,
    unit: str | None = None,
    mutable: Mutability = Mutability.IMMUTABLE,
    example: object = None,
    **constraints: Any,
) -> Any:
    """Make a pydantic field with its documentation, unit and mutability attached to the JSON schema.

    `example` is a good value of a required field: messages and the reference page show it.
    """
    extra: dict[str, Any] = {"x-tracerl-mutability": mutable.value}
    if unit is not None:
        extra["x-tracerl-unit"] = unit
    if example is not None:
        extra["x-tracerl-example"] = example
    if isinstance(default, type) and issubclass(default, BaseModel):
        return Field(default_factory=default, description=doc, json_schema_extra=extra, **constraints)
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


def _wrong(problem: str, remedy: str) -> PydanticCustomError:
    # The braces of a value must not be taken for a template of pydantic, hence the context alone.
    return PydanticCustomError("tracerl", "{problem}; {remedy}", {"problem": problem, "remedy": remedy})


_DECIMAL_PATTERN = r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"
_DECIMAL_LENGTH = 32


def _decimal(value: object) -> object:
    if isinstance(value, Decimal):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise _wrong(f"is the number {value!r} without quotes", f'write it in quotes: "{value!r}"')
    if not isinstance(value, str):
        raise _wrong("is not a decimal", 'write a decimal in quotes, for example "0.01"')
    if len(value) > _DECIMAL_LENGTH or re.fullmatch(_DECIMAL_PATTERN, value, re.ASCII) is None:
        raise _wrong(f"is {value[:_DECIMAL_LENGTH]!r}, not a decimal number", 'write for example "0.01"')
    return Decimal(value)


def _decimal_schema(allowed: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "string",
            "pattern": _DECIMAL_PATTERN,
            "maxLength": _DECIMAL_LENGTH,
            "x-tracerl-range": allowed,
        }
    )


_as_text = PlainSerializer(str, return_type=str)
DecimalString = Annotated[Decimal, BeforeValidator(_decimal), _as_text, _decimal_schema("")]
PositiveDecimal = Annotated[Decimal, Field(gt=0), BeforeValidator(_decimal), _as_text, _decimal_schema("> 0")]
NonNegativeDecimal = Annotated[
    Decimal, Field(ge=0), BeforeValidator(_decimal), _as_text, _decimal_schema("≥ 0")
]
RatioDecimal = Annotated[
    Decimal, Field(ge=0, le=1), BeforeValidator(_decimal), _as_text, _decimal_schema("0 to 1")
]
DecayDecimal = Annotated[
    Decimal, Field(ge=0, lt=1), BeforeValidator(_decimal), _as_text, _decimal_schema("≥ 0, < 1")
]
BandDecimal = Annotated[
    Decimal,
    Field(gt=0, le=Decimal("0.5")),
    BeforeValidator(_decimal),
    _as_text,
    _decimal_schema("> 0, ≤ 0.5"),
]
WeightBoundDecimal = Annotated[
    Decimal, Field(ge=1), BeforeValidator(_decimal), _as_text, _decimal_schema("≥ 1")
]

_UNITS = {
    "": 1,
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60},
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18},
}
_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2}|)", re.ASCII)
_RESOURCE = re.compile(r"[0-9][0-9A-Za-z.]{0,31}", re.ASCII)
_CPU = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?|[0-9]{1,12}m", re.ASCII)


def quantity_bytes(text: str) -> int:
    """Bytes of a Kubernetes memory quantity such as ``256Mi``; ValueError says what to write instead."""
    match = _QUANTITY.fullmatch(text)
    if match is not None:
        number, suffix = match.groups()
        factor = _UNITS.get(suffix) or 10 ** int(suffix[1:])
        value = Decimal(number) * factor
        if value == value.to_integral_value():
            return int(value)
    raise ValueError(
        f'"{text[:40]}" is not a memory quantity; write bytes with a suffix, for example "256Mi"'
    )


def _quantity(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _wrong("is not a memory quantity", 'write bytes with a suffix, for example "256Mi"')
    try:
        quantity_bytes(value)
    except ValueError:
        problem = f"is {value[:40]!r}, not a memory quantity"
        raise _wrong(problem, 'write bytes with a suffix, for example "256Mi"') from None
    return value


def _cpu(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or _CPU.fullmatch(value) is None:
        raise _wrong("is not a CPU quantity", 'write cores or millicores, for example "2" or "500m"')
    return value


def _resource(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if not isinstance(value, str) or _RESOURCE.fullmatch(value) is None:
        raise _wrong("is not a quantity", 'write a number or a quantity, for example "1" or "10Gi"')
    return value


def _int_or_string(pattern: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": f"^({pattern})$",
            "maxLength": _QUANTITY_LENGTH,
        }
    )


_QUANTITY_LENGTH = 32
Quantity = Annotated[str, BeforeValidator(_quantity), _int_or_string(_QUANTITY.pattern)]
CPUQuantity = Annotated[str, BeforeValidator(_cpu), _int_or_string(_CPU.pattern)]
ResourceQuantity = Annotated[str, BeforeValidator(_resource), _int_or_string(_RESOURCE.pattern)]


def _integer(value: object) -> object:
    # Literal[0, 1] takes true for 1, which an API server would refuse.
    if isinstance(value, bool):
        raise _wrong(f"is {str(value).lower()}", "write a number of bits")
    return value


CodeBits = Annotated[Literal[0, 1, 2, 4], BeforeValidator(_integer)]
ScaleBits = Annotated[Literal[0, 1, 2, 3, 8], BeforeValidator(_integer)]

INT32_MAX = 2**31 - 1
UID_PATTERN = r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$"
"""A job's UID names directories."""


class Model(BaseModel):
    """Base of every model of the resource: camelCase aliases, no unknown fields, frozen after parsing."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_enum_values=False
    )


# -- what to train ----------------------------------------------------------------------------------------


class DType(StrEnum):
    """Compute precision of everything that is not quantised."""

    BFLOAT16 = "BFloat16"
    FLOAT32 = "Float32"


class ModelSource(Model):
    """The policy model."""

    uri: str = field(
        doc="Where the model is: builtin://NAME, hf://ORG/NAME, s3://…, file://… or pvc://CLAIM/PATH. A "
        "directory holds Hugging Face's config.json and *.safetensors. In every URL of a job the path behind "
        "file:// is taken as it stands: a space is a space and not %20. Which of them this version reads: "
        "docs/reference/rules.md, What this version runs.",
        example="builtin://tiny-moe",
        min_length=1,
        max_length=1024,
    )
    tokenizer_uri: str | None = field(
        None, doc="Where the tokenizer is; null means with the model.", max_length=1024
    )
    dtype: DType = field(DType.BFLOAT16, doc="Compute precision of everything that is not quantised.")


class Warmup(Model):
    """Supervised steps before RL, so that a tiny model does the task some of the time; cached by content."""

    steps: int = field(0, doc="Optimizer steps; 0 means none.", ge=0, le=1_000_000)
    batch_size: int = field(192, doc="Examples a step.", ge=1, le=65_536)
    learning_rate: PositiveDecimal = field(Decimal("0.004"), doc="Peak AdamW learning rate.")
    answer_noise: RatioDecimal = field(
        Decimal(0),
        doc="Share of examples that carry another example's answer: imperfect demonstrations, after which "
        "the policy prefers right answers but gives them only some of the time.",
    )
    seed: int = field(
        1,
        doc="Seed of a builtin model's initial weights and of the noise. Apart from algorithm.seed, so that "
        "runs that differ by that start from the same policy.",
        ge=0,
        le=2**31 - 1,
    )


class RewardSource(Model):
    """Where the module of `task.reward` comes from; at most one of the fields. None means the image."""

    config_map: str | None = field(
        None, doc="Config map whose keys are files; Python ones for the reward.", max_length=253
    )
    uri: str | None = field(
        None, doc="Python file, zip file of them, or directory; any fsspec URL.", max_length=1024
    )


class AnswerFormat(StrEnum):
    """How the answer is written by the model."""

    PLAIN = "Plain"
    REVERSED = "Reversed"


class Task(Model):
    """What the policy is asked and how an answer is scored: a named task, or JSONL with a reward function."""

    name: str | None = field(
        None,
        doc="reasoning_gym/DATASET (extra `tasks`) or builtin/chain_sum. Of a reasoning_gym data set only a "
        "score of exactly 1 counts: partial scores are rewarded with 0.",
        max_length=253,
    )
    parameters: dict[str, Any] = field(
        {}, doc="Arguments of the named task, for example min_digits.", max_length=64
    )
    uri: str | None = field(None, doc="JSONL of {prompt, answer, …}; any fsspec URL.", max_length=1024)
    reward: str | None = field(
        None,
        doc="module:function called as f(completion: str, item: dict) -> float.",
        max_length=253,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
    )
    source: RewardSource | None = field(None, doc="Where the reward module comes from.")
    reward_timeout_seconds: int = field(
        10, doc="A reward call that takes longer fails the job.", unit="s", ge=1, le=3600
    )
    answer_format: AnswerFormat = field(
        AnswerFormat.PLAIN, doc="Reversed: answers are written last character first."
    )
    seed: int = field(17, doc="Seed of the training prompts.", ge=0, le=2**31 - 1)
    held_out_prompts: int = field(256, doc="Prompts kept out of training for evaluation.", ge=0, le=65_536)


class ImportanceSamplingLevel(StrEnum):
    """What one importance weight covers."""

    TOKEN = "Token"  # noqa: S105 (a level, not a secret)


class ImportanceSampling(Model):
    """Correction for rollout and trainer disagreeing about a token's probability (TIS)."""

    level: ImportanceSamplingLevel = field(ImportanceSamplingLevel.TOKEN, doc="What one weight covers.")
    upper: WeightBoundDecimal = field(Decimal(5), doc="Upper bound of a weight; larger ones are cut to it.")


class Staleness(StrEnum):
    """What happens to generation that would pass `maxVersionDiff`."""

    WAIT = "Wait"
    DROP = "Drop"


class Evaluation(Model):
    """Evaluation on the held-out prompts, one response each."""

    every: int = field(
        0,
        doc="Steps between evaluations; 0 means before the first and after the last step only.",
        ge=0,
        le=INT32_MAX,
    )
    prompts: int = field(
        256, doc="Held-out prompts an evaluation, at most task.heldOutPrompts.", ge=0, le=INT32_MAX
    )
    temperature: NonNegativeDecimal = field(
        Decimal(0), doc="0 takes the most probable tokens; 1 measures the policy as it samples in training."
    )


class Algorithm(Model):
    """The RL algorithm and its batch shapes."""

    name: Literal["GRPO"] = field("GRPO", doc="Group-relative policy optimisation.")
    steps: int = field(
        doc="Optimisation steps; one step consumes one batch of groups.", example=30, ge=1, le=10_000_000
    )
    prompts_per_step: int = field(doc="Groups a step.", example=16, ge=1, le=65_536)
    samples_per_prompt: int = field(
        doc="Trajectories a group; GRPO needs at least 2.", example=8, ge=1, le=4_096
    )
    mini_batches: int = field(1, doc="Optimizer updates a step.", ge=1, le=1_024)
    max_prompt_tokens: int = field(
        64, doc="A longer prompt fails the job.", unit="tokens", ge=1, le=INT32_MAX
    )
    max_response_tokens: int = field(16, doc="Generation stops here.", unit="tokens", ge=1, le=INT32_MAX)
    temperature: PositiveDecimal = field(Decimal(1), doc="Sampling temperature, and the ratio's.")
    clip_low: RatioDecimal = field(Decimal("0.2"), doc="PPO ratio is clipped at 1 - clipLow.")
    clip_high: NonNegativeDecimal = field(Decimal("0.2"), doc="PPO ratio is clipped at 1 + clipHigh.")
    normalize_advantage: bool = field(True, doc="Divide a group's advantages by their standard deviation.")
    max_version_diff: int = field(
        3,
        doc="Largest allowed trainer version minus version of a trajectory's oldest sampled token when it is "
        "trained on; 0 is the synchronous mode.",
        unit="versions",
        le=1_000,
        ge=0,
    )
    staleness: Staleness = field(
        Staleness.WAIT, doc="Wait: generation waits for the trainer; Drop: too old groups are dropped whole."
    )
    importance_sampling: ImportanceSampling = field(ImportanceSampling, doc="Token-level TIS.")
    routing_replay: bool = field(True, doc="The trainer replays the rollout's expert choices (R3).")
    evaluation: Evaluation = field(Evaluation, doc="Evaluation on held-out prompts.")
    seed: int = field(1, doc="Seed of data order and sampling.", ge=0, le=2**31 - 1)


# -- how it is quantised and aligned ----------------------------------------------------------------------


class Format(StrEnum):
    """Block-scaled FP4 format."""

    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"


class Target(StrEnum):
    """What is quantised; everything else stays in `model.dtype`."""

    ROUTED_EXPERTS = "RoutedExperts"
    KV_CACHE = "KVCache"


class SecondInput(StrEnum):
    """Input of the experts' second matrix, which the rollout's kernels quantise as well."""

    BF16 = "BF16"
    RTN = "RTN"
    RECORDED = "Recorded"


class TensorScaleRule(StrEnum):
    """Where the FP32 scale above the block scales comes from."""

    FIXED = "Fixed"
    PER_VERSION = "PerVersion"
    PER_TOKEN = "PerToken"  # noqa: S105 (a rule, not a secret)


class RoundingOrder(StrEnum):
    """Order of the FP32 operations in block quantisation; each mode equals a public package bit for bit."""

    RECIPROCAL = "Reciprocal"
    FOUR_OVER_SIX = "FourOverSix"
    TORCHAO = "TorchAO"
    MODELOPT = "ModelOpt"
    COMPRESSED_TENSORS = "CompressedTensors"


class PrefillAttends(StrEnum):
    """Which keys and values a prefilled token attends of those that its own pass computes."""

    QUANTIZED = "Quantized"
    EXACT = "Exact"


class Quantization(Model):
    """What the rollout quantises, and how."""

    format: Format = field(Format.NVFP4, doc="Block-scaled FP4 format.")
    targets: list[Target] = field(
        [Target.ROUTED_EXPERTS, Target.KV_CACHE], doc="What is quantised.", min_length=1, max_length=2
    )
    second_input: SecondInput = field(
        SecondInput.RTN, doc="Input of the experts' second matrix: BF16, RTN on both sides, or Recorded."
    )
    tensor_scale: TensorScaleRule = field(TensorScaleRule.FIXED, doc="Rule of the FP32 scale.")
    order: RoundingOrder = field(RoundingOrder.RECIPROCAL, doc="Order of the FP32 operations.")
    prefill_attends: PrefillAttends = field(
        PrefillAttends.QUANTIZED,
        doc="Keys and values of its own pass that a prefilled token attends: Quantized or Exact.",
    )


class MethodName(StrEnum):
    """How the trainer treats what the rollout quantised."""

    BF16 = "BF16"
    VANILLA = "Vanilla"
    QAT = "QAT"
    TRACE = "TRACE"


class LayerPolicy(StrEnum):
    """Which layers are recorded and guided."""

    ALL = "All"
    LAST_HALF = "LastHalf"
    LAST = "Last"
    LIST = "List"


class Layers(Model):
    """Layers that are recorded and guided. LastHalf counts K/V among full-attention layers only."""

    policy: LayerPolicy = field(
        LayerPolicy.LAST_HALF, doc="All, LastHalf, Last (with last) or List (with indices)."
    )
    last: int | None = field(None, doc="Number of last layers, for policy Last.", ge=1, le=1_024)
    indices: list[Annotated[int, Field(ge=0, le=1_023)]] | None = field(
        None, doc="Layer indices from 0, for policy List.", max_length=1_024
    )


class RatioFrom(StrEnum):
    """Which forward pass of the current weights the importance weight is computed from."""

    GUIDED = "Guided"
    UNGUIDED = "Unguided"
    AUTO = "Auto"
    EXACT = "Exact"


class Trace(Model):
    """TRACE: what is recorded, and how strongly the trainer follows it."""

    code_bits: CodeBits = field(1, doc="Low bits of each 4-bit code; 4 is the whole code, sign included.")
    scale_bits: ScaleBits = field(3, doc="Low bits of each block scale; 8 is the whole scale.")
    layers: Layers = field(Layers, doc="Which layers.")
    ratio_from: RatioFrom = field(
        RatioFrom.AUTO,
        doc="Auto: Guided for tokens of the current version, else Unguided; Exact: weight 1 for them.",
    )
    drift_band: BandDecimal | None = field(
        None,
        doc="Guide only values this close to a rounding boundary, as a share of the bracket's width (at most "
        '"0.5"); null guides all.',
    )
    max_guided_version_diff: int | None = field(
        None,
        doc="Guide only tokens at most this many versions old; null guides all.",
        unit="versions",
        ge=0,
        le=INT32_MAX,
    )


class Method(Model):
    """The training method."""

    name: MethodName = field(
        doc="BF16 (no quantisation), Vanilla (rollout only), QAT, or TRACE.", example="TRACE"
    )
    trace: Trace | None = field(None, doc="Only with TRACE; null there means its defaults.")


# -- where it runs ----------------------------------------------------------------------------------------


class RolloutEngine(StrEnum):
    """Rollout engine."""

    REFERENCE = "Reference"
    SGLANG = "SGLang"


class TrainerEngine(StrEnum):
    """Trainer engine."""

    REFERENCE = "Reference"
    MEGATRON = "Megatron"
    VERL = "Verl"


class NumericsBackend(StrEnum):
    """Emulated: fake quantisation in BF16 arithmetic (CPU, Hopper); Native: Blackwell FP4 kernels."""

    EMULATED = "Emulated"
    NATIVE = "Native"


class ResourceList(Model):
    """Resources of a container by name; memory and cpu are typed so that rules can read them."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
    __pydantic_extra__: dict[str, ResourceQuantity] = Field(init=False)
    cpu: CPUQuantity | None = field(None, doc="CPU quantity.")
    memory: Quantity | None = field(None, doc="Memory quantity.", unit="bytes")


class ResourceClaimRef(Model):
    """A DRA claim of the pod template that the container uses."""

    name: str = field(
        doc="Name of the claim in the pod template.", example="compute-domain-channel", max_length=63
    )
    request: str | None = field(None, doc="Request within the claim.", max_length=63)


class Resources(Model):
    """Container resources."""

    requests: ResourceList = field(
        ResourceList, doc="Requests by resource name.", mutable=Mutability.WHILE_SUSPENDED
    )
    limits: ResourceList = field(
        ResourceList, doc="Limits by resource name.", mutable=Mutability.WHILE_SUSPENDED
    )
    claims: list[ResourceClaimRef] = field([], doc="DRA claims.", max_length=16)


class RolloutParallelism(Model):
    """Model parallelism of one rollout replica."""

    tensor: int = field(1, doc="Tensor-parallel size.", ge=1, le=1_024)
    expert: int = field(1, doc="Expert-parallel size.", ge=1, le=1_024)
    data: int = field(1, doc="Data-parallel (DP attention) size.", ge=1, le=1_024)

    @property
    def ranks(self) -> int:
        """Processes of one replica that compute."""
        return self.tensor * self.data


class TrainerParallelism(Model):
    """Parallelism of the trainer."""

    tensor: int = field(1, doc="Tensor-parallel size.", ge=1, le=1_024)
    pipeline: int = field(1, doc="Pipeline-parallel size.", ge=1, le=1_024)
    context: int = field(1, doc="Context-parallel size.", ge=1, le=1_024)
    expert: int = field(1, doc="Expert-parallel size.", ge=1, le=1_024)
    data: int = field(1, doc="Data-parallel size.", ge=1, le=65_536)

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.tensor * self.pipeline * self.context * self.data


class Rollout(Model):
    """The rollout role: servers that generate trajectories and record how they rounded."""

    engine: RolloutEngine = field(RolloutEngine.REFERENCE, doc="Rollout engine.")
    nodes: int = field(1, doc="Pods of this role.", ge=1, le=4_096)
    nodes_per_replica: int = field(1, doc="Pods that one server spans.", ge=1, le=4_096)
    gpus_per_node: int = field(0, doc="GPUs a pod.", ge=0, le=16)
    parallelism: RolloutParallelism = field(RolloutParallelism, doc="Model parallelism of one replica.")
    numerics: NumericsBackend = field(NumericsBackend.EMULATED, doc="Emulated or Native FP4.")
    max_running_requests: int = field(512, doc="Sequences decoded together.", ge=1, le=65_536)
    kv_cache_tokens: int = field(65_536, doc="KV cache size of a replica.", unit="tokens", ge=16, le=2**40)
    threads: int = field(1, doc="CPU threads a process.", ge=1, le=1_024)
    image: str | None = field(
        None, doc="Container image; null means the operator's default.", max_length=1024
    )
    engine_args: dict[str, Any] = field({}, doc="Passed to the engine as they are.", max_length=256)
    resources: Resources = field(Resources, doc="Container resources.", mutable=Mutability.WHILE_SUSPENDED)
    template: dict[str, Any] = field(
        {}, doc="Strategic-merge patch of the pod template.", mutable=Mutability.WHILE_SUSPENDED
    )


class WeightSync(StrEnum):
    """How weights travel from trainer to rollout."""

    AUTO = "Auto"
    DISTRIBUTED = "Distributed"
    DISK = "Disk"


class Optimizer(Model):
    """AdamW with linear warm-up, then constant."""

    name: Literal["AdamW"] = field("AdamW", doc="Optimizer.")
    learning_rate: PositiveDecimal = field(Decimal("0.000001"), doc="Learning rate after warm-up.")
    warmup_steps: int = field(0, doc="Updates of linear learning-rate warm-up.", ge=0, le=INT32_MAX)
    beta1: DecayDecimal = field(Decimal("0.9"), doc="AdamW beta1.")
    beta2: DecayDecimal = field(Decimal("0.95"), doc="AdamW beta2.")
    epsilon: PositiveDecimal = field(Decimal("1e-8"), doc="AdamW epsilon.")
    weight_decay: NonNegativeDecimal = field(Decimal(0), doc="Decoupled weight decay.")
    gradient_clip: PositiveDecimal | None = field(
        Decimal(1), doc="Bound of the global gradient norm; null means none."
    )


class CheckpointState(StrEnum):
    """Full: trainer-0 gathers weights and optimizer and writes all. Sharded: each trainer writes its part."""

    FULL = "Full"
    SHARDED = "Sharded"


class Checkpoint(Model):
    """Checkpoints of the whole job: weights, optimizer, data order, counters."""

    every: int = field(
        10, doc="Steps between checkpoints.", unit="steps", ge=1, mutable=Mutability.WHILE_SUSPENDED
    )
    keep: int = field(2, doc="Newest checkpoints kept.", ge=1, le=1_000, mutable=Mutability.WHILE_SUSPENDED)
    state: CheckpointState = field(
        CheckpointState.FULL,
        doc="Who writes weights and optimizer: Full, trainer-0, in whose memory all of it must fit; Sharded, "
        "each trainer what it holds, into one directory that all see. A job continues from either.",
        mutable=Mutability.WHILE_SUSPENDED,
    )


class Trainer(Model):
    """The trainer role."""

    engine: TrainerEngine = field(TrainerEngine.REFERENCE, doc="Trainer engine.")
    nodes: int = field(1, doc="Pods of this role.", ge=1, le=4_096)
    gpus_per_node: int = field(0, doc="GPUs a pod.", ge=0, le=16)
    parallelism: TrainerParallelism = field(TrainerParallelism, doc="Parallelism.")
    weight_sync: WeightSync = field(
        WeightSync.AUTO, doc="Auto: Disk on one machine and in a one-node Pod, else Distributed."
    )
    optimizer: Optimizer = field(Optimizer, doc="Optimizer.")
    micro_batch_tokens: int = field(
        16_384, doc="Padded tokens of one forward and backward.", unit="tokens", ge=1, le=INT32_MAX
    )
    checkpoint: Checkpoint = field(Checkpoint, doc="Checkpoints.", mutable=Mutability.WHILE_SUSPENDED)
    threads: int = field(1, doc="CPU threads a process.", ge=1, le=1_024)
    image: str | None = field(
        None, doc="Container image; null means the operator's default.", max_length=1024
    )
    engine_args: dict[str, Any] = field({}, doc="Passed to the engine as they are.", max_length=256)
    resources: Resources = field(Resources, doc="Container resources.", mutable=Mutability.WHILE_SUSPENDED)
    template: dict[str, Any] = field(
        {}, doc="Strategic-merge patch of the pod template.", mutable=Mutability.WHILE_SUSPENDED
    )


class Colocation(StrEnum):
    """Whether a rollout and a trainer share a pod, a node, or nothing."""

    POD = "Pod"
    NODE = "Node"
    NONE = "None"


class Fabric(StrEnum):
    """Multi-node NVLink fabric."""

    AUTO = "Auto"
    COMPUTE_DOMAIN = "ComputeDomain"
    NONE = "None"


class Topology(Model):
    """Topology constraint of the job's pods."""

    required: str | None = field(
        None, doc="Node label that all pods share, for example nvidia.com/gpu.clique.", max_length=316
    )
    preferred: str | None = field(None, doc="Node label that pods share where possible.", max_length=316)


class Placement(Model):
    """Where pods go."""

    colocation: Colocation = field(
        Colocation.POD,
        doc="Pod: rollout and trainer of a node share a pod; Node: a pod each, on the same node; None: a pod "
        "each, anywhere.",
    )
    fabric: Fabric = field(Fabric.AUTO, doc="Whether a ComputeDomain is made for the job.")
    topology: Topology = field(Topology, doc="Topology constraint.")
    queue: str | None = field(None, doc="Kueue local queue.", max_length=63)


class Ring(Model):
    """The record store's ring of segments in shared memory."""

    size: Quantity = field(
        "256Mi", doc="Shared memory reserved a node.", unit="bytes", mutable=Mutability.WHILE_SUSPENDED
    )


class Retention(StrEnum):
    """How long frames in the object store live."""

    TRAINED = "Trained"
    JOB = "Job"
    FOREVER = "Forever"


class ObjectStore(Model):
    """Frames in an object store, any fsspec URL."""

    uri: str | None = field(
        None, doc="Where frames go; null means records/ under the run's output.", max_length=1024
    )
    secret_name: str | None = field(
        None, doc="Secret with credentials, mounted into the pods.", max_length=253
    )
    endpoint_url: str | None = field(
        None, doc="Endpoint of an S3-compatible store; null means AWS_ENDPOINT_URL or AWS.", max_length=1024
    )
    batch_size: Quantity = field(
        "8Mi", doc="Frames are gathered into objects of about this size.", unit="bytes"
    )
    batch_milliseconds: int = field(
        50,
        doc="A finished trajectory's frames wait at most this long for others.",
        unit="ms",
        ge=0,
        le=60_000,
    )
    retention: Retention = field(Retention.TRAINED, doc="Trained: deleted after the step that used them.")


class Spill(StrEnum):
    """Whether frames may leave the node when memory and spillPath are full."""

    NEVER = "Never"
    OBJECT_STORE = "ObjectStore"


class Transport(Model):
    """How records travel from rollout to trainer."""

    ring: Ring = field(Ring, doc="Shared-memory ring.")
    spill_path: str | None = field(None, doc="Local directory for cold segments.", max_length=1024)
    spill_limit: Quantity | None = field(
        None, doc="Most bytes in spillPath; null means what its file system has.", unit="bytes"
    )
    object: ObjectStore = field(ObjectStore, doc="Object store.")
    spill: Spill = field(Spill.NEVER, doc="Whether cold segments may go to the object store.")
    only_object: bool = field(False, doc="Frames travel by the object store alone, without a ring.")
    deadline_seconds: int = field(
        60,
        doc="A frame that finds no room for this long, or an object that cannot be uploaded or read, is "
        "given up: its rows are missing and counted.",
        unit="s",
        ge=1,
        le=86_400,
        mutable=Mutability.WHILE_SUSPENDED,
    )


class Reprefill(StrEnum):
    """Which rows count when a sequence was prefilled again under newer weights."""

    AS_SAMPLED = "AsSampled"
    AS_ATTENDED = "AsAttended"


class Records(Model):
    """What is recorded besides the bits."""

    chunk_tokens: int = field(
        512, doc="Rows of a frame while a trajectory grows.", unit="rows", ge=1, le=65_536
    )
    max_missing_ratio: RatioDecimal = field(
        Decimal("0.01"), doc="The job fails above this share of missing rows in a step."
    )
    reprefill: Reprefill = field(Reprefill.AS_SAMPLED, doc="Which rows count after a re-prefill.")
    audit_every: int = field(
        0, doc="Every n-th trajectory also sends whole codes of all layers; 0 means none.", ge=0, le=INT32_MAX
    )


class Observe(Model):
    """Observation beyond the standard metrics."""

    baseline_every: int = field(
        0,
        doc="Every n-th step is also done without records, and that update thrown away, to measure what they "
        "cost; 0 means none.",
        ge=0,
        le=INT32_MAX,
    )
    tensorboard: bool = field(
        False,
        doc="Write the trainer's metrics as TensorBoard event files, too, below tensorboard/ of the run.",
        mutable=Mutability.WHILE_SUSPENDED,
    )


class Expect(Model):
    """What a canary must reach; broken, the job fails."""

    min_reward: NonNegativeDecimal | None = field(None, doc="Least held-out reward at the end.")
    min_reward_gain: DecimalString | None = field(
        None, doc="Least held-out reward at the end minus at the start."
    )
    max_gap: PositiveDecimal | None = field(None, doc="Largest mean guided gap over the run.", unit="nats")
    max_gap_ratio: PositiveDecimal | None = field(
        None, doc="Largest guided gap over unguided (RTN) gap of the same batches, mean over the run."
    )
    max_overhead: PositiveDecimal | None = field(None, doc="Largest overhead ratio over the run.")
    max_missing_rows: int | None = field(
        None, doc="Most missing record rows over the run.", unit="rows", ge=0, le=INT32_MAX
    )


class FailurePolicy(Model):
    """Restart budget."""

    max_restarts: int = field(
        3, doc="Restarts of a role before the job fails.", ge=0, le=1_000, mutable=Mutability.ALWAYS
    )


class Output(Model):
    """Where checkpoints, logs and the report go."""

    uri: str | None = field(
        None,
        doc="pvc://CLAIM/PATH, s3://BUCKET/PREFIX or file:///PATH. On a cluster every job makes a directory "
        "of its own there (see status.output); null means a directory of the pod, which goes with it. "
        "`tracerl run --out` wins locally.",
        max_length=1024,
    )
    secret_name: str | None = field(
        None,
        doc="Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for an s3:// uri, mounted into "
        "the trainer's pods; null means what the pods have by themselves, such as a role of their account.",
        max_length=253,
    )
    endpoint_url: str | None = field(
        None, doc="Endpoint of an S3-compatible store; null means AWS_ENDPOINT_URL or AWS.", max_length=1024
    )


class Spec(Model):
    """What is wanted."""

    suspend: bool = field(
        False, doc="Stop, keep the checkpoint, release the machines.", mutable=Mutability.ALWAYS
    )
    managed_by: str | None = field(None, doc="Controller that manages the job, if another.", max_length=63)
    active_deadline_seconds: int | None = field(
        None, doc="The job fails when it ran longer.", unit="s", ge=1, mutable=Mutability.ALWAYS
    )
    ttl_seconds_after_finished: int | None = field(
        None, doc="The finished job is deleted after this time.", unit="s", ge=0, mutable=Mutability.ALWAYS
    )
    failure_policy: FailurePolicy = field(FailurePolicy, doc="Restart budget.", mutable=Mutability.ALWAYS)
    model: ModelSource = field(doc="The policy model.")
    warmup: Warmup = field(Warmup, doc="Supervised steps before RL.")
    output: Output = field(Output, doc="Where results go.")
    task: Task = field(doc="Prompts and reward.", example={"name": "builtin/chain_sum"})
    algorithm: Algorithm = field(doc="The RL algorithm.")
    quantization: Quantization = field(Quantization, doc="What the rollout quantises.")
    method: Method = field(doc="The training method.")
    rollout: Rollout = field(Rollout, doc="The rollout role.")
    trainer: Trainer = field(Trainer, doc="The trainer role.")
    placement: Placement = field(Placement, doc="Where pods go.")
    transport: Transport = field(Transport, doc="How records travel.")
    records: Records = field(Records, doc="What is recorded.")
    observe: Observe = field(Observe, doc="Observation.")
    expect: Expect = field(Expect, doc="What a canary must reach.", mutable=Mutability.WHILE_SUSPENDED)


# -- what is observed -------------------------------------------------------------------------------------


class Condition(Model):
    """A condition in the style of metav1.Condition."""

    type: str = Field(max_length=316, description="Ready, Suspended, Complete or Failed.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(max_length=1024, description="Why, in one word of the table of reasons.")
    message: str = Field(
        "", max_length=32_768, description="Why, in a sentence; empty where there is nothing to say."
    )
    last_transition_time: str = Field(description="When status changed last.")
    observed_generation: int | None = Field(None, description="metadata.generation that it was decided on.")


class Expectation(Model):
    """A figure of spec.expect, as it was judged when all steps were done."""

    name: str = Field(max_length=32, description="Field of spec.expect.")
    wanted: str = Field(max_length=40, description="The bound, as in <= 0.5.")
    value: DecimalString | None = Field(None, description="What was measured; absent where nothing was.")
    met: bool = Field(description="Whether the figure is within the bound.")


class OverheadParts(Model):
    """The three parts of the overhead, each as a share of the step."""

    records: DecimalString | None = Field(None, description="Capture, pack, put, fetch and unpack.")
    guided_kernels: DecimalString | None = Field(None, description="Guided rounding.")
    extra_forward: DecimalString | None = Field(None, description="The second forward pass, for the ratio.")


class Progress(Model):
    """What the trainer reports while it runs, of its last step."""

    step: int = Field(0, description="Steps that are done.")
    steps: int = Field(0, description="Steps that the job has, algorithm.steps.")
    policy_version: int = Field(0, description="Version of the trainer's weights.")
    reward: DecimalString | None = Field(None, description="Mean reward of the step's answers.")
    logprob_gap: DecimalString | None = Field(
        None, description="Mean distance of the trainer's log-probs from the rollout's, in nats."
    )
    tokens_per_second: DecimalString | None = Field(
        None, description="Tokens trained on, by the step's time."
    )
    step_seconds: DecimalString | None = Field(None, description="Time of the step, in s.")
    overhead_ratio: DecimalString | None = Field(None, description="Share of the step that TRACE costs.")
    overhead_parts: OverheadParts | None = Field(None, description="What it is the sum of.")
    record_bytes_per_token: DecimalString | None = Field(None, description="Bytes of records a token.")
    expectations: list[Expectation] | None = Field(
        None, max_length=16, description="The figures of spec.expect, when all steps are done."
    )
    updated_at: str | None = Field(None, description="When the operator wrote this.")


class Status(Model):
    """What was observed. Only the operator writes it."""

    observed_generation: int | None = Field(None, description="metadata.generation that this is about.")
    summary: str | None = Field(
        None,
        description="One word for people: Complete, Failed, Suspended, Suspending, or the reason of Ready.",
    )
    ready: str | None = Field(None, description="Nodes whose pods are ready, of all of the job, as in 1/1.")
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Ready, Suspended, Complete and Failed."
    )
    terminal: Literal["Complete", "Failed"] | None = Field(
        None, description="How the job ended; absent until then."
    )
    start_time: str | None = Field(None, description="When the job was let run; absent while it is held.")
    completion_time: str | None = Field(None, description="When the job ended.")
    restarts: int = Field(0, description="Restarts so far, which failurePolicy.maxRestarts limits.")
    output: str | None = Field(
        None, max_length=2048, description="The job's own directory below spec.output.uri."
    )
    progress: Progress = Field(default_factory=Progress, description="How far the trainer is.")


class Metadata(Model):
    """The parts of ObjectMeta that TraceRL reads; others pass through."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)
    name: Annotated[str, Field(max_length=50, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = field(
        doc="A name for the job: lower-case letters, digits and dashes, at most 50.", example="canary"
    )
    namespace: str | None = None
    uid: Annotated[str, Field(max_length=64, pattern=UID_PATTERN)] | None = field(
        None,
        doc="Letters, digits and dashes, at most 64.",
    )
    generation: int | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class TraceRLJob(Model):
    """An RL job whose FP4 rollout and trainer round alike."""

    api_version: Literal["tracerl.dev/v1alpha1"] = "tracerl.dev/v1alpha1"
    kind: Literal["TraceRLJob"] = "TraceRLJob"
    metadata: Metadata
    spec: Spec
    status: Status | None = None
