"""The two forms of attention are one, and neither looks ahead."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chargpt.models.attention import (
    attention_scores,
    average_by_loop,
    average_by_matrix,
    average_by_softmax,
    average_weights,
    causal_mask,
    explicit_attention,
    fused_attention,
)


def random_heads(queries, keys, head_size=4, seed=0):
    """Return unit normal q (2, 3, T, D) and k, v (2, 3, S, D)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, 3, steps, head_size, generator=generator) for steps in (queries, keys, keys)
    )


@given(
    keys=st.integers(1, 20),
    past=st.integers(0, 19),
    head_size=st.integers(1, 17),
    causal=st.booleans(),
    scaled=st.booleans(),
)
def test_fused_attention_equals_the_explicit_form(keys, past, head_size, causal, scaled):
    q, k, v = random_heads(keys - min(past, keys - 1), keys, head_size)
    mixed, _ = explicit_attention(q, k, v, causal=causal, scaled=scaled)
    fused = fused_attention(q, k, v, causal=causal, scaled=scaled)
    torch.testing.assert_close(fused, mixed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 3, 8])
def test_the_explicit_form_is_the_papers_formula_term_by_term(queries):
    q, k, v = random_heads(queries, 8)
    mixed, weights = explicit_attention(q, k, v)
    past = 8 - queries
    for t in range(queries):
        scores = torch.tensor([float(q[1, 2, t] @ k[1, 2, s]) / 2 for s in range(past + t + 1)])
        shares = scores.exp() / scores.exp().sum()
        expected = sum(share * v[1, 2, s] for s, share in enumerate(shares))
        torch.testing.assert_close(weights[1, 2, t, : past + t + 1], shares)
        torch.testing.assert_close(mixed[1, 2, t], expected)


def test_weights_of_the_future_are_exactly_zero_and_rows_sum_to_one():
    _, weights = explicit_attention(*random_heads(5, 9))
    assert torch.equal(weights[..., ~causal_mask(5, 9)], torch.zeros(2, 3, 5 * 9 - 35))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))


def test_the_last_queries_see_all_keys_up_to_their_own_place():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(3, 3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_without_the_mask_every_query_sees_every_key():
    q, k, v = random_heads(4, 4)
    _, weights = explicit_attention(q, k, v, causal=False)
    assert weights.min() > 0


@pytest.mark.parametrize("form", [lambda *x: explicit_attention(*x)[0], fused_attention])
def test_future_keys_and_values_never_change_past_outputs(form):
    q, k, v = random_heads(8, 8)
    before = form(q, k, v)
    k[:, :, 5:] += 3
    v[:, :, 5:] -= 3
    after = form(q, k, v)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert (before[:, :, 5:] - after[:, :, 5:]).abs().min() > 1e-3


def test_scores_are_scaled_by_the_root_of_the_head_size():
    q, k, _ = random_heads(3, 3, head_size=9)
    unscaled = attention_scores(q, k, scaled=False)
    torch.testing.assert_close(attention_scores(q, k) * 3, unscaled)
    assert float(unscaled[0, 0, 1, 2]) == pytest.approx(float(q[0, 0, 1] @ k[0, 0, 2]), abs=1e-5)


def test_scores_of_unit_gaussians_have_the_variance_of_the_head_size():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 256, 16, generator=generator)
    assert attention_scores(q, k, scaled=False).var().item() == pytest.approx(16, rel=0.03)
    assert attention_scores(q, k).var().item() == pytest.approx(1, rel=0.03)


def test_attention_in_bfloat16_stays_near_float32():
    q, k, v = random_heads(8, 8)
    half = fused_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), fused_attention(q, k, v), atol=0.05, rtol=0.05)


@given(steps=st.integers(1, 30), channels=st.integers(1, 5), seed=st.integers(0, 100))
def test_the_three_ways_of_averaging_the_past_agree(steps, channels, seed):
    x = torch.randn(2, steps, channels, generator=torch.Generator().manual_seed(seed))
    expected = average_by_loop(x)
    torch.testing.assert_close(average_by_matrix(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(average_by_softmax(x), expected, atol=1e-5, rtol=1e-5)


def test_an_average_is_the_mean_of_a_position_and_all_before_it():
    x = torch.tensor([[[1.0], [3.0], [8.0]]])
    assert average_by_loop(x).flatten().tolist() == [1, 2, 4]
    assert average_by_matrix(x).flatten().tolist() == pytest.approx([1, 2, 4])
    assert average_by_softmax(x).flatten().tolist() == pytest.approx([1, 2, 4])


def test_average_weights_spread_evenly_over_the_past():
    weights = average_weights(2, 3)
    assert weights.tolist() == [[0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    assert math.isclose(float(weights.sum()), 2, rel_tol=1e-6)
