"""Every object that a job gets, as pure builders.

One JobSet with one Indexed Job a role, or one for both in colocation Pod; its headless service gives the pods
their names. Everything is owned by the job, so that it goes with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tracerl.api.constants import LABEL_JOB_NAME, LABEL_JOB_UID, LABEL_METHOD
from tracerl.api.job import API_VERSION, KIND, Colocation, TraceRLJob
from tracerl.api.pods import FINAL_EXIT_CODES, progress_map
from tracerl_operator import names
from tracerl_operator.pods import (
    channel_template,
    config_map,
    pod_template,
    secret,
    service_account,
    uses_compute_domain,
)
from tracerl_operator.resolve import document, resolve
from tracerl_operator.types import Document, Installation, Ref

JOBSET = ("jobset.x-k8s.io/v1alpha2", "JobSet")
_COMPUTE_DOMAIN = ("resource.nvidia.com/v1beta1", "ComputeDomain")
_NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy")
_POD_MONITOR = ("monitoring.coreos.com/v1", "PodMonitor")
_RBAC = "rbac.authorization.k8s.io"
_KUEUE = "kueue.x-k8s.io/"
_QUEUE_NAME = f"{_KUEUE}queue-name"
_NEVER = 2**31 - 1
DISRUPTED = "DisruptionTarget"
"""Condition of a pod that was evicted, preempted, or removed from a node that is gone."""
CLEANING_SECONDS = 120
"""What a cleaning pod may take; a node that is gone has nothing to clean."""


def progress_ref(name: str) -> Ref:
    """The config map that trainer 0 writes its progress into."""
    return Ref("v1", "ConfigMap", progress_map(name))


def wanted(
    job: TraceRLJob,
    uid: str,
    installation: Installation,
    *,
    served: frozenset[str],
    token: str,
    restarts: int,
) -> list[Document]:
    """Build all objects of a running job, in the order in which they are applied: the JobSet is the last.

    `restarts` counts those before this JobSet, which come out of its budget. PatchError when a role's pod
    template does not fit.
    """
    name = job.metadata.name
    text = document(resolve(job, uid))
    domain = uses_compute_domain(job.spec, served)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [
        _object("v1", "ConfigMap", config_map(name), job, uid, data={names.JOB_KEY: text}),
        _object(
            "v1",
            "Secret",
            secret(name),
            job,
            uid,
            type="Opaque",
            stringData={names.TOKEN_KEY: token},
            # Another operator that makes it at the same time is refused, and not obeyed by half of the pods.
            immutable=True,
        ),
        *kept_right(job, uid, installation, served=served),
        _jobset(job, uid, installation, domain=domain, digest=digest, restarts=restarts),
    ]


def kept_right(
    job: TraceRLJob, uid: str, installation: Installation, *, served: frozenset[str]
) -> list[Document]:
    """Build the objects that are put right while pods run, which were started with all the others."""
    objects = [
        _object("v1", "ConfigMap", progress_map(job.metadata.name), job, uid),
        *_trainer_access(job, uid),
    ]
    if uses_compute_domain(job.spec, served):
        objects.append(_compute_domain(job, uid))
    if installation.network_policy:
        objects.append(_network_policy(job, uid, installation))
    if installation.pod_monitor and "PodMonitor" in served:
        objects.append(_pod_monitor(job, uid, installation))
    return objects


def _object(api_version: str, kind: str, name: str, job: TraceRLJob, uid: str, **content: Any) -> Document:
    metadata: Document = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": names.job_labels(job.metadata.name, uid),
        "ownerReferences": [names.owner(job.metadata.name, uid)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def _trainer_access(job: TraceRLJob, uid: str) -> list[Document]:
    """Build the account of the trainer's pods, which may patch one config map and nothing else."""
    name = job.metadata.name
    account = service_account(name)
    rule = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [progress_map(name)],
        "verbs": ["patch"],
    }
    subject = {"kind": "ServiceAccount", "name": account, "namespace": job.metadata.namespace}
    role = {"apiGroup": _RBAC, "kind": "Role", "name": account}
    return [
        _object("v1", "ServiceAccount", account, job, uid, automountServiceAccountToken=False),
        _object(f"{_RBAC}/v1", "Role", account, job, uid, rules=[rule]),
        _object(f"{_RBAC}/v1", "RoleBinding", account, job, uid, roleRef=role, subjects=[subject]),
    ]


