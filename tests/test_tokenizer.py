"""Character tokenizer: encoding, decoding, unknown characters, and its JSON file."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chargpt.errors import RunError, TextError, UnknownCharacterError
from chargpt.text import tokenizer as module
from chargpt.text.display import REPLACEMENT
from chargpt.text.tokenizer import CharTokenizer, Rare, choose_min_count


@given(st.text(min_size=1))
@example("a\r\nb\rc\n\ufeff\0\x1b\u2028")
@example("👩‍👩‍👧‍👦🏳️‍🌈文e\u0301 is not é")
def test_decoding_the_ids_of_a_text_returns_the_text(text: str) -> None:
    tokenizer = CharTokenizer.fit(text)
    assert list(tokenizer.characters) == sorted(set(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert CharTokenizer.from_json(tokenizer.to_json()) == tokenizer


@pytest.mark.parametrize("alphabet", ["ab\0\x7f", "абя", "a😀\U0010ffff"])
@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 131])
def test_long_texts_get_the_id_of_each_character(
    alphabet: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chargpt.text.tokenizer.CHUNK", 64)
    text = "".join(random.Random(size).choices(alphabet, k=size))
    tokenizer = CharTokenizer("".join(sorted(alphabet)))
    expected = [tokenizer.characters.index(character) for character in text]
    assert tokenizer.encode(text).tolist() == expected
    with_unknown = text[:-1] + "!"
    assert tokenizer.encode(with_unknown, unknown="skip").tolist() == expected[:-1]
    assert tokenizer.encode("!" + text, unknown="skip").tolist() == expected


@given(st.text(min_size=1), st.text())
def test_only_unknown_characters_are_skipped_or_replaced(text: str, other: str) -> None:
    tokenizer = CharTokenizer.fit(text)
    known = set(text)
    skipped = "".join(character for character in other if character in known)
    assert tokenizer.decode(tokenizer.encode(other, "skip")) == skipped
    replacement = tokenizer.characters[tokenizer.replacement_id]
    replaced = "".join(character if character in known else replacement for character in other)
    assert tokenizer.decode(tokenizer.encode(other, "replace")) == replaced


@pytest.mark.parametrize(
    ("text", "replacement"),
    [("a? \ufffd", REPLACEMENT), ("a? ", "?"), ("a b", " "), ("ba", "a"), ("\n\tb", "b")],
)
def test_the_replacement_is_the_first_candidate_in_the_vocabulary(
    text: str, replacement: str
) -> None:
    tokenizer = CharTokenizer.fit(text)
    assert tokenizer.decode(tokenizer.encode("ж", "replace")) == replacement


def test_the_eos_token_is_saved() -> None:
    tokenizer = CharTokenizer("\nab", eos_token="\n")
    assert CharTokenizer.from_json(tokenizer.to_json()) == tokenizer
    assert "eos_token" not in CharTokenizer("\nab").to_json()


def test_rare_characters_share_one_unknown_token() -> None:
    tokenizer = CharTokenizer.fit("aaabbbxy", min_count=2, rare="unknown")
    assert (tokenizer.characters, tokenizer.vocab_size) == ("ab", 3)
    assert tokenizer.encode("axby", "replace").tolist() == [0, 2, 1, 2]
    assert tokenizer.decode([0, 2, 1]) == "a\ufffdb"
    assert not CharTokenizer.fit("aabb", min_count=2, rare="unknown").has_unknown


RARE = CharTokenizer.fit("hello world\n" * 3 + "\u20ac\U0001f600J", min_count=3)  # as bytes


def test_rare_characters_become_the_bytes_of_their_utf8_form() -> None:
    assert RARE.characters == "\n dehlorw"
    assert len(RARE.bytes_) == 128 - 9 + 51 + 64  # ASCII but the vocabulary, first, continuation
    assert RARE.vocab_size == 9 + len(RARE.bytes_)
    tokens = RARE.encode("h\u20ac\U0001f600J")
    names = [RARE.token_text(token) for token in tokens]
    assert names == "h <0xE2> <0x82> <0xAC> <0xF0> <0x9F> <0x98> <0x80> <0x4A>".split()
    assert RARE.count_characters(tokens) == 4
    assert RARE.decode(tokens) == "h\u20ac\U0001f600J"
    assert CharTokenizer.fit("aabc", min_count=2, rare="keep").characters == "abc"
    assert not CharTokenizer.fit("aabb", min_count=2).has_bytes


@given(text=st.text() | st.text("hel lo\n\x00\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff"))
def test_byte_tokens_spell_every_text(text: str) -> None:
    tokens = RARE.encode(text)
    assert RARE.decode(tokens) == text
    assert RARE.count_characters(tokens) == len(text)
    assert tokens.dtype == np.uint8
    assert RARE.find_unknown(text) == ""
    read = RARE.decode_stream()
    assert "".join(map(read, tokens.tolist())) == text


def test_bytes_that_are_no_utf8_decode_to_the_replacement_character() -> None:
    euro = RARE.encode("\u20ac")
    for ids in (euro[:2], euro[1:], euro[::-1], [*euro[:1], *RARE.encode("h")]):
        text = RARE.decode(ids)
        assert REPLACEMENT in text
        assert set(text) <= {REPLACEMENT, "h"}
    many = np.tile(euro, 20)
    for size in range(2, 7):  # a chunk may end inside a character
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK", size)
            assert RARE.decode(many) == "\u20ac" * 20


def test_byte_tokens_spell_no_lone_surrogate() -> None:
    with pytest.raises(UnknownCharacterError, match=r"U\+D800"):
        RARE.encode("h\u20ac\ud800")
    assert RARE.decode(RARE.encode("h\u20ac\ud800l", "skip")) == "h\u20acl"
    assert RARE.decode(RARE.encode("h\u20ac\ud800l", "replace")) == "h\u20ac l"
    assert RARE.find_unknown("h\u20ac\ud800") == "\ud800"


def test_the_threshold_is_one_up_to_256_different_characters() -> None:
    few = np.zeros(1000, dtype=np.int64)
    few[:256] = 1
    few[0] = 10**9
    assert choose_min_count(few) == 1
    many = few.copy()
    many[:257] = [10**8, *range(1, 257)]
    assert choose_min_count(many) == round(1e-5 * many.sum())
    assert choose_min_count(np.ones(5000, dtype=np.int64)) == 1


def test_the_error_names_the_unknown_characters_and_the_remedy() -> None:
    for known, text, expected in (
        ("abc", "жaжxyz\n!\u0301", r": 'ж' U\+0436, 'x' .*, '⏎' U\+000A and 2 more;"),
        ("abcä", "\udc80", r": '\ufffd' U\+DC80; leave them out or replace .*text.unknown"),
        ("abcä", "\u0650\u0650", ": '◌\u0650' U\\+0650;"),
        ("abcä", "BabA", "; convert it to lower case, or leave them out or"),
        ("abcä", "AZ", "'A' U\\+0041, 'Z' U\\+005A; leave them out"),
        ("abcä", "a\u0308b", "; convert it to composed characters \\(NFC\\), or leave"),
        ("abcä", "a\u0308z", "; leave them out"),
        ("abca\u0308", "ä", "; convert it to decomposed characters \\(NFD\\), or leave"),
        ("a'-. ", "’—…\u00a0", "has ' for ’, - for —, ... for …, ␣ for U\\+00A0\\); leave"),
        ("a’“”–«", "'\"-„", "has ’ for ', “ or ” for \", – for -, “ or ” for „\\); leave"),
        ("abc", "’", ": '’' U\\+2019; leave"),
    ):
        with pytest.raises(UnknownCharacterError, match=expected):
            CharTokenizer.fit(known).encode(text)


@pytest.mark.parametrize(
    ("known", "text", "form", "counts"),
    [
        ("caféd", "cafe\u0301", "café", ("composed characters (NFC)", 0, 2)),
        ("cafe\u0301", "café", "cafe\u0301", ("decomposed characters (NFD)", 0, 1)),
        ("caféd", "cafe\u0301ж", "caféж", ("composed characters (NFC)", 1, 3)),
        ("cafe", "café", "café", ()),  # neither form is known
        ("cafeé\u0301", "cafe\u0301é", "cafe\u0301é", ()),  # both are
        ("caf", "a" + "\u0315\u0300" * 200_000, "", ()),  # which takes minutes to normalise
    ],
)
@pytest.mark.parametrize("bytewise", [False, True])
def test_a_text_is_read_in_the_normal_form_that_the_vocabulary_knows(
    known: str, text: str, form: str, counts: tuple[str, int, int], bytewise: bool, notes: list[str]
) -> None:
    tokenizer = CharTokenizer("".join(sorted(set(known))), has_bytes=bytewise)
    read = tokenizer.choose_form(text)
    assert read == (form or text)
    if counts:
        converted = "the text was converted to {}: {} of its characters are outside the vocabulary"
        assert notes.pop(0) == f"{converted}, instead of {{}}".format(*counts)
    is_spelled = bytewise and not set(read) <= set(known)
    assert [note.partition(": ")[0] for note in notes] == is_spelled * [
        "rare in the training text, or not in it, and spelled as bytes"
    ]


@pytest.mark.parametrize(
    ("n_characters", "dtype"), [(256, "uint8"), (257, "uint16"), (65537, "uint32")]
)
def test_ids_have_the_smallest_dtype_that_holds_them(n_characters: int, dtype: str) -> None:
    text = "".join(chr(i if i < 0xD800 else i + 0x800) for i in range(n_characters))
    tokenizer = CharTokenizer.fit(text)
    assert tokenizer.dtype == tokenizer.encode(text).dtype == np.dtype(dtype)
    assert tokenizer.encode(text).tolist() == list(range(n_characters))


@pytest.mark.parametrize(
    ("text", "min_count", "message"),
    [
        ("", 1, "no character of the text"),
        ("aabb", 3, r"occurs 3 times; lower text\.min_count"),
        ("a\ud800", 1, "surrogates"),
        ("aaa\ud800", 2, "surrogates"),
    ],
)
def test_a_text_without_usable_characters_is_rejected(
    text: str, min_count: int, message: str
) -> None:
    with pytest.raises(TextError, match=message):
        CharTokenizer.fit(text, min_count=min_count)


@pytest.mark.parametrize("rare", ["bytes", "keep", "unknown"])
def test_a_saved_tokenizer_loads_equal(tmp_path: Path, rare: Rare) -> None:
    tokenizer = CharTokenizer.fit('aab\U0001f600\r\n"\\жж', min_count=2, rare=rare)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert CharTokenizer.load(tmp_path / "tokenizer.json") == tokenizer
    assert hash(CharTokenizer.load(tmp_path / "tokenizer.json")) == hash(tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


VALID = {"format": "chargpt-tokenizer", "version": 1, "characters": "ab", "unknown": False}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "not a chargpt tokenizer"),
        ({"version": 2}, "update chargpt"),
        ({"characters": "ba"}, "not sorted and distinct"),
        ({"characters": "aa"}, "not sorted and distinct"),
        ({"characters": ""}, "not sorted and distinct"),
        ({"characters": "a\ud800"}, "not sorted and distinct"),
        ({"characters": ["a"]}, "missing or has"),
        ({"characters": None}, "missing or has"),
        ({"unknown": 1}, "missing or has"),
        ({"unknown": True, "bytes": True}, "contradict"),
        ({"eos_token": "z"}, "contradict"),
        *((text, "") for text in ("", "[]", "{", "7", "[" * 100_000)),
    ],
)
def test_a_tampered_tokenizer_is_rejected(change: dict[str, object] | str, reason: str) -> None:
    assert CharTokenizer.from_json(json.dumps(VALID)).characters == "ab"
    text = change if isinstance(change, str) else json.dumps({**VALID, **change})
    with pytest.raises(RunError, match=rf"^here cannot be used as a tokenizer.*{reason}"):
        CharTokenizer.from_json(text, origin="here")


def test_unreadable_tokenizer_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    reasons = {"none": "No such file", "bytes": "invalid start byte", "huge": "larger than 16,000"}
    for name, message in reasons.items():
        with pytest.raises(RunError, match=message):
            CharTokenizer.load(tmp_path / f"{name}.json")
