"""From what a user asks for to a session: the straight path to the first step, and to the last.

request -> settings -> text -> plan -> baselines -> trainer -> run folder -> steps.
"""

import itertools
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from chargpt.config import Config
from chargpt.distributed import (
    RankGroup,
    destroy_process_group,
    init_process_group,
    is_lost_rank_error,
    is_main_rank,
)
from chargpt.errors import (
    ConfigError,
    DeviceError,
    OperationError,
    RunError,
    Stopped,
    UnsavedError,
    reason_of,
)
from chargpt.files import exists, quoted
from chargpt.inference.evaluation import Baselines
from chargpt.log import logger
from chargpt.store.folder import RunFolder
from chargpt.store.layout import has_checkpoint, is_abandoned
from chargpt.store.mirror import on_all_ranks, shared_run
from chargpt.store.run import Run
from chargpt.text import TextProgress
from chargpt.text.catalog import resolve_settings
from chargpt.text.corpus import Corpus
from chargpt.text.describe import quick_warnings
from chargpt.text.prepare import prepare
from chargpt.text.source import STDIN, Source, find_text
from chargpt.training.budget import expected_seconds, plan_run, with_measured_threads
from chargpt.training.deadline import PLANNED_KEYS, Deadline, Pace, parse_duration
from chargpt.training.learner import explained_memory_errors
from chargpt.training.trainer import StepReport, Trainer

DEFAULT_BUDGET = "150s"
MAX_PATH = 4096  # characters; longer is a text in place of its path
OTHER_RUNS = {"train.from_run", "train.teachers", "train.teacher_weight"}
PLANNED_SECTIONS = {"model", "train", "optim", "schedule"}  # with one set, no default budget


class StartMode(Enum):
    """What to do about a run that exists in the output folder."""

    NEW = "new"  # reject it if it has results
    RESUME = "resume"
    NEW_OR_RESUME = "new or resume"  # resume it if it has a checkpoint
    REPLACE = "replace"  # rename it


@dataclass(frozen=True)
class Request:
    """What a user asks `train` for; the fields are like the arguments of `chargpt.train`.

    `started` is when the command began, by `time.perf_counter`.
    """

    path: str | None = None
    text: str | None = None
    config: str | Config | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    budget: str | float | None = None
    out: Path | None = None
    start: StartMode = StartMode.NEW
    started: float | None = None

    @cached_property
    def resolved(self) -> tuple[Config, frozenset[str]]:
        """The config of a new run, and the dotted keys of the settings that are fixed.

        Raises:
            ConfigError: a setting is wrong, or there are two texts.
        """
        if self.text is not None and self.path is not None:
            raise ConfigError("give the path of a text or the text itself, not both")
        if self.path is not None and (len(self.path) > MAX_PATH or "\n" in self.path):
            raise ConfigError("the path of the text is a text itself; give it as text=")
        path = self.path if self.text is None else STDIN
        return resolve_settings(path, self.config, self.settings)

    @property
    def config_name(self) -> str | None:
        """The name of the config, to name runs and models by, if it has one."""
        name = slug(self.config) if isinstance(self.config, str) else None
        return None if name == "config" else name  # that of a run, which says nothing

    @property
    def resumes(self) -> bool:
        """Whether the run exists already and is to be continued."""
        if self.start is StartMode.NEW_OR_RESUME:
            return self.out is not None and has_checkpoint(self.out)
        return self.start is StartMode.RESUME

    def changes(self) -> Mapping[str, object]:
        """Return the settings of a resumed run that are to change, by dotted keys.

        Raises:
            ConfigError: an argument applies only to a new run.
        """
        given = {"the config": self.config, "the text": self.text}
        if self.out is not None:  # else the path is that of the run
            given["the path"] = self.path
        if names := " and ".join(name for name, value in given.items() if value is not None):
            raise ConfigError(
                f"a resumed run keeps its text and settings; drop {names} (--resume with a text "
                "and --out begins a run where there is none, and takes them)"
            )
        return self.settings

    def repeated_settings(self) -> dict[str, object]:
        """Return the settings that this request fixes for the whole run, by dotted keys.

        The command that started a run, given again, fixes the same ones.
        """
        config, fixed_keys = self.resolved
        keys = fixed_keys | {"text.path"}  # none given: the built-in text
        if self.budget is not None:  # planning and re-planning change them
            keys = keys.difference(PLANNED_KEYS)
        values = config.flatten()
        return {key: values[key] for key in sorted(keys)}

    def deadline(self) -> tuple[Deadline | None, frozenset[str]]:
        """Return the deadline of the budget asked for, or of the default one if nothing else was.

        The keys are those of the settings that planning must not change.

        Raises:
            ConfigError: as for `deadline_of`.
        """
        duration, (_, fixed_keys) = self.budget, self.resolved
        sections = {key.partition(".")[0] for key in fixed_keys - OTHER_RUNS}
        is_default = self.config is None and sections.isdisjoint(PLANNED_SECTIONS)
        if duration is None and is_default:
            duration = DEFAULT_BUDGET
        if duration is None:
            return None, fixed_keys
        if self.settings.get("train.students"):
            raise ConfigError(
                "a budget plans train.students itself; drop that setting, or give train.max_steps "
                "in place of the budget"
            )
        # of a config: the budget takes precedence
        fixed_keys -= {"train.max_steps", "train.students"}.difference(self.settings)
        return deadline_of(duration, self.started, fixed_keys), fixed_keys


