"""Progress bars on stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import NoReturn

from tqdm import tqdm

from chargpt.cli import console

PLAIN_LINE_SECONDS = 5.0
DELAY_SECONDS = 0.5  # shorter work shows no bar
BAR = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"


class ProgressBar:
    """A tqdm bar on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, total: int, unit: str, *, initial: int = 0) -> None:
        self.unit, self.done = unit, initial
        self.bar: tqdm[NoReturn] | None = None
        self.last_line, self.last_done = time.monotonic(), initial
        if not console.is_silent and sys.stderr.isatty():
            # tqdm's own dynamic_ncols shows no bar on a terminal that does not know its rows
            ncols, nrows = console.terminal_size(sys.stderr)
            self.bar = tqdm(
                total=total,
                initial=initial,
                unit=unit,
                ncols=ncols,
                nrows=nrows,
                file=sys.stderr,
                leave=False,
                bar_format=BAR,
                delay=DELAY_SECONDS,
                colour=None if os.environ.get("NO_COLOR") else "cyan",
            )
            console.writers.append(self.write)

    def update(self, done: int, total: int, detail: Callable[[], str] | None) -> None:
        """Show that `done` of `total` units are done.

        `detail` is called only when its text is shown, since it may synchronise the device.
        """
        step, self.done = done - self.done, done
        if self.bar is not None:
            self.bar.total = total
            is_due = time.time() - self.bar.last_print_t >= self.bar.mininterval or done == total
            if detail is not None and is_due:
                self.bar.ncols, _ = console.terminal_size(sys.stderr)
                self.bar.set_postfix_str(console.printable(detail()), refresh=False)
            self.bar.update(step)
            return
        now = time.monotonic()
        is_due = now - self.last_line >= PLAIN_LINE_SECONDS
        if detail is not None and is_due and not console.is_silent:
            rate = (done - self.last_done) / max(now - self.last_line, 1e-9)
            # after a rollback the rate is negative
            left = f", {console.duration((total - done) / rate)} left" if rate > 0 else ""
            console.say(f"{self.unit} {done:,}/{total:,}  {detail()}{left}")
            self.last_line, self.last_done = now, done

    def write(self, text: str, *, is_sample: bool = False) -> None:
        """Print lines above the bar; a sample keeps its own line breaks."""
        if self.bar is None:
            console.say(text)
            return
        text = console.printable(text)
        if not is_sample:
            text = console.wrapped(text, sys.stderr)
        self.bar.delay = 0  # tqdm shows the bar again after the text, but removes it only if due
        with suppress(OSError):  # the terminal is closed
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
            with suppress(ValueError):  # it is closed already
                console.writers.remove(self.write)


@contextmanager
def show_progress(unit: str, label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield a function of (done, total) that shows both, with a label."""
    with closing(ProgressBar(1, unit)) as bar:
        yield lambda done, total: bar.update(done, total, lambda: label)


class LoadingProgress:
    """Shows the download of a text, and the preparation of a long one."""

    MIN_BYTES = 50_000_000

    def __init__(self, on_show: Callable[[], object] = lambda: None) -> None:
        self.on_show = on_show  # called before a bar is shown
        self.bar: ProgressBar | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total < self.MIN_BYTES and stage != "fetching":
            return
        if self.bar is None:
            self.on_show()
            self.bar = ProgressBar(total, "byte")
        detail = f"{stage} {console.size(done)} of {console.size(total)}"
        self.bar.update(done, total, lambda: detail)
        if done >= total:
            self.bar.close()
            self.bar = None
