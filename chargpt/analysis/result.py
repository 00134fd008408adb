"""What a run came to: its loss beside the lines to beat, and a verdict in plain words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chargpt.inference.baselines import NGRAM, baselines
from chargpt.inference.evaluation import Evaluation, evaluate_tokens
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run
from chargpt.text.corpus import SPLITS, Corpus, Split
from chargpt.training.budget import scored_characters

# characters scored: of those trained on, but so many at least and at most
WAVERING = 0.02  # nats by which evaluations differ without any over-fitting
MEMORISING = 0.3  # nats by which a model may do better on what it was trained on


@dataclass(frozen=True)
class Result:
    """A run's losses.

    Attributes:
        levels: what counting reaches on the validation part, in nats, by name.
        losses: the run's own on each part.
    """

    levels: Mapping[str, float]
    losses: Mapping[Split, Evaluation]

    def rows(self, kind: str) -> list[tuple[str, str, float]]:
        """Return model, part and nats, as the closing table has them."""
        counted = [(name, "val", nats) for name, nats in self.levels.items()]
        own = [(f"{kind} (trained)", split, e.nats_per_char) for split, e in self.losses.items()]
        return [*counted, *own]


def result_of(run: Run, corpus: Corpus, levels: Mapping[str, float] | None = None) -> Result:
    """Measure a run on parts of what it was and was not trained on.

    Args:
        run: what `load_run` gives.
        corpus: its text.
        levels: what `baselines` gives, if it is at hand.

    Raises:
        TextError: a split is too short to score.
    """
    scored = scored_characters(run.config, run.step)
    losses = {
        split: evaluate_tokens(run.model, corpus.split(split), split=split, max_characters=scored)
        for split in SPLITS
    }
    return Result(levels or baselines(corpus), losses)


def verdict(run: Run, result: Result, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in plain words whether the model beat counting, and whether it over-fitted.

    Args:
        run: at any checkpoint.
        result: what `result_of` gives.
        records: of its `metrics.jsonl`.
    """
    sentences = []
    train_loss, val_loss = (result.losses[split].nats_per_char for split in SPLITS)
    seen = validation_curve(records)
    last = seen[-1][1] if seen else val_loss
    best, best_step = run.state.best_nats_per_char, run.state.best_step
    if run.config.model.kind == "gpt":
        gains = [
            f"{abs(gain):.3f} nats {'better' if gain > 0 else 'worse'} than the {name}"
            for name, gain in ((n, result.levels[n] - val_loss) for n in ("bigram", NGRAM))
        ]
        sentences.append(f"Attention is {' and '.join(gains)} on text it has not seen.")
    if best is not None and best_step is not None and last > best + WAVERING:
        used = ", so that checkpoint is the one used" if run.step == best_step else ""
        sentences.append(
            f"It over-fitted: validation was best at step {best_step:,} ({best:.3f} nats) and has "
            f"risen since (to {last:.3f}){used}; more text, model.dropout or fewer steps would "
            "help."
        )
    elif val_loss - train_loss > MEMORISING:
        remedy = "more text" if run.config.model.dropout else "more text or model.dropout"
        sentences.append(
            f"It does {val_loss - train_loss:.2f} nats better on the text it trained on: it has "
            f"begun to memorise; {remedy} would help."
        )
    patience, since = run.config.train.patience, sum(step > (best_step or 0) for step, _ in seen)
    if patience is not None and since >= patience:
        sentences.append(f"It stopped early: {since} evaluations brought nothing new.")
    return sentences
