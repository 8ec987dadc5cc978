"""What trainer 0 tells about itself on a cluster: the config map that the operator mirrors into the status.

It needs no client library: one PATCH with the token of the pod's account. A report that does not get through
is made again with the next one, and never holds up or ends the training.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Self

from tracerl.api.job import Expectation, OverheadParts, Progress
from tracerl.api.pods import PROGRESS_KEY
from tracerl.rl.steprecord import FinishRecord, StepRecord

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts the account's token, the API server's CA and the namespace."""
_INTERVAL_SECONDS = 5.0
"""Reports are at least so far apart."""
_LEAST = 1e-6
"""What is smaller has an exponent as text, and is nothing to look at."""
_TRY_SECONDS = 5.0
_LAST_SECONDS = 10.0
"""How long the last report may hold up the end."""

log = logging.getLogger(__name__)


def progress_of(step: StepRecord) -> Progress:
    """Make the report of a step."""
    return Progress(
        step=step.step,
        steps=step.steps,
        policy_version=step.version,
        reward=_decimal(step.reward.mean),
        logprob_gap=_decimal(step.gap_guided.mean),
        tokens_per_second=_decimal(step.tokens_per_second),
        step_seconds=_decimal(step.seconds.total),
        overhead_ratio=_decimal(step.overhead.ratio),
        overhead_parts=OverheadParts(
            **{name: _decimal(share) for name, share in step.overhead.part_ratios.items()}
        ),
        record_bytes_per_token=_decimal(step.records.bytes_per_token),
        updated_at=datetime.fromtimestamp(step.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def judged(last: Progress, finish: FinishRecord) -> Progress:
    """Add to the report of the last step what became of `spec.expect`."""
    found = [
        Expectation(name=one.name, wanted=one.wanted, value=_decimal(one.value), met=one.met)
        for one in finish.expectations
    ]
    return last.model_copy(update={"expectations": found})


def _decimal(value: float | None) -> Decimal | None:
    """Round to four significant digits, without an exponent; None for what is no number."""
    if value is None or not abs(value) < float("inf"):
        return None
    if abs(value) < _LEAST:
        return Decimal(0)
    return Decimal(format(Decimal(f"{value:.4g}"), "f"))


@dataclass(frozen=True)
class ApiServer:
    """The API server as a pod reaches it."""

    host: str
    port: int
    account: Path = ACCOUNT

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ) -> ApiServer | None:
        """Find it by what the kubelet sets; None where there is none."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
        return cls(host, int(port)) if host and port else None

    def patch_config_map(self, name: str, data: Mapping[str, str]) -> None:
        """Merge keys into a config map of the pod's namespace. OSError, ValueError or HTTPException."""
        # Read again each time: the kubelet replaces the token before it ends.
        token = (self.account / "token").read_text(encoding="ascii").strip()
        namespace = (self.account / "namespace").read_text(encoding="ascii").strip()
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=_TRY_SECONDS, context=context)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        path = f"/api/v1/namespaces/{namespace}/configmaps/{name}?fieldManager=tracerl-trainer"
        try:
            connection.request("PATCH", path, json.dumps({"data": data}).encode(), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"the API server answers {answer.status} {answer.reason}")
        finally:
            connection.close()


class ProgressReporter:
    """Reports the latest progress on a thread of its own; use it as a context manager."""

    def __init__(self, server: ApiServer, name: str, *, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._server, self._name, self._interval = server, name, interval_seconds
        self._changed = threading.Condition()
        self._latest: Progress | None = None
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
        self._thread.start()

    def report(self, progress: Progress) -> None:
        """Report this, unless something newer comes before its turn; returns at once."""
        with self._changed:
            self._latest = progress
            self._changed.notify()

    def close(self) -> None:
        """Report what was not reported yet, for some seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_LAST_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._closing)
                progress, self._latest = self._latest, None
                last = self._closing
            if progress is not None and not self._send(progress) and not last:
                with self._changed:
                    self._latest = self._latest or progress
            if last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._interval)

    def _send(self, progress: Progress) -> bool:
        text = progress.model_dump_json(by_alias=True)
        try:
            self._server.patch_config_map(self._name, {PROGRESS_KEY: text})
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._failing:
                log.warning("progress cannot be reported to config map %s: %s", self._name, error)
            self._failing = True
            return False
        if self._failing:
            log.info("progress is reported again")
        self._failing = False
        return True
