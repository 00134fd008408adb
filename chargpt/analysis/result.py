"""Losses of a finished run next to the n-gram baselines, and a summary in sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from chargpt.errors import NOT_FINITE, OperationError
from chargpt.inference.evaluation import BaselineLoss, Baselines, Evaluation, evaluate_tokens
from chargpt.models.ngram import NGRAM
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run
from chargpt.text.corpus import REQUIRED_SPLITS, Corpus, Split
from chargpt.text.describe import SplitDifference, compare_splits, warn_of_repeats

MIN_RISE = 0.02  # nats above the best validation loss that count as over-fitting, not noise
LAST_STEPS = 10  # whose mean is the last training loss
MIXTURE_SUFFIX = " + n-grams"
MIXTURE_LABEL = f"gpt{MIXTURE_SUFFIX}"
MIN_GAP = 0.3  # nats of generalisation gap that are reported
# fall of the validation loss in the second half of the steps, relative to that of the training
# loss, from which more steps may help in spite of a gap (measured: benchmarks/LOG.md)
MIN_GENERALISED = 0.4
# generalisation gap, relative to the KL divergence of the character frequencies of the splits, that
# their difference may explain: contexts differ more than frequencies
MAX_EXPLAINED_RATIO = 5


# Why the generalisation gap is large: the splits differ by their character frequencies, or as no
# character was seen twice; or the validation loss is still falling with the training loss
GapReason = Literal["unlike splits", "learning", "over-fitting"]


@dataclass(frozen=True)
class RunScores:
    """Losses of a run and its baselines."""

    baselines: Mapping[str, BaselineLoss]  # by name, on the same characters
    evaluations: Mapping[Split, Evaluation]  # of the run on each split
    val_characters: int  # of the validation split
    mixture: Evaluation | None = None  # of GPT and n-gram models, on the validation split
    split_difference: SplitDifference | None = None  # of the validation from the training split
    epochs: float = math.inf  # of training, in passes over the training split
    val_origin: str = ""  # " of NAME" if the validation split has files of its own
    repeats: str = ""  # warning that the training split holds much of the validation split

    @property
    def scored_on(self) -> str:
        """What the validation losses were measured on, and their standard error."""
        val = self.evaluations["val"]
        return (
            f"{val.characters:,} of {self.val_characters:,} validation characters"
            f"{self.val_origin} (protocol {val.protocol}), standard error {val.standard_error:.3f}"
        )

    @property
    def baseline_losses(self) -> dict[str, float]:
        """The losses of the baselines in nats per character, by name."""
        return {name: loss.nats_per_char for name, loss in self.baselines.items()}

    @property
    def has_better_mixture(self) -> bool:
        """Whether the mixture is better than its GPT alone."""
        if self.mixture is None:
            return False
        gain, error = difference(self.mixture, self.evaluations["val"])
        return gain > error

    @property
    def generalisation_gap(self) -> float:
        """Validation loss minus training loss, in nats."""
        return self.evaluations["val"].nats_per_char - self.evaluations["train"].nats_per_char

    @property
    def gap_error(self) -> float:
        """Twice the standard error of the generalisation gap, in nats."""
        return 2 * math.hypot(*(each.standard_error for each in self.evaluations.values()))

    @property
    def splits_explain_gap(self) -> bool:
        """Whether the difference of the splits may be the whole reason of the gap."""
        divergence = self.split_difference.divergence if self.split_difference else -math.inf
        return self.generalisation_gap <= MAX_EXPLAINED_RATIO * divergence

    def gap_reason(self, records: Sequence[Mapping[str, Any]]) -> GapReason | None:
        """Return why the gap is large, None if it is not; `records`: the metrics.

        That of an untrained model, worse than a bigram, is not considered.
        """
        is_trained = self.evaluations["train"].nats_per_char < self.baseline_losses["bigram"]
        if not is_trained or self.generalisation_gap <= max(MIN_GAP, self.gap_error):
            return None
        if self.epochs < 1 or self.splits_explain_gap:
            return "unlike splits"
        val, train = changes_in_second_half(records) or (0.0, 0.0)
        is_learning = val < 0 and val <= MIN_GENERALISED * train
        return "learning" if is_learning else "over-fitting"

    def over_fits(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the gap is that of a model which memorises; `records`: the metrics."""
        return self.gap_reason(records) == "over-fitting"

    def rows(self, kind: str) -> list[list[str]]:
        """Return the rows of the results table: model, split, nats, bits and perplexity."""
        rows = [(name, "val", nats) for name, nats in self.baseline_losses.items()]
        rows += [(f"{kind} (trained)", s, e.nats_per_char) for s, e in self.evaluations.items()]
        if self.mixture:
            rows.append((MIXTURE_LABEL, "val", self.mixture.nats_per_char))
        return [[model, split, *loss_cells(nats)] for model, split, nats in rows]


