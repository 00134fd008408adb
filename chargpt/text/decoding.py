"""Bytes of files to text: encodings, byte order marks, and messages for what does not decode."""

import codecs
import encodings.aliases
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Literal, NamedTuple

from charset_normalizer import from_bytes

from chargpt.errors import TextError, most_similar

BOMS = (  # UTF-32 before UTF-16, whose little-endian mark is a prefix of UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
OLDER = ("cp1252", "cp1251", "koi8_r", "shift_jis", "cp949", "euc_jp", "big5", "gb18030")
BYTE_ORDER_MARK = "\ufeff"
Errors = Literal["strict", "replace"]


class Chunk(NamedTuple):
    """Some consecutive bytes of a file, decompressed."""

    file_name: str
    content: bytes


def codec_name(encoding: str) -> str:
    """Return the canonical name of a text encoding, or raise TextError; `auto` stays `auto`."""
    if encoding == "auto":
        return encoding
    try:
        info = codecs.lookup(encoding)
        if getattr(info, "_is_text_encoding", True) and info.incrementaldecoder:
            return info.name
        problem = f"{encoding} decodes to bytes, not to text"
    except (LookupError, ValueError):
        problem = f"there is no encoding {encoding!r:.60}"
    known = sorted({*encodings.aliases.aliases, *encodings.aliases.aliases.values(), "auto"})
    similar = most_similar(encoding.lower().replace("-", "_"), known)
    common = "common ones are utf-8, utf-16, cp1252, cp1251, latin-1"
    raise TextError(f"{problem}; " + (f"did you mean {similar}?" if similar else common))


def decode(
    chunks: Iterable[Chunk], encoding: str = "auto", errors: Errors = "strict"
) -> Iterator[Iterator[str]]:
    """Yield the text of each file's chunks in pieces, without byte order marks.

    Raises:
        TextError: bytes that do not decode, named with their offset, if errors are `strict`.
    """
    codec = codec_name(encoding)
    for name, group in groupby(chunks, key=lambda chunk: chunk.file_name):
        yield _decode_file(name, codec, errors, (chunk.content for chunk in group))


def _decode_file(name: str, codec: str, errors: Errors, contents: Iterator[bytes]) -> Iterator[str]:
    """Yield the text of one file's chunks, which may end inside a character."""
    head = next(contents)
    if codec == "auto":
        codec = next((marked for mark, marked in BOMS if head.startswith(mark)), "utf-8")
    decoder = codecs.getincrementaldecoder(codec)(errors)
    offset = 0  # of the chunk's first byte
    is_start = True
    for content in chain([head], contents, [b""]):
        if codec in {"utf-8", "utf-8-sig"} and (index := content.find(b"\0")) >= 0:
            raise TextError(
                f"{name} holds a NUL byte at offset {offset + index:,}, so it is binary, or UTF-16 "
                "without a byte order mark; name a text, or try --encoding utf-16-le"
            )
        n_pending = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeError as error:
            message = _undecodable(name, codec, offset - n_pending, error, is_end=not content)
            raise TextError(message) from None
        offset += len(content)
        if text:
            yield text.removeprefix(BYTE_ORDER_MARK) if is_start else text
            is_start = False


def _undecodable(name: str, codec: str, offset: int, error: UnicodeError, *, is_end: bool) -> str:
    """Return the message for an error in bytes that begin at `offset` of the file, or end it."""
    where = "a part"
    if isinstance(error, UnicodeDecodeError):
        where = f"byte 0x{error.object[error.start]:02X} at offset {offset + error.start:,}"
    shown = {"utf-8": "UTF-8", "utf-8-sig": "UTF-8"}.get(codec, codec)
    content = error.object if isinstance(error, UnicodeDecodeError) else b""
    likely = [match.encoding for match in from_bytes(content, cp_isolation=[*OLDER])]
    examples = f", for example {' or '.join(likely[:3])}" if likely else ""
    remedy = (
        f"convert it to UTF-8, name the encoding of the whole text with --encoding{examples}, or "
        "replace what does not decode with --encoding-errors replace"
    )
    cause = ", so it may be binary" if codec.startswith(("utf-16", "utf-32")) else ""
    if is_end:
        cause = ", where it ends inside a character: it may be cut short"
    return f"{name} is not {shown} text ({where} does not decode){cause}; {remedy}"
