"""The reference model against transformers in FP32, and its two paths against each other."""

import json
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS, ModelShape, model_shape
from tracerl.engines.hf import read_tensors, write_model
from tracerl.engines.reference.kernels import experts
from tracerl.engines.reference.model import Decode, KVCache, MoEModel, PlainHooks, Prefill, WholeSequences
from tracerl.engines.reference.weights import copy_weights, hf_views, initialise
from tracerl.numerics import fake_quantize

SMALL = {"hidden": 48, "head_dim": 16, "expert_hidden": 32, "vocab": 40, "context": 160}
SHAPES = {
    "tiny-moe": BUILTIN_MODELS["tiny-moe"],
    "top-1": ModelShape.uniform(2, heads=2, kv_heads=2, experts=4, top_k=1, norm_topk_prob=False, **SMALL),
    "top-1 normalised": ModelShape.uniform(2, heads=2, kv_heads=1, experts=4, top_k=1, **SMALL),
    "top-4": ModelShape.uniform(2, heads=4, kv_heads=1, experts=6, top_k=4, **SMALL),
    "unnormalised": ModelShape.uniform(
        2,
        heads=4,
        kv_heads=4,
        experts=5,
        top_k=2,
        norm_topk_prob=False,
        rope_theta=1e6,
        rms_eps=1e-5,
        **SMALL,
    ),
    "all experts, tied": ModelShape.uniform(
        1, heads=4, kv_heads=2, experts=3, top_k=3, tie_embeddings=True, **SMALL
    ),
}
LENGTHS = [1, 17, 40, 16, 5]


def reference(shape: ModelShape, seed: int = 0) -> MoEModel:
    model = MoEModel(shape)
    parameters = dict(model.named_parameters())
    initialise(shape, parameters, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # norms of ones would hide a norm in the wrong place
        for parameter in parameters.values():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def hf_tensors(model: MoEModel) -> dict[str, Tensor]:
    return hf_views(model.shape, dict(model.named_parameters()))


@cache
def pair(name: str) -> tuple[MoEModel, Qwen3MoeForCausalLM]:
    shape = SHAPES[name]
    ours = reference(shape)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape.to_hf_config())).float()
    mine, named, state = dict(ours.named_parameters()), hf_tensors(ours), {}
    for key in theirs.state_dict():
        if "experts" in key:  # transformers holds experts stacked, as we do
            state[key] = mine[f"layers.{key.split('.')[2]}.{'gate_up' if 'gate_up' in key else 'down'}"]
        else:
            tied = shape.tie_embeddings and key == "lm_head.weight"
            state[key] = named["model.embed_tokens.weight" if tied else key]
    theirs.load_state_dict({key: value.detach().clone() for key, value in state.items()})
    if shape.tie_embeddings:
        theirs.tie_weights()
    return ours, theirs


