"""Counts, entropies, and the description of a text with its warnings."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chargpt.config import TextConfig
from chargpt.text import corpus as corpus_module
from chargpt.text import describe as describe_module
from chargpt.text.corpus import count_pairs, count_tokens
from chargpt.text.describe import (
    MIN_REPEATED,
    compare_splits,
    conditional_entropy_bits,
    describe,
    entropy_bits,
    find_repeats,
    warn_of_length,
    warn_of_list,
    warn_of_repeats,
)
from chargpt.text.prepare import load_corpus

DTYPES = ("uint8", "uint16", "uint32", "int64")


@pytest.fixture(params=["default", "small chunks", "sparse"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Count with the default settings, in chunks of 3 tokens, or with the sparse method."""
    if request.param != "default":
        monkeypatch.setattr(corpus_module, "CHUNK", 3)
        monkeypatch.setattr(corpus_module, "SPARSE_CHUNK", 4)
    if request.param == "sparse":
        monkeypatch.setattr(corpus_module, "MAX_DENSE_PAIRS", 0)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 8, 100])
def test_counts_equal_those_of_collections_counter(method: str, dtype: str, size: int) -> None:
    generator = np.random.default_rng(size)
    tokens = generator.integers(0, 11, size).astype(dtype)
    ids = tokens.tolist()
    counter = Counter(ids)
    assert count_tokens(tokens, 11).tolist() == [counter[token] for token in range(11)]
    pairs = count_pairs(tokens, 11)
    expected = sorted(Counter(pairwise(ids)).items())
    found = zip(pairs.first, pairs.second, pairs.counts, strict=True)
    assert [((int(a), int(b)), int(n)) for a, b, n in found] == expected


@pytest.mark.parametrize(
    ("counts", "bits"), [([1, 1], 1.0), ([5], 0.0), ([], 0.0), ([2, 0, 1, 1], 1.5), ([3] * 8, 3.0)]
)
def test_entropies_of_known_distributions(counts: list[int], bits: float) -> None:
    assert entropy_bits(np.array(counts, dtype=np.int64)) == pytest.approx(bits)


def test_conditional_entropy_is_0_for_a_cycle_and_full_for_noise() -> None:
    cycle = np.tile(np.arange(4, dtype=np.uint8), 50_000)
    noise = np.random.default_rng(0).permutation(cycle)
    for tokens, bits in ((cycle, 0.0), (noise, 2.0)):
        found = conditional_entropy_bits(count_pairs(tokens, 4))
        assert found == pytest.approx(bits, abs=1e-3)


def describe_text(folder: Path, text: str, **settings: Any) -> SimpleNamespace:
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    return SimpleNamespace(**describe(load_corpus(TextConfig(path=str(path), **settings))))


def test_a_description_has_the_statistics_of_the_text(tmp_path: Path) -> None:
    description = describe_text(tmp_path, "aaab\n" * 4000 + "cc")
    assert (description.characters, description.vocab_size) == (20_002, 4)
    assert description.most_frequent[0] == ("a", 12_000)
    assert description.least_frequent[0] == ("c", 2)
    assert (description.lines, description.longest_line) == (4001, 4)
    assert description.unigram_bits == pytest.approx(1.372, abs=2e-3)
    assert description.bigram_bits == pytest.approx(0.551, abs=2e-3)
    assert not description.warnings


def test_items_of_several_lines_are_not_taken_for_a_list_of_lines() -> None:
    jokes = "".join(f"Lamp {i}\nand boat {i}\n\tby {i}\n%%\n" for i in range(300))
    advice = warn_of_list(load_corpus(TextConfig(), text=jokes))
    assert advice.startswith("300 lines are %%, ")
    (setting,) = re.findall(r"text.documents='(.*)'", advice)
    assert load_corpus(TextConfig(documents=setting), text=jokes).n_documents == 300
    assert not warn_of_list(load_corpus(TextConfig(documents="lines"), text=jokes))
    assert not warn_of_list(load_corpus(TextConfig(), text=jokes.replace("%%\n", "")))  # indented
    for text, setting in (
        (jokes.replace("%%", "\n---\n"), r"'\n\n---\n\n'"),
        (jokes.replace("%%", "* * *"), r"'\n* * *\n'"),
        ("".join(f"X:{i}\nK:G\nGAB\n\n" for i in range(300)), r"'\n\n'"),
        ("".join(f"{i}\n00:01 --> 00:02\nA line.\n\n" for i in range(300)), r"'\n\n'"),
    ):
        advice = warn_of_list(load_corpus(TextConfig(), text=text))
        assert f"if so, -s text.documents={setting} shuffles" in advice
        settings = TextConfig(documents=setting.strip("'"))
        assert load_corpus(settings, text=text).n_documents == 300
    assert not warn_of_list(load_corpus(TextConfig(), text=json.dumps([{"a": 1}] * 999, indent=1)))


