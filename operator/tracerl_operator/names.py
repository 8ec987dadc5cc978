"""Names, places and ports that the operator's objects share and the resolved job tells the processes."""

from __future__ import annotations

import hashlib

from tracerl.api.constants import LABEL_JOB_NAME, LABEL_JOB_UID
from tracerl.api.job import API_VERSION, GROUP, KIND, Colocation, Spec
from tracerl.api.pods import JOB_DIRECTORY

MANAGER = f"{GROUP}/operator"
"""Value of spec.managedBy that means this operator, and its name as a field manager."""
FINALIZER = f"{GROUP}/node-ring"
"""On jobs whose rings are on nodes: they are removed there before the job is."""
ANNOTATION_RING_NODES = f"{GROUP}/ring-nodes"
"""Annotation of a job with FINALIZER: the nodes that may hold a ring of it, separated by commas."""
ANNOTATION_RESTARTS_BEFORE = f"{GROUP}/restarts-before"
"""Annotation of a JobSet: restarts that the job had before this JobSet was made."""
LABEL_CLEANS = f"{GROUP}/cleans-ring"
"""Label of cleaning pods; nothing else has it."""

LABEL_MANAGED_BY, OPERATOR = "app.kubernetes.io/managed-by", "tracerl-operator"
LABEL_INDEX = "batch.kubernetes.io/job-completion-index"
LABEL_JOBSET = "jobset.sigs.k8s.io/jobset-name"
LABEL_JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
LABEL_REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"

ROLLOUT, STORE, TRAINER = "rollout", "store", "trainer"
"""Containers, and replicated jobs where the roles have pods of their own."""
NODE = "node"
"""Replicated job of pods that hold all roles."""

ROLLOUT_PORT, STORE_PORT, TRAINER_PORT = 8000, 8001, 8002
RENDEZVOUS_PORT, MEETING_PORT = 29500, 29501
USER = 65532

CREDENTIALS_DIRECTORY = f"{JOB_DIRECTORY}/credentials"
OUTPUT_CREDENTIALS_DIRECTORY = f"{JOB_DIRECTORY}/output-credentials"
TOKEN_DIRECTORY = f"{JOB_DIRECTORY}/token"
RUNS_DIRECTORY = "/var/lib/tracerl"
"""Where the volume with the run's directory is mounted."""
CACHE_DIRECTORY = "/var/cache/tracerl"
RING_DIRECTORY = "/run/tracerl/ring"
TOKEN_KEY, JOB_KEY = "token", "job.yaml"

_LABEL_LENGTH = 63


def replicated_jobs(spec: Spec) -> dict[str, int]:
    """Give the pods of each replicated job of the JobSet, which are as many nodes."""
    if spec.placement.colocation is Colocation.POD:
        return {NODE: spec.trainer.nodes}
    return {ROLLOUT: spec.rollout.nodes, TRAINER: spec.trainer.nodes}


def jobset_name(job: str, spec: Spec) -> str:
    """Give the job's name, shortened where the name of a pod would not fit a label of DNS."""
    suffix = max(len(f"-{name}-0-{nodes - 1}-abcde") for name, nodes in replicated_jobs(spec).items())
    room = _LABEL_LENGTH - suffix
    if len(job) <= room:
        return job
    digest = hashlib.sha256(job.encode()).hexdigest()[:6]
    return f"{job[: room - 7].rstrip('-')}-{digest}"


def pod_host(jobset: str, replicated_job: str, index: int) -> str:
    """Give the DNS name of a pod, good within the namespace."""
    return f"{jobset}-{replicated_job}-0-{index}.{jobset}"


def job_labels(name: str, uid: str) -> dict[str, str]:
    """Labels of everything that belongs to a job."""
    return {
        "app.kubernetes.io/name": "tracerl",
        "app.kubernetes.io/instance": name,
        LABEL_MANAGED_BY: OPERATOR,
        LABEL_JOB_NAME: name,
        LABEL_JOB_UID: uid,
    }


def owner(name: str, uid: str) -> dict[str, object]:
    """Reference to the job that owns an object."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
