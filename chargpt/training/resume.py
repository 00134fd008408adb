"""Resuming a run: its text, which settings may change, and how the schedule continues."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch, fnmatchcase
from functools import partial
from glob import has_magic
from pathlib import Path

import torch

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, DeviceError, FinishedError, RunError, TextError
from chargpt.files import exists, expand_user, quoted
from chargpt.inference.evaluation import Baselines
from chargpt.log import logger
from chargpt.store.checkpoint import Checkpoint, name_of
from chargpt.store.folder import RunFolder
from chargpt.store.mirror import on_all_ranks, shared_run
from chargpt.store.run import newest_run, open_run
from chargpt.text import TextProgress
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import META, prepare
from chargpt.text.source import STDIN, find_text
from chargpt.training.budget import expected_seconds, plan_more_steps
from chargpt.training.deadline import with_max_steps
from chargpt.training.learner import explained_memory_errors
from chargpt.training.optim import decay_start, lr_factor_at
from chargpt.training.start import Request, Session, StartMode, deadline_of
from chargpt.training.trainer import Trainer

# Fraction of the peak of the learning rates when a finished run goes on: RESTART times the square
# root of (steps to come / steps done), within limits.
RESTART, MIN_RESTART, MAX_RESTART = 0.5, 0.001, 0.5
NOTED_RISE = 1.5  # a rise of the learning rates up to this factor needs no restart or note
ENDED = 0.95  # fraction of the steps from which a decay that has begun counts as ended
RATES = ("optim.lr", "optim.matrix_lr")
MAY_CHANGE = (  # and names in _every; `text_of_run` compares the text of the same command
    *("train.max_steps", "train.patience", "train.keep_last", "train.max_rollbacks"),
    *("train.micro_batches", "train.teachers", "schedule.restarts"),
    *(*RATES, "device", "dtype", "threads", "track.tensorboard"),
)


@contextmanager
def resumed_run(
    request: Request, group: RankGroup, on_progress: TextProgress | None
) -> Iterator[Session]:
    """Continue a run, by default the newest, from its latest checkpoint."""
    same_command = request.start is StartMode.NEW_OR_RESUME
    changes = request.repeated_settings() if same_command else request.changes()
    found = open_run(request.out or request.path or newest_run()) if group.is_main else None
    path = group.broadcast_text("" if found is None else str(found.path))
    folder = found or RunFolder(Path(path))  # which other ranks may not see
    with folder.locked(), ExitStack() as stack:
        load = partial(load_latest, folder)
        saved: Checkpoint = load() if group.is_alone else on_all_ranks(group, load)
        read = partial(text_of_run, folder, saved, request, on_progress)
        corpus: Corpus = read() if group.is_alone else on_all_ranks(group, read)
        stack.enter_context(corpus.checked())
        config, pace = changed_config(saved, changes, same_command=same_command), None
        if request.budget is not None and not same_command:
            deadline = deadline_of(request.budget, request.started, changes).shared(group)
            pace = plan_more_steps(config, saved.state.step, corpus, deadline, group)
            config = pace.config
        config = continued_config(saved, config)
        if same_command and request.budget is not None:
            logger.warning(
                "the budget is not used: it plans a new run, and a resumed one keeps its own "
                f"plan of {config.train.max_steps:,} steps"
            )
        corpus.require_blocks(config.model.block_size)
        baselines = Baselines(corpus) if group.is_main else None
        session = continue_run(folder, saved, config, corpus, baselines, group)
        if pace is not None:
            session.pace, session.expected_seconds = pace, pace.deadline.remaining
        yield session


def continue_run(
    folder: RunFolder,
    saved: Checkpoint,
    config: Config,
    corpus: Corpus,
    baselines: Baselines | None,
    group: RankGroup = RankGroup(),
) -> Session:
    """Return the session that continues a run, whose folder is locked, from a checkpoint.

    Raises:
        RunError: the base run has changed, and the result depends on it; the folder is unusable.
        ChargptError: a setting does not fit the machine.
    """
    base_run = None
    if config.optim.l2_sp and config.train.from_run is not None:
        base_run = shared_run(group, config.train.from_run)
        known = saved.state.base_fingerprint  # None of runs of earlier versions
        if known not in (None, base_run.fingerprint().hex()):
            raise RunError(
                f"{config.train.from_run}, towards whose weights optim.l2_sp pulls, has changed "
                f"since {folder.path} was started; restore it, or start a new run with "
                f"`chargpt train TEXT --from {quoted(folder.path)}`"
            )
    with explained_memory_errors(config, corpus, group):
        trainer = Trainer(
            config,
            corpus,
            folder=folder,
            saved=saved,
            group=group,
            baselines=baselines,
            base_run=base_run,
        )
        step, has_changed = saved.state.step, config.device != saved.config.device
        if step and not group.all_reduce_any(has_changed):  # with validation, saving and samples
            seconds = (config.train.max_steps - step) * saved.state.seconds / step
        else:
            seconds = expected_seconds(trainer)
    if group.is_main:
        folder.require_room(1, trainer.checkpoint_bytes())
        if (edits := folder.describe_edits(saved.config)) is not None:
            logger.warning(edits)
        folder.write_config(trainer.config)
    logger.info(f"resuming {folder.path} from step {step:,}")
    return Session(trainer, folder, baselines, seconds, resumed_at=step)


def load_latest(folder: RunFolder) -> Checkpoint:
    """Return the checkpoint to resume from, without a best one if that is gone, which is logged.

    Raises:
        RunError: it has no optimizer state, or none is intact.
    """
    saved = folder.load("latest")
    if not saved.optimizer:
        raise RunError(
            f"{folder.path} was imported and has no optimizer state; start a new run from its "
            f"weights with `chargpt train TEXT --from {quoted(folder.path)}`"
        )
    best = saved.state.best_step
    if not best or exists(saved.folder.with_name(name_of(best))):
        return saved
    logger.warning(
        f"the best checkpoint, step {best:,}, is missing; the next validated one replaces it"
    )
    return replace(saved, state=replace(saved.state, best_step=None, best_nats_per_char=None))


def text_of_run(
    folder: RunFolder, saved: Checkpoint, request: Request, on_progress: TextProgress | None
) -> Corpus:
    """Return the text of a run to resume, which its folder holds.

    With `StartMode.NEW_OR_RESUME` the request names a text as well, which must be the same. Of a
    run that has none, since an earlier version of chargpt has trained it, it becomes the text.

    Raises:
        TextError: it is another text, or cannot be read.
        RunError: the run has no text, or a file of it is damaged.
    """
    settings, tokenizer = saved.config.text, saved.tokenizer
    run = quoted(folder.path)
    if request.start is StartMode.NEW_OR_RESUME:
        given = request.resolved[0].text
        keys = ("path", "val_path", "test_path")
        is_same_file = request.text is None and given.path != STDIN
        is_same_file &= all(getattr(given, key) == getattr(settings, key) for key in keys)
        if not (is_same_file and folder.has_text()):
            source, key = find_text(given, request.text), saved.state.corpus_key
            corpus = prepare(source, settings, folder.new_text, on_progress, like=key)
            if corpus.key != key:
                raise TextError(
                    f"{corpus.name} is not the text that the run was trained on; name that one, or "
                    f"start a new run with another --out (from its weights: --from {run})"
                )
            if not folder.has_text():
                folder.adopt_text()
    corpus = folder.read_text(settings, tokenizer, saved.state.corpus_key, waits=False)
    if _source_has_changed(corpus):
        logger.warning(
            f"{corpus.name} has changed since the run began: the run goes on with its own copy of "
            f"the text, and `chargpt train {quoted(settings.path)} --from {run}` trains "
            "on the new one from its weights"
        )
    return corpus


def _source_has_changed(corpus: Corpus) -> bool:
    """Return whether files of a run's text were changed, deleted or added since it was prepared.

    Added ones are looked for beside the others only: the settings of a run from someone else may
    name the whole disk. If none is left, as on another machine, nothing has changed.
    """
    settings, known = corpus.settings, {file.path for file in corpus.files}
    left = {path for path in known if os.path.isfile(path)}
    if not left or corpus.folder is None:
        return False
    if left != known or any(file.has_changed() for file in corpus.files):
        return True
    patterns = set[str]()  # of the names of added files
    for path in filter(None, (settings.path, settings.val_path, settings.test_path)):
        if has_magic(path) and not exists(expand_user(path)):
            patterns.add(Path(path).name)
        elif not any(f"/{file}".endswith(f"/{expand_user(path)}") for file in known):  # a folder
            patterns |= {f"*.{suffix.lstrip('*.')}" for suffix in settings.suffixes}
    prepared = (corpus.folder / META).stat().st_mtime
    for folder in {os.path.dirname(path) for path in known} if patterns else ():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if (
                    not (entry.path in known or entry.name.startswith("."))
                    and any(fnmatch(entry.name, each) for each in patterns)
                    and not any(fnmatchcase(entry.name, each) for each in settings.exclude)
                    and entry.is_file()
                    and entry.stat().st_mtime > prepared
                ):
                    return True
    return False


def changed_config(
    saved: Checkpoint, changes: Mapping[str, object], *, same_command: bool = False
) -> Config:
    """Return the config of a run with changed settings, and what this machine has.

    Args:
        saved: the checkpoint to continue from.
        changes: settings by dotted keys; values that the run has already are ignored.
        same_command: whether they are the settings that started the run, given again. Those that
            the run itself has changed since, such as its device or the rates after a rollback, then
            stay as they are, and the caller compares the text.

    Raises:
        ConfigError: a change would make it another run.
    """
    changes = {
        key: value
        for key, value in changes.items()
        if saved.config.with_values({key: value}) != saved.config
        and not (same_command and (value == "auto" or (key in RATES and saved.state.rollbacks)))
    }
    paths = ("text.path", "text.val_path", "text.test_path")
    allowed = {*MAY_CHANGE, *paths} if same_command else MAY_CHANGE
    for key in changes:
        if key not in allowed and not key.endswith("_every"):
            raise ConfigError(
                f"{key} cannot change when a run is resumed; drop it, or start a new run with --out"
            )
    # a device that the run once had to leave is no mistake of the same command
    asked = {} if same_command else changes
    return _on_this_machine(saved.config.with_values(changes), saved, asked)


def continued_config(saved: Checkpoint, config: Config) -> Config:
    """Return the changed config with its schedule; log what the changes mean for the run.

    Raises:
        FinishedError: all steps are done, or the run stopped early.
    """
    state, run = saved.state, saved.folder.parent.parent
    if state.stopped_early and config.train.patience == saved.config.train.patience:
        raise FinishedError(
            f"{run} stopped early at step {state.step}, as its validation loss no longer fell; let "
            "it go on with -s train.patience=null"
        )
    if state.step >= config.train.max_steps:
        raise FinishedError(
            f"{run} has done all its {state.step} steps; give it more with -s train.max_steps=N, "
            f"or time with `chargpt train --resume {quoted(run)} --budget 5m`"
        )
    if config.optim != saved.config.optim:
        logger.warning(
            f"the learning rates change at step {state.step:,}: the run can no longer be "
            "reproduced from its config alone"
        )
    return continue_schedule(saved.config, config, state.step)


def _on_this_machine(config: Config, saved: Checkpoint, changes: Mapping[str, object]) -> Config:
    """Return the config with a device and threads that this machine has."""
    if config.device != "cpu" and "device" not in changes:
        try:
            choose_device(config.device)
        except DeviceError:
            device, reason = choose_device("auto")
            now = f"{device.type} ({reason})"
            logger.warning(f"{config.device} is not available, so the run continues on {now}")
            is_same = config.device.startswith(device.type) or "dtype" in changes
            dtype = {} if is_same else {"dtype": "auto"}
            config = config.with_values({"device": device.type, **dtype})
    if (config.threads or 0) > (os.cpu_count() or 1):
        config = config.with_values({"threads": None})  # saved on a machine with more cores
    threads = config.threads or torch.get_num_threads()
    if saved.state.threads != threads and config.device == "cpu":
        logger.warning(
            f"{saved.state.threads} threads before, {threads} now: results may differ in the last "
            f"digits (-s threads={saved.state.threads} for the same digits)"
        )
    return config


def continue_schedule(before: Config, after: Config, step: int) -> Config:
    """Return the config with a schedule for its new number of steps.

    A linear decay that has begun continues from its present rate to the new end. At or near the end
    of the run the rates warm up to a fraction of their peak and decay again (benchmarks/LOG.md).
    Otherwise the rates follow the schedule for the new number of steps. If they rise, that is
    logged.

    Args:
        before: of the run so far.
        after: of the resumed run; returned as it is if its number of steps stays the same or its
            schedule is changed as well.
        step: number of steps done.
    """
    old, new, schedule = before.train.max_steps, after.train.max_steps, after.schedule
    if new <= step or new == old or schedule != before.schedule:
        return after
    if step <= max(before.train.students, default=-1):  # the last one has not started
        return with_max_steps(after.with_values({"train.max_steps": old}), step, new)
    decay_begins = decay_start(schedule, old) if schedule.kind == "wsd" else old
    if schedule.restarts:
        decay_begins = schedule.restarts[-1][0]
    is_decaying = decay_begins < step < old
    is_over = step >= old or (is_decaying and step >= ENDED * old and new > old)
    last = lr_factor_at(min(step, old - 1), schedule, old)
    following = lr_factor_at(step, schedule, new)
    rises = following > NOTED_RISE * last
    if is_decaying:  # the rates of the steps done stay as they are
        points = (*schedule.decay_points, (step - 1, old))
        after = after.with_values({"schedule.decay_points": points})
    if not rises or (is_decaying and not is_over):
        return after
    peak = following
    if is_over:
        peak = max(MIN_RESTART, min(MAX_RESTART, RESTART * math.sqrt((new - step) / step)))
        restarts = (*schedule.restarts, (step, round(peak, 3)))
        after = after.with_values({"schedule.restarts": restarts})
    logger.warning(
        f"the learning rates rise from {last:.0%} to {peak:.0%} of their peak: the loss may rise "
        "a little before it falls"
    )
    return after
