"""`chargpt train`: a text in, a trained model out; and steps on a progress bar."""

import math
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from chargpt.cli import console, options
from chargpt.cli.main import catch_signals, say_stopping
from chargpt.config import ModelConfig
from chargpt.device import default_threads, used_memory
from chargpt.errors import ConfigError, FinishedError, Stopped
from chargpt.files import quoted
from chargpt.models.ngram import MAX_TOKENS, NGRAM
from chargpt.text.display import display_char
from chargpt.text.source import RECORD_SEPARATOR
from chargpt.training.learner import training_bytes
from chargpt.training.start import DEFAULT_BUDGET, Request, Session, StartMode, open_session
from chargpt.training.trainer import StepReport

LABEL = 8  # columns of the plan's labels
# bytes of memory for each token that the n-gram baseline or a mixture counts, and for each document
COUNTING_BYTES, MIXTURE_BYTES, DOCUMENT_BYTES = 50, 160, 32
MIXTURE_CHUNK_BYTES = 60_000_000
START_BYTES = used_memory()  # after the imports, before a text is read
MIN_SPARKLINE_COLUMNS = 100  # of the terminal


def train(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file, folder (of .txt, .md and .gz files), glob, name from `chargpt data "
            "list`, or - for standard input; with --resume, a run. Without it: the built-in "
            "text; with --resume, the newest run.",
            show_default=False,
        ),
    ] = None,
    config: options.ConfigName = None,
    out: options.RunsOut = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Total time, as in 30s, 3m or 1h: model size and steps are chosen to fit. "
            f"Without -c and settings of model or training: {DEFAULT_BUDGET}.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume a run; with a text and --out, start it if it has no checkpoint yet.",
        ),
    ] = False,
    val: options.Val = None,
    test: options.Test = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Start from the weights of this run, of another text."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in --out, which is renamed to OUT.old.")
    ] = False,
    seed: options.Seed = None,
    json_: options.Json = False,
    device: options.Device = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    set_: options.Set = None,
) -> None:
    """Train a model on a text.

    Without a text: on one that comes with Python.

    Examples: `chargpt train`, `chargpt train novel.txt --budget 10m`,
    `chargpt train novel.txt -c bigram -s train.max_steps=500`, `chargpt train --resume`; a list of
    items: `chargpt train names.txt -s text.documents=lines`.
    """
    settings = options.given_settings(
        set_,
        seed=seed,
        device=device,
        val=val,
        test=test,
        encoding=encoding,
        encoding_errors=encoding_errors,
    )
    if from_ is not None:
        settings["train.from_run"] = str(from_.absolute())
    request = Request(
        path=text,
        config=config,
        settings=settings,
        budget=budget,
        out=out,
        start=start_mode(text, out, resume=resume, force=force),
        started=console.started,
    )
    try:
        with (
            catch_signals(),
            console.say_if_slow("reading the text ...") as notice,
            open_session(request, console.LoadingProgress()) as session,
        ):
            notice.cancel()
            console.say(*describe_plan(session), hanging=LABEL * " ")
            run_steps(session)
            if session.trainer.group.is_main:
                from chargpt.cli.report import show_result  # which would delay the first step

                show_result(session, json_=json_)
            session.trainer.group.broadcast(0.0)  # other ranks wait until rank 0 has saved
    except FinishedError as error:
        if request.start is not StartMode.NEW_OR_RESUME:
            raise
        console.say(str(error))


def start_mode(text: str | None, out: Path | None, *, resume: bool, force: bool) -> StartMode:
    """Return what --resume and --force ask for."""
    if resume and force:
        raise ConfigError("--resume continues a run and --force replaces it; give one of them")
    if resume:
        has_both = text is not None and out is not None
        return StartMode.NEW_OR_RESUME if has_both else StartMode.RESUME
    return StartMode.REPLACE if force else StartMode.NEW


def describe_plan(session: Session) -> list[str]:
    """Return lines about what will be trained, for how long, on what, and a budget's choice."""
    trainer, config, corpus = session.trainer, session.trainer.config, session.trainer.corpus
    budget, rare, documents, threads = list[str](), "", "", ""
    if (pace := session.pace) is not None:
        is_chosen = pace.size_was_chosen
        reason = "size with the lowest predicted loss" if is_chosen else "the model size is given"
        seconds = console.duration(pace.deadline.seconds)
        speed = pace.speed * corpus.characters_per_token
        budget = [f"budget  {seconds}: {speed:,.0f} characters/s measured; {reason}"]
    if corpus.rare_count:
        percent = f"{corpus.rare_fraction:.2%}" if corpus.rare_fraction > 1e-4 else "under 0.01%"
        rare = f"; rarer ones, {percent} of the text, are {corpus.rare_form}"
    if corpus.n_documents:
        documents = f"{corpus.n_documents:,} documents, shuffled by text.seed {config.text.seed}; "
    if trainer.device.type == "cpu":
        n_threads = torch.get_num_threads()
        threads = f"{n_threads} of {max(n_threads, default_threads())} threads"
    ranks = f" x {trainer.group.world_size} processes" if trainer.group.world_size > 1 else ""
    n_steps = config.train.max_steps - trainer.state.step
    n_tokens = n_steps * config.tokens_per_step
    n_characters = round(n_tokens * corpus.characters_per_token)
    n_bytes = training_bytes(config, corpus.tokenizer.vocab_size, trainer.learner.micro_batch_size)
    n_counted = min(MAX_TOKENS, len(corpus.split("train")))
    ngram = trainer.learner.ngram or (session.baselines and session.baselines.ngram)
    ngram_bytes = sum(buffer.nbytes for buffer in ngram.buffers()) if ngram else 0
    if len(corpus.split("mixture")):
        ngram_bytes += max(0, MIXTURE_CHUNK_BYTES + MIXTURE_BYTES * n_counted - n_bytes)
    students = ""
    if n_students := sum(step >= trainer.state.step for step in config.train.students):
        what = "its student" if n_students == 1 else f"{n_students} students in turn"
        students = f", of a model and then {what}"
    counting_bytes = max(COUNTING_BYTES * n_counted, DOCUMENT_BYTES * corpus.n_documents)
    needed = max(counting_bytes, ngram_bytes + n_bytes)
    return [
        *budget,
        f"text    {corpus.name}: {documents}{console.characters(corpus.n_characters)} "
        f"({corpus.describe_splits()})",
        f"vocab   {corpus.tokenizer.describe()}{rare}",
        f"model   {describe_model(config.model)}, {trainer.model.num_parameters():,} parameters",
        f"device  {trainer.device.type}{ranks}{in_brackets(trainer.device_reason, threads)}, "
        f"{config.dtype}{in_brackets(trainer.dtype_reason)}",
        f"plan    {n_steps:,} steps x {config.train.batch_size} sequences x "
        f"{config.model.block_size} tokens = {console.short(n_characters)} characters "
        f"({console.short(n_tokens / len(corpus.split('train')))} epochs{students})",
        f"needs   about {console.size(START_BYTES + needed)} of memory, {console.size(n_bytes)} of "
        f"it for model and batches, and {console.duration(session.expected_seconds)}",
    ]


