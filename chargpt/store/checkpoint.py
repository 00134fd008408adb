"""The commit protocol: a checkpoint is there whole, or not at all.

It is written into `step-N.tmp/`, each file flushed to disk, the manifest (size and sha256 of all
the others) last; the folder is flushed and renamed, its parent flushed; then the pointer file is
replaced. Old checkpoints go only after that. A reader believes nothing without its manifest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chargpt.errors import RunError
from chargpt.files import flush_folder, write_atomically, write_flushed

MANIFEST = "manifest.json"
MAX_JSON_BYTES = 64_000_000


def to_json(value: object) -> bytes:
    """Return readable JSON with keys in a fixed order."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        RunError: the file is missing, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
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


def commit(parent: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """Write one checkpoint under `parent` and return its folder."""
    final = parent / folder_name(step)
    temporary = parent / f"{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    manifest = {}
    for name, content in files.items():
        write_flushed(temporary / name, content)
        manifest[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_flushed(temporary / MANIFEST, to_json({"step": step, "files": manifest}))
    flush_folder(temporary)
    if final.exists():  # the same step, saved again
        shutil.rmtree(final)
    os.rename(temporary, final)
    flush_folder(parent)
    return final


def point(parent: Path, pointer: str, folder: Path) -> None:
    """Make `latest.json` or `best.json` name a checkpoint by its folder and manifest's sha256."""
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    content = {"checkpoint": folder.name, "manifest_sha256": digest}
    write_atomically(parent / f"{pointer}.json", to_json(content))


def follow(parent: Path, pointer: str) -> Path:
    """Return the checkpoint folder that a pointer names, after checking its manifest's sum.

    Raises:
        RunError: the pointer is missing or does not agree with the folder.
    """
    content = read_json(parent / f"{pointer}.json")
    name, digest = str(content.get("checkpoint")), content.get("manifest_sha256")
    folder = parent / name
    if not name.startswith("step-") or not name[5:].isdigit():
        raise RunError(f"{parent / pointer}.json names no checkpoint; delete it")
    try:
        found = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        raise RunError(f"{folder} has no readable manifest; use another checkpoint") from None
    if found != digest:
        raise RunError(f"{folder} is not the checkpoint that {pointer}.json names; use another")
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """Return a checkpoint's files, every one checked against the manifest.

    Raises:
        RunError: a file is missing, changed, or not named as it should be.
    """
    listed = read_json(folder / MANIFEST).get("files")
    if not isinstance(listed, dict):
        raise RunError(f"{folder / MANIFEST} lists no files; use another checkpoint")
    files = {}
    for name, facts in listed.items():
        path = folder / name
        if name != Path(name).name or path.is_symlink() or not isinstance(facts, dict):
            raise RunError(f"{folder / MANIFEST} is malformed at {name!r}; use another checkpoint")
        try:
            if path.stat().st_size != facts.get("size"):
                raise RunError(f"{path} is not of the size it was saved with; use another")
            content = path.read_bytes()
        except OSError as error:
            raise RunError(
                f"{path} cannot be read ({error.strerror}); use another checkpoint"
            ) from None
        if hashlib.sha256(content).hexdigest() != facts.get("sha256"):
            raise RunError(f"{path} has changed since it was saved; use another checkpoint")
        files[name] = content
    return files


def committed(parent: Path) -> list[Path]:
    """Return the committed checkpoint folders, oldest first."""
    return sorted(
        path
        for path in parent.glob("step-*")
        if path.name[5:].isdigit() and (path / MANIFEST).is_file()
    )


def prune(parent: Path, keep: Iterable[Path], keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and those named in `keep`."""
    kept = {path.name for path in keep}
    for folder in committed(parent)[:-keep_last]:
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)