def random_tokens(shape: ModelShape, count: int, seed: int = 5) -> Tensor:
    return torch.randint(shape.vocab, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_equal_transformers(name):
    ours, theirs = pair(name)
    shape = ours.shape
    tokens = random_tokens(shape, sum(LENGTHS))
    attention = WholeSequences(shape, LENGTHS)
    logits = ours.logits(ours(tokens, attention, PlainHooks(shape)))
    expected = torch.cat([theirs(part[None]).logits[0] for part in tokens.split(LENGTHS)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    targets = random_tokens(shape, sum(LENGTHS), seed=6)
    for model in pair(name):
        model.zero_grad()
    functional.cross_entropy(logits, targets, reduction="sum").backward()
    functional.cross_entropy(expected, targets, reduction="sum").backward()
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    mine = hf_views(shape, gradients)
    for key, parameter in theirs.named_parameters():
        if "experts" in key:
            part = "gate_up" if "gate_up" in key else "down"
            gradient = gradients[f"layers.{key.split('.')[2]}.{part}"]
        else:
            gradient = mine[key]
        torch.testing.assert_close(
            gradient, parameter.grad, atol=2e-4, rtol=1e-3, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_greedy_decoding_equals_transformers(name):
    ours, theirs = pair(name)
    shape = ours.shape
    prompts = [part.tolist() for part in random_tokens(shape, sum(LENGTHS)).split(LENGTHS)]
    new = 12
    slots = torch.tensor([3, 0, 6, 1, 4])
    cache = KVCache(shape, slots=7, capacity=64, dtype=torch.float32)
    hooks = PlainHooks(shape)
    prefill = Prefill(cache, slots, LENGTHS)
    hidden = ours(random_tokens(shape, sum(LENGTHS)), prefill, hooks)
    tokens = ours.logits(hidden[torch.tensor(LENGTHS).cumsum(0) - 1]).argmax(-1)
    generated = [tokens]
    for step in range(new - 1):
        # The order of the batch means nothing: slots tell who is who.
        order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(step))
        lengths = torch.tensor(LENGTHS) + step
        hidden = ours(tokens[order], Decode(cache, slots[order], lengths[order]), hooks)
        tokens = tokens.clone()
        tokens[order] = ours.logits(hidden).argmax(-1)
        generated.append(tokens)
    for prompt, mine in zip(prompts, torch.stack(generated, 1), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        assert mine.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [3, 128, 129, 150])
@torch.no_grad()
def test_decoding_token_by_token_equals_the_whole_sequence(length):
    """Also across the length at which whole sequences change their attention."""
    shape = SHAPES["top-4"]
    model, hooks = reference(shape), PlainHooks(shape)
    tokens = random_tokens(shape, length)
    whole = model(tokens, WholeSequences(shape, [length]), hooks)
    cache = KVCache(shape, slots=2, capacity=length, dtype=torch.float32)
    slot, first = torch.tensor([1]), length - 3
    if first:
        model(tokens[:first], Prefill(cache, slot, [first]), hooks)
    rows = [
        model(tokens[t : t + 1], Decode(cache, slot, torch.tensor([t])), hooks) for t in range(first, length)
    ]
    torch.testing.assert_close(torch.cat(rows), whole[first:], atol=1e-5, rtol=0)


def test_gradients_across_long_sequences_equal_those_of_short_attention(monkeypatch):
    shape = SHAPES["top-4"]
    tokens = random_tokens(shape, 150)
    gradients = []
    for longest in (128, 256):
        monkeypatch.setattr("tracerl.engines.reference.model.LONGEST_SHORT", longest)
        model = reference(shape)
        model.logits(model(tokens, WholeSequences(shape, [150]), PlainHooks(shape))).logsumexp(
            -1
        ).sum().backward()
        gradients.append(model.layers[0].qkv.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_experts_quantise_their_second_input_straight_through():
    """Against one expert after the other, with autograd."""
    generator = torch.Generator().manual_seed(0)
    n, e, k, h, f = 37, 5, 2, 32, 16

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).requires_grad_()

    x, gate_up, down = random(n, h), random(e, 2 * f, h), random(e, h, f)
    gates = torch.rand((n, k), generator=generator).requires_grad_()
    ids = torch.rand((n, e), generator=generator).topk(k).indices
    leaves = [x, gates, gate_up, down]

    def rounded(inner: Tensor) -> Tensor:
        return fake_quantize(inner.view(-1, f)).view_as(inner)

    out = experts(x, gates, ids, gate_up_EGH=gate_up, down_EHF=down, fc2_input=rounded)
    expected = torch.zeros_like(out)
    for token in range(n):
        for slot in range(k):
            expert = int(ids[token, slot])
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            inner = functional.silu(gate) * up
            inner = inner + (rounded(inner[None])[0] - inner).detach()
            expected[token] = expected[token] + gates[token, slot] * (down[expert] @ inner)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    weight = torch.randn(out.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_bf16_is_close_to_fp32():
    shape = SHAPES["tiny-moe"]
    full = reference(shape)
    half = MoEModel(shape, torch.bfloat16)
    copy_weights(hf_tensors(half), hf_tensors(full), "test")
    copy_weights(hf_tensors(full), hf_tensors(half), "test")
    tokens = random_tokens(shape, 200)
    results = [
        model.logits(model(tokens, WholeSequences(shape, [50] * 4), PlainHooks(shape)))
        for model in (full, half)
    ]
    gap = (results[0].log_softmax(-1) - results[1].log_softmax(-1)).abs().mean()
    assert gap < 0.02


# -- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-moe", "unnormalised", "all experts, tied"])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(name, tmp_path):
    ours, theirs = pair(name)
    shape = ours.shape
    write_model(tmp_path / "ours", shape, hf_tensors(ours).items())
    loaded, info = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() or name != "tiny-moe"
    assert model_shape(f"file://{tmp_path / 'theirs'}") == shape
    again = MoEModel(shape)
    copy_weights(hf_tensors(again), read_tensors(tmp_path / "theirs"), "test")
    for key, value in hf_tensors(ours).items():
        assert torch.equal(hf_tensors(again)[key], value), key


def test_initial_weights_do_not_depend_on_dtype_and_differ_by_seed():
    shape = SHAPES["top-1"]
    models = []
    for dtype, seed in ((torch.float32, 7), (torch.bfloat16, 7), (torch.float32, 8)):
        model = MoEModel(shape, dtype)
        initialise(shape, dict(model.named_parameters()), seed)
        models.append(model)
    for key, value in hf_tensors(models[0]).items():
        assert torch.equal(value.bfloat16(), hf_tensors(models[1])[key])
        assert value.ndim == 1 or not torch.equal(value, hf_tensors(models[2])[key])


def written(tmp_path, **changes):
    model = reference(SHAPES["top-1"])
    tensors = {key: value.detach().clone() for key, value in hf_tensors(model).items()}
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    write_model(tmp_path, model.shape, tensors.items())
    return model


ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (ROUTER, None, f"tensor {ROUTER} is missing"),
        ("model.extra.weight", torch.zeros(2), "has no tensor model.extra.weight"),
        (ROUTER, torch.zeros(5, 48), f"tensor {ROUTER} has shape [5, 48], but config.json asks for [4, 48]"),
        (ROUTER, torch.zeros(4, 48, dtype=torch.int8), f"tensor {ROUTER} holds int8"),
        (ROUTER, torch.full((4, 48), torch.nan), f"tensor {ROUTER} holds NaN or Inf"),
    ],
)
def test_wrong_weights_are_refused_by_name_and_change_nothing(tmp_path, name, value, says):
    written(tmp_path, **{name: value})
    model = reference(SHAPES["top-1"], seed=9)
    before = {key: tensor.clone() for key, tensor in hf_tensors(model).items()}
    with pytest.raises(InputError) as error:
        copy_weights(hf_tensors(model), read_tensors(tmp_path), str(tmp_path))
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert all(torch.equal(before[key], tensor) for key, tensor in hf_tensors(model).items())


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def truncate_header(path):
    path.write_bytes(path.read_bytes()[:20])


def empty(path):
    path.write_bytes(b"")


def break_header(path):
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, truncate_header, empty, break_header, remove])
def test_damaged_files_are_named(tmp_path, damage):
    written(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": "../model.safetensors"}}'],
)
def test_damaged_indexes_are_named(tmp_path, text):
    written(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000, "[]", "{}"])
def test_damaged_configurations_are_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        model_shape(f"file://{tmp_path}")


def test_a_model_with_dense_layers_is_refused():
    config = SHAPES["top-1"].to_hf_config() | {"mlp_only_layers": [0]}
    with pytest.raises(InputError, match="layers without experts"):
        MoEModel(ModelShape.from_hf_config(json.loads(json.dumps(config))))
