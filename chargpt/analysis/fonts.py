"""Fonts for the characters of a figure that its default font lacks."""

import re
import unicodedata
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "DejaVu Sans"  # which matplotlib brings
# blocks of Unicode that Noto Sans CJK has
CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f"
    "\uff00-\uffef\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
# first words of the names of characters that have a Noto Sans of their own
SCRIPTS = frozenset(
    "ADLAM ARABIC ARMENIAN BALINESE BENGALI CHAM CHEROKEE COPTIC CUNEIFORM DESERET DEVANAGARI "
    "ETHIOPIC GEORGIAN GLAGOLITIC GOTHIC GUJARATI GURMUKHI HEBREW JAVANESE KANNADA KHMER LAO "
    "LEPCHA LIMBU MALAYALAM MONGOLIAN MYANMAR OGHAM ORIYA OSMANYA RUNIC SHAVIAN SINHALA "
    "SUNDANESE SYRIAC TAMIL TELUGU THAANA THAI TIFINAGH VAI YI".split()
)
OTHER_FONTS = {
    "CANADIAN": "Noto Sans Canadian Aboriginal",
    "EGYPTIAN": "Noto Sans Egyptian Hieroglyphs",
    "MATHEMATICAL": "Noto Sans Math",
    "NKO": "Noto Sans NKo",
    "TIBETAN": "Noto Serif Tibetan",
}


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
    missing = {c for text in texts for c in text.get_text() if may_lack_glyph(c)}
    missing -= found_in(findfont(DEFAULT), missing)
    chosen = choose_fonts(missing) if missing else {}
    if missing.difference(*chosen.values()) and add_new_fonts():
        chosen = choose_fonts(missing)
    for text in texts if chosen else ():
        text.set_fontfamily([DEFAULT, *chosen])
    return "".join(sorted(missing.difference(*chosen.values())))


def may_lack_glyph(character: str) -> bool:
    """Return whether the default font may lack a character that is drawn."""
    return (
        not character.isascii()
        and unicodedata.category(character) not in ("Cf", "Cc")
        and not "\ufe00" <= character <= "\ufe0f"  # variation selectors
    )


def choose_fonts(characters: set[str]) -> dict[str, set[str]]:
    """Return families that together have as many of the characters as any, and what each adds."""
    from matplotlib.font_manager import fontManager

    found: dict[str, set[str]] = {}
    # regular fonts first
    for font in sorted(fontManager.ttflist, key=lambda f: (f.style != "normal", f.weight != 400)):
        is_placeholder = "lastresort" in font.name.replace(" ", "").lower()
        if font.name not in found and not is_placeholder:
            found[font.name] = found_in(font.fname, characters)
    chosen = {}
    missing = set(characters)
    while any(each & missing for each in found.values()):
        name = max(found, key=lambda name: len(found[name] & missing))
        chosen[name] = found[name] & missing
        missing -= chosen[name]
    return chosen


def found_in(path: str, characters: set[str]) -> set[str]:
    """Return those of the characters that a font file has; none if it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):  # removed since matplotlib listed it, or damaged
        return set()
    return {c for c in characters if font.get_char_index(ord(c))}


def add_new_fonts() -> bool:
    """Make known the fonts installed since matplotlib listed them; return whether there are any."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    before = len(fontManager.ttflist)
    for path in {*findSystemFonts()} - {font.fname for font in fontManager.ttflist}:
        with suppress(Exception):  # a damaged file, or one of bitmaps; its kinds of error are many
            fontManager.addfont(path)
    return len(fontManager.ttflist) > before


def fonts_for(characters: str) -> list[str]:
    """Return the names of fonts to install for such characters, the most useful one first."""
    return [name for name, _ in Counter(map(_font_for, characters)).most_common()]


def _font_for(character: str) -> str:
    script = re.split("[ -]", unicodedata.name(character, ""))[0]
    if CJK.match(character):
        return "Noto Sans CJK"
    if script in SCRIPTS:
        return f"Noto Sans {script.title()}"
    if script in OTHER_FONTS:
        return OTHER_FONTS[script]
    category = unicodedata.category(character)
    if category in ("So", "Sk"):
        is_emoji = unicodedata.east_asian_width(character) == "W" or (
            "\U0001f1e6" <= character < "\U0001fb00"
        )
        return "Noto Emoji" if is_emoji else "Noto Sans Symbols 2"
    return "Noto Sans Math" if category == "Sm" else "Noto Sans"