def deadline_of(
    budget: str | float, started: float | None, fixed_keys: Collection[str]
) -> Deadline:
    """Return the deadline of a budget that began at `started`.

    Raises:
        ConfigError: it is not a duration, or `train.max_steps` is fixed too.
    """
    if "train.max_steps" in fixed_keys:
        raise ConfigError(
            "a budget and train.max_steps both say how long to train; drop one of them"
        )
    return Deadline.from_budget(parse_duration(budget), started)


@dataclass
class Session:
    """A run that is ready to train: one invocation of training, whoever drives it."""

    trainer: Trainer
    folder: RunFolder  # locked until the session ends
    baselines: Baselines | None  # of the text; None on other ranks than 0
    expected_seconds: float  # of the remaining steps, validation included
    pace: Pace | None = None  # keeps a run with a budget within its deadline
    base_run: Run | None = None  # whose weights are the start of a new run
    resumed_at: int | None = None  # step that a resumed run continues from

    def reports(
        self,
        on_signal: Callable[[int], object] = lambda _: None,
        on_report: Callable[[StepReport], object] = lambda _: None,
        wait_for_space: Callable[[str], bool] = lambda _: False,
    ) -> Iterator[StepReport]:
        """Run all steps and yield a report after each.

        After a signal, of which `on_signal` gets the number, the step ends and the run is saved. It
        is also saved, and the last one, after a report for which `on_report` returns True. If the
        last save fails, `wait_for_space` is called with the cause, until one succeeds. Once it
        returns false, a copy of the run goes to the system's temporary folder.

        Raises:
            DeviceError: there is not enough memory.
            Stopped: a signal has ended the run, on this rank or another, or came with the last
                step.
            UnsavedError: the last checkpoint or the metrics are not in the run's folder.
            RunError: the run's folder was renamed; training has stopped, and it is saved there.
        """
        trainer, folder = self.trainer, self.folder

        def saved_run() -> Path | None:
            has_saved = trainer.writer.saved_step != self.resumed_at
            return folder.path if has_saved else None

        try:
            with (
                explained_memory_errors(trainer.config, trainer.corpus, trainer.group, saved_run),
                deferred_signals(on_signal) as caught,
            ):
                yield from trainer.steps(
                    self.pace, lambda report: on_report(report) is True or bool(caught)
                )
        except UnsavedError:
            with suppress(KeyboardInterrupt, Stopped):  # which end the waiting
                while folder.moved_from is None and (failure := trainer.save_failure) is not None:
                    asked = time.perf_counter()
                    is_retry = wait_for_space(failure)
                    trainer.started += time.perf_counter() - asked  # this is no training
                    if not is_retry:
                        break
                    trainer.save()
            if (failure := trainer.save_failure) is not None:
                self._save_copy(failure)
                raise
        is_early = trainer.stopped_by == "signal"  # or by `on_report`
        is_caught = is_early and trainer.group.all_reduce_any(bool(caught))
        if is_caught or caught:  # maybe on another rank only
            raise Stopped(caught[0] if caught else signal.SIGTERM, is_saved=True)
        if folder.moved_from is not None:
            message = f"{folder.moved_from} was renamed to {folder.path} during training"
            if not trainer.finished:
                raise RunError(
                    f"{message}, which stopped at step {trainer.state.step:,} and is saved there; "
                    f"resume with\n  chargpt train --resume {quoted(folder.path)}"
                )
            logger.warning(f"{message}; it is saved there")

    def _save_copy(self, failure: str) -> None:
        """Raise an UnsavedError that names a copy of the run, unless that cannot be written."""
        trainer = self.trainer
        try:
            parent = Path(tempfile.mkdtemp(prefix="chargpt-"))
        except OSError:
            return
        trainer.folder = trainer.writer.folder = copy = RunFolder(parent / self.folder.path.name)
        copy.checkpoints.mkdir(parents=True)
        trainer.writer.newest = None  # so that it is saved once more
        if trainer.save() is None:
            shutil.rmtree(parent, ignore_errors=True)
            return
        self.folder.copy_to(copy, trainer.state.best_step)
        use = "sample" if trainer.finished else "train --resume"
        raise UnsavedError(
            f"{failure}; it is saved in {copy.path}, a copy of the run: move it to a disk with "
            f"space, or use it there, as with\n  chargpt {use} {quoted(copy.path)}"
        ) from None

    def late_note(self) -> str | None:
        """Return, on rank 0, a sentence if a budget's command took longer than was announced."""
        if self.pace is None or not (group := self.trainer.group).is_main:
            return None
        deadline = self.pace.deadline
        if not group.is_alone:  # its clock stands still between the steps
            deadline = replace(deadline, clock=time.perf_counter)
        return deadline.late_note()


