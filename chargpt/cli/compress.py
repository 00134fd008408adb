"""`chargpt compress` and `chargpt decompress`: lossless compression with a run's model."""

import lzma
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options, runs
from chargpt.cli.progress import Progress
from chargpt.errors import ConfigError, TextError
from chargpt.files import write_atomically
from chargpt.inference.coding import compress as pack
from chargpt.inference.coding import decompress as unpack
from chargpt.inference.evaluation import OnProgress
from chargpt.store.run import Run

XZ_BYTES = 20_000_000  # beyond it, xz takes longer than one would wait for a comparison
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]


def compress(
    run: options.RunPath,
    text: Annotated[Path, typer.Argument(metavar="IN", help="A text, as UTF-8.")],
    out: Out,
    unknown: options.UnknownPolicy = None,
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Compress a text losslessly with a run's model.

    To get it back, the same run, machine and library versions are needed. With --unknown skip or
    replace, characters outside the vocabulary are lost.

    Example: `chargpt compress runs/novel chapter.txt chapter.cgpt`.
    """

    lost = 0

    def pack_text(loaded: Run, content: bytes, on_progress: OnProgress) -> bytes:
        nonlocal lost
        packed = pack(loaded, content, on_progress, unknown or "error")
        lost = loaded.tokenizer.count_unknown(content.decode())
        console.say_unknown(lost, unknown or "error")
        return packed

    content, packed = _convert(pack_text, run, text, checkpoint, out, force=force)
    characters = len(content.decode()) - (lost if unknown == "skip" else 0)
    bits = f": {8 * len(packed) / characters:.3f} bits per character" if characters else ""
    xz = ""
    if len(content) <= XZ_BYTES and not lost:
        xz = f"; xz -9: {len(lzma.compress(content, preset=9)):,} bytes"
    sizes = f"{len(content):,} bytes -> {len(packed):,} bytes"
    console.out_sentence(f"{console.characters(characters)}, {sizes}{bits}{xz}")


def decompress(
    run: options.RunPath,
    packed: Annotated[
        Path, typer.Argument(metavar="IN", help="A file that `chargpt compress` wrote.")
    ],
    out: Out,
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Decompress a text that was compressed with the same run.

    Example: `chargpt decompress runs/novel chapter.cgpt chapter.txt`.
    """
    _, content = _convert(unpack, run, packed, checkpoint, out, force=force)
    console.out(f"{console.characters(len(content.decode()))}, {len(content):,} bytes")


def _convert(
    coder: Callable[..., bytes], run: Path, source: Path, checkpoint: str, out: Path, *, force: bool
) -> tuple[bytes, bytes]:
    """Compress or decompress a file with a progress bar; return its content and the result.

    Raises:
        ChargptError: the run, the file or the output file is unusable.
    """
    try:
        content = source.read_bytes()
    except OSError as error:
        raise TextError(f"{source} cannot be read ({error.strerror}); name another file") from None
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}; create it, or name another file")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; name another file, or replace it with --force")
    loaded = runs.open_run(run, checkpoint, "cpu")
    with closing(Progress(len(content), "character")) as bar:
        result = coder(loaded, content, bar.callback(""))
    write_atomically(out, result)
    return content, result
