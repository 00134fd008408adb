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
WESTERN = "cp1252"
# Letters other than ASCII in languages of Latin script, of which charset-normalizer lists only the
# most frequent: German, French, Spanish, Portuguese, Italian, Catalan, Dutch, Swedish and Finnish,
# Danish and Norwegian, Icelandic; Polish, Czech and Slovak, Hungarian, Croatian and Slovene,
# Romanian; Turkish, Lithuanian, Latvian, Estonian
LATIN_ALPHABETS = (
    "äöüß àâæçèéêëîïôœùûüÿ áéíñóúü àáâãçéêíóôõúü àèéìíîòóù àçèéíïòóúü áèéëïíóöúü äåéö åæéòóôø "
    "áæéíðóöúýþ ąćęłńóśźż áäčďéěíĺľňóôŕřšťúůýž áéíóöőúüű ćčđšž âîăşţșț âçîöûüğış ąčėęįšūųž "
    "āčēģīķļņšūž äõöüšž"
).split()


def guess_encodings(content: bytes, start: int) -> list[tuple[str, str]]:
    """Return the likely encodings, with words that they read, of bytes that are not UTF-8.

    The sample is of whole lines or words around the byte at `start`. Of encodings that are equally
    likely, Western European is first, as that of most texts.
    """
    begin = content.rfind(b"\n", 0, start) + 1
    begin = max(begin, start - SAMPLE_BYTES // 2)
    sample = content[begin : begin + SAMPLE_BYTES]
    if (end := max(sample.rfind(b"\n"), sample.rfind(b" "))) > start - begin:
        sample = sample[:end]  # it may be cut inside a character
    guesses = list[tuple[float, bool, str, str]]()
    best: CharsetMatch | None = None
    for match in from_bytes(sample, cp_isolation=LEGACY_ENCODINGS):
        counts = Counter(str(match))
        words = dict.fromkeys(word for word in str(match).split() if not word.isascii())
        if not words or count_garbage(counts):
            continue
        best = best or match
        is_near = match.chaos < best.chaos + 0.2 and match.coherence > best.coherence - 0.05
        rank = -_fraction_of_a_language(counts) if is_near else 1.0
        is_western = WESTERN in match.could_be_from_charset
        encoding = WESTERN if is_western else match.encoding
        words_read = " ".join(words)[:MAX_SHOWN].strip()
        guesses.append((round(rank, 2), not is_western, encoding, words_read))
    guesses.sort(key=itemgetter(0, 1))
    return [guess[2:] for guess in guesses[:MAX_GUESSES]]


def count_garbage(counts: Counter[str]) -> int:
    """Return how many of a text's characters show that it was decoded with another encoding."""
    wrong = ("Cc", "Cn", "Co", "Cs")  # controls, unassigned, private use, surrogates
    found = (char for char in counts if char > "~" and category(char) in wrong)
    return sum(counts[char] for char in (*found, "\0", "\ufffd"))


def _fraction_of_a_language(counts: Counter[str]) -> float:
    """Return the largest fraction of a text's non-ASCII letters that one language has.

    charset-normalizer takes encodings with the same ASCII letters for equally likely.
    """
    letters = Counter[str]()
    for char, count in counts.items():
        if char > "~" and category(char) != "Sc" and category(char)[0] != "P":
            letters[char.lower()] += count
    alphabets = (*FREQUENCIES.values(), *LATIN_ALPHABETS)
    fits = (sum(letters[char] for char in alphabet) for alphabet in alphabets)
    return max(fits) / letters.total() if letters else 1.0