@contextmanager
def deferred_signals(on_signal: Callable[[int], object]) -> Iterator[list[int]]:
    """Record the signals that would end the work, in the list that the block gets.

    These are Ctrl-C, unless the program handles it otherwise, and those whose handler has a list
    `caught` of signals so far, as that of the command line has. If the second one is Ctrl-C, the
    replaced handler ends the step at once, and nothing is saved; a second TERM or HUP is only
    recorded. Outside the main thread none is recorded.

    Args:
        on_signal: called with the number of each signal that is recorded.
    """
    caught: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        if caught and number in (signal.SIGINT, getattr(signal, "SIGBREAK", None)):
            previous[number](number, frame)
        caught.append(number)
        on_signal(number)

    try:
        with suppress(ValueError):  # outside the main thread
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if handler is signal.default_int_handler or hasattr(handler, "caught"):
                    # those before, whose exception Python has dropped
                    caught[:] = getattr(handler, "caught", caught)
                    previous[number] = signal.signal(number, handle)
        yield caught
    finally:
        for replaced, handler in previous.items():
            signal.signal(replaced, handler)


@contextmanager
def open_session(request: Request, on_progress: TextProgress | None = None) -> Iterator[Session]:
    """Start or resume a run as requested; in the block, its folder is locked.

    `on_progress` is called with the progress of preparing the text.

    Raises:
        FinishedError: the run to resume has no steps left.
        DeviceError: two ranks have the same GPU, or the program has a process group.
        OperationError: another rank has failed.
        ChargptError: the text, a setting or the folder is unusable, or the text of a resumed run
            is damaged.
    """
    start = new_run
    try:
        group = init_process_group()
        if group.broadcast(request.resumes):
            from chargpt.training.resume import resumed_run  # a new run does not need it

            start = resumed_run
        with start(request, group, on_progress) as session:
            yield session
        session.trainer.learner.unwrap_ddp()
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):  # of NCCL
            raise DeviceError(
                "two processes have the same GPU; start no more than there are GPUs, and give "
                "device no number"
            ) from None
        if not is_lost_rank_error(error):
            raise
        cause = str(error).splitlines()[0].split("] ")[-1].split(". ")[0]
        raise OperationError(
            f"another rank has failed ({cause:.100}); start the command again, with "
            "--resume if the run has a checkpoint, and any number of processes"
        ) from None
    destroy_process_group()


