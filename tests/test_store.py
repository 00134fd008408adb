"""What a run leaves on disk is whole, checked, and safe to read."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import REPOSITORY
from saving import CONFIG, TOKENIZER, save

from chargpt.errors import RunError
from chargpt.models import build_model
from chargpt.store import commit
from chargpt.store.run import RunFolder, has_checkpoint, load_run, newest_run
from chargpt.store.state import RunState
from chargpt.store.tensors import serialize
from chargpt.store.verify import verify
from chargpt.text.corpus import load_corpus
from chargpt.training.trainer import Trainer


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER, force=False)


def test_a_checkpoint_holds_the_files_that_the_format_names(run: RunFolder) -> None:
    folder = save(run, 1000)
    assert folder.name == "step-00001000"
    names = {
        "model.safetensors",
        "optimizer.safetensors",
        "config.yaml",
        "tokenizer.json",
        "state.json",
        "manifest.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json"}


def test_what_is_loaded_is_what_was_saved(run: RunFolder) -> None:
    save(run, 7, best=True, fill=0.25)
    loaded = load_run(run.path, device="cpu")
    assert loaded.step == 7
    assert loaded.config == CONFIG
    assert loaded.tokenizer == TOKENIZER
    assert all((p == 0.25).all() for p in loaded.model.parameters())


def test_reading_takes_best_and_latest_and_steps_as_asked(run: RunFolder) -> None:
    save(run, 1, best=True)
    save(run, 2)
    save(run, 3)
    assert load_run(run.path, device="cpu").step == 1
    assert load_run(run.path, "latest", "cpu").step == 3
    assert load_run(run.path, "2", "cpu").step == 2
    with pytest.raises(RunError, match="no checkpoint '9'"):
        load_run(run.path, "9", "cpu")


def test_pruning_keeps_the_best_and_the_last(run: RunFolder) -> None:
    for step in range(1, 7):
        save(run, step, best=step == 2)
    steps = [path.name for path in commit.committed(run.checkpoints)]
    assert steps == ["step-00000002", "step-00000005", "step-00000006"]


def test_an_unfinished_save_is_never_read(run: RunFolder) -> None:
    save(run, 1, best=True)
    unfinished = run.checkpoints / "step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert load_run(run.path, "latest", "cpu").step == 1
    save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 2
    assert not unfinished.exists()


def test_a_write_that_fails_leaves_the_checkpoint_before(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1, best=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for operation in ("rename", "fsync", "mkdir"):
        with monkeypatch.context() as patched:
            patched.setattr(f"os.{operation}", full)
            with pytest.raises(OSError, match="No space"):
                save(run, 2)
        assert load_run(run.path, "latest", "cpu").step == 1
        assert not list(run.path.rglob("*.tmp"))


def test_a_save_is_refused_while_the_disk_has_no_room_for_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run, 1)
    taken = sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    room = [taken - 1]
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, room[0])
    )
    with pytest.raises(OSError, match="No space") as refused:
        save(run, 2)
    assert refused.value.errno == errno.ENOSPC
    room[0] = taken + 10
    save(run, 2)


def test_metrics_that_the_disk_refused_are_written_with_the_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.metrics.append({"step": 1})
    path = run.path / "metrics.jsonl"
    aside = path.rename(run.path / "aside")
    path.mkdir()
    for step in (2, 3):
        with pytest.raises(IsADirectoryError):
            run.metrics.append({"step": step})
    path.rmdir()
    aside.rename(path)
    with open(path, "a") as file:
        file.write('{"step": 2')  # what a full disk leaves of a line
    run.metrics.append({"step": 4})
    assert [record["step"] for record in run.metrics.records()] == [1, 2, 3, 4]
    assert path.read_text().splitlines() == [
        *('{"step": 1}', '{"step": 2'),
        *('{"step": 2}', '{"step": 3}', '{"step": 4}'),
    ]


def test_a_run_is_one_processes_alone_until_it_ends(run: RunFolder) -> None:
    with pytest.raises(RunError) as refused:
        RunFolder(run.path).lock()
    assert str(refused.value) == (
        f"another process is training into {run.path}; wait for it or stop it, or name "
        "another folder with --out"
    )
    with pytest.raises(RunError, match="another process is training"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, force=True)
    run.unlock()
    RunFolder(run.path).lock()


def test_a_process_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other").create(CONFIG, TOKENIZER, force=False)
    path = other.path
    other.unlock()
    script = (
        "import sys, time; from pathlib import Path; from chargpt.store.run import RunFolder;"
        "run = RunFolder(Path(sys.argv[1])); run.lock(); print('locked', flush=True);"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(RunError, match="another process"):
        RunFolder(path).lock()
    process.kill()
    process.wait()
    RunFolder(path).lock()


def test_pruning_leaves_alone_what_is_newer_than_the_checkpoint_gone_on_from(
    run: RunFolder,
) -> None:
    for step in (10, 20, 30):
        save(run, step)
    for step in (12, 14, 16):  # 20 and 30 were found damaged
        save(run, step)
    steps = [commit.step_of(path) for path in commit.committed(run.checkpoints)]
    assert steps == [14, 16, 20, 30]
    assert load_run(run.path, "latest", "cpu").step == 16


def test_before_anything_was_measured_the_best_is_the_newest(run: RunFolder) -> None:
    for step in (1, 2):
        model = build_model(CONFIG.model, TOKENIZER.vocab_size)
        run.save(
            config=CONFIG,
            tokenizer=TOKENIZER,
            state=RunState(step),
            model=model.state_dict(),
            optimizer={},
            is_best=False,
        )
    assert load_run(run.path, "best", "cpu").step == 2
    assert not verify(run).problems


def test_verify_finds_each_damaged_checkpoint_and_where_the_pointers_lead_now(
    run: RunFolder,
) -> None:
    save(run, 1, best=True)
    save(run, 2)
    assert verify(run).problems == []
    newest = save(run, 3)
    unfinished = run.checkpoints / "step-00000004.tmp"
    unfinished.mkdir()
    (newest / "optimizer.safetensors").unlink()
    verdict = verify(run)
    assert [each.problem is None for each in verdict.checkpoints] == [True, True, False]
    assert any("optimizer.safetensors" in problem for problem in verdict.problems)
    assert "instead of latest, step-00000002 is used" in verdict.problems
    assert verdict.uses["best"] == run.checkpoints / "step-00000001"
    assert verdict.uses["latest"] == run.checkpoints / "step-00000002"
    assert str(unfinished) in verdict.notes[0]


def test_a_folder_that_cannot_be_made_a_run_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(RunError, match="No space left"):
            RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER, force=False)
    assert not (tmp_path / "run").exists()
    RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER, force=False)


def test_the_same_weights_give_the_same_bytes(run: RunFolder) -> None:
    first = (save(run, 1) / "model.safetensors").read_bytes()
    second = (save(run, 2) / "model.safetensors").read_bytes()
    assert first == second


def test_a_run_is_never_overwritten_without_force(run: RunFolder, tmp_path: Path) -> None:
    save(run, 1)
    with pytest.raises(RunError) as refused:
        RunFolder(run.path).create(CONFIG, TOKENIZER, force=False)
    assert str(refused.value) == (
        f"{run.path} exists; continue it with --resume, replace it with --force, "
        "or name another folder with --out"
    )
    assert commit.committed(run.checkpoints)
    path, checkpoints = run.path, run.checkpoints
    run.unlock()
    RunFolder(path).create(CONFIG, TOKENIZER, force=True)
    assert not commit.committed(checkpoints)
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(RunError) as refused:
        RunFolder(precious).create(CONFIG, TOKENIZER, force=True)
    assert str(refused.value) == (
        f"{precious} holds 'thesis.tex', which is not a run's, so --force leaves it "
        "alone; move that away, or name another folder"
    )
    assert (precious / "thesis.tex").exists()


def test_a_run_that_another_process_has_begun_meanwhile_is_not_begun_anew(run: RunFolder) -> None:
    folder = save(run, 1)
    run.unlock()
    RunFolder.require_free(run.path.with_name("none"), begun=True)
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, begun=True)
    assert folder.exists()
    shutil.rmtree(folder)
    (run.path / ".config.yaml.0123.tmp").write_text("half")  # a process died while it wrote
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER)
    precious = run.checkpoints / "epoch10.pt"
    precious.write_bytes(b"x")
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, begun=True)
    precious.rename(run.path.with_name("away"))
    RunFolder(run.path).create(CONFIG, TOKENIZER, begun=True)
    assert (run.path / "config.yaml").exists()
    assert not list(run.path.glob("*.tmp"))


def test_a_run_whose_checkpoints_are_on_a_disk_that_is_away_is_not_begun_anew(
    run: RunFolder, tmp_path: Path
) -> None:
    run.unlock()
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path / "not-mounted")
    assert has_checkpoint(run.path)
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, begun=True)


def test_force_leaves_what_no_run_has_made(run: RunFolder, tmp_path: Path) -> None:
    run.unlock()
    precious = run.checkpoints / "epoch10.pt"
    precious.write_bytes(b"x")
    with pytest.raises(RunError, match=r"holds 'checkpoints/epoch10\.pt', which is not a run's"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, force=True)
    precious.unlink()
    run.checkpoints.rename(tmp_path / "away")
    run.checkpoints.symlink_to(tmp_path / "away")
    with pytest.raises(RunError, match="holds 'checkpoints'"):
        RunFolder(run.path).create(CONFIG, TOKENIZER, force=True)
    (tmp_path / "plain").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        RunFolder(tmp_path / "plain").create(CONFIG, TOKENIZER, force=False)


def test_metrics_that_no_run_writes_are_passed_over_or_refused(run: RunFolder) -> None:
    path = run.path / "metrics.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(
        b'{"step": 1}\n\xff\xfe\n' + deep + b'\n{"step": 2, "loss": "x"}\n{"step": 3}\n'
    )
    assert [record["step"] for record in run.metrics.records()] == [1, 3]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="not what a run writes"):
        run.metrics.records()


def test_half_a_run_that_a_killed_process_left_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match="--force"):
        RunFolder(path).create(CONFIG, TOKENIZER, force=False)
    RunFolder(path).create(CONFIG, TOKENIZER, force=True)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").create(CONFIG, TOKENIZER, force=True)


def test_metrics_survive_a_line_cut_short_and_forget_what_is_done_again(run: RunFolder) -> None:
    for step in (1, 2, 3):
        run.metrics.append({"step": step, "loss": 1.0 / step})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in run.metrics.records()] == [1, 2, 3]
    run.metrics.truncate_after(2)
    assert [record["step"] for record in run.metrics.records()] == [1, 2]


def test_the_newest_run_is_the_one_saved_last(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="chargpt train"):
        newest_run(tmp_path)
    for name in ("b", "a"):
        save(RunFolder(tmp_path / name).create(CONFIG, TOKENIZER, force=False), 1)
    assert newest_run(tmp_path) == tmp_path / "a"


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    remedy = "; train one with `chargpt train`, or name another"
    with pytest.raises(RunError) as refused:
        load_run(tmp_path / "nothing")
    assert str(refused.value) == f"there is no folder {tmp_path}/nothing{remedy}"
    with pytest.raises(RunError) as refused:
        load_run(tmp_path)
    assert str(refused.value) == f"there is no run in {tmp_path}{remedy}"
    empty = RunFolder(tmp_path / "new").create(CONFIG, TOKENIZER, force=False)
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_run(empty.path)


def test_weights_are_packed_as_the_library_packs_them_without_a_copy() -> None:
    tensors = {
        "wide": torch.randn(3, 5),
        "turned": torch.randn(4, 2).mT,
        "one number": torch.tensor(0.5),
        "ärm": torch.randn(7),
        "empty": torch.empty(0, 3),
    }
    chunks = serialize(tensors)
    assert b"".join(chunks) == safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}
    )
    tensors["wide"].zero_()
    assert bytes(chunks[-2]) == bytes(60)


def test_optimizer_and_raw_weights_come_back(run: RunFolder) -> None:
    save(run, 3)
    saved, skipped = run.load("latest")
    assert skipped == []
    assert saved.optimizer == {"adamw.step": torch.tensor(3.0)}
    assert saved.raw_model is saved.model
    averaged = dataclasses.replace(saved, optimizer={"raw.head.weight": torch.ones(2)})
    assert averaged.raw_model == {"head.weight": averaged.optimizer["raw.head.weight"]}


def test_what_is_loaded_says_where_it_is_from(run: RunFolder) -> None:
    save(run, 3, best=True)
    loaded = load_run(run.path, device="cpu")
    assert loaded.folder == run.path
    assert loaded.checkpoint == "step-00000003"
    assert loaded.notes == ()
    assert not loaded.model.training


@pytest.mark.parametrize(
    "changes",
    [
        {"model.kind": "bigram"},
        {"model.n_layer": 40, "model.n_embd": 2, "model.n_head": 1, "model.n_mlp": 1},
        {"train.ema": 0.9, "model.n_layer": 1, "model.n_embd": 16},
        {"train.ema": 0.9, "optim.name": "adamw", "model.n_layer": 3, "model.n_embd": 32},
    ],
    ids=["bigram", "many narrow layers", "average", "average with AdamW"],
)
def test_whatever_can_be_trained_can_be_read_back(
    changes: dict[str, object], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello world, hello words. " * 20)
    small = {"text.path": str(text), "device": "cpu", "model.block_size": 8}
    config = CONFIG.with_values({"train.max_steps": 1, "train.batch_size": 2, **small, **changes})
    corpus = load_corpus(config.text)
    folder = RunFolder(tmp_path / "run")
    trainer = Trainer(config, corpus, folder=folder)
    folder.create(trainer.config, corpus.tokenizer, force=False)
    for _ in trainer.steps():
        pass
    saved, skipped = folder.load("latest")
    assert skipped == []
    assert verify(folder).problems == []
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(saved.raw_model[name], weight), name
    again = Trainer(saved.config, corpus, saved=saved)
    for name, tensor in trainer.learner.optimizer.state_tensors().items():
        assert torch.equal(again.learner.optimizer.state_tensors()[name], tensor), name


def test_json_is_written_for_people_and_always_alike() -> None:
    assert commit.to_json({"b": "ж", "a": 1}) == '{\n  "a": 1,\n  "b": "ж"\n}\n'.encode()


def test_checkpoints_are_in_order_of_their_steps_however_long(run: RunFolder) -> None:
    for step in (99_999_999, 100_000_000):
        save(run, step)
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "step-00000001").mkdir()  # without a manifest
    shutil.copytree(run.checkpoints / "step-100000000", run.checkpoints / "step-copy")
    steps = [commit.step_of(path) for path in commit.committed(run.checkpoints)]
    assert steps == [99_999_999, 100_000_000]


def test_a_checkpoint_is_saved_though_somebody_has_deleted_their_folder(run: RunFolder) -> None:
    save(run, 1)
    shutil.rmtree(run.checkpoints)
    save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 2


def test_what_cannot_be_deleted_does_not_stop_a_save(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("os.rmdir", refuse)
        for step in (1, 2, 3, 4):
            save(run, step)
    left = sorted(path.name for path in run.checkpoints.glob("*.tmp"))
    assert left == ["step-00000001.old.tmp", "step-00000002.old.tmp"]
    save(run, 5)
    assert not list(run.checkpoints.glob("*.tmp"))


def test_a_run_is_made_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "of" / "today" / "run"
    save(RunFolder(path).create(CONFIG, TOKENIZER, force=False), 1)
    assert newest_run(tmp_path / "of") == path


def test_a_folder_that_cannot_be_written_is_told_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError) as refused:
        RunFolder(tmp_path / "file" / "run").create(CONFIG, TOKENIZER, force=False)
    assert str(refused.value) == (
        f"{tmp_path}/file/run cannot be written (Not a directory); name another folder with --out"
    )


def test_verify_tells_sizes_and_every_problem_once(run: RunFolder) -> None:
    folder = save(run, 1, best=True)
    (whole,) = verify(run).checkpoints
    assert whole.size == sum(path.stat().st_size for path in folder.iterdir())
    (folder / "state.json").unlink()
    verdict = verify(run)
    gone = f"{folder}/state.json cannot be read (No such file or directory); use another checkpoint"
    (checked,) = verdict.checkpoints
    assert checked.problem == gone
    assert checked.size == sum(path.stat().st_size for path in folder.iterdir())
    assert verdict.problems == [
        gone,
        f"best leads to no whole checkpoint: {gone}",
        f"latest leads to no whole checkpoint: {gone}",
    ]
    assert verdict.uses == {"best": None, "latest": None}
