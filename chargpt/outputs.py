"""Files that a user names: pages, plots, exports and texts that a command writes.

A page or plot holds the SHA-256 of its own content, by which it is known as one that nobody has
edited: only such a file is replaced without being asked.
"""

import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chargpt.errors import ConfigError, reason_of
from chargpt.files import exists, taken, write_atomically

HEAD_BYTES = 4096  # of a page or plot, which hold its mark
NO_DIGEST = 64 * "0"
MARK = f"chargpt sha256:{NO_DIGEST}"  # which `with_digest` completes
MARKED = re.compile(rb'(?:content="|<dc:identifier>|tEXtSoftware\0)chargpt sha256:([0-9a-f]{64})')


def write_output(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file that a user named, if `require_output` accepts it.

    A link stays and its target is written; a file keeps its mode; a device or pipe is written to.

    Raises:
        ConfigError: there is a file that `require_output` rejects, or it cannot be written.
    """
    with writing(path):
        require_output(path, force=force)
        _write(path, content, force=force or exists(path) or None)


def write_new(path: Path, content: bytes, *, force: bool | None = None) -> None:
    """Write a file as `write_output`, but replace none unless `force`, as in `require_new`."""
    with writing(path):
        require_new_output(path, force=force)
        _write(path, content, force=force)


def _write(path: Path, content: bytes, *, force: bool | None) -> None:
    if path.exists() and (is_open_descriptor(path) or not path.is_file()):
        with open(path, "ab") as file:  # a redirected /dev/stdout is a file, and not to be cut
            file.write(content)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(os.path.realpath(path)), content, force=force)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report an OSError in the block as a ConfigError: the path that a user named is of no use."""
    try:
        yield
    except BrokenPipeError:  # nobody reads: that is no error
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({reason_of(error)}); name another") from None


def require_new_output(path: Path, *, force: bool | None = None) -> None:
    """Check as `require_output`, but reject every file unless `force`, as in `require_new`."""
    require_output(path, force=True)
    if not force and path.is_file() and not is_open_descriptor(path):
        raise taken(path, force)


def require_output(path: Path | None, *, force: bool = False) -> None:
    """Check that a file, if one is named, may be written, else ConfigError.

    Accepted: no file yet, an empty one, a page or plot that nobody has edited since chargpt wrote
    it, a pipe or a device; with `force`, all but a folder.
    """
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path is None or force or not path.is_file() or is_open_descriptor(path):
        return
    try:
        with open(path, "rb") as file:
            content = file.read(HEAD_BYTES)
            if MARKED.search(content):
                content += file.read()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({reason_of(error)}); name another file"
        ) from None
    if content and not is_unchanged_output(content):
        raise ConfigError(
            f"{path} exists and was not made by chargpt, or has been edited or is of an earlier "
            "version; name another file, or delete it"
        )


def require_no_link(path: Path) -> None:
    """Reject a link at a path in a folder that a user named: ConfigError."""
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symbolic link, and none is followed in the folder of a comparison; "
            "delete it, or name another folder with --out"
        )


def is_open_descriptor(path: Path) -> bool:
    """Return whether a path stands for an open file, as /dev/stdout does."""
    return str(path).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/"))


def with_digest(content: bytes) -> bytes:
    """Return a page, SVG or PNG with the SHA-256 of its content in its mark, if it has one.

    It is that of the content with zeros in its place.
    """
    mark = MARKED.search(content, 0, HEAD_BYTES)
    if mark is None:
        return content
    digest = hashlib.sha256(_with_mark(content, mark, NO_DIGEST)).hexdigest()
    return _with_mark(content, mark, digest)


def _with_mark(content: bytes, mark: re.Match[bytes], digest: str) -> bytes:
    end = mark.end()
    marked = content[mark.start() : end - len(digest)] + digest.encode()
    if marked.startswith(b"tEXt"):  # a chunk of a PNG, which ends with its CRC
        marked, end = marked + zlib.crc32(marked).to_bytes(4, "big"), end + 4
    return content[: mark.start()] + marked + content[end:]


def is_unchanged_output(content: bytes) -> bool:
    """Return whether a page, SVG or PNG is, to the byte, as chargpt wrote it.

    It is not if it was edited, or if it is of an earlier version, which wrote no digest.
    """
    has_mark = MARKED.search(content, 0, HEAD_BYTES) is not None
    return has_mark and with_digest(content) == content
