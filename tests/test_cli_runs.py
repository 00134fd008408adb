"""The commands `runs`, `config` and `sample --interactive`."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import yaml
from conftest import REPOSITORY, Cli, refusal, run_cli, run_here, run_python
from rich.cells import cell_len
from saving import CONFIG, TOKENIZER, save
from test_docs import load_script

from chargpt.cli import console, progress, tables
from chargpt.cli import main as main_module
from chargpt.cli.runs import runs as cli_runs
from chargpt.config import Config
from chargpt.models import count_parameters
from chargpt.store import listing
from chargpt.store.folder import RunFolder

QUICK = (
    "-s train.max_steps=6 -s train.batch_size=4 -s train.evaluate_every=3 -s train.save_every=3 "
    "-s train.evaluation_tokens=300 -s train.sample_every=0 -s model.n_layer=1 "
    "-s model.n_embd=16 -s model.block_size=16 -s sample.length=40 --device cpu -s dtype=float32"
).split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two small runs for the tests that only read them, and damage a copy of one."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "novel.txt")
    for name, extra in (("a", []), ("group/b", ["--seed", "5", "-s", "train.max_steps=9"])):
        args = ("train", "novel.txt", *QUICK, *extra, "-o", f"runs/{name}")
        run_here(*args, cwd=folder)
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "damaged")
    (folder / "runs" / "damaged" / "checkpoints" / "latest.json").write_text("{}")
    shutil.copytree(folder / "runs" / "a", folder / "runs" / "unsaved")
    shutil.rmtree(folder / "runs" / "unsaved" / "checkpoints")
    return folder / "runs"


# -- runs -------------------------------------------------------------------------------------


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
    read = listing.read_metadata

    def save_before_reading(folder: Path) -> object:
        if folder == first and folder.exists():
            save(run, 2, best=True)
            shutil.rmtree(first)
        return read(folder)

    monkeypatch.setattr(listing, "read_metadata", save_before_reading)
    (summary,) = listing.list_runs(tmp_path)
    assert (summary.step, summary.status) == (2, "unfinished")


def test_runs_shows_which_run_is_in_training(runs: Path, tmp_path: Path, cli: Cli) -> None:
    folder = RunFolder(Path(shutil.copytree(runs / "a", tmp_path / "a")))
    with folder.locked():
        assert "training, 100%" in cli("runs", tmp_path).stdout
    assert "finished" in cli("runs", tmp_path).stdout
    with folder.locked():  # looking at it did not keep it
        pass


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


def test_runs_of_an_empty_folder_names_the_next_command(tmp_path: Path, cli: Cli) -> None:
    assert "train one with `chargpt train`" in refusal(cli("runs", tmp_path))
    assert "there is no folder" in refusal(cli("runs", tmp_path / "missing"))


# -- config -----------------------------------------------------------------------------------


def test_config_lists_every_setting_with_a_meaning(cli: Cli) -> None:
    listed = json.loads(cli("config", "--json").stdout)
    tree = Config().model_dump(mode="json")
    for each in listed:
        section, _, name = each["key"].rpartition(".")
        assert each["default"] == (tree[section] if section else tree)[name]
        assert each["meaning"].endswith(".")
    sections = [value for value in tree.values() if isinstance(value, dict)]
    assert len(listed) == len(tree) - len(sections) + sum(map(len, sections))
    types = {each["key"]: each["type"] for each in listed}
    assert types["model.n_layer"] == "integer >= 1, <= 256"
    assert types["train.patience"] == "integer >= 1, or null"
    assert types["text.unknown"] == "one of error, skip, replace"


def test_config_shows_one_setting_or_section_and_a_runs_values(runs: Path, cli: Cli) -> None:
    one = cli("config", "train.max_steps", "--run", runs / "a").stdout
    assert one.startswith("train.max_steps = 6   (default 650; integer >= 1)\n")
    section = cli("config", "optim").stdout
    assert section.count("optim.") == 5
    assert "did you mean model.n_layer" in refusal(cli("config", "n_layers"))


@pytest.mark.parametrize("value", ["true", "\n\n", "a: b", "plain words"])
def test_config_shows_a_string_as_yaml_that_is_read_back(value: str, cli: Cli) -> None:
    Path("c.yaml").write_text(Config().with_values({"text.documents": value}).to_yaml())
    shown = cli("config", "text.documents", "-c", "c.yaml").stdout.splitlines()[0]
    written = shown.removeprefix("text.documents = ").partition("   (")[0]
    assert yaml.safe_load(written) == value


def test_compare_tells_of_a_checkpoint_that_it_cannot_use(runs: Path, cli: Cli) -> None:
    shutil.copytree(runs, "runs")
    (Path("runs") / "a" / "checkpoints" / "best.json").write_text("{}")
    done = cli("compare", "runs/a", "runs/group/b")
    assert done.returncode == 0, done.stderr
    assert "runs/a/checkpoints/best.json" in done.stderr


def test_the_page_of_settings_is_up_to_date() -> None:
    script = load_script(REPOSITORY / "scripts" / "write_config_page.py")
    assert script.TARGET.read_text(encoding="utf-8") == script.page()


# -- sample --interactive ---------------------------------------------------------------------


def test_interactive_sampling_continues_each_line(runs: Path, cli: Cli) -> None:
    typed = "The sea\n/num_samples 3\n/stop \\n\n/stop []\n/length 5\n/temperature 0\n"
    typed += "The light\n\n/seed x\nΩ\n"
    typed += "/unknown x\n/unknown skip\nThe Ω end\n/stop a=b: #\n/length = 6\n"
    typed += '/stop ["END", "\\n"]\n'
    done = run_cli("sample", runs / "a", "-i", "--seed", "1", cwd=runs, stdin=typed)
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
    assert "U+03A9; leave it out or replace it with /unknown skip" in done.stderr
    assert "chargpt: unknown: expected 'error', 'skip' or 'replace'" in done.stderr
    assert 'unknown is "skip"' in done.stderr
    assert "1 character outside the vocabulary ('Ω' U+03A9): left out" in done.stderr
    assert 'stop is ["a=b: #"]' in done.stderr
    assert "length is 6" in done.stderr
    assert 'stop is ["END", "\\n"]' in done.stderr
    assert len(fourth.removesuffix("\n")) == len("The Ω end") + 5
    assert "drop --json" in refusal(cli("sample", runs / "a", "-i", "--json"))


def test_interactive_sampling_takes_paths_as_text_and_ends_at_quit(runs: Path, cli: Cli) -> None:
    typed = '/length 3\n/temperature 0\n/stop "\\n"\n/etc/apt the\n/quit\nThe sea\n'
    done = run_cli("sample", runs / "a", "-i", "--unknown", "skip", cwd=runs, stdin=typed)
    assert done.returncode == 0, done.stderr
    assert 'stop is ["\\n"]' in done.stderr
    assert "there is no setting" not in done.stderr
    assert "The sea" not in done.stdout


def test_slow_loading_is_said_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(name: str) -> object:
        time.sleep(0.3)
        return import_module(name)

    monkeypatch.setattr(main_module, "import_module", slow)
    for is_terminal, seconds, expected in ((True, 0.1, 1), (True, 0.6, 0), (False, 0.1, 0)):
        monkeypatch.setattr(console, "NOTICE_SECONDS", seconds)
        monkeypatch.setattr(sys.stderr, "isatty", lambda result=is_terminal: result)
        main_module.load_command(main_module.COMMANDS[0])
        time.sleep(0.4)
        assert capsys.readouterr().err.count("loading PyTorch") == expected


def test_an_import_that_drops_exceptions_does_not_drop_a_signal(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "from chargpt.cli import main\n"
        "def load(name, load=main.import_module):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException:\n"
        "        pass\n"
        "    return load(name)\n"
        "main.import_module = load\n"
        "sys.argv = ['chargpt', 'config']\n"
        "main.run()\n"
    )
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


# -- a terminal of 80 columns -----------------------------------------------------------------


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
    return b"".join(chunks).decode().replace("loading PyTorch ...\r\n", "")


@pytest.mark.slow
def test_a_terminal_shows_the_seed_that_repeats_a_sample(runs: Path) -> None:
    sample = ("sample", "runs/a", "-n", "20")
    shown = on_terminal(*sample, cwd=runs.parent).replace("\r\n", "\n")
    seed = re.search(r"\n--seed (\d+) gives the same text\n$", shown)
    assert seed is not None
    again = on_terminal(*sample, "--seed", seed[1], cwd=runs.parent).replace("\r\n", "\n")
    assert again == shown[: seed.start() + 1]


def test_a_terminal_breaks_sentences_between_words(runs: Path) -> None:
    wide = run_cli("config", "schedule", cwd=runs.parent).stdout
    shown = on_terminal("config", "schedule", cwd=runs.parent).replace("\r\n", "\n")
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split()[: len(wide.split())] == wide.split()  # then the message on stderr
    assert len(shown.splitlines()) > len(wide.splitlines())


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
    bar = progress.ProgressBar(100, "step", initial=50)
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0)
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
        bar = progress.ProgressBar(10, "step")
        bar.update(10, 10, lambda: "loss 2")
        bar.write(sample, is_sample=True)
        bar.write(note)
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


def test_the_loading_bar_takes_the_place_of_a_notice() -> None:
    shown: list[str] = []
    loading = progress.LoadingProgress(lambda: shown.append("bar"))
    loading("reading", 1, 1000)  # too short for a bar
    assert shown == []
    for done in (1, 2):
        loading("reading", done, loading.MIN_BYTES)
    assert shown == ["bar"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (999.4, "999"), (999.6, "1k"), (999_600, "1M"), (1e12, "1000G")],
)
def test_a_number_is_never_rounded_to_a_thousand_of_its_unit(count: float, text: str) -> None:
    assert console.short(count) == text


@pytest.mark.slow
def test_training_on_a_terminal_shows_a_percentage_in_80_columns(runs: Path) -> None:
    text = f"a-{'long-' * 10}name.txt"
    shutil.copy(runs.parent / "novel.txt", runs.parent / text)
    shown = on_terminal("train", text, *QUICK, "-s", "train.max_steps=300", cwd=runs.parent)
    wrapped = re.search(r"(?m)^(text +)a-long-[^\r]*\r\n( +)\S", shown)
    assert wrapped is not None, shown
    assert len(wrapped[1]) == len(wrapped[2]), "the labels are alone in their columns"
    frames = [re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", frame) for frame in shown.split("\r")]
    bars = [frame.strip() for frame in frames if "chars/s" in frame]
    assert bars
    assert all("%" in bar and len(bar) <= 80 for bar in bars)
