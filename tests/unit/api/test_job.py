from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tracerl.api import schema
from tracerl.api.errors import InputError
from tracerl.api.job import Colocation, LayerPolicy, Spec, Target, TraceRLJob, quantity_bytes
from tracerl.api.load import check, load_job
from tracerl.api.resolved import Endpoint, Endpoints, ResolvedJob

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        # https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
        ("0", 0),
        ("1", 1),
        ("128974848", 128974848),
        ("129e6", 129_000_000),
        ("129M", 129_000_000),
        ("123Mi", 128_974_848),
        ("1.5Gi", 1_610_612_736),
        ("1k", 1000),
        ("2Ti", 2_199_023_255_552),
        ("1Ei", 2**60),
        ("1E", 10**18),
    ],
)
def test_quantity(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "Mi", "-1Mi", "1.5", "0.1k2", "1KB", "1 Gi", "1_000", "NaNMi", "InfGi", "1e", "²", "1Gib", "100m"],
)
def test_text_that_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="256Mi"):
        quantity_bytes(text)


@given(st.integers(0, 10**6), st.sampled_from([("", 1), ("Ki", 2**10), ("Mi", 2**20), ("M", 10**6)]))
def test_whole_quantities(number: int, unit: tuple[str, int]) -> None:
    assert quantity_bytes(f"{number}{unit[0]}") == number * unit[1]


def test_defaults(manifest: dict[str, Any]) -> None:
    """The defaults that the design promises."""
    spec = TraceRLJob.model_validate(manifest).spec
    assert spec.suspend is False
    assert spec.algorithm.max_version_diff == 3
    assert spec.algorithm.importance_sampling.upper == 5
    assert spec.algorithm.routing_replay is True
    assert spec.quantization.targets == [Target.ROUTED_EXPERTS, Target.KV_CACHE]
    assert spec.method.trace is None
    assert spec.placement.colocation is Colocation.POD
    assert spec.transport.ring.size == "256Mi"
    assert spec.transport.spill_path is None
    assert spec.records.chunk_tokens == 512
    assert spec.records.max_missing_ratio == Decimal("0.01")
    assert spec.observe.baseline_every == 0


def test_defaults_of_trace(manifest: dict[str, Any]) -> None:
    manifest["spec"]["method"]["trace"] = {}
    trace = TraceRLJob.model_validate(manifest).spec.method.trace
    assert trace is not None
    assert (trace.code_bits, trace.scale_bits, trace.layers.policy) == (1, 3, LayerPolicy.LAST_HALF)
    assert trace.drift_band is None


def test_round_trip(manifest: dict[str, Any]) -> None:
    """What a job writes is a manifest of the same job, with every default in it."""
    manifest["spec"]["trainer"] = {"optimizer": {"learningRate": "1e-8", "epsilon": "0.00000001"}}
    manifest["spec"]["rollout"] = {"resources": {"limits": {"memory": 2**30, "cpu": 2, "rdma/ib": 1}}}
    manifest["spec"]["method"]["trace"] = {"driftBand": "0.10"}
    manifest["metadata"]["finalizers"] = ["kept"]
    job = TraceRLJob.model_validate(manifest)
    written = job.model_dump(mode="json", by_alias=True)
    assert check(written) == []
    assert TraceRLJob.model_validate(written) == job
    assert TraceRLJob.model_validate(yaml.safe_load(yaml.safe_dump(written))) == job
    assert written["metadata"]["finalizers"] == ["kept"]
    assert Decimal(written["spec"]["trainer"]["optimizer"]["learningRate"]) == Decimal("0.00000001")
    assert written["spec"]["method"]["trace"]["driftBand"] == "0.10", "decimal strings keep their digits"


PLANNED = {f"gb200-qwen3.5-35b-a3b-{colocation}.yaml" for colocation in ("node", "none")}
"""For `tracerl plan`: no engine here runs them."""


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "jobs/examples").glob("*.yaml") if path.name not in PLANNED),
    ids=lambda path: path.name,
)
def test_examples_are_valid(path: Path) -> None:
    assert load_job(path).spec


def test_every_field_is_documented() -> None:
    for item in schema.walk():
        if item.path.startswith(("spec", "status")):
            assert item.schema.get("description"), item.path
        if item.path.startswith("spec") and "[]" not in item.path and item.path != "spec":
            assert item.schema["x-tracerl-mutability"] in {"Immutable", "WhileSuspended", "Always"}


def test_every_required_field_has_an_example_that_is_allowed() -> None:
    Spec.model_validate(schema.example(schema.child(schema.root(), "spec") or {}))


def test_resolved_job(manifest: dict[str, Any], tmp_path: Path) -> None:
    resolved = ResolvedJob(
        job=TraceRLJob.model_validate(manifest),
        job_uid="0b5e",
        run_dir=tmp_path,
        cache_dir=tmp_path / "cache",
        token_file=tmp_path / "token",
        endpoints=Endpoints(directory=tmp_path / "endpoints", rollout=[Endpoint(name="rollout-0")]),
    )
    path = tmp_path / "job.yaml"
    resolved.write(path)
    assert ResolvedJob.read(path) == resolved
    assert [file.name for file in tmp_path.iterdir()] == ["job.yaml"]
    path.write_text("job: {")
    with pytest.raises(InputError, match="not a resolved job"):
        ResolvedJob.read(path)
