"""Text generation: prefill a prompt, sample tokens, decode text, cut at stop strings.

The context is at most `block_size` tokens: of a longer prompt the last `block_size`. When the KV
cache is full, its older half is evicted (decoders.py). How a token is chosen: sampling.py.

Shapes in this file: N = sequences sampled together, T = prompt length, V = vocabulary size.
"""

import io
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from chargpt.config import SampleConfig
from chargpt.errors import ConfigError, TooFewError
from chargpt.inference.constrained import ConstrainedSampler, Rules, build_rules
from chargpt.inference.constraints import CONSTRAINTS
from chargpt.inference.decoders import build_decoder
from chargpt.inference.sampling import (
    Ended,
    Piece,
    SampledText,
    decoded_ahead,
    filter_probs,
    prefill,
    sample_tokens,
    uniforms,
)
from chargpt.inference.selection import Sample, Selection, new_sample
from chargpt.log import logger
from chargpt.models import LanguageModel, eval_mode
from chargpt.store.run import Run, as_run
from chargpt.text.display import display_char
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens, UnknownPolicy

N_COPIES = 6  # of logits and probabilities of a token
MAX_GROUP_BYTES = 256_000_000  # of KV caches and logits of sequences that are sampled together

_latest_rules: WeakKeyDictionary[LanguageModel, tuple[Any, Rules]] = WeakKeyDictionary()


class _OfTheRun:
    """The default of a sampling setting: its value in the run. None is a value."""

    def __repr__(self) -> str:
        return "<of the run>"


OF_THE_RUN: Any = _OfTheRun()
# settings without a choice among samples, and of a text that is streamed
ALL_SAMPLES: dict[str, Any] = {"new": False, "distinct": False, "best": None}
ONE_TEXT = {"num_samples": 1, **ALL_SAMPLES}
RULES = (*CONSTRAINTS, "max_chars", "no_copy")  # settings that a `ConstrainedSampler` applies
# of samples that show the model, whatever the run's settings ask for
PLAIN = {**ALL_SAMPLES, **{name: SampleConfig.model_fields[name].default for name in RULES}}


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
    match: str | None = OF_THE_RUN,
    only: str | None = OF_THE_RUN,
    without: str | None = OF_THE_RUN,
    word: Sequence[str] = OF_THE_RUN,
    lines: int | None = OF_THE_RUN,
    acrostic: Sequence[str] = OF_THE_RUN,
    end: str | None = OF_THE_RUN,
    max_chars: int | None = OF_THE_RUN,
    no_copy: int | None = OF_THE_RUN,
    whole: bool = OF_THE_RUN,
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
        match, only, without, word, lines, acrostic, end, max_chars, whole: constraints that every
            text satisfies, as in `sample(run, match="[A-Z][a-z]+", without="e")`; see
            `SampleConfig` and constraints.py.
        no_copy: sample no stretch of more characters of the run's text.
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
        ConfigError: a setting is unknown or invalid, or no text satisfies the constraints; or
            `new` is asked of a run without documents.
        RunError: `new` is asked of a run without its text.
        UnknownCharacterError: the prompt contains unknown characters and `unknown` is `error`.
        OperationError: the model's logits are not finite, or nothing is left that `no_copy` allows.
    """
    given = locals()  # before there are others
    run = as_run(run)
    chosen = with_changes(run, options, given)
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
    # of one sequence: a KV cache in float32, and logits and probabilities in float64
    n_bytes = 8 * run.model.new_cache(1).keys.numel() + 8 * N_COPIES * run.model.vocab_size
    max_group = max(1, MAX_GROUP_BYTES // n_bytes)
    selection = Selection(run, options)
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
        yield sorted(found, key=lambda each: (math.isnan(each.surprisal), each.surprisal))[
            : options.best
        ]
    selection.require_enough()


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
    match: str | None = OF_THE_RUN,
    only: str | None = OF_THE_RUN,
    without: str | None = OF_THE_RUN,
    word: Sequence[str] = OF_THE_RUN,
    lines: int | None = OF_THE_RUN,
    acrostic: Sequence[str] = OF_THE_RUN,
    end: str | None = OF_THE_RUN,
    max_chars: int | None = OF_THE_RUN,
    no_copy: int | None = OF_THE_RUN,
    whole: bool = OF_THE_RUN,
    seed: int | None = OF_THE_RUN,
    unknown: UnknownPolicy | None = None,
) -> Iterator[str]:
    """Yield the continuation of one text as it is sampled, piece by piece, without the prompt.

    The arguments and errors are those of `sample`.
    """
    given = locals()
    run = as_run(run)
    chosen = with_changes(run, options, {**given, **ONE_TEXT})
    return (piece.text for (piece,) in stream_run(run, chosen, unknown=unknown) if piece.text)


def with_changes(run: Run, options: SampleConfig | None, given: Mapping[str, Any]) -> SampleConfig:
    """Return the options, by default the run's, with the settings among the arguments `given`."""
    if isinstance(options, str):
        raise ConfigError(f"give the prompt by name, as in sample(run, prompt={options[:20]!r})")
    if not isinstance(options, SampleConfig | None):
        raise ConfigError("give settings by name, as in sample(run, temperature=0.5)")
    config = run.config.model_copy(update={"sample": options or run.config.sample})
    values = {key: given.get(key, OF_THE_RUN) for key in SampleConfig.model_fields}
    named = {key: value for key, value in values.items() if value is not OF_THE_RUN}
    return config.with_values({f"sample.{key}": value for key, value in named.items()}).sample


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
    prompt_ids = run.tokenizer.encode(
        eos_token + prompt, unknown=unknown or run.config.text.unknown
    )

    def unigram() -> Ints:
        return run.corpus().token_counts("train")

    ids = range(options.num_samples) if sequence_ids is None else sequence_ids
    given = run.model, run.tokenizer, prompt_ids, options
    if not any(getattr(options, name) for name in RULES):
        return stream_pieces(*given, sequence_ids=ids, unigram=unigram)
    if options.stop and any(getattr(options, name) for name in CONSTRAINTS):
        raise ConfigError(
            "a stop string ends a text wherever it is, and constraints say where one may end; drop "
            "them, or --stop"
        )
    rules = rules_of(run, options, prompt)
    sampler = ConstrainedSampler(*given, ids, rules=rules, unigram=unigram)
    return itertools.chain.from_iterable(decoded_ahead(run.model, sampler.steps()))


