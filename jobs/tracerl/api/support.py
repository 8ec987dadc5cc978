"""What the resource allows and this version does not run yet: one table, shortened as parts arrive.

Everything here is refused when a job starts, and by `tracerl validate`, with the value that does run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.alias_generators import to_snake

from tracerl.api.errors import Fault
from tracerl.api.job import (
    Format,
    NumericsBackend,
    RolloutEngine,
    TensorScaleRule,
    TrainerEngine,
)
from tracerl.api.rules import MODEL_SCHEMES, Check, Facts, Level, Rule, scheme


@dataclass(frozen=True, slots=True)
class Only:
    """The one value of a field that this version runs, and why no other."""

    path: str
    value: object
    why: str


_ENGINE = "it has the Reference engine alone"
_CPU = "its engines compute on CPUs"
_ONE_PROCESS = "a rollout is one process"
_WHOLE_MODEL = "every trainer process holds the whole model"

SUPPORTED: tuple[Only, ...] = (
    Only("spec.rollout.engine", RolloutEngine.REFERENCE, _ENGINE),
    Only("spec.trainer.engine", TrainerEngine.REFERENCE, _ENGINE),
    Only("spec.rollout.numerics", NumericsBackend.EMULATED, "it emulates FP4"),
    Only("spec.rollout.nodesPerReplica", 1, _ONE_PROCESS),
    Only("spec.rollout.gpusPerNode", 0, _CPU),
    Only("spec.trainer.gpusPerNode", 0, _CPU),
    Only("spec.rollout.parallelism.tensor", 1, _ONE_PROCESS),
    Only("spec.rollout.parallelism.expert", 1, _ONE_PROCESS),
    Only("spec.rollout.parallelism.data", 1, _ONE_PROCESS),
    Only("spec.trainer.parallelism.tensor", 1, _WHOLE_MODEL),
    Only("spec.trainer.parallelism.pipeline", 1, _WHOLE_MODEL),
    Only("spec.trainer.parallelism.context", 1, _WHOLE_MODEL),
    Only("spec.trainer.parallelism.expert", 1, _WHOLE_MODEL),
    Only("spec.quantization.format", Format.NVFP4, "it computes NVFP4 alone"),
    Only("spec.quantization.tensorScale", TensorScaleRule.FIXED, "it has fixed tensor scales alone"),
    Only("spec.observe.baselineEvery", 0, "its steps all record"),
)

MODEL_SCHEMES_NOW = ("builtin", "file")


def _refuse_other(only: Only) -> Check:
    def check(facts: Facts) -> Iterator[Fault]:
        value: object = facts
        for part in only.path.split("."):
            value = getattr(value, to_snake(part))
        if value != only.value:
            problem = f"is {_yaml(value)}, which this version does not run ({only.why})"
            yield Fault(only.path, problem, f"write {_yaml(only.value)}")

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


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


SUPPORT_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            "version-" + to_snake(only.path.removeprefix("spec.")).replace(".", "-").replace("_", "-"),
            Level.START,
            (only.path,),
            f"`{_yaml(only.value)}` only: {only.why}.",
            _refuse_other(only),
        )
        for only in SUPPORTED
    ),
    Rule(
        "version-model-uri",
        Level.START,
        ("spec.model.uri",),
        "`builtin://NAME` and `file:///PATH` only.",
        _refuse_remote_model,
    ),
    Rule(
        "version-dense-layers",
        Level.START,
        ("spec.model.uri",),
        "Models whose layers are all mixtures of experts.",
        _refuse_dense_layers,
    ),
)
