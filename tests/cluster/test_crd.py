"""The definition on a real API server takes what validates, and refuses what the manifest alone shows."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, RefusedError
from manifests import MINIMAL
from test_check import BAD

from tracerl.api import schema
from tracerl.api.cel import CEL
from tracerl.api.job import Mutability
from tracerl.api.load import apply_overrides, check
from tracerl.api.rules import RULES, Level

EXAMPLES = sorted((Path(__file__).parents[2] / "jobs/examples").glob("*.yaml"))

# What only `tracerl validate` refuses: the server takes 3.0 for 3 and a null for absence, where there is a
# default.
MORE_EXACT = [["spec.algorithm.steps=3.0"], ["spec.trainer=null"]]


def refusal(server: ApiServer, job: dict[str, Any]) -> str | None:
    try:
        server.create(job, dry_run=True)
    except RefusedError as error:
        return str(error)
    return None


def test_every_rule_of_level_api_is_in_cel_and_no_other() -> None:
    assert {cel.rule for cel in CEL} == {rule.name for rule in RULES if rule.level is Level.API}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_taken(server: ApiServer, path: Path) -> None:
    server.create(yaml.safe_load(path.read_text()), dry_run=True)


def test_the_server_fills_in_the_models_defaults(server: ApiServer) -> None:
    from tracerl.api.job import TraceRLJob

    stored = server.create(MINIMAL, dry_run=True)
    filled = TraceRLJob.model_validate(stored).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    own = TraceRLJob.model_validate(MINIMAL).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored["spec"] == filled == own


@pytest.mark.parametrize(("overrides", "path", "_"), BAD, ids=lambda value: str(value)[:60])
def test_what_the_manifest_alone_shows_is_refused(
    server: ApiServer, overrides: list[str], path: str, _: str
) -> None:
    job = apply_overrides(copy.deepcopy(MINIMAL), overrides)
    later = {fault.path for fault in check(job)} and not refused_by_api(job)
    answer = refusal(server, job)
    if later or overrides in MORE_EXACT:
        assert answer is None
    else:
        assert answer is not None
        assert (
            path.split("[", maxsplit=1)[0].rpartition(".")[2] in answer or path.rpartition(".")[0] in answer
        )


def refused_by_api(job: dict[str, Any]) -> bool:
    """Whether the models or a rule of level API refuse it."""
    from pydantic import ValidationError

    from tracerl.api.job import TraceRLJob
    from tracerl.api.rules import Facts

    try:
        text = json.dumps(job)
        spec = TraceRLJob.model_validate_json(text, strict=True, by_alias=True, by_name=False).spec
    except ValidationError:
        return True
    return any(list(rule.check(Facts(spec))) for rule in RULES if rule.level is Level.API)


def values(item: schema.FieldDoc, seed: random.Random) -> Any:
    """Give some value of the field's type, often one at or beyond its bounds."""
    inner = item.schema
    if choices := schema.allowed(inner):
        return seed.choice([*choices, "Other"])
    match schema.kind(inner):
        case "integer":
            low, high = inner["minimum"], inner.get("maximum", 2**31)
            return seed.choice([low, low + 1, low + 2, high, low - 1, high + 1, "1"])
        case "boolean":
            return seed.choice([True, False, "true"])
        case "decimal":
            return seed.choice(["0", "1", "0.5", "-1", "2", "1e-8", "x", 1])
        case "quantity":
            return seed.choice(["1Mi", "64Mi", "1Gi", "512", 7, "1.5x", "-1"])
        case "text":
            return seed.choice(
                ["a", "s3://bucket/prefix", "file:///tmp/x", "pvc://claim/x", "/tmp", "", "a" * 2000]
            )
        case "list":
            return seed.choice([[], [0], [1, 1], ["KVCache"], ["KVCache", "KVCache"]])
        case "map":
            return seed.choice(
                [{}, {"spec": {"restartPolicy": "Never"}}, {"metadata": {"labels": {"a": "b"}}}]
            )
        case _:
            return None


