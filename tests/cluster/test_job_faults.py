"""What docs/reference/faults.md says of each fault, made to happen on a real cluster.

Each test sees the condition that a user sees, puts the cause right where that is documented, and waits for
the job's end. At the end of each, jobs are deleted as a user does, and nothing of them may stay.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import OPERATOR, Namespace, api_server_down, drained, fake_gpus, new_namespace, restart_kubelet
from trial import LONG, QUICK, STEPS, Trial, at_step, condition, containers, gpus, running

from cluster import Cluster

pytestmark = pytest.mark.timeout(900)

CHART = Path(__file__).parents[2] / "charts/tracerl"
SELECTOR = "app.kubernetes.io/name=tracerl-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
REWARDS = {
    "train.jsonl": "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(64)),
    "good.py": "def score(completion, item):\n    return float(completion == item['answer'])\n",
    "bad.py": "def score(completion, item):\n    raise LookupError('no such answer')\n",
}


@pytest.fixture
def trial(namespace: Namespace) -> Iterator[Trial]:
    one = Trial(namespace)
    yield one
    one.remove_all()


@pytest.fixture
def training(trial: Trial) -> Trial:
    """A job that is training and keeps its checkpoints in a claim."""
    trial.namespace.volume("runs")
    trial.start("job", LONG)
    trial.wait_step(2)
    return trial


def assert_resumed(trial: Trial) -> None:
    """The last start went on from a checkpoint, and each step is in the log once."""
    assert trial.resumed_from()[-1] >= 1
    assert [record["step"] for record in trial.log("step")] == [*range(1, STEPS + 1)]


# -- processes that are killed


def killed(trial: Trial, container: str) -> None:
    """Kill a container's process, and see that the user is told."""
    restarts = trial.status()["restarts"]
    trial.kill(container)
    trial.wait(lambda status: status["restarts"] == restarts + 1, "restarted", 120)
    message = trial.event("Restarted").splitlines()[-1]
    assert container in message
    assert "SIGKILL" in message


@pytest.mark.ci
def test_a_killed_trainer_goes_on_from_its_checkpoint(training: Trial) -> None:
    before = training.uids()
    killed(training, "trainer")
    training.wait_for("Running", seconds=240)
    status = training.wait_complete()
    assert status["restarts"] == 1
    assert not before & training.uids()
    assert_resumed(training)


@pytest.mark.ci
def test_a_killed_rollout_comes_back_in_its_pod(training: Trial) -> None:
    before = training.uids()
    killed(training, "rollout")
    status = training.wait_complete()
    assert status["restarts"] == 1
    assert before == training.uids()
    assert "RolloutRestarted" in {record["reason"] for record in training.log("event")}
    assert training.resumed_from() == [0], "the trainer was started again"


@pytest.mark.full
def test_a_trainer_that_does_not_stay_uses_the_budget_up(trial: Trial) -> None:
    trial.start("job", {"algorithm": {"steps": 5000}, "failurePolicy": {"maxRestarts": 1}})
    seen: set[str] = set()

    def kill_each() -> bool:
        for pod in trial.pods():
            if pod["metadata"]["uid"] not in seen and "trainer" in running(pod):
                trial.namespace.kill_process(pod["metadata"]["name"], "trainer")
                seen.add(pod["metadata"]["uid"])
        return bool(trial.status().get("terminal"))

    trial.namespace.wait_for(kill_each, "the end of a job whose trainer is always killed", 240)
    message = trial.wait_failed("RestartsExhausted", "2 restarts", "maxRestarts is 1", "trainer", "SIGKILL")
    assert len(seen) == 2, message
    trial.wait(lambda _: not any(map(running, trial.pods())), "without running pods", 60)


@pytest.mark.full
def test_too_little_memory_is_said(trial: Trial) -> None:
    # To import torch takes more.
    limits = {"resources": {"limits": {"memory": "100Mi"}}}
    trial.start("job", {"trainer": limits, "failurePolicy": {"maxRestarts": 1}})
    why = ("trainer", "more memory", "spec.trainer.resources.limits.memory", "maxRestarts is 1")
    trial.wait_failed("RestartsExhausted", *why)


