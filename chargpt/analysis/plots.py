"""Plots (figures of matplotlib), as SVG or PNG files or inline in a page.

Shapes in this file: H = heads, T = characters.
"""

import itertools
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from chargpt.analysis.fonts import DEFAULT, fonts_for, set_fallback_fonts
from chargpt.errors import ConfigError
from chargpt.files import write_output
from chargpt.log import logger
from chargpt.text.display import display_text, graphemes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chargpt.analysis.ladder import Ladder
    from chargpt.analysis.predictions import Group

# Okabe and Ito's palette, which most colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE = "#6b7280", "#c9ced6"
MAX_POINTS = 40  # of a smoothed curve
MAX_NAMED = 5  # characters that no font has
MAX_MARKED = 20  # points of a curve that are marked
LABEL_HEIGHT, LABEL_WIDTH = 12, 40  # points, of the label of a curve
LEADER_LINE = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
INSIDE_LABEL = {"facecolor": "white", "linewidth": 0, "pad": 1}  # of a label that curves may cross
SUFFIXES = (".svg", ".png")


def require_suffix(path: Path) -> None:
    """Check that a path ends in .svg or .png.

    Raises:
        ConfigError: it does not.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in .svg or .png; rename it")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to a file; log which characters of a PNG no installed font has.

    Raises:
        ConfigError: the suffix is neither .svg nor .png, or the file cannot be written.
    """
    require_suffix(path)
    is_png = path.suffix == ".png"
    missing = set_fallback_fonts(figure) if is_png else ""
    metadata = {"Software": "chargpt"} if is_png else {"Date": None, "Title": "chargpt"}
    write_output(path, _rendered(figure, format=path.suffix[1:], dpi=130, metadata=metadata))
    if missing:
        others = len(missing) - MAX_NAMED
        named = " ".join(missing[:MAX_NAMED]) + (f" and {others} more" if others > 0 else "")
        logger.warning(
            f"{path}: no installed font has {named}, so boxes stand for them; install "
            f"{', '.join(fonts_for(missing)[:3])}, or name an .svg file, whose viewer brings fonts"
        )


def inline(figure: "Figure", name: str) -> Markup:
    """Return a figure as SVG for a page; black takes the colour of the page's text.

    Args:
        figure: is changed.
        name: prefix of its ids, which must be unique in the page.
    """
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    svg = _rendered(figure, format="svg", metadata={"Date": None}).decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))

    def shorten(tag: re.Match[str]) -> str:
        coloured = tag[0].replace("#000000", "currentColor")
        return re.sub(r' id="([^"]*)"', lambda id_: id_[0] if id_[1] in used else "", coloured)

    svg = re.sub(r"<[^>]+>", shorten, svg)  # and not the text between tags
    for mark in used:  # hashes, which occur nowhere else
        svg = svg.replace(mark, f"{name}-{mark}")
    return Markup(svg.replace("<svg ", '<svg aria-hidden="true" ', 1))  # its container has a label


def loss_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    lines: Mapping[str, float],
    title: str,
    width: float = 8,
) -> "Figure":
    """Draw losses in nats per character against steps, with a horizontal line per baseline.

    Curves and lines are labelled where they end, with their last values; labels that would overlap
    are moved apart, with a line from the end to the label.

    Args:
        curves: (step, nats) points by name.
        lines: nats of the baselines by name.
        title: name of the text.
        width: of the figure, in inches.
    """
    figure = _figure(width, 4.5)
    axes = figure.add_subplot()
    ends: list[tuple[float, float, str, str]] = []  # step, nats, label and colour
    for (name, points), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        steps, nats = zip(*points, strict=True) if points else ((), ())
        marker = "o" if len(points) <= MAX_MARKED else ""
        (curve,) = axes.plot(steps, nats, color=colour, linewidth=2, label=plain(name))
        curve.set(marker=marker, clip_on=False)
        if points:
            ends.append((*points[-1], f"{points[-1][1]:.3f}", colour))
    for level in lines.values():
        axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=plain(title))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    _remove_spines(axes)
    axes.autoscale_view()  # pixels depend on the limits
    # where baselines end too, so that none runs through a label
    right = max((step for step, *_ in ends), default=axes.get_xlim()[1])
    axes.set_xlim(right=right)
    ends += [(right, level, f"{name} {level:.3f}", GREY) for name, level in lines.items()]
    _label_ends(axes, ends, 72 / figure.dpi)
    if curves:
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    return figure


