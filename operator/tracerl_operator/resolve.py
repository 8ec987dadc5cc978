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
_CLAIM, _S3, _DIRECTORY = "pvc://", "s3://", "file://"


def output_place(spec: Spec, name: str, uid: str) -> str | None:
    """Give the URL of a job's own directory below spec.output.uri; None without an output.

    The UID is in it, so that two jobs never write over each other and a new job of a name starts anew.
    """
    uri = spec.output.uri
    if uri is None:
        return None
    return f"{uri}{'' if uri.endswith('/') else '/'}{_run_name(name, uid)}"


def run_directory(spec: Spec, name: str, uid: str) -> Path:
    """Where a run is kept inside the pods; its processes make the directory."""
    uri, run = spec.output.uri or "", _run_name(name, uid)
    if uri.startswith(_DIRECTORY):
        return Path(uri.removeprefix(_DIRECTORY), run)
    claim = output_claim(spec)
    return Path(names.RUNS_DIRECTORY, claim[1] if claim else "", run)


def output_claim(spec: Spec) -> tuple[str, str] | None:
    """Give the volume claim of spec.output and the path in it; None where it is another place."""
    uri = spec.output.uri or ""
    if not uri.startswith(_CLAIM):
        return None
    claim, _, path = uri.removeprefix(_CLAIM).partition("/")
    return claim, path.strip("/")


def run_is_mounted(spec: Spec) -> bool:
    """Whether the run's directory is in a volume of ours; file:// is one of the image or of a template."""
    return not (spec.output.uri or "").startswith(_DIRECTORY)


def _run_name(name: str, uid: str) -> str:
    return f"{name}-{uid[:8]}"


def resolve(job: TraceRLJob, uid: str) -> ResolvedJob:
    """Resolve a job whose pods are those of `objects.wanted`.

    Of the metadata, only what identifies the job is kept: labels may change while it runs.
    """
    spec, name = job.spec, job.metadata.name
    identity = {"name": name, "namespace": job.metadata.namespace, "uid": uid}
    place = output_place(spec, name, uid)
    objects, output = spec.transport.object.secret_name, spec.output.secret_name
    return ResolvedJob(
        job=TraceRLJob.model_validate({"metadata": identity, "spec": spec}),
        job_uid=uid,
        run_dir=run_directory(spec, name, uid),
        cache_dir=Path(names.CACHE_DIRECTORY),
        token_file=Path(names.TOKEN_DIRECTORY, names.TOKEN_KEY),
        credentials_dir=None if objects is None else Path(names.CREDENTIALS_DIRECTORY),
        output_uri=place if place is not None and place.startswith(_S3) else None,
        output_credentials_dir=None if output is None else Path(names.OUTPUT_CREDENTIALS_DIRECTORY),
        ring_dir=None if spec.transport.only_object else Path(names.RING_DIRECTORY),
        endpoints=_endpoints(spec, names.jobset_name(name, spec)),
    )


def _endpoints(spec: Spec, jobset: str) -> Endpoints:
    shared = spec.placement.colocation is Colocation.POD
    rollout_job, trainer_job = (names.NODE, names.NODE) if shared else (names.ROLLOUT, names.TRAINER)
    rollouts, trainers = spec.rollout.nodes, spec.trainer.nodes
    apart = rollouts if spec.placement.colocation is Colocation.NONE else 0

    def endpoints(
        role: str, job: str, nodes: int, port: int, *, first: int = 0, processes: int = 1
    ) -> list[Endpoint]:
        return [
            Endpoint(
                name=f"{role}-{index * processes + process}",
                url=f"http://{names.pod_host(jobset, job, index)}:{port}" if process == 0 else None,
                node=f"node-{first + index}",
            )
            for index in range(nodes)
            for process in range(processes)
        ]

    stores = 0 if spec.transport.only_object else rollouts
    leader = names.pod_host(jobset, trainer_job, 0)
    return Endpoints(
        rollout=endpoints(names.ROLLOUT, rollout_job, rollouts, names.ROLLOUT_PORT),
        store=endpoints(names.STORE, rollout_job, stores, names.STORE_PORT),
        trainer=endpoints(
            names.TRAINER,
            trainer_job,
            trainers,
            names.TRAINER_PORT,
            first=apart,
            processes=spec.trainer.parallelism.ranks // trainers,
        ),
        rendezvous=f"{leader}:{names.RENDEZVOUS_PORT}",
        meeting=f"{leader}:{names.MEETING_PORT}",
    )


def document(resolved: ResolvedJob) -> str:
    """Give the text that the processes read."""
    content = resolved.model_dump(mode="json", by_alias=True)
    return _HEAD + yaml.dump(content, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
