"""The reference trainer against rollouts decoded by hand, transformers, and torch's optimizer."""

import dataclasses

import pytest
import torch
from data_parallel_worker import assert_two_equal_one
from hand_rollout import roll_out, spec_of
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM

from tracerl.api.errors import InputError, JobError
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.hf import read_tensors, write_model
from tracerl.engines.reference.model import MoEModel
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.numerics import TensorScale, dequantize, quantize
from tracerl.records.sites import SiteKind

TINY = BUILTIN_MODELS["tiny-moe"]
SMALL = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)
ALL = {"layers": {"policy": "All"}}
METHODS = {
    "BF16": ("BF16", {}, {}),
    "QAT": ("QAT", {}, {}),
    "QAT, BF16 second input": ("QAT", {"secondInput": "BF16"}, {}),
    "QAT, FourOverSix": ("QAT", {"order": "FourOverSix"}, {}),
    "TRACE": ("TRACE", {}, ALL),
    "TRACE, whole": ("TRACE", {}, ALL | {"codeBits": 4, "scaleBits": 8}),
    "TRACE, second input": ("TRACE", {"secondInput": "Recorded"}, ALL),
}


def prompts_of(count: int, vocab: int, seed: int = 3) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    new = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths], new


def sampled(trainer: ReferenceTrainer, count: int = 16, **options) -> list[Trajectory]:
    """Trajectories of a rollout that got the trainer's exported weights."""
    prompts, new = prompts_of(count, trainer.shape.vocab)
    return roll_out(trainer.shape, trainer.spec, dict(trainer.export()), prompts, new, **options)


def gaps(logp: Tensor, trajectories: list[Trajectory]) -> Tensor:
    return torch.cat(
        [
            (row[: len(t.logp_rollout)] - t.logp_rollout).abs()
            for row, t in zip(logp, trajectories, strict=True)
        ]
    )


def agree(logp: Tensor, trajectories: list[Trajectory]) -> bool:
    """Whether log-probs are equal to rounding noise, in nearly all trajectories.

    In FP32 about one value in 10^5 lies so close to a boundary that the noise of another order of summation
    rounds it to the other side, which moves the rest of its trajectory.
    """
    equal = [gaps(row[None], [t]).max() < 1e-5 for row, t in zip(logp, trajectories, strict=True)]
    return sum(equal) >= 0.7 * len(equal)


def forward(
    trainer: ReferenceTrainer, trajectories: list[Trajectory], *, guided: bool = True, version: int = 0
):
    return trainer.forward(
        Batch(trajectories),
        guided=guided,
        temperature=float(trainer.spec.algorithm.temperature),
        version=version,
    )


# -- the two sides agree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_fp32_rollout_and_trainer_are_equal_before_and_after_an_update(name):
    """Same weights, replayed routes: no guided code differs, and log-probs are equal."""
    method, quantization, trace = METHODS[name]
    trainer = ReferenceTrainer(
        TINY, spec_of(method, quantization=quantization, algorithm={"temperature": "0.7"}, **trace)
    )
    trainer.set_learning_rate(1e-3)
    for version in (0, 1):
        trajectories = sampled(trainer, audited=method != "BF16", version=version)
        for guided in (True, False):
            logp = forward(trainer, trajectories, guided=guided, version=version)
            assert agree(logp, trajectories)
            # Where everything is guided nothing can differ, however close to a boundary.
            if method == "BF16" or (name == "TRACE, second input" and guided):
                assert gaps(logp, trajectories).max() < 1e-5
        stats = trainer.stats()
        rows = sum(len(t.tokens) - 1 for t in trajectories)
        assert (stats.routes_rows, stats.routes_missing, stats.guided_missing) == (2 * 4 * rows, 0, 0)
        kinds = [SiteKind.EXPERT_INPUT, SiteKind.KEY, SiteKind.VALUE]
        if name == "TRACE, second input":
            kinds.append(SiteKind.FC2_INPUT)
        audited = [] if method == "BF16" else [(layer, kind.value) for layer in range(4) for kind in kinds]
        assert sorted(stats.sites) == sorted(audited)
        for counts in stats.sites.values():
            assert counts.values > 0
            assert counts.rtn_mismatched <= counts.values / 50
            assert counts.scales_wrong == 0
            assert counts.guided_mismatched == (0 if method == "TRACE" else counts.rtn_mismatched)
        trainer.accumulate(
            Batch(trajectories), lambda logp: -logp.sum() / 100, guided=True, temperature=0.7, version=version
        )
        assert trainer.update() > 0
        trainer.stats()


