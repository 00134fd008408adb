"""`chargpt sample --before FILE --after FILE`: text between two given ends."""

from chargpt.cli import console, runs
from chargpt.config import Config, TextConfig
from chargpt.errors import ConfigError, Stopped
from chargpt.inference.infill import infill
from chargpt.store.run import Run
from chargpt.text.source import read_text


def fill_in(
    run: Run,
    config: Config,
    before: str | None,
    after: str | None,
    encoding: str | None,
    candidates: int,
    form: str,
) -> None:
    """Print infills of the text of two files, with the settings of a config.

    Args:
        run: whose model is sampled.
        config: its settings.
        before, after: paths of the ends; without `before` the middle begins a text.
        encoding: of the files; None: that of the run's text.
        candidates: middles that are sampled.
        form: `text`, `json` or `jsonl`.
    """
    if after is None:
        raise ConfigError(
            "--before needs --after, the text that follows; --prompt-file continues a text"
        )
    if before == after == "-":
        raise ConfigError("standard input can be --before or --after, not both; name a file")
    settings = TextConfig(encoding=encoding or config.text.encoding)
    start, end = ("" if path is None else read_text(path, settings) for path in (before, after))
    unknown = config.text.unknown
    for text in (start, end):
        runs.say_unknown(run, run.tokenizer.find_unknown(text), unknown)
    caught: list[int] = []
    with runs.stoppable_progress("candidate", "sampled, then weighed", caught) as callbacks:
        found = infill(
            run, start, end, config.sample, candidates=candidates, unknown=unknown, **callbacks
        )
    if form == "text":
        for number, each in enumerate(found, 1):
            if config.sample.num_samples > 1:
                console.out(f"-- sample {number} --")
            console.out_text(each.text, "\n")
    elif form == "json":
        console.out_json({"infills": list(map(vars, found)), "run": str(run.folder)})
    else:
        for each in found:
            console.out_json(vars(each))
    if caught:
        raise Stopped(caught[0])
