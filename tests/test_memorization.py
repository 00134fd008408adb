"""Verbatim overlap: matches of every length are found, with their position."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import Cli
from hypothesis import given
from hypothesis import strategies as st

from chargpt.analysis import memorization as module
from chargpt.analysis.memorization import (
    MIN_MATCH,
    NGRAM_LENGTHS,
    VerbatimMatch,
    find_overlap,
    longest_match,
    measure_overlap,
)
from chargpt.cli.sample import print_overlap
from chargpt.config import TextConfig
from chargpt.text.corpus import load_corpus

QUICK = ("-s", "train.max_steps=2", "-s", "model.n_layer=1", "-s", "model.n_embd=16")


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8)


@pytest.fixture
def training(verse: Path) -> str:
    return verse.read_text(encoding="utf-8").encode("ascii", "replace").decode()


def test_planted_matches_of_every_length_are_found_with_their_position(training: str) -> None:
    random = np.random.default_rng(0)
    texts, planted = [], []
    for _ in range(100):
        length = int(random.integers(20, 501))
        place = int(random.integers(0, len(training) - length))
        before, after = ("".join(map(chr, random.integers(160, 255, n))) for n in (90, 130))
        texts.append(tokens(before + training[place : place + length] + after))
        planted.append((90, length, training[place : place + length]))
    for (start, length, words), found in zip(
        planted, find_overlap(tokens(training), texts), strict=True
    ):
        assert found.longest is not None
        assert (found.longest.start, found.longest.length) == (start, length)
        position = found.longest.position
        assert training[position : position + length] == words
        assert found.matched == [(start, start + length)]


@given(st.text("ab", min_size=1, max_size=400), st.text("ab", min_size=1, max_size=120))
def test_the_result_equals_a_brute_force_search(text: str, sample: str) -> None:
    with mock.patch.object(module, "MAX_POSITIONS", 400):  # every place
        (found,) = find_overlap(tokens(text), [tokens(sample)])
    for n in NGRAM_LENGTHS:
        if n <= min(len(sample), len(text)):
            grams = [sample[i : i + n] for i in range(len(sample) - n + 1)]
            assert found.novel[n] == pytest.approx(np.mean([gram not in text for gram in grams]))
    longest = max(
        (
            n
            for n in range(MIN_MATCH, len(sample) + 1)
            if any(sample[i : i + n] in text for i in range(len(sample) - n + 1))
        ),
        default=0,
    )
    assert (found.longest.length if found.longest else 0) == longest
    covered = set()
    for i in range(len(sample) - MIN_MATCH + 1):
        if sample[i : i + MIN_MATCH] in text:
            covered |= set(range(i, i + MIN_MATCH))
    assert {i for start, end in found.matched for i in range(start, end)} == covered


def test_few_positions_of_a_frequent_ngram_are_stored(training: str) -> None:
    text, sample = tokens(" " * 50_000 + training + " " * 90), [tokens(" " * 90 + training[:300])]
    with mock.patch.object(module._NGramTable, "pairs", autospec=True) as asked:
        asked.side_effect = lambda table, number: stored_positions(table)
        find_overlap(text, sample)
    assert asked.call_count
    (found,) = find_overlap(text, sample)
    assert found.longest is not None
    assert found.longest.length >= 300
    assert found.matched == [(0, 390)]


def stored_positions(table: module._NGramTable) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([np.zeros(0, dtype=int), *(ids for ids, _ in table.positions)])
    assert np.bincount(ids, minlength=1).max() <= module.MAX_POSITIONS
    return ids[:0], ids[:0]


def test_matches_across_chunks_are_found(training: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [tokens(training[start : start + 64]) for start in range(0, 2000, 37)]
    whole = find_overlap(tokens(training), copies)
    monkeypatch.setattr(module, "CHUNK", 100)
    assert find_overlap(tokens(training), copies) == whole
    assert all(found.longest and found.longest.length == 64 for found in whole)


def test_unrelated_text_is_all_novel(training: str) -> None:
    (found,) = find_overlap(tokens(training), [tokens("\xff" * 50)])
    assert found.longest is None
    assert found.matched == []
    assert set(found.novel.values()) == {1.0}


def test_short_texts_and_no_texts_are_accepted(training: str) -> None:
    assert find_overlap(tokens(training), []) == []
    empty, short = find_overlap(tokens(training), [tokens(""), tokens("abc")])
    assert empty.novel == short.novel == {}


def test_the_compared_parts_are_from_all_of_the_validation_split(training: str) -> None:
    random = np.random.default_rng(0)
    copied, new = training[:400], "".join(map(chr, random.integers(97, 123, 2700)))
    corpus = load_corpus(TextConfig(val_fraction=0.1), text=training[:27_900] + copied + new)
    report = measure_overlap(corpus, [training[500:700]])
    assert longest_match(report.val) == 200  # of the part that is copied
    assert report.longest_in_val == 0  # of most parts
    _, (_, ours, unseen), *_ = report.novel_rows()[-2:] + report.novel_rows()
    assert ours == "0.0%"
    assert float(unseen.rstrip("%")) > 50


def test_ngrams_are_those_of_the_longest_text(training: str) -> None:
    report = measure_overlap(load_corpus(TextConfig(), text=training), ["sea", training[:300]])
    assert [int(n) for n, *_ in report.novel_rows()] == [4, 6, 8, 12, 16, 20, 24, 32]


def test_lengths_are_those_of_characters_also_where_bytes_spell_them() -> None:
    numbers = np.random.default_rng(1).permutation(np.arange(0x4E00, 0x5600)).tolist()
    text = "".join(map(chr, numbers))  # each occurs once, and is spelled as three bytes
    corpus = load_corpus(TextConfig(min_count=2), text="ab" * 20 + text)
    assert corpus.tokenizer.has_bytes
    training = corpus.tokenizer.decode(corpus.split("train"))
    copied = [training[300:330], training[500:510]]
    (found, short), longest = measure_overlap(corpus, copied).texts, len(copied[0])
    assert found.matched == [(0, longest)]
    assert found.longest == VerbatimMatch(0, longest, 300, copied[0])
    assert (short.matched, short.longest) == ([], None)  # 30 bytes, but 10 characters


def test_sample_check_counts_whole_lines_with_what_the_prompt_has_of_them(cli: Cli) -> None:
    Path("letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n" * 100)
    steps = ["-s", "train.max_steps=300", "-s", "model.block_size=16", "-s", "train.batch_size=8"]
    cli("train", "letters.txt", "-c", "bigram", *steps, "--out", "mine")
    args = ["sample", "mine", "-p", "Q\nabc", "--unknown", "skip", "-n", "60", "--overlap"]
    done = cli(*args, "--temperature", "0")
    assert "different lines" not in done.stdout  # there is one: that of the training text
    done = cli(*args, "--temperature", "0", "-p", "Q\nxbc")
    assert "of 2 different lines, 1 are in the training split" in done.stdout


def test_sample_check_reports_matches_and_novel_ngrams(cli: Cli) -> None:
    Path("letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n" * 100)
    steps = ["-s", "train.max_steps=300", "-s", "model.block_size=16", "-s", "train.batch_size=8"]
    cli("train", "letters.txt", "-c", "bigram", *steps, "--out", "mine")
    args = [
        "sample",
        "mine",
        "--prompt",
        "xyz\n",
        "--length",
        "60",
        "--temperature",
        "0",
        "--overlap",
    ]
    done = cli(*args)
    assert done.returncode == 0, done.stderr
    assert "xyz\n⟦abcdefghijklmnopqrstuvwxyz\n" in done.stdout  # the prompt is not marked
    assert "with the training split; the longest: 60" in done.stdout
    (overlap,) = json.loads(cli(*args, "--json").stdout)["overlap"]
    assert overlap["longest"]["length"] == 60
    assert overlap["matched"] == [[0, 60]]


def test_items_of_a_list_are_found_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chargpt.analysis.memorization.CHUNK", 7)
    corpus = load_corpus(TextConfig(), text="anna\nbert\ncarla\ndora\n" * 3)
    wanted = {"bert", "anna", "carl", "dora", "ann"}
    found = module.find_copied_documents(corpus, wanted, "\n")
    assert found == {"bert", "anna", "dora"}
    spelled = load_corpus(TextConfig(min_count=15), text="a\N{PILE OF POO}b\nab\n" * 10)
    for size in range(1, 12):  # also where a chunk would end within a character
        monkeypatch.setattr("chargpt.analysis.memorization.CHUNK", size)
        assert module.find_copied_documents(spelled, {"a\N{PILE OF POO}b"}, "\n")


def test_a_longest_match_of_blanks_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        module.Overlap(module.VerbatimMatch(0, length, 7, text), [(0, length)], {})
        for length, text in ((80, " " * 80), (40, "int " * 10))
    ]
    print_overlap(module.OverlapReport(texts, []), TextConfig())
    assert "the longest: 40 characters (" in " ".join(capsys.readouterr().out.split())
    print_overlap(module.OverlapReport(texts[:1], []), TextConfig())
    assert "80 characters, all of them blanks (" in " ".join(capsys.readouterr().out.split())


def test_the_longest_match_is_located_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("The lamp was lit.\n" * 9)
    passage = "and the boat came home at last"
    Path("books/b.txt").write_text(f"The sea.\nThe wind,\n{passage}.\n")
    match = module.VerbatimMatch(0, len(passage), 190, passage)
    report = module.OverlapReport([module.Overlap(match, [(0, len(passage))], {})], [])
    print_overlap(report, TextConfig(path=str(tmp_path / "books")))
    assert "at books/b.txt, line 3: and" in " ".join(capsys.readouterr().out.split())
    Path("books/b.txt").unlink()
    print_overlap(report, TextConfig(path=str(tmp_path / "books")))
    assert "at character 190 of the split" in " ".join(capsys.readouterr().out.split())


def test_the_usual_longest_match_is_one_of_those_measured() -> None:
    match = module.VerbatimMatch(0, 20, 0, "x" * 20)
    without, with_one = (module.Overlap(each, [], {}) for each in (None, match))
    assert module.OverlapReport([without], [without, with_one]).longest_in_val == 0
    assert module.OverlapReport([without], [with_one, with_one, without]).longest_in_val == 20
