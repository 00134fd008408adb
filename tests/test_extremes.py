"""Unusual but valid conditions: killed and stopped processes, large numbers, copies, -O."""

import contextlib
import signal
import time
import zipfile
from pathlib import Path

import pytest
from conftest import POSIX, REPOSITORY, Cli, refusal, start_cli

from chargpt.store.checkpoint import list_checkpoints
from chargpt.store.run import load_run

pytestmark = pytest.mark.slow
TINY = (
    "-s train.max_steps=4 -s train.batch_size=4 -s train.evaluation_tokens=300 "
    "-s model.n_layer=1 -s model.n_embd=16 -s model.block_size=16 --device cpu -s dtype=float32"
).split()


@POSIX
def test_a_run_that_is_moved_away_while_it_trains_is_saved_there_and_ends(
    verse: Path, tmp_path: Path
) -> None:
    long = "-s train.max_steps=100000 -s train.save_every=5 --out r".split()
    process = start_cli("train", verse, *TINY, *long, cwd=tmp_path)
    end = time.monotonic() + 60
    while not list_checkpoints(tmp_path / "r" / "checkpoints"):
        assert time.monotonic() < end, process.communicate(timeout=5)
        time.sleep(0.05)
    (tmp_path / "r").rename(tmp_path / "away")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "r was renamed to away during training, which stopped at step" in err
    assert "resume with\n  chargpt train --resume away\n" in err
    assert load_run(tmp_path / "away", "latest", "cpu").step
    assert not (tmp_path / "r").exists()


@POSIX
def test_a_process_that_was_stopped_beyond_its_budget_saves_and_ends(
    verse: Path, tmp_path: Path
) -> None:
    small = "-s model.n_layer=1 -s model.n_embd=16 -s model.block_size=16".split()
    start = time.monotonic()
    process = start_cli("train", verse, *small, "--budget", "20s", "--out", "r", cwd=tmp_path)
    while not (tmp_path / "r" / "config.yaml").exists():
        assert time.monotonic() < start + 60, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    time.sleep(max(0, start + 21 - time.monotonic()))
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert load_run(tmp_path / "r", "latest", "cpu").step


def test_few_open_files_are_enough(verse: Path, tmp_path: Path) -> None:
    process = start_cli("train", verse, *TINY, "--out", "r", cwd=tmp_path, shell="ulimit -n 40;")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_vocabulary_of_a_hundred_thousand_characters(cli: Cli, tmp_path: Path) -> None:
    alphabet = "".join(map(chr, (*range(0x4E00, 0x9FFF), *range(0x20000, 0x33000))))[:100_000]
    (tmp_path / "t.txt").write_text(alphabet[::-1] + alphabet, encoding="utf-8")
    assert f"{len(alphabet):,}" in cli("data", "info", "t.txt").stdout
    assert "would need about" in refusal(cli("train", "t.txt", "-c", "bigram"))
    done = cli("train", "t.txt", *TINY, "-s", "train.evaluate_every=4", "--out", "r")
    assert done.returncode == 0, done.stderr
    assert len(cli("sample", "r", "-n", "9", "--seed", "1").stdout) == 10


def test_python_without_assertions_and_docstrings(verse: Path, tmp_path: Path) -> None:
    for words in (["train", verse, *TINY, "--out", "r"], ["sample", "r"]):
        process = start_cli(*words, cwd=tmp_path, shell="export PYTHONOPTIMIZE=2;")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_a_run_is_used_through_a_link_and_after_being_zipped(tmp_path: Path) -> None:
    golden = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    (tmp_path / "link").symlink_to(golden)
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for path in golden.rglob("*"):
            archive.write(path, path.relative_to(golden))
    with contextlib.chdir(tmp_path), zipfile.ZipFile("run.zip") as archive:
        archive.extractall("copy")
    runs = [load_run(path, device="cpu") for path in (golden, tmp_path / "link", tmp_path / "copy")]
    assert len({tuple(run.logits("light").flatten().tolist()) for run in runs}) == 1


def test_of_three_processes_on_one_new_folder_one_trains(verse: Path, tmp_path: Path) -> None:
    processes = [start_cli("train", verse, *TINY, "--out", "r", cwd=tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2, 2], outputs
    assert all("Traceback" not in err for _, err in outputs)
    assert load_run(tmp_path / "r", device="cpu").step
