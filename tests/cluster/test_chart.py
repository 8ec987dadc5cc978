"""What Helm makes of the chart: every rendering on a real API server, and what its operator may do there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import KUBE, ApiServer, RefusedError
from chart_files import alert_rules, boards
from definitions import definition
from operator_process import eventually
from small_cluster import APART, NODE, SPEC, TOKEN, merged, nodes

from tracerl.api.job import TraceRLJob
from tracerl.cli import _parser
from tracerl_operator.objects import cleaning_pod, job_marks, wanted
from tracerl_operator.types import Installation

CHART = Path(__file__).parents[2] / "charts/tracerl"
DEFINITION = CHART.parents[1] / "crds/tracerljobs.yaml"
SYSTEM = "tracerl-system"
TEAMS = ("team-a", "team-b")
DIGEST = f"sha256:{'0f' * 32}"
RENDERINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "standby": {"replicas": 3, "podDisruptionBudget": {"enabled": True}},
    "namespaces": {"watchNamespaces": [*TEAMS]},
    "rings": {"nodeRing": {"enabled": True}},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "30s"},
        "jobPodMonitor": {"enabled": True, "labels": {"release": "prometheus", "team": "a"}},
        "docsUrl": "https://docs.example.org/{page}.html",
        "dashboards": {
            "enabled": True,
            "labels": {"team": "a"},
            "annotations": {"grafana_folder": "TraceRL"},
        },
        "alerts": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "thresholds": {"overheadRatio": 0.03, "jobStuckMinutes": 180},
        },
    },
    "canary": {"canary": {"enabled": True}},
    "canary of a team": {
        "watchNamespaces": [*TEAMS],
        "canary": {
            "enabled": True,
            "schedule": "*/30 * * * *",
            "timeZone": "Etc/UTC",
            "namespace": "team-b",
            "manifest": {
                "apiVersion": "tracerl.dev/v1alpha1",
                "kind": "TraceRLJob",
                "metadata": {"name": "ours"},
                "spec": {"model": {"uri": "builtin://tiny-moe"}},
            },
            "set": ["spec.rollout.image=registry.example/canary:1", "spec.expect.maxGap=0.5"],
            "timeoutSeconds": 900,
            "reportClaim": "reports",
        },
    },
    "least": {
        "crds": {"install": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "resources": {"requests": None, "limits": None},
    },
    "everything": {
        "image": {"repository": "registry.example:5000/a/operator", "tag": "1", "digest": DIGEST},
        "rolloutImage": {"repository": "registry.example/rollout", "tag": "2"},
        "trainerImage": {"repository": "registry.example/trainer", "digest": DIGEST},
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 2,
        "watchNamespaces": [*TEAMS],
        "crds": {"keep": False},
        "nodeRing": {"enabled": True},
        "jobNetworkPolicy": {"enabled": True},
        "jobPodMonitor": {"enabled": True},
        "serviceMonitor": {"enabled": True},
        "dashboards": {"enabled": True},
        "alerts": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "podDisruptionBudget": {"enabled": True},
        "serviceAccount": {"name": "other", "annotations": {"example.org/a": "b"}},
        "canary": {"enabled": True, "namespace": "team-a"},
        "logLevel": "debug",
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
    },
}


def helm(*arguments: str, values: dict[str, Any] | None = None, server: ApiServer | None = None) -> str:
    """Run Helm with values; RuntimeError with what it wrote when it fails."""
    built = KUBE.parent / "helm"
    program = str(built) if built.exists() else shutil.which("helm")
    assert program is not None, f"{built} is not there; run make test-cluster, which builds it"
    command = [program, *arguments]
    if values is not None:
        command.append("--values=-")
    if server is not None:
        command.append(f"--kubeconfig={server.kubeconfig}")
    given = yaml.safe_dump(values) if values is not None else None
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, input=given, env=environment
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a rendering."""
    where = ("--namespace", SYSTEM, "--kube-version", "v1.36.3")
    text = helm("template", "tracerl", str(CHART), *where, values=values)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, Loader=loader) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def operator(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod template of the Deployment."""
    (deployment,) = of_kind(documents, "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


def arguments(documents: list[dict[str, Any]]) -> list[str]:
    found: list[str] = operator(documents)["spec"]["containers"][0]["args"]
    return found


# -- without a server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RENDERINGS)
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    where = ("--strict", "--kube-version", "v1.36.3", "--namespace", SYSTEM)
    helm("lint", str(CHART), *where, values=RENDERINGS[name])


def test_arguments_of_the_default_installation() -> None:
    assert arguments(render({})) == [
        "--rollout-image=localhost/tracerl-rollout:0.1.0",
        "--trainer-image=localhost/tracerl-trainer:0.1.0",
        "--peering=tracerl-operator",
        "--listen=0.0.0.0:8080",
        "--log-level=info",
    ]


def test_arguments_of_every_value() -> None:
    documents = render(RENDERINGS["everything"])
    container = operator(documents)["spec"]["containers"][0]
    assert container["image"] == f"registry.example:5000/a/operator:1@{DIGEST}"
    assert container["args"] == [
        "--rollout-image=registry.example/rollout:2",
        f"--trainer-image=registry.example/trainer:0.1.0@{DIGEST}",
        "--namespace=team-a",
        "--namespace=team-b",
        "--node-ring",
        "--network-policy",
        "--pod-monitor",
        "--peering=tracerl-operator",
        "--listen=0.0.0.0:8080",
        "--log-level=debug",
    ]
    labelled = arguments(render(RENDERINGS["monitoring"]))
    assert [a for a in labelled if "label" in a] == [
        "--pod-monitor-label=release=prometheus",
        "--pod-monitor-label=team=a",
    ]


def test_an_operator_stands_by_until_the_old_one_gives_up() -> None:
    for name in ("default", "standby"):
        (deployment,) = of_kind(render(RENDERINGS[name]), "Deployment")
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    documents = render({})
    (lease,) = of_kind(documents, "Lease")
    assert lease["metadata"] | {"labels": None} == {
        "name": "tracerl-operator",
        "namespace": SYSTEM,
        "labels": None,
    }
    assert f"--peering={lease['metadata']['name']}" in arguments(documents)
    fields = {e["name"]: e["valueFrom"] for e in operator(documents)["spec"]["containers"][0]["env"]}
    assert fields["POD_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}


def test_definition_is_the_committed_one() -> None:
    (rendered,) = of_kind(render({}), "CustomResourceDefinition")
    committed = yaml.safe_load(DEFINITION.read_text())
    assert rendered["spec"] == committed["spec"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert of_kind(render(RENDERINGS["least"]), "CustomResourceDefinition") == []
    (dropped,) = of_kind(render(RENDERINGS["everything"]), "CustomResourceDefinition")
    assert "annotations" not in dropped["metadata"]


def canary_pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod template of the CronJob."""
    (cron,) = of_kind(documents, "CronJob")
    template: dict[str, Any] = cron["spec"]["jobTemplate"]["spec"]["template"]
    return template


def test_there_is_no_canary_unless_it_is_asked_for() -> None:
    documents = render({})
    assert not of_kind(documents, "CronJob")
    assert not [one for one in documents if "canary" in one["metadata"]["name"]]


def test_a_canary_trains_the_example_and_says_so_in_its_log() -> None:
    documents = render(RENDERINGS["canary"])
    (config,) = of_kind(documents, "ConfigMap")
    example = (CHART.parents[1] / "jobs/examples/canary.yaml").read_text()
    assert yaml.safe_load(config["data"]["job.yaml"]) == yaml.safe_load(example)
    (cron,) = of_kind(documents, "CronJob")
    assert (cron["metadata"]["name"], cron["metadata"]["namespace"]) == ("tracerl-canary", SYSTEM)
    assert cron["spec"]["schedule"] == "17 3 * * *"
    assert "timeZone" not in cron["spec"]
    (container,) = canary_pod(documents)["spec"]["containers"]
    assert container["image"] == operator(documents)["spec"]["containers"][0]["image"]
    words = [*container["command"], *container["args"]]
    assert words[:4] == ["python", "-P", "-m", "tracerl"]
    options = _parser().parse_args(words[4:])
    assert (options.namespace, options.timeout, options.junit) == (SYSTEM, 3600, Path("-"))
    (mount,) = container["volumeMounts"]
    assert Path(mount["mountPath"], *config["data"]) == options.job


def test_a_canary_of_a_team_is_where_the_team_is() -> None:
    documents = render(RENDERINGS["canary of a team"])
    found = [one for one in documents if one["metadata"]["name"] == "tracerl-canary"]
    kinds = ["ConfigMap", "CronJob", "Role", "RoleBinding", "ServiceAccount"]
    assert sorted(one["kind"] for one in found) == kinds
    assert {one["metadata"]["namespace"] for one in found} == {"team-b"}
    (cron,) = of_kind(documents, "CronJob")
    assert (cron["spec"]["schedule"], cron["spec"]["timeZone"]) == ("*/30 * * * *", "Etc/UTC")
    # Longer than it waits for the job, so that the verdict is its own.
    assert cron["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 900 + 600
    pod = canary_pod(documents)["spec"]
    assert pod["containers"][0]["args"] == [
        "--namespace=team-b",
        "--timeout=900s",
        "--set=spec.rollout.image=registry.example/canary:1",
        "--set=spec.expect.maxGap=0.5",
        "--junit=/reports/$(POD_NAME).xml",
    ]
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": "reports"}]
    (config,) = [one for one in found if one["kind"] == "ConfigMap"]
    assert yaml.safe_load(config["data"]["job.yaml"])["metadata"]["name"] == "ours"


def test_nothing_that_selects_the_operators_pods_selects_the_canarys() -> None:
    documents = render(RENDERINGS["everything"])
    labels = canary_pod(documents)["metadata"]["labels"]
    selectors = [one["spec"]["selector"] for one in of_kind(documents, "Service")]
    for kind in ("PodDisruptionBudget", "ServiceMonitor", "Deployment"):
        selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(documents, kind)]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(documents, "NetworkPolicy")]
    assert len(selectors) >= 5
    assert not [one for one in selectors if one.items() <= labels.items()]


