"""`chargpt train`: new runs, resumed runs, and texts in any encoding."""

import gzip
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, refusal
from shared_runs import QUICK

from chargpt.config import load_config
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run


def test_train_prints_its_plan_losses_and_commands_that_succeed(verse: Path, cli: Cli) -> None:
    done = cli("train", verse, *QUICK, "-s", "train.sample_every=6")
    assert done.returncode == 0, done.stderr
    assert "device  cpu (1 of " in done.stderr  # which were not chosen
    for word in ("text ", "vocab ", "model ", "plan ", "needs ", "epochs"):
        assert word in done.stderr, word
    for row in ("uniform", "unigram", "bigram", "gpt (trained)", "nats/char", "perplexity"):
        assert row in done.stdout, row
    assert "-- sample at step 6 --" in done.stderr
    assert load_run("runs/lighthouse-gpt").step in (3, 6)
    commands = [line.split() for line in done.stdout.splitlines() if line.startswith("  chargpt")]
    assert len(commands) == 4
    for _, *args in commands:
        assert cli(*args).returncode == 0
    assert RunFolder(Path("runs/lighthouse-gpt")).load("latest").state.step == 12


def test_a_text_that_stands_twice_in_a_file_is_said_before_training_and_once_in_the_result(
    verse: Path, cli: Cli
) -> None:
    Path("twice.txt").write_text(2 * verse.read_text(encoding="utf-8"))
    done = cli("train", "twice.txt", "-c", "bigram", "-s", "train.max_steps=2")
    described = cli("data", "info", "twice.txt")
    said = "bout 100% of the passages of 64 characters of the validation split occur in the train"
    for printed in (done.stderr, done.stdout, described.stdout):
        assert " ".join(printed.split()).count(said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mixture", [0, 20_000])
def test_the_plan_says_how_much_memory_the_process_will_take(
    verse: Path, mixture: int, tmp_path: Path
) -> None:
    words = np.array(verse.read_text(encoding="utf-8").split())
    Path(tmp_path, "long.txt").write_text(" ".join(np.random.default_rng(1).choice(words, 200_000)))
    settings = (*QUICK, "-s", f"text.mixture_characters={mixture}")
    command = [sys.executable, "-m", "chargpt", "train", "long.txt", *settings]
    used = 0
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            used = max(used, *map(int, re.findall(r"RssAnon:\s+(\d+) kB", status)), 0)
            time.sleep(0.005)
        assert process.stderr is not None
        printed = re.search(r"needs   about ([\d.]+) MB of memory", process.stderr.read())
    assert printed is not None
    assert float(printed[1]) == pytest.approx(1024 * used / 1e6, rel=0.25)


def test_train_prints_its_result_as_json(verse: Path, cli: Cli) -> None:
    whole = ("-s", "train.evaluation_tokens=30000")
    done = cli("train", verse, *QUICK, *whole, "--seed", "4", "-o", "mine", "--json")
    report = json.loads(done.stdout)
    assert report["run"] == "mine"
    assert report["step"] == 6
    assert set(report["losses"]) == {"train", "val"}
    again = json.loads(cli("evaluate", "mine", "--json").stdout)
    assert report["losses"]["val"]["nats_per_char"] == pytest.approx(again["nats_per_char"])
    assert load_config("mine/config.yaml").seed == 4


def test_validation_and_test_files_are_named_and_kept_on_resuming(verse: Path, cli: Cli) -> None:
    lines = verse.read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:400]), ("valid", lines[400:600]), ("test", lines[600:])):
        Path(f"{name}.txt").write_text("".join(part))
    words = ("train", "a.txt", "--val", "valid.txt", "--test", "test.txt", *QUICK, "-o", "run")
    first = cli(*words, "-s", "text.val_fraction=0")
    sizes = {name: len(Path(f"{name}.txt").read_text()) for name in ("valid", "test")}
    named = f"{sizes['valid']:,} val of valid.txt, {sizes['test']:,} test of test.txt"
    assert named in " ".join(first.stderr.split())
    assert f"of {sizes['valid']:,} validation characters of valid.txt (proto" in first.stdout
    for split, name in (("val", "valid"), ("test", "test")):
        shown = cli("evaluate", "run", "--split", split).stdout
        assert shown.startswith(f"a.txt, {split} split of {name}.txt: ")
        assert f"{sizes[name] - 1:,} characters scored" in shown
    again = cli(*words, "-s", "text.val_fraction=0", "--resume")
    assert (again.returncode, again.stderr.count("has done all its 6 steps")) == (0, 1)
    other = cli(*words[:2], "--val", "test.txt", *QUICK, "-o", "run", "--resume")
    assert "is not the text that the run was trained on" in refusal(other)


