"""`chargpt.train`: from a text to a trained run in one call."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import chargpt
from chargpt.errors import ConfigError, FinishedError
from chargpt.ranks import is_main_rank, world_size
from chargpt.store.run import Run, load_run
from chargpt.text import TextProgress
from chargpt.text.source import require_text
from chargpt.training.budget import Budget
from chargpt.training.mixing import try_add_mixture
from chargpt.training.request import Request, StartMode
from chargpt.training.session import Session, open_session
from chargpt.yaml_io import to_flow_yaml

MAX_CALL_SECONDS = 1.0  # from the import of `train` to its call, in one statement


def train(
    path: str | Path | None = None,
    *,
    text: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    budget: str | float | None = None,
    from_run: str | Path | None = None,
    out: str | Path | None = None,
    start: StartMode | str = "new",
    device: str | None = None,
    encoding: str | None = None,
    progress: bool = False,
) -> Run:
    """Train a model on a text and return the run with its best checkpoint.

    Without `config` and settings of model, train, optim or schedule, sizes and steps are chosen for
    a budget of 150 seconds. The run's `notes` say what happened, such as that a budget was too
    short. Ctrl-C ends training after the current step and saves a checkpoint.

    Args:
        path: a file, folder, glob, or a name from `chargpt data list`; by default the built-in
            text.
        text: the text itself, instead of `path`. To evaluate or resume the run later, the cache
            must still have it.
        config: a shipped config's name, such as `gpt` or `bigram`, or a YAML file.
        settings: by dotted keys, as in {"train.max_steps": 500}; they take precedence.
        budget: a time, in seconds or as in "3m", that size and steps are chosen for. It includes
            loading PyTorch, at the first use of `chargpt.train`.
        from_run: folder of the base run: of another text, its weights are the start.
        out: folder of the run; by default a new one under runs/.
        start: what to do about a run that exists in `out`: `new` rejects it, `resume` continues it
            (or the run in `path`, by default the newest), `new or resume` begins where there is
            none, `replace` deletes it once the new run has saved.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        encoding: of the text; by default UTF-8, or what its byte order mark says.
        progress: show a progress bar on stderr.

    Raises:
        ChargptError: the text, a setting, the folder or the device is unusable, or the last
            checkpoint could not be written.
        KeyboardInterrupt: training was interrupted. After the first Ctrl-C, which lets the step
            finish, the message names the checkpoint.
    """
    started = _call_start()
    if text is not None:
        require_text(text)
    if not isinstance(settings, Mapping | None):
        raise ConfigError(
            "settings: expected a dictionary, such as {'train.max_steps': 500} (it is of type "
            f"{type(settings).__name__})"
        )
    is_number = isinstance(budget, int) or (isinstance(budget, float) and math.isfinite(budget))
    if not (budget is None or isinstance(budget, str) or is_number):
        raise ConfigError(
            f"budget: expected seconds, or a time such as '3m' (it is {budget!r:.100})"
        )
    overrides = [f"{key}={to_flow_yaml(value)}" for key, value in (settings or {}).items()]
    if from_run is not None:
        overrides.append(f"train.from_run={to_flow_yaml(str(Path(from_run).absolute()))}")
    if encoding is not None:
        overrides.append(f"text.encoding={to_flow_yaml(encoding)}")
    try:
        start = StartMode(start)
    except ValueError:
        modes = ", ".join(repr(mode.value) for mode in StartMode)
        raise ConfigError(f"start {start!r} is not one of {modes}") from None
    if start is StartMode.NEW_OR_RESUME and out is None:
        raise ConfigError("start 'new or resume' needs the run's folder; give out=")
    if start is not StartMode.RESUME and out is None and world_size() > 1:
        raise ConfigError("several processes need the run's folder; give out=")
    request = Request(
        path=None if path is None else str(path),
        text=text,
        config=None if config is None else str(config),
        overrides=tuple(overrides),
        budget=budget if budget is None or isinstance(budget, str) else f"{round(budget)}s",
        out=None if out is None else Path(out),
        start=start,
        device=device,
        started=started,
    )
    notes, budgets = list[str](), list[Budget]()

    def run_session(session: Session) -> None:
        if session.budget is not None:
            budgets.append(session.budget)
        run_steps(session, progress=progress, notes=notes)

    try:
        folder = run_training(request, run_session)
    except FinishedError:
        if start is not StartMode.NEW_OR_RESUME:
            raise
        return load_run(str(request.out), device=device or "auto")
    run = load_run(folder, device=device or "auto")
    if is_main_rank():
        try_add_mixture(run, None, notes)
    notes += [note for budget in budgets if (note := budget.late_note()) is not None]
    return replace(run, notes=(*notes, *run.notes))


def _call_start() -> float:
    """Return when the statement that calls `train` began, by `time.perf_counter`.

    `chargpt.train(...)` imports this module, and PyTorch, before it calls the function.
    """
    now = time.perf_counter()
    started, ended = chargpt.import_intervals.get("train", (now, now))
    return started if now - ended < MAX_CALL_SECONDS else now


def run_training(
    request: Request,
    run_session: Callable[[Session], None],
    on_progress: TextProgress | None = None,
) -> Path:
    """Start a run, train it with `run_session`, and return its folder."""
    with open_session(request, on_progress) as session:
        run_session(session)
        session.trainer.group.broadcast(0.0)  # other ranks wait until rank 0 has saved
        return session.folder.path


def run_steps(session: Session, *, progress: bool, notes: list[str]) -> None:
    """Run all steps, with a progress bar on stderr or without; add sentences to `notes`."""
    trainer = session.trainer
    notes += session.notes
    total, done = trainer.config.train.max_steps, trainer.state.step
    is_main = trainer.group.is_main
    with (
        deferred_interrupt() as interrupts,
        tqdm(total=total, initial=done, unit="step", disable=not (progress and is_main)) as bar,
    ):
        disk_error, val = None, ""
        for report in trainer.steps(session.budget, lambda: bool(interrupts)):
            notes += report.notes
            if trainer.writer.disk_error not in (None, disk_error):
                notes.append(
                    f"cannot write to the run at step {report.step:,} ({trainer.writer.disk_error})"
                )
            disk_error = trainer.writer.disk_error
            bar.total = report.max_steps
            if report.validation is not None:
                val = f", val {report.validation.nats_per_char:.3f}"
            if trainer.last_loss is not None:
                bar.set_postfix_str(f"loss {trainer.last_loss:.2f}{val}", refresh=False)
            bar.update(report.step - bar.n)
    if interrupts and trainer.finished:
        raise KeyboardInterrupt(f"all steps are done and saved in {session.folder.path}")
    if interrupts:
        raise KeyboardInterrupt(
            f"stopped at step {trainer.state.step:,} and saved in {session.folder.path}; "
            "start='resume' continues the run"
        )


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Record a first Ctrl-C instead of raising KeyboardInterrupt within a step.

    Does nothing outside the main thread, or if the signal has a handler already.
    """
    caught: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield caught
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
