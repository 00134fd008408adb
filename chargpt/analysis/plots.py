"""Plots (figures of matplotlib), as SVG or PNG files or inline in a page.

Shapes in this file: H = heads, T = characters.
"""

import itertools
import math
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from chargpt.errors import ConfigError
from chargpt.log import logger
from chargpt.outputs import MARK, with_digest, write_output
from chargpt.text.display import display_text, graphemes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chargpt.analysis.ladder import Ladder
    from chargpt.analysis.predictions import Group

# Okabe and Ito's palette, which most colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE = "#6b7280", "#c9ced6"
MAX_POINTS = 40  # of a smoothed curve
MAX_MARKED = 20  # points of a curve that are marked
LABEL_HEIGHT = 12  # points, of a baseline's label
DEFAULT_FONT = "DejaVu Sans"  # which matplotlib brings


def require_suffix(path: Path | None) -> None:
    """Check that a path, if there is one, ends in .svg or .png.

    Raises:
        ConfigError: it does not.
    """
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path} must end in .svg or .png; rename it")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to an .svg or .png file; log which characters of a PNG no installed font has.

    Raises:
        ConfigError: the file cannot be written.
    """
    is_png = path.suffix == ".png"
    missing = set_fallback_fonts(figure) if is_png else ""
    own = {"Date": None, "Title": "chargpt", "Identifier": MARK}
    metadata = {"Software": MARK} if is_png else own
    content = _rendered(figure, format=path.suffix[1:], dpi=130, metadata=metadata)
    write_output(path, with_digest(content))
    if missing:
        logger.warning(
            f"{path}: no installed font has {' '.join(missing)}, so boxes stand for them; install "
            "one, such as Google's Noto font of that script, or name an .svg file, whose viewer "
            "brings fonts"
        )


def inline(figure: "Figure", name: str) -> Markup:
    """Return a figure as SVG for a page; black takes the colour of the page's text.

    Args:
        figure: is changed.
        name: of the figure, unique in the page, on which the ids in the SVG depend.
    """
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    svg = _rendered(figure, salt=ascii(name), format="svg", metadata=metadata).decode()

    def shorten(tag: re.Match[str]) -> str:
        without_numbers = re.sub(r' id="[^"_]+_\d+"', "", tag[0])  # the same in every figure
        return without_numbers.replace("#000000", "currentColor")

    svg = re.sub(r"<[^>]+>", shorten, svg[svg.index("<svg") :])  # and not the text between tags
    # matplotlib's style sheet would hold for the whole page; the container has a label
    svg = re.sub(r"\s*<defs>\s*<style.*?</defs>", "", svg, count=1, flags=re.DOTALL)
    start = '<svg aria-hidden="true" style="stroke-linejoin: round" '
    return Markup(svg.replace("<svg ", start, 1))


def loss_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    lines: Mapping[str, float],
    title: str,
    width: float = 8,
) -> "Figure":
    """Draw losses in nats per character against steps, with a horizontal line per baseline.

    The legend has the curves' last values; lines are labelled at the right, apart from each other.

    Args:
        curves: (step, nats) points by name.
        lines: nats of the baselines by name.
        title: name of the text.
        width: of the figure, in inches.
    """
    figure, (axes,) = _axes(width, 4.5)
    for (name, points), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        marker = "o" if len(points) <= MAX_MARKED else ""
        label = plain(name) + (f": {points[-1][1]:.3f}" if points else "")
        axes.plot(
            *np.reshape(points, (-1, 2)).T, color=colour, linewidth=2, label=label, marker=marker
        )
    for level in lines.values():
        axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=plain(title))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.autoscale_view()  # heights depend on the limits
    lowest_free = -math.inf
    for name, level in sorted(lines.items(), key=lambda line: line[1]):
        height = axes.transData.transform((0, level))[1] * 72 / figure.dpi
        place = max(height, lowest_free)
        lowest_free = place + LABEL_HEIGHT
        axes.annotate(
            f"{name} {level:.3f}",
            (1, level),
            (6, place - height),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=GREY,
            va="center",
        )
    if curves:
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    return figure


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
    parts = {
        "learning-rate factor": [(row["step"], row["lr_factor"]) for row in rows],
        "gradient norm": smoothed([(row["step"], row["grad_norm"]) for row in rows]),
        "characters per second": smoothed(speeds),
    }
    figure, all_axes = _axes(5.5, 5.5, len(parts))
    for axes, colour, (name, points) in zip(all_axes, COLOURS, parts.items(), strict=False):
        axes.plot(*np.reshape(points, (-1, 2)).T, color=colour)
        axes.set_title(name, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_ylim(bottom=0)
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
    figure, (axes,) = _axes(5, 4)
    axes.plot((0, 1), (0, 1), color=GREY, linestyle="--", linewidth=1)
    total = sum(group.characters for group in groups)
    confidence, accuracy = [g.confidence for g in groups], [g.accuracy for g in groups]
    sizes = [10 + 300 * group.characters / total for group in groups]
    axes.plot(confidence, accuracy, color=COLOURS[0])
    axes.scatter(confidence, accuracy, sizes, color=COLOURS[0])
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.grid(alpha=0.25)
    return figure


def attention(weights: npt.NDArray[np.float32], text: str, titles: Sequence[str]) -> "Figure":
    """Draw the attention weights of heads, a square each, labelled with the characters.

    Args:
        weights: (H, T, T), rows sum to 1.
        text: T characters.
        titles: one per head.
    """
    import_matplotlib()
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    blue = (0, 0.45, 0.7)
    clear_to_blue = LinearSegmentedColormap.from_list("ours", [(*blue, 0), (*blue, 1)])
    size = max(2.6, 0.115 * len(text))
    across = min(4, len(weights))
    down = math.ceil(len(weights) / across)
    width, height = size + 0.3, size + 0.5  # of a head, with its characters and its title
    # without a layout engine, which takes seconds for so many characters
    figure = Figure(figsize=(width * across, height * down))
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


def plain(name: str) -> str:
    """Return a name as a line to draw.

    `$` would begin a formula, a leading `_` would keep it from a legend, and XML has no control
    characters.
    """
    shown = display_text(name, keep_spaces=True).replace("$", r"\$")
    return (" " if name.startswith("_") else "") + shown


def ladder(result: "Ladder") -> "Figure":
    """Draw the losses of a ladder as bars, in bits per character."""
    kinds = {"n-gram": GREY, "compressed": PALE, "trained": COLOURS[0]}
    bars = [
        (name, group.loss.value, group.loss.margin or 0.0, kinds[result.kind_of(group)])
        for name, group in result.groups.items()
    ]
    figure, (axes,) = _axes(8, 0.6 + 0.28 * len(bars))
    names, nats, margins, colours = zip(*bars, strict=True)
    words = {"val": "validation"}.get(result.split, result.split)
    bits, errors = ([each / math.log(2) for each in values] for values in (nats, margins))
    places = range(len(bars))
    axes.barh(places, bits, color=colours, height=0.7)
    axes.errorbar(bits, places, xerr=errors, fmt="none", ecolor="black", elinewidth=1)
    for place, value, error in zip(places, bits, errors, strict=True):
        axes.annotate(
            f"{value:.3f}", (value + error, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, [*map(plain, names)])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(bits))
    axes.set(xlabel=f"bits per character of the {words} split (lower is better)")
    axes.set_title(
        f"{plain(result.title)}: n-grams (grey), compressors (pale), trained (blue)", fontsize=10
    )
    return figure


def _axes(width: float, height: float, n_rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """Return a figure, sizes in inches, and its axes, one below the other, of two spines each."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = [*figure.subplots(n_rows, sharex=True, squeeze=False).flat]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def import_matplotlib() -> None:
    """Import matplotlib, also if MPLBACKEND names a backend that is not installed.

    Jupyter sets it for every program that a notebook starts. Figures here are drawn without one.
    """
    if "matplotlib" not in sys.modules and (backend := os.environ.pop("MPLBACKEND", "")):
        import matplotlib

        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend  # of a notebook's own plots


