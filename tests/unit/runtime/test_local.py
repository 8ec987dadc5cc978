"""What a local run is made of: its directory, its processes' environment, and what is shown of its log."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from test_rundir import job

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS
from tracerl.api.resolved import RunLayout
from tracerl.observe.runlog import RunLog
from tracerl.rl.steprecord import StartRecord
from tracerl.runtime import compare, local, rundir
from tracerl.runtime.display import Lines


@pytest.mark.parametrize(
    ("out", "uri", "found"),
    [
        (None, None, "/here/runs/tiny"),
        ("there", None, "/here/there"),
        ("/there", "s3://runs", "/there"),
        ("~/there", None, "/home/me/there"),
        (None, "file:///data/run", "/data/run"),
        (None, "s3://runs", None),
        (None, "pvc://claim/runs", None),
    ],
)
def test_where_a_run_goes(monkeypatch, out, uri, found):
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    monkeypatch.setenv("HOME", "/home/me")
    wanted = job(output={"uri": uri})
    if found is None:
        with pytest.raises(InputError, match="is not on this machine; give a directory with --out"):
            local.run_directory(wanted, None)
    else:
        assert local.run_directory(wanted, out and Path(out)) == Path(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_processes_and_their_environment(monkeypatch, tmp_path, before, after):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if before is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    trainer = {"threads": 5, "parallelism": {"data": 2}}
    resolved = rundir.start_run(job(rollout={"threads": 3}, trainer=trainer), tmp_path)
    rundir.write_token(resolved.layout)
    processes = local.process_specs(resolved)
    # The store of a rollout is there first; only trainers cannot go on without each other.
    assert [process.name for process in processes] == ["store-0", "rollout-0", "trainer-0", "trainer-1"]
    assert [process.group for process in processes] == ["store-0", "rollout-0", "trainer", "trainer"]
    assert [process.env["OMP_NUM_THREADS"] for process in processes] == ["1", "3", "5", "5"]
    assert [process.arguments[-3:-2] for process in processes] == [
        [f"tracerl.runtime.{role}_main"] for role in ("store", "rollout", "trainer", "trainer")
    ]
    # Nothing that a run listens on is reachable from another machine.
    for carrier in ("GLOO", "NCCL"):
        assert {process.env[f"{carrier}_SOCKET_IFNAME"] for process in processes} == {"lo"}
    assert {process.env["GLIBC_TUNABLES"] for process in processes} == {after}
    for process in processes:
        assert resolved.token() not in " ".join([*process.arguments, *process.env.values()])


@pytest.mark.parametrize(
    ("visible", "rollout", "trainer"),
    [
        (None, "0", "1"),
        ("0", "0", "0"),
        ("0,1", "0", "1"),
        ("5, GPU-8c1,7", "5", "GPU-8c1"),
        # CUDA shows what stands before the first that is not there.
        ("7,8,0", "7", "7"),
        ("8", None, None),
        ("", None, None),
    ],
)
def test_processes_see_a_gpu_each_as_far_as_there_are_enough(
    monkeypatch, tmp_path, visible, rollout, trainer
):
    files = [Path(f"/dev/nvidia{number}") for number in range(8)]
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda at, what: files if at == Path("/dev") else glob(at, what))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resolved = rundir.start_run(job(rollout={"gpusPerNode": 1}, trainer={"gpusPerNode": 1}), tmp_path)
    found = [process.env.get("CUDA_VISIBLE_DEVICES") for process in local.process_specs(resolved)]
    assert found == [None, rollout, trainer]


def test_a_store_that_ended_gives_its_memory_back(tmp_path):
    """Before the next one takes as much; the trainers' meeting place goes with the trainers."""
    resolved = rundir.start_run(job(), tmp_path)
    leaves = {process.name: set(process.leaves) for process in local.process_specs(resolved)}
    place = resolved.store_place("store-0")
    assert {place.ring, place.socket, tmp_path / "endpoints/store-0.json"} == leaves["store-0"]
    assert leaves["trainer-0"] == {tmp_path / "endpoints/trainer-0.json", tmp_path / "endpoints/trainers"}


def test_without_a_ring_there_is_no_store(tmp_path):
    resolved = rundir.start_run(job(transport={"onlyObject": True}), tmp_path)
    assert [process.name for process in local.process_specs(resolved)] == ["rollout-0", "trainer-0"]
    assert resolved.ring_dir is None
    with pytest.raises(ValueError, match="store-0 has no ring"):
        resolved.store_place("store-0")


