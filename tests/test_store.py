"""Run folders: checkpoints, locks, metrics and integrity checks."""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import stat
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import POSIX, REPOSITORY, start_cli
from saving import CONFIG, TOKENIZER, failing, failing_at, rewrite, save

from chargpt.config import Config
from chargpt.errors import DeviceError, RunError, UnreadableError
from chargpt.files import to_json
from chargpt.store import checkpoint, metrics
from chargpt.store.checkpoint import (
    Checkpoint,
    RunState,
    list_checkpoints,
    load_checkpoint,
    newest_metadata,
    step_of,
)
from chargpt.store.folder import RunFolder
from chargpt.store.layout import find_foreign_file
from chargpt.store.listing import list_runs
from chargpt.store.metrics import RECORD_BYTES, MetricsLog, to_line
from chargpt.store.run import load_run, newest_run, open_run
from chargpt.store.tensors import serialize
from chargpt.store.verify import verify
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.resume import load_latest


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER)


def test_a_checkpoint_has_the_documented_files(run: RunFolder) -> None:
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


def test_loading_returns_what_was_saved(run: RunFolder) -> None:
    save(run, 7, best=True, fill=0.25)
    loaded = load_run(run.path, device="cpu")
    assert (loaded.folder, loaded.checkpoint, loaded.step) == (run.path, "step-00000007", 7)
    assert loaded.config == CONFIG
    assert loaded.tokenizer == TOKENIZER
    assert all((p == 0.25).all() for p in loaded.model.parameters())
    assert not loaded.model.training
    assert loaded.notes == ()


def test_pruning_keeps_the_best_the_last_and_what_is_marked_to_be_kept(run: RunFolder) -> None:
    save(run, 1)
    with run.kept(1):
        pass
    for step in range(2, 7):
        save(run, step, best=step == 3)
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [1, 3, 5, 6]
    assert run.is_kept(1)
    assert not run.is_kept(6)


def test_a_failed_write_leaves_the_previous_checkpoint(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1, best=True)
    for operation in ("rename", "fsync", "mkdir"):
        with monkeypatch.context() as patched:
            patched.setattr(f"os.{operation}", failing(errno.ENOSPC))
            with pytest.raises(OSError, match="No space"):
                save(run, 2)
        assert load_run(run.path, "latest", "cpu").step == 1
        assert not list(run.path.rglob("*.tmp"))


def test_a_save_fails_while_the_disk_has_too_little_space(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run, 1)
    taken = sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    room = [taken - 1]
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, room[0])
    )
    with pytest.raises(OSError, match="No space") as caught:
        save(run, 2)
    assert caught.value.errno == errno.ENOSPC
    room[0] = taken + 10
    save(run, 2)


