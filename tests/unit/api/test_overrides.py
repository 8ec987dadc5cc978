from typing import Any

import pytest

from tracerl.api.errors import InputError
from tracerl.api.load import apply_overrides, check


def at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[int(key) if isinstance(document, list) else key]
    return document


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("spec.algorithm.steps=5", "spec.algorithm.steps", 5),
        ("spec.trainer.optimizer.learningRate=0.0001", "spec.trainer.optimizer.learningRate", "0.0001"),
        ("spec.trainer.optimizer.learningRate=1e-4", "spec.trainer.optimizer.learningRate", "1e-4"),
        ("spec.trainer.optimizer.learningRate='2'", "spec.trainer.optimizer.learningRate", "2"),
        ("spec.trainer.optimizer={learningRate: 0.25}", "spec.trainer.optimizer", {"learningRate": "0.25"}),
        ("spec.trainer.optimizer.gradientClip=null", "spec.trainer.optimizer.gradientClip", None),
        ("spec.method.trace.driftBand=0.10", "spec.method.trace.driftBand", "0.10"),
        ("spec.transport.ring.size=1048576", "spec.transport.ring.size", "1048576"),
        ("spec.rollout.resources.limits={cpu: 2, a.b/c: 1}", "spec.rollout.resources.limits.cpu", "2"),
        ("metadata.name=007", "metadata.name", "007"),
        ("spec.suspend=true", "spec.suspend", True),
        ("spec.method.trace=", "spec.method.trace", None),
        ("spec.quantization.targets=[KVCache]", "spec.quantization.targets", ["KVCache"]),
        ("spec.quantization.targets.0=KVCache", "spec.quantization.targets", ["KVCache"]),
        ("spec.quantization.targets[0]=KVCache", "spec.quantization.targets", ["KVCache"]),
        ("spec.method.trace.layers.indices[0]=3", "spec.method.trace.layers.indices", [3]),
        ("spec.task.parameters.deep.er=1.5", "spec.task.parameters.deep.er", 1.5),
        ("spec.task.uri=s3://b/k?x=y", "spec.task.uri", "s3://b/k?x=y"),
        (
            "spec.rollout.template.spec.tolerations.0.operator=Exists",
            "spec.rollout.template.spec.tolerations",
            [{"operator": "Exists"}],
        ),
    ],
)
def test_override(manifest: dict[str, Any], override: str, path: str, value: object) -> None:
    before = str(manifest)
    assert at(apply_overrides(manifest, [override]), path) == value
    assert str(manifest) == before, "the manifest itself does not change"


def test_overrides_apply_in_order(manifest: dict[str, Any]) -> None:
    changed = apply_overrides(
        manifest,
        [
            "spec.quantization.targets=[RoutedExperts]",
            "spec.quantization.targets.1=KVCache",
            "spec.quantization.targets[0]=KVCache",
        ],
    )
    assert changed["spec"]["quantization"] == {"targets": ["KVCache", "KVCache"]}


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("spec.algorithm.steps", "has no =; write --set spec.algorithm.steps=VALUE"),
        ("", "has no ="),
        ("=3", "empty name"),
        ("spec..steps=3", "empty name"),
        ("spec.algorithm.step=3", "did you mean spec.algorithm.steps?"),
        ("spec.algorithm.samples_per_prompt=3", "did you mean spec.algorithm.samplesPerPrompt?"),
        ("algorithm.steps=3", "did you mean spec.algorithm.steps?"),
        (
            "spec.learningRate=3",
            "did you mean spec.warmup.learningRate or spec.trainer.optimizer.learningRate?",
        ),
        ("spec.trainer.optimiser.learningRate=3", "did you mean spec.trainer.optimizer.learningRate?"),
        ("spec.zzzzzz=3", "write one of suspend,"),
        ("spec.algorithm.steps.x=3", "spec.algorithm.steps has no fields below it"),
        ("spec.quantization.targets.x=3", "count from 0"),
        ("spec.quantization.targets.1=KVCache", "has 0 items; count from 0"),
        ("spec.quantization.targets[99999999]=KVCache", "has 0 items"),
        ("spec.algorithm.steps=a: b: c", "is not valid YAML: line 1"),
        ("spec.task.parameters=&a [*a]", "is nested more than"),
        ("spec.algorithm.steps=99999999999999999999", "is beyond 64 bits"),
        ("spec.task.parameters={a: .nan}", "is nan; write a finite number"),
    ],
)
def test_override_that_is_refused(manifest: dict[str, Any], override: str, fragment: str) -> None:
    with pytest.raises(InputError) as error:
        apply_overrides(manifest, [override])
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)


def test_all_that_is_refused_comes_at_once(manifest: dict[str, Any]) -> None:
    changes = ["spec.algorithm.step=3", "spec.algorithm.steps=3", "spec.rollout.replicas=2"]
    with pytest.raises(InputError) as error:
        apply_overrides(manifest, changes)
    first, *lines = str(error.value).splitlines()
    assert first == "2 of 3 changes cannot be made:"
    assert [line.rpartition("did you mean ")[2] for line in lines] == [
        "spec.algorithm.steps?",
        "spec.rollout.nodes?",
    ]


def test_override_below_a_single_value(manifest: dict[str, Any]) -> None:
    manifest["spec"]["model"] = "builtin://tiny-moe"
    with pytest.raises(InputError, match=r"spec\.model is a single value in the manifest"):
        apply_overrides(manifest, ["spec.model.uri=builtin://tiny-moe"])


def test_number_in_quotes_is_asked_for_in_a_file_only(manifest: dict[str, Any]) -> None:
    """A file is what `kubectl apply` sends, so it needs the quotes that --set supplies."""
    manifest["spec"]["records"] = {"maxMissingRatio": 0.02}
    (fault,) = check(manifest)
    assert fault.remedy == 'write it in quotes: "0.02"'
    assert check(apply_overrides(manifest, ["spec.records.maxMissingRatio=0.02"])) == []