def _compute_domain(job: TraceRLJob, uid: str) -> Document:
    name = job.metadata.name
    channel = {"resourceClaimTemplate": {"name": channel_template(name)}, "allocationMode": "Single"}
    # numNodes is deprecated and required; 0 lets the domain follow the pods.
    return _object(*_COMPUTE_DOMAIN, name, job, uid, spec={"numNodes": 0, "channel": channel})


def _network_policy(job: TraceRLJob, uid: str, installation: Installation) -> Document:
    """Build who reaches a job's pods: its own pods, and where metrics are scraped, all on the HTTP ports.

    Those ask for the job's token; process groups of weights and gradients ask for nothing. What pods reach
    is not limited.
    """
    pods = {"matchLabels": {LABEL_JOB_UID: uid}}
    rules: list[Document] = [{"from": [{"podSelector": pods}]}]
    if installation.pod_monitor:
        # By number: not every network finds the names of a sidecar's ports.
        ports = {
            names.ROLLOUT: names.ROLLOUT_PORT,
            names.STORE: names.STORE_PORT,
            names.TRAINER: names.TRAINER_PORT,
        }
        rules.append({"ports": [{"protocol": "TCP", "port": ports[role]} for role in _scraped(job)]})
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}
    return _object(*_NETWORK_POLICY, job.metadata.name, job, uid, spec=spec)


def _scraped(job: TraceRLJob) -> list[str]:
    """Give the roles with metrics, which are the names of their ports."""
    store = [] if job.spec.transport.only_object else [names.STORE]
    return [names.ROLLOUT, *store, names.TRAINER]


def _pod_monitor(job: TraceRLJob, uid: str, installation: Installation) -> Document:
    name = job.metadata.name
    token = {"type": "Bearer", "credentials": {"name": secret(name), "key": names.TOKEN_KEY}}
    method = LABEL_METHOD.translate(str.maketrans("./-", "___"))
    endpoints = [
        {
            "port": role,
            "path": "/metrics",
            "authorization": token,
            "relabelings": [
                {"targetLabel": "role", "replacement": role},
                {"targetLabel": "method", "sourceLabels": [f"__meta_kubernetes_pod_label_{method}"]},
            ],
            # tracerl_info says the method too, for who scrapes without this.
            "metricRelabelings": [{"action": "labeldrop", "regex": "exported_method"}],
        }
        for role in _scraped(job)
    ]
    monitor = _object(
        *_POD_MONITOR,
        name,
        job,
        uid,
        spec={
            "jobLabel": LABEL_JOB_NAME,
            "selector": {"matchLabels": {LABEL_JOB_UID: uid}},
            "podMetricsEndpoints": endpoints,
        },
    )
    monitor["metadata"]["labels"] |= installation.pod_monitor_labels
    return monitor


def _jobset(
    job: TraceRLJob, uid: str, installation: Installation, *, domain: bool, digest: str, restarts: int
) -> Document:
    spec, name = job.spec, job.metadata.name
    replicated = names.replicated_jobs(spec)
    leader = names.NODE if names.NODE in replicated else names.TRAINER
    jobs = [
        {
            "name": each,
            "replicas": 1,
            "template": {
                "spec": _indexed_job(
                    nodes,
                    pod_template(
                        spec,
                        each,
                        name=name,
                        uid=uid,
                        installation=installation,
                        domain=domain,
                        digest=digest,
                    ),
                    leads=each == leader,
                )
            },
        }
        for each, nodes in replicated.items()
    ]
    jobset = _object(
        *JOBSET,
        names.jobset_name(name, spec),
        job,
        uid,
        spec={
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": names.jobset_name(name, spec),
            },
            "replicatedJobs": jobs,
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [leader]},
            "failurePolicy": {
                "maxRestarts": max(0, spec.failure_policy.max_restarts - restarts),
                "rules": [
                    # A drained node is no fault of the job, and takes nothing from its budget.
                    {
                        "name": "disrupted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        # Of the two rules of the Job, its message alone says which one it was.
                        "onJobFailureMessagePatterns": [f"has condition {DISRUPTED} "],
                        "targetReplicatedJobs": [leader],
                    },
                    # An exit code of the trainer that would come back.
                    {
                        "name": "final",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "targetReplicatedJobs": [leader],
                    },
                ],
            },
            # What Kueue manages is Kueue's to start; without Kueue it stays suspended, visibly.
            "suspend": spec.placement.queue is not None,
        },
    )
    metadata = jobset["metadata"]
    metadata["labels"] |= {k: v for k, v in job.metadata.labels.items() if k.startswith(_KUEUE)}
    if spec.placement.queue is not None:
        metadata["labels"][_QUEUE_NAME] = spec.placement.queue
    passed = {k: v for k, v in job.metadata.annotations.items() if k.startswith(_KUEUE)}
    metadata["annotations"] = passed | {names.ANNOTATION_RESTARTS_BEFORE: str(restarts)}
    return jobset


