"""Results on a real S3 server: kept whole, fetched by a fresh pod, and what is said of a useless secret."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from s3_server import S3Server

from tracerl.api.errors import JobError
from tracerl.api.job import TraceRLJob
from tracerl.api.resolved import Endpoint, Endpoints, ResolvedJob
from tracerl.rl.checkpoint import Checkpoints
from tracerl.rl.tasks import load_task
from tracerl.runtime.output import Output
from tracerl.transport.base import TransportError
from tracerl.transport.places import open_objects, s3_options

MIB = 2**20


def resolved(base: Path, server: S3Server, bucket: str, secret: Path | None, **spec: object) -> ResolvedJob:
    """A job as in a pod, whose run directory is empty."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    document = {
        "metadata": {"name": "canary"},
        "spec": {
            "model": {"uri": "builtin://tiny-moe"},
            "method": {"name": "TRACE"},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": 4, "promptsPerStep": 2, "samplesPerPrompt": 2},
            "output": {"uri": f"s3://{bucket}/runs", "endpointUrl": server.endpoint_url, "secretName": "s3"},
            "trainer": {"checkpoint": {"keep": 2}},
            **spec,
        },
    }
    return ResolvedJob(
        job=TraceRLJob.model_validate(document),
        job_uid="uid-1",
        run_dir=base,
        cache_dir=base / "cache",
        token_file=base / "token",
        credentials_dir=secret,
        output_uri=f"s3://{bucket}/runs/canary-12345678",
        output_credentials_dir=secret,
        endpoints=Endpoints(rollout=[Endpoint(name="rollout-0", url="http://rollout:8000")]),
    )


def started(job: ResolvedJob) -> ResolvedJob:
    job.write(job.layout.job)
    return job


def keys(server: S3Server, bucket: str) -> dict[str, int]:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
    prefix = "runs/canary-12345678/"
    found = [item for page in pages for item in page.get("Contents", ())]
    assert all(item["Key"].startswith(prefix) for item in found)
    return {item["Key"].removeprefix(prefix): item["Size"] for item in found}


def until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def test_a_fresh_pod_fetches_what_the_one_before_kept(s3_server: S3Server, tmp_path: Path) -> None:
    """The state has more than two parts."""
    bucket, secret = s3_server.bucket(), s3_server.credentials(tmp_path / "secret")
    first = started(resolved(tmp_path / "first", s3_server, bucket, secret))
    checkpoints = Checkpoints(first.layout.checkpoints, keep=2)
    tensors = {"state": torch.randint(0, 255, (65 * MIB,), dtype=torch.uint8)}
    with Output(first, "trainer-0") as output:
        output.restore()
        for step in (1, 2, 3):
            with first.layout.metrics.open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
            checkpoints.save(step, tensors if step == 3 else {"state": torch.zeros(4)}, {"step": step})
            output.saved(step)
            manifest = f"checkpoints/step-{step:06d}/manifest.json"
            until(lambda manifest=manifest: manifest in keys(s3_server, bucket), manifest)
        first.layout.model.mkdir()
        (first.layout.model / "config.json").write_text("{}")
        first.layout.result.write_text("done")
        output.finish()
    found = keys(s3_server, bucket)
    assert {name.split("/")[1] for name in found if name.startswith("checkpoints/")} == {
        "step-000002",
        "step-000003",
    }
    assert found["checkpoints/step-000003/state.safetensors"] > 65 * MIB
    assert {"job.yaml", "metrics.jsonl", "model/config.json", "result.json"} < found.keys()
    second = started(resolved(tmp_path / "second", s3_server, bucket, secret))
    with Output(second, "trainer-0") as output:
        output.restore()
    restored = Checkpoints(second.layout.checkpoints, keep=2).load(pytest.fail)
    assert restored is not None
    assert restored.step == 3
    assert torch.equal(restored.tensors["state"], tensors["state"])
    assert second.layout.metrics.read_text() == first.layout.metrics.read_text()


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (
            lambda s: (s / "AWS_SECRET_ACCESS_KEY").unlink(),
            "Configuration",
            "has no key AWS_SECRET_ACCESS_KEY",
        ),
        (
            lambda s: (s / "AWS_ACCESS_KEY_ID").write_text("\n"),
            "Configuration",
            "has an empty AWS_ACCESS_KEY_ID",
        ),
        (lambda s: (s / "AWS_SECRET_ACCESS_KEY").write_text("no"), "CheckpointFailed", "answers 403"),
    ],
)
def test_a_secret_that_is_of_no_use(s3_server: S3Server, tmp_path: Path, change, reason, words) -> None:
    bucket, secret = s3_server.bucket(), s3_server.credentials(tmp_path / "secret")
    change(secret)
    job = started(resolved(tmp_path / "run", s3_server, bucket, secret))
    with pytest.raises(JobError, match=words) as caught, Output(job, "trainer-0") as output:
        output.restore()
    assert caught.value.reason == reason
    if reason == "Configuration":
        assert "the secret of spec.output.secretName" in str(caught.value)
        objects = {"uri": f"s3://{bucket}/records", "endpointUrl": s3_server.endpoint_url, "secretName": "s3"}
        other = resolved(tmp_path / "other", s3_server, bucket, secret, transport={"object": objects})
        with pytest.raises(TransportError, match=words) as refused:
            open_objects(other)
        assert "the secret of spec.transport.object.secretName" in str(refused.value)


def test_a_bucket_that_does_not_exist(s3_server: S3Server, tmp_path: Path) -> None:
    secret = s3_server.credentials(tmp_path / "secret")
    job = started(resolved(tmp_path / "run", s3_server, "no-such-bucket", secret))
    with pytest.raises(JobError, match="the bucket does not exist"), Output(job, "trainer-0") as output:
        output.restore()


@pytest.mark.parametrize("by", ["output", "transport"])
def test_a_task_is_read_with_the_job_s_own_credentials(s3_server: S3Server, tmp_path: Path, by: str) -> None:
    """The environment has none, and no endpoint."""
    bucket, secret = s3_server.bucket(), s3_server.credentials(tmp_path / "secret")
    lines = b"".join(b'{"prompt": "%d =", "answer": "%d"}\n' % (n, n) for n in range(8))
    code = b"def score(completion, item):\n    return float(completion == item['answer'])\n"
    for name, data in ("task/words.jsonl", lines), ("task/code.py", code):
        s3_server.client().put_object(Bucket=bucket, Key=name, Body=data)
    task = {
        "uri": f"s3://{bucket}/task/words.jsonl",
        "reward": "reward:score",
        "source": {"uri": f"s3://{bucket}/task/code.py"},
        "heldOutPrompts": 2,
    }
    place = {"uri": f"s3://{bucket}/x", "endpointUrl": s3_server.endpoint_url, "secretName": "s3"}
    other = {"output": {}, "transport": {"object": place}} if by == "transport" else {}
    job = resolved(tmp_path / "run", s3_server, bucket, secret, task=task, **other)
    loaded = load_task(job.job.spec.task, order_seed=1, scratch=job.run_dir, s3=s3_options(job))
    try:
        items = loaded.train(range(3))
        assert loaded.score(items, [str(items[0].answer), "x", str(items[2].answer)]) == [1.0, 0.0, 1.0]
    finally:
        loaded.close()
