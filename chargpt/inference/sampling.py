"""Sampling of tokens: filters, inverse transform sampling, and what every generator shares.

A token is the inverse of the cumulative distribution at one uniform number, which is a function of
(seed, sequence, position) alone. So the text of a sequence does not depend on how many are
sampled together, except where rounding changes the logits.

Filters, in this order: valid tokens (not the unknown one, and bytes only where they form valid
UTF-8) and constraints; temperature; top-k (the k most likely tokens); top-p (the smallest set of
most likely tokens whose probabilities sum to at least p; Holtzman et al. 2020, section 3.1); min-p
(tokens at least p times as likely as the most likely one).

Shapes in this file: N = sequences sampled together, T = prompt length, V = vocabulary size.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from chargpt.config import SampleConfig
from chargpt.device import one_blas_thread
from chargpt.errors import ChargptError, OperationError
from chargpt.models import KVCache, LanguageModel, eval_mode
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens

UNIFORMS_CHUNK = 256  # positions whose uniform numbers are computed together
MIN_TEMPERATURE = 1e-100  # dividing differences of logits by it does not overflow
SLICE_SECONDS = 0.005  # that a thread decodes before others may

# Threads that decode at once take turns at Python's lock within every small operation of numpy,
# and several times as long as one after another.
_decoding = threading.Lock()

# why a text has ended, "" if it has not
Ended = Literal["", "length", "stop", "document", "match", "sentence", "stopped"]
T = TypeVar("T")


class Piece(NamedTuple):
    """What a token adds to the text of its sequence, and what a `Sample` that ends here records.

    The text is one character; while a stop string may be beginning it is empty, and afterwards
    several characters. It is also empty while byte tokens spell a character, and after the end of
    the sequence until all others have ended.
    """

    text: str = ""
    ended: Ended = ""
    surprisal: float = math.nan


def decoded_ahead(model: LanguageModel, steps: Iterator[T]) -> Iterator[list[T]]:
    """Yield decode steps in lists of those that take up to `SLICE_SECONDS`.

    One thread decodes at a time, and none while its steps are used. Meanwhile the model is in its
    own mode.
    """
    while True:
        ahead: list[T] = []
        # threads of the BLAS spin while they wait: on a busy machine they slow a decode step
        with _decoding, eval_mode(model), one_blas_thread():
            end = time.perf_counter() + SLICE_SECONDS
            for step in steps:
                ahead.append(step)
                if time.perf_counter() > end:
                    break
        if not ahead:
            return
        yield ahead


def prefill(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    prompt_ids: Tokens,
    unigram: Callable[[], Ints] | None = None,
) -> tuple[Floats, KVCache]:
    """Return the logits of the first token, (V,), and the cache of one sequence after a prompt.

    Args:
        prompt_ids: tokens to continue, (T,), of which the last `block_size` count. If empty, the
            text starts after the EOS token or a newline.
        unigram: returns the count of each token, (V,), for a vocabulary without either; without it
            or its text, the first token is uniform.
    """
    prompt = np.asarray(prompt_ids).astype(np.int64)[-model.block_size :]
    prompt = prompt[np.argmax(prompt < model.first_continuation_id) :] if prompt.size else prompt
    if not prompt.size:
        prompt = tokenizer.encode(tokenizer.bos_text).astype(np.int64)
    cache = model.new_cache(1)
    first = np.zeros(tokenizer.vocab_size)
    if prompt.size:
        with torch.inference_mode():
            for logits in model.iter_parts(torch.from_numpy(prompt)[None].to(model.device), cache):
                first = logits[0, -1].float().cpu().numpy()
    elif unigram is not None:
        with suppress(ChargptError), np.errstate(divide="ignore"):  # the text may be deleted
            first = np.log(unigram())
    return first.astype(np.float64), cache


class SampledText:
    """A sequence's text, of which the end is buffered while it may begin a stop string."""

    def __init__(self, tokenizer: CharTokenizer, options: SampleConfig) -> None:
        self.read = tokenizer.decode_stream()
        self.eos_token = tokenizer.eos_token
        self.stops = options.stop + ((self.eos_token,) if self.eos_token else ())
        self.remaining = options.limit  # characters
        self.buffer = ""
        self.ended: Ended = ""
        self.has_token = False  # whether the last token is part of it

    def push(self, token: int) -> str:
        """Append a token; return the characters that cannot belong to a stop string."""
        self.has_token = not self.ended
        if self.ended:
            return ""
        character = self.read(token)
        if not self.remaining:  # of a document, whose end may be the next token
            self.ended = "document" if character == self.eos_token else "length"
            self.has_token = self.ended == "document"
        if self.ended or not character:
            return ""
        self.remaining -= 1
        if not self.remaining and not self.eos_token:
            self.ended = "length"
        if not self.stops:
            return character
        self.buffer += character
        starts = [start for start in map(self.buffer.find, self.stops) if start >= 0]
        if starts:
            is_eos = self.eos_token and self.buffer[min(starts)] == self.eos_token
            self.ended = "document" if is_eos else "stop"
        elif self.remaining:  # a suffix that begins a stop string waits for the rest
            starts = [
                start
                for start in range(len(self.buffer))
                if any(stop.startswith(self.buffer[start:]) for stop in self.stops)
            ]
        end = min(starts, default=len(self.buffer))
        piece, self.buffer = self.buffer[:end], self.buffer[end:]
        return piece


