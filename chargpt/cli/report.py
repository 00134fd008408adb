"""`chargpt report`, all about a run on one page; and what `chargpt train` prints at its end."""

from dataclasses import asdict

from chargpt.analysis.report import write_report
from chargpt.analysis.result import RunScores, evaluate_run, of_model, summarize
from chargpt.cli import console, options, runs, tables
from chargpt.errors import ChargptError, Stopped
from chargpt.files import quoted
from chargpt.outputs import is_open_descriptor, require_output
from chargpt.store.run import Run, load_run
from chargpt.training.deadline import MIN_REPORT_BUDGET
from chargpt.training.finetune import forgetting
from chargpt.training.mixing import try_add_mixture
from chargpt.training.start import Session

COLUMNS = ("model", "split", "nats/char", "bits/char", "perplexity")


def report(
    run: options.RunOrNewest = None,
    out: options.Page = None,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = None,
) -> None:
    """Write a report page about a run.

    Training curves, samples, surprisal, accuracy, calibration, attention and verbatim overlap,
    in one file that loads nothing from a network.

    Examples: `chargpt report`, `chargpt report runs/novel --out novel.html`.
    """
    require_output(out)
    loaded = runs.load_named_run(run, checkpoint, device)
    with console.show_progress("section", "written") as on_progress:
        page = write_report(loaded, out, on_progress=on_progress)
    if not is_open_descriptor(page):  # whose content is the page
        console.out(str(page))


def show_result(session: Session, *, json_: bool = False) -> None:
    """Fit the mixture; print the results table or the JSON; write the report of a long run."""
    try:
        _show_result(session, json_=json_)
    except (KeyboardInterrupt, Stopped):
        console.say(
            f"the run is saved in {session.folder.path}, its mixture or report may be missing; "
            "`chargpt evaluate` measures the run, `chargpt report` writes its report"
        )
        raise


def _show_result(session: Session, *, json_: bool) -> None:
    trainer, folder, state = session.trainer, session.folder, session.trainer.state
    best = load_run(folder.path, "best", str(trainer.device))
    with console.say_if_slow("scoring ..."):
        scores = final_scores(session, best)
    records = of_model(best, best.records())
    sentences = summarize(best, scores, records)
    forgotten = forgetting(base, best) if (base := session.base_run) else None
    if base and forgotten:
        sentences.append(forgotten.describe(base))
    if session.resumed_at is not None and (state.best_step or 0) <= session.resumed_at:
        sentences.append(
            f"The steps after {session.resumed_at:,} did not lower the validation loss."
        )
    has_report = state.seconds >= MIN_REPORT_BUDGET
    if session.pace is not None:
        has_report = session.pace.deadline.has_report
    if json_:
        console.out_json(
            {
                "run": str(folder.path),
                "step": state.step,
                "best_step": state.best_step,
                "seconds": state.seconds,
                "parameters": best.model.num_parameters(),
                "baselines": scores.baseline_losses,
                "losses": {split: loss.as_dict() for split, loss in scores.evaluations.items()},
                "mixture": scores.mixture.as_dict() if scores.mixture else None,
                **({"forgetting": asdict(forgotten)} if forgotten else {}),
                "summary": sentences,
            }
        )
    else:
        # more steps would only over-fit
        is_best = state.best_step == state.step and not scores.over_fits(records)
        print_result(session, scores, sentences, has_report=has_report, may_improve=is_best)
    if has_report:
        show_report(session, best, scores, json_=json_)
    if (late := session.late_note()) is not None:
        console.say(late)


def final_scores(session: Session, best: Run) -> RunScores:
    """Fit the mixture of a run that has been trained, and evaluate both beside the baselines."""
    trainer = session.trainer
    mixture_run = try_add_mixture(best, trainer.corpus)
    validation = trainer.float32_validation(best.step)
    return evaluate_run(best, trainer.corpus, session.baselines, mixture_run, validation)


def print_result(
    session: Session,
    scores: RunScores,
    sentences: list[str],
    *,
    has_report: bool,
    may_improve: bool,
) -> None:
    """Print losses beside those of the baselines, the summary, and the next commands.

    `may_improve`: whether more steps may help a finished run.
    """
    state, kind = session.trainer.state, session.trainer.config.model.kind
    tables.table(COLUMNS, scores.rows(kind))
    console.out_sentence(f"Losses on {scores.scored_on}.", *sentences)
    best_step = f"the best checkpoint is step {state.best_step:,}"
    if state.best_step == 0:
        best_step = "no checkpoint is better than the weights at the start; commands use the last"
    earlier = ", those before --resume included" if session.resumed_at is not None else ""
    console.out_sentence(
        f"trained to step {state.step:,} in {console.duration(state.seconds)}{earlier}; {best_step}"
    )
    path = quoted(session.folder.path)
    more = f" -s train.max_steps={2 * state.step}" if session.trainer.finished else ""
    if more and session.pace is not None:
        more = f" --budget {session.pace.deadline.seconds:g}s"
    mixture = " --mixture" if scores.has_better_mixture else ""
    commands = [f"chargpt sample {path}{mixture}", f"chargpt evaluate {path}"]
    if not has_report:
        commands.append(f"chargpt report {path}")
    if may_improve or not more:
        commands.append(f"chargpt train --resume {path}{more}")
    lines = [f"the run is in {path}; next:", *(f"  {command}" for command in commands)]
    console.out_sentence(*lines)


def show_report(session: Session, best: Run, scores: RunScores, *, json_: bool) -> None:
    """Write the report page and print where it is."""
    try:
        with console.show_progress("section", "of the report") as on_progress:
            corpus = session.trainer.corpus
            page = write_report(best, corpus=corpus, scores=scores, on_progress=on_progress)
    except (ChargptError, OSError) as error:  # the run itself is complete and saved
        path = quoted(session.folder.path)
        console.say(f"no report: {error}; `chargpt report {path}` tries again")
    else:
        (console.say if json_ else console.out)(f"report: {page}")