def loss_cells(nats: float) -> list[str]:
    """Return a loss as nats, bits and perplexity for the row of a table."""
    perplexity = math.exp(min(nats, 700))
    shown = f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.1e}"
    return [f"{nats:.4f}", f"{nats / math.log(2):.4f}", shown]


def evaluate_run(
    run: Run,
    corpus: Corpus,
    baselines: Baselines | None = None,
    mixture_run: Run | None = None,
    validation: Evaluation | None = None,
) -> RunScores:
    """Evaluate a run on its training and validation splits, and the baselines on the latter.

    Args:
        run: what `load_run` returned.
        corpus: its text.
        baselines: of the text, if already estimated.
        mixture_run: the run with its mixture in place of its GPT, if it has one.
        validation: of the run on `train.evaluation_tokens` of the validation split, if already
            known.

    Raises:
        TextError: a split is too short to score.
        OperationError: a loss is not finite.
    """
    scored = run.config.train.evaluation_tokens
    known = {"val": validation}
    losses = {
        split: known.get(split)
        or evaluate_tokens(run.model, corpus.split(split), split=split, max_tokens=scored)
        for split in REQUIRED_SPLITS
    }
    if not all(math.isfinite(loss.nats_per_char) for loss in losses.values()):
        raise OperationError(NOT_FINITE)
    val = corpus.split("val")
    baselines = baselines or Baselines(corpus)
    reference = baselines.evaluate(val, max_tokens=scored, span=run.model.block_size)
    mixture = evaluate_tokens(mixture_run.model, val, max_tokens=scored) if mixture_run else None
    n_val, origin = corpus.count_characters("val"), corpus.origin("val")
    n_steps = run.step - run.config.model_start(run.step)
    epochs = n_steps * run.config.tokens_per_step / len(corpus.split("train"))
    unlike, repeats = compare_splits(corpus), warn_of_repeats(corpus)
    return RunScores(reference, losses, n_val, mixture, unlike, epochs, origin, repeats)


def difference(evaluation: Evaluation, reference: Evaluation | BaselineLoss) -> tuple[float, float]:
    """Return by how many nats a loss is lower than another, and twice the standard error."""
    gain = reference.nats_per_char - evaluation.nats_per_char
    return gain, 2 * evaluation.difference_error(reference)


def describe_gain(gain: float, margin: float | None, name: str) -> str:
    """Return by how much a loss is lower than that of `name` in words, with `margin` after ±."""
    shown = f"{abs(gain):.3f}" + ("" if margin is None else f" ± {margin:.3f}")
    shown += f" nats {'better' if gain > 0 else 'worse'}"
    if margin is None:
        return f"{shown} than {name} (too few common seeds for an interval)"
    if abs(gain) > margin:
        return f"{shown} than {name}"
    return f"not distinguishable from {name} ({shown})"


def describe_mixture(scores: RunScores, mixture: Evaluation) -> str:
    """Return a sentence about the mixture of GPT and n-gram models beside the better of them."""
    alone: dict[str, Evaluation | BaselineLoss]
    alone = {"gpt": scores.evaluations["val"], NGRAM: scores.baselines[NGRAM]}
    better = min(alone, key=lambda name: alone[name].nats_per_char)
    words = describe_gain(*difference(mixture, alone[better]), f"the {better}")
    use = "; chargpt sample --mixture uses it" if scores.has_better_mixture else ""
    return f"The mixture of gpt and n-gram models is {words}{use}."


