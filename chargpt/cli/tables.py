"""Tables and boxes of text on stdout."""

import sys
from collections.abc import Callable, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chargpt.cli import console
from chargpt.text.display import one_line, printable

MAX_WHOLE = 24  # characters of a cell that is not wrapped
MIN_FIRST = 12  # characters that the first column always has room for


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    text_column: int | None = None,
    clean: Callable[[str], str] = one_line,
    has_line_ends: bool = False,
) -> None:
    """Print a table on stdout; all columns but the first are right-aligned, short cells whole.

    Line ends in cells become signs unless `has_line_ends`. `text_column` is the index of one that
    is left-aligned, and cut if lines would be too long; `clean` replaces what it may not hold.
    """
    shown = printable if has_line_ends else one_line
    cells = [[shown(cell) for cell in row] for row in rows]
    if text_column is not None:
        for cleaned, row in zip(cells, rows, strict=True):
            cleaned[text_column] = clean(row[text_column])
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    if text_column is not None:
        others = 1 + 2 * len(widths) + sum(widths) - widths[text_column]
        room = max(Console().width - others, cell_len(columns[text_column]))
        widths[text_column] = min(widths[text_column], room)
        for row in cells:
            text = Text(row[text_column])
            text.truncate(room, overflow="ellipsis")
            row[text_column] = text.plain
    grid = Table(
        title=Text(one_line(title)) if title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(columns):
        is_short = all(cell_len(row[index]) <= MAX_WHOLE for row in cells)
        is_text = index == text_column
        justify: Literal["left", "right"] = "left" if index == 0 or is_text else "right"
        grid.add_column(
            Text(one_line(column)),
            justify=justify,
            overflow="fold",
            no_wrap=is_text or (bool(index) and is_short),
            min_width=None if index else min(MIN_FIRST, widths[0]),
            style="" if index else "cyan",
        )
    for row in cells:
        grid.add_row(*map(Text, row))
    # a terminal that is too narrow breaks whole lines: rich would leave out columns and cut numbers
    limits = (MIN_FIRST, *(MAX_WHOLE for _ in widths[1:]))
    least = 1 + 2 * len(widths) + sum(map(min, widths, limits))
    print_rich(Console(highlight=False, width=max(Console().width, least)), grid)


def print_rich(target: Console, content: RenderableType) -> None:
    """Print a table or columns on stdout; rich itself would end the command if nobody reads it."""
    with target.capture() as captured:
        target.print(content)
    console.write_out(captured.get())


def panel(title: str, text: str) -> None:
    """Print a text on stdout: in a box on a terminal, as it is below its title in a file."""
    if not sys.stdout.isatty():
        console.out(f"-- {title} --")
        console.out_text(text, "\n")
        return
    content = Text(printable(text), overflow="fold")
    print_rich(Console(highlight=False), Panel(content, title=Text(one_line(title))))
