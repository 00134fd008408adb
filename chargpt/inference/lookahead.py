"""Look-ahead: how probable it is that a text will match, for each token that may come next.

Masking alone keeps a text possible, not natural: a rhyme is forced into the last characters, into
the middle of a word. So tokens are weighed by the probability that what follows matches, under a
Markov chain that predicts each token from the one before as the model does (the model given one
token of context). For a bigram model that samples exactly the texts that rejection sampling
accepts, with their probabilities; for others it is a proposal close to it. With a hidden Markov
model in place of the chain this is Ctrl-G (Zhang et al. 2024).

With r characters left, state s and last token v, h is the probability to end in a match and g that
if the next token is w:

    h_0(s, v) = [s accepts]
    g_r(s, w) = h_{r-1}(s w, w) if w leads on to a match, else [s accepts and w may end]
    h_r(s, v) = sum over w of p(w | v) g_r(s, w)

Shapes in this file: S = states, C = classes, V = vocabulary size, N = sequences, R = lengths kept.
"""

import numpy as np
import numpy.typing as npt
import torch

from chargpt.inference.constraints import Bools, Constraint
from chargpt.models import LanguageModel
from chargpt.text.tokenizer import Ints

MAX_OPERATIONS = 20e9  # of the products, a second or two
MAX_BYTES = 256_000_000  # of the table
MAX_LENGTH = 4_096  # characters that are looked ahead
LEAST = 1e-30  # a weight above 0: what is possible stays so
MIN_TEMPERATURE = 0.1  # of the chain: greedy sampling looks ahead, too


class LookAhead:
    """Logarithms of g_r(s, w), for r in steps of at most 1/32 of r.

    Attributes:
        table: (R, S, V).
        row: of each r from 0 on; longer texts use the last.
    """

    def __init__(
        self,
        constraint: Constraint,
        may_end: Bools,
        chain: npt.NDArray[np.float32],
        max_length: int,
    ) -> None:
        """Compute the table for texts of `max_length` characters.

        Args:
            may_end: tokens that may end a text that matches, (V,).
            chain: probability of each token after each, (V, V).
        """
        automaton = constraint.automaton
        following = automaton.next_state[:, automaton.classes]  # (S, V)
        distance = constraint.distance[following] + constraint.weights[automaton.classes]
        distance[following < 0] = max_length + 1
        ends = automaton.accepts[:, None] & may_end  # (S, V)
        n_states, vocab_size = following.shape
        columns = np.arange(vocab_size)
        into = np.ascontiguousarray(chain.T)
        h = np.repeat(automaton.accepts[:, None], vocab_size, axis=1).astype(np.float32)
        one = 1.0  # in the scale of h
        kept = [np.zeros((n_states, vocab_size), np.float32)]  # after the last character
        row = [0]
        n_kept = MAX_BYTES // (4 * n_states * vocab_size)
        for r in range(1, min(max_length, MAX_LENGTH) + 1):
            g = np.where(distance <= r, h[following, columns], np.float32(one) * ends)
            if r % 2 ** max(0, r.bit_length() - 6) == 0:
                kept.append(np.log(np.maximum(g, LEAST)))
            row.append(len(kept) - 1)
            is_last = len(kept) >= n_kept or r * n_states * vocab_size**2 > MAX_OPERATIONS
            if is_last:
                break
            h = g @ into
            scale = max(float(h.max()), LEAST)
            h /= scale
            one = min(one / scale, 1 / LEAST)
        self.table, self.row = np.stack(kept), np.array(row)

    def log_weights(self, states: Ints, remaining: Ints) -> npt.NDArray[np.float32]:
        """Return what is added to the logits of sequences in these states, (N, V)."""
        weights: npt.NDArray[np.float32] = self.table[
            self.row[np.minimum(remaining, len(self.row) - 1)], states
        ]
        return weights


@torch.inference_mode()
def markov_chain(model: LanguageModel, temperature: float) -> npt.NDArray[np.float32]:
    """Return the probability of each token after each, given no other context, (V, V)."""
    tokens = torch.arange(model.vocab_size, device=model.device)[:, None]
    logits = model(tokens)[:, 0].float() / max(temperature, MIN_TEMPERATURE)
    chain: npt.NDArray[np.float32] = logits.softmax(dim=-1).cpu().numpy()
    return chain


def is_affordable(constraint: Constraint, vocab_size: int) -> bool:
    """Return whether some hundred characters can be looked ahead."""
    n_states = len(constraint.distance)
    return (
        100 * n_states * vocab_size**2 <= MAX_OPERATIONS
        and 100 * 4 * n_states * vocab_size <= MAX_BYTES
    )
