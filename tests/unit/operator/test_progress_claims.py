"""What a trainer says of itself is shown when it can be true, not too often, and decides nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_cluster import Cluster, job

GOOD = {
    "step": 7,
    "steps": 30,
    "policyVersion": 7,
    "reward": "0.5",
    "tokensPerSecond": "1200",
    "overheadRatio": "0.01",
    "updatedAt": "2020-01-01T00:00:00Z",
}


def shown(text: str) -> dict[str, Any]:
    c = Cluster(job()).running()
    c.report(text)
    c.step()
    assert c.conditions()["Ready"] == "True Running"
    found: dict[str, Any] = c.status["progress"]
    return found


def test_a_claim_is_shown_with_the_operators_time() -> None:
    assert shown(json.dumps(GOOD)) == {**GOOD, "updatedAt": "2026-11-29T12:00:00Z"}


NOTHING = {"step": 0, "steps": 0, "policyVersion": 0}
BAD = [
    "",
    "{",
    "null",
    "[]",
    '"text"',
    "NaN",
    "[" * 4000,
    '{"a":' * 800,
    json.dumps(GOOD | {"step": -1}),
    json.dumps(GOOD | {"step": 31}),
    json.dumps(GOOD | {"step": True}),
    json.dumps(GOOD | {"step": "7"}),
    json.dumps(GOOD | {"step": 7.5}),
    '{"step": 1' + "0" * 3000 + "}",
    json.dumps(GOOD | {"policyVersion": 2**31}),
    json.dumps(GOOD | {"policyVersion": -1}),
    json.dumps(GOOD | {"reward": 0.5}),
    json.dumps(GOOD | {"reward": "NaN"}),
    json.dumps(GOOD | {"reward": "Infinity"}),
    json.dumps(GOOD | {"reward": "0." + "5" * 40}),
    json.dumps(GOOD | {"reward": "٣"}),
    json.dumps(GOOD | {"state": "Complete"}),
    json.dumps(GOOD | {"terminal": "Complete"}),
    json.dumps(GOOD)[:-1] + " " * 4096 + "}",
    json.dumps(GOOD | {"updatedAt": "é" * 3000}, ensure_ascii=False),
    json.dumps(GOOD)[:-1] + ', "reward": "\ud800"}',
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: ascii(text)[:40])
def test_what_cannot_be_true_is_not_shown(text: str) -> None:
    assert shown(text) == NOTHING


def test_steps_are_the_jobs_and_not_the_trainers() -> None:
    assert shown(json.dumps(GOOD | {"steps": 7}))["steps"] == 30


@pytest.mark.parametrize("data", [None, [], "x", {"progress": None}, {"progress": {}}, {"other": "x"}])
def test_a_config_map_of_another_shape_says_nothing(data: Any) -> None:
    c = Cluster(job()).running()
    progress = c.find("ConfigMap", "-progress")
    assert progress is not None
    progress["data"] = data
    c.step()
    assert c.status["progress"] == NOTHING


def test_a_claim_to_be_done_changes_nothing() -> None:
    c = Cluster(job()).running()
    c.report(json.dumps(GOOD | {"step": 30}))
    decision = c.step()
    assert c.status["progress"]["step"] == 30
    assert c.status.get("terminal") is None
    assert c.conditions()["Complete"] == "False Running"
    assert decision.events == ()


def test_status_is_written_for_progress_at_a_bounded_rate() -> None:
    c = Cluster(job()).running()
    writes = 0
    for step in range(1, 61):
        c.report(json.dumps(GOOD | {"step": step % 30, "policyVersion": step}))
        decision = c.step()
        writes += decision.status is not None
        if decision.status is None:
            assert decision.look_again_at is not None
            assert 0 < (decision.look_again_at - c.now).total_seconds() <= 10
        c.wait(seconds=1)
    assert writes == 6
    assert c.status["progress"]["policyVersion"] == 51


def test_the_last_claim_before_the_end_does_not_wait() -> None:
    c = Cluster(job()).running()
    for step in (29, 30):
        c.report(json.dumps(GOOD | {"step": step}))
        if step == 30:
            c.end_jobset("Completed")
        c.step()
    assert c.status["progress"]["step"] == 30
    c.report(json.dumps(GOOD | {"step": 3}))
    c.wait(hours=1)
    assert c.step().status is None


def test_a_clock_that_was_wrong_delays_nothing() -> None:
    c = Cluster(job()).running()
    c.report(json.dumps(GOOD))
    c.step()
    c.wait(days=-1)
    c.report(json.dumps(GOOD | {"step": 8}))
    c.step()
    assert c.status["progress"]["step"] == 8
