"""The workers: each takes a job's key from the queue, has the controller look at it, and says how it went."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tracerl_operator.cluster import clean_text
from tracerl_operator.shell.api import Api, ApiError
from tracerl_operator.shell.controller import Controller, StaleError
from tracerl_operator.shell.kinds import JOB, JobKey
from tracerl_operator.shell.metrics import Metrics
from tracerl_operator.shell.store import Store
from tracerl_operator.shell.workqueue import WorkQueue

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workers:
    """What all workers share."""

    queue: WorkQueue[JobKey]
    controller: Controller
    api: Api
    store: Store
    metrics: Metrics

    async def work(self) -> None:
        """Look at one job after another, for ever."""
        while True:
            key = await self.queue.get()
            began = time.monotonic()
            result = await self._look_at(key)
            self.metrics.durations.labels(result).observe(time.monotonic() - began)

    async def _look_at(self, key: JobKey) -> str:
        try:
            return await self._try(key)
        except ApiError as error:
            code, text = error.code, str(error)
        except Exception as error:  # noqa: BLE001  # one job's trouble must not be that of others
            code, text = None, clean_text(f"a fault of the operator: {error!r}")
            await self._show(key)
        reason = self.metrics.failed(code)
        seconds = self.queue.failed(key)
        level = logging.ERROR if reason == "Unexpected" else logging.WARNING
        where = {"job": key.name, "namespace": key.namespace, "reason": reason}
        _LOG.log(level, "%s; again in %.0f s", text, seconds, extra=where, exc_info=level == logging.ERROR)
        return "error"

    async def _show(self, key: JobKey) -> None:
        message = "the operator failed at this job and tries again; its log has the reason"
        try:
            await self.controller.show_trouble(key, message)
        except Exception as error:  # noqa: BLE001  # what it failed at may be the very status
            where = {"job": key.name, "namespace": key.namespace, "reason": "Unexpected"}
            _LOG.warning("cannot show this in the job's status: %r", error, extra=where)

    async def _try(self, key: JobKey) -> str:
        try:
            done = await self.controller.work(key)
        except StaleError:
            found = await self.api.get(JOB, key.namespace, key.name)
            if found is not None:
                self.store.put(JOB, found)
            self.queue.add(key)
            self.queue.done(key)
            return "stale"
        if done.result == "gone":
            self.queue.forget(key)
            return done.result
        self.queue.done(key)
        if done.again is not None:
            self.queue.add_after(key, done.again)
        return done.result
