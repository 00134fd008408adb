"""What a terminal shows: sentences, tables and progress bars."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli
from rich.cells import cell_len
from shared_runs import QUICK

from chargpt.cli import console, tables

pty = pytest.importorskip("pty", reason="needs terminals of POSIX")
termios = pytest.importorskip("termios")


def on_terminal(*arguments: str, cwd: Path) -> str:
    """Return what a command prints on a terminal of 80 columns that does not know its rows."""
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (0, 80))
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-m", "chargpt", *arguments]
    with subprocess.Popen(command, stdout=other, stderr=other, cwd=cwd, env=environment) as process:
        os.close(other)
        chunks = []
        try:
            while chunk := os.read(main, 65536):
                chunks.append(chunk)
        except OSError:  # Linux's way to say that the other end is closed
            pass
        os.close(main)
    assert process.returncode == 0
    shown = b"".join(chunks).decode()
    return re.sub(r"loading PyTorch \.\.\.\r +\r", "", shown)  # erased


@pytest.mark.slow
def test_a_terminal_shows_the_seed_that_repeats_a_sample(trained: Path, tmp_path: Path) -> None:
    sample = ("sample", str(trained), "-n", "20")
    shown = on_terminal(*sample, cwd=tmp_path).replace("\r\n", "\n")
    seed = re.search(r"\n--seed (\d+) gives the same text\n$", shown)
    assert seed is not None
    again = on_terminal(*sample, "--seed", seed[1], cwd=tmp_path).replace("\r\n", "\n")
    assert again == shown[: seed.start() + 1]


def test_a_terminal_breaks_sentences_between_words(cli: Cli, tmp_path: Path) -> None:
    wide = cli("config", "schedule").stdout
    shown = on_terminal("config", "schedule", cwd=tmp_path).replace("\r\n", "\n")
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split()[: len(wide.split())] == wide.split()  # then the message on stderr
    assert len(shown.splitlines()) > len(wide.splitlines())


@pytest.mark.slow
def test_training_on_a_terminal_shows_a_percentage_in_80_columns(
    trained: Path, tmp_path: Path
) -> None:
    text = f"a-{'long-' * 10}name.txt"
    shutil.copy(trained.parent / "novel.txt", tmp_path / text)
    rare = "-s train.max_steps=700 -s train.save_every=700 -s train.evaluate_every=300".split()
    shown = on_terminal("train", text, *QUICK, *rare, cwd=tmp_path)
    wrapped = re.search(r"(?m)^(text +)a-long-[^\r]*\r\n( +)\S", shown)
    assert wrapped is not None, shown
    assert len(wrapped[1]) == len(wrapped[2]), "the labels are alone in their columns"
    frames = [re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", frame) for frame in shown.split("\r")]
    bars = [frame.strip() for frame in frames if "chars/s" in frame]
    assert bars
    assert all("%" in bar and len(bar) <= 80 for bar in bars)


@pytest.mark.parametrize("columns", [20, 40, 57])
def test_a_table_keeps_its_names_and_numbers_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    head = ["model", "split", "nats/char", "bits/char", "perplexity"]
    tables.table(head, [["gpt (trained)", "train", "1.2345", "2.3456", "1,234.56"]])
    shown = capsys.readouterr().out.split()
    for word in (*head, "gpt", "(trained)", "train", "1.2345", "2.3456", "1,234.56"):
        assert word in shown
    tables.table(["model", "nats"], [["a long name " * 9, "1.0"], ["漢字" * 12, "2.0"]])
    assert max(map(cell_len, capsys.readouterr().out.splitlines())) <= 80


def test_progress_after_a_rollback_is_not_said_to_end_in_the_past(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_LINE_SECONDS", 0)
    bar = console.ProgressBar("step", initial=50)
    bar.update(40, 100, lambda: "loss 2")
    bar.update(60, 100, lambda: "loss 1")
    back, on = capsys.readouterr().err.splitlines()
    assert "left" not in back
    assert " left" in on
    assert "-" not in on


def test_a_bar_leaves_nothing_and_samples_above_it_keep_their_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    sample, note = ("a word " * 20).strip(), ("a note " * 20).strip()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        bar = console.ProgressBar("step")
        bar.update(10, 10, lambda: "loss 2")
        console.say(sample, is_sample=True)
        console.say(note)
        bar.close()  # before the bar's delay is over
        console.say("== gpt ==")
        shown = ""
        while "== gpt ==\r\n" not in shown:
            shown += os.read(main, 65536).decode()
    os.close(main)
    assert sample in shown
    assert note not in shown
    assert note in re.sub(r"\s+", " ", shown)
    assert re.search(r"100%[^\n]*\r {20,}\r== gpt ==\r\n$", shown), "the bar is still there"


def test_a_result_takes_the_place_of_the_bar_on_its_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    monkeypatch.setattr(console, "DELAY_SECONDS", 0)
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        bar = console.ProgressBar("sample")
        bar.update(5, 10, lambda: "generated")
        console.out_json({"sample": 5})
        bar.close()
        shown = ""
        while '{"sample": 5}\r\n' not in shown:
            shown += os.read(main, 65536).decode()
    os.close(main)
    assert re.search(r'0%[^\n]*\r {20,}\r\{"sample": 5\}\r\n', shown), "the bar is before it"


def test_the_loading_bar_takes_the_place_of_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "NOTICE_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    loading = console.LoadingProgress()
    for total, n_notices in ((1000, 1), (loading.MIN_BYTES, 0)):
        loading("reading", 1, total)  # the first is too short for a bar
        with console.say_if_slow("a notice") as notice:
            notice.join()
        assert capsys.readouterr().err.count("a notice") == n_notices
    loading("reading", total, total)
    assert console.active_bar is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (999.4, "999"), (999.6, "1k"), (999_600, "1M"), (1e12, "1T")],
)
def test_a_number_is_never_rounded_to_a_thousand_of_its_unit(count: float, text: str) -> None:
    assert console.short(count) == text
