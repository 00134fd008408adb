"""Plots that commands write, with a message about characters that no font has."""

from pathlib import Path
from typing import TYPE_CHECKING

from chargpt.analysis import plots
from chargpt.cli import console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMED = 5


def save_plot_file(figure: "Figure", path: Path) -> None:
    """Write a figure to a file."""
    missing = plots.save(figure, path)
    if missing:
        others = len(missing) - MAX_NAMED
        named = " ".join(missing[:MAX_NAMED]) + (f" and {others} more" if others > 0 else "")
        console.say(
            f"{path}: no installed font has {named}, so boxes stand for them; install one, such as "
            "Google's Noto font of that script, or name an .svg file, whose viewer brings fonts"
        )
