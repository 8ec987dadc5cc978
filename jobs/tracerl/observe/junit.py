"""How a canary ended, as JUnit XML: the form in which CI systems show tests.

A job is a suite. Its first case is the job itself; each figure of `spec.expect` is a case of its own with
figure and bound in its output. No schema of the format is official; this writes what Jenkins' and GitLab's
readers share: suites, properties of a suite, cases, failure, skipped, system-out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.etree import ElementTree

from tracerl.api.constants import Reason
from tracerl.api.job import Expect
from tracerl.rl.steprecord import Expectation

JOB_CASE = "job"
"""Name of the case that is the job itself."""
# What XML 1.0 cannot hold at all, not even escaped.
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `started` is seconds since 1970, None where it never started; `seconds` its length."""

    job: str
    complete: bool
    reason: str
    message: str
    expect: Expect
    expectations: tuple[Expectation, ...]
    started: float | None = None
    seconds: float = 0.0
    properties: dict[str, str] = field(default_factory=dict)
    """What else a reader wants to know, such as the method."""

    @property
    def passed(self) -> bool:
        """Whether the job is complete and no figure that is known breaks its bound."""
        return self.complete and all(one.met for one in self.expectations)


def expectation_line(one: Expectation) -> str:
    """The figure and its bound, for example ``maxGapRatio 0.331, wanted <= 0.5``."""
    value = "not measured" if one.value is None else f"{one.value:.4g}"
    return f"{one.name} {value}, wanted {one.wanted}"


def junit_xml(outcome: Outcome) -> str:
    """The document of one job, with an XML declaration."""
    suite = ElementTree.Element("testsuite", name=_text(outcome.job))
    if outcome.started is not None:
        suite.set("timestamp", datetime.fromtimestamp(outcome.started, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    if outcome.properties:
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in outcome.properties.items():
            ElementTree.SubElement(properties, "property", name=name, value=_text(value))
    _job_case(suite, outcome)
    judged = {one.name: one for one in outcome.expectations}
    for name in _expected(outcome.expect):
        case = _case(suite, outcome, name)
        one = judged.get(name)
        if one is None:
            said = (
                "the job is complete, so it is met; the figure was not reported"
                if outcome.complete
                else "not judged: the job ended before its last step"
            )
            ElementTree.SubElement(case, "skipped", message=said)
            continue
        if not one.met:
            failure = {"message": expectation_line(one), "type": Reason.EXPECTATION_BROKEN.value}
            ElementTree.SubElement(case, "failure", failure).text = _text(outcome.message)
        ElementTree.SubElement(case, "system-out").text = expectation_line(one)
    root = ElementTree.Element("testsuites", name="tracerl")
    for element in (root, suite):
        element.set("tests", str(len(suite.findall("testcase"))))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", "0")
        element.set("skipped", str(len(suite.findall("testcase/skipped"))))
        element.set("time", f"{outcome.seconds:.3f}")
    root.append(suite)
    ElementTree.indent(root)
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ElementTree.tostring(root, encoding='unicode')}\n"


def _job_case(suite: ElementTree.Element, outcome: Outcome) -> None:
    case = _case(suite, outcome, JOB_CASE, outcome.seconds)
    # A broken expectation fails its own case alone, so that the number of failures is that of causes.
    if not outcome.complete and not any(not one.met for one in outcome.expectations):
        message = _text(outcome.message)
        attributes = {"message": f"{_text(outcome.reason)}: {message}", "type": _text(outcome.reason)}
        ElementTree.SubElement(case, "failure", attributes).text = message


def _case(
    suite: ElementTree.Element, outcome: Outcome, name: str, seconds: float = 0.0
) -> ElementTree.Element:
    classname = f"tracerl.{_text(outcome.job)}"
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=name, time=f"{seconds:.3f}")


def _expected(expect: Expect) -> Iterable[str]:
    """Names of the fields that have a bound, as YAML has them."""
    return expect.model_dump(by_alias=True, exclude_none=True)


def _text(text: str) -> str:
    return _NOT_XML.sub("?", text)