def test_conversations_and_copies_of_few_lines_are_not_taken_for_lists() -> None:
    days = [f"{day:02}.{month:02}.23" for month in range(1, 13) for day in range(1, 29)]
    items = [f"We sailed on {i} boats" for i in range(len(days))]
    for lines, is_list in (
        (items, True),
        ([f"{day}, 18:07 - Ada: so" for day in days], False),
        ([f"[{day}, 18:07:12] Ada: so" for day in days], False),
        ([f"18:07 <ada> so {day}" for day in days], False),
        (["The same line."] * 3000, False),
        (items[:20] * 20, False),
        ([*items[:-1], "and\r", "on"], False),  # CR LF between messages, LF inside
    ):
        advice = warn_of_list(load_corpus(TextConfig(), text="\n".join(lines)))
        assert ("like a list of items" in advice) == is_list, lines[0]


def test_long_lines_are_taken_for_a_list_only_if_they_are_sorted() -> None:
    lines = [f"{'aAbB'[i % 4]}{i:05} {'the lamp and the boat ' * 2}" for i in range(300)]
    assert not warn_of_list(load_corpus(TextConfig(), text="\n".join(lines)))
    for key in (str, str.casefold):
        assert load_corpus(TextConfig(), text="\n".join(sorted(lines, key=key))).n_documents == 300


def test_code_and_headings_are_not_taken_for_lists() -> None:
    code = "".join(f"int f{i}(void)\n{{\n\treturn {i};\n}}\n\n" for i in range(300))
    assert not warn_of_list(load_corpus(TextConfig(), text=code))
    lines = "Lamp and boat.\n" * 30
    sections = "".join(f"Part {i}\n------\n{lines}\n" for i in range(300))
    assert not warn_of_list(load_corpus(TextConfig(), text=sections))


@pytest.mark.parametrize(
    ("text", "lines", "longest"),
    [("abc", 1, 3), ("abc\n", 1, 3), ("\n\n", 2, 0), ("a\nbcd\ne", 3, 3), ("a\nbcdefgh", 2, 7)],
)
def test_lines_are_measured_across_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, lines: int, longest: int
) -> None:
    monkeypatch.setattr(describe_module, "CHUNK", 2)
    description = describe_text(tmp_path, text)
    assert (description.lines, description.longest_line) == (lines, longest)


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(("separator", "end"), [("\n%\n", ""), ("%\n", "\n")])
def test_lines_of_documents_are_those_between_separators(
    monkeypatch: pytest.MonkeyPatch, chunk: int, separator: str, end: str
) -> None:
    monkeypatch.setattr(describe_module, "CHUNK", chunk)
    text = separator.join(f"a{end}" if i % 2 else f"ab\nabc{end}" for i in range(40))
    found = describe(load_corpus(TextConfig(documents=separator), text=text))
    assert [found[key] for key in ("documents", "lines", "longest_line")] == [40, 60, 3]


def test_unlike_splits_are_told_from_alike_ones() -> None:
    rng = np.random.default_rng(1)
    letters = np.array(list("etaoin shrdlu"))
    alike = "".join(rng.choice(letters, 20_000))
    other = "".join(rng.choice(letters[::2], 2_000))
    rare = "".join(rng.choice(list("qxz "), 2_000, p=[0.45, 0.3, 0.05, 0.2]))
    paragraphs = "\n\n".join(alike[start : start + 100] for start in range(0, 18_000, 100))
    for text in (alike, alike[:200], "ab"):  # short splits differ by chance
        assert compare_splits(load_corpus(TextConfig(), text=text)) is None
    for text, warning in (
        (alike[:18_000] + other, "=lines, =files or =SEPARATOR shuffles them"),
        (paragraphs + rare, r"\(rarer there: . . .; more frequent there: q x .\)"),
    ):
        corpus = load_corpus(TextConfig(), text=text)
        found = compare_splits(corpus)
        assert found is not None
        assert "differs from the training split" in found.warning
        assert re.search(warning, found.warning)
        assert compare_splits(corpus.with_settings(mixture_characters=500)) == found


