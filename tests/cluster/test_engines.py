"""SGLang and Megatron-Core in one TraceRLJob, each in its own image, on CPU cores.

Ten GB of images: in CI there is neither the room nor the time, so these tests are of the whole rig alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import Namespace
from oci import load_image
from small_cluster import merged

from cluster import Cluster

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "jobs/examples"
FILES = [EXAMPLES / "canary-engines/reward.py", EXAMPLES / "own-task/words.jsonl"]
TARGETS = ("rollout", "trainer")
SECONDS = 2400
"""Several times what it takes: each process imports for a minute or more before it does anything."""
pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Images of both roles, put together and known to the cluster, as parts of a job's spec."""
    out = cluster.place.cache / "images/out"
    words = [sys.executable, ROOT / "images/assemble.py", "--out", out, *TARGETS]
    environment = {**os.environ, "TRACERL_CLUSTER_CACHE": str(cluster.place.cache)}
    subprocess.run(words, check=True, env=environment)
    for target in TARGETS:
        load_image(cluster, json.loads((out / f"{target}.json").read_text()))
    return {target: {"image": f"localhost/tracerl-{target}:test"} for target in TARGETS}


def start(namespace: Namespace, *changes: dict[str, Any]) -> None:
    """Apply the canary of the engines, with its task from a config map."""
    files = [f"--from-file={path}" for path in FILES]
    namespace.kubectl("create", "configmap", "digits", *files)
    job = yaml.safe_load((EXAMPLES / "canary-engines.yaml").read_text())
    spec = job["spec"]
    task = {"uri": "/etc/tracerl/reward/words.jsonl", "source": {"uri": None, "configMap": "digits"}}
    for change in ({"task": task}, *changes):
        spec = merged(spec, change)
    namespace.apply({**job, "spec": spec})


def test_sglang_and_megatron_in_one_pod(namespace: Namespace, images: dict[str, dict[str, str]]) -> None:
    """Under the restricted standard, with read-only root file systems and user 65532."""
    start(namespace, images)
    namespace.wait_for(lambda: namespace.list("pod"), "the pod", 120)
    [pod] = namespace.list("pod", "tracerl.dev/job-name=canary-engines")
    inside = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    assert {each["name"]: each["image"].split("/")[1] for each in inside} == {
        "store": "tracerl-rollout:test",
        "rollout": "tracerl-rollout:test",
        "trainer": "tracerl-trainer:test",
    }
    job = namespace.wait_for_job("canary-engines", seconds=SECONDS)
    # What the manifest expects held: reward, gap, and no row missing.
    progress = job["status"]["progress"]
    assert (progress["step"], progress["policyVersion"]) == (24, 24)
    assert float(progress["reward"]) > 0.8
    assert job["status"]["restarts"] == 0


def test_sglang_and_megatron_in_pods_of_their_own(
    namespace: Namespace, images: dict[str, dict[str, str]]
) -> None:
    """Weights by gloo between pods, records over HTTP, and a rollout that is killed on the way."""
    start(
        namespace,
        images,
        {"placement": {"colocation": "None"}, "algorithm": {"steps": 8}, "expect": {"minRewardGain": None}},
    )

    def step() -> int:
        status = namespace.get("trj", "canary-engines").get("status", {})
        assert not status.get("terminal"), status
        return int(status.get("progress", {}).get("step", 0))

    namespace.wait_for(lambda: step() >= 2, "two steps", SECONDS)
    [rollout] = namespace.list("pod", "tracerl.dev/job-name=canary-engines,tracerl.dev/role=rollout")
    # Its first process alone: SGLang's own go with it.
    namespace.kill_process(rollout["metadata"]["name"], "rollout")
    job = namespace.wait_for_job("canary-engines", seconds=SECONDS)
    assert job["status"]["progress"]["step"] == 8
