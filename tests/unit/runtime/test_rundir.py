"""The run directory: who may use it, what resuming may change, and what is left when a run is over."""

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fsspec.core import url_to_fs
from live_processes import processes_of, wait_until

from tracerl.api.errors import InputError
from tracerl.api.job import TraceRLJob
from tracerl.api.resolved import EndpointFile, ResolvedJob, RunLayout, write_atomically
from tracerl.observe.run import Ending
from tracerl.runtime import rundir
from tracerl.transport.ring.file import RingDirectory
from tracerl.transport.store.spill import SpillDirectory


def job(**spec) -> TraceRLJob:
    document = yaml.safe_load("""
        metadata: {name: tiny}
        spec:
          model: {uri: "builtin://tiny-moe"}
          task: {name: builtin/chain_sum}
          algorithm: {steps: 2, promptsPerStep: 2, samplesPerPrompt: 2}
          method: {name: TRACE, trace: {codeBits: 1}}
    """)
    document["spec"].update(spec)
    return TraceRLJob.model_validate(document)


def test_the_resolved_job_reads_back_as_it_was_written(tmp_path):
    resolved = rundir.start_run(job(), tmp_path)
    assert ResolvedJob.read(RunLayout(tmp_path).job) == resolved
    text = RunLayout(tmp_path).job.read_text()
    assert "microBatchTokens: 16384" in text
    assert resolved.endpoints.rollout[0].name == "rollout-0"
    assert resolved.records_uri == f"file://{tmp_path}/records"