def rules(documents: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    for role in of_kind(documents, kind):
        yield from role["rules"]


@pytest.mark.parametrize("name", RENDERINGS)
def test_rights_are_named_one_by_one(name: str) -> None:
    documents = render(RENDERINGS[name])
    for rule in [*rules(documents, "ClusterRole"), *rules(documents, "Role")]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"escalate", "bind", "impersonate"} & {*rule["verbs"]}
        assert not {"pods/exec", "nodes", "clusterroles"} & {*rule["resources"]}


def test_release_for_namespaces_needs_no_right_to_the_cluster() -> None:
    documents = render({**RENDERINGS["namespaces"], "crds": {"install": False}})
    assert {document["metadata"].get("namespace") for document in documents} == {SYSTEM, *TEAMS}
    rights = {role["metadata"]["namespace"]: role["rules"] for role in of_kind(documents, "Role")}
    assert {right for rule in rights[SYSTEM] for right in rule["resources"]} == {"leases"}


def test_alerts_are_the_committed_ones() -> None:
    assert of_kind(render({}), "PrometheusRule") == []
    (made,) = of_kind(render(RENDERINGS["everything"]), "PrometheusRule")
    assert made["spec"] == alert_rules(SYSTEM)


def test_thresholds_and_addresses_are_values() -> None:
    (made,) = of_kind(render(RENDERINGS["monitoring"]), "PrometheusRule")
    assert made["metadata"]["labels"]["release"] == "prometheus"
    (expected,) = alert_rules(SYSTEM)["groups"]
    for rule in expected["rules"]:
        page = f"runbooks/{rule['alert']}"
        rule["annotations"]["runbook_url"] = f"https://docs.example.org/{page}.html"
        if rule["alert"] == "TraceRLOverheadAboveBudget":
            rule["expr"] = rule["expr"].replace("> 0.1", "> 0.03")
        if rule["alert"] == "TraceRLJobStuck":
            rule["for"] = "180m"
            text = rule["annotations"]["description"]
            rule["annotations"]["description"] = text.replace("60 minutes", "180 minutes")
    assert made["spec"]["groups"] == [expected]


