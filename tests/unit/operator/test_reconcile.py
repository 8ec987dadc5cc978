"""What becomes of a job: from what is there to its status, objects and events, with a clock of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from small_cluster import ALL_KINDS, APART, INSTALLATION, NODE, TOKEN, UID, Cluster, job, nodes

from tracerl.api.constants import ConditionType, Reason
from tracerl_operator.reconcile import reconcile
from tracerl_operator.types import Observed, Ref

NOTE = json.dumps({"reason": "RecordsMissing", "message": "2% of the rows are missing"})
LOST = json.dumps({"reason": "TrainerLost", "message": "trainer-1 is gone"})


def cluster(**spec: Any) -> Cluster:
    return Cluster(job(**spec))


def with_node_ring(found: Cluster) -> Cluster:
    installation = replace(INSTALLATION, node_ring=True)
    found.observed = replace(found.observed, installation=installation, pod_security="privileged")
    return found


# -- transitions ------------------------------------------------------------------------------------------


def start(c: Cluster) -> None:
    pass


def make(c: Cluster) -> None:
    c.step()


def start_pods(c: Cluster) -> None:
    c.settle()
    c.run_pods(ready=False)


def run(c: Cluster) -> None:
    c.running()


def lose_readiness(c: Cluster) -> None:
    c.running().run_pods(ready=False)


def suspend(c: Cluster) -> None:
    c.running().job["spec"]["suspend"] = True
    c.step()


def resume(c: Cluster) -> None:
    suspend(c)
    c.settle()
    c.job["spec"]["suspend"] = False


def complete(c: Cluster) -> None:
    c.running().end_jobset("Completed", "AllJobsCompleted")
    c.end_pods("Succeeded")


def fail_by_note(c: Cluster) -> None:
    c.running().end_container(0, "trainer", 1, NOTE)
    c.end_pods("Failed")
    c.end_jobset("Failed", "FailJobSetFailurePolicyAction")


def fail_by_log(c: Cluster) -> None:
    c.running().end_container(0, "trainer", 70, "line 1\nERROR trainer-0 failed\x1b[31m\n")
    c.end_jobset("Failed", "FailJobSetFailurePolicyAction")


def kill_trainer(c: Cluster) -> None:
    c.running().end_container(0, "trainer", 137)
    c.end_jobset("Failed", "ReachedMaxRestarts")


def lose_trainer(c: Cluster) -> None:
    c.running().end_container(0, "trainer", 1, LOST)
    c.end_jobset("Failed", "FailJobSetFailurePolicyAction")


def refuse_rollout(c: Cluster) -> None:
    c.running().end_container(0, "rollout", 2, "spec.model.uri is no model", restarts=1)


def stop_rollout_badly(c: Cluster) -> None:
    """The trainer is done, so the rollout is told to stop, which goes wrong."""
    c.running().end_container(0, "trainer", 0)
    c.end_container(0, "rollout", 1, "bad file descriptor")


def kill_rollout(c: Cluster) -> None:
    c.running().end_container(0, "rollout", 137, restarts=2)


def kill_rollout_often(c: Cluster) -> None:
    c.running().end_container(0, "rollout", 137, restarts=4)


def restart_often(c: Cluster) -> None:
    c.running().set_jobset(restartsCountTowardsMax=3)


def lower_budget(c: Cluster) -> None:
    c.running().set_jobset(restartsCountTowardsMax=3)
    c.job["spec"]["failurePolicy"] = {"maxRestarts": 2}


def run_long(c: Cluster) -> None:
    c.running().wait(seconds=100)


def delete_jobset(c: Cluster) -> None:
    c.running().jobset["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"


def lose_secret(c: Cluster) -> None:
    c.running()
    ref = Ref("v1", "Secret", "canary-token")
    c.observed = replace(c.observed, objects={k: v for k, v in c.observed.objects.items() if k != ref})


def serve_nothing(c: Cluster) -> None:
    c.observed = replace(c.observed, served=frozenset())


def serve_no_domain(c: Cluster) -> None:
    c.observed = replace(c.observed, served=ALL_KINDS - {"ComputeDomain"})


def be_refused(c: Cluster) -> None:
    c.observed = replace(c.observed, refusals=('JobSet/canary: spec.x: Invalid value: "y"',))


def allow_node_rings(c: Cluster) -> None:
    c.observed = replace(c.observed, installation=replace(INSTALLATION, node_ring=True))


def be_there_before(c: Cluster) -> None:
    ref = Ref("v1", "ConfigMap", "canary-progress")
    c.observed = replace(c.observed, objects={ref: {"metadata": {"name": ref.name, "uid": "another"}}})


ALIVE = "not terminal"
CASES: list[tuple[Callable[[Cluster], None], dict[str, Any], str, str, str]] = [
    # what happens, fields of the job, conditions that are true, reason of Ready, summary
    (start, {}, "", "Starting", "Starting"),
    (start_pods, {}, "", "Starting", "Starting"),
    (run, {}, "Ready", "Running", "Running"),
    (run, nodes(3), "Ready", "Running", "Running"),
    (run, nodes(3) | APART, "Ready", "Running", "Running"),
    (lose_readiness, {}, "", "Starting", "Starting"),
    (start, {"suspend": True}, "Suspended", "SuspendedBySpec", "Suspended"),
    (suspend, {}, "Suspended", "SuspendedBySpec", "Suspended"),
    (resume, {}, "", "Starting", "Starting"),
    (make, {"placement": {"queue": "lq"}}, "Suspended", "Queued", "Queued"),
    (run, {"placement": {"queue": "lq"}}, "Ready", "Running", "Running"),
    (complete, {}, "Complete", "Completed", "Complete"),
    (fail_by_note, {}, "Failed", "RecordsMissing", "Failed"),
    (fail_by_log, {}, "Failed", "Unexpected", "Failed"),
    (kill_trainer, {}, "", "Starting", "Starting"),
    (kill_trainer, {"failurePolicy": {"maxRestarts": 0}}, "Failed", "RestartsExhausted", "Failed"),
    (lose_trainer, {}, "", "Starting", "Starting"),
    (refuse_rollout, {}, "Failed", "InvalidSpec", "Failed"),
    (kill_rollout, {}, "Ready", "Running", "Running"),
    (stop_rollout_badly, {}, "Ready", "Running", "Running"),
    (kill_rollout_often, {}, "Failed", "RestartsExhausted", "Failed"),
    (restart_often, {}, "Ready", "Running", "Running"),
    (lower_budget, {}, "Failed", "RestartsExhausted", "Failed"),
    (run_long, {}, "Ready", "Running", "Running"),
    (run_long, {"activeDeadlineSeconds": 101}, "Ready", "Running", "Running"),
    (run_long, {"activeDeadlineSeconds": 100}, "Failed", "DeadlineExceeded", "Failed"),
    (delete_jobset, {}, "", "Starting", "Starting"),
    (lose_secret, {}, "", "Configuration", "Configuration"),
    (serve_nothing, {}, "", "Configuration", "Configuration"),
    (serve_no_domain, {}, "", "Starting", "Starting"),
    (serve_no_domain, {"placement": {"fabric": "ComputeDomain"}}, "", "Configuration", "Configuration"),
    (start, NODE, "", "Configuration", "Configuration"),
    (allow_node_rings, NODE, "", "Configuration", "Configuration"),  # the namespace is restricted
    (be_refused, {}, "", "Configuration", "Configuration"),
    (be_there_before, {}, "", "Configuration", "Configuration"),
    (start, {"trainer": {"engine": "Verl"}}, "Failed", "InvalidSpec", "Failed"),
    (start, {"trainer": {"parallelism": {"pipeline": 2}}}, "Failed", "InvalidSpec", "Failed"),
    (start, {"output": {"uri": "pvc://runs/../other"}}, "Failed", "InvalidSpec", "Failed"),
    (start, {"model": {"uri": 3}}, "Failed", "InvalidSpec", "Failed"),
    (start, {"trainer": {"template": {"spec": {"containers": 3}}}}, "Failed", "InvalidSpec", "Failed"),
]


@pytest.mark.parametrize(
    ("happens", "spec", "true", "reason", "summary"),
    CASES,
    ids=[f"{case[0].__name__} {json.dumps(case[1])[:50]}" for case in CASES],
)
def test_what_is_true(
    happens: Callable[[Cluster], None], spec: dict[str, Any], true: str, reason: str, summary: str
) -> None:
    c = cluster(**spec)
    happens(c)
    for _ in range(2):  # the same again once all of it was done
        c.step()
        held = [kind for kind, text in c.conditions().items() if text.startswith("True ")]
        assert held == ([true] if true else [])
        assert c.conditions()["Ready"].split()[1] == reason
        assert c.status["summary"] == summary
        assert c.status.get("terminal") == (true if true in ("Complete", "Failed") else None)
        assert [condition["type"] for condition in c.status["conditions"]] == [*ConditionType]
        assert {condition["reason"] for condition in c.status["conditions"]} <= {*Reason}
        if happens in (lose_trainer, kill_trainer, delete_jobset, refuse_rollout):
            break  # what follows is another attempt


@pytest.mark.parametrize(
    ("happens", "spec", "words"),
    [
        (fail_by_note, {}, "trainer of canary-node-0-0-abcde: 2% of the rows are missing"),
        (fail_by_log, {}, "trainer of canary-node-0-0-abcde: ERROR trainer-0 failed [31m"),
        (refuse_rollout, {}, "rollout of canary-node-0-0-abcde: spec.model.uri is no model"),
        (kill_rollout_often, {}, "the rollout was restarted 4 times, and failurePolicy.maxRestarts is 3"),
        (start, {"trainer": {"engine": "Verl"}}, "spec.trainer.engine: is Verl"),
        (
            start,
            {"trainer": {"parallelism": {"pipeline": 2}}},
            "does not run with Reference (every trainer process holds the whole model); write 1",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30]),
)
def test_a_failure_says_why(happens: Callable[[Cluster], None], spec: dict[str, Any], words: str) -> None:
    c = cluster(**spec)
    happens(c)
    c.step()
    assert words in c.message("Failed")


@pytest.mark.parametrize(
    ("happens", "spec", "words"),
    [
        (serve_nothing, {}, "install JobSet"),
        (serve_no_domain, {"placement": {"fabric": "ComputeDomain"}}, "install NVIDIA's DRA driver"),
        (start, NODE, "nodeRing.enabled=true"),
        (allow_node_rings, NODE, "enforce=privileged"),
        (be_refused, {}, 'spec.x: Invalid value: "y"'),
        (be_there_before, {}, "ConfigMap/canary-progress is there and is not this job's"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30]),
)
def test_what_keeps_a_job_from_starting(
    happens: Callable[[Cluster], None], spec: dict[str, Any], words: str
) -> None:
    c = cluster(**spec)
    happens(c)
    decision = c.step()
    assert words in c.message("Ready")
    assert [(event.type, event.reason) for event in decision.events] == [("Warning", "Configuration")]
    assert decision.look_again_at is not None
    if happens is not be_refused:  # what was refused is tried again
        assert not decision.apply
    assert c.step().events == ()


def test_a_job_waits_until_an_earlier_one_of_its_name_is_gone() -> None:
    c = cluster()
    owner = {"kind": "TraceRLJob", "uid": "earlier", "controller": True}
    ref = Ref("v1", "ServiceAccount", "canary-trainer")
    c.observed = replace(c.observed, objects={ref: {"metadata": {"ownerReferences": [owner]}}})
    decision = c.step()
    assert not decision.apply
    assert decision.look_again_at is not None
    assert c.conditions()["Ready"] == "False Starting"
    assert "an earlier job of this name is being removed" in c.message("Ready")
    c.observed = replace(c.observed, objects={})
    assert c.step().apply


EVENTS: list[tuple[Callable[[Cluster], None], dict[str, Any], list[str]]] = [
    (start, {}, []),
    (run, {}, ["Normal Running"]),
    (lose_readiness, {}, ["Normal Running", "Normal Starting"]),
    (suspend, {}, ["Normal Running", "Normal SuspendedBySpec", "Normal SuspendedBySpec"]),
    (start, {"placement": {"queue": "lq"}}, ["Normal Queued"]),
    (run, {"placement": {"queue": "lq"}}, ["Normal Queued", "Normal Running", "Normal Resumed"]),
    (complete, {}, ["Normal Running", "Normal Completed"]),
    (fail_by_note, {}, ["Normal Running", "Warning RecordsMissing"]),
    (start, {"trainer": {"engine": "Verl"}}, ["Warning InvalidSpec"]),
]


@pytest.mark.parametrize(("happens", "spec", "events"), EVENTS, ids=lambda v: getattr(v, "__name__", ""))
def test_events_are_of_transitions(
    happens: Callable[[Cluster], None], spec: dict[str, Any], events: list[str]
) -> None:
    c = cluster(**spec)
    happens(c)
    c.settle()
    assert [f"{event.type} {event.reason}" for event in c.events] == events
    assert all(event.message for event in c.events)


# -- one answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", [case[0] for case in CASES if not case[1]], ids=lambda f: f.__name__)
def test_what_was_done_is_not_done_again(happens: Callable[[Cluster], None]) -> None:
    c = cluster()
    happens(c)
    if happens is delete_jobset:
        c.observed = replace(c.observed, objects={}, pods=())  # it is gone, too
    if happens is be_refused:
        c.step()
        c.observed = replace(c.observed, refusals=())
    c.settle()


@pytest.mark.parametrize("happens", [case[0] for case in CASES], ids=lambda f: f.__name__)
def test_the_same_question_has_the_same_answer(happens: Callable[[Cluster], None]) -> None:
    c = cluster()
    happens(c)
    assert c.decide() == c.decide()


def test_a_missed_change_changes_nothing() -> None:
    """Who sees only the end of a story tells the same of it."""
    seen, missed = cluster(), cluster()
    for c, steps in ((seen, 3), (missed, 1)):
        c.settle()
        c.run_pods(ready=False)
        for _ in range(steps):
            c.step()
        c.run_pods()
        c.step()
    assert seen.status == missed.status


def test_what_somebody_changed_is_put_right() -> None:
    c = cluster().running()
    role = c.find("Role")
    assert role is not None
    role["rules"][0]["verbs"] = ["*"]
    assert [str(one) for one in c.step().apply] == ["Role/canary-trainer"]


def test_a_running_job_is_not_touched_by_a_new_version_of_the_operator() -> None:
    c = cluster().running()
    c.observed = replace(
        c.observed, installation=replace(INSTALLATION, rollout_image="example.org/rollout:2")
    )
    c.job["spec"]["algorithm"]["newField"] = 1  # and its definition knows more than this one
    decision = c.decide()
    assert not decision.apply
    assert not decision.delete
    c.step()
    assert c.status.get("terminal") is None
    assert c.conditions()["Ready"] == "False Configuration"


def test_a_running_job_that_a_new_rule_forbids_goes_on() -> None:
    c = cluster().running()
    c.job["spec"]["trainer"] = {"engine": "Verl"}
    assert c.step().delete == ()
    assert c.conditions()["Ready"] == "True Running"


def test_the_clock_of_a_job_in_a_queue_has_not_started() -> None:
    c = cluster(placement={"queue": "lq"}, activeDeadlineSeconds=10)
    c.settle()
    c.wait(hours=1)
    c.settle()
    assert "startTime" not in c.status
    assert c.status.get("terminal") is None


def test_what_is_being_deleted_is_not_deleted_again() -> None:
    c = cluster()
    delete_jobset(c)
    c.job["spec"]["suspend"] = True
    assert c.step().delete == ()
    assert c.status["summary"] == "Suspending"


def test_another_controllers_job_is_left_alone() -> None:
    c = cluster(managedBy="kueue.x-k8s.io/multikueue")
    decision = c.decide()
    assert decision == type(decision)()
    assert cluster(managedBy="tracerl.dev/operator").decide().apply


# -- life and death ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", [complete, fail_by_note, kill_rollout_often])
def test_an_ended_job_stays_ended(happens: Callable[[Cluster], None]) -> None:
    c = cluster()
    happens(c)
    c.settle()
    ended = c.status
    for change in (
        lambda: c.job["spec"].update(suspend=True),
        lambda: c.job["spec"].update(suspend=False, failurePolicy={"maxRestarts": 99}),
        lambda: c.observed.__class__ and setattr(c, "observed", Observed(INSTALLATION, TOKEN, ALL_KINDS)),
        lambda: c.wait(days=400),
        lambda: c.job["spec"].pop("model"),
    ):
        change()
        decision = c.step()
        assert not decision.apply
        assert decision.status is None
        assert c.status == ended


def test_an_ended_job_keeps_what_has_its_logs_and_gives_back_what_runs() -> None:
    completed, failed = cluster(), cluster()
    complete(completed)
    completed.settle()
    assert completed.deleted == []
    kill_rollout_often(failed)
    failed.settle()
    assert [(str(d.ref), d.propagation) for d in failed.deleted] == [("JobSet/canary", "Foreground")]


def test_a_finished_job_is_deleted_after_its_time() -> None:
    c = cluster(ttlSecondsAfterFinished=60)
    complete(c)
    first = c.step()
    assert first.look_again_at is not None
    assert (first.look_again_at - c.now).total_seconds() == 60
    c.wait(seconds=59)
    assert not c.decide().delete
    c.wait(seconds=1)
    assert [(str(d.ref), d.uid) for d in c.decide().delete] == [("TraceRLJob/canary", UID)]


def test_a_suspended_job_gives_back_everything_but_its_token_and_starts_its_clock_again() -> None:
    c = cluster(activeDeadlineSeconds=100).running()
    assert c.status["startTime"] == "2026-11-29T12:00:00Z"
    secret = c.find("Secret")
    c.job["spec"]["suspend"] = True
    first = c.step()
    assert [str(d.ref) for d in first.delete] == ["JobSet/canary"]
    assert c.conditions()["Suspended"] == "False Resumed"
    assert c.status["summary"] == "Suspending"  # until the pods are gone
    c.settle()
    assert c.conditions()["Suspended"] == "True SuspendedBySpec"
    assert "startTime" not in c.status
    assert c.status["ready"] == "0/1"
    c.wait(hours=1)
    c.job["spec"]["suspend"] = False
    c.running()
    assert c.status["startTime"] == "2026-11-29T13:00:00Z"
    assert c.find("Secret") == secret


def test_what_may_change_while_suspended_is_in_the_next_jobset() -> None:
    c = cluster().running()
    c.job["spec"]["suspend"] = True
    c.settle()
    c.job["spec"] |= {"suspend": False, "transport": {"ring": {"size": "1Gi"}}}
    c.settle()
    assert "2049Mi" in json.dumps(c.jobset)


def test_nothing_starts_beside_pods_of_the_last_attempt() -> None:
    c = cluster().running()
    pods = c.observed.pods
    c.job["spec"]["suspend"] = True
    c.step()
    c.observed = replace(c.observed, pods=pods)  # they take their time
    c.job["spec"]["suspend"] = False
    assert not c.decide().apply
    c.observed = replace(c.observed, pods=())
    assert c.decide().apply


def test_restarts_are_never_forgotten() -> None:
    """A JobSet that is deleted and made again goes on with the budget that was left."""
    c = cluster(failurePolicy={"maxRestarts": 3}).running()
    assert c.jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    c.set_jobset(restartsCountTowardsMax=2)
    c.settle()
    assert c.status["restarts"] == 2
    c.observed = replace(c.observed, objects={}, pods=())
    c.running()
    assert c.jobset["spec"]["failurePolicy"]["maxRestarts"] == 1
    assert c.status["restarts"] == 2
    c.set_jobset(restartsCountTowardsMax=1)
    kill_trainer_again(c)
    assert c.conditions()["Failed"] == "True RestartsExhausted"


def test_restarts_of_pods_that_are_gone_still_count() -> None:
    c = cluster()
    kill_rollout(c)
    c.settle()
    assert c.status["restarts"] == 2
    c.set_jobset(restartsCountTowardsMax=1)
    c.run_pods()
    c.settle()
    assert c.status["restarts"] == 2


def kill_trainer_again(c: Cluster) -> None:
    c.end_jobset("Failed", "ReachedMaxRestarts")
    c.settle()


def test_a_raised_budget_counts_for_a_job_that_runs() -> None:
    c = cluster(failurePolicy={"maxRestarts": 1}).running()
    c.set_jobset(restartsCountTowardsMax=1)
    c.settle()
    c.job["spec"]["failurePolicy"]["maxRestarts"] = 2
    kill_trainer_again(c)
    assert c.status.get("terminal") is None
    assert c.status["restarts"] == 2
    c.running()
    assert c.jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    kill_trainer_again(c)
    assert c.conditions()["Failed"] == "True RestartsExhausted"


def test_time_is_asked_for_where_it_decides() -> None:
    c = cluster(activeDeadlineSeconds=100).running()
    again = c.decide().look_again_at
    assert again is not None
    assert (again - c.now).total_seconds() == 100
    assert cluster().running().decide().look_again_at is None


def test_conditions_remember_when_they_changed() -> None:
    c = cluster().running()
    c.wait(seconds=30)
    c.set_jobset(restartsCountTowardsMax=1)
    c.step()
    assert {condition["lastTransitionTime"] for condition in c.status["conditions"]} == {
        "2026-11-29T12:00:00Z"
    }
    c.run_pods(ready=False)
    c.step()
    times = {condition["type"]: condition["lastTransitionTime"] for condition in c.status["conditions"]}
    assert times["Ready"] == "2026-11-29T12:00:30Z"
    assert times["Failed"] == "2026-11-29T12:00:00Z"


def test_readiness_counts_nodes() -> None:
    for spec, whole, part in (
        (nodes(2), "2/2", "1/2"),
        (nodes(2) | NODE, "2/2", "1/2"),
        (nodes(2) | APART, "4/4", "3/4"),
    ):
        c = with_node_ring(cluster(**spec)).running()
        assert c.status["ready"] == whole
        c.observed.pods[0]["status"]["conditions"] = []
        c.step()
        assert c.status["ready"] == part


def test_without_an_output_the_status_says_that_nothing_is_kept() -> None:
    c = cluster(output=None).running()
    assert "spec.output.uri is not set" in c.message("Ready")
    assert "spec.output.uri" not in cluster().running().message("Ready")


# -- the secret -------------------------------------------------------------------------------------------


def test_the_token_is_made_once_and_shown_to_nobody() -> None:
    c = cluster()
    decision = c.step()
    assert TOKEN not in repr(decision) + repr(c.observed) + str(decision.status)
    secrets = [one.document for one in decision.apply if one.ref.kind == "Secret"]
    assert [secret["stringData"] for secret in secrets] == [{"token": TOKEN}]
    others = [one.document for one in decision.apply if one.ref.kind != "Secret"]
    assert TOKEN not in json.dumps(others)
    c.observed = replace(c.observed, new_token="ab" * 32)
    c.running()
    kill_trainer(c)
    for _ in range(4):
        assert not [one for one in c.step().apply if one.ref.kind == "Secret"]


# -- rings on nodes ---------------------------------------------------------------------------------------


def cleaning(c: Cluster) -> list[str]:
    label = "tracerl.dev/cleans-ring"
    return [pod["spec"]["nodeName"] for pod in c.observed.pods if label in pod["metadata"]["labels"]]


@pytest.mark.parametrize("ending", ["delete", "complete", "suspend"])
def test_rings_are_removed_from_the_nodes_before_the_finalizer(ending: str) -> None:
    c = with_node_ring(cluster(**nodes(2), **NODE))
    first = c.step()
    assert str(first.apply[0]) == "TraceRLJob/canary"  # before any pod can make a ring
    assert c.job["metadata"]["finalizers"] == ["tracerl.dev/node-ring"]
    c.running()
    assert c.job["metadata"]["annotations"] == {"tracerl.dev/ring-nodes": "machine-0,machine-1"}
    if ending == "delete":
        c.job["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    elif ending == "suspend":
        c.job["spec"]["suspend"] = True
    else:
        c.end_jobset("Completed")
        c.step()
        assert cleaning(c) == []  # the rollout still runs
        c.end_pods("Succeeded")
    c.settle()
    assert cleaning(c) == ["machine-0", "machine-1"]
    assert c.job["metadata"]["finalizers"] == ["tracerl.dev/node-ring"]
    expected = {"delete": "Interrupted", "suspend": "Suspended", "complete": "Complete"}
    assert c.status["summary"] == expected[ending]
    cleaners = [pod for pod in c.observed.pods if pod["spec"].get("volumes")]
    cleaners[0].setdefault("status", {})["phase"] = "Succeeded"
    c.settle()
    assert "finalizers" in c.job["metadata"]
    c.wait(seconds=241)  # the other node does not answer
    c.settle()
    assert "finalizers" not in c.job["metadata"]
    assert cleaning(c) == []


def test_a_job_does_not_start_while_its_ring_is_being_removed() -> None:
    c = with_node_ring(cluster(**NODE)).running()
    c.job["spec"]["suspend"] = True
    c.settle()
    c.job["spec"]["suspend"] = False
    decision = c.step()
    assert not [one for one in decision.apply if one.ref.kind == "JobSet"]
    assert [d.ref.kind for d in decision.delete] == ["Pod"]
    assert [one.ref.kind for one in c.step().apply] == ["JobSet"]


def test_other_jobs_have_no_finalizer() -> None:
    for spec in ({}, APART, NODE | {"transport": {"onlyObject": True, "object": {"uri": "s3://bucket/p"}}}):
        c = with_node_ring(cluster(**spec)).running()
        assert "finalizers" not in c.job["metadata"]


def test_a_document_that_no_server_stored_is_left_alone() -> None:
    for broken in ({}, {"metadata": None}, {"metadata": {"name": "x"}}, {"metadata": {"name": 1}}):
        decision = reconcile(broken, Cluster(job()).observed, Cluster(job()).now)
        assert decision == type(decision)()


def cleaned(c: Cluster, phase: str, node: str = "machine-0") -> None:
    """The cleaning pods of a node that have not ended do so."""
    label = "tracerl.dev/cleans-ring"
    for pod in c.observed.pods:
        if label in pod["metadata"]["labels"] and pod["spec"]["nodeName"] == node:
            pod.setdefault("status", {}).setdefault("phase", phase)


def deleted(**spec: Any) -> Cluster:
    """A job with rings on its nodes that is being deleted."""
    c = with_node_ring(cluster(**(NODE | spec))).running()
    c.job["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    return c


def test_a_failed_cleaner_is_made_again_and_then_its_node_is_named() -> None:
    c = deleted()
    for attempt in range(1, 4):
        c.settle()
        assert cleaning(c) == ["machine-0"] * attempt
        cleaned(c, "Failed")
        if attempt < 3:
            c.settle()
            assert cleaning(c) == ["machine-0"] * attempt  # not at once
            assert "finalizers" in c.job["metadata"]
            c.wait(seconds=61)
    c.events.clear()
    c.settle()
    assert "finalizers" not in c.job["metadata"]
    (event,) = c.events
    assert event.type == "Warning"
    assert f"/dev/shm/{UID}" in event.message
    assert "machine-0" in event.message


def test_a_cleaner_that_worked_at_last_leaves_nothing() -> None:
    c = deleted()
    c.settle()
    cleaned(c, "Failed")
    c.wait(seconds=61)
    c.settle()
    cleaned(c, "Succeeded")
    c.events.clear()
    c.settle()
    assert "finalizers" not in c.job["metadata"]
    assert c.events == []


def test_a_namespace_that_is_deleted_does_not_wait_for_rings() -> None:
    c = deleted(**nodes(2))
    c.step()  # the JobSet goes
    (pod, _) = [one.ref for one in c.decide().apply]
    answer = f'{pod}: pods "x" is forbidden: unable to create new content in namespace team '
    c.observed = replace(c.observed, refusals=(answer + "because it is being terminated",))
    decision = c.decide()
    assert [one.ref.kind for one in decision.apply] == ["TraceRLJob"]
    (event,) = decision.events
    assert f"/dev/shm/{UID}" in event.message
    assert "machine-0, machine-1" in event.message


@pytest.mark.parametrize("ending", ["delete", "suspend"])
def test_a_cleaner_that_is_refused_is_said(ending: str) -> None:
    c = with_node_ring(cluster(**NODE)).running()
    if ending == "delete":
        c.job["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    else:
        c.job["spec"]["suspend"] = True
    c.step()
    (pod,) = [one.ref for one in c.decide().apply]
    c.observed = replace(c.observed, refusals=(f"{pod}: exceeded quota: q",))
    assert c.step().look_again_at is not None
    assert "exceeded quota: q" in c.message("Ready")
    assert "finalizers" in c.job["metadata"]


def test_rings_are_removed_by_the_installations_image_where_it_allows_rings() -> None:
    c = deleted(rollout={"image": "example.org/mine:1"})
    c.observed = replace(c.observed, installation=INSTALLATION)
    c.settle()
    assert cleaning(c) == []
    assert "nodeRing.enabled=true" in c.message("Ready")
    with_node_ring(c).settle()
    (pod,) = c.observed.pods
    parts = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    assert {part["image"] for part in parts} == {INSTALLATION.rollout_image}


def test_a_finalizer_that_somebody_wrote_makes_no_pods() -> None:
    for spec in ({}, APART, {"model": {"uri": 3}}):
        c = with_node_ring(cluster(**spec))
        c.job["metadata"] |= {
            "finalizers": ["tracerl.dev/node-ring"],
            "annotations": {"tracerl.dev/ring-nodes": "machine-7"},
            "deletionTimestamp": "2026-11-29T12:00:00Z",
        }
        c.settle()
        assert cleaning(c) == []
        assert "finalizers" not in c.job["metadata"]


def test_nodes_that_somebody_wrote_are_few_and_have_names_of_nodes() -> None:
    c = deleted()
    names = ["Machine", "a b", "-a", "a..b", "a" * 254, "../x", *(f"machine-{i}" for i in range(999))]
    c.job["metadata"]["annotations"]["tracerl.dev/ring-nodes"] = ",".join(names)
    c.settle()
    assert cleaning(c) == ["machine-0", "machine-1"]
    c.job["status"]["restarts"] = 3
    c.settle()
    assert len(cleaning(c)) == 16  # of 50, at once


def test_a_trainer_that_has_ended_is_no_start() -> None:
    c = cluster().running()
    c.end_container(0, "trainer", 0)
    c.observed.pods[0]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    c.events.clear()
    c.step()
    assert c.conditions()["Ready"] == "True Running"
    assert c.message("Ready") == "the trainer has ended; its JobSet is being completed"
    assert c.events == []


@pytest.mark.parametrize(("code", "words"), [(137, "was ended by SIGKILL"), (0, "ended with exit code 0")])
def test_too_many_restarts_of_a_server_say_the_last_cause(code: int, words: str) -> None:
    c = cluster().running()
    c.end_container(0, "rollout", code, restarts=4)
    c.end_container(0, "trainer", 137)  # which lost its rollout
    c.step()
    assert c.conditions()["Failed"] == "True RestartsExhausted"
    assert f"(last: rollout of canary-node-0-0-abcde: {words})" in c.message("Failed")
