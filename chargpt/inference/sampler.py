"""Which character comes next, once a model has said how likely each is.

The draw. Each character is the inverse of the distribution's cumulative sum at one uniform number,
and that number is a function of (seed, stream, position) alone. So the text of a stream depends
neither on how many streams are drawn together nor on who draws them, but for how they round.

The filters, in this order: temperature, top-k (the k likeliest), top-p (the fewest likeliest that
hold a share p), min-p (those at least p times as likely as the likeliest). The unknown token is
never drawn.

Shapes in this file: N = streams drawn together, V = vocabulary.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from chargpt.config import SampleConfig
from chargpt.errors import WorkError

DRAWN_AT_ONCE = 256  # uniform numbers per stream
LEAST_TEMPERATURE = 1e-100  # over which no difference of logits grows infinite

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class Decoder(Protocol):
    """What N streams of characters have left in a model's memory.

    It holds the last `block_size` characters at most. When so many are held, the older half is
    forgotten before the next, and what is known of the others stays as it was worked out: from then
    on each character is drawn with more than half a block before it.
    """

    def step(self, ids: Ids) -> npt.NDArray[np.floating[Any]]:
        """Take in a character of each stream, (N,); return the next ones' logits, (N, V)."""


def drawn(
    decoder: Decoder,
    logits: Floats,
    options: SampleConfig,
    streams: Sequence[int],
    unknown_id: int | None = None,
) -> Iterator[Ids]:
    """Yield a character of each stream, (N,), `options.length` times.

    Args:
        decoder: of N streams, which hold what was before.
        logits: of the first characters, (V,).
        options: whose `seed` is set.
        streams: the numbers of the N streams.
        unknown_id: the token that is never drawn.

    Raises:
        WorkError: the model's weights give numbers that are not finite.
    """
    assert options.seed is not None
    numbers = uniforms(options.seed, streams)
    expected = np.tile(logits, (len(streams), 1))
    for left in reversed(range(options.length)):
        ids = draw(probabilities(expected, options, unknown_id), next(numbers))
        yield ids
        if left:
            expected = decoder.step(ids).astype(np.float64)


def side_by_side(sources: Sequence[Iterator[Ids]], steps: int) -> Iterator[Ids]:
    """Yield what all sources yield, (N,) each, in one; several run in a thread each.

    Args:
        sources: of one length.
        steps: that the threads take before they wait for each other.
    """
    if len(sources) == 1:
        yield from sources[0]
        return
    ended = threading.Event()

    def some(source: Iterator[Ids]) -> list[Ids]:
        return list(takewhile(lambda _: not ended.is_set(), islice(source, steps)))

    with ThreadPoolExecutor(len(sources)) as pool:
        try:
            ahead = pool.map(some, sources)
            while found := list(zip(*ahead, strict=True)):
                ahead = pool.map(some, sources)
                yield from map(np.concatenate, found)
        finally:
            ended.set()


def probabilities(logits: Floats, options: SampleConfig, unknown_id: int | None = None) -> Floats:
    """Return what each token's chance is in proportion to, (N, V), after all filters.

    Args:
        logits: (N, V).
        options: of which the temperature, top_k, top_p and min_p count.
        unknown_id: the token that is never drawn.

    Raises:
        WorkError: the logits are not finite numbers.
    """
    if unknown_id is not None:
        logits = logits.copy()
        logits[:, unknown_id] = -math.inf
    peak = highest(logits)
    if options.temperature == 0:
        likeliest = np.zeros_like(logits)
        likeliest[np.arange(len(logits)), logits.argmax(axis=1)] = 1
        return likeliest
    shares = logits - peak
    shares /= max(options.temperature, LEAST_TEMPERATURE)
    np.exp(shares, out=shares)
    if options.top_k is not None or options.top_p is not None:
        shares *= _among_likeliest(shares, options.top_k, options.top_p)
    if options.min_p is not None:
        shares *= shares >= options.min_p  # the likeliest has 1
    return shares


def highest(logits: Floats) -> Floats:
    """Return each row's highest logit: (N, V) to (N, 1).

    Raises:
        WorkError: it is not a finite number.
    """
    peak: Floats = np.maximum.reduce(logits, axis=1, keepdims=True)  # the method is slower
    if not math.isfinite(np.add.reduce(peak, axis=None)):
        raise WorkError(
            "the model's predictions are not finite numbers, so its training diverged; "
            "use an earlier checkpoint, or train anew with a lower optim.lr"
        )
    return peak


def _among_likeliest(shares: Floats, top_k: int | None, top_p: float | None) -> npt.NDArray[Any]:
    """Return bool (N, V), true for what top-k and then top-p keep."""
    order = np.argsort(-shares, axis=1, kind="stable")
    ranked = np.take_along_axis(shares, order, axis=1)
    if top_k is not None:
        ranked[:, top_k:] = 0
    keep = ranked > 0
    if top_p is not None and top_p < 1:
        before = ranked.cumsum(axis=1) - ranked  # the share of all that are likelier
        keep &= before < top_p * ranked.sum(axis=1, keepdims=True)
    among = np.zeros_like(keep)
    np.put_along_axis(among, order, keep, axis=1)
    return among


def draw(shares: Floats, numbers: Floats) -> Ids:
    """Return token ids, (N,), by the inverse of the cumulated shares.

    Args:
        shares: (N, V), at least one above 0 in each row; they need not sum to 1.
        numbers: (N,), from 0 up to but without 1.
    """
    cumulated = np.add.accumulate(shares, axis=1)  # (N, V)
    aims = numbers * cumulated[:, -1]  # (N,)
    # As many as end at or before the aim: a token without any share has no width to fall into.
    ids: Ids = np.add.reduce(cumulated <= aims[:, None], axis=1)
    return ids


def uniforms(seed: int, streams: Sequence[int]) -> Iterator[Floats]:
    """Yield position after position one number in [0, 1) for each stream, (N,).

    The bits are those of Philox keyed by (seed, stream), raw, since these are the same in every
    version of numpy; the counter's start sets them apart from those of training batches.
    """
    generators = [
        np.random.Philox(
            counter=np.array([0, 0, 0, 1], dtype=np.uint64),
            key=np.array([seed, stream], dtype=np.uint64),
        )
        for stream in streams
    ]
    while True:
        bits = np.stack([source.random_raw(DRAWN_AT_ONCE) for source in generators], axis=1)
        yield from (bits >> np.uint64(11)) * 2.0**-53  # (positions, N)
