"""What of the chart only a whole cluster shows: controllers that add up roles, and pods that stand by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import OPERATOR, Namespace

from cluster import Cluster

CHART = Path(__file__).parents[2] / "charts/tracerl"


@pytest.mark.ci
def test_people_with_the_usual_roles_get_those_for_jobs(namespace: Namespace) -> None:
    """The controller manager adds the chart's roles to view, edit and admin."""
    for role in ("view", "edit", "admin"):
        namespace.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}")

    def may(user: str, verb: str, *part: str) -> bool:
        asked = ("auth", "can-i", verb, "tracerljobs.tracerl.dev", *part, f"--as={user}")
        return namespace.kubectl(*asked, check=False).strip() == "yes"

    namespace.wait_for(lambda: may("admin", "create"), "admin's right to create jobs")
    for user, able in (("view", False), ("edit", True), ("admin", True)):
        assert may(user, "list")
        for verb in ("create", "update", "patch", "delete"):
            assert may(user, verb) is able, (user, verb)
        assert not may(user, "update", "--subresource=status")


@pytest.fixture
def two_operators(cluster: Cluster) -> Iterator[None]:
    def scale(replicas: int) -> None:
        how = ("--namespace", OPERATOR, "--reuse-values", f"--set=replicas={replicas}", "--wait")
        cluster.helm("upgrade", "tracerl", str(CHART), *how, "--timeout", "240s")

    scale(2)
    yield
    scale(1)


@pytest.mark.usefixtures("two_operators")
def test_another_operator_goes_on_when_one_is_lost(cluster: Cluster, namespace: Namespace) -> None:
    system = Namespace(cluster, OPERATOR)

    def holder() -> str:
        name: str = system.get("lease", "tracerl-operator")["spec"].get("holderIdentity", "")
        return name

    def pods() -> set[str]:
        listed = system.list("pods", "app.kubernetes.io/name=tracerl-operator")
        return {pod["metadata"]["name"] for pod in listed}

    first = next(pod for pod in pods() if holder().startswith(pod))
    (standby,) = pods() - {first}
    system.kubectl("delete", "pod", first, "--grace-period=0", "--force")
    namespace.wait_for(lambda: holder() and not holder().startswith(first), "another holder of the lease")
    job = {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {"name": "noticed"},
        "spec": {
            "suspend": True,
            "model": {"uri": "builtin://tiny-moe"},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": 1, "promptsPerStep": 8, "samplesPerPrompt": 4},
            "method": {"name": "TRACE"},
        },
    }
    namespace.apply(job)
    namespace.wait_for(
        lambda: namespace.condition("noticed", "Suspended").get("status") == "True", "a status of the job"
    )
    where = f"/api/v1/namespaces/{OPERATOR}/pods/{standby}"
    assert json.loads(cluster.kubectl("get", "--raw", where))["status"]["phase"] == "Running"
