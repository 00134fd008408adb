"""Losses of a model on a text, by three protocols, and of baselines estimated from counts.

`blocks`   non-overlapping blocks: every token but the first is scored exactly once, the short
           last block included. The protocol to quote.
`sliding`  a window of T tokens moves by the stride S: every token but the first is scored once,
           with at least T - S + 1 tokens of context except near the start.
`nanogpt`  the mean over 200 seeded random batches of 64 x min(T, 256), as nanoGPT evaluates.

Losses are float32 on the device; all sums are float64 on the CPU. Byte tokens count towards the
character that they spell: its loss is the sum of theirs, and it is predicted if all of them are.
Shapes in this file: B = windows of a forward pass, T = block size, S = stride, L = scored tokens of
a window, V = vocabulary size, N = scored characters in total.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.device import autocast
from chargpt.distributed import RankGroup
from chargpt.errors import NOT_FINITE, ConfigError, OperationError, TextError
from chargpt.models import LanguageModel, eval_mode
from chargpt.models.ngram import BIGRAM_ALPHA, NGRAM, NGRAM_ORDER, NGramLM, bigram_log_probs
from chargpt.store.run import Run, as_run
from chargpt.text.corpus import (
    Corpus,
    Split,
    block_offsets,
    count_pairs,
    count_tokens,
    require_whole,
    shuffled_order,
)
from chargpt.text.source import as_read, read_text, require_text
from chargpt.text.tokenizer import Floats, Ints, Tokens, UnknownPolicy

EvaluationProtocol = Literal["blocks", "sliding", "nanogpt"]
OnProgress = Callable[[int, int], object]  # of the number done and the total

MIN_BLOCKS = 20  # for a standard error by block
MIN_PAIRS = 8  # for that of a difference by block, which varies far less
NANOGPT_EVAL_ITERS, NANOGPT_BATCH_SIZE, NANOGPT_BLOCK = 200, 64, 256
MAX_COUNTED = 20_000_000  # tokens: a tenth of a second of work
MAX_LOGITS_BYTES = 64_000_000  # of one forward pass
MAX_CALL_TOKENS = 16_384  # of one forward pass
MAX_CPU_CALL_TOKENS = 4_096  # activations of more do not fit into a CPU's caches
UNIGRAM_ALPHA = 1.0  # pseudo-count of additive smoothing


class Windows(NamedTuple):
    """Windows of equal length into a text."""

    starts: Ints  # (B,): index of the first input token of each
    length: int  # input tokens of each
    n_unscored: int = 0  # leading targets that are not scored


@dataclass(frozen=True)
class BaselineLoss:
    """Loss of a baseline, as a whole and by block."""

    nats_per_char: float
    clusters: Floats = field(repr=False, compare=False)  # S_b and n_b of `Evaluation`, (2, blocks)

    @property
    def standard_error(self) -> float:
        """Cluster-robust standard error of `nats_per_char`."""
        return math.sqrt(_variance(*self.clusters)) / float(self.clusters[1].sum())


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Result of an evaluation, and how it was measured.

    The standard error is cluster-robust, with blocks b as clusters: sqrt(sum_b (S_b - n_b *
    mean)^2) / N, where S_b is the summed loss and n_b the number of b's characters. With fewer
    than `MIN_BLOCKS` blocks that may be far too small: the error is then at least the one with
    single characters as clusters.
    """

    nats_per_char: float  # mean negative log-likelihood
    accuracy: float  # fraction of characters that were the most likely one
    characters: int  # N
    standard_error: float  # of `nats_per_char`
    protocol: str
    split: str  # `mixture`, `train`, `val` or `test`; `all` for another text
    block_size: int  # T, the maximum context in tokens
    # that could be scored: those from the second token on
    of_characters: int | None = field(default=None, compare=False)
    # name of the split's files, if it has files of its own
    held_out: str | None = field(default=None, compare=False)
    n_unknown: int = 0  # characters outside the vocabulary, left out or replaced
    nats_per_document: float | None = None  # of a list of documents: `nats_per_char` * mean length
    # S_b and n_b, (2, blocks), or of spans, if these were given
    clusters: Floats | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        loss = f"{self.nats_per_char:.4f} nats/char, {self.bits_per_char:.4f} bits/char"
        scored = f"{self.characters:,} characters of {self.split}, protocol {self.protocol}"
        return f"Evaluation({loss}, accuracy {self.accuracy:.2%}, {scored})"

    def _repr_html_(self) -> str:
        """Return the losses as HTML, for a notebook."""
        return str(import_module("chargpt.cli.notebook").evaluation_html(self))

    def difference_error(self, other: "Evaluation | BaselineLoss") -> float:
        """Return the standard error of the difference of two losses, in nats per character.

        It is paired by block if both scored the same number of characters in each of at least
        `MIN_PAIRS` blocks, as the standard deviation of Student's t with as many degrees of freedom
        as there are blocks but one. Otherwise the losses are taken as independent.
        """
        if self.clusters is not None and other.clusters is not None:
            (losses, sizes), (other_losses, other_sizes) = self.clusters, other.clusters
            if (n := len(sizes)) >= MIN_PAIRS and np.array_equal(sizes, other_sizes):
                variance = _variance(losses - other_losses, sizes) * n / (n - 3)
                return math.sqrt(variance) / self.characters
        return math.hypot(self.standard_error, other.standard_error)

    @property
    def bits_per_char(self) -> float:
        """The loss in bits."""
        return self.nats_per_char / math.log(2)

    @property
    def perplexity(self) -> float:
        """exp(nats_per_char), or inf if that overflows."""
        return perplexity_of(self.nats_per_char)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are not None under the names that `--json` prints."""
        fields = loss_values(self.nats_per_char) | asdict(replace(self, clusters=None))
        return {name: value for name, value in fields.items() if value is not None}


def loss_values(nats: float) -> dict[str, Any]:
    """Return a loss under the JSON keys that all commands use."""
    bits, perplexity = nats / math.log(2), perplexity_of(nats)
    return {"nats_per_char": nats, "bits_per_char": bits, "perplexity": perplexity}


def perplexity_of(nats: float) -> float:
    """Return exp(nats), or inf if that overflows."""
    return math.exp(nats) if nats < 700 else math.inf


def evaluate(
    run: Run | str | Path,
    split: Split = "val",
    protocol: EvaluationProtocol = "blocks",
    path: str | Path | None = None,
    *,
    text: str | None = None,
    tokens: Tokens | None = None,
    unknown: UnknownPolicy | None = None,
    stride: int | None = None,
    max_characters: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 1337,
    on_progress: OnProgress = lambda *_: None,
    is_stopped: Callable[[], bool] | None = None,
) -> Evaluation:
    """Evaluate a run on a split of its own text, or on all of another text.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        split: `train`, `val`, `test` or `mixture` of the run's text, unless another text is given.
        protocol: `blocks`, `sliding` or `nanogpt`.
        path: of another text.
        text: another text itself, instead of its path.
        tokens: another text as token ids, (tokens,), instead of its path.
        unknown: policy for characters of another text outside the vocabulary; the run's
            `text.unknown` by default.
        stride: S of `sliding`, 1 to T; max(1, T // 2) by default.
        max_characters: with `blocks` or `sliding`, at most so many are scored, evenly spread.
        dtype: torch.bfloat16 or float16 for mixed precision; float32 by default.
        seed: of the random batches of `nanogpt`.
        on_progress: called with the number of tokens scored, and of all.
        is_stopped: if given, blocks are scored in random order, and once it returns True the result
            is that of the blocks so far.

    Raises:
        TextError: the text is missing, unreadable, too short, or contains unknown characters.
        ConfigError: several texts are given, the stride is out of range, or `max_characters` is
            given with `nanogpt`.
        OperationError: the loss is not finite.
    """
    if sum(each is not None for each in (path, text, tokens)) > 1:
        raise ConfigError("give one of path, text and tokens: each is another text")
    if protocol == "nanogpt" and max_characters is not None:
        raise ConfigError(
            "max_characters does not apply to the protocol nanogpt, which scores a fixed number of "
            "random blocks; choose blocks or sliding"
        )
    run, n_unknown, scored, held_out = as_run(run), 0, "all", None
    settings = run.config.text
    if path is not None:
        text = read_text(path, settings)
    elif text is not None:
        require_text(text)
        text = as_read(text, settings)
    if text is not None:
        text = run.tokenizer.choose_form(text)
        tokens = run.tokenizer.encode(text, unknown=unknown or settings.unknown)
        n_unknown = len(run.tokenizer.find_unknown(text))
    elif tokens is None:
        corpus = run.corpus()
        tokens, scored = corpus.split(split), split
        held_out = corpus.held_out[split].name if split in corpus.held_out else None
        if run.tokenizer.has_unknown:
            n_unknown = int(np.sum(tokens == run.tokenizer.replacement_id))
    result = evaluate_tokens(
        run.model,
        tokens,
        protocol=protocol,
        split=scored,
        stride=stride,
        max_tokens=max_characters,
        dtype=dtype,
        seed=seed,
        on_progress=on_progress,
        is_stopped=is_stopped,
    )
    if not math.isfinite(result.nats_per_char):
        raise OperationError(NOT_FINITE)
    per_document = None
    if run.tokenizer.eos_token and (n_documents := np.sum(tokens == run.tokenizer.eos_token_id)):
        mean_length = run.tokenizer.count_characters(tokens) / int(n_documents)
        per_document = result.nats_per_char * mean_length
    return replace(
        result,
        of_characters=run.tokenizer.count_characters(tokens[1:]),
        held_out=held_out,
        n_unknown=n_unknown,
        nats_per_document=per_document,
    )


def evaluate_tokens(
    model: LanguageModel,
    tokens: Tokens,
    *,
    protocol: EvaluationProtocol = "blocks",
    split: str = "val",
    stride: int | None = None,
    max_tokens: int | None = None,
    span: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 1337,
    on_progress: OnProgress = lambda *_: None,
    is_stopped: Callable[[], bool] | None = None,
    group: RankGroup = RankGroup(),
) -> Evaluation:
    """Evaluate a model on token ids.

    Args:
        model: used on its device in evaluation mode; its mode is restored.
        tokens: shape (tokens,).
        split: name of the split in the result.
        max_tokens: with `blocks` or `sliding`, at most so many tokens are scored, in evenly spread
            spans.
        span: with `blocks`, length of such a span; the block size by default. Models with different
            block sizes score the same characters if it is the same.
        protocol, stride, dtype, seed, on_progress, is_stopped: as for `evaluate`.
        group: the ranks, which score a part each and return the same result as one process.

    Raises:
        TextError: there are too few characters.
        ConfigError: the stride is out of range.
    """
    assert protocol == "blocks" or span is None
    assert protocol != "nanogpt" or max_tokens is None
    _require_scorable(tokens, split)
    n_inputs, block_size, lookback = len(tokens) - 1, model.block_size, 0
    if protocol == "blocks":
        windows = block_windows(n_inputs, block_size, max_tokens, span)
        lookback = model.lookback
    elif protocol == "sliding":
        windows = sliding_windows(n_inputs, block_size, stride, max_tokens)
    else:
        block_size = min(block_size, NANOGPT_BLOCK)
        windows = nanogpt_windows(tokens, block_size, seed)
    total = sum(len(starts) * (length - unscored) for starts, length, unscored in windows)
    if is_stopped is not None:  # the blocks before a stop are then a random sample
        windows = [
            each._replace(starts=each.starts[shuffled_order(len(each.starts), seed)])
            for each in windows
        ]
    calls = split_by_call(model, windows)
    own = range(group.rank, len(calls), group.world_size)
    batches = iter_losses(model, tokens, [calls[number] for number in own], lookback, dtype)
    first_blocks = np.cumsum([0, *(len(starts) for starts, *_ in calls)])
    # loss and size of each block; correct characters and sum of squares with a call's first block
    sums, done = np.zeros((4, first_blocks[-1])), 0
    for number, batch in zip(own, batches, strict=True):
        first, end = first_blocks[number : number + 2]
        sums[:2, first:end], sums[2:, first] = _sums_of(*batch)
        done += batch[0].size
        on_progress(done, total)
        if is_stopped is not None and is_stopped():
            sums = sums[:, :end]
            break
    sums = group.all_reduce_sum(torch.from_numpy(sums)).numpy()  # exact: others have added 0
    losses, sizes, n_correct, squares = *sums[:2], int(sums[2].sum()), sum(sums[3].tolist())
    characters = int(sizes.sum())
    if not characters:
        raise TextError("no character begins in what is scored; give a longer text")
    mean = float(losses.sum()) / characters
    variance = _variance(losses, sizes)
    if len(losses) < MIN_BLOCKS:
        variance = max(variance, squares - characters * mean**2)
    clusters = np.stack((losses, sizes)) if is_stopped is None else None  # which pairs by order
    return Evaluation(
        nats_per_char=mean,
        accuracy=n_correct / characters,
        characters=characters,
        standard_error=math.sqrt(variance) / characters,
        protocol=protocol,
        split=split,
        block_size=block_size,
        clusters=_by_span(clusters, windows, span) if span and clusters is not None else clusters,
    )


def block_windows(
    n_inputs: int, block_size: int, max_tokens: int | None = None, span: int | None = None
) -> list[Windows]:
    """Return blocks of T inputs, not overlapping, of all inputs or of those of `even_spans`.

    The last block of each span may be shorter.
    """
    starts, length = even_spans(n_inputs, span or block_size, max_tokens)
    n_blocks, rest = divmod(length, block_size)
    windows = []
    if n_blocks:
        firsts = (starts[:, None] + np.arange(n_blocks) * block_size).ravel()
        windows.append(Windows(firsts, block_size))
    if rest:
        windows.append(Windows(starts + n_blocks * block_size, rest))
    return windows


def even_spans(n_inputs: int, span: int, max_tokens: int | None) -> tuple[Ints, int]:
    """Return the first input of each scored span, shape (spans,), and the length of the spans.

    Either one span of all inputs, or evenly spread spans of at most `span` inputs, in all
    `max_tokens` at most.
    """
    if max_tokens is None or max_tokens >= n_inputs:
        return np.zeros(1, dtype=np.int64), n_inputs
    n_spans = n_inputs // span
    count = max(1, min(n_spans, max_tokens // span))
    middles = (2 * np.arange(count) + 1) * n_spans // (2 * count)  # of equal parts
    return middles * span, min(span, max(1, max_tokens))


def sliding_windows(
    n_inputs: int, block_size: int, stride: int | None = None, max_tokens: int | None = None
) -> list[Windows]:
    """Return a first window scored whole, then windows whose last S targets are scored.

    Remaining targets are scored in one more window, aligned to the end. S is max(1, T // 2) by
    default. If there are more than `max_tokens` targets, only those of evenly spread windows of the
    second kind are scored, or the first ones of a text without such windows.

    Raises:
        ConfigError: the stride is not between 1 and T.
    """
    stride = max(1, block_size // 2) if stride is None else stride
    if not 1 <= stride <= block_size:
        raise ConfigError(
            f"stride {stride} is not between 1 and the block size; choose 1 to {block_size}"
        )
    last = n_inputs - block_size  # start of the window aligned to the end
    if max_tokens is not None and max_tokens < n_inputs:
        n_regular = last // stride * stride  # targets of windows of the second kind
        if n_regular <= 0:
            return [Windows(np.zeros(1, dtype=np.int64), min(max_tokens, block_size))]
        firsts, length = even_spans(n_regular, stride, min(max_tokens, n_regular - 1))
        return [Windows(stride + firsts, block_size, n_unscored=block_size - length)]
    windows = [Windows(np.zeros(1, dtype=np.int64), min(n_inputs, block_size))]
    if last >= stride:
        starts = np.arange(stride, last + 1, stride)
        windows.append(Windows(starts, block_size, n_unscored=block_size - stride))
    if last > 0 and (rest := last % stride):
        windows.append(Windows(np.array([last]), block_size, n_unscored=block_size - rest))
    return windows


def nanogpt_windows(tokens: Tokens, block_size: int, seed: int) -> list[Windows]:
    """Return seeded random windows.

    Raises:
        TextError: there are not more than T characters.
    """
    if len(tokens) <= block_size:
        raise TextError(
            f"the nanogpt protocol needs {block_size + 1} characters, and there are {len(tokens)}; "
            "use the protocol blocks"
        )
    offsets = [
        block_offsets(tokens, block_size, NANOGPT_BATCH_SIZE, seed, step)
        for step in range(NANOGPT_EVAL_ITERS)
    ]
    starts = np.concatenate(offsets)
    return [Windows(starts, block_size)]


def gather_rows(tokens: Tokens, starts: Ints, length: int) -> Ints:
    """Return length + 1 tokens from each start, (B, length + 1); -1 before the first token.

    Raises:
        RunError: as of `require_whole`.
    """
    require_whole(tokens)
    index = starts[:, None] + np.arange(length + 1)
    rows: Ints = tokens.take(index, mode="clip").astype(np.int64)
    rows[index < 0] = -1
    return rows


def _sums_of(losses: Floats, correct: Floats, is_first: Floats) -> tuple[Floats, Floats]:
    """Return loss and size of each block; number of correct characters, sum of squared losses."""
    # number of the character that each token belongs to, from 1
    character = is_first.ravel().cumsum().astype(np.int64)
    n_wrong = np.bincount(character, weights=1 - correct.ravel())  # tokens of each
    squares = (np.bincount(character, weights=losses.ravel()) ** 2).sum()
    n_correct = (n_wrong[1:] == 0).sum()
    return np.stack((losses.sum(axis=1), is_first.sum(axis=1))), np.array([n_correct, squares])


def _by_span(clusters: Floats, windows: Sequence[Windows], span: int) -> Floats:
    """Return the sums of spans, (2, spans), of those of blocks, if spans consist of blocks."""
    first = np.concatenate([starts // span for starts, *_ in windows])
    last = np.concatenate([(starts + length - 1) // span for starts, length, *_ in windows])
    if not np.array_equal(first, last):
        return clusters
    _, index = np.unique(first, return_inverse=True)
    return np.stack([np.bincount(index, weights=each) for each in clusters])


def _variance(block_losses: Floats, block_sizes: Floats) -> float:
    """Return the variance of summed losses, with blocks as clusters."""
    mean = block_losses.sum() / block_sizes.sum()
    return float(((block_losses - block_sizes * mean) ** 2).sum())


def _require_scorable(tokens: Tokens, split: str) -> None:
    """Raise TextError if a split, or `all` of another text, has fewer than 2 tokens."""
    if len(tokens) < 2:
        if split == "all":
            raise TextError("the text is shorter than 2 characters; give a longer one")
        setting = {"test": "test_fraction=0.1", "mixture": "mixture_characters=20000"}.get(split)
        needs = f" ({split} needs training with -s text.{setting})" if setting else ""
        raise TextError(f"the {split} split is shorter than 2 characters; evaluate another{needs}")


def iter_losses(
    model: LanguageModel,
    tokens: Tokens,
    windows: Sequence[Windows],
    lookback: int = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[Floats]:
    """Yield (3, B, L) of tokens: loss in nats, is predicted, is the first of a character."""

    def losses_of(logits: Tensor, targets: Tensor, _: int) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        correct = logits.argmax(dim=-1) == targets
        is_first = targets < model.first_continuation_id
        # one transfer from the device for all
        return torch.stack((losses.view_as(targets), correct.float(), is_first.float()))

    for each in split_by_call(model, windows):
        parts = starmap(losses_of, iter_logits(model, tokens, [each], lookback, dtype))
        yield torch.cat([*parts], dim=2).cpu().double().numpy()


@torch.inference_mode()
def iter_logits(
    model: LanguageModel,
    tokens: Tokens,
    windows: Sequence[Windows],
    lookback: int = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield logits (B, L, V), targets (B, L) and the number of tokens of the window before these.

    They are those of one forward pass after another: a window that needs more memory than a pass is
    bounded to is scored in parts.

    The model is in evaluation mode, and its mode is restored at the end. `lookback` is the number
    of tokens before each window that n-gram models read; -1 stands for none.
    """
    device = model.device
    with eval_mode(model):
        for starts, length, n_unscored in split_by_call(model, windows):
            rows = gather_rows(tokens, starts - lookback, lookback + length)
            batch = torch.from_numpy(rows).to(device)
            before, inputs = batch[:, :lookback], batch[:, lookback:-1]
            targets, done = batch[:, lookback + 1 :], 0
            with autocast(device, dtype):
                for logits in _iter_parts(model, inputs, before):
                    first, done = max(done, n_unscored), done + logits.size(1)
                    if done > first:
                        yield logits[:, first - done :].float(), targets[:, first:done], first


def _iter_parts(model: LanguageModel, inputs: Tensor, before: Tensor) -> Iterator[Tensor]:
    """Yield the logits of inputs (B, T), whole or in parts; `before` as of `Mixture.forward`."""
    if inputs.size(1) <= model.max_tokens_per_pass():
        yield model(inputs, before=before) if before.size(1) else model(inputs)
        return
    cache = model.new_cache(len(inputs))
    cache.tokens = before
    yield from model.iter_parts(inputs, cache)


def split_by_call(model: LanguageModel, windows: Sequence[Windows]) -> list[Windows]:
    """Return the windows of each forward pass, as many as its memory is bounded to."""
    max_tokens = MAX_CPU_CALL_TOKENS if model.device.type == "cpu" else MAX_CALL_TOKENS
    max_tokens = min(max_tokens, model.max_tokens_per_pass())
    calls = []
    for each in windows:
        row_bytes = 4 * each.length * model.vocab_size
        n_rows = max(1, min(MAX_LOGITS_BYTES // row_bytes, max_tokens // each.length))
        cuts = np.arange(n_rows, len(each.starts), n_rows)
        calls += [each._replace(starts=starts) for starts in np.split(each.starts, cuts)]
    return calls


class Baselines:
    """The baselines of a text, fitted to its training split.

    `uniform`: ln V per token. `unigram` and `bigram`: frequencies in the last `MAX_COUNTED` tokens
    of the training split, with 1 added to each character's count and 0.1 to each pair's. `6-gram`:
    `ngram`, that of the last `ngram.MAX_TOKENS` tokens.

    Raises:
        TextError: the training split has fewer than 2 tokens.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.tokenizer = corpus.tokenizer
        train, vocab_size = corpus.split("train")[-MAX_COUNTED:], corpus.tokenizer.vocab_size
        _require_scorable(train, "train")
        self.token_counts = count_tokens(train, vocab_size)  # (V,)
        self.pair_counts = count_pairs(train, vocab_size)
        self.ngram = NGramLM.fit(train, vocab_size)

    def losses(
        self, tokens: Tokens, *, max_tokens: int | None = None, span: int | None = None
    ) -> dict[str, float]:
        """Return the loss of each baseline in nats per character, by name; see `evaluate`."""
        found = self.evaluate(tokens, max_tokens=max_tokens, span=span)
        return {name: loss.nats_per_char for name, loss in found.items()}

    def evaluate(
        self, tokens: Tokens, *, max_tokens: int | None = None, span: int | None = None
    ) -> dict[str, BaselineLoss]:
        """Return the loss of each baseline, by name.

        They score the characters that `evaluate_tokens` scores with the same arguments, each with
        all of its context. `span`, the model's block size, is also the length of the blocks whose
        losses are added up; `max_tokens` needs it.

        Raises:
            TextError: there are fewer than 2 tokens.
        """
        assert max_tokens is None or span is not None
        _require_scorable(tokens, "all")
        n_inputs = len(tokens) - 1
        starts, length = even_spans(n_inputs, span or n_inputs, max_tokens)
        n_earlier = NGRAM_ORDER - 2  # tokens of context before each span
        rows = gather_rows(tokens, starts - n_earlier, length + n_earlier)
        first, second = rows[:, n_earlier:-1].ravel(), rows[:, n_earlier + 1 :].ravel()
        counts = self.token_counts + UNIGRAM_ALPHA
        pair_log_probs = bigram_log_probs(self.pair_counts, first, second, BIGRAM_ALPHA)
        losses = {  # of each token
            "uniform": np.full(second.size, math.log(len(counts))),
            "unigram": -np.log(counts / counts.sum())[second],
            "bigram": -pair_log_probs,
            NGRAM: self.ngram.losses(rows)[:, n_earlier:],
        }

        in_row = np.arange(0, length, span or length)  # first token of each block
        blocks = (np.arange(len(rows))[:, None] * length + in_row).ravel()
        block_sums = partial(np.add.reduceat, indices=blocks, dtype=np.float64)
        sizes = block_sums(second < self.tokenizer.first_continuation_id)
        n_characters = max(1, sizes.sum())
        return {
            name: BaselineLoss(
                float(each.sum(dtype=np.float64)) / n_characters,
                np.stack((block_sums(each.ravel()), sizes)),
            )
            for name, each in losses.items()
        }