def shifted(trajectory: Trajectory) -> Trajectory:
    records = trajectory.records
    moved = dataclasses.replace(
        records, rows=records.rows.roll(1, 0), zero_blocks=torch.zeros((0, 3), dtype=torch.int64)
    )
    return dataclasses.replace(trajectory, records=moved)


def test_records_shifted_by_one_row_cannot_hide():
    trainer = ReferenceTrainer(TINY, spec_of("TRACE", **ALL))
    trajectories = sampled(trainer, audited=True)
    moved = [shifted(t) for t in trajectories]
    assert gaps(forward(trainer, moved), trajectories).mean() > 0.1
    # Keys of the first layer depend on the token alone: their own rounding is right, the record is not.
    counts = trainer.stats().sites[0, "Key"]
    assert counts.guided_mismatched > 0.3 * counts.values
    assert counts.rtn_mismatched == 0


def test_routes_of_another_row_cannot_hide():
    trainer = ReferenceTrainer(TINY, spec_of("BF16"))
    trajectories = sampled(trainer)
    assert gaps(forward(trainer, [shifted(t) for t in trajectories]), trajectories).mean() > 0.05


def test_bf16_gaps_are_in_the_papers_order():
    """The two sides round at different places in BF16; guidance brings them together, QAT does not."""
    mean = {}
    for name, method, trace in (
        ("Vanilla", "Vanilla", {}),
        ("QAT", "QAT", {}),
        ("half", "TRACE", {}),
        ("all", "TRACE", ALL),
    ):
        trainer = ReferenceTrainer(TINY, spec_of(method, dtype="BFloat16", **trace))
        trajectories = sampled(trainer, count=32, audited=True)
        mean[name] = float(gaps(forward(trainer, trajectories), trajectories).mean())
        counts = trainer.stats().sites[3, "ExpertInput"]
        if name == "all":
            assert counts.guided_mismatched == 0
            assert counts.rtn_adjacent > 0.95 * counts.rtn_mismatched
    assert mean["all"] < mean["QAT"] / 5
    assert mean["half"] < mean["QAT"] / 2
    assert mean["QAT"] < mean["Vanilla"]


# -- what is missing ----------------------------------------------------------------------------------------


def without(trajectory: Trajectory, kind: SiteKind, rows: slice) -> Trajectory:
    records = trajectory.records
    present, data = records.present.clone(), records.rows.clone()
    for index, site in enumerate(records.table.sites):
        if site.kind is kind:
            present[rows, index] = False
            data[rows, records.table.offset(site) : records.table.offset(site) + site.row_bytes] = 0
    return dataclasses.replace(trajectory, records=dataclasses.replace(records, present=present, rows=data))


def test_missing_rows_are_rounded_to_nearest_and_counted():
    """In FP32 both roundings are the same, so that nothing but the counts may change."""
    trainer = ReferenceTrainer(TINY, spec_of("TRACE", **ALL))
    trajectories = sampled(trainer, count=8)
    lacking = [
        without(without(t, SiteKind.EXPERT_INPUT, slice(0, 2)), SiteKind.ROUTES, slice(1, 2))
        for t in trajectories
    ]
    rows = [len(t.tokens) - 1 for t in trajectories]
    before = [t.records.rows.clone() for t in lacking]
    assert agree(forward(trainer, lacking), trajectories)
    stats = trainer.stats()
    assert stats.guided_missing == 4 * sum(min(n, 2) for n in rows)
    assert stats.routes_missing == 4 * sum(n > 1 for n in rows)
    assert stats.guided_rows == 3 * 4 * sum(rows)
    # Looked up, not used up: a second pass finds the same.
    assert all(torch.equal(b, t.records.rows) for b, t in zip(before, lacking, strict=True))
    forward(trainer, lacking)
    assert trainer.stats().guided_missing == stats.guided_missing


