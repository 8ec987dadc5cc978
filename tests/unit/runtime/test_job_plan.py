"""What a job's records take: the published figures, real frames as the oracle, and the pages' examples."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tracerl.api.errors import InputError
from tracerl.api.load import check, load_job, read_manifest
from tracerl.api.model import BUILTIN_MODELS
from tracerl.api.shapes import KNOWN_MODELS, planning_shape
from tracerl.cli import main
from tracerl.engines.capture import held_sites
from tracerl.engines.frames import FrameWriter
from tracerl.engines.sglang.recorder import Recorder, SlotRows
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.sites import audit_table, site_table
from tracerl.runtime.plan import Load, Plan, plan, render

ROOT = Path(__file__).resolve().parents[3]
CANARY = ROOT / "jobs/examples/canary.yaml"
QWEN, APART = (ROOT / f"jobs/examples/gb200-qwen3.5-35b-a3b-{name}.yaml" for name in ("node", "none"))
LONG = ("spec.algorithm.maxResponseTokens=260096", "spec.trainer.microBatchTokens=262144")
GIB = 2**30


def planned(manifest: Path, *overrides: str, load: Load | None = None) -> Plan:
    return plan(manifest, overrides, load=load or Load())


@pytest.mark.parametrize("manifest", [QWEN, APART], ids=lambda path: path.stem)
def test_bytes_a_token_of_the_35b_model(manifest: Path) -> None:
    token = planned(manifest).token
    assert {kind.kind: kind.bytes for kind in token.kinds} == {
        "ExpertInput": 6080,
        "Key": 380,
        "Value": 380,
        "Routes": 320,
    }
    assert (token.record, token.everything) == (7160, 51_840)


def test_keys_and_values_of_layers_with_full_attention_alone() -> None:
    """10 of the 40 layers have a cache of keys and values; the last half of those is recorded, or all."""
    layers = {
        policy: {kind.kind: kind.layers for kind in planned(QWEN, *policy).token.kinds}
        for policy in [(), ("spec.method.trace.layers.policy=All",)]
    }
    assert layers == {
        (): {"ExpertInput": 20, "Key": 5, "Value": 5, "Routes": 40},
        ("spec.method.trace.layers.policy=All",): {"ExpertInput": 40, "Key": 10, "Value": 10, "Routes": 40},
    }


@pytest.mark.parametrize("manifest", [QWEN, APART], ids=lambda path: path.stem)
@pytest.mark.parametrize(("prompts", "samples"), [(256, 16), (128, 16), (64, 16), (64, 8)])
@pytest.mark.parametrize(("overrides", "tokens"), [((), 32_768), (LONG, 262_144)])
def test_every_batch_of_the_paper(
    manifest: Path, prompts: int, samples: int, overrides: tuple[str, ...], tokens: int
) -> None:
    """The manifests take each of the paper's shapes and lengths, on the 72 GPUs of its figures."""
    shape = (f"spec.algorithm.promptsPerStep={prompts}", f"spec.algorithm.samplesPerPrompt={samples}")
    result = planned(manifest, *shape, *overrides)
    assert result.gpus == 72
    assert result.step.tokens == prompts * samples * tokens
    rows = prompts * samples * (tokens - 1)
    assert result.step.everything_bytes == rows * 51_840
    # Headers of frames are a thousandth of the records.
    assert 1 < result.step.record_bytes / (rows * 7160) < 1.002
    nodes = result.rollout_nodes
    assert result.residency.node_bytes == -(-4 * result.step.record_bytes // nodes)


def test_what_this_version_refuses_of_the_gb200_manifests() -> None:
    """Their heads say that it does, and name the field."""
    for manifest in (QWEN, APART):
        paths = [fault.path for fault in check(read_manifest(manifest))]
        assert paths == ["spec.model.uri"]
        head = manifest.read_text("utf-8").partition("apiVersion")[0]
        assert "plans it and refuses to run it (spec.model.uri)" in head
        assert "NOT IN THIS PROJECT" in head
        assert "NEVER RAN" in head


def test_the_papers_51_terabytes_and_3_hours() -> None:
    step = planned(QWEN, *LONG, load=Load(bandwidth=5e9)).step
    assert step.trajectories == 4096
    assert step.tokens == 4096 * 262_144
    # The paper says 51 TB and 3 hours; 50.6 TiB is what 51,840 B a token give.
    assert round(step.everything_bytes / 2**40, 1) == 50.6
    assert step.everything_transfer_seconds is not None
    assert round(step.everything_transfer_seconds / 3600, 1) == 3.1


@pytest.mark.parametrize(("overrides", "terabytes", "link"), [((), 1.03, 206), (LONG, 8.25, 27 * 60 + 29)])
def test_the_papers_compact_record(overrides: tuple[str, ...], terabytes: float, link: float) -> None:
    """1 bit and whole scales of 20 layers' experts' input: 7.5 KiB a token, 206 s at 32K, 27 min at 256K."""
    paper = ("spec.method.trace={scaleBits: 8}", "spec.quantization.targets=[RoutedExperts]")
    result = planned(QWEN, *overrides, *paper, "spec.algorithm.routingReplay=false", load=Load(bandwidth=5e9))
    assert result.token.record == 7680
    # Frames add their headers: less than two thousandths.
    assert result.step.record_bytes / 1e12 == pytest.approx(terabytes, rel=4e-3)
    assert result.step.transfer_seconds == pytest.approx(link, rel=4e-3)


def test_a_step_is_what_its_frames_take() -> None:
    result = planned(CANARY, "spec.records.chunkTokens=16", "spec.records.auditEvery=0")
    job = load_job(CANARY)
    table = site_table(BUILTIN_MODELS["tiny-moe"], job.spec)
    lengths = []
    for start, stop in ((0, 16), (16, 32), (32, 39)):
        header = FrameHeader("j" * 36, "r" * 32, "t" * 44, 0, 1, start, stop, 0, table.digest)
        frame = encode_frame(header, table, np.zeros((stop - start, table.row_bytes), np.uint8))
        lengths.append(-(-len(frame) // 64) * 64)
    assert result.step.frames == 512 * 3
    assert result.step.record_bytes == 512 * sum(lengths)


def test_frames_never_outgrow_a_segment() -> None:
    result = planned(QWEN, "spec.transport.ring.size=1Gi", "spec.records.chunkTokens=65536")
    job = load_job(QWEN, shape_of=planning_shape)
    table = site_table(KNOWN_MODELS["Qwen/Qwen3.5-35B-A3B"], job.spec)
    assert result.store.segment_bytes == 32 * 2**20
    rows = result.store.frame_rows
    header = FrameHeader("j" * 36, "r" * 32, "t" * 44, 0, 2, 0, rows, 0, table.digest)
    slices = table.select(0, 2)
    width = sum(table.layout(slices).widths)
    frame = encode_frame(header, table, np.zeros((rows, width), np.uint8), slices=slices)
    assert 0.99 < len(frame) / result.store.segment_bytes <= 1


def test_what_lives_at_once() -> None:
    one, four = (planned(QWEN, f"spec.algorithm.maxVersionDiff={diff}") for diff in (0, 3))
    assert (one.residency.windows, four.residency.windows) == (1, 4)
    assert four.residency.tokens == 256 * 16 * 32_768 * 4
    assert four.residency.bytes == 4 * one.residency.bytes == 4 * one.step.record_bytes
    assert four.residency.node_bytes == -(-four.residency.bytes // 18)


@pytest.mark.parametrize(
    ("transport", "spilled", "homeless", "fits", "sentence"),
    [
        ("{ring: {size: 320Gi}}", 0, 0, True, None),
        ("{ring: {size: 250Gi}}", 0, 0, True, "just large enough"),
        ("{ring: {size: 128Gi}, spillPath: /spill}", 89, 0, True, "spill to /spill"),
        ("{ring: {size: 128Gi}, spillPath: /spill, spillLimit: 50Gi}", 50, 39, True, "have no place"),
        ("{ring: {size: 128Gi}}", 0, 89, True, "have no place"),
        ("{ring: {size: 32Gi}}", 0, 172, False, "no step could be trained"),
        (
            "{ring: {size: 32Gi}, spillPath: /spill, spillLimit: 8Gi, spill: ObjectStore, object: {uri: s3://bucket/p}}",
            172,
            0,
            True,
            "spill to /spill, then s3://bucket/p",
        ),
    ],
)
def test_where_records_go(
    transport: str, spilled: int, homeless: int, fits: bool, sentence: str | None
) -> None:
    result = planned(QWEN, f"spec.transport={transport}")
    store = result.store
    assert round(store.spilled_bytes / GIB) == spilled
    assert round(store.homeless_bytes / GIB) == homeless
    assert store.fits_batch is fits
    assert store.usable_bytes + store.spilled_bytes + store.homeless_bytes >= result.residency.node_bytes
    if sentence is None:
        assert result.advice == ()
    else:
        assert sentence in result.advice[0]
    wanted = re.search(r"(\d+)Gi", " ".join(result.advice))
    if wanted is not None:
        bigger = planned(QWEN, f"spec.transport={{ring: {{size: {wanted[0]}}}}}")
        assert (bigger.store.spilled_bytes, bigger.store.homeless_bytes, bigger.advice) == (0, 0, ())


def test_rates_come_from_the_step() -> None:
    by_step = planned(QWEN, load=Load(step_seconds=700))
    generated = 4096 * 30_720
    by_rate = planned(QWEN, load=Load(tokens_per_second=generated / 700))
    assert by_rate.step.seconds == pytest.approx(700)
    node = by_step.node
    assert node.written_per_second == by_step.step.record_bytes / 18 / 700
    assert node.read_per_second is not None
    # Two tensor-parallel ranks read half of K and V each, and experts' input and routes of half of the rows:
    # of 64 frames one is read by both.
    assert node.read_per_second == pytest.approx(node.written_per_second * (65 / 64 * 6400 + 760) / 7160)
    assert node.network_per_second == pytest.approx((0, node.read_per_second * 17 / 18))
    # Rank 0 of two context-parallel ranks has rows at both ends: two cuts, in each part one more between
    # tensor ranks. Where a trajectory is one frame everybody reads it.
    for sizes, frames, by_rows, by_heads in (
        ("{context: 2, expert: 2, data: 18}", 32, 34 / 32, 34 / 32),
        ("{tensor: 2, context: 2, data: 9}", 32, 36 / 32, 34 / 32),
        ("{tensor: 2, context: 2, data: 9}", 1, 4, 2),
    ):
        prompt = 16 * frames
        load = Load(step_seconds=700, prompt_tokens=prompt, response_tokens=512 * frames - prompt)
        cut = planned(QWEN, f"spec.trainer.parallelism={sizes}", load=load).node
        assert cut.read_per_second == pytest.approx(
            cut.written_per_second * (by_rows * 6400 + by_heads * 760) / 7160
        )
    apart = planned(QWEN, "spec.placement.colocation=None", load=Load(step_seconds=700))
    assert apart.node.network_per_second == (node.read_per_second, node.read_per_second)


@pytest.mark.parametrize("audit", [0, 8])
def test_sglang_holds_a_row_for_every_slot(audit: int) -> None:
    """As much as its recorder takes; an engine that holds running sequences alone takes less."""
    slots = 4096
    rollout = f"spec.rollout={{engine: SGLang, kvCacheTokens: {slots}}}"
    every = f"spec.records.auditEvery={audit}"
    job = load_job(CANARY, [rollout, every])
    shape = BUILTIN_MODELS["tiny-moe"]
    tables = [site_table(shape, job.spec), *([audit_table(shape, job.spec)] if audit else [])]
    held = [SlotRows(table, held_sites(table), slots) for table in tables]
    with closing(FrameWriter(limit_bytes=1, deadline_seconds=1)) as writer:
        recorder = Recorder(
            held,
            writer,
            reprefill=job.spec.records.reprefill,
            chunk_tokens=512,
            audit_every=audit,
            instance="i",
            finished=lambda *_: None,
        )
    assert planned(CANARY, rollout, every).node.rollout_rows_bytes == recorder.bytes
    reference = planned(CANARY, "spec.rollout={kvCacheTokens: 4096}", every)
    assert reference.node.rollout_rows_bytes < recorder.bytes


def test_mean_lengths() -> None:
    result = planned(QWEN, load=Load(prompt_tokens=300, response_tokens=9_700))
    assert result.step.tokens == 4096 * 10_000
    assert result.step.shared_prompt_bytes == 256 * 15 * 299 * 7160


def test_mean_lengths_are_rarely_whole() -> None:
    around = [planned(CANARY, load=Load(8, response)).step for response in (4, 4.25, 5)]
    assert around[1].tokens == around[0].trajectories * 12.25
    assert around[1].record_bytes == (3 * around[0].record_bytes + around[2].record_bytes) / 4


def test_the_heading_names_the_model_that_is_planned_for() -> None:
    other = plan(CANARY, model="Qwen/Qwen3-30B-A3B", load=Load())
    assert render(other).splitlines()[0].endswith(", Qwen/Qwen3-30B-A3B")
    assert other.to_json()["model"] == "Qwen/Qwen3-30B-A3B"


def test_only_objects() -> None:
    result = planned(
        QWEN, "spec.transport={onlyObject: true, object: {uri: s3://bucket/p}}", load=Load(step_seconds=700)
    )
    assert result.store.ring_bytes == 0
    assert result.objects is not None
    assert result.objects.objects == -(-result.step.record_bytes // (8 * 2**20))
    assert "ring" not in render(result)


def test_methods_that_record_less() -> None:
    plain = ("spec.method.trace=null", "spec.records.auditEvery=0", "spec.expect={}")
    routes = planned(CANARY, *plain, "spec.method.name=QAT")
    assert [kind.kind for kind in routes.token.kinds] == ["Routes"]
    nothing = planned(CANARY, *plain, "spec.method.name=BF16", "spec.algorithm.routingReplay=false")
    assert nothing.token.record == nothing.step.record_bytes == 0
    assert nothing.advice == ()


def test_audits_are_apart() -> None:
    result = planned(CANARY)
    assert result.token.audit == 360 / 64
    assert result.step.audit_bytes > 8 * 39 * 360


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (Load(response_tokens=40_000), "write 1 to 30720"),
        (Load(prompt_tokens=0), "write 1 to 2048"),
        (Load(step_seconds=1, tokens_per_second=1), "give one of them"),
        (Load(step_seconds=-1), "write a positive number"),
        (Load(bandwidth=float("inf")), "write a positive number"),
    ],
)
def test_loads_that_contradict_the_job(load: Load, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        plan(QWEN, load=load)


def test_faults_of_the_manifest_are_said_as_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hf://Qwen/Nothing"):
        planned(QWEN, "spec.model.uri=hf://Qwen/Nothing")
    with pytest.raises(InputError, match=re.escape("spec.algorithm.maxResponseTokens")):
        planned(QWEN, "spec.algorithm.maxResponseTokens=300000", "spec.trainer.microBatchTokens=400000")
    with pytest.raises(InputError, match="GPU"):
        planned(QWEN, "spec.rollout.gpusPerNode=0")
    other = plan(QWEN, model="Qwen/Qwen3-30B-A3B", load=Load())
    assert other.token.record == (2048 * 24 + 2 * 512 * 24) * 19 // 128 + 48 * 8


def test_json_has_every_figure() -> None:
    document = json.loads(json.dumps(planned(QWEN, load=Load(step_seconds=700)).to_json()))
    assert document["token"]["record"] == 7160
    assert document["residency"]["nodeBytes"] > 0
    assert document["node"]["networkPerSecond"][0] == 0
    unknown = planned(QWEN).to_json()
    assert unknown["node"]["writtenPerSecond"] is None
    assert "\N{NO-BREAK SPACE}" not in render(planned(QWEN))


def examples(page: Path) -> list[tuple[list[str], str]]:
    """Commands of a page's console blocks with what the page says they print."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        command, _, output = block.replace("\\\n", " ").partition("\n")
        words = shlex.split(command.removeprefix("$ "))
        if words[:2] == ["tracerl", "plan"] and output:
            found.append((words[1:], output))
    return found


def test_the_examples_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    pages = examples(ROOT / "docs/how-to/size-the-store.md")
    assert len(pages) >= 2
    for words, output in pages:
        assert main(words) == 0
        assert capsys.readouterr().out == output, words