@POSIX
def test_metrics_of_which_a_full_disk_took_a_part_are_written_with_the_next(run: RunFolder) -> None:
    import resource

    run.metrics.append({"step": 1})
    path = run.path / "metrics.jsonl"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match="too large"):
                run.metrics.append({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    run.metrics.append({"step": 4})
    assert path.read_text() == "".join(to_line({"step": step}) for step in (1, 2, 3, 4))


def test_a_killed_process_leaves_no_lock(run: RunFolder) -> None:
    script = (
        "import sys, time; from pathlib import Path; from chargpt.store.folder import RunFolder;"
        "lock = RunFolder(Path(sys.argv[1])).locked(); lock.__enter__();"
        "print('locked', flush=True); time.sleep(60)"
    )
    process = start_cli(run.path, cwd=run.path, program=f"-c {script}")
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match="another process"), run.locked():
        pass
    process.kill()
    process.wait()
    with run.locked():
        pass


def test_pruning_keeps_checkpoints_newer_than_the_resumed_one(run: RunFolder) -> None:
    for step in (10, 20, 30):
        save(run, step)
    for step in (20, 30):
        (run.checkpoints / f"step-{step:08}" / "state.json").unlink()
    for step in (12, 14, 16):
        save(run, step)
    steps = [step_of(path) for path in list_checkpoints(run.checkpoints)]
    assert steps == [14, 16, 20, 30]
    assert load_run(run.path, "latest", "cpu").step == 16


def test_verify_finds_damaged_and_unfinished_checkpoints_and_what_is_used_instead(
    run: RunFolder,
) -> None:
    save(run, 1, best=True)
    save(run, 2)
    assert verify(run).problems == []
    newest = save(run, 3)
    unfinished = run.checkpoints / "step-00000004.tmp"
    unfinished.mkdir()
    (newest / "optimizer.safetensors").unlink()
    result = verify(run)
    assert [each.problem is None for each in result.checkpoints] == [True, True, False]
    assert any("optimizer.safetensors" in problem for problem in result.problems)
    assert "step-00000002 is used instead of latest" in result.problems
    assert result.loaded_by["best"] == run.checkpoints / "step-00000001"
    assert result.loaded_by["latest"] == run.checkpoints / "step-00000002"
    assert str(unfinished) in result.notes[0]
    save(run, 4)
    assert not unfinished.exists()


def test_a_run_whose_settings_no_config_can_hold_is_not_created(tmp_path: Path) -> None:
    characters = "".join(map(chr, range(0x20000, 0x20000 + 2 * 10**5)))
    config = CONFIG.with_values({"text.extra_characters": characters})
    with pytest.raises(RunError, match="the settings take over 200,000 characters"):
        RunFolder(tmp_path / "run").create(config, TOKENIZER)
    assert not (tmp_path / "run").exists()


def prepared_text(parent: Path) -> Path:
    folder = parent / "text"
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(b"x")
    return folder


def test_runs_share_the_files_of_a_text_or_copy_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prepared_text(tmp_path)
    linked = RunFolder(tmp_path / "a").create(CONFIG, TOKENIZER, text)
    assert (linked.path / "text" / "tokens.bin").samefile(text / "tokens.bin")
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    copied = RunFolder(tmp_path / "b").create(CONFIG, TOKENIZER, text)
    assert (copied.path / "text" / "tokens.bin").read_bytes() == b"x"


def test_force_renames_the_old_run_and_deletes_nothing(run: RunFolder, notes: list[str]) -> None:
    run_with_best(run)
    with run.kept(1):
        pass
    (run.path / "notes.txt").write_text("precious")
    with RunFolder(run.path).locked() as new:
        old = sorted(path.relative_to(run.path) for path in run.path.rglob("*"))
        new.create(CONFIG, TOKENIZER, replace=True)
    aside = run.path.with_name("run.old")
    assert notes == [f"the run that was {run.path} is now {aside}"]
    assert sorted(path.relative_to(aside) for path in aside.rglob("*")) == old
    assert load_run(aside, device="cpu").step == 1
    assert not list_checkpoints(new.checkpoints)
    save(new, 7)
    assert load_run(run.path, device="cpu").step == 7
    RunFolder(run.path).create(CONFIG, TOKENIZER, replace=True)
    assert load_run(run.path.with_name("run.old-2"), device="cpu").step == 7


def test_a_run_that_replaces_another_is_locked_at_its_new_place(run: RunFolder) -> None:
    save(run, 1)
    new = RunFolder(run.path)
    with new.locked(is_new=True):
        new.create(CONFIG, TOKENIZER, replace=True)
        with pytest.raises(RunError, match="another process"), RunFolder(run.path).locked():
            pass
        with RunFolder(run.path.with_name("run.old")).locked():
            pass
    with RunFolder(run.path).locked():
        pass


@pytest.mark.parametrize("call", range(12))
def test_a_start_that_is_killed_at_any_rename_leaves_a_whole_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    run_with_best(run)
    text = prepared_text(run.path.parent)
    calls, real = [], {name: getattr(os, name) for name in ("rename", "replace", "link")}

    def killed(name: str, *paths: Path) -> None:
        calls.append(name)
        if len(calls) > call:  # nothing runs after a kill
            raise SystemExit
        real[name](*paths)

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(killed, name))
    with contextlib.suppress(SystemExit):
        RunFolder(run.path).create(CONFIG, TOKENIZER, text, replace=True)
    monkeypatch.undo()
    aside = run.path.with_name("run.old")
    if not aside.exists():
        assert load_run(run.path, device="cpu").step == 1
        with run.locked():
            pass
        assert not (run.path / ".new").exists()
    else:
        assert load_run(aside, device="cpu").step == 1
    again = RunFolder(run.path)
    with again.locked(is_new=True):
        again.create(CONFIG, TOKENIZER, replace=True)
    assert not list_checkpoints(again.checkpoints)


