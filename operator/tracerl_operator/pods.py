"""Pod templates: what runs in a job's pods, what is mounted there, and where they may go.

Without a patch they pass the Restricted level of Pod Security, but for the node's ring of colocation Node,
which is a hostPath. Memory of the ring is charged to whoever touches it first, which is the record store: its
container has a limit of its own, the ring and a little more. /dev/shm is a volume apart, so that neither
starves the other.
"""

from __future__ import annotations

from typing import Any

from tracerl.api.constants import ANNOTATION_RESOLVED_HASH, LABEL_METHOD, LABEL_ROLE
from tracerl.api.job import (
    Colocation,
    Fabric,
    Resources,
    Rollout,
    Spec,
    Spill,
    Trainer,
    quantity_bytes,
)
from tracerl.api.pods import JOB_DIRECTORY, REWARD_DIRECTORY, weights_by_disk
from tracerl_operator import names
from tracerl_operator.merge import PatchError, strategic_merge
from tracerl_operator.resolve import output_claim, run_is_mounted
from tracerl_operator.types import Document, Installation

GPU = "nvidia.com/gpu"
CLIQUE = "nvidia.com/gpu.clique"
CHANNEL = "compute-domain-channel"
"""Name of the claim for a channel of the ComputeDomain within a pod."""

_MIB, _GIB = 2**20, 2**30
_STORE_OVERHEAD = 256 * _MIB
"""Memory of a record store beside its ring."""
_SHM_LEAST, _SHM_GPU_MOST = 64 * _MIB, 64 * _GIB
_HOST = "kubernetes.io/hostname"
_TOKEN_SECONDS = 3600
_QUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
_QUEUE_GROUP = "kueue.x-k8s.io/podset-group-name"


def uses_compute_domain(spec: Spec, served: frozenset[str]) -> bool:
    """Whether a job gets a ComputeDomain: when asked, and by itself where GPUs are to share a clique."""
    gpus = spec.rollout.gpus_per_node + spec.trainer.gpus_per_node
    if spec.placement.fabric is Fabric.AUTO:
        topology = spec.placement.topology
        return bool(gpus) and "ComputeDomain" in served and CLIQUE in (topology.required, topology.preferred)
    return spec.placement.fabric is Fabric.COMPUTE_DOMAIN


def channel_template(job: str) -> str:
    """Name of the claim template that the ComputeDomain's controller makes for a job."""
    return f"{job}-channel"


def pod_template(
    spec: Spec,
    replicated_job: str,
    *,
    name: str,
    uid: str,
    installation: Installation,
    domain: bool,
    digest: str,
) -> Document:
    """Build the pod template of a replicated job; PatchError when a role's template does not fit.

    `domain` says whether the job has a ComputeDomain, `digest` is the sha256 of its resolved job.
    """
    rollout = replicated_job in (names.NODE, names.ROLLOUT)
    trainer = replicated_job in (names.NODE, names.TRAINER)
    shared = rollout and trainer
    sidecars, containers = [], []
    if rollout and not spec.transport.only_object:
        sidecars.append(_sidecar(_store(spec, installation)))
    if rollout:
        container = _rollout(spec, installation, domain)
        if shared:
            sidecars.append(_sidecar(container))
        else:
            containers.append(container)
    if trainer:
        containers.append(_trainer(spec, installation, domain))
    roles = [spec.rollout] * rollout + [spec.trainer] * trainer
    mounted = {mount["name"] for container in (*sidecars, *containers) for mount in container["volumeMounts"]}
    volumes = [volume for volume in _volumes(spec, name) if volume["name"] in mounted]
    shm = _shm_bytes(roles)
    if shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(shm)}})
        for container in (*sidecars, *containers):
            if container["name"] != names.STORE:
                container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    for container in (*sidecars, *containers):
        container["env"].insert(0, {"name": "TRACERL_JOB_UID", "value": uid})
    pod: Document = {
        # A rollout apart is started again in its pod, beside the store that kept the records.
        "restartPolicy": "Never" if trainer else "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.USER,
            "runAsGroup": names.USER,
            "fsGroup": names.USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": _affinity(spec, replicated_job, names.jobset_name(name, spec), domain=domain),
        "initContainers": sidecars,
        "containers": containers,
        "volumes": volumes,
    }
    if not sidecars:
        del pod["initContainers"]
    if trainer:
        pod["serviceAccountName"] = service_account(name)
    if domain and any(role.gpus_per_node for role in roles):
        pod["resourceClaims"] = [{"name": CHANNEL, "resourceClaimTemplateName": channel_template(name)}]
    template: Document = {"metadata": _metadata(spec), "spec": pod}
    if rollout:
        template = _patched(template, spec.rollout.template, "spec.rollout.template")
    if trainer:
        template = _patched(template, spec.trainer.template, "spec.trainer.template")
    # What the operator finds pods by is not for a patch to change.
    labels = names.job_labels(name, uid) | {LABEL_METHOD: spec.method.name.value}
    if not shared:
        labels[LABEL_ROLE] = replicated_job
    metadata = template["metadata"]
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    metadata["labels"].pop(names.LABEL_CLEANS, None)
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION_RESOLVED_HASH: digest}
    return template


