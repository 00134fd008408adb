"""The counted n-gram: against the formula written with dictionaries, and against itself."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chargpt.config import SampleConfig
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.sampling import stream
from chargpt.models import ngram
from chargpt.models.ngram import NGramLM
from chargpt.text.tokenizer import CharTokenizer

VERSE = """\
The keeper wound the clockwork tight
and lit the lamp and trimmed it bright;
the keeper's daughter, half asleep,
was told the hours that lighthouse keepers keep.
"""


def ids(text: str) -> npt.NDArray[np.int64]:
    return CharTokenizer.fit(VERSE).encode(text).astype(np.int64)


def slow_share(
    text: list[int], vocab_size: int, order: int, context: list[int], char: int
) -> float:
    """The formula, one dictionary an order."""
    share = 1 / vocab_size
    for k in range(1, order + 1):
        if len(context) < k - 1:
            break
        past = tuple(context[len(context) - k + 1 :])
        grams = Counter(tuple(text[i : i + k]) for i in range(len(text) - k + 1))
        followers = {gram[-1]: count for gram, count in grams.items() if gram[:-1] == past}
        if followers:
            total, kinds = sum(followers.values()), len(followers)
            share = (followers.get(char, 0) + kinds * share) / (total + kinds)
    return share


def test_a_share_worked_out_by_hand() -> None:
    # "aabab": a 3 times, b twice; after a: a once, b twice
    model = NGramLM.fit(np.array([0, 0, 1, 0, 1]), 2, block_size=8, order=2)
    unigram = (3 + 2 * 1 / 2) / (5 + 2)
    bigram = (1 + 2 * unigram) / (3 + 2)
    shares = model(torch.tensor([[0]])).exp()
    torch.testing.assert_close(shares[0, 0], torch.tensor([bigram, 1 - bigram]))


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    other=st.lists(st.integers(0, 4), min_size=2, max_size=8),
    order=st.integers(1, 5),
)
def test_the_model_is_the_formula(text: list[int], other: list[int], order: int) -> None:
    model = NGramLM.fit(np.array(text), 5, block_size=8, order=order)
    shares = model(torch.tensor([other[:-1]])).double().exp()[0]
    for place in range(1, len(other)):
        expected = slow_share(text, 5, order, other[:place], other[place])
        assert float(shares[place - 1, other[place]]) == pytest.approx(expected, rel=1e-5)


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    rows=st.lists(st.lists(st.integers(0, 6), min_size=9, max_size=9), min_size=1, max_size=4),
)
def test_losses_are_what_the_logits_say(text: list[int], rows: list[list[int]]) -> None:
    model = NGramLM.fit(np.array(text, dtype=np.uint8), 7, block_size=8)
    tokens = torch.tensor(rows)
    logits = model(tokens[:, :-1])
    expected = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(
        torch.from_numpy(model.losses(np.array(rows))), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("order", [1, 2, 5])
def test_a_table_of_all_contexts_says_what_mixing_says(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.from_numpy(np.stack([ids(VERSE)[:60], ids(VERSE)[60:120][::-1].copy()]))
    tabulated = NGramLM.fit(ids(VERSE), 40, block_size=64, order=order)
    monkeypatch.setattr(ngram, "MOST_TABULATED", 0)
    mixed = NGramLM.fit(ids(VERSE), 40, block_size=64, order=order)
    assert tabulated.table is not None
    assert mixed.table is None
    torch.testing.assert_close(tabulated.shares(tokens), mixed.shares(tokens))


def test_shares_sum_to_one_after_any_context() -> None:
    model = NGramLM.fit(ids(VERSE), 40, block_size=64)
    tokens = torch.from_numpy(np.stack([ids(VERSE)[:64], np.arange(64) % 40]))
    torch.testing.assert_close(model(tokens).exp().sum(-1), torch.ones(2, 64))


@pytest.mark.parametrize("order", [1, 2, 5])
def test_a_cache_changes_nothing(order: int) -> None:
    tokens = torch.from_numpy(ids(VERSE)[None, :24])
    model = NGramLM.fit(ids(VERSE), 40, block_size=24, order=order)
    whole = model(tokens)
    cache = model.new_cache(1)
    parts = [model(part, cache) for part in torch.split(tokens, [1, 5, 1, 2, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert cache.length == 24


def test_a_vocabulary_of_all_unicode_does_not_overflow() -> None:
    vocab_size = 1_114_112
    generator = np.random.default_rng(0)
    text = generator.integers(0, vocab_size, 3000).astype(np.uint32)
    model = NGramLM.fit(np.tile(text, 2), vocab_size, block_size=8)
    # every gram was seen twice and went on one way, but the one over the seam
    assert model.losses(text[None, :2000]).max() < np.log(2)


def test_longer_grams_predict_a_text_of_the_same_kind_better(verse) -> None:
    tokenizer = CharTokenizer.fit(verse.read_text(encoding="utf-8"))
    tokens = tokenizer.encode(verse.read_text(encoding="utf-8"))
    train, val = tokens[:-3000], tokens[-3000:]
    losses = [
        evaluate_tokens(NGramLM.fit(train, tokenizer.vocab_size, 64, order), val).nats_per_char
        for order in (1, 2, 3)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0] - 0.5


def test_it_writes_text_as_any_model_does() -> None:
    tokenizer = CharTokenizer.fit(VERSE)
    model = NGramLM.fit(tokenizer.encode(VERSE), tokenizer.vocab_size, block_size=16)
    options = SampleConfig(length=60, temperature=0.0, seed=1)
    texts = [
        "".join(
            piece
            for (piece,) in stream(
                model, tokenizer, tokenizer.encode("The keep"), options, use_cache=use_cache
            )
        )
        for use_cache in (True, False)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("er")


def kneser_ney_by_hand(train: list[int], scored: list[int], vocab: int, order: int) -> float:
    """Return the mean nats of an interpolated Kneser-Ney model, from the formula, with dicts."""
    grams = [
        Counter(tuple(train[i : i + k]) for i in range(len(train) - k + 1))
        for k in range(order + 1)
    ]
    counts: list[Counter[tuple[int, ...]]] = []
    for k in range(1, order + 1):
        if k == order:
            counts.append(grams[k])
        else:
            before = Counter(gram[1:] for gram in grams[k + 1])
            counts.append(Counter({gram: max(1, before[gram]) for gram in grams[k]}))
    discounts, wholes, kinds = [], [], []
    for found in counts:
        once, twice = (sum(c == i for c in found.values()) for i in (1, 2))
        discounts.append(once / (once + 2 * twice) if once and twice else 0.5)
        whole: Counter[tuple[int, ...]] = Counter()
        kind: Counter[tuple[int, ...]] = Counter()
        for gram, count in found.items():
            whole[gram[:-1]] += count
            kind[gram[:-1]] += 1
        wholes.append(whole)
        kinds.append(kind)

    def share(context: tuple[int, ...], token: int) -> float:
        k = len(context)
        shorter = share(context[1:], token) if context else 1 / vocab
        if not wholes[k][context]:
            return shorter
        own = max(counts[k][(*context, token)] - discounts[k], 0)
        rest = discounts[k] * kinds[k][context] * shorter
        return (own + rest) / wholes[k][context]

    nats = [
        -math.log(share(tuple(scored[max(0, i - order + 1) : i]), scored[i]))
        for i in range(1, len(scored))
    ]
    return sum(nats) / len(nats)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8])
def test_kneser_ney_is_what_an_independent_count_gives(order: int, verse: Path) -> None:
    text = verse.read_text(encoding="utf-8")[:6000]
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = [index[c] for c in text]
    train, scored = ids[:5000], ids[5000:]
    model = NGramLM.fit(np.array(train), len(index), 1, order, "kneser-ney")
    found = float(model.losses(np.array(scored)[None]).mean(dtype=np.float64))
    assert found == pytest.approx(kneser_ney_by_hand(train, scored, len(index), order), abs=1e-5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4))
def test_kneser_ney_shares_sum_to_one(tokens: list[int], order: int) -> None:
    model = NGramLM.fit(np.array(tokens), 4, 8, order, "kneser-ney")
    shares = model.shares(torch.tensor([tokens[:8]]))
    assert shares.min() > 0
    assert torch.allclose(shares.sum(dim=-1), torch.ones(shares.shape[:2]), atol=1e-5)