def _indexed_job(nodes: int, template: Document, *, leads: bool) -> Document:
    job: Document = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if leads:
        # Any other end of a trainer is a restart of all, by the JobSet and within its budget.
        codes = {"containerName": names.TRAINER, "operator": "In", "values": [*FINAL_EXIT_CODES]}
        disrupted = [{"type": DISRUPTED, "status": "True"}]
        policy = {
            "rules": [
                {"action": "FailJob", "onPodConditions": disrupted},
                {"action": "FailJob", "onExitCodes": codes},
            ]
        }
        job |= {"backoffLimit": 0, "podFailurePolicy": policy}
    else:
        job["backoffLimit"] = _NEVER
    return {**job, "template": template}


# -- rings on nodes ---------------------------------------------------------------------------------------


def node_rings(job: TraceRLJob) -> bool:
    """Whether a job's rings are on its nodes and outlive its pods."""
    return job.spec.placement.colocation is Colocation.NODE and not job.spec.transport.only_object


def job_marks(name: str, namespace: str, uid: str, nodes: Sequence[str] | None) -> Document:
    """Build what the operator owns of the job: finalizer and nodes with a ring; None takes both away."""
    metadata: Document = {"name": name, "namespace": namespace, "uid": uid}
    if nodes is not None:
        metadata["finalizers"] = [names.FINALIZER]
        metadata["annotations"] = {names.ANNOTATION_RING_NODES: ",".join(nodes)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}


_REMOVE_CONTENT = (
    "import os, shutil\n"
    "for entry in os.scandir('/ring'):\n"
    "    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)\n"
)
_REMOVE_DIRECTORY = (
    "import os, pathlib\npath = pathlib.Path('/shm', os.environ['TRACERL_JOB_UID'])\n"
    "path.rmdir() if path.is_dir() else None\n"
)


def cleaning_pod(name: str, namespace: str, uid: str, node: str, image: str, *, attempt: int = 0) -> Document:
    """Build the short pod that removes a job's ring from a node, with any pods of the job gone from there.

    The image is the installation's: a part of this pod is root on the node, which no job's own image is.
    What the job's user wrote is removed by that user, the directory that the kubelet made by root, without
    any capability: it owns the directory.
    """
    digest = hashlib.sha256(node.encode()).hexdigest()[:10]
    again = f"-{attempt}" if attempt else ""
    labels = {**names.job_labels(name, uid), names.LABEL_CLEANS: "true"}
    mount = {"name": "shm", "mountPath": "/ring", "subPathExpr": "$(TRACERL_JOB_UID)"}
    whole = {"name": "shm", "mountPath": "/shm"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name[:40].rstrip('-')}-clean-{digest}{again}",
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": [names.owner(name, uid)],
        },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": CLEANING_SECONDS,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [
                _cleaner("content", _REMOVE_CONTENT, mount, image=image, uid=uid, user=names.USER)
            ],
            "containers": [_cleaner("directory", _REMOVE_DIRECTORY, whole, image=image, uid=uid, user=0)],
            "volumes": [{"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}}],  # noqa: S108
        },
    }


def _cleaner(name: str, program: str, mount: Document, *, image: str, uid: str, user: int) -> Document:
    return {
        "name": name,
        "image": image,
        "command": ["python", "-I", "-c", program],
        "env": [{"name": "TRACERL_JOB_UID", "value": uid}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": {
            "runAsUser": user,
            "runAsGroup": user,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [mount],
    }
