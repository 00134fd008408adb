"""Tables and boxes of text on stdout."""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chargpt.cli import console

MAX_WHOLE = 24  # characters of a cell that is not wrapped
MIN_FIRST = 12  # characters that the first column always has room for


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    last_is_text: bool = False,
) -> None:
    """Print a table on stdout; all columns but the first are right-aligned, short cells whole.

    With `last_is_text` the last column is left-aligned, and cut where the line ends.
    """
    rows = list(rows)
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    grid = Table(
        title=Text(console.printable(title)) if title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(columns):
        is_short = all(cell_len(row[index]) <= MAX_WHOLE for row in rows)
        is_text = last_is_text and index == len(columns) - 1
        justify: Literal["left", "right"] = "left" if index == 0 or is_text else "right"
        grid.add_column(
            Text(console.printable(column)),
            justify=justify,
            overflow="fold",
            no_wrap=is_text or (bool(index) and is_short),
            min_width=None if index else min(MIN_FIRST, widths[0]),
            style="" if index else "cyan",
        )
    available = Console().width - 1 - 2 * len(widths) - sum(widths[:-1])
    for row in rows:
        cells = [Text(console.printable(cell)) for cell in row]
        if last_is_text:
            cells[-1].truncate(max(available, MIN_FIRST), overflow="ellipsis")
        grid.add_row(*cells)
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
    """Print a text in a box on stdout."""
    content = Text(console.printable(text), overflow="fold")
    print_rich(Console(highlight=False), Panel(content, title=Text(console.printable(title))))
