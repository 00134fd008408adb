"""Verbatim overlap: matches of every length are found, with their place."""

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import Cli
from formula import longest_common
from hypothesis import given, settings
from hypothesis import strategies as st

from chargpt.analysis import memorization as module
from chargpt.analysis.memorization import (
    MIN_MATCH,
    NGRAM_LENGTHS,
    OverlapReport,
    VerbatimMatch,
    find_overlap,
    longest_copied,
    longest_match,
    measure_overlap,
)
from chargpt.cli.sample import measure, overlap_json, print_new, print_overlap
from chargpt.config import TextConfig
from chargpt.inference.selection import Sample, new_sample
from chargpt.text.corpus import Corpus, Place
from chargpt.text.documents import find_documents
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8)


def measured(corpus: Corpus, texts: list[Sample]) -> OverlapReport:
    report = measure(corpus, texts, [])
    assert report is not None
    return report


@pytest.fixture
def training(verse: Path) -> str:
    return verse.read_text(encoding="utf-8").encode("ascii", "replace").decode()


def test_planted_matches_of_every_length_are_found(training: str) -> None:
    random = np.random.default_rng(0)
    texts, planted = [], []
    for _ in range(100):
        length = int(random.integers(20, 501))
        place = int(random.integers(0, len(training) - length))
        before, after = ("".join(map(chr, random.integers(160, 255, n))) for n in (90, 130))
        texts.append(tokens(before + training[place : place + length] + after))
        planted.append((90, length))
    for (start, length), found in zip(planted, find_overlap(tokens(training), texts), strict=True):
        assert found.longest is not None
        assert (found.longest.start, found.longest.length) == (start, length)
        covered = {i for start, end in found.spans for i in range(start, end)}
        assert covered == set(range(start, start + length))


@given(
    st.text("ab", min_size=1, max_size=400),
    st.text("ab", min_size=1, max_size=120),
    st.sampled_from([np.uint8, np.uint16, np.uint32]),
)
def test_the_result_equals_a_brute_force_search(text: str, sample: str, dtype: type) -> None:
    with mock.patch.object(module, "MAX_POSITIONS", 400):  # every place
        (found,) = find_overlap(tokens(text).astype(dtype), [tokens(sample)])
    for n in NGRAM_LENGTHS:
        if n <= min(len(sample), len(text)):
            grams = [sample[i : i + n] for i in range(len(sample) - n + 1)]
            assert found.novel[n] == pytest.approx(np.mean([gram not in text for gram in grams]))
    longest = longest_common(sample, text) if longest_common(sample, text) >= MIN_MATCH else 0
    assert (found.longest.length if found.longest else 0) == longest
    for match in found.matches:
        start, end = match.start, match.start + match.length
        assert sample[start:end] == text[match.position : match.position + match.length]
        assert found.longest == match or end - start <= longest
    covered = set()
    for i in range(len(sample) - MIN_MATCH + 1):
        if sample[i : i + MIN_MATCH] in text:
            covered |= set(range(i, i + MIN_MATCH))
    assert {i for start, end in found.spans for i in range(start, end)} == covered


@given(
    st.text("abé漢\N{PILE OF POO}", max_size=300),
    st.lists(st.text("abé漢\N{PILE OF POO}", max_size=60), max_size=4),
    st.integers(0, 40),
    st.sampled_from(["ab", "abé漢"]),
)
def test_the_longest_copied_part_equals_a_brute_force_search(
    text: str, samples: list[str], n_planted: int, known: str
) -> None:
    samples.append(f"ab{text[3 : 3 + n_planted]}ba")
    tokenizer = CharTokenizer(known, has_bytes=True)
    found = longest_copied(
        tokenizer.encode(text), [*map(tokenizer.encode, samples)], tokenizer.first_continuation_id
    )
    for sample, length in zip(samples, found, strict=True):
        assert length == longest_common(sample, text)


def test_few_positions_of_a_frequent_ngram_are_stored(training: str) -> None:
    text, sample = tokens(" " * 50_000 + training + " " * 90), [tokens(" " * 90 + training[:300])]
    asked = []

    def pairs(table: module._NGramTable) -> tuple[np.ndarray, np.ndarray]:
        ids = np.concatenate([ids for ids, _ in table.positions])
        asked.append(np.bincount(ids, minlength=1).max())
        return ids[:0], ids[:0]

    with mock.patch.object(module._NGramTable, "pairs", pairs):
        find_overlap(text, sample)
    assert max(asked) == module.MAX_POSITIONS
    (found,) = find_overlap(text, sample)
    assert found.longest is not None
    assert found.longest.length >= 300
    assert {i for start, end in found.spans for i in range(start, end)} == set(range(390))


