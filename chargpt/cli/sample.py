"""`chargpt sample`: text generated from a trained model."""

import dataclasses
import math
import re
import secrets
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from chargpt.analysis.memorization import (
    MAX_SCANNED,
    MIN_MATCH,
    OverlapReport,
    longest_copied,
    measure_overlap,
)
from chargpt.cli import console, options, runs, tables
from chargpt.cli.infill import fill_in
from chargpt.cli.interact import interact, print_stream
from chargpt.cli.main import catch_signals
from chargpt.config import MAX_SAMPLES, Config, SampleConfig, TextConfig, unescape
from chargpt.errors import ConfigError, RunError, Stopped, TextError, TooFewError
from chargpt.inference.generation import ONE_TEXT, sample_groups
from chargpt.inference.infill import CANDIDATES, UNCONSTRAINED
from chargpt.inference.selection import Sample, counts_samples
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus, Place
from chargpt.text.display import display_text, whole_graphemes
from chargpt.text.documents import find_documents
from chargpt.text.source import REPLACE_REMEDY, read_text
from chargpt.text.tokenizer import UnknownPolicy, code_points

MAX_REPEATED, MAX_REPEATED_FRACTION = 40, 1 / 3  # characters of one repetition, of a sample
MIN_REPEATS, MAX_PERIOD = 3, 300  # of a passage, and its characters
MAX_SEARCHED = 2_000  # characters at the end of a sample that are searched for repetition
MAX_SHOWN = 10  # matches in the table
MAX_PASSAGE = 80  # characters of a match in the table

Format = Literal["text", "json", "jsonl"]


def setting(name: str, *flags: str, metavar: str | None = None, help_: str = "") -> Any:
    """Return the option of a field of `SampleConfig`, with its meaning, default and bounds.

    Args:
        name: of the field.
        flags: of the option, if it has others than the field's name.
        metavar: what stands for the value in the help; None of a flag.
        help_: begins the help.
    """
    field = SampleConfig.model_fields[name]
    meaning = " ".join((field.description or "").split()).rstrip(".").replace("null: ", "")
    default = "" if field.default is None else f"; {field.default}"
    default = "" if field.default in (False, ()) else f"{default} by default"
    limits = ChainMap(*map(dataclasses.asdict, field.metadata))
    low, high = limits.get("ge", limits.get("gt")), limits.get("le")
    help_ = f"{help_} {meaning}{default}.".strip()
    return typer.Option(None, *flags, metavar=metavar, help=help_, min=low, max=high)


