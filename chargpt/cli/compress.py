"""`chargpt compress` and `chargpt decompress`: lossless compression with a run's model."""

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from chargpt.cli import console, options, runs
from chargpt.cli.progress import Progress
from chargpt.errors import ConfigError, TextError
from chargpt.files import write_atomically
from chargpt.inference.coding import compress as pack
from chargpt.inference.coding import decompress as unpack

XZ_BYTES = 20_000_000  # beyond it, xz takes longer than one would wait for a comparison
Work = Callable[..., bytes]
RunPath = Annotated[Path, typer.Argument(help="The run's folder.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]


def compress(
    run: RunPath,
    text: Annotated[Path, typer.Argument(metavar="IN", help="A text, as UTF-8.")],
    out: Out,
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Compress a text losslessly with a run's model.

    To get it back, the same run, machine and library versions are needed.

    Example: `chargpt compress runs/novel chapter.txt chapter.cgpt`.
    """
    content = _read(text)
    packed = _work(pack, run, content, checkpoint, out, force=force)
    characters = len(content.decode())
    bits = 8 * len(packed) / max(1, characters)
    beside = ""
    if len(content) <= XZ_BYTES:
        beside = f"; xz -9: {len(lzma.compress(content, preset=9)):,}"
    console.out(
        f"{console.characters(characters)}, {len(content):,} bytes -> {len(packed):,} bytes: "
        f"{bits:.3f} bits per character{beside}"
    )


def decompress(
    run: RunPath,
    packed: Annotated[Path, typer.Argument(metavar="IN", help="What `chargpt compress` has made.")],
    out: Out,
    checkpoint: options.Checkpoint = "best",
    force: Force = False,
) -> None:
    """Decompress a text that was compressed with the same run.

    Example: `chargpt decompress runs/novel chapter.cgpt chapter.txt`.
    """
    content = _work(unpack, run, _read(packed), checkpoint, out, force=force)
    console.out(f"{console.characters(len(content.decode()))}, {len(content):,} bytes")


def _read(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        TextError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read ({error.strerror}); name another file") from None


def _work(
    work: Work, run: Path, content: bytes, checkpoint: str, out: Path, *, force: bool
) -> bytes:
    """Compress or decompress with a progress bar, and write the result.

    Raises:
        ChargptError: the run, the content or the output file is unusable.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; name another file, or replace it with --force")
    loaded = runs.open_run(run, checkpoint, "cpu")
    with Progress(len(content), "character") as bar:
        result = work(loaded, content, bar.callback(""))
    write_atomically(out, result)
    return result
