"""`chargpt train`: a text in, a trained model out."""

import math
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chargpt.cli import console, options
from chargpt.cli.signals import Signals, Stopped, catch_signals
from chargpt.errors import ConfigError, RunError, WorkError

if TYPE_CHECKING:
    from chargpt.store.run import RunFolder
    from chargpt.text.corpus import Split
    from chargpt.training.trainer import Report, Trainer

DEFAULT_BUDGET = "150s"  # what a bare `chargpt train` takes
SPLITS: "tuple[Split, ...]" = ("train", "val")
# characters scored for the closing table: of those trained on, but so many at least and at most
CLOSING_SHARE, CLOSING_LEAST, CLOSING_MOST = 1 / 20, 20_000, 300_000
WAVERING = 0.02  # nats by which evaluations differ without any over-fitting


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    set_: options.Set = None,
) -> None:
    """Train a model on a text. Without a text: on one that comes with Python.

    Examples: `chargpt train`, `chargpt train novel.txt --budget 10m`,
    `chargpt train novel.txt -c bigram -s train.max_steps=500`, `chargpt train --resume`.
    """
    from chargpt.device import leave_world

    folder = None
    try:
        with catch_signals() as signals:
            if resume:
                if config is not None or force or encoding is not None or budget is not None:
                    raise ConfigError(
                        "--resume takes its settings from the run; drop -c, --budget, --force and "
                        "--encoding"
                    )
                clock = None
                trainer, folder = resume_run(out or text, set_ or [], device)
            else:
                settings = options.build_config(
                    text, config, set_, device=device, encoding=encoding
                )
                clock = Clock.of(budget, config, set_)
                trainer, folder = start_run(settings, out, force=force, clock=clock)
            show_plan(trainer, clock)
            levels = train_to_end(trainer, folder, signals, clock)
            if trainer.world.is_main:
                show_result(trainer, folder, levels)
    finally:
        if folder is not None:
            folder.unlock()
        leave_world()


@dataclass(frozen=True)
class Clock:
    """A time budget, from the start of the process, and what the user has fixed besides."""

    seconds: float
    given: frozenset[str]

    @classmethod
    def of(
        cls, written: str | None, config: str | None, changes: list[str] | None
    ) -> "Clock | None":
        """Return the budget that was written, or the default one where nothing else was.

        Raises:
            ConfigError: it is not a time, or several processes would have to agree on it.
        """
        from chargpt.device import world_size
        from chargpt.training.planner import seconds_of

        if written is None and config is None and not changes and world_size() == 1:
            written = DEFAULT_BUDGET
        if written is None:
            return None
        if world_size() > 1:
            raise ConfigError("--budget plans for one process; give train.max_steps instead")
        return cls(seconds_of(written), frozenset(options.given_keys(config, changes)))

    @property
    def left(self) -> float:
        """Seconds until the last training step has to be done."""
        closing = min(0.8 + 0.04 * self.seconds, 20.0)  # scoring, the table, leaving
        return self.seconds - closing - (time.perf_counter() - console.started)


def start_run(
    settings: Any, out: Path | None, *, force: bool = False, clock: Clock | None = None
) -> "tuple[Trainer, RunFolder]":
    """Prepare the text, plan, make the run's folder, and return the trainer at step 0.

    Raises:
        ChargptError: the text, the settings or the folder will not do.
    """
    from chargpt.device import choose_device, join_world
    from chargpt.store.run import RunFolder
    from chargpt.text.corpus import prepare
    from chargpt.training.trainer import Trainer

    world = join_world(choose_device(settings.device)[0])
    if out is not None and world.is_main and not force:
        RunFolder.check_free(out)
    corpus = prepare(settings.text, progress=options.PrepareProgress())
    if clock is not None:
        from chargpt.training.planner import plan

        settings, why = plan(settings, clock.given, corpus, clock.left)
        console.say(f"budget  {console.duration(clock.seconds)}: {why}")
    path = out or options.free_folder(f"{options.slug(corpus.name)}-{settings.model.kind}")
    folder = RunFolder(path)
    trainer = Trainer(settings, corpus, folder=folder, world=world)
    if world.is_main:
        require_room(trainer, path, trainer.config.train.keep_last + 2)  # the best; one unfinished
        folder.create(trainer.config, corpus.tokenizer, force=force)
    for note in corpus.notes:
        console.say(note)
    return trainer, folder


