"""What a caller of `train` may show; the base class shows nothing."""

from typing import TYPE_CHECKING

from chargpt.training.report import StepReport

if TYPE_CHECKING:
    from chargpt.store.run import Run
    from chargpt.training.budget import Budget
    from chargpt.training.planner import Plan
    from chargpt.training.session import Session


class View:
    """Receives the events of a training run, in this order."""

    def loading(self, stage: str, done: int, total: int) -> None:
        """Show the progress of preparing the text."""

    def planned(self, plan: "Plan", budget: "Budget") -> None:
        """Show what a time budget has chosen."""

    def started(self, session: "Session") -> None:
        """Show the run before its first step."""

    def stepped(self, report: StepReport) -> None:
        """Show a step."""

    def should_stop(self) -> bool:
        """Return whether to save the run and stop."""
        return False

    def ended(self, session: "Session") -> None:
        """Show that the last step is done, or that the run was interrupted.

        May raise to end the command here.
        """

    def finished(self, session: "Session", run: "Run") -> None:
        """Show the trained model."""
