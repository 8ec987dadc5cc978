"""What pods and the JobSet say, read from their documents without trusting their shape."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tracerl.api.constants import Reason
from tracerl.api.pods import FINAL_EXIT_CODES
from tracerl_operator import names
from tracerl_operator.objects import JOBSET
from tracerl_operator.types import Document, Observed, Ref

_MESSAGE_LENGTH = 1000
_SIGNALLED = 128
_SIGNALS = {number.value: number.name for number in signal.Signals}
_REASONS = {reason.value: reason for reason in Reason}


def at(document: object, *path: str | int) -> Any:
    """Give what is at a path of a document; None where there is nothing."""
    here = document
    for part in path:
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            return None
    return here


def items(document: object, *path: str) -> list[Any]:
    """Give the list of mappings at a path; empty where there is none."""
    found = at(document, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def number(value: object) -> int:
    """Give a count; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def owned_by(document: Document, uid: str) -> bool:
    """Whether the job with this UID controls an object."""
    references = items(document, "metadata", "ownerReferences")
    return any(at(reference, "uid") == uid and at(reference, "controller") for reference in references)


def find_jobset(observed: Observed, uid: str) -> tuple[Ref, Document] | None:
    """Find the job's JobSet, by owner: its name depends on a spec that may not parse."""
    for ref, document in observed.objects.items():
        if ref[:2] == JOBSET and owned_by(document, uid):
            return ref, document
    return None


def condition_of(document: Document, kind: str, status: str = "True") -> Document | None:
    """Give a condition of an object if it has this status."""
    found = items(document, "status", "conditions")
    return next((c for c in found if at(c, "type") == kind and at(c, "status") == status), None)


def is_true(document: Document, condition: str) -> bool:
    """Whether a condition of an object is true."""
    return condition_of(document, condition) is not None


def name_of(document: Document) -> str:
    """Name of an object."""
    return str(at(document, "metadata", "name"))


def is_leaving(pod: Document) -> bool:
    """Whether a pod is being removed."""
    return at(pod, "metadata", "deletionTimestamp") is not None


def has_ended(pod: Document) -> bool:
    """Whether all containers of a pod have ended for good."""
    return at(pod, "status", "phase") in ("Succeeded", "Failed")


def containers(pod: Document) -> Iterator[Document]:
    """Statuses of a pod's containers, the sidecars' too."""
    yield from items(pod, "status", "initContainerStatuses")
    yield from items(pod, "status", "containerStatuses")


def clean_text(text: str) -> str:
    """Cut text of others to a length and to what a terminal shows as it is."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * _MESSAGE_LENGTH])
    return " ".join(shown.split())[:_MESSAGE_LENGTH]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended."""

    pod: str
    container: str
    code: int
    reason: Reason
    message: str

    @property
    def final(self) -> bool:
        """Whether it would end the same way again; a lost peer may be there the next time."""
        return self.code in FINAL_EXIT_CODES and self.reason is not Reason.TRAINER_LOST


def exits(pods: Iterable[Document], roles: tuple[str, ...]) -> list[Exit]:
    """Ends of the containers of these roles, but for exit code 0; of one that came back, the last end."""
    found = []
    for pod in pods:
        for status in containers(pod):
            name = str(at(status, "name"))
            ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
            code = at(ended, "exitCode")
            if name in roles and isinstance(code, int) and code != 0:
                reason, message = _note(str(at(ended, "message") or ""), code)
                killed = _killed(name, code, str(at(ended, "reason")))
                sentence = killed or message or f"ended with exit code {code}"
                found.append(Exit(name_of(pod), name, code, reason, sentence))
    return found


def _killed(container: str, code: int, reason: str) -> str:
    """Say that a container was ended from outside, whatever its log says last; empty where it was not."""
    if reason == "OOMKilled":
        role = names.ROLLOUT if container == names.STORE else container
        limit = f"spec.{role}.resources.limits.memory"
        if container == names.STORE:
            limit = f"the limit of the container {container} in spec.{role}.template"
        return f"was killed because it used more memory than its limit; suspend the job and raise {limit}"
    number = code - _SIGNALLED
    if number not in _SIGNALS:
        return ""
    return f"was ended by {_SIGNALS[number]}"


def _note(text: str, code: int) -> tuple[Reason, str]:
    """Read why a process ended: its note, or the last line of its log."""
    try:
        note = json.loads(text)
        reason, message = _REASONS[note["reason"]], note["message"]
        if isinstance(message, str):
            return reason, clean_text(message)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    lines = [line for line in text.splitlines() if line.strip()]
    reason = Reason.INVALID_SPEC if code == 2 else Reason.UNEXPECTED
    return reason, clean_text(lines[-1]) if lines else ""


def restarts_of(pods: Iterable[Document], role: str) -> int:
    """Count how often the kubelet started containers of a role again, in these pods."""
    return sum(
        number(at(status, "restartCount"))
        for pod in pods
        for status in containers(pod)
        if at(status, "name") == role
    )


def index_of(pod: Document) -> str:
    """Completion index of a pod."""
    return str(at(pod, "metadata", "labels", names.LABEL_INDEX))