def resume_run(
    path: str | Path | None, changes: list[str], device: str | None
) -> "tuple[Trainer, RunFolder]":
    """Return the trainer of a run, or of the newest one, where it stopped.

    Raises:
        ChargptError: there is no run to go on with, or a change would make it another one.
    """
    from chargpt.config import parse_override
    from chargpt.device import choose_device, join_world
    from chargpt.store.run import newest_run, open_run
    from chargpt.text.corpus import prepare
    from chargpt.training.resume import resume
    from chargpt.training.trainer import Trainer

    folder = open_run(path or newest_run())
    overrides = dict(parse_override(written) for written in changes)
    if device is not None:
        overrides["device"] = device
    if console.is_main():
        folder.lock()  # before it is read, lest another process write in between
    saved, settings, notes = resume(folder, overrides)
    world = join_world(choose_device(settings.device)[0])
    corpus = prepare(
        settings.text, key=saved.state.get("corpus"), progress=options.PrepareProgress()
    )
    trainer = Trainer(settings, corpus, folder=folder, saved=saved, world=world)
    if world.is_main:
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


def show_plan(trainer: "Trainer", clock: Clock | None = None) -> None:
    """Say in a few lines what is about to happen. Without a budget, it measures a few steps.

    To be called on every rank.
    """
    from chargpt.training.estimate import estimate

    config, corpus = trainer.config, trainer.corpus
    plan = estimate(trainer, clock.left if clock else None)
    unknown = f", {corpus.unknown_share:.2%} of them unknown" if corpus.unknown_share else ""
    lengths = ", ".join(
        f"{len(corpus.split(name)):,} {name}"
        for name in ("train", "val", "test")
        if len(corpus.split(name))
    )
    threads = ""
    if trainer.device.type == "cpu":
        import torch

        threads = f", {torch.get_num_threads()} threads"
    ranks = f" x {trainer.world.size} processes" if trainer.world.size > 1 else ""
    console.say(
        f"text    {corpus.name}: {console.characters(len(corpus.tokens))} ({lengths}){unknown}\n"
        f"vocab   {corpus.tokenizer.vocab_size:,} characters\n"
        f"model   {describe_model(config.model)}, {plan.parameters:,} parameters\n"
        f"device  {trainer.device.type}{ranks} ({trainer.device_reason}{threads}), "
        f"{config.dtype} ({trainer.dtype_reason})\n"
        f"plan    {plan.steps:,} steps x {config.train.batch_size} blocks x "
        f"{config.model.block_size} = {console.short(plan.characters)} characters "
        f"({plan.epochs:.1f} epochs)\n"
        f"needs   about {console.size(plan.memory_bytes)} of memory and "
        f"{console.duration(plan.seconds)}"
    )


def describe_model(model: Any) -> str:
    """Return a model's settings in a few words."""
    if model.kind == "bigram":
        return "bigram table"
    heads = "1 head" if model.n_head == 1 else f"{model.n_head} heads"
    attention = {"full": heads, "average": "average", "none": "no attention"}
    return (
        f"gpt {model.n_layer} layers x {model.n_embd} wide, {attention[model.attention]}, "
        f"block {model.block_size}"
    )


