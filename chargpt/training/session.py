"""The start of a training run: new, resumed, or in place of another."""

import itertools
import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from chargpt.config import Config
from chargpt.device import choose_device
from chargpt.distributed import destroy_process_group, init_process_group, is_lost_rank_error
from chargpt.errors import OperationError, RunError, TextError
from chargpt.files import exists
from chargpt.ranks import is_main_rank, world_size
from chargpt.store.folder import RunFolder
from chargpt.store.layout import REPLACED, has_checkpoint
from chargpt.store.run import Run, newest_run, open_run
from chargpt.text import TextProgress
from chargpt.text.corpus import MAX_MIXTURE_FRACTION, Corpus, load_cached, load_corpus
from chargpt.text.describe import (
    warn_of_length,
    warn_of_list,
    warn_of_repeats,
    warn_of_validation,
)
from chargpt.text.source import STDIN
from chargpt.threads import ThreadTuner, default_threads, measure_threads
from chargpt.training.budget import (
    REPLANNING,
    RESERVE,
    Budget,
    mixture_seconds,
    replanned_config,
)
from chargpt.training.cost import Cost, expected_cost
from chargpt.training.finetune import config_from_base_run, describe_base_run, load_base_run
from chargpt.training.mixing import MIN_CHARACTERS
from chargpt.training.planner import RECIPE, Plan, fitting_block_size, plan
from chargpt.training.request import Request, StartMode
from chargpt.training.resume import require_same_text, resume
from chargpt.training.trainer import Trainer


@dataclass
class Session:
    """One invocation of training: a run from its start or resume to the end of its steps."""

    trainer: Trainer
    folder: RunFolder  # locked until the session ends
    cost: Cost  # expected of the remaining steps
    budget: Budget | None = None
    plan: Plan | None = None  # what the budget chose
    notes: list[str] = field(default_factory=list)  # sentences for the user
    base_run: Run | None = None  # whose weights are the start
    resumed_at: int | None = None  # step

    def __post_init__(self) -> None:
        if error := self.trainer.learner.capture_error:
            self.notes.append(f"{error}: training works, but a small model trains more slowly")


@contextmanager
def open_session(request: Request, on_progress: TextProgress | None = None) -> Iterator[Session]:
    """Start a run as requested; unlock its folder and leave the process group at the end.

    `on_progress` is called with the progress of preparing the text.

    Raises:
        FinishedError: the run to resume has no steps left.
        OperationError: another rank has failed.
        ChargptError: the text, a setting or the folder is unusable.
    """
    try:
        session = start_session(request, on_progress)
        with session.folder.unlocked_on_error():
            yield session
        if session.trainer.group.is_main:
            session.folder.unlock()
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


def start_session(request: Request, on_progress: TextProgress | None) -> Session:
    """Create a run or resume one, as the request's start mode says."""
    if request.start is StartMode.RESUME:
        return resume_run(request.out or request.path, request.changes(), on_progress)
    config = request.run_config()
    if request.start is StartMode.NEW_OR_RESUME:
        assert request.out is not None
        if has_checkpoint(request.out):
            changes = request.fixed_values(config)
            session = resume_run(
                request.out, changes, on_progress, text=request.text, same_command=True
            )
            if request.budget is not None:
                session.notes.append(
                    "the budget is not used: it plans a new run, and a resumed one keeps its own "
                    f"plan of {session.trainer.config.train.max_steps:,} steps"
                )
            return session
    return create_run(
        config,
        request.out,
        on_progress,
        text=request.text,
        budget=request.time_budget(),
        start=request.start,
        fixed_keys=request.fixed_keys(),
    )


