"""Fonts for the characters of a figure that its default font lacks."""

import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "DejaVu Sans"  # which matplotlib brings


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
    drawn = {c for text in texts for c in text.get_text() if may_lack_glyph(c)}
    missing = drawn - found_in(findfont(DEFAULT), drawn)
    if missing:
        add_new_fonts()
        families, missing = choose_fonts(missing)
        for text in texts:
            text.set_fontfamily([DEFAULT, *families])
    return "".join(sorted(missing))


def may_lack_glyph(character: str) -> bool:
    """Return whether the default font may lack a character that is drawn."""
    return (
        not character.isascii()
        and unicodedata.category(character) not in ("Cf", "Cc")
        and not "\ufe00" <= character <= "\ufe0f"  # variation selectors
    )


def choose_fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Return families that have the characters, few if possible, and the characters none has."""
    from matplotlib.font_manager import fontManager

    # the regular font of each family, the last one here
    fonts = sorted(fontManager.ttflist, key=lambda f: (f.style == "normal", f.weight == 400))
    paths = {font.name: font.fname for font in fonts}
    found = {name: found_in(path, characters) for name, path in paths.items()}
    families = []
    for name in sorted(found, key=lambda name: len(found[name]), reverse=True):
        is_placeholder = "lastresort" in name.replace(" ", "").lower()
        if found[name] & characters and not is_placeholder:
            families.append(name)
            characters = characters - found[name]
    return families, characters


def found_in(path: str, characters: set[str]) -> set[str]:
    """Return those of the characters that a font file has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):  # removed since matplotlib listed it, or damaged
        return set()
    return {c for c in characters if font.get_char_index(ord(c))}


def add_new_fonts() -> None:
    """Make known the fonts that were installed since matplotlib listed them."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for path in {*findSystemFonts()} - {font.fname for font in fontManager.ttflist}:
        with suppress(Exception):  # a damaged file, or one of bitmaps; its kinds of error are many
            fontManager.addfont(path)
