"""Documents: a text made of items, such as names, tweets, poems or files.

Every document ends with the EOS token (end of sequence): one character, which the model learns to
predict. It is the line end if the documents are lines, else U+001E, the record separator of ASCII.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from chargpt.errors import TextError
from chargpt.text.tokenizer import Ints, Tokens

RECORD_SEPARATOR = "\x1e"
CHUNK = 1 << 22  # tokens read or written at once


def eos_token_of(documents: str | None) -> str:
    """Return the character that ends each document of `text.documents`; "" if that is null."""
    return "" if documents is None else "\n" if documents == "lines" else RECORD_SEPARATOR


def mark_documents(files: Iterable[Iterator[str]], documents: str | None) -> Iterator[str]:
    """Yield the text of files with the EOS token after each document, and no empty document.

    Args:
        files: pieces of the text of each file; a document ends where its file ends. TextError if
            one holds U+001E, unless that separates them or they are lines.
        documents: `lines`, `files`, the separator of the documents, or None: nothing is changed.
    """
    eos_token = eos_token_of(documents)
    has_ended = True  # whether the last document has ended
    for pieces in files:
        if documents is None:
            yield from pieces
            continue
        for piece in _separated(pieces, documents, eos_token):
            text = re.sub(f"{eos_token}+", eos_token, piece)
            text = text.removeprefix(eos_token) if has_ended else text
            if text:
                has_ended = text.endswith(eos_token)
                yield text


def _separated(pieces: Iterator[str], documents: str, eos_token: str) -> Iterator[str]:
    """Yield the text of one file with EOS tokens in place of separators, and one at its end."""
    rest = ""
    for piece in pieces:
        if documents == "lines":
            yield piece.replace("\r", "\n")
            continue
        if eos_token in piece and documents != eos_token:
            raise TextError(
                "the text holds the character U+001E, which marks the end of a document; remove it"
            )
        if documents == "files":
            yield piece
            continue
        *whole, rest = (rest + piece).split(documents)
        complete = max(0, len(rest) - len(documents) + 1)  # the rest may begin a separator
        yield "".join(document + eos_token for document in whole) + rest[:complete]
        rest = rest[complete:]
    yield rest + eos_token


def document_ends(tokens: Tokens, eos_token_id: int) -> Ints:
    """Return the index after each EOS token, shape (documents,)."""
    return np.concatenate(
        [
            np.flatnonzero(tokens[start : start + CHUNK] == eos_token_id) + start + 1
            for start in range(0, len(tokens), CHUNK)
        ]
    )


def shuffled(tokens: Tokens, eos_token_id: int, seed: int) -> Iterator[Tokens]:
    """Yield the tokens of a text in chunks, its documents in random order.

    The order depends only on the number of documents and the seed, in every version of numpy.
    """
    tokens = np.asarray(tokens)
    ends = document_ends(tokens, eos_token_id)
    starts = np.concatenate(([0], ends[:-1]))
    order = np.random.Philox(key=seed).random_raw(len(ends)).argsort(kind="stable")
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