def test_of_a_long_training_split_little_is_hashed_and_short_ngrams_are_left_out(
    training: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = load_corpus(TextConfig(), text="".join(sorted(training)) + training[:900] * 2)
    text = new_sample("", training[:200], "length")
    exact = measured(corpus, [text])
    hashed, prefix_sums = [], module.prefix_sums
    for name in ("chargpt.cli.sample", "chargpt.analysis.memorization"):
        monkeypatch.setattr(f"{name}.MAX_SCANNED", 1000)
    monkeypatch.setattr(
        module, "prefix_sums", lambda *args: hashed.append(len(args[0])) or prefix_sums(*args)
    )
    found = measured(corpus, [text])
    assert sum(hashed[1:]) < 2500 < len(training) / 4  # the first: of the samples
    assert [each.matches for each in found.texts] == [each.matches for each in exact.texts]
    long = {n: fraction for n, fraction in exact.texts[0].novel.items() if n >= MIN_MATCH}
    assert found.texts[0].novel == long
    print_overlap(corpus, found, [text])
    sentence = "Below n = 20 none are counted: the training split has more than 1,000 tokens"
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_matches_across_chunks_are_found(training: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [tokens(training[start : start + 64]) for start in range(0, 2000, 37)]
    whole = find_overlap(tokens(training), copies)
    monkeypatch.setattr(module, "CHUNK", 100)
    assert find_overlap(tokens(training), copies) == whole
    assert all(found.longest and found.longest.length == 64 for found in whole)


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
    assert ours.startswith("0.0% of ")
    assert float(unseen.partition("%")[0]) > 50


def test_lengths_are_those_of_characters_also_where_bytes_spell_them() -> None:
    numbers = np.random.default_rng(1).permutation(np.arange(0x4E00, 0x5600)).tolist()
    text = "".join(map(chr, numbers))  # each occurs once, and is spelled as three bytes
    corpus = load_corpus(TextConfig(min_count=2), text="ab" * 20 + text)
    assert corpus.tokenizer.has_bytes
    training = corpus.tokenizer.decode(corpus.split("train"))
    copied = [training[300:330], training[500:510]]
    (found, short), longest = measure_overlap(corpus, copied).texts, len(copied[0])
    assert found.longest == VerbatimMatch(0, longest, copied[0], 820)
    assert short.matches == []  # 30 bytes, but 10 characters


def test_the_command_marks_matches_and_counts_whole_lines_with_what_the_prompt_has(
    cli: Cli,
) -> None:
    Path("letters.txt").write_text("abcdefghijklmnopqrstuvwxyz\n" * 100)
    steps = ["-s", "train.max_steps=300", "-s", "model.block_size=16", "-s", "train.batch_size=8"]
    cli("train", "letters.txt", "-c", "bigram", *steps, "--out", "mine")
    args = ["sample", "mine", "-n", "60", "--temperature", "0", "--overlap"]
    done = cli(*args, "-p", "xyz\n")
    assert done.returncode == 0, done.stderr
    assert "xyz\n⟦abcdefghijklmnopqrstuvwxyz\n" in done.stdout  # the prompt is not marked
    assert "with the training split; the longest: 60" in done.stdout
    (overlap,) = json.loads(cli(*args, "-p", "xyz\n", "--json").stdout)["overlap"]
    assert overlap["longest"]["length"] == 60
    done = cli(*args, "-p", "Q\nabc", "--unknown", "skip")
    assert "distinct" not in done.stdout  # there is one: that of the training text
    done = cli(*args, "-p", "Q\nxbc", "--unknown", "skip")
    assert re.search(r"lines +number +not in the text .*\n.*\n *distinct +2 +1 +1 +0", done.stdout)


def test_items_of_a_list_are_found_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chargpt.text.documents.CHUNK", 7)
    corpus = load_corpus(TextConfig(), text="anna\nbert\ncarla\ndora\n" * 3)
    wanted = {"bert", "anna", "carl", "dora", "ann"}
    assert find_documents(corpus, wanted, "\n")[0] == {"bert", "anna", "dora"}
    spelled = load_corpus(TextConfig(min_count=15), text="a\N{PILE OF POO}b\nab\n" * 10)
    for size in range(1, 12):  # also where a chunk would end within a character
        monkeypatch.setattr("chargpt.text.documents.CHUNK", size)
        assert find_documents(spelled, {"a\N{PILE OF POO}b"}, "\n")[0]


def test_documents_of_the_validation_split_are_neither_new_nor_copied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"{a}{b}n" for a in "abcdefghij" for b in "aeiou"]
    corpus = load_corpus(TextConfig(documents="lines"), text="\n".join(names))
    decode = corpus.tokenizer.decode
    training, held_out = (set(decode(corpus.split(s)).split()) for s in ("train", "val"))
    copied, known = find_documents(corpus, {*names, "xyz"}, "\n")
    assert (copied, known) == (training, training | held_out)
    wanted = [*sorted(training)[:2], *sorted(held_out)[:3], "xyz"]
    print_new("documents", {"sampled": wanted}, copied, known)
    assert re.search("sampled +6 +1 +2 +3", capsys.readouterr().out)


def test_matches_of_blanks_do_not_count(training: str) -> None:
    corpus = load_corpus(TextConfig(), text=" " * 100 + "} {\n" + " " * 28 + training)
    copied = "\n" + " " * 30 + training[60:130]
    (found,) = measure_overlap(corpus, [" " * 90 + "} {\n" + " " * 20 + "#" + copied]).texts
    assert found.longest is not None
    assert found.longest.text in copied
    assert found.longest.length == 70
    assert all(start > 114 for start, _ in found.spans)


def test_every_marked_passage_is_verbatim_and_overlapping_ones_are_marked_apart(
    training: str,
) -> None:
    first, second, third = training[1000:1050], training[2000:2025], training[3000:3030]
    text = f"{training}#{first[-20:]}{second}#{training}"  # a match that overlaps the first
    corpus = load_corpus(TextConfig(), text=text)
    (found,) = measure_overlap(corpus, [first + second + third]).texts
    assert found.spans == [(0, 50), (50, 75), (75, 105)]
    assert [match.text for match in found.matches] == [first, third, second]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 60)), min_size=1, max_size=9))
