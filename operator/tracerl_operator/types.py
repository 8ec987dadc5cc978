"""What goes into `reconcile` and what comes out. Kubernetes objects are plain documents, as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

Document = dict[str, Any]
"""A Kubernetes object, or a part of one."""

Propagation = Literal["Background", "Foreground"]


class Ref(NamedTuple):
    """An object of the job's namespace."""

    api_version: str
    kind: str
    name: str

    def __str__(self) -> str:
        """Name it as kubectl does."""
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Installation:
    """What whoever installed the operator decided."""

    rollout_image: str
    trainer_image: str
    node_ring: bool = False
    """Whether placement.colocation Node is allowed: its pods mount the node's /dev/shm."""
    network_policy: bool = False
    """Whether each job gets a NetworkPolicy, so that only its own pods reach its pods."""
    pod_monitor: bool = False
    """Whether each job gets a PodMonitor, where the cluster has them; its pods' HTTP ports are then open."""
    pod_monitor_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which a Prometheus selects PodMonitors."""


class Inquiry(NamedTuple):
    """Objects to be listed in the job's namespace: what keeps a job waiting is not in what is watched."""

    api_version: str
    kind: str
    fields: str = ""
    """Field selector."""
    labels: str = ""
    """Label selector."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What is there. Objects are those that `objects.wanted` names for the job, whoever made them."""

    installation: Installation
    new_token: str = field(repr=False)
    """Random text for the Secret of a job that has none; new at every call."""
    served: frozenset[str] = frozenset()
    """Which of the kinds that a cluster may lack are served: JobSet, ComputeDomain, PodMonitor, and
    Kueue's Workload."""
    pod_security: str | None = None
    """Level of the namespace's label pod-security.kubernetes.io/enforce; None where it has none."""
    objects: Mapping[Ref, Document] = field(default_factory=dict, repr=False)
    """By reference; of Secrets, metadata is enough."""
    pods: tuple[Document, ...] = field(default=(), repr=False)
    """All pods with the job's label."""
    refusals: tuple[str, ...] = ()
    """What the API server answered to objects of the last decision that it did not take, each as
    "KIND/NAME: ANSWER"."""
    answers: tuple[Document, ...] = field(default=(), repr=False)
    """Everything that `reconcile.inquiries` asked for, as far as it could be listed."""


@dataclass(frozen=True, slots=True)
class Apply:
    """An object to be applied by server-side apply. Its content is never shown: it may be the Secret."""

    document: Document = field(repr=False)

    @property
    def ref(self) -> Ref:
        """What it is."""
        return Ref(self.document["apiVersion"], self.document["kind"], str(self.document["metadata"]["name"]))

    def __str__(self) -> str:
        """Name it as kubectl does."""
        return str(self.ref)


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to be deleted, if it still is the one with this UID. Foreground: after all that it owns."""

    ref: Ref
    uid: str
    propagation: Propagation = "Background"


@dataclass(frozen=True, slots=True)
class Event:
    """An event on the job, to be written after the status was."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, in this order; the same again when any of it failed."""

    apply: tuple[Apply, ...] = ()
    delete: tuple[Delete, ...] = ()
    status: Document | None = None
    """The whole new status; None where it is to stay as it is."""
    events: tuple[Event, ...] = ()
    look_again_at: datetime | None = None
    """When time alone will change the answer; None where only a change of an object can."""
