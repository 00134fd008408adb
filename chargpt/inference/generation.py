"""Text generation: prefill a prompt, sample tokens (sampler.py), decode text, cut at stop strings.

The context is at most `block_size` tokens: of a longer prompt the last `block_size`. When the KV
cache is full, its older half is evicted (decoders.py).

Shapes in this file: N = sequences sampled together, T = prompt length, V = vocabulary size.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from chargpt.config import SampleConfig
from chargpt.errors import ChargptError, ConfigError
from chargpt.inference.decoders import build_decoder
from chargpt.inference.sampler import generate
from chargpt.models import KVCache, LanguageModel, eval_mode
from chargpt.store.run import Run, as_run
from chargpt.text.tokenizer import CharTokenizer, Floats, Ints, Tokens, UnknownPolicy

MAX_GROUP_BYTES = 256_000_000  # of KV caches and logits of sequences that are sampled together


def sample(
    run: Run | str | Path,
    options: SampleConfig | None = None,
    *,
    unknown: UnknownPolicy | None = None,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    **changes: object,
) -> list[str]:
    """Generate texts with a trained model; that of `with_mixture(run)` is its mixture.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        options: sampling settings; the run's own `sample` section by default.
        unknown: policy for prompt characters outside the vocabulary; the run's `text.unknown` by
            default.
        on_progress: called with the number of characters sampled for all texts and their total;
            where a text may end before its length, at a stop string or the end of a document, with
            the number of finished texts and `num_samples`.
        changes: changed settings: `prompt`, `length`, `temperature`, `top_k`, `top_p`, `min_p`,
            `num_samples`, `stop` or `seed`, as in `sample(run, prompt="To be", temperature=0.5)`.

    Returns:
        `num_samples` texts, each the prompt and its continuation (`stream` yields the continuation
        alone), without stop strings.

    Raises:
        ConfigError: a setting is unknown or invalid.
        UnknownCharacterError: the prompt contains unknown characters and `unknown` is `error`.
        OperationError: the model's logits are not finite.
    """
    run = as_run(run)
    chosen = _with_changes(run, options, changes)
    # float32 numbers in the KV cache and the logits of one sequence
    n_values = 2 * run.model.new_cache(1).keys.numel() + run.model.vocab_size
    group_size = max(1, MAX_GROUP_BYTES // (4 * n_values))
    ends_early = bool(chosen.stop or run.tokenizer.eos_token)
    total = chosen.num_samples * (1 if ends_early else chosen.length)
    texts: list[str] = []
    n_ended: list[int] = []  # in the group, after each step
    for first in range(0, chosen.num_samples, group_size):
        sequence_ids = range(first, min(first + group_size, chosen.num_samples))
        steps = []
        for step in stream_run(
            run, chosen, unknown=unknown, sequence_ids=sequence_ids, on_ended=n_ended.append
        ):
            steps.append(step)
            done = first * chosen.length + min(len(steps), chosen.length) * len(sequence_ids)
            on_progress(first + n_ended[-1] if ends_early else done, total)
        texts += [chosen.prompt + "".join(pieces) for pieces in zip(*steps, strict=True)]
    return texts


def stream(
    run: Run | str | Path,
    options: SampleConfig | None = None,
    *,
    unknown: UnknownPolicy | None = None,
    **changes: object,
) -> Iterator[str]:
    """Yield the continuation of one text as it is sampled, piece by piece, without the prompt.

    The arguments and errors are those of `sample`.
    """
    run = as_run(run)
    chosen = _with_changes(run, options, {**changes, "num_samples": 1})
    return (piece for (piece,) in stream_run(run, chosen, unknown=unknown) if piece)


def _with_changes(
    run: Run, options: SampleConfig | None, changes: Mapping[str, object]
) -> SampleConfig:
    """Return the options, by default the run's, with changes, and a random seed if none is set."""
    if isinstance(options, str):
        raise ConfigError(f"give the prompt by name, as in sample(run, prompt={options[:20]!r})")
    if "mixture" in changes:
        raise ConfigError("mixture is not a setting; give chargpt.with_mixture(run) as the run")
    config = run.config.model_copy(update={"sample": options or run.config.sample})
    values = {f"sample.{key}": value for key, value in changes.items()}
    return _with_seed(config.with_values(values).sample)


def stream_run(
    run: Run,
    options: SampleConfig,
    *,
    unknown: UnknownPolicy | None = None,
    sequence_ids: Sequence[int] | None = None,
    on_ended: Callable[[int], object] = lambda _: None,
) -> Iterator[list[str]]:
    """Yield the continuations that `sample` returns, piece by piece as `stream_pieces` does.

    Errors are those of `sample`, raised before the first piece.
    """
    tokenizer = run.tokenizer
    text = tokenizer.eos_token + options.prompt
    prompt = tokenizer.encode(text, unknown=unknown or run.config.text.unknown)

    def unigram() -> Ints | None:
        with suppress(ChargptError):  # the text may have been deleted
            return run.corpus().token_counts("train")
        return None

    return stream_pieces(
        run.model,
        tokenizer,
        prompt,
        options,
        sequence_ids=sequence_ids,
        unigram=unigram,
        on_ended=on_ended,
    )


