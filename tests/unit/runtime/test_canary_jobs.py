"""What a canary makes of its manifest, and of the status that the operator wrote."""

from __future__ import annotations

import pytest
from test_rundir import job

from tracerl.api.errors import InputError
from tracerl.api.job import Status, TraceRLJob
from tracerl.runtime.canary import Canary, manifest_of, outcome_of


def canary(name: str) -> Canary:
    document = job().model_dump(mode="json", by_alias=True)
    document["metadata"]["name"] = name
    return Canary(document, TraceRLJob.model_validate(document), None, 60)


def prefix(name: str) -> str:
    return manifest_of(canary(name))["metadata"]["generateName"]


def test_a_name_is_kept_whole_where_five_characters_more_have_room() -> None:
    assert prefix("nightly") == "nightly-"
    assert prefix("n" * 44) == "n" * 44 + "-"


def test_canaries_whose_long_names_begin_alike_do_not_share_their_jobs_names() -> None:
    """Their ended jobs are told apart by what precedes the server's five characters."""
    shared = "nightly-qwen3-30b-a3b-on-four-nodes-of-gb200"
    names = [shared, *(f"{shared}-{end}" for end in ("a", "b", "bf16"))]
    prefixes = [prefix(name) for name in names]
    assert len(set(prefixes)) == len(names)
    for made in prefixes:
        # A job's name has at most 50 characters.
        assert len(made) <= 45
        assert made.startswith("nightly-qwen3-30b-a3b-on-")


@pytest.mark.parametrize(
    ("started", "ended", "seconds"),
    [
        ("2026-11-30T10:00:00Z", "2026-11-30T10:02:10Z", 130.0),
        ("2026-11-30T10:00:00.250000Z", "2026-11-30T10:00:01Z", 0.75),
        ("2026-11-30T10:00:00Z", "2026-11-30T11:00:00.5+01:00", 0.5),
    ],
)
def test_a_jobs_time_has_fractions_of_a_second_or_none(started: str, ended: str, seconds: float) -> None:
    assert outcome_of("nightly-abcde", canary("nightly"), complete(started, ended)).seconds == seconds


def test_a_time_that_is_none_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"trj/nightly-abcde has a time that is none \('yesterday'\)"):
        outcome_of("nightly-abcde", canary("nightly"), complete("yesterday", "2026-11-30T10:02:10Z"))


def complete(started: str, ended: str) -> Status:
    condition = {
        "type": "Complete",
        "status": "True",
        "reason": "Completed",
        "message": "all steps are done",
        "lastTransitionTime": ended,
    }
    return Status.model_validate(
        {"terminal": "Complete", "startTime": started, "completionTime": ended, "conditions": [condition]}
    )
