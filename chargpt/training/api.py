"""`chargpt.train`: from a text to a trained run in one call."""

import json
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from chargpt.errors import FinishedError
from chargpt.store.run import Run, load_run
from chargpt.training.report import StepReport
from chargpt.training.session import Request, Session, StartMode, open_session
from chargpt.training.view import View


def train(
    text: str | Path | None = None,
    *,
    config: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    budget: str | float | None = None,
    out: str | Path | None = None,
    start: StartMode = StartMode.NEW,
    device: str | None = None,
    encoding: str | None = None,
    progress: bool = False,
) -> Run:
    """Train a model on a text and return the run with its best checkpoint.

    Without `config` and `settings`, sizes and steps are chosen for a budget of 150 seconds.

    Args:
        text: a file, folder, glob, or name of the catalog; by default an embedded text.
        config: a shipped config's name, such as `gpt` or `bigram`, or a YAML file.
        settings: by dotted keys, as in {"train.max_steps": 500}; they take precedence.
        budget: a time, in seconds or as in "3m", that size and steps are chosen for.
        out: folder of the run; by default a new one under runs/.
        start: what to do about a run that exists in `out`.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        encoding: of the text, if it is neither UTF-8 nor UTF-16.
        progress: show a progress bar on stderr.

    Raises:
        ChargptError: the text, a setting, the folder or the device is unusable.
    """
    request = Request(
        text=None if text is None else str(text),
        config=None if config is None else str(config),
        overrides=tuple(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()),
        budget=budget if budget is None or isinstance(budget, str) else f"{round(budget)}s",
        out=None if out is None else Path(out),
        start=start,
        device=device,
        encoding=encoding,
    )
    try:
        return run_training(request, ProgressBar() if progress else View())
    except FinishedError:
        if start is not StartMode.BEGIN_OR_RESUME or request.out is None:
            raise
        return load_run(request.out, device=device or "auto")


def run_training(request: Request, view: View) -> Run:
    """Train as requested, with all that happens shown on a view; return the trained run."""
    with open_session(request, view) as session:
        trainer = session.trainer
        view.started(session)
        for report in trainer.steps(session.budget, view.should_stop):
            view.stepped(report)
        view.ended(session)
        run = load_run(session.folder.path, "best", trainer.device.type)
        if trainer.group.is_main:
            view.finished(session, run)
        return run


class ProgressBar(View):
    """A progress bar with loss and speed."""

    def started(self, session: Session) -> None:
        trainer = session.trainer
        total, done = trainer.config.train.max_steps, trainer.state.step
        self.bar = tqdm(total=total, initial=done, unit="step")

    def stepped(self, report: StepReport) -> None:
        self.bar.total = report.max_steps
        if report.validation is not None:
            self.bar.set_postfix_str(f"val {report.validation.nats_per_char:.3f}", refresh=False)
        self.bar.update(report.step - self.bar.n)

    def ended(self, session: Session) -> None:
        self.bar.close()
