"""The n-gram baseline: against the formula with dictionaries, and its fast paths."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chargpt.models import ngram
from chargpt.models.ngram import NGramLM


def reference_prob(
    text: list[int], vocab_size: int, order: int
) -> Callable[[tuple[int, ...], int], float]:
    """Return p(token | past) by the interpolated Kneser-Ney formula, one dictionary an order."""
    order = min(order, len(text))
    seen = [
        Counter(tuple(text[i : i + k]) for i in range(len(text) - k + 1)) for k in range(order + 1)
    ]
    counts: list[dict[tuple[int, ...], int]] = []
    for k in range(1, order):
        before = Counter(gram[1:] for gram in seen[k + 1])
        counts.append({gram: max(1, before[gram]) for gram in seen[k]})
    counts.append(seen[order])
    once, twice = ([sum(c == i for c in each.values()) for each in counts] for i in (1, 2))
    discounts = [o / (o + 2 * t) if o and t else 0.5 for o, t in zip(once, twice, strict=True)]
    followers: list[dict[tuple[int, ...], list[int]]] = []
    for each in counts:
        followers.append({})
        for gram, count in each.items():
            followers[-1].setdefault(gram[:-1], []).append(count)

    def prob(past: tuple[int, ...], token: int) -> float:
        k = min(len(past), order - 1)
        past = past[len(past) - k :]
        lower = prob(past[1:], token) if past else 1 / vocab_size
        known = followers[k].get(past)
        if known is None:
            return lower
        discounted = max(counts[k].get((*past, token), 0) - discounts[k], 0)
        return (discounted + discounts[k] * len(known) * lower) / sum(known)

    return prob


@pytest.mark.parametrize("spacing", [1, 50, 100, 30_000])  # 64 bits; ids of 1 to 4 bytes
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    other=st.lists(st.integers(0, 4), min_size=2, max_size=8),
    order=st.integers(1, 8),
)
def test_probabilities_equal_the_formula(
    spacing: int, text: list[int], other: list[int], order: int
) -> None:
    text, other = [spacing * token for token in text], [spacing * token for token in other]
    vocab_size = 4 * spacing + 1
    model = NGramLM.fit(np.array(text), vocab_size, block_size=8, order=order)
    prob = reference_prob(text, vocab_size, order)
    probs = model(torch.tensor([other[:-1]])).double().exp()[0]
    for position in range(1, len(other)):
        expected = prob(tuple(other[:position]), other[position])
        assert float(probs[position - 1, other[position]]) == pytest.approx(expected, rel=1e-5)


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    rows=st.lists(st.lists(st.integers(0, 6), min_size=9, max_size=9), min_size=1, max_size=4),
)
def test_losses_equal_those_of_the_logits(text: list[int], rows: list[list[int]]) -> None:
    model = NGramLM.fit(np.array(text, dtype=np.uint8), 7, block_size=8)
    tokens = torch.tensor(rows)
    logits = model(tokens[:, :-1])
    expected = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(
        torch.from_numpy(model.losses(np.array(rows))), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize("n_tabulated", [1, 3, 5])
def test_probabilities_from_the_table_equal_interpolated_ones(
    order: int, n_tabulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = np.random.default_rng(0).integers(0, 40, 200) // 4
    tokens = torch.from_numpy(np.stack([text[:60], text[60:120][::-1]]))
    model = NGramLM.fit(text, 40, block_size=64, order=order)
    interpolated = model.probs(tokens)
    n_contexts = [1, *(len(each.codes) for each in model.orders)]
    monkeypatch.setattr(ngram, "MAX_TABLE_ENTRIES", 40 * sum(n_contexts[:n_tabulated]))
    model.build_table()
    assert model.n_tabulated == min(n_tabulated, order)
    assert torch.equal(model.probs(tokens), interpolated)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_probabilities_are_positive_and_sum_to_one(text: list[int], order: int) -> None:
    probs = NGramLM.fit(np.array(text), 5, 8, order).probs(torch.tensor([[*text[:6], 4, 0]]))
    assert probs.min() > 0
    torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:2]))


def test_a_vocabulary_of_all_unicode_does_not_overflow() -> None:
    vocab_size = 1_114_112
    generator = np.random.default_rng(0)
    text = generator.integers(0, vocab_size, 3000).astype(np.uint32)
    model = NGramLM.fit(np.tile(text, 2), vocab_size, block_size=8)
    # every n-gram occurs twice with one continuation, except across the boundary of the copies
    assert model.losses(text[None, :2000]).max() < np.log(2)