# -- what a job needs and is not there


def own_task(module: str) -> dict[str, Any]:
    """A task whose prompts and reward are in the config map `rewards`."""
    return {
        "name": None,
        "parameters": None,
        "answerFormat": None,
        "uri": "file:///etc/tracerl/reward/train.jsonl",
        "reward": f"{module}:score",
        "source": {"configMap": "rewards"},
    }


def rewards() -> dict[str, Any]:
    """The config map of `own_task`."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rewards"}, "data": REWARDS}


@pytest.fixture(scope="module")
def room(cluster: Cluster) -> Iterator[Trial]:
    """Jobs that wait for something, each for another thing, at the same time."""
    with new_namespace(cluster, labels=RESTRICTED) as namespace:
        one = Trial(namespace)
        one.start("no-image", {"trainer": {"image": "localhost/tracerl-trainer:missing"}})
        objects = {"uri": "s3://records/trial", "secretName": "s3-keys", "endpointUrl": "http://s3:9000"}
        one.start("no-secret", {"transport": {"ring": None, "onlyObject": True, "object": objects}})
        yield one
        one.remove_all()


@pytest.fixture(scope="module")
def full_room(room: Trial) -> None:
    """More of them, which CI has no time for."""
    room.start("no-gpus", QUICK, {"trainer": {"template": gpus("trainer", 3)}})
    room.start("no-claim", QUICK, {"output": {"uri": "pvc://missing"}})
    room.start("no-rewards", QUICK, {"task": own_task("good")})
    room.start("no-host", QUICK, {"placement": {"colocation": "Node"}})
    room.start("no-domain", {"placement": {"fabric": "ComputeDomain"}})


@pytest.mark.ci
def test_an_image_that_does_not_exist_is_named(room: Trial) -> None:
    room.wait_for("Configuration", "trainer:missing", "spec.trainer.image", seconds=90, name="no-image")
    assert "trainer:missing" in room.event("Configuration", "no-image")
    room.remove("no-image")


@pytest.mark.ci
def test_a_missing_secret_is_named(room: Trial) -> None:
    room.wait_for("Configuration", "s3-keys", "not found", seconds=120, name="no-secret")
    # It is there, and now the keys are missing.
    room.namespace.secret("s3-keys", {"USER": "somebody"})
    room.wait_failed("Configuration", "AWS_ACCESS_KEY_ID", name="no-secret")


@pytest.mark.full
@pytest.mark.usefixtures("full_room")
def test_a_job_waits_for_gpus_and_starts_when_a_node_has_them(room: Trial) -> None:
    room.wait_for("Unschedulable", "nvidia.com/gpu", "ask for less", seconds=60, name="no-gpus")
    with fake_gpus(room.cluster, 4):
        status = room.wait_complete(name="no-gpus")
    assert status["restarts"] == 0


@pytest.mark.full
@pytest.mark.usefixtures("full_room")
def test_a_missing_volume_claim_is_named(room: Trial) -> None:
    room.wait_for("Configuration", "missing", "make that claim", "spec.output", seconds=60, name="no-claim")
    room.namespace.volume("missing")
    status = room.wait_complete(name="no-claim")
    assert status["restarts"] == 0


@pytest.mark.full
@pytest.mark.usefixtures("full_room")
def test_a_missing_reward_config_map_is_named(room: Trial) -> None:
    room.wait_for("Configuration", "rewards", "not found", seconds=120, name="no-rewards")
    room.namespace.apply(rewards())
    status = room.wait_complete(name="no-rewards")
    assert status["restarts"] == 0


@pytest.mark.full
@pytest.mark.usefixtures("full_room")
def test_a_namespace_that_forbids_host_paths_is_named(room: Trial) -> None:
    words = ("restricted", "hostPath", "colocation: Pod")
    room.wait_for("Configuration", *words, seconds=60, name="no-host")
    assert not room.pods("no-host")
    assert room.namespace.find("jobset", "no-host") is None
    label = ("label", "--overwrite", "namespace", room.namespace.name)
    room.cluster.kubectl(*label, "pod-security.kubernetes.io/enforce=privileged")
    room.wait_complete(name="no-host")
    # While the ring's cleaning pod is allowed.
    room.remove("no-host")
    room.cluster.kubectl(*label, "pod-security.kubernetes.io/enforce=restricted")


@pytest.mark.full
@pytest.mark.usefixtures("full_room")
def test_a_fabric_that_is_not_installed_is_named(room: Trial) -> None:
    words = ("ComputeDomain", "DRA driver", "fabric: None")
    room.wait_for("Configuration", *words, seconds=60, name="no-domain")
    assert not room.pods("no-domain")
    assert room.namespace.find("jobset", "no-domain") is None


@pytest.mark.full
@pytest.mark.parametrize("hard", [{"pods": "0"}, {"limits.memory": "1Gi"}], ids=["pods", "memory"])
def test_a_quota_that_is_used_up_is_named(trial: Trial, hard: dict[str, str]) -> None:
    quota = {"kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}
    trial.namespace.apply({"apiVersion": "v1", **quota})
    trial.namespace.wait_for(
        lambda: trial.namespace.get("resourcequota", "small").get("status", {}).get("hard"), "the quota"
    )
    memory = {"resources": {"limits": {"memory": "2Gi"}}}
    trial.start("job", QUICK, {"rollout": memory, "trainer": memory})
    trial.wait_for("Configuration", "exceeded quota: small", *hard, seconds=120)
    assert not trial.pods()
    trial.namespace.delete("resourcequota", "small")
    status = trial.wait_complete(600)
    assert status["restarts"] == 0


# -- what comes from users and their programs


@pytest.mark.full
def test_a_reward_that_raises_ends_the_job(trial: Trial) -> None:
    trial.namespace.apply(rewards())
    trial.start("job", QUICK, {"task": own_task("bad")})
    trial.wait_failed("RewardFailed", "trainer", "no such answer", "correct it")
    assert trial.status()["restarts"] == 0


# -- disturbances of one job, which trains on through all of them


def operators(cluster: Cluster) -> dict[str, int]:
    """The operator's pods that are ready, and how often the process of each was started again."""
    found = json.loads(cluster.kubectl("-n", OPERATOR, "get", "pods", "-l", SELECTOR, "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]: status["restartCount"]
        for pod in found
        for status in containers(pod)
        if status["ready"] and "deletionTimestamp" not in pod["metadata"]
    }


def leader(cluster: Cluster) -> str:
    """The operator that works now."""
    lease = Namespace(cluster, OPERATOR).find("lease", "tracerl-operator") or {"spec": {}}
    holder = lease["spec"].get("holderIdentity") or ""
    return next((pod for pod in operators(cluster) if holder.startswith(pod)), "")


@pytest.fixture(scope="class")
def steady(cluster: Cluster) -> Iterator[Trial]:
    """A job that trains as long as anybody looks."""
    with new_namespace(cluster, labels=RESTRICTED) as namespace:
        one = Trial(namespace)
        namespace.volume("runs")
        one.start("job", LONG, {"algorithm": {"steps": 5000}, "failurePolicy": {"maxRestarts": 100}})
        yield one
        one.remove_all()


@pytest.fixture
def two_operators(cluster: Cluster) -> Iterator[None]:
    scale = ("-n", OPERATOR, "scale", "deployment", "-l", SELECTOR)
    cluster.kubectl(*scale, "--replicas=2")
    try:
        cluster.poll(lambda: len(operators(cluster)) == 2, "two operators", 180)
        yield
    finally:
        cluster.kubectl(*scale, "--replicas=1")
    cluster.poll(lambda: len(operators(cluster)) == 1 and leader(cluster), "one operator at work", 180)


def tags(trial: Trial, name: str) -> set[str]:
    """Tags of the images of a job's pods."""
    return {
        container["image"].rpartition(":")[2]
        for pod in trial.pods(name)
        for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])
    }


