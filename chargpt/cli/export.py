"""`chargpt export` and `chargpt play`: a run's GPT in the formats of other tools, and as a page."""

import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options, runs
from chargpt.export.check import ExportCheck
from chargpt.export.gguf import Precision, export_gguf, modelfile_path
from chargpt.export.html import export_html
from chargpt.export.huggingface import export_huggingface
from chargpt.export.onnx import export_onnx
from chargpt.files import require_new
from chargpt.outputs import is_open_descriptor, require_output, writing
from chargpt.store.layout import PLAY
from chargpt.store.mixture import has_mixture
from chargpt.store.run import Run

app = options.command_group("Export a run's GPT for other tools, each file checked.")
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


@app.command()
def hf(
    run: options.RunPath,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    checkpoint: options.Checkpoint = "best",
) -> None:
    """Export a folder for Hugging Face transformers.

    `AutoModelForCausalLM.from_pretrained(DIR)` opens it.

    Example: `chargpt export hf runs/novel-gpt novel-hf`.
    """
    require_new(folder)
    write(export_huggingface, load(run, checkpoint), folder)


@app.command()
def gguf(
    run: options.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    precision: Annotated[Precision, typer.Option(help="Precision of the matrices.")] = "f32",
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Export a GGUF file for llama.cpp, and a Modelfile for Ollama.

    Example: `chargpt export gguf runs/novel-gpt novel.gguf --precision q8_0`.
    """
    for each in (file, modelfile_path(file)):
        require_new(each, force=force)
    write(partial(export_gguf, precision=precision, force=force), load(run, checkpoint), file)


@app.command()
def onnx(
    run: options.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Export as an ONNX graph with a KV cache, for onnxruntime.

    Example: `chargpt export onnx runs/novel-gpt novel.onnx`.
    """
    require_new(file, force=force)
    write(partial(export_onnx, force=force), load(run, checkpoint), file)


@app.command()
def html(
    run: options.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The page to write.")],
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Export as one page that runs the model in any browser.

    Example: `chargpt export html runs/novel-gpt novel.html`.
    """
    if not is_open_descriptor(file):
        require_new(file, force=force)
    write(partial(export_html, force=force, is_new=True), load(run, checkpoint), file)


def load(path: Path | None, checkpoint: str) -> Run:
    """Load a run, or the newest one, on the CPU, and say that its n-gram models are left out."""
    run = runs.load_named_run(path, checkpoint, "cpu")
    if has_mixture(run):
        console.say("the GPT alone is exported, without the n-gram models of the run's mixture")
    console.say("exporting and checking ...")
    return run


def write(export: Callable[[Run, Path], ExportCheck | None], run: Run, path: Path) -> None:
    """Export a run's GPT to a path; print the path and the result of the check, if there is one."""
    with writing(path):
        check = export(run, path)
    if not is_open_descriptor(path):  # whose content is the page
        console.out(str(path))
    if check is not None:
        console.say(check.describe())


def play(
    run: options.RunOrNewest = None,
    out: options.Page = None,
    is_open: Annotated[
        bool, typer.Option("--open/--no-open", help="Whether to open the page.")
    ] = True,
    checkpoint: options.Checkpoint = "best",
) -> None:
    """Open a run's model as a page in the browser.

    One file that holds the model and runs it without a network: text is continued as you write,
    with the surprisal, the predictions and the attention of every character.

    Examples: `chargpt play`, `chargpt play runs/novel --out novel.html`.
    """
    require_output(out)
    loaded = load(run, checkpoint)
    page = out or loaded.writable_folder().path / PLAY
    require_output(page)
    write(export_html, loaded, page)
    if page.is_file() and not is_open_descriptor(page):
        address = page.absolute().as_uri()
        if is_open and not webbrowser.open(address):
            console.say(f"no browser opened; open {address} in one")
