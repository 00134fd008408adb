"""Preparing a text: sources, decoding, encoding, splits, and the files of its tokens."""

import bz2
import codecs
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POSIX, run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import failing, flip
from xxhash import xxh3_64_intdigest

from chargpt.config import TextConfig
from chargpt.errors import RunError, TextError, UnreadableError
from chargpt.files import to_json
from chargpt.text import source
from chargpt.text.corpus import SPLITS, Corpus
from chargpt.text.describe import count_line_ends, describe
from chargpt.text.prepare import LINES, META, TOKENS, load_corpus, prepare, read_prepared
from chargpt.text.source import find_text, read_text
from chargpt.text.tokenizer import CharTokenizer

Write = Callable[..., Path]
SPLIT_FILES = {"val": "valid", "test": "test"}
MIXED = "Ein Bär, ёжик, 漢字, 👩‍👩‍👧 and e\u0301.\r\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write bytes or UTF-8 text to a file of this test's folder."""

    def write(content: str | bytes, name: str = "text.txt") -> Path:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def load(path: Path | str | None, **values: object) -> Corpus:
    text = None if path is None else str(path)
    return load_corpus(TextConfig.model_validate({"path": text, **values}))


def text_of(corpus: Corpus) -> str:
    return corpus.tokenizer.decode(corpus.tokens)


def line_of(corpus: Corpus, passage: str) -> tuple[str, int]:
    """Return file and line of a passage that the training split has."""
    position = corpus.tokenizer.decode(corpus.split("train")).index(passage)
    place = corpus.place_of(position)
    assert place is not None
    return place