@contextlib.contextmanager
def upgraded(cluster: Cluster, tag: str) -> Iterator[None]:
    """The release with images of another tag, made from those that are there, for the time of the block."""

    def upgrade(to: str) -> None:
        which = ",".join(f"{image}.tag={to}" for image in ("image", "rolloutImage", "trainerImage"))
        how = ("--namespace", OPERATOR, "--reuse-values", "--wait", "--timeout", "240s")
        cluster.helm("upgrade", "tracerl", str(CHART), *how, f"--set={which}")

    names = [f"localhost/tracerl-{image}" for image in ("operator", "canary")]
    for name in names:
        cluster.ctr("images", "tag", "--force", f"{name}:test", f"{name}:{tag}")
    upgrade(tag)
    try:
        yield
    finally:
        upgrade("test")
        cluster.poll(lambda: len(operators(cluster)) == 1 and leader(cluster), "the former operator", 180)
        cluster.ctr("images", "rm", *(f"{name}:{tag}" for name in names))


@pytest.mark.full
class TestDisturbances:
    @pytest.fixture(autouse=True)
    def training(self, steady: Trial) -> None:
        """Begin and end each test with a job that trains and says so."""
        steady.wait_for("Running", seconds=300)
        steps = steady.steps()
        steady.wait_step(max(2, steps + 1))

    @pytest.fixture
    def untouched(self, steady: Trial) -> Iterator[None]:
        """Nothing is started again: the job has its pods and its trainer, and trains on."""
        before, restarts, starts = steady.uids(), steady.status()["restarts"], steady.resumed_from()
        yield
        steady.wait_step(steady.steps() + 2)
        steady.wait_for("Running", seconds=120)
        assert steady.uids() == before
        assert steady.status()["restarts"] == restarts
        assert steady.resumed_from() == starts

    @pytest.mark.usefixtures("untouched")
    def test_a_kubelet_that_restarts(self, cluster: Cluster) -> None:
        restart_kubelet(cluster)

    @pytest.mark.usefixtures("untouched")
    def test_an_api_server_that_is_away_for_30_seconds(self, steady: Trial, cluster: Cluster) -> None:
        shown = at_step(steady.status())
        with api_server_down(cluster):
            until = time.monotonic() + 30
            steady.wait_step(steady.steps() + 2, 120)
            cluster.poll(lambda: time.monotonic() > until, "the end of 30 s", 40)
        steady.wait(lambda status: at_step(status) > shown, "with newer progress", 180)

    @pytest.mark.usefixtures("untouched")
    def test_a_killed_operator(self, steady: Trial, cluster: Cluster) -> None:
        ((pod, restarts),) = operators(cluster).items()
        Namespace(cluster, OPERATOR).kill_process(pod, "operator")
        # Made while nobody looks after jobs.
        steady.start("killed", {"suspend": True})
        cluster.poll(lambda: operators(cluster).get(pod) == restarts + 1, "the operator's next start", 180)
        steady.wait_for("SuspendedBySpec", seconds=120, name="killed")
        shown = at_step(steady.status())
        steady.wait(lambda status: at_step(status) > shown, "with newer progress", 180)

    @pytest.mark.usefixtures("untouched")
    def test_an_operator_that_is_upgraded(self, steady: Trial, cluster: Cluster) -> None:
        """By Helm, to other images: the running job keeps its own, one that starts later has the new ones."""
        steady.start("resumed", QUICK, {"suspend": True})
        steady.wait_for("SuspendedBySpec", seconds=120, name="resumed")
        old = operators(cluster).keys()
        with upgraded(cluster, "next"):
            cluster.poll(lambda: leader(cluster) not in ("", *old), "the new operator at work", 240)
            (pod,) = Namespace(cluster, OPERATOR).pods(SELECTOR)
            assert pod["spec"]["containers"][0]["image"] == "localhost/tracerl-operator:next"
            steady.namespace.patch("trj", "resumed", {"spec": {"suspend": False}})
            steady.namespace.wait_for(lambda: steady.pods("resumed"), "its pod", 120)
            assert tags(steady, "resumed") == {"next"}
            steady.wait_complete(name="resumed")
            assert tags(steady, "job") == {"test"}

    @pytest.mark.usefixtures("untouched", "two_operators")
    def test_two_operators_of_which_one_is_killed(self, steady: Trial, cluster: Cluster) -> None:
        first = leader(cluster)
        assert first
        # Without a word of farewell, and its pod does not come back, either.
        Namespace(cluster, OPERATOR).kill_process(first, "operator")
        Namespace(cluster, OPERATOR).delete_now(first)
        steady.start("taken-over", {"suspend": True})
        cluster.poll(lambda: leader(cluster) not in ("", first), "the other operator at work", 90)
        steady.wait_for("SuspendedBySpec", seconds=120, name="taken-over")

    @pytest.mark.usefixtures("untouched")
    def test_a_pod_that_lies(self, steady: Trial) -> None:
        def say(text: str) -> None:
            steady.namespace.patch("configmap", "job-progress", {"data": {"progress": text}})

        def may(*what: str) -> str:
            account = f"--as=system:serviceaccount:{steady.namespace.name}:job-trainer"
            return steady.namespace.kubectl("auth", "can-i", *what, account, check=False).split()[0]

        lies = ("nonsense", "[" * 4000, "x" * 100_000, '{"step": -1}', '{"step": 3, "terminal": "Complete"}')
        for lie in lies:
            say(lie)
            # In between it may have said something true.
            assert 0 <= at_step(steady.status()) < 5000
        say(json.dumps({"step": 5000, "steps": 5000}))
        told = steady.status()
        assert told.get("terminal") is None
        assert condition(told, "Complete")["status"] == "False"
        steady.wait(lambda status: 0 < at_step(status) < 5000, "telling the truth again", 120)
        assert may("patch", "configmap/job-progress") == "yes"
        assert may("patch", "configmap/job-job") == "no"
        assert may("patch", "trj/job") == "no"
        assert may("patch", "trj/job", "--subresource=status") == "no"

    def test_a_killed_record_store(self, steady: Trial) -> None:
        before, starts = steady.uids(), steady.resumed_from()
        killed(steady, "store")
        steady.wait_step(steady.steps() + 2)
        assert "RecordStoreRestarted" in {record["reason"] for record in steady.log("event")}
        assert steady.uids() == before
        assert steady.resumed_from() == starts, "the trainer was started again"

    def test_an_evicted_pod(self, steady: Trial) -> None:
        restarts, starts = steady.status()["restarts"], len(steady.resumed_from())
        (pod,) = steady.pods()
        steady.namespace.evict(pod["metadata"]["name"])
        steady.wait(lambda _: pod["metadata"]["uid"] not in steady.uids(), "without the evicted pod", 180)
        steady.namespace.wait_for(lambda: steady.resumed_from()[starts:], "the trainer's next start", 300)
        assert steady.resumed_from()[-1] >= 1
        assert steady.status()["restarts"] == restarts, "an eviction is no fault of the job"

    def test_a_drained_node(self, steady: Trial, cluster: Cluster) -> None:
        before, restarts = steady.uids(), steady.status()["restarts"]
        starts = len(steady.resumed_from())
        # The job's pods alone: on a cluster of one node the operator would be gone, too.
        with drained(cluster, selector="tracerl.dev/job-name=job"):
            steady.wait_for("Unschedulable", "unschedulable", "node", seconds=180)
            assert not before & steady.uids()
        steady.namespace.wait_for(lambda: steady.resumed_from()[starts:], "the trainer's next start", 300)
        assert steady.resumed_from()[-1] >= 1
        assert steady.status()["restarts"] == restarts, "a drain is no fault of the job"
