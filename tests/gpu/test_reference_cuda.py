"""The reference engine on a GPU: rollout against trainer, CUDA graphs against calls, and against the CPU."""

import numpy as np
import pytest
import torch
from data_parallel_worker import assert_two_equal_one
from rollout_builders import SHAPE, Rollout, spec_of, weights_of

from tracerl.api.errors import JobError
from tracerl.engines.base import Batch, EngineStats, Trajectory
from tracerl.engines.device import Uploads
from tracerl.engines.guided import MicroBatch, Treatments
from tracerl.engines.reference.capture import CaptureHooks
from tracerl.engines.reference.kernels import experts, logits
from tracerl.engines.reference.model import KVCache, MoEModel, WholeSequences
from tracerl.engines.reference.passes import Draw, EagerPasses, Stream, passes_on
from tracerl.engines.reference.quantised import TrainerHooks
from tracerl.engines.reference.sampling import uniform
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.numerics import NonFiniteFlags
from tracerl.records.sites import SiteKind, audit_table, site_table

WHOLE = {"name": "TRACE", "trace": {"layers": {"policy": "All"}, "codeBits": 4, "scaleBits": 8}}


def whole(spec, second="Recorded"):
    """Every site recorded whole: nothing is left that could differ but the arithmetic between."""
    document = spec.model_dump(by_alias=True, mode="json") | {"method": WHOLE}
    document["quantization"]["secondInput"] = second
    return type(spec).model_validate(document)


