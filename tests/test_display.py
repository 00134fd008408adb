"""Graphemes stay whole; the `regex` package, which has Unicode's tables, is the judge."""

import pytest

from chargpt.analysis.predictions import name_of
from chargpt.cli.sample import mark
from chargpt.text.display import display_text, graphemes, sign_or_code, whole_graphemes

TEXTS = {
    "families and professions": "👨‍👩‍👧‍👦👩🏽‍🚀 👋🏿❤️‍🔥🙂‍↔️🐻‍❄️",
    "flags": "🇩🇪🇯🇵🇫 🏳️‍🌈🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "keycaps": "1️⃣2️⃣ #️⃣*",
    "accents": "cafe\u0301 nai\u0308ve \u0301a\n\u0301",
    "Devanagari": "क्षत्रिय नमस्ते हिन्दी",
    "Thai": "น้ำ ที่ กำ",
    "Hangul": "\u1112\u1161\u11ab\u1100\u1173\u11af 한글",
    "Arabic and Hebrew": "مُحَمَّد שָׁלוֹם",
    "Chinese": "床前明月光，\n疑是地上霜。",
    "nothing": "",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_graphemes_are_those_of_unicode(text: str) -> None:
    regex = pytest.importorskip("regex")
    assert [text[start:end] for start, end in graphemes(text)] == regex.findall(r"\X", text)


def test_only_characters_on_their_own_are_displayed_as_signs() -> None:
    assert display_text("a \n") == "a␣⏎"
    assert display_text("👨‍👩 e\u0301") == "👨‍👩␣e\u0301"
    assert display_text("\u200d") == "ZWJ"
    assert display_text("\u0301") == "◌\u0301"
    assert display_text("a\u3000b\u00a0c\r\n\x1e") == "a␣b␣c␍⏎■"
    assert display_text("\ue000") == "\N{REPLACEMENT CHARACTER}"


def test_every_space_has_a_name_of_its_own() -> None:
    names = {" ": "space", "\n": "line end", "\u3000": "U+3000", "\ue000": "U+E000", "\r": "CR"}
    assert {character: name_of(character) for character in names} == names
    signs = {" ": "␣", "\u3000": "U+3000", "\ue000": "U+E000", "a": "a", "\x1e": "■"}
    assert {character: sign_or_code(character) for character in signs} == signs


def test_a_verbatim_match_is_marked_without_pieces_of_graphemes() -> None:
    text = "ab👨‍👩cde\u0301"
    assert whole_graphemes(text, [(0, 3), (4, 8), (7, 8)]) == [(0, 2), (5, 7)]
    assert mark(text, [(0, 3), (4, 6)]) == "⟦ab⟧👨‍👩⟦c⟧de\u0301"