def service_account(job: str) -> str:
    """Name of the account of a job's trainer pods."""
    return f"{job}-trainer"


def _patched(template: Document, patch: dict[str, Any], path: str) -> Document:
    """Apply a role's patch; a container that is a sidecar here may be patched under `containers`, too."""
    patch = dict(patch)
    inner = patch.get("spec")
    if inner is not None and not isinstance(inner, dict):
        raise PatchError(f"{path}.spec is not a mapping; write the fields of a pod below it")
    if isinstance(inner, dict) and isinstance(inner.get("containers"), list):
        # A list: a patch may give a name that cannot be in a set.
        sidecars = [container["name"] for container in template["spec"].get("initContainers", ())]
        moved: list[Any] = []
        kept: list[Any] = []
        for container in inner["containers"]:
            is_sidecar = isinstance(container, dict) and container.get("name") in sidecars
            (moved if is_sidecar else kept).append(container)
        if moved:
            first = inner.get("initContainers")
            init = [*(first if isinstance(first, list) else ()), *moved]
            patch["spec"] = {**inner, "containers": kept, "initContainers": init}
    merged = strategic_merge(template, patch, path)
    for key in ("metadata", "spec"):
        if not isinstance(merged.get(key), dict):
            raise PatchError(f"{path} removes {key}; remove that part of the patch")
    for key in ("labels", "annotations"):
        if not isinstance(merged["metadata"].get(key) or {}, dict):
            raise PatchError(f"{path}.metadata.{key} is not a mapping; write names and values")
    return merged


def _metadata(spec: Spec) -> Document:
    topology = spec.placement.topology
    if spec.placement.queue is None or not (topology.required or topology.preferred):
        return {}
    strength = "required" if topology.required else "preferred"
    annotations = {_QUEUE_TOPOLOGY.format(strength): topology.required or topology.preferred}
    roles_apart = spec.placement.colocation is not Colocation.POD
    # Kueue fits two sets of pods into one domain where one of them is a single pod, else each by itself.
    if roles_apart and min(spec.rollout.nodes, spec.trainer.nodes) == 1:
        annotations[_QUEUE_GROUP] = "job"
    return {"annotations": annotations}


# -- containers -------------------------------------------------------------------------------------------


def _container(name: str, image: str, threads: int, port: int) -> Document:
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{names.LABEL_INDEX}']"}}
    return {
        "name": name,
        "image": image,
        "command": ["python", "-P", "-m", f"tracerl.runtime.{name}_main"],
        "args": [f"{JOB_DIRECTORY}/{names.JOB_KEY}", f"{name}-$(TRACERL_NODE_INDEX)"],
        "env": [
            {"name": "TRACERL_NODE_INDEX", "valueFrom": index},
            # A user without an entry in /etc/passwd has no home and no name.
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 (a volume of the pod)
            {"name": "USER", "value": "tracerl"},
            *({"name": pool, "value": str(threads)} for pool in pools),
        ],
        "ports": [{"name": name, "containerPort": port}],
        # The last lines of the log, unless the process wrote why it ended.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {
                "name": "job",
                "mountPath": f"{JOB_DIRECTORY}/{names.JOB_KEY}",
                "subPath": names.JOB_KEY,
                "readOnly": True,
            },
            {"name": "token", "mountPath": names.TOKEN_DIRECTORY, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        ],
    }


def _sidecar(container: Document) -> Document:
    return {**container, "restartPolicy": "Always"}


def _probe(port: str) -> Document:
    return {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5, "timeoutSeconds": 5}


