"""Documents: a text made of items, such as names, tweets, poems or files.

Every document ends with the EOS token (end of sequence): one character, which the model learns to
predict. It is the line end if the documents are lines, else U+001E, the record separator of ASCII.
`prepare` stores the documents in `shuffled_order`, so that every split is a sample of them.
"""

import io
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from chargpt.errors import TextError
from chargpt.text.tokenizer import Ints, Tokens

RECORD_SEPARATOR = "\x1e"
CHUNK = 1 << 22  # tokens read or written at once


def eos_token_of(documents: str | None) -> str:
    """Return the character that ends each document of `text.documents`; "" if that is null."""
    return "" if documents is None else "\n" if documents == "lines" else RECORD_SEPARATOR


@dataclass
class Places:
    """Where the files and documents of a text begin.

    Attributes:
        files: number of characters before each file; of a list of documents, the number of lines.
        lines: number of lines before each document. Every file begins a new line.
    """

    files: list[int] = field(default_factory=list)
    lines: "array[int]" = field(default_factory=lambda: array("q"))


def mark_documents(
    files: Iterable[Iterator[str]], documents: str | None, places: Places | None = None
) -> Iterator[str]:
    """Yield the text of files with the EOS token after each document, and no empty document.

    Args:
        files: pieces of the text of each file; a document ends where its file ends. TextError if
            one holds U+001E, unless that separates them or they are lines.
        documents: `lines`, `files`, the separator of the documents, or None: nothing is changed.
        places: receives where files and documents begin.
    """
    places = places or Places()
    if documents is not None:
        yield from _marked(files, documents, places)
        return
    n_characters = 0
    for pieces in files:
        places.files.append(n_characters)
        for piece in pieces:
            n_characters += len(piece)
            yield piece


def _marked(files: Iterable[Iterator[str]], documents: str, places: Places) -> Iterator[str]:
    eos_token = eos_token_of(documents)
    # line ends in a separator
    n_separating = {"lines": 1, "files": 0}.get(documents, documents.count("\n"))
    line = 0
    for pieces in files:
        places.files.append(line)
        is_open = False  # whether a document has begun
        for *ended, last in _split(pieces, documents):
            text = list[str]()
            for part in ended:
                if part and not is_open:
                    places.lines.append(line)
                if part or is_open:
                    text += (part, eos_token)
                line += part.count("\n") + n_separating
                is_open = False
            if last and not is_open:
                places.lines.append(line)
            is_open = is_open or bool(last)
            line += last.count("\n")
            yield "".join([*text, last])
        if is_open:
            yield eos_token
        line += 1


def _split(pieces: Iterator[str], documents: str) -> Iterator[list[str]]:
    """Yield the text of one file in parts of documents, of which all but the last have ended."""
    separator = "\n" if documents == "lines" else documents
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    rest = ""
    for piece in pieces:
        if documents == "lines":
            piece = newlines.decode(piece)
        elif RECORD_SEPARATOR in piece and documents != RECORD_SEPARATOR:
            raise TextError(
                "the text holds the character U+001E, which marks the end of a document; remove it"
            )
        if documents == "files":
            yield [piece]
            continue
        *ended, rest = (rest + piece).split(separator)
        complete = max(0, len(rest) - len(separator) + 1)  # the rest may begin a separator
        yield [*ended, rest[:complete]]
        rest = rest[complete:]
    yield (rest + newlines.decode("", final=True)).split("\n") if documents == "lines" else [rest]


def document_ends(tokens: Tokens, eos_token_id: int) -> Ints:
    """Return the index after each EOS token, shape (documents,)."""
    return np.concatenate(
        [
            np.flatnonzero(tokens[start : start + CHUNK] == eos_token_id) + start + 1
            for start in range(0, len(tokens), CHUNK)
        ]
    )


def shuffled_order(n_documents: int, seed: int) -> Ints:
    """Return the random order of documents, the same in every version of numpy."""
    return np.random.Philox(key=seed).random_raw(n_documents).argsort(kind="stable")


def shuffled(tokens: Tokens, eos_token_id: int, seed: int) -> Iterator[Tokens]:
    """Yield the tokens of a text in chunks, its documents in `shuffled_order`."""
    tokens = np.asarray(tokens)
    ends = document_ends(tokens, eos_token_id)
    starts = np.concatenate(([0], ends[:-1]))
    order = shuffled_order(len(ends), seed)
    documents: list[Tokens] = []
    size = 0
    for start, end in zip(starts[order].tolist(), ends[order].tolist(), strict=True):
        documents.append(tokens[start:end])
        size += end - start
        if size > CHUNK:
            yield np.concatenate(documents)
            documents, size = [], 0
    if documents:
        yield np.concatenate(documents)
