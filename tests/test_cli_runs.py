"""`chargpt runs` and `chargpt verify`."""

import errno
import json
import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
from conftest import REPOSITORY, Cli, refusal, run_here
from rich.cells import cell_len
from saving import CONFIG, TOKENIZER, failing_at, flip, save
from shared_runs import QUICK

from chargpt.cli.runs import runs as cli_runs
from chargpt.models import count_parameters
from chargpt.store import checkpoint, listing
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two small runs for the tests that only read them, and damage a copy of one."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "novel.txt")
    for name, extra in (("a", []), ("group/b", ["--seed", "5", "-s", "train.max_steps=9"])):
        args = ("train", "novel.txt", *QUICK, *extra, "-o", f"runs/{name}")
        run_here(*args, cwd=folder)
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "damaged")
    for state in (folder / "runs" / "damaged").glob("*/step-*/state.json"):
        state.write_text("{}")
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "unsaved")
    shutil.rmtree(folder / "runs" / "unsaved" / "checkpoints")
    return folder / "runs"


def test_runs_lists_each_run_with_its_state(runs: Path, cli: Cli) -> None:
    listed = json.loads(cli("runs", runs, "--json").stdout)
    by_name = {Path(each["run"]).relative_to(runs).as_posix(): each for each in listed}
    assert {name: each["status"] for name, each in by_name.items()} == {
        "a": "finished",
        "group/b": "finished",
        "damaged": "damaged",
        "unsaved": "no checkpoint",
    }
    assert next(iter(by_name)) == "group/b"  # it was saved last
    assert load_run(runs / "group" / "b", device="cpu").config.seed == 5
    assert by_name["a"]["text"] == "novel.txt"
    assert by_name["a"]["step"] == by_name["a"]["max_steps"] == 6
    state = json.loads((runs / "a" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert by_name["a"]["best_nats_per_char"] == state["best_nats_per_char"]
    table = cli("runs", runs).stdout
    for word in ("novel.txt", "finished", "damaged", "no checkpoint", "group/b"):
        assert word in table
    assert max(map(len, table.splitlines())) <= 82


def test_a_run_that_is_saved_while_it_is_listed_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER)
    first = save(run, 1, best=True)
    read = checkpoint.read_metadata

    def save_before_reading(folder: Path) -> object:
        if folder == first and folder.exists():
            save(run, 2, best=True)
            shutil.rmtree(first)
        return read(folder)

    monkeypatch.setattr(checkpoint, "read_metadata", save_before_reading)
    (summary,) = listing.list_runs(tmp_path)
    assert (summary.step, summary.status) == (2, "unfinished")


def test_runs_shows_which_run_is_in_training(runs: Path, tmp_path: Path, cli: Cli) -> None:
    folder = RunFolder(Path(shutil.copytree(runs / "a", tmp_path / "a")))
    with folder.locked():
        assert "training, 100%" in cli("runs", tmp_path).stdout
    assert "finished" in cli("runs", tmp_path).stdout
    with folder.locked():  # looking at it did not keep it
        pass


@pytest.mark.parametrize("seconds", [1e12, 253402300799.0, -1e11, -3e9, 1e300])
def test_a_run_saved_in_any_year_is_listed(
    seconds: float, trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chargpt.store.listing.last_saved", lambda _: seconds)
    done = cli("runs", trained.parent)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^ run .* finished .*\d\.\d{3}", done.stdout)
    assert cli("runs", trained.parent, "--json").returncode == 0


def test_a_folder_that_cannot_be_read_is_no_missing_run(
    trained: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "runs" / "a")
    (tmp_path / "runs" / "locked").mkdir()
    # root can read any folder
    monkeypatch.setattr("os.listdir", failing_at(os.listdir, errno.EACCES, "locked"))
    done = cli("runs")
    assert " a " in done.stdout
    assert "runs/locked cannot be read (Permission denied): it may be a run" in done.stderr
    for words in (("verify", "runs/locked"), ("compare", "runs/locked"), ("sample", "runs/locked")):
        message = refusal(cli(*words))
        assert "runs/locked cannot be read (Permission denied)" in message
    monkeypatch.setattr("os.listdir", failing_at(os.listdir, errno.EACCES, "runs"))
    assert "runs cannot be read (Permission denied)" in refusal(cli("runs"))


@pytest.mark.parametrize("status", get_args(listing.Status))
def test_the_names_of_runs_stay_whole_in_80_columns(
    status: listing.Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = datetime(2025, 9, 26, tzinfo=UTC)
    values = ("a-long-name.txt", "lines", "gpt", 123_456, 99_999, 200_000, 1.234, 60.0, saved)
    name = "a-run-whose-name-is-30-letters"
    long, short = (listing.RunSummary(Path(each), status, *values) for each in (name, "b"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("chargpt.cli.runs.list_runs", lambda _: [long, short])
    cli_runs(Path())
    lines = capsys.readouterr().out.splitlines()
    assert sum(name in line for line in lines) == 1
    assert max(map(cell_len, lines)) <= 80
    monkeypatch.setattr("chargpt.cli.runs.list_runs", lambda _: [short])
    cli_runs(Path())
    assert "a-long-name.txt (documents)" in capsys.readouterr().out


def test_a_run_that_has_just_begun_is_listed_first_with_its_text_and_size(
    runs: Path, tmp_path: Path, cli: Cli
) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    config = CONFIG.with_values({"text.path": "texts/poems.txt"})
    run = RunFolder(tmp_path / "begun")
    with run.locked(is_new=True):
        run.create(config, TOKENIZER)
        first, _ = json.loads(cli("runs", tmp_path, "--json").stdout)
    assert (first["run"], first["status"]) == (str(run.path), "training")
    assert (first["text"], first["step"], first["saved"]) == ("poems.txt", None, None)
    parameters = count_parameters(config.model, TOKENIZER.vocab_size)
    assert first["parameters"] == parameters


def test_compare_tells_of_a_checkpoint_that_it_cannot_use(runs: Path, cli: Cli) -> None:
    shutil.copytree(runs, "runs")
    damaged = max(Path("runs", "a", "checkpoints").iterdir()) / "state.json"
    damaged.write_text("{}")
    done = cli("compare", "runs/a", "runs/group/b")
    assert done.returncode == 0, done.stderr
    assert str(damaged) in done.stderr


def test_verify_names_the_damaged_file_and_the_checkpoint_used_instead(
    runs: Path, cli: Cli
) -> None:
    shutil.copytree(runs / "a", "run")
    intact = cli("verify", "run")
    assert intact.returncode == 0
    assert "match their checksums" in intact.stdout
    path = Path("run/checkpoints/step-00000006/model.safetensors")
    flip(path, 8 * (path.stat().st_size // 2) + 2)
    damaged = cli("verify", "run")
    assert damaged.returncode == 1
    shown = " ".join(damaged.stdout.split())
    assert "model.safetensors has changed since it was saved" in shown
    assert "step-00000003 is used instead of latest" in shown
    report = json.loads(cli("verify", "run", "--json").stdout)
    assert report["intact"] is False
    assert report["loaded_by"]["latest"] == "step-00000003"
    states = {row["checkpoint"]: row["problem"] is None for row in report["checkpoints"]}
    assert states == {"step-00000003": True, "step-00000006": False}
