"""Which keys a row attends exactly and which quantised, against a double loop over rows and keys."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tracerl.engines.guided import pass_mask


def starts_of(passes: list[int], decoded: int) -> list[int]:
    """First exact position of each row: prefill passes of these lengths, then decoded rows."""
    starts: list[int] = []
    for length in passes:
        starts += [len(starts)] * length
    return starts + [row + 1 for row in range(len(starts), len(starts) + decoded)]


def chunk_of(passes: list[int], decoded: int) -> list[int | None]:
    """Number of the prefill pass of each row; None of a decoded one."""
    return [number for number, length in enumerate(passes) for _ in range(length)] + [None] * decoded


layouts = st.tuples(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 5)).filter(lambda x: x[0] or x[1])


@settings(deadline=None)
@given(st.lists(layouts, min_size=1, max_size=3))
def test_it_is_the_mask_of_a_double_loop(batch: list[tuple[list[int], int]]) -> None:
    size = max(sum(passes) + decoded for passes, decoded in batch)
    batch = [(passes, size - sum(passes)) for passes, _ in batch]
    masks = pass_mask(torch.tensor([starts_of(*one) for one in batch]))
    assert masks.shape == (len(batch), size, 2 * size)
    for (passes, decoded), mask in zip(batch, masks.tolist(), strict=True):
        chunks = chunk_of(passes, decoded)
        for i in range(size):
            for j in range(size):
                together = chunks[i] is not None and chunks[i] == chunks[j]
                assert mask[i][j] is not (j <= i and not together)
                assert mask[i][size + j] is not (j <= i and together)


@settings(deadline=None)
@given(layouts, st.integers(0, 2**16))
def test_attention_over_both_is_attention_pass_by_pass(layout: tuple[list[int], int], seed: int) -> None:
    """Softmax over [quantised; exact] keys equals that of each row over the keys that its pass had."""
    passes, decoded = layout
    size, dim = sum(passes) + decoded, 4
    generator = torch.Generator().manual_seed(seed)
    q, k, v, stored_k, stored_v = (
        torch.randn(size, dim, generator=generator, dtype=torch.float64) for _ in range(5)
    )
    mask = pass_mask(torch.tensor([starts_of(passes, decoded)]))[0]
    out = functional.scaled_dot_product_attention(
        q, torch.cat([stored_k, k]), torch.cat([stored_v, v]), attn_mask=~mask
    )
    first = 0
    for length in [*passes, *[1] * decoded]:
        exact = first < sum(passes)
        last = first + length
        for row in range(first, last):
            keys = torch.cat([stored_k[:first], (k if exact else stored_k)[first : row + 1]])
            values = torch.cat([stored_v[:first], (v if exact else stored_v)[first : row + 1]])
            wanted = torch.softmax(keys @ q[row] / dim**0.5, dim=0) @ values
            torch.testing.assert_close(out[row], wanted)
        first = last