def rules_of(run: Run, options: SampleConfig, prompt: str) -> Rules:
    """Return the rules of sampling settings, built once for groups that are sampled in turn."""
    key = (options.model_copy(update={"prompt": "", "seed": 0}), prompt if options.whole else "")
    latest = _latest_rules.get(run.model)
    if latest is None or latest[0] != key:
        with eval_mode(run.model):
            rules = build_rules(run.model, run.tokenizer, options, key[1], run.texts)
        _latest_rules[run.model] = latest = key, rules
    return latest[1]


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
    for ahead in decoded_ahead(model, steps):
        # of all steps at once: in each it would cost a tenth of the speed
        is_own, tokens = (np.stack([step[n] for step in ahead]) for n in (2, 3))  # (steps, N)
        logits = np.stack([step.logits for step in ahead])  # (steps, N, V)
        logits -= np.maximum.reduce(logits, axis=-1, keepdims=True)
        own_logits = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        each = np.where(is_own, np.log(np.exp(logits).sum(axis=-1)) - own_logits, 0)
        # one sum after the other: rounding does not depend on how many steps were decoded ahead
        nats = np.cumsum(np.concatenate((nats[-1:], each)), axis=0)[1:]
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
    sequences = [SampledText(tokenizer, options) for _ in ids]
    first, cache = prefill(model, tokenizer, prompt_ids, unigram)
    decoder = build_decoder(model, len(ids), cache, max_threads=os.cpu_count() or 1)
    logits = np.tile(first, (len(ids), 1))  # (N, V)
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
