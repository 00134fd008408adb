"""Training steps on the terminal: progress bar, notes, and what a signal does."""

import math
import shlex
import signal
import sys
from contextlib import closing
from functools import partial

from chargpt.cli import console
from chargpt.cli.progress import ProgressBar
from chargpt.cli.signals import Signals, Stopped
from chargpt.inference.baselines import NGRAM, Baselines
from chargpt.store.folder import RunFolder
from chargpt.text.display import display_char
from chargpt.text.documents import RECORD_SEPARATOR
from chargpt.training.budget import Budget
from chargpt.training.trainer import StepReport, Trainer

MIN_SPARKLINE_COLUMNS = 100  # of the terminal


class StepView:
    """Shows the steps of one trainer; ends the command after a signal has stopped it."""

    def __init__(self, trainer: Trainer, folder: RunFolder, signals: Signals) -> None:
        self.trainer, self.folder, self.signals = trainer, folder, signals
        self.baselines: Baselines | None = None  # of the text; None on other ranks than 0
        self.baseline_losses: dict[str, float] = {}  # on what training validates on
        if trainer.group.is_main:
            config = trainer.config
            self.baselines = Baselines(trainer.corpus, trainer.learner.fitted_ngram)
            self.baseline_losses = self.baselines.losses(
                trainer.corpus.split("val"),
                max_tokens=config.train.evaluation_tokens,
                span=config.model.block_size,
            )
        self.bar = ProgressBar(trainer.config.train.max_steps, "step", initial=trainer.state.step)
        self.validation: list[float] = []
        self.has_reported_disk_error = False
        signals.is_deferred = True

    def show(self, report: StepReport) -> None:
        """Show a step on the bar, and its sample and notes above it."""
        if report.validation is not None and report.step:  # not that before training
            self.validation.append(report.validation.nats_per_char)
        detail = None if report.loss is None else partial(self._detail, report)
        self.bar.update(report.step, report.max_steps, detail)
        if report.sample is not None:
            sign = display_char(RECORD_SEPARATOR)
            legend = f" ({sign}: end of a document)" if sign in report.sample else ""
            self.bar.write(f"-- sample at step {report.step:,}{legend} --")
            self.bar.write(report.sample.strip("\r\n"), is_sample=True)
        for note in report.notes:
            self.bar.write(note)
        disk_error = self.trainer.writer.disk_error
        is_last = self.trainer.finished or self.trainer.stopped_by is not None
        if disk_error is not None and not is_last and not self.has_reported_disk_error:
            self.bar.write(
                f"cannot write to the run at step {report.step:,} ({disk_error}); "
                f"{self._last_checkpoint()}; training continues: free some space"
            )
        self.has_reported_disk_error = disk_error is not None

    def end(self) -> None:
        """End the command, by raising `Stopped`, if a signal came."""
        trainer = self.trainer
        # another rank's signal stops this one too; the run is saved, so later ones are dropped
        default = signal.SIGTERM if trainer.stopped_by == "signal" else None
        number = next(iter(self.signals.caught), default)
        self.signals.caught = []
        if trainer.writer.disk_error is not None:  # the checkpoint is saved
            console.say(f"the last metrics cannot be written ({trainer.writer.disk_error})")
        if number is None:
            self.signals.is_deferred = False
            return
        if trainer.finished:
            console.say(f"all steps are done and saved in {self.folder.path}")
        else:
            step = trainer.state.step
            console.say(f"stopped at step {step:,} and saved; {self._how_to_resume()}")
        raise Stopped(number, is_reported=True)

    def say_last_checkpoint(self) -> None:
        """Name the last checkpoint after a signal has stopped a step."""
        if self.trainer.writer.saved_step is not None:
            console.say(f"{self._last_checkpoint()}; {self._how_to_resume()}")

    def _how_to_resume(self) -> str:
        return f"resume with\n  chargpt train --resume {shlex.quote(str(self.folder.path))}"

    def _last_checkpoint(self) -> str:
        step = self.trainer.writer.saved_step
        if step is None:
            return "there is no checkpoint yet"
        return f"the last checkpoint is step {step:,}"

    def _detail(self, report: StepReport) -> str:
        """Return loss, validation, the next baseline to beat and speed, within 80 columns."""
        # the last one that was read: reading the step's own would synchronise a GPU
        loss = "" if self.trainer.last_loss is None else f"loss {self.trainer.last_loss:.2f} "
        last, val = math.inf, ""
        if self.validation:
            last = self.validation[-1]
            val = f"val {last:.3f} "
            if console.terminal_size(sys.stderr)[0] >= MIN_SPARKLINE_COLUMNS:
                val += f"{console.sparkline(self.validation, sys.stderr, 5)} "
        name = "bigram" if self.baseline_losses["bigram"] < last else NGRAM
        speed = f" {console.short(report.speed)} chars/s" if report.speed else ""
        return f"{loss}{val}{name} {self.baseline_losses[name]:.3f}{speed}"


def run_steps(
    trainer: Trainer, folder: RunFolder, signals: Signals, budget: Budget | None = None
) -> Baselines | None:
    """Run all steps with a progress bar; a signal saves the run and ends the command.

    Returns the baselines of the text, on rank 0.
    """
    view = StepView(trainer, folder, signals)
    try:
        with closing(view.bar):
            for report in trainer.steps(budget, lambda: bool(signals.caught)):
                view.show(report)
        view.end()
    except Stopped as stop:
        if not stop.is_reported:
            view.say_last_checkpoint()
        raise
    return view.baselines
