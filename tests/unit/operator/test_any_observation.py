"""No job, progress, pod or object makes `reconcile` raise, and no answer asks for itself again for ever."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from small_cluster import APART, INSTALLATION, NODE, TOKEN, Cluster, job, nodes

from tracerl.api.job import Status
from tracerl_operator.reconcile import inquiries
from tracerl_operator.types import Decision

WORDS: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**70,
        0.5,
        float("inf"),
        "",
        "x",
        "1",
        "Complete",
        "Failed",
        "True",
    ),
    *(
        "Node",
        "None",
        "Pod",
        "ComputeDomain",
        "Failed\x00",
        "\ud800",
        "é" * 300,
        "2026-11-29T12:00:00Z",
        "9" * 40,
    ),
    *([], {}, [None], [{}], {"name": "x"}, {"": None}, {"$patch": "delete"}, [{"name": "trainer"}]),
    *({"terminated": {"exitCode": 2}}, {"containers": [{"name": "rollout", "env": 3}]}, "a,b", ["x"] * 50),
]
IDENTITY = {("metadata", key) for key in ("name", "namespace", "uid")}
SHAPES: list[dict[str, Any]] = [{}, NODE | nodes(2), APART | nodes(2), {"placement": {"queue": "lq"}}]


ANSWERS: list[dict[str, Any]] = [
    {
        "involvedObject": {"uid": "uid-canary-node-0-0-abcde"},
        "type": "Warning",
        "reason": "FailedMount",
        "message": "x",
        "lastTimestamp": "2026-11-29T12:00:00Z",
    },
    {
        "involvedObject": {"name": "canary-node-0"},
        "type": "Warning",
        "reason": "FailedCreate",
        "message": 'pods "canary-node-0-0-abcde" is forbidden',
        "series": {"lastObservedTime": "2026-11-29T12:00:00.5Z"},
    },
    {
        "metadata": {"ownerReferences": [{"uid": "made-9"}]},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "x"}]},
    },
]


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    return [path] * bool(path) + [p for key, member in members for p in places(member, (*path, key))]


def mutate(document: Any, chance: random.Random, keep: set[tuple[Any, ...]]) -> None:
    """Replace, remove or add something somewhere."""
    path = chance.choice([place for place in places(document) if place not in keep] or [("x",)])
    here = document
    for part in path[:-1]:
        here = here[part]
    word = copy.deepcopy(chance.choice(WORDS))
    match chance.randrange(3):
        case 0:
            here[path[-1]] = word
        case 1 if isinstance(here, dict):
            here.pop(path[-1], None)
        case _:
            if isinstance(here, dict):
                here[chance.choice(["name", "spec", "status", "template", "suspend", "x"])] = word
            else:
                here.append(word)


def story(seed: int) -> Cluster:
    """A job somewhere on its way."""
    chance = random.Random(seed)
    c = Cluster(job(**chance.choice(SHAPES)))
    c.observed = replace(c.observed, installation=replace(INSTALLATION, node_ring=True), pod_security=None)
    match seed % 6:
        case 0:
            pass
        case 1:
            c.settle()
        case 2:
            c.running()
        case 3:
            c.running().end_container(0, "trainer", chance.choice([1, 137]), "{}")
            c.end_jobset("Failed")
        case 4:
            c.running().job["spec"]["suspend"] = True
            c.step()
        case 5:
            c.running().end_jobset("Completed")
            c.settle()
    return c


def check(decision: Decision, c: Cluster) -> None:
    assert TOKEN not in repr(decision)
    for one in decision.apply:
        assert one.ref.name
    if decision.status is not None:
        Status.model_validate(decision.status)
        held = [x for x in decision.status["conditions"] if x["type"] in ("Complete", "Failed")]
        assert [x["status"] for x in held].count("True") <= 1
        assert all(len(x["message"]) <= 1000 for x in decision.status["conditions"])
    assert decision.look_again_at is None or decision.look_again_at > c.now


@pytest.mark.parametrize("part", range(5))
def test_mutated_jobs(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        c, chance = story(seed), random.Random(seed)
        before = c.job.get("status", {}).get("terminal")
        for _ in range(chance.randint(1, 4)):
            mutate(c.job, chance, IDENTITY)
        decision = c.decide()
        check(decision, c)
        status = c.job.get("status")
        after = status.get("terminal") if isinstance(status, dict) else None
        if before in ("Complete", "Failed") and after == before and decision.status is not None:
            assert decision.status["terminal"] == before


@pytest.mark.parametrize("part", range(5))
def test_mutated_progress(part: int) -> None:
    import json

    for seed in range(part * 100, part * 100 + 100):
        chance = random.Random(seed)
        c = Cluster(job()).running()
        claim: dict[str, Any] = {"step": 3, "steps": 30, "policyVersion": 3, "reward": "0.5"}
        for _ in range(chance.randint(1, 3)):
            mutate(claim, chance, set())
        text = json.dumps(claim)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(text))
            text = (
                text[:at] + chance.choice(["", "{", '"', "\\", "\x00", "9" * 400, "[" * 900]) + text[at + 1 :]
            )
        c.report(text)
        decision = c.step()
        check(decision, c)
        assert c.status.get("terminal") is None
        assert 0 <= c.status["progress"]["step"] <= 30
        c.settle()


@pytest.mark.parametrize("part", range(2))
def test_mutated_observations(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        c, chance = story(seed), random.Random(seed)
        if chance.random() < 0.5 and seed % 6:
            c.observed = replace(c.observed, pods=())  # or there are only events
        objects = copy.deepcopy(dict(c.observed.objects))
        pods = copy.deepcopy(c.observed.pods)
        for _ in range(chance.randint(1, 6)):
            if pods and chance.random() < 0.5:
                mutate(chance.choice(pods), chance, {("metadata",), ("metadata", "name")})
            elif objects:
                mutate(chance.choice([*objects.values()]), chance, set())
        answers = [copy.deepcopy(chance.choice(ANSWERS)) for _ in range(3)]
        for answer in answers:
            mutate(answer, chance, set())
        c.observed = replace(c.observed, objects=objects, pods=pods, answers=tuple(answers))
        assert len(inquiries(c.job, c.observed, c.now)) <= 6
        check(c.decide(), c)
