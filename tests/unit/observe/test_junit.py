"""JUnit XML of a canary, read back by junitparser, and by the rules of the format's readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Failure, JUnitXml, Skipped, TestSuite
from sample_runs import write_run

from tracerl.api.job import Expect
from tracerl.observe.junit import Outcome, junit_xml
from tracerl.rl.steprecord import Expectation
from tracerl.runtime.results import run_outcome

EXPECT = Expect.model_validate({"minRewardGain": "0.1", "maxGapRatio": "0.5", "maxMissingRows": 0})
GAIN = Expectation(name="minRewardGain", wanted=">= 0.1", value=0.398, met=True)
RATIO = Expectation(name="maxGapRatio", wanted="<= 0.5", value=0.61, met=False)
ROWS = Expectation(name="maxMissingRows", wanted="<= 0", value=0.0, met=True)


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "job": "canary",
        "complete": True,
        "reason": "Completed",
        "message": "all 60 steps are done",
        "expect": EXPECT,
        "expectations": (GAIN, RATIO.model_copy(update={"value": 0.33, "met": True}), ROWS),
        "started": 1_790_000_000.0,
        "seconds": 130.25,
        "properties": {"method": "TRACE"},
    }
    return Outcome(**(values | changes))


def suite_of(given: Outcome) -> TestSuite:
    document = JUnitXml.fromstring(junit_xml(given).encode())
    (suite,) = document
    assert isinstance(suite, TestSuite)
    # The totals that are written are those of the cases that are there.
    for totals in (document, suite):
        written = (totals.tests, totals.failures, totals.errors, totals.skipped)
        kinds = [type(result) for case in suite for result in case.result]
        assert written == (len(list(suite)), kinds.count(Failure), 0, kinds.count(Skipped))
    return suite


def results(suite: TestSuite) -> dict[str, list[str]]:
    return {case.name: [type(one).__name__ for one in case.result] for case in suite}


def test_a_case_for_the_job_and_one_for_each_expectation_with_figure_and_bound() -> None:
    suite = suite_of(outcome())
    assert (suite.name, suite.time, suite.timestamp) == ("canary", 130.25, "2026-09-21T14:13:20")
    assert [(one.name, one.value) for one in suite.properties()] == [("method", "TRACE")]
    assert results(suite) == {"job": [], "minRewardGain": [], "maxGapRatio": [], "maxMissingRows": []}
    assert {case.name: case.system_out for case in suite if case.name != "job"} == {
        "minRewardGain": "minRewardGain 0.398, wanted >= 0.1",
        "maxGapRatio": "maxGapRatio 0.33, wanted <= 0.5",
        "maxMissingRows": "maxMissingRows 0, wanted <= 0",
    }
    assert {case.classname for case in suite} == {"tracerl.canary"}


def test_a_broken_expectation_fails_its_own_case() -> None:
    broken = outcome(
        complete=False,
        reason="ExpectationBroken",
        message="the run missed what spec.expect asks for",
        expectations=(GAIN, RATIO, ROWS),
    )
    suite = suite_of(broken)
    assert results(suite)["maxGapRatio"] == ["Failure"]
    assert [name for name, found in results(suite).items() if found] == ["maxGapRatio"]
    (failure,) = next(case for case in suite if case.name == "maxGapRatio").result
    assert (failure.type, failure.message) == ("ExpectationBroken", "maxGapRatio 0.61, wanted <= 0.5")
    assert not broken.passed


def test_a_figure_that_was_not_measured_is_a_failure() -> None:
    unmeasured = RATIO.model_copy(update={"value": None})
    suite = suite_of(outcome(complete=False, reason="ExpectationBroken", expectations=(unmeasured,)))
    (failure,) = next(case for case in suite if case.name == "maxGapRatio").result
    assert failure.message == "maxGapRatio not measured, wanted <= 0.5"


def test_a_job_that_fails_earlier_fails_the_jobs_case_and_judges_nothing() -> None:
    suite = suite_of(outcome(complete=False, reason="RecordsMissing", message="12 % <lost>", expectations=()))
    assert results(suite) == {
        "job": ["Failure"],
        "minRewardGain": ["Skipped"],
        "maxGapRatio": ["Skipped"],
        "maxMissingRows": ["Skipped"],
    }
    (failure,) = next(iter(suite)).result
    assert (failure.type, failure.message) == ("RecordsMissing", "RecordsMissing: 12 % <lost>")


def test_a_complete_job_whose_figures_were_not_reported_passes_without_a_claim() -> None:
    unreported = outcome(expectations=())
    assert unreported.passed
    assert results(suite_of(unreported))["maxGapRatio"] == ["Skipped"]


@given(st.text(), st.text())
def test_any_text_is_well_formed_xml(message: str, name: str) -> None:
    given = outcome(
        complete=False, reason="Unexpected", message=message, expectations=(), properties={"x": name}
    )
    assert results(suite_of(given))["job"] == ["Failure"]


@pytest.mark.parametrize(("end", "failed"), [("Complete", []), ("Failed", ["job"])])
def test_of_a_run_directory(tmp_path: Path, end: str, failed: list[str]) -> None:
    suite = suite_of(run_outcome(write_run(tmp_path / "run", done=7 if end == "Failed" else None, end=end)))
    assert [name for name, found in results(suite).items() if found == ["Failure"]] == failed
    finish = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()][-1]
    judged = {one["name"] for one in finish["expectations"]}
    assert {case.name for case in suite if case.system_out} == judged
    assert {case.name for case in suite} == {"job", "maxGapRatio", "maxOverhead"}
