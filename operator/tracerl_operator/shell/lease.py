"""Who of several operators works: the one that holds a Lease, renewed every few seconds.

Times are this process's own: a Lease is old when it was seen unchanged for its whole duration, so clocks of
different machines do not matter. The holder stops before its Lease can be taken. A handover may still overlap
with a last request, which is why everything that the operator does may be done twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from tracerl_operator.cluster import at
from tracerl_operator.shell.api import Api, ApiError
from tracerl_operator.shell.kinds import Kind
from tracerl_operator.types import Document

LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
DURATION, RENEWED_FOR, PAUSE = 15.0, 10.0, 3.0
_LOG = logging.getLogger(__name__)


class Lease:
    """The one Lease, and whether this process holds it."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, changed: Callable[[bool], None]
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._changed = changed
        self._seen: tuple[object, float] = (None, time.monotonic())
        self._renewed = 0.0
        self.held = False

    async def keep(self) -> None:
        """Try for ever to get the Lease and to keep it."""
        while True:
            began, pause = time.monotonic(), PAUSE
            try:
                mine = await asyncio.wait_for(self._try(), RENEWED_FOR / 2)
            except (ApiError, TimeoutError) as error:
                if not (isinstance(error, ApiError) and error.code in (0, 409)):
                    _LOG.warning(
                        "the lease %s/%s: %s", self._namespace, self._name, str(error) or "no answer in time"
                    )
                mine = self.held and began - self._renewed < RENEWED_FOR
                pause = 5 * PAUSE if isinstance(error, ApiError) and error.code == 403 else PAUSE
            else:
                if mine:
                    self._renewed = began
            self._set(mine)
            await asyncio.sleep(pause)

    async def release(self) -> None:
        """Let another operator work at once."""
        if self.held:
            self._set(False)
            found = await self._api.get(LEASE, self._namespace, self._name)
            if found is not None and at(found, "spec", "holderIdentity") == self._identity:
                found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.update(LEASE, found)

    async def _try(self) -> bool:
        found = await self._api.get(LEASE, self._namespace, self._name)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine: Document = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION),
            "renewTime": now,
        }
        if found is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            lease = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": mine}
            await self._api.create(LEASE, self._namespace, lease | {"spec": mine | {"acquireTime": now}})
            return True
        version = at(found, "metadata", "resourceVersion")
        if self._seen[0] != version:
            self._seen = (version, time.monotonic())
        holder = at(found, "spec", "holderIdentity")
        duration = at(found, "spec", "leaseDurationSeconds")
        lasts = float(duration) if isinstance(duration, int) else DURATION
        if holder and holder != self._identity and time.monotonic() - self._seen[1] < lasts:
            return False
        spec = at(found, "spec") or {}
        if holder != self._identity:
            transitions = spec.get("leaseTransitions")
            mine |= {"acquireTime": now, "leaseTransitions": (transitions or 0) + 1}
        await self._api.update(LEASE, {**found, "spec": spec | mine})
        return True

    def _set(self, held: bool) -> None:
        if held != self.held:
            self.held = held
            _LOG.info("works on jobs now" if held else "stands by", extra={"reason": "Lease"})
            self._changed(held)
