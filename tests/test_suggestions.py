"""Suggestions are the most probable continuations, whole words ahead."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from noise import noisy_model, noisy_run_on

import chargpt
from chargpt.errors import ConfigError
from chargpt.inference.suggestions import suggest
from chargpt.models.ngram import BigramLM
from chargpt.store.run import Run

TEXT = "the sea, the light. It's the ship of the night!\n" * 9


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return noisy_run_on(tmp_path, TEXT)


def bigram_run(folder: Path, text: str, scale: float = 2.0) -> Run:
    """Return a run with a bigram model with random probabilities."""
    run = noisy_run_on(folder, text)
    model = BigramLM(run.tokenizer.vocab_size, block_size=64)
    generator = torch.Generator().manual_seed(1)
    model.table.weight.data = scale * torch.randn(model.table.weight.shape, generator=generator)
    return Run(run.folder, run.config, run.tokenizer, model.eval(), run.step, run.state)


def all_words(run: Run, text: str, longest: int) -> dict[str, float]:
    """Return the probability of each continuation by one word, of those up to a length."""
    characters = run.tokenizer.characters
    probs = run.model.table.weight.double().softmax(dim=1).tolist()
    index = {character: i for i, character in enumerate(characters)}
    ends = [character for character in characters if not character.isalnum()]
    found = {}
    for n in range(1, longest + 1):
        for letters in itertools.product(characters, repeat=n):
            word = "".join(letters)
            if re.fullmatch(r"\W*\w+", word):
                pairs = itertools.pairwise(text[-1] + word)
                prob = math.prod(probs[index[v]][index[w]] for v, w in pairs)
                found[word] = prob * sum(probs[index[word[-1]]][index[end]] for end in ends)
    return found


@pytest.mark.parametrize("text", ["ab", "b ", "a,"])
def test_the_suggestions_of_a_bigram_model_are_the_most_probable_of_all(
    tmp_path: Path, text: str
) -> None:
    run = bigram_run(tmp_path, "ab, ba cab\n" * 40)
    everything = sorted(all_words(run, text, 6).items(), key=lambda each: -each[1])
    found = suggest(run, text, 4)
    assert [each.text for each in found] == [each for each, _ in everything[:4]]
    assert [each.prob for each in found] == pytest.approx([p for _, p in everything[:4]])
    others = suggest(run, text, 3, excluded=[each.text for each in found])
    assert [each.text for each in others] == [each for each, _ in everything[4:7]]


def test_each_suggestion_ends_with_a_word_and_its_probability_is_that_of_the_model(
    run: Run,
) -> None:
    found = chargpt.suggest(run, "the l", 5, words=2)
    assert len({each.text for each in found}) == 5
    ends = [i for i, each in enumerate(run.tokenizer.characters) if not each.isalnum()]
    for text, prob in found:
        assert len(re.findall(r"[\w']+", text)) == 2
        assert text[-1].isalnum() or text[-1] == "'"
        tokens = torch.from_numpy(run.tokenizer.encode(text).astype("int64"))
        log_probs = run.logits("the l" + text).log_softmax(dim=-1)  # (tokens, V)
        own = log_probs[4:-1].gather(1, tokens[:, None]).sum().exp()
        end = log_probs[-1].exp()[[i for i in ends if run.tokenizer.characters[i] != "'"]].sum()
        assert prob == pytest.approx(float(own * end), rel=1e-4)
    assert [each.prob for each in found] == sorted((each.prob for each in found), reverse=True)


def test_a_document_may_end_and_its_end_is_shown_by_its_token(tmp_path: Path) -> None:
    run = noisy_run_on(tmp_path, "anna\nberta\ncarla\n" * 30, **{"text.documents": "lines"})
    found = suggest(run, "anna\nber", 5)
    assert found == suggest(run, "ber", 5)  # the last document is what the model reads
    assert all("\n" not in each.text[:-1] for each in found)
    assert any(each.text.endswith("\n") for each in found)


def test_a_long_text_is_read_from_its_end_on(run: Run) -> None:
    assert suggest(run, TEXT * 3 + "the l", 3) == suggest(run, TEXT[-30:] + "the l", 3)


def test_characters_spelled_by_bytes_are_whole(tmp_path: Path) -> None:
    run = noisy_run_on(tmp_path, TEXT + "€", **{"text.min_count": 2})
    assert run.tokenizer.has_bytes
    run.model.first_continuation_id = run.tokenizer.first_continuation_id
    for text in ("the ", "the €"):
        for each in suggest(run, text, 5):
            each.text.encode()
            assert "\ufffd" not in each.text


def test_a_chinese_character_is_a_word(tmp_path: Path) -> None:
    run = noisy_run_on(tmp_path, "夜は海の上に。\n" * 40)
    assert all(len(each.text) <= 4 for each in suggest(run, "夜", 5))
    model = noisy_model(vocab_size=run.tokenizer.vocab_size)
    assert model.block_size < 24  # and a small block suffices


def test_too_many_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="ask for up to 32"):
        suggest(run, "the", 33)
