"""Tables and boxes of text on stdout."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chargpt.cli import console

MAX_WHOLE = 24  # characters of a cell that is not wrapped


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
    grid = Table(
        title=Text(console.printable(title)) if title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    cells = [[Text(console.printable(cell)) for cell in row] for row in (columns, *rows)]
    least = 1  # column of the terminal
    for index, column in enumerate(zip(*cells, strict=True)):
        is_text, is_first, room = index == text_column, index == 0, MAX_WHOLE
        longest = max(cell.cell_len for cell in column)
        if is_text:
            room = column[0].cell_len
            for cell in column:
                cell.no_wrap, cell.overflow = True, "ellipsis"
        elif is_first and text_column is not None:
            room = longest
        grid.add_column(
            column[0],
            justify="left" if is_first or is_text else "right",
            overflow="fold",
            no_wrap=longest <= room and not is_text,
            style="cyan" if is_first else "",
        )
        least += 2 + min(longest, room)
    for row in cells[1:]:
        grid.add_row(*row)
    # a terminal that is too narrow breaks whole lines: rich would leave out columns and cut numbers
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
