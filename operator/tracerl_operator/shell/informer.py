"""What the cluster serves, whether all of it is known, and which jobs have news."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from tracerl_operator.shell.api import Api, ApiError
from tracerl_operator.shell.kinds import ASKED, JOB, KINDS, JobKey, Kind
from tracerl_operator.shell.options import Options
from tracerl_operator.shell.store import Store
from tracerl_operator.shell.watches import Watches
from tracerl_operator.shell.workqueue import WorkQueue
from tracerl_operator.types import Document

_DISCOVERY_SECONDS = 10.0
_ABSENT = 3
"""So often a kind must be missing: an API server that starts does not know all definitions yet."""
_SYNC_SECONDS = 600.0
_PAUSE = 0.1
_LOG = logging.getLogger(__name__)


class Informer:
    """Fills the store from watches and lists, and lets jobs out of the queue when the store is complete.

    kopf lists again when a watch got lost, without saying what went meanwhile, and a watch may be wrong in a
    way that nobody knows. So everything is listed here as well: then, and every ten minutes.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        queue: WorkQueue[JobKey],
        watches: Watches,
        *,
        options: Options,
        saw: Callable[[Kind], None],
    ) -> None:
        self._api, self._store, self._queue, self._watches = api, store, queue, watches
        self._namespaces: tuple[str | None, ...] = options.namespaces or (None,)
        self._saw = saw
        unwished = set()
        if not options.installation.pod_monitor:
            unwished.add("PodMonitor")
        if not options.installation.network_policy:
            unwished.add("NetworkPolicy")
        self._wished = tuple(k for k in KINDS if k.watched and k.name not in unwished)
        self._served: frozenset[Kind] = frozenset()
        self._absences: Counter[Kind] = Counter()
        self._asked: frozenset[str] = frozenset()
        self._synced: dict[Kind, float] = {}
        self._relisted: set[Kind] = set()
        self._round = 0
        self._generations: dict[str, object] = {}
        self.leads = False
        """Whether this operator works, and not another one."""

    # -- what others want to know -------------------------------------------------------------------------

    def optional_kinds(self) -> frozenset[str]:
        """Which of the kinds that a cluster may lack are served, and known."""
        return self._asked | {kind.name for kind in self._synced if kind.optional}

    def unready(self) -> str | None:
        """Say what is not known yet; None when the first lists of all kinds are in, and the watches open."""
        if JOB not in self._served:
            return "the cluster's kinds are not known yet, or it has no TraceRLJobs"
        if not self._watches.complete:
            return "not all watches are open"
        waiting = sorted(kind.plural for kind in self._served - self._synced.keys())
        return f"not listed yet: {', '.join(waiting)}" if waiting else None

    def illness(self) -> str | None:
        """Say what only a restart of the process cures."""
        if self._served and not self._watches.alive:
            return "the thread of the watches ended"
        return "the watches stand still" if self._watches.stands_still else None

    def lead(self, leads: bool) -> None:
        """Begin to work on all jobs, or stop."""
        self.leads = leads
        if leads:
            self._add_all()
        self._gate()

    # -- what is served -----------------------------------------------------------------------------------

    async def discover(self) -> None:
        """Watch the kinds that are served, and notice when this changes."""
        while True:
            try:
                served = {kind for kind in self._wished if await self._is_served(kind)}
                asked = [kind for kind in ASKED if kind.optional]
                self._asked = frozenset([kind.name for kind in asked if await self._is_served(kind)])
            except ApiError as error:
                _LOG.warning("cannot ask what the cluster serves: %s", error)
            else:
                if served != self._served:
                    self._rewatch(frozenset(served))
            await asyncio.sleep(_DISCOVERY_SECONDS)

    async def _is_served(self, kind: Kind) -> bool:
        if not kind.optional and kind is not JOB:
            return True
        if await self._api.served(kind):
            self._absences[kind] = 0
            return True
        self._absences[kind] += 1
        known = kind in self._served or kind.name in self._asked
        return known and self._absences[kind] < _ABSENT

    def _rewatch(self, served: frozenset[Kind]) -> None:
        gone, new = self._served - served, served - self._served
        for kind in gone:
            _LOG.warning("%s is not served any more", kind.name, extra={"kind": kind.name})
        for kind in new:
            if self._served:
                _LOG.info("%s is served now", kind.name, extra={"kind": kind.name})
        self._served = served
        for kind in gone:
            self._synced.pop(kind, None)
            for key in self._store.drop(kind):
                self._queue.add(key)
        if gone:
            self._add_all()
        self._gate()
        self._watches.start(served, self._seen)

    # -- what is there ------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """List what is watched when its watch has begun, when one began anew, and now and then."""
        while True:
            await asyncio.sleep(_PAUSE)
            if not self._watches.complete:
                continue
            if self._round != self._watches.round:
                self._round = self._watches.round
                self._relisted |= self._served
            old = time.monotonic() - _SYNC_SECONDS
            self._relisted |= {kind for kind, then in self._synced.items() if then < old}
            for kind in self._relisted & self._served:
                try:
                    await self._list(kind)
                except ApiError as error:
                    _LOG.warning("cannot list %s: %s", kind.plural, error, extra={"kind": kind.name})
                    await asyncio.sleep(20 * _PAUSE)

    async def _list(self, kind: Kind) -> None:
        self._relisted.discard(kind)
        first = kind not in self._synced
        try:
            for namespace in self._namespaces:
                names: set[tuple[str, str]] = set()
                as_of = -1
                async for chunk, as_of in self._api.list_all(kind, namespace):  # noqa: B007  # read below
                    for document in chunk:
                        self._put(kind, document)
                        names.add((document["metadata"]["namespace"], document["metadata"]["name"]))
                for key in self._store.keep(kind, namespace, names, as_of):
                    self._queue.add(key)
        except ApiError:
            self._relisted.add(kind)
            raise
        if kind not in self._served:
            return
        self._synced[kind] = time.monotonic()
        if first and kind.optional:
            self._add_all()
        self._gate()

    def _seen(self, kind: Kind, change: str | None, document: Document) -> None:
        """Take what a watch brought."""
        self._saw(kind)
        if kind not in self._served:
            return
        if change is None and kind in self._synced:
            self._relisted.add(kind)
        if change == "DELETED":
            self._generations.pop(document["metadata"]["uid"], None)
            self._add(self._store.remove(kind, document))
            return
        self._put(kind, document, urgent=kind is JOB and self._is_edited(document))

    def _put(self, kind: Kind, document: Document, *, urgent: bool = False) -> None:
        try:
            key = self._store.put(kind, document)
        except (RecursionError, ValueError) as error:
            # One object that nobody can read must not keep the others from being known.
            metadata = document["metadata"]
            where = {"job": metadata["name"], "namespace": metadata["namespace"], "reason": "Unreadable"}
            _LOG.warning("a %s is left out: %s", kind.name, error, extra=where)
            return
        self._add(key, urgent=urgent)

    def _is_edited(self, job: Document) -> bool:
        """Whether its user wants something else: this does not wait until an older trouble is looked at."""
        metadata = job["metadata"]
        generation = metadata.get("generation")
        if self._generations.get(metadata["uid"]) == generation:
            return False
        self._generations[metadata["uid"]] = generation
        return True

    # -- who has news -------------------------------------------------------------------------------------

    def _add(self, key: JobKey | None, *, urgent: bool = False) -> None:
        if key is not None:
            self._queue.add(key, urgent=urgent)

    def _add_all(self) -> None:
        for key in self._store.job_keys():
            self._queue.add(key, urgent=True)

    def _gate(self) -> None:
        """Let jobs be worked on when this operator leads and knows all that is there."""
        known = JOB in self._served and self._served <= self._synced.keys()
        self._queue.run(self.leads and known)
