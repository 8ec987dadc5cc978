"""What a job gets, checked against rules that are written out here and not taken from the builders."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from small_cluster import ALL_KINDS, APART, INSTALLATION, NODE, TOKEN, UID, job, merged, nodes

from tracerl.api.job import TraceRLJob, quantity_bytes
from tracerl.api.load import check
from tracerl.api.pods import REWARD_DIRECTORY, weights_by_disk
from tracerl.api.resolved import ResolvedJob
from tracerl_operator.objects import cleaning_pod, wanted
from tracerl_operator.resolve import output_place, resolve

GPUS = {"rollout": {"gpusPerNode": 2}, "trainer": {"gpusPerNode": 2, "parallelism": {"tensor": 2}}}
SHAPES: dict[str, dict[str, Any]] = {
    "pod": {},
    "pod x 3": nodes(3),
    "node": NODE | nodes(2),
    "apart": APART | nodes(2),
    "gpus": GPUS,
    "gpus on nodes": GPUS | NODE,
    "objects only": {
        "transport": {"onlyObject": True, "object": {"uri": "s3://bucket/p", "secretName": "s3"}}
    },
    "spill": {"transport": {"spillPath": "/spill", "spillLimit": "1Gi"}},
    "own reward": {
        "task": {
            "name": None,
            "uri": "s3://bucket/t.jsonl",
            "reward": "m:f",
            "source": {"configMap": "rewards"},
        }
    },
    "no output": {"output": None},
    "directory": {"output": {"uri": "file:///data/run"}},
}


def build(name: str = "canary", **spec: Any) -> list[dict[str, Any]]:
    installation = replace(INSTALLATION, pod_monitor=True, pod_monitor_labels={"release": "prometheus"})
    parsed = TraceRLJob.model_validate(job(name, **spec))
    return wanted(parsed, UID, installation, served=ALL_KINDS, token=TOKEN, restarts=0)


def one(objects: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    return found


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    jobs = one(objects, "JobSet")["spec"]["replicatedJobs"]
    return {each["name"]: each["template"]["spec"]["template"] for each in jobs}


def containers(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = template["spec"]
    return {c["name"]: c for c in (*spec.get("initContainers", []), *spec["containers"])}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def volume(template: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((v for v in template["spec"]["volumes"] if v["name"] == name), None)


# -- Pod Security, level Restricted, from kubernetes.io/docs/concepts/security/pod-security-standards ------

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def broken_rules(pod: dict[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for each in spec.get("volumes", []):
        if set(each) - {"name"} - _VOLUMES:
            yield f"volume {each['name']}"
    whole = spec.get("securityContext", {})
    if whole.get("sysctls"):
        yield "sysctls"
    for each in (*spec.get("initContainers", []), *spec["containers"]):
        own = each.get("securityContext", {})
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield f"{each['name']} privileges"
        if (own.get("runAsNonRoot", whole.get("runAsNonRoot"))) is not True:
            yield f"{each['name']} runAsNonRoot"
        if own.get("runAsUser", whole.get("runAsUser")) == 0:
            yield f"{each['name']} runAsUser"
        profile = own.get("seccompProfile", whole.get("seccompProfile")) or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{each['name']} seccomp"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield f"{each['name']} keeps capabilities"
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{each['name']} adds capabilities"
        if any("hostPort" in port for port in each.get("ports", [])):
            yield f"{each['name']} hostPort"


@pytest.mark.parametrize("shape", SHAPES)
def test_pods_are_restricted(shape: str) -> None:
    for template in templates(build(**SHAPES[shape])).values():
        allowed = ["volume ring"] if "node" in shape else []
        assert list(broken_rules(template)) == allowed
        spec = template["spec"]
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["runAsGroup"] == 65532
        assert spec["securityContext"]["fsGroup"] == 65532
        for container in containers(template).values():
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            names = {volume["name"] for volume in spec["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            assert mounts(container)["/tmp"]["name"] == "tmp"


def test_the_rules_above_find_what_they_forbid() -> None:
    good = templates(build())["node"]
    for change in (
        {"hostIPC": True},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"securityContext": {}},
        {"containers": [{"name": "x", "securityContext": {"allowPrivilegeEscalation": False}}]},
    ):
        assert list(broken_rules({"spec": {**good["spec"], **change}}))


# -- who is where -----------------------------------------------------------------------------------------


def test_one_pod_has_the_store_and_the_rollout_beside_the_trainer() -> None:
    objects = build(**nodes(3))
    (template,) = templates(objects).values()
    assert [c["name"] for c in template["spec"]["initContainers"]] == ["store", "rollout"]
    assert [c["restartPolicy"] for c in template["spec"]["initContainers"]] == ["Always", "Always"]
    assert [c["name"] for c in template["spec"]["containers"]] == ["trainer"]
    assert "restartPolicy" not in template["spec"]["containers"][0]
    jobset = one(objects, "JobSet")["spec"]
    (indexed,) = [each["template"]["spec"] for each in jobset["replicatedJobs"]]
    assert (indexed["completionMode"], indexed["completions"], indexed["parallelism"]) == ("Indexed", 3, 3)
    assert jobset["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}


@pytest.mark.parametrize("shape", ["node", "apart"])
def test_roles_apart_have_a_job_each(shape: str) -> None:
    objects = build(**SHAPES[shape])
    found = templates(objects)
    assert [[*containers(template)] for template in found.values()] == [["store", "rollout"], ["trainer"]]
    assert found["rollout"]["metadata"]["labels"]["tracerl.dev/role"] == "rollout"
    assert found["trainer"]["metadata"]["labels"]["tracerl.dev/role"] == "trainer"
    assert one(objects, "JobSet")["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    # A Job with a pod failure policy needs Never; a rollout is started again beside its store.
    assert found["trainer"]["spec"]["restartPolicy"] == "Never"
    assert found["rollout"]["spec"]["restartPolicy"] == "OnFailure"


def test_a_pair_shares_a_node_and_a_role_does_not() -> None:
    found = templates(build(**SHAPES["node"]))
    host = "kubernetes.io/hostname"
    for role, template in found.items():
        (apart,) = template["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert apart["topologyKey"] == host
        assert apart["labelSelector"]["matchLabels"] == {
            "jobset.sigs.k8s.io/jobset-name": "canary",
            "jobset.sigs.k8s.io/replicatedjob-name": role,
        }
    (pair,) = found["trainer"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert pair["topologyKey"] == host
    assert pair["matchLabelKeys"] == ["batch.kubernetes.io/job-completion-index"]
    # A key in both places is taken by JobSet and Job, and then every pod is refused.
    assert not set(pair["matchLabelKeys"]) & set(pair["labelSelector"]["matchLabels"])
    assert pair["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/replicatedjob-name"] == "rollout"
    assert "podAffinity" not in found["rollout"]["spec"]["affinity"]
    assert "podAffinity" not in templates(build(**APART))["trainer"]["spec"]["affinity"]


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", ["256Mi", "3Gi"])
@pytest.mark.parametrize("limit", ["4Gi", "64Gi"])
def test_ring_and_shared_memory_are_apart_and_within_the_limits(ring: str, limit: str) -> None:
    resources = {"resources": {"limits": {"memory": limit}}}
    template = templates(build(rollout=resources, trainer=resources, transport={"ring": {"size": ring}}))[
        "node"
    ]
    found = containers(template)
    sizes = {}
    for name, path in (("ring", "/run/tracerl/ring"), ("shm", "/dev/shm")):
        directory = volume(template, name)
        assert directory is not None
        assert directory["emptyDir"]["medium"] == "Memory"
        sizes[name] = quantity_bytes(directory["emptyDir"]["sizeLimit"])
        for role in ("rollout", "trainer"):
            assert mounts(found[role])[path]["name"] == name
    # A ring, that of a killed store as long as others have it mapped, and a socket.
    assert sizes["ring"] > 2 * quantity_bytes(ring)
    # The store touches its ring first, so its container is charged for it.
    assert quantity_bytes(found["store"]["resources"]["limits"]["memory"]) > quantity_bytes(ring)
    limits = [quantity_bytes(c["resources"]["limits"]["memory"]) for c in found.values()]
    assert sum(sizes.values()) < sum(limits)
    assert sizes["shm"] <= quantity_bytes(limit)


@pytest.mark.parametrize(("rollout", "trainer"), [("2Gi", "64Gi"), ("64Gi", "2Gi")])
def test_shared_memory_is_within_the_limit_of_either_role(rollout: str, trainer: str) -> None:
    """Its pages are charged to whichever container touches them first."""
    spec = {
        role: {"resources": {"limits": {"memory": limit}}}
        for role, limit in (("rollout", rollout), ("trainer", trainer))
    }
    shm = volume(templates(build(**spec))["node"], "shm")
    assert shm is not None
    assert quantity_bytes(shm["emptyDir"]["sizeLimit"]) <= quantity_bytes("2Gi")


def test_the_ring_of_a_node_is_one_directory_of_its_shared_memory() -> None:
    for role, template in templates(build(**SHAPES["node"])).items():
        ring = volume(template, "ring")
        assert ring == {"name": "ring", "hostPath": {"path": "/dev/shm", "type": "Directory"}}
        for name, container in containers(template).items():
            mount = mounts(container)["/run/tracerl/ring"]
            assert mount["subPathExpr"] == "$(TRACERL_JOB_UID)", (role, name)
            assert {"name": "TRACERL_JOB_UID", "value": UID} in container["env"]


def test_apart_the_trainer_has_no_ring_and_with_objects_only_nobody_has() -> None:
    apart = templates(build(**APART))
    assert volume(apart["trainer"], "ring") is None
    assert volume(apart["rollout"], "ring") is not None
    only = templates(build(**SHAPES["objects only"]))["node"]
    assert volume(only, "ring") is None
    assert [*containers(only)] == ["rollout", "trainer"]


# -- access -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_trainer_reaches_the_api_and_only_its_progress(shape: str) -> None:
    objects = build(**SHAPES[shape])
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    for template in templates(objects).values():
        assert template["spec"]["automountServiceAccountToken"] is False
        for name, container in containers(template).items():
            assert (token in mounts(container)) == (name == "trainer")
        projected = volume(template, "api-access")
        assert (projected is None) == ("trainer" not in containers(template))
        assert ("serviceAccountName" in template["spec"]) == ("trainer" in containers(template))
    assert one(objects, "Role")["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["canary-progress"],
            "verbs": ["patch"],
        }
    ]
    binding = one(objects, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "canary-trainer", "namespace": "team"}]
    assert binding["roleRef"]["name"] == one(objects, "Role")["metadata"]["name"]
    assert "data" not in one(objects, "ConfigMap", "-progress")


def test_credentials_are_mounted_and_never_copied() -> None:
    objects = build(**SHAPES["objects only"])
    template = templates(objects)["node"]
    assert volume(template, "credentials") == {
        "name": "credentials",
        "secret": {"secretName": "s3", "defaultMode": 0o440},
    }
    for container in containers(template).values():
        assert mounts(container)["/etc/tracerl/credentials"]["readOnly"] is True
    assert [o["metadata"]["name"] for o in objects if o["kind"] == "Secret"] == ["canary-token"]


S3 = {"output": {"uri": "s3://bucket/runs", "secretName": "own", "endpointUrl": "http://minio:9000"}}
PLACES: list[tuple[dict[str, Any], str | None, str, str | None, dict[str, Any] | None]] = [
    # output, status.output, run directory, output in an object store, volume `run`
    (
        {"uri": "pvc://runs"},
        "pvc://runs/canary-6f1c2f9e",
        "/var/lib/tracerl/canary-6f1c2f9e",
        None,
        {"persistentVolumeClaim": {"claimName": "runs"}},
    ),
    (
        {"uri": "pvc://runs/team/a/"},
        "pvc://runs/team/a/canary-6f1c2f9e",
        "/var/lib/tracerl/team/a/canary-6f1c2f9e",
        None,
        {"persistentVolumeClaim": {"claimName": "runs"}},
    ),
    (
        {"uri": "s3://bucket/p"},
        "s3://bucket/p/canary-6f1c2f9e",
        "/var/lib/tracerl/canary-6f1c2f9e",
        "s3://bucket/p/canary-6f1c2f9e",
        {"emptyDir": {}},
    ),
    ({"uri": "file:///data"}, "file:///data/canary-6f1c2f9e", "/data/canary-6f1c2f9e", None, None),
    ({"uri": "file:///"}, "file:///canary-6f1c2f9e", "/canary-6f1c2f9e", None, None),
    ({}, None, "/var/lib/tracerl/canary-6f1c2f9e", None, {"emptyDir": {}}),
]


@pytest.mark.parametrize(("output", "place", "directory", "uri", "source"), PLACES)
def test_every_job_has_a_directory_of_its_own(
    output: Any, place: str | None, directory: str, uri: str | None, source: Any
) -> None:
    document = job()
    document["spec"]["output"] = output
    parsed = TraceRLJob.model_validate(document)
    resolved = resolve(parsed, UID)
    assert (output_place(parsed.spec, "canary", UID), str(resolved.run_dir)) == (place, directory)
    assert resolved.output_uri == uri
    objects = wanted(parsed, UID, INSTALLATION, served=ALL_KINDS, token=TOKEN, restarts=0)
    template = templates(objects)["node"]
    assert volume(template, "run") == (None if source is None else {"name": "run", **source})
    # The root of the volume: processes make the directories, which a subPath would make as root.
    run = mounts(containers(template)["trainer"]).get("/var/lib/tracerl")
    assert run == (None if source is None else {"name": "run", "mountPath": "/var/lib/tracerl"})


DISTRIBUTED = {"trainer": {"weightSync": "Distributed"}}
OBJECTS = {"transport": {"object": {"uri": "s3://bucket/p", "secretName": "s3"}}}
NEEDS: list[tuple[dict[str, Any], dict[str, set[str]]]] = [
    # What store, rollout and trainer mount of the run, both secrets and the cache; ! is to be read only.
    ({}, {"store": set(), "rollout": {"!run"}, "trainer": {"run", "cache"}}),  # weights travel by disk
    (DISTRIBUTED, {"store": set(), "rollout": set(), "trainer": {"run", "cache"}}),
    (APART, {"store": set(), "rollout": set(), "trainer": {"run", "cache"}}),
    (
        S3 | DISTRIBUTED,
        {"store": set(), "rollout": set(), "trainer": {"run", "cache", "!output-credentials"}},
    ),
    (
        OBJECTS | APART,  # which nobody uses
        {"store": set(), "rollout": set(), "trainer": {"run", "cache"}},
    ),
    (
        APART | {"transport": {**OBJECTS["transport"], "spill": "ObjectStore"}},
        {"store": {"!credentials"}, "rollout": set(), "trainer": {"run", "cache"}},
    ),
    (
        APART | {"transport": {**OBJECTS["transport"], "onlyObject": True}},
        {"rollout": {"!credentials"}, "trainer": {"run", "cache", "!credentials"}},
    ),
    (
        DISTRIBUTED | {"transport": {"onlyObject": True}},  # frames are below the run's directory
        {"rollout": {"run"}, "trainer": {"run", "cache"}},
    ),
]


@pytest.mark.parametrize(("spec", "needs"), NEEDS)
def test_a_role_has_what_it_needs_and_no_more(spec: Any, needs: dict[str, set[str]]) -> None:
    asked = {"run", "cache", "credentials", "output-credentials"}
    found = {}
    for template in templates(build(**spec)).values():
        inside = set()
        for name, container in containers(template).items():
            used = {"!" * m.get("readOnly", False) + m["name"] for m in container["volumeMounts"]}
            found[name] = {each for each in used if each.strip("!") in asked}
            inside |= {each["name"] for each in container["volumeMounts"]}
        assert {each["name"] for each in template["spec"]["volumes"]} == inside
    assert found == needs


def test_the_places_of_secrets_are_where_the_processes_look() -> None:
    resolved = resolve(TraceRLJob.model_validate(job(**merged(S3, OBJECTS))), UID)
    assert str(resolved.credentials_dir) == "/etc/tracerl/credentials"
    assert str(resolved.output_credentials_dir) == "/etc/tracerl/output-credentials"
    without = resolve(TraceRLJob.model_validate(job()), UID)
    assert (without.credentials_dir, without.output_credentials_dir) == (None, None)


def test_the_reward_is_mounted_where_the_trainer_looks() -> None:
    found = templates(build(**SHAPES["own reward"], **APART))
    assert volume(found["trainer"], "reward") == {"name": "reward", "configMap": {"name": "rewards"}}
    assert mounts(containers(found["trainer"])["trainer"])[REWARD_DIRECTORY]["readOnly"] is True
    assert volume(found["rollout"], "reward") is None


@pytest.mark.parametrize("monitored", [False, True])
def test_only_a_jobs_own_pods_reach_it_and_who_scrapes(monitored: bool) -> None:
    installation = replace(INSTALLATION, network_policy=True, pod_monitor=monitored)
    parsed = TraceRLJob.model_validate(job(**APART))
    objects = wanted(parsed, UID, installation, served=ALL_KINDS, token=TOKEN, restarts=0)
    policy = one(objects, "NetworkPolicy")["spec"]
    pods = {"matchLabels": {"tracerl.dev/job-uid": UID}}
    assert policy["podSelector"] == pods
    assert policy["policyTypes"] == ["Ingress"]  # what pods reach is not limited
    assert policy["ingress"][0] == {"from": [{"podSelector": pods}]}
    opened = {port["port"] for rule in policy["ingress"][1:] for port in rule["ports"]}
    assert opened == ({8000, 8001, 8002} if monitored else set())
    for template in templates(objects).values():
        assert template["metadata"]["labels"].items() >= pods["matchLabels"].items()
    assert not [o for o in build() if o["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("shape", SHAPES)
def test_everything_belongs_to_the_job(shape: str) -> None:
    for each in build(**SHAPES[shape]):
        assert each["metadata"]["namespace"] == "team"
        assert each["metadata"]["labels"]["tracerl.dev/job-uid"] == UID
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("TraceRLJob", UID, True)


# -- the resolved job -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_processes_read_what_was_resolved(shape: str, tmp_path: Any) -> None:
    objects = build(**SHAPES[shape])
    path = tmp_path / "job.yaml"
    path.write_text(one(objects, "ConfigMap", "-job")["data"]["job.yaml"])
    resolved = ResolvedJob.read(path)
    assert resolved.job_uid == UID
    assert resolved.job.status is None
    found = templates(objects)
    ring = {m for t in found.values() for c in containers(t).values() for m in mounts(c) if "ring" in m}
    assert ({str(resolved.ring_dir)} if resolved.ring_dir else set()) == ring
    for template in found.values():
        for name, container in containers(template).items():
            assert container["args"][0] == "/etc/tracerl/job.yaml"
            assert mounts(container)["/etc/tracerl/job.yaml"]["subPath"] == "job.yaml"
            assert str(resolved.token_file.parent) in mounts(container)
            several = name == "trainer" and SHAPES[shape].get("trainer", {}).get("gpusPerNode") == 2
            module = "trainer_pod_main" if several else f"{name}_main"
            assert container["command"][-1] == f"tracerl.runtime.{module}"
            if name == "trainer" and shape != "directory":
                assert any(resolved.run_dir.is_relative_to(place) for place in mounts(container))
    # Every endpoint is a pod of the JobSet: <jobset>-<job>-<job index>-<pod index>.<subdomain>.
    jobset = one(objects, "JobSet")
    assert jobset["spec"]["network"]["subdomain"] == jobset["metadata"]["name"]
    hosts = {
        f"canary-{each['name']}-0-{index}.canary": each["name"]
        for each in jobset["spec"]["replicatedJobs"]
        for index in range(each["template"]["spec"]["completions"])
    }
    endpoints = resolved.endpoints
    # Of several trainers in a pod the first one answers for all.
    pods = [endpoint for endpoint in endpoints.trainer if endpoint.url is not None]
    ranks = resolved.job.spec.trainer.parallelism.ranks
    assert [endpoint.name for endpoint in endpoints.trainer] == [f"trainer-{rank}" for rank in range(ranks)]
    each = ranks // len(pods)
    assert pods == endpoints.trainer[::each]
    for endpoint in (*endpoints.rollout, *endpoints.store, *pods):
        match = re.fullmatch(r"http://([^:]+):(\d+)", endpoint.url or "")
        assert match is not None
        role, _, index = endpoint.name.partition("-")
        template = found[hosts[match[1]]]
        container = containers(template)[role]
        assert int(match[2]) in [port["containerPort"] for port in container["ports"]]
        pod = int(index) // each if role == "trainer" else int(index)
        assert match[1].split(".")[0].endswith(f"-{pod}")
    assert [e.name for e in endpoints.store] == [
        e.name.replace("rollout", "store") for e in endpoints.rollout if resolved.ring_dir
    ]
    shared = {e.node for e in endpoints.rollout} & {e.node for e in endpoints.trainer}
    assert bool(shared) == (shape != "apart")


def test_the_resolved_job_holds_no_secret_and_nothing_that_changes() -> None:
    document = job()
    document["metadata"] |= {"annotations": {"a": "b"}, "managedFields": [{"manager": "x"}]}
    document["status"] = {"restarts": 3}
    parsed = TraceRLJob.model_validate(document)
    objects = wanted(parsed, UID, INSTALLATION, served=ALL_KINDS, token=TOKEN, restarts=3)
    assert one(objects, "ConfigMap", "-job") == one(build(), "ConfigMap", "-job")
    assert TOKEN not in yaml.safe_dump(one(objects, "ConfigMap", "-job"))


@pytest.mark.parametrize("count", [1, 10, 11, 4096])
@pytest.mark.parametrize("spec", [{}, NODE])
def test_names_of_pods_fit_a_label(count: int, spec: dict[str, Any]) -> None:
    name = "a" * 50
    objects = build(name, **spec, **nodes(count))
    jobset = one(objects, "JobSet")
    for each in jobset["spec"]["replicatedJobs"]:
        # What JobSet's webhook asks for, with the five letters of a pod's name.
        pod = f"{jobset['metadata']['name']}-{each['name']}-0-{count - 1}-abcde"
        assert len(pod) <= 63
    other = one(build("a" * 49 + "b", **spec, **nodes(count)), "JobSet")
    assert other["metadata"]["name"] != jobset["metadata"]["name"]


# -- machines ---------------------------------------------------------------------------------------------


def test_gpus_go_to_limits_and_other_resources_are_as_given() -> None:
    resources = {"limits": {"rdma/ib": "1", "memory": "8Gi"}, "requests": {"cpu": "500m"}}
    template = templates(
        build(rollout={"gpusPerNode": 3, "resources": resources}, trainer={"gpusPerNode": 1})
    )
    found = containers(template["node"])
    assert found["rollout"]["resources"] == {
        "limits": {"nvidia.com/gpu": "3", "rdma/ib": "1", "memory": "8Gi"},
        "requests": {"cpu": "500m"},
    }
    assert found["trainer"]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "nvidia.com/gpu" not in json.dumps(found["store"])


def test_device_claims_are_as_given() -> None:
    claims = {
        "resources": {"claims": [{"name": "roce", "request": "nic"}]},
        "template": {
            "spec": {"resourceClaims": [{"name": "roce", "resourceClaimTemplateName": "roce-template"}]}
        },
    }
    spec = {"rollout": claims | GPUS["rollout"], "trainer": claims | GPUS["trainer"]}
    template = templates(build(**spec, placement={"fabric": "ComputeDomain"}))["node"]
    assert template["spec"]["resourceClaims"] == [
        {"name": "compute-domain-channel", "resourceClaimTemplateName": "canary-channel"},
        {"name": "roce", "resourceClaimTemplateName": "roce-template"},
    ]
    for role in ("rollout", "trainer"):
        assert containers(template)[role]["resources"]["claims"] == [
            {"name": "roce", "request": "nic"},
            {"name": "compute-domain-channel"},
        ]


CLIQUE = {"topology": {"required": "nvidia.com/gpu.clique"}}
DOMAINS = [
    # placement, GPUs, whether the CRD is there, whether there is a ComputeDomain
    ({"fabric": "ComputeDomain"}, GPUS, True, True),
    (CLIQUE, GPUS, True, True),
    (CLIQUE, GPUS, False, False),
    (CLIQUE, {}, True, False),
    ({}, GPUS, True, False),
    ({"fabric": "None", **CLIQUE}, GPUS, True, False),
]


@pytest.mark.parametrize(("placement", "gpus", "served", "domain"), DOMAINS)
def test_compute_domain(placement: Any, gpus: Any, served: bool, domain: bool) -> None:
    parsed = TraceRLJob.model_validate(job(placement=placement, **gpus))
    kinds = ALL_KINDS if served else ALL_KINDS - {"ComputeDomain"}
    objects = wanted(parsed, UID, INSTALLATION, served=kinds, token=TOKEN, restarts=0)
    found = [o for o in objects if o["kind"] == "ComputeDomain"]
    spec = templates(objects)["node"]["spec"]
    arch = "kubernetes.io/arch" in json.dumps(spec)
    assert (len(found) == 1, "resourceClaims" in spec, arch) == (domain, domain, domain)
    if domain:
        name = found[0]["spec"]["channel"]["resourceClaimTemplate"]["name"]
        assert found[0]["spec"]["numNodes"] == 0
        assert spec["resourceClaims"] == [
            {"name": "compute-domain-channel", "resourceClaimTemplateName": name}
        ]
        for role in ("rollout", "trainer"):
            claims = containers({"spec": spec})[role]["resources"]["claims"]
            assert claims == [{"name": "compute-domain-channel"}]


def test_a_role_without_gpus_runs_on_any_architecture() -> None:
    spec = {"rollout": {"gpusPerNode": 4}, "placement": {"colocation": "None", "fabric": "ComputeDomain"}}
    found = templates(build(**spec))
    assert "nodeAffinity" in found["rollout"]["spec"]["affinity"]
    assert "nodeAffinity" not in found["trainer"]["spec"]["affinity"]
    assert "resourceClaims" not in found["trainer"]["spec"]


def test_topology_is_an_affinity_or_kueues_annotation() -> None:
    required = build(placement=CLIQUE)
    affinity = templates(required)["node"]["spec"]["affinity"]["podAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "nvidia.com/gpu.clique"
    preferred = build(placement={"topology": {"preferred": "nvidia.com/gpu.clique"}})
    affinity = templates(preferred)["node"]["spec"]["affinity"]["podAffinity"]
    assert [*affinity] == ["preferredDuringSchedulingIgnoredDuringExecution"]
    queued = build(placement={"queue": "lq", **CLIQUE})
    template = templates(queued)["node"]
    assert "podAffinity" not in template["spec"]["affinity"]
    key = "kueue.x-k8s.io/podset-required-topology"
    assert template["metadata"]["annotations"][key] == "nvidia.com/gpu.clique"


@pytest.mark.parametrize(
    ("spec", "grouped"),
    [
        ({}, False),
        (APART, True),
        (APART | {"rollout": {"nodes": 3}}, True),
        (merged(APART, nodes(2)), False),  # Kueue refuses groups of two sets of several pods
    ],
)
def test_kueue_fits_both_roles_into_one_domain_where_it_can(spec: dict[str, Any], grouped: bool) -> None:
    placement = {"placement": {"queue": "lq", **CLIQUE}}
    for template in templates(build(**merged(spec, placement))).values():
        annotations = template["metadata"]["annotations"]
        assert ("kueue.x-k8s.io/podset-group-name" in annotations) == grouped
        assert annotations["kueue.x-k8s.io/podset-required-topology"] == "nvidia.com/gpu.clique"


def test_kueue_starts_what_has_a_queue() -> None:
    document = job(placement={"queue": "lq"})
    document["metadata"] |= {
        "labels": {"kueue.x-k8s.io/priority-class": "high", "team": "a"},
        "annotations": {"kueue.x-k8s.io/x": "y", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
    }
    parsed = TraceRLJob.model_validate(document)
    jobset = one(wanted(parsed, UID, INSTALLATION, served=ALL_KINDS, token=TOKEN, restarts=0), "JobSet")
    labels = {k: v for k, v in jobset["metadata"]["labels"].items() if "kueue" in k}
    assert labels == {"kueue.x-k8s.io/queue-name": "lq", "kueue.x-k8s.io/priority-class": "high"}
    assert "kubectl.kubernetes.io/last-applied-configuration" not in jobset["metadata"]["annotations"]
    assert jobset["metadata"]["annotations"]["kueue.x-k8s.io/x"] == "y"
    assert "team" not in jobset["metadata"]["labels"]
    assert jobset["spec"]["suspend"] is True
    assert one(build(), "JobSet")["spec"]["suspend"] is False


# -- the rest ---------------------------------------------------------------------------------------------


def test_a_trainers_own_verdict_is_final_and_a_signal_is_a_restart() -> None:
    jobset = one(build(failurePolicy={"maxRestarts": 5}), "JobSet")["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 5
    drained, final = jobset["failurePolicy"]["rules"]
    assert (final["action"], final["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert drained["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # As the Job's controller of Kubernetes 1.36 says it.
    said = "Pod team/canary-node-0-0-x has condition DisruptionTarget matching FailJob rule at index 0"
    assert re.search(drained["onJobFailureMessagePatterns"][0], said)
    said = "Container trainer for pod team/x failed with exit code 1 matching FailJob rule at index 1"
    assert not re.search(drained["onJobFailureMessagePatterns"][0], said)
    disrupted, policy = jobset["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert policy["onExitCodes"]["values"] == [1, 2, 70]  # of tracerl.runtime.child
    assert policy["onExitCodes"]["containerName"] == "trainer"
    assert "ttlSecondsAfterFinished" not in jobset  # the job's own, or the budget would start again


def test_a_pod_monitor_tells_roles_apart() -> None:
    objects = build()
    monitor = one(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    ports = {p["name"] for c in containers(templates(objects)["node"]).values() for p in c["ports"]}
    assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == ["rollout", "store", "trainer"]
    assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert all(t["metadata"]["labels"].items() >= selected.items() for t in templates(objects).values())
    parsed = TraceRLJob.model_validate(job())
    without = wanted(parsed, UID, INSTALLATION, served=ALL_KINDS, token=TOKEN, restarts=0)
    assert not [o for o in without if o["kind"] == "PodMonitor"]


def test_templates_patch_their_role_wherever_it_runs() -> None:
    patch = {
        "metadata": {"labels": {"team": "a", "tracerl.dev/job-name": "other"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "rollout", "env": [{"name": "A", "value": "1"}]}],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "spare", "emptyDir": {}}],
        },
    }
    for spec in ({}, APART):
        found = templates(build(rollout={"template": patch}, **spec))
        template = next(iter(found.values()))
        assert containers(template)["rollout"]["env"][-1] == {"name": "A", "value": "1"}
        assert [c["name"] for c in template["spec"]["containers"]] == (["rollout"] if spec else ["trainer"])
        assert template["metadata"]["labels"]["team"] == "a"
        assert template["metadata"]["labels"]["tracerl.dev/job-name"] == "canary"
        assert volume(template, "tmp") == {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
        assert volume(template, "spare") is not None
        assert not list(broken_rules(template))


@pytest.mark.parametrize("spec", [{}, APART])
def test_both_roles_have_templates(spec: dict[str, Any]) -> None:
    def patch(role: str) -> dict[str, Any]:
        container = {"name": role, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
        return {"template": {"spec": {"nodeSelector": {role: "yes"}, "containers": [container]}}}

    found = templates(build(rollout=patch("rollout"), trainer=patch("trainer"), **spec))
    selectors = [template["spec"]["nodeSelector"] for template in found.values()]
    assert selectors == (
        [{"rollout": "yes"}, {"trainer": "yes"}] if spec else [{"rollout": "yes", "trainer": "yes"}]
    )
    for template in found.values():
        for name, container in containers(template).items():
            added = container["securityContext"]["capabilities"].get("add")
            assert added == (None if name == "store" else ["IPC_LOCK"])


@pytest.mark.parametrize("colocation", ["Pod", "Node", "None"])
@pytest.mark.parametrize("sync", ["Auto", "Distributed", "Disk"])
@pytest.mark.parametrize("count", [1, 2])
def test_weights_by_disk_have_a_disk(colocation: str, sync: str, count: int) -> None:
    """Where the trainer writes weights into the run's directory, rollouts see it."""
    spec = merged(nodes(count), {"placement": {"colocation": colocation}, "trainer": {"weightSync": sync}})
    parsed = TraceRLJob.model_validate(job(**spec))
    resolved = resolve(parsed, UID)
    rollout = next(iter(templates(build(**spec)).values()))
    mounted = any(resolved.layout.weights.is_relative_to(m) for m in mounts(containers(rollout)["rollout"]))
    assert mounted == weights_by_disk(parsed.spec, one_machine=False)


