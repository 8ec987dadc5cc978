"""The kinds of objects that the operator reads or writes, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tracerl.api.constants import LABEL_JOB_NAME
from tracerl.api.job import API_VERSION, KIND
from tracerl_operator.cluster import at
from tracerl_operator.names import LABEL_MANAGED_BY, OPERATOR
from tracerl_operator.types import Document


class JobKey(NamedTuple):
    """Which job."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind that objects of a job have; there is one instance of each."""

    api_version: str
    name: str
    plural: str
    watched: bool = True
    """Whether its objects are in the cache. Secrets never are, and what is only asked about is not."""
    optional: bool = False
    """Whether a cluster may lack it."""

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version within the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        """Path of the group and version, which lists what is served there."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    @property
    def selector(self) -> str | None:
        """Label selector of the objects that are the operator's business; None for all."""
        if self is CONFIG_MAP:  # which others have many of, and large ones
            return f"{LABEL_MANAGED_BY}={OPERATOR},{LABEL_JOB_NAME}"
        return None if self is JOB else LABEL_JOB_NAME

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Path of an object, or of a collection."""
        where = f"/namespaces/{namespace}" if namespace is not None else ""
        what = f"/{name}" if name is not None else ""
        return f"{self.root}{where}/{self.plural}{what}{subresource}"


JOB = Kind(API_VERSION, KIND, "tracerljobs")
JOBSET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", optional=True)
SECRET = Kind("v1", "Secret", "secrets", watched=False)
POD = Kind("v1", "Pod", "pods")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
KINDS = (
    JOB,
    JOBSET,
    POD,
    CONFIG_MAP,
    SECRET,
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("resource.nvidia.com/v1beta1", "ComputeDomain", "computedomains", optional=True),
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", optional=True),
)
ASKED = (
    Kind("v1", "Event", "events", watched=False),
    Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads", watched=False, optional=True),
)
BY_NAME = {(kind.api_version, kind.name): kind for kind in (*KINDS, *ASKED)}


def job_key(kind: Kind, document: Document) -> JobKey | None:
    """Say whose an object is: a job is its own, all others have its label."""
    name = at(document, "metadata", "name") if kind is JOB else label(document, LABEL_JOB_NAME)
    namespace = at(document, "metadata", "namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        return JobKey(namespace, name)
    return None


def label(document: Document, key: str) -> object:
    """Give a label of an object."""
    return at(document, "metadata", "labels", key)


def version(document: Document) -> int:
    """Give the resource version as the number that API servers let clients compare."""
    found = at(document, "metadata", "resourceVersion")
    return int(found) if isinstance(found, str) and found.isdecimal() else 0
