from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import KUBE, ApiServer
from live import OPERATOR, Namespace, NotSeenError, new_namespace
from oci import load_image

from cluster import Cluster, ClusterError, here
from results import Results

ROOT = Path(__file__).parents[2]
LEVELS = ("api", "ci", "full")
IMAGES = {"operator": "localhost/tracerl-operator", "canary": "localhost/tracerl-canary"}
_NAMESPACES = pytest.StashKey[list[Namespace]]()


def _level() -> str:
    level = os.environ.get("TRACERL_CLUSTER", "full")
    if level not in LEVELS:
        raise pytest.UsageError(f"TRACERL_CLUSTER is {level!r}: write one of {', '.join(LEVELS)}")
    return level


def pytest_configure(config: pytest.Config) -> None:
    level = _level()
    if path := os.environ.get("TRACERL_CLUSTER_RESULTS"):
        config.pluginmanager.register(Results(Path(path).resolve(), level), "cluster-results")


def _needs_cluster(item: pytest.Item) -> bool:
    return "cluster" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the level, and run tests of a whole cluster last.

    Below full, a test of a whole cluster runs in ci if it is marked ci, and no test does that is marked full.
    """

    def wanted(item: pytest.Item) -> bool:
        if _level() == "full":
            return True
        if item.get_closest_marker("full") is not None:
            return False
        return not _needs_cluster(item) or (_level() == "ci" and item.get_closest_marker("ci") is not None)

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = sorted(filter(wanted, items), key=_needs_cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Add to a failed test what its namespaces looked like, for they are gone afterwards."""
    report = yield
    if (
        call.when == "call"
        and report.failed
        and not (call.excinfo and call.excinfo.errisinstance(NotSeenError))
    ):
        for namespace in item.stash.get(_NAMESPACES, []):
            report.sections.append((f"namespace {namespace.name}", namespace.describe()))
    return report


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that knows TraceRLJobs, by the committed definition."""
    assert KUBE.exists(), f"{KUBE} is not there; run make test-cluster, which builds it"
    path = ROOT / "crds/tracerljobs.yaml"
    with ApiServer(tmp_path_factory.mktemp("api-server")) as server:
        server.define(yaml.safe_load(path.read_text()))
        yield server


def _install_operator(cluster: Cluster, say: Callable[[str], None], *, again: bool) -> None:
    """Our images and our chart, as the README says a user installs them; `again` where it may be there."""
    out = cluster.place.cache / "images/out"
    say("cluster tests: images")
    subprocess.run([sys.executable, ROOT / "images/assemble.py", "--out", out, *IMAGES], check=True)
    new = [load_image(cluster, json.loads((out / f"{name}.json").read_text())) for name in IMAGES]
    say("cluster tests: operator")
    canary = f"repository={IMAGES['canary']},tag=test"
    values = {
        "image": f"repository={IMAGES['operator']},tag=test",
        "rolloutImage": canary,
        "trainerImage": canary,
        "nodeRing": "enabled=true",
    }
    sets = [f"--set={key}.{each}" for key, pairs in values.items() for each in pairs.split(",")]
    release = ("upgrade", "--install", "tracerl", str(ROOT / "charts/tracerl"), "--namespace", OPERATOR)
    cluster.helm(*release, "--create-namespace", *sets, "--wait", "--timeout", "600s")
    if again and any(new):
        # The tag stays the same, so nothing else would tell the deployment.
        cluster.kubectl("--namespace", OPERATOR, "rollout", "restart", "deployment")
        cluster.kubectl(
            "--namespace", OPERATOR, "rollout", "status", "deployment", "--timeout=600s", seconds=660
        )


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A Kubernetes with JobSet and our operator; one that was up before is used and stays up."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    cluster = Cluster(here())
    if cluster.owner is not None:
        raise ClusterError(
            f"process {cluster.owner} runs tests on cluster {cluster.place.number}: wait for it, or take "
            "another number (TRACERL_CLUSTER_NUMBER)"
        )
    borrowed = cluster.is_ready
    try:
        if not borrowed:
            say("cluster tests: cluster")
            cluster.up(owned=True)
        cluster.install("jobset")
        with capture.global_and_fixture_disabled():
            _install_operator(cluster, say, again=borrowed)
        yield cluster
    finally:
        if not borrowed:
            cluster.down()


@pytest.fixture(scope="session")
def kueue(cluster: Cluster) -> Cluster:
    """The cluster with Kueue."""
    cluster.install("kueue")
    return cluster


@pytest.fixture
def namespaces(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., Namespace]]:
    """Makes namespaces, `namespaces(labels={…})`; afterwards they go, with all that runs in them."""
    with contextlib.ExitStack() as stack:

        def make(prefix: str = "test", labels: dict[str, str] | None = None) -> Namespace:
            namespace = stack.enter_context(new_namespace(cluster, prefix, labels))
            request.node.stash.setdefault(_NAMESPACES, []).append(namespace)
            return namespace

        yield make


@pytest.fixture
def namespace(namespaces: Callable[..., Namespace]) -> Namespace:
    """A namespace that takes only pods of the restricted pod security standard."""
    return namespaces(labels={"pod-security.kubernetes.io/enforce": "restricted"})


@pytest.fixture(scope="session")
def s3(cluster: Cluster) -> Iterator[Any]:
    """An S3 server on this machine that pods reach by its endpoint_url (tests/transport/s3_server.py)."""
    from s3_server import start_s3_server

    with start_s3_server(cluster.place.host) as server:
        yield server
