"""What keeps a job's pods from running: found in the pods themselves, or by asking the API server for more.

Kubernetes says in a pod's status that its image or its environment is wrong and that no node fits. That pods
are refused (by a quota, or by Pod Security) and that a volume cannot be mounted, it says in events alone.
Those are listed for the few jobs that wait without a reason of their own (`inquiries`), and never watched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from tracerl.api.constants import Reason
from tracerl_operator import names
from tracerl_operator.cluster import (
    at,
    clean_text,
    condition_of,
    containers,
    has_ended,
    is_leaving,
    items,
    name_of,
    number,
)
from tracerl_operator.objects import DISRUPTED
from tracerl_operator.status import Finding
from tracerl_operator.times import later, parse_time
from tracerl_operator.types import Document, Inquiry

PATIENCE = timedelta(seconds=10)
"""A pod that is not made, or not started, for this long is asked about."""
WORKLOAD = ("kueue.x-k8s.io/v1beta2", "Workload")
_PODSET, _HOST = "kueue.x-k8s.io/podset", "kubernetes.io/hostname"
"""Label of Kueue's pods, and the key by which it selects the node of each where a flavor has a topology."""
_SELDOM = timedelta(minutes=1)
_FRESH = timedelta(minutes=5)
"""Controllers and kubelets try again, and say so again, within this time."""
_LEAVES_FOR = timedelta(minutes=1)
"""A pod that takes longer to go has lost its node, or its finalizer's owner."""
_MOST_PODS = 3

_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
_CONFIGURATION = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
"""Reasons of the end of a container whose program did not start."""
_REFUSED = frozenset({"FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed"})
"""Reasons of events on a Job and on a JobSet."""
_CREATING = frozenset({"ContainerCreating", "PodInitializing"})


def inquiries(
    jobset: Document, pods: Iterable[Document], now: datetime, *, queue: bool
) -> Iterator[tuple[Inquiry, timedelta]]:
    """Say what to list about a JobSet that is there, with these pods, and for how long each has waited.

    What has waited for less than `PATIENCE` is not listed yet. `queue` says whether Kueue decides when it
    starts.
    """
    uid, age = str(at(jobset, "metadata", "uid")), _age(jobset, now)
    if at(jobset, "spec", "suspend") is True:
        if queue:
            yield Inquiry(*WORKLOAD, labels=f"kueue.x-k8s.io/job-uid={uid}"), age
        return
    present = [pod for pod in pods if not is_leaving(pod)]
    lacking = _jobs_without_pods(jobset, present)
    for job in lacking:
        yield Inquiry("v1", "Event", fields=f"involvedObject.kind=Job,involvedObject.name={job}"), age
    if lacking:
        yield Inquiry("v1", "Event", fields=f"involvedObject.uid={uid}"), age
    for pod in [pod for pod in present if _is_silent(pod)][:_MOST_PODS]:
        fields = f"involvedObject.uid={at(pod, 'metadata', 'uid')}"
        yield Inquiry("v1", "Event", fields=fields), _age(pod, now)


def ask_again(now: datetime, waited: timedelta) -> datetime:
    """Give when to ask about something that has waited for a time: ever more seldom."""
    return now + min(max(waited, PATIENCE), _SELDOM)


def _age(document: Document, now: datetime) -> timedelta:
    made = parse_time(at(document, "metadata", "creationTimestamp"))
    return timedelta(0) if made is None else max(now - made, timedelta(0))


def _jobs_without_pods(jobset: Document, pods: list[Document]) -> list[str]:
    """Name the Jobs of a JobSet that have fewer pods than they need."""
    lacking = []
    for replicated in items(jobset, "spec", "replicatedJobs"):
        role = at(replicated, "name")
        there = [p for p in pods if at(p, "metadata", "labels", names.LABEL_REPLICATED_JOB) == role]
        if len(there) < number(at(replicated, "template", "spec", "completions")):
            lacking.append(f"{name_of(jobset)}-{role}-0")
    return lacking


def _is_silent(pod: Document) -> bool:
    """Whether a pod neither runs nor says why."""
    if has_ended(pod) or is_leaving(pod) or condition_of(pod, "PodScheduled", "False") is not None:
        return False
    states = [at(status, "state") for status in containers(pod)]
    return not any(
        at(state, "running")
        or at(state, "terminated")
        or str(at(state, "waiting", "reason")) not in _CREATING
        for state in states
    )


def obstacle(
    jobset: Document, pods: Iterable[Document], answers: Iterable[Document], now: datetime
) -> Finding | None:
    """Find what somebody has to do before all pods run; None where they only need time."""
    present = sorted((p for p in pods if not is_leaving(p)), key=name_of)
    waiting = [pod for pod in present if not has_ended(pod)]
    for pod in present:
        for status in containers(pod):
            found = _refused_container(pod, status)
            if found:
                return Finding(Reason.CONFIGURATION, clean_text(found))
    unplaced = [pod for pod in waiting if _unschedulable(pod) is not None]
    if unplaced:
        return _no_node(unplaced)
    for pod in waiting:
        event = _newest(answers, "uid", at(pod, "metadata", "uid"), pod, now) if _is_silent(pod) else None
        if event is not None:
            said = at(event, "message")
            message = f"{name_of(pod)} does not start: {said}; put right or make what it names"
            return Finding(Reason.CONFIGURATION, clean_text(message))
    for key, value in (
        *(("name", job) for job in _jobs_without_pods(jobset, waiting)),
        ("uid", at(jobset, "metadata", "uid")),
    ):
        event = _newest(answers, key, value, jobset, now)
        if event is not None and str(at(event, "reason")) in _REFUSED:
            said = _without_random_names(str(at(event, "message")))
            message = f"pods are refused: {said}; change what refuses them, or ask for less"
            return Finding(Reason.CONFIGURATION, clean_text(message))
    return None


