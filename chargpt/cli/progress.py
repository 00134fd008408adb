"""Progress bars on stderr."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Self

from tqdm import tqdm

from chargpt.cli import console

PLAIN_LINE_SECONDS = 5.0


class Progress:
    """A tqdm bar on a terminal; elsewhere a plain line every few seconds.

    Args:
        total: number of units.
        unit: what is counted.
        initial: number of units done before.
    """

    def __init__(self, total: int, unit: str, *, initial: int = 0) -> None:
        self.total = total
        self.unit = unit
        self.done = initial
        self.quiet = not console.is_main()
        self.bar: tqdm[NoReturn] | None = None
        self.last_line, self.last_done = time.monotonic(), initial
        if not self.quiet and sys.stderr.isatty():
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
        """Return whether a detail would be shown now; making one may synchronise the device."""
        if self.quiet:
            return False
        if self.bar is not None:
            return bool(time.time() - self.bar.last_print_t >= self.bar.mininterval)
        return time.monotonic() - self.last_line >= PLAIN_LINE_SECONDS

    def move_to(self, done: int, detail: str | None = None) -> None:
        """Show that `done` units are done, with a detail if there is one."""
        step, self.done = done - self.done, done
        if self.bar is not None:
            if detail is not None:
                self.bar.set_postfix_str(detail, refresh=False)
            self.bar.update(step)
        elif detail is not None and not self.quiet:
            now = time.monotonic()
            rate = (done - self.last_done) / max(now - self.last_line, 1e-9)
            left = f", {console.duration((self.total - done) / rate)} left" if rate else ""
            console.say(f"{self.unit} {done:,}/{self.total:,}  {detail}{left}")
            self.last_line, self.last_done = now, done

    def change_total(self, total: int) -> None:
        """Change the total."""
        self.total = total
        if self.bar is not None:
            self.bar.total = total

    def write(self, text: str) -> None:
        """Print lines above the bar."""
        if self.quiet:
            return
        if self.bar is not None:
            with suppress(OSError):  # the terminal is closed
                self.bar.write(text, file=sys.stderr)
        else:
            console.say(text)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def callback(self, label: str) -> Callable[[int, int], None]:
        """Return a function of (done, total) that shows both, with a label."""

        def show(done: int, total: int) -> None:
            self.change_total(total)
            self.move_to(done, label if self.wants_detail() else None)

        return show

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadingProgress:
    """Shows how a text is downloaded, or a long one prepared; of a short one nothing."""

    MIN_BYTES = 50_000_000

    def __init__(self) -> None:
        self.bar: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total < self.MIN_BYTES and stage != "fetching":
            return
        if self.bar is None:
            self.bar = Progress(total, stage)
        detail = f"{stage} {console.size(done)} of {console.size(total)}"
        self.bar.move_to(done, detail if self.bar.wants_detail() else None)
        if done >= total:
            self.bar.close()
            self.bar = None
