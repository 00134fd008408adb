"""What the bytes of a file show: whether it is a text, and in which encoding."""

import codecs
import re
from collections import Counter
from operator import itemgetter
from unicodedata import category

from charset_normalizer import CharsetMatch, from_bytes
from charset_normalizer.constant import FREQUENCIES

BOMS = (  # UTF-32 before UTF-16, whose little-endian mark is a prefix of UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LEGACY_ENCODINGS = (  # of the web, by the WHATWG's standard; rarer ones would be named too often
    "cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp866 koi8_r iso8859_2 iso8859_7 "
    "iso8859_8 big5 big5hkscs cp932 shift_jis cp949 euc_jp gb18030"
).split()
SAMPLE_BYTES = 32_768  # whose encoding is guessed
MAX_GUESSES, MAX_SHOWN = 3, 24  # encodings; characters of what one reads
CONTROL = bytes({*range(32)} - {*b"\b\t\n\v\f\r\x1b\x1c\x1d\x1e\x1f"})  # hardly ever in a text
MAX_CONTROL = 0.02  # fraction of a text's first bytes; compressed data have about 0.08
NOT_TEXT = (  # how files begin, what they are, and what makes text of them
    (rb"%PDF-", "a PDF document", "pdftotext"),
    (rb"PK\x03\x04.{26}mimetypeapplication/epub", "an EPUB book", "pandoc -t plain"),
    (rb"PK\x03\x04.{26}mimetypeapplication/vnd.oasis", "an OpenDocument file", "pandoc -t plain"),
    (rb"PK\x03\x04.*?word/document", "a Word document", "pandoc -t plain"),
    (rb"PK\x03\x04", "a ZIP archive", "unzip"),
    (rb"\{\\rtf", "an RTF document", "pandoc -t plain"),
    (rb"\xd0\xcf\x11\xe0", "an old Office document", "soffice --convert-to txt"),
    (rb".{60}BOOKMOBI", "a Kindle book", "ebook-convert"),
    (rb".{257}ustar", "a tar archive", "tar -xf"),
    (rb"BZh[1-9]1AY&SY", "a bzip2 file", "bunzip2"),
    (rb"\xfd7zXZ\0", "an xz file", "unxz"),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", "unzstd"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x"),
    (rb"Rar!\x1a\x07", "a RAR archive", "unrar x"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*", "an image", "tesseract"),
    (rb"SQLite format 3\0", "an SQLite database", "sqlite3"),
    (rb"PAR1", "a Parquet table", "duckdb"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "the program that wrote it"),
)
MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)", re.IGNORECASE)


def problem_of(head: bytes) -> str:
    """Return why a file that begins with `head` is no UTF-8 text, and a remedy; "" if it may be.

    It is binary if it holds a NUL byte, and over 2% control characters.
    """
    if head.startswith(tuple(mark for mark, _ in BOMS)):
        return ""
    for begin, kind, tool in NOT_TEXT:
        if re.match(begin, head, re.DOTALL):
            return f"is {kind}; make text of it with `{tool}`, and name that"
    n_control, n_nul = len(head) - len(head.translate(None, CONTROL)), head.count(0)
    if not n_nul or n_control <= MAX_CONTROL * len(head):
        return ""
    for encoding in ("utf-16-le", "utf-16-be") if len(head) % 2 == 0 else ():
        counts = Counter(head.decode(encoding, "replace"))
        n_ascii = sum(n for char, n in counts.items() if char.isascii())
        if 2 * n_ascii >= n_nul and _count_garbage(counts) <= MAX_CONTROL * counts.total():
            return f"is UTF-16 without a byte order mark; read it with --encoding {encoding}"
    return (
        f"is binary (control characters, such as NUL bytes: {n_control:,} of the first "
        f"{len(head):,} bytes); name a text"
    )


def guess_encodings(content: bytes, start: int) -> str:
    """Return the likely encodings, with words that they read, of bytes that are not UTF-8.

    The sample is of whole lines or words around the byte at `start`.
    """
    begin = content.rfind(b"\n", 0, start) + 1
    begin = max(begin, start - SAMPLE_BYTES // 2)
    sample = content[begin : begin + SAMPLE_BYTES]
    if (end := max(sample.rfind(b"\n"), sample.rfind(b" "))) > start - begin:
        sample = sample[:end]  # it may be cut inside a character
    guesses = list[tuple[float, str]]()
    best: CharsetMatch | None = None
    for match in from_bytes(sample, cp_isolation=LEGACY_ENCODINGS):
        counts = Counter(str(match))
        words = dict.fromkeys(word for word in str(match).split() if not word.isascii())
        if not words or _count_garbage(counts):
            continue
        best = best or match
        is_near = match.chaos < best.chaos + 0.1 and match.coherence > best.coherence - 0.05
        rank = -_fraction_of_a_language(counts) if is_near else 1.0
        words_read = " ".join(words)[:MAX_SHOWN].strip()
        guesses.append((round(rank, 2), f'{match.encoding} reads it as "{words_read}"'))
    guesses.sort(key=itemgetter(0))
    listed = ", ".join(guess for _, guess in guesses[:MAX_GUESSES])
    return f" (--encoding {listed})" if guesses else ""


def _count_garbage(counts: Counter[str]) -> int:
    """Return how many of a text's characters show that it was decoded with another encoding."""
    wrong = ("Cc", "Cn", "Co", "Cs")  # controls, unassigned, private use, surrogates
    found = (char for char in counts if char > "~" and category(char) in wrong)
    return sum(counts[char] for char in (*found, "\0", "\ufffd"))


def _fraction_of_a_language(counts: Counter[str]) -> float:
    """Return how much of a text's characters are letters of one language; ASCII, punctuation aside.

    charset-normalizer takes encodings with the same ASCII letters for equally likely.
    """
    letters = Counter[str]()
    for char, count in counts.items():
        if char > "~" and category(char)[0] != "P":
            letters[char.lower()] += count
    fits = (sum(letters[char] for char in alphabet) for alphabet in FREQUENCIES.values())
    return max(fits) / max(1, letters.total())
