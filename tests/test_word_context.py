"""Word n-grams: their contexts, their probabilities, and which tokens are words."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chargpt.models import mixture
from chargpt.models.mixture import (
    LOOKBACK,
    NO_TOKEN,
    WORDS,
    WordContextModel,
    hash_contexts,
    word_token_mask,
)
from chargpt.text.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer(" .abcd")
IN_WORDS = word_token_mask(TOKENIZER)
# with words that are longer than LOOKBACK
TEXTS = st.lists(
    st.sampled_from([" ", ".", "a", "b", "ab", "cd", "abcd" * 5, "a" * 40]), min_size=2, max_size=40
).map("".join)


def contexts_at(text: str, index: int) -> list[tuple[str, ...]]:
    """Return the context that ends at a character, by number of words: the definition."""
    oldest = index - LOOKBACK + 1
    start = index
    if text[index].isalnum():
        while start > 0 and text[start - 1].isalnum():
            start -= 1
    found = [(text[max(0, start, oldest) : index + 1],)]
    for _ in range(WORDS):
        last = start - 1
        while last >= 0 and not text[last].isalnum():
            last -= 1
        start = max(0, last)
        while start > 0 and text[start - 1].isalnum():
            start -= 1
        is_near = last >= 0 and start >= oldest
        found.append((*found[-1], text[start : last + 1] if is_near else ""))
    return found


@given(text=TEXTS)
def test_a_context_is_the_word_so_far_and_the_words_before_it(text: str) -> None:
    hashes = hash_contexts(TOKENIZER.encode(text).astype(np.int64)[None], IN_WORDS)
    for n_words in range(WORDS + 1):
        by_context = defaultdict(set)
        for index in range(len(text)):
            by_context[contexts_at(text, index)[n_words]].add(int(hashes[n_words][0, index]))
        assert all(len(found) == 1 for found in by_context.values())
        assert len(set.union(*by_context.values())) == len(by_context)


@given(text=TEXTS, start=st.integers(0, 400))
def test_a_context_depends_only_on_the_last_tokens(text: str, start: int) -> None:
    tokens = TOKENIZER.encode(text).astype(np.int64)
    start %= len(tokens)
    padded = np.pad(tokens, (LOOKBACK, 0), constant_values=NO_TOKEN)
    window = padded[start : start + LOOKBACK + 8]
    for whole, part in zip(
        hash_contexts(tokens[None], IN_WORDS), hash_contexts(window[None], IN_WORDS), strict=True
    ):
        assert part[0, LOOKBACK:].tolist() == whole[0, start : start + 8].tolist()


def test_probabilities_are_discounted_counts_and_back_off_to_fewer_words() -> None:
    text = "a b. a c. b a b. aa b a b c. a b a. dd a b. " * 2 + "c a"
    tokens = TOKENIZER.encode(text).astype(np.int64)
    words = WordContextModel(tokens, TOKENIZER.vocab_size, IN_WORDS)
    prompt = "b a b a"
    encoded = torch.from_numpy(TOKENIZER.encode(prompt).astype(np.int64))[None]
    probs = torch.arange(TOKENIZER.vocab_size).float().softmax(-1).repeat(len(prompt), 1)
    assert len(words.orders) == WORDS + 1
    for n_words, (order, ids) in enumerate(zip(words.orders, words.contexts(encoded), strict=True)):
        lower = probs.clone()
        order.interpolate(probs, ids[0])
        counts: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for index in range(len(text) - 1):
            counts[contexts_at(text, index)[n_words]][text[index + 1]] += 1
        sizes = Counter(count for after in counts.values() for count in after.values())
        discount = sizes[1] / (sizes[1] + 2 * sizes[2]) if sizes[1] and sizes[2] else 0.5
        for index in range(len(prompt)):
            after = counts[contexts_at(prompt, index)[n_words]]
            total, weight = after.total(), 1.0
            if total:
                weight = discount * len(after) / total
            for token, character in enumerate(TOKENIZER.characters):
                seen = (after[character] - discount) / total if after[character] else 0.0
                expected = seen + weight * float(lower[index, token])
                assert float(probs[index, token]) == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(probs.sum(-1), torch.ones(len(prompt)))


def test_a_text_is_counted_in_chunks_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TOKENIZER.encode("ab abc. dd a " * 20 + "a" * 50 + " b").astype(np.int64)
    whole = WordContextModel(tokens, TOKENIZER.vocab_size, IN_WORDS)
    monkeypatch.setattr(mixture, "CHUNK", 40)
    parts = WordContextModel(tokens, TOKENIZER.vocab_size, IN_WORDS)
    for one, other in zip(whole.orders, parts.orders, strict=True):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.discounted_prob, other.discounted_prob)


def test_words_are_letters_marks_digits_and_bytes() -> None:
    tokenizer = CharTokenizer.fit("it's naïve_1\u0301 家 ☃", min_count=1, rare="keep")
    known = {
        c for c, part in zip(tokenizer.characters, word_token_mask(tokenizer), strict=True) if part
    }
    assert known == set("itsnaïve_1\u0301家")
    with_bytes = CharTokenizer(" a", has_bytes=True)
    assert word_token_mask(with_bytes).tolist() == [False, *[True] * (with_bytes.vocab_size - 1)]
