"""A passage of the validation split with the surprisal of each character, for the report."""

from typing import Any

import numpy as np

from chargpt.analysis import predictions
from chargpt.analysis.predictions import ScoredCharacter
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus
from chargpt.text.display import display_char, display_text, graphemes, sign_or_code
from chargpt.text.documents import RECORD_SEPARATOR

PASSAGE = 800  # tokens whose surprisal is shown
N_PRECEDING = 20  # characters before one of high surprisal
N_HIGHEST = 8
SURPRISAL_BITS = (0.5, 1, 2, 3.5, 5, 7)  # from which on the colour becomes stronger


def surprisal(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return the passage by graphemes, and the predictions of each grapheme's characters."""
    # the EOS token, which has no prediction, precedes the first document
    before = run.tokenizer.encode(run.tokenizer.eos_token)
    tokens = np.concatenate((before, corpus.split("val")[: PASSAGE + 1]))
    scored = predictions.score_passage(run.model, run.tokenizer, tokens, PASSAGE)
    text = "".join(each.character for each in scored)
    spans = graphemes(text)
    return {
        "passage": [shown(text[start:end], scored[start:end]) for start, end in spans],
        "passage_length": len(scored),
        "passage_bits": sum(each.bits for each in scored) / len(scored),
        "top_k": len(scored[0].top),
        "predictions": [[prediction(each) for each in scored[start:end]] for start, end in spans],
        "longest_grapheme": max(end - start for start, end in spans),
        "highest": highest_surprisal(text, scored, spans),
    }


def shown(grapheme: str, scored: list[ScoredCharacter]) -> dict[str, Any]:
    """Return how a grapheme is displayed: its colour is that of its highest surprisal."""
    bits = max(each.bits for each in scored)
    return {
        "text": display_text(grapheme, keep_spaces=True),
        # its visible sign stands before the line break
        "ends_line": grapheme in ("\n", RECORD_SEPARATOR),
        "level": sum(bits >= level for level in SURPRISAL_BITS),
    }


def prediction(scored: ScoredCharacter) -> list[Any]:
    """Return a character's name, its surprisal in bits, and the most likely characters."""
    top = [[name_of(character), round(prob, 4)] for character, prob in scored.top]
    return [name_of(scored.character), round(scored.bits, 3), top]


def highest_surprisal(
    text: str, scored: list[ScoredCharacter], spans: list[tuple[int, int]]
) -> list[list[Any]]:
    """Return the rows of a table: context, character, bits and the most likely characters.

    `spans` are the graphemes of the text.
    """
    start_of = [start for start, end in spans for _ in range(start, end)]
    return [
        [
            display_text(text[start_of[max(0, i - N_PRECEDING)] : i]),
            display_char(scored[i].character),
            f"{scored[i].bits:.1f}",
            [(display_char(c), f"{prob:.0%}") for c, prob in scored[i].top[:3]],
        ]
        for i in sorted(range(len(scored)), key=lambda i: -scored[i].bits)[:N_HIGHEST]
    ]


def name_of(character: str) -> str:
    """Return a character as it is named in a sentence."""
    names = {" ": "space", "\n": "line end", "\t": "tab"}
    return names.get(character) or sign_or_code(character)