def test_train_without_a_text_uses_the_embedded_one(cli: Cli) -> None:
    done = cli("train", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "python-docs" in done.stderr
    assert Path("runs/python-docs-gpt").is_dir()


def test_a_yaml_file_configures_a_run(verse: Path, cli: Cli) -> None:
    Path("mine.yaml").write_text("model: {kind: bigram}\noptim: {name: adamw, lr: 1e-1}\n")
    assert cli("train", verse, "-c", "mine.yaml", *QUICK).returncode == 0
    assert cli("train", verse, "-c", "runs/lighthouse-mine/config.yaml", *QUICK).returncode == 0
    config = load_run("runs/lighthouse-bigram").config  # a run's config has no name of its own
    assert config.optim.lr == 0.1
    assert config.text.path == str(verse)
    assert config.device == "cpu"


def test_a_second_run_never_overwrites_the_first(verse: Path, cli: Cli) -> None:
    for name in ("runs/lighthouse-gpt", "runs/lighthouse-gpt-2"):
        assert cli("train", verse, *QUICK).returncode == 0
        assert Path(name).is_dir()


@pytest.mark.parametrize("is_same_command", [False, True])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    is_same_command: bool, verse: Path, cli: Cli
) -> None:
    whole = ["train", verse, *QUICK, "-s", "schedule.cooldown=0", "--out"]
    shorter = [str(word).replace("max_steps=6", "max_steps=3") for word in whole]
    assert cli(*whole, "whole").returncode == 0
    assert cli(*shorter, "parts", "--resume").returncode == 0
    command = ["train", "--resume", "parts", "-s", "train.max_steps=6"]
    if is_same_command:
        command = [*whole, "parts", "--resume", "--device", "auto"]
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    assert "resuming parts from step 3" in done.stderr
    model = "checkpoints/step-00000006/model.safetensors"
    assert Path("whole", model).read_bytes() == Path("parts", model).read_bytes()
    again = cli(*command)
    assert again.returncode == (0 if is_same_command else 2)
    assert "has done all its 6 steps" in again.stderr


def test_resume_takes_the_same_text_from_anywhere_and_rejects_others_and_other_settings(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*QUICK, "--out", "mine", "--resume"]
    assert cli("train", verse, *options).returncode == 0
    shutil.copy(verse, "moved.txt")
    assert "has done all its 6 steps" in cli("train", "moved.txt", *options).stderr
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(verse.read_bytes())))
    done = cli("train", "-", *options, "-s", "train.max_steps=8")
    assert done.returncode == 0, done.stderr
    assert "resuming mine from step 6" in done.stderr
    Path("other.txt").write_text(verse.read_text() + "!")
    message = refusal(cli("train", "other.txt", *options, "-s", "train.max_steps=9"))
    assert "other.txt is not the text that the run was trained on" in message
    for more, key in (
        (("-s", "seed=9"), "seed"),
        (("-c", "bigram"), "model.kind"),
        (("--encoding", "latin-1"), "text.encoding"),
    ):
        assert f"{key} cannot change" in refusal(cli("train", verse, *options, *more))


@pytest.mark.parametrize("kind", ["no manifests", "other files", "a link"])
def test_resume_never_replaces_files_that_it_cannot_resume(
    kind: str, trained: Path, verse: Path, cli: Cli, tmp_path: Path
) -> None:
    checkpoints = Path("mine/checkpoints")
    if kind == "other files":
        checkpoints.mkdir(parents=True)
        Path("mine/config.yaml").write_text("theirs: true")
        (checkpoints / "epoch10.pt").write_bytes(b"precious")
    else:
        shutil.copytree(trained, "mine")
    if kind == "no manifests":
        for manifest in Path("mine").rglob("manifest.json"):
            manifest.unlink()
    elif kind == "a link":
        checkpoints.rename("scratch")
        checkpoints.symlink_to(tmp_path / "not-mounted")
    before = sorted(Path("mine").rglob("*"))
    refusal(cli("train", verse, *QUICK, "--out", "mine", "--resume"))
    assert sorted(Path("mine").rglob("*")) == before


def test_resume_restarts_a_run_without_a_checkpoint(verse: Path, cli: Cli) -> None:
    args = ["train", verse, *QUICK, "--out", "mine", "--resume"]
    assert cli(*args).returncode == 0
    for left in Path("mine/checkpoints").iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    Path("mine/checkpoints/step-00000003.tmp").mkdir()
    assert cli(*args).returncode == 0


