"""`chargpt sample --interactive` by keys on a terminal, and by lines without one."""

import io
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Cli
from noise import noisy_run_on

from chargpt.cli.interact import PlainReader, Writer

pty = pytest.importorskip("pty", reason="needs terminals of POSIX")
termios = pytest.importorskip("termios")


class Terminal:
    """A terminal of 24 lines in which the command runs."""

    def __init__(self, *words: object, cwd: Path, columns: int = 100, **environment: str) -> None:
        self.own, self.other = pty.openpty()
        sizes = {"LINES": "24", "COLUMNS": str(columns), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chargpt", "sample", *map(str, words), "--interactive"],
            stdin=self.other,
            stdout=self.other,
            stderr=self.other,
            cwd=cwd,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "TERM": "xterm",
                **sizes,
                **environment,
            },
            start_new_session=True,
        )
        self.shown = ""

    def read(self) -> str:
        """Return what is shown next, or fail after a while."""
        ready, _, _ = select.select([self.own], [], [], 20)
        assert ready, self.shown
        return os.read(self.own, 65536).decode(errors="replace")

    def wait(self, pattern: str) -> str:
        """Return what is shown up to the end of a pattern, without control sequences."""
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            self.shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.read().replace("\r", ""))
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self.own, keys.encode())

    def close(self) -> int:
        """Return the exit code of the command."""
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            os.close(self.own)
            os.close(self.other)

    def reads_lines(self) -> bool:
        """Return whether the terminal is in its usual mode: it gives a program whole lines."""
        return bool(termios.tcgetattr(self.other)[3] & termios.ICANON)


def menu(terminal: Terminal) -> list[str]:
    """Return the five suggestions, when they are shown."""
    shown = terminal.wait(r"\n?1 [^\n]+%.*?5 [^\n]+%")
    return re.findall(r"^\d (.*?) (?:under )?[\d.]+%", shown, re.MULTILINE)


def test_suggestions_are_chosen_by_a_key_undone_retried_edited_and_saved(
    trained: Path, tmp_path: Path
) -> None:
    terminal = Terminal(trained, "--seed", 1, "-n", 8, cwd=tmp_path)
    terminal.wait("Ctrl-D ends")
    menu(terminal)
    terminal.press("The light\r")
    terminal.wait("The light[^\n]*\n")
    first = menu(terminal)
    terminal.press("2")
    shown = terminal.wait(r"The light[^\n]*\n")
    assert re.sub(r"\W", "", first[1].strip("…")) in re.sub(r"\W", "", shown)
    menu(terminal)
    terminal.press("\x7f")  # Backspace
    terminal.wait(r"The light[^\n]*\n")
    assert menu(terminal) == first
    terminal.press("\t")
    assert not set(menu(terminal)) & set(first)
    terminal.press("/edit The sea, all of it\r")
    terminal.wait("The sea, all of it\n")
    menu(terminal)
    terminal.press("/save mine.txt\r")
    terminal.wait(r"characters written to\s.*?mine\.txt")
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8").endswith("The sea, all of it")
    menu(terminal)
    terminal.press("/quit\r")
    assert terminal.close() == 0


@pytest.mark.parametrize(("option", "environment"), [("--plain", {}), ("", {"TERM": "dumb"})])
def test_a_plain_terminal_gets_lines_without_control_sequences(
    trained: Path, tmp_path: Path, option: str, environment: dict[str, str]
) -> None:
    words = [trained, "--seed", 1, "-n", 8, *filter(None, [option])]
    terminal = Terminal(*words, cwd=tmp_path, **environment)
    terminal.press("The light\n/1\n/quit\n")
    shown = ""
    while not shown.count("> ") >= 3:
        shown += terminal.read()
    assert "/1 to /9 choose" in shown
    assert "\x1b[" not in shown.replace("\x1b[?2004h", "").replace("\x1b[?2004l", "")
    assert terminal.close() == 0


def test_keys_work_in_a_narrow_terminal_without_colours(trained: Path, tmp_path: Path) -> None:
    terminal = Terminal(trained, "-n", 8, cwd=tmp_path, columns=30, NO_COLOR="1")
    menu(terminal)
    terminal.press("1")
    menu(terminal)
    terminal.press("\x04")
    assert terminal.close() == 0


def test_lines_choose_undo_retry_edit_and_save_by_commands(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed = "The light\n/1\n/undo\n/retry\n/edit The sea\n/save a.txt\n/edit The sky\n/save\n"
    typed += "/undo\n/save b.txt\n/suggestions 0\n/1\n/9\n/ahead 9\n/undo\n/undo\n/undo\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = cli("sample", trained, "-i", "--seed", "1", "-n", "4", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.txt").read_text(encoding="utf-8").endswith("The sky")  # saved again
    assert (tmp_path / "b.txt").read_text(encoding="utf-8").endswith("The sea")
    assert "there is no suggestion 1; choose one that is shown" in done.stderr
    assert "ahead: expected a number from 1 to 5" in done.stderr
    assert "there is nothing to undo; begin a text" in done.stderr
    assert "suggestions is 0" in done.stderr


def test_a_saved_file_is_replaced_until_somebody_edits_it(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class EditingReader(io.StringIO):
        def readline(self, *_: int) -> str:
            line = super().readline()
            if line == "/save\n":
                (tmp_path / "a.txt").write_text("my own", encoding="utf-8")
            return line

    typed = "The light\n/save a.txt\n/save a.txt\n/edit The sea\n/save\n/save b.txt\n"
    monkeypatch.setattr("sys.stdin", EditingReader(typed))
    done = cli("sample", trained, "-i", "--seed", "1", "-n", "4")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "my own"
    assert done.stderr.count("a.txt exists; delete it, or name another") == 1
    assert (tmp_path / "b.txt").exists()


def test_a_file_that_was_there_before_is_not_replaced(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("my own", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("The light\n/save mine.txt\n/save\n"))
    done = cli("sample", trained, "-i", "--seed", "1", "-n", "4")
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "my own"
    assert "mine.txt" in done.stderr
    assert "no file is named; name one" in done.stderr


def test_a_signal_leaves_the_terminal_as_it_was_and_ctrl_c_only_begins_a_new_line(
    trained: Path, tmp_path: Path
) -> None:
    terminal = Terminal(trained, cwd=tmp_path)
    menu(terminal)
    assert not terminal.reads_lines()
    terminal.process.send_signal(signal.SIGINT)
    menu(terminal)
    terminal.process.terminate()
    terminal.wait("stopped")
    terminal.process.wait(timeout=20)
    assert terminal.reads_lines()
    assert terminal.close() == 128 + signal.SIGTERM


def test_a_document_that_has_ended_is_shown_when_what_follows_it_is_undone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = noisy_run_on(tmp_path, "anna\nberta\ncarla\n" * 30, **{"text.documents": "lines"})
    writer = Writer(run, run.config.with_values({"sample.prompt": "anna\nberta"}), PlainReader())
    ends = next(i for i, line in enumerate(writer.menu(), 1) if "the document ends" in line)
    writer.choose(ends)
    ended = writer.text
    assert ended.endswith("\n")
    shown = capfd.readouterr().out
    assert shown.startswith("berta")
    writer.menu()
    writer.choose(1)
    following = writer.text.removeprefix(ended).removesuffix("\n")
    assert capfd.readouterr().out == following + "\n"
    writer.undo()
    assert writer.text == ended
    assert capfd.readouterr().out == shown