def of_model(run: Run, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the metrics of the model that the run holds: with students, it is one of several."""
    started = run.config.model_start(run.step)
    end = min((at for at in run.config.train.students if at >= run.step), default=math.inf)
    return [record for record in records if (started or -1) < record["step"] <= end]


def changes_in_second_half(records: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the changes of validation and training loss in the second half of the steps, in nats.

    None if the metrics do not have them.
    """
    curve = validation_curve(records)
    if len(curve) < 2:
        return None
    last_step, last = curve[-1]
    half = (records[0]["step"] + last_step) / 2
    middle_step, middle = min(curve[:-1], key=lambda point: abs(point[0] - half))
    change = change_of_training_loss(records, middle_step, last_step)
    return None if math.isnan(change) else (last - middle, change)


def change_of_training_loss(records: Sequence[Mapping[str, Any]], first: int, second: int) -> float:
    """Return how the mean training loss up to a step differs from that up to an earlier one.

    In nats; NaN if the metrics lack the steps.
    """
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    before, after = (
        [losses[n] for n in range(step - LAST_STEPS + 1, step + 1) if n in losses]
        for step in (max(1, first), second)
    )
    return fmean(after) - fmean(before) if before and after else math.nan


def summarize(run: Run, scores: RunScores, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on the gain over the baselines, over-fitting and early stopping."""
    sentences = []
    val = scores.evaluations["val"]
    if run.config.model.kind == "gpt":
        gains = " and ".join(
            describe_gain(*difference(val, scores.baselines[name]), f"the {name}")
            for name in ("bigram", NGRAM)
        )
        sentences.append(
            f"The gpt is {gains} on the validation split (± twice the standard error)."
        )
    if scores.mixture is not None:
        sentences.append(describe_mixture(scores, scores.mixture))
    unlike = scores.split_difference.warning if scores.split_difference else ""
    warnings = filter(None, (unlike, scores.repeats))
    sentences += [f"{warning[0].upper()}{warning[1:]}." for warning in warnings]
    records = of_model(run, records)
    curve, best = validation_curve(records), run.state.best_nats_per_char
    last = curve[-1][1] if curve else val.nats_per_char
    if has_diverged(last, scores, records):
        sentences.append(
            f"The training diverged: its losses, last {last:.3f} nats, are above the "
            f"{scores.baseline_losses['uniform']:.3f} of an untrained model. Train again with "
            f"lower learning rates, such as {run.config.optim.lower_rates()}."
        )
    elif curve and best is not None and last > best + MIN_RISE:
        sentences.append(describe_rise(run, scores, records))
    elif (reason := scores.gap_reason(records)) is not None:
        sentences.append(describe_gap(reason, scores, records))
    patience = run.config.train.patience
    n_worse = sum(step > (run.state.best_step or 0) for step, _ in curve)
    if patience is not None and n_worse >= patience:
        sentences.append(f"Early stopping: {n_worse} evaluations without a new best.")
    return sentences


def describe_rise(run: Run, scores: RunScores, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on a validation loss that ended above the lowest one.

    A run that has not read its text once does not over-fit, nor one whose training loss rose too.
    """
    (last_step, last), best_step = validation_curve(records)[-1], run.state.best_step or 0
    rise = (
        f"validation loss was lowest at step {best_step:,} ({run.state.best_nats_per_char:.3f} "
        f"nats) and rose to {last:.3f} nats."
    )
    if change_of_training_loss(records, best_step, last_step) > MIN_RISE:
        rates = run.config.optim.lower_rates()
        return f"The {rise} So did the training loss: try lower learning rates, such as {rates}."
    epochs = scores.epochs * last_step / max(1, run.step)  # those of `scores` are of the best step
    if epochs < 1 or scores.splits_explain_gap:
        return f"The {rise}"
    return f"It over-fits: the {rise} More text, model.dropout or fewer steps may help."


def has_diverged(last: float, scores: RunScores, records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether validation and training losses ended above that of an untrained model."""
    uniform = scores.baseline_losses["uniform"]
    training = [record["loss"] for record in records if "loss" in record][-LAST_STEPS:]
    return last > uniform + MIN_RISE and bool(training) and fmean(training) > uniform


def describe_gap(reason: GapReason, scores: RunScores, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on a large generalisation gap and its reason."""
    gap = (
        f"After {scores.epochs:.1f} epochs the generalisation gap (validation minus training loss) "
        f"is {scores.generalisation_gap:.2f} ± {scores.gap_error:.2f} nats"
    )
    if reason == "unlike splits":
        return f"{gap}: the validation split is harder to predict than the training split."
    if (found := changes_in_second_half(records)) is not None:
        gap += (
            "; in the second half of the steps the validation loss changed by {:+.2f} nats, the "
            "training loss by {:+.2f}".format(*found)
        )
    if reason == "learning":
        return f"{gap}: more steps may help the gpt."
    return f"{gap}: it over-fits; more text or a higher model.dropout may help."
