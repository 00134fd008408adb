"""Sampling under constraints and without copied stretches, with backing up where nothing is left.

At each position a token has probability 0 if no text that matches begins so, or if it would
complete a stretch of more than `no_copy` tokens of the run's text; the others are renormalised.
Where the text matches already, all tokens may be sampled: one that leads out of the constraint ends
the text before it. In a list of documents only the EOS token does that.

A position where no token is left is a dead end: constraints alone have none (constraints.py), but
what they force may be copied. The sequence then backs up by one token, by 2, 4, ... if it does not
come further, and gives up the token there. From then on it is sampled on its own, after the others.

Shapes in this file: N = sequences, V = vocabulary size.
"""

import itertools
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from chargpt.config import SampleConfig
from chargpt.errors import OperationError
from chargpt.inference.constraints import Automaton, Bools, Constraint, build_constraint
from chargpt.inference.copying import CopyIndex
from chargpt.inference.decoders import Decoder, ModelDecoder, build_decoder
from chargpt.inference.lookahead import (
    MIN_TEMPERATURE,
    LookAhead,
    is_affordable,
    markov_chain,
)
from chargpt.inference.sampling import (
    Ended,
    Piece,
    SampledText,
    filter_probs,
    prefill,
    sample_tokens,
    uniforms,
)
from chargpt.models import LanguageModel
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens

HELD_BACK = 128  # tokens at the end of a text that backing up may still change
MAX_DEAD_ENDS = 1_000  # of a sequence
SENTENCE_END = re.compile(r"[.!?…。！？]+[)\]\"'”’»]*(?=\s|$)|[。！？]")
LINE_END = re.compile(r"(?=[\r\n])")


class Rules(NamedTuple):
    """What sampled texts must satisfy, prepared once for all sequences."""

    constraint: Constraint
    copies: CopyIndex | None  # of the run's text, its n being `no_copy`
    look_ahead: LookAhead | None
    may_end: Bools  # tokens that may end a text that matches, (V,)


def build_rules(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    options: SampleConfig,
    prompt: str = "",
    texts: Callable[[], Iterable[Tokens]] = tuple,
) -> Rules:
    """Return the rules of sampling settings.

    Args:
        prompt: of the text, for constraints on the whole of it.
        texts: returns the token ids of which `no_copy` lets no long stretch pass.

    Raises:
        ConfigError: as `build_constraint`.
        DeviceError: the index of the texts does not fit into memory.
    """
    constraint = build_constraint(options, tokenizer, prompt if options.whole else "")
    look_ahead = index = None
    if tokenizer.eos_token:
        may_end = np.arange(tokenizer.vocab_size) == tokenizer.eos_token_id
    else:
        excluded = constraint.excluded if constraint else False
        may_end = tokenizer.valid_tokens.allowed[0] & ~np.array(excluded)
    if constraint and is_affordable(constraint, tokenizer.vocab_size):
        chain = markov_chain(model, options.temperature)
        look_ahead = LookAhead(constraint, may_end, chain, options.limit)
    if options.no_copy:
        index = CopyIndex(texts(), options.no_copy, tokenizer.vocab_size)
    return Rules(constraint or unconstrained(tokenizer), index, look_ahead, may_end)


def unconstrained(tokenizer: CharTokenizer) -> Constraint:
    """Return a constraint that all texts match."""
    allowed, next_state = tokenizer.valid_tokens
    accepts = np.arange(len(allowed)) == 0
    weights = np.ones(tokenizer.vocab_size, np.int64)
    weights[tokenizer.first_continuation_id :] = 0
    classes = np.arange(tokenizer.vocab_size)
    table = np.where(allowed, next_state, -1)
    return Constraint(Automaton(classes, table, accepts), weights, np.zeros_like(allowed[0]))


