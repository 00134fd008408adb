"""The most probable continuations of a text, to the end of a word, by beam search.

A beam is the start of a continuation. All beams have the same number of tokens, so that a step
decodes them as one batch; the W most probable ones are kept. A continuation is complete where its
last word ends: its probability is that of its tokens times that of any token that ends a word. It
is also complete with the EOS token, and at `MAX_TOKENS`.

A word is a run of letters, marks, digits and `_`, and of apostrophes within; a Chinese character or
Japanese letter, which no space follows, is a word of its own.

Shapes in this file: W = beams, V = vocabulary size.
"""

import math
import unicodedata
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from chargpt.errors import ConfigError
from chargpt.inference.decoders import ModelDecoder
from chargpt.inference.sampling import max_logits, prefill
from chargpt.models import KVCache, LanguageModel, eval_mode
from chargpt.models.mixture import word_token_mask
from chargpt.store.run import Run, as_run
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens, UnknownPolicy

MAX_TOKENS = 24  # of a continuation
BEAMS_EACH = 3  # beams for each continuation that is asked for or excluded
MAX_BEAMS = 96
APOSTROPHES = "'’"
UNSPACED = ("CJK ", "IDEOGRAPHIC ", "HIRAGANA ", "KATAKANA ")  # how Unicode's names of them begin
SEPARATOR, LETTER, WHOLE_WORD, APOSTROPHE = range(4)  # kinds of tokens


class Suggestion(NamedTuple):
    """A continuation of a text.

    Attributes:
        text: the continuation; where the document ends, it ends with the EOS token.
        prob: its probability, at temperature 1 without filters.
    """

    text: str
    prob: float


