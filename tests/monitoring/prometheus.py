"""A Prometheus of the tests' own, and its HTTP API."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Samples = list[tuple[float, float]]


def until(what: str, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something; TimeoutError when it does not come."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} within {seconds:.0f} s")
        time.sleep(0.1)


@dataclass(frozen=True)
class Series:
    """Labels without the name, and samples: Unix times and values."""

    labels: dict[str, str]
    samples: Samples

    @property
    def finite(self) -> Samples:
        return [(at, value) for at, value in self.samples if math.isfinite(value)]


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Ask the API; RuntimeError with its answer when it does not like the question."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def over(self, expr: str, start: float, end: float) -> list[Series]:
        """Evaluate each second of a time."""
        data = self.get("query_range", query=expr, start=f"{start}", end=f"{end}", step="1")
        return [_series(found["metric"], found["values"]) for found in data["result"]]

    def raw(self, selector: str, start: float, end: float) -> list[Series]:
        """The samples themselves."""
        window = f"{math.ceil(end - start)}s"
        data = self.get("query", query=f"{selector}[{window}]", time=f"{end}")
        return [_series(found["metric"], found["values"]) for found in data["result"]]


def _series(metric: dict[str, str], values: list[list[Any]]) -> Series:
    labels = {key: value for key, value in metric.items() if key != "__name__"}
    return Series(labels, [(float(at), float(value)) for at, value in values])


@contextmanager
def running(directory: Path, scrapes: list[dict[str, Any]], rules: dict[str, Any]) -> Iterator[Prometheus]:
    """Start Prometheus in a directory and end it."""
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
    configuration = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrapes,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "prometheus.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=directory) as process:
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")

            def ready() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False

            until("Prometheus is ready", ready)
            yield prometheus
        finally:
            process.terminate()
            process.wait()
