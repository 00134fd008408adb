"""`chargpt.train`: from a text to a trained run in one call."""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from chargpt.config import Config, require_settings
from chargpt.distributed import RankGroup, destroy_process_group, rank_variable, world_size
from chargpt.errors import ConfigError, FinishedError, Stopped
from chargpt.log import collected_notes, logger
from chargpt.store.layout import identity_of
from chargpt.store.mirror import shared_run
from chargpt.store.run import Run, load_run
from chargpt.training.mixing import try_add_mixture
from chargpt.training.start import Request, Session, StartMode, open_session
from chargpt.training.trainer import StepReport


def train(
    path: str | Path | None = None,
    *,
    text: str | None = None,
    config: str | Path | Config | None = None,
    settings: Mapping[str, object] | None = None,
    budget: str | float | None = None,
    from_run: str | Path | None = None,
    out: str | Path | None = None,
    start: StartMode | Literal["new", "resume", "new or resume", "replace"] = "new",
    device: str | None = None,
    encoding: str | None = None,
    progress: bool | None = None,
    on_report: Callable[[StepReport], object] = lambda _: None,
) -> Run:
    """Train a model on a text and return the run with its best checkpoint.

    Without `config` and settings of model, train, optim or schedule, sizes and steps are chosen for
    a budget of 150 seconds. What happened, such as that a budget was too short, is logged by the
    logger `chargpt`, and listed in the run's `notes`. Ctrl-C ends training after the current step
    and saves a checkpoint.

    Args:
        path: a file, folder, glob, or a name from `chargpt data list`; by default the built-in
            text.
        text: the text itself, instead of `path`.
        config: a shipped config's name, such as `gpt` or `bigram`, a YAML file, or a Config.
        settings: by dotted keys, as in {"train.max_steps": 500}; they take precedence.
        budget: a time, in seconds or as in "3m", that size and steps are chosen for. It begins at
            the call: loading PyTorch, at the first use of `chargpt.train`, comes before.
        from_run: folder of the base run: of another text, its weights are the start.
        out: folder of the run; by default a new one under runs/.
        start: what to do about a run that exists in `out`: `new` rejects it, `resume` continues it
            (or the run in `path`, by default the newest), `new or resume` begins where there is
            none, `replace` renames it to NAME.old.
        device: `auto`, `cpu`, `cuda`, `cuda:N`, `xpu`, `xpu:N` or `mps`.
        encoding: of the text; by default UTF-8, or what its byte order mark says.
        progress: show a progress bar on stderr; in a Jupyter notebook, where it is the default, a
            widget if ipywidgets is installed, with the plan before it and the results below.
        on_report: called with the results of each step after it, and of a new run first with those
            of the validation before any, as step 0. Once it returns True, the run is saved and
            returned, to be resumed or used.

    Raises:
        ChargptError: the text, a setting, the folder or the device is unusable, or the last
            checkpoint could not be written.
        KeyboardInterrupt: training was interrupted. After the first Ctrl-C, which lets the step
            finish, the message names the checkpoint.
    """
    request = new_request(
        path, text, config, settings, budget, out, device, encoding, from_run, start
    )
    notebook = None if progress is False else notebook_view()
    with collected_notes() as notes:
        try:
            with open_session(request) as session:
                if notebook is not None:
                    notebook.show_plan(session)
                run_steps(session, bool(progress or notebook), on_report)
                group = session.trainer.group
                run = load_shared_run(session.folder.path, device or "auto", group)
        except FinishedError:
            if request.start is not StartMode.NEW_OR_RESUME or request.out is None:
                raise
            group = RankGroup(rank_variable("RANK"), world_size())
            run = load_shared_run(request.out, device or "auto", group)
            destroy_process_group()
            return run
        if notebook is not None:
            notebook.show_result(session, run)
        elif group.is_main:
            try_add_mixture(run, session.trainer.corpus)
        if (late := session.late_note()) is not None:
            logger.warning(late)
    return replace(run, notes=tuple(notes))


def load_shared_run(folder: Path, device: str, group: RankGroup) -> Run:
    """Return a run as `load_run` does; other ranks wait for rank 0, whose folder they may not see.

    Errors are those of `load_run`.
    """
    if group.is_alone:
        return load_run(folder, device=device)
    run = shared_run(group, str(folder), device)
    return replace(run, folder=folder, identity=identity_of(folder))


def new_request(
    path: str | Path | None,
    text: str | None,
    config: str | Path | Config | None,
    settings: Mapping[str, object] | None,
    budget: str | float | None,
    out: str | Path | None,
    device: str | None,
    encoding: str | None,
    from_run: str | Path | None = None,
    start: StartMode | str = StartMode.NEW,
) -> Request:
    """Return what the arguments of `train` ask for, which starts now; raise as `train` does."""
    started = time.perf_counter()
    try:
        start = StartMode(start)
    except ValueError:
        modes = ", ".join(repr(mode.value) for mode in StartMode)
        raise ConfigError(f"start {start!r} is not one of {modes}") from None
    is_shared = world_size() > 1 and start is not StartMode.RESUME
    if out is None and (is_shared or start is StartMode.NEW_OR_RESUME):
        raise ConfigError(
            "start 'new or resume' and several processes need the run's folder; give out="
        )
    given = {
        "train.from_run": None if from_run is None else str(Path(from_run).absolute()),
        "text.encoding": encoding,
        "device": device,
    }
    given = {key: each for key, each in given.items() if each is not None}
    return Request(
        path=None if path is None else str(path),
        text=text,
        config=config if isinstance(config, Config | None) else str(config),
        settings={**require_settings(settings), **given},
        budget=budget,
        out=None if out is None else Path(out),
        start=start,
        started=started,
    )


def notebook_view() -> Any:
    """Return the module that shows a training in a notebook, which is of a later layer, or None."""
    ipython = sys.modules.get("IPython")
    in_kernel = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    return import_module("chargpt.cli.notebook") if in_kernel else None


def run_steps(
    session: Session, progress: bool, on_report: Callable[[StepReport], object] = lambda _: None
) -> None:
    """Run all steps, with a progress bar on stderr or without."""
    trainer, val = session.trainer, ""
    is_shown = progress and trainer.group.is_main
    with warnings.catch_warnings():  # that ipywidgets are not installed
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm
    done, total = trainer.state.step, trainer.config.train.max_steps
    try:
        with (
            logging_redirect_tqdm(None if is_shown else [], tqdm),  # above the bar
            tqdm(total=total, initial=done, unit="step", disable=not is_shown) as bar,
        ):
            for report in session.reports(on_report=on_report):
                bar.total = report.max_steps
                if report.validation is not None:
                    val = f", val {report.validation.nats_per_char:.3f}"
                if trainer.last_loss is not None:
                    bar.set_postfix_str(f"loss {trainer.last_loss:.2f}{val}", refresh=False)
                bar.update(report.step - bar.n)
    except Stopped:
        path = session.folder.path
        if trainer.finished:
            raise KeyboardInterrupt(f"all steps are done and saved in {path}") from None
        raise KeyboardInterrupt(
            f"stopped at step {trainer.state.step:,} and saved in {path}; start='resume' does the "
            "remaining steps"
        ) from None