@pytest.mark.parametrize(
    ("name", "link"),
    [("monitoring", r"[\1](https://docs.example.org/\2.html)"), ("everything", r"\1: docs/\2.md")],
)
def test_dashboards_are_the_committed_ones(name: str, link: str) -> None:
    """With addresses where links go, or the paths of the pages in their place."""
    assert of_kind(render({}), "ConfigMap") == []
    made = {}
    for one in of_kind(render(RENDERINGS[name]), "ConfigMap"):
        # The canary has one, too.
        if one["metadata"]["labels"].get("grafana_dashboard") == "1":
            ((file, text),) = one["data"].items()
            made[file] = json.loads(text)
    expected = {
        f"tracerl-{board}.json": re.sub(r"\[([^][]+)\]\(@docs:([^@]+)@\)", link, json.dumps(content))
        for board, content in boards().items()
    }
    assert made == {file: json.loads(text) for file, text in expected.items()}


WRONG = {
    "nodering: {enabled: true}": "additional properties 'nodering' not allowed",
    "nodeRing: true": "at '/nodeRing': got boolean, want object",
    "nodeRing: {enabled: 'yes'}": "at '/nodeRing/enabled': got string, want boolean",
    "logLevel: verbose": "value must be one of 'debug', 'info', 'warning', 'error'",
    "replicas: '2'": "at '/replicas': got string, want integer",
    "watchNamespaces: team-a": "at '/watchNamespaces': got string, want array",
    "watchNamespaces: [a, a]": "items at 0 and 1 are equal",
    "watchNamespaces: [Team_A]": "'Team_A' does not match pattern",
    "image: {digest: abc}": "at '/image/digest': 'abc' does not match pattern",
    "image: {repository: ''}": "at '/image/repository'",
    "image: {repository: 'a/b:1'}": "a/b:1 is more than the repository of an image: write the part after",
    "image: {pullPolicy: never}": "value must be one of 'Always', 'IfNotPresent', 'Never'",
    "alerts: {thresholds: {overhead: 1}}": "additional properties 'overhead' not allowed",
    "alerts: {thresholds: {ringShare: 95}}": "at '/alerts/thresholds/ringShare': maximum: got 95, want 1",
    "alerts: {thresholds: {gapGrowth: '2'}}": "at '/alerts/thresholds/gapGrowth': got string, want number",
    "docsUrl: https://docs.example.org": "does not match pattern",
    "jobPodMonitor: {labels: {a: 1}}": "at '/jobPodMonitor/labels/a': got number, want string",
    "imagePullSecrets: [registry]": "at '/imagePullSecrets/0': got string, want object",
    "serviceAccount: {create: false}": "serviceAccount.name is needed where serviceAccount.create is false",
    "resources: {cpu: 1}": "additional properties 'cpu' not allowed",
    "canary: {schedule: ''}": "at '/canary/schedule'",
    "canary: {enabled: true}\nwatchNamespaces: [a]": "canary.namespace tracerl-system is not one of",
    "canary: {set: [spec.seed]}": "'spec.seed' does not match pattern",
    "env: {A: b}": "at '/env': got object, want array",
}


