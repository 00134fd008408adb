"""Text out of a model: prefill the prompt, then draw one character at a time.

The draw. Each character is the inverse of the distribution's cumulative sum at one uniform number,
and that number is a function of (seed, stream, position) alone. So the text of a stream depends
neither on how many streams are drawn together nor on whether a cache is used.

The filters, in this order: temperature, top-k (the k likeliest), top-p (the fewest likeliest that
hold a share p), min-p (those at least p times as likely as the likeliest). The unknown token is
never drawn.

The window. A model looks at `block_size` characters at most. A longer prompt counts with its last
`block_size` characters. Once that many are held, the last `block_size // 2` (at least one) become
the new window, which then grows again: each character is drawn with at least that much context.

Shapes in this file: N = streams drawn together, T = characters of the window, V = vocabulary.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.config import SampleConfig
from chargpt.errors import ChargptError, ConfigError, WorkError
from chargpt.inference.decoder import Decoder
from chargpt.models import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer, Tokens, Unknown

DRAWN_AT_ONCE = 256  # uniform numbers per stream
LEAST_TEMPERATURE = 1e-100  # over which no difference of logits grows infinite
GROUP_BYTES = 256_000_000  # what the streams of one group may take

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def sample(
    run: Run,
    options: SampleConfig | None = None,
    *,
    unknown: Unknown | None = None,
    **changes: object,
) -> list[str]:
    """Return texts, each the prompt and what the model writes after it.

    Args:
        run: what `load_run` gives.
        options: how to draw; the run's own `sample` section by default.
        unknown: what to do with characters of the prompt that the vocabulary lacks; the run's
            `text.unknown` by default.
        changes: single settings, as in `sample(run, prompt="To be", temperature=0.5)`.

    Returns:
        `num_samples` texts. Stop strings are not part of them.

    Raises:
        ConfigError: a setting is unknown or does not fit.
        UnknownCharacterError: the prompt holds unknown characters, and `unknown` is `error`.
    """
    config = run.config.model_copy(update={"sample": options or run.config.sample})
    chosen = config.with_values({f"sample.{key}": value for key, value in changes.items()}).sample
    chosen = chosen.model_copy(update={"seed": _seed(chosen)})
    size = _group_size(run.model)
    texts: list[str] = []
    for first in range(0, chosen.num_samples, size):
        streams = range(first, min(first + size, chosen.num_samples))
        steps = list(stream_run(run, chosen, unknown=unknown, streams=streams))
        texts += [chosen.prompt + "".join(pieces) for pieces in zip(*steps, strict=True)]
    return texts


def stream_run(
    run: Run,
    options: SampleConfig,
    *,
    unknown: Unknown | None = None,
    streams: Sequence[int] | None = None,
) -> Iterator[list[str]]:
    """Yield what `sample` returns, without the prompt, piece by piece as `stream` does.

    Raises:
        ConfigError, UnknownCharacterError: as `sample` does, before the first piece.
    """
    tokenizer = run.tokenizer
    prompt = tokenizer.encode(options.prompt, unknown=unknown or run.config.text.unknown)
    unigram = None
    if not prompt.size and "\n" not in tokenizer.characters:
        unigram = _unigram(run)
    return stream(run.model, tokenizer, prompt, options, streams=streams, unigram=unigram)


def stream(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    prompt_ids: Tokens,
    options: SampleConfig,
    *,
    use_cache: bool = True,
    streams: Sequence[int] | None = None,
    unigram: npt.NDArray[np.int64] | None = None,
) -> Iterator[list[str]]:
    """Yield each stream's next piece of text, one list a step, the prompt left out.

    A piece is one character, or none or more where a stop string was about to appear; a stream
    that has come to a stop string gives empty pieces until all have ended.

    Args:
        model: used where it is, in evaluation mode; its mode is restored at the end.
        tokenizer: what the ids mean.
        prompt_ids: token ids to go on from, shape (characters,). If there are none, the text starts
            after a newline, or without one in the vocabulary from `unigram`.
        options: all of `SampleConfig` but its `prompt`.
        use_cache: False computes every window anew, to the same text, slowly.
        streams: numbers of the streams to draw; the first `num_samples` by default.
        unigram: counts of the ids, shape (V,), for the first character; all alike by default.

    Raises:
        ConfigError: a stop string is empty.
        WorkError: the model's weights give numbers that are not finite.
    """
    if "" in options.stop:
        raise ConfigError("a stop string is empty and would stop at once; give it a character")
    numbers = range(options.num_samples) if streams is None else streams
    uniforms = _uniforms(_seed(options), numbers)
    context = np.asarray(prompt_ids).astype(np.int64)[-model.block_size :]
    if not context.size and "\n" in tokenizer.characters:
        context = tokenizer.encode("\n").astype(np.int64)
    window = _Window(model, context, len(numbers), use_cache)
    if not context.size:
        window.assume(np.ones(tokenizer.vocab_size) if unigram is None else unigram)
    return _write(tokenizer, options, window, uniforms)


class _Window:
    """The characters that the model looks at, and what it expects next."""

    def __init__(self, model: LanguageModel, context: Ids, count: int, use_cache: bool) -> None:
        self.model = model
        # what has been computed of the characters so far, if that is to be kept
        self.memory: Decoder | KVCache | None = None
        if use_cache:
            self.memory = Decoder(model, count) if Decoder.fits(model) else model.new_cache(count)
        self.tokens = np.zeros((count, model.block_size), dtype=np.int64)  # the first are held
        self.length = context.size
        self.tokens[:, : self.length] = context
        self.assumed = np.zeros((count, 0))

    def assume(self, counts: npt.NDArray[np.number[Any]]) -> None:
        """Take these counts, (V,), for what is expected while there is no character yet."""
        with np.errstate(divide="ignore"):
            logits = np.log(np.asarray(counts, dtype=np.float64))
        self.assumed = np.tile(logits, (len(self.tokens), 1))  # (N, V)

    def logits(self) -> Floats:
        """Return the next characters' logits, (N, V)."""
        if not self.length:
            return self.assumed
        known = 0 if self.memory is None else self.memory.length
        new = self.tokens[:, known : self.length]  # (N, T)
        if isinstance(self.memory, Decoder):
            return self.memory.step(new).astype(np.float64)
        with torch.inference_mode():
            tokens = torch.from_numpy(new).to(self.model.device)
            logits: Tensor = self.model(tokens, self.memory)  # (N, T, V)
            # a device may lack float64
            last: Floats = logits[:, -1].float().cpu().numpy().astype(np.float64)
            return last

    def append(self, drawn: Ids) -> None:
        """Take in one character of each stream, (N,); start anew where the window is full."""
        if self.length == self.model.block_size:
            kept = max(1, self.model.block_size // 2) - 1
            self.tokens[:, :kept] = self.tokens[:, self.length - kept :].copy()
            self.length = kept
            if self.memory is not None:
                self.memory.clear()
        self.tokens[:, self.length] = drawn
        self.length += 1


class _Tail:
    """The end of one stream's text, held back while it may be the start of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = ""
        self.ended = False

    def push(self, character: str, is_last: bool) -> str:
        """Take in a character; return what is now sure to belong to the text."""
        if not self.stops:
            return character
        if self.ended:
            return ""
        self.held += character
        found = [place for place in map(self.held.find, self.stops) if place >= 0]
        self.ended = bool(found) or is_last
        sure = min(found) if found else len(self.held) - (0 if is_last else self._doubtful())
        piece, self.held = self.held[:sure], self.held[sure:]
        return piece

    def _doubtful(self) -> int:
        """Return how many characters at the end may turn out to begin a stop string."""
        longest = max(map(len, self.stops), default=0)
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-size:]) for stop in self.stops):
                return size
        return 0


def _write(
    tokenizer: CharTokenizer, options: SampleConfig, window: _Window, uniforms: Iterator[Floats]
) -> Iterator[list[str]]:
    """Draw a character of each stream, look out for stop strings, and so on."""
    tails = [_Tail(options.stop) for _ in window.tokens]
    was_training = window.model.training
    window.model.eval()
    try:
        for position in range(options.length):
            shares = probabilities(window.logits(), options, tokenizer.unknown_id)
            drawn = draw(shares, next(uniforms))
            is_last = position == options.length - 1
            yield [
                tail.push(tokenizer.characters[token], is_last)
                for tail, token in zip(tails, drawn.tolist(), strict=True)
            ]
            if all(tail.ended for tail in tails):
                return
            window.append(drawn)
    finally:
        window.model.train(was_training)


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
    peak = np.maximum.reduce(logits, axis=1, keepdims=True)  # (N, 1); the method is slower
    if not math.isfinite(np.add.reduce(peak, axis=None)):
        raise WorkError(
            "the model's predictions are not finite numbers, so its training diverged; "
            "use an earlier checkpoint, or train anew with a lower optim.lr"
        )
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


def draw(shares: Floats, uniforms: Floats) -> Ids:
    """Return token ids, (N,), by the inverse of the cumulated shares.

    Args:
        shares: (N, V), at least one above 0 in each row; they need not sum to 1.
        uniforms: (N,), from 0 up to but without 1.
    """
    cumulated = np.add.accumulate(shares, axis=1)  # (N, V)
    aims = uniforms * cumulated[:, -1]  # (N,)
    # As many as end at or before the aim: a token without any share has no width to fall into.
    ids: Ids = np.add.reduce(cumulated <= aims[:, None], axis=1)
    return ids


def _uniforms(seed: int, streams: Sequence[int]) -> Iterator[Floats]:
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


def _seed(options: SampleConfig) -> int:
    return secrets.randbits(63) if options.seed is None else options.seed


def _group_size(model: LanguageModel) -> int:
    """Return how many streams may be drawn together without taking much memory."""
    cache = model.new_cache(1)
    logits_bytes = 4 * model.block_size * model.vocab_size
    return max(1, GROUP_BYTES // (cache.keys.nbytes + cache.values.nbytes + logits_bytes))


def _unigram(run: Run) -> npt.NDArray[np.int64] | None:
    """Return the counts of the run's training text, if it can still be had."""
    try:
        return run.corpus().token_counts("train")
    except ChargptError:
        return None
