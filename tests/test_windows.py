"""What differs on Windows, simulated: open files, names, pipes, line ends and Ctrl-Break."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest
from conftest import Cli
from saving import failing
from shared_runs import QUICK

from chargpt.cli import console, main
from chargpt.config import TextConfig
from chargpt.files import INVALID_NAME, open_regular, quoted
from chargpt.store import layout
from chargpt.store.folder import RunFolder
from chargpt.store.layout import LOCK
from chargpt.store.run import load_run
from chargpt.store.verify import verify
from chargpt.text.prepare import load_corpus
from chargpt.training.start import deferred_signals, slug

fcntl = pytest.importorskip("fcntl", reason="on Windows itself nothing is simulated")


def is_open(path: str) -> bool:
    """Return whether this process has a file, or one in a folder, open or mapped."""
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    mapped = [line.split(maxsplit=5)[-1].strip() for line in maps.splitlines()]
    return any(f"{each}/".startswith(f"{os.path.abspath(path)}/") for each in opened + mapped)


@pytest.fixture
def windows_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let file operations fail as on Windows."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    real_stat, real_fsync = os.stat, os.fsync

    def refusing(real: Callable[..., Any], *, replaces: bool = True) -> Callable[..., Any]:
        def operation(*paths: Any, **options: Any) -> Any:
            is_taken = not replaces and os.path.exists(paths[1])
            if not options and (is_taken or any(map(is_open, paths))):
                raise PermissionError(errno.EACCES, "Access is denied", paths[0])
            return real(*paths, **options)

        return operation

    def fsync(number: int) -> None:
        if not fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(number)

    def stat(path: Any, **options: Any) -> os.stat_result:
        if "*" in str(path):
            error = OSError(errno.EINVAL, "The filename syntax is incorrect")
            error.winerror = INVALID_NAME
            raise error
        return real_stat(path, **options)

    def open_unlocked(path: Path, max_bytes: int) -> IO[bytes]:
        if path.name == LOCK:
            raise PermissionError(errno.EACCES, "Access is denied", path)
        return open_regular(path, max_bytes)

    monkeypatch.setattr(layout, "open_regular", open_unlocked)
    for name in ("replace", "unlink", "rmdir"):
        monkeypatch.setattr(f"os.{name}", refusing(getattr(os, name)))
    monkeypatch.setattr("os.rename", refusing(os.rename, replaces=False))
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.stat", stat)
    monkeypatch.delattr("os.chown")
    for module in ("files", "store.folder", "store.commit"):
        monkeypatch.setattr(f"chargpt.{module}.sync_directory", Mock())
    for module in ("files", "text.prepare", "store.folder"):
        monkeypatch.setattr(f"chargpt.{module}.IS_WINDOWS", True)


@pytest.mark.usefixtures("windows_files")
def test_runs_are_created_replaced_and_resumed_where_no_open_file_can_be_moved(
    cli: Cli, verse: Path
) -> None:
    Path("a.txt").write_bytes(verse.read_bytes())
    for words in (
        ("*.txt", "-s", "text.documents=lines", "--out", "run", *QUICK),
        ("a.txt", "--out", "run", "--force", *QUICK),
        ("--resume", "run", "-s", "train.max_steps=9"),
    ):
        done = cli("train", *words)
        assert done.returncode == 0, done.stderr
    for folder, step in (("run", 9), ("run.old", 6)):
        assert load_run(folder, "latest", "cpu").step == step
        assert not verify(RunFolder(Path(folder))).problems
    Path("short.txt").write_text("abc")
    assert cli("train", "short.txt", *QUICK, "--out", "other").returncode == 2
    assert not Path("other").exists()
    assert load_corpus(text="ab\n" * 20).n_characters == 60


def test_texts_keep_their_line_ends_on_a_stream_that_translates_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "utf-8", newline="\r\n"))
    main.open_streams()
    console.out_text("a\r\nb\n")
    assert content.getvalue() == b"a\r\nb\n"


def test_a_closed_pipe_is_no_error_by_either_of_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in (errno.EPIPE, errno.EINVAL):
        monkeypatch.setattr("builtins.print", failing(number))
        with pytest.raises(console.OutputClosed):
            console.write_out("text")


def test_ctrl_break_lets_a_step_end_and_the_second_one_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    caught: list[int] = []

    def press_twice() -> None:
        with main.catch_signals(), deferred_signals(caught.append):
            signal.raise_signal(signal.SIGUSR1)
            assert caught == [signal.SIGUSR1]
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(main.Stopped):
        press_twice()
    assert len(caught) == 1


def test_a_passage_of_a_file_on_another_drive_is_shown_by_its_whole_path(
    verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = load_corpus(TextConfig(path=str(verse)))
    monkeypatch.setattr("os.path.relpath", Mock(side_effect=ValueError))
    place = corpus.place_of(0)
    assert place is not None
    assert place.path == str(verse)


def test_a_folder_is_never_named_like_a_device() -> None:
    assert [slug(name) for name in ("con.2.txt", "a novel.txt", "...")] == [
        "con-2",
        "a-novel",
        "text",
    ]


def test_a_command_to_copy_is_quoted_for_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chargpt.files.IS_WINDOWS", True)
    assert [quoted(path) for path in (r"runs\a", r"C:\my runs\b")] == [r"runs\a", r'"C:\my runs\b"']
