"""Tables and boxes of text on stdout."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chargpt.cli import console

MAX_WHOLE = 24  # characters of a cell that is not wrapped
MIN_WIDTH = 80  # a narrower terminal breaks whole lines: rich would leave out columns, cut numbers


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    text_column: int | None = None,
) -> None:
    """Print a table on stdout; all columns but the first are right-aligned, short cells whole.

    `text_column` is the index of one that is left-aligned, and cut if lines would be too long.
    """
    cells = [[console.printable(cell) for cell in row] for row in rows]
    grid = Table(
        title=Text(console.printable(title)) if title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(columns):
        is_whole = all(cell_len(row[index]) <= MAX_WHOLE for row in cells)
        if index == 0:  # names are cut only if nothing else can be
            is_whole = text_column is not None
        is_left = index in (0, text_column)
        grid.add_column(
            Text(console.printable(column)),
            justify="left" if is_left else "right",
            overflow="fold",
            no_wrap=is_whole and index != text_column,
            style="" if index else "cyan",
        )
    for row in cells:
        texts = list(map(Text, row))
        if text_column is not None:
            texts[text_column] = Text(row[text_column], no_wrap=True, overflow="ellipsis")
        grid.add_row(*texts)
    print_rich(Console(highlight=False, width=max(Console().width, MIN_WIDTH)), grid)


def print_rich(target: Console, content: RenderableType) -> None:
    """Print a table or columns on stdout; rich itself would end the command if nobody reads it."""
    with target.capture() as captured:
        target.print(content)
    console.write_out(captured.get())


def panel(title: str, text: str) -> None:
    """Print a text in a box on stdout."""
    content = Text(console.printable(text), overflow="fold")
    print_rich(Console(highlight=False), Panel(content, title=Text(console.printable(title))))
