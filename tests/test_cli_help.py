"""The help of the program and of each command, without PyTorch; and unexpected errors."""

import re
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Cli, run_python
from shared_runs import QUICK
from typer.main import get_command

from chargpt.cli import console
from chargpt.cli import main as main_module
from chargpt.cli.main import (
    COMMANDS,
    HELP_COLUMNS,
    HELP_PAGES,
    ClickException,
    app,
    check_usage,
    help_text,
    load_command,
    page_command,
)


def test_help_lists_of_texts_and_usage_errors_import_nothing_heavy(tmp_path: Path) -> None:
    lines = [
        "--help",
        "sample -n 5 -h",
        "train -help",
        *(f"{page.stem.replace('-', ' ')} --help" for page in HELP_PAGES.iterdir()),
    ]
    refused = [
        *("data list", "config train", "eval x", "export .", "export --lr 1", "train --lr 1"),
        *("train a b", "export gguf", "export gguf --bits 8", "import hf a b c", "config epochs"),
    ]
    code = (
        "import sys\n"
        "from chargpt.cli.main import run\n"
        f"for line in {lines}:\n"
        "    sys.argv = ['chargpt', *line.split()]\n"
        "    try: run()\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'yaml', 'matplotlib'} & set(sys.modules)))\n"
        f"for line in {refused}:\n"
        "    sys.argv = ['chargpt', *line.split()]\n"
        "    try: run()\n"
        "    except SystemExit as left: print(left.code)\n"
        "print('torch' in sys.modules)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.count("Usage: chargpt ") == len(lines)
    assert "\n[]\n" in done.stdout
    assert re.findall(r"(?m)^\d$", done.stdout) == list("00222222222")
    assert done.stdout.endswith("\nFalse\n")


def test_the_help_pages_are_those_of_the_commands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    pages = import_module("write_help_pages").pages()
    names = {name.replace(" ", "-") for name in pages}
    assert {path.stem for path in HELP_PAGES.iterdir()} == names
    for command, page in pages.items():
        written = help_text(command)
        # versions of typer break lines differently
        assert written.split() == page.split(), "run scripts/write_help_pages.py"
        assert max(map(len, written.splitlines())) <= HELP_COLUMNS
        assert "-\n" not in written  # an option or a word that is broken
        assert cli(*command.split(), "--help").stdout.split() == written.split()
        assert f"`chargpt {command}" in written or "COMMAND [ARGS]" in written, "an example"
    monkeypatch.setattr("chargpt.cli.console.terminal_width", lambda _: 60)
    assert cli("train", "--help").stdout.split() == pages["train"].split()


def test_a_help_page_has_the_options_and_arguments_of_its_command() -> None:
    def options_of(command: Any) -> set[tuple[object, ...]]:
        return {
            (frozenset(each.opts), *each.secondary_opts, each.is_flag, each.nargs, each.required)
            for each in command.params
            if each.param_type_name == "option"
        }

    parent = get_command(app).make_context("chargpt", [], resilient_parsing=True)
    for file in HELP_PAGES.iterdir():
        name, *subs = words = file.stem.split("-")
        command = load_command(name)
        for sub in subs:
            command = command.commands[sub]
        if hasattr(command, "commands"):
            continue
        assert options_of(page_command(help_text(" ".join(words)))) == options_of(command)
        given = [each for each in command.params if each.param_type_name == "argument"]
        needed = [each.opts[0] for each in command.params if each.required and each not in given]
        words += (f"{option}=x" for option in needed)
        arguments = [each.nargs for each in given]
        check_usage(parent, *words, *("x" for _ in arguments))
        is_open = -1 in arguments and name != "sample"  # whose further arguments are folders
        with nullcontext() if is_open else pytest.raises(ClickException, match=r"\(x x\)"):
            check_usage(parent, *words, *("x" for _ in arguments), "x", "x")
        required = [each.metavar or each.name for each in given if each.required]
        for number, missing in enumerate(required):
            with pytest.raises(ClickException, match=f"Missing argument '{missing}'"):
                check_usage(parent, *words, *required[:number])
    words = ["-p", "--", "-n5", "--temperature=-1", "--seed", "-1", "--", "-x"]
    context = page_command(help_text("sample")).make_context("sample", words)
    given = {each.opts[-1]: context.params[each.name] for each in context.command.params}
    names = ("--prompt", "--length", "--temperature", "--seed")
    assert [given[name] for name in names] == ["--", "5", "-1", "-1"]
    assert context.args == ["-x"]


def test_no_arguments_show_the_help_and_version_is_printed(cli: Cli) -> None:
    for printed in (cli().stdout, cli("--help").stdout):
        assert all(f"  {command} " in printed for command in COMMANDS)
        assert "..." not in printed.split("Commands:")[1]
        assert "--install-completion" in printed
    assert cli("--version").stdout.startswith("chargpt 0.")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ZeroDivisionError("oops"), "this is a bug in chargpt; please report it"),
        (MemoryError(), "there is not enough memory; end other programs"),
    ],
)
def test_an_unexpected_exception_is_one_sentence_after_the_traceback_of_a_bug(
    error: Exception, sentence: str, verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("chargpt.cli.train.describe_plan", fail)
    done = cli("train", verse, *QUICK)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"chargpt: {sentence}")
    assert ("ZeroDivisionError: oops" in done.stderr) == ("bug" in sentence)


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
        main_module.load_command("train")
        time.sleep(0.4)
        notice = "loading PyTorch ..."
        assert capsys.readouterr().err == f"{notice}\r{' ' * len(notice)}\r" * expected


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
