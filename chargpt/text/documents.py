"""Which texts are documents of a corpus."""

from collections.abc import Collection

import numpy as np

from chargpt.text.corpus import CHUNK, Corpus, document_ends


def find_documents(
    corpus: Corpus, wanted: Collection[str], separator: str
) -> tuple[set[str], set[str]]:
    """Return which of the wanted texts are documents of the training split, and of the whole text.

    They are matched whole, since most documents are shorter than a verbatim match.

    Args:
        separator: what ends each document, one token.
    """
    tokens, vocab_size = corpus.tokens, corpus.tokenizer.vocab_size
    encoded = {text: corpus.tokenizer.encode(text + separator, "replace") for text in wanted}
    by_content = {each.astype(tokens.dtype).tobytes(): text for text, each in encoded.items()}
    keys = np.array([len(each) * vocab_size + int(each[0]) for each in encoded.values()])
    training_start = len(corpus.split("mixture"))
    training_end = training_start + len(corpus.split("train"))
    copied, known = set(), set()
    for first in range(0, len(tokens) if encoded else 0, CHUNK):
        # with the separator before the chunk, and the documents that begin in it
        start = max(0, first - 1)
        chunk = np.asarray(tokens[start : first + CHUNK + keys.max() // vocab_size])
        ends = document_ends(chunk, corpus.tokenizer.encode(separator, "replace").item())
        ends = ends if start else np.append(0, ends)
        content = chunk.tobytes()
        is_near = np.isin(np.diff(ends) * vocab_size + chunk[ends[:-1]], keys)
        for index in np.flatnonzero(is_near).tolist():
            begin, end = int(ends[index]), int(ends[index + 1])
            text = by_content.get(content[begin * tokens.itemsize : end * tokens.itemsize])
            if text is not None:
                known.add(text)
                if training_start <= start + begin and start + end <= training_end:
                    copied.add(text)
    return copied, known