def test_long_documents_of_several_kinds_have_alike_splits() -> None:
    rng = np.random.default_rng(1)
    kinds = ["etaoin shr", "xylophone ", "0123456789"]
    documents = ["".join(rng.choice(list(kinds[n % 3]), 1500)) for n in range(60)]
    settings = TextConfig(documents="%", seed=7)
    alike = load_corpus(settings, text="%".join(documents))
    counts = [alike.token_counts(split) / len(alike.split(split)) for split in ("train", "val")]
    assert np.abs(counts[0] - counts[1]).sum() > 0.5
    assert compare_splits(alike) is None
    one = alike.tokenizer.characters.index("8")
    tokens = np.where(np.arange(alike.tokens.size) < len(alike.split("train")), alike.tokens, one)
    tokens[alike.tokens == alike.tokenizer.eos_token_id] = alike.tokenizer.eos_token_id
    unlike = compare_splits(replace(alike, tokens=tokens))
    assert unlike is not None
    assert "give more documents, " in unlike.warning


def test_a_validation_split_too_short_for_a_loss_is_pointed_out() -> None:
    text = "a line of a poem\n" * 2000
    assert not warn_of_length(load_corpus(TextConfig(), text=text))
    few = f"{text}%%{text}%%{'b' * 20}"
    for settings, content, expected in (
        ({"documents": "%%"}, few, "0 characters, too few to measure a loss; give a longer"),
        ({"val_fraction": 0.001}, text, "34 characters, too few to measure a loss; give a longer"),
    ):
        assert expected in warn_of_length(load_corpus(TextConfig(**settings), text=content))


@pytest.mark.parametrize("documents", ["lines", "%\n"])
def test_documents_of_the_validation_split_that_were_trained_on_are_counted(documents: str) -> None:
    names = [f"n{number:03}" for number in range(500)]
    separator = "\n" if documents == "lines" else documents
    for items, warned in ((names, False), ([*names, *names], True), (names * 10, True)):
        text = "".join(item + separator for item in items)
        corpus = load_corpus(TextConfig(documents=documents), text=text)
        train, val = (
            corpus.tokenizer.decode(corpus.split(split)).split(corpus.tokenizer.eos_token)[:-1]
            for split in ("train", "val")
        )
        counted = sum(name in train for name in val)
        shown = (
            f"{counted:,} of {len(val):,} documents ({counted / len(val):.0%}) of the validation"
        )
        assert (shown in warn_of_repeats(corpus)) == warned


