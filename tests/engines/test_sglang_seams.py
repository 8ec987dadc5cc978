"""Every seam of the installed SGLang by name and parameters: an upgrade fails here, not in a job."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import types
from typing import Any

import pytest
import torch
from conftest import spec_of

from tracerl.api.errors import JobError
from tracerl.engines.sglang import native, seams
from tracerl.engines.sglang.server import _prepare_environment


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    _prepare_environment(spec_of().rollout, tmp_path_factory.mktemp("sglang"))


def parameters(path: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(pkgutil.resolve_name("sglang.srt." + path)).parameters)


def test_the_installed_version_is_the_tested_one() -> None:
    assert importlib.metadata.version("sglang") in seams.TESTED_VERSIONS
    seams.check_version()


@pytest.mark.parametrize("seam", seams.HOOKED + seams.CALLED + native.HOOKED, ids=lambda seam: seam.path)
def test_seam(seam: seams.Seam) -> None:
    seams.check_seams((seam,))


def test_a_seam_that_is_gone_is_named() -> None:
    with pytest.raises(JobError, match=r"has no sglang.srt.managers.scheduler.Scheduler.gone"):
        seams.check_seams((seams.Seam("managers.scheduler.Scheduler.gone", ()),))
    with pytest.raises(JobError, match=r"has no parameter colour"):
        seams.check_seams((seams.Seam(seams.RELEASE.path, ("req", "colour")),))


def test_hooks_that_did_not_take_are_named() -> None:
    with pytest.raises(JobError, match=r"the hook of sglang.srt.*did not take"):
        seams.check_hooks(seams.HOOKED)


def test_the_entry_point_is_installed() -> None:
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="tracerl")
    assert found.value == "tracerl.engines.sglang.plugin:register"
    found.load()()  # outside a rollout it does nothing
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert not HookRegistry._hooks


def test_how_sglang_calls_what_is_hooked() -> None:
    """Hooks take arguments as SGLang passes them: by keyword here, by position there."""
    source = inspect.getsource(
        pkgutil.resolve_name("sglang.srt.model_executor.model_runner.ModelRunner.forward")
    )
    call = source[source.index("experts_capturer.on_forward_end(") :]
    assert [word in call[:300] for word in ("forward_batch=", "can_run_graph=", "no_copy_to_cpu=")] == [
        True
    ] * 3
    experts = pkgutil.resolve_name("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl")
    assert "self.run_moe_core(\n            dispatch_output=dispatch_output," in inspect.getsource(experts)
    for method in ("retract_all", "ScheduleBatch.release_req"):
        body = inspect.getsource(pkgutil.resolve_name(f"sglang.srt.managers.schedule_batch.{method}"))
        assert "release_req(\n" in body
        assert "req=" in body
        assert "req_to_token_pool=" in body
    processor = (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    )
    for method, order in (
        ("process_batch_result_prefill", "self._maybe_collect_routed_experts(req)"),
        ("_handle_finish_state_updated_req", "self._maybe_collect_routed_experts(req)"),
    ):
        body = inspect.getsource(pkgutil.resolve_name(f"{processor}.{method}"))
        assert body.index(order) < body.index("release_kv_cache(", body.index(order))
    finalizing = inspect.getsource(pkgutil.resolve_name(f"{processor}.process_batch_result_decode"))
    assert "result.routed_experts_output.finalize()" in finalizing


def test_what_sglang_asks_of_its_copied_output() -> None:
    from sglang.srt.state_capturer.base import TopkCaptureOutput

    from tracerl.engines.sglang.plugin import _Output

    for name in ("map_device_tensors", "finalize"):
        assert len(inspect.signature(getattr(TopkCaptureOutput, name)).parameters) == len(
            inspect.signature(getattr(_Output, name)).parameters
        )


def test_requests_have_what_is_read_of_them() -> None:
    from sglang.srt.managers.schedule_batch import Req

    names = set(inspect.getsource(Req.__init__).split())
    attributes = inspect.getsource(Req)
    for name in ("rid", "origin_input_ids", "output_ids", "finished_reason", "is_retracted", "kv"):
        assert f"self.{name}" in attributes, name
    assert isinstance(inspect.getattr_static(Req, "output_ids_through_stop"), property)
    assert callable(Req.finished)
    assert names


def test_answers_have_the_fields_that_are_read() -> None:
    from sglang.srt.managers import io_struct

    for name, fields in {
        "UpdateWeightFromDiskReqInput": ("model_path", "weight_version", "flush_cache"),
        "UpdateWeightFromDiskReqOutput": ("success", "message", "num_paused_requests"),
        "UpdateWeightsFromDistributedReqInput": ("names", "dtypes", "shapes", "group_name", "weight_version"),
        "UpdateWeightsFromDistributedReqOutput": ("success", "message"),
        "EndWeightUpdateReqOutput": ("success", "message"),
        "PauseGenerationReqInput": ("mode",),
        "ContinueGenerationReqInput": ("torch_empty_cache",),
        "InitWeightsUpdateGroupReqInput": ("master_address", "rank_offset", "world_size", "backend"),
        "GenerateReqInput": ("rid", "input_ids", "sampling_params", "return_logprob"),
    }.items():
        found = set(inspect.signature(getattr(io_struct, name)).parameters)
        assert set(fields) <= found, name


def test_engine_arguments_exist(tmp_path: Any) -> None:
    from conftest import SHAPE, spec_of
    from sglang.srt.server_args import ServerArgs

    from tracerl.engines.sglang.settings import _NATIVE, _REFUSED, engine_arguments

    known = set(inspect.signature(ServerArgs).parameters)
    assert set(engine_arguments(spec_of(), SHAPE, tmp_path)) <= known
    assert set(_NATIVE) | {"custom_sigquit_handler"} <= known
    assert set(_REFUSED) <= known


def test_native_codes_are_packed_as_emulated_ones_are() -> None:
    """The same codes, once as SGLang's kernels lay them out and once by `pack_rows`."""
    from conftest import SHAPE, spec_of

    from tracerl.engines.capture import held_sites
    from tracerl.numerics import quantize
    from tracerl.records.rows import pack_routes, pack_rows
    from tracerl.records.sites import SiteKind, site_table

    spec = spec_of(quantization={"secondInput": "RTN"})
    table = site_table(SHAPE, spec)
    capture = native.NativeCapture(held_sites(table), rows=32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    rows, expected, zero = 9, [], []
    for index, site in enumerate(table.sites):
        if site.kind is SiteKind.ROUTES:
            ids = torch.randint(0, SHAPE.experts, (rows, SHAPE.top_k), generator=generator)
            capture.routes(site.layer, ids)
            expected.append(pack_routes(site, ids))
            continue
        x = torch.randn((rows, site.dim), generator=generator)
        x[4, :32] = 0
        q = quantize(x)
        packed = q.codes[:, 0::2] | (q.codes[:, 1::2] << 4)
        scales = q.scales.view(torch.float8_e4m3fn)
        if site.kind is SiteKind.EXPERT_INPUT:
            capture.expert_input(site.layer, packed, scales)
        else:
            if site.kind is SiteKind.KEY:
                capture.begin_key_value(site.layer)
            heads = SHAPE.kv_heads
            capture.key_value(packed.view(rows, heads, -1), scales.view(rows, heads, -1))
        row, blocks = pack_rows(site, q)
        expected.append(row)
        zero += [(int(at), index, int(block)) for at, block in blocks]
    captured, audit = capture.finish(rows)
    done = capture.complete(captured)
    assert audit is None
    assert torch.equal(done.rows, torch.cat(expected, dim=1))
    assert sorted(map(tuple, done.zero_blocks.tolist())) == sorted(zero)
    assert zero


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, byte by byte as its author describes it."""
    h, mask = 0, 0xFFFFFFFF
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & mask
    return h ^ h >> 16


def test_seeded_sampling_draws_as_sglangs_kernel_does() -> None:
    """Its hash by the byte, its rule by frequency."""
    from tracerl.engines.sglang.sampling import multinomial_with_seed, murmur_hash32

    assert murmur3(b"test") == 0xBA6BD213  # a published vector
    seeds, positions = [0, 7, 2**63 - 1, 0x1234_5678_9ABC_DEF0], [0, 5, 1023, 70_000]
    found = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), 9)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in range(9):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(found[row, column]) == murmur3(data)

    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    drawn = multinomial_with_seed(probabilities.log().expand(n, 4), torch.full((n,), 3), torch.arange(n))
    assert drawn.shape == (n, 1)
    shares = torch.bincount(drawn[:, 0], minlength=4) / n
    assert torch.allclose(shares, probabilities, atol=4 * (0.25 / n) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_sglangs_when_nothing_is_quantised(dtype: torch.dtype) -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    from tracerl.engines.sglang.experts import experts_forward

    generator = torch.Generator().manual_seed(5)
    experts, hidden, width, rows, top_k = 6, 32, 16, 21, 2

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    layer = types.SimpleNamespace(
        num_experts=experts,
        w13_weight=draw(experts, 2 * width, hidden),
        w2_weight=draw(experts, hidden, width),
        moe_tp_size=1,
    )
    config = types.SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None
    )
    x = draw(rows, hidden)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    weights = torch.rand((rows, top_k), generator=generator)
    seen: list[torch.Tensor] = []

    def hook(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return values

    expected = moe_forward_native(layer, x, (weights, ids.int(), None), config)
    activation = SiluAndMul()
    found = experts_forward(
        layer, x, weights, ids.int(), width=width, activation=activation, second_input=hook
    )
    assert torch.equal(found, expected)
    # What the hook saw is by row and slot: of row 7, its second expert's.
    of_slot = activation(torch.nn.functional.linear(x[7:8], layer.w13_weight[ids[7, 1]]))
    assert torch.allclose(
        seen[0][7, width:].float(), of_slot[0].float(), atol=1e-2 if dtype != torch.float32 else 1e-5
    )
