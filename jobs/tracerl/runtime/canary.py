"""Run a job on a cluster as a check: make it, wait for its end, and give the verdict.

The job gets a name of its own each time, so that canaries never meet, and goes by itself should nobody be
left to wait for it. Needs the package kubernetes, as the operator's image has it, and rights to create, get,
list, watch and delete TraceRLJobs in one namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from tracerl.api.constants import LABEL_CANARY, ConditionType, Reason
from tracerl.api.errors import InputError, JobError, first_line, how_to_install
from tracerl.api.job import GROUP, VERSION, Status, TraceRLJob
from tracerl.observe.junit import Outcome
from tracerl.rl.steprecord import Expectation

if TYPE_CHECKING:
    from kubernetes.client import CustomObjectsApi

_KEPT_SECONDS = 14 * 24 * 3600
"""An ended canary goes by itself after so long, unless its manifest says otherwise."""
_PREFIX = 44
"""Characters of a canary's name before the five that the API server adds: a job's name has at most 50."""
_WATCH_SECONDS = 60
_REQUEST_SECONDS = 20.0
_RETRY_SECONDS = 2.0
_PLURAL = "tracerljobs"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FINAL = (400, 401, 403, 404, 405, 409, 422)
"""Answers of the API server that asking again does not change."""
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What the package raises for a KUBECONFIG, or an answer, of another shape than it takes for granted."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Canary:
    """What to run, where, and for how long to wait: `document` is the manifest, `job` the same, checked."""

    document: Document
    job: TraceRLJob
    namespace: str | None
    timeout_seconds: int


def run_canary(canary: Canary, say: Callable[[str], None]) -> Outcome:
    """Make the job, wait until it has ended or time is up, and return how it ended.

    Ended canaries of the same name but the last of each result are deleted. `say` gets a line whenever the
    job's summary or step changes. Ctrl-C and SIGTERM delete the job.

    Raises InputError where no cluster is known or the server refuses the job, JobError where it cannot be
    reached.
    """
    jobs = _Jobs(*_cluster(canary))
    with _stoppable():
        name = jobs.create(manifest_of(canary))
        say(f"made trj/{name} in namespace {jobs.namespace}")
        try:
            status = _wait(jobs, name, canary.timeout_seconds, say)
        except KeyboardInterrupt:
            jobs.delete(name)
            raise
    with contextlib.suppress(JobError):  # what is left over goes by itself
        for old in _superseded(jobs.list(), name):
            jobs.delete(old)
    return outcome_of(name, canary, status)


def manifest_of(canary: Canary) -> Document:
    """The manifest under a name that the server completes, with an end for a job nobody waits for."""
    spec = dict(canary.document["spec"])
    spec.setdefault("activeDeadlineSeconds", canary.timeout_seconds)
    spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
    given = canary.document["metadata"]
    metadata = {key: given[key] for key in ("annotations", "labels") if given.get(key)}
    metadata["labels"] = {**metadata.get("labels", {}), LABEL_CANARY: "true"}
    metadata["generateName"] = _prefix(canary.job.metadata.name)
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "TraceRLJob", "metadata": metadata, "spec": spec}


def _prefix(name: str) -> str:
    """What the names of a canary's jobs begin with; of no other canary's."""
    if len(name) > _PREFIX:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: _PREFIX - 9]}-{digest}"
    return f"{name}-"


def outcome_of(name: str, canary: Canary, status: Status) -> Outcome:
    """What the last status says; a job without an end is one that ran out of time."""
    kind = ConditionType.COMPLETE if status.terminal == "Complete" else ConditionType.FAILED
    conditions = {one.type: one for one in status.conditions}
    if status.terminal is None:
        ready = conditions.get(ConditionType.READY)
        last = f"{ready.reason}: {ready.message}" if ready else "the operator has not looked at it"
        reason, message = (
            Reason.DEADLINE_EXCEEDED.value,
            f"trj/{name} has not ended after {canary.timeout_seconds} s, and last said {last}; it is left as "
            "it is: look at it with kubectl describe, or give it longer with --timeout",
        )
    elif kind in conditions:
        reason, message = conditions[kind].reason, conditions[kind].message
    else:
        raise InputError(
            f"the status of trj/{name} is {kind} and does not say why, as of another version of TraceRL; "
            "use the operator's version of tracerl"
        )
    started, ended = _seconds(name, status.start_time), _seconds(name, status.completion_time)
    expectations = tuple(
        Expectation(name=one.name, wanted=one.wanted, value=_float(one.value), met=one.met)
        for one in status.progress.expectations or ()
    )
    progress = status.progress
    properties = {
        "job": name,
        "method": canary.job.spec.method.name.value,
        "steps": f"{progress.step} of {canary.job.spec.algorithm.steps}",
        "restarts": str(status.restarts),
        "reason": reason,
    }
    if status.output:
        properties["output"] = status.output
    return Outcome(
        job=canary.job.metadata.name,
        complete=status.terminal == "Complete",
        reason=reason,
        message=message,
        expect=canary.job.spec.expect,
        expectations=expectations,
        started=started,
        seconds=max(ended - started, 0.0) if started is not None and ended is not None else 0.0,
        properties=properties,
    )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _seconds(name: str, moment: str | None) -> float | None:
    """Unix time of a moment of a job's status, with fractions of a second or without."""
    if moment is None:
        return None
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        raise InputError(
            f"the status of trj/{name} has a time that is none ({moment[:40]!r}), as of another version of "
            "TraceRL; use the operator's version of tracerl"
        ) from None