def _rendered(figure: "Figure", salt: str = "chargpt", **options: Any) -> bytes:
    """Return the content of an image file; `salt` makes the ids in an SVG reproducible."""
    from matplotlib import rc_context

    settings: Any = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.sans-serif": [DEFAULT_FONT],  # SVG would otherwise list a dozen fonts per text
    }
    content = BytesIO()
    with rc_context(settings), warnings.catch_warnings():
        # of an SVG the viewer has the fonts, of a PNG the caller is told
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(content, **options)
    return content.getvalue()


def set_fallback_fonts(figure: "Figure") -> str:
    """Give the texts of a figure installed fonts that have the characters the default font lacks.

    Matplotlib takes each character from the first family of a list that has it. Only families that
    are needed are listed, since it opens all of them.

    Returns:
        The characters that no installed font has, sorted.
    """
    from matplotlib.font_manager import findfont
    from matplotlib.text import Text

    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    drawn = {
        character
        for character in "".join(text.get_text() for text in texts)
        if unicodedata.category(character) not in ("Cf", "Cc")
        and not "\ufe00" <= character <= "\ufe0f"  # variation selectors
    }
    missing = drawn - characters_of_font(findfont(DEFAULT_FONT), drawn)
    if missing:
        families, missing = choose_fonts(missing)
        for text in texts:
            text.set_fontfamily([DEFAULT_FONT, *families])
    return "".join(sorted(missing))


def choose_fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Return families that have the characters, few if possible, and the characters none has."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for path in {*findSystemFonts()} - {font.fname for font in fontManager.ttflist}:
        # installed since matplotlib listed them; damaged ones have many kinds of errors
        with suppress(Exception):
            fontManager.addfont(path)
    # the regular font of each family, the last one here
    fonts = sorted(fontManager.ttflist, key=lambda f: (f.style == "normal", f.weight == 400))
    paths = {font.name: font.fname for font in fonts}
    found = {name: characters_of_font(path, characters) for name, path in paths.items()}
    families = []
    for name in sorted(found, key=lambda name: len(found[name]), reverse=True):
        is_placeholder = "lastresort" in name.replace(" ", "").lower()
        if found[name] & characters and not is_placeholder:
            families.append(name)
            characters = characters - found[name]
    return families, characters


def characters_of_font(path: str, characters: set[str]) -> set[str]:
    """Return those of the characters that a font file has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):  # removed since matplotlib listed it, or damaged
        return set()
    return {c for c in characters if font.get_char_index(ord(c))}
