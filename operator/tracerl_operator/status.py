"""The status of a job: built in one piece from what is true, with transitions where a condition changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import ValidationError

from tracerl.api.constants import ConditionType, Reason
from tracerl.api.job import Condition, Progress, Status
from tracerl_operator.times import show_time
from tracerl_operator.types import Document, Event

Terminal = Literal["Complete", "Failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is true of a job now: the one reason of its state, and the sentence that goes with it."""

    reason: Reason
    message: str
    ready: bool = False
    suspended: bool = False
    terminal: Terminal | None = None


def read_status(job: Document) -> Status:
    """Read the status as it is; of one that does not parse, the end of the job is kept."""
    found = job.get("status")
    try:
        return Status.model_validate(found or {})
    except ValidationError:
        terminal = found.get("terminal") if isinstance(found, dict) else None
        return Status(terminal=terminal if terminal in ("Complete", "Failed") else None)


def show(status: Status) -> Document:
    """Give the document of a status."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def new_status(
    before: Status,
    finding: Finding,
    now: datetime,
    *,
    generation: int | None,
    ready: str,
    restarts: int,
    progress: Progress,
    start_time: str | None,
    output: str | None,
) -> Status:
    """Build the status that shows a finding."""
    known = {condition.type: condition for condition in before.conditions}
    truths = {
        ConditionType.READY: finding.ready,
        ConditionType.SUSPENDED: finding.suspended,
        ConditionType.COMPLETE: finding.terminal == "Complete",
        ConditionType.FAILED: finding.terminal == "Failed",
    }
    conditions = []
    for kind, truth in truths.items():
        previous = known.get(kind)
        status: Literal["True", "False"] = "True" if truth else "False"
        same = previous is not None and previous.status == status
        conditions.append(
            Condition(
                type=kind.value,
                status=status,
                reason=_reason(kind, truth, finding).value,
                message=_message(kind, truth, finding),
                last_transition_time=previous.last_transition_time
                if same and previous is not None
                else show_time(now),
                observed_generation=generation,
            )
        )
    return Status(
        observed_generation=generation,
        summary=_summary(finding),
        ready=ready,
        conditions=conditions,
        terminal=finding.terminal,
        start_time=start_time,
        completion_time=show_time(now) if finding.terminal else None,
        restarts=restarts,
        output=output,
        progress=progress,
    )


def _reason(kind: ConditionType, truth: bool, finding: Finding) -> Reason:
    if kind is ConditionType.SUSPENDED and not truth:
        return Reason.RESUMED
    return finding.reason


def _message(kind: ConditionType, truth: bool, finding: Finding) -> str:
    if truth or kind is ConditionType.READY:
        return finding.message
    return "the job is not suspended" if kind is ConditionType.SUSPENDED else ""


def _summary(finding: Finding) -> str:
    if finding.terminal is not None:
        return finding.terminal
    if finding.reason is Reason.SUSPENDED_BY_SPEC:
        return ConditionType.SUSPENDED.value if finding.suspended else "Suspending"
    return finding.reason.value


def troubled(job: Document, message: str, now: datetime) -> Document | None:
    """Give the status of a job about which nothing could be decided; None where it says so, or has ended."""
    before = read_status(job)
    if before.terminal is not None:
        return None
    generation = job["metadata"].get("generation")
    suspended = any(c.type == ConditionType.SUSPENDED and c.status == "True" for c in before.conditions)
    status = new_status(
        before,
        Finding(Reason.UNEXPECTED, message, suspended=suspended),
        now,
        generation=generation if isinstance(generation, int) else None,
        ready=before.ready or "0/0",
        restarts=before.restarts,
        progress=before.progress,
        start_time=before.start_time,
        output=before.output,
    )
    return show(status) if status != before else None


_BLOCKED = (Reason.CONFIGURATION.value, Reason.UNSCHEDULABLE.value)


def transitions(before: Status, after: Status, cause: str) -> Iterable[Event]:
    """Give an event for a restart, each condition that changed, and a reason that keeps a job from starting.

    `cause` says what was the matter with the pods when they were seen last.
    """
    if after.restarts > before.restarts and after.terminal is None:
        yield Event("Warning", Reason.RESTARTED.value, f"restart {after.restarts}: {cause}")
    known: Mapping[str, Condition] = {condition.type: condition for condition in before.conditions}
    for condition in after.conditions:
        previous = known.get(condition.type)
        was = "False" if previous is None else previous.status
        blocked = condition.reason in _BLOCKED
        newly_blocked = blocked and (previous is None or previous.reason != condition.reason)
        if condition.status == was and not (condition.type == ConditionType.READY and newly_blocked):
            continue
        if condition.type == ConditionType.READY and condition.status == "False" and after.terminal:
            continue  # the terminal condition says it
        bad = condition.type == ConditionType.FAILED or blocked
        yield Event("Warning" if bad else "Normal", condition.reason, condition.message)
