"""The only printer. stdout is data and results; stderr is progress and talk.

tqdm owns the terminal while a run trains; rich draws before and after.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_LINE_SECONDS = 5.0

started = time.perf_counter()  # when the command began


def note_start() -> None:
    """Count a command's time from now."""
    global started
    started = time.perf_counter()


def is_main() -> bool:
    """Return whether this process is the one that speaks, among those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tell the user something, on stderr; that nobody listens any more stops no work."""
    if is_main():
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def out(text: str, end: str = "\n") -> None:
    """Write data, on stdout."""
    if is_main():
        print(text, end=end, flush=True)


def fail(text: str) -> None:
    """Print an error's one sentence: rank 0's, or another's that has already met the others."""
    together = sys.modules.get("torch.distributed")
    if is_main():
        say(f"chargpt: {text}")
    elif together is not None and together.is_initialized():
        with suppress(OSError):
            print(f"chargpt: process {os.environ['RANK']}: {text}", file=sys.stderr, flush=True)


def characters(count: int) -> str:
    """Return `1,115,394 characters`."""
    return f"{count:,} character{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Return bytes as `13.9 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def short(count: float) -> str:
    """Return a number as `870k` or `3.7M`."""
    for unit in ("", "k", "M", "G"):
        if count < 1000 or unit == "G":
            return f"{count:.3g}{unit}" if count < 1000 else f"{count:.0f}{unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min 5 s` or `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def loss_cells(nats: float) -> list[str]:
    """Return a loss as nats, bits and perplexity, for a table's row."""
    return [f"{nats:.4f}", f"{nats / math.log(2):.4f}", f"{math.exp(min(nats, 700)):,.2f}"]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return values as a row of bars, the last `width` of them evenly thinned."""
    if len(values) > width:
        picks = [round(i * (len(values) - 1) / (width - 1)) for i in range(width)]
        values = [values[i] for i in picks]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    bars = "".join(SPARKS[int((v - low) / span * (len(SPARKS) - 1))] for v in values)
    return bars if unicode_terminal() else ""


def unicode_terminal() -> bool:
    """Return whether stderr can show bars."""
    return (sys.stderr.encoding or "").lower().replace("-", "").startswith("utf")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print a table of results on stdout; all but the first column are flush right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        title=title or None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(columns):
        grid.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, highlight=False, no_color="NO_COLOR" in os.environ).print(grid)


def side_by_side(titles: Sequence[str], texts: Sequence[str]) -> None:
    """Print texts in columns, on stdout."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, no_color="NO_COLOR" in os.environ)
    width = max(24, console.width // len(titles) - 1)
    panels = [
        Panel(Text(printable(text)), title=title, width=width)
        for title, text in zip(titles, texts, strict=True)
    ]
    console.print(Columns(panels, padding=0))


def printable(text: str) -> str:
    """Return text that cannot steer a terminal: control characters become visible signs.

    But for carriage returns, which end the lines of many texts: they are left out.
    """
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == "\u200d") else "\N{REPLACEMENT CHARACTER}"
        for c in text
        if c != "\r"
    )


class Progress:
    """A tqdm bar on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, total: int, unit: str, *, initial: int = 0) -> None:
        self.total = total
        self.unit = unit
        self.done = initial
        self.quiet = not is_main()
        self.bar: Any = None
        self.last_line, self.last_done = time.monotonic(), initial
        if not self.quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=total,
                initial=initial,
                unit=unit,
                dynamic_ncols=True,
                file=sys.stderr,
                leave=False,
                bar_format="{n_fmt}/{total_fmt} |{bar:6}| {elapsed}<{remaining}{postfix}",
            )

    def wants_detail(self) -> bool:
        """Return whether a postfix set now would be seen; making one may wait for the device."""
        if self.quiet:
            return False
        if self.bar is not None:
            return bool(time.time() - self.bar.last_print_t >= self.bar.mininterval)
        return time.monotonic() - self.last_line >= PLAIN_LINE_SECONDS

    def move_to(self, done: int, detail: str | None = None) -> None:
        """Show that `done` of the total is done, and a few words if they are given."""
        step, self.done = done - self.done, done
        if self.bar is not None:
            if detail is not None:
                self.bar.set_postfix_str(detail, refresh=False)
            self.bar.update(step)
        elif detail is not None and not self.quiet:
            now = time.monotonic()
            rate = (done - self.last_done) / max(now - self.last_line, 1e-9)
            left = (self.total - done) / rate if rate else math.inf
            ahead = f", {duration(left)} left" if math.isfinite(left) else ""
            say(f"{self.unit} {done:,}/{self.total:,}  {detail}{ahead}")
            self.last_line, self.last_done = now, done

    def change_total(self, total: int) -> None:
        """Show another total from now on."""
        self.total = total
        if self.bar is not None:
            self.bar.total = total

    def write(self, text: str) -> None:
        """Print lines without breaking the bar."""
        if self.quiet:
            return
        if self.bar is not None:
            with suppress(OSError):  # the terminal is gone
                self.bar.write(text, file=sys.stderr)
        else:
            say(text)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