@pytest.fixture
def rollout(tmp_path):
    made = []

    def make(spec, **options):
        made.append(Rollout(tmp_path / f"store-{len(made)}", spec, device="cuda", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def asks(count, seed=0):
    generator = np.random.default_rng(seed)
    return [
        {
            "prompt": generator.integers(SHAPE.vocab, size=generator.integers(1, 16)).tolist(),
            "new": int(generator.integers(2, 40)),
            "seed": 1000 + index,
            "id": f"t{index}",
        }
        for index in range(count)
    ]


def trajectories_of(one, wanted, done, *, audit):
    return [
        Trajectory(
            id=ask["id"],
            tokens=torch.tensor(ask["prompt"] + out.tokens),
            prompt_tokens=len(ask["prompt"]),
            logp_rollout=torch.tensor(out.logp),
            token_versions=[0] * len(out.tokens),
            records=one.assemble(ask["id"], ask["prompt"], out),
            audit=one.assemble(ask["id"], ask["prompt"], out, audit=True) if audit else None,
        )
        for ask, out in zip(wanted, done, strict=True)
    ]


def gap_of(logp, trajectories):
    return torch.cat(
        [
            (row[: len(t.logp_rollout)] - t.logp_rollout).abs()
            for row, t in zip(logp, trajectories, strict=True)
        ]
    )


def passes_of(spec, device, slots=16, weights=None):
    """A model with weights, and passes over it."""
    table = site_table(SHAPE, spec)
    model = MoEModel(SHAPE, torch.bfloat16 if spec.model.dtype == "BFloat16" else torch.float32, device)
    RolloutWeights(model, plan(spec, SHAPE), spec.quantization).load(weights or weights_of(0))
    cache = KVCache(SHAPE, slots=slots, capacity=SHAPE.context, dtype=torch.float32, device=device)
    hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, table, None, device=device, rows=slots)
    return model, cache, hooks


def steps(passes, count, length):
    """Prefill `count` prompts and decode; gives tokens, log-probs, rows and zero blocks of every pass."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(SHAPE.vocab, size=(count, 5))
    slots, seeds = np.arange(count), np.arange(count, dtype=np.uint64)
    temperature = np.where(slots % 3 == 0, 0, 1).astype(np.float32)

    def draw(position, rows=None):
        return Draw(temperature, uniform(seeds, np.full(count, position)), rows)

    found = []
    with torch.inference_mode():
        stream = Stream(tokens.ravel(), slots.repeat(5), np.tile(np.arange(5), count), [5] * count)
        passed = passes.run(stream, draw(5, np.arange(count) * 5 + 4))
        for position in range(5, length):
            token, logp = passed.drawn()
            captured = passed.record.arrived()
            found.append((token, logp, captured.rows.clone(), captured.zero_blocks))
            stream = Stream(token, slots, np.full(count, position))
            passed = passes.run(stream, draw(position + 1))
        passed.drawn()
    return found


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_a_step_of_a_cuda_graph_equals_calls(dtype, count):
    with torch.inference_mode():
        spec = spec_of(dtype=dtype)
        graphs = steps(passes_on(*passes_of(spec, "cuda")), count, 40)
        calls = steps(EagerPasses(*passes_of(spec, "cuda")), count, 40)
    # Rows that a graph adds to fill its size may move sums of others by rounding noise; whole sizes do not.
    exact = count == 16
    for (token, logp, rows, _), (token_2, logp_2, rows_2, _) in zip(graphs, calls, strict=True):
        if exact:
            assert token.tolist() == token_2.tolist()
            assert logp.tolist() == logp_2.tolist()
            assert torch.equal(rows, rows_2)
        else:
            assert (token == token_2).mean() > 0.8
        if not (token == token_2).all():
            break  # other tokens follow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_rows_are_those_that_a_cpu_packs_of_the_same_values(dtype):
    spec = spec_of(secondInput="Recorded")
    table = site_table(SHAPE, spec)
    generator = torch.Generator().manual_seed(0)
    values = {
        # Router logits are FP32: of equal ones, devices choose as they like.
        (layer, kind): torch.randn(37, width, generator=generator).to(
            torch.float32 if kind is SiteKind.ROUTES else dtype
        )
        for layer in range(SHAPE.layers)
        for kind, width in {
            SiteKind.EXPERT_INPUT: 32,
            SiteKind.KEY: 32,
            SiteKind.VALUE: 32,
            SiteKind.FC2_INPUT: 32,
            SiteKind.ROUTES: 4,
        }.items()
    }
    for (_, kind), x in values.items():
        if kind is not SiteKind.ROUTES:
            x[2, 16:] = 0
            x[5, :16] *= 1e-6
            x[6] *= 1e4
            x[7] = 0
    found = []
    for device in ("cpu", "cuda"):
        hooks = CaptureHooks(SHAPE, plan(spec, SHAPE), spec.quantization, table, None, device=device, rows=64)
        hooks.begin(None)
        outs = []
        for layer in range(SHAPE.layers):
            here = {kind: values[layer, kind].to(device) for kind in SiteKind if (layer, kind) in values}
            outs += hooks.key_value(layer, here[SiteKind.KEY], here[SiteKind.VALUE])
            outs.append(hooks.routes(layer, here[SiteKind.ROUTES]))
            outs.append(hooks.expert_input(layer, here[SiteKind.EXPERT_INPUT]))
            outs.append(hooks.fc2_input(layer, here[SiteKind.FC2_INPUT]))
        record, _ = hooks.finish(37)
        captured = record.arrived()
        found.append((captured, [out.cpu() for out in outs]))
    (cpu, cpu_outs), (gpu, gpu_outs) = found
    assert torch.equal(gpu.rows, cpu.rows)
    assert sorted(map(tuple, gpu.zero_blocks.tolist())) == sorted(map(tuple, cpu.zero_blocks.tolist()))
    assert len(gpu.zero_blocks) > 0
    for one, other in zip(gpu_outs, cpu_outs, strict=True):
        assert torch.equal(one, other)


def test_fp32_rollout_and_trainer_are_equal(rollout):
    spec = whole(spec_of(records={"auditEvery": 1}))
    trainer = ReferenceTrainer(SHAPE, spec, weights_of(0), "cuda")
    one = rollout(spec, weights=dict(trainer.export()))
    wanted = asks(24)
    trajectories = trajectories_of(one, wanted, one.generate(*wanted), audit=True)
    logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=0)
    assert gap_of(logp, trajectories).max() <= 1e-5
    stats = trainer.stats()
    rows = sum(len(t.tokens) - 1 for t in trajectories)
    assert (stats.routes_rows, stats.routes_missing, stats.guided_missing) == (2 * rows, 0, 0)
    assert len(stats.sites) == 2 * 4
    for counts in stats.sites.values():
        assert counts.values > 0
        assert (counts.guided_mismatched, counts.scales_wrong) == (0, 0)


def test_bf16_guided_gap_is_a_fifth_of_the_unguided(rollout):
    spec = whole(spec_of(dtype="BFloat16"), second="RTN")
    trainer = ReferenceTrainer(SHAPE, spec, weights_of(0), "cuda")
    one = rollout(spec, weights=dict(trainer.export()), slots=32)
    wanted = asks(200)
    trajectories = trajectories_of(one, wanted, one.generate(*wanted), audit=False)
    guided, unguided = (
        gap_of(
            trainer.forward(Batch(trajectories), guided=guided, temperature=1.0, version=0), trajectories
        ).mean()
        for guided in (True, False)
    )
    assert 0 < guided <= unguided / 5


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
def test_a_step_on_the_gpu_is_the_cpus(rollout, dtype):
    """Log-probs and gradient of the same weights, tokens and records."""
    spec = spec_of(dtype=dtype)
    one = rollout(spec)
    wanted = asks(24)
    trajectories = trajectories_of(one, wanted, one.generate(*wanted), audit=False)
    norms, logps = [], []
    for device in ("cpu", "cuda"):
        trainer = ReferenceTrainer(SHAPE, spec, weights_of(0), device)
        logps.append(
            trainer.accumulate(
                Batch(trajectories), lambda logp: -logp.sum() / 100, guided=True, temperature=1.0, version=0
            )
        )
        norms.append(trainer.update())
        assert all(not tensor.is_cuda for tensor in trainer.state().values())
    bound = 1e-4 if dtype == "Float32" else 0.1
    assert (logps[0] - logps[1]).abs().mean() < bound
    assert norms[1] == pytest.approx(norms[0], rel=1e-3 if dtype == "Float32" else 0.05)


def test_what_was_looked_ahead_for_changes_nothing(rollout):
    """Passes over micro-batches that were uploaded during the pass before, in any order, and once more."""
    spec = spec_of(dtype="BFloat16")
    one = rollout(spec)
    wanted = asks(24)
    trajectories = trajectories_of(one, wanted, one.generate(*wanted), audit=False)
    batches = [trajectories[:8], trajectories[8:16], trajectories[16:]]
    plain, ahead = (ReferenceTrainer(SHAPE, spec, weights_of(0), "cuda") for _ in range(2))
    how = {"guided": True, "temperature": 1.0, "version": 0}
    for this, after in ((0, 1), (1, 2), (2, 2), (2, 0), (1, 0)):
        expected = plain.forward(Batch(batches[this]), **how)
        found = ahead.forward(Batch(batches[this], lambda after=after: batches[after]), **how)
        assert torch.equal(found, expected)


def test_tensors_are_joined_on_the_way_to_the_gpu():
    """Page-locked ones, others, parts of one, empty ones; also where the host lets go of them at once."""
    parts = [torch.randint(256, (n, 3), dtype=torch.uint8) for n in (0, 7, 1, 4_000_000, 5)]
    expected = torch.cat([*parts, parts[3][9:2_000_000]])
    uploads = Uploads("cuda")
    locked = parts[3].pin_memory()
    there = uploads.put(*parts[:3], locked, parts[4], locked[9:2_000_000])
    del locked
    torch.zeros((4_000_000, 3), dtype=torch.uint8, pin_memory=True)  # would have its memory
    uploads.join()
    assert torch.equal(there.cpu(), expected)


def test_a_page_locked_record_is_uploaded_from_where_it_is(rollout):
    wanted = asks(1)
    one = rollout(whole(spec_of(dtype="BFloat16")))
    (trajectory,) = trajectories_of(one, wanted, one.generate(*wanted), audit=True)
    assert trajectory.records.rows.is_pinned()
    assert trajectory.audit.rows.is_pinned()


@pytest.mark.parametrize("guided", [True, False])
def test_a_pass_waits_for_nothing(rollout, guided):
    """From records to logits and back to gradients, nothing stops until the GPU has computed something."""
    spec = whole(spec_of(dtype="BFloat16"))
    one = rollout(spec)
    wanted = asks(24)
    trajectories = trajectories_of(one, wanted, one.generate(*wanted), audit=False)
    trajectories[3].records = None  # its rows are missing
    trainer = ReferenceTrainer(SHAPE, spec, weights_of(0), "cuda")

    def make():
        micro = MicroBatch(trajectories, site_table(SHAPE, spec), audit_table(SHAPE, spec), uploads)
        micro.arrive()
        treatments = Treatments(
            plan(spec, SHAPE), spec.quantization, micro, EngineStats(), guided=guided, version=0
        )
        with flags:
            hidden = model(
                micro.tokens_N,
                WholeSequences(SHAPE, micro.lengths, "cuda"),
                TrainerHooks(SHAPE, treatments),
            )
        model.logits(hidden.index_select(0, micro.predicting_M)).logsumexp(-1).sum().backward()

    trainer.forward(Batch(trajectories), guided=guided, temperature=1.0, version=0)
    model, uploads, flags = trainer._working.model, Uploads("cuda"), NonFiniteFlags("cuda")
    make()
    torch.cuda.set_sync_debug_mode("error")
    try:
        make()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    flags.check()


def test_grouped_experts_are_the_padded_ones():
    """BF16 on the GPU takes products of groups; FP32 of the same values is what they are rounded from."""
    generator = torch.Generator().manual_seed(0)
    count, top_k, number, hidden, width = 500, 4, 16, 128, 64
    x = torch.randn(count, hidden, generator=generator)
    gates = torch.rand(count, top_k, generator=generator)
    # No token goes to the first and the last expert.
    ids = torch.stack([torch.randperm(number - 2, generator=generator)[:top_k] + 1 for _ in range(count)])
    gate_up = torch.randn(number, 2 * width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(number, hidden, width, generator=generator) / width**0.5
    gradient = torch.randn(count, hidden, generator=generator)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.bfloat16().to(dtype).cuda().requires_grad_() for t in (x, gate_up, down)]
        weights = gates.cuda().requires_grad_()
        out = experts(
            leaves[0], weights, ids.cuda(), gate_up_EGH=leaves[1], down_EHF=leaves[2], fc2_input=lambda t: t
        )
        grads = torch.autograd.grad(out, (*leaves, weights), gradient.to(dtype).cuda())
        found.append([t.float().cpu() for t in (out, *grads)])
    for exact, rounded in zip(*found, strict=True):
        assert rounded.isfinite().all()
        assert (rounded - exact).abs().max() <= 0.03 * exact.abs().max()
    assert found[1][2][0].abs().max() == found[1][2][-1].abs().max() == 0


def test_logits_are_fp32_sums_of_bf16_products():
    generator = torch.Generator().manual_seed(0)
    x, head, gradient = (torch.randn(size, generator=generator) for size in ((40, 64), (96, 64), (40, 96)))
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.bfloat16().to(device).requires_grad_() for t in (x, head)]
        out = logits(*leaves)
        assert out.dtype is torch.float32
        grads = torch.autograd.grad(out, leaves, gradient.to(device))
        found.append([t.float().cpu() for t in (out, *grads)])
    (exact, *exact_grads), (out, *grads) = found
    assert (out - exact).abs().max() <= 1e-5 * exact.abs().max()
    for one, other in zip(grads, exact_grads, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize(
    ("weight", "site"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput"),
        ("model.layers.0.self_attn.v_proj.weight", "layer 0 Value"),
        ("lm_head.weight", "logits"),
    ],
)
def test_values_that_are_not_finite_name_their_site(rollout, weight, site):
    broken = weights_of(0)
    broken[weight] = torch.full_like(broken[weight], 3e38)
    spec = spec_of()
    one = rollout(spec)
    wanted = asks(4)
    done = one.generate(*wanted)
    trajectories = trajectories_of(one, wanted, done, audit=False)
    trainer = ReferenceTrainer(SHAPE, spec, broken, "cuda")
    with pytest.raises(JobError, match=f"{site} holds NaN or Inf"):
        trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=0)
    one.push(broken, 1)
    pending = one.start(*wanted)
    for outcome in pending.wait():
        assert outcome.reason == "NonFinite"
        assert site in outcome.message


def test_memory_pressure_changes_nothing(rollout):
    spec = spec_of(records={"chunkTokens": 4})
    wanted = asks(10)
    plenty, tight = (rollout(spec, kv_tokens=tokens).generate(*wanted) for tokens in (1024, 90))
    assert [one.tokens for one in plenty] == [one.tokens for one in tight]


def test_a_new_version_is_computed_with_by_graphs_of_before(rollout):
    spec = spec_of()
    one, other = rollout(spec), rollout(spec, weights=weights_of(1))
    ask = asks(16)
    one.generate(*ask)
    one.push(weights_of(1), 1)
    assert [o.tokens for o in one.generate(*ask)] == [o.tokens for o in other.generate(*ask)]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two processes need two GPUs, and there is one here"
)
def test_two_processes_on_two_gpus_equal_one_with_the_whole_batch(tmp_path):
    assert_two_equal_one(tmp_path, "cuda")