@pytest.mark.parametrize("kind", ["none", "another table", "another length"])
def test_records_that_cannot_be_used_count_as_missing(kind):
    trainer = ReferenceTrainer(TINY, spec_of("TRACE", **ALL))
    good = sampled(trainer, count=8)
    other = sampled(ReferenceTrainer(TINY, spec_of("TRACE")), count=8)
    replaced = {"none": None, "another table": other[1].records, "another length": good[0].records}[kind]
    mixed = [good[0], dataclasses.replace(good[1], records=replaced), *good[2:]]
    assert agree(forward(trainer, mixed), good)
    stats = trainer.stats()
    assert stats.guided_missing == 3 * 4 * (len(good[1].tokens) - 1)
    assert stats.routes_missing == 4 * (len(good[1].tokens) - 1)


def test_rows_that_are_too_old_are_not_followed():
    trainer = ReferenceTrainer(TINY, spec_of("TRACE", maxGuidedVersionDiff=1, **ALL))
    trajectories = sampled(trainer, count=8, version=5)
    rows = sum(len(t.tokens) - 1 for t in trajectories)
    for version, missing in ((5, 0), (6, 0), (7, 12 * rows)):
        forward(trainer, trajectories, version=version)
        assert trainer.stats().guided_missing == missing


def test_unguided_passes_do_not_follow_records():
    trainer = ReferenceTrainer(TINY, spec_of("TRACE", **ALL))
    trajectories = [shifted(t) for t in sampled(trainer, count=8)]
    with_routes = [without(t, SiteKind.ROUTES, slice(None)) for t in trajectories]
    assert agree(forward(trainer, with_routes, guided=False), trajectories)
    assert trainer.stats().guided_rows == 0


# -- gradients and updates ----------------------------------------------------------------------------------


def test_padding_and_packing_do_not_matter():
    """Log-probs and gradients of a batch are those of its trajectories one by one."""
    trainer = ReferenceTrainer(TINY, spec_of("QAT"))
    trajectories = sampled(trainer, count=5)

    def loss(logp: Tensor) -> Tensor:
        return (logp * torch.arange(1, 1 + logp.shape[1])).sum()

    together = trainer.accumulate(Batch(trajectories), loss, guided=True, temperature=1.0, version=0)
    norm_together = trainer.update()
    trainer = ReferenceTrainer(TINY, spec_of("QAT"))
    for row, trajectory in zip(together, trajectories, strict=True):
        alone = trainer.accumulate(Batch([trajectory]), loss, guided=True, temperature=1.0, version=0)
        torch.testing.assert_close(alone[0], row[: alone.shape[1]], atol=1e-5, rtol=0)
        assert not row[alone.shape[1] :].any()
    assert trainer.update() == pytest.approx(norm_together, rel=1e-4)


