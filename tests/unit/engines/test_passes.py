"""What a GPU computes by other ways, on the CPU: a step that lies still, rows from a buffer, uploads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_builders import SHAPE, spec_of, weights_of

from tracerl.api.errors import InputError
from tracerl.engines.base import Trajectory
from tracerl.engines.capture import Arriving, Captured, _DevicePacker, _HostPacker, held_sites
from tracerl.engines.device import Uploads, device_of
from tracerl.engines.frames import NO_ZERO_BLOCKS
from tracerl.engines.guided import MicroBatch
from tracerl.engines.reference import kernels
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.passes import DecodeStep, Draw, EagerPasses, Stream
from tracerl.engines.reference.sampling import uniform
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.numerics import NVFP4
from tracerl.records.sites import SiteKind, site_table

SLOTS, PROMPT = 8, 5


def made(spec):
    dtype = torch.bfloat16 if spec.model.dtype == "BFloat16" else torch.float32
    model = MoEModel(SHAPE, dtype)
    RolloutWeights(model, plan(spec, SHAPE), spec.quantization).load(weights_of(0))
    cache = KVCache(SHAPE, slots=SLOTS, capacity=SHAPE.context, dtype=torch.float32)
    return (
        model,
        cache,
        CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, site_table(SHAPE, spec), None),
    )


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize("count", [SLOTS, 5])
def test_a_step_whose_tensors_lie_still_is_the_step(dtype, count):
    """Rows that fill its size change no other, and what is looked at beyond a sequence changes nothing."""
    spec = spec_of(dtype=dtype)
    one, other = made(spec), made(spec)
    eager, still = EagerPasses(*one), EagerPasses(*other)
    step, hooks = DecodeStep(*other), other[2]
    prompts = np.random.default_rng(0).integers(SHAPE.vocab, size=(count, PROMPT))
    slots, seeds = np.arange(count), np.arange(count, dtype=np.uint64)
    temperature = np.where(slots % 3 == 0, 0, 0.8).astype(np.float32)
    stream = Stream(
        prompts.ravel(), slots.repeat(PROMPT), np.tile(np.arange(PROMPT), count), [PROMPT] * count
    )

    def draw(position, rows=None):
        return Draw(temperature, uniform(seeds, np.full(count, position)), rows)

    with torch.inference_mode():
        first = draw(PROMPT, np.arange(count) * PROMPT + PROMPT - 1)
        (token, _), _ = eager.run(stream, first).drawn(), still.run(stream, first)
        for position in range(PROMPT, 30):
            stream = Stream(token, slots, np.full(count, position))
            passed = eager.run(stream, draw(position + 1))
            step.give(stream, draw(position + 1), SLOTS)
            hooks.begin(None)
            step.compute(SLOTS, 64)
            record, _ = hooks.finish(SLOTS)
            token, logp = passed.drawn()
            found, found_logp = step.taken(count)()
            assert found.tolist() == token.tolist()
            assert found_logp == pytest.approx(logp, abs=1e-6 if dtype == "Float32" else 1e-2, rel=0)
            assert torch.equal(record.rows[:count], passed.record.rows)


@pytest.mark.parametrize("bits", [{}, {"codeBits": 4, "scaleBits": 8}, {"codeBits": 2, "scaleBits": 1}])
def test_rows_of_a_buffer_are_the_rows(bits):
    spec = spec_of(secondInput="Recorded")
    document = spec.model_dump(by_alias=True, mode="json")
    document["method"]["trace"] |= bits
    table = site_table(SHAPE, type(spec).model_validate(document))
    held = held_sites(table)
    host = _HostPacker(held, NVFP4, spec.quantization.order)
    buffer = _DevicePacker(held, spec.quantization.order, 16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for rows in (9, 40, 16):  # one needs more than what lies still
        host.begin()
        buffer.begin()
        for index, one in enumerate(held):
            if one.site.kind is SiteKind.ROUTES:
                ids = torch.randint(SHAPE.experts, (rows, one.site.dim), generator=generator)
                host.keep(index, ids)
                buffer.keep(index, ids)
                continue
            x = torch.randn(rows, one.site.dim, generator=generator)
            x[1, 16:] = 0
            x[3] = 0
            assert torch.equal(host.quantise([index], x, "x"), buffer.quantise([index], x, "x"))
        want, got = host.pack(rows), buffer.pack(rows).arrived()
        assert torch.equal(got.rows, want.rows)
        assert sorted(map(tuple, got.zero_blocks.tolist())) == sorted(map(tuple, want.zero_blocks.tolist()))
        assert (np.diff(got.zero_blocks[:, 0]) >= 0).all()
        assert len(got.zero_blocks) > len(held)


def test_rows_that_arrive_late_are_there_when_they_are_asked_for():
    table = site_table(SHAPE, spec_of())
    places = np.array([[0, block] for block in range(8)])
    here, late = (RowBuffer(table, slots=4, capacity=8, reprefill="AsSampled") for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for position in range(4):
        rows = torch.randint(256, (3, table.row_bytes), generator=generator, dtype=torch.uint8)
        bits = torch.zeros(3, 1, dtype=torch.uint8)
        zero = NO_ZERO_BLOCKS
        if position == 2:
            bits[1], zero = 0b10, np.array([[1, 0, 1]])
        at = np.arange(3), np.full(3, position)
        here.store(*at, Captured(rows, zero), position)
        late.store(*at, Arriving(torch.cat([rows, bits], dim=1), None, table.row_bytes, places), position)
    for buffer in (here, late):
        buffer.copy(np.array([2]), np.array([3]), 4)
    for slot in range(4):
        for one, other in zip(here.take(slot, 0, 4), late.take(slot, 0, 4), strict=True):
            assert np.array_equal(one, other)
        assert here.versions(slot, 4).tolist() == late.versions(slot, 4).tolist() == [0, 1, 2, 3]
    assert len(late.take(1, 0, 4)[1]) == 1


@pytest.mark.parametrize("second", [None, lambda x: (2 * x).round() / 2], ids=["plain", "second input"])
def test_products_of_groups_are_those_of_padded_experts(second):
    """On one device both ways to compute experts in BF16 agree, with experts that no token goes to."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(23)])
    x, gates, gate_up, down, gradient = (
        torch.randn(size, generator=generator) / 4
        for size in ((23, 32), (23, 2), (5, 32, 32), (5, 32, 16), (23, 32))
    )
    found = []
    for function in (kernels._Experts, kernels._GroupedExperts):
        leaves = [t.bfloat16().requires_grad_() for t in (x, gate_up, down)]
        weights = gates.clone().requires_grad_()
        out = function.apply(leaves[0], weights, ids, leaves[1], leaves[2], second)
        found.append((out, *torch.autograd.grad(out, (*leaves, weights), gradient.bfloat16())))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 0.01 * one.abs().max()


def test_a_micro_batch_is_that_of_the_same_trajectories_with_the_same_records():
    spec = spec_of()
    table = site_table(SHAPE, spec)

    def trajectory(id, count=4):
        return Trajectory(id, torch.arange(count), 2, torch.zeros(count - 2), [0] * (count - 2))

    pair = [trajectory("a"), trajectory("b", 5)]
    micro = MicroBatch(pair, table, table, Uploads("cpu"))
    assert micro.holds(pair)
    assert micro.holds([replace(one) for one in pair])
    assert not micro.holds(pair[:1])
    assert not micro.holds([pair[0], trajectory("b", 5)])  # other tokens
    assert not micro.holds([pair[0], replace(pair[1], records=object())])


def test_uploads_to_the_cpu_leave_tensors_where_they_are():
    uploads, tensor = Uploads("cpu"), torch.arange(3)
    assert uploads.put(tensor) is tensor
    uploads.join()


def test_a_machine_without_a_gpu_says_which_field_asks_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(0, "spec.rollout.gpusPerNode").type == "cpu"
    with pytest.raises(InputError, match=r"^spec.rollout.gpusPerNode is 1, but PyTorch .* sees no GPU here"):
        device_of(1, "spec.rollout.gpusPerNode")
