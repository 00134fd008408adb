"""`chargpt compare --ladder`: from a bigram to a GPT, one idea at a time."""

import json
from pathlib import Path

from chargpt.analysis import plots
from chargpt.analysis.ladder import Estimate, Ladder, climb
from chargpt.cli import console, tables
from chargpt.cli.loop import run_steps
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.config import Config
from chargpt.text.corpus import load_corpus
from chargpt.training.session import free_folder, slug
from chargpt.training.trainer import Trainer

SHOWN = 150  # characters of a rung's sample


def climb_and_show(
    settings: "Config", out: Path | None, seeds: int, plot: Path | None, *, json_: bool
) -> None:
    """Train the rungs, draw them, and print the table or the JSON.

    Raises:
        ChargptError: the text, a setting or the folder will not do.
    """
    found, folder = train_rungs(settings, out, seeds)
    picture = plots.save(plots.ladder(found), plot or folder / "ladder.svg")
    if json_:
        facts = {**found.as_dict(), "picture": str(picture)}
        console.out(json.dumps(facts, ensure_ascii=False))
        return
    show(found)
    console.out(f"the ladder as a picture: {picture}")


def train_rungs(settings: "Config", out: Path | None, seeds: int) -> "tuple[Ladder, Path]":
    """Train every rung, each with a progress bar; return them and the folder of their runs."""
    corpus = load_corpus(settings.text, progress=LoadingProgress())
    folder = out or free_folder(f"ladder-{slug(corpus.name)}")

    def watch(name: str, trainer: "Trainer") -> None:
        console.say(f"== {name} ==")
        assert trainer.folder is not None
        run_steps(trainer, trainer.folder, signals)

    with catch_signals() as signals:
        return climb(settings, folder, corpus, seeds, watch), folder


def show(found: "Ladder") -> None:
    """Print the ladder as a table, what each rung added, and what each writes."""
    rows = [
        [name, "-", *console.loss_cells(nats)[:2], "", "-"]
        for levels in (found.counted, found.compressed)
        for name, nats in levels.items()
    ]
    for step in found.steps:
        loss = step.loss
        margin = "" if loss.margin is None else f"± {loss.margin:.4f}"
        cells = console.loss_cells(loss.value)[:2]
        row = [step.rung.name, f"{step.parameters:,}", *cells, margin, f"{step.seconds:.1f}"]
        rows.append(row)
    tables.table(
        ["model", "parameters", "nats/char", "bits/char", "95%", "seconds"],
        rows,
        title=f"{found.title}: validation loss, protocol full",
    )
    for step in found.steps:
        if step.gain is not None:
            console.out(f"{step.rung.name}: {in_words(step.gain)}, by {step.rung.adds}")
    console.out(
        f"attention, one scaled head, gains {found.attention_gain} nats per character over the "
        f"bigram; the whole ladder {found.whole_gain}"
    )
    if len(found.steps[0].nats) > 1:
        console.out("±: half a 95% interval over the seeds (Student's t); gains are of equal seeds")
    for step in found.steps:
        words = " / ".join(console.printable(step.sample)[:SHOWN].split("\n"))
        console.out(f"-- {step.rung.name} --\n{words}")


def in_words(gain: "Estimate") -> str:
    """Return a gain with its sign in words."""
    margin = "" if gain.margin is None else f" ± {gain.margin:.4f}"
    return f"{abs(gain.value):.4f}{margin} nats {'lower' if gain.value >= 0 else 'higher'}"
