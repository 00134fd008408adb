"""`chargpt evaluate` and `chargpt score`: a run's own text and others."""

import json
import math
import re
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
from conftest import POSIX, Cli, refusal, start_cli
from shared_runs import EVALUATION_KEYS, QUICK

from chargpt.analysis.result import loss_cells
from chargpt.store.run import load_run


@pytest.mark.parametrize("protocol", ["blocks", "sliding", "nanogpt"])
def test_evaluate_prints_one_json_object_with_the_documented_keys(
    protocol: str, trained: Path, cli: Cli
) -> None:
    facts = json.loads(cli("evaluate", trained, "--protocol", protocol, "--json").stdout)
    assert set(facts) == EVALUATION_KEYS
    assert facts["protocol"] == protocol
    assert facts["bits_per_char"] == pytest.approx(facts["nats_per_char"] / math.log(2))
    assert 1 < facts["nats_per_char"] < 4.5


def test_evaluate_prints_protocol_split_and_block_size(trained: Path, cli: Cli) -> None:
    shown = cli("evaluate", trained, "--split", "train").stdout
    assert "train split: protocol blocks, blocks of 16" in shown
    assert "characters scored" in shown


@POSIX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_the_loss_so_far_and_of_how_many_characters(
    number: signal.Signals, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("the sea and the light\n" * 1_000_000)
    frequent = "from chargpt.cli import main, console; console.PLAIN_LINE_SECONDS = 0.1; "
    words = ("evaluate", trained, "--text", "long.txt", "--device", "cpu")
    process = start_cli(*words, cwd=tmp_path, program=f"-c {frequent}main.run()")
    assert process.stderr is not None
    while not process.stderr.readline().startswith("character "):
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert re.search(r"[\d,]+ of 21,999,999 characters scored", out)
    assert "std error" in out
    assert "the loss is that of the blocks scored so far, a random part of the text" in err


def test_the_characters_to_score_can_be_limited(trained: Path, cli: Cli) -> None:
    facts = json.loads(cli("evaluate", trained, "--max-characters", "330", "--json").stdout)
    assert (facts["characters"], facts["of_characters"]) == (320, 2843)
    shown = cli("evaluate", trained, "--max-characters", "330").stdout
    assert "320 of 2,843 characters scored" in shown
    Path("other.txt").write_text("the sea and the light\n" * 40)
    text = ("--text", "other.txt")
    assert "other.txt, all of it: protocol" in cli("evaluate", trained, *text).stdout
    limited = cli("evaluate", trained, *text, "--max-characters", "330").stdout
    assert "other.txt, a part of it: protocol" in limited
    words = ("--max-characters", "330", "--protocol", "nanogpt")
    assert "does not apply to the protocol nanogpt" in refusal(cli("evaluate", trained, *words))


def test_the_unknown_tokens_of_a_split_are_counted(cli: Cli, verse: Path) -> None:
    rare = ("-s", "text.rare=unknown", "-s", "text.min_count=20", "--out", "rare")
    assert cli("train", verse, *QUICK, *rare).returncode == 0
    val, tokenizer = load_run("rare").corpus().split("val"), load_run("rare").tokenizer
    expected = tokenizer.decode(val).count("\ufffd")
    assert expected > 0
    assert json.loads(cli("evaluate", "rare", "--json").stdout)["n_unknown"] == expected


def test_unknown_characters_are_counted_and_named(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("the sea Ω and Ж the light\n" * 10)
    for command, text in (("evaluate", ["--text", "other.txt"]), ("score", ["other.txt"])):
        for policy, done in (("skip", "left out"), ("replace", "replaced by '")):
            result = cli(command, trained, *text, "--unknown", policy, "--json")
            assert json.loads(result.stdout)["n_unknown"] == 20
            names = "('Ω' U+03A9, 'Ж' U+0416)"
            assert f"20 characters outside the vocabulary {names}: {done}" in result.stderr


def test_the_files_that_are_read_of_a_folder_are_printed(trained: Path, cli: Cli) -> None:
    for name in ("a.txt", "b.txt", "c.h"):
        Path("held", name).parent.mkdir(exist_ok=True)
        Path("held", name).write_text("the sea\n")
    for words in (("evaluate", trained, "--text", "held"), ("score", trained, "held")):
        done = cli(*words)
        assert "files read of held/: 2, which end in .txt" in done.stderr


def test_the_part_of_a_text_that_was_trained_on_is_said(
    trained: Path, cli: Cli, verse: Path
) -> None:
    text = verse.read_text(encoding="utf-8")
    start = len(text) - len(load_run(trained).corpus().split("val"))
    new = text[start + 10 : start + 1000]
    for name, content, percent in (
        ("excerpt.txt", text[1000:2000], "100"),
        ("begins.txt", text[1001:2000] + new, "49"),
        ("wrapped.txt", textwrap.fill(text[1000:4000], 30, break_long_words=False), "100"),
        ("windows.txt", text[1000:2000].replace("\n", "\r\n"), "100"),
        ("val.txt", new, None),
        ("short.txt", text[1000:1060], None),
        ("changed.txt", text[1000:1500].replace("e", "a"), None),
    ):
        Path(name).write_bytes(content.encode())
        warning = f"about {percent}% of the passages of 64 characters of {name} occur in the train"
        for words in (("score", trained, name), ("evaluate", trained, "--text", name)):
            printed = cli(*words).stderr
            assert warning in printed if percent else "of the passages of" not in printed, name


def test_a_text_that_repeats_itself_is_scored_with_its_share_and_that_of_the_split(
    verse: Path, cli: Cli
) -> None:
    text = verse.read_text(encoding="utf-8")
    Path("twice.txt").write_text(text + text, encoding="utf-8")
    Path("part.txt").write_text(text[2000:9000], encoding="utf-8")
    assert cli("train", "twice.txt", *QUICK, "-o", "run").returncode == 0
    said = "about 100% of the passages of 64 characters of"
    assert f"{said} the validation split" in cli("evaluate", "run").stderr
    of_both = "occur in the training split of the run, and about 100% of the passages of 64 "
    for words in (("score", "run", "part.txt"), ("evaluate", "run", "--text", "part.txt")):
        printed = cli(*words).stderr
        assert f"{said} part.txt {of_both}" in printed


def test_a_huge_perplexity_is_shown_in_few_digits() -> None:
    assert loss_cells(math.log(65)) == ["4.1744", "6.0224", "65.00"]
    assert loss_cells(146.184)[2] == "3.1e+63"
    assert loss_cells(5000.0)[2] == "1.0e+304"


def test_commands_name_the_run_that_they_took(trained: Path, cli: Cli) -> None:
    shutil.copytree(trained, "runs/mine")
    for args in (("sample", "--length", "5"), ("evaluate",), ("verify",), ("explain",)):
        done = cli(*args)
        assert done.returncode == 0, done.stderr
        assert "run: runs/mine" in done.stderr
        assert "run: " not in cli(args[0], "runs/mine", *args[1:]).stderr
