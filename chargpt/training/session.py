"""One invocation of training, from the first step to the last: the driver of all who train."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chargpt.errors import Stopped
from chargpt.inference.baselines import Baselines
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run
from chargpt.training.cost import Cost
from chargpt.training.interrupts import deferred_signals
from chargpt.training.pace import Pace
from chargpt.training.planner import Plan
from chargpt.training.trainer import StepReport, Trainer


@dataclass
class Session:
    """A run that is ready to train.

    Attributes:
        trainer: of the run.
        folder: locked until the session ends.
        baselines: of the text; None on other ranks than 0.
        cost: expected of the remaining steps.
        pace: keeps a run with a budget within its deadline.
        plan: what the budget chose.
        base_run: whose weights are the start.
        resumed_at: step that a resumed run continues from.
    """

    trainer: Trainer
    folder: RunFolder
    baselines: Baselines | None
    cost: Cost
    pace: Pace | None = None
    plan: Plan | None = None
    base_run: Run | None = None
    resumed_at: int | None = None

    def reports(self, on_signal: Callable[[int], object] = lambda _: None) -> Iterator[StepReport]:
        """Run all steps and yield a report after each.

        After a signal, of which `on_signal` gets the number, the step ends and the run is saved.

        Raises:
            Stopped: a signal has ended the run, on this rank or another, or came with the last
                step.
        """
        with deferred_signals(on_signal) as caught:
            yield from self.trainer.steps(self.pace, lambda: bool(caught))
        if caught:
            raise Stopped(caught[0], is_saved=True)
        if self.trainer.stopped_by == "signal":  # that of another rank, whose number is not known
            raise Stopped(signal.SIGTERM, is_saved=True)

    def late_note(self) -> str | None:
        """Return a sentence if a budgeted command has taken longer than was announced."""
        return None if self.pace is None else self.pace.deadline.late_note()
