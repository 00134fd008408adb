"""Runs from strangers, and folders that change under a training process.

Nothing is followed through a link, what decides a number has a checksum, and a process writes only
to the folder that it has locked.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from conftest import POSIX, Cli, refusal
from saving import CONFIG, TOKENIZER, failing_at, flip, rewrite, save
from shared_runs import MIXED_SETTINGS

import chargpt
from chargpt.analysis.report import write_report
from chargpt.errors import RunError, TextError, UnsavedError
from chargpt.inference.scoring import score
from chargpt.store import commit
from chargpt.store.checkpoint import FILES, RunState, read_metadata
from chargpt.store.folder import RunFolder
from chargpt.store.layout import has_checkpoint
from chargpt.store.listing import list_runs
from chargpt.store.metrics import VALIDATION, to_line
from chargpt.store.run import load_run, newest_run, open_run
from chargpt.store.verify import verify
from chargpt.training.start import Request, open_session

pytestmark = POSIX
PLACES = (
    *("config.yaml", "tokenizer.json", "metrics.jsonl", "mixture.safetensors", "report.html"),
    *("play.html", ".lock", ".new", ".new/text", "text", "text/tokens.bin", "text/meta.json"),
    *("tensorboard", "tensorboard/events.out.tfevents.1.vm.2.0", ".report.html.0123456789ab.tmp"),
    *("checkpoints", "checkpoints/best.json", "checkpoints/step-00000001"),
    *(f"checkpoints/step-00000002/{name}" for name in (*FILES, "keep")),
    *("checkpoints/step-00000003", "checkpoints/step-00000003.77.tmp"),
    *("checkpoints/step-00000001.old.tmp", "checkpoints/.best.json.0123456789ab.tmp"),
)
QUICK = {
    "model.n_layer": 1,
    "model.n_embd": 16,
    "model.n_head": 1,
    "model.block_size": 16,
    "train.max_steps": 400,
    "train.batch_size": 2,
    "train.evaluate_every": 100,
    "train.evaluation_tokens": 50,
    "train.save_every": 5,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "mine").create(CONFIG, TOKENIZER)


def contents(folder: Path) -> dict[str, object]:
    """Return the content of each file, and the target of each link, below a folder."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.name != ".lock":
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize("kind", ["a file", "a folder", "the same elsewhere", "nothing", "itself"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_holds_a_link_is_refused_and_the_link_not_followed(
    place: str, kind: str, run: RunFolder, tmp_path: Path
) -> None:
    save(run, 1, best=True)
    save(run, 2)
    (run.path / "text").mkdir()
    victim = tmp_path / "victim"
    shutil.copytree(run.path, victim / "same")
    (victim / "file").write_text("precious")
    path = run.path / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = {
        "a file": victim / "file",
        "a folder": victim,
        "the same elsewhere": victim / "same" / place,
        "nothing": victim / "nothing",
        "itself": path,
    }
    path.symlink_to(targets[kind])
    before = contents(tmp_path)

    def locked() -> None:
        with run.locked():
            pass

    uses: tuple[Callable[[], object], ...] = (
        lambda: load_run(run.path, device="cpu"),
        lambda: open_run(run.path),
        locked,
        lambda: RunFolder(run.path).create(CONFIG, TOKENIZER, replace=True),
        lambda: RunFolder(run.path).create(CONFIG, TOKENIZER),
    )
    for use in uses:
        with pytest.raises(RunError, match="is a symbolic link, a pipe or a device, which a run"):
            use()
    assert has_checkpoint(run.path)  # what a link leads to may be on an unmounted disk
    assert [each.status for each in list_runs(run.path.parent)] in (["damaged"], [])
    with pytest.raises(RunError, match="there is no run under"):
        newest_run(run.path.parent)
    with pytest.raises(OSError, match="link"):
        run.require_own()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["gpt", "curves.svg"])
def test_a_comparison_follows_no_link_in_its_folder(
    name: str, cli: Cli, verse: Path, mixed_run: Path
) -> None:
    shutil.copytree(mixed_run, "victim")
    before = contents(Path("victim"))
    Path("both").mkdir()
    target = Path("victim") if name == "gpt" else Path("victim", "new.svg")
    Path("both", name).symlink_to(target.absolute())
    words = ("--out", "both", "--resume", "--models", "bigram,gpt", "-s", "train.max_steps=1")
    message = refusal(cli("compare", verse, *words))
    assert f"both/{name} is a symbolic link, and none is followed" in message
    assert contents(Path("victim")) == before


def test_the_newest_run_is_none_that_a_link_leads_to(run: RunFolder, tmp_path: Path) -> None:
    save(run, 1)
    for path, target in (("runs/link", run.path), ("runs/group", run.path.parent)):
        link = tmp_path / "other" / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    with pytest.raises(RunError, match="there is no run under"):
        newest_run(tmp_path / "other" / "runs")
    assert list_runs(tmp_path / "other") == []
    named = tmp_path / "other" / "runs" / "link"
    assert load_run(named, device="cpu").step == 1
    assert newest_run(tmp_path / "other" / "runs" / "group") == named.with_name("group") / "mine"


def test_a_link_of_another_name_in_a_run_stays_and_hinders_nothing(
    run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("precious")
    (run.path / "notes").symlink_to(tmp_path / "notes")
    (run.path / "more").symlink_to(tmp_path)
    save(run, 1)
    with run.locked():
        save(run, 2)
    assert load_run(run.path, "latest", "cpu").step == 2
    assert [each.run for each in list_runs(tmp_path)] == [run.path]
    copy = RunFolder(tmp_path / "copy")
    run.copy_to(copy, 1)
    assert (copy.path / "notes").is_symlink()


def test_a_locked_folder_whose_inode_is_numbered_anew_has_not_moved(run: RunFolder) -> None:
    with run.locked():
        run.identity = (0, 0)  # as on a file system in user space
        run.follow()
        assert run.moved_from is None
        save(run, 1)


def test_an_old_start_whose_deletion_is_killed_is_no_run_without_checkpoints(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(run.path).create(CONFIG, TOKENIZER)
    assert not (run.path / "config.yaml").exists()
    RunFolder(run.path).create(CONFIG, TOKENIZER)


def train_until(folder: Path, action: Callable[[], object]) -> chargpt.Run:
    """Train into a folder, calling a function once after 20 steps."""

    def on_report(report: Any) -> None:
        if report.step == 20:
            action()

    return chargpt.train(text=TEXT, settings=QUICK, out=folder, device="cpu", on_report=on_report)


TEXT = "the sea and the light. " * 60


@pytest.mark.parametrize("has_other", [False, True])
def test_a_run_that_is_renamed_while_it_trains_is_saved_there_and_stops(
    has_other: bool, tmp_path: Path
) -> None:
    path, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    other: dict[str, object] = {}

    def move() -> None:
        path.rename(moved)
        if has_other:
            save(RunFolder(path).create(CONFIG, TOKENIZER), 7)
            other.update(contents(path))

    with pytest.raises(RunError) as stopped:
        train_until(path, move)
    assert f"{path} was renamed to {moved} during training, which stopped at" in str(stopped.value)
    assert f"resume with\n  chargpt.train('{moved}', start='resume')" in str(stopped.value)
    assert contents(path) == other if has_other else not path.exists()
    assert verify(RunFolder(moved)).problems == []
    at = load_run(moved, "latest", "cpu").step
    assert 20 <= at <= 40
    more = {"train.max_steps": at + 2}
    assert chargpt.train(moved, settings=more, start="resume", device="cpu").folder == moved


@pytest.mark.parametrize("has_other", [False, True])
def test_a_run_that_is_deleted_while_it_trains_is_saved_as_a_copy(
    has_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, asked = tmp_path / "run", list[str]()
    other: dict[str, object] = {}
    request = Request(text=TEXT, settings=QUICK, out=path)

    def train() -> None:
        with open_session(request) as session:
            for report in session.reports(wait_for_space=lambda cause: bool(asked.append(cause))):
                if report.step == 20:
                    shutil.rmtree(path)
                    if has_other:
                        save(RunFolder(path).create(CONFIG, TOKENIZER), 7)
                        (path / "notes").write_text("of the other")
                        other.update(contents(path))

    with pytest.raises(UnsavedError) as end:
        train()
    (copy,) = tmp_path.glob("chargpt-*/run")
    assert "(No such file or directory); it is saved in" in str(end.value)
    assert f"chargpt train --resume {copy}" in str(end.value)
    assert asked == []  # space would not help
    assert load_run(copy, "latest", "cpu").step < 40
    assert not (copy / "notes").exists()
    assert contents(path) == other if has_other else not path.exists()


def test_what_is_written_for_a_loaded_run_reaches_no_other_one(
    run: RunFolder, tmp_path: Path
) -> None:
    save(run, 1)
    loaded = load_run(run.path, "latest", "cpu")
    assert loaded.writable_folder().path == run.path
    (run.path / "report.html").symlink_to(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"report\.html in it is a link"):
        loaded.writable_folder()
    run.path.rename(tmp_path / "moved")
    with pytest.raises(RunError, match="it is no longer at its path"):
        loaded.writable_folder()
    save(RunFolder(run.path).create(CONFIG, TOKENIZER), 1)
    with pytest.raises(RunError, match="it is no longer at its path"):
        loaded.writable_folder()


def test_a_link_put_into_a_run_while_it_trains_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, victim = tmp_path / "run", tmp_path / "victim"

    def link() -> None:
        (path / "checkpoints").rename(victim)
        (path / "checkpoints").symlink_to(victim)

    before: dict[str, object] = {}
    with pytest.raises(UnsavedError, match="checkpoints in it is a link"):
        train_until(path, lambda: (link(), before.update(contents(victim))))
    assert contents(victim) == before
    assert sum("cannot write the" in note for note in notes) == 1


def test_a_run_without_its_checkpoints_is_not_begun_anew(
    cli: Cli, verse: Path, tmp_path: Path
) -> None:
    words = [word for key, value in QUICK.items() for word in ("-s", f"{key}={value}")]
    command = ["train", verse, "--out", "r", "--resume", *words, "-s", "train.max_steps=4"]
    assert cli(*command).returncode == 0
    Path("r/checkpoints").rename("on-a-disk-that-is-not-mounted")
    before = contents(Path("r"))
    assert "whose folder checkpoints is missing; restore it" in refusal(cli(*command))
    assert "r/checkpoints is missing; restore it" in refusal(cli("sample", "r"))
    assert contents(Path("r")) == before
    Path("on-a-disk-that-is-not-mounted").rename("r/checkpoints")
    assert cli(*command[:-1], "train.max_steps=6").returncode == 0


def test_every_flipped_bit_of_the_metrics_is_seen_or_changes_no_number(
    run: RunFolder, notes: list[str]
) -> None:
    records = [{"step": 1, "loss": 2.5, "seconds": 0.5}, {"step": 2, "sample": "the\nlight"}]
    run.metrics.append(*records)
    intact = run.metrics.path.read_bytes()
    seen = 0
    for bit in range(8 * len(intact)):
        flip(run.metrics.path, bit)
        found = run.metrics.records()
        known = [
            {key: each[key] for key in each.keys() & {"step", "loss", "sample"}} for each in found
        ]
        expected = [{key: each[key] for key in each.keys() - {"seconds"}} for each in records]
        if known != expected:
            assert notes == [f"damaged lines of {run.metrics.path}, left out: 1"] or (
                notes == [f"damaged lines of {run.metrics.path}, left out: 2"]
            )
            assert run.metrics.problems(RunState(1))
            seen += 1
        notes.clear()
        run.metrics.path.write_bytes(intact)
    assert seen > 0.9 * 8 * len(intact)


def test_lines_of_earlier_versions_have_no_checksum_and_later_ones_must(run: RunFolder) -> None:
    run.metrics.path.write_text('{"step": 1, "loss": 3.0}\n')
    run.metrics.append({"step": 2, "loss": 2.0})
    assert [record["loss"] for record in run.metrics.records()] == [3.0, 2.0]
    with open(run.metrics.path, "a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    assert [record["loss"] for record in run.metrics.records()] == [3.0, 2.0]
    assert "damaged lines: 1 of 3" in " ".join(run.metrics.problems(RunState(2)))


def test_a_log_without_its_checksums_or_of_another_run_is_damaged(
    mixed_run: Path, tmp_path: Path, notes: list[str]
) -> None:
    run = RunFolder(Path(shutil.copytree(mixed_run, tmp_path / "run")))
    loaded, log = load_run(run.path, device="cpu"), run.metrics.path
    intact = log.read_text()
    assert verify(run).problems == []
    stripped = re.sub(r', "crc32": \d+', "", intact)
    log.write_text(stripped.replace('"loss": 2', '"loss": 0'))
    assert "has damaged lines: 43 of 43" in verify(run).problems[0]
    assert loaded.records() == []
    assert "left out: 43" in notes[-1]
    records = [*map(json.loads, stripped.splitlines())]
    others = [{**each, **({VALIDATION: 0.5} if VALIDATION in each else {})} for each in records]
    log.write_text("".join(map(to_line, others)))
    (problem,) = verify(run).problems
    assert "it was changed, or is of another run" in problem
    log.write_text(intact + to_line({"step": 3, "loss": 0.5}))
    assert verify(run).problems == [f"{log} repeats steps: 1"]


@pytest.mark.parametrize("n_keys", [0, 10, 1000, 100_000])
def test_metrics_of_any_kind_take_bounded_memory(
    n_keys: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chargpt.store.metrics.MAX_KEPT_BYTES", 1_000_000)
    with open(run.metrics.path, "w") as file:
        for number in range(max(1, 300_000 // (n_keys + 3))):
            keys = "".join(f',"{number}.{key}":1' for key in range(n_keys))
            file.write(f'{{"step":{number}{keys}}}\n')
    tracemalloc.start()
    try:
        assert run.metrics.records()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 15_000_000
    assert peak < 40_000_000


def test_a_mixture_of_complex_numbers_is_refused(mixed_run: Path, tmp_path: Path) -> None:
    shutil.copytree(mixed_run, tmp_path / "run")
    path = tmp_path / "run" / "mixture.safetensors"
    arrays = safetensors.numpy.load_file(path)
    del arrays["sha256"]
    arrays["output"] = arrays["output"].astype("complex64")
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(RunError, match=r"mixture\.safetensors cannot be used"):
        chargpt.with_mixture(load_run(tmp_path / "run", device="cpu"))
    assert "mixture.safetensors cannot be used" in " ".join(
        verify(RunFolder(tmp_path / "run")).problems
    )


def test_every_flipped_bit_of_a_mixture_is_seen_or_changes_no_number(
    mixed_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixed_run, tmp_path / "run")
    path = tmp_path / "run" / "mixture.safetensors"

    def losses() -> object:
        mixed = chargpt.with_mixture(load_run(tmp_path / "run", device="cpu"))
        return score(mixed, "the sea and the light").bits_per_char

    intact, expected = path.read_bytes(), losses()
    errors = []
    for bit in range(3, 8 * len(intact), len(intact) // 8):
        flip(path, bit)
        try:
            assert losses() == expected
        except RunError as error:
            errors.append(str(error))
        path.write_bytes(intact)
    assert len(errors) > 50
    assert all("cannot be used" in error or "is that of" in error for error in errors)


def test_a_checkpoint_that_is_kept_while_it_is_being_deleted_stays(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commit._set_aside

    def keep_first(folder: Path) -> Path:
        if folder.name == "step-00000001":
            with run.kept(1):
                pass
        return real(folder)

    for step in (1, 2):
        save(run, step)
    monkeypatch.setattr(commit, "_set_aside", keep_first)
    for step in (3, 4):
        save(run, step)
    assert run.load("1").state.step == 1
    assert run.is_kept(1)


def test_compress_keeps_the_checkpoint_before_it_compresses(
    cli: Cli, mixed_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chargpt.cli.compress as command

    shutil.copytree(mixed_run, "r")
    Path("t.txt").write_text("the sea")
    step = load_run("r", device="cpu").step
    real, seen = command.pack, []

    def pack(*arguments: Any) -> bytes:
        seen.append(RunFolder(Path("r")).is_kept(step))
        if len(seen) == 1:
            return bytes(real(*arguments))
        (Path("r") / "mixture.safetensors").unlink()  # as if it had been replaced
        return bytes(real(*arguments))

    monkeypatch.setattr(command, "pack", pack)
    for number in (1, 2):
        done = cli("compress", "r", "t.txt", f"{number}.cgpt", "--keep", "--mixture")
        assert (done.returncode == 0) == (number == 1), done.stderr
        assert Path(f"{number}.cgpt").exists() == (number == 1)
        if number == 1:
            (Path("r") / "checkpoints" / f"step-{step:08d}" / "keep").unlink()
    assert seen == [True, True]
    assert not RunFolder(Path("r")).is_kept(step)


def test_a_report_reaches_no_run_that_was_put_in_place_of_its_own(
    mixed_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(mixed_run, path)
    run = load_run(path, device="cpu")
    corpus = run.corpus()
    path.rename(tmp_path / "moved")
    shutil.copytree(mixed_run, path)
    before = contents(path)
    with pytest.raises(RunError, match="it is no longer at its path"):
        write_report(run, corpus=corpus)
    assert contents(path) == before


def test_verify_names_a_page_of_the_run_that_was_changed(
    cli: Cli, mixed_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixed_run, "r")
    assert cli("report", "r").returncode == 0
    assert cli("play", "r", "--no-open").returncode == 0
    intact = cli("verify", "r").stdout
    assert "was changed" not in intact
    for name in ("report.html", "play.html"):
        page = Path("r", name)
        content = page.read_bytes()
        flip(page, 8 * len(content) // 2)
        assert (
            f"r/{name} was changed, or written by an earlier version" in cli("verify", "r").stdout
        )
        page.write_bytes(content)
    assert cli("verify", "r").stdout == intact


def test_a_folder_stays_locked_when_its_lock_is_deleted(run: RunFolder) -> None:
    with run.locked():
        (run.path / ".lock").unlink()
        with pytest.raises(RunError, match="another process is training into"):
            RunFolder(run.path).locked().__enter__()
    with RunFolder(run.path).locked():
        pass


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "my notes"),
        ("tensorboard/events.out.tfevents.1", "mine"),
        (".lock", "precious"),
        ("tokenizer.json", "{}"),
    ],
)
def test_a_file_that_only_has_the_name_of_a_run_s_stays(
    run: RunFolder, name: str, content: str, verse: Path, cli: Cli
) -> None:
    Path("d").mkdir()
    shutil.copy(run.path / "tokenizer.json", "d")
    path = Path("d", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    message = refusal(cli("train", verse, "--out", "d", "-s", "train.max_steps=1"))
    assert f"holds {name!r}, which no run writes" in message
    assert path.read_text() == content


def test_the_target_of_a_link_to_a_run_is_renamed_where_it_is(
    mixed_run: Path, verse: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A rename to another disk would fail, and leave nothing at the link's path."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "r"
    shutil.copytree(mixed_run, elsewhere)
    Path("link").symlink_to(elsewhere)
    done = cli("train", verse, "--out", "link", "--force", "-s", "train.max_steps=1")
    assert done.returncode == 0, done.stderr
    assert Path("link").is_symlink()
    assert load_run("link").step == 1
    assert load_run(elsewhere.with_name("r.old")).step == load_run(mixed_run).step


def test_a_replacement_that_cannot_be_moved_to_its_place_leaves_the_old_run(
    mixed_run: Path, verse: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(mixed_run, run)
    before = contents(run)

    monkeypatch.setattr(os, "rename", failing_at(os.rename, errno.EXDEV, ".new"))
    with pytest.raises(RunError, match="cannot be written"):
        chargpt.train(verse, settings={"train.max_steps": 1}, out=run, start="replace")
    assert contents(run) == before
    assert not run.with_name("run.old").exists()


def test_force_does_not_rename_the_current_folder(mixed_run: Path, verse: Path, cli: Cli) -> None:
    text = verse.absolute()
    shutil.copytree(mixed_run, "here")
    for folder, out in (("here", "."), ("here/checkpoints", "..")):
        with contextlib.chdir(folder):
            message = refusal(cli("train", text, "--out", out, "--force"))
            assert "holds the current folder" in message


@pytest.mark.parametrize("words", [("data", "info", "t.txt"), ("sample", "RUN", "-n", "5")])
def test_a_deleted_current_folder_is_named_as_the_cause(
    words: tuple[str, ...], mixed_run: Path, cli: Cli
) -> None:
    Path("gone").mkdir()
    with contextlib.chdir("gone"):
        Path("../gone").rmdir()
        message = refusal(cli(*(mixed_run if word == "RUN" else word for word in words)))
    assert message == "chargpt: the current folder was deleted; change to another with cd"


def test_a_text_of_another_run_with_the_same_characters_is_refused(
    mixed_run: Path, verse: Path, cli: Cli
) -> None:
    shutil.copytree(mixed_run, "r")
    Path("t.txt").write_text(verse.read_text("utf-8")[::-1], "utf-8")
    settings = {**MIXED_SETTINGS, "train.max_steps": 1}
    other = chargpt.train("t.txt", settings=settings, out="other")
    shutil.copytree("other/text", "r/text", dirs_exist_ok=True)
    assert load_run("r").tokenizer == other.tokenizer
    cause = "the text in r/text is damaged (it is the text of another run); restore it"
    for command in (["evaluate", "r"], ["train", "--resume", "r", "-s", "train.max_steps=41"]):
        assert cause in refusal(cli(*command))
    assert cause in cli("verify", "r").stdout


def test_a_run_whose_config_leaves_nothing_to_train_on_is_refused(
    mixed_run: Path, verse: Path, cli: Cli
) -> None:
    nothing = {"text.val_fraction": 0.999999, "text.mixture_characters": 0}
    shutil.copytree(mixed_run, "r")
    forged = load_run("r").config.with_values(nothing).to_yaml().encode()
    for folder in Path("r/checkpoints").glob("step-*"):
        rewrite(folder, "config.yaml", forged)
    new = ("-s", "text.val_fraction=0.999999", "-s", "train.max_steps=1")
    for command in (
        ["train", "--resume", "r", "-s", "train.max_steps=41"],
        ["train", verse, "--out", "new", *new],
    ):
        assert "characters, 0 to train on and" in refusal(cli(*command))
    assert "the train split is shorter than 2" in refusal(cli("compare", "r", "r"))


@pytest.mark.parametrize("path", ["~a\0b", "a\0b", "~\ud800"])
def test_a_path_that_no_system_can_have_is_refused(path: str) -> None:
    with pytest.raises(RunError, match="there is no folder"):
        load_run(path)
    with pytest.raises(TextError):
        chargpt.train(path, settings={"train.max_steps": 1})


def test_a_run_whose_config_has_a_path_with_nul_is_resumed_from_its_own_files_alone(
    mixed_run: Path, cli: Cli
) -> None:
    shutil.copytree(mixed_run, "r")
    config = load_run("r").config.with_values({"text.path": "~a\0b"})
    folder = Path("r/checkpoints/step-00000040")
    for base in ({}, {"train.from_run": "a\0b", "optim.l2_sp": 0.1}):
        rewrite(folder, "config.yaml", config.with_values(base).to_yaml().encode())
        done = cli("train", "--resume", "r", "-s", "train.max_steps=41")
        if base:
            assert "there is no folder a" in refusal(done)
        else:
            assert done.returncode == 0, done.stderr
            shutil.rmtree("r")
            shutil.copytree(mixed_run, "r")


def test_no_folder_but_those_of_its_text_is_listed_when_a_run_is_resumed(
    verse: Path, cli: Cli, tmp_path: Path
) -> None:
    """The settings of a run from someone else may name the whole disk."""
    shutil.copytree(verse.parent, "texts", ignore=lambda *_: {"README.md"})
    chargpt.train("texts", settings={**QUICK, "train.max_steps": 1}, out="r", device="cpu")
    (checkpoint,) = Path("r/checkpoints").glob("step-*")
    config, _, _ = read_metadata(checkpoint)
    forged = config.with_values({"text.path": f"{tmp_path}/**"}).to_yaml()
    rewrite(checkpoint, "config.yaml", forged.encode())
    Path("others").mkdir()
    added = {"others/new.txt": False, "texts/.new.txt": False, "texts/new.txt": True}
    for number, (path, is_noted) in enumerate(added.items(), 2):
        Path(path).write_text("new")
        done = cli("train", "--resume", "r", "-s", f"train.max_steps={number}")
        assert done.returncode == 0, done.stderr
        assert ("has changed since the run began" in done.stderr) == is_noted