@contextmanager
def new_run(
    request: Request, group: RankGroup, on_progress: TextProgress | None
) -> Iterator[Session]:
    """Prepare the text, plan the run for a budget, create it, by default under runs/."""
    config, _ = request.resolved
    deadline, fixed_keys = request.deadline()
    replaces = request.start is StartMode.REPLACE
    if request.out is not None and group.is_main:
        RunFolder(request.out).require_unused(replace=replaces)
    base_run = None
    if config.train.from_run is not None:
        from chargpt.training import finetune  # most runs do not need it

        base_run = shared_run(group, config.train.from_run)
        config = finetune.config_from_base_run(base_run, config, fixed_keys)
    config = with_measured_threads(config)
    # rank 0 alone reads the text
    source = find_text(config.text, request.text) if group.is_main else Source("text")
    name = f"{slug(source.name)}-{request.config_name or config.model.kind}"
    with output_folder(request.out, name) as path, RunFolder(path).locked(is_new=True) as folder:
        read = partial(prepare, source, config.text, folder.new_text, on_progress)
        corpus: Corpus = read() if group.is_alone else on_all_ranks(group, read)
        for warning in quick_warnings(corpus) if group.is_main else ():
            logger.warning(warning)
        if base_run is not None:
            config = finetune.config_for_text(base_run, config, corpus, fixed_keys)
        pace = None
        if deadline is not None:
            shared = deadline.shared(group)
            config, corpus, pace = plan_run(config, corpus, shared, fixed_keys, group)
        corpus.require_blocks(config.model.block_size)
        baselines = Baselines(corpus) if group.is_main else None
        yield start_run(folder, config, corpus, baselines, pace, base_run, group, replaces=replaces)


def start_run(
    folder: RunFolder,
    config: Config,
    corpus: Corpus,
    baselines: Baselines | None,
    pace: Pace | None = None,
    base_run: Run | None = None,
    group: RankGroup = RankGroup(),
    *,
    replaces: bool = False,
) -> Session:
    """Return the session of a new run in a locked folder, which is created here.

    With a pace, the config of its plan is used instead of `config`. With `replaces`, a run in the
    folder may have results; it is renamed.

    Raises:
        ChargptError: a setting does not fit the text or the machine; the folder is unusable.
    """
    seconds = None
    if pace is not None:
        config, seconds = pace.fit_plan()
    config = config.with_values({"text.documents": corpus.settings.documents})
    with explained_memory_errors(config, corpus, group):
        trainer = Trainer(
            config, corpus, folder=folder, group=group, baselines=baselines, base_run=base_run
        )
        if seconds is None:
            seconds = expected_seconds(trainer)
    if group.is_main:
        # the last ones, the best one and an unfinished one
        folder.require_room(trainer.config.train.keep_last + 2, trainer.checkpoint_bytes())
        folder.create(trainer.config, corpus.tokenizer, corpus.folder, replace=replaces)
    return Session(trainer, folder, baselines, seconds, pace, base_run)


def slug(name: str) -> str:
    """Return a text's name as part of a folder name: `novel.txt` gives `novel`."""
    # without dots: Windows takes con.2-gpt for a device
    return re.sub(r"[^\w-]+", "-", Path(name).stem).strip("-") or "text"


@contextmanager
def output_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Return OUT, or else create runs/NAME, or runs/NAME-N with the first free number.

    The folder of a start that was killed is free: the new one goes on with its text. A folder that
    stays empty is deleted. Other ranks than 0 create nothing.

    Raises:
        RunError: it cannot be created.
    """
    if out is not None or not is_main_rank():
        yield out or Path("runs")
        return
    had_parent = exists(Path("runs"))
    for number in itertools.count(1):
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except OSError as error:
            if isinstance(error, FileExistsError) and is_abandoned(path):
                break
            if not (isinstance(error, FileExistsError) and exists(path)):
                raise RunError(
                    f"{path} cannot be created ({reason_of(error)}); name another folder with --out"
                ) from None
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()
            if not had_parent:
                path.parent.rmdir()
