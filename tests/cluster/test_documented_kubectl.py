"""Commands of the documentation for kubectl and Helm do what they say, on a real API server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from api_server import KUBE, ApiServer
from definitions import definition
from documented_commands import ROOT, Block, all_marked, run_block

BLOCKS = all_marked("cluster")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Where kubectl and Helm are, for a cluster with the chart installed, as pages for its users expect."""
    directory = tmp_path_factory.mktemp("documented")
    programs = directory / "bin"
    programs.mkdir()
    helm = KUBE.parent / "helm" if (KUBE.parent / "helm").exists() else shutil.which("helm")
    assert helm is not None, "Helm is not there; run make test-cluster, which builds it"
    for name, words in (("kubectl", f"{KUBE} kubectl"), ("helm", str(helm))):
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)
    with ApiServer(directory) as server:
        for kind in ("JobSet", "PodMonitor", "ServiceMonitor", "PrometheusRule"):
            server.define(definition(kind))
        found = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "KUBECONFIG": str(server.kubeconfig),
            "HOME": str(directory),
        }
        install = "helm install tracerl charts/tracerl -n tracerl-system --create-namespace"
        (directory / "install").mkdir()
        run_block(Block(Path(__file__), 0, install, "cluster"), directory / "install", found)
        yield found


@pytest.fixture
def canary(tmp_path: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """The job that the pages speak of."""

    def run(name: str, script: str) -> None:
        (tmp_path / name).mkdir()
        run_block(Block(Path(__file__), 0, script, "cluster"), tmp_path / name, variables)

    run("before", "kubectl apply -f jobs/examples/canary.yaml")
    yield
    run("after", "kubectl delete --ignore-not-found trj canary")


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_it_runs(block: Block, tmp_path: Path, variables: Mapping[str, str]) -> None:
    where = tmp_path / "here"
    where.mkdir()
    run_block(block, where, variables)


def test_what_the_page_switches_on_is_there(tmp_path: Path, variables: Mapping[str, str]) -> None:
    for number, block in enumerate(block for block in BLOCKS if block.page.name == "dashboards.md"):
        (tmp_path / str(number)).mkdir()
        run_block(block, tmp_path / str(number), variables)
    asked = "kubectl get -n tracerl-system -o yaml configmaps,servicemonitors,prometheusrules"
    (tmp_path / "asked").mkdir()
    text = run_block(Block(Path(__file__), 0, asked, "cluster"), tmp_path / "asked", variables)
    items = yaml.safe_load(text)["items"]
    labels = [item["metadata"]["labels"] for item in items]
    assert sum(one.get("grafana_dashboard") == "1" for one in labels) == 3
    assert {item["kind"] for item in items if item["metadata"]["labels"].get("release") == "prometheus"} == {
        "ServiceMonitor",
        "PrometheusRule",
    }


def test_the_pages_are_found() -> None:
    assert {block.page.relative_to(ROOT).name for block in BLOCKS} >= {"dashboards.md", "run-on-a-cluster.md"}