@pytest.mark.parametrize("values", WRONG)
def test_wrong_values_are_refused_with_the_place(values: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        render(yaml.safe_load(values))
    assert WRONG[values] in str(refused.value)


# -- on a server ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with the kinds and namespaces that an installation finds, and nothing of this chart."""
    others = [definition(kind) for kind in ("JobSet", "PodMonitor", "ServiceMonitor", "PrometheusRule")]
    with ApiServer(tmp_path_factory.mktemp("api-server")) as server:
        for other in others:
            server.define(other)
        for namespace in (SYSTEM, *TEAMS):
            # No controller makes the account without which no pod is taken.
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
            account = {"metadata": {"name": "default"}}
            server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
        yield server


@pytest.fixture
def install(api: ApiServer) -> Iterator[Any]:
    """Install the chart, by default as it is committed; all of it is gone after the test, jobs too."""
    releases = []

    def run(
        values: dict[str, Any], *, release: str = "tracerl", namespace: str = SYSTEM, chart: Path = CHART
    ) -> str:
        output = helm("install", release, str(chart), "--namespace", namespace, values=values, server=api)
        releases.append((release, namespace))
        return output

    yield run
    for namespace in TEAMS:
        where = f"/apis/tracerl.dev/v1alpha1/namespaces/{namespace}/tracerljobs"
        with contextlib.suppress(RefusedError):  # the definition has gone
            for left in api.request("GET", where)["items"]:
                change = {"metadata": {"finalizers": None}}
                path = f"{where}/{left['metadata']['name']}"
                api.request("PATCH", path, change, kind="merge-patch+json")
    for release, namespace in releases:
        helm("uninstall", release, "--ignore-not-found", "--namespace", namespace, server=api)
    api.kubectl("delete", "crd", "--ignore-not-found", "tracerljobs.tracerl.dev")


def apply(server: ApiServer, documents: list[dict[str, Any]], *options: str) -> str:
    """Apply on the server's side, refusing fields that are not known."""
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    how = ("--server-side", "--validate=strict", *options)
    return server.kubectl("apply", "--filename=-", *how, given=given)


@pytest.mark.parametrize("name", RENDERINGS)
def test_every_object_is_taken(api: ApiServer, install: Any, name: str) -> None:
    """Twice: by a dry run that refuses unknown fields, and by Helm."""
    values = RENDERINGS[name]
    documents = render(values)
    answer = apply(api, documents, "--dry-run=server")
    assert answer.count("(server dry run)") == len(documents)
    install(values)
    if "canary" in values:
        (cron,) = of_kind(documents, "CronJob")
        pod = {"apiVersion": "v1", "kind": "Pod", **canary_pod(documents)}
        pod["metadata"]["name"] = "canary"
        where = f"/api/v1/namespaces/{cron['metadata']['namespace']}/pods"
        api.request("POST", f"{where}?dryRun=All&fieldValidation=Strict", pod)
    pod = operator(documents)
    if "name" in values.get("serviceAccount", {}) and not values["serviceAccount"].get("create", True):
        pod["spec"]["serviceAccountName"] = "default"
    pod["metadata"]["name"] = "operator"
    where = f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All&fieldValidation=Strict"
    api.request("POST", where, {"apiVersion": "v1", "kind": "Pod", **pod})


def test_notes_say_what_to_do_next(install: Any) -> None:
    notes = install({})
    assert "JobSet" not in notes
    assert "kubectl -n tracerl-system rollout status deployment/tracerl-operator\n" in notes
    assert "kubectl apply -f jobs/examples/canary.yaml\n" in notes
    assert "nodeRing" not in notes


def test_notes_warn_of_rings_on_nodes(install: Any) -> None:
    notes = install({"watchNamespaces": [*TEAMS], "nodeRing": {"enabled": True}})
    assert "looks after TraceRLJobs in the namespaces team-a, team-b.\n" in notes
    assert "kubectl -n team-a apply -f" in notes
    assert "uninstall it or set nodeRing.enabled to false, delete these jobs" in notes


def test_notes_say_that_jobset_is_missing(api: ApiServer, install: Any) -> None:
    api.kubectl("delete", "crd", "jobsets.jobset.x-k8s.io")
    deadline = time.monotonic() + 30
    while "jobset.x-k8s.io" in api.request("GET", "/apis", raw=True):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    try:
        assert "JobSet is not in this cluster. No job starts until it is" in install({})
    finally:
        api.define(definition("JobSet"))


def job(server: ApiServer, namespace: str, name: str, spec: dict[str, Any]) -> tuple[TraceRLJob, str]:
    """Store a job, as its user does."""
    body = {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {"name": name},
        "spec": merged(SPEC, spec),
    }
    where = f"/apis/tracerl.dev/v1alpha1/namespaces/{namespace}/tracerljobs?fieldValidation=Strict"
    stored = server.request("POST", where, body)
    return TraceRLJob.model_validate(stored), stored["metadata"]["uid"]


JOBS: dict[str, dict[str, Any]] = {
    "pod": {},
    "apart": APART | nodes(2),
    "node": NODE | nodes(2),
    "queued": {"placement": {"queue": "lq"}},
}
INSTALLATION = Installation(
    "example.org/rollout:1", "example.org/trainer:1", node_ring=True, pod_monitor=True
)


@pytest.mark.parametrize(("name", "team"), [("rings", "team-a"), ("everything", "team-b")])
def test_operator_may_do_what_jobs_need(api: ApiServer, install: Any, name: str, team: str) -> None:
    """In a namespace of its own: nobody collects what the jobs of the other one owned."""
    values = merged(RENDERINGS[name], {"jobPodMonitor": {"enabled": True}, "serviceAccount": {"name": "op"}})
    install(values)
    api.kubectl("label", "ns", team, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    let_in(api, "op", team)
    me = ("--as=system:serviceaccount:tracerl-system:op", "--field-manager=tracerl.dev/operator")
    installation = replace(INSTALLATION, network_policy=name == "everything")
    namespaced = "-n", team, *me[:1]
    for shape, spec in JOBS.items():
        parsed, uid = job(api, team, shape, spec)
        served = frozenset({"JobSet", "PodMonitor"})
        documents = wanted(parsed, uid, installation, served=served, token=TOKEN, restarts=0)
        if shape == "node":
            documents.append(cleaning_pod(shape, team, uid, "node-1", "example.org/rollout:1"))
            # kubectl asks for a spec, which the server does not: it is there.
            apply(api, [job_marks(shape, team, uid, ["node-1"])], *me, "--validate=ignore")
        # Where a thing is new, and where it is not.
        for _ in range(2):
            apply(api, documents, *me, "--force-conflicts")
        if shape == "node":
            apply(api, [job_marks(shape, team, uid, None)], *me, "--validate=ignore")
            (pod,) = api.kubectl("get", "pods", "-o", "name", *namespaced).split()
            api.kubectl("delete", pod, "--wait=false", *namespaced)
        api.kubectl("delete", "jobset", "--all", "--wait=false", *namespaced)
        api.kubectl("delete", "trj", shape, *namespaced)
    api.kubectl("delete", "pods", "--all", "--force", "-n", team)


def may(server: ApiServer, account: str, verb: str, what: str, namespace: str = "") -> bool:
    """Whether an account of the release's namespace may do something to "RESOURCE[/PART][.GROUP][ NAME]"."""
    what, _, name = what.partition(" ")
    resource, _, group = what.partition(".")
    resource, _, part = resource.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": part,
        "name": name,
        "namespace": namespace,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"]
    user = f"system:serviceaccount:{SYSTEM}:{account}"
    body = {"spec": {"user": user, "groups": groups, "resourceAttributes": attributes}}
    review = server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    allowed: bool = review["status"]["allowed"]
    return allowed


def let_in(server: ApiServer, account: str, namespace: str) -> None:
    """Wait until the server knows what was granted: it reads roles and policies in its own time."""
    eventually(lambda: may(server, account, "create", "configmaps", namespace), 60)


NEEDED = [
    *((verb, "tracerljobs.tracerl.dev") for verb in ("get", "list", "watch", "patch", "delete")),
    ("patch", "tracerljobs/status.tracerl.dev"),
    ("update", "tracerljobs/finalizers.tracerl.dev"),
    *((verb, "jobsets.jobset.x-k8s.io") for verb in ("get", "list", "watch", "create", "patch", "delete")),
    *((verb, "configmaps") for verb in ("get", "create", "patch")),
    *((verb, "secrets") for verb in ("get", "create", "patch")),
    *((verb, "pods") for verb in ("get", "list", "watch")),
    *((verb, "computedomains.resource.nvidia.com") for verb in ("create", "patch")),
    ("list", "events"),
    ("list", "workloads.kueue.x-k8s.io"),
    ("create", "events.events.k8s.io"),
    ("get", "namespaces"),
]
REFUSED = [
    ("create", "tracerljobs.tracerl.dev"),
    ("list", "secrets"),
    ("watch", "secrets"),
    ("delete", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("create", "serviceaccounts/token"),
    ("escalate", "roles.rbac.authorization.k8s.io"),
    ("bind", "roles.rbac.authorization.k8s.io"),
    ("create", "clusterroles.rbac.authorization.k8s.io"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("create", "podmonitors.monitoring.coreos.com"),
    ("create", "networkpolicies.networking.k8s.io"),
    ("create", "deployments.apps"),
    ("create", "jobs.batch"),
    ("get", "nodes"),
    ("list", "nodes"),
    ("get", "leases.coordination.k8s.io"),
    ("list", "namespaces"),
    ("patch", "namespaces"),
    ("list", "customresourcedefinitions.apiextensions.k8s.io"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
    ("impersonate", "users"),
]
CANARYS = [(verb, "tracerljobs.tracerl.dev") for verb in ("create", "get", "list", "watch", "delete")]
NOT_CANARYS = [
    *((verb, "tracerljobs.tracerl.dev") for verb in ("update", "patch", "deletecollection")),
    *((verb, "tracerljobs/status.tracerl.dev") for verb in ("update", "patch")),
    *((verb, what) for verb in ("get", "list", "create") for what in ("secrets", "pods", "configmaps")),
    ("get", "pods/log"),
    ("create", "pods/exec"),
    ("create", "serviceaccounts/token"),
    ("create", "jobs.batch"),
    ("create", "roles.rbac.authorization.k8s.io"),
]
OPTIONAL = {
    "rings": [("create", "pods"), ("delete", "pods")],
    "monitoring": [("create", "podmonitors.monitoring.coreos.com")],
}


def test_rights_of_the_canary(api: ApiServer, install: Any) -> None:
    install(RENDERINGS["canary"])
    account = "tracerl-canary"
    eventually(lambda: may(api, account, "create", CANARYS[0][1], SYSTEM), 60)
    assert [right for right in CANARYS if not may(api, account, *right, SYSTEM)] == []
    assert [right for right in NOT_CANARYS if may(api, account, *right, SYSTEM)] == []
    assert [right for right in CANARYS if may(api, account, *right, TEAMS[0])] == []


def test_rights_of_the_default_installation(api: ApiServer, install: Any) -> None:
    install({})
    account = "tracerl-operator"
    let_in(api, account, "team-a")
    assert [one for one in NEEDED if not may(api, account, *one, "team-a")] == []
    assert [one for one in REFUSED if may(api, account, *one, "team-a")] == []
    lease = "leases.coordination.k8s.io"
    assert may(api, account, "update", f"{lease} tracerl-operator", SYSTEM)
    assert not may(api, account, "update", f"{lease} another", SYSTEM)


@pytest.mark.parametrize("name", OPTIONAL)
def test_rights_of_what_is_switched_on(api: ApiServer, install: Any, name: str) -> None:
    install(RENDERINGS[name])
    let_in(api, "tracerl-operator", "team-a")
    given = [one for one in REFUSED if may(api, "tracerl-operator", *one, "team-a")]
    assert given == OPTIONAL[name]


def test_rights_end_at_the_watched_namespaces(api: ApiServer, install: Any) -> None:
    install(RENDERINGS["namespaces"])
    account = "tracerl-operator"
    for team in TEAMS:
        let_in(api, account, team)
        assert [one for one in NEEDED if not may(api, account, *one, team)] == []
        assert [one for one in REFUSED if may(api, account, *one, team)] == []
    for namespace in ("default", "kube-system", SYSTEM, ""):
        assert [one for one in NEEDED if may(api, account, *one, namespace)] == []


def test_operator_cannot_grant_what_it_has_not(api: ApiServer, install: Any) -> None:
    install({})
    let_in(api, "tracerl-operator", "team-a")
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "more", "namespace": "team-a"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}],
    }
    me = "--as=system:serviceaccount:tracerl-system:tracerl-operator"
    with pytest.raises(RuntimeError, match="attempting to grant RBAC permissions not currently held"):
        apply(api, [role], me)


FOREIGN: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Secret", "stringData": {"a": "mine"}},
    {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "mine"}},
    {"apiVersion": "v1", "kind": "ServiceAccount"},
    {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": []},
    {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": {"replicatedJobs": []}},
]
OWNED = {
    "metadata": {
        "ownerReferences": [
            {
                "apiVersion": "tracerl.dev/v1alpha1",
                "kind": "TraceRLJob",
                "name": "a",
                "uid": "u",
                "controller": True,
            }
        ]
    }
}
NOT_OURS = "writes nothing but what a TraceRLJob owns"


def test_operator_of_the_whole_cluster_writes_nothing_that_no_job_owns(api: ApiServer, install: Any) -> None:
    """RBAC lets it; the admission policy does not: neither change, nor make, nor adopt, nor delete."""
    install(RENDERINGS["rings"])
    me = (
        "--as=system:serviceaccount:tracerl-system:tracerl-operator",
        "--field-manager=tracerl.dev/operator",
    )
    named = [merged(each, {"metadata": {"name": "theirs", "namespace": "team-a"}}) for each in FOREIGN]

    def refused(document: dict[str, Any]) -> bool:
        try:
            apply(api, [document], *me, "--force-conflicts", "--dry-run=server")
        except RuntimeError as error:
            return NOT_OURS in str(error)
        return False

    let_in(api, "tracerl-operator", "team-a")
    eventually(lambda: refused(named[0]), 60)
    assert [each["kind"] for each in named if not refused(each)] == []
    apply(api, named)
    try:
        labelled = [merged(each, {"metadata": {"labels": {"a": "b"}}}) for each in named]
        assert [each["kind"] for each in labelled if not refused(each)] == []
        # The others are refused for another reason on this server: who may not delete them may not own them.
        assert refused(merged(named[-1], OWNED))
        with pytest.raises(RuntimeError, match=NOT_OURS):
            api.kubectl("delete", "jobset", "theirs", "-n", "team-a", me[0])
        # Only the operator is bound by it.
        apply(api, labelled)
    finally:
        for each in named:
            api.kubectl("delete", each["kind"], "theirs", "-n", "team-a", "--wait=false")


def test_upgrade_brings_the_new_definition_and_keeps_jobs(
    api: ApiServer, install: Any, tmp_path: Path
) -> None:
    older = tmp_path / "tracerl"
    shutil.copytree(CHART, older)
    old = yaml.safe_load(DEFINITION.read_text())
    version = old["spec"]["versions"][0]
    column = version["additionalPrinterColumns"].pop(0)
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    steps = spec["algorithm"]["properties"]["steps"].pop("description")
    (older / "files/tracerljobs.yaml").write_text(json.dumps(old))
    install({}, chart=older)
    job(api, "team-a", "mine", {})
    helm("upgrade", "tracerl", str(CHART), "--namespace", SYSTEM, server=api)
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/tracerljobs.tracerl.dev"
    (now,) = api.request("GET", where)["spec"]["versions"]
    assert now["additionalPrinterColumns"][0]["name"] == column["name"]
    spec = now["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert spec["algorithm"]["properties"]["steps"]["description"] == steps
    assert "mine" in api.kubectl("get", "trj", "-n", "team-a", "-o", "name")


def made(server: ApiServer) -> set[str]:
    """What is there of the release, by kind and name."""
    kinds = "deploy,sa,cm,secret,svc,role,rolebinding,netpol,pdb,lease,crd,clusterrole,clusterrolebinding"
    kinds += ",validatingadmissionpolicy,validatingadmissionpolicybinding"
    label = "app.kubernetes.io/part-of=tracerl"
    return {*server.kubectl("get", kinds, "-A", f"--selector={label}", "-o", "name").split()}


def test_uninstalling_leaves_definition_and_jobs_and_installing_takes_them_over(
    api: ApiServer, install: Any
) -> None:
    install(RENDERINGS["standby"])
    job(api, "team-a", "mine", {})
    assert len(made(api)) > 5
    helm("uninstall", "tracerl", "--namespace", SYSTEM, server=api)
    assert made(api) == {"customresourcedefinition.apiextensions.k8s.io/tracerljobs.tracerl.dev"}
    assert "mine" in api.kubectl("get", "trj", "-n", "team-a", "-o", "name")
    install({})
    assert "mine" in api.kubectl("get", "trj", "-n", "team-a", "-o", "name")


def test_uninstalling_takes_everything_where_nothing_is_kept(api: ApiServer, install: Any) -> None:
    install({"crds": {"keep": False}})
    helm("uninstall", "tracerl", "--wait", "--namespace", SYSTEM, server=api)
    assert made(api) == set()


def test_two_releases_for_the_same_namespaces_are_refused(api: ApiServer, install: Any) -> None:
    install({})
    with pytest.raises(RuntimeError, match=r"CustomResourceDefinition .* exists and cannot be imported"):
        install({}, release="second", namespace="team-b")
    with pytest.raises(RuntimeError, match=r"ClusterRole .* exists and cannot be imported"):
        install({"crds": {"install": False}}, release="second", namespace="team-b")


def test_two_releases_for_one_namespace_are_refused(api: ApiServer, install: Any) -> None:
    install({"watchNamespaces": [*TEAMS]})
    other = {"watchNamespaces": ["team-a"], "crds": {"install": False}}
    with pytest.raises(RuntimeError, match=r"Role .* in namespace \"team-a\" exists and cannot be imported"):
        install(other, release="second", namespace="team-a")


def test_two_releases_for_different_namespaces_live_together(api: ApiServer, install: Any) -> None:
    install({"watchNamespaces": ["team-a"]})
    other = {"watchNamespaces": ["team-b"], "crds": {"install": False}}
    install(other, namespace="team-b")
    assert may(api, "tracerl-operator", "list", "tracerljobs.tracerl.dev", "team-a")
    assert not may(api, "tracerl-operator", "list", "tracerljobs.tracerl.dev", "team-b")


def test_definition_applied_by_hand_is_taken_over_when_asked(api: ApiServer, install: Any) -> None:
    api.define(yaml.safe_load(DEFINITION.read_text()))
    with pytest.raises(RuntimeError, match="cannot be imported"):
        install({})
    install({"crds": {"install": False}})
    how = ("--take-ownership", "--reset-values", "--namespace", SYSTEM)
    helm("upgrade", "tracerl", str(CHART), *how, server=api)
    assert "customresourcedefinition.apiextensions.k8s.io/tracerljobs.tracerl.dev" in made(api)
