"""What rank 0 has read of a text and a run, on the other ranks; on hosts without its files too."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chargpt.config import TextConfig
from chargpt.distributed import RankGroup, rank_variable
from chargpt.store.checkpoint import Checkpoint, read_checkpoint
from chargpt.store.run import Run, open_run, run_of
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import read_prepared
from chargpt.text.tokenizer import CharTokenizer

CHUNK_BYTES = 2**26


def shared_run(group: RankGroup, path: str, device: str = "cpu") -> Run:
    """Return a run; on other ranks than 0, which may not see it, what that has read."""

    def read() -> Checkpoint:
        return open_run(path).load("best", optimizer=False)

    saved = read() if group.is_alone else on_all_ranks(group, read, optimizer=False)
    return run_of(saved, device)


def on_all_ranks(group: RankGroup, read: Callable[[], Any], *, optimizer: bool = True) -> Any:
    """Return the text or checkpoint that `read` returns on rank 0, where alone it is called.

    `optimizer`: whether other ranks need the optimizer state of a checkpoint.
    """
    found, facts = None, list[str]()
    if group.is_main:
        found = read()
        if isinstance(found, Corpus):
            facts = [found.settings.model_dump_json(), found.tokenizer.to_json()]
    facts = json.loads(group.broadcast_text(json.dumps(facts)))
    with mirrored(None if found is None else found.folder, group) as folder:
        if found is None and facts:
            settings = TextConfig.model_validate_json(facts[0])
            tokenizer = CharTokenizer.from_json(facts[1])
            found = read_prepared(folder, settings, tokenizer, waits=False)
        elif found is None:
            found = read_checkpoint(folder, optimizer=optimizer)
    return found


@contextmanager
def mirrored(folder: Path | None, group: RankGroup) -> Iterator[Path]:
    """Yield a folder of files, which rank 0 names, on every rank: itself, or a copy of its files.

    A host that does not see it gets one copy from rank 0, in the system's temporary folder, which
    is deleted when all ranks have left the block: what they have mapped of it stays.
    """
    facts = [] if folder is None else [str(folder.absolute()), secrets.token_hex(8), _facts(folder)]
    path, token, files = json.loads(group.broadcast_text(json.dumps(facts)))
    sees_it = _facts(Path(path)) == files
    if not group.all_reduce_any(not sees_it):
        yield Path(path)
        return
    parent = Path(tempfile.gettempdir()) / f"chargpt-{token}"
    copy = parent / Path(path).name  # which says a checkpoint's step
    writes = not sees_it and rank_variable("LOCAL_RANK") == 0
    try:
        if writes:
            parent.mkdir(mode=0o700)
            copy.mkdir()
        for name, (size, _) in files.items():
            with (
                open(folder / name if folder else os.devnull, "rb") as source,
                open(copy / name if writes else os.devnull, "wb") as target,
            ):
                for begin in range(0, size, CHUNK_BYTES):
                    n_bytes = min(CHUNK_BYTES, size - begin)
                    target.write(group.broadcast_bytes(source.read(n_bytes), n_bytes))
        group.all_reduce_any(False)  # a barrier: the copy of this host is complete
        yield Path(path) if sees_it else copy
        group.all_reduce_any(False)
    finally:
        if writes:
            shutil.rmtree(parent, ignore_errors=True)


def _facts(folder: Path) -> dict[str, list[int]]:
    """Return size and time of change of each file in a folder, if there is one, by name."""
    files = {}
    with suppress(OSError):
        for file in filter(Path.is_file, folder.iterdir()):
            files[file.name] = [file.stat().st_size, file.stat().st_mtime_ns]
    return files