def test_marked_passages_are_disjoint_and_leave_out_none(pieces: list[tuple[int, int]]) -> None:
    training = "".join(np.random.default_rng(0).choice(list("abcd \n"), 3000))
    corpus = load_corpus(TextConfig(), text=training)
    text = "".join(training[start : start + length] for start, length in pieces)
    (found,) = measure_overlap(corpus, [text]).texts
    known = corpus.tokenizer.decode(corpus.split("train"))
    edges = [0, *(edge for span in found.spans for edge in span), len(text)]
    assert edges == sorted(edges)
    assert all(text[start:end] in known for start, end in found.spans)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        for i in range(start, end - MIN_MATCH + 1):
            part = text[i : i + MIN_MATCH]
            assert part not in known or len("".join(part.split())) < module.MIN_VISIBLE


def line_of(corpus: Corpus, passage: str) -> Place:
    """Return file and line of a passage that the training split has."""
    place = corpus.place_of(corpus.tokenizer.decode(corpus.split("train")).index(passage))
    assert place is not None
    return place


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Corpus, list[str]]:
    """A folder of two files, and passages that occur in it, longest first."""
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("The lamp was lit.\n" * 9)
    passages = ["and the boat came\nhome at last,", "by the light of no star"]
    new = "Waves, one by one: zig, zag! Quite so? Very well; enough." * 3
    Path("books/b.txt").write_text(f"The sea.\nThe wind,\n{passages[0]}.\n{passages[1]}\n{new}")
    settings = TextConfig(path=str(tmp_path / "books"))
    return load_corpus(settings), passages


