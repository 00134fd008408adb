"""Explicit and fused attention: equality, causality and scale; averages of the past."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chargpt.analysis.explain import average_by_loop, average_by_matrix, average_by_softmax
from chargpt.models.kernels import explicit_attention, fast_attention


def random_heads(n_queries, n_keys, head_size=4, seed=0):
    """Return unit normal q (2, 3, T, D) and k, v (2, 3, S, D)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, 3, length, head_size, generator=generator)
        for length in (n_queries, n_keys, n_keys)
    )


@given(
    keys=st.integers(1, 20),
    past=st.integers(0, 19),
    head_size=st.integers(1, 17),
    scaled=st.booleans(),
    has_mask=st.booleans(),
)
def test_fused_attention_equals_the_explicit_form(keys, past, head_size, scaled, has_mask):
    n_queries = keys - min(past, keys - 1)
    q, k, v = random_heads(n_queries, keys, head_size)
    mask = None
    if has_mask:
        mask = torch.rand(n_queries, keys, generator=torch.Generator().manual_seed(0)) < 0.5
        mask[:, 0] = True
    expected, weights = explicit_attention(q, k, v, scaled=scaled, mask=mask)
    assert mask is None or not weights[..., ~mask].any()
    fused = fast_attention(q, k, v, scaled=scaled, mask=mask)
    torch.testing.assert_close(fused, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_queries", [1, 3, 8])
def test_the_explicit_form_is_the_papers_formula_term_by_term(n_queries):
    q, k, v = random_heads(n_queries, 8)
    output, weights = explicit_attention(q, k, v)
    past = 8 - n_queries
    for t in range(n_queries):
        scores = torch.tensor([float(q[1, 2, t] @ k[1, 2, s]) / 2 for s in range(past + t + 1)])
        probs = scores.exp() / scores.exp().sum()
        expected = sum(prob * v[1, 2, s] for s, prob in enumerate(probs))
        torch.testing.assert_close(weights[1, 2, t, : past + t + 1], probs)
        torch.testing.assert_close(output[1, 2, t], expected)
        assert not weights[..., t, past + t + 1 :].any()


@given(length=st.integers(1, 30), channels=st.integers(1, 5), seed=st.integers(0, 100))
def test_the_three_averages_of_the_past_are_equal(length, channels, seed):
    x = torch.randn(2, length, channels, generator=torch.Generator().manual_seed(seed))
    expected = average_by_loop(x)
    torch.testing.assert_close(average_by_matrix(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(average_by_softmax(x), expected, atol=1e-5, rtol=1e-5)