def sample(
    ctx: typer.Context,
    run: Annotated[
        list[Path] | None,
        typer.Argument(
            help="The run's folder, or those of several to mix. Without it: the newest run."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Start of the text.")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The prompt, in a file; - for stdin.")
    ] = None,
    length: int | None = setting("length", "-n", "--length", metavar="N"),
    temperature: float | None = setting("temperature", metavar="T"),
    top_k: int | None = setting("top_k", metavar="K"),
    top_p: float | None = setting("top_p", metavar="P"),
    min_p: float | None = setting("min_p", metavar="P"),
    num_samples: int | None = setting("num_samples", metavar="N"),
    new: bool | None = setting("new", "--new"),
    distinct: bool | None = setting("distinct", "--distinct"),
    best: int | None = setting("best", metavar="K"),
    seed: int | None = setting("seed", metavar="N", help_="The same seed gives the same text;"),
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End before this text (\\n: a line end); may be repeated."
        ),
    ] = None,
    match: str | None = setting("match", metavar="REGEX"),
    only: str | None = setting("only", metavar="LETTERS"),
    without: str | None = setting("without", metavar="LETTERS"),
    word: list[str] | None = setting("word", metavar="TEXT"),
    lines: int | None = setting("lines", metavar="N"),
    acrostic: list[str] | None = setting("acrostic", metavar="TEXT"),
    end: str | None = setting("end", metavar="TEXT"),
    max_chars: int | None = setting("max_chars", metavar="N"),
    no_copy: int | None = setting("no_copy", metavar="N"),
    whole: bool | None = setting("whole", "--whole"),
    before: Annotated[
        str | None, typer.Option(metavar="FILE", help="Fill in text between this one and --after.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="FILE", help="What follows the text that is filled in.")
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MAX_SAMPLES, help="Sampled texts that --after chooses from."
        ),
    ] = CANDIDATES,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive", "-i", help="Continue what you type, with suggestions, until Ctrl-D."
        ),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="With --interactive: print lines only, for screen readers."),
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Mark verbatim matches with the training split.")
    ] = False,
    unknown: options.UnknownOption = None,
    mix: options.Mix = None,
    mixture: options.Mixture = False,
    checkpoint: options.Checkpoint = "best",
    format_: Annotated[
        Format | None,
        typer.Option(
            "--format", help="How to print: text (the default), one JSON object, or one a sample."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    device: options.Device = None,
    encoding: options.RunEncoding = None,
) -> None:
    """Generate text from a trained model, streamed as it is sampled.

    Examples: `chargpt sample`, `chargpt sample runs/novel -p "It was" -n 300`,
    `chargpt sample --temperature 0.5 --num-samples 3 --seed 1 --json`,
    `chargpt sample --interactive`, `chargpt sample runs/dickens runs/austen --mix 0.3`.
    """
    loaded = runs.load_runs(run or [], mix, checkpoint, device, mixture=mixture)
    # on a busy machine torch's threads would wait for each other in every decode step
    torch.set_num_threads(1)
    policy = unknown or loaded.config.text.unknown
    if before is None and after is None:
        alone = {"--encoding": prompt_file is None and encoding}
        options.reject(alone, "is that of a --prompt-file, and there is none")
        options.reject({"--candidates": candidates != CANDIDATES}, "applies only to --after")
    prompt = given_prompt(loaded, prompt, prompt_file, encoding, policy)
    if stop is not None:
        ctx.params["stop"] = [loaded.tokenizer.choose_form(unescape(text)) for text in stop]
    config = sample_config(loaded.config, {**ctx.params, "prompt": prompt}, policy)
    if interactive:
        unused = ("overlap", "new", "distinct", "best", "before", "after")
        given = {f"--{name}": ctx.params[name] for name in unused}
        given |= {"--json": json_, "--format": format_, "--num-samples": (num_samples or 1) > 1}
        options.reject(given, "does not apply to --interactive, which prints one text at a time")
        changes = {f"sample.{name}": value for name, value in ONE_TEXT.items()}
        interact(loaded, config.with_values(changes), begins=prompt is not None, is_plain=plain)
        return
    options.reject({"--plain": plain}, "applies only to --interactive")
    form = choose_format(format_, json_, has_overlap=overlap)
    if before is not None or after is not None:
        others = ("prompt", "prompt_file", "overlap", "new", "distinct", "best", "stop")
        names = (*others, *UNCONSTRAINED)
        given = {f"--{name.replace('_', '-')}": ctx.params[name] for name in names}
        options.reject(given, "does not apply to a text between --before and --after")
        fill_in(loaded, config, before, after, encoding, candidates, form)
        return
    facts = {
        "run": str(loaded.folder),
        "step": loaded.step,
        "mixture": mixture,
        **runs.mix_json(loaded),
    }
    generate(loaded, config, form, facts, has_overlap=overlap)


def generate(
    loaded: Run, config: Config, form: Format, facts: Mapping[str, Any], *, has_overlap: bool
) -> None:
    """Sample texts with the settings of a config, print them, and say what is wrong with them.

    Args:
        loaded: whose model is sampled.
        config: its settings.
        form: how to print.
        facts: of the run, for JSON.
        has_overlap: whether to measure the overlap with the training split.

    Raises:
        Stopped: a signal ended the sampling; what was sampled is printed.
        TooFewError: some samples are missing; the others are printed.
    """
    if is_random := config.sample.seed is None:  # chosen here, so that it can be printed
        config = config.with_values({"sample.seed": secrets.randbits(32)})
    settings = config.sample
    caught: list[int] = []  # signals that ended the sampling
    too_few: list[TooFewError] = []
    if settings.num_samples == 1 and form == "text" and not has_overlap and not settings.new:
        texts = [print_stream(loaded, config)]
    elif form == "jsonl":
        corpus = None
        try:
            corpus = loaded.corpus()
        except RunError as cause:
            console.say(f"longest_copied is null: {cause}")
        texts = sample_several(
            loaded, config, caught, too_few, lambda group: print_lines(group, settings, corpus)
        )
    else:
        corpus = loaded.corpus() if has_overlap else None  # an error before the work
        texts = sample_several(loaded, config, caught, too_few)
        report = measure(corpus, texts, caught) if corpus and texts else None
        if form == "json":
            print_json(texts, settings, facts, corpus, report)
        else:
            print_samples(texts, report, has_lines=loaded.tokenizer.eos_token == "\n")
            if corpus and report:
                print_overlap(corpus, report, texts)
    if is_random and settings.temperature and sys.stdout.isatty() and form == "text":
        console.say(f"--seed {settings.seed} gives the same text")
    n_cut = sum(text.ended == "length" for text in texts)
    if n_cut and loaded.tokenizer.eos_token:
        console.say(
            f"documents cut at {console.characters(settings.limit)}: {n_cut:,} of "
            f"{len(texts):,}; a higher -n finishes them"
        )
    if caught:
        raise Stopped(caught[0])
    say_flaws(texts)
    for error in too_few:
        raise error


def choose_format(format_: Format | None, json_: bool, *, has_overlap: bool) -> Format:
    """Return how to print the samples, or reject options that exclude each other."""
    if json_ and format_ not in (None, "json"):
        raise ConfigError(f"--json and --format {format_} exclude each other; give one")
    if format_ == "jsonl":
        options.reject({"--overlap": has_overlap}, "prints a table, and --format jsonl lines")
    return "json" if json_ else format_ or "text"


def sample_several(
    run: Run,
    config: Config,
    caught: list[int],
    too_few: list[TooFewError],
    on_group: Callable[[list[Sample]], object] = lambda _: None,
) -> list[Sample]:
    """Return samples, with a progress bar; a signal ends them, and is appended to `caught`.

    Args:
        too_few: receives the error if some are missing for another reason.
        on_group: called with the samples of each group as soon as they are known.
    """
    settings = config.sample
    unit = "sample" if counts_samples(run, settings) else "character"
    texts: list[Sample] = []
    with runs.stoppable_progress(unit, "generated", caught) as callbacks:
        try:
            for group in sample_groups(run, settings, unknown=config.text.unknown, **callbacks):
                on_group(group)
                texts += group
        except TooFewError as error:
            too_few.append(error)
    if caught:
        n_stopped = sum(text.ended == "stopped" for text in texts)
        console.say(
            f"these are the samples so far: {len(texts):,} of "
            f"{settings.best or settings.num_samples:,}, of which {n_stopped:,} are unfinished"
        )
    return texts


def copied_lengths(corpus: Corpus | None, texts: Sequence[Sample]) -> list[int | None]:
    """Return the characters of the longest part of each continuation in the training split."""
    if corpus is None:
        return [None] * len(texts)
    tokenizer = corpus.tokenizer
    tokens = [tokenizer.encode(text.continuation, "replace") for text in texts]
    return [*longest_copied(corpus.split("train"), tokens, tokenizer.first_continuation_id)]


def facts_of(text: Sample) -> dict[str, Any]:
    """Return facts of a sample for JSON, such as its mean surprisal in bits per character."""
    return {
        "ended": text.ended,
        "finished": text.finished,
        "surprisal": None if math.isnan(text.surprisal) else text.surprisal,
    }


def print_lines(texts: Sequence[Sample], settings: SampleConfig, corpus: Corpus | None) -> None:
    """Print one JSON object for each sample."""
    for text, length in zip(texts, copied_lengths(corpus, texts), strict=True):
        own = {"prompt": text.prompt, "continuation": text.continuation, **facts_of(text)}
        own |= {"longest_copied": length, "seed": settings.seed, "sample": text.sequence_id + 1}
        console.out_json(own)


def print_json(
    texts: Sequence[Sample],
    settings: SampleConfig,
    facts: Mapping[str, Any],
    corpus: Corpus | None,
    report: OverlapReport | None,
) -> None:
    """Print one JSON object with all samples, facts of the run, and the overlap if it is known."""
    own = [*map(facts_of, texts)]
    result = {
        "samples": texts,
        "prompt": settings.prompt,
        "continuations": [text.continuation for text in texts],
        **{name: [each[name] for each in own] for name in ("ended", "finished", "surprisal")},
        "sample": [text.sequence_id + 1 for text in texts],
        "seed": settings.seed,
        **facts,
    }
    if corpus and report:
        result["longest_copied"] = copied_lengths(corpus, texts)
        result |= overlap_json(corpus, report, texts)
    console.out_json(result)


def say_flaws(samples: Sequence[Sample]) -> None:
    """Print how many samples are blank, all the same or repeat a passage, and what helps."""
    n_samples = len(samples)
    seen = (  # a few spaces after a prompt are no flaw
        each.continuation if len(each.continuation) > MAX_REPEATED else each for each in samples
    )
    if n_blank := sum(not text.strip() for text in seen):
        console.say(
            f"blank samples: {n_blank:,} of {n_samples:,}; another --temperature, --seed or "
            "--prompt gives others"
        )
    if n_samples > 1 and len(set(samples)) == 1:
        console.say(
            f"the {n_samples:,} samples are the same; a higher --temperature without --top-k, "
            "--top-p and --min-p gives different ones"
        )
    if repeated := [passage for each in samples if (passage := find_repeated(each.continuation))]:
        console.say(
            f"samples with a long repetition: {len(repeated):,} of {n_samples:,}, the first of "
            f'"{display_text(repeated[0][:MAX_PASSAGE], keep_spaces=True)}"; a higher '
            "--temperature without --top-k, --top-p and --min-p repeats less, and so does a model "
            "that was trained longer"
        )


def find_repeated(text: str) -> str:
    """Return a passage that a text repeats for long near its end, "" if there is none."""
    text = text[-MAX_SEARCHED:]
    codes = code_points(text)
    least = max(MAX_REPEATED, MAX_REPEATED_FRACTION * len(text))
    for period in range(1, min(MAX_PERIOD, len(text) // MIN_REPEATS) + 1):
        # between two neighbours of `edges`, each character equals the one a period before
        differ = np.flatnonzero(codes[period:] != codes[:-period])
        edges = np.concatenate(([-1], differ, [codes.size - period]))
        longest = np.diff(edges).argmax()
        start, end = edges[longest] + 1, edges[longest + 1] + period
        if end - start > least and end - start >= MIN_REPEATS * period:
            return text[start : start + period]
    return ""


def given_prompt(
    run: Run, prompt: str | None, file: str | None, encoding: str | None, unknown: UnknownPolicy
) -> str | None:
    """Return the prompt of --prompt or --prompt-file as the model reads it; say what it does not.

    None if there is neither.
    """
    if file is not None:
        if prompt is not None:
            raise ConfigError("--prompt and --prompt-file exclude each other; give one")
        try:
            prompt = read_text(file, TextConfig(encoding=encoding or run.config.text.encoding))
        except TextError as error:  # the option is that of other commands
            raise TextError(str(error).removesuffix(REPLACE_REMEDY)) from None
        if prompt.endswith(("\n", "\r")):
            console.say("the prompt ends with a line end, so the samples continue on a new line")
    elif prompt is None:
        return None
    elif re.search(r"\\[nt]", prompt):
        console.say(
            r"\n and \t in --prompt are two characters each; for line ends and tabs use "
            r"--prompt-file, or -p $'...\n...' in bash"
        )
    tokenizer = run.tokenizer
    prompt = tokenizer.choose_form(prompt)
    tokens = tokenizer.encode(prompt, unknown=unknown)
    runs.say_unknown(run, tokenizer.find_unknown(prompt), unknown)
    n_tokens = len(tokens) + len(tokenizer.eos_token)  # which precedes it
    if n_tokens > run.model.block_size:
        unit = "tokens" if tokenizer.has_bytes or tokenizer.eos_token else "characters"
        console.say(
            f"the prompt has {n_tokens:,} {unit}; the model reads the last {run.model.block_size:,}"
        )
    return prompt if unknown == "error" else tokenizer.decode(tokens)


def print_samples(texts: list[Sample], report: OverlapReport | None, *, has_lines: bool) -> None:
    """Print texts with their verbatim matches marked; lines without a heading each."""
    for index, text in enumerate(texts):
        spans = report.texts[index].spans if report else []
        if report and text in report.copied:
            spans = [(0, len(text.continuation))]
        if not has_lines:
            console.out(f"-- sample {index + 1} --")
        console.out_text(text.prompt + mark(text.continuation, spans), "\n")


def sample_config(config: Config, given: Mapping[str, Any], unknown: UnknownPolicy) -> Config:
    """Return the run's config with the given sampling settings and policy."""
    changes = {
        f"sample.{name}": given[name]
        for name in SampleConfig.model_fields
        if given[name] not in (None, [], ())
    }
    try:
        return config.with_values({"text.unknown": unknown, **changes})
    except ConfigError as error:
        message = str(error)
        for name in SampleConfig.model_fields:  # name the options instead of the settings
            message = message.replace(f"sample.{name}", f"--{name.replace('_', '-')}")
        raise ConfigError(message) from None


def measure(corpus: Corpus, texts: list[Sample], caught: list[int]) -> OverlapReport | None:
    """Return the overlap of samples, without their prompt, with the training split.

    There is none after a signal, also one that ends the measuring and is appended to `caught`.
    """
    documents = [text for text in texts if text.is_document]
    sampled = [text.continuation for text in texts]
    try:
        with catch_signals(), console.show_progress("character", "of the training split") as shown:
            if not caught:
                return measure_overlap(corpus, sampled, documents, shown)
    except Stopped as stop:
        caught.append(stop.number)
    console.say("the overlap with the training split was not measured")
    return None


def overlap_json(corpus: Corpus, report: OverlapReport, texts: Sequence[Sample]) -> dict[str, Any]:
    """Return the overlap of each sample, with places, and which documents are new or copied."""
    overlaps = []
    for each in report.texts:
        values = dataclasses.asdict(each)
        for match in values["matches"]:
            place = corpus.place_of(match.pop("position"))
            match |= place._asdict() if place else dict.fromkeys(Place._fields)
        overlaps.append({"longest": next(iter(values["matches"]), None), **values})
    result: dict[str, Any] = {"overlap": overlaps}
    if corpus.tokenizer.eos_token:  # else a text is no document
        ended = [text if text.is_document else None for text in texts]
        result["new"] = [None if each is None else each not in report.known for each in ended]
        result["copied"] = [None if each is None else each in report.copied for each in ended]
    return result


def mark(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text with its verbatim matches in brackets that rarely occur in texts."""
    for start, end in reversed(whole_graphemes(text, spans)):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


def print_overlap(corpus: Corpus, report: OverlapReport, texts: list[Sample]) -> None:
    """Print what was found below the samples: documents or lines that are new, and the matches."""
    has_documents = bool(corpus.tokenizer.eos_token)
    documents = [text for text in texts if text.is_document]
    if has_documents and documents:
        groups = {"sampled": documents, "distinct": set(documents)}
        print_new("documents", groups, report.copied, report.known)
    whole, longest, matches = "whole documents or ", "", report.longest_matches()
    if not has_documents:
        lengths = (matches[0].length if matches else 0, report.longest_in_val)
        own, median = (f"{n:,}" if n else f"under {MIN_MATCH}" for n in lengths)
        whole = ""
        longest = (
            f"; the longest: {own} characters (the median of equally long parts of the validation "
            f"split: {median})"
        )
    console.out_sentence(
        f"⟦…⟧: verbatim matches of {whole}{MIN_MATCH} characters or more with the training split"
        f"{longest}"
    )
    rows = []
    for each in matches[:MAX_SHOWN]:
        place = str(corpus.place_of(each.position) or "-")
        rows.append([f"{each.length:,}", place, display_text(each.text[:MAX_PASSAGE])])
    if rows:
        tables.table(["characters", "file and line", "longest matches"], rows, text_column=2)
    if rows := report.novel_rows():
        tables.table(["n", "novel n-grams", "of validation text"], rows)
        left_out = ""
        if len(corpus.split("train")) > MAX_SCANNED:
            left_out = (
                f". Below n = {MIN_MATCH} none are counted: the training split has more than "
                f"{MAX_SCANNED:,} tokens"
            )
        console.out_sentence(
            "novel n-grams: fraction of those of the samples that are not in the training split, "
            "and their number. From n = 20 on, fewer than in the validation text means copying; of "
            "short n-grams there are also fewer at a low temperature. Validation text: "
            f"{report.val_characters:,} of the "
            f"{console.characters(corpus.count_characters('val'))} of the validation split"
            + left_out
        )
    # lines that the model has ended, with what the prompt has of the first
    first = texts[0].rfind("\n", 0, len(texts[0].prompt)) + 1
    lines = {line for text in texts for line in text[first:].split("\n")[:-1] if line}
    if len(lines) > 1 and not has_documents:
        print_new("lines", {"distinct": lines}, *find_documents(corpus, lines, "\n"))


def print_new(
    kind: str,
    groups: Mapping[str, Collection[str]],
    copied: Collection[str],
    known: Collection[str],
) -> None:
    """Print how many documents or lines of each group are new, copied, or only in other splits."""
    rows = []
    for name, texts in groups.items():
        n_new = sum(text not in known for text in texts)
        n_copied = sum(text in copied for text in texts)
        numbers = (len(texts), n_new, n_copied, len(texts) - n_new - n_copied)
        rows.append([name, *(f"{number:,}" for number in numbers)])
    columns = ["number", "not in the text", "in the training split", "in others"]
    tables.table([kind, *columns], rows)
