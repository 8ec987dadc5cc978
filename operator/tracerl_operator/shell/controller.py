"""One job after another: observe, decide, act. In this order: apply, delete, the status, its events."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tracerl_operator import names
from tracerl_operator.check import is_foreign
from tracerl_operator.cluster import at, owned_by
from tracerl_operator.pods import config_map, secret
from tracerl_operator.reconcile import inquiries, reconcile
from tracerl_operator.shell.api import Api, ApiError
from tracerl_operator.shell.events import Events
from tracerl_operator.shell.kinds import BY_NAME, CONFIG_MAP, JOB, POD, SECRET, JobKey, Kind, version
from tracerl_operator.shell.store import Store
from tracerl_operator.status import troubled
from tracerl_operator.types import Apply, Decision, Document, Installation, Observed, Ref

_REMEMBERED_SECONDS, _NAMESPACE_SECONDS = 300.0, 60.0
_ROUNDS = 4
_LOG = logging.getLogger(__name__)


class StaleError(Exception):
    """The job is another one by now; look at it again."""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a look at a job: one word for the metric, and in how many seconds to look again."""

    result: str
    again: float | None = None


@dataclass(frozen=True, slots=True)
class _Refusal:
    ref: Ref
    answer: str

    def __str__(self) -> str:
        return f"{self.ref}: {self.answer}"


@dataclass
class _Memo:
    """What is read now and then, of one job or namespace."""

    value: Document | None
    read_at: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.read_at


