"""Surprisal of characters and lines."""

import dataclasses
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, refusal
from noise import noisy_run

from chargpt.errors import TextError, UnknownCharacterError
from chargpt.inference import evaluation
from chargpt.inference.coding import compress
from chargpt.inference.evaluation import evaluate, evaluate_tokens
from chargpt.inference.generation import sample
from chargpt.inference.scoring import score
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

QUICK = ("-s", "train.max_steps=2", "-s", "model.n_layer=1", "-s", "model.n_embd=16")


def run_of(letters: str) -> Run:
    return noisy_run(CharTokenizer.fit(letters), block_size=8)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 12, 13, 100])
def test_surprisal_is_the_sliding_loss_after_a_newline(length: int) -> None:
    run = run_of("\nabcdefgh")
    text = "".join(np.random.default_rng(length).choice(list("abcdefgh"), length))
    scored = score(run, text)
    whole = evaluate_tokens(run.model, run.tokenizer.encode("\n" + text), protocol="sliding")
    assert scored.text == text
    assert len(scored.bits) == length
    assert scored.bits_per_char == pytest.approx(whole.nats_per_char / math.log(2))


def test_each_character_is_scored_with_the_context_before_it() -> None:
    run = run_of("\nabcdefgh")
    text = "abcd\nefgh" * 5
    tokens = run.tokenizer.encode("\n" + text)
    bits = score(run, text).bits
    for index in (1, 5, 8):  # in the first window, with all characters before as context
        upto = evaluate_tokens(run.model, tokens[: index + 1])
        before = evaluate_tokens(run.model, tokens[:index]) if index > 1 else None
        nats = upto.nats_per_char * index - (before.nats_per_char * (index - 1) if before else 0)
        assert bits[index - 1] == pytest.approx(nats / math.log(2), abs=1e-4)


def test_a_line_has_the_mean_surprisal_of_its_characters_and_newline() -> None:
    scored = score(run_of("\nabcdefgh "), "abc\n\n  \nde\nf")
    assert [(line.number, line.text) for line in scored.lines()] == [
        (1, "abc"),
        (4, "de"),
        (5, "f"),
    ]
    for line, part in zip(scored.lines(), (slice(0, 4), slice(8, 11), slice(11, 12)), strict=True):
        assert line.bits_per_char == pytest.approx(scored.bits[part].mean())
        assert line.bits == pytest.approx(scored.bits[part].sum())


def test_a_line_of_a_list_has_one_figure_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "MAX_CALL_TOKENS", 20)  # of several batches
    run = run_of("\nabcdefgh")
    run = dataclasses.replace(run, tokenizer=dataclasses.replace(run.tokenizer, eos_token="\n"))
    random = np.random.default_rng(1)
    lines = ["".join(random.choice(list("abcdefgh"), n)) for n in (*range(1, 8), *range(1, 12))]
    expected = {}
    for line in lines:
        tokens = run.tokenizer.encode(f"\n{line}\n")
        expected[line] = evaluate_tokens(run.model, tokens, protocol="sliding").nats_per_char
        expected[line] *= (len(tokens) - 1) / math.log(2)
        if len(line) < run.model.block_size:
            log_probs = run.logits(f"\n{line}").log_softmax(dim=-1).numpy()
            bits = -log_probs[np.arange(len(line) + 1), tokens[1:]] / math.log(2)
            assert expected[line] == pytest.approx(bits.sum(), rel=1e-4)
    done: list[tuple[int, int]] = []
    for text in ("\n".join(lines), "\n\n".join(reversed(lines)) + "\n"):
        scored = score(run, text, on_progress=lambda *each: done.append(each))
        assert scored.protocol == "documents"
        n_scored = len("".join(lines)) + len(lines)  # empty lines are no documents
        assert (len(scored.bits), done[-1]) == (n_scored, (n_scored, n_scored))
        assert scored.text == text.rstrip("\n") + "\n"
        found = {line.text: line.bits for line in scored.lines()}
        assert found == pytest.approx(expected, rel=1e-4)
    skipped = score(run, "ab\nxx\n\nxc", unknown="skip")
    assert [(line.text, line.number) for line in skipped.lines()] == [("ab", 1), ("xc", 4)]
    assert np.array_equal(skipped.bits, score(run, "ab\nc").bits)
    for empty in ("", "\n\n"):
        with pytest.raises(TextError, match="no character to score"):
            score(run, empty)


def test_a_text_is_scored_in_python_as_the_command_reads_it(cli: Cli, tmp_path: Path) -> None:
    content = "one day\n\n\nno\u2028one\n\na day"
    Path("poems.txt").write_text(content * 400, encoding="utf-8")
    for documents in (r"\n\n", "lines", "null"):
        out = ("-s", f"text.documents={documents}", *"-s text.newlines=lf --out R --force".split())
        assert cli("train", "poems.txt", *QUICK, *out).returncode == 0
        Path("more.txt").write_text(content, encoding="utf-8")
        printed = json.loads(cli("score", "R", "more.txt", "--json").stdout)
        scored = score("R", content)
        assert scored.bits_per_char == pytest.approx(printed["bits_per_char"], rel=1e-6)
        assert printed["characters"] == len(scored.bits)
        assert "\u2028" not in scored.text
        assert scored.text.count("\x1e") == (3 if documents == r"\n\n" else 0)
        assert np.array_equal(score("R", scored.text).bits, scored.bits)  # marked already
    folder = Path("two")
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("one day\n\nno one")
    poems = ("-s", r"text.documents=\n\n", "--out", "R", "--force")
    assert cli("train", "poems.txt", *QUICK, *poems).returncode == 0
    printed = json.loads(cli("score", "R", folder, "--json").stdout)
    assert printed["characters"] == 4 + 2 * len("one dayno one")  # every file ends a document
    assert " documents " in cli("score", "R", "poems.txt").stderr  # that were trained on


