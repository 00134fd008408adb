"""From a request to a session, the straight path to the first step, and from there to the last.

settings -> text -> plan -> baselines -> trainer -> run folder -> steps. Each part is a function
that returns values.
"""

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.distributed import (
    RankGroup,
    destroy_process_group,
    init_process_group,
    is_lost_rank_error,
)
from chargpt.errors import OperationError, RunError, Stopped, TextError
from chargpt.files import exists
from chargpt.inference.evaluation import Baselines
from chargpt.ranks import world_size
from chargpt.store.folder import Existing, RunFolder
from chargpt.store.layout import has_checkpoint
from chargpt.store.run import Run, load_run
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus
from chargpt.text.describe import log_warnings
from chargpt.text.prepare import find_text
from chargpt.text.source import STDIN
from chargpt.training.budget import Cost, expected_cost, plan_run, with_measured_threads
from chargpt.training.deadline import Pace
from chargpt.training.interrupts import deferred_signals
from chargpt.training.request import Request, StartMode
from chargpt.training.trainer import StepReport, Trainer

EXISTING: dict[StartMode, Existing] = {
    StartMode.NEW: "reject",
    StartMode.NEW_OR_RESUME: "restart",
    StartMode.REPLACE: "rename",
}


@dataclass
class Session:
    """A run that is ready to train: one invocation of training, whoever drives it.

    Attributes:
        trainer: of the run.
        folder: locked until the session ends.
        baselines: of the text; None on other ranks than 0.
        cost: expected of the remaining steps.
        pace: keeps a run with a budget within its deadline.
        base_run: whose weights are the start.
        resumed_at: step that a resumed run continues from.
    """

    trainer: Trainer
    folder: RunFolder
    baselines: Baselines | None
    cost: Cost
    pace: Pace | None = None
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


@contextmanager
def open_session(request: Request, on_progress: TextProgress | None = None) -> Iterator[Session]:
    """Start or resume a run as requested; in the block, its folder is locked.

    `on_progress` is called with the progress of preparing the text.

    Raises:
        FinishedError: the run to resume has no steps left.
        OperationError: another rank has failed.
        ChargptError: the text, a setting or the folder is unusable.
    """
    start, resumes = new_run, request.start is StartMode.RESUME
    if request.start is StartMode.NEW_OR_RESUME:
        assert request.out is not None
        resumes = has_checkpoint(request.out)
    if resumes:
        from chargpt.training.resume import resumed_run  # a new run does not need it

        start = resumed_run
    try:
        with start(request, on_progress) as session:
            yield session
        session.trainer.learner.unwrap_ddp()
    except RuntimeError as error:
        if not is_lost_rank_error(error):
            raise
        cause = str(error).splitlines()[0].split("] ")[-1].split(". ")[0]
        raise OperationError(
            f"another rank has failed ({cause:.100}); continue from the last checkpoint with "
            "--resume, with any number of processes"
        ) from None
    destroy_process_group()


@contextmanager
def new_run(request: Request, on_progress: TextProgress | None) -> Iterator[Session]:
    """Prepare the text, plan the run for a budget, create it, by default under runs/."""
    config, _ = request.resolved
    deadline, fixed_keys = request.deadline()
    existing = EXISTING[request.start]
    if config.text.path == STDIN and request.text is None and world_size() > 1:
        raise TextError("several processes cannot share standard input; name a file")
    group = init_process_group(choose_device(config.device)[0])
    if request.out is not None and group.is_main:
        RunFolder(request.out).require_unused(existing)
    base_run = None
    if config.train.from_run is not None:
        from chargpt.training import finetune  # most runs do not need it

        base_run = load_run(Path(config.train.from_run), device="cpu")
        config = finetune.config_from_base_run(base_run, config, fixed_keys)
    config = with_measured_threads(config)
    source = find_text(config.text, request.text)
    name = f"{slug(source.name)}-{config.model.kind}"
    with new_folder(request.out, name, group) as folder:
        corpus = folder.prepare_text(source, config.text, on_progress)
        log_warnings(corpus)
        if base_run is not None:
            config = finetune.config_for_text(base_run, config, corpus, fixed_keys)
        pace = None
        if deadline is not None:
            config, corpus, pace = plan_run(config, corpus, deadline, fixed_keys)
        baselines = Baselines(corpus) if group.is_main else None
        yield start_run(
            folder,
            config,
            corpus,
            baselines,
            pace=pace,
            base_run=base_run,
            group=group,
            existing=existing,
        )


def start_run(
    folder: RunFolder,
    config: Config,
    corpus: Corpus,
    baselines: Baselines | None,
    *,
    pace: Pace | None = None,
    base_run: Run | None = None,
    group: RankGroup = RankGroup(),
    existing: Existing = "reject",
) -> Session:
    """Return the session of a new run in a locked folder, which is created here.

    Args:
        folder: of the run.
        config: of the run; with a pace, the config of its plan is used instead.
        corpus: the text.
        baselines: of the text; None on other ranks than 0.
        pace: of a run with a budget.
        base_run: whose weights are the start.
        group: the ranks that train together.
        existing: what to do about a run in the folder.

    Raises:
        ChargptError: a setting does not fit the text or the machine; the folder is unusable.
    """
    seconds = None
    if pace is not None:
        config, seconds = pace.fit_plan()
    ngram = None if baselines is None else baselines.ngram
    trainer = Trainer(config, corpus, folder=folder, group=group, ngram=ngram, base_run=base_run)
    cost = expected_cost(trainer, seconds)
    if group.is_main:
        # the last ones, the best one and an unfinished one
        folder.require_room(trainer.config.train.keep_last + 2, trainer.checkpoint_bytes())
        folder.create(trainer.config, corpus.tokenizer, corpus.folder, existing=existing)
    return Session(trainer, folder, baselines, cost, pace, base_run)


def slug(name: str) -> str:
    """Return a text's name as part of a folder name: `novel.txt` gives `novel`."""
    return re.sub(r"[^\w.-]+", "-", Path(name).stem).strip("-.") or "text"


@contextmanager
def new_folder(out: Path | None, name: str, group: RankGroup) -> Iterator[RunFolder]:
    """Lock the folder of a new run: `out`, by default a new one, runs/NAME.

    Other ranks than 0 lock and write nothing.
    """
    if not group.is_main:
        yield RunFolder(out or Path("runs"))
        return
    with output_folder(out, name) as path, RunFolder(path).locked(is_new=True) as folder:
        yield folder


@contextmanager
def output_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Return OUT, or else create runs/NAME, or runs/NAME-N with the first free number.

    A folder that stays empty is deleted.

    Raises:
        RunError: it cannot be created.
    """
    if out is not None:
        yield out
        return
    had_parent = exists(Path("runs"))
    for number in itertools.count(1):
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                continue
            raise RunError(
                f"{path} cannot be created ({error.strerror}); name another folder with --out"
            ) from None
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()
            if not had_parent:
                path.parent.rmdir()
