"""The chart's CronJob on a whole cluster: a canary that is met, one that is not, and what each leaves."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from junitparser import JUnitXml
from live import OPERATOR, Namespace

from cluster import Cluster
from tracerl.api.constants import LABEL_CANARY

CHART = Path(__file__).parents[2] / "charts/tracerl"
SMALL: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "jobs/small.yaml").read_text())
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
SECONDS = 900


@pytest.fixture
def installed(cluster: Cluster, namespace: Namespace) -> Iterator[Namespace]:
    """The release with a canary of the small job, in a namespace of its own."""
    job = copy.deepcopy(SMALL)
    job["spec"]["expect"] = {"maxGap": "10", "maxMissingRows": 0}
    values = namespace.cluster.place.data / "canary-values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "canary": {
                    "enabled": True,
                    "namespace": namespace.name,
                    "manifest": job,
                    "schedule": "0 0 1 1 *",
                }
            }
        )
    )

    def upgrade(*more: str) -> None:
        how = ("--namespace", OPERATOR, "--reuse-values", "--wait", "--timeout", "240s")
        cluster.helm("upgrade", "tracerl", str(CHART), *how, *more)

    upgrade(f"--values={values}")
    yield namespace
    upgrade("--set=canary.enabled=false")
    values.unlink()


def run_now(namespace: Namespace, name: str) -> tuple[str, str]:
    """Start the CronJob's job by hand, as its page says; how it ended, and its log."""
    namespace.kubectl("create", "job", "--from=cronjob/tracerl-canary", name)

    def ended() -> str:
        conditions = namespace.get("job", name).get("status", {}).get("conditions", [])
        kinds = [one["type"] for one in conditions if one["status"] == "True"]
        return next((kind for kind in kinds if kind in ("Complete", "Failed")), "")

    end = namespace.wait_for(ended, f"the end of job {name}", SECONDS)
    return end, namespace.kubectl("logs", f"job/{name}", "--tail=-1")


def cases(log: str) -> dict[str, list[str]]:
    """Cases of the XML in a log, with what became of them."""
    (suite,) = JUnitXml.fromstring(log[log.index("<?xml") : log.index("</testsuites>") + 14].encode())
    return {case.name: [type(one).__name__ for one in case.result] for case in suite}


def test_canaries_of_the_cronjob(installed: Namespace) -> None:
    end, log = run_now(installed, "met")
    assert end == "Complete", log
    assert cases(log) == {"job": [], "maxGap": [], "maxMissingRows": []}
    assert "met     maxGap " in log

    job = yaml.safe_load(installed.get("configmap", "tracerl-canary")["data"]["job.yaml"])
    job["spec"]["expect"] = {"maxGap": "0.0000001"}
    changed = {"data": {"job.yaml": json.dumps(job)}}
    installed.patch("configmap", "tracerl-canary", changed)
    end, log = run_now(installed, "missed")
    assert end == "Failed", log
    assert cases(log) == {"job": [], "maxGap": ["Failure"]}
    assert "tracerl: ExpectationBroken: " in log

    # Both stay, by the label that alerts look at, and say in their status what became of the figures.
    left = installed.list("trj", f"{LABEL_CANARY}=true")
    by_end = {one["status"]["terminal"]: one["status"]["progress"]["expectations"] for one in left}
    assert {end: {one["name"]: one["met"] for one in found} for end, found in by_end.items()} == {
        "Complete": {"maxGap": True, "maxMissingRows": True},
        "Failed": {"maxGap": False},
    }