def in_brackets(*words: str) -> str:
    """Return the words that are not empty in brackets."""
    present = ", ".join(word for word in words if word)
    return f" ({present})" if present else ""


def describe_model(model: ModelConfig) -> str:
    """Return a model's settings in a few words."""
    if model.kind == "bigram":
        return "bigram table"
    heads = "1 head" if model.n_head == 1 else f"{model.n_head} heads"
    layers = "1 layer" if model.n_layer == 1 else f"{model.n_layer} layers"
    attention = {"full": heads, "average": "average", "none": "no attention"}
    return (
        f"{model.kind} {layers} x {model.n_embd} wide, {attention[model.attention]}, "
        f"block {model.block_size}"
    )


class StepView:
    """Shows the steps of a session on a progress bar."""

    def __init__(self, session: Session) -> None:
        self.trainer = trainer = session.trainer
        self.baseline_losses: dict[str, float] = {}  # on what training validates on
        if session.baselines is not None:
            self.baseline_losses = session.baselines.losses(
                trainer.corpus.split("val"),
                max_tokens=trainer.config.train.evaluation_tokens,
                span=trainer.config.model.block_size,
            )
        self.bar = console.ProgressBar("step", trainer.state.step)
        self.validation: list[float] = []

    def show(self, report: StepReport) -> None:
        """Show a step on the bar, and its sample above it."""
        if report.validation is not None and report.step:  # not that before training
            self.validation.append(report.validation.nats_per_char)
        if report.loss is not None:
            self.bar.update(report.step, report.max_steps, partial(self._detail, report))
        if report.sample is not None:
            sign = display_char(RECORD_SEPARATOR)
            legend = f" ({sign}: end of a document)" if sign in report.sample else ""
            console.say(f"-- sample at step {report.step:,}{legend} --")
            console.say(report.sample, is_sample=True)

    def wait_for_space(self, failure: str) -> bool:
        """Ask on a terminal for disk space; return whether to save again."""
        if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        self.bar.close()
        console.say(
            f"{failure}; the weights are in memory: free some space and press Enter to save them, "
            "or q and Enter to save a copy of the run in the system's temporary folder"
        )
        answer = sys.stdin.readline()
        return answer.strip() != "q" and answer != ""

    def _detail(self, report: StepReport) -> str:
        """Return loss, validation, the next baseline to beat and speed, within 80 columns."""
        # the last one that was read: reading the step's own would synchronise a GPU
        loss = "" if self.trainer.last_loss is None else f"loss {self.trainer.last_loss:.2f} "
        last, val = math.inf, ""
        if self.validation:
            last = self.validation[-1]
            val = f"val {last:.3f} "
            if console.terminal_width(sys.stderr) >= MIN_SPARKLINE_COLUMNS:
                val += f"{console.sparkline(self.validation, sys.stderr, 5)} "
        name = "bigram" if self.baseline_losses["bigram"] < last else NGRAM
        speed = f" {console.short(report.speed)} chars/s" if report.speed else ""
        return f"{loss}{val}{name} {self.baseline_losses[name]:.3f}{speed}"


def run_steps(session: Session, *, says_resume: bool = True) -> None:
    """Run all steps with a progress bar; a signal saves the run and ends the command.

    `says_resume`: whether the message about that names the command that resumes the run.
    """
    trainer, view = session.trainer, StepView(session)
    path = quoted(session.folder.path)
    resume = f"; resume with\n  chargpt train --resume {path}" if says_resume else ""
    try:
        with closing(view.bar):
            for report in session.reports(say_stopping, wait_for_space=view.wait_for_space):
                view.show(report)
    except Stopped as stop:
        if stop.is_saved and trainer.finished:
            console.say(f"all steps are done and saved in {session.folder.path}")
        elif stop.is_saved:
            console.say(f"stopped at step {trainer.state.step:,} and saved{resume}")
        else:
            again = "; train again" if trainer.writer.saved_step is None else resume
            console.say(f"stopped without saving; {trainer.last_checkpoint}{again}")
        stop.is_reported = True
        raise