def _store(spec: Spec, installation: Installation) -> Document:
    image = spec.rollout.image or installation.rollout_image
    container = _container(names.STORE, image, 1, names.STORE_PORT)
    memory = _mebibytes(quantity_bytes(spec.transport.ring.size) + _STORE_OVERHEAD)
    container["resources"] = {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}}
    container["readinessProbe"] = _probe(names.STORE)
    container["volumeMounts"].append(_ring_mount(spec))
    if spec.transport.spill is Spill.OBJECT_STORE:
        container["volumeMounts"] += _credentials_mounts(spec)
    if spec.transport.spill_path is not None:
        container["volumeMounts"].append({"name": "spill", "mountPath": spec.transport.spill_path})
    return container


def _rollout(spec: Spec, installation: Installation, domain: bool) -> Document:
    role = spec.rollout
    image = role.image or installation.rollout_image
    container = _container(names.ROLLOUT, image, role.threads, names.ROLLOUT_PORT)
    container["resources"] = _resources(role, domain)
    container["readinessProbe"] = _probe(names.ROLLOUT)
    mounts = container["volumeMounts"]
    if spec.transport.only_object:
        mounts += _credentials_mounts(spec)
    else:
        mounts.append(_ring_mount(spec))
    if records_under_run(spec):
        mounts += _run_mounts(spec)
    elif weights_by_disk(spec, one_machine=False):
        mounts += [{**mount, "readOnly": True} for mount in _run_mounts(spec)]
    return container


def _trainer(spec: Spec, installation: Installation, domain: bool) -> Document:
    role = spec.trainer
    image = role.image or installation.trainer_image
    container = _container(names.TRAINER, image, role.threads, names.TRAINER_PORT)
    if role.parallelism.ranks > role.nodes:
        container["command"][-1] = "tracerl.runtime.trainer_pod_main"
    container["ports"] += [
        {"name": "rendezvous", "containerPort": names.RENDEZVOUS_PORT},
        {"name": "meeting", "containerPort": names.MEETING_PORT},
    ]
    container["resources"] = _resources(role, domain)
    mounts = container["volumeMounts"]
    if not spec.transport.only_object and spec.placement.colocation is not Colocation.NONE:
        mounts.append(_ring_mount(spec))
    mounts += [*_run_mounts(spec), {"name": "cache", "mountPath": names.CACHE_DIRECTORY}]
    if spec.transport.only_object:
        mounts += _credentials_mounts(spec)
    if spec.output.secret_name is not None:
        mounts.append(
            {"name": "output-credentials", "mountPath": names.OUTPUT_CREDENTIALS_DIRECTORY, "readOnly": True}
        )
    mounts.append(
        {
            "name": "api-access",
            "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
            "readOnly": True,
        }
    )
    if spec.task.source is not None and spec.task.source.config_map is not None:
        mounts.append({"name": "reward", "mountPath": REWARD_DIRECTORY, "readOnly": True})
    return container


def _resources(role: Rollout | Trainer, domain: bool) -> Document:
    given: Resources = role.resources
    parts: dict[str, Any] = {
        "requests": given.requests.model_dump(by_alias=True, exclude_none=True),
        "limits": given.limits.model_dump(by_alias=True, exclude_none=True),
    }
    claims = [claim.model_dump(by_alias=True, exclude_none=True) for claim in given.claims]
    if role.gpus_per_node:
        parts["limits"][GPU] = str(role.gpus_per_node)
        if domain and CHANNEL not in {claim["name"] for claim in claims}:
            claims.append({"name": CHANNEL})
    return {key: value for key, value in {**parts, "claims": claims}.items() if value}


# -- volumes ----------------------------------------------------------------------------------------------


def _ring_mount(spec: Spec) -> Document:
    mount: Document = {"name": "ring", "mountPath": names.RING_DIRECTORY}
    if spec.placement.colocation is Colocation.NODE:
        mount["subPathExpr"] = "$(TRACERL_JOB_UID)"
    return mount


def records_under_run(spec: Spec) -> bool:
    """Whether rollouts put frames into the run's directory, from where the trainer reads them."""
    return spec.transport.only_object and spec.transport.object.uri is None


def _run_mounts(spec: Spec) -> list[Document]:
    return [{"name": "run", "mountPath": names.RUNS_DIRECTORY}] if run_is_mounted(spec) else []


def _credentials_mounts(spec: Spec) -> list[Document]:
    if spec.transport.object.secret_name is None:
        return []
    return [{"name": "credentials", "mountPath": names.CREDENTIALS_DIRECTORY, "readOnly": True}]