def test_a_run_with_a_checkpoint_or_foreign_files_is_not_replaced(run: RunFolder) -> None:
    folder = save(run, 1)
    RunFolder(run.path.with_name("none")).require_unused()
    with pytest.raises(RunError, match="continue it with --resume, replace it with --force"):
        RunFolder(run.path).create(CONFIG, TOKENIZER)
    assert folder.exists()
    shutil.rmtree(folder)
    (run.path / ".config.yaml.0123456789ab.tmp").write_text("half")  # a process died while it wrote
    precious = run.checkpoints / "epoch10.pt"
    precious.write_bytes(b"x")
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER)
    precious.rename(run.path.with_name("away"))
    RunFolder(run.path).create(CONFIG, TOKENIZER)
    assert (run.path / "config.yaml").exists()
    assert not list(run.path.glob("*.tmp"))


def test_metrics_are_read_from_a_regular_file_only(run: RunFolder) -> None:
    os.mkfifo(run.path / "metrics.jsonl")
    with pytest.raises(RunError, match="not a regular file"):
        run.metrics.records()


def test_a_run_without_a_checkpoint_does_not_block_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    TOKENIZER.save(path / "tokenizer.json")
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    RunFolder(path).create(CONFIG, TOKENIZER)
    assert sorted(os.listdir(path)) == ["checkpoints", "config.yaml", "tokenizer.json"]
    (path / "report.html").write_text("what somebody may want")
    with pytest.raises(RunError, match="--force"):
        RunFolder(path).create(CONFIG, TOKENIZER)
    RunFolder(path).create(CONFIG, TOKENIZER, replace=True)
    assert (tmp_path / "run.old" / "report.html").exists()
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").create(CONFIG, TOKENIZER, replace=True)