def test_every_match_is_located_in_its_file(
    books: tuple[Corpus, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, passages = books
    assert line_of(corpus, "The ") == Place("books/a.txt", 1)
    text = new_sample("", f"QQ{passages[1]}QQ{passages[0]}QQ{passages[1]}", "length")
    found = measured(corpus, [text])
    (overlap,) = overlap_json(corpus, found, [text])["overlap"]
    places = [(match["start"], match["path"], match["line"]) for match in overlap["matches"]]
    assert places == [(27, "books/b.txt", 3), (2, "books/b.txt", 5), (60, "books/b.txt", 5)]
    assert overlap["longest"] == overlap["matches"][0]
    print_overlap(corpus, found, [text])
    shown = capsys.readouterr().out
    assert max(map(len, shown[shown.index("characters  ") :].splitlines()[:4])) <= 80
    rows = re.findall(r"(\d+) +(\S+, line \d) +(.*\S)", shown)
    assert [row[:2] for row in rows] == [
        ("31", "books/b.txt, line 3"),
        ("23", "books/b.txt, line 5"),
    ]
    assert rows[0][2].startswith("and␣the␣boat␣came⏎home")


def test_a_place_is_one_in_the_training_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a passage of the text\n")
    (tmp_path / "b.txt").write_text("été\n" * 300 + "a passage of the text\n" + "no\n" * 300)
    (tmp_path / "c.txt").write_text("no passage\na passage of the text\n")
    settings = TextConfig(path=str(tmp_path), mixture_characters=30)
    corpus = load_corpus(settings)
    assert corpus.count_characters("mixture") == 30
    place = line_of(corpus, "a passage of the text")
    assert (Path(place.path).name, place.line) == ("b.txt", 301)
    listed = settings.model_copy(update={"documents": "lines"})
    corpus = load_corpus(listed)
    place = line_of(corpus, "a passage of the text")
    assert (Path(place.path).name, place.line) in (("a.txt", 1), ("b.txt", 301), ("c.txt", 2))


def test_the_usual_longest_match_is_one_of_those_measured() -> None:
    without, with_one = (
        module.Overlap(matches, {}, {}) for matches in ([], [VerbatimMatch(0, 20, "x" * 20)])
    )
    assert module.OverlapReport([without], [without, with_one]).longest_in_val == 0
    assert module.OverlapReport([without], [with_one, with_one, without]).longest_in_val == 20


def test_novel_fractions_come_with_their_number_of_ngrams_unless_those_are_few(
    training: str,
) -> None:
    corpus = load_corpus(TextConfig(), text=training)
    (n, ours, _), *_ = measure_overlap(corpus, [training[:40], "\n" * 30]).novel_rows()
    assert (n, ours.partition(" of ")[2]) == ("4", "64")
    short = measure_overlap(corpus, [training[:12]] * 5).novel_rows()
    assert [row[0] for row in short] == ["4", "6"]  # 5 of length 8 are 25
    # up to the length of the longest text; those of validation text are counted once
    n_val = corpus.count_characters("val")
    report = measure_overlap(corpus, [training[: n_val - 10]])
    assert report.val_characters == n_val - 10
    assert [int(n) for n, *_ in report.novel_rows()] == [4, 6, 8, 12, 16, 20, 24, 32]
    assert report.novel_rows()[0][2].endswith(f" of {n_val - 13:,}")


def test_validation_text_of_a_list_is_whole_documents() -> None:
    names = [f"{a}{b}{c}n" for a in "abcdefgh" for b in "aeiou" for c in "lmnrst"]
    corpus = load_corpus(TextConfig(documents="lines"), text="\n".join(names))
    report = measure_overlap(corpus, ["lanelinelo"] * 40)  # longer than a document
    assert {n for each in report.val for n in each.ngrams} == {4}
    short = measure_overlap(corpus, ["la"])
    n_val = corpus.count_characters("val")
    assert short.val_characters == n_val - n_val // 5  # all but the EOS tokens
    assert {ngrams for each in short.val for ngrams in each.ngrams.values()} == {1}


def test_of_documents_that_did_not_end_the_ngrams_are_compared_but_none_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    poem = "the sea was calm and the lamp was lit;\nthe boat came home.%"
    settings = TextConfig(documents="%")
    corpus = load_corpus(settings, text=poem * 50)
    texts = [new_sample("", poem[:30], "length")] * 4
    print_overlap(corpus, measured(corpus, texts), texts)
    shown = capsys.readouterr().out
    assert "not in the text" not in shown
    assert re.search(r"4 +0\.0% of 108 +0\.0% of \d+", shown)