def test_supervised_steps_equal_transformers_with_torchs_adamw(tmp_path):
    spec = spec_of(
        "QAT",
        dtype="BFloat16",  # the warm-up is FP32 and unquantised whatever the job computes with
        trainer={"optimizer": {"weightDecay": "0.1", "gradientClip": "0.5", "beta2": "0.99"}},
    )
    trainer = ReferenceTrainer(SMALL, spec)
    weights = {
        name.removeprefix("weights/"): t for name, t in trainer.state().items() if name.startswith("weights/")
    }
    write_model(tmp_path, SMALL, weights.items())
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    trainer.set_learning_rate(0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(SMALL.vocab, (6, 9), generator=generator)
        mask = torch.rand((6, 9), generator=generator) < 0.5
        logits = model(tokens).logits[:, :-1]
        expected = functional.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert trainer.supervised_step(tokens, mask) == pytest.approx(expected.item(), rel=1e-4)
    model.save_pretrained(tmp_path / "after")
    initial, state = ReferenceTrainer(SMALL, spec).state(), trainer.state()
    for name, expected in read_tensors(tmp_path / "after").items():
        torch.testing.assert_close(state[f"weights/{name}"], expected, atol=1e-4, rtol=1e-3)
        assert not torch.equal(state[f"weights/{name}"], initial[f"weights/{name}"])


def test_gradients_reach_the_master_straight_through():
    """BF16 and FP4 change where the loss is taken, not how its gradient reaches the FP32 weights."""
    step = {}
    for method, dtype in (("BF16", "Float32"), ("BF16", "BFloat16"), ("QAT", "BFloat16")):
        trainer = ReferenceTrainer(
            TINY, spec_of(method, dtype=dtype, trainer={"optimizer": {"gradientClip": None}})
        )
        trajectories = sampled(ReferenceTrainer(TINY, spec_of("BF16")), count=8)
        trainer.accumulate(
            Batch(trajectories), lambda logp: -logp.sum(), guided=True, temperature=1.0, version=0
        )
        before = {name: tensor for name, tensor in trainer.state().items() if name.startswith("weights/")}
        trainer.set_learning_rate(1e-6)  # far below what BF16 could hold
        trainer.update()
        after = trainer.state()
        step[method, dtype] = torch.cat([(after[n] - before[n]).flatten() for n in sorted(before)]).sign()
        assert all(t.dtype == torch.float32 for n, t in after.items() if n.startswith("weights/"))
    full = step["BF16", "Float32"]
    for other in (step["BF16", "BFloat16"], step["QAT", "BFloat16"]):
        both = (full != 0) & (other != 0)
        assert (full[both] == other[both]).float().mean() > 0.85


def test_export_is_what_the_trainer_computes_with():
    trainer = ReferenceTrainer(SMALL, spec_of("QAT", dtype="BFloat16"))
    state = trainer.state()
    for name, tensor in trainer.export():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, state[f"weights/{name}"].bfloat16())


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
def test_both_sides_compute_with_the_same_weight_codes_after_an_update(dtype):
    """Blocks along the summed axis, one FP32 scale for an expert's gate and up together and one for down."""
    trainer = ReferenceTrainer(SMALL, spec_of("QAT", dtype=dtype))
    rollout = MoEModel(SMALL, torch.bfloat16 if dtype == "BFloat16" else torch.float32)
    weights = RolloutWeights(rollout, plan(trainer.spec, SMALL), trainer.spec.quantization)
    trainer.set_learning_rate(0.003)
    tokens = torch.randint(SMALL.vocab, (4, 8))
    for _ in range(2):
        batch = Batch([Trajectory(str(i), row, 3, torch.zeros(5), [0] * 5) for i, row in enumerate(tokens)])
        trainer.accumulate(batch, lambda logp: -logp.mean(), guided=True, temperature=1.0, version=0)
        trainer.update()
        trainer.forward(batch, guided=True, temperature=1.0, version=0)
        exported = dict(trainer.export())
        weights.load(exported)
        for layer, (ours, theirs) in enumerate(
            zip(trainer._working.model.layers, rollout.layers, strict=True)
        ):
            assert torch.equal(ours.gate_up, theirs.gate_up)
            assert torch.equal(ours.down, theirs.down)
            for expert in range(SMALL.experts):
                name = f"model.layers.{layer}.mlp.experts.{expert}."
                gate, up, down = (exported[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
                for value, used in ((torch.cat([gate, up]), theirs.gate_up), (down, theirs.down)):
                    scale = TensorScale(value.abs().max().float(), "amax")
                    quantized = quantize(value, tensor_scale=scale)
                    assert torch.equal(dequantize(quantized, value.dtype), used[expert])


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
def test_a_checkpoint_continues_as_if_nothing_had_happened(dtype):
    def train(trainer: ReferenceTrainer, steps: range) -> None:
        for step in steps:
            trainer.set_learning_rate(0.01)
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(SMALL.vocab, (4, 8), generator=generator)
            batch = Batch(
                [Trajectory(str(i), row, 3, torch.zeros(5), [0] * 5) for i, row in enumerate(tokens)]
            )
            trainer.accumulate(batch, lambda logp: -logp.mean(), guided=True, temperature=1.0, version=0)
            trainer.update()

    straight, stopped = (ReferenceTrainer(SMALL, spec_of("QAT", dtype=dtype)) for _ in range(2))
    train(straight, range(4))
    train(stopped, range(2))
    resumed = ReferenceTrainer(SMALL, spec_of("QAT", dtype=dtype, seed=99))
    resumed.load_state(stopped.state())
    train(resumed, range(2, 4))
    expected = straight.state()
    assert set(expected) == set(resumed.state())
    for name, tensor in resumed.state().items():
        assert torch.equal(tensor, expected[name]), name
    assert int(expected["updates"]) == 4

    resumed.reset_optimizer()
    fresh = resumed.state()
    assert int(fresh["updates"]) == 0
    assert not any(t.any() for name, t in fresh.items() if name.startswith("exp_avg"))


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing():
    trainer = ReferenceTrainer(SMALL, spec_of("QAT"))
    before = trainer.state()
    with pytest.raises(InputError, match=r"checkpoint's weights: .* has no tensor model\.layers\."):
        trainer.load_state(ReferenceTrainer(TINY, spec_of("QAT")).state())
    with pytest.raises(InputError, match=r"checkpoint's exp_avg: tensor lm_head\.weight has shape \[1, 2\]"):
        trainer.load_state(before | {"exp_avg/lm_head.weight": torch.zeros(1, 2)})
    for lacking in ("updates", "exp_avg/model.norm.weight"):
        with pytest.raises(InputError, match="checkpoint"):
            trainer.load_state({name: t for name, t in before.items() if name != lacking})
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().items())


# -- what is not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "weight", "site"),
    [
        ("QAT", "model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput"),
        ("BF16", "model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput"),
        ("BF16", "model.layers.0.self_attn.v_proj.weight", "layer 0 Value"),
        ("QAT", "model.layers.0.self_attn.v_proj.weight", "layer 0 Value"),
        ("BF16", "model.layers.1.mlp.experts.0.up_proj.weight", "layer 1 FC2Input"),
        ("BF16", "lm_head.weight", "logits"),
    ],
)
def test_activations_that_are_not_finite_name_layer_and_site(method, weight, site):
    spec = spec_of(method, quantization={"targets": ["KVCache"]} if "up_proj" in weight else {})
    state = ReferenceTrainer(SMALL, spec).state()
    weights = {n.removeprefix("weights/"): t for n, t in state.items() if n.startswith("weights/")}
    weights[weight] = torch.full_like(weights[weight], 3e38)
    trainer = ReferenceTrainer(SMALL, spec, weights)
    trajectories = [
        Trajectory(str(i), torch.randint(SMALL.vocab, (20,)), 3, torch.zeros(17), [0] * 17) for i in range(4)
    ]
    with pytest.raises(JobError, match=site) as error:
        forward(trainer, trajectories)
    assert error.value.reason == "NonFinite"