def test_the_cleaning_pod_touches_this_jobs_directory_alone() -> None:
    pod = cleaning_pod("a" * 50, "team", UID, "machine-1", "example.org/rollout:1")
    assert len(pod["metadata"]["name"]) <= 63
    assert (
        pod["metadata"]["name"] != cleaning_pod("a" * 50, "team", UID, "machine-2", "x")["metadata"]["name"]
    )
    assert pod["spec"]["nodeName"] == "machine-1"
    (content,), (directory,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert content["securityContext"]["runAsUser"] == 65532
    assert content["volumeMounts"][0]["subPathExpr"] == "$(TRACERL_JOB_UID)"
    assert directory["securityContext"]["runAsUser"] == 0  # the kubelet made the directory as root
    for container in (content, directory):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"name": "TRACERL_JOB_UID", "value": UID} in container["env"]
    allowed = {"volume shm", "directory runAsUser", "content runAsNonRoot", "directory runAsNonRoot"}
    assert set(broken_rules(pod)) == allowed


def test_the_cleaning_pod_cleans(tmp_path: Any) -> None:
    import subprocess
    import sys

    mine, other = tmp_path / UID, tmp_path / "other"
    for directory in (mine / "store-0", other / "store-0"):
        directory.mkdir(parents=True)
        (directory / "ring").write_bytes(b"x")
    (mine / "link").symlink_to(other)
    pod = cleaning_pod("canary", "team", UID, "machine-1", "x")["spec"]
    for container, path in ((pod["initContainers"][0], mine), (pod["containers"][0], tmp_path)):
        *flags, program = container["command"][1:]
        place = container["volumeMounts"][0]["mountPath"]
        program = program.replace(f"'{place}'", repr(str(path)))
        environment = {each["name"]: each["value"] for each in container["env"]}
        subprocess.run([sys.executable, *flags, program], check=True, env=environment)
    assert not mine.exists()
    assert (other / "store-0/ring").read_bytes() == b"x"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "gpus" not in shape])
def test_the_shapes_above_are_jobs(shape: str) -> None:
    document = copy.deepcopy(job(**SHAPES[shape]))
    assert [str(fault) for fault in check({**document, "spec": merged(document["spec"], {})})] == []
