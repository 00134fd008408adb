"""The commit protocol: a checkpoint is there whole, or not at all.

It is written into `step-N.tmp/`, each file flushed to disk, the manifest (size and sha256 of all
the others) last; the folder is flushed and renamed, its parent flushed; then the pointer file is
replaced. Old checkpoints go only after that. A reader believes nothing without its manifest, and
reads nothing that is larger than it can be.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import Chunks, sync_directory, write_atomically, write_synced

MANIFEST = "manifest.json"
MAX_JSON_BYTES = 64_000_000
NAME = re.compile(r"step-[0-9]{8,18}")


def to_json(value: object) -> bytes:
    """Return readable JSON with keys in a fixed order."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        RunError: the file is missing, not a plain file, too large, or not a JSON object.
    """
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            raise RunError(f"{path} is not a plain file, as all of a run are; restore it")
        if facts.st_size > MAX_JSON_BYTES:
            raise RunError(f"{path} is far too large for what it should be; restore it")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path} is missing; restore it or use another checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}); restore it") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is not a JSON object; restore it")
    return value


def folder_name(step: int) -> str:
    """Return the folder's name for a step: `step-00001000`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step-"))


def commit(parent: Path, step: int, files: Mapping[str, Chunks]) -> Path:
    """Write one checkpoint under `parent` and return its folder; if that fails, leave no part.

    Raises:
        OSError: the disk refused.
    """
    clear_unfinished(parent)
    final = parent / folder_name(step)
    temporary = parent / f"{final.name}.tmp"
    try:
        temporary.mkdir(parents=True)
        with ThreadPoolExecutor(len(files)) as beside:  # summing takes longer than writing
            sums = {name: beside.submit(_sha256, chunks) for name, chunks in files.items()}
            for name, chunks in files.items():
                write_synced(temporary / name, chunks)
        manifest = {
            name: {"size": sum(map(len, chunks)), "sha256": sums[name].result()}
            for name, chunks in files.items()
        }
        write_synced(temporary / MANIFEST, [to_json({"step": step, "files": manifest})])
        sync_directory(temporary)
        discard(final)  # a run that went on from an older checkpoint has come here again
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(parent)
    return final


def _sha256(chunks: Chunks) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def discard(folder: Path) -> None:
    """Delete a checkpoint so that, whenever the process dies, no part of it passes for one."""
    if folder.exists():
        going = folder.with_name(f"{folder.name}.old.tmp")
        os.rename(folder, going)
        shutil.rmtree(going, ignore_errors=True)


def clear_unfinished(parent: Path) -> None:
    """Delete what a process that died in the middle of a save, or of a deletion, has left."""
    for left in parent.glob("step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def write_pointer(parent: Path, pointer: str, folder: Path) -> None:
    """Make `latest.json` or `best.json` name a checkpoint by its folder and manifest's sha256."""
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    content = {"checkpoint": folder.name, "manifest_sha256": digest}
    write_atomically(parent / f"{pointer}.json", to_json(content))


def read_pointer(parent: Path, pointer: str) -> tuple[Path, str]:
    """Return the checkpoint folder that a pointer names, and its manifest's sha256.

    Raises:
        RunError: the pointer is missing or malformed.
    """
    content = read_json(parent / f"{pointer}.json")
    name, digest = str(content.get("checkpoint")), str(content.get("manifest_sha256"))
    if not NAME.fullmatch(name):
        raise RunError(f"{parent / pointer}.json names no checkpoint; delete it")
    return parent / name, digest


def resolve_pointer(parent: Path, pointer: str) -> Path:
    """Return the checkpoint folder that a pointer names, after checking its manifest's sum.

    Raises:
        RunError: the pointer is missing or does not agree with the folder.
    """
    folder, digest = read_pointer(parent, pointer)
    _listed(folder)
    found = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    if found != digest:
        raise RunError(f"{folder} is not the checkpoint that {pointer}.json names; use another")
    return folder


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and sha256 of each file that a checkpoint's manifest lists.

    Raises:
        RunError: the folder or its manifest is missing, malformed, or of another step.
    """
    if folder.is_symlink():
        raise RunError(f"{folder} is a symbolic link, not a checkpoint; restore it")
    content = read_json(folder / MANIFEST)
    if content.get("step") != step_of(folder):
        raise RunError(f"{folder / MANIFEST} is another step's; use another checkpoint")
    files = content.get("files")
    if not isinstance(files, dict):
        raise RunError(f"{folder / MANIFEST} lists no files; use another checkpoint")
    listed = {}
    for name, facts in files.items():
        facts = facts if isinstance(facts, dict) else {}
        size, digest = facts.get("size"), facts.get("sha256")
        if name != Path(name).name or not isinstance(size, int) or not isinstance(digest, str):
            raise RunError(f"{folder / MANIFEST} is malformed at {name!r:.80}; use another")
        listed[name] = (size, digest)
    return listed


def read(folder: Path, most: Mapping[str, int]) -> dict[str, bytes]:
    """Return some of a checkpoint's files, every byte checked against the manifest.

    Args:
        folder: of the checkpoint.
        most: the files wanted, and how many bytes each can have at most.

    Raises:
        RunError: a file is missing, too large, changed, or not a plain file.
    """
    listed = _listed(folder)
    files = {}
    for name, limit in most.items():
        path = folder / name
        if name not in listed:
            raise RunError(f"{folder} lacks {name}; use another checkpoint")
        size, digest = listed[name]
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                raise RunError(f"{path} is not a plain file, as all of a run are; use another")
            if facts.st_size != size:
                raise RunError(f"{path} is not of the size it was saved with; use another")
            if size > limit:
                raise RunError(f"{path} is larger than what its config says; use another")
            content = path.read_bytes()
        except OSError as error:
            raise RunError(
                f"{path} cannot be read ({error.strerror}); use another checkpoint"
            ) from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise RunError(f"{path} has changed since it was saved; use another checkpoint")
        files[name] = content
    return files


def committed(parent: Path) -> list[Path]:
    """Return the committed checkpoint folders, oldest first."""
    found = [
        path
        for path in parent.glob("step-*")
        if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of)


def prune(parent: Path, keep: Iterable[Path], keep_last: int, newest: Path) -> None:
    """Delete old checkpoints, but for the last `keep_last` up to `newest` and those in `keep`.

    What is newer than `newest` was passed over as damaged, and is not ours to delete.
    """
    kept = {path.name for path in keep}
    older = [path for path in committed(parent) if step_of(path) <= step_of(newest)]
    for folder in older[:-keep_last]:
        if folder.name not in kept:
            discard(folder)
