"""Text generation: prefill a prompt, sample tokens, decode text, cut at stop strings.

The context is at most `block_size` tokens: of a longer prompt the last `block_size`. When the KV
cache is full, its older half is evicted (decoders.py).

A token is the inverse of the cumulative distribution at one uniform number, which is a function of
(seed, sequence, position) alone. So the text of a sequence does not depend on how many are
sampled together, except where rounding changes the logits.

Filters, in this order: valid tokens (not the unknown one, and bytes only where they form valid
UTF-8); temperature; top-k (the k most likely tokens); top-p (the smallest set of most likely tokens
whose probabilities sum to at least p; Holtzman et al. 2020, section 3.1); min-p (tokens at least p
times as likely as the most likely one).

Shapes in this file: N = sequences sampled together, T = prompt length, V = vocabulary size.
"""

import io
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chargpt.config import SampleConfig
from chargpt.device import one_blas_thread
from chargpt.errors import ChargptError, ConfigError, OperationError, TooFewError
from chargpt.inference.decoders import build_decoder
from chargpt.log import logger
from chargpt.models import LanguageModel, eval_mode
from chargpt.store.run import Run, as_run
from chargpt.text.display import display_char
from chargpt.text.documents import find_documents
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens, UnknownPolicy

MAX_GROUP_BYTES = 256_000_000  # of KV caches and logits of sequences that are sampled together
UNIFORMS_CHUNK = 256  # positions whose uniform numbers are computed together
MAX_REJECTED = 1_000  # sequences in a row, before `new` or `distinct` gives up
MIN_GROUP = 32  # sequences sampled together where some are rejected: fewer take as long
MIN_TEMPERATURE = 1e-100  # dividing differences of logits by it does not overflow
SLICE_SECONDS = 0.005  # that a thread decodes before others may

# Threads that decode at once take turns at Python's lock within every small operation of numpy,
# and several times as long as one after another.
_decoding = threading.Lock()


class _OfTheRun:
    """The default of a sampling setting: its value in the run. None is a value."""

    def __repr__(self) -> str:
        return "<of the run>"


OF_THE_RUN: Any = _OfTheRun()
# settings without a choice among samples, and of a text that is streamed
ALL_SAMPLES: dict[str, Any] = {"new": False, "distinct": False, "best": None}
ONE_TEXT = {"num_samples": 1, **ALL_SAMPLES}

# why a text has ended, "" if it has not
Ended = Literal["", "length", "stop", "document", "stopped"]


