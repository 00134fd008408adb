"""`chargpt compare --ladder`: from a bigram to a GPT, one component at a time."""

from pathlib import Path

from chargpt.analysis import plots
from chargpt.analysis.compare import shared_text, undertrained
from chargpt.analysis.ladder import Estimate, Ladder, run_ladder
from chargpt.analysis.result import loss_cells
from chargpt.cli import console, tables
from chargpt.cli.loop import run_steps
from chargpt.cli.plot_file import save_plot_file
from chargpt.cli.progress import LoadingProgress
from chargpt.cli.signals import catch_signals
from chargpt.config import Config
from chargpt.text.prepare import find_text
from chargpt.training.start import Session, output_folder, slug

MAX_SAMPLE = 150  # characters of a rung's sample


def compare_rungs(
    config: Config, out: Path | None, n_seeds: int, plot: Path | None, *, json_: bool
) -> None:
    """Train the rungs with progress bars, draw them, and print the table or the JSON."""

    def run_session(name: str, session: Session) -> None:
        console.say(f"== {name} ==")
        run_steps(session)

    name = f"ladder-{slug(find_text(config.text).name)}"
    with (
        catch_signals(),
        output_folder(out, name) as folder,
        shared_text(config, folder, LoadingProgress()) as corpus,
    ):
        ladder = run_ladder(config, folder, corpus, n_seeds, run_session)
    plot = plot or folder / "ladder.svg"
    save_plot_file(plots.ladder(ladder), plot)
    if json_:
        console.out_json({**ladder.as_dict(), "plot": str(plot)})
        return
    print_ladder(ladder)
    console.out(f"plot: {plot}")


def print_ladder(ladder: Ladder) -> None:
    """Print the ladder as a table, the gain of each rung, and its sample."""
    rows = [
        [name, "-", *loss_cells(nats)[:2], "-", "-"]
        for losses in (ladder.ngrams, ladder.compressor_losses)
        for name, nats in losses.items()
    ]
    for result in ladder.results:
        loss = result.loss
        margin = "-" if loss.margin is None else f"± {loss.margin:.4f}"
        cells = loss_cells(loss.value)[:2]
        name, parameters = result.rung.name, f"{result.parameters:,}"
        rows.append([name, parameters, *cells, margin, f"{result.seconds:.1f}"])
    tables.table(
        ["model", "parameters", "nats/char", "bits/char", "95% CI", "seconds"],
        rows,
        title=f"{ladder.title}: loss on the first {ladder.characters:,} validation characters, "
        "protocol blocks",
    )
    for result in ladder.results:
        if result.gain is not None:
            console.out_sentence(
                f"{result.rung.name}: {describe_gain(result.gain)} ({result.rung.adds})"
            )
    console.out_sentence(
        f"one scaled attention head: {describe_gain(ladder.attention_gain)} than the bigram; "
        f"gpt: {describe_gain(ladder.total_gain)} than the bigram"
    )
    trained = ladder.results[0]
    note = undertrained({trained.rung.name: trained.loss.value, **ladder.ngrams})
    if note is not None:
        console.out_sentence(note)
    if ladder.compressor_losses:
        console.out_sentence(
            "compressors: the size of both splits together minus that of the training split"
        )
    if len(ladder.results[0].nats) > 1:
        console.out_sentence(
            "±: half a 95% confidence interval (Student's t); gains are paired by seed"
        )
    for result in ladder.results:
        text = " / ".join(result.sample[:MAX_SAMPLE].split("\n"))
        console.out_sentence(f"-- {result.rung.name} --\n{text}")


def describe_gain(gain: Estimate) -> str:
    """Return a gain as `0.1234 ± 0.0123 nats per character lower`."""
    absolute = Estimate(abs(gain.value), gain.margin)
    return f"{absolute} nats per character {'lower' if gain.value >= 0 else 'higher'}"