def error_message(path: Path | str, **values: object) -> str:
    with pytest.raises(TextError) as caught:
        load(path, **values)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Pipe(io.BytesIO):
    """Bytes that can be read only once."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation("a pipe cannot seek")


def corpus_of_size(size: int, val: float = 0.1, test: float = 0.0) -> Corpus:
    tokens = np.broadcast_to(np.uint8(0), (size,))
    settings = TextConfig(val_fraction=val, test_fraction=test)
    return Corpus("text.txt", "key", CharTokenizer("a"), tokens, settings)


# Splits


@pytest.mark.parametrize(
    ("size", "val", "test", "sizes"),
    [
        (1_115_394, 0.1, 0.0, (1_003_854, 111_540, 0)),
        (100_000_000, 0.05, 0.05, (90_000_000, 5_000_000, 5_000_000)),
        (10, 0.1, 0.0, (9, 1, 0)),
        (1000, 0.29, 0.57, (140, 290, 570)),
        (1, 0.5, 0.4, (0, 1, 0)),
    ],
)
def test_split_sizes(size: int, val: float, test: float, sizes: tuple[int, int, int]) -> None:
    corpus = corpus_of_size(size, val, test)
    assert tuple(corpus.split(name).size for name in ("train", "val", "test")) == sizes


@given(st.integers(1, 10**6), st.floats(0.001, 0.6), st.floats(0, 0.39))
def test_splits_are_consecutive_and_cover_the_text(size: int, val: float, test: float) -> None:
    corpus = replace(corpus_of_size(size, val, test), tokens=np.arange(size))
    splits = [corpus.split(name) for name in ("train", "val", "test")]
    assert np.array_equal(np.concatenate(splits), np.arange(size))


def test_a_text_too_short_for_a_block_names_the_settings_to_change() -> None:
    corpus_of_size(1290).require_blocks(128)
    corpus_of_size(1280).require_blocks(127)
    corpus_of_size(1280, 0.101).require_blocks(128)
    for corpus, expected in (
        (corpus_of_size(1280), r"1,280 characters, 1,152 to train on and 128 to validate on, "),
        (corpus_of_size(1280), r"set text.val_fraction to 0.101, or set .*block_size to 127 or"),
        (corpus_of_size(1280, 0.95), r"set text.val_fraction to 0.101, "),  # too few to train on
        (corpus_of_size(1), r" 0 to train on.* of each; give a longer text$"),
        (corpus_of_size(400, 0.1, 0.5), r"of each; set model.block_size to 39 or less, or give"),
    ):
        with pytest.raises(TextError, match=expected):
            corpus.require_blocks(128)


@settings(max_examples=200)
@given(size=st.integers(20, 2000), test=st.sampled_from([0.0, 0.1, 0.3, 0.5]))
def test_the_advised_fraction_suffices(size: int, test: float) -> None:
    try:
        corpus_of_size(size, 0.1, test).require_blocks(64)
    except TextError as error:
        advised = re.search(r"text.val_fraction to ([0-9.]+)", str(error))
        if advised:
            corpus = corpus_of_size(size, float(advised[1]), test)
            assert min(len(corpus.split("train")), len(corpus.split("val"))) > 64


def test_lengths_of_a_text_with_byte_tokens_are_said_in_tokens() -> None:
    corpus = load_corpus(TextConfig(min_count=10), text="ab" * 20 + "éèêëàâäùûü" * 4)
    with pytest.raises(TextError, match=r"holds 80 characters, \d+ tokens to train on and 1\d "):
        corpus.require_blocks(30)


# Decoding


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"), min_size=1),
    chunk=st.integers(1, 7),
)
def test_decoding_the_tokens_returns_the_text_for_any_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode("utf-8"))
    corpus = load(path)
    assert text_of(corpus) == text
    assert corpus.tokenizer == CharTokenizer.fit(text)


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (b"", "utf-8-sig"),
        (b"", "utf-16"),
        (b"", "utf-32"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("chunk", [4, 5, 1 << 20])
def test_a_byte_order_mark_sets_the_encoding_and_is_removed(
    write: Write, monkeypatch: pytest.MonkeyPatch, mark: bytes, codec: str, chunk: int
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    assert text_of(load(write(mark + MIXED.encode(codec)))) == MIXED


@pytest.mark.parametrize("codec", ["cp1251", "koi8-r", "UTF-16LE", "latin_1", "shift_jis", "utf8"])
def test_an_encoding_can_be_named(write: Write, codec: str) -> None:
    text = "Wörld\r\n" if codec == "latin_1" else "Привет\r\n"
    assert text_of(load(write(text.encode(codec)), encoding=codec)) == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("big5", "滾滾長江東逝水，浪花淘盡英雄。是非成敗轉頭空，青山依舊在，幾度夕陽紅。\n"),
        ("shift_jis", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"),
        ("euc_jp", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"),
        ("euc_kr", "나라의 말이 중국과 달라 한자와는 서로 잘 통하지 아니하므로\n"),
        ("gbk", "话说天下大势，分久必合，合久必分：周末七国分争，并入于秦。\n"),
        ("cp1251", "Все счастливые семьи похожи друг на друга\n"),
        ("koi8_r", "Все счастливые семьи похожи друг на друга\n"),
        ("cp1252", "Le café, où elle était née, n’avait pas changé : l’été s’achevait déjà.\n"),
        ("cp1252", "let author = 'Ola Söder'\n"),
        ("cp1252", "“It’s £5,” she said — and left.\n"),
        ("latin_1", "It cost £5 and the café was shut.\n"),
        ("latin_1", "Der Bär aß süße Äpfel und öffnete die Tür.\n"),
        ("latin_1", "En un lugar vivía un hidalgo de rocín flaco. Tenía una sobrina; él, años.\n"),
        ("cp1250", "Zażółć gęślą jaźń, źdźbło trawy i święty spokój.\n"),
        ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy.\n"),
        ("cp1250", "Sva ljudska bića rađaju se slobodna; čovjek, žena.\n"),
        ("cp1253", "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.\n"),
        ("cp1254", "Bir varmış, bir yokmuş; evvel zaman içinde bir padişah yaşarmış.\n"),
        ("iso8859_2", "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności\n"),
        ("iso8859_2", "Árvíztűrő tükörfúrógép. Hol volt, hol nem volt, volt egyszer.\n"),
    ],
)
@pytest.mark.parametrize("n_ascii", [0, 40_000])
def test_the_first_encoding_that_is_advised_reads_the_text_as_shown(
    encoding: str, text: str, n_ascii: int, write: Write
) -> None:
    path = write(b"plain\n" * (n_ascii // 6) + (text * 20).encode(encoding))
    advised = re.search(r'\(--encoding (\S+) reads it as "(.*?)"[,)]', error_message(path))
    assert advised is not None
    assert text_of(load(path, encoding=advised[1])).endswith(text * 20)
    if encoding in ("cp1252", "latin_1"):  # other code pages read some of these texts too
        assert advised[1] == "cp1252"
    words = [word for word in text.split() if not word.isascii()]
    assert advised[2] == " ".join(words)[:24].strip()


@pytest.mark.parametrize("workers", [False, True])
def test_an_odd_file_among_utf_8_is_converted_or_left_out(
    write: Write, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    folder = write(MIXED, "a.txt").parent
    odd = write("Все счастливые семьи похожи друг на друга\n".encode("cp1251"), "old/b 1.txt")
    if workers:
        monkeypatch.setattr("chargpt.text.prepare.MIN_SEGMENTS", 1)
    message = error_message(folder)
    assert message.startswith(f"{odd} is not UTF-8 text (byte 0xC2 ")
    assert f"`iconv -f cp1251 -t utf-8 '{odd}'`" in message
    assert message.endswith("""or leave it out with -s text.exclude='["old/b 1.txt"]'""")
    second = write("Счастье\n".encode("cp1251"), "old/[c], 2.txt")
    assert message != error_message(folder)
    assert error_message(folder).endswith("""text.exclude='["old/[[]c], 2.txt", "old/b 1.txt"]'""")
    second.unlink()
    packed = write(gzip.compress("Счастье\n".encode("cp1251")), "c.txt.gz")
    assert f"`zcat {packed} | iconv -f cp1251 -t utf-8`" in error_message(folder)
    packed.unlink()
    assert text_of(load(folder, exclude=["old/b 1.txt"])) == MIXED
    write(b"\x98", "old/b 1.txt")
    assert "(--encoding auto reads it)" in error_message(folder, encoding="ascii")
    assert "is not IDNA text" in error_message(folder, encoding="idna")  # which replaces nothing
    for name in ("a.txt", "old/b 1.txt"):
        write("Все семьи похожи\n".encode("cp1251"), name)
    assert "whole text (--encoding cp1251 reads it as" in error_message(folder)


def test_replacing_is_advised_only_where_few_bytes_do_not_decode(
    write: Write, notes: list[str]
) -> None:
    for n_ascii, is_advised in ((0, False), (9000, True)):
        path = write(b"plain " * n_ascii + "Жил-был пёс.\n".encode("cp1251"))
        message = error_message(path)
        assert message.endswith("--encoding-errors replace") == is_advised
        load(path, encoding_errors="replace")
        assert ("the encoding is probably another one" in notes[-1]) != is_advised


@pytest.mark.parametrize("chunk", [3, 16, 1 << 20])
@pytest.mark.parametrize(
    ("content", "encoding", "where"),
    [
        (b"plain\n" * 5 + b"don\x92t", "auto", "byte 0x92 at offset 33"),
        ("жжж".encode() + b"\xd0a", "auto", "byte 0xD0 at offset 6"),
        (codecs.BOM_UTF16_LE + b"a\0b", "auto", "byte 0x62 at offset 4"),
        (b"abc\x81", "cp1252", "byte 0x81 at offset 3"),
        (codecs.BOM_UTF8 + b"ab\xff", "auto", "byte 0xFF at offset 5"),
    ],
)
def test_undecodable_bytes_are_named_with_their_offset(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    content: bytes,
    encoding: str,
    where: str,
    notes: list[str],
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    path = write(content)
    message = error_message(path, encoding=encoding)
    assert where in message
    assert str(path) in message
    assert "; name the encoding of the whole text" in message
    text = text_of(load(path, encoding=encoding, encoding_errors="replace"))
    known = codecs.lookup("utf-16" if content[:1] == b"\xff" else encoding.replace("auto", "utf-8"))
    assert text == known.decode(content, "replace")[0].removeprefix("\ufeff")
    note = f"bytes that do not decode, replaced by U+FFFD: {text.count(chr(0xFFFD))}"
    assert "\ufffd" in text
    assert any(each.startswith(note) for each in notes)


def test_a_wrong_encoding_and_a_file_that_was_cut_are_said(write: Write, notes: list[str]) -> None:
    path = write("Ünten ging der Fluß.\n" * 9)
    assert "(--encoding auto reads it)" in error_message(path, encoding="ascii")
    load(path, encoding="cp1252")
    assert notes[1:] == ["text.txt looks like UTF-8 and is read as cp1252"]
    marked = write("ab".encode("utf-16"), "marked.txt")
    assert "(--encoding auto reads it)" in error_message(marked, encoding="utf-8")
    cut = write("aß".encode()[:-1], "cut file.txt")
    assert error_message(cut).endswith(f"leave its last bytes out: head -c 1 '{cut}'")


def test_a_binary_is_rejected_and_utf_16_without_a_mark_is_named(write: Write) -> None:
    words = "is binary (control characters, such as NUL bytes: 2 of the first 9 bytes); name a text"
    assert words in error_message(write(b"\x7fELF...\0\0"))
    assert words in error_message(write(b"\x7fELF...\0\0"), encoding="UTF8")
    for text in ("hello", "白日依山尽，黄河入海流。欲穷千里目，更上一层楼。\n"):
        for encoding in ("utf-16-le", "utf-16-be"):
            assert f"--encoding {encoding}" in error_message(write(text.encode(encoding)))
    unpaired = write(b"\x00\xd8a\x00", "unpaired.txt")
    assert "UTF-16-LE" in error_message(unpaired, encoding="utf-16-le")


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_few_nul_bytes_are_read_and_counted(write: Write, notes: list[str], errors: str) -> None:
    text = "It was a dark\0 and stormy night.\n" + "The sea.\n" * 20
    folder = write(text).parent
    for path in (folder / "text.txt", folder):
        assert text_of(load(path, encoding_errors=errors)) == text
        assert notes[-1] == "NUL characters, U+0000, in the text: 1"
    write("The light.\n", "2.txt")
    assert text_of(load(folder)) == "The light.\n" + text


ZIP = b"PK\x03\x04" + b"\0" * 26
FORMATS = [
    (b"%PDF-1.7\n%\xe2\xe3\n", "a PDF document", "pdftotext"),
    (ZIP + b"mimetypeapplication/epub+zipPK", "an EPUB book", "pandoc -t plain"),
    (ZIP + b"mimetypeapplication/vnd.oasis.opendocument.text", "an OpenDocument file", "pandoc"),
    (ZIP + b"[Content_Types].xml...word/document.xml", "a Word document", "pandoc"),
    (ZIP + b"chapter.txt", "a ZIP archive", "unzip"),
    (b"{\\rtf1\\ansi caf\\'e9}", "an RTF document", "pandoc"),
    (b"chapter.txt".ljust(257, b"\0") + b"ustar\00000", "a tar archive", "tar -xf"),
    (gzip.compress(b"chapter.txt".ljust(257, b"\0") + b"ustar\00000"), "a tar archive", "tar -xf"),
    (bz2.compress(b"text"), "a bzip2 file", "bunzip2"),
    (lzma.compress(b"text"), "an xz file", "unxz"),
    (b"\x89PNG\r\n\x1a\n", "an image", "tesseract"),
    (pickle.dumps("text"), "a Python pickle", "the program that wrote it"),
]


@pytest.mark.parametrize(("content", "kind", "tool"), FORMATS, ids=[row[1] for row in FORMATS])
def test_a_file_of_another_format_is_named_with_the_tool_that_makes_text_of_it(
    write: Write, notes: list[str], content: bytes, kind: str, tool: str
) -> None:
    path = write(content, "a.doc")
    sentence = f"a.doc is {kind}; make text of it with `{tool}"
    assert sentence in error_message(path)
    sentence = sentence.replace("a.doc", "a.doc (1 of 1)")
    assert "(text.suffixes), and " + sentence in error_message(path.parent)
    write("text", "b.txt")
    assert text_of(load(path.parent, suffixes=("doc", "txt"))) == "text"
    assert f"files not read: 1, such as a.doc, which is {kind}; make text" in "".join(notes)
    load(path, encoding="latin-1")
    assert any(each.startswith(f"a.doc is {kind}; make text of it with ") for each in notes)


def test_mustard_is_no_tar_archive(write: Write) -> None:
    text = "mustard".rjust(263, "=")
    assert text_of(load(write(text))) == text


@pytest.mark.parametrize(
    "content",
    ["<!DOCTYPE html>\n<p>a", "\ufeff\n<HTML>a", "<?xml ?><a/>", "<!-- a\n -->\n<p>a"],
)
@pytest.mark.parametrize("encoding", ["auto", "utf-8", "utf-16"])
def test_markup_is_read_with_a_warning(
    write: Write, notes: list[str], content: str, encoding: str
) -> None:
    text = content.removeprefix("\ufeff")
    path = write(content if encoding == "auto" else text.encode(encoding), "a.html")
    assert text_of(load(path, encoding=encoding)) == text
    (note,) = notes
    assert note.startswith("files of HTML or XML, whose tags are read as text: 1, such as a.html; ")
    assert "pandoc -t plain" in note


@pytest.mark.parametrize("encoding", ["utf-9", "base64", "a\0b", "undefined"])
def test_an_unknown_encoding_is_rejected(write: Write, encoding: str) -> None:
    words = "undefined encoding" if encoding == "undefined" else "common ones are utf-8"
    assert words in error_message(write("abc"), encoding=encoding)


# Sources


def test_an_empty_text_is_rejected(write: Write) -> None:
    assert "is empty" in error_message(write(""))
    assert "is empty" in error_message(write(codecs.BOM_UTF8, "mark.txt"))


def test_a_gzip_file_is_recognised_by_its_content(write: Write) -> None:
    packed = gzip.compress(MIXED.encode() * 1000)
    assert text_of(load(write(packed, "a.gz"))) == MIXED * 1000
    assert text_of(load(write(packed, "b.txt"))) == MIXED * 1000
    assert "not a complete gzip file" in error_message(write(packed[:-20], "cut.gz"))
    assert "not a complete gzip file" in error_message(write(b"plain", "misnamed.gz"))
    damaged = packed[:30] + b"\xff\xff\xff\xff" + packed[34:]
    assert "not a complete gzip file" in error_message(write(damaged, "damaged.gz"))


def test_the_unpacked_size_of_an_archive_is_bounded(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = write(gzip.compress(b"a" * 50_000_000), "bomb.gz")
    monkeypatch.setattr(source, "MAX_TEXT_BYTES", 3_000_000)
    assert "the text is over 3,000,000 bytes, decompressed, at" in error_message(bomb)


@POSIX
def test_a_disk_that_takes_no_more_is_reported(write: Write, tmp_path: Path) -> None:
    import resource

    path = write("abc" * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2999, limits[1]))
    try:
        with pytest.raises(TextError, match=r"encoded in .*File too large.*name another place"):
            prepared(path, tmp_path / "text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_is_read_recursively_sorted_and_by_suffix(write: Write, notes: list[str]) -> None:
    write("b1\n", "b/1.txt")
    write(codecs.BOM_UTF8 + b"a2\n", "a/2.md")
    write(gzip.compress(b"z3"), "z.gz")
    write("no", "a/code.py")
    write("no", ".hidden.txt")
    folder = write("no", ".git/x.txt").parent.parent
    corpus = load(folder)
    assert text_of(corpus) == "a2\nb1\nz3"
    assert corpus.name == "texts/"
    files, split = notes
    assert files == (
        "files read of texts/: 3, which end in .txt, .md, .gz (text.suffixes), sorted by path and "
        "number; not read: 1 (1 .py)"
    )
    assert "-s text.documents=files shuffles the files" in split
    notes.clear()
    load(folder, documents="files")
    assert notes == [files]
    assert text_of(load(folder, suffixes=("py",))) == "no"
    notes.clear()
    matched = load(folder / "*" / "*.*")
    assert matched.name.endswith("texts/*/*.*")
    assert notes == [f"files read of {matched.name}: 3, sorted by path and number", split]
    message = error_message(folder, suffixes=(".rst", ".tex"))
    assert ".rst, .tex (text.suffixes)" in message
    assert message.endswith("; name another folder, or its files: -s text.suffixes=.gz")


def test_files_named_train_valid_and_test_are_the_splits(write: Write, notes: list[str]) -> None:
    contents = {"train": "ab" * 600, "valid": "ba" * 500 + "é", "test": "ab" * 550}
    for name, content in contents.items():
        folder = write(content, f"ptb.{name}.txt").parent
    write("Read me", "README.md")
    corpus = load(folder, val_fraction=0)
    found = [corpus.tokenizer.decode(corpus.split(split)) for split in ("train", "val", "test")]
    assert found == [*contents.values()]
    assert corpus.describe_splits() == (
        "1,200 train, 1,001 val of ptb.valid.txt, 1,100 test of ptb.test.txt"
    )
    assert notes[0].endswith(
        "; by their names: 1 train, 1 val, 1 test; not used: 1, such as README.md"
    )
    assert notes[1:] == ["characters of held-out files that the training text lacks: 'é' U+00E9"]
    named = {
        f"{split}_path": str(folder / f"ptb.{name}.txt") for split, name in SPLIT_FILES.items()
    }
    same = load(folder / "ptb.train.txt", **named)
    assert (text_of(same), same.key, same.held_out) == (
        text_of(corpus),
        corpus.key,
        corpus.held_out,
    )
    only_val = load(folder / "ptb.train.txt", val_path=named["val_path"])
    assert [len(only_val.split(split)) for split in SPLITS] == [0, 1200, 1001, 0]
    only_test = load(folder / "ptb.train.txt", test_path=named["test_path"])
    assert [len(only_test.split(split)) for split in SPLITS] == [0, 1080, 120, 1100]
    again = "is in two splits; give each split files of its own"
    assert error_message(folder / "ptb.train.txt", val_path=str(folder / "ptb.train.txt")).endswith(
        again
    )
    write("more to train on " * 100, "other.txt")
    notes.clear()
    assert not load(folder).held_out  # the names do not say what it is
    assert "such as other.txt (text.exclude): all files are one text" in notes[0]
    notes.clear()
    assert not load(folder / "[op]*t*e*.txt", exclude=["ptb.train.txt"]).held_out
    assert "; some names say " in notes[0]
    write("ab" * 99, "ptb.valid2.txt")
    assert load(folder, exclude=["other.txt"]).origin("val") == " of ptb.valid2.txt and 1 more"


def test_held_out_documents_are_shuffled_apart(write: Write, tmp_path: Path) -> None:
    folder = write("\n".join(f"a{i}" for i in range(50)), "train.txt").parent
    write("\n".join(f"b{i}" for i in range(40)), "dev.txt")
    corpus = prepared(folder, tmp_path / "text", documents="lines")
    again = read_prepared(tmp_path / "text", corpus.settings, corpus.tokenizer)
    assert again.held_out == corpus.held_out
    for split, letter, size in (("train", "a", 50), ("val", "b", 40)):
        lines = corpus.tokenizer.decode(again.split(split)).split()
        in_order = [f"{letter}{i}" for i in range(size)]
        assert sorted(lines) == sorted(in_order) != lines
    assert line_of(corpus, "a7\n")[1] == 8


@pytest.mark.parametrize("chunk", [1, 1 << 19])
def test_line_ends_of_every_kind_become_lf_if_asked(
    write: Write, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    path = write("a\r\nb\rc\nd\u2028e\u2029\r\r\n\n")
    assert text_of(load(path, newlines="lf")) == "a\nb\nc\nd\ne\n\n\n\n"
    corpus = load(path)
    assert text_of(corpus) == path.read_bytes().decode()
    kinds = {"LF": 2, "CR LF": 2, "CR": 2, "U+2028": 1, "U+2029": 1}
    assert count_line_ends(corpus) == kinds
    facts = describe(corpus)
    assert (facts["lines"], facts["line_ends"], facts["longest_line"]) == (8, kinds, 1)
    assert any("2 CR LF" in each and "text.newlines=lf" in each for each in facts["warnings"])


def test_binary_files_among_several_are_skipped_and_named(write: Write, notes: list[str]) -> None:
    folder = write("ab\n", "m.txt").parent
    alone = load(folder, documents="files").key
    binary = [write(b"\0" * size, name) for size, name in ((9, "a.txt"), (600_000, "n.txt"))]
    assert text_of(load(folder)) == "ab\n"
    note = "files not read: 2, such as a.txt, which is binary (control characters, such as NUL "
    note += "bytes: 9 of the first 9 bytes); name a text"
    assert note in notes
    assert load(folder, documents="files").key == alone
    notes.clear()
    assert read_text(folder) == "ab\n"
    assert notes[1:] == [note]
    assert "is binary" in error_message(folder, encoding="utf-8")
    write("ab".encode("utf-16"), "m.txt")
    assert text_of(load(folder)) == "ab"
    (folder / "m.txt").unlink()
    assert f"{binary[0]} is binary" in error_message(folder)
    assert "is binary" in error_message(binary[1])


def test_files_are_read_in_the_order_of_their_numbers_and_end_their_last_line(
    write: Write, tmp_path: Path, notes: list[str]
) -> None:
    contents = {"ch1": "one", "ch2": "the\r\ntwo", "ch3": "", "ch10": "ten", "part2/ch1": "end\n"}
    contents |= {"part10/ch1": "last"}
    for name, content in reversed(contents.items()):
        folder = write(content, f"{name}.txt").parent
    for path in (folder, folder / "ch*.txt"):
        corpus = prepared(path, tmp_path / path.stem.strip("*"), val_fraction=0.01)
        text = "one\nthe\r\ntwo\r\nten" + ("\nend\nlast" if path is folder else "")
        assert text_of(corpus) == text == read_text(path)
        names = [Path(file.path).relative_to(folder).with_suffix("") for file in corpus.files]
        assert names == list(map(Path, contents))[: len(names)]
        assert ", sorted by path and number" in notes[0]
        assert [line_of(corpus, word)[1] for word in ("two", "te")] == [2, 1]
        notes.clear()
    one, many = (
        load(path, documents=each) for path, each in ((folder / "ch1.txt", None), (folder, "files"))
    )
    assert text_of(one) == "one"
    assert "\n\x1e" not in text_of(many).replace("end\n", "")


@pytest.mark.parametrize(
    "exclude", ["LICENSE.txt,drafts/*", ["LICENSE*", "drafts/"], "*/b.txt, L*"]
)
def test_excluded_files_are_not_read_and_counted(
    write: Write, notes: list[str], exclude: object
) -> None:
    for name in ("a.txt", "LICENSE.txt", "drafts/b.txt"):
        folder = write(name[0], name).parent
    folder = folder.parent
    for path in (folder, f"{folder}/**/*.txt"):
        assert text_of(load(path, exclude=exclude)) == "a"
        assert "1, " in notes[0]
        assert notes[0].endswith("; left out by text.exclude: 2")
        notes.clear()
    assert "text.exclude leaves out all files of texts/: 3" in error_message(folder, exclude="*")


@pytest.mark.parametrize("suffixes", [(".md,.py",), (".md .py",), ("md", "*.py")])
def test_several_endings_can_be_named(write: Write, suffixes: tuple[str, ...]) -> None:
    for name in ("b.py", "a.md", "c.txt"):
        folder = write(name[0], name).parent
    assert text_of(load(folder, suffixes=suffixes)) == "a\nb"


def test_a_symbolic_link_to_a_parent_is_not_followed(write: Write) -> None:
    folder = write("abc", "in/a.txt").parent
    (folder / "up").symlink_to(folder)
    (folder / "broken.txt").symlink_to(folder / "none")
    assert text_of(load(folder)) == "abc"


def test_a_file_whose_name_is_a_pattern_is_read(write: Write) -> None:
    assert text_of(load(write("abc", "novel [1].txt"))) == "abc"


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def set_stdin(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content)))

    set_stdin(MIXED.encode())
    first = load("-")
    assert text_of(first) == MIXED
    assert first.name == "standard input"
    set_stdin(gzip.compress(b"packed"))
    assert text_of(load("-")) == "packed"
    set_stdin(b"")
    assert "standard input is empty" in error_message("-")
    set_stdin("жы".encode() + b"\xff")
    assert "standard input is not UTF-8 text (byte 0xFF at offset 4" in error_message("-")
    monkeypatch.setattr("chargpt.text.source.opened.__wrapped__.__defaults__", (None, 5))
    set_stdin(MIXED.encode())
    assert "standard input is over 5 bytes" in error_message("-")
    set_stdin(MIXED.encode())
    with pytest.raises(TextError):
        prepare(find_text(TextConfig(path="-")), TextConfig(path="-"), tmp_path / "text")
    assert not list((tmp_path / "text").iterdir())  # the copy of the input is deleted


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("novell.txt", "novel.txt?"),
        ("zzz", "correct the path, or see `chargpt data list`"),
        ("nael.txt", "correct the path"),  # only the ending makes it similar
        ("none/novel.txt", "correct the path"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "cannot be read"),
        ("*.csv", "no file matches"),
        ("https://a.org/b.txt?c=*", "download it first: `curl -LO 'https://a.org/b.txt?c=*'`"),
        ("https:/mattmahoney.net/dc/text8.zip", "download it first: `chargpt data get text8`"),
        ("pipe.txt", "name it `-`"),
        ("/dev/null", "name it `-`"),
    ],
)
def test_a_path_that_names_no_text_is_rejected(write: Write, name: str, words: str) -> None:
    folder = write("abc", "novel.txt").parent
    os.mkfifo(folder / "pipe.txt")
    assert words in error_message(os.path.join(folder, name))


def test_an_unreadable_text_is_rejected(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("abc")
    monkeypatch.setattr("builtins.open", failing(errno.EACCES))
    assert "cannot be read (Permission denied)" in error_message(path)


@pytest.mark.parametrize(
    ("n_characters", "dtype"), [(239, "uint8"), (3000, "uint16"), (70_000, "uint32")]
)
def test_texts_of_every_token_dtype_are_encoded(
    write: Write, monkeypatch: pytest.MonkeyPatch, n_characters: int, dtype: str
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", 1000)
    characters = [chr(0x20000 - code) for code in range(n_characters)]
    text = "plain ascii first " * 100 + "".join(characters) + "and last " * 100
    corpus = load(write(text))
    assert corpus.tokens.dtype == np.dtype(dtype)
    assert text_of(corpus) == text


def test_rare_characters_become_the_unknown_token(write: Write) -> None:
    corpus = load(write("abab" * 20 + "жx" + "ж"), min_count=2, rare="unknown")
    assert corpus.tokenizer.characters == "abж"
    assert corpus.rare_fraction == pytest.approx(1 / 83)
    assert text_of(corpus) == "abab" * 20 + "ж\ufffdж"
    wide = "".join(chr(0x4E00 + index) for index in range(400))
    corpus = load(write(wide + "ab" * 9, "wide.txt"), min_count=2, rare="unknown")
    assert corpus.tokens.dtype == np.uint8
    assert text_of(corpus) == "\ufffd" * 400 + "ab" * 9
    assert "lower text.min_count" in error_message(write("abc", "rare.txt"), min_count=2)


def test_progress_reaches_the_size_of_the_files_in_both_passes(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("chargpt.text.prepare.CHUNK_BYTES", 1000)
    folder = write("ab" * 1500, "a.txt").parent
    write("cd" * 1000, "b.txt")
    reports: list[tuple[str, int, int]] = []
    corpus = load_corpus(
        TextConfig(path=str(folder)), on_progress=lambda *report: reports.append(report)
    )
    assert text_of(corpus) == "ab" * 1500 + "\n" + "cd" * 1000
    stages = ("reading", "encoding")
    assert [*dict.fromkeys(reports)] == [
        (each, 1000 * n, 5000) for each in stages for n in range(1, 6)
    ]


@pytest.mark.parametrize("content", [b"xyz" * 10, b"abc" * 9, b"abc" * 11, b"", None])
@pytest.mark.parametrize("documents", [None, "lines"])
def test_a_text_that_changes_between_the_passes_is_rejected(
    write: Write, monkeypatch: pytest.MonkeyPatch, content: bytes | None, documents: str | None
) -> None:
    path = write("abc" * 10)
    os.utime(path, (0, 0))
    fit = CharTokenizer.from_counts

    def change(*arguments: Any) -> CharTokenizer:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        return fit(*arguments)

    monkeypatch.setattr(CharTokenizer, "from_counts", change)
    expected = "changed while it was read; try again" if content is not None else "No such file"
    assert expected in error_message(path, documents=documents)


# The files of a prepared text


def prepared(path: Path, folder: Path, like: str | None = None, **values: object) -> Corpus:
    settings = TextConfig.model_validate({"path": str(path), **values})
    return prepare(find_text(settings), settings, folder, like=like)


def test_the_key_depends_on_encoding_and_min_count(write: Write) -> None:
    path = write("Привет".encode("cp1251") * 3)
    keys = {
        load(path, encoding="cp1251").key,
        load(path, encoding="latin-1").key,
        load(path, encoding="latin-1", min_count=2).key,
        load(path, encoding="latin-1", min_count=2, rare="unknown").key,
    }
    assert len(keys) == 4
    # what changes no token changes no key
    assert load(path, encoding="latin-1", min_count=2, rare="keep").key in keys
    spelt = load(path, encoding="windows-1251").key
    assert spelt == load(path, encoding="cp1251", val_fraction=0.3).key


def test_keys_and_tokens_are_those_of_earlier_versions(write: Write, tmp_path: Path) -> None:
    path = write("hello, w\u00f6rld\n")
    corpus = load(path)
    assert corpus.key == "2-b4283aad31145aafe4e0b5d95a060eada0a455f7342f9c5e353e8dbc78235fc0"
    write("", "empty.txt")
    assert load(path.parent).key == corpus.key
    old = "b82d901cb0674a0e970962a52072f4cf1ecdc5743e5d7007bfc604adfda50cb8"
    assert prepared(path, tmp_path / "old", like=old).key == old
    assert prepared(path, tmp_path / "new", like=corpus.key).key == corpus.key
    assert corpus.tokens.tolist() == [5, 4, 6, 6, 7, 2, 1, 9, 10, 8, 6, 3, 0]
    assert corpus.tokenizer.to_json() == (
        '{"format": "chargpt-tokenizer", "version": 1, "characters": "\\n ,dehlorw\\u00f6", '
        '"unknown": false}'
    )
    rare = load(path, encoding="latin-1", min_count=2, rare="unknown")
    assert rare.key == "2-ee887138d9f9c910e0b2dcfe861b35fc38d56eacb5a217dbe143490fdd7c7394"
    assert rare.tokens.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]


def test_a_prepared_text_is_read_back_without_its_source(write: Write, tmp_path: Path) -> None:
    path = write("one\n\ntwo\nthree\n", "a.txt")
    corpus = prepared(path.parent, tmp_path / "text", documents="lines")
    path.unlink()
    again = read_prepared(tmp_path / "text", corpus.settings, corpus.tokenizer)
    assert text_of(again) == text_of(corpus)
    assert not again.tokens.flags.writeable
    assert not again.split("train").flags.writeable
    assert (again.name, again.key, again.files) == (corpus.name, corpus.key, corpus.files)
    assert line_of(again, "three")[1] == 4
    assert sorted(each.name for each in (tmp_path / "text").iterdir()) == [LINES, META, TOKENS]


@pytest.mark.parametrize("documents", [None, "lines", "files", "--\n"])
def test_passages_are_located_by_file_and_line(
    write: Write, tmp_path: Path, documents: str | None
) -> None:
    for name in "abc":
        lines = [f"{name}{number}" for number in range(50)] + ["--"]
        content = "\n".join(["", *lines, "", "--", "", "end é of " + name + "\n"])
        folder = write(content, f"{name}.txt").parent
    write("", "empty.txt")
    write(b"\0", "binary.txt")
    corpus = prepared(folder, tmp_path / "text", documents=documents, val_fraction=0.01)
    passages = ["a7", "b0", "c49", "end é of a", "end é of b"]
    found = [each for each in passages if each in corpus.tokenizer.decode(corpus.split("train"))]
    assert len(found) >= 4  # one may be in the validation split
    for passage in found:
        path, number = line_of(corpus, passage)
        assert passage in Path(path).read_text().splitlines()[number - 1]


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
def test_a_file_name_that_is_not_utf8_is_kept_with_a_replacement(tmp_path: Path) -> None:
    for name in (b"a.txt", b"b\xff.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("abc" * 10)
    corpus = prepared(tmp_path, tmp_path / "text")
    assert [Path(file.path).name for file in corpus.files] == ["a.txt", "b\ufffd.txt"]
    again = read_prepared(tmp_path / "text", corpus.settings, corpus.tokenizer)
    assert again.files == corpus.files


def put(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in the place of a file."""
    return lambda folder: ((folder / name).unlink(), make(folder / name))


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["crc32"]
    meta |= changes
    meta["crc32"] = zlib.crc32(to_json(meta))
    (folder / "meta.json").write_bytes(to_json(meta))