def stream_pieces(
    model: LanguageModel,
    tokenizer: CharTokenizer,
    prompt_ids: Tokens,
    options: SampleConfig,
    *,
    sequence_ids: Sequence[int] | None = None,
    unigram: Callable[[], Ints | None] = lambda: None,
    on_ended: Callable[[int], object] = lambda _: None,
) -> Iterator[list[str]]:
    """Yield the next piece of each sequence's text, a list of N pieces a step, without the prompt.

    A piece is one character; while a stop string may be beginning it is empty, and afterwards
    several characters. It is also empty while byte tokens spell a character. A sequence that
    reached its length, a stop string or the end of a document yields empty pieces until all have.

    Args:
        model: used on its device in evaluation mode; its mode is restored at the end.
        tokenizer: of the model.
        prompt_ids: tokens to continue, (T,). If empty, the text starts after the EOS token or a
            newline, or if the vocabulary has none, with a character sampled from `unigram`.
        options: sampling settings; `prompt` is not used.
        sequence_ids: numbers of the N sequences; 0 to `num_samples` - 1 by default.
        unigram: returns the count of each token, (V,); None, the default, for uniform.
        on_ended: called before each list with the number of sequences that have ended.

    Raises:
        ConfigError: a stop string is empty.
        OperationError: the model's logits are not finite.
    """
    if "" in options.stop:
        raise ConfigError("a stop string is empty and would stop at once; give it a character")
    ids = range(options.num_samples) if sequence_ids is None else sequence_ids
    options = _with_seed(options)
    prompt = np.asarray(prompt_ids).astype(np.int64)[-model.block_size :]
    prompt = prompt[np.argmax(prompt < model.first_continuation_id) :] if prompt.size else prompt
    if not prompt.size:
        prompt = tokenizer.encode(tokenizer.bos_text).astype(np.int64)
    counts = None if prompt.size else unigram()

    def pieces() -> Iterator[list[str]]:
        sequences = [_SampledText(tokenizer, options) for _ in ids]
        # threads of the BLAS spin while they wait: on a busy machine they slow a decode step
        with eval_mode(model), threadpool_limits(1, user_api="blas"):
            cache = model.new_cache(1)
            if prompt.size:
                logits = _prefill(model, prompt, cache)
            else:
                with np.errstate(divide="ignore"):
                    logits = np.log(np.ones(tokenizer.vocab_size) if counts is None else counts)
            decoder = build_decoder(model, len(ids), cache, max_threads=os.cpu_count() or 1)
            for tokens in generate(decoder, logits, options, ids, tokenizer.valid_tokens):
                pairs = zip(sequences, tokens.tolist(), strict=True)
                step = [sequence.push(token) for sequence, token in pairs]
                n_ended = sum(each.has_ended for each in sequences)
                on_ended(n_ended)
                yield step
                if n_ended == len(sequences):
                    return

    return pieces()  # a generator of its own, so that errors of the arguments are raised at once


@torch.inference_mode()
def _prefill(model: LanguageModel, prompt: Tokens, cache: KVCache) -> Floats:
    """Append the prompt, (T,), to an empty cache; return the logits of the next token, (V,)."""
    tokens = torch.from_numpy(prompt)[None].to(model.device)
    last: Floats = model(tokens, cache)[0, -1].float().cpu().numpy().astype(np.float64)
    return last  # converted on the CPU because a device may lack float64


class _SampledText:
    """A sequence's text, of which the end is buffered while it may begin a stop string."""

    def __init__(self, tokenizer: CharTokenizer, options: SampleConfig) -> None:
        self.read = tokenizer.decode_stream()
        self.stops = options.stop + ((tokenizer.eos_token,) if tokenizer.eos_token else ())
        self.remaining = options.length  # characters
        self.buffer = ""
        self.has_ended = False

    def push(self, token: int) -> str:
        """Append a token; return the characters that cannot belong to a stop string."""
        character = "" if self.has_ended else self.read(token)
        if not character:
            return ""
        self.remaining -= 1
        self.has_ended = not self.remaining
        if not self.stops:
            return character
        self.buffer += character
        starts = [start for start in map(self.buffer.find, self.stops) if start >= 0]
        self.has_ended |= bool(starts)
        if not self.has_ended:  # a suffix that begins a stop string waits for the rest
            starts = [
                start
                for start in range(len(self.buffer))
                if any(stop.startswith(self.buffer[start:]) for stop in self.stops)
            ]
        end = min(starts, default=len(self.buffer))
        piece, self.buffer = self.buffer[:end], self.buffer[end:]
        return piece


def _with_seed(options: SampleConfig) -> SampleConfig:
    """Return the settings with a random seed if they have none."""
    if options.seed is not None:
        return options
    return options.model_copy(update={"seed": secrets.randbits(63)})
