"""Sampling of tokens from logits.

A token is the inverse of the cumulative distribution at one uniform number, which is a function of
(seed, sequence, position) alone. So the text of a sequence does not depend on how many are
sampled together, except where rounding changes the logits.

Filters, in this order: valid tokens (not the unknown one, and bytes only where they form valid
UTF-8); temperature; top-k (the k most likely tokens); top-p (the smallest set of most likely tokens
whose probabilities sum to at least p; Holtzman et al. 2020, section 3.1); min-p (tokens at least p
times as likely as the most likely one).

Shapes in this file: N = sequences, V = vocabulary size.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from chargpt.config import SampleConfig
from chargpt.errors import OperationError
from chargpt.inference.decoders import Decoder
from chargpt.text.tokenizer import Floats, Tokens, ValidTokens

UNIFORMS_CHUNK = 256  # positions whose uniform numbers are computed together
MIN_TEMPERATURE = 1e-100  # dividing differences of logits by it does not overflow


def generate(
    decoder: Decoder,
    logits: Floats,
    options: SampleConfig,
    sequence_ids: Sequence[int],
    valid: ValidTokens,
) -> Iterator[Tokens]:
    """Sample tokens without end and yield those of each position, (N,).

    The first ones follow from the logits after the prompt, (V,). The numbers of the N sequences
    select their uniform numbers. The options have a seed.

    Raises:
        OperationError: the logits are not finite.
    """
    assert options.seed is not None
    uniform_numbers = uniforms(options.seed, sequence_ids)
    next_logits = np.tile(logits, (len(sequence_ids), 1))  # (N, V)
    states = np.zeros(len(sequence_ids), dtype=np.int64)
    is_restricted = not valid.allowed.all()
    while True:
        allowed = valid.allowed[states] if is_restricted else None
        probs = filter_probs(next_logits, options, allowed)
        tokens = sample_tokens(probs, next(uniform_numbers))
        yield tokens
        states = valid.next_state[states, tokens]
        next_logits = decoder.step(tokens).astype(np.float64)


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
