"""`promtool check metrics` has nothing to say about what any exporter shows."""

from __future__ import annotations

import math
import shutil
import subprocess
from itertools import product

import pytest
from conftest import Scraped

from tracerl.api.constants import METRICS, Role
from tracerl.transport.exposition import Distribution, exposition
from tracerl_operator.shell.kinds import JOB
from tracerl_operator.shell.metrics import Metrics

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def of_a_job(role: Role) -> bytes:
    """Every metric of a role of a job with every listed label value, by its exporter's builder."""
    several = Distribution({0.5: 1, math.inf: 1}, 2.5)
    values = {
        spec.name: dict.fromkeys(
            product(*(listed or ("open",) for listed in spec.values)),
            several if spec.type == "histogram" else 1.0,
        )
        for spec in METRICS
        if spec.source is role
    }
    return exposition(role, values)


def of_the_operator() -> bytes:
    metrics = Metrics()
    metrics.show_jobs(lambda: [{"status": {"terminal": "Complete"}}, {}])
    metrics.show("tracerl_operator_queue_depth", lambda: {"": 0.0})
    metrics.show("tracerl_operator_leads", lambda: {"": 1.0})
    metrics.saw(JOB)
    metrics.count("GET", "TraceRLJob", 200)
    metrics.failed(503)
    metrics.durations.labels("changed").observe(0.2)
    return metrics.text()


def complaints(text: bytes) -> str:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode() or str(done.returncode or "")


@pytest.mark.parametrize("role", [Role.TRAINER, Role.ROLLOUT, Role.STORE])
def test_a_process_of_a_job(role: Role) -> None:
    assert complaints(of_a_job(role)) == ""


def test_the_operator() -> None:
    assert complaints(of_the_operator()) == ""


@pytest.mark.parametrize("role", [*Role])
def test_a_page_of_a_living_run(scraped: Scraped, role: Role) -> None:
    page = scraped.pages[role]
    assert page.count(b"# TYPE tracerl_") == sum(spec.source is role for spec in METRICS)
    assert complaints(page) == ""


def test_that_promtool_would_complain() -> None:
    assert "counter metrics should have" in complaints(
        b"# HELP a_thing Is.\n# TYPE a_thing counter\na_thing 1\n"
    )