def _superseded(jobs: list[Document], newest: str) -> Iterator[str]:
    """Names of ended canaries of the same name, but the last one of each result."""
    prefix = newest[:-5]
    ended = [
        (job["status"]["completionTime"], job["status"]["terminal"], job["metadata"]["name"])
        for job in jobs
        if job["metadata"]["name"][:-5] == prefix and job.get("status", {}).get("completionTime")
    ]
    for result in ("Complete", "Failed"):
        names = [name for _, terminal, name in sorted(ended) if terminal == result]
        yield from names[:-1]


def _wait(jobs: _Jobs, name: str, seconds: int, say: Callable[[str], None]) -> Status:
    """Follow the job until it has ended or time is up."""
    deadline = time.monotonic() + seconds
    said, status = "", Status()
    while True:
        left = deadline - time.monotonic()
        try:
            for status in jobs.follow(name, min(left, _WATCH_SECONDS)):
                line = f"{status.summary or 'not looked at yet'}, step {status.progress.step}"
                if line != said:
                    say(line)
                    said = line
                if status.terminal is not None:
                    return status
        except _UnreachableError as error:
            if deadline - time.monotonic() <= 0:
                raise JobError(
                    Reason.CONFIGURATION,
                    f"the API server cannot be asked about trj/{name} ({error}); look at it with kubectl get",
                ) from None
            say(f"the API server cannot be reached ({error}); asking again")
            time.sleep(min(_RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
        if deadline - time.monotonic() <= 0:
            return status


class _UnreachableError(Exception):
    """The API server did not answer, or answered that it cannot now."""


class _Jobs:
    """TraceRLJobs of one namespace of a cluster."""

    def __init__(self, api: CustomObjectsApi, namespace: str) -> None:
        self._api, self.namespace = api, namespace
        self._where = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": _PLURAL}

    def create(self, document: Document) -> str:
        """Make the job; its name."""
        with self._failures("made"):
            made = self._api.create_namespaced_custom_object(
                **self._where, body=document, field_validation="Strict", _request_timeout=_REQUEST_SECONDS
            )
            name: str = made["metadata"]["name"]
        return name

    def delete(self, name: str) -> None:
        """Delete a job, which may be gone."""
        from kubernetes.client import ApiException  # noqa: PLC0415

        with self._failures("deleted"):
            try:
                self._api.delete_namespaced_custom_object(
                    **self._where, name=name, _request_timeout=_REQUEST_SECONDS
                )
            except ApiException as error:
                if error.status != 404:
                    raise

    def list(self) -> list[Document]:
        """All canaries."""
        with self._failures("listed"):
            found = self._api.list_namespaced_custom_object(
                **self._where, label_selector=f"{LABEL_CANARY}=true", _request_timeout=_REQUEST_SECONDS
            )
            items: list[Document] = found["items"]
        return items

    def follow(self, name: str, seconds: float) -> Iterator[Status]:
        """The status now, and each new one for so long; InputError when the job is gone."""
        from kubernetes import watch  # noqa: PLC0415

        with self._failures("read", again=True):
            now = self._api.get_namespaced_custom_object(
                **self._where, name=name, _request_timeout=_REQUEST_SECONDS
            )
            yield _status(now)
            if seconds < 1:
                return
            events = watch.Watch().stream(
                self._api.list_namespaced_custom_object,
                **self._where,
                field_selector=f"metadata.name={name}",
                resource_version=now["metadata"]["resourceVersion"],
                timeout_seconds=int(seconds),
                _request_timeout=seconds + _REQUEST_SECONDS,
            )
            for event in events:
                if event["type"] == "DELETED":
                    return  # the next look says that it is gone
                yield _status(event["object"])

    @contextlib.contextmanager
    def _failures(self, done: str, *, again: bool = False) -> Iterator[None]:
        from kubernetes.client import ApiException  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        try:
            yield
        except ApiException as error:
            if again and error.status not in _FINAL:
                raise _UnreachableError(f"answer {error.status} {error.reason}") from None
            raise InputError(
                f"the job cannot be {done} in namespace {self.namespace}: the API server answers "
                f"{_answer(error)}; correct that and start the canary again"
            ) from None
        except (HTTPError, OSError) as error:
            sentence = first_line(error)
            if again:
                raise _UnreachableError(sentence) from None
            raise JobError(
                Reason.CONFIGURATION,
                f"the API server cannot be reached ({sentence}); see kubectl cluster-info",
            ) from None
        except _DAMAGED as error:
            raise InputError(
                f"what answers in place of the API server is none ({first_line(error)}); see kubectl "
                "cluster-info, and correct the server in KUBECONFIG"
            ) from None


def _answer(error: Any) -> str:
    import json  # noqa: PLC0415

    with contextlib.suppress(ValueError, TypeError, KeyError):
        return " ".join(str(json.loads(error.body)["message"]).split())
    return f"{error.status} {error.reason}"


def _status(job: Document) -> Status:
    try:
        return Status.model_validate(job.get("status") or {})
    except ValidationError as error:
        raise InputError(
            f"the status of trj/{job['metadata']['name']} is of another version of TraceRL "
            f"({error.errors()[0]['msg']}); use the operator's version of tracerl"
        ) from None


def _cluster(canary: Canary) -> tuple[CustomObjectsApi, str]:
    """The client of the cluster that kubectl would ask, or the pod's own; and the namespace."""
    try:
        from kubernetes import client, config  # noqa: PLC0415
    except ImportError:
        raise InputError(
            "a canary on a cluster needs the package kubernetes, which is not installed; "
            f"{how_to_install('operator')}, or run the job here with tracerl run"
        ) from None
    namespace = canary.namespace or canary.job.metadata.namespace
    try:
        config.load_incluster_config()
        own = _NAMESPACE_FILE.read_text(encoding="ascii").strip()
    except config.ConfigException:
        try:
            config.load_kube_config()
            _, active = config.list_kube_config_contexts()
            own = active["context"].get("namespace") or "default"
        except (config.ConfigException, OSError, yaml.YAMLError, *_DAMAGED) as error:
            raise InputError(
                f"no cluster is known here ({first_line(error)}); say which with KUBECONFIG, or run "
                "the job here with tracerl run"
            ) from None
    return client.CustomObjectsApi(), namespace or own


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C, and the SIGTERM of a pod that is to go, interrupt what is done here: its job must not stay."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
