"""Text for display: visible signs for invisible characters, and graphemes.

A grapheme is what a reader sees as one character, such as a family emoji or an accented letter. The
rules are those of UAX #29 for marks, joiners, emoji, flags, Hangul and conjuncts, by category
instead of its tables: Python has no such tables, and drawing a text needs no exact agreement. Where
they differ they mostly join more, such as conjuncts of every Indic script.
"""

import itertools
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

REPLACEMENT = "\ufffd"  # stands for an unknown character, and for bytes that do not decode
ZWJ = "\N{ZERO WIDTH JOINER}"
# but \n and \t; and what is no text, or no character in XML
CONTROLS = "\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff"
CONTROL = re.compile(f"[{CONTROLS}\n\u2028\u2029]")  # in a line
UNSAFE = re.compile(f"[{CONTROLS}\u202a-\u202e\u2066-\u2069]")  # or reorders the text around it
FORMATS = re.compile("[\xad\u061c\u200b\u200e\u200f\u2060-\u2064\ufeff]")  # outside graphemes
LINE_END = re.compile("[\r\x85\u2028\u2029]|\n(?!  chargpt )")  # but before a command to copy
FIRST_CONTROL_PICTURE = 0x2400  # Unicode's signs of the control characters, in their order
CONTROL_NAMES = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI "
    "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
).split()


def graphemes(text: str) -> list[tuple[int, int]]:
    """Return the graphemes of a text as (start, end) positions in order."""
    edges, flag_letters = [], 0  # consecutive letters of flags are paired from the left
    for index, character in enumerate(text):
        is_flag_letter = "\U0001f1e6" <= character <= "\U0001f1ff"
        completes_flag = is_flag_letter and flag_letters % 2 == 1
        if index == 0 or not (completes_flag or _extends(text[index - 1], character)):
            edges.append(index)
        flag_letters = flag_letters + 1 if is_flag_letter else 0
    return list(itertools.pairwise([*edges, len(text)]))


def _extends(before: str, character: str) -> bool:
    """Return whether a character belongs to the grapheme of the one before; flags aside."""
    if unicodedata.category(before) in ("Cc", "Zl", "Zp"):
        return False  # a line end or another control character stays alone
    category = unicodedata.category(character)
    return (
        category[0] == "M"  # combining marks, variation selectors and keycaps
        or character in (ZWJ, "\N{ZERO WIDTH NON-JOINER}")
        or "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= character <= "\U000e007f"  # tags: the flags of regions
        or "\u1160" <= character <= "\u11ff"  # Hangul vowels and final consonants
        or "\ud7b0" <= character <= "\ud7fb"
        or character in "\u0e33\u0eb3"  # the vowel sign am of Thai and Lao
        or (before == ZWJ and (category[0] == "S" or category in ("Cn", "Po", "Lo")))
        or (unicodedata.combining(before) == 9 and category == "Lo")  # conjuncts
    )


def display_char(character: str) -> str:
    """Return what to draw for a character or byte token: a symbol if it is invisible, a dotted
    circle under a lone mark, else itself."""
    signs = {
        "\n": "\N{RETURN SYMBOL}",
        "\t": "\N{RIGHTWARDS ARROW TO BAR}",
        "\x1e": "\N{BLACK SQUARE}",  # the end of a document; common fonts lack U+241E
        "\N{ZERO WIDTH JOINER}": "ZWJ",
        "\N{VARIATION SELECTOR-16}": "VS16",
    }
    if character in signs or len(character) > 1:
        return signs.get(character, character)
    category = unicodedata.category(character)
    if category[0] == "M":
        return f"\N{DOTTED CIRCLE}{character}"  # a mark alone would be drawn on its neighbour
    if category == "Zs":
        return "\N{OPEN BOX}"  # a space of any width
    if character < " ":
        return chr(FIRST_CONTROL_PICTURE + ord(character))
    return character if character.isprintable() else REPLACEMENT


def sign_or_code(character: str) -> str:
    """Return a character as a sign, or as U+XXXX if it has no sign of its own."""
    sign = display_char(character)
    has_sign = sign != REPLACEMENT and (sign != display_char(" ") or character == " ")
    return sign if has_sign else f"U+{ord(character):04X}"


def display_text(text: str, *, keep_spaces: bool = False) -> str:
    """Return a text with its invisible characters as signs, unless they are part of a grapheme.

    With `keep_spaces`, spaces stay as they are.
    """
    parts = (text[start:end] for start, end in graphemes(text))
    return "".join(
        printable(part) if len(part) > 1 or (keep_spaces and part == " ") else display_char(part)
        for part in parts
    )


def printable(text: str) -> str:
    """Return text with control characters as signs, so that it cannot control a terminal.

    Other invisible characters are kept. Line ends of every kind become LF.
    """
    text = re.sub("\r\n?|[\u2028\u2029]", "\n", text)
    return UNSAFE.sub(lambda found: display_char(found[0]), text)


def one_line(text: str) -> str:
    """Return a printable message as one line, whatever the names in it, and commands below it."""
    return printable(LINE_END.sub(lambda found: display_char(found[0]), text))


def end_sign(ended: str, eos_token: str) -> str:
    """Return the sign to show after a sampled document: its EOS token's, or … if it was cut.

    `ended` is that of a `Sample`. There is no sign for lines, whose end shows, nor for a text that
    is no list of documents, with the EOS token "".
    """
    if eos_token in ("", "\n"):
        return ""
    return display_char(eos_token) if ended == "document" else "…"


def whole_graphemes(text: str, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (start, end) parts of a text, shrunk to the graphemes inside, without empty ones."""
    starts = [*(start for start, _ in graphemes(text)), len(text)]
    shrunk = [
        (starts[bisect_left(starts, start)], starts[bisect_right(starts, end) - 1])
        for start, end in parts
    ]
    return [(start, end) for start, end in shrunk if start < end]
