"""Every picture, as SVG or PNG by the file's ending, drawn off screen."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chargpt.errors import ChargptError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chargpt.analysis.ladder import Ladder

# Okabe and Ito's colours, told apart by most colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE = "#6b7280", "#c9ced6"


def loss_curves(
    path: Path,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    lines: Mapping[str, float],
    title: str,
) -> Path:
    """Draw validation loss (nats per character) against steps, with level lines to compare with.

    Args:
        path: ends in .svg or .png.
        curves: for each model, its (step, nats) points.
        lines: for each baseline, its nats.
        title: what was trained on.

    Raises:
        ChargptError: another ending, or the file cannot be written.
    """
    figure = _figure(path, 8, 4.5)
    axes = figure.add_subplot()
    for (name, points), colour in zip(curves.items(), _cycle(len(curves)), strict=True):
        _curve(axes, name, points, colour)
    for name, level in lines.items():
        _level(axes, name, level)
    axes.set(xlabel="step", ylabel="validation loss (nats per character)", title=title)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if curves:
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    return _save(figure, path)


def ladder(path: Path, ladder: "Ladder") -> Path:
    """Draw what each rung reaches as bars, in bits per character, beside counts and compressors.

    Args:
        path: ends in .svg or .png.
        ladder: what `climb` gives.

    Raises:
        ChargptError: another ending, or the file cannot be written.
    """
    bars = [
        *((name, nats, None, GREY) for name, nats in ladder.counted.items()),
        *((name, nats, None, PALE) for name, nats in ladder.compressed.items()),
        *((s.rung.name, s.loss.value, s.loss.margin, COLOURS[0]) for s in ladder.steps),
    ]
    figure = _figure(path, 8, 0.6 + 0.28 * len(bars))
    axes = figure.add_subplot()
    names, nats, margins, colours = zip(*bars, strict=True)
    bits = [each / math.log(2) for each in nats]
    errors = [(margin or 0) / math.log(2) for margin in margins]
    places = range(len(bars))
    axes.barh(places, bits, color=colours, height=0.7)
    axes.errorbar(bits, places, xerr=errors, fmt="none", ecolor="black", elinewidth=1)
    for place, value, error in zip(places, bits, errors, strict=True):
        axes.annotate(
            f"{value:.3f}", (value + error, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(bits))
    axes.set(xlabel="bits per character of the validation part: the fewer, the better")
    axes.set_title(
        f"{ladder.title}: counted (grey), compressed (pale), trained (blue)", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def _figure(path: Path, width: float, height: float) -> "Figure":
    """Return an empty figure, in inches, for a file whose ending is checked first."""
    if path.suffix not in (".svg", ".png"):
        raise ChargptError(f"{path} must end in .svg or .png; name it so")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: Path) -> Path:
    from matplotlib import rc_context

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "chargpt", "svg.fonttype": "none"}):
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=130, metadata=metadata)
    except OSError as error:
        raise ChargptError(f"{path} cannot be written ({error.strerror}); name another") from None
    return path


def _curve(axes: "Axes", name: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Draw one model's losses, with the last one in numbers."""
    steps, nats = zip(*points, strict=True) if points else ((), ())
    axes.plot(steps, nats, color=colour, linewidth=2, label=name)
    if points:
        axes.annotate(
            f"{nats[-1]:.3f}",
            (steps[-1], nats[-1]),
            (4, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )


def _level(axes: "Axes", name: str, level: float) -> None:
    """Draw a level line, with its name and number below."""
    axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
    axes.annotate(
        f"{name} {level:.3f}",
        (0.5, level),
        (0, -11),
        color=GREY,
        ha="center",
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=9,
    )


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
