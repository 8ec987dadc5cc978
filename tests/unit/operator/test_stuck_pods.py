"""Pods that do not run: what Kubernetes 1.36 says of each, and what the job's status makes of it.

Statuses and events are those of a real cluster, shortened.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from small_cluster import APART, NOW, Cluster, job, merged, nodes

from tracerl.api.constants import Reason
from tracerl_operator.reconcile import inquiries

READY_TO_START = {"type": "PodReadyToStartContainers", "status": "False"}
NOT_READY = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
PULL = (
    'Back-off pulling image "registry.invalid/x:1": ErrImagePull: failed to pull and unpack image '
    '"registry.invalid/x:1": failed to resolve image: no such host'
)
GPUS = (
    "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 "
    "nodes are available: 1 Preemption is not helpful for scheduling."
)


def time(**before: float) -> str:
    return (NOW - timedelta(**before)).strftime("%Y-%m-%dT%H:%M:%SZ")


def started(**spec: Any) -> Cluster:
    """A job whose pods were made half a minute ago and are nowhere yet."""
    c = Cluster(job(**spec))
    c.settle()
    c.run_pods(ready=False)
    c.jobset["metadata"]["creationTimestamp"] = time(seconds=30)
    for pod in c.observed.pods:
        pod["metadata"]["creationTimestamp"] = time(seconds=30)
        pod["spec"] = {}
        pod["status"] = {"phase": "Pending", "conditions": []}
    return c


def waiting(reason: str, message: str | None = None) -> dict[str, Any]:
    state = {"reason": reason} if message is None else {"reason": reason, "message": message}
    return {
        "phase": "Pending",
        "conditions": [NOT_READY],
        "initContainerStatuses": [
            {"name": "store", "state": {"running": {"startedAt": time(seconds=20)}}, "restartCount": 0},
            {"name": "rollout", "state": {"waiting": state}, "restartCount": 0},
        ],
        "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}, "restartCount": 0}
        ],
    }


def creating() -> dict[str, Any]:
    names = ["store", "rollout"]
    return {
        "phase": "Pending",
        "conditions": [READY_TO_START, NOT_READY],
        "initContainerStatuses": [
            {"name": name, "state": {"waiting": {"reason": "PodInitializing"}}} for name in names
        ],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }


def unplaced(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    return {
        "phase": "Pending",
        "conditions": [{**UNSCHEDULABLE, "reason": reason, "message": message}],
    }


SEEN_IN_PODS: list[tuple[dict[str, Any], str, list[str]]] = [
    (
        waiting("ImagePullBackOff", PULL),
        "Configuration",
        ["rollout of canary-node-0-0-abcde", "registry.invalid/x:1", "spec.rollout.image"],
    ),
    (waiting("ErrImagePull", "not found"), "Configuration", ["not found", "imagePullSecrets"]),
    (
        waiting("ErrImageNeverPull", 'Container image "localhost/nope:1" is not present with pull policy'),
        "Configuration",
        ["localhost/nope:1"],
    ),
    (waiting("InvalidImageName", "couldn't parse image name"), "Configuration", ["couldn't parse"]),
    (
        waiting("CreateContainerConfigError", 'secret "nope" not found'),
        "Configuration",
        ['secret "nope" not found', "spec.rollout.template"],
    ),
    (waiting("CreateContainerConfigError"), "Configuration", ["CreateContainerConfigError"]),
    (
        unplaced(GPUS),
        "Unschedulable",
        ["waits for a node: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu", "ask for less"],
    ),
    (
        unplaced('0/1 nodes are available: persistentvolumeclaim "nope" not found. not found'),
        "Configuration",
        ['persistentvolumeclaim "nope" not found', "make that claim"],
    ),
    (unplaced("waits for a gate", "SchedulingGated"), "Starting", ["0 of 1 nodes are ready"]),
    (creating(), "Starting", ["0 of 1 nodes are ready"]),
    (waiting("PodInitializing"), "Starting", ["0 of 1 nodes are ready"]),
    (waiting("a\x1b[31m" + "b" * 9000, "c" * 9000), "Starting", ["0 of 1"]),
    (waiting("ErrImagePull", "\x1b[31m\n\u202e" + "c" * 9000), "Configuration", ["does not start: [31m"]),
]


@pytest.mark.parametrize(("status", "reason", "words"), SEEN_IN_PODS)
def test_what_pods_say(status: dict[str, Any], reason: str, words: list[str]) -> None:
    c = started()
    c.observed.pods[0]["status"] = status
    c.settle()
    assert c.conditions()["Ready"] == f"False {reason}"
    assert c.status["summary"] == reason
    for word in words:
        assert word in c.message("Ready")
    assert len(c.message("Ready")) <= 1000
    assert c.message("Ready").isprintable()
    told = [f"{event.type} {event.reason}" for event in c.events]
    assert told == ([f"Warning {reason}"] if reason != "Starting" else [])
    c.run_pods()
    c.settle()
    assert c.conditions()["Ready"] == "True Running"


def test_several_pods_that_wait_are_one_sentence() -> None:
    c = started(**nodes(3))
    for pod in c.observed.pods:
        pod["status"] = unplaced(GPUS)
    c.settle()
    assert "canary-node-0-0-abcde and 2 more wait for a node" in c.message("Ready")


def test_a_node_that_kueue_chose_is_told_from_one_that_is_lacking() -> None:
    c = started(placement={"queue": "team"})
    (pod,) = c.observed.pods
    pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "node"
    pod["status"] = unplaced("0/5 nodes are available: 1 node(s) didn't match pod anti-affinity rules")
    c.jobset["spec"]["suspend"] = False
    c.settle()
    assert "ask for less" in c.message("Ready")
    pod["spec"] = {"nodeSelector": {"kubernetes.io/hostname": "n1"}}
    c.settle()
    assert c.conditions()["Ready"] == "False Unschedulable"
    assert "whose flavors have no topology, or use colocation Pod" in c.message("Ready")


# -- what only events say ---------------------------------------------------------------------------------


def event(
    c: Cluster, kind: str, reason: str, message: str, *, normal: bool = False, **before: float
) -> dict[str, Any]:
    pod = c.observed.pods[0]["metadata"] if c.observed.pods else {}
    involved = {
        "Pod": {"kind": "Pod", "name": pod.get("name"), "uid": pod.get("uid")},
        "Job": {"kind": "Job", "name": "canary-node-0", "uid": "uid-of-the-job"},
        "JobSet": {"kind": "JobSet", "name": "canary", "uid": c.jobset["metadata"]["uid"]},
    }[kind]
    return {
        "involvedObject": involved,
        "type": "Normal" if normal else "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": time(**(before or {"seconds": 5})),
    }


QUOTA = 'Error creating: pods "canary-node-0-0-x7k2p" is forbidden: exceeded quota: q, requested: pods=1'
JOB = "involvedObject.kind=Job,involvedObject.name=canary-node-0"
ANSWERS: list[tuple[str, str, str, dict[str, Any], str, list[str]]] = [
    # object, reason and message of an event, when it was, reason of Ready, words
    (
        "Pod",
        "FailedMount",
        'MountVolume.SetUp failed for volume "credentials" : secret "nope" not found',
        {},
        "Configuration",
        ['canary-node-0-0-abcde does not start: MountVolume.SetUp failed for volume "credentials" : secret'],
    ),
    (
        "Pod",
        "FailedResourceClaimCreation",
        'PodResourceClaim compute-domain-channel: resource claim template "canary-channel": not found',
        {},
        "Configuration",
        ["canary-channel"],
    ),
    ("Pod", "FailedMount", "secret not found", {"minutes": 6}, "Starting", ["0 of 1"]),
    ("Pod", "Pulling", 'Pulling image "x"', {"normal": True}, "Starting", ["0 of 1"]),
    (
        "Job",
        "FailedCreate",
        QUOTA,
        {},
        "Configuration",
        ['pods are refused: Error creating: pods "canary-node-0-0" is forbidden: exceeded quota: q'],
    ),
    ("Job", "FailedCreate", QUOTA, {"minutes": 6}, "Starting", ["0 of 1"]),
    ("Job", "SuccessfulCreate", "Created pod: x", {"normal": True}, "Starting", ["0 of 1"]),
    (
        "JobSet",
        "JobCreationFailed",
        'jobs.batch "canary-node-0" is forbidden: exceeded quota: q, requested: count/jobs.batch=1',
        {},
        "Configuration",
        ["exceeded quota: q, requested: count/jobs.batch=1"],
    ),
    (
        "JobSet",
        "HeadlessServiceCreationFailed",
        'services "canary" is forbidden: exceeded quota: q, requested: services=1',
        {},
        "Configuration",
        ["exceeded quota: q, requested: services=1"],
    ),
    ("JobSet", "RestartJobSetFailurePolicyAction", "restarting", {}, "Starting", ["0 of 1"]),
]


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case[1]} {case[4]}")
def test_what_events_say(case: tuple[str, str, str, dict[str, Any], str, list[str]]) -> None:
    kind, reason, message, when, expected, words = case
    c = started()
    c.observed.pods[0]["status"] = creating()
    if kind != "Pod":
        c.observed = replace(c.observed, pods=())
    c.observed = replace(c.observed, answers=(event(c, kind, reason, message, **when),))
    c.settle()
    assert c.conditions()["Ready"] == f"False {expected}"
    for word in words:
        assert word in c.message("Ready")
    # It is looked at again without any change that is watched.
    again = c.decide().look_again_at
    assert again is not None
    assert timedelta(seconds=10) <= again - c.now <= timedelta(minutes=1)


def test_a_newer_event_ends_an_older_ones_warning() -> None:
    c = started()
    c.observed.pods[0]["status"] = creating()
    failed = event(c, "Pod", "FailedMount", "secret not found", seconds=20)
    micro = {**event(c, "Pod", "Pulling", "Pulling", normal=True), "lastTimestamp": None}
    micro["eventTime"] = "2026-11-29T11:59:50.123456Z"
    c.observed = replace(c.observed, answers=(micro, failed))
    c.settle()
    assert c.conditions()["Ready"] == "False Starting"
    c.observed = replace(c.observed, answers=(micro, {**failed, "lastTimestamp": "2026-11-29T11:59:55Z"}))
    c.settle()
    assert c.conditions()["Ready"] == "False Configuration"


def test_the_same_refusal_of_another_pod_is_no_news() -> None:
    c = started()
    c.observed = replace(c.observed, pods=())
    c.observed = replace(c.observed, answers=(event(c, "Job", "FailedCreate", QUOTA),))
    c.settle()
    other = QUOTA.replace("x7k2p", "zz9f4")
    c.observed = replace(c.observed, answers=(event(c, "Job", "FailedCreate", other),))
    assert c.decide().status is None


def test_an_event_of_an_earlier_job_of_this_name_is_none_of_this_one() -> None:
    c = started()
    c.observed = replace(c.observed, pods=())
    c.observed = replace(c.observed, answers=(event(c, "Job", "FailedCreate", QUOTA, seconds=31),))
    c.settle()
    assert c.conditions()["Ready"] == "False Starting"


def asked(c: Cluster) -> list[tuple[str, str, str]]:
    return [(i.kind, i.fields, i.labels) for i in inquiries(c.job, c.observed, c.now)]


def test_only_what_waits_in_silence_is_asked_about() -> None:
    assert asked(Cluster(job())) == []
    assert asked(Cluster(job()).running()) == []
    c = started()
    uid = c.observed.pods[0]["metadata"]["uid"]
    for status, questions in (
        (creating(), [("Event", f"involvedObject.uid={uid}", "")]),
        ({"phase": "Pending"}, [("Event", f"involvedObject.uid={uid}", "")]),  # for a claim's template
        (unplaced(GPUS), []),
        (waiting("ErrImagePull", "x"), []),
        ({"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}, []),
        ({"phase": "Failed"}, []),
    ):
        c.observed.pods[0]["status"] = status
        assert asked(c) == questions
    c.observed.pods[0]["status"] = creating()
    c.observed.pods[0]["metadata"]["creationTimestamp"] = time(seconds=9)
    assert asked(c) == []
    again = c.decide().look_again_at
    assert again is not None
    assert again - c.now == timedelta(seconds=1)
    c.observed = replace(c.observed, pods=())
    jobset = c.jobset["metadata"]["uid"]
    assert asked(c) == [("Event", JOB, ""), ("Event", f"involvedObject.uid={jobset}", "")]
    c.job["metadata"]["deletionTimestamp"] = time()
    assert asked(c) == []


def test_a_hundred_pods_are_a_few_questions() -> None:
    c = started(**merged(nodes(100), APART))
    for pod in c.observed.pods:
        pod["status"] = creating()
    assert len(asked(c)) <= 5


# -- queues -----------------------------------------------------------------------------------------------


def test_a_job_in_a_queue_says_what_kueue_says() -> None:
    c = Cluster(job(placement={"queue": "lq"}))
    c.settle()
    assert c.message("Suspended") == "waits for the queue lq"
    c.jobset["metadata"]["creationTimestamp"] = time(seconds=30)
    uid = c.jobset["metadata"]["uid"]
    assert asked(c) == [("Workload", "", f"kueue.x-k8s.io/job-uid={uid}")]
    said = (
        "couldn't assign flavors to pod set node: insufficient quota for nvidia.com/gpu in flavor f, (6) > 4"
    )
    workload = {
        "metadata": {"ownerReferences": [{"uid": uid}]},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": said}]},
    }
    c.observed = replace(c.observed, answers=(workload,))
    c.settle()
    assert c.message("Suspended") == f"waits for the queue lq: {said}"
    assert c.conditions()["Ready"] == "False Queued"


def test_a_queue_needs_kueue() -> None:
    c = Cluster(job(placement={"queue": "lq"}))
    c.observed = replace(c.observed, served=c.observed.served - {"Workload"})
    c.settle()
    assert c.conditions()["Ready"] == "False Configuration"
    assert "install Kueue" in c.message("Ready")
    assert c.find("JobSet") is None


# -- pods that were taken away ----------------------------------------------------------------------------


def take(c: Cluster, reason: str, **more: Any) -> None:
    pod = c.observed.pods[0]
    pod["metadata"]["deletionTimestamp"] = time()
    pod["status"]["conditions"] += [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    pod["status"] |= more


@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet"])
def test_a_pod_that_was_taken_away_is_no_restart(reason: str) -> None:
    c = Cluster(job(failurePolicy={"maxRestarts": 0})).running()
    take(c, reason)
    c.settle()
    assert c.conditions()["Ready"] == "False Starting"
    assert f"canary-node-0-0-abcde was taken from its node ({reason})" in c.message("Ready")
    c.end_container(0, "trainer", 143)
    c.set_jobset(restarts=1)  # which JobSet counts, but not towards the maximum
    c.run_pods()
    c.settle()
    assert c.conditions()["Ready"] == "True Running"
    assert c.status["restarts"] == 0


def test_who_lost_a_peer_that_was_taken_away_is_not_to_blame() -> None:
    c = Cluster(job(failurePolicy={"maxRestarts": 0}, **nodes(2))).running()
    take(c, "EvictionByEvictionAPI")
    c.end_container(1, "trainer", 1, '{"reason": "TrainerLost", "message": "trainer-0 is gone"}')
    c.end_jobset("Failed", "FailJobSetFailurePolicyAction")
    c.step()
    assert c.status.get("terminal") is None
    assert c.status["restarts"] == 0
    c.running()
    assert c.conditions()["Ready"] == "True Running"


def test_a_pod_that_is_going_is_not_ready() -> None:
    c = Cluster(job(**nodes(2))).running()
    assert c.status["ready"] == "2/2"
    c.observed.pods[0]["metadata"]["deletionTimestamp"] = time()
    c.step()
    assert c.status["ready"] == "1/2"


def test_a_pod_that_does_not_go_names_its_node() -> None:
    c = Cluster(job()).running()
    take(c, "DeletionByTaintManager")
    c.settle()
    again = c.decide().look_again_at
    assert again is not None
    assert again - c.now <= timedelta(minutes=1)
    c.wait(minutes=1)
    c.settle()
    assert "does not go from node machine-0" in c.message("Ready")
    assert "kubectl delete node machine-0" in c.message("Ready")
    c.job["spec"]["suspend"] = True
    pods = c.observed.pods
    c.step()
    c.observed = replace(c.observed, pods=pods)
    c.job["spec"]["suspend"] = False
    c.settle()
    assert "of the last attempt are being removed; canary-node-0-0-abcde does not go" in c.message("Ready")


# -- how containers ended ---------------------------------------------------------------------------------


def killed(c: Cluster, container: str, reason: str, code: int, **more: Any) -> None:
    c.end_container(0, container, code, "Killed\n", **more)
    for status in c.observed.pods[0]["status"]["containerStatuses"]:
        ended = status.get("lastState", status["state"]).get("terminated")
        if status["name"] == container and ended:
            ended["reason"] = reason


ENDS = [
    (
        "trainer",
        "OOMKilled",
        137,
        ["trainer of canary-node-0-0-abcde: was killed because it used more memory"],
    ),
    ("trainer", "OOMKilled", 137, ["raise spec.trainer.resources.limits.memory"]),
    ("rollout", "OOMKilled", 137, ["raise spec.rollout.resources.limits.memory"]),
    ("store", "OOMKilled", 137, ["the container store in spec.rollout.template"]),
    ("trainer", "Error", 137, ["was ended by SIGKILL"]),
    ("rollout", "Error", 139, ["was ended by SIGSEGV"]),
]


@pytest.mark.parametrize(("container", "reason", "code", "words"), ENDS)
def test_how_a_container_ended(container: str, reason: str, code: int, words: list[str]) -> None:
    c = Cluster(job(failurePolicy={"maxRestarts": 1})).running()
    c.run_pods(ready=False)
    if container == "trainer":
        killed(c, container, reason, code)
        # Its pod's servers end with it.
        killed(c, "rollout", "OOMKilled", 137)
        c.set_jobset(restarts=1, restartsCountTowardsMax=1)
    else:
        killed(c, container, reason, code, restarts=1)
    c.events.clear()
    c.step()
    for word in words:
        assert word in c.message("Ready")
        assert [word in event.message for event in c.events if event.reason == "Restarted"] == [True]
    if container == "trainer":
        c.end_jobset("Failed", "ReachedMaxRestarts")
    else:
        killed(c, container, reason, code, restarts=2)
    c.step()
    assert c.conditions()["Failed"] == "True RestartsExhausted"
    for word in words:
        assert word in c.message("Failed")


def test_how_a_container_ended_is_told_when_others_are_in_its_pods_place() -> None:
    """The JobSet may have made new pods by the time that its restart is seen."""
    c = Cluster(job()).running()
    c.run_pods(ready=False)
    killed(c, "trainer", "Error", 137)
    c.step()
    assert "trainer of canary-node-0-0-abcde: was ended by SIGKILL" in c.message("Ready")
    c.set_jobset(restarts=1, restartsCountTowardsMax=1)
    c.run_pods(ready=False)
    c.events.clear()
    c.step()
    [event] = [event for event in c.events if event.reason == "Restarted"]
    assert event.message == (
        "restart 1: its pods ended; seen last: 0 of 1 nodes are ready; "
        "trainer of canary-node-0-0-abcde: was ended by SIGKILL"
    )


def test_a_refusal_of_what_is_there_by_now_is_forgotten() -> None:
    """Two operators may make the Secret at once; the one that came second is refused."""
    c = Cluster(job())
    c.step()
    jobset = next(ref for ref in c.observed.objects if ref.kind == "JobSet")
    c.observed = replace(
        c.observed,
        objects={ref: one for ref, one in c.observed.objects.items() if ref != jobset},
        refusals=("Secret/canary-token: field is immutable when `immutable` is set",),
    )
    c.step()
    assert c.conditions()["Ready"] == "False Starting"
    assert c.find("JobSet") is not None


def test_reasons_are_documented() -> None:
    assert Reason.UNSCHEDULABLE.doc


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun", "RunContainerError"])
def test_a_container_whose_program_does_not_start_is_said_steadily(reason: str) -> None:
    c = started()
    said = 'exec: "pyhton": executable file not found in $PATH'
    messages = set()
    for state in ({"reason": "RunContainerError", "message": "x"}, {"reason": "CrashLoopBackOff"}):
        status = waiting("y")
        status["initContainerStatuses"][1] |= {
            "state": {"waiting": state},
            "lastState": {"terminated": {"exitCode": 128, "reason": reason, "message": said}},
            "restartCount": 1,
        }
        c.observed.pods[0]["status"] = status
        c.settle()
        assert c.conditions()["Ready"] == "False Configuration"
        messages.add(c.message("Ready"))
    (message,) = messages
    assert said in message
