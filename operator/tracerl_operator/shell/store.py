"""The cache of watched objects. Newer versions win, whoever brings them: a watch, a list or an answer.

Resource versions are compared as numbers, as they always were and as Kubernetes promises since 1.35.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import NamedTuple

from tracerl.api.pods import PROGRESS_KEY
from tracerl_operator.cluster import at, items
from tracerl_operator.names import ROLLOUT, TRAINER
from tracerl_operator.progress import MOST_BYTES
from tracerl_operator.shell.kinds import CONFIG_MAP, JOB, JOBSET, POD, JobKey, Kind, job_key, version
from tracerl_operator.types import Document, Ref

_TOMBSTONES = 10_000
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_MAP_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)


class _Place(NamedTuple):
    kind: Kind
    namespace: str
    name: str


class _Cached(NamedTuple):
    """An object as text, a fifth of its size in memory; it is read once in a while."""

    owner: JobKey
    uid: object
    version: int
    text: bytes

    @property
    def document(self) -> Document:
        return dict(json.loads(self.text))


class Store:
    """Objects by kind, namespace and name, and which of them belong to a job."""

    def __init__(self) -> None:
        self._objects: dict[_Place, _Cached] = {}
        self._of_job: dict[JobKey, set[_Place]] = {}
        # Versions in which objects went: a list that began before would bring them back.
        self._gone: dict[str, int] = {}

    def put(self, kind: Kind, document: Document) -> JobKey | None:
        """Take an object over, and say whose it is if this is news."""
        key, place, uid = job_key(kind, document), _place(kind, document), at(document, "metadata", "uid")
        if key is None or place is None or version(document) <= self._gone.get(uid, -1):
            return None
        before = self._objects.get(place)
        if before is not None:
            if before.version >= version(document):
                return None
            self._forget(place)
        text = json.dumps(_slim(kind, document), separators=(",", ":")).encode()
        self._objects[place] = _Cached(key, uid, version(document), text)
        self._of_job.setdefault(key, set()).add(place)
        return key

    def remove(self, kind: Kind, document: Document) -> JobKey | None:
        """Forget an object that is gone, and say whose it was if it was known."""
        uid, place = at(document, "metadata", "uid"), _place(kind, document)
        found = self._objects.get(place) if place is not None else None
        if isinstance(uid, str):
            self._gone[uid] = version(document)
            if len(self._gone) > _TOMBSTONES:
                del self._gone[next(iter(self._gone))]
        if place is None or found is None or found.uid != uid:
            return None
        return self._forget(place)

    def keep(
        self, kind: Kind, namespace: str | None, listed: Set[tuple[str, str]], list_version: int
    ) -> set[JobKey]:
        """Forget what a complete list of that version has not, and say whose it was; newer objects stay.

        `listed` has namespaces and names.
        """
        gone = [
            place
            for place, cached in self._objects.items()
            if place.kind is kind
            and namespace in (None, place.namespace)
            and (place.namespace, place.name) not in listed
            and cached.version <= list_version
        ]
        return {self._forget(place) for place in gone}

    def drop(self, kind: Kind) -> set[JobKey]:
        """Forget a kind that is not served any more."""
        return {self._forget(place) for place in list(self._objects) if place.kind is kind}

    def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Give an object as it was last seen."""
        found = self._objects.get(_Place(kind, namespace, name))
        return found.document if found is not None else None

    def job(self, key: JobKey) -> Document | None:
        """Give a job as it was last seen."""
        return self.get(JOB, *key)

    def job_keys(self) -> list[JobKey]:
        """Give the keys of all jobs."""
        return [cached.owner for place, cached in self._objects.items() if place.kind is JOB]

    def objects(self, key: JobKey) -> Mapping[Ref, Document]:
        """Give what belongs to a job, without the job and its pods."""
        return {
            Ref(place.kind.api_version, place.kind.name, place.name): self._objects[place].document
            for place in self._of_job.get(key, ())
            if place.kind not in (JOB, POD)
        }

    def pods(self, key: JobKey) -> tuple[Document, ...]:
        """Give the pods of a job."""
        places = [place for place in self._of_job.get(key, ()) if place.kind is POD]
        return tuple(self._objects[place].document for place in sorted(places, key=lambda place: place.name))

    def _forget(self, place: _Place) -> JobKey:
        key = self._objects.pop(place).owner
        places = self._of_job[key]
        places.discard(place)
        if not places:
            del self._of_job[key]
        return key


def _place(kind: Kind, document: Document) -> _Place | None:
    namespace, name = at(document, "metadata", "namespace"), at(document, "metadata", "name")
    return _Place(kind, namespace, name) if isinstance(namespace, str) and isinstance(name, str) else None


def _slim(kind: Kind, document: Document) -> Document:
    """Leave out what is large and nobody reads: who wrote what, and what pods are or were made of."""
    metadata = _without(document["metadata"], "managedFields")
    metadata["annotations"] = _without(metadata.get("annotations"), _LAST_APPLIED)
    slim = {**document, "metadata": metadata}
    if kind is CONFIG_MAP:
        return _slim_map(slim)
    if kind is POD:
        spec = document.get("spec")
        slim["spec"] = {key: at(spec, key) for key in ("nodeName", "nodeSelector") if at(spec, key)}
    elif kind is JOBSET:
        jobs = [
            {"name": at(job, "name"), "template": {"spec": _without(at(job, "template", "spec"), "template")}}
            for job in items(document, "spec", "replicatedJobs")
        ]
        slim["spec"] = {**_without(document.get("spec"), "replicatedJobs"), "replicatedJobs": jobs}
    elif kind is JOB and at(document, "status", "terminal") is not None:
        # An ended job makes no more pods.
        slim["spec"] = {
            key: _without(part, "template", "engineArgs") if key in (ROLLOUT, TRAINER) else part
            for key, part in _without(document.get("spec")).items()
        }
    return slim


def _slim_map(document: Document) -> Document:
    """Keep the progress that a config map tells: the resolved job is applied whenever pods are to be made.

    Anybody may make config maps with our labels, and a megabyte of data or annotations.
    """
    metadata = {key: value for key, value in document["metadata"].items() if key in _MAP_METADATA}
    claim = at(document, "data", PROGRESS_KEY)
    kept = {key: document[key] for key in ("apiVersion", "kind") if key in document} | {"metadata": metadata}
    if isinstance(claim, str) and len(claim) <= MOST_BYTES:
        kept["data"] = {PROGRESS_KEY: claim}
    return kept


def _without(document: object, *keys: str) -> Document:
    return {k: v for k, v in document.items() if k not in keys} if isinstance(document, dict) else {}