def create_run(
    config: Config,
    out: Path | None,
    on_progress: TextProgress | None = None,
    *,
    text: str | None = None,
    budget: Budget | None = None,
    start: StartMode = StartMode.NEW,
    fixed_keys: Collection[str] = (),
) -> Session:
    """Load the text, plan the run for the budget, and create its folder, by default under runs/.

    `text` is the text itself, instead of what the config names. `fixed_keys` are the dotted keys
    that the user has set. Errors are those of `open_session`.
    """
    force = start is StartMode.REPLACE
    allow_unsaved = start is StartMode.NEW_OR_RESUME  # a run that has saved nothing is replaced
    device, _ = choose_device(config.device)
    group = init_process_group(device)
    base_run = load_base_run(config)
    if base_run is not None:
        config = config_from_base_run(base_run, config, fixed_keys)
        if budget is not None:
            budget.fixed_keys |= {"model.kind"}  # so the planner chooses no size
    config = with_measured_threads(config, budget)
    if out is not None and group.is_main and not force:
        RunFolder.require_unused(out, allow_unsaved=allow_unsaved)
    require_one_reader(config, text)
    corpus = load_corpus(config.text, text=text, on_progress=on_progress)
    if base_run is not None and config.model.kind == "gpt" and "model.block_size" not in fixed_keys:
        block_size = fitting_block_size(config.model.block_size, corpus)
        config = config.with_values({"model.block_size": block_size})
    planned = None
    if budget is not None:
        planned, corpus = plan_run(config, corpus, budget)
        config = planned.config
    if not group.is_main:
        out = out or Path("runs")  # any path: other ranks write nothing
    with (
        output_folder(out, f"{slug(corpus.name)}-{config.model.kind}") as path,
        RunFolder(path).unlocked_on_error() as folder,
    ):
        folder.is_new = group.is_main and (out is None or not exists(path))
        trainer = Trainer(config, corpus, folder=folder, group=group, base_run=base_run)
        notes = [*corpus.notes, *(warn_of_length(corpus) or warn_of_validation(corpus))]
        notes += [*warn_of_list(corpus), *warn_of_repeats(corpus)]
        seconds = None
        if budget is not None and planned is not None:
            notes += planned.notes
            seconds = fit_budget(budget, trainer, planned, notes)
        if group.is_main:
            # the last ones, the best one and an unfinished one
            require_space(folder, trainer.config.train.keep_last + 2, trainer.checkpoint_bytes())
            folder.create(
                trainer.config, corpus.tokenizer, force=force, allow_unsaved=allow_unsaved
            )
            notes += folder.notes
        if base_run is not None:
            notes.append(describe_base_run(base_run, config, corpus.tokenizer))
        cost = expected_cost(trainer.config, trainer.learner, 0, seconds)
    return Session(trainer, folder, cost, budget, planned, notes, base_run)


def plan_run(config: Config, corpus: Corpus, budget: Budget) -> tuple[Plan, Corpus]:
    """Return the plan of a run for a budget, and the corpus with its mixture split."""
    config, corpus = with_mixture_split(config, corpus, budget)
    if len(corpus.split("mixture")):
        budget.evaluation_seconds += mixture_seconds(corpus, budget.slowdown)
    return plan(config, corpus, budget), corpus


def fit_budget(budget: Budget, trainer: Trainer, planned: Plan, notes: list[str]) -> float:
    """Reserve the measured time of scoring; return the expected time of the steps, in seconds.

    A budget that is too short for the fewest useful steps is extended, with a note, or an
    OperationError says how much it lacks.
    """
    config = trainer.config
    budget.measure_evaluation(trainer.model, trainer.corpus, config)
    step_seconds = config.tokens_per_step / planned.speed
    if config.train.ngram_target_weight:
        trainer.learner.ngram  # noqa: B018 - counted now, so that the remaining time is known
    n_steps = min(REPLANNING.min_steps, config.train.max_steps)
    n_validations = math.ceil(n_steps / config.train.evaluate_every) + 1
    validation_seconds = n_validations * budget.validation_seconds
    note = budget.extend_for(n_steps, step_seconds, validation_seconds)
    if note is not None:
        notes.append(note)
        seconds = budget.remaining - validation_seconds
        trainer.config = config = replanned_config(config, 0, step_seconds, seconds)
    planned_seconds = config.train.max_steps * step_seconds / RECIPE.initial_fraction
    return min(budget.remaining, planned_seconds + validation_seconds)


def with_mixture_split(config: Config, corpus: Corpus, budget: Budget) -> tuple[Config, Corpus]:
    """Return config and corpus with a mixture split, unless the user has fixed its length.

    There is none, with a note, if the text is too short for it, or if fitting the mixture would
    take too much of the time that is left.
    """
    key, note = "text.mixture_characters", ""
    if key not in budget.fixed_keys and config.model.kind == "gpt":
        seconds, remaining = mixture_seconds(corpus, budget.slowdown), budget.remaining
        if MAX_MIXTURE_FRACTION * corpus.n_characters < MIN_CHARACTERS:
            note = (
                f"without a mixture: {MAX_MIXTURE_FRACTION:.0%} of the text is too little to fit "
                "its weights to"
            )
        elif seconds > RESERVE.mixture_fraction * remaining:
            note = (
                f"without a mixture: fitting one would take about {seconds:.1f} s, over "
                f"{RESERVE.mixture_fraction:.0%} of the {max(0.0, remaining):.1f} s that are left; "
                "give a longer --budget"
            )
        else:
            config = config.with_values({key: RECIPE.mixture_characters})
    corpus = replace(corpus, mixture_characters=config.text.mixture_characters)
    n_mixture = len(corpus.split("mixture"))
    max_fraction = 2 * MAX_MIXTURE_FRACTION  # of a split that ends with a whole document
    if key not in budget.fixed_keys and n_mixture > max_fraction * len(corpus.tokens):
        note = (
            "without a mixture: its split, of whole documents, would be over "
            f"{max_fraction:.0%} of the text; -s {key}=20000 makes one all the same"
        )
        config = config.with_values({key: 0})
        corpus = replace(corpus, mixture_characters=0)
    return config, replace(corpus, notes=(*corpus.notes, note)) if note else corpus