def test_mutated_manifests_are_refused_by_both_or_by_neither(server: ApiServer) -> None:
    seed = random.Random(7)
    fields = [item for item in schema.walk() if item.path.startswith("spec.") and "[]" not in item.path]
    refused = 0
    for _ in range(500):
        job = copy.deepcopy(MINIMAL)
        for item in seed.sample(fields, seed.randint(1, 3)):
            value = values(item, seed)
            place = job
            *parents, name = item.path.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    break
            else:
                if value is not None:
                    place[name] = value
        expected, answer = refused_by_api(job), refusal(server, job)
        refused += expected
        assert expected == (answer is not None), f"{json.dumps(job['spec'])} {answer}"
    assert 100 < refused < 500


def test_fields_change_when_the_models_say_so(server: ApiServer) -> None:
    job = copy.deepcopy(MINIMAL)
    job["metadata"]["name"] = "changing"
    server.create(job, dry_run=False)
    changed = {Mutability.IMMUTABLE: 0, Mutability.WHILE_SUSPENDED: 0, Mutability.ALWAYS: 0}
    for path, value, mutability in CHANGES:
        change: Any = value
        for name in reversed(path.split(".")):
            change = {name: change}
        if mutability is Mutability.ALWAYS:
            server.patch("changing", change, dry_run=True)
        else:
            with pytest.raises(RefusedError, match=r"cannot be changed|while spec\.suspend is true"):
                server.patch("changing", change, dry_run=True)
        changed[mutability] += 1
    server.patch("changing", {"spec": {"suspend": True}}, dry_run=False)
    for path, value, mutability in CHANGES:
        change = value
        for name in reversed(path.split(".")):
            change = {name: change}
        if mutability is Mutability.WHILE_SUSPENDED:
            server.patch("changing", change, dry_run=True)
    assert min(changed.values()) >= 3


CHANGES: list[tuple[str, Any, Mutability]] = [
    ("spec.algorithm.steps", 31, Mutability.IMMUTABLE),
    ("spec.algorithm.importanceSampling.upper", "6", Mutability.IMMUTABLE),
    ("spec.method.trace", {"codeBits": 2}, Mutability.IMMUTABLE),
    ("spec.model.uri", "builtin://tiny-moe-deep", Mutability.IMMUTABLE),
    ("spec.rollout.nodes", 2, Mutability.IMMUTABLE),
    ("spec.rollout.image", "registry/image:1", Mutability.IMMUTABLE),
    ("spec.trainer.optimizer.gradientClip", "2", Mutability.IMMUTABLE),
    ("spec.managedBy", "example.com/other", Mutability.IMMUTABLE),
    ("spec.placement.queue", "lq", Mutability.IMMUTABLE),
    ("spec.transport.spillPath", "/spill", Mutability.IMMUTABLE),
    ("spec.output.uri", "pvc://claim/x", Mutability.IMMUTABLE),
    ("spec.rollout.resources.limits", {"memory": "1Gi"}, Mutability.WHILE_SUSPENDED),
    ("spec.trainer.resources.requests", {"cpu": "2"}, Mutability.WHILE_SUSPENDED),
    ("spec.rollout.template", {"spec": {"nodeSelector": {"a": "b"}}}, Mutability.WHILE_SUSPENDED),
    ("spec.suspend", True, Mutability.ALWAYS),
    ("spec.activeDeadlineSeconds", 60, Mutability.ALWAYS),
    ("spec.failurePolicy.maxRestarts", 7, Mutability.ALWAYS),
    ("spec.trainer.checkpoint.every", 5, Mutability.WHILE_SUSPENDED),
    ("spec.expect.maxGap", "0.1", Mutability.WHILE_SUSPENDED),
]


def test_a_null_that_means_something_is_kept(server: ApiServer) -> None:
    job = apply_overrides(copy.deepcopy(MINIMAL), ["spec.trainer.optimizer.gradientClip=null"])
    assert server.create(job, dry_run=True)["spec"]["trainer"]["optimizer"]["gradientClip"] is None


def test_kubectl_explains_and_lists(server: ApiServer) -> None:
    text = server.kubectl("explain", "trj.spec.method.trace")
    assert "Low bits of each 4-bit code" in text
    server.create({**MINIMAL, "metadata": {"name": "listed"}}, dry_run=False)
    head, *rows = server.kubectl("get", "trj", "listed").splitlines()
    assert head.split() == ["NAME", "STATUS", "READY", "STEP", "REWARD", "OVERHEAD", "RESTARTS", "AGE"]
    assert rows[0].startswith("listed")
