"""Text out of a model: read the prompt, then draw one character at a time (drawing.py).

The window. A model looks at `block_size` characters at most, and a longer prompt counts with its
last `block_size`. Once that many are held, the older half is forgotten, and what has been worked
out of the other half stays as it is. So from then on each character is drawn with more than half a
block before it, nearly as `sliding` scores it, and none is read twice.

Shapes in this file: N = streams drawn together, V = vocabulary.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chargpt.config import SampleConfig
from chargpt.errors import ChargptError, ConfigError
from chargpt.inference.decoder import decoders_for, is_worth_compiling
from chargpt.inference.drawing import Floats, Ids, drawn, side_by_side
from chargpt.models import LanguageModel
from chargpt.models.cache import KVCache
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer, Tokens, Unknown

GROUP_BYTES = 256_000_000  # what the streams of one group may take
PADDED = 64  # what decoders may fill a head's numbers, and a block's characters, up to
ROUND = 10**9  # multiplications that threads do before they wait for each other: some 20 ms
MOST_STEPS = 64  # in a round


def sample(
    run: Run,
    options: SampleConfig | None = None,
    *,
    unknown: Unknown | None = None,
    watch: Callable[[int, int], object] = lambda *_: None,
    **changes: object,
) -> list[str]:
    """Return texts, each the prompt and what the model writes after it.

    Args:
        run: what `load_run` gives.
        options: how to draw; the run's own `sample` section by default.
        unknown: what to do with characters of the prompt that the vocabulary lacks; the run's
            `text.unknown` by default.
        watch: told how many characters are done, and of how many at most.
        changes: single settings, as in `sample(run, prompt="To be", temperature=0.5)`.

    Returns:
        `num_samples` texts. Stop strings are not part of them.

    Raises:
        ConfigError: a setting is unknown or does not fit.
        UnknownCharacterError: the prompt holds unknown characters, and `unknown` is `error`.
        WorkError: as `stream` does.
    """
    config = run.config.model_copy(update={"sample": options or run.config.sample})
    chosen = config.with_values({f"sample.{key}": value for key, value in changes.items()}).sample
    chosen = chosen.model_copy(update={"seed": _seed(chosen)})
    size = _group_size(run.model)
    texts: list[str] = []
    for first in range(0, chosen.num_samples, size):
        streams = range(first, min(first + size, chosen.num_samples))
        steps = []
        for step in stream_run(run, chosen, unknown=unknown, streams=streams):
            steps.append(step)
            done = first * chosen.length + len(steps) * len(streams)
            watch(done, chosen.num_samples * chosen.length)
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
        streams: numbers of the streams to draw; the first `num_samples` by default.
        unigram: counts of the ids, shape (V,), for the first character; all alike by default.

    Raises:
        ConfigError: a stop string is empty.
        WorkError: the model's weights give numbers that are not finite.
    """
    if "" in options.stop:
        raise ConfigError("a stop string is empty and would stop at once; give it a character")
    numbers = range(options.num_samples) if streams is None else streams
    options = options.model_copy(update={"seed": _seed(options)})
    context = np.asarray(prompt_ids).astype(np.int64)[-model.block_size :]
    if not context.size and "\n" in tokenizer.characters:
        context = tokenizer.encode("\n").astype(np.int64)
    counts = np.ones(tokenizer.vocab_size) if unigram is None else unigram
    ids = _draw(model, context, counts, options, numbers, tokenizer.unknown_id)
    return _write(tokenizer, options, ids, len(numbers))


def _draw(
    model: LanguageModel,
    context: Ids,
    counts: npt.NDArray[np.number[Any]],
    options: SampleConfig,
    streams: Sequence[int],
    unknown_id: int | None,
) -> Iterator[Ids]:
    """Yield a character of each stream, (N,), by the fastest way there is."""
    was_training = model.training
    model.eval()
    try:
        held = model.new_cache(1)
        if context.size:
            logits = _read(model, context, held)
        else:
            with np.errstate(divide="ignore"):
                logits = np.log(np.asarray(counts, dtype=np.float64))
        parameters = model.parameter_count()
        of_job = max(options.num_samples, len(streams))
        compiled = is_worth_compiling(parameters, of_job, options.length)
        decoders = decoders_for(model, len(streams), held, compiled=compiled)
        parts = np.array_split(np.asarray(streams), len(decoders))
        sources = [
            drawn(decoder, logits, options, part.tolist(), unknown_id)
            for decoder, part in zip(decoders, parts, strict=True)
        ]
        a_step = max(1, parameters * len(parts[0]))
        yield from side_by_side(sources, max(1, min(MOST_STEPS, ROUND // a_step)))
    finally:
        model.train(was_training)


@torch.inference_mode()
def _read(model: LanguageModel, context: Ids, held: KVCache) -> Floats:
    """Let an empty cache hold the characters, (T,); return what comes next, logits (V,)."""
    tokens = torch.from_numpy(context)[None].to(model.device)
    last: Floats = model(tokens, held)[0, -1].float().cpu().numpy().astype(np.float64)
    return last  # a device may lack float64


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
    tokenizer: CharTokenizer, options: SampleConfig, ids: Iterator[Ids], count: int
) -> Iterator[list[str]]:
    """Turn ids into pieces of text, and end once every stream has come to a stop string."""
    tails = [_Tail(options.stop) for _ in range(count)]
    for position, tokens in enumerate(ids, 1):
        is_last = position == options.length
        yield [
            tail.push(tokenizer.characters[token], is_last)
            for tail, token in zip(tails, tokens.tolist(), strict=True)
        ]
        if all(tail.ended for tail in tails):
            return


def _seed(options: SampleConfig) -> int:
    return secrets.randbits(63) if options.seed is None else options.seed


def _group_size(model: LanguageModel) -> int:
    """Return how many streams may be drawn together without taking much memory."""
    layers, _, heads, *sizes = model.new_cache(1).keys.shape
    places, numbers = (-(-size // PADDED) * PADDED for size in sizes)
    held = 2 * layers * heads * places * numbers
    return max(1, GROUP_BYTES // (4 * (held + model.vocab_size)))


def _unigram(run: Run) -> npt.NDArray[np.int64] | None:
    """Return the counts of the run's training text, if it can still be had."""
    try:
        return run.corpus().token_counts("train")
    except ChargptError:
        return None
