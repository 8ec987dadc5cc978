"""The operator's cache: what is newer wins, and what is gone stays gone."""

from __future__ import annotations

from typing import Any

from tracerl_operator.shell.kinds import CONFIG_MAP, JOB, JOBSET, POD, JobKey
from tracerl_operator.shell.store import Store
from tracerl_operator.types import Ref

KEY = JobKey("team", "canary")
MAP = Ref("v1", "ConfigMap", "canary-job")


def document(
    version: int, name: str = "canary-job", uid: str = "u1", *, job: str | None = "canary", **more: Any
) -> dict[str, Any]:
    labels = {} if job is None else {"tracerl.dev/job-name": job}
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": metadata, **more}


def test_newer_versions_win() -> None:
    store = Store()
    assert store.put(CONFIG_MAP, document(9, data={"progress": "9"})) == KEY
    assert store.put(CONFIG_MAP, document(9, data={"progress": "9"})) is None
    assert store.put(CONFIG_MAP, document(8, data={"progress": "8"})) is None
    assert store.objects(KEY)[MAP]["data"] == {"progress": "9"}
    assert store.put(CONFIG_MAP, document(10, data={"progress": "10"})) == KEY
    assert store.objects(KEY)[MAP]["data"] == {"progress": "10"}


def test_what_went_does_not_come_back_with_an_older_list() -> None:
    store = Store()
    store.put(CONFIG_MAP, document(5))
    assert store.remove(CONFIG_MAP, document(7)) == KEY
    assert store.objects(KEY) == {}
    assert store.put(CONFIG_MAP, document(5)) is None
    assert store.objects(KEY) == {}
    # It only lost its label, and has it again; or another one has its name.
    assert store.put(CONFIG_MAP, document(8)) == KEY
    assert store.remove(CONFIG_MAP, document(9)) == KEY
    assert store.put(CONFIG_MAP, document(6, uid="u2")) == KEY


def test_the_end_of_a_former_object_of_a_name_ends_not_the_next() -> None:
    store = Store()
    store.put(CONFIG_MAP, document(9, uid="u2"))
    assert store.remove(CONFIG_MAP, document(7, uid="u1")) is None
    assert MAP in store.objects(KEY)


def test_a_list_ends_what_it_has_not_but_for_what_is_newer() -> None:
    store = Store()
    for version, name in ((3, "a"), (4, "b"), (12, "c")):
        store.put(CONFIG_MAP, document(version, name, f"uid-{name}"))
    store.put(POD, document(2, "p", "uid-p", spec={}))
    assert store.keep(CONFIG_MAP, None, {("team", "a")}, 10) == {KEY}
    assert {ref.name for ref in store.objects(KEY)} == {"a", "c"}
    assert len(store.pods(KEY)) == 1
    assert store.keep(CONFIG_MAP, "other", set(), 99) == set()
    assert store.keep(CONFIG_MAP, "team", set(), 99) == {KEY}


def test_objects_of_others_are_no_news() -> None:
    store = Store()
    assert store.put(CONFIG_MAP, document(1, job=None)) is None
    assert store.put(JOB, {"metadata": {"name": "x"}}) is None
    assert store.put(CONFIG_MAP, document(1, job="a")) == JobKey("team", "a")
    # Whose it is may change.
    assert store.put(CONFIG_MAP, document(2, job="b")) == JobKey("team", "b")
    assert store.objects(JobKey("team", "a")) == {}
    assert MAP in store.objects(JobKey("team", "b"))


def test_jobs_pods_and_objects_are_apart_and_without_what_nobody_reads() -> None:
    store = Store()
    job = document(1, "canary", "j", job=None, spec={"x": 1})
    job["metadata"]["managedFields"] = [{}]
    store.put(JOB, job)
    store.put(
        POD, document(1, "p", "p", spec={"nodeName": "n", "containers": []}, status={"phase": "Running"})
    )
    template = {"spec": {"completions": 2, "template": {"spec": {}}}}
    jobset = {"suspend": False, "replicatedJobs": [{"name": "node", "template": template}]}
    store.put(JOBSET, document(1, "s", "s", spec=jobset))
    found = store.job(KEY)
    assert found is not None
    assert found["spec"] == {"x": 1}
    assert "managedFields" not in found["metadata"]
    assert "managedFields" in job["metadata"]
    (pod,) = store.pods(KEY)
    assert pod["spec"] == {"nodeName": "n"}
    assert pod["status"] == {"phase": "Running"}
    ((_, cached),) = store.objects(KEY).items()
    kept = {"name": "node", "template": {"spec": {"completions": 2}}}
    assert cached["spec"] == {"suspend": False, "replicatedJobs": [kept]}
    assert store.drop(JOB) == {KEY}
    assert store.job(KEY) is None