def forge_tokens(folder: Path, content: bytes) -> None:
    (folder / "tokens.bin").write_bytes(content)
    change_meta(folder, checksums={"tokens.bin": [len(content), xxh3_64_intdigest(content)]})


def forge_lines(folder: Path, n_documents: int) -> None:
    content = bytes(8 * n_documents)
    (folder / "lines.bin").write_bytes(content)
    checksums = json.loads((folder / "meta.json").read_text())["checksums"]
    checksums["lines.bin"] = [len(content), xxh3_64_intdigest(content)]
    change_meta(folder, checksums=checksums)


@pytest.mark.parametrize("version", [1, 2])
def test_the_checksums_of_earlier_versions_are_read(
    version: int, write: Write, tmp_path: Path
) -> None:
    corpus = prepared(write("abc" * 100), tmp_path / "text")
    first, rest = b"\0\1\2" * 40, b"\0\1\2" * 60
    parts: list[Any] = [(len(each), zlib.crc32(each)) for each in (first, rest)]
    if version == 1:
        parts = [len(first + rest), zlib.crc32(first + rest)]
    change_meta(tmp_path / "text", version=version, checksums={"tokens.bin": parts})
    again = read_prepared(tmp_path / "text", corpus.settings, corpus.tokenizer)
    assert text_of(again) == text_of(corpus)
    flip(tmp_path / "text" / "tokens.bin", 8 * 298)
    with pytest.raises(RunError, match=r"damaged \(tokens\.bin has changed"):
        read_prepared(tmp_path / "text", corpus.settings, corpus.tokenizer)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip(folder / "tokens.bin", 40),
    "tokens cut short": lambda folder: os.truncate(folder / "tokens.bin", 7),
    "no tokens": lambda folder: (folder / "tokens.bin").unlink(),
    "an empty file": lambda folder: forge_tokens(folder, b""),
    "an id that no character has": lambda folder: forge_tokens(folder, b"\0\1\xff"),
    "another tokenizer": lambda folder: change_meta(folder, tokenizer_sha256="0"),
    "a link": put("tokens.bin", lambda path: path.symlink_to("/dev/zero")),
    "a folder": put("tokens.bin", os.mkdir),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "meta a pipe": put("meta.json", os.mkfifo),
    "another name": lambda folder: (folder / "meta.json").write_text(
        (folder / "meta.json").read_text().replace("text.txt", "next.txt")
    ),
    "meta not JSON": put("meta.json", lambda path: path.write_text("{")),
    "meta not an object": put("meta.json", lambda path: path.write_text("[]")),
    "meta nested": put("meta.json", lambda path: path.write_text("[" * 90_000)),
    "meta empty": put("meta.json", lambda path: path.write_text("{}")),
    "another version": lambda folder: change_meta(folder, version=99),
    "a file elsewhere": lambda folder: change_meta(folder, checksums={"../x": [1, 1]}),
    "no number": lambda folder: change_meta(folder, rare_count=None),
    "a file without a name": lambda folder: change_meta(folder, files=[[1, 2, 3, 4]]),
    "no checksums": lambda folder: change_meta(folder, checksums={}),
    "files in disorder": lambda folder: change_meta(
        folder, files=[["a", 1, 1, begin] for begin in (1, 0)]
    ),
    "more rare characters than tokens": lambda folder: change_meta(folder, rare_count=10**9),
    "lines of a text without documents": lambda folder: forge_lines(folder, 1),
    "a size beyond the file's": lambda folder: change_meta(
        folder,
        checksums={"tokens.bin": [31, xxh3_64_intdigest((folder / "tokens.bin").read_bytes())]},
    ),
    **{
        f"held-out splits {held_out}": partial(change_meta, held_out=held_out)
        for held_out in (
            {"val": ["x", -5]},
            {"val": ["x", 2**70]},
            {"val": ["x", 9], "test": ["x", 8]},
            {"dev": ["x", 5]},
        )
    },
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_text_is_reported_in_one_sentence(
    write: Write, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "text"
    corpus = prepared(write("abc" * 10), folder)
    damage(folder)
    with pytest.raises(RunError, match="restore it from a copy") as caught:
        read_prepared(folder, corpus.settings, corpus.tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_documents", [0, 9, 11])
def test_a_text_with_lines_of_other_documents_is_damaged(
    write: Write, tmp_path: Path, n_documents: int
) -> None:
    folder = tmp_path / "text"
    corpus = prepared(write("abc\n" * 10), folder, documents="lines")
    forge_lines(folder, 10)
    read_prepared(folder, corpus.settings, corpus.tokenizer)
    forge_lines(folder, n_documents)
    with pytest.raises(RunError, match=r"lines\.bin is of other documents than tokens\.bin"):
        read_prepared(folder, corpus.settings, corpus.tokenizer)


def test_a_text_in_memory_has_no_place_in_the_files_of_its_held_out_split(write: Write) -> None:
    held_out = write("abc" * 10)
    corpus = load_corpus(TextConfig(val_path=str(held_out)), text="abc" * 10)
    assert corpus.files
    assert corpus.place_of(0) is None


def test_a_text_that_cannot_be_read_now_is_not_called_damaged(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "text"
    corpus = prepared(write("abc" * 10), folder)
    for name in ("read_json", "open_regular"):  # of the meta file, and of the tokens
        with monkeypatch.context() as patch:
            patch.setattr(f"chargpt.text.prepare.{name}", failing(errno.EIO))
            with pytest.raises(UnreadableError, match="try again"):
                read_prepared(folder, corpus.settings, corpus.tokenizer)


def test_a_changed_source_is_noticed(write: Write) -> None:
    path = write("abc" * 10)
    (file,) = load(path).files
    assert not file.has_changed()
    write("abd" * 10)
    assert file.has_changed()
    path.unlink()
    assert not file.has_changed()  # as on another machine


def test_a_text_in_memory_has_no_encoding() -> None:
    corpus = load_corpus(TextConfig(encoding="cp1251"), text="Привет, " * 50)
    assert text_of(corpus) == "Привет, " * 50
    assert load_corpus(text="ab" * 9).n_characters == 18


# read_text


def test_read_text_decodes_like_a_corpus(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_text(write(MIXED.encode("utf-16"))) == MIXED
    assert read_text(write(gzip.compress(b"abc"), "a.gz")) == "abc"
    assert read_text(write("", "empty.txt")) == ""
    with pytest.raises(TextError, match="0x92 at offset 3"):
        read_text(write(b"don\x92t"))
    monkeypatch.setattr("chargpt.text.source.MAX_READ_CHARACTERS", 10)
    with pytest.raises(TextError, match="over 10 characters"):
        read_text(write("abc" * 10))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has another unit")
def test_memory_stays_bounded_for_a_large_text(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        for number in range(300):
            file.write(b"%d " % number + b"the quick brown fox jumps over it\n" * 30_000)
    assert path.stat().st_size > 300_000_000
    script = (
        "import resource; from chargpt.config import TextConfig;"
        "from chargpt.text.prepare import load_corpus;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000;"
        "before = peak(); load_corpus(TextConfig(path='large.txt')); print(peak() - before)"
    )
    assert int(run_python(script, tmp_path).stdout) < 200  # MB
    script = (
        "import resource; from chargpt.text.tokenizer import CharTokenizer;"
        "text = open('large.txt').read(); known = CharTokenizer(''.join(sorted(set(text))));"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000;"
        "before = peak(); known.choose_form(text); known.find_unknown(text); print(peak() - before)"
    )
    assert int(run_python(script, tmp_path).stdout) < 200