def test_records_lie_in_the_run_directory_whatever_it_is_called(tmp_path):
    """An oracle of its own: what fsspec makes of the URL."""
    for name in ("sp ace", "per%20cent", "hash#", "question?"):
        resolved = rundir.start_run(job(), mkdir(tmp_path / name))
        assert url_to_fs(resolved.records_uri)[1] == str(tmp_path / name / "records")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/".join(["x" * 200] * 5), "has a path of 1,0.. bytes, more than 900; give another directory"),
        (os.fsdecode(b"not-utf-8-\xff"), "is not UTF-8; give another directory with --out"),
        ("file::x", "holds ::, which joins URLs of fsspec; give another directory with --out"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_processes_could_not_tell_each_other_of(tmp_path, name, words, resume):
    with pytest.raises(InputError, match=words) as caught:
        rundir.refuse(tmp_path / name, resume=resume)
    str(caught.value).encode()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("limits", "after"), [((40, 4096), "4096"), ((300, 300), "300"), ((40, 40), "may have 40 files open")]
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(limits, after):
    code = (
        "import resource\n"
        "from tracerl.runtime.rundir import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "try:\n"
        "    allow_open_files()\n"
        "    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except Exception as error:\n"
        "    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert after in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        ("{", "not YAML"),
        ("job: 1", "job"),
        ("jobUid: x", "Field required"),
        ("job: {spec: {task: {parameters: &all {all: *all}}}}", "holds itself, or it is nested too deep"),
        ("[" * 3000, "holds itself, or it is nested too deep"),
    ],
)
def test_a_resolved_job_that_is_none(tmp_path, content, words):
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        ResolvedJob.read(path)
    assert str(caught.value).startswith(f"{path} is not a resolved job (")


def test_a_run_is_resumed_with_its_uid_also_elsewhere(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    before = rundir.start_run(job(), first)
    first.rename(second)
    after = rundir.resume_run(job(), second)
    assert after.job_uid == before.job_uid
    assert (after.run_dir, after.token_file, after.endpoints.directory) == (
        second,
        second / "token",
        second / "endpoints",
    )


@pytest.mark.parametrize(
    ("spec", "changed"),
    [
        ({}, None),
        ({"failurePolicy": {"maxRestarts": 9}}, None),
        ({"activeDeadlineSeconds": 60}, None),
        ({"trainer": {"checkpoint": {"every": 1}}}, None),
        ({"expect": {"maxGap": "0.1"}}, None),
        ({"output": {"uri": "file:///elsewhere"}}, None),
        ({"output": {"uri": "s3://runs", "endpointUrl": "http://minio:9000"}}, None),
        ({"transport": {"ring": {"size": "1Gi"}, "deadlineSeconds": 5}}, None),
        ({"transport": {"onlyObject": True}}, "spec.transport.onlyObject"),
        ({"algorithm": {"steps": 3, "promptsPerStep": 2, "samplesPerPrompt": 2}}, "spec.algorithm.steps"),
        ({"method": {"name": "QAT"}}, "spec.method.name"),
        ({"method": {"name": "TRACE", "trace": {"codeBits": 4}}}, "spec.method.trace"),
        ({"trainer": {"optimizer": {"learningRate": "1"}}}, "spec.trainer.optimizer.learningRate"),
        ({"quantization": {"targets": ["KVCache"]}}, "spec.quantization.targets"),
    ],
)
def test_what_may_change_when_a_run_is_resumed(tmp_path, spec, changed):
    rundir.start_run(job(), tmp_path)
    if changed is None:
        assert rundir.resume_run(job(**spec), tmp_path).job == job(**spec)
    else:
        with pytest.raises(InputError) as caught:
            rundir.resume_run(job(**spec), tmp_path)
        assert str(caught.value).startswith(f"{changed} is not what the run in {tmp_path} was started with;")


HOLDER = """
import sys
from pathlib import Path
from pathlib import Path
from tracerl.runtime.rundir import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_in_one_directory_never_meet(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        words = rf"another tracerl run \(process {holder.pid}\) works in {run}; wait"
        with pytest.raises(InputError, match=words), rundir.claimed(run):
            pass
        holder.kill()
    with rundir.claimed(run):
        assert RunLayout(run).lock.read_text() == f"{os.getpid()}\n"
    assert RunLayout(run).lock.read_text() == ""


def test_the_next_run_waits_for_the_last_processes_of_a_killed_one(tmp_path):
    """The children of a killed parent hold the lock until they have noticed."""
    layout = RunLayout(tmp_path)
    layout.lock.write_text("999999999\n")
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time\n"
            "file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True)\n"
            "time.sleep(0.5)",
            str(layout.lock),
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"held\n"
    with rundir.claimed(tmp_path), layout.lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.stdout.close()
    wait_until(lambda: child.poll() is not None, "the child is reaped")


LEFT_OVER = """
import fcntl, os, signal, subprocess, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.pwrite(lock, f"{os.getpid()}\\n".encode(), 0)
fcntl.flock(lock, fcntl.LOCK_EX)
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(1000)", *sys.argv[2:]],
    pass_fds=[lock], start_new_session=True, stdout=subprocess.DEVNULL,
    env={**os.environ, "TRACERL_PARENT_PID": str(os.getpid())},
)
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_what_a_dead_run_left_behind_and_cannot_end_itself(tmp_path, monkeypatch, ours):
    """A stopped trainer of this run is killed; one of another run that holds the lock is named."""
    monkeypatch.setattr(rundir, "_LOCK_SECONDS", 0.3)
    layout = RunLayout(tmp_path)
    job_path = layout.job if ours else tmp_path / "other.yaml"
    done = subprocess.run(
        [
            *(sys.executable, "-c", LEFT_OVER, str(layout.lock)),
            *("tracerl.runtime.trainer_main", str(job_path), "trainer-0"),
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    pid = int(done.stdout)
    try:
        if ours:
            with rundir.claimed(tmp_path):
                assert not processes_of(str(job_path))
        else:
            words = rf"an earlier tracerl run left processes behind \({pid}\) that still work in {tmp_path};"
            with pytest.raises(InputError, match=words), rundir.claimed(tmp_path):
                pass
            assert processes_of(str(job_path)) == {pid}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_child_of_a_run_that_lives_is_not_left_over(tmp_path):
    arguments = ["tracerl.runtime.trainer_main", str(tmp_path / "job.yaml"), "trainer-0"]
    for parent, left_over in ((str(os.getpid()), False), ("999999999", True), (None, False)):
        environment = {**os.environ, **({} if parent is None else {"TRACERL_PARENT_PID": parent})}
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            child.stdout.readline()
            assert rundir._is_left_over(child.pid, tmp_path / "job.yaml") is left_over
            assert not rundir._is_left_over(child.pid, tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("left", "begun"),
    [
        ([], False),
        (["events.jsonl", "metrics.jsonl", "result.json", "logs/trainer-0.log", "lock"], False),
        (["metrics.jsonl:{}\n"], True),
        (["checkpoints/step-000001/model"], True),
    ],
)
def test_a_run_that_did_not_get_to_its_first_step_is_started_anew(tmp_path, left, begun):
    layout = RunLayout(tmp_path)
    before = rundir.start_run(job(), tmp_path)
    for name, _, text in (entry.partition(":") for entry in left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rundir.has_begun(tmp_path) is begun
    corrected = job(method={"name": "QAT"})
    words = "start a new run with --out" if begun else "start it anew without --resume"
    with pytest.raises(InputError, match=words):
        rundir.resume_run(corrected, tmp_path)
    rundir.refuse(tmp_path, resume=True)
    if begun:
        with pytest.raises(InputError, match="already has a run"):
            rundir.refuse(tmp_path, resume=False)
        return
    rundir.refuse(tmp_path, resume=False)
    after = rundir.start_run(corrected, tmp_path)
    assert after.job_uid != before.job_uid
    assert ResolvedJob.read(layout.job) == after
    assert {path.name for path in tmp_path.iterdir()} <= {"job.yaml", "lock", "logs"}


def test_the_token_is_secret_and_new_every_time(tmp_path):
    resolved = rundir.start_run(job(), tmp_path)
    layout = resolved.layout
    os.umask(before := os.umask(0))
    os.umask(0)
    try:
        rundir.write_token(layout)
    finally:
        os.umask(before)
    first = resolved.token()
    assert stat.S_IMODE(layout.token.stat().st_mode) == 0o600
    assert len(first) == 64
    layout.token.chmod(0o644)
    rundir.write_token(layout)
    assert stat.S_IMODE(layout.token.stat().st_mode) == 0o600
    assert resolved.token() != first
    assert first not in layout.job.read_text()


@pytest.mark.parametrize(("retention", "kept"), [("Trained", False), ("Job", True), ("Forever", True)])
def test_what_is_left_when_a_run_is_over(tmp_path, retention, kept):
    resolved = rundir.start_run(job(transport={"object": {"retention": retention}}), tmp_path)
    layout = resolved.layout
    rundir.write_token(layout)
    EndpointFile(url="http://127.0.0.1:1", pid=1, instance_id="x").publish(
        layout.endpoints / "rollout-0.json"
    )
    for name in (
        "records/a/b.trec",
        "weights/v-1/model.safetensors",
        "checkpoints/step-000001/model",
        ".x.tmp",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    rundir.write_ending(layout, Ending(state="Stopped", reason="Interrupted", message="", restarts={}))
    rundir.tidy(resolved)
    rundir.tidy(resolved)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"job.yaml", "result.json", "checkpoints"} | ({"records"} if kept else set())
    assert rundir.read_ending(layout).state == "Stopped"


def mkdir(path):
    path.mkdir()
    return path


def rings(shared):
    """Names of the runs that have a ring."""
    return {path.parents[1].name for path in shared.glob("*/store-0/ring")}


def test_rings_of_killed_runs_go_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "SHARED_MEMORY", tmp_path / "shm")
    jobs = [rundir.start_run(job(), mkdir(tmp_path / name)) for name in ("living", "killed")]
    living, killed = (resolved.ring_dir.name for resolved in jobs)
    stores = [RingDirectory.create(resolved.store_place("store-0").directory) for resolved in jobs]
    (tmp_path / "shm/tracerl-other/store-0").mkdir(parents=True)
    for name in (living, killed, "tracerl-other"):
        (tmp_path / f"shm/{name}/store-0/ring").write_text("")
    os.close(stores[1]._descriptor)  # as the end of its process does
    rundir.remove_dead_rings()
    assert rings(tmp_path / "shm") == {living, "tracerl-other"}
    # The run's own end removes what its store left.
    rundir.tidy(jobs[0])
    assert rings(tmp_path / "shm") == {living, "tracerl-other"}
    os.close(stores[0]._descriptor)
    rundir.tidy(jobs[0])
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["tracerl-other"]


def test_the_rings_of_two_runs_lie_apart_and_a_socket_fits(tmp_path):
    """Also when their manifest sets the UID, and however long the names are."""
    wanted = job().model_copy(update={"metadata": job().metadata.model_copy(update={"uid": "x" * 64})})
    places = []
    for name in ("a", "b" * 200):
        resolved = rundir.start_run(wanted, mkdir(tmp_path / name))
        assert resolved.job_uid == "x" * 64
        places.append(resolved.store_place("store-4095"))
        assert rundir.resume_run(wanted, tmp_path / name).ring_dir == resolved.ring_dir
    assert places[0].directory.parent != places[1].directory.parent
    assert all(len(bytes(place.socket)) <= 107 for place in places)


def test_spilled_frames_of_a_killed_store_are_removed(tmp_path):
    spilled, run = mkdir(tmp_path / "nvme"), mkdir(tmp_path / "run")
    resolved = rundir.start_run(job(transport={"spillPath": str(spilled)}), run)
    living = SpillDirectory(spilled, job_uid="another", store="store-0", limit_bytes=None)
    killed = SpillDirectory(spilled, job_uid=resolved.job_uid, store="store-0", limit_bytes=None)
    (killed.directory / "00000000").write_text("frames")
    os.close(killed._lock)  # as the end of its process does
    rundir.tidy(resolved)
    assert [*spilled.iterdir()] == [living.directory]
    living.close()
    assert [*spilled.iterdir()] == []


@pytest.mark.parametrize("retention", ["Trained", "Job"])
def test_objects_of_a_run_that_was_stopped_are_removed(tmp_path, retention):
    """Those of other jobs stay, and all of them when the job keeps its own."""
    uri = f"file://{tmp_path}/objects"
    wanted = job(transport={"onlyObject": True, "object": {"uri": uri, "retention": retention}})
    resolved = rundir.start_run(wanted, mkdir(tmp_path / "run"))
    for uid in (resolved.job_uid, "another"):
        (tmp_path / "objects" / uid / "run/rollout-0").mkdir(parents=True)
        (tmp_path / "objects" / uid / "run/rollout-0/00000000-1.trecs").write_text("")
    rundir.remove_objects(resolved)
    left = {path.parts[-4] for path in (tmp_path / "objects").rglob("*.trecs")}
    assert left == {"another"} | ({resolved.job_uid} if retention == "Job" else set())
    assert (tmp_path / "objects" / resolved.job_uid).exists() == (retention == "Job")


@pytest.mark.parametrize(("text", "found"), [(None, None), ("", None), ("{}", None), ("[1", None)])
def test_an_ending_that_is_none(tmp_path, text, found):
    if text is not None:
        RunLayout(tmp_path).result.write_text(text)
    assert rundir.read_ending(RunLayout(tmp_path)) is found


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    """Interrupted between the temporary file and its rename, as by a full disk."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tracerl.api.resolved import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "write_atomically(Path(sys.argv[1]), 'new' * 1000)\n"
    )
    target = tmp_path / "file"
    target.write_text("old")
    done = subprocess.run([sys.executable, "-B", "-c", code, str(target)], capture_output=True, check=False)
    assert b"OSError" in done.stderr
    assert target.read_text() == "old"
    assert [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("file")])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make):
    """As root one would else lose /dev/null itself."""
    (tmp_path / "file").write_text("old")
    target = tmp_path / "target"
    make(target)
    kind = stat.S_IFMT(target.lstat().st_mode)
    with pytest.raises(OSError, match="what is there is no regular file"):
        write_atomically(target, "new")
    assert stat.S_IFMT(target.lstat().st_mode) == kind
    assert (tmp_path / "file").read_text() == "old"
    assert len([*tmp_path.iterdir()]) == 2
