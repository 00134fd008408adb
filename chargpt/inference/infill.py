"""Infill: text between two given ends, by sampling importance resampling (Rubin 1988).

Middles are sampled as continuations of what comes before. Each is cut at several of its word ends,
and each cut is weighed by the probability of what comes after, given all that precedes it:

    p(middle | before, after)  ~  p(middle | before) p(after | before, middle)

Infills are sampled from the cuts in proportion to their weights, without replacement. Of what comes
after, the first `AFTER` tokens count, half a block at most, of what comes before the last that fit
into a block with them.

Cost: `candidates` continuations of `length` characters, and `candidates` x `CUTS` forward passes of
up to a block.

Shapes in this file: M = cuts, A = scored tokens.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chargpt.config import SampleConfig
from chargpt.errors import NOT_FINITE, ConfigError, OperationError, TextError
from chargpt.inference.evaluation import Windows, iter_losses
from chargpt.inference.generation import ALL_SAMPLES, OF_THE_RUN, sample_groups, with_changes
from chargpt.inference.sampling import uniforms
from chargpt.models import LanguageModel
from chargpt.store.run import Run, as_run
from chargpt.text.tokenizer import Floats, Tokens, UnknownPolicy

CANDIDATES = 64  # by default
CUTS = 8  # of each middle, at most
AFTER = 64  # tokens
# constraints that a cut may break, which therefore do not apply
UNCONSTRAINED = {
    name: SampleConfig.model_fields[name].default
    for name in ("match", "word", "lines", "acrostic", "end", "whole")
}
CHOICE = 1 << 32  # number of the sequence whose uniform numbers choose among the cuts


@dataclass(frozen=True)
class Infill:
    """A middle with its ends.

    Attributes:
        bits_per_char: mean surprisal of the first characters of `after`, that were weighed.
    """

    before: str
    middle: str
    after: str
    bits_per_char: float

    @property
    def text(self) -> str:
        """The whole text."""
        return self.before + self.middle + self.after


def infill(
    run: Run | str | Path,
    before: str,
    after: str,
    options: SampleConfig | None = None,
    *,
    candidates: int = CANDIDATES,
    length: int = OF_THE_RUN,
    temperature: float = OF_THE_RUN,
    top_k: int | None = OF_THE_RUN,
    top_p: float | None = OF_THE_RUN,
    min_p: float | None = OF_THE_RUN,
    no_copy: int | None = OF_THE_RUN,
    num_samples: int = OF_THE_RUN,
    seed: int | None = OF_THE_RUN,
    unknown: UnknownPolicy | None = None,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Infill]:
    """Generate text between two ends, of 1 to `length` characters.

    Args:
        run: a run from `train` or `load_run`, or its folder.
        before: what the middle continues; empty: it begins a text.
        after: what follows it.
        options, length, temperature, top_k, top_p, min_p, no_copy, num_samples, seed, unknown: as
            of `sample`, for the middles. Of the constraints in `options` and the run's settings
            `only`, `without`, `max_chars` and `no_copy` apply.
        candidates: middles that are sampled; more are slower, and the best fit better.
        on_progress: called with the number of candidates that are sampled and that are weighed, and
            of all, twice `candidates`.
        is_stopped: once it returns True, the infills of the candidates so far are returned.

    Returns:
        `num_samples` different infills, the first one sampled first; fewer if there are not as
        many cuts.

    Raises:
        ConfigError: a setting is invalid, or `after` is empty.
        TextError: `after` has no character of the vocabulary, and `unknown` is `skip`.
        UnknownCharacterError: an end contains unknown characters and `unknown` is `error`.
        OperationError: the model's logits are not finite, or all that is sampled is empty.
    """
    given = locals()
    run = as_run(run)
    chosen = with_changes(run, options, {**given, "prompt": before, **ALL_SAMPLES, **UNCONSTRAINED})
    if not after:
        raise ConfigError(
            "there is no text after the gap; give it in --after, or sample a continuation"
        )
    tokenizer, policy = run.tokenizer, unknown or run.config.text.unknown
    seed = secrets.randbits(63) if chosen.seed is None else chosen.seed
    settings = chosen.model_copy(update={"num_samples": candidates, "seed": seed, "stop": ()})

    def on_sampled(done: int, total: int) -> None:
        on_progress(candidates * done // total, 2 * candidates)

    def on_weighed(fraction: float) -> None:
        on_progress(candidates + int(candidates * fraction), 2 * candidates)

    n_weighed = max(1, min(AFTER, run.model.block_size // 2))
    encoded = tokenizer.encode(tokenizer.choose_form(after), unknown=policy)[:n_weighed]
    if not encoded.size:
        raise TextError(
            "the text after the gap has no character of the vocabulary; give another, or set "
            "text.unknown to replace"
        )
    groups = sample_groups(run, settings, unknown, on_sampled, is_stopped)
    middles = [each.continuation for group in groups for each in group]
    cuts = sorted({cut for middle in middles for cut in _cuts(middle, after)})
    if not cuts:
        raise OperationError(
            f"each of the {len(middles):,} texts that were sampled after the start is empty; raise "
            "--candidates, or change the start"
        )
    start = tokenizer.eos_token + tokenizer.choose_form(before)
    starts = [tokenizer.encode((start or tokenizer.bos_text) + cut, unknown=policy) for cut in cuts]
    nats = losses_after(run.model, starts, encoded, on_weighed)
    n_characters = tokenizer.count_characters(encoded)
    return [
        Infill(before, cuts[number], after, float(nats[number]) / math.log(2) / n_characters)
        for number in _sampled_order(nats, seed)[: chosen.num_samples]
    ]


def _cuts(middle: str, after: str) -> list[str]:
    """Return the beginnings of a middle that end no word in its midst, evenly spread, CUTS at most.

    They end in no space where one follows. If there are none, they end anywhere.
    """
    everywhere = range(1, len(middle) + 1)
    ends = [
        n
        for n in everywhere
        if not (middle[n - 1].isalnum() and any(map(str.isalnum, middle[n : n + 1] + after[0])))
        and not (middle[n - 1].isspace() and after[0].isspace())
    ]
    ends = ends or list(everywhere)
    spread = np.linspace(0, len(ends) - 1, min(CUTS, len(ends))).round().astype(int).tolist()
    return [middle[: ends[number]] for number in spread]


def losses_after(
    model: LanguageModel,
    starts: Sequence[Tokens],
    after: Tokens,
    on_progress: Callable[[float], object] = lambda _: None,
) -> Floats:
    """Return the loss of the tokens `after`, (A,), after each start, in nats, (M,).

    Of a start that does not fit into a block with `after`, the end counts. `on_progress` is called
    with the fraction that is done.

    Raises:
        OperationError: a loss is not finite.
    """
    context = model.block_size + 1 - len(after)
    rows = [np.append(start[-context:], after) for start in starts]
    sizes = np.array([len(row) for row in rows])  # (M,)
    begins = np.cumsum(sizes) - sizes
    windows = [
        Windows(begins[sizes == size], size - 1, size - 1 - len(after))
        for size in np.unique(sizes).tolist()
    ]
    order, done = np.argsort(sizes, kind="stable"), 0
    nats = np.empty(len(rows))
    for losses, _, _ in iter_losses(model, np.concatenate(rows), windows):
        nats[order[done : done + len(losses)]] = losses.sum(axis=1)
        done += len(losses)
        on_progress(done / len(rows))
    if not np.isfinite(nats).all():
        raise OperationError(NOT_FINITE)
    return nats


def _sampled_order(nats: Floats, seed: int) -> list[int]:
    """Return numbers sampled in proportion to exp(-nats), without replacement.

    By the Gumbel-top-k trick (Kool et al. 2019, section 2).
    """
    numbers = uniforms(seed, [CHOICE])
    gumbel = np.array([-math.log(-math.log(next(numbers)[0] + 2.0**-54)) for _ in nats])
    order: list[int] = np.argsort(nats - gumbel, kind="stable").tolist()
    return order
