"""Guess the encoding of bytes that are not UTF-8."""

from collections import Counter
from operator import itemgetter
from unicodedata import category

from charset_normalizer import CharsetMatch, from_bytes
from charset_normalizer.constant import FREQUENCIES

LEGACY_ENCODINGS = (  # of the web, by the WHATWG's standard; rarer ones would be named too often
    "cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp866 koi8_r iso8859_2 iso8859_7 "
    "iso8859_8 big5 big5hkscs cp932 shift_jis cp949 euc_jp gb18030"
).split()
SAMPLE_BYTES = 32_768  # whose encoding is guessed
MAX_GUESSES, MAX_SHOWN = 3, 24  # encodings; characters of what one reads


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
        if not words or count_garbage(counts):
            continue
        best = best or match
        is_near = match.chaos < best.chaos + 0.1 and match.coherence > best.coherence - 0.05
        rank = -_fraction_of_a_language(counts) if is_near else 1.0
        words_read = " ".join(words)[:MAX_SHOWN].strip()
        guesses.append((round(rank, 2), f'{match.encoding} reads it as "{words_read}"'))
    guesses.sort(key=itemgetter(0))
    listed = ", ".join(guess for _, guess in guesses[:MAX_GUESSES])
    return f" (--encoding {listed})" if guesses else ""


def count_garbage(counts: Counter[str]) -> int:
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