def suggest(
    run: Run | str | Path,
    text: str,
    n: int = 5,
    *,
    words: int = 1,
    excluded: Collection[str] = (),
    unknown: UnknownPolicy | None = None,
) -> list[Suggestion]:
    """Return the most probable continuations of a text, each to the end of a word.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        text: to continue, of any length; what follows the last EOS token is read, up to the block
            size less `MAX_TOKENS`.
        n: continuations, up to 32.
        words: of each continuation, the rest of a word that has begun included.
        excluded: continuations that are not wanted, such as those of an earlier call.
        unknown: policy for characters outside the vocabulary; the run's `text.unknown` by default.

    Returns:
        Up to `n` different continuations, the most probable first: those that a beam search finds.
        None for an empty text if the vocabulary has no EOS token or newline to precede it.

    Raises:
        ConfigError: `n` is over 32.
        UnknownCharacterError: the text contains unknown characters and `unknown` is `error`.
        OperationError: the model's logits are not finite.
    """
    run = as_run(run)
    if n > MAX_BEAMS // BEAMS_EACH:
        raise ConfigError(f"n is {n:,}; ask for up to {MAX_BEAMS // BEAMS_EACH} suggestions")
    tokenizer, block_size = run.tokenizer, run.model.block_size
    eos_token = tokenizer.eos_token
    if eos_token:
        text = text.rpartition(eos_token)[2]
    text = eos_token + tokenizer.choose_form(text) or tokenizer.bos_text
    context = max(block_size - MAX_TOKENS, (block_size + 1) // 2)  # a search that evicts is slower
    tokens = tokenizer.encode(text, unknown=unknown or run.config.text.unknown)[-context:]
    if not tokens.size:
        return []
    with eval_mode(run.model):
        return _Search(run.model, tokenizer, tokens, n, words, excluded).run()


def token_kinds(tokenizer: CharTokenizer) -> Ints:
    """Return the kind of each token, (V,): SEPARATOR, LETTER, WHOLE_WORD or APOSTROPHE."""
    kinds = np.where(word_token_mask(tokenizer), LETTER, SEPARATOR)
    for token, character in enumerate(tokenizer.characters):
        if unicodedata.name(character, "").startswith(UNSPACED) and kinds[token] == LETTER:
            kinds[token] = WHOLE_WORD
        elif character in APOSTROPHES:
            kinds[token] = APOSTROPHE
    return kinds


class _BeamDecoder(ModelDecoder):
    """Decoder whose sequences, which share the prefilled tokens, can be reordered."""

    def __init__(self, model: LanguageModel, num_sequences: int, prefilled: KVCache) -> None:
        super().__init__(model, num_sequences, prefilled)
        self.n_shared = prefilled.length

    @torch.inference_mode()
    def step_from(self, beams: Ints, tokens: Tokens) -> Floats:
        """Append tokens (W,) to the sequences `beams` (W,); return the next logits, (W, V)."""
        cache, order = self.cache, torch.from_numpy(beams).to(self.model.device)
        cache.reorder(order, self.n_shared)
        if cache.length == self.model.block_size:  # the step evicts
            self.n_shared = 0
        return self.step(tokens).astype(np.float64)


class _Search:
    """Beam search for `n` continuations of a context."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: CharTokenizer,
        context: Tokens,
        n: int,
        words: int,
        excluded: Collection[str],
    ) -> None:
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.n, self.words, self.excluded = n, words, excluded
        self.width = min(MAX_BEAMS, BEAMS_EACH * (n + len(excluded)))  # W
        self.kinds, self.valid = token_kinds(tokenizer), tokenizer.valid_tokens
        self.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token else -1
        self.found: dict[str, float] = {}  # log-probability of each complete continuation
        # of each beam: its tokens, log-probability, state of UTF-8, words that it has begun, and
        # whether it ends within one; those of unused beams have the log-probability -inf
        self.tails = np.zeros((self.width, 0), np.int64)
        self.log_probs = np.where(np.arange(self.width) == 0, 0, -math.inf)
        self.states = np.zeros(self.width, np.int64)
        self.n_words = np.zeros(self.width, np.int64)
        self.is_in_word = np.zeros(self.width, np.bool_)

    def run(self) -> list[Suggestion]:
        """Return the continuations that were found, the most probable first."""
        first, prefilled = prefill(self.model, self.tokenizer, self.context)
        decoder = _BeamDecoder(self.model, self.width, prefilled)
        logits = np.tile(first, (self.width, 1))  # (W, V)
        while True:
            beams = self._extend(logits)
            if self.tails.shape[1] == MAX_TOKENS or self._is_settled():
                break
            logits = decoder.step_from(beams, self.tails[:, -1])
        for beam in np.flatnonzero(self.states == 0):  # between characters
            self._add(self.tails[beam], self.log_probs[beam])
        best = sorted(self.found.items(), key=lambda each: -each[1])[: self.n]
        return [Suggestion(text, math.exp(log_prob)) for text, log_prob in best]

    def _extend(self, logits: Floats) -> Ints:
        """Extend the beams by their next tokens, (W, V); return which were extended, (W,).

        Those that a token completes are added to `found` instead.
        """
        logits = np.where(self.valid.allowed[self.states], logits, -math.inf)
        logits -= max_logits(logits)
        totals = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        totals += self.log_probs[:, None]  # (W, V)
        is_eos = np.arange(totals.shape[1]) == self.eos_token_id  # (V,)
        is_whole = self.kinds == WHOLE_WORD  # (V,)
        is_letter = (self.kinds == LETTER) | (
            (self.kinds == APOSTROPHE) & self.is_in_word[:, None]
        )  # (W, V)
        n_words = self.n_words[:, None] + (is_whole | (is_letter & ~self.is_in_word[:, None]))
        is_last = (self.n_words == self.words)[:, None]  # of beams within their last word
        ends_word = is_last & ~is_letter & ~is_eos
        for beam in np.flatnonzero(is_last[:, 0]):
            self._add(self.tails[beam], np.logaddexp.reduce(totals[beam, ends_word[beam]]))
        is_complete = is_eos | (is_whole & (n_words == self.words) & ~is_last)
        complete = np.where(is_complete, totals, -math.inf)
        for beam, token in zip(*self._most_probable(complete), strict=True):
            self._add(np.append(self.tails[beam], token), complete[beam, token])
        totals[is_complete | ends_word] = -math.inf
        beams, tokens = self._most_probable(totals)
        self.tails = np.column_stack((self.tails[beams], tokens))
        self.log_probs = totals[beams, tokens]
        self.states = self.valid.next_state[self.states[beams], tokens]
        self.n_words, self.is_in_word = n_words[beams, tokens], is_letter[beams, tokens]
        return beams

    def _most_probable(self, totals: Floats) -> tuple[Ints, Ints]:
        """Return the beam and token of the W highest log-probabilities of (W, V), (W,) each."""
        order = np.argsort(-totals, axis=None, kind="stable")[: self.width]
        order = np.resize(order, self.width)  # of a very small vocabulary
        return order // totals.shape[1], order % totals.shape[1]

    def _add(self, tail: Ints, log_prob: float) -> None:
        """Add a complete continuation to `found`, if it is possible and not excluded."""
        text = self.tokenizer.decode(tail)  # may be spelled in several ways
        if log_prob > self.found.get(text, -math.inf) and text not in self.excluded:
            self.found[text] = float(log_prob)

    def _is_settled(self) -> bool:
        """Return whether no beam can become one of the `n` most probable continuations."""
        best = sorted(self.found.values(), reverse=True)[: self.n]
        least = best[-1] if len(best) == self.n else -math.inf
        return bool(self.log_probs.max() <= least)
