"""What must hold before a job's pods are made: the job itself, and the cluster around it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from tracerl.api.errors import Fault
from tracerl.api.job import KIND, Colocation, Fabric, Spec, TraceRLJob
from tracerl.api.manifest import dotted
from tracerl.api.model import model_shape
from tracerl.api.rules import RULES, Facts
from tracerl.api.support import SUPPORT_RULES
from tracerl_operator import names
from tracerl_operator.cluster import at, clean_text, items, owned_by
from tracerl_operator.pods import config_map, records_under_run, secret
from tracerl_operator.resolve import output_claim, run_is_mounted
from tracerl_operator.types import Document, Observed, Ref

_MOST_LEVELS, _MOST_BYTES = 64, 256 * 2**10
"""What a spec may be: what is made of it, and all that reads it, is then bounded too."""


def parse(job: Document) -> tuple[TraceRLJob | None, list[Fault]]:
    """Read a job as the API server has it, and find every fault that the operator can know.

    A model that is a file is one of the pods' file system, which the operator never looks into.
    """
    excess = _excess(job.get("spec"))
    if excess is not None:
        return None, [excess]
    try:
        parsed = TraceRLJob.model_validate({key: value for key, value in job.items() if key != "status"})
    except ValidationError as error:
        return None, [_fault(dict(found)) for found in error.errors(include_url=False)[:5]]
    uri = parsed.spec.model.uri
    facts = Facts(parsed.spec, shape=model_shape(uri) if uri.startswith("builtin://") else None)
    faults = [fault for rule in (*RULES, *SUPPORT_RULES) for fault in rule.check(facts)]
    return parsed, [*faults, *_cluster_faults(parsed.spec)]


def _excess(spec: object) -> Fault | None:
    """Say what of a spec is nested too deeply or too large, without recursion."""
    here: list[tuple[tuple[str | int, ...], object]] = [(("spec",), spec)]
    for _ in range(_MOST_LEVELS):
        here = [
            (where if len(where) == 3 else (*where, key), value)
            for where, parent in here
            for key, value in _children(parent)
        ]
    if here:
        problem = f"is nested deeper than {_MOST_LEVELS} levels"
        return Fault(dotted(here[0][0]), problem, "write it flatter, or put it into a file of the image")
    size = len(json.dumps(spec, separators=(",", ":"), ensure_ascii=False).encode(errors="replace"))
    if size > _MOST_BYTES:
        problem = f"is {size} bytes of JSON, and a job may have {_MOST_BYTES}"
        return Fault("spec", problem, "put what is large into a config map or a file of the image")
    return None


def _children(parent: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(parent, dict):
        return parent.items()
    return enumerate(parent) if isinstance(parent, list) else ()


def _fault(error: dict[str, Any]) -> Fault:
    remedy = "write what docs/reference/job.md says, or install the definition of this operator's version"
    return Fault(dotted(tuple(error["loc"])), clean_text(str(error["msg"])), remedy)


def _cluster_faults(spec: Spec) -> Iterator[Fault]:
    apart = spec.placement.colocation is not Colocation.POD or spec.rollout.nodes > 1
    in_pod = run_is_mounted(spec) and output_claim(spec) is None
    if apart and in_pod and records_under_run(spec):
        problem = "is not set, so records go where the other pods do not see them"
        yield Fault("spec.transport.object.uri", problem, "write s3://BUCKET/PREFIX")


def blockers(job: TraceRLJob, uid: str, observed: Observed, wanted: list[Ref]) -> Iterator[str]:
    """Say what around the job keeps it from starting: a sentence each, with what to do."""
    spec = job.spec
    if "JobSet" not in observed.served:
        yield "the cluster has no JobSets (jobset.x-k8s.io); install JobSet"
    if spec.placement.fabric is Fabric.COMPUTE_DOMAIN and "ComputeDomain" not in observed.served:
        yield (
            "spec.placement.fabric is ComputeDomain, but the cluster has no ComputeDomains "
            "(resource.nvidia.com); install NVIDIA's DRA driver, or write fabric: None"
        )
    if spec.placement.queue is not None and "Workload" not in observed.served:
        yield (
            f"spec.placement.queue is {clean_text(spec.placement.queue)}, but the cluster has no queues "
            "(kueue.x-k8s.io); install Kueue, or make the job anew without a queue"
        )
    if spec.placement.colocation is Colocation.NODE:
        instead = "or write spec.placement.colocation: Pod"
        if not observed.installation.node_ring:
            yield (
                "spec.placement.colocation is Node, which this installation does not allow; install the "
                f"chart with nodeRing.enabled=true, {instead}"
            )
        if observed.pod_security not in (None, "privileged"):
            yield (
                "spec.placement.colocation is Node, but the namespace enforces Pod Security "
                f"{clean_text(observed.pod_security or '')}, which forbids its hostPath; label it "
                f"pod-security.kubernetes.io/enforce=privileged, {instead}"
            )
    for ref in wanted:
        found = observed.objects.get(ref)
        if found is not None and not owned_by(found, uid) and not _of_earlier_job(found):
            yield f"{ref} is there and is not this job's; delete it, or give the job another name"


def earlier_job(uid: str, observed: Observed, wanted: list[Ref]) -> str | None:
    """Say what is left of a job of this name that was deleted: the cluster is removing it."""
    for ref in wanted:
        found = observed.objects.get(ref)
        if found is not None and not owned_by(found, uid) and _of_earlier_job(found):
            return f"{ref} of an earlier job of this name is being removed"
    return None


def _of_earlier_job(found: Document) -> bool:
    """Whether an object is of a job; of this name, since the object's name is made of it."""
    owners = items(found, "metadata", "ownerReferences")
    return any(at(owner, "kind") == KIND and at(owner, "controller") for owner in owners)


def lost_object(job: TraceRLJob, observed: Observed) -> str | None:
    """Say what pods were started with and could not be started with again; None where all of it is there."""
    name = job.metadata.name
    for kind, each in (("ConfigMap", config_map(name)), ("Secret", secret(name))):
        if Ref("v1", kind, each) not in observed.objects:
            return f"{kind}/{each} was deleted; suspend the job and resume it"
    return None


def is_foreign(job: Document) -> bool:
    """Whether another controller manages the job."""
    spec = job.get("spec")
    manager = spec.get("managedBy") if isinstance(spec, dict) else None
    return manager is not None and manager != names.MANAGER
