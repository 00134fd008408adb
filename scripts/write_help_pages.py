"""Write chargpt/cli/help/COMMAND.txt, what `chargpt COMMAND --help` prints.

    python scripts/write_help_pages.py

A command's module imports torch, which takes a second; its page is printed without it. A test
checks that the pages are up to date.
"""

import typer

from chargpt.cli.main import COMMANDS, HELP_COLUMNS, HELP_PAGES, app, load_command


def page(command: str) -> str:
    """Return the help of a command as its module gives it."""
    group = typer.main.get_command(app)
    parent = group.make_context("chargpt", [], resilient_parsing=True, terminal_width=HELP_COLUMNS)
    loaded = load_command(command)
    context = loaded.make_context(command, [], parent=parent, resilient_parsing=True)
    return f"{loaded.get_help(context)}\n"


if __name__ == "__main__":
    HELP_PAGES.mkdir(exist_ok=True)
    for command in COMMANDS:
        (HELP_PAGES / f"{command}.txt").write_text(page(command), encoding="utf-8")