@pytest.mark.parametrize(
    ("counts", "colocation", "nodes"),
    [
        ((1, 1, 2), "Pod", [0, 0]),
        ((2, 2, 2), "Pod", [0, 1]),
        ((2, 2, 6), "Node", [0, 0, 0, 1, 1, 1]),
        ((1, 1, 1), "None", [1]),
        ((2, 3, 3), "None", [2, 3, 4]),
    ],
)
def test_the_nodes_that_a_machine_stands_in_for(tmp_path, counts, colocation, nodes):
    rollouts, trainers, ranks = counts
    wanted = job(
        rollout={"nodes": rollouts},
        trainer={"nodes": trainers, "parallelism": {"data": ranks}},
        placement={"colocation": colocation},
    )
    resolved = rundir.start_run(wanted, tmp_path)
    assert [resolved.node(f"trainer-{rank}") for rank in range(ranks)] == [f"node-{node}" for node in nodes]
    for role in ("rollout", "store"):
        assert [resolved.node(f"{role}-{i}") for i in range(rollouts)] == [
            f"node-{i}" for i in range(rollouts)
        ]
    names = [process.name for process in local.process_specs(resolved)]
    assert names == [
        *(f"{role}-{i}" for role in ("store", "rollout") for i in range(rollouts)),
        *(f"trainer-{rank}" for rank in range(ranks)),
    ]


def manifest(tmp_path, **spec) -> Path:
    path = tmp_path / "job.yaml"
    document = job(**spec).model_dump(mode="json", by_alias=True)
    path.write_text(json.dumps({**document, "status": None}))
    return path


def test_a_task_whose_package_is_not_installed(monkeypatch, tmp_path):
    path = manifest(tmp_path, task={"name": "reasoning_gym/chain_sum"})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"needs reasoning-gym, which is not installed; run make install in"):
        local.load_local_job(path, [])


def test_the_runs_of_a_comparison(tmp_path):
    path = manifest(tmp_path, expect={"maxGap": "0.1"})
    methods = compare.parse_methods("trace, qat")
    arms = compare.plan_arms(path, ["spec.algorithm.seed=7"], methods, 2, tmp_path)
    assert [arm.directory.name for arm in arms] == ["trace-seed7", "trace-seed8", "qat-seed7", "qat-seed8"]
    assert [arm.job.spec.algorithm.seed for arm in arms] == [7, 8, 7, 8]
    assert [arm.job.spec.method.name for arm in arms] == ["TRACE", "TRACE", "QAT", "QAT"]
    assert [arm.job.spec.method.trace is None for arm in arms] == [False, False, True, True]
    assert all(arm.job.spec.expect.max_gap is None for arm in arms)
    assert arms[0].job.spec.warmup == arms[2].job.spec.warmup


CANARY = Path(__file__).parents[3] / "jobs/examples/canary.yaml"


def test_the_canary_can_be_compared_under_every_method(tmp_path):
    """Whatever the manifest sets for TRACE, the jobs of the other methods are valid ones."""
    pytest.importorskip("reasoning_gym")
    more = ["spec.quantization.secondInput=Recorded"]
    for overrides in ([], more):
        arms = compare.plan_arms(
            CANARY, overrides, compare.parse_methods("BF16,Vanilla,QAT,TRACE"), 1, tmp_path
        )
        assert [arm.job.spec.records.audit_every for arm in arms] == [0, 64, 64, 64]
    assert [arm.job.spec.quantization.second_input for arm in arms] == ["RTN", "RTN", "RTN", "Recorded"]


def test_a_fault_of_one_method_names_it(tmp_path):
    """A dimension that blocks do not divide is a fault where something is quantised."""
    config = {**BUILTIN_MODELS["tiny-moe"].to_hf_config(), "moe_intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = manifest(tmp_path, method={"name": "BF16"}, model={"uri": f"file://{tmp_path}"})
    with pytest.raises(InputError) as caught:
        compare.plan_arms(path, [], compare.parse_methods("BF16,QAT"), 1, tmp_path)
    assert str(caught.value).startswith("under method QAT, ")
    assert "does not divide the model's expert hidden size 24" in str(caught.value)


def start(resumed_from, held_out=None) -> dict:
    return StartRecord(
        run_id="r",
        time=time.time(),
        resumed_from=resumed_from,
        steps=9,
        method="TRACE",
        parameters=1_500_000,
        row_bytes=1,
        whole_row_bytes=1,
        warmup_steps=0,
        warmup_seconds=0,
        held_out_reward=held_out,
    ).model_dump(mode="json")


def test_what_is_shown_of_a_log(tmp_path, capsys):
    """Nothing of before, a line for every tenth of a warm-up, and each thing once."""
    with RunLog(tmp_path) as log:
        log.event("Restarted", "of an earlier run")
        follower = local.Follower(RunLayout(tmp_path), Lines(print))
        follower.show()
        for done in range(5, 101, 5):
            log.progress("warming up", done, 100, loss=0.25)
            follower.show()
        log.write(start(0, 0.5))
        log.event("Restarted", "rollout-0 was killed")
        log.event("RolloutRestarted", "rollout-0 was restarted")
        log.write(start(4))
        (tmp_path / "events.jsonl").open("a").write('{"torn": ')
        follower.show()
        follower.show()
    assert follower.step == 4
    assert capsys.readouterr().out.splitlines() == [
        "warming up 5/100  loss 0.25",
        *(f"warming up {done}/100  loss 0.25" for done in range(10, 101, 10)),
        "TRACE starts: 1.50 M parameters, held-out reward 0.500",
        "rollout-0 was killed",
        "TRACE continues after step 4: 1.50 M parameters",
    ]
