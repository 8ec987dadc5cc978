"""Products in BF16, by a CPU's own arithmetic and by FP32, against NumPy in FP64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tracerl.api.model import ModelShape
from tracerl.engines.reference import products
from tracerl.engines.reference.model import MoEModel, PlainHooks, WholeSequences
from tracerl.engines.reference.weights import initialise


@pytest.fixture(params=["by FP32", "native"])
def way(request, monkeypatch):
    """Either way, on a CPU of any kind."""
    monkeypatch.setattr(products, "multiplies_bf16", lambda: request.param == "native")
    return request.param


def normal(*size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size)).bfloat16()


def exact(x):
    return x.detach().double().numpy()


def assert_rounded_once(found, factors, plus=0.0):
    """Values of a product [.., J, K] of `factors` are the nearest of BF16, but for errors of FP32 sums."""
    assert found.dtype is torch.bfloat16
    a, b = factors
    want = a @ b + plus
    half_step = 2.0 ** (np.floor(np.log2(np.abs(want))) - 8)
    sums = (a.shape[-1] + 1) * 2.0**-24 * (np.abs(a) @ np.abs(b) + np.abs(plus))
    assert (np.abs(exact(found) - want) <= half_step + sums).all()


def test_a_linear_map_and_its_gradients_are_rounded_once(way):
    x, weight = normal(37, 96).requires_grad_(), normal(48, 96, seed=1).requires_grad_()
    gradient = normal(37, 48, seed=2)
    out = products.linear(x, weight)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), gradient)
    assert_rounded_once(out, (exact(x), exact(weight).T))
    assert_rounded_once(grad_x, (exact(gradient), exact(weight)))
    assert_rounded_once(grad_weight, (exact(gradient).T, exact(x)))


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_a_batch_are_rounded_once(way, turned):
    a, b = normal(3, 64, 40), normal(3, 40, 24, seed=1)
    if turned:  # what gradients multiply lies across
        a, b = normal(3, 40, 64).transpose(1, 2), normal(3, 24, 40, seed=1).transpose(1, 2)
    assert_rounded_once(products.bmm(a, b), (exact(a), exact(b)))


def test_a_sum_with_a_product_is_rounded_once(way):
    a, b, plus = normal(2, 64, 16), normal(2, 16, 32, seed=1), normal(2, 64, 32, seed=2)
    kept = plus.clone()
    assert_rounded_once(products.bmm(a, b, plus), (exact(a), exact(b)), exact(plus))
    assert torch.equal(plus, kept)


def test_fp32_is_multiplied_as_it_is(way):
    a, b = normal(2, 8, 16).float() / 3, normal(2, 16, 8, seed=1).float() / 3
    assert torch.equal(products.bmm(a, b), torch.bmm(a, b))
    assert torch.equal(products.linear(a[0], a[1]), functional.linear(a[0], a[1]))


def test_both_ways_give_a_model_the_same_logits_and_gradients(monkeypatch):
    """As far as BF16 goes; every token has all experts, so that no choice between two near ones differs."""
    shape = ModelShape.uniform(
        2,
        hidden=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        experts=3,
        top_k=3,
        expert_hidden=32,
        vocab=40,
        context=32,
    )
    model = MoEModel(shape, torch.bfloat16)
    initialise(shape, dict(model.named_parameters()), seed=0)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(shape.vocab, size=60))
    found = []
    for native in (False, True):
        monkeypatch.setattr(products, "multiplies_bf16", lambda native=native: native)
        model.zero_grad()
        logits = model.logits(model(tokens, WholeSequences(shape, [20, 29, 11]), PlainHooks(shape)))
        functional.cross_entropy(logits, tokens.roll(1)).backward()
        found.append({"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()})
    for name, one in found[0].items():
        other = found[1][name]
        assert (one - other).norm() <= 0.02 * one.norm(), name
        assert one.norm() > 0, name
