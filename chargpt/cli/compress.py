"""`chargpt compress` and `chargpt decompress`: lossless compression with a run's model."""

import io
import lzma
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options, runs
from chargpt.device import memory_limit
from chargpt.errors import MissingTextError, RunError, TextError, reason_of
from chargpt.files import read_regular
from chargpt.inference.coding import BYTES_PER_CHARACTER, decode, header_size, read_header
from chargpt.inference.coding import compress as pack
from chargpt.inference.coding import decompress as unpack
from chargpt.outputs import require_new_output, write_new
from chargpt.store.run import open_run
from chargpt.text.source import STDIN, copy_stdin, missing_message
from chargpt.training.adaptive import AdaptiveDecoder

XZ_BYTES = 20_000_000  # beyond it, xz takes longer than one would wait for a comparison
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="The file to write; - for standard output.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]


def compress(
    run: options.RunPath,
    text: Annotated[
        Path, typer.Argument(metavar="IN", help="A text, not a .gz file; - for standard input.")
    ],
    out: Out,
    unknown: options.UnknownOption = None,
    encoding: options.RunEncoding = None,
    mixture: options.Mixture = False,
    adaptive: options.Adaptive = False,
    checkpoint: options.Checkpoint = "best",
    keep: Annotated[
        bool, typer.Option("--keep", help="Never delete the checkpoint, which OUT needs.")
    ] = False,
    force: Force = False,
) -> None:
    """Compress a text losslessly with a run's model.

    To get it back, the same checkpoint, machine and library versions are needed. With --unknown
    skip or replace, characters outside the vocabulary are lost.

    Example: `chargpt compress runs/novel chapter.txt chapter.cgpt --keep`.
    """
    open_run(run)
    content = read_input(text, out, force=force)
    load = partial(runs.load_named_run, run, device="cpu", mixture=mixture or adaptive)
    loaded = load(checkpoint)
    folder = loaded.writable_folder()
    encoding = encoding or loaded.config.text.encoding
    decoded, _ = decode(loaded, content, encoding, str(text))
    decoder = partial(AdaptiveDecoder, loaded) if adaptive else None
    with (
        folder.kept(loaded.step) if keep else nullcontext(),
        console.show_progress(runs.unit_of(loaded), "compressed") as on_progress,
    ):
        packed = pack(loaded, content, on_progress, unknown or "error", decoder, encoding)
        if keep:  # training may have deleted it just before
            load(str(loaded.step))
    runs.warn_of_own_text(loaded, str(text), decoded)
    lost = loaded.tokenizer.find_unknown(decoded)
    runs.say_unknown(loaded, lost, unknown)
    characters = len(decoded) - (len(lost) if unknown == "skip" else 0)
    size = f"{console.characters(characters)}, {len(content):,} bytes -> {len(packed):,} bytes"
    rate = f": {8 * len(packed) / characters:.3f} bits per character" if characters else ""
    xz = ""
    if len(content) <= XZ_BYTES and not lost:
        xz = f"; xz -9: {len(lzma.compress(content, preset=9)):,} bytes"
    write(packed, out, f"{size}{rate}, with {header_size(packed)} bytes of header{xz}", force=force)
    if not folder.is_kept(loaded.step):
        console.say(
            f"decompression needs step {loaded.step:,} of {loaded.folder}, which is deleted when "
            "the run is resumed and a better one is found; --keep protects it and its mixture"
        )


def decompress(
    run: options.RunPath,
    packed: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A file that `chargpt compress` wrote; - for standard input."
        ),
    ],
    out: Out,
    force: Force = False,
) -> None:
    """Decompress a text that was compressed with the same run.

    Example: `chargpt decompress runs/novel chapter.cgpt chapter.txt`.
    """
    open_run(run)
    content = read_input(packed, out, force=force)
    step, kind = read_header(content)
    try:
        loaded = runs.load_named_run(run, str(step), "cpu", mixture=kind != "plain")
    except RunError as error:
        cause = str(error).partition(";")[0]
        raise RunError(
            f"{packed} was compressed with step {step:,} of a run, but {cause}; name the run that "
            "compressed it, or a copy of that run from before it was resumed"
        ) from None
    decoder = partial(AdaptiveDecoder, loaded) if kind == "adaptive" else None
    with console.show_progress(runs.unit_of(loaded), "restored") as on_progress:
        text = unpack(loaded, content, on_progress, decoder)
    write(text, out, f"{len(content):,} bytes -> {len(text):,} bytes", force=force)


def read_input(path: Path, out: Path, *, force: bool) -> bytes:
    """Return the content of a file, after checking that the output file can be written."""
    if str(out) != STDIN:
        require_new_output(out, force=force)
    limit = memory_limit() // BYTES_PER_CHARACTER
    if str(path) == STDIN:
        content = io.BytesIO()
        copy_stdin(content.write, limit)
        return content.getvalue()
    try:
        return read_regular(path.resolve(), limit)  # reading a pipe could wait for ever
    except FileNotFoundError:
        raise MissingTextError(missing_message(path)) from None
    except (OSError, ValueError) as error:
        raise TextError(
            f"{path} cannot be read ({reason_of(error)}); name another file or a part of it, or "
            "pipe a text in and name it `-`"
        ) from None


def write(content: bytes, out: Path, sentence: str, *, force: bool) -> None:
    """Write the result to a file and a sentence to stdout; to stderr if stdout gets the result."""
    if str(out) != STDIN:
        write_new(out, content, force=force)
        console.out_sentence(sentence)
        return
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise console.OutputClosed from None
    console.say(sentence)