def _volumes(spec: Spec, name: str) -> list[Document]:
    """Build all volumes that containers of a job mount; a pod has those that its own do."""
    transport = spec.transport
    claim = output_claim(spec)
    run: Document = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim[0]}}
    # Room for two: rollout and trainer keep a killed store's ring mapped until they use the next one.
    size = _mebibytes(2 * quantity_bytes(transport.ring.size) + _MIB)
    ring: Document = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    if spec.placement.colocation is Colocation.NODE:
        ring = {"hostPath": {"path": "/dev/shm", "type": "Directory"}}  # noqa: S108
    limit = {} if transport.spill_limit is None else {"sizeLimit": transport.spill_limit}
    source = spec.task.source
    return [
        {"name": "job", "configMap": {"name": config_map(name)}},
        {"name": "token", **_secret_volume(secret(name))},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "run", **run},
        {"name": "ring", **ring},
        {"name": "credentials", **_secret_volume(transport.object.secret_name)},
        {"name": "output-credentials", **_secret_volume(spec.output.secret_name)},
        {"name": "spill", "emptyDir": limit},
        {"name": "api-access", "projected": {"defaultMode": 0o440, "sources": _api_access()}},
        {"name": "reward", "configMap": {"name": source.config_map if source else None}},
    ]


def _secret_volume(name: str | None) -> Document:
    # Of the group of the pod's user, and of nobody else.
    return {"secret": {"secretName": name, "defaultMode": 0o440}}


def _api_access() -> list[Document]:
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]


def config_map(job: str) -> str:
    """Name of the config map with the resolved job."""
    return f"{job}-job"


def secret(job: str) -> str:
    """Name of the Secret with the bearer token."""
    return f"{job}-token"


def _shm_bytes(roles: list[Rollout | Trainer]) -> int:
    """Size of /dev/shm of a pod: half of the memory of its smaller role, which may be the one that fills it.

    0 where that is less than what every container has by itself, 64 MiB. The ring is in the store's memory.
    """
    limits = [role.resources.limits.memory for role in roles]
    gpus = any(role.gpus_per_node for role in roles)
    if any(limit is None for limit in limits):
        return _SHM_GPU_MOST if gpus else _SHM_LEAST
    size = min(quantity_bytes(limit) for limit in limits if limit is not None) // 2
    size = min(size, _SHM_GPU_MOST) // _MIB * _MIB
    return size if size > _SHM_LEAST else 0


def _mebibytes(count: int) -> str:
    return f"{-(-count // _MIB)}Mi"


# -- placement --------------------------------------------------------------------------------------------


def _affinity(spec: Spec, replicated_job: str, jobset: str, *, domain: bool) -> Document:
    same_role = {names.LABEL_JOBSET: jobset, names.LABEL_REPLICATED_JOB: replicated_job}
    affinity: Document = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": _HOST, "labelSelector": {"matchLabels": same_role}}
            ]
        }
    }
    required: list[Document] = []
    preferred: list[Document] = []
    topology = spec.placement.topology
    if spec.placement.queue is None:  # else Kueue places by the template's annotation
        whole_job = {"labelSelector": {"matchLabels": {names.LABEL_JOBSET: jobset}}}
        if topology.required is not None:
            required.append({"topologyKey": topology.required, **whole_job})
        if topology.preferred is not None:
            term = {"topologyKey": topology.preferred, **whole_job}
            preferred.append({"weight": 100, "podAffinityTerm": term})
    if spec.placement.colocation is Colocation.NODE and replicated_job == names.TRAINER:
        pair = {names.LABEL_JOBSET: jobset, names.LABEL_REPLICATED_JOB: names.ROLLOUT}
        required.append(
            {
                "topologyKey": _HOST,
                "labelSelector": {"matchLabels": pair},
                "matchLabelKeys": [names.LABEL_INDEX],
            }
        )
    terms = {
        "requiredDuringSchedulingIgnoredDuringExecution": required,
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    if any(terms.values()):
        affinity["podAffinity"] = {key: value for key, value in terms.items() if value}
    gpus = {
        names.ROLLOUT: spec.rollout.gpus_per_node,
        names.TRAINER: spec.trainer.gpus_per_node,
        names.NODE: spec.rollout.gpus_per_node + spec.trainer.gpus_per_node,
    }
    if domain and gpus[replicated_job]:
        # A ComputeDomain spans Grace nodes; roles without GPUs run on any.
        arm = {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}
        affinity["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [arm]}]
            }
        }
    return affinity