def _label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]], scale: float) -> None:
    """Label the ends of curves at their right; move labels that would overlap.

    Args:
        ends: step, nats, label and colour of each.
        scale: points per pixel.
    """
    columns: list[list[tuple[Any, ...]]] = []  # of points whose labels may overlap
    right = -math.inf
    for x, y, label, colour in sorted(ends):
        left, height = axes.transData.transform((x, y)) * scale
        if left > right + LABEL_WIDTH:
            columns.append([])
        columns[-1].append((height, left, (x, y), label, colour))
        right = left
    bottom = axes.get_window_extent().y0 * scale
    for column in columns:
        column.sort()
        heights, lefts, *_ = zip(*column, strict=True)
        places = spread(heights, LABEL_HEIGHT, bottom)
        is_moved = max(abs(place - h) for place, h in zip(places, heights, strict=True)) > 1
        for place, (height, left, point, label, colour) in zip(places, column, strict=True):
            axes.annotate(
                label,
                point,
                (max(lefts) - left + (18 if is_moved else 6), place - height),
                textcoords="offset points",
                color=colour,
                va="center",
                arrowprops=LEADER_LINE | {"color": colour} if is_moved else None,
                bbox=None if column is columns[-1] else INSIDE_LABEL,
            )


def spread(values: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Return sorted values moved apart to at least `gap`, by the least squares, above `lowest`."""
    groups: list[list[float]] = []  # isotonic regression of the values without their gaps
    for i, value in enumerate(values):
        groups.append([value - i * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [max(fmean(group), lowest) for group in groups for _ in group]
    return [mean + i * gap for i, mean in enumerate(means)]


def optimization_curves(records: Sequence[Mapping[str, Any]], characters: float) -> "Figure":
    """Draw learning-rate factor, gradient norm and speed against steps.

    Args:
        records: of `metrics.jsonl`.
        characters: read per step.
    """
    rows = [each for each in records if {"grad_norm", "lr_factor", "seconds"} <= each.keys()]
    # metrics of several steps are written at once, with the time of the last
    timestamps = list({row["seconds"]: row["step"] for row in rows}.items())
    speeds = [
        (step, characters * (step - before) / (now - then))
        for (then, before), (now, step) in itertools.pairwise(timestamps)
        if now > then and step > before
    ]
    figure = _figure(5.5, 5.5)
    parts = {
        "learning-rate factor": [(row["step"], row["lr_factor"]) for row in rows],
        "gradient norm": smoothed([(row["step"], row["grad_norm"]) for row in rows]),
        "characters per second": smoothed(speeds),
    }
    all_axes = figure.subplots(len(parts), sharex=True)
    for axes, colour, (name, points) in zip(all_axes, COLOURS, parts.items(), strict=False):
        axes.plot(*(zip(*points, strict=True) if points else ((), ())), color=colour)
        axes.set_title(name, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_ylim(bottom=0)
        _remove_spines(axes)
    axes.set_xlabel("step", fontsize=9)
    return figure


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Smooth a curve: return the means of at most `MAX_POINTS` equal parts, the last one longer."""
    size = math.ceil(len(points) / MAX_POINTS) or 1
    limits = [*range(0, len(points) - size + 1, size), len(points)]
    parts = [points[first:end] for first, end in itertools.pairwise(limits)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def calibration(groups: "Sequence[Group]") -> "Figure":
    """Draw accuracy against confidence; circles are larger for more characters."""
    figure = _figure(5, 4)
    axes = figure.add_subplot()
    axes.plot((0, 1), (0, 1), color=GREY, linestyle="--", linewidth=1)
    total = sum(group.characters for group in groups)
    confidence, accuracy = [g.confidence for g in groups], [g.accuracy for g in groups]
    sizes = [10 + 300 * group.characters / total for group in groups]
    axes.plot(confidence, accuracy, color=COLOURS[0])
    axes.scatter(confidence, accuracy, sizes, color=COLOURS[0])
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    _remove_spines(axes)
    axes.grid(alpha=0.25)
    return figure


def attention(weights: "npt.NDArray[np.float32]", text: str, titles: Sequence[str]) -> "Figure":
    """Draw the attention weights of heads, a square each, labelled with the characters.

    Args:
        weights: (H, T, T), rows sum to 1.
        text: T characters.
        titles: one per head.
    """
    from matplotlib.colors import LinearSegmentedColormap

    blue = (0, 0.45, 0.7)
    clear_to_blue = LinearSegmentedColormap.from_list("ours", [(*blue, 0), (*blue, 1)])
    size = max(2.6, 0.115 * len(text))
    across = min(4, len(weights))
    down = math.ceil(len(weights) / across)
    width, height = size + 0.3, size + 0.5  # of a head, with its characters and its title
    figure = _figure(width * across, height * down)
    figure.set_layout_engine("none")  # finding a layout among so many characters takes seconds
    labels = [((i + end - 1) / 2, display_text(text[i:end])) for i, end in graphemes(text)]
    for number, (head, title) in enumerate(zip(weights, titles, strict=True)):
        row, column = divmod(number, across)
        left = (column + 0.25 / width) / across
        bottom = 1 - (row + (size + 0.45) / height) / down
        axes = figure.add_axes((left, bottom, size / width / across, size / height / down))
        axes.imshow(head, cmap=clear_to_blue, vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9, pad=12)
        axes.set(xticks=[], yticks=[])
        for place, label in labels:
            axes.text(place, -0.7, label, fontsize=7, ha="center", va="bottom")
            axes.text(-0.8, place, label, fontsize=7, ha="right", va="center")
    return figure


def inline_heads(
    weights: "npt.NDArray[np.float32]", text: str, titles: Sequence[str], name: str
) -> list[Markup]:
    """Return the attention weights of heads as SVG for a page, one each, which a page can wrap."""
    return [
        inline(attention(weights[i : i + 1], text, [title]), f"{name}-{i + 1}")
        for i, title in enumerate(titles)
    ]


def plain(name: str) -> str:
    """Escape a name: `$` would begin a formula, and a leading `_` would keep it from a legend."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def ladder(result: "Ladder") -> "Figure":
    """Draw the losses of a ladder as bars, in bits per character."""
    bars = [
        *((name, nats, 0.0, GREY) for name, nats in result.ngrams.items()),
        *((name, nats, 0.0, PALE) for name, nats in result.compressor_losses.items()),
        *((r.rung.name, r.loss.value, r.loss.margin or 0.0, COLOURS[0]) for r in result.results),
    ]
    figure = _figure(8, 0.6 + 0.28 * len(bars))
    axes = figure.add_subplot()
    names, nats, margins, colours = zip(*bars, strict=True)
    bits, errors = ([each / math.log(2) for each in values] for values in (nats, margins))
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
    axes.set(xlabel="bits per character of the validation split (lower is better)")
    axes.set_title(
        f"{plain(result.title)}: n-grams (grey), compressors (pale), trained (blue)", fontsize=10
    )
    _remove_spines(axes)
    return figure


def _figure(width: float, height: float) -> "Figure":
    """Return an empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _remove_spines(axes: "Axes") -> None:
    """Remove the top and right spines."""
    axes.spines[["top", "right"]].set_visible(False)


def _rendered(figure: "Figure", **options: Any) -> bytes:
    from matplotlib import rc_context

    settings: Any = {
        "svg.hashsalt": "chargpt",
        "svg.fonttype": "none",
        "font.sans-serif": [DEFAULT],  # SVG would otherwise list a dozen fonts per text
    }
    content = BytesIO()
    with rc_context(settings), warnings.catch_warnings():
        # of an SVG the viewer has the fonts, of a PNG the caller is told
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(content, **options)
    return content.getvalue()