def _refused_container(pod: Document, status: Document) -> str:
    """Say what is wrong with a container that cannot be made; empty where nothing is."""
    waiting, name = at(status, "state", "waiting"), str(at(status, "name"))
    reason = str(at(waiting, "reason"))
    # The end says the same all the time, while the container waits for one thing after the other.
    ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
    if at(status, "state", "running") is None and str(at(ended, "reason")) in _NOT_STARTED:
        waiting, reason = ended, "RunContainerError"
    said = f"{name} of {name_of(pod)} does not start: {at(waiting, 'message') or reason}"
    role = names.ROLLOUT if name == names.STORE else name
    if reason in _IMAGE:
        return (
            f"{said}; let the nodes pull it (imagePullSecrets in spec.{role}.template), or make the job anew "
            f"with another spec.{role}.image"
        )
    if reason in _CONFIGURATION:
        return f"{said}; put right or make what it names, which spec.{role}.template may ask for"
    return ""


def _unschedulable(pod: Document) -> str | None:
    condition = condition_of(pod, "PodScheduled", "False")
    if condition is None or at(condition, "reason") != "Unschedulable":
        return None
    return str(at(condition, "message"))


def _no_node(pods: list[Document]) -> Finding:
    said = _unschedulable(pods[0]) or ""
    who = name_of(pods[0]) + (f" and {len(pods) - 1} more wait" if len(pods) > 1 else " waits")
    claim = re.search(r'persistentvolumeclaim "[^"]*" not found', said)
    if claim:
        message = (
            f"{who} for a volume: {claim[0]}; make that claim, which spec.output.uri or a template names"
        )
        return Finding(Reason.CONFIGURATION, clean_text(message))
    # What preemption could not do helps nobody who reads this.
    said = said.partition(" preemption: ")[0].rstrip(" .,")
    message = (
        f"{who} for a node: {said}; it starts when a node fits: add such nodes, or suspend the job and ask "
        "for less"
    )
    by_kueue = at(pods[0], "metadata", "labels", _PODSET) and at(pods[0], "spec", "nodeSelector", _HOST)
    if by_kueue and "affinity rules" in said:
        message = (
            f"{who} for the node that Kueue chose: {said}; a topology of Kueue knows nothing of pods that "
            "must share a node or must not: name a queue whose flavors have no topology, or use colocation "
            "Pod with pods that fill a node"
        )
    return Finding(Reason.UNSCHEDULABLE, clean_text(message))


def _newest(
    answers: Iterable[Document], key: str, value: object, since: Document, now: datetime
) -> Document | None:
    """Give the newest event on an object if it is a warning that still holds.

    An event that is older than `since` is of an earlier object of the same name.
    """
    found = []
    for event in answers:
        seen = _seen(event) if at(event, "involvedObject", key) == value else None
        if seen is not None:
            found.append((seen.replace(microsecond=0), at(event, "type") == "Warning", event))
    if not found:
        return None
    when, warning, event = max(found, key=lambda one: one[:2])
    made = parse_time(at(since, "metadata", "creationTimestamp"))
    holds = now - when < _FRESH and (made is None or made <= when)
    return event if warning and holds else None


def _seen(event: Document) -> datetime | None:
    """Give when an event was last seen, which is in one of several places."""
    places = (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",), ("firstTimestamp",))
    times = (parse_time(at(event, *place)) for place in places)
    return next((time for time in times if time is not None), None)


def _without_random_names(text: str) -> str:
    """Leave out the ends of pod names, which are others at every try: the status would change each time."""
    return re.sub(r'(pods "[a-z0-9.-]{1,80}?-[0-9]+)-([a-z0-9]{5})?"', r'\1"', text)


def explained(pods: Iterable[Document], now: datetime) -> str:
    """Say what happened to pods that do not run and come back by themselves; empty where nothing did."""
    pods = sorted(pods, key=name_of)
    late = leaving(pods, now)
    if late:
        return late
    for pod in pods:
        condition = condition_of(pod, DISRUPTED)
        if condition is not None:
            said = f"{name_of(pod)} was taken from its node ({at(condition, 'reason')})"
            return clean_text(f"{said}, which counts as no restart")
    return ""


def leaving(pods: Iterable[Document], now: datetime) -> str:
    """Say which pod should be gone and is not; empty where none is late."""
    for pod in sorted(pods, key=name_of):
        due = parse_time(at(pod, "metadata", "deletionTimestamp"))
        late = later(due, _LEAVES_FOR) if due is not None else None
        if late is not None and late <= now:
            node = at(pod, "spec", "nodeName")
            said = (
                f"{name_of(pod)} does not go from node {node}; if that is gone for good, kubectl delete node"
            )
            return clean_text(f"{said} {node}")
    return ""


def due_to_leave(pods: Iterable[Document], now: datetime) -> datetime | None:
    """Give when `leaving` may have something to say of pods that are going."""
    times = [parse_time(at(pod, "metadata", "deletionTimestamp")) for pod in pods]
    late = [later(time, _LEAVES_FOR) for time in times if time is not None]
    return min((time for time in late if time is not None and time > now), default=None)


def queued(workloads: Iterable[Document], uid: str) -> str:
    """Say why Kueue does not admit a JobSet, in Kueue's words; empty where it said nothing."""
    for workload in workloads:
        if any(at(owner, "uid") == uid for owner in items(workload, "metadata", "ownerReferences")):
            condition = condition_of(workload, "QuotaReserved", "False")
            return clean_text(str(at(condition, "message") or ""))
    return ""
