"""`chargpt train`: a text in, a trained model out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chargpt.cli import console, options
from chargpt.cli.loop import DEFAULT_BUDGET, Clock, train_to_end
from chargpt.cli.signals import catch_signals
from chargpt.cli.summary import show_plan, show_result
from chargpt.errors import ConfigError, FinishedError, RunError, WorkError

if TYPE_CHECKING:
    from chargpt.store.folder import RunFolder
    from chargpt.training.trainer import Trainer


def train(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file, folder, glob, name from `chargpt data list`, or - for standard input; "
            "with --resume, a run. Without it: an embedded text, or the newest run.",
            show_default=False,
        ),
    ] = None,
    config: options.ConfigName = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="The run's folder.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Take so long, as in 30s, 3m or 1h: sizes and steps are chosen to fit. "
            f"Without -c and -s: {DEFAULT_BUDGET}.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a run; with a text and --out, begin it if there is none yet.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    set_: options.Set = None,
) -> None:
    """Train a model on a text. Without a text: on one that comes with Python.

    Examples: `chargpt train`, `chargpt train novel.txt --budget 10m`,
    `chargpt train novel.txt -c bigram -s train.max_steps=500`, `chargpt train --resume`.
    """
    from chargpt.store.folder import has_checkpoint

    again = resume and text is not None and out is not None
    clock = None
    if resume and force:
        raise ConfigError("--resume goes on with a run, and --force replaces it; give one of them")
    with catch_signals() as signals, among_processes():
        if resume and not again:
            require_nothing_new(config, budget, encoding)
            wanted = options.parsed(set_, device)
            trainer, folder = resume_run(out or text, wanted)
        else:
            settings = options.build_config(text, config, set_, device=device, encoding=encoding)
            if again and out is not None and has_checkpoint(out):
                wanted = options.given_values(settings, config, set_, text, device, encoding)
                try:
                    trainer, folder = resume_run(out, wanted, again=True)
                except FinishedError as error:
                    console.say(str(error))
                    return
            else:
                clock = Clock.of(budget, config, set_)
                trainer, folder = start_run(
                    settings, out, force=force, allow_unsaved=again, clock=clock
                )
        try:
            show_plan(trainer, clock)
            levels = train_to_end(trainer, folder, signals, clock)
            if trainer.group.is_main:
                show_result(trainer, folder, levels, clock)
        finally:
            folder.unlock()
        trainer.learner.leave_others()


@contextmanager
def among_processes() -> Iterator[None]:
    """Leave the processes that train together at the end; tell of one that has gone.

    Raises:
        WorkError: another one has gone.
    """
    from chargpt.device import destroy_process_group, is_lost_rank_error

    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank_error(error):
            raise
        cause = str(error).splitlines()[0].split("] ")[-1].split(". ")[0]
        raise WorkError(
            f"another of the processes has gone ({cause:.100}); go on from the last checkpoint "
            "with --resume, among as many processes as you like"
        ) from None
    destroy_process_group()


def require_nothing_new(config: str | None, budget: str | None, encoding: str | None) -> None:
    """Check that nothing was given that only a beginning run can heed.

    Raises:
        ConfigError: something was.
    """
    if config is not None or encoding is not None or budget is not None:
        raise ConfigError(
            "--resume takes its settings from the run; drop -c, --budget and --encoding, or give "
            "both a text and --out to begin the run where there is none"
        )


def start_run(
    settings: Any,
    out: Path | None,
    *,
    force: bool = False,
    allow_unsaved: bool = False,
    clock: Clock | None = None,
) -> "tuple[Trainer, RunFolder]":
    """Prepare the text, plan, make the run's folder, and return the trainer at step 0.

    Args:
        settings: of the run.
        out: its folder; by default a new one under runs/.
        force: whether a run that is there is replaced.
        allow_unsaved: replace a run that has not saved a checkpoint yet.
        clock: the time that it may take.

    Raises:
        ChargptError: the text, the settings or the folder will not do.
    """
    from chargpt.device import choose_device, init_process_group
    from chargpt.store.folder import RunFolder
    from chargpt.text.corpus import load_corpus
    from chargpt.training.trainer import Trainer

    group = init_process_group(choose_device(settings.device)[0])
    if out is not None and group.is_main and not force:
        RunFolder.require_free(out, allow_unsaved=allow_unsaved)
    corpus = load_corpus(settings.text, progress=options.PrepareProgress())
    if clock is not None:
        from chargpt.training.planner import plan

        settings, why = plan(settings, clock.given, corpus, clock.left)
        console.say(f"budget  {console.duration(clock.seconds)}: {why}")
    path = out or options.free_folder(f"{options.slug(corpus.name)}-{settings.model.kind}")
    folder = RunFolder(path)
    trainer = Trainer(settings, corpus, folder=folder, group=group)
    if clock is not None:
        clock.time_scoring(trainer)
    if group.is_main:
        require_room(trainer, path, trainer.config.train.keep_last + 2)  # the best; one unfinished
        folder.create(trainer.config, corpus.tokenizer, force=force, allow_unsaved=allow_unsaved)
    for note in corpus.notes:
        console.say(note)
    return trainer, folder


def resume_run(
    path: str | Path | None, wanted: dict[str, object], *, again: bool = False
) -> "tuple[Trainer, RunFolder]":
    """Return the trainer of a run, or of the newest one, where it stopped.

    Args:
        path: of the run.
        wanted: settings by their dotted keys.
        again: whether they are those that the run was begun with.

    Raises:
        FinishedError: the run is done.
        ChargptError: there is no run to go on with, or a change would make it another one.
    """
    from chargpt.device import choose_device, init_process_group
    from chargpt.store.run import newest_run, open_run
    from chargpt.text.corpus import load_corpus
    from chargpt.training.resume import resume
    from chargpt.training.trainer import Trainer

    folder = open_run(path or newest_run())
    if console.is_main():
        folder.lock()  # before it is read, lest another process write in between
    saved, settings, notes = resume(folder, wanted, again=again)
    group = init_process_group(choose_device(settings.device)[0])
    corpus = load_corpus(settings.text, key=saved.state.corpus, progress=options.PrepareProgress())
    trainer = Trainer(settings, corpus, folder=folder, saved=saved, group=group)
    if group.is_main:
        require_room(trainer, folder.path, 1)
        folder.write_config(trainer.config)
    for note in (*notes, *corpus.notes):
        console.say(note)
    console.say(f"going on with {folder.path} from step {trainer.progress.step:,}")
    return trainer, folder


def require_room(trainer: "Trainer", path: Path, checkpoints: int) -> None:
    """Check that the disk holds so many checkpoints more.

    Raises:
        RunError: it does not.
    """
    wanted = checkpoints * trainer.checkpoint_bytes()
    try:
        trainer.folder.require_space(wanted) if trainer.folder else None
    except OSError:
        raise RunError(
            f"{path} would need {console.size(wanted)} of disk for {checkpoints} checkpoints, and "
            "less is free; free some space, lower train.keep_last, or name another place with --out"
        ) from None
