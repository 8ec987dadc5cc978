"""Events on jobs. One that is told again within some minutes is counted up instead."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime

from tracerl.api.job import API_VERSION, KIND
from tracerl_operator import names
from tracerl_operator.shell.api import Api, ApiError
from tracerl_operator.shell.kinds import Kind
from tracerl_operator.types import Document, Event

EVENT = Kind("events.k8s.io/v1", "Event", "events", watched=True)
_SERIES_SECONDS = 600.0
_REMEMBERED = 5000
_NOTE_BYTES = 1024


class Events:
    """Writes events, and remembers the last ones of this process."""

    def __init__(self, api: Api, identity: str) -> None:
        self._api, self._identity = api, identity
        self._told: dict[tuple[str, Event], tuple[str, int, float]] = {}

    async def tell(self, job: Document, event: Event) -> None:
        """Write an event on a job, whose status says it already."""
        metadata = job["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        known = self._told.pop((metadata["uid"], event), None)
        if known is not None and time.monotonic() - known[2] < _SERIES_SECONDS:
            name, count, _ = known
            series = {"series": {"count": count + 1, "lastObservedTime": now}}
            try:
                await self._api.merge(EVENT, metadata["namespace"], name, series)
            except ApiError as error:
                if error.code != 404:
                    raise
            else:
                self._remember(metadata["uid"], event, name, count + 1)
                return
        # The same name when a request whose answer got lost is made again.
        text = f"{metadata['uid']} {metadata['resourceVersion']} {event}"
        name = f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        document = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "eventTime": now,
            "reportingController": names.MANAGER,
            "reportingInstance": self._identity[:128],
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": event.message.encode()[:_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                **{key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            },
        }
        try:
            await self._api.create(EVENT, metadata["namespace"], document)
        except ApiError as error:
            if error.code != 409:
                raise
        self._remember(metadata["uid"], event, name, 1)

    def _remember(self, uid: str, event: Event, name: str, count: int) -> None:
        self._told[uid, event] = (name, count, time.monotonic())
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