def filter_probs(
    logits: Floats, options: SampleConfig, allowed: npt.NDArray[np.bool_] | None = None
) -> Floats:
    """Return unnormalised probabilities after all filters, (N, V), 0 for tokens not `allowed`.

    Raises:
        OperationError: the logits are not finite.
    """
    if allowed is not None:
        logits = np.where(allowed, logits, -math.inf)
    maximum = max_logits(logits)
    if options.temperature == 0:
        one_hot = np.zeros_like(logits)
        one_hot[np.arange(len(logits)), logits.argmax(axis=1)] = 1
        return one_hot
    probs = logits - maximum
    probs /= max(options.temperature, MIN_TEMPERATURE)
    np.exp(probs, out=probs)
    if options.top_k is not None or options.top_p is not None:
        probs *= _top_mask(probs, options.top_k, options.top_p)
    if options.min_p is not None:
        probs *= probs >= options.min_p  # the most likely token has 1
    return probs


def max_logits(logits: Floats) -> Floats:
    """Return the maximum of each row, (N, V) -> (N, 1).

    Raises:
        OperationError: a maximum is not finite.
    """
    maximum: Floats = np.maximum.reduce(logits, axis=1, keepdims=True)  # faster than `logits.max`
    if not math.isfinite(np.add.reduce(maximum, axis=None)):
        raise OperationError(
            "the model's predictions are not finite numbers, so its training diverged; "
            "use an earlier checkpoint, or train again with a lower optim.lr"
        )
    return maximum


def _top_mask(probs: Floats, top_k: int | None, top_p: float | None) -> npt.NDArray[np.bool_]:
    """Return which tokens pass top-k and then top-p, (N, V)."""
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    if top_k is not None:
        ranked[:, top_k:] = 0
    passes = ranked > 0
    if top_p is not None and top_p < 1:
        before = ranked.cumsum(axis=1) - ranked  # total of the more likely tokens
        passes &= before < top_p * ranked.sum(axis=1, keepdims=True)
    mask = np.zeros_like(passes)
    np.put_along_axis(mask, order, passes, axis=1)
    return mask


def sample_tokens(probs: Floats, numbers: Floats) -> Tokens:
    """Return one token a row of unnormalised probabilities (N, V), by inverse transform sampling.

    Each row has a probability above 0. The uniform numbers and the result are (N,).
    """
    cumulative = np.add.accumulate(probs, axis=1)  # (N, V)
    thresholds = numbers * cumulative[:, -1]  # (N,)
    # With <=, a token of probability 0 is an empty interval and is never chosen.
    tokens: Tokens = np.add.reduce(cumulative <= thresholds[:, None], axis=1)
    return tokens


def uniforms(seed: int, sequence_ids: Sequence[int]) -> Iterator[Floats]:
    """Yield a uniform number in [0, 1) for each sequence, (N,), position after position.

    Raw bits of Philox keyed by (seed, sequence), which are the same in every version of numpy. The
    counter starts elsewhere than that of the training batches, so that no numbers are shared.
    """
    generators = [
        np.random.Philox(
            counter=np.array([0, 0, 0, 1], dtype=np.uint64),
            key=np.array([seed, sequence], dtype=np.uint64),
        )
        for sequence in sequence_ids
    ]
    while True:
        bits = np.stack([source.random_raw(UNIFORMS_CHUNK) for source in generators], axis=1)
        yield from (bits >> np.uint64(11)) * 2.0**-53  # (positions, N)
