"""Patches of a pod template against what kubectl's strategic merge gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tracerl_operator.merge import PatchError, strategic_merge

BASE: dict[str, Any] = {
    "spec": {
        "nodeSelector": {"a": "1", "b": "2"},
        "tolerations": [{"key": "x"}],
        "containers": [
            {
                "name": "rollout",
                "image": "i",
                "args": ["1", "2"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
}


def container(**change: Any) -> dict[str, Any]:
    return {"containers": [{"name": "rollout", **change}]}


CASES: list[tuple[dict[str, Any], str, Any]] = [
    # patch of the spec, path into the result, what is there
    ({"nodeSelector": {"b": "3"}}, "nodeSelector", {"a": "1", "b": "3"}),
    ({"nodeSelector": {"a": None}}, "nodeSelector", {"b": "2"}),
    ({"nodeSelector": {"$patch": "replace", "c": "1"}}, "nodeSelector", {"c": "1"}),
    ({"nodeSelector": None}, "nodeSelector", None),
    ({"nodeSelector": {"$patch": "delete"}}, "nodeSelector", None),
    ({"tolerations": [{"key": "y"}]}, "tolerations", [{"key": "y"}]),
    (container(image="j"), "containers.0.image", "j"),
    (container(image="j"), "containers.0.args", ["1", "2"]),
    (container(args=["3"]), "containers.0.args", ["3"]),
    (container(env=[{"name": "B", "value": "3"}]), "containers.0.env.1.value", "3"),
    (container(env=[{"name": "B", "value": "3"}]), "containers.0.env.0.value", "1"),
    (container(env=[{"name": "C", "value": "3"}]), "containers.0.env.2.name", "C"),
    (container(env=[{"name": "A", "$patch": "delete"}]), "containers.0.env", [{"name": "B", "value": "2"}]),
    (
        container(volumeMounts=[{"name": "big", "mountPath": "/tmp"}]),
        "containers.0.volumeMounts.0.name",
        "big",
    ),
    ({"containers": [{"name": "new", "image": "k"}]}, "containers.1", {"name": "new", "image": "k"}),
    ({"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]}, "volumes.0.emptyDir.medium", "Memory"),
    # kubectl would keep emptyDir beside it, which no server takes
    (
        {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]},
        "volumes.0",
        {"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}},
    ),
    # of several for one name, the last says what becomes of it
    (
        container(
            env=[{"name": "A", "$patch": "delete"}, {"name": "C", "value": "1"}, {"name": "C", "value": "2"}]
        ),
        "containers.0.env",
        [{"name": "B", "value": "2"}, {"name": "C", "value": "2"}],
    ),
    ({"resourceClaims": [{"name": "gpu"}]}, "resourceClaims", [{"name": "gpu"}]),
]


@pytest.mark.parametrize(("patch", "path", "value"), CASES, ids=[case[1] for case in CASES])
def test_merge(patch: dict[str, Any], path: str, value: Any) -> None:
    base = copy.deepcopy(BASE)
    found: Any = strategic_merge(base, {"spec": patch}, "template")["spec"]
    assert base == BASE
    for part in path.split("."):
        found = found[int(part)] if part.isdecimal() else found.get(part)
    assert found == value


REFUSED = [
    ({"containers": 3}, "template.spec.containers is not a list"),
    ({"containers": {"name": "x"}}, "template.spec.containers is not a list"),
    ({"containers": [3]}, "template.spec.containers[0] has no name"),
    ({"containers": [{"image": "x"}]}, "template.spec.containers[0] has no name"),
    (container(env=[{"value": "x"}]), "template.spec.containers[0].env[0] has no name"),
    (
        container(env=[{"name": ["x"]}]),
        "template.spec.containers[0].env[0].name is neither text nor a number",
    ),
    ({"nodeSelector": 3}, "template.spec.nodeSelector is not a mapping"),
    ({"nodeSelector": {"$patch": "merge"}}, "write replace or delete"),
    ({"$setElementOrder/containers": []}, "is a directive that is not known"),
    ({"tolerations": {"key": "x"}}, "template.spec.tolerations is not a list"),
]


@pytest.mark.parametrize(("patch", "words"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_does_not_fit_is_named(patch: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchError) as caught:
        strategic_merge(copy.deepcopy(BASE), {"spec": patch}, "template")
    assert words in str(caught.value)
