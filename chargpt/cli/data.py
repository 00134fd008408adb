"""`chargpt data`: download named texts and describe any text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from chargpt.cli import console, options, tables
from chargpt.errors import TextError, most_similar
from chargpt.files import quoted
from chargpt.text.catalog import CATALOG, DATA, fetch, resolve_settings
from chargpt.text.corpus import Corpus
from chargpt.text.describe import describe
from chargpt.text.display import one_line, sign_or_code
from chargpt.text.prepare import load_corpus

MAX_COLUMNS = 54  # of a list of characters

app = options.command_group("List, describe and fetch texts.")


@app.command("list")
def list_() -> None:
    """List the named texts. Example: `chargpt data list`."""
    for entry in CATALOG.values():
        console.out(f"{entry.name:16} {entry.description}")
    console.out_sentence(
        "fetch one with `chargpt data get NAME`, then train with `chargpt train NAME`"
    )


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A name from `chargpt data list`.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write it to.")] = DATA,
) -> None:
    """Fetch a named text and verify its checksum. Example: `chargpt data get tinyshakespeare`."""
    if name not in CATALOG:
        near = most_similar(name, CATALOG)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(CATALOG)}"
        raise TextError(f"there is no text named {name!r}; {hint}")
    path = fetch(CATALOG[name], to, console.LoadingProgress())
    console.out(f"{path} ({console.size(path.stat().st_size)})")
    argument = name if to == DATA else quoted(path)
    console.say(f"train on it with `chargpt train {argument}`")


@app.command()
def info(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file, folder, glob or name; - for standard input. Without it: the text that "
            "comes with Python."
        ),
    ] = None,
    json_: options.Json = False,
    val: options.Val = None,
    test: options.Test = None,
    encoding: options.Encoding = None,
    encoding_errors: options.EncodingErrors = None,
    set_: options.Set = None,
) -> None:
    """Describe a text, with warnings about training on it.

    Shows its size, characters and entropy.

    Example: `chargpt data info novel.txt`.
    """
    given = options.given_settings(
        set_, val=val, test=test, encoding=encoding, encoding_errors=encoding_errors
    )
    config, _ = resolve_settings(text, None, given)
    corpus = load_corpus(config.text, on_progress=console.LoadingProgress())
    facts = describe(corpus)
    if json_:
        console.out_json(facts)
    else:
        _print_description(corpus, facts)


def _print_description(corpus: Corpus, facts: dict[str, Any]) -> None:
    def listed(pairs: Iterable[tuple[str, int]]) -> str:
        cells = [f"{sign_or_code(c)} {count:,}" for c, count in pairs]
        per_row = min(5, max(1, MAX_COLUMNS // (2 + max(map(len, cells)))))
        return "\n".join("  ".join(cells[i : i + per_row]) for i in range(0, len(cells), per_row))

    least, rare = "least frequent", "none"
    if corpus.rare_count:
        least += "\nin the vocabulary"
        rare = f"{corpus.rare_fraction:.4%} of the text, {corpus.rare_form}"
    tables.table(
        ["text", one_line(corpus.name)],
        [
            ["characters", f"{corpus.n_characters:,}"],
            ["splits", corpus.describe_splits().replace(", ", "\n")],
            ["vocabulary", corpus.tokenizer.describe()],
            *([["documents", f"{corpus.n_documents:,}"]] if corpus.n_documents else []),
            ["lines", f"{facts['lines']:,} (longest {facts['longest_line']:,} characters)"],
            ["line ends", ", ".join(f"{n:,} {kind}" for kind, n in facts["line_ends"].items())],
            ["most frequent", listed(facts["most_frequent"])],
            [least, listed(facts["least_frequent"])],
            ["not in the vocabulary", rare],
            ["unigram entropy", f"{facts['unigram_bits']:.4f} bits/character"],
            ["bigram entropy", f"{facts['bigram_bits']:.4f} bits/character"],
        ],
        has_line_ends=True,
    )
    for warning in facts["warnings"]:
        console.out_sentence(f"note: {warning}")
