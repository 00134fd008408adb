"""Write chargpt/cli/help/COMMAND.txt, what `chargpt COMMAND --help` prints.

    python scripts/write_help_pages.py

A command's module imports torch, which takes a second; its page is printed without it. A test
checks that the pages are up to date.
"""

import typer

from chargpt.cli.main import COMMANDS, HELP_COLUMNS, HELP_PAGES, app, load_command


def pages() -> dict[str, str]:
    """Return the help of each command and subcommand, as in `export gguf`, by its name."""
    group = typer.main.get_command(app)
    parent = group.make_context("chargpt", [], resilient_parsing=True, terminal_width=HELP_COLUMNS)
    loaded = {name: load_command(name) for name in COMMANDS}
    for name, command in list(loaded.items()):
        loaded |= {f"{name} {sub}": each for sub, each in getattr(command, "commands", {}).items()}
    contexts = {
        name: command.make_context(name, [], parent=parent, resilient_parsing=True)
        for name, command in loaded.items()
    }
    return {name: f"{loaded[name].get_help(context)}\n" for name, context in contexts.items()}


if __name__ == "__main__":
    HELP_PAGES.mkdir(exist_ok=True)
    for name, page in pages().items():
        file = HELP_PAGES / f"{name.replace(' ', '-')}.txt"
        file.write_text(page, encoding="utf-8")