class Sample(str):
    """A sampled text: the prompt and its continuation.

    Attributes:
        prompt: its beginning.
        ended: by its `length`, before a `stop` string, at the end of a `document`, or `stopped`
            from outside.
        surprisal: mean bits per sampled character, -log2 of its probability before temperature and
            filters; of all that was sampled, also the stop string or end of the document. NaN if
            nothing was.
        sequence_id: number of its sequence, from 0: with the seed it decides the text.
    """

    prompt: str
    ended: Ended
    surprisal: float
    sequence_id: int

    @property
    def text(self) -> str:
        """The whole text as a plain string."""
        return str(self)

    @property
    def continuation(self) -> str:
        """The text without the prompt."""
        return self[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        """Whether a stop string or the end of a document has ended it."""
        return self.ended in ("stop", "document")


def sample(
    run: Run | str | Path,
    options: SampleConfig | None = None,
    *,
    prompt: str = OF_THE_RUN,
    length: int = OF_THE_RUN,
    temperature: float = OF_THE_RUN,
    top_k: int | None = OF_THE_RUN,
    top_p: float | None = OF_THE_RUN,
    min_p: float | None = OF_THE_RUN,
    num_samples: int = OF_THE_RUN,
    new: bool = OF_THE_RUN,
    distinct: bool = OF_THE_RUN,
    best: int | None = OF_THE_RUN,
    stop: Sequence[str] = OF_THE_RUN,
    seed: int | None = OF_THE_RUN,
    unknown: UnknownPolicy | None = None,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Sample]:
    """Generate texts with a trained model; that of `with_mixture(run)` is its mixture.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        options: sampling settings; the run's own `sample` section by default.
        prompt, length, temperature, top_k, top_p, min_p, num_samples, stop, seed: settings that
            replace those of `options`, as in `sample(run, prompt="To be", temperature=0.5)`; top_k,
            top_p and min_p None: no such filter; seed None: a new one each time.
        new, distinct: settings too: only whole documents that are not in the run's text, in any
            split; no continuation twice. Sequences are sampled until `num_samples` are found; of
            `MAX_REJECTED` in a row that are rejected, those found are returned, with a warning.
        best: a setting too: return only so many, those of the lowest surprisal, lowest first; None:
            all.
        unknown: policy for prompt characters outside the vocabulary; the run's `text.unknown` by
            default.
        on_progress: called with the number of characters sampled for all texts and their total;
            where a text may end before its length, at a stop string or the end of a document, with
            the number of finished texts and `num_samples`; for new and distinct, of those found.
        is_stopped: once it returns True, the texts so far are returned; some may be missing.

    Returns:
        `num_samples` strings, each the prompt and its continuation without stop strings, with the
        attributes of `Sample`; in the order of their sequences, but for `best`. They do not depend
        on what other threads sample meanwhile.

    Raises:
        ConfigError: a setting is unknown or invalid, or `new` is asked of a run without documents.
        RunError: `new` is asked of a run without its text.
        UnknownCharacterError: the prompt contains unknown characters and `unknown` is `error`.
        OperationError: the model's logits are not finite.
    """
    given = locals()  # before there are others
    run = as_run(run)
    chosen = _with_changes(run, options, given)
    samples: list[Sample] = []
    try:
        for group in sample_groups(run, chosen, unknown, on_progress, is_stopped):
            samples += group
    except TooFewError as error:
        logger.warning(str(error))
    return samples


def sample_groups(
    run: Run,
    options: SampleConfig,
    unknown: UnknownPolicy | None = None,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[list[Sample]]:
    """Yield the samples that `sample` returns as they are known, group by group; `best` at the end.

    The arguments and other errors are those of `sample`.

    Raises:
        TooFewError: after all samples, they are fewer than `num_samples`.
    """
    # float32 numbers in the KV cache and the logits of one sequence
    n_values = 2 * run.model.new_cache(1).keys.numel() + run.model.vocab_size
    max_group = max(1, MAX_GROUP_BYTES // (4 * n_values))
    selection = _Selection(run, options)
    found: list[Sample] = []
    while not selection.is_done:
        sequence_ids = selection.next_ids(max_group)
        texts = [io.StringIO() for _ in sequence_ids]
        steps = stream_run(run, options, unknown=unknown, sequence_ids=sequence_ids)
        for n_steps, step in enumerate(steps, 1):
            for text, piece in zip(texts, step, strict=True):
                text.write(piece.text)
            on_progress(*selection.progress(n_steps, step))
            if is_stopped():
                break
        group = [
            new_sample(options.prompt, text.getvalue(), ended or "stopped", surprisal, number)
            for text, (_, ended, surprisal), number in zip(texts, step, sequence_ids, strict=True)
        ]
        found += selection.accept(group)
        if options.best is None:
            yield found
            found = []
        if is_stopped():
            break
    if options.best is not None:
        yield sorted(found, key=lambda each: each.surprisal)[: options.best]
    selection.require_enough()


class _Selection:
    """Which sequences become samples: all, or by rejection those that are new and distinct.

    They are accepted in the order of their numbers, so they do not depend on the groups.

    Raises:
        ConfigError: `options.new`, and the run has no documents.
        RunError: `options.new`, and the run has no text.
    """

    def __init__(self, run: Run, options: SampleConfig) -> None:
        self.run, self.options = run, options
        self.rejects = options.new or options.distinct
        self.n_tried = self.n_found = self.n_cut = 0  # n_cut: at their length
        self.n_rejected = 0  # in a row, the last ones
        self.seen: set[str] = set()  # continuations
        self.is_known: dict[str, bool] = {}  # of documents that were looked up
        if not options.new:
            return
        if not run.tokenizer.eos_token:
            raise ConfigError(
                f"new samples are whole documents, and the text of {run.folder} is no list of "
                "them; train with -s text.documents=lines, files or a separator, or do without new"
            )
        self.corpus = run.corpus()

    @property
    def is_done(self) -> bool:
        """Whether enough are found, or too many in a row were rejected."""
        return self.n_found >= self.options.num_samples or self.n_rejected >= MAX_REJECTED

    def next_ids(self, largest: int) -> range:
        """Return the next sequences to sample, at most `largest`: what it takes at the rate so far.

        Where some are rejected, those that were sampled beyond the last accepted one are wasted.
        """
        size = self.options.num_samples - self.n_found
        if self.rejects and self.n_tried:
            n_likely = size * self.n_tried // max(1, self.n_found)
            size = max(MIN_GROUP, min(n_likely, MAX_REJECTED - self.n_rejected))
        return range(self.n_tried, self.n_tried + min(size, largest))

    def progress(self, n_steps: int, step: Sequence["Piece"]) -> tuple[int, int]:
        """Return what is done after a step of the next sequences, and the total.

        Of samples, or where no text can end before its length, of characters.
        """
        total, length = self.options.num_samples, self.options.length
        if self.rejects:
            return self.n_found, total
        if self.options.stop or self.run.tokenizer.eos_token:
            return self.n_found + sum(bool(piece.ended) for piece in step), total
        return self.n_found * length + min(n_steps, length) * len(step), total * length

    def accept(self, group: list[Sample]) -> list[Sample]:
        """Return those of the next sequences that become samples."""
        if self.options.new:
            self._look_up(group)
        accepted = []
        for each in group:
            if self.is_done:
                break
            self.n_tried += 1
            self.n_cut += each.ended == "length"
            if (self.options.new and not self._is_new(each)) or (
                self.options.distinct and each.continuation in self.seen
            ):
                self.n_rejected += 1
                continue
            if self.options.distinct:
                self.seen.add(each.continuation)
            self.n_found, self.n_rejected = self.n_found + 1, 0
            accepted.append(each)
        return accepted

    def _document(self, sample: Sample) -> str:
        """Return the document that a text ends with: its prompt may hold the ends of others."""
        return sample.rpartition(self.run.tokenizer.eos_token)[2]

    def _is_new(self, sample: Sample) -> bool:
        """Return whether a text that was looked up is a whole document, not blank, and new."""
        document = self._document(sample)
        return sample.ended == "document" and bool(document.strip()) and not self.is_known[document]

    def _look_up(self, group: list[Sample]) -> None:
        wanted = {self._document(each) for each in group if each.ended == "document"}
        wanted -= self.is_known.keys()
        _, known = find_documents(self.corpus, wanted, self.run.tokenizer.eos_token)
        self.is_known |= {document: document in known for document in wanted}

    def require_enough(self) -> None:
        """Raise TooFewError if the search has ended with too few."""
        if self.n_found >= self.options.num_samples or self.n_rejected < MAX_REJECTED:
            return
        kinds = [kind for kind in ("new", "distinct") if getattr(self.options, kind)]
        is_cut = self.options.new and self.n_cut > self.n_tried / 2
        remedy = "length, which cut most of them" if is_cut else "temperature"
        raise TooFewError(
            f"found {self.n_found:,} of {self.options.num_samples:,} {' and '.join(kinds)} samples "
            f"in {self.n_tried:,} sequences, none in the last {MAX_REJECTED:,}; raise the {remedy}"
        )


def new_sample(
    prompt: str,
    continuation: str,
    ended: Ended,
    surprisal: float = math.nan,
    sequence_id: int = 0,
) -> Sample:
    """Return a sample; without a constructor of its own, its class can be pickled."""
    sample = Sample(prompt + continuation)
    sample.prompt, sample.ended, sample.surprisal = prompt, ended, surprisal
    sample.sequence_id = sequence_id
    return sample


def stream(
    run: Run | str | Path,
    options: SampleConfig | None = None,
    *,
    prompt: str = OF_THE_RUN,
    length: int = OF_THE_RUN,
    temperature: float = OF_THE_RUN,
    top_k: int | None = OF_THE_RUN,
    top_p: float | None = OF_THE_RUN,
    min_p: float | None = OF_THE_RUN,
    stop: Sequence[str] = OF_THE_RUN,
    seed: int | None = OF_THE_RUN,
    unknown: UnknownPolicy | None = None,
) -> Iterator[str]:
    """Yield the continuation of one text as it is sampled, piece by piece, without the prompt.

    The arguments and errors are those of `sample`.
    """
    given = locals()
    run = as_run(run)
    chosen = _with_changes(run, options, {**given, **ONE_TEXT})
    return (piece.text for (piece,) in stream_run(run, chosen, unknown=unknown) if piece.text)


def _with_changes(run: Run, options: SampleConfig | None, given: Mapping[str, Any]) -> SampleConfig:
    """Return the options, by default the run's, with the settings among the arguments `given`."""
    if isinstance(options, str):
        raise ConfigError(f"give the prompt by name, as in sample(run, prompt={options[:20]!r})")
    if not isinstance(options, SampleConfig | None):
        raise ConfigError("give settings by name, as in sample(run, temperature=0.5)")
    config = run.config.model_copy(update={"sample": options or run.config.sample})
    values = {key: given.get(key, OF_THE_RUN) for key in SampleConfig.model_fields}
    named = {key: value for key, value in values.items() if value is not OF_THE_RUN}
    return config.with_values({f"sample.{key}": value for key, value in named.items()}).sample


class Piece(NamedTuple):
    """What a token adds to the text of its sequence, and what a `Sample` that ends here records.

    The text is one character; while a stop string may be beginning it is empty, and afterwards
    several characters. It is also empty while byte tokens spell a character, and after the end of
    the sequence until all others have ended.
    """

    text: str = ""
    ended: Ended = ""
    surprisal: float = math.nan


class _Step(NamedTuple):
    """A token of each of N sequences."""

    texts: list[str]
    ended: list[Ended]
    has_token: list[bool]  # whether it is part of the sequence
    tokens: Tokens  # (N,)
    logits: Floats  # that they were sampled from, (N, V)


def stream_run(
    run: Run,
    options: SampleConfig,
    *,
    unknown: UnknownPolicy | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> Iterator[list[Piece]]:
    """Return the pieces of the continuations that `sample` returns, one of each in every step.

    Errors of the arguments are those of `sample`, raised at once.
    """
    eos_token, prompt = run.tokenizer.eos_token, run.tokenizer.choose_form(options.prompt)
    if eos_token and eos_token in prompt:
        logger.info(
            f"the prompt holds the end of a document ({display_char(eos_token)}): what follows it "
            "begins a new one"
        )
    return stream_pieces(
        run.model,
        run.tokenizer,
        run.tokenizer.encode(eos_token + prompt, unknown=unknown or run.config.text.unknown),
        options,
        sequence_ids=sequence_ids,
        unigram=lambda: run.corpus().token_counts("train"),
    )


def stream_pieces(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    prompt_ids: Tokens,
    options: SampleConfig,
    *,
    sequence_ids: Sequence[int] | None = None,
    unigram: Callable[[], Ints] | None = None,
) -> Iterator[list[Piece]]:
    """Yield the pieces of N texts that continue a prompt, one of each in every step.

    Steps are decoded ahead for up to `SLICE_SECONDS`: one thread decodes at a time, and none while
    its pieces are used. Meanwhile the model is in its own mode.

    Args:
        model: used on its device in evaluation mode.
        tokenizer: of the model.
        prompt_ids: tokens to continue, (T,). If empty, the text starts after the EOS token or a
            newline, or if the vocabulary has none, with a character sampled from `unigram`.
        options: sampling settings; `prompt` is not used.
        sequence_ids: numbers of the N sequences; 0 to `num_samples` - 1 by default.
        unigram: returns the count of each token, (V,); without it or its text, uniform.

    Raises:
        OperationError: in a step, the model's logits are not finite.
    """
    ids = range(options.num_samples) if sequence_ids is None else sequence_ids
    steps = _decode(model, tokenizer, prompt_ids, options, ids, unigram)
    nats, n_characters = np.zeros((1, len(ids))), np.zeros((1, len(ids)))  # up to each step
    while True:
        ahead: list[_Step] = []
        # threads of the BLAS spin while they wait: on a busy machine they slow a decode step
        with _decoding, eval_mode(model), one_blas_thread():
            end = time.perf_counter() + SLICE_SECONDS
            for step in steps:
                ahead.append(step)
                if time.perf_counter() > end:
                    break
        if not ahead:
            return
        # of all steps at once: in each it would cost a tenth of the speed
        is_own, tokens = (np.stack([step[n] for step in ahead]) for n in (2, 3))  # (steps, N)
        logits = np.stack([step.logits for step in ahead])  # (steps, N, V)
        logits -= np.maximum.reduce(logits, axis=-1, keepdims=True)
        own_logits = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        each = np.where(is_own, np.log(np.exp(logits).sum(axis=-1)) - own_logits, 0)
        nats = nats[-1] + np.cumsum(each, axis=0)
        is_first = is_own & (tokens < model.first_continuation_id)
        n_characters = n_characters[-1] + np.cumsum(is_first, axis=0)
        with np.errstate(invalid="ignore"):  # NaN before the first character
            bits = nats / (math.log(2) * n_characters)
        for step, surprisals in zip(ahead, bits.tolist(), strict=True):
            yield list(map(Piece, step.texts, step.ended, surprisals))


def _decode(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    prompt_ids: Tokens,
    options: SampleConfig,
    ids: Sequence[int],
    unigram: Callable[[], Ints] | None,
) -> Iterator["_Step"]:
    """Yield the steps of `stream_pieces` for the sequences `ids`."""
    prompt = np.asarray(prompt_ids).astype(np.int64)[-model.block_size :]
    prompt = prompt[np.argmax(prompt < model.first_continuation_id) :] if prompt.size else prompt
    if not prompt.size:
        prompt = tokenizer.encode(tokenizer.bos_text).astype(np.int64)
    sequences = [_SampledText(tokenizer, options) for _ in ids]
    cache = model.new_cache(1)
    first = np.zeros(tokenizer.vocab_size)  # logits of the first token, (V,)
    if prompt.size:
        with torch.inference_mode():
            last = model(torch.from_numpy(prompt)[None].to(model.device), cache)[0, -1]
            first = last.float().cpu().numpy()
    elif unigram is not None:
        with suppress(ChargptError), np.errstate(divide="ignore"):  # the text may be deleted
            first = np.log(unigram())
    decoder = build_decoder(model, len(ids), cache, max_threads=os.cpu_count() or 1)
    logits = np.tile(first.astype(np.float64), (len(ids), 1))  # (N, V)
    valid, states = tokenizer.valid_tokens, np.zeros(len(ids), dtype=np.int64)
    is_restricted = not valid.allowed.all()
    seed = secrets.randbits(63) if options.seed is None else options.seed
    for numbers in uniforms(seed, ids):
        allowed = valid.allowed[states] if is_restricted else None
        tokens = sample_tokens(filter_probs(logits, options, allowed), numbers)  # (N,)
        pairs = zip(sequences, tokens.tolist(), strict=True)
        texts = [sequence.push(token) for sequence, token in pairs]
        ended = [sequence.ended for sequence in sequences]
        yield _Step(texts, ended, [sequence.has_token for sequence in sequences], tokens, logits)
        if all(ended):
            return
        states = valid.next_state[states, tokens]
        logits = decoder.step(tokens).astype(np.float64)


class _SampledText:
    """A sequence's text, of which the end is buffered while it may begin a stop string."""

    def __init__(self, tokenizer: CharTokenizer, options: SampleConfig) -> None:
        self.read = tokenizer.decode_stream()
        self.eos_token = tokenizer.eos_token
        self.stops = options.stop + ((self.eos_token,) if self.eos_token else ())
        self.remaining = options.length  # characters
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
