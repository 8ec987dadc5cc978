"""The Megatron trainer against the reference trainer: same weights, same records, the same numbers."""

import dataclasses

import pytest
import torch
from hand_rollout import roll_out, spec_of
from torch import Tensor

from tracerl.api.errors import InputError, JobError
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.expert_weights import quantise_expert_weights
from tracerl.engines.hf import hf_shapes
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.engines.reference.model import MoEModel
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.records.sites import SiteKind

torch.set_num_threads(1)

TINY = BUILTIN_MODELS["tiny-moe"]
SMALL = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)
ALL = {"layers": {"policy": "All"}}
RECORDED = {"secondInput": "Recorded"}
METHODS = {
    "BF16": ("BF16", {}, {}),
    "Vanilla": ("Vanilla", {}, {}),
    "QAT": ("QAT", {}, {}),
    "QAT, BF16 second input": ("QAT", {"secondInput": "BF16"}, {}),
    "QAT, FourOverSix": ("QAT", {"order": "FourOverSix"}, {}),
    "QAT, experts alone": ("QAT", {"targets": ["RoutedExperts"]}, {}),
    "TRACE": ("TRACE", {}, ALL),
    "TRACE, half": ("TRACE", {}, {}),
    "TRACE, whole": ("TRACE", {}, ALL | {"codeBits": 4, "scaleBits": 8}),
    "TRACE, band": ("TRACE", {}, ALL | {"driftBand": "0.1"}),
    "TRACE, second input": ("TRACE", RECORDED, ALL),
}
UNTIED = {"norm_topk_prob": False}
TIED = {"tie_embeddings": True}