def test_what_a_killed_start_has_left_does_not_block(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create(CONFIG, TOKENIZER)
    run.create(CONFIG, TOKENIZER)
    (run.path / "tokenizer.json").unlink()
    (run.path / "config.yaml").unlink()
    run.new_text.mkdir(parents=True)
    (run.new_text / "tokens.bin").write_bytes(b"x")
    with run.locked(is_new=True):
        run.create(CONFIG, TOKENIZER)
    assert (run.path / "config.yaml").exists()
    assert not (run.path / "text").exists()


def test_a_link_in_place_of_a_text_is_not_followed(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    run.new_text.parent.mkdir(parents=True)
    other.mkdir()
    (other / "tokens.bin").write_bytes(b"somebody's own")
    run.new_text.symlink_to(other)
    with pytest.raises(RunError, match="text is a symbolic link"), run.locked(is_new=True):
        pass
    assert [each.read_bytes() for each in other.iterdir()] == [b"somebody's own"]


def test_a_last_line_that_a_crash_cut_short_is_skipped_and_no_damage(run: RunFolder) -> None:
    save(run, 1)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert run.metrics.records() == [{"step": 1, "loss": 1.0}]
    assert verify(run).problems == []


def test_other_lines_of_the_metrics_survive_a_resume_however_long(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.metrics.append({"step": 1, "loss": 1.0})
    path = run.path / "metrics.jsonl"
    before = path.read_bytes() + b"x" * 2500 + b"\n" + b"y" * 1000 + b"\n\nz\n"
    path.write_bytes(before)
    run.metrics.append({"step": 2, "loss": 1.0})
    monkeypatch.setattr("chargpt.store.metrics.MAX_LINE_BYTES", 1000)
    run.metrics.truncate_after(1)
    assert path.read_bytes() == before


def test_what_is_no_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("the sea")
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "new").create(CONFIG, TOKENIZER)
    for name, message in (
        ("nothing", "there is no folder .*/nothing; train one with `chargpt train`, or name"),
        ("empty", "there is no run in .*; train one with `chargpt train`, or name another"),
        ("novel.txt", r"novel\.txt is a file, not a run; name the run's folder, such as runs/n"),
        ("new", "no checkpoint yet.*`chargpt train TEXT --out .*/new` trains it again"),
    ):
        with pytest.raises(RunError, match=message):
            load_run(tmp_path / name)


def test_serialize_gives_the_bytes_of_safetensors_without_a_copy() -> None:
    tensors = {
        "wide": torch.randn(3, 5),
        "transposed": torch.randn(4, 2).mT,
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


def test_json_is_indented_and_sorted() -> None:
    assert to_json({"b": "ж", "a": 1}) == '{\n  "a": 1,\n  "b": "ж"\n}\n'.encode()


def test_checkpoints_are_listed_in_the_order_of_their_steps(run: RunFolder) -> None:
    for step in (99_999_999, 100_000_000):
        save(run, step)
    (run.checkpoints / "step-1").mkdir()
    shutil.copytree(run.checkpoints / "step-100000000", run.checkpoints / "step-copy")
    steps = [step_of(path) for path in list_checkpoints(run.checkpoints)]
    assert steps == [99_999_999, 100_000_000]


def test_saving_recreates_a_deleted_checkpoint_folder(run: RunFolder) -> None:
    save(run, 1)
    shutil.rmtree(run.checkpoints)
    save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 2


def test_a_failed_deletion_does_not_stop_a_save(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.rmdir", failing(errno.EACCES))
        for step in (1, 2, 3, 4):
            save(run, step)
    left = sorted(path.name for path in run.checkpoints.glob("*.tmp"))
    assert left == ["step-00000001.old.tmp", "step-00000002.old.tmp"]
    save(run, 5)
    assert not list(run.checkpoints.glob("*.tmp"))


def test_creating_a_run_creates_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "of" / "today" / "run"
    save(RunFolder(path).create(CONFIG, TOKENIZER), 1)
    assert newest_run(tmp_path / "of") == path


def test_a_file_is_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        RunFolder(tmp_path / "file").create(CONFIG, TOKENIZER)
    with pytest.raises(RunError, match=r"file/run cannot be written \(Not a directory\); name"):
        RunFolder(tmp_path / "file" / "run").create(CONFIG, TOKENIZER)


def test_verify_lists_sizes_and_each_problem_once(run: RunFolder) -> None:
    folder = save(run, 1, best=True)
    for name in ("model.safetensors", "state.json"):
        (checked,) = verify(run).checkpoints
        assert checked.size == sum(path.stat().st_size for path in folder.iterdir())
        (folder / name).unlink()
    result = verify(run)
    (checked,) = result.checkpoints
    assert result.problems == [
        checked.problem,
        f"no intact checkpoint for best: {checked.problem}",
        f"no intact checkpoint for latest: {checked.problem}",
    ]
    assert result.loaded_by == {"best": None, "latest": None}


# -- what cannot be read, and what is not ours ------------------------------------------------


def run_with_best(run: RunFolder) -> RunFolder:
    """Save steps 1 (the best), 2 and 3 with keep_last 2; step 1 remains only as the best."""
    save(run, 1, best=True)
    save(run, 2)
    save(run, 3)
    return run


def test_pointers_of_earlier_versions_and_leftovers_of_a_kill_are_files_of_ours(
    run: RunFolder,
) -> None:
    run_with_best(run)
    for name in ("best.json", "latest.json"):
        (run.checkpoints / name).write_text('{"checkpoint": "step-00000002"}')
    (run.checkpoints / "step-00000003" / ".keep.0123456789ab.tmp").touch()
    steps = [load_run(run.path, which, "cpu").step for which in ("best", "latest", "2")]
    assert steps == [1, 3, 2]
    assert find_foreign_file(run.path) is None


@pytest.mark.parametrize("damage", ["manifest.json", "state.json", "model.safetensors"])
def test_if_the_newest_checkpoint_is_damaged_the_best_is_that_of_the_one_before(
    run: RunFolder, damage: str
) -> None:
    run_with_best(run)
    (run.checkpoints / "step-00000003" / damage).unlink()
    assert load_run(run.path, "best", "cpu").step == 1
    latest = load_run(run.path, "latest", "cpu")
    assert latest.step == 2
    assert f"step-00000003/{damage} cannot be read" in latest.notes[0]
    assert latest.notes[1] == "step-00000002 is used instead"
    save(run, 4)
    assert (run.checkpoints / "step-00000001").is_dir()


def test_saving_a_step_again_never_leaves_it_without_a_checkpoint(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, missing = save(run, 1), Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        missing.append(not (folder / "manifest.json").exists())
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    save(run, 1, fill=0.25)
    assert missing
    assert not any(missing)
    saved, skipped = load_checkpoint(run.checkpoints, "latest")
    assert (float(saved.model["head.weight"][0, 0]), skipped) == (0.25, [])
    assert [path.name for path in run.checkpoints.iterdir() if path.is_dir()] == [folder.name]


def test_runs_are_listed_by_their_last_save_and_beside_folders_that_cannot_be_read(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)
    os.utime(run.checkpoints / "step-00000001" / "manifest.json", (1, 1))
    other = RunFolder(tmp_path / "other").create(CONFIG, TOKENIZER)
    save(other, 2)
    save(other, 3)
    assert load_run(other.path, device="cpu").step == 3  # none is known as the best
    with run.kept(1):  # changes the folder of the checkpoint, and saves nothing
        pass
    (tmp_path / "lost+found").mkdir()
    monkeypatch.setattr(os, "listdir", failing_at(os.listdir, errno.EACCES, "lost+found"))
    assert [each.run for each in list_runs(tmp_path)] == [other.path, run.path]
    assert newest_run(tmp_path) == other.path
    monkeypatch.setattr("chargpt.store.commit.read_json", failing(errno.EIO))
    assert [each.status for each in list_runs(tmp_path)] == ["unreadable", "unreadable"]


def test_a_step_that_cannot_be_saved_again_keeps_its_checkpoint(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = save(run, 1), os.rename

    def rename(source: Path, target: Path) -> None:
        if target == folder and ".old" not in source.name:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    with run.kept(1):
        pass
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        save(run, 1, fill=0.25)
    saved, skipped = load_checkpoint(run.checkpoints, "latest")
    assert (float(saved.model["head.weight"][0, 0]), skipped) == (0.5, [])
    assert run.is_kept(1)
    assert [path.name for path in run.checkpoints.iterdir() if path.is_dir()] == [folder.name]


def test_a_kill_while_a_checkpoint_is_replaced_loses_nothing(
    run: RunFolder, notes: list[str]
) -> None:
    folder = save(run, 1)
    with run.kept(1):
        pass
    aside = folder.with_name(f"{folder.name}.old.tmp")
    folder.rename(aside)  # killed between the two renames
    with run.locked():
        assert run.is_kept(1)
        run.load("latest")
        assert not notes
        shutil.copytree(folder, aside)  # killed after them
        (folder / "keep").unlink()
    with run.locked():
        assert run.is_kept(1)
        save(run, 2)
    assert not aside.exists()


def test_a_checkpoint_is_no_run(run: RunFolder) -> None:
    folder = save(run, 1)
    assert list_runs(run.path) == []
    for path in (run.checkpoints, folder):
        with pytest.raises(RunError, match="there is no run in"):
            open_run(path)


def test_a_tokenizer_is_read_from_a_regular_file_only(run: RunFolder) -> None:
    save(run, 1)
    path = run.path / "tokenizer.json"
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(RunError, match="not a regular file"):
        CharTokenizer.load(path)
    assert any("not a regular file" in problem for problem in verify(run).problems)


def test_too_little_memory_is_no_damage(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1)
    too_little = Mock(side_effect=DeviceError("too little memory"))
    monkeypatch.setattr("chargpt.store.checkpoint.require_memory", too_little)
    with pytest.raises(DeviceError, match=r"^too little memory$"):
        run.load("latest")


def test_a_checkpoint_deleted_while_it_is_read_is_no_damage(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)
    save(run, 2)
    real, saves = checkpoint.read_checkpoint, iter((3, 4))

    def read(folder: Path, *, optimizer: bool) -> Checkpoint:
        for step in saves:  # with keep_last 2, the second one deletes step 2
            save(run, step)
        return real(folder, optimizer=optimizer)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read)
    saved, skipped = load_checkpoint(run.checkpoints, "latest")
    assert (saved.state.step, skipped) == (4, [])


def test_a_run_with_a_damaged_checkpoint_is_listed_and_found_among_others(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_best(run)
    other = RunFolder(run.path.with_name("other")).create(CONFIG, TOKENIZER)
    save(other, 1)
    (run.checkpoints / "step-00000001" / "manifest.json").unlink()
    assert {each.status for each in list_runs(run.path.parent)} == {"unfinished"}
    assert newest_run(run.path.parent) == other.path
    monkeypatch.setattr(checkpoint, "entry_names", failing(errno.EACCES))
    with pytest.raises(RunError, match="there is no run"):
        newest_run(run.path.parent)


def test_if_the_best_is_gone_the_newest_takes_its_place(run: RunFolder) -> None:
    run_with_best(run)
    saved = run.load("latest")
    assert load_latest(run).state == saved.state
    shutil.rmtree(run.checkpoints / "step-00000001")
    loaded = load_run(run.path, "best", "cpu")
    assert loaded.step == 3
    assert "step-00000001, the best checkpoint, is missing" in loaded.notes[0]
    state = load_latest(run).state
    assert (state.step, state.best_step, state.best_nats_per_char) == (3, None, None)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_cannot_be_read_now_is_neither_skipped_nor_deleted(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run_with_best(run)
    before = sorted(run.path.rglob("*"))
    for end, use in (
        ("step-00000003/state.json", lambda: run.load("best")),
        ("step-00000003/state.json", lambda: run.load("latest")),
        ("step-00000003/model.safetensors", lambda: run.load("latest")),
        ("metrics.jsonl", run.metrics.records),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("os.stat", failing_at(os.stat, number, end))
            with pytest.raises(UnreadableError, match="try again"):
                use()
    with monkeypatch.context() as patched:
        patched.setattr("os.stat", failing_at(os.stat, number, "metrics.jsonl"))
        with pytest.raises(OSError, match=os.strerror(number)):
            run.metrics.truncate_after(1)
    assert sorted(run.path.rglob("*")) == before


def test_truncating_the_metrics_keeps_lines_that_are_not_of_a_later_step(run: RunFolder) -> None:
    path = run.path / "metrics.jsonl"
    lines = ['{"step": 1, "loss": 1}', "damaged", '{"step": 3, "loss": 1}', '{"step": 2, "x": 1}']
    path.write_text("\n".join(lines))
    run.metrics.truncate_after(2)
    assert path.read_text() == "\n".join([lines[0], lines[1], lines[3], ""])


@pytest.mark.parametrize(
    "line",
    [
        '{"step": NaN}',
        '{"step": 1, "loss": Infinity}',
        '{"step": 1, "loss": 1e400}',
        '{"step": 1, "loss": ' + "9" * 400 + "}",
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1000000000000000000000}',
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "sample": 5}',
        '{"step": 1, "sample": "\\ud800"}',
        '{"step": 1, "loss": null}',
        "[1]",
        "{" * 10_000,
        pytest.param("[" * 100_000, id="deeply nested"),
        "\udcff\udcfe",  # bytes that are not UTF-8
    ],
)
def test_hostile_metrics_are_damaged_lines(run: RunFolder, line: str) -> None:
    content = f'{line}\n{{"step": 1, "loss": 2.0}}\n'
    (run.path / "metrics.jsonl").write_bytes(os.fsencode(content))
    assert run.metrics.records() == [{"step": 1, "loss": 2.0}]
    assert run.metrics.problems(RunState(1)) == [
        f"{run.path / 'metrics.jsonl'} has damaged lines: 1 of 2"
    ]


def test_a_log_too_long_for_memory_is_thinned_evenly_but_for_its_validations(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = 100 * (len(to_line({"step": 100, "val_nats_per_char": 1.0})) + RECORD_BYTES)
    monkeypatch.setattr("chargpt.store.metrics.MAX_KEPT_BYTES", n_bytes)
    for step in range(1, 1001):
        kind = "val_nats_per_char" if step % 100 == 0 else "loss"
        run.metrics.append({"step": step, kind: 1.0})
    records = run.metrics.records()
    assert 40 < len(records) <= 100
    validated = [r["step"] for r in records if "val_nats_per_char" in r]
    assert validated == list(range(100, 1001, 100))
    gaps = np.diff([r["step"] for r in records if "loss" in r])
    assert gaps.max() <= 2 * np.median(gaps)


def test_verify_finds_damage_in_the_files_beside_the_checkpoints(run: RunFolder) -> None:
    run_with_best(run)
    assert verify(run).problems == []
    (run.path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\njunk\n')
    CharTokenizer.fit("another").save(run.path / "tokenizer.json")
    run.write_config(CONFIG.with_values({"seed": 5}))
    result = verify(run)
    assert result.problems == [
        f"{run.path / 'tokenizer.json'} is not the tokenizer of step-00000003",
        f"{run.path / 'metrics.jsonl'} has damaged lines: 1 of 2",
        f"{run.path / 'metrics.jsonl'} lacks the training loss of 2 of 3 steps",
    ]
    assert result.notes == [
        f"{run.path / 'config.yaml'} differs from the checkpoint in seed; the checkpoint's "
        "settings are used, and -s KEY=VALUE changes them"
    ]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("adamw.exp_avg.embedding.weight", torch.zeros(3)),
        ("adamw.exp_avg_sq.embedding.weight", torch.full((8, 16), math.nan)),
        ("muon.momentum.embedding.weight", torch.zeros(16, 8)),
    ],
)
def test_verify_finds_an_optimizer_of_another_shape_or_not_finite(
    run: RunFolder, name: str, tensor: torch.Tensor
) -> None:
    folder = save(run, 1)
    rewrite(folder, "optimizer.safetensors", safetensors.torch.save({name: tensor}))
    assert any(name in problem for problem in verify(run).problems)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16])
def test_weights_of_another_type_than_float32_are_rejected(
    run: RunFolder, dtype: torch.dtype
) -> None:
    folder = save(run, 1)
    weights = run.load("1").model
    changed = {name: tensor.to(dtype) for name, tensor in weights.items()}
    rewrite(folder, "model.safetensors", safetensors.torch.save(changed))
    with pytest.raises(RunError, match=f"is {dtype}, not float32"):
        run.load("1")


def test_a_run_without_its_config_is_still_a_run(run: RunFolder) -> None:
    save(run, 1)
    (run.path / "config.yaml").unlink()
    assert load_run(run.path, device="cpu").step == 1
    assert newest_metadata(open_run(run.path).checkpoints)[0] == CONFIG


FOREIGN = (
    *("notes.txt", "draft.tmp", "data.tmp/x", "checkpoints/model.pt", ".new/notes", "text/notes"),
    *("checkpoints/step-00000001/notes.txt", "checkpoints/step-00000009.tmp/x", "tensorboard/x"),
    *("checkpoints/step-00000002.tmp/x", ".config.yaml.tmp", "checkpoints/latest.json.bak"),
)


@pytest.mark.parametrize("name", FOREIGN)
def test_locking_and_saving_leave_files_of_others(run: RunFolder, name: str) -> None:
    run_with_best(run)
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    with run.locked():
        for step in range(4, 10):
            save(run, step, best=step == 5)
    assert find_foreign_file(run.path) == name
    with pytest.raises(RunError, match="continue it with --resume"):
        RunFolder(run.path).create(CONFIG, TOKENIZER)
    assert path.read_text() == "precious"


OURS = ("config.yaml", "metrics.jsonl", "report.html", "tokenizer.json")


@pytest.mark.parametrize("name", ["thesis.tex", *OURS])
def test_a_folder_that_is_no_run_is_not_replaced_whatever_its_file_is_called(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("{}")
    for replace in (False, True):
        with pytest.raises(RunError, match=f"holds '{name}', which no run writes; name another"):
            RunFolder(tmp_path).create(CONFIG, TOKENIZER, replace=replace)
    assert (tmp_path / name).read_text() == "{}"


def test_a_reader_beside_a_saving_run_sees_no_damage(run: RunFolder) -> None:
    run_with_best(run)
    reader, stop = RunFolder(run.path), threading.Event()

    def write() -> None:
        step = 4
        while not stop.is_set():
            save(run, step, best=step % 2 == 0)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(60):
            which = "best" if number % 2 else "latest"
            assert load_checkpoint(reader.checkpoints, which)[1] == []
    finally:
        stop.set()
        writer.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_linked", [False, True])
def test_the_first_checkpoint_waits_until_the_text_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_linked: bool
) -> None:
    flushed, real, may_end = list[str](), os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/run/text/" in name and not may_end.wait(30):
            raise TimeoutError
        real(descriptor)
        flushed.append(name)

    settings = Config().with_values({"text.documents": "lines"}).text
    run = RunFolder(tmp_path / "run")
    folder = tmp_path / "prepared" if is_linked else run.new_text
    corpus = prepare(find_text(settings, "hello world\nhello\n"), settings, folder)
    monkeypatch.setattr("os.fsync", fsync)
    run.create(CONFIG, corpus.tokenizer, folder)  # does not wait
    saved = threading.Thread(target=save, args=(run, 1))
    saved.start()
    saved.join(0.2)
    assert not any("checkpoints" in name for name in flushed)
    may_end.set()
    saved.join(30)
    text = [str(run.path / "text" / name) for name in ("lines.bin", "meta.json", "tokens.bin")]
    first = next(i for i, name in enumerate(flushed) if "checkpoints" in name)
    assert sorted(name for name in flushed[:first] if "/run/text/" in name) == text
    assert load_run(run.path, device="cpu").step == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_text_is_on_disk_before_a_run_that_has_none_gets_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = list[str](), os.fsync
    monkeypatch.setattr(
        "os.fsync",
        lambda number: (flushed.append(os.readlink(f"/proc/self/fd/{number}")), real(number))[1],
    )
    prepare(find_text(Config().text, "hello world"), Config().text, run.new_text)
    run.adopt_text()
    assert {str(run.new_text / name) for name in ("meta.json", "tokens.bin")} <= {*flushed}
    assert flushed[-1] == str(run.path)


def test_no_checkpoint_is_saved_if_the_text_cannot_be_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run = Config().text, RunFolder(tmp_path / "run")
    corpus = prepare(find_text(settings, "hello world"), settings, run.new_text)
    flushed: Future[None] = Future()
    flushed.set_exception(OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr("chargpt.store.folder.sync_files", lambda *_: flushed)
    run.create(CONFIG, corpus.tokenizer, run.new_text)
    for _ in range(2):  # the system reports it once
        with pytest.raises(OSError, match="Input/output"):
            save(run, 1)
    assert not list_checkpoints(run.checkpoints)


@POSIX
def test_a_file_system_without_locks_or_flushing_of_folders_is_used_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    monkeypatch.setattr("os.fsync", fsync)
    run = RunFolder(tmp_path / "run")
    with run.locked(is_new=True):
        save(run.create(CONFIG, TOKENIZER), 1)
    assert "has no locks" in notes[0]
    assert load_run(run.path, device="cpu").step == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere in another unit")
def test_a_small_file_with_the_config_of_a_large_model_allocates_nothing(run: RunFolder) -> None:
    folder = save(run, 1)
    large = CONFIG.with_values({"model.n_embd": 2048, "model.n_layer": 8})
    rewrite(folder, "config.yaml", large.to_yaml().encode())
    resource = pytest.importorskip("resource", reason="measures memory")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match="do not match its config"):
        run.load("1")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB, not 6 GB


def test_several_metrics_are_written_with_one_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, opened = MetricsLog(tmp_path / "metrics.jsonl"), Mock(wraps=open)
    monkeypatch.setattr(metrics, "open", opened, raising=False)
    records = [{"step": step, "loss": 1.5} for step in range(1, 11)]
    log.append(*records)
    assert opened.call_count == 1
    assert log.records() == records


def test_a_run_of_the_first_version_gives_the_logits_that_it_gave_then() -> None:
    golden = REPOSITORY / "tests" / "golden" / "0.1.0"
    stored = safetensors.torch.load_file(golden / "logits.safetensors")
    with torch.no_grad():
        logits = load_run(golden / "run", device="cpu").model(stored["tokens"])
    torch.testing.assert_close(logits, stored["logits"], rtol=1e-5, atol=1e-5)
    assert not verify(RunFolder(golden / "run")).problems