def test_prompts_and_texts_take_a_known_normal_form_but_not_texts_to_compress(
    notes: list[str],
) -> None:
    run = run_of("\nabcdé")
    known, other = "abé\ncdé", "abe\u0301\ncde\u0301"
    assert score(run, other).text == known
    results = [evaluate(run, text=text).nats_per_char for text in (other, known)]
    assert results[0] == results[1]
    given, composed = (sample(run, prompt=text, seed=1, length=9)[0] for text in (other, known))
    assert (given.prompt, given.continuation) == (other, composed.continuation)
    assert [note.partition(":")[0] for note in notes] == 3 * [
        "the text was converted to composed characters (NFC)"
    ]
    with pytest.raises(UnknownCharacterError, match="convert it to composed"):
        compress(run, other.encode())


def test_without_a_newline_in_the_vocabulary_the_first_character_is_uniform() -> None:
    run = run_of("abcdefgh")
    assert score(run, "abc").bits[0] == score(run, "a").bits_per_char == pytest.approx(3)


def test_unknown_characters_are_rejected_or_skipped() -> None:
    run = run_of("\nabc")
    with pytest.raises(UnknownCharacterError, match="x"):
        score(run, "abxc")
    assert len(score(run, "abxc", unknown="skip").bits) == 3
    with pytest.raises(TextError, match="no character to score"):
        score(run, "xyz", unknown="skip")


@pytest.mark.parametrize("letters", ["\nabc", "abc"])
def test_skipped_characters_stay_in_the_lines_that_are_shown(letters: str) -> None:
    run = run_of(letters)
    scored = score(run, "axb\nxx\nc\ny\nab", unknown="skip")
    known = score(run, "ab\n\nc\n\nab", unknown="skip")
    assert scored.bits.tolist() == known.bits.tolist()
    shown = {line.text: line for line in scored.lines()}
    expected = [line.bits_per_char for line in known.lines()]
    assert [shown[text].bits_per_char for text in ("axb", "c", "ab")] == expected
    assert [shown[text].n_skipped for text in ("axb", "c")] == [1, 0]
    assert ("xx" in shown) == ("\n" in letters)  # its newline was scored


def test_lines_from_which_characters_were_left_out_say_so(cli: Cli, mixed_run: Path) -> None:
    odd = "the \u200b sea\x1b[1m \U000e0067\u06dd \u202a\u202c"  # in a file as it is
    Path("ten.txt").write_text(f"{odd}\nthe light\n", encoding="utf-8")
    words = ("score", mixed_run, "ten.txt", "--unknown", "skip")
    lines = {line.split("\t")[3]: line for line in cli(*words, "--per-line").stdout.splitlines()}
    assert lines[odd].endswith("\t8 left out")
    assert lines["the light"].endswith("\tthe light")
    assert "(8 left out) " + odd.replace("\x1b", "␛") in cli(*words).stdout


def test_a_table_of_lines_is_cut_where_it_says_so_and_shows_a_repeated_line_once(
    cli: Cli, mixed_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [letter + "the sea and the light " * 9 for letter in "abcd"]
    Path("long.txt").write_text("\n".join(lines + lines))
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("score", mixed_run, "long.txt").stdout.splitlines()
    assert any("bits/char" in line for line in shown)
    assert max(map(len, shown)) <= 80
    cut = [line for line in shown if "the sea" in line]
    assert len(cut) == len({line.split()[2] for line in cut}) == len(lines)
    assert all(line.rstrip().endswith("…") for line in cut)


def test_the_command_ranks_lines_and_reads_standard_input(
    verse: Path, cli: Cli, mixed_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(mixed_run, "mine")
    done = cli("score", "mine", verse, "--json")
    facts = json.loads(done.stdout)
    assert facts["characters"] == len(verse.read_text(encoding="utf-8"))
    shutil.rmtree("mine/text")  # as of a run by an earlier version
    assert "is the file that the run was trained on" in cli("score", "mine", verse).stderr
    of_number = {line["number"]: line for line in facts["lines"]}
    assert list(of_number) == sorted(of_number)
    ranked = cli("score", "mine", verse, "--per-line").stdout.splitlines()
    bits = [float(line.split("\t")[0]) for line in ranked]
    assert bits == sorted(bits, reverse=True)
    assert len(ranked) == len(of_number)
    per_char, total, number, text = ranked[0].split("\t", 3)
    highest = of_number[int(number)]
    assert f"{highest['bits_per_char']:.3f} {highest['bits']:.2f}" == f"{per_char} {total}"
    shown = cli("score", "mine", verse).stdout
    assert f"{facts['bits_per_char']:.3f} bits per character" in shown
    assert text[:20] in shown
    Path("part.txt").write_text("the sea\nthe light\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the sea\nthe light\n")))
    done = cli("score", "mine", "part.txt")
    assert cli("score", "mine").stdout == done.stdout
    assert "was trained on" not in done.stderr
    assert "the sea" in done.stdout
    bits_per_char = json.loads(cli("score", "mine", "part.txt", "--json").stdout)["bits_per_char"]
    assert score("mine", "the sea\nthe light\n").bits_per_char == pytest.approx(bits_per_char)
    with pytest.raises(TextError, match="is a file, not a text; give its content"):
        score("mine", "part.txt")
    assert "no folder" in refusal(cli("score", "none", "part.txt"))