def sampled(trainer, count: int = 16, seed: int = 3, **options) -> list[Trajectory]:
    """Trajectories of a rollout that got the trainer's exported weights, of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    new = torch.randint(1, 30, (count,), generator=generator).tolist()
    prompts = [torch.randint(trainer.shape.vocab, (n,), generator=generator).tolist() for n in lengths]
    return roll_out(trainer.shape, trainer.spec, dict(trainer.export()), prompts, new, **options)


def forward(trainer, trajectories, *, guided=True, version=0) -> Tensor:
    return trainer.forward(Batch(trajectories), guided=guided, temperature=0.7, version=version)


def gaps(logp: Tensor, trajectories: list[Trajectory]) -> Tensor:
    rows = zip(logp, trajectories, strict=True)
    return torch.cat([(row[: len(t.logp_rollout)] - t.logp_rollout).abs() for row, t in rows])


def weighted(logp: Tensor) -> Tensor:
    return -(logp * torch.arange(1, 1 + logp.shape[1])).sum() / 100


def train(trainer, trajectories, *, version=0, rate=1e-3) -> float:
    trainer.set_learning_rate(rate)
    trainer.accumulate(Batch(trajectories), weighted, guided=True, temperature=0.7, version=version)
    return trainer.update()


def part(trainer, prefix: str) -> dict[str, Tensor]:
    return {n: t for n, t in trainer.state().items() if n.startswith(prefix)}


# -- the reference trainer's numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_fp32_equals_the_reference_trainer_before_and_after_updates(name):
    method, quantization, trace = METHODS[name]
    spec = spec_of(method, quantization=quantization, algorithm={"temperature": "0.7"}, **trace)
    ours, theirs = MegatronTrainer(TINY, spec), ReferenceTrainer(TINY, spec)
    for version in range(2):
        trajectories = sampled(theirs, audited=method != "BF16", version=version)
        for guided in (True, False):
            expected = forward(theirs, trajectories, guided=guided, version=version)
            found = forward(ours, trajectories, guided=guided, version=version)
            assert found.shape == expected.shape
            assert (found - expected).abs().max() < 1e-5
            if guided and method != "Vanilla":
                assert gaps(found, trajectories).max() < 1e-5
        found, expected = ours.stats(), theirs.stats()
        for counts in found.sites.values():
            assert counts.values > 0
            if method == "TRACE" and name != "TRACE, band":
                assert counts.guided_mismatched == counts.scales_wrong == 0
        assert {key: counts.values for key, counts in found.sites.items()} == {
            key: counts.values for key, counts in expected.sites.items()
        }
        rows = sum(len(t.tokens) - 1 for t in trajectories)
        assert (found.routes_rows, found.routes_missing) == (2 * TINY.layers * rows, 0)
        assert expected.guided_missing == found.guided_missing == 0
        # Norms in FP32 over one flat buffer and over many tensors.
        assert train(ours, trajectories, version=version) == pytest.approx(
            train(theirs, trajectories, version=version), rel=1e-4
        )
        for moment, bound in (("exp_avg/", 1e-6), ("exp_avg_sq/", 1e-6)):
            expected_moments = part(theirs, moment)
            for key, value in part(ours, moment).items():
                torch.testing.assert_close(value, expected_moments[key], atol=bound, rtol=1e-3)
        # Adam divides by what may be rounding noise, so weights go on from one and the same place.
        ours.load_state(theirs.state())
        ours.stats(), theirs.stats()


@pytest.mark.parametrize("change", [UNTIED, TIED], ids=["probabilities not renormalised", "tied embeddings"])
def test_other_shapes_equal_the_reference_trainer(change):
    shape = SMALL.model_copy(update=change)
    spec = spec_of("TRACE", **ALL)
    ours, theirs = MegatronTrainer(shape, spec), ReferenceTrainer(shape, spec)
    trajectories = sampled(theirs, audited=True)
    assert (forward(ours, trajectories) - forward(theirs, trajectories)).abs().max() < 1e-5
    train(ours, trajectories)
    train(theirs, trajectories)
    expected = part(theirs, "exp_avg/")
    for key, value in part(ours, "exp_avg/").items():
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
def test_supervised_steps_equal_the_reference_trainers(dtype):
    """The warm-up is unquantised FP32 on the masters, whatever the job computes with."""
    settings = {"optimizer": {"weightDecay": "0.1", "gradientClip": "0.5", "beta2": "0.99"}}
    spec = spec_of("QAT", dtype=dtype, trainer=settings)
    ours, theirs = MegatronTrainer(SMALL, spec), ReferenceTrainer(SMALL, spec)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(SMALL.vocab, (6, 9), generator=generator)
        mask = torch.rand((6, 9), generator=generator) < 0.5
        for trainer in (ours, theirs):
            trainer.set_learning_rate(0.01)
        loss = ours.supervised_step(tokens, mask)
        assert loss == pytest.approx(theirs.supervised_step(tokens, mask), rel=1e-4)
    expected = part(theirs, "weights/")
    for key, value in part(ours, "weights/").items():
        torch.testing.assert_close(value, expected[key], atol=1e-3, rtol=1e-3)
    ours.reset_optimizer()
    fresh = ours.state()
    assert int(fresh["updates"]) == 0
    assert not any(t.any() for key, t in fresh.items() if key.startswith("exp_avg"))


def test_bf16_gaps_are_in_the_papers_order():
    """Two frameworks round at different places in BF16; guidance brings them together, QAT does not."""
    mean = {}
    for name, method, trace in (("Vanilla", "Vanilla", {}), ("QAT", "QAT", {}), ("all", "TRACE", ALL)):
        trainer = MegatronTrainer(TINY, spec_of(method, dtype="BFloat16", **trace))
        trajectories = sampled(trainer, count=32, audited=True)
        logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=0)
        mean[name] = float(gaps(logp, trajectories).mean())
        counts = trainer.stats().sites[3, "ExpertInput"]
        if name == "all":
            assert counts.guided_mismatched == 0
            assert counts.rtn_mismatched > 0
    assert mean["all"] < mean["QAT"] / 5
    assert mean["QAT"] < mean["Vanilla"]


# -- records ------------------------------------------------------------------------------------------------


def shifted(trajectory: Trajectory) -> Trajectory:
    records = trajectory.records
    moved = dataclasses.replace(
        records, rows=records.rows.roll(1, 0), zero_blocks=torch.zeros((0, 3), dtype=torch.int64)
    )
    return dataclasses.replace(trajectory, records=moved)


def without(trajectory: Trajectory, kind: SiteKind, rows: slice) -> Trajectory:
    records = trajectory.records
    present = records.present.clone()
    for index, site in enumerate(records.table.sites):
        if site.kind is kind:
            present[rows, index] = False
    return dataclasses.replace(trajectory, records=dataclasses.replace(records, present=present))


def test_records_shifted_by_one_row_cannot_hide():
    trainer = MegatronTrainer(TINY, spec_of("TRACE", quantization=RECORDED, **ALL))
    trajectories = sampled(trainer, audited=True)
    assert gaps(forward(trainer, [shifted(t) for t in trajectories]), trajectories).mean() > 0.1
    sites = trainer.stats().sites
    for kind in ("ExpertInput", "Key", "Value", "FC2Input"):
        assert sites[3, kind].guided_mismatched > 0.3 * sites[3, kind].values


def test_missing_rows_take_the_live_router_and_round_to_nearest_and_are_counted():
    spec = spec_of("TRACE", algorithm={"temperature": "0.7"}, **ALL)
    ours, theirs = MegatronTrainer(TINY, spec), ReferenceTrainer(TINY, spec)
    trajectories = sampled(ours, count=8)
    lacking = [
        without(without(t, SiteKind.EXPERT_INPUT, slice(0, 2)), SiteKind.ROUTES, slice(1, 2))
        for t in trajectories
    ]
    lacking[3] = dataclasses.replace(lacking[3], records=None)
    assert (forward(ours, lacking) - forward(theirs, lacking)).abs().max() < 1e-5
    found, expected = ours.stats(), theirs.stats()
    assert found.guided_missing == expected.guided_missing > 0
    assert found.routes_missing == expected.routes_missing > 0
    assert (found.guided_rows, found.routes_rows) == (expected.guided_rows, expected.routes_rows)


def test_rows_that_are_too_old_are_not_followed():
    trainer = MegatronTrainer(TINY, spec_of("TRACE", maxGuidedVersionDiff=1, **ALL))
    trajectories = sampled(trainer, count=4, version=5)
    rows = sum(len(t.tokens) - 1 for t in trajectories)
    for version, missing in ((6, 0), (7, 12 * rows)):
        forward(trainer, trajectories, version=version)
        assert trainer.stats().guided_missing == missing


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["uniform", "block", "attention", "experts"],
)
def test_activation_recompute_finds_the_same_records_and_counts_them_once(dtype, arguments):
    specs = [
        spec_of("TRACE", dtype=dtype, quantization=RECORDED, trainer={"engineArgs": extra}, **ALL)
        for extra in ({}, arguments)
    ]
    plain, recomputing = (MegatronTrainer(TINY, spec) for spec in specs)
    trajectories = sampled(plain, count=8, audited=True)
    trajectories[2] = without(trajectories[2], SiteKind.ROUTES, slice(None))
    norms = [train(trainer, trajectories) for trainer in (plain, recomputing)]
    assert norms[0] == norms[1] > 0
    expected = plain.state()
    for name, tensor in recomputing.state().items():
        assert torch.equal(tensor, expected[name]), name
    found, expected = recomputing.stats(), plain.stats()
    assert found.sites == expected.sites
    assert (found.guided_rows, found.routes_rows) == (expected.guided_rows, expected.routes_rows)


# -- gradients, updates, weights ----------------------------------------------------------------------------


def test_padding_and_packing_do_not_matter():
    """Log-probs and gradients of a batch are those of its trajectories one by one."""
    together, alone = (MegatronTrainer(TINY, spec_of("QAT")) for _ in range(2))
    trajectories = sampled(together, count=5)
    how = {"guided": True, "temperature": 1.0, "version": 0}
    logp = together.accumulate(Batch(trajectories), weighted, **how)
    for row, trajectory in zip(logp, trajectories, strict=True):
        one = alone.accumulate(Batch([trajectory]), weighted, **how)
        torch.testing.assert_close(one[0], row[: one.shape[1]], atol=1e-5, rtol=0)
        assert not row[one.shape[1] :].any()
    assert alone.update() == pytest.approx(together.update(), rel=1e-4)


def test_export_is_what_the_trainer_computes_with():
    trainer = MegatronTrainer(SMALL, spec_of("QAT", dtype="BFloat16"))
    trajectories = sampled(trainer, count=4)
    train(trainer, trajectories)
    forward(trainer, trajectories)
    state, exported = trainer.state(), dict(trainer.export())
    assert set(exported) == set(hf_shapes(SMALL))
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert torch.equal(tensor, state[f"weights/{name}"].bfloat16())


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
def test_weight_codes_equal_the_rollouts_after_updates(dtype):
    trainer = MegatronTrainer(SMALL, spec_of("QAT", dtype=dtype))
    rollout = MoEModel(SMALL, torch.bfloat16 if dtype == "BFloat16" else torch.float32)
    weights = RolloutWeights(rollout, plan(trainer.spec, SMALL), trainer.spec.quantization)
    trajectories = sampled(trainer, count=4)
    for _ in range(2):
        train(trainer, trajectories, rate=0.003)
        forward(trainer, trajectories)
        weights.load(dict(trainer.export()))
        held = dict(trainer._model.named_parameters())
        for layer, theirs in enumerate(rollout.layers):
            for expert in range(SMALL.experts):
                name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_"
                assert torch.equal(held[name + "fc1.weight"], theirs.gate_up[expert])
                assert torch.equal(held[name + "fc2.weight"], theirs.down[expert])
                exact = trainer._exact[name + "fc1.weight"]
                codes = quantise_expert_weights(exact[None], trainer.spec.quantization, site="")
                assert codes.codes.float().std() > 0
                assert not torch.equal(exact, theirs.gate_up[expert])


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize("form", ["state", "sharded"])
def test_a_checkpoint_continues_as_if_nothing_had_happened(dtype, form, tmp_path):
    straight, stopped = (MegatronTrainer(SMALL, spec_of("QAT", dtype=dtype)) for _ in range(2))
    trajectories = sampled(straight, count=4)
    for trainer in (straight, stopped):
        train(trainer, trajectories, rate=0.01)
        train(trainer, trajectories, rate=0.01)
    resumed = MegatronTrainer(SMALL, spec_of("QAT", dtype=dtype, seed=99))
    if form == "state":
        resumed.load_state(stopped.state())
    else:
        stopped.save_sharded(tmp_path / "checkpoint")
        resumed.load_sharded(tmp_path / "checkpoint")
    for trainer in (straight, resumed):
        assert forward(trainer, trajectories).equal(forward(stopped, trajectories))
        train(trainer, trajectories, rate=0.01)
    expected = straight.state()
    assert set(expected) == set(resumed.state())
    for name, tensor in resumed.state().items():
        assert torch.equal(tensor, expected[name]), name
    assert int(expected["updates"]) == 3


def test_either_engine_continues_the_others_checkpoint():
    spec = spec_of("TRACE", dtype="BFloat16", **ALL)
    ours, theirs = MegatronTrainer(SMALL, spec), ReferenceTrainer(SMALL, spec_of("TRACE", seed=9, **ALL))
    train(ours, sampled(ours, count=4))
    state = ours.state()
    theirs.load_state(state)
    back = MegatronTrainer(SMALL, spec_of("TRACE", dtype="BFloat16", seed=8, **ALL))
    back.load_state(theirs.state())
    assert set(state) == set(back.state())
    for name, tensor in back.state().items():
        assert torch.equal(tensor, state[name]), name


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing():
    trainer = MegatronTrainer(SMALL, spec_of("QAT"))
    before = trainer.state()
    with pytest.raises(InputError, match=r"checkpoint's weights: .*(shape|no tensor)"):
        trainer.load_state(MegatronTrainer(TINY, spec_of("QAT")).state())
    for lacking in ("updates", "exp_avg/model.norm.weight"):
        with pytest.raises(InputError, match="checkpoint"):
            trainer.load_state({name: t for name, t in before.items() if name != lacking})
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().items())


# -- what is refused or not finite --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "weight", "site"),
    [
        ("QAT", "model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput"),
        ("BF16", "model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput"),
        ("BF16", "model.layers.0.self_attn.v_proj.weight", "layer 0 Value"),
        ("BF16", "model.layers.1.mlp.experts.0.up_proj.weight", "layer 1 FC2Input"),
        ("BF16", "lm_head.weight", "logits"),
    ],
)
def test_activations_that_are_not_finite_name_layer_and_site(method, weight, site):
    spec = spec_of(method)
    weights = dict(MegatronTrainer(SMALL, spec).export())
    weights[weight] = torch.full_like(weights[weight], 3e38)
    trainer = MegatronTrainer(SMALL, spec, weights)
    trajectories = [
        Trajectory(str(i), torch.randint(SMALL.vocab, (20,)), 3, torch.zeros(17), [0] * 17) for i in range(4)
    ]
    with pytest.raises(JobError, match=site) as error:
        forward(trainer, trajectories)
    assert error.value.reason == "NonFinite"


def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_nothing_behind():
    trainer = MegatronTrainer(SMALL, spec_of("QAT"))
    before = trainer.state()
    batch = Batch([Trajectory("a", torch.randint(SMALL.vocab, (9,)), 3, torch.zeros(6), [0] * 6)])
    how = {"guided": True, "temperature": 1.0, "version": 0}
    trainer.accumulate(batch, lambda logp: logp.sum() * torch.nan, **how)
    assert not trainer.update() < float("inf")
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().items())
    trainer.accumulate(batch, lambda logp: logp.sum(), **how)
    assert 0 < trainer.update() < float("inf")


@pytest.mark.parametrize(
    ("trainer", "quantization", "sentence"),
    [
        ({}, {"tensorScale": "PerToken"}, r"spec\.quantization\.tensorScale"),
        ({"engineArgs": {"num_layers": 3}}, {}, r"engineArgs\.num_layers is decided"),
        ({"engineArgs": {"no_such": 3}}, {}, r"engineArgs\.no_such is no field"),
        ({"engineArgs": {"recompute_granularity": "some"}}, {}, "Megatron refuses"),
        ({"engineArgs": {"num_layers_in_first_pipeline_stage": 1}}, {}, "pipeline_stage is decided"),
        (
            {"parallelism": {"context": 2}},
            {"prefillAttends": "Exact"},
            r"prefillAttends is Exact, which the Megatron trainer does not compute with .*context above 1",
        ),
        ({"parallelism": {"data": 2}}, {}, "asks for 2 processes"),
    ],
)
def test_what_it_does_not_compute_is_one_sentence(trainer, quantization, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        MegatronTrainer(SMALL, spec_of("QAT", trainer=trainer, quantization=quantization))
    assert "\n" not in str(error.value)


def test_weights_of_another_model_are_refused():
    weights = dict(MegatronTrainer(SMALL, spec_of("QAT")).export())
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(InputError, match=r"the initial weights: .*experts\.3\.up_proj"):
        MegatronTrainer(SMALL, spec_of("QAT"), weights)