@pytest.mark.parametrize("text", ["my novel.txt", "novels", "novels/*.txt", "**/*.txt"])
def test_a_run_whose_text_has_changed_resumes_with_its_own_and_says_so(
    text: str, verse: Path, cli: Cli
) -> None:
    Path("novels").mkdir()
    shutil.copy(verse, "novels/a.txt" if text != "my novel.txt" else text)
    cli("train", text, *QUICK, "--out", "mine")
    if text == "my novel.txt":
        Path("another.txt").write_text("beside it, and no part of it")
    same = cli("train", "--resume", "mine", "-s", "train.max_steps=7")
    assert "has changed" not in same.stderr
    before = json.loads(cli("evaluate", "mine", "--json").stdout)["nats_per_char"]
    grown = Path("novels/b.txt" if text != "my novel.txt" else text)
    grown.write_text(verse.read_text(encoding="utf-8") + "Quite another text, xyz. " * 400)
    assert json.loads(cli("evaluate", "mine", "--json").stdout)["nats_per_char"] == before
    done = cli("train", "--resume", "mine", "-s", "train.max_steps=8")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "has changed" in line]
    assert "has changed since the run began: the run goes on with its own copy of the text" in line
    advised = shlex.split(line.split("`")[1])
    assert advised == ["chargpt", "train", str(Path(text).resolve()), "--from", "mine"]
    assert cli(*advised[1:], "--out", "new", "-s", "train.max_steps=2").returncode == 0
    assert load_run("new").corpus().n_characters > load_run("mine").corpus().n_characters
    shutil.copy(grown, "copy.txt")
    message = refusal(cli("train", "copy.txt", *QUICK, "--out", "mine", "--resume"))
    assert "start a new run with another --out (from its weights: --from mine)" in message


def test_a_run_in_use_is_rejected(trained: Path, verse: Path, cli: Cli) -> None:
    shutil.copytree(trained, "run")
    with RunFolder(Path("run")).locked():
        for args in (["--resume", "run"], [verse, *QUICK, "--out", "run", "--force"]):
            assert "another process is training into run" in refusal(cli("train", *args))
            assert Path("run/config.yaml").exists()


def test_a_run_that_does_not_fit_on_the_disk_is_rejected_before_it_starts(
    verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    message = refusal(cli("train", verse, *QUICK, "--out", "run"))
    assert "of disk for 4 checkpoints" in message
    assert not Path("run").exists()


def test_a_diverged_run_is_reported_as_such(verse: Path, cli: Cli) -> None:
    args = [w.replace("max_steps=6", "max_steps=30") for w in QUICK]
    args += ["-s", "optim.lr=3", "-s", "optim.matrix_lr=0.8"]
    done = cli("train", verse, *args, "-s", "schedule.cooldown=0", "--out", "diverged")
    assert done.returncode == 0, done.stderr
    assert "The training diverged" in done.stdout
    assert "no checkpoint is better than the weights at the start" in done.stdout
    # at most the defaults
    assert "lower learning rates, such as -s optim.lr=0.02 -s optim.matrix_lr=0.05" in done.stdout
    assert "over-fits" not in done.stdout


TEXTS: dict[str, bytes] = {
    "windows line ends": b"Zeile eins\r\nZeile zwei\r\n" * 100,
    "a byte order mark": b"\xef\xbb\xbf" + b"It was a dark and stormy night. " * 50,
    "utf-16": ("Der Fluß war breit und kühl.\n" * 60).encode("utf-16"),
    "cyrillic": ("Все счастливые семьи похожи друг на друга.\n" * 60).encode(),
    "chinese": ("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏\n" * 60).encode(),
    "emoji with joiners": ("a 👩‍👩‍👧 family 👨🏽‍🚀 and a flag 🏳️‍🌈\n" * 60).encode(),
    "one line": b"no line end at all, " * 5000,
    "gzip": gzip.compress(b"To be, or not to be, that is the question. " * 60),
}


@pytest.mark.parametrize("name", TEXTS)
def test_common_encodings_and_scripts_train(name: str, cli: Cli) -> None:
    path = Path("text.txt.gz" if name == "gzip" else "text.txt")
    path.write_bytes(TEXTS[name])
    done = cli("train", path, *QUICK)
    assert done.returncode == 0, done.stderr
    tokens = load_run(next(Path("runs").iterdir())).tokenizer.characters
    assert "\ufeff" not in tokens
    assert ("\r" in tokens) == (name == "windows line ends")


def test_an_encoding_is_named_and_bytes_that_do_not_decode_are_replaced_if_asked(
    verse: Path, cli: Cli
) -> None:
    Path("old.txt").write_bytes("“Café” – naïve\n".encode("cp1252") * 100)
    assert cli("train", "old.txt", "--encoding", "cp1252", *QUICK).returncode == 0
    assert "é" in load_run("runs/old-gpt").tokenizer.characters
    done = cli("train", "old.txt", *QUICK, "--encoding-errors", "replace", "-o", "run")
    assert "bytes that do not decode, replaced by U+FFFD: 400" in done.stderr
    assert cli("evaluate", "run", "--text", "old.txt").returncode == 0
