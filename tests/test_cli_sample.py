"""`chargpt sample`, also interactively and on a terminal."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import POSIX, REPOSITORY, Cli
from shared_runs import QUICK, RARE

from chargpt.cli.sample import say_flaws
from chargpt.inference.selection import new_sample


def test_sample_prints_the_prompt_and_its_continuation(trained: Path, cli: Cli) -> None:
    done = cli("sample", trained, "--prompt", "The ", "--length", "50", "--seed", "1")
    assert done.returncode == 0
    assert done.stdout.startswith("The ")
    assert len(done.stdout) == 4 + 50 + 1
    assert cli("sample", trained, "-p", "The ", "-n", "50", "--seed", "1").stdout == done.stdout


def test_the_first_of_several_samples_equals_a_single_sample(trained: Path, cli: Cli) -> None:
    args = ["sample", trained, "--length", "40", "--seed", "5", "--json"]
    many = json.loads(cli(*args, "--num-samples", "3", "-p", "The ").stdout)
    assert ["The " + text for text in many["continuations"]] == many["samples"]
    assert (many["prompt"], many["ended"]) == ("The ", ["length"] * 3)
    one = json.loads(cli(*args, "-p", "The ").stdout)
    assert many["samples"][0] == one["samples"][0]
    assert len(set(many["samples"])) == 3
    assert cli("sample", trained, "--num-samples", "2").stdout.count("-- sample") == 2


def test_several_samples_on_a_terminal_show_their_seed(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    args = ("sample", trained, "--num-samples", "2", "-n", "9")
    done = cli(*args)
    seed = re.search(r"--seed (\d+) gives the same text", done.stderr)
    assert seed is not None
    again = cli(*args, "--seed", seed[1])
    assert again.stdout == done.stdout
    assert "--seed" not in again.stderr


def test_control_characters_of_a_sample_are_replaced_on_a_terminal_only(
    tmp_path: Path, cli: Cli
) -> None:
    Path("odd.txt").write_text("red \x1b[31m and back \x1b[0m\r\n" * 200, newline="")
    assert cli("train", "odd.txt", *QUICK, "--out", "run").returncode == 0
    args = ["sample", "run", "--prompt", "\x1b[31m", "--length", "200", "--seed", "1"]
    args += ["--temperature", "2"]
    assert cli(*args).stdout.count("\x1b") > 1
    terminal, other_end = pytest.importorskip("pty", reason="needs a terminal").openpty()
    subprocess.run(
        [sys.executable, "-m", "chargpt", *args],
        stdout=other_end,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"},
        check=True,
    )
    shown = os.read(terminal, 10_000)
    os.close(terminal)
    os.close(other_end)
    assert b"\x1b" not in shown
    assert "\N{SYMBOL FOR ESCAPE}[31m".encode() in shown


def test_a_prompt_comes_from_a_file_or_standard_input(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("prompt.txt").write_text("The keeper")
    Path("line.txt").write_text("The keeper\n")
    options = ("--seed", 1, "--length", 9, "--prompt-file")
    from_file = cli("sample", trained, *options, "prompt.txt")
    assert from_file.stdout.startswith("The keeper")
    assert "line end" not in from_file.stderr
    assert "the prompt ends with a line end" in cli("sample", trained, *options, "line.txt").stderr
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The keeper")))
    assert cli("sample", trained, *options, "-").stdout == from_file.stdout


def test_an_escape_in_a_prompt_is_said_to_be_none(trained: Path, cli: Cli) -> None:
    escaped = cli("sample", trained, "-p", r"a\nb", "-n", "5", "--unknown", "skip")
    assert "are two characters each" in escaped.stderr
    assert "two characters" not in cli("sample", trained, "-p", "a\nb", "-n", "5").stderr


def test_of_a_long_prompt_the_last_block_is_read(trained: Path, cli: Cli) -> None:
    done = cli("sample", trained, "-p", "a" * 17, "-n", "1", "--seed", "1")
    assert "the prompt has 17 characters; the model reads the last 16" in done.stderr
    assert "the prompt has" not in cli("sample", trained, "-p", "a" * 16, "-n", "1").stderr
    assert cli("train", trained.parent / "novel.txt", *QUICK, "--out", "r", *RARE).returncode == 0
    done = cli("sample", "r", "-p", "漢字" * 4, "-n", "1")  # spelt by bytes
    assert "the prompt has 24 tokens; the model reads the last 16" in done.stderr
    assert done.stderr.count("spelled as bytes: '漢' U+6F22, '字' U+5B57") == 1


def test_unknown_prompt_characters_follow_the_policy(trained: Path, cli: Cli) -> None:
    args = ["sample", trained, "--prompt", "The ж", "--length", "5", "--device", "cpu"]
    skipped = cli(*args, "--unknown", "skip")
    assert "1 character outside the vocabulary ('ж' U+0436): left out" in skipped.stderr
    assert skipped.stdout.startswith("The ")
    assert len(skipped.stdout) == len("The ") + 5 + 1
    args[3] = "The ж\u037e"  # its normal form is ;
    replaced = cli(*args, "--unknown", "replace")
    assert "1 character outside" in replaced.stderr
    assert replaced.stderr.count("converted to composed characters (NFC): 1 of its") == 1
    assert replaced.stdout[5] == ";"
    assert "ж" not in replaced.stdout
    assert len(replaced.stdout) == len("The ж;") + 5 + 1


@POSIX
def test_a_closed_output_pipe_is_no_error(trained: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m chargpt sample {trained} --length 5000 | head -c 20"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert done.stderr == ""
    assert len(done.stdout) == 20


def test_interactive_sampling_continues_each_line(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "The sea\n/num_samples 3\n/stop \\n\n/stop []\n/length 5\n/temperature 0\n"
    typed += "The light\n\n/seed x\nΩ\n"
    typed += "/unknown x\n/unknown skip\nThe Ω end\n/stop a=b: #\n/length = 6\n"
    typed += '/stop ["END", "\\n"]\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = cli("sample", trained, "-i", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "Ctrl-D" in done.stderr
    first, second, third, fourth = (
        part for part in done.stdout.split("> ") if part.startswith("The")
    )
    assert len(first.rstrip("\n")) >= len("The sea") + 38
    assert len(second.removesuffix("\n")) == len("The light") + 5
    assert third.startswith(second.removesuffix("\n"))  # an empty line continues the text
    assert "chargpt: seed: expected a number" in done.stderr
    assert "there is no setting 'num_samples'" in done.stderr
    assert 'stop is ["\\n"]' in done.stderr
    assert "U+03A9; leave them out or replace them with /unknown skip" in done.stderr
    assert "chargpt: unknown: expected 'error', 'skip' or 'replace'" in done.stderr
    assert 'unknown is "skip"' in done.stderr
    assert "1 character outside the vocabulary ('Ω' U+03A9): left out" in done.stderr
    assert 'stop is ["a=b: #"]' in done.stderr
    assert "length is 6" in done.stderr
    assert 'stop is ["END", "\\n"]' in done.stderr
    assert len(fourth.removesuffix("\n")) == len("The Ω end") + 5


def test_interactive_sampling_begins_with_the_prompt_takes_paths_as_text_and_ends_at_quit(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = '/length 3\n/temperature 0\n/stop "\\n"\n/etc/apt the\n/quit\nThe sea\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = cli("sample", trained, "-i", "-n", "2", "-p", "The li", "--unknown", "skip")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.partition("\n> ")[0].removeprefix("The li")) == 2
    assert 'stop is ["\\n"]' in done.stderr
    assert "there is no setting" not in done.stderr
    assert "The sea" not in done.stdout


@pytest.mark.parametrize(
    ("continuations", "said"),
    [
        (["x" * 40, "ab12" + "c" * 36], ""),
        (["no " * 13 + "tail of another kind"], ""),  # 39 of 59
        (["x" * 41, "abc"], 'samples with a long repetition: 1 of 2, the first of "x"; a higher'),
        (["He went " + "and the " * 9], 'repetition: 1 of 1, the first of " and the"; a higher'),
        (["a\n" * 30], 'the first of "a⏎"; a higher --temperature without --top-k, --top-p'),
        (["one", "one", "one"], "the 3 samples are the same; a higher --temperature without"),
        (["", " \n ", "a"], "blank samples: 2 of 3; another --temperature, --seed or --prompt"),
    ],
)
def test_samples_that_repeat_are_blank_or_the_same_are_said_with_what_helps(
    continuations: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    say_flaws([new_sample("", each, "length") for each in continuations])
    shown = capfd.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == bool(said)
    say_flaws([new_sample("x" * 90, "ab", "length"), new_sample("x", " \n", "length")])
    assert capfd.readouterr().err == ""
    say_flaws([new_sample("x", " " * 20 + "\n" * 21, "length")])
    assert "blank samples: 1 of 1" in capfd.readouterr().err


def test_one_ctrl_d_ends_a_text_that_is_typed(trained: Path, tmp_path: Path) -> None:
    terminal, other_end = pytest.importorskip("pty", reason="needs a terminal").openpty()
    words = ("score", str(trained), "--device", "cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "chargpt", *words],
        cwd=tmp_path,
        stdin=other_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "type the text; Ctrl-D ends it\n"
    os.write(terminal, b"the sea and the light\n\x04")
    assert "22 characters: " in process.communicate(timeout=60)[0]