class Controller:
    """Brings jobs to where they are wanted."""

    def __init__(
        self,
        api: Api,
        store: Store,
        events: Events,
        installation: Installation,
        served: Callable[[], frozenset[str]],
    ) -> None:
        self._api, self._store, self._events = api, store, events
        self._installation, self._served = installation, served
        self._secrets: dict[JobKey, _Memo] = {}
        self._labels: dict[str, _Memo] = {}

    async def work(self, key: JobKey) -> Done:
        """Look at a job and do what has to be done. ApiError or StaleError when it has to be done again."""
        job = self._store.job(key)
        if job is None:
            self._secrets.pop(key, None)
            return Done("gone")
        if is_foreign(job):
            return Done("foreign")
        job, observed, decision = await self._decide(key, job)
        refused = await self._apply(key, decision)
        if refused is not None:
            observed = await self._after_refusal(key, observed, refused)
            decision = reconcile(job, observed, datetime.now(UTC))
            _LOG.warning("the API server refused %s", refused, extra=_where(key, "Refused"))
            if all(one.ref != refused.ref for one in decision.apply):
                refused = await self._apply(key, decision)  # what is done instead
        for one in decision.delete:
            kind = BY_NAME[one.ref.api_version, one.ref.kind]
            answer = await self._api.delete(kind, key.namespace, one.ref.name, one.uid, one.propagation)
            if answer is not None and answer.get("kind") == kind.name:
                self._store.put(kind, answer)
        written = job if decision.status is None else await self._write_status(key, job, decision)
        await self._tell(key, written, decision)
        acted = decision.apply or decision.delete or decision.status is not None
        again = decision.look_again_at
        seconds = None if again is None else (again - datetime.now(UTC)).total_seconds()
        if refused and seconds is None:
            raise ApiError(422, f"the API server refused {refused}")
        return Done("refused" if refused else "changed" if acted else "unchanged", seconds)

    async def show_trouble(self, key: JobKey, message: str) -> None:
        """Have the job's status say that the operator failed at it; ApiError or StaleError when it cannot."""
        job = self._store.job(key)
        status = None if job is None or is_foreign(job) else troubled(job, message, datetime.now(UTC))
        if job is not None and status is not None:
            await self._write_status(key, job, Decision(status=status))

    async def _decide(self, key: JobKey, job: Document) -> tuple[Document, Observed, Decision]:
        """Decide on what is cached, and again on what is there before anything is made or deleted."""
        observed = await self._observe(key, job)
        fresh = False
        looked_for: set[Ref] = set()
        for _ in range(_ROUNDS):
            decision = reconcile(job, observed, datetime.now(UTC))
            if not (decision.apply or decision.delete):
                break
            if not fresh:
                found = await self._api.get(JOB, key.namespace, key.name)
                if found is None or at(found, "metadata", "uid") != at(job, "metadata", "uid"):
                    self._store.remove(JOB, job)
                    if found is not None:
                        self._store.put(JOB, found)
                    raise StaleError("the job is gone")
                fresh = True
                if version(found) != version(job):
                    self._store.put(JOB, found)
                    job = found
                    continue
            # Whatever is not in the cache may be there without the label that brings it there.
            news = [
                one.ref
                for one in decision.apply
                if one.ref not in observed.objects
                and one.ref not in looked_for
                and _kind(one) not in (JOB, POD)
            ]
            looked_for.update(news)
            objects = dict(observed.objects)
            for ref in news:
                there = await self._api.get(BY_NAME[ref.api_version, ref.kind], key.namespace, ref.name)
                if there is not None:
                    objects[ref] = there
            if len(objects) == len(observed.objects):
                break
            observed = replace(observed, objects=objects)
        else:
            raise StaleError("its objects change faster than they are looked at")
        return job, observed, decision

    async def _observe(self, key: JobKey, job: Document) -> Observed:
        objects = dict(self._store.objects(key))
        # These two tell whether pods can be started again.
        if at(job, "status", "terminal") is None:
            for kind, name in ((SECRET, secret(key.name)), (CONFIG_MAP, config_map(key.name))):
                ref = Ref(kind.api_version, kind.name, name)
                found = objects.get(ref) or await self._read(key, job, kind, name)
                if found is not None:
                    objects[ref] = found
        security = None
        if at(job, "spec", "placement", "colocation") == "Node":
            labels = await self._namespace_labels(key.namespace)
            found_level = labels.get("pod-security.kubernetes.io/enforce")
            security = found_level if isinstance(found_level, str) else None
        observed = Observed(
            installation=self._installation,
            new_token=secrets.token_hex(32),
            served=self._served(),
            pod_security=security,
            objects=objects,
            pods=self._store.pods(key),
        )
        answers: list[Document] = []
        for inquiry in inquiries(job, observed, datetime.now(UTC)):
            try:
                answers += await self._api.ask(key.namespace, inquiry)
            except ApiError as error:
                if error.passes:
                    raise
                # Without an answer the job is shown as waiting, which is true.
                _LOG.warning(
                    "cannot list %s: %s", inquiry.kind, error, extra=_where(key, f"Code{error.code}")
                )
        return replace(observed, answers=tuple(answers))

    async def _read(self, key: JobKey, job: Document, kind: Kind, name: str) -> Document | None:
        """Read what is not in the cache; that the job has its Secret is believed for some minutes."""
        if kind is not SECRET:
            return await self._api.get(kind, key.namespace, name)
        memo = self._secrets.get(key)
        mine = memo is not None and owned_by(memo.value or {}, job["metadata"]["uid"])
        if memo is None or not mine or memo.age > _REMEMBERED_SECONDS:
            memo = _Memo(await self._api.get(SECRET, key.namespace, name))
            self._secrets[key] = memo
        return memo.value

    async def _namespace_labels(self, name: str) -> Document:
        memo = self._labels.get(name)
        if memo is None or memo.age > _NAMESPACE_SECONDS:
            memo = _Memo(await self._api.namespace_labels(name))
            self._labels[name] = memo
        return memo.value or {}

    async def _apply(self, key: JobKey, decision: Decision) -> _Refusal | None:
        for one in decision.apply:
            kind = _kind(one)
            try:
                answer = await self._api.apply(kind, key.namespace, one.document)
            except ApiError as error:
                if error.passes:
                    raise
                return _Refusal(one.ref, str(error))
            if kind is JOB:
                answer = await self._without_finalizer(one.document, answer)
            if kind is SECRET:
                self._secrets[key] = _Memo(answer)
            else:
                self._store.put(kind, answer)
        return None

    async def _without_finalizer(self, wished: Document, found: Document) -> Document:
        """Take the finalizer away where it stays, since a user wrote it into the manifest, too."""
        metadata = found["metadata"]
        there = metadata.get("finalizers") or []
        if names.FINALIZER not in there or "finalizers" in wished["metadata"]:
            return found
        change = {key: metadata[key] for key in ("uid", "resourceVersion")}
        change["finalizers"] = [one for one in there if one != names.FINALIZER]
        return await self._api.merge(JOB, metadata["namespace"], metadata["name"], {"metadata": change})

    async def _after_refusal(self, key: JobKey, observed: Observed, refused: _Refusal) -> Observed:
        """Observe what is there now; StaleError when another operator made the very object meanwhile."""
        objects = {**observed.objects, **self._store.objects(key)}
        if refused.ref not in objects and BY_NAME[refused.ref[:2]] not in (JOB, POD):
            there = await self._api.get(BY_NAME[refused.ref[:2]], key.namespace, refused.ref.name)
            if there is not None:
                raise StaleError(f"{refused.ref} was made by another one")
        return replace(observed, refusals=(str(refused),), objects=objects)

    async def _write_status(self, key: JobKey, job: Document, decision: Decision) -> Document:
        assert decision.status is not None
        latest = self._store.job(key)
        # What this very look at the job wrote into it made it newer.
        mine = latest is not None and any(_kind(one) is JOB for one in decision.apply)
        try:
            written = await self._api.write_status(JOB, latest if mine and latest else job, decision.status)
        except ApiError as error:
            if error.code == 404:
                self._store.remove(JOB, job)
                raise StaleError("the job is gone") from None
            if error.code == 409:
                raise StaleError("the job was changed meanwhile") from None
            raise
        self._store.put(JOB, written)
        return written

    async def _tell(self, key: JobKey, job: Document, decision: Decision) -> None:
        for event in decision.events:
            _LOG.info("%s", event.message or event.reason, extra=_where(key, event.reason))
        for event in decision.events:
            try:
                await self._events.tell(job, event)
            except ApiError as error:
                # The status says it; an event that is missing is no reason to do anything again.
                _LOG.warning("an event was not written: %s", error, extra=_where(key, event.reason))


def _kind(one: Apply) -> Kind:
    return BY_NAME[one.ref.api_version, one.ref.kind]


def _where(key: JobKey, reason: str) -> dict[str, str]:
    return {"job": key.name, "namespace": key.namespace, "reason": reason}
