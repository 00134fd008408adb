"""`chargpt compare --ladder`: from a bigram to a GPT, adding one component at a time."""

import json
from pathlib import Path

from chargpt.analysis import plots
from chargpt.analysis.ladder import Estimate, Ladder, run_ladder
from chargpt.cli import console, tables
from chargpt.cli.loop import run_steps
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.config import Config
from chargpt.text.corpus import load_corpus
from chargpt.training.session import free_folder, slug
from chargpt.training.trainer import Trainer

MAX_SAMPLE = 150  # characters printed of a rung's sample


def print_ladder(
    settings: Config, out: Path | None, n_seeds: int, plot: Path | None, *, json_: bool
) -> None:
    """Train the rungs with progress bars, plot them, and print a table or JSON.

    Raises:
        ChargptError: the text, a setting or the folder is not usable.
    """
    corpus = load_corpus(settings.text, progress=LoadingProgress())
    folder = out or free_folder(f"ladder-{slug(corpus.name)}")

    def run_trainer(name: str, trainer: Trainer) -> None:
        console.say(f"== {name} ==")
        assert trainer.folder is not None
        run_steps(trainer, trainer.folder, signals)

    with catch_signals() as signals:
        ladder = run_ladder(settings, folder, corpus, n_seeds, run_trainer)
    picture = plots.save(plots.ladder(ladder), plot or folder / "ladder.svg")
    if json_:
        report = {**ladder.as_dict(), "picture": str(picture)}
        console.out(json.dumps(report, ensure_ascii=False))
        return
    _print_table(ladder)
    _print_gains(ladder)
    for result in ladder.results:
        sample = " / ".join(console.printable(result.sample)[:MAX_SAMPLE].split("\n"))
        console.out(f"-- {result.rung.name} --\n{sample}")
    console.out(f"picture: {picture}")


def _print_table(ladder: Ladder) -> None:
    rows = [
        [name, "-", *console.loss_cells(nats)[:2], "", "-"]
        for name, nats in {**ladder.baselines, **ladder.compressors}.items()
    ]
    for result in ladder.results:
        loss = result.loss
        margin = "" if loss.margin is None else f"± {loss.margin:.4f}"
        cells = [*console.loss_cells(loss.value)[:2], margin, f"{result.seconds:.1f}"]
        rows.append([result.rung.name, f"{result.parameters:,}", *cells])
    tables.table(
        ["model", "parameters", "nats/char", "bits/char", "95% CI", "seconds"],
        rows,
        title=f"{ladder.title}: validation loss, protocol full",
    )


def _print_gains(ladder: Ladder) -> None:
    for result in ladder.results:
        if result.gain is not None:
            gain = _signed(result.gain, "lower", "higher")
            console.out(f"{result.rung.name}: {gain} ({result.rung.adds})")
    attention = _signed(ladder.attention_gain, "better", "worse")
    total = _signed(ladder.total_gain, "better", "worse")
    console.out(f"one scaled attention head is {attention} than the bigram; the gpt is {total}")
    if len(ladder.results[0].nats) > 1:
        console.out("±: half the 95% confidence interval over seeds (Student's t), paired by seed")


def _signed(gain: Estimate, positive: str, negative: str) -> str:
    """Return a gain with a comparative in place of its sign."""
    absolute = Estimate(abs(gain.value), gain.margin)
    return f"{absolute} nats per character {positive if gain.value >= 0 else negative}"
