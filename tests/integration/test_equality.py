"""The trainer and a rollout process with the same weights: what travelled between them makes them equal."""

import dataclasses

import pytest
import torch
from rollout_servers import NODE, Server, reader_of, resolve

from tracerl.api.job import Spec
from tracerl.api.model import BUILTIN_MODELS
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.client import RolloutClient, Sampling, push_from_disk
from tracerl.engines.hf import write_model
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.records.pairing import assemble
from tracerl.records.sites import audit_table, site_table
from tracerl.transport.sources import open_source

pytestmark = pytest.mark.xdist_group("rollout-server")

SHAPE = BUILTIN_MODELS["tiny-moe"]
PROMPTS = [[3 + 5 * i % 50, 7, 11 + i, 20][: 1 + i % 4] for i in range(12)]
TRACE = {"codeBits": 1, "layers": {"policy": "All"}}


def serve(directory, method, dtype, trace):
    """A server that records everything, in frames of few rows, and has room for half of the requests."""
    resolved = resolve(directory / "run")
    document = resolved.job.spec.model_dump(mode="json", by_alias=True)
    document["model"]["dtype"] = dtype
    document["method"] = {"name": method, "trace": trace}
    document["quantization"]["secondInput"] = "Recorded" if method == "TRACE" else "RTN"
    document["records"] |= {"chunkTokens": 7, "auditEvery": 1}
    document["rollout"] |= {"maxRunningRequests": 6}
    job = resolved.job.model_copy(update={"spec": Spec.model_validate(document)})
    resolved = resolved.model_copy(update={"job": job})
    resolved.write(resolved.run_dir / "job.yaml")
    return Server(resolved)


async def generate(server, client, version) -> list[Trajectory]:
    spec = server.resolved.job.spec
    frames = open_source(server.resolved, "run-1", NODE)
    sampling = [Sampling(max_new_tokens=4 + 2 * i, seed=i) for i in range(len(PROMPTS))]
    ids = [f"{version}-{i}" for i in range(len(PROMPTS))]
    trajectories = []
    for prompt, one in zip(PROMPTS, await client.generate_batch(PROMPTS, sampling, ids=ids), strict=True):
        found = [
            assemble(
                one.records,
                reader_of(frames),
                table(SHAPE, spec),
                tokens=len(prompt) + len(one.tokens),
                prompt_tokens=len(prompt),
                token_versions=one.versions,
                job_uid="uid-1",
                run_id="run-1",
                trajectory=one.id,
            )
            for table in (site_table, audit_table)
        ]
        assert [records.missing for records in found] == [{}, {}]
        trajectories.append(
            Trajectory(
                id=one.id,
                tokens=torch.tensor(prompt + one.tokens),
                prompt_tokens=len(prompt),
                logp_rollout=torch.tensor(one.logp),
                token_versions=one.versions,
                records=found[0],
                audit=found[1],
            )
        )
    frames.close()
    return trajectories


def gap(trainer, trajectories, version, *, guided=True):
    logp = trainer.forward(Batch(trajectories), guided=guided, temperature=1.0, version=version)
    return torch.cat(
        [
            (row[: len(t.logp_rollout)] - t.logp_rollout).abs()
            for row, t in zip(logp, trajectories, strict=True)
        ]
    )


def shifted(trajectory):
    records = dataclasses.replace(trajectory.records, rows=trajectory.records.rows.roll(1, 0))
    return dataclasses.replace(trajectory, records=records)


@pytest.mark.parametrize(("method", "trace"), [("BF16", None), ("QAT", None), ("TRACE", TRACE)])
async def test_fp32_is_equal_at_every_version(tmp_path, method, trace):
    server = serve(tmp_path, method, "Float32", trace)
    trainer = ReferenceTrainer(SHAPE, server.resolved.job.spec)
    trainer.set_learning_rate(1e-3)
    async with RolloutClient(server.url, "s3cret", run_id="run-1") as client:
        await client.connect()
        for version in range(2):
            write_model(tmp_path / f"v{version}", SHAPE, trainer.export())
            await push_from_disk([client], str(tmp_path / f"v{version}"), version)
            trajectories = await generate(server, client, version)
            found = gap(trainer, trajectories, version)
            # Close to a boundary, where rounding noise decides, one value in 10^5 falls to the other side and
            # moves the rest of its trajectory; where everything is guided, none can.
            assert found.quantile(0.7) < 1e-5
            assert found.max() < 1e-5 or method == "QAT"
            stats = trainer.stats()
            assert (stats.routes_missing, stats.guided_missing) == (0, 0)
            assert len(stats.sites) == {"BF16": 0, "QAT": 3, "TRACE": 4}[method] * SHAPE.layers
            for counts in stats.sites.values():
                assert counts.values > 0
                assert counts.rtn_mismatched <= counts.values / 50
                assert counts.scales_wrong == 0
                assert counts.guided_mismatched == (0 if method == "TRACE" else counts.rtn_mismatched)
            assert gap(trainer, [shifted(t) for t in trajectories], version).mean() > 0.03
            trainer.accumulate(
                Batch(trajectories),
                lambda logp: -logp.sum() / 100,
                guided=True,
                temperature=1.0,
                version=version,
            )
            trainer.update()
            trainer.stats()
    server.close()


async def test_bf16_guidance_brings_the_two_sides_together(tmp_path):
    """The same trajectories, guided and rounded to nearest: all but what follows from BF16 is gone."""
    server = serve(tmp_path, "TRACE", "BFloat16", TRACE)
    trainer = ReferenceTrainer(SHAPE, server.resolved.job.spec)
    write_model(tmp_path / "v0", SHAPE, trainer.export())
    async with RolloutClient(server.url, "s3cret", run_id="run-1") as client:
        await client.connect()
        await push_from_disk([client], str(tmp_path / "v0"), 0)
        trajectories = await generate(server, client, 0)
    server.close()
    guided = gap(trainer, trajectories, 0).mean()
    stats = trainer.stats()
    assert all(counts.guided_mismatched == 0 for counts in stats.sites.values())
    assert sum(counts.rtn_mismatched for counts in stats.sites.values()) > 0
    assert guided < gap(trainer, trajectories, 0, guided=False).mean() / 5