@pytest.mark.parametrize("n_kinds", [60, 600])  # a token of one byte, of two
@pytest.mark.parametrize("offset", [0, 1, 6, 7, 4003])
def test_the_part_of_the_validation_split_that_was_trained_on_is_said_wherever_it_stands(
    n_kinds: int, offset: int
) -> None:
    rng = np.random.default_rng(offset)
    text, new = (
        "".join(map(chr, rng.integers(0x4E00, 0x4E00 + n_kinds, size))) for size in (90_000, 10_000)
    )
    blanks = " " * 200 + "-" * 200  # which many texts hold
    for n_new, expected in ((10_000, 0), (9_800, 0), (5_300, 47), (0, 100)):
        val = new[:n_new] + text[offset : offset + 10_000 - n_new]
        warning = warn_of_repeats(load_corpus(TextConfig(), text=blanks + text + val + blanks))
        said = re.match(r"about (\d+)% of the passages of 64 characters of the validation", warning)
        assert abs(int(said[1]) - expected) < 5 if said else not expected


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r", "\u2028"])
@pytest.mark.parametrize("fraction", [0, 0.5, 1])  # of the lines that were trained on
@pytest.mark.parametrize(("first", "n_kinds", "length"), [(0x61, 26, 20), (0x4E00, 3000, 9)])
def test_lines_of_the_validation_split_that_were_trained_on_are_found_in_any_order(
    newline: str, fraction: float, first: int, n_kinds: int, length: int
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(first, first + n_kinds, (5000, length))
    lines = ["".join(map(chr, row)) for row in codes]
    copied = rng.permutation(lines[:4500])[: int(500 * fraction)].tolist()
    val = [*copied, *lines[4500 + len(copied) :]]
    text = "".join(line + newline for line in [*lines[:4500], *(f"\t{line} " for line in val)])
    warning = warn_of_repeats(load_corpus(TextConfig(documents=None), text=text))
    said = re.match(r"about (\d+)% of the characters, in whole lines of \d+ or more, of", warning)
    assert (int(said[1]) if said else 0) == pytest.approx(100 * fraction, abs=10 if said else 0)


@pytest.mark.parametrize("n_times", [1, 2, 5])
def test_copied_lines_count_as_often_as_a_text_has_them(n_times: int) -> None:
    rng = np.random.default_rng(0)
    lines = ["".join(map(chr, row)) + "\n" for row in rng.integers(0x61, 0x7B, (1060, 30))]
    corpus = load_corpus(TextConfig(documents=None), text="".join(lines[:1000]))
    known, new = lines[:60], lines[1000:]
    for mixed, fraction in ((known, 1.0), ([*known, *new], 0.5)):
        text = "".join(rng.permutation(mixed * n_times).tolist())
        assert find_repeats(corpus, corpus.tokenizer.encode(text)).fraction == pytest.approx(
            fraction
        )


def test_lines_that_recur_by_nature_are_no_copies() -> None:
    rng = np.random.default_rng(0)
    refrains = ["".join(map(chr, row)) for row in rng.integers(0x61, 0x7B, (20, 30))]
    short = ["".join(map(chr, row)) for row in rng.integers(0x61, 0x7B, (20_000, 12))]
    songs = [rng.choice(refrains) if n % 30 == 0 else line for n, line in enumerate(short)]
    records = [f'"{key}": "{key * 3}",' for key in rng.choice(short[:300], 5000)]
    for lines in (songs, records):
        text = "".join(line + "\n" for line in lines)
        corpus = load_corpus(TextConfig(documents=None), text=text)
        found = find_repeats(corpus, corpus.split("val"))
        assert "lines" not in found.unit or found.fraction < MIN_REPEATED


def test_repeated_documents_are_named_before_their_lines() -> None:
    rng = np.random.default_rng(0)
    items = ["".join(map(chr, row)) for row in rng.integers(0x61, 0x7B, (1050, 30))]
    poems = [f"{item}\n{item[::-1]}\n{item[::2] * 2}" for item in items[:50]]  # a tenth, twice
    for documents, separator in (("%", "%"), ("lines", "\n")):
        twice = poems if documents == "%" else items[:50]
        corpus = load_corpus(
            TextConfig(documents=documents), text=separator.join([*items[50:], *twice, *twice])
        )
        assert "documents" in warn_of_repeats(corpus)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("abab" * 10, "too few"),
        ("one\r\n\r\n" * 5000, "line ends: 10,000 CR LF, "),
        (
            "".join(map(chr, (*range(20_000, 26_000), *range(25_999, 19_999, -1)))),
            "vocabulary of 6,000",
        ),
        (
            "".join(map(chr, range(0x4E00, 0x4E00 + 300))) + "a" * 20_000,
            "300 of the 301 characters occur only once and cannot be learned; -s text.rare=bytes "
            "-s text.min_count=2 spells them as bytes",
        ),
    ],
)
def test_each_problem_of_a_text_causes_one_warning(tmp_path: Path, text: str, warning: str) -> None:
    warnings = describe_text(tmp_path, text).warnings
    assert len(warnings) == 1
    assert warning in warnings[0]


def test_bytes_are_not_advised_where_they_outnumber_the_characters_that_occur_once(
    tmp_path: Path,
) -> None:
    once = "".join(map(chr, range(0x4E00, 0x4E00 + 200)))
    assert not describe_text(tmp_path, once + "a" * 20_000).warnings


@pytest.mark.parametrize(
    ("rare", "vocabulary"),
    [("unknown", "2 characters"), ("bytes", "2 characters and 241 bytes")],
)
def test_a_description_has_the_fraction_of_rare_characters(
    tmp_path: Path, rare: str, vocabulary: str
) -> None:
    description = describe_text(tmp_path, "ab" * 4999 + "x\u20ac", min_count=2, rare=rare)
    assert description.rare_fraction == pytest.approx(2 / 10_000)
    assert description.characters == 10_000
    assert description.vocabulary_summary == vocabulary
    assert [character for character, _ in description.most_frequent] == ["a", "b"]
