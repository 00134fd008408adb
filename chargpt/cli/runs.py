"""`chargpt runs` and `verify`: the runs in a folder, and whether one is intact; loading a run."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from chargpt.cli import console, options, tables
from chargpt.cli.main import catch_signals, hang_up
from chargpt.errors import ChargptError, ConfigError, RunError
from chargpt.store import verify as checks
from chargpt.store.ensemble import MAX_ERROR, MixedRun, mix
from chargpt.store.listing import RunSummary, list_runs
from chargpt.store.mixture import with_mixture
from chargpt.store.run import Run, load_run, newest_run, open_run
from chargpt.text.describe import MANY_REPEATED, MIN_REPEATED, find_repeats
from chargpt.text.source import STDIN
from chargpt.training.start import deferred_signals


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, two levels deep.")] = Path("runs"),
    json_: options.Json = False,
) -> None:
    """List runs with their text, size, steps, loss and status.

    The newest is first; other commands take by default the one that was saved last.

    Examples: `chargpt runs`, `chargpt runs experiments --json`.
    """
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; train a run first, or name another folder")
    found = list_runs(folder)
    if json_:
        console.out_json([as_json(run) for run in found])
        return
    if not found:
        raise RunError(
            f"there is no run in {folder}; train one with `chargpt train`, or name a folder of runs"
        )
    tables.table(
        ["run", "text", "size", "progress", "nats/char", "saved"],
        [cells(run, folder) for run in found],
        text_column=1,  # so that the names of runs stay whole
    )
    console.out_sentence(
        "size: parameters; nats/char: lowest validation loss in training.",
        "Newest first. `chargpt compare RUN RUN` scores the same characters.",
    )


def as_json(run: RunSummary) -> dict[str, object]:
    """Return a run under the JSON keys that all commands use."""
    saved = run.saved.isoformat(timespec="seconds") if run.saved else None
    return {**asdict(run), "run": str(run.run), "saved": saved}


def cells(run: RunSummary, folder: Path) -> list[str]:
    """Return a run as a row of the table."""
    name = str(run.run.relative_to(folder))
    size = "-" if run.parameters is None else console.short(run.parameters)
    text = (run.text or "-") + (" (documents)" if run.documents else "")
    if run.step is None:
        return [name, text, size, run.status, "-", "-"]
    done = f"{100 * run.step // (run.max_steps or 1)}%"
    progress = {"unfinished": f"{done} done", "training": f"training, {done}"}
    nats = "-" if run.best_nats_per_char is None else f"{run.best_nats_per_char:.3f}"
    saved = "-"
    if run.saved is not None:
        is_today = run.saved.date() == datetime.now(UTC).astimezone().date()
        saved = f"{run.saved:%H:%M}" if is_today else f"{run.saved:%d %b}"
    return [name, text, size, progress.get(run.status, run.status), nats, saved]


def verify(run: options.RunOrNewest = None, json_: options.Json = False) -> None:
    """Verify that every checkpoint of a run is intact.

    The exit code is 1 if one is damaged.

    Examples: `chargpt verify`, `chargpt verify runs/novel-gpt --json`.
    """
    folder = open_run(find_run(run))
    result = checks.verify(folder)
    if json_:
        facts: dict[str, Any] = {"run": str(folder.path), "intact": not result.problems}
        facts["checkpoints"] = [
            {"checkpoint": each.folder.name, "bytes": each.size, "problem": each.problem}
            for each in result.checkpoints
        ]
        facts["loaded_by"] = {name: path and path.name for name, path in result.loaded_by.items()}
        console.out_json({**facts, "problems": result.problems, "notes": result.notes})
    else:
        rows = []
        for each in result.checkpoints:
            uses = (name for name, path in result.loaded_by.items() if path == each.folder)
            state = "damaged" if each.problem else "intact"
            rows.append([each.folder.name, " and ".join(uses), console.size(each.size), state])
        tables.table(["checkpoint", "loaded as", "size", "state"], rows)
        for sentence in (*result.problems, *result.notes):
            console.out_sentence(sentence)
        if not result.problems:
            console.out_sentence(
                f"{folder.path} is intact: checkpoints, text, metrics and mixture match "
                "their checksums."
            )
    if result.problems:
        raise typer.Exit(1)


def find_run(path: Path | None) -> Path:
    """Return the run named, or else the newest one, which is then printed."""
    if path is None:
        path = newest_run()
        console.say(f"run: {path}")
    return path


def load_named_run(
    path: Path | None, checkpoint: str, device: str | None, *, mixture: bool = False
) -> Run:
    """Load a run, or the newest one, with its mixture if asked."""
    run = load_run(find_run(path), checkpoint, device or "auto")
    return load_run_mixture(run) if mixture else run


def load_runs(
    paths: Sequence[Path],
    mix_weights: Sequence[float] | None,
    checkpoint: str,
    device: str | None,
    *,
    mixture: bool = False,
) -> Run:
    """Load a run, several as a mixed one, or the newest run if none is named.

    Args:
        paths: of the runs.
        mix_weights: of each run after the first; equal weights by default.
        checkpoint, device, mixture: as of `load_named_run`, of each run.
    """
    n_others = max(0, len(paths) - 1)
    weights = None
    if mix_weights:
        if len(mix_weights) != n_others:
            raise ConfigError(
                f"--mix is the weight of a run after the first: there are {n_others} of them and "
                f"{len(mix_weights)} weights; give one for each, as in `chargpt sample A B --mix "
                "0.3`"
            )
        total = math.fsum(mix_weights)
        if total > 1 + MAX_ERROR:
            raise ConfigError(f"the weights of --mix sum to {total:g}, which is over 1; lower them")
        weights = [max(0.0, 1 - total), *mix_weights]
    named: list[Path | None] = [*paths] or [None]
    loaded = [load_named_run(path, checkpoint, device, mixture=mixture) for path in named]
    return mix(loaded, weights)


def mix_json(run: Run) -> dict[str, Any]:
    """Return the parts of a mixed run and their weights under the JSON key `mix`."""
    if not isinstance(run, MixedRun):
        return {}
    pairs = zip(run.parts, run.weights, strict=True)
    parts = [
        {"run": str(part.folder), "step": part.step, "weight": weight} for part, weight in pairs
    ]
    return {"mix": parts}


def warn_of_own_text(run: Run, path: str, content: str) -> None:
    """Say how much of a text is in the training split, or that it is the file of the run's text.

    Of a run without a text, only the paths are compared.
    """
    own = run.config.text.path
    try:
        tokens = run.tokenizer.encode(content, "replace")
        corpus = run.corpus()
        found, usual = find_repeats(corpus, tokens), find_repeats(corpus, corpus.split("val"))
        trained_on = ""
        if found.fraction > min(MANY_REPEATED, usual.fraction + MIN_REPEATED):
            trained_on = f"{found} of {path} occur in the training split of the run"
            if usual.fraction >= MIN_REPEATED:  # as of logs, which repeat by nature
                trained_on += f", and {usual} of its validation split"
    except ChargptError:
        is_own = own not in (None, STDIN) and Path(path).resolve() == Path(str(own)).resolve()
        trained_on = f"{path} is the file that the run was trained on" if is_own else ""
    if trained_on:
        console.say(
            f"{trained_on}: its loss is lower than that of a new text; chargpt evaluate measures "
            "the validation split"
        )


@contextmanager
def stoppable_progress(unit: str, action: str, caught: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the `on_progress` and `is_stopped` of work that a signal ends with what there is.

    Its number is appended to `caught`. The other arguments are those of `show_progress`.
    """
    with (
        catch_signals(),
        deferred_signals(hang_up) as signals,
        console.show_progress(unit, action) as on_progress,
    ):
        yield {"on_progress": on_progress, "is_stopped": lambda: bool(signals)}
    caught += signals


def unit_of(run: Run) -> str:
    """Return what a model reads of a text one by one."""
    return "token" if run.tokenizer.has_bytes else "character"


def say_unknown(run: Run, unknown: str, policy: str | None) -> None:
    """Print which characters outside the vocabulary, if any, were left out or replaced."""
    if unknown:
        is_left_out = (policy or run.config.text.unknown) == "skip"
        replacement = run.tokenizer.token_text(run.tokenizer.replacement_id)
        done = "left out" if is_left_out else f"replaced by {replacement!r}"
        count, names = console.characters(len(unknown)), run.tokenizer.name_missing(unknown)
        console.say(f"{count} outside the vocabulary ({names}): {done}")


def load_run_mixture(run: Run) -> Run:
    """Return a run with its mixture in place of its GPT, with a message if counting is slow.

    Raises:
        RunError: it has none, or that of another checkpoint, or the file is damaged.
    """
    with console.say_if_slow("counting the n-grams of the training text ..."):
        return with_mixture(run)