def with_measured_threads(config: Config, budget: Budget | None = None) -> Config:
    """Return the config with the number of CPU threads that is fastest now, unless it is fixed."""
    max_threads = default_threads()
    device, _ = choose_device(config.device)
    threads = measure_threads(device) if config.threads is None else None
    if threads is None:
        return config
    if budget is not None:
        budget.thread_tuner = ThreadTuner(max_threads)
    return config.with_values({"threads": threads})


def resume_run(
    path: str | Path | None,
    changes: dict[str, object],
    on_progress: TextProgress | None = None,
    *,
    text: str | None = None,
    same_command: bool = False,
) -> Session:
    """Load the text and the latest checkpoint of a run, by default the newest run.

    `changes`, `same_command` and the errors are those of `resume`; `text` is the text itself, given
    again.
    """
    folder = open_run(path or newest_run())
    if folder.path.name == REPLACED:  # locking the run puts the old one back
        folder = RunFolder(folder.path.parent)
    with folder.unlocked_on_error():
        if is_main_rank():
            folder.lock()  # before it is read, so that no other process writes in between
        saved, config, notes = resume(folder, changes, same_command=same_command)
        group = init_process_group(choose_device(config.device)[0])
        key = saved.state.corpus_key
        is_a_file = text is None and config.text.path != STDIN
        if same_command and is_a_file:  # the command names the text
            corpus = load_corpus(config.text, key=key, on_progress=on_progress)
        elif same_command:
            require_one_reader(config, text)
            corpus = load_corpus(config.text, text=text, on_progress=on_progress)
            require_same_text(corpus, saved)
        else:
            corpus = load_cached(config.text, key, saved.state.text_name)
        base_run = load_base_run(config) if config.optim.l2_sp else None
        trainer = Trainer(
            config, corpus, folder=folder, saved=saved, group=group, base_run=base_run
        )
        if group.is_main:
            require_space(folder, 1, trainer.checkpoint_bytes())
            folder.repair_pointer(saved)
            folder.note_edits(saved.config)
            folder.write_config(trainer.config)
        notes = [*notes, *folder.notes, *corpus.notes]
        notes.append(f"resuming {folder.path} from step {trainer.state.step:,}")
        step, seconds = saved.state.step, None
        if step and config.device == saved.config.device:  # with validation, saving and samples
            seconds = (config.train.max_steps - step) * saved.state.seconds / step
        cost = expected_cost(trainer.config, trainer.learner, step, seconds)
    return Session(trainer, folder, cost, notes=notes, resumed_at=step)


def require_space(folder: RunFolder, n_checkpoints: int, n_bytes: int) -> None:
    """Raise a RunError unless the disk has room for `n_checkpoints` of `n_bytes` each."""
    n_bytes *= n_checkpoints
    try:
        folder.require_space(n_bytes)
    except OSError:
        what, remedy = "a checkpoint", "free some space"
        if n_checkpoints > 1:
            what = f"{n_checkpoints} checkpoints"
            remedy += ", lower train.keep_last, or name another place with --out"
        raise RunError(
            f"{folder.path} needs {n_bytes / 1e6:,.1f} MB of disk for {what}, and less is free; "
            f"{remedy}"
        ) from None


def require_one_reader(config: Config, text: str | None) -> None:
    """Raise a TextError if several processes would each read a part of standard input."""
    if world_size() > 1 and config.text.path == STDIN and text is None:
        raise TextError("several processes cannot share standard input; name a file")


def slug(name: str) -> str:
    """Return a text's name as part of a folder name: `novel.txt` gives `novel`."""
    return re.sub(r"[^\w.-]+", "-", Path(name).stem).strip("-.") or "text"


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