def test_a_gradient_that_is_not_finite_changes_no_weight():
    trainer = ReferenceTrainer(SMALL, spec_of("QAT"))
    before = trainer.state()
    trajectory = Trajectory("a", torch.randint(SMALL.vocab, (9,)), 3, torch.zeros(6), [0] * 6)
    trainer.accumulate(
        Batch([trajectory]), lambda logp: logp.sum() * torch.nan, guided=True, temperature=1.0, version=0
    )
    assert not trainer.update() < float("inf")
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().items())
    # and leaves nothing behind in the gradient
    trainer.accumulate(Batch([trajectory]), lambda logp: logp.sum(), guided=True, temperature=1.0, version=0)
    assert 0 < trainer.update() < float("inf")


def test_tensor_scale_rules_that_are_not_computed_are_refused():
    with pytest.raises(InputError, match=r"spec\.quantization\.tensorScale"):
        ReferenceTrainer(SMALL, spec_of("QAT", quantization={"tensorScale": "PerToken"}))


@pytest.mark.parametrize("hidden", [2**19, 2**24])
def test_a_model_without_memory_for_it_is_one_sentence(hidden: int):
    big = SMALL.model_copy(update={"hidden": hidden, "expert_hidden": 2**24, "vocab": 2**24})
    with pytest.raises(
        InputError, match=r"^there is no memory for the model of builtin://.*; use a "
    ) as error:
        ReferenceTrainer(big, spec_of("QAT"))
    assert "\n" not in str(error.value)


# -- several processes --------------------------------------------------------------------------------------


def test_two_processes_equal_one_with_the_whole_batch(tmp_path):
    assert_two_equal_one(tmp_path, "cpu")