def train_to_end(
    trainer: "Trainer",
    folder: "RunFolder",
    signals: Signals,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Run all steps with a progress bar; a signal saves the run and ends the process.

    Returns:
        What counting reaches on the validation split: the lines to beat.

    Raises:
        WorkError: the last thing to be saved could not be.
    """
    from chargpt.inference.evaluation import baselines

    levels = baselines(trainer.corpus) if trainer.world.is_main else {}
    bar = console.Progress(trainer.config.train.max_steps, "step", initial=trainer.progress.step)
    go_on = f"go on with\n  chargpt train --resume {shlex.quote(str(folder.path))}"
    signals.patient = True
    try:
        do_steps(trainer, bar, signals, levels, clock)
    except Stopped:
        if trainer.saved_step is not None:
            console.say(f"the last checkpoint is step {trainer.saved_step:,}; {go_on}")
        raise
    finally:
        bar.close()
    ended_by, signals.caught = signals.caught[:1], []  # another one now changes nothing
    if trainer.trouble:
        raise WorkError(f"{unsaved(trainer)}; free some space, then {go_on}")
    if ended_by:
        if trainer.finished:
            console.say(f"all steps are done and saved in {folder.path}")
        else:
            console.say(f"stopped at step {trainer.progress.step:,} and saved; {go_on}")
        raise Stopped(ended_by[0])
    signals.patient = False
    return levels


def do_steps(
    trainer: "Trainer",
    bar: console.Progress,
    signals: Signals,
    levels: dict[str, float],
    clock: Clock | None,
) -> None:
    """Go through the steps, showing each, until all are done, time is up or a signal came."""
    validation: list[float] = []
    began, falling_from, told = math.nan, cooldown_start(trainer), False
    characters = trainer.config.train.batch_size * trainer.config.model.block_size
    looked, counted = time.perf_counter(), trainer.progress.step
    for report in trainer.steps():
        if report.validation is not None:
            validation.append(report.validation.nats_per_char)
        detail = None
        if bar.wants_detail() and report.loss is not None:
            now = time.perf_counter()
            speed = (report.step - counted) * characters / (now - looked)
            looked, counted = now, report.step
            detail = _detail(report, validation, levels, speed)
        bar.move_to(report.step, detail)
        if report.sample is not None:
            bar.write(f"-- sample at step {report.step:,} --")
            bar.write(console.printable(report.sample).strip("\n"))
        if report.note is not None:
            bar.write(report.note)
        if trainer.trouble and not told:
            bar.write(f"{unsaved(trainer)}; training goes on: free some space")
            told = True
        if report.step == 1:  # the first is slower than any other
            began = time.perf_counter()
        if clock is not None and report.step == falling_from < bar.total:
            keep_to(clock, trainer, (time.perf_counter() - began) / (report.step - 1))
            bar.change_total(trainer.config.train.max_steps)
        elif clock is not None and clock.left < 0 and not trainer.finished:
            trainer.conclude()
            bar.write(f"the machine slowed down: stopped at step {report.step:,} of {bar.total:,}")
            return
        if trainer.world.any(bool(signals.caught)) and not trainer.finished:
            trainer.save()
            signals.caught = signals.caught or [signal.SIGTERM]  # it was another process's
            return


def unsaved(trainer: "Trainer") -> str:
    """Return what the disk refused, and what there is instead, in words."""
    last = "there is no checkpoint yet"
    if trainer.saved_step is not None:
        last = f"the last checkpoint is step {trainer.saved_step:,}"
    step = trainer.progress.step
    return f"the disk refuses what step {step:,} is to save ({trainer.trouble}); {last}"


def cooldown_start(trainer: "Trainer") -> int:
    """Return the step after which the learning rate begins to fall."""
    steps = trainer.config.train.max_steps
    return max(2, steps - round(trainer.config.schedule.cooldown * steps))


def keep_to(clock: Clock, trainer: "Trainer", step_seconds: float) -> None:
    """Fit the run's length to the time left, at so many seconds a step."""
    from chargpt.training.planner import refit

    trainer.change_config(refit(trainer.config, trainer.progress.step, step_seconds, clock.left))


def _detail(
    report: "Report", validation: list[float], levels: dict[str, float], speed: float
) -> str:
    assert report.loss is not None
    # short enough for a terminal of 80 columns, the bar included
    words = [f"loss {float(report.loss):.2f}"]
    if validation:
        words.append(f"val {validation[-1]:.3f}{console.sparkline(validation, 5)}")
    # the next line to beat
    beaten = validation[-1] if validation else math.inf
    name = next((name for name in ("bigram", "5-gram") if levels[name] < beaten), "5-gram")
    words.append(f"{name} {levels[name]:.3f}")
    words.append(f"{console.short(speed)} chars/s")
    return " ".join(words)


def show_result(trainer: "Trainer", folder: "RunFolder", levels: dict[str, float]) -> None:
    """Print the closing table, a word on over-fitting, and the commands to go on with."""
    from chargpt.inference.evaluation import evaluate_tokens
    from chargpt.store.run import load_run

    best = load_run(folder.path, "best", trainer.device.type)
    corpus = trainer.corpus
    rows = [[name, "val", *console.loss_cells(nats)] for name, nats in levels.items()]
    losses = {}
    train = trainer.config.train
    trained = train.max_steps * train.batch_size * trainer.config.model.block_size
    scored = min(CLOSING_MOST, max(CLOSING_LEAST, int(CLOSING_SHARE * trained)))
    for split in SPLITS:
        result = evaluate_tokens(
            best.model,
            corpus.split(split),
            split=split,
            max_characters=scored,
            dtype=trainer.dtype,
        )
        losses[split] = result.nats_per_char
        name = trainer.config.model.kind
        rows.append([f"{name} (trained)", split, *console.loss_cells(result.nats_per_char)])
    console.table(["model", "split", "nats/char", "bits/char", "perplexity"], rows)
    for sentence in verdict(trainer, levels, losses["train"], losses["val"]):
        console.out(sentence)
    path = shlex.quote(str(folder.path))
    step = trainer.progress.step
    console.out(
        f"trained {step:,} steps in {console.duration(trainer.progress.seconds)}; "
        f"the best checkpoint is step {best.step:,}\n"
        f"the run is in {path}; go on with any of\n"
        f"  chargpt sample {path}\n"
        f"  chargpt evaluate {path}\n"
        f"  chargpt train --resume {path} -s train.max_steps={2 * step}"
    )


def verdict(
    trainer: "Trainer", levels: dict[str, float], train_loss: float, val_loss: float
) -> list[str]:
    """Return in plain words whether the model beat counting, and whether it over-fitted."""
    sentences = []
    progress = trainer.progress
    records = trainer.folder.metrics.records() if trainer.folder else []
    seen = [(r["step"], r["val_nats_per_char"]) for r in records if "val_nats_per_char" in r]
    last = seen[-1][1] if seen else val_loss
    if trainer.config.model.kind == "gpt":
        gains = [
            f"{abs(gain):.3f} nats {'better' if gain > 0 else 'worse'} than the {name}"
            for name, gain in ((n, levels[n] - val_loss) for n in ("bigram", "5-gram"))
        ]
        sentences.append(f"Attention is {' and '.join(gains)} on text it has not seen.")
    if progress.best_step is not None and last > progress.best_loss + WAVERING:
        sentences.append(
            f"It over-fitted: validation was best at step {progress.best_step:,} "
            f"({progress.best_loss:.3f} nats) and has risen since (to {last:.3f}), so that "
            "checkpoint is the one used; more text, model.dropout or fewer steps would help."
        )
    elif val_loss - train_loss > 0.3:
        sentences.append(
            f"It does {val_loss - train_loss:.2f} nats better on the text it trained on: it has "
            "begun to memorise; more text or model.dropout would help."
        )
    if progress.stopped_early:
        sentences.append(
            f"It stopped early: {progress.evaluations_since_best} evaluations brought nothing new."
        )
    return sentences
