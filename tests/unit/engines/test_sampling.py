"""Sampling: the published SplitMix64 sequence, the distribution that is drawn from, its log-probs."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.engines.reference.sampling import sample, splitmix64, uniform


def test_splitmix64_gives_the_published_sequence():
    # Of seed 1234567, as listed with Vigna's reference implementation on Rosetta Code.
    want = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    seed = np.full(5, 1234567, np.uint64)
    assert splitmix64(seed, np.arange(5, dtype=np.uint64)).tolist() == want


def test_noise_is_uniform_and_has_no_shared_stream_between_seeds():
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100), 100)
    noise = uniform(seeds, positions).numpy()
    assert len(np.unique(noise)) == len(noise)
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    # Chi-squared with 19 degrees of freedom is below 43.8 with probability .999.
    assert ((counts - 500) ** 2 / 500).sum() < 43.8


def test_tokens_follow_the_distribution_at_the_temperature():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    n = 20_000
    for temperature in (0.5, 1.0, 2.0):
        noise = uniform(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
        tokens, logp = sample(logits.expand(n, -1), torch.full((n,), temperature), noise)
        p = np.exp(logits.double().numpy() / temperature)
        p /= p.sum()
        counts = np.bincount(tokens.numpy(), minlength=5)
        assert counts[4] == 0
        # Chi-squared with 3 degrees of freedom is below 16.3 with probability .999.
        assert ((counts[:4] - n * p[:4]) ** 2 / (n * p[:4])).sum() < 16.3
        np.testing.assert_allclose(logp.numpy(), np.log(p[tokens.numpy()]), atol=1e-6)


def test_temperature_0_takes_the_most_probable_token_beside_rows_that_sample():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    temperature = torch.where(torch.arange(64) % 2 == 0, 0.0, 1.0)
    noise = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logp = sample(logits, temperature, noise)
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1))
    assert torch.allclose(logp, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    st.one_of(st.sampled_from([0.0, 1 - 2.0**-53, 2.0**-53]), st.floats(0, 1, exclude_max=True)),
)
@settings(max_examples=200, deadline=None)
def test_any_noise_gives_a_token_that_can_occur(logits, noise):
    tokens, logp = sample(torch.tensor([logits]), torch.ones(1), torch.tensor([noise], dtype=torch.float64))
    assert 0 <= int(tokens[0]) < len(logits)
    # FP32 probabilities below 1e-38 are 0: such a token must not be drawn.
    assert float(logp[0]) > -104


def test_nan_logits_give_a_nan_log_probability_and_no_index_error():
    tokens, logp = sample(torch.full((1, 7), torch.nan), torch.ones(1), torch.zeros(1, dtype=torch.float64))
    assert 0 <= int(tokens[0]) < 7
    assert bool(logp.isnan().all())
