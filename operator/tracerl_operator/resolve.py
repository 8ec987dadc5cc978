"""The resolved job of a cluster: where the processes of a job find their files and each other."""

from __future__ import annotations

from pathlib import Path

import yaml

from tracerl.api.job import Colocation, Spec, TraceRLJob
from tracerl.api.resolved import Endpoint, Endpoints, ResolvedJob
from tracerl_operator import names

# Ten times faster where PyYAML was built with libyaml: a job may have thousands of endpoints.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_HEAD = "# Written by the TraceRL operator: the resolved job.\n"


def run_directory(spec: Spec) -> str:
    """Where a run is kept inside the pods: a file:// output is a directory there, all else is mounted."""
    uri = spec.output.uri or ""
    return uri.removeprefix("file://") if uri.startswith("file:///") else names.RUN_DIRECTORY


def resolve(job: TraceRLJob, uid: str) -> ResolvedJob:
    """Resolve a job whose pods are those of `objects.wanted`.

    Of the metadata, only what identifies the job is kept: labels may change while it runs.
    """
    spec, name = job.spec, job.metadata.name
    identity = {"name": name, "namespace": job.metadata.namespace, "uid": uid}
    return ResolvedJob(
        job=TraceRLJob.model_validate({"metadata": identity, "spec": spec}),
        job_uid=uid,
        run_dir=Path(run_directory(spec)),
        cache_dir=Path(names.CACHE_DIRECTORY),
        token_file=Path(names.TOKEN_DIRECTORY, names.TOKEN_KEY),
        ring_dir=None if spec.transport.only_object else Path(names.RING_DIRECTORY),
        endpoints=_endpoints(spec, names.jobset_name(name, spec)),
    )


def _endpoints(spec: Spec, jobset: str) -> Endpoints:
    shared = spec.placement.colocation is Colocation.POD
    rollout_job, trainer_job = (names.NODE, names.NODE) if shared else (names.ROLLOUT, names.TRAINER)
    rollouts, trainers = spec.rollout.nodes, spec.trainer.nodes
    apart = rollouts if spec.placement.colocation is Colocation.NONE else 0

    def endpoints(role: str, job: str, nodes: int, port: int, first: int = 0) -> list[Endpoint]:
        return [
            Endpoint(
                name=f"{role}-{index}",
                url=f"http://{names.pod_host(jobset, job, index)}:{port}",
                node=f"node-{first + index}",
            )
            for index in range(nodes)
        ]

    stores = 0 if spec.transport.only_object else rollouts
    return Endpoints(
        rollout=endpoints(names.ROLLOUT, rollout_job, rollouts, names.ROLLOUT_PORT),
        store=endpoints(names.STORE, rollout_job, stores, names.STORE_PORT),
        trainer=endpoints(names.TRAINER, trainer_job, trainers, names.TRAINER_PORT, apart),
        rendezvous=f"{names.pod_host(jobset, trainer_job, 0)}:{names.RENDEZVOUS_PORT}",
    )


def document(resolved: ResolvedJob) -> str:
    """Give the text that the processes read."""
    content = resolved.model_dump(mode="json", by_alias=True)
    return _HEAD + yaml.dump(content, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
