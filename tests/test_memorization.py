"""What was copied from the training text is found, however long, and from where."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import Cli
from hypothesis import given
from hypothesis import strategies as st

from chargpt.analysis import memorization as module
from chargpt.analysis.memorization import LEAST, LENGTHS, memorization

QUICK = ("-s", "train.max_steps=2", "-s", "model.n_layer=1", "-s", "model.n_embd=16")


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8)


@pytest.fixture
def training(verse: Path) -> str:
    return verse.read_text(encoding="utf-8").encode("ascii", "replace").decode()


def test_planted_copies_of_every_length_are_found_with_their_place(training: str) -> None:
    random = np.random.default_rng(0)
    texts, planted = [], []
    for _ in range(100):
        length = int(random.integers(20, 501))
        place = int(random.integers(0, len(training) - length))
        before, after = ("".join(map(chr, random.integers(160, 255, n))) for n in (90, 130))
        texts.append(tokens(before + training[place : place + length] + after))
        planted.append((90, length, training[place : place + length]))
    for (start, length, words), found in zip(
        planted, memorization(tokens(training), texts), strict=True
    ):
        assert found.longest is not None
        assert (found.longest.start, found.longest.length) == (start, length)
        place = found.longest.place
        assert training[place : place + length] == words
        assert found.copied == [(start, start + length)]


@given(st.text("ab", min_size=1, max_size=400), st.text("ab", min_size=1, max_size=120))
def test_it_finds_what_searching_by_hand_finds(text: str, sample: str) -> None:
    with mock.patch.object(module, "MOST_PLACES", 400):  # every place
        (found,) = memorization(tokens(text), [tokens(sample)])
    for n in LENGTHS:
        if n <= min(len(sample), len(text)):
            grams = [sample[i : i + n] for i in range(len(sample) - n + 1)]
            assert found.novel[n] == pytest.approx(np.mean([gram not in text for gram in grams]))
    longest = max(
        (
            n
            for n in range(LEAST, len(sample) + 1)
            if any(sample[i : i + n] in text for i in range(len(sample) - n + 1))
        ),
        default=0,
    )
    assert (found.longest.length if found.longest else 0) == longest
    covered = set()
    for i in range(len(sample) - LEAST + 1):
        if sample[i : i + LEAST] in text:
            covered |= set(range(i, i + LEAST))
    assert {i for start, end in found.copied for i in range(start, end)} == covered


def test_of_a_stretch_that_stands_everywhere_few_places_are_remembered(training: str) -> None:
    text, sample = tokens(" " * 50_000 + training + " " * 90), [tokens(" " * 90 + training[:300])]
    with mock.patch.object(module._Wanted, "occurrences", autospec=True) as asked:
        asked.side_effect = lambda wanted, number: remembered(wanted)
        memorization(text, sample)
    assert asked.call_count
    (found,) = memorization(text, sample)
    assert found.longest is not None
    assert found.longest.length >= 300
    assert found.copied == [(0, 390)]


def remembered(wanted: module._Wanted) -> tuple[np.ndarray, np.ndarray]:
    kinds = np.concatenate([np.zeros(0, dtype=int), *(kinds for kinds, _ in wanted.places)])
    assert np.bincount(kinds, minlength=1).max() <= module.MOST_PLACES
    return kinds[:0], kinds[:0]


def test_nothing_is_missed_where_two_parts_meet(
    training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [tokens(training[start : start + 64]) for start in range(0, 2000, 37)]
    whole = memorization(tokens(training), copies)
    monkeypatch.setattr(module, "PART", 100)
    assert memorization(tokens(training), copies) == whole
    assert all(found.longest and found.longest.length == 64 for found in whole)


def test_a_text_with_nothing_of_it_is_all_novel(training: str) -> None:
    (found,) = memorization(tokens(training), [tokens("\xff" * 50)])
    assert found.longest is None
    assert found.copied == []
    assert set(found.novel.values()) == {1.0}


def test_short_and_no_texts_are_no_trouble(training: str) -> None:
    assert memorization(tokens(training), []) == []
    empty, short = memorization(tokens(training), [tokens(""), tokens("abc")])
    assert empty.novel == short.novel == {}


def test_samples_are_checked_beside_text_that_was_never_seen(verse: Path, cli: Cli) -> None:
    cli("train", verse, *QUICK, "--out", "mine")
    words = verse.read_text(encoding="utf-8")[1000:1080]
    done = cli("sample", "mine", "--prompt", words, "--length", "60", "--check", "--seed", "1")
    assert done.returncode == 0, done.stderr
    marked = done.stdout.replace("\n", " ")
    assert "⟦" + words.replace("\n", " ") in marked
    assert "stands in the training text: 8" in marked
    assert "from character 1,000 on" in marked
    told = json.loads(
        cli("sample", "mine", "--prompt", words, "--length", "60", "--check", "--json").stdout
    )
    assert told["memorization"][0]["longest"]["place"] == 1000
    assert told["memorization"][0]["copied"][0][0] == 0
