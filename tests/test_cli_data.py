"""`chargpt data`: named texts, and descriptions of texts."""

import json
import sys
from pathlib import Path

import pytest
from conftest import Cli, refusal, run_cli
from shared_runs import RARE


def test_data_info_describes_a_text_and_warns_about_training_on_it(verse: Path, cli: Cli) -> None:
    shown = cli("data", "info", verse).stdout
    for word in ("characters", "vocabulary", "most frequent", "bigram entropy", "bits/character"):
        assert word in shown
    Path("tiny.txt").write_text("too little text\n" * 3)
    assert "note: " in cli("data", "info", "tiny.txt").stdout
    facts = json.loads(cli("data", "info", "tiny.txt", "--json").stdout)
    assert facts["characters"] == 48
    for words, label in (((), "least frequent"), (RARE, "least frequent in the vocabulary")):
        done = cli("data", "info", verse, *words)
        names = [line[1:23].strip() for line in done.stdout.splitlines()]
        rows = " ".join(filter(None, names))
        assert f" {label} not in the vocabulary " in rows, "nothing is left out of a whole text"


def test_an_ascii_terminal_gets_a_table(verse: Path, tmp_path: Path) -> None:
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = run_cli("data", "info", verse, cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "bits/character" in done.stdout


def test_data_list_names_the_catalog(cli: Cli) -> None:
    assert "tinyshakespeare" in cli("data", "list").stdout


def test_a_closed_standard_input_is_rejected(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python does for `<&-`
    assert "standard input is closed" in refusal(cli("data", "info", "-"))
