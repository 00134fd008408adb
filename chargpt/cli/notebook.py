"""What trainings, runs and results show in a notebook: HTML, in which every text is escaped."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from markupsafe import Markup

from chargpt.analysis import plots
from chargpt.analysis.compare import Comparison, conclusions
from chargpt.analysis.page import render
from chargpt.analysis.result import loss_cells, summarize
from chargpt.cli import compare, console, evaluate, report
from chargpt.cli.train import describe_model, describe_plan
from chargpt.errors import ChargptError
from chargpt.inference.evaluation import Evaluation
from chargpt.log import logger
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run
from chargpt.training.start import Session

WIDTH = 6.5  # inches of a plot


def html(
    caption: str,
    rows: Iterable[Sequence[str]],
    columns: Sequence[str] = (),
    sentences: Iterable[str] = (),
    plot: Markup | None = None,
) -> str:
    """Return a table, then sentences and a plot."""
    page: dict[str, Any] = {"columns": columns, "rows": rows, "sentences": sentences, "plot": plot}
    return render("notebook.html", caption=caption, **page)


def show_plan(session: Session) -> None:
    """Print what `chargpt train` prints before the first step."""
    console.out_sentence(*describe_plan(session))


def show_result(session: Session, run: Run) -> None:
    """Display the losses of a trained run beside the baselines, and the summary, as a command does.

    The mixture is fitted first. An error is logged: the run is complete and saved.
    """
    from IPython.display import HTML, display  # only notebooks have it

    try:
        scores = report.final_scores(session, run)
        sentences = summarize(run, scores, run.records())
    except ChargptError as error:
        logger.warning(f"no results: {error}")
        return
    caption = f"losses on {scores.scored_on}"
    rows = scores.rows(run.config.model.kind)
    display(HTML(html(caption, rows, report.COLUMNS, sentences)))


def run_html(run: Run) -> str:
    """Return the main facts about a run, and its validation curve if it has one."""
    state, curve, best, plot = run.state, [], "unknown", None
    with suppress(ChargptError):  # the model is loaded and can be used
        curve = validation_curve(run.records())
    if state.best_nats_per_char is not None:
        nats, bits, _ = loss_cells(state.best_nats_per_char)
        best = f"{nats} nats/char ({bits} bits/char) at step {state.best_step or 0:,}"
    rows = [
        ("text", state.text_name),
        ("vocabulary", run.tokenizer.describe()),
        ("model", describe_model(run.config.model)),
        ("parameters", f"{run.model.num_parameters():,}"),
        ("checkpoint", f"step {run.step:,}, trained for {console.duration(state.seconds)}"),
        ("lowest validation loss", best),
    ]
    if curve:
        figure = plots.loss_curves({"validation": curve}, {}, state.text_name, WIDTH)
        plot = plots.inline(figure, str(run.folder))
    return html(f"run {run.folder}", rows, plot=plot)


def evaluation_html(result: Evaluation) -> str:
    """Return the losses and the accuracy, and what they were measured on."""
    part = "another text" if result.split == "all" else f"{result.split} split"
    caption = (
        f"{part}: {evaluate.scored_characters(result)}, protocol {result.protocol}, blocks of "
        f"{result.block_size:,}"
    )
    return html(caption, [evaluate.cells(result)], evaluate.COLUMNS)


def comparison_html(result: Comparison) -> str:
    """Return the table of the models, the conclusions and the validation curves."""
    figure = plots.loss_curves(result.curves, result.curve_baselines, result.title, WIDTH)
    columns, rows = compare.table_of(result)
    caption = f"{result.title}: loss on {result.scored_on}"
    return html(caption, rows, columns, conclusions(result), plots.inline(figure, result.title))
