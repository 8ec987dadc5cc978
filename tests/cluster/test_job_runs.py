"""Jobs that go well, as a user meets them: applied, watched, suspended, edited and deleted with kubectl.

The commands are those of docs/how-to/run-on-a-cluster.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import Namespace
from small_cluster import merged

ROOT = Path(__file__).parents[2]
CANARY = ROOT / "jobs/examples/canary.yaml"
OWN_TASK = ROOT / "jobs/examples/own-task"
SMALL: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "jobs/small.yaml").read_text())
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}
pytestmark = pytest.mark.timeout(1800)
KINDS = (
    "jobsets.jobset.x-k8s.io,jobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,endpointslices"
)
QUICK, LONG = 400, 1200
"""Seconds after which a small job, or the canary, hangs: many times what they take."""

Spec = dict[str, Any]
_PVC: Spec = {"output": {"uri": "pvc://runs/team"}}
# Long enough to be met at work: progress is mirrored every ten seconds, and a step can take a sixth of one.
_LONG_STEPS = 300
_LONG: Spec = {
    "algorithm": {"steps": _LONG_STEPS, "evaluation": {"every": 1000}},
    "trainer": {"checkpoint": {"every": 5}},
}


def small(name: str = "small", *changes: Spec) -> dict[str, Any]:
    """The small job with changes of its spec."""
    spec = SMALL["spec"]
    for change in changes:
        spec = merged(spec, change)
    return {**SMALL, "metadata": {"name": name}, "spec": spec}


def start(namespace: Namespace, *changes: Spec, name: str = "small") -> str:
    """Apply the small job; its UID."""
    namespace.apply(small(name, *changes))
    uid: str = namespace.get("trj", name)["metadata"]["uid"]
    return uid


def status(namespace: Namespace, name: str = "small") -> dict[str, Any]:
    found: dict[str, Any] = namespace.get("trj", name).get("status", {})
    return found


def step(namespace: Namespace, name: str = "small") -> int:
    """How far training has come."""
    done: int = status(namespace, name).get("progress", {}).get("step", 0)
    return done


def wait_step(namespace: Namespace, least: int, name: str = "small") -> int:
    """Wait until training has come so far; how far it is."""

    def there() -> int:
        now = status(namespace, name)
        assert not now.get("terminal"), f"{name} ended before step {least}: {now}"
        done: int = now.get("progress", {}).get("step", 0)
        return done if done >= least else 0

    return namespace.wait_for(there, f"step {least} of {name}", QUICK)


def left(namespace: Namespace, name: str = "small") -> list[str]:
    """Everything in the namespace that is a job's, by its label, its name or the JobSet's label."""
    labelled = namespace.kubectl("get", KINDS, "-l", f"tracerl.dev/job-name={name}", "-o", "name").split()
    everything = namespace.kubectl("get", KINDS, "-o", "name").split()
    named = [one for one in everything if f"{one.partition('/')[2]}-".startswith(f"{name}-")]
    return sorted({*labelled, *named})


def logged(namespace: Namespace, name: str = "small", more: str = "") -> str:
    """What the trainer logged; `more` is more of a selector."""
    return namespace.kubectl("logs", "-l", f"tracerl.dev/job-name={name}{more}", "-c", "trainer", "--tail=-1")


def place(namespace: Namespace, name: str = "small") -> str:
    """The run's own directory, as the job's status says it."""
    job = namespace.get("trj", name)
    wanted = job["spec"]["output"]["uri"]
    output = namespace.kubectl("get", "trj", name, "-o", "jsonpath={.status.output}")
    assert output == f"{wanted}/{name}-{job['metadata']['uid'][:8]}"
    return output


def check_files(files: dict[str, bytes], steps: int) -> None:
    """What a run leaves in its directory, by path."""
    summary = json.loads(files["summary.json"])
    assert (summary["outcome"], summary["steps_done"]) == ("Complete", steps)
    assert b"</html>" in files["report.html"]
    lines = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    # After a resume, too, every step is there once.
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    assert f"checkpoints/step-{steps:06d}/manifest.json" in files, [*files]


def in_claim(directory: Path, namespace: Namespace, name: str = "small") -> dict[str, bytes]:
    """Files of a run whose output is a claim on this directory."""
    run = directory / place(namespace, name).removeprefix("pvc://runs/")
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


class Store:
    """A bucket of the S3 server, and the secret with which pods reach it."""

    def __init__(self, server: Any, namespace: Namespace) -> None:
        self._client, self.bucket = server.client(), server.bucket()
        keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        literals = [f"--from-literal={key}={value}" for key, value in keys.items()]
        namespace.kubectl("create", "secret", "generic", "s3", *literals)
        self._access = {"secretName": "s3", "endpointUrl": server.endpoint_url}

    @property
    def output(self) -> Spec:
        return {"output": {"uri": f"s3://{self.bucket}/runs", **self._access}}

    @property
    def records(self) -> Spec:
        where = {"uri": f"s3://{self.bucket}/records", "retention": "Job", **self._access}
        return {"transport": {"onlyObject": True, "object": where}}

    def keys(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def files(self, namespace: Namespace, name: str = "small") -> dict[str, bytes]:
        """Files of a run whose output is this bucket."""
        prefix = place(namespace, name).removeprefix(f"s3://{self.bucket}/") + "/"
        return {
            key.removeprefix(prefix): self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            for key in self.keys(prefix)
        }


# -- a whole run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "colocation",
    [
        pytest.param("Pod", marks=pytest.mark.ci),
        pytest.param("Node", marks=pytest.mark.full),
        pytest.param("None", marks=pytest.mark.full),
    ],
)
def test_the_canary_is_applied_trains_and_completes(
    namespaces: Callable[..., Namespace], colocation: str, request: pytest.FixtureRequest
) -> None:
    """In one pod as it is; in pairs with a claim; apart, with its records and results on an S3 server."""
    level = "privileged" if colocation == "Node" else "restricted"
    namespace = namespaces(labels={"pod-security.kubernetes.io/enforce": level})
    job = yaml.safe_load(CANARY.read_text())
    directory, store = None, None
    if colocation == "Pod":
        namespace.kubectl("apply", "-f", str(CANARY))
    elif colocation == "Node":
        directory = namespace.volume("runs")
        spec = merged(merged(job["spec"], _PVC), {"placement": {"colocation": "Node"}})
        namespace.apply({**job, "spec": spec})
    else:
        store = Store(request.getfixturevalue("s3"), namespace)
        spec = merged(merged(job["spec"], store.output), store.records)
        namespace.apply({**job, "spec": merged(spec, {"placement": {"colocation": "None"}})})
    seen: list[int] = []
    trainers = "" if colocation == "Pod" else ",tracerl.dev/role=trainer"

    def trains() -> bool:
        done = step(namespace, "canary")
        if not seen or seen[-1] != done:
            seen.append(done)
        return 0 < done < 60 or bool(status(namespace, "canary").get("terminal"))

    namespace.wait_for(trains, "training", LONG)
    assert re.search(r"\bstep \d+", logged(namespace, "canary", trainers))
    namespace.wait_for(lambda: trains() and status(namespace, "canary").get("terminal"), "the end", LONG)
    namespace.kubectl("wait", "--for=jsonpath={.status.terminal}=Complete", "trj/canary", "--timeout=1s")
    seen.append(step(namespace, "canary"))
    assert seen == sorted(seen), seen
    assert seen[-1] == 60, seen
    assert len(set(seen)) > 3, seen
    header, row = namespace.kubectl("get", "trj").splitlines()
    shown = dict(zip(header.split(), row.split(), strict=True))
    assert (shown["NAME"], shown["STATUS"], shown["STEP"], shown["RESTARTS"]) == (
        "canary",
        "Complete",
        "60",
        "0",
    )
    # What the canary expects of itself: it learned, though not everything.
    assert 0.3 < float(shown["REWARD"]) <= 1
    assert 0 < float(shown["OVERHEAD"]) < 2
    # The pod stays until the job is deleted, so that its logs can be read.
    assert "step 60/60" in logged(namespace, "canary", trainers)
    described = namespace.kubectl("describe", "trj", "canary")
    assert re.search(r"Normal\s+Completed\s.*all 60 steps are done", described), described
    if directory is not None:
        check_files(in_claim(directory, namespace, "canary"), steps=60)
    if store is not None:
        check_files(store.files(namespace, "canary"), steps=60)
        uid = namespace.get("trj", "canary")["metadata"]["uid"]
        assert len(store.keys(f"records/{uid}/")) > 60


@pytest.mark.ci
def test_results_are_in_the_claim(namespace: Namespace, tmp_path: Path) -> None:
    directory = namespace.volume("runs")
    start(namespace, _PVC)
    job = namespace.wait_for_job("small", seconds=QUICK)
    assert job["status"]["summary"] == "Complete"
    files = in_claim(directory, namespace)
    check_files(files, steps=4)
    # `tracerl run` of the same manifest leaves the same files and says the same kinds of things.
    manifest = tmp_path / "small.yaml"
    manifest.write_text(yaml.safe_dump(small()))
    run = [Path(sys.executable).with_name("tracerl"), "run", manifest, "--out", tmp_path / "run", "--quiet"]
    subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    local = {
        str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()
    }

    def top(paths: Any) -> set[str]:
        return {path.partition("/")[0] for path in paths}

    # A local run is locked by its process; on a cluster only one pod has the claim's directory.
    assert top(files) == top(local) - {"lock"}
    assert (
        json.loads(files["summary.json"]).keys()
        == json.loads((tmp_path / "run/summary.json").read_text()).keys()
    )


def test_a_node_ring_is_removed_with_its_job(namespaces: Callable[..., Namespace]) -> None:
    namespace = namespaces(labels=PRIVILEGED)
    directory = namespace.volume("runs")
    uid = start(namespace, _PVC, {"placement": {"colocation": "Node"}})
    ring = namespace.cluster.files("/dev/shm") / uid
    namespace.wait_for(ring.exists, "the ring on the node", QUICK)
    assert namespace.get("trj", "small")["metadata"]["finalizers"] == ["tracerl.dev/node-ring"]
    namespace.wait_for_job("small", seconds=QUICK)
    check_files(in_claim(directory, namespace), steps=4)
    namespace.delete("trj", "small")
    assert not ring.exists()
    namespace.wait_for(lambda: not left(namespace), "the end of everything", 60)


def roles(namespace: Namespace) -> set[str]:
    """Roles of the pods that are there; those of rollouts go when the job is complete."""
    return {pod["metadata"]["labels"]["tracerl.dev/role"] for pod in namespace.pods()}


def test_roles_apart_with_records_and_results_in_an_object_store(namespace: Namespace, s3: Any) -> None:
    store = Store(s3, namespace)
    uid = start(namespace, store.output, store.records, {"placement": {"colocation": "None"}})
    namespace.wait_for(lambda: roles(namespace) == {"rollout", "trainer"}, "a pod of each role", QUICK)
    job = namespace.wait_for_job("small", seconds=QUICK)
    check_files(store.files(namespace), steps=4)
    records = store.keys(f"records/{uid}/")
    assert records
    assert all(key.endswith(".trecs") for key in records)
    # Of a credential, nothing but its secret's name is in what the operator makes.
    made = namespace.kubectl("get", "configmaps,jobsets,jobs,pods,tracerljobs", "-o", "yaml")
    assert s3.secret_key not in made
    assert s3.secret_key not in logged(namespace, more=",tracerl.dev/role=trainer")
    assert job["status"]["restarts"] == 0


def test_roles_apart_send_records_over_http(namespace: Namespace) -> None:
    directory = namespace.volume("runs")
    start(namespace, _PVC, {"placement": {"colocation": "None"}})
    namespace.wait_for_job("small", seconds=QUICK)
    check_files(in_claim(directory, namespace), steps=4)


# -- suspend and resume -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("pvc", marks=pytest.mark.ci), "s3"])
def test_a_suspended_job_goes_on_from_its_checkpoint(
    namespace: Namespace, kind: str, request: pytest.FixtureRequest
) -> None:
    store = Store(request.getfixturevalue("s3"), namespace) if kind == "s3" else None
    directory = namespace.volume("runs") if kind == "pvc" else None
    uid = start(namespace, store.output if store else _PVC, _LONG)
    wait_step(namespace, 6)
    namespace.kubectl("patch", "trj", "small", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    namespace.kubectl("wait", "--for=condition=Suspended", "trj/small", "--timeout=90s")
    assert namespace.condition("small", "Suspended")["reason"] == "SuspendedBySpec"
    assert not namespace.pods("tracerl.dev/job-name=small")
    assert not namespace.list("jobsets")
    kept = step(namespace)
    assert 6 <= kept < _LONG_STEPS
    checkpoint = kept - kept % 5
    namespace.kubectl("patch", "trj", "small", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    namespace.wait_for(lambda: namespace.condition("small", "Ready")["status"] == "True", "Ready", QUICK)
    assert namespace.condition("small", "Suspended")["reason"] == "Resumed"
    lowest = _LONG_STEPS

    def goes_on() -> bool:
        nonlocal lowest
        lowest = min(lowest, step(namespace))
        return step(namespace) > kept

    namespace.wait_for(goes_on, f"a step after {kept}", QUICK)
    assert lowest >= checkpoint
    (resumed,) = re.findall(r"continues after step (\d+)", logged(namespace))
    assert int(resumed) >= checkpoint
    job = namespace.wait_for_job("small", seconds=LONG)
    assert job["metadata"]["uid"] == uid
    files = store.files(namespace) if store else in_claim(directory or Path(), namespace)
    check_files(files, steps=_LONG_STEPS)


# -- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when", ["at its start", pytest.param("while it runs", marks=pytest.mark.ci), "after its end"]
)
def test_a_deleted_job_leaves_nothing(namespace: Namespace, when: str) -> None:
    uid = start(namespace, {} if when == "after its end" else _LONG)
    if when == "while it runs":
        wait_step(namespace, 1)
    elif when == "after its end":
        namespace.wait_for_job("small", seconds=QUICK)
    else:
        namespace.wait_for(lambda: namespace.pods("tracerl.dev/job-name=small"), "a pod", 60)
    assert left(namespace)
    namespace.kubectl("delete", "trj", "small", "--timeout=60s")
    namespace.wait_for(lambda: not left(namespace), "the end of everything", 60)
    assert namespace.find("trj", "small") is None
    shm = namespace.cluster.files("/dev/shm")
    assert not [path for path in shm.rglob("*") if uid in str(path)]


def test_a_running_job_with_a_node_ring_leaves_nothing(namespaces: Callable[..., Namespace]) -> None:
    namespace = namespaces(labels=PRIVILEGED)
    uid = start(namespace, _LONG, {"placement": {"colocation": "Node"}})
    wait_step(namespace, 1)
    namespace.kubectl("delete", "trj", "small", "--timeout=90s")
    namespace.wait_for(lambda: not left(namespace), "the end of everything", 60)
    assert not (namespace.cluster.files("/dev/shm") / uid).exists()


# -- edits ------------------------------------------------------------------------------------------------


def _patch(namespace: Namespace, change: Spec) -> None:
    namespace.patch("trj", "small", {"spec": change})


def test_a_shorter_deadline_ends_a_running_job(namespace: Namespace) -> None:
    start(namespace, _LONG)
    wait_step(namespace, 1)
    _patch(namespace, {"activeDeadlineSeconds": 1})
    job = namespace.wait_for_job("small", terminal="Failed", seconds=60)
    assert job["status"]["summary"] == "Failed"
    failed = namespace.condition("small", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert "activeDeadlineSeconds (1 s)" in failed["message"]
    namespace.wait_for(lambda: not namespace.pods("tracerl.dev/job-name=small"), "the end of its pods", 60)


def test_a_restart_budget_of_none_counts_at_once(namespace: Namespace) -> None:
    start(namespace, _LONG)
    wait_step(namespace, 1)
    _patch(namespace, {"failurePolicy": {"maxRestarts": 0}})
    (pod,) = namespace.pods("tracerl.dev/job-name=small")
    namespace.kill_process(pod["metadata"]["name"], "trainer")
    job = namespace.wait_for_job("small", terminal="Failed", seconds=90)
    assert namespace.condition("small", "Failed")["reason"] == "RestartsExhausted", job["status"]


def test_a_finished_job_is_deleted_in_time(namespace: Namespace) -> None:
    start(namespace)
    namespace.wait_for_job("small", seconds=QUICK)
    _patch(namespace, {"ttlSecondsAfterFinished": 1})
    namespace.wait_for(lambda: namespace.find("trj", "small") is None, "the end of the job", 60)
    namespace.wait_for(lambda: not left(namespace), "the end of everything", 60)


def test_a_field_that_cannot_change_is_refused_with_a_sentence(namespace: Namespace) -> None:
    start(namespace)
    anew = "cannot be changed; make a new job, by another name, with the new value"
    refused: list[tuple[Spec, str]] = [
        ({"model": {"uri": "builtin://other"}}, f"spec.model {anew}"),
        ({"algorithm": {"steps": 5}}, f"spec.algorithm {anew}"),
        ({"output": {"uri": "pvc://elsewhere"}}, f"spec.output {anew}"),
        ({"placement": {"queue": "other"}}, f"spec.placement {anew}"),
        ({"trainer": {"checkpoint": {"every": 7}}}, "suspend"),
    ]
    for change, sentence in refused:
        with pytest.raises(RuntimeError) as error:
            _patch(namespace, change)
        assert sentence in str(error.value)


# -- a queue ----------------------------------------------------------------------------------------------


@contextmanager
def _queue(namespace: Namespace) -> Iterator[Callable[[str], None]]:
    """A queue of the namespace whose cluster queue is held; the function says its stop policy."""
    name = namespace.name
    covered = ["cpu", "memory"]
    quotas = [
        {"name": each, "nominalQuota": quota} for each, quota in zip(covered, ("8", "16Gi"), strict=True)
    ]
    groups = [{"coveredResources": covered, "flavors": [{"name": name, "resources": quotas}]}]
    version = "kueue.x-k8s.io/v1beta2"
    hold = {"namespaceSelector": {}, "stopPolicy": "Hold", "resourceGroups": groups}
    namespace.apply(
        [
            {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": name}},
            {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": hold},
            {
                "apiVersion": version,
                "kind": "LocalQueue",
                "metadata": {"name": "team"},
                "spec": {"clusterQueue": name},
            },
        ]
    )
    try:
        yield lambda policy: namespace.patch("clusterqueue", name, {"spec": {"stopPolicy": policy}})
    finally:
        namespace.kubectl("delete", "trj", "--all", "--timeout=90s")
        namespace.kubectl("delete", "localqueue", "team", check=False)
        namespace.kubectl("delete", "clusterqueue,resourceflavor", name, "--timeout=60s", check=False)


@pytest.mark.full
def test_a_job_with_a_queue_waits_until_it_is_admitted(kueue: Any, namespace: Namespace) -> None:
    with _queue(namespace) as set_policy:
        start(namespace, {"placement": {"queue": "team"}})
        namespace.wait_for(lambda: status(namespace).get("summary") == "Queued", "Queued", 60)
        assert not namespace.pods("tracerl.dev/job-name=small")
        suspended = namespace.condition("small", "Suspended")
        assert (suspended["status"], suspended["reason"]) == ("True", "Queued")
        assert "queue team" in suspended["message"]
        assert status(namespace).get("startTime") is None
        set_policy("None")
        namespace.wait_for_job("small", seconds=QUICK)


# -- own code ---------------------------------------------------------------------------------------------


def test_a_task_of_ones_own_comes_with_a_config_map(namespace: Namespace) -> None:
    namespace.kubectl("create", "configmap", "own-task", f"--from-file={OWN_TASK}")
    job = yaml.safe_load((OWN_TASK / "job.yaml").read_text())
    changes = {
        "task": {"uri": "/etc/tracerl/reward/words.jsonl", "source": {"uri": None, "configMap": "own-task"}},
        "algorithm": {"steps": 4},
    }
    namespace.apply({**job, "spec": merged(job["spec"], changes)})
    done = namespace.wait_for_job("own-task", seconds=QUICK)
    # Letters that stand where they should are worth something from the start.
    assert float(done["status"]["progress"]["reward"]) > 0.05


# -- what kubectl says ------------------------------------------------------------------------------------


def test_kubectl_explains_fields(namespace: Namespace) -> None:
    text = namespace.kubectl("explain", "trj.spec.method.trace")
    fields = re.findall(r"^  (\w+)\t<([^>]+)>", text, re.MULTILINE)
    assert {"codeBits", "scaleBits", "layers", "ratioFrom"} <= {name for name, _ in fields}
    # Every field has a sentence below its name.
    described = re.findall(r"^  (\w+)\t<[^>]+>.*\n(?:  enum:.*\n)?    \S", text, re.MULTILINE)
    assert described == [name for name, _ in fields], text
    for path in ("trj", "trj.spec", "trj.spec.placement.colocation", "trj.status.progress"):
        assert "DESCRIPTION:\n    <empty>" not in namespace.kubectl("explain", path), path


def test_kubectl_gets_columns(namespace: Namespace) -> None:
    namespace.apply(small("small", {"suspend": True}))
    namespace.wait_for(lambda: status(namespace).get("summary"), "a summary", 60)
    narrow, wide = (namespace.kubectl("get", "trj", *more).splitlines() for more in ((), ("-o", "wide")))
    assert narrow[0].split() == ["NAME", "STATUS", "READY", "STEP", "REWARD", "OVERHEAD", "RESTARTS", "AGE"]
    assert narrow[1].split()[:3] == ["small", "Suspended", "0/1"]
    assert set(narrow[0].split()) < set(wide[0].split())