class ConstrainedSampler:
    """N sequences that continue a prompt under a constraint and an index of the run's text."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: CharTokenizer,
        prompt_ids: Tokens,
        options: SampleConfig,
        ids: Sequence[int],
        *,
        rules: Rules,
        unigram: Callable[[], Ints] | None = None,
    ) -> None:
        """Prepare the sequences with the numbers `ids`.

        Args:
            model, prompt_ids, options, unigram: as in `stream_pieces`. An EOS token at the start of
                the prompt is no part of the text.
            rules: from `build_rules`.
        """
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.prompt_ids = np.asarray(prompt_ids).astype(np.int64)
        self.constraint, self.index, self.look_ahead, self.ending = rules
        self.unigram = unigram
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.valid = tokenizer.valid_tokens.allowed[0]  # (V,)
        self.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token else -1
        self.prompt_text = self.prompt_ids[1 if tokenizer.eos_token else 0 :].tolist()
        if not self.prompt_ids.size:  # as in `prefill`, also where a sequence has backed up
            self.prompt_ids = tokenizer.encode(tokenizer.bos_text).astype(np.int64)
        self.sequences = [_Sequence(number, self) for number in ids]

    def steps(self) -> Iterator[list[Piece]]:
        """Yield the pieces of all sequences, (N,): first all together, then those left alone."""
        yield from self._decode(self.sequences)
        for sequence in self.sequences:
            while not sequence.ended:
                yield from self._decode([sequence])

    def _decode(self, group: list["_Sequence"]) -> Iterator[list[Piece]]:
        """Continue sequences of equal length until each has ended or backed up."""
        begun = group[0].tokens
        prompt = np.append(self.prompt_ids, np.array(begun, np.int64))
        first, cache = prefill(self.model, self.tokenizer, prompt, self.unigram)
        # the fastest decoder takes too long to build for a sequence that backs up again and again
        build: Callable[..., Decoder] = build_decoder
        if begun:
            build = ModelDecoder
        elif len(group) > 1:
            build = partial(build_decoder, max_threads=os.cpu_count() or 1)
        decoder = build(self.model, len(group), cache)
        logits = np.tile(first, (len(group), 1))  # (N, V)
        numbers = uniforms(self.seed, [sequence.number for sequence in group])
        rows = np.arange(len(group))  # of those that go on
        for uniform in itertools.islice(numbers, len(begun), None):
            rows, tokens = self._sample(group, rows, logits, uniform)
            yield [sequence.release() for sequence in self.sequences]
            if not rows.size:
                return
            logits = decoder.step(tokens).astype(np.float64)

    def _sample(
        self, group: list["_Sequence"], rows: Ints, logits: Floats, uniform: Floats
    ) -> tuple[Ints, Ints]:
        """Sample a token for some rows of a group; return the rows that go on, and tokens (N,)."""
        active = [group[row] for row in rows.tolist()]
        states = np.array([sequence.states[-1] for sequence in active])
        remaining = np.array([sequence.text.remaining for sequence in active])
        leads, ends = self._masks(active, states, remaining)  # (rows, V)
        is_open: Bools = np.logical_or.reduce(leads | ends, axis=1)
        for sequence in itertools.compress(active, (~is_open).tolist()):
            sequence.back_up()
        rows, leads, ends = rows[is_open], leads[is_open], ends[is_open]
        tokens = np.zeros(len(group), np.int64)
        if not rows.size:
            return rows, tokens
        weighed = logits[rows]
        if self.look_ahead:  # whose chain has the temperature, by which `filter_probs` divides
            log_weights = self.look_ahead.log_weights(states[is_open], remaining[is_open])
            weighed = weighed + max(self.options.temperature, MIN_TEMPERATURE) * log_weights
        probs = filter_probs(weighed, self.options, leads | ends)
        tokens[rows] = chosen = sample_tokens(probs, uniform[rows])
        own = logits[rows] - logits[rows].max(axis=1, keepdims=True)
        each = np.arange(len(rows))
        nats = np.log(np.exp(own).sum(axis=1)) - own[each, chosen]
        columns = (rows, chosen, nats, leads[each, chosen])
        for row, *step in zip(*(column.tolist() for column in columns), strict=True):
            group[row].push(*step)
        return rows[[not group[row].ended for row in rows.tolist()]], tokens

    def _masks(
        self, sequences: list["_Sequence"], states: Ints, remaining: Ints
    ) -> tuple[Bools, Bools]:
        """Return which tokens continue each sequence, and which others may end it, (N, V)."""
        leads = self.constraint.allowed(states, remaining)
        accepts = self.constraint.automaton.accepts[states]
        is_over = remaining == 0
        if self.eos_token_id < 0:
            is_over |= ~leads.any(axis=1)  # and what may end a text may be excluded
        ends = np.where(is_over[:, None], self.valid, self.ending) & accepts[:, None] & ~leads
        for row, sequence in enumerate(sequences):
            leads[row, sequence.given_up.get(len(sequence.tokens), [])] = False
        n = self.index.n if self.index else 0
        # all have the same length
        if self.index and len(self.prompt_text) + len(sequences[0].tokens) >= n:
            contexts = [(self.prompt_text + each.tokens[-n:])[-n:] for each in sequences]
            rows, copied = self.index.followers(np.array(contexts))
            is_text = copied != self.eos_token_id
            leads[rows[is_text], copied[is_text]] = False
        return leads, ends


class _Sequence:
    """A text that is sampled, and what was given up on the way."""

    def __init__(self, number: int, sampler: ConstrainedSampler) -> None:
        self.number, self.sampler = number, sampler
        self.tokens: list[int] = []
        self.nats: list[float] = []  # of each token before filters
        self.states = [0]  # of the constraint, before and after each token
        self.text = SampledText(sampler.tokenizer, sampler.options)
        self.written = ""  # what it has returned
        self.n_released = 0  # characters of it
        self.ended: Ended = ""
        self.given_up: dict[int, list[int]] = {}  # tokens by position
        self.furthest = self.n_dead_ends = self.n_in_vain = self.n_characters = 0
        self.total_nats = 0.0

    def push(self, token: int, nats: float, continues: bool) -> None:
        """Append a token; if it does not continue the text, end before it."""
        if not (continues or token == self.sampler.eos_token_id or not self.text.remaining):
            self.ended = "match"
            return
        self.written += self.text.push(token)
        self.ended = self.text.ended
        if self.text.has_token:
            self.tokens.append(token)
            self.nats.append(nats)
            self.total_nats += nats
            self.n_characters += token < self.sampler.model.first_continuation_id
        if continues:
            self.states.append(self.sampler.constraint.next_state(self.states[-1], token))
        if self.ended == "length" and self.sampler.options.max_chars:
            self._cut()

    def _cut(self) -> None:
        """End the text after its last sentence, or else line, that matches."""
        starts = np.flatnonzero(np.array(self.tokens) < self.sampler.model.first_continuation_id)
        edges = [*starts.tolist(), len(self.tokens)]  # tokens before each character
        accepts = self.sampler.constraint.automaton.accepts
        for pattern in (SENTENCE_END, LINE_END):
            ends = [found.end() for found in pattern.finditer(self.written)]
            whole = [end for end in ends if end and accepts[self.states[edges[end]]]]
            if whole:
                self.written, self.ended = self.written[: whole[-1]], "sentence"
                return

    def back_up(self) -> None:
        """Remove tokens from a dead end, and give up the first of them at its position.

        Raises:
            OperationError: nothing is left, or it was tried too often.
        """
        if len(self.tokens) > self.furthest:
            self.furthest, self.n_in_vain = len(self.tokens), 0
        floor = max(0, self.furthest - HELD_BACK)  # what is before has been released
        position = max(floor, len(self.tokens) - 2**self.n_in_vain)
        self.n_in_vain = 0 if position == floor else self.n_in_vain + 1
        self.n_dead_ends += 1
        if self.n_dead_ends > MAX_DEAD_ENDS or position == len(self.tokens):
            raise OperationError(
                f"a text was given up after {self.n_dead_ends:,} dead ends: too little matches "
                "that is no copy; drop a constraint, or raise --no-copy"
            )
        self.given_up = {at: tokens for at, tokens in self.given_up.items() if at <= position}
        self.given_up.setdefault(position, []).append(self.tokens[position])
        del self.tokens[position:], self.nats[position:], self.states[position + 1 :]
        self.total_nats = sum(self.nats)
        first_continuation_id = self.sampler.model.first_continuation_id
        self.n_characters = sum(token < first_continuation_id for token in self.tokens)
        self.text = SampledText(self.sampler.tokenizer, self.sampler.options)
        self.written = "".join(map(self.text.push, self.tokens))

    def release(self) -> Piece:
        """Return what is certain of the text since the last call."""
        end = len(self.written)
        if not self.ended:
            end -= HELD_BACK if self.sampler.index is not None else 0
            end = 0 if self.sampler.options.max_chars else end
        piece = self.written[self.n_released : max(end, self.n_released)]
        self.n_released += len(piece)
        bits = self.total_nats / math.log(2) / self.n_characters if self.n_characters else math.nan
        return Piece(piece, self.ended, bits)
