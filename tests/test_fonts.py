"""Pictures take the characters that the default font lacks from the fonts that are installed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, run_cli
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from chargpt.analysis import plots

RARE = "𰀀𰀁𰀂𰀃"  # of an extension of Chinese that hardly any font has
TINY = (
    "-s train.max_steps=2 -s train.batch_size=4 -s model.n_layer=1 -s model.n_head=1 "
    "-s model.n_embd=16 -s model.block_size=8"
).split()


def make_font(path: Path, characters: str, name: str) -> None:
    """Write a font in which each of the characters is a filled square."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    square = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap(dict.fromkeys(map(ord, characters), "square"))
    builder.setupGlyf({".notdef": square, "square": square})
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "square"), (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path.parent.mkdir(parents=True, exist_ok=True)
    builder.save(path)


@pytest.mark.skipif(sys.platform != "linux", reason="fonts are installed elsewhere")
@pytest.mark.slow
def test_a_picture_without_a_font_says_so_and_finds_it_once_installed(
    cli: Cli, tmp_path: Path
) -> None:
    Path("rare.txt").write_text(f"{RARE}\n" * 60, encoding="utf-8")
    assert cli("train", "rare.txt", *TINY, "--out", "mine").returncode == 0
    own = {
        name: str(tmp_path / name) for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
    }

    def plot(name: str) -> str:
        words = ("explain", "mine", "--section", "attention", "--plot", name)
        done = run_cli(*words, cwd=tmp_path, **own)
        assert done.returncode == 0, done.stderr
        return done.stderr

    said = plot("before.png").splitlines()[-1]  # after what matplotlib says of its first start
    assert f"before.png: no installed font has {' '.join(RARE)}, so boxes stand" in said
    assert "no installed font" not in plot("before.svg")
    make_font(Path(own["XDG_DATA_HOME"]) / "fonts/rare.ttf", RARE[:2], "Rare One")
    make_font(Path(own["XDG_DATA_HOME"]) / "fonts/more.ttf", RARE[2:], "Rare Two")
    assert plot("after.png") == ""
    assert Path("after.png").read_bytes() != Path("before.png").read_bytes()


def test_fonts_are_searched_only_for_characters_that_the_default_font_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("the fonts were searched")

    monkeypatch.setattr(plots, "choose_fonts", searched)
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", searched)
    weights = np.eye(4, dtype=np.float32)[None]
    for text in ("abcd", "жить", "a ⏎é"):
        figure = plots.attention(weights, text, ["one"])
        plots.save(figure, tmp_path / "a.png")
    assert notes == []


def test_a_damaged_font_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "bad.ttf").write_bytes(b"no font")
    for path in ("bad.ttf", "gone.ttf"):
        assert plots.characters_of_font(str(tmp_path / path), {"a"}) == set()
    make_font(tmp_path / "good.ttf", "a", "Good")
    assert plots.characters_of_font(str(tmp_path / "good.ttf"), {"a", "b"}) == {"a"}
