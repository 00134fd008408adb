"""Texts with a name: the embedded one, and others by address and checksum."""

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chargpt.errors import DownloadError, TextError

EMBEDDED = "python-docs"
TIMEOUT = 30  # seconds without a byte
CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Entry:
    """A named text.

    Attributes:
        name, description: for people.
        url: where it is published; None for the embedded text.
        known_hash: of the file at `url`, as `algorithm:hexadecimal`.
        content_hash, size: of the text itself, size in bytes.
        member: the text's name inside a ZIP archive.
        settings: `text.*` settings that are customary for it.
    """

    name: str
    description: str
    url: str | None = None
    known_hash: str = ""
    content_hash: str = ""
    size: int = 0
    member: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


_HUNDRED_MB: dict[str, object] = {"text.val_fraction": 0.05, "text.test_fraction": 0.05}
_TINYSHAKESPEARE = "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(EMBEDDED, "the Python language reference that every CPython carries (no network)"),
        Entry(
            "tinyshakespeare",
            "40,000 lines of Shakespeare's plays: 1,115,394 characters, 65 kinds",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            _TINYSHAKESPEARE,
            content_hash=_TINYSHAKESPEARE,
            size=1_115_394,
        ),
        Entry(
            "text8",
            "English Wikipedia, letters and spaces only: 100,000,000 characters, 27 kinds",
            "http://mattmahoney.net/dc/text8.zip",
            "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            content_hash="md5:3bea1919949baf155f99411df5fada7e",
            size=100_000_000,
            member="text8",
            settings=_HUNDRED_MB,
        ),
        Entry(
            "enwik8",
            "English Wikipedia as XML, byte by byte: 100,000,000 bytes, 205 kinds",
            "http://mattmahoney.net/dc/enwik8.zip",
            "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            content_hash="md5:a1fa5ffddb56f4953e226637dabbb36a",
            size=100_000_000,
            member="enwik8",
            # Its customary unit is the byte, and latin-1 makes one character of each.
            settings={"text.encoding": "latin-1", **_HUNDRED_MB},
        ),
    )
}


def embedded_text() -> str:
    """Return the embedded text: the topics of Python's language reference, in sorted order.

    Raises:
        TextError: this Python came without it.
    """
    topics: object = None
    try:
        from pydoc_data import topics as module

        topics = module.topics
    except (ImportError, AttributeError):
        pass
    if not isinstance(topics, dict) or not topics:
        raise TextError(
            "this Python came without its documentation, the default text; "
            "fetch another with `chargpt data get tinyshakespeare`"
        )
    return "\n".join(str(topics[name]) for name in sorted(topics))


def settings_for(name: str, folder: Path = Path("data")) -> dict[str, object] | None:
    """Return the `text.*` settings of a named text; None if the catalog has no such name.

    Raises:
        TextError: the text has not been fetched yet.
    """
    entry = CATALOG.get(name)
    if entry is None:
        return None
    if entry.url is None:
        return {"text.path": None}
    path = folder / f"{name}.txt"
    if not path.is_file():
        raise TextError(f"{name} is not in {folder} yet; fetch it with `chargpt data get {name}`")
    return {"text.path": str(path), **entry.settings}


def fetch(entry: Entry, folder: Path = Path("data"), progress: Progress | None = None) -> Path:
    """Bring a named text into a folder as NAME.txt, checked, unless it is there already.

    Args:
        entry: what to fetch.
        folder: made if need be.
        progress: called with ("fetching", bytes so far, bytes in all).

    Raises:
        DownloadError: with cause and remedy; the folder is left as it was.
        TextError: the text is embedded, and there is nothing to fetch.
    """
    if entry.url is None:
        raise TextError(
            f"{entry.name} is embedded; train on it with `chargpt train`, no TEXT named"
        )
    target = folder / f"{entry.name}.txt"
    try:
        if _has_content(target, entry):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as workplace:
            part = _download(entry, Path(workplace), progress)
            if entry.member is not None:
                part = _extract(entry, part, Path(workplace) / "text")
            os.chmod(part, 0o644)
            os.replace(part, target)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DownloadError(
            f"{entry.name} cannot be written to {folder} ({reason}); "
            "make room or choose another folder"
        ) from None
    return target


def _has_content(path: Path, entry: Entry) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == entry.size
        and _file_hash(path, entry.content_hash) == entry.content_hash
    )


def _file_hash(path: Path, like: str) -> str:
    """Return the file's checksum by the algorithm that `like` begins with."""
    algorithm = like.partition(":")[0]
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


class _Meter:
    """What pooch's downloader tells its progress to: the shape of a tqdm bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.done, self.total = progress, 0, 0

    def update(self, size: int) -> None:
        self.done += size
        self.progress("fetching", min(self.done, self.total or self.done), self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        self.progress("fetching", self.total, self.total)


def _download(entry: Entry, folder: Path, progress: Progress | None) -> Path:
    """Return the published file, its checksum verified."""
    import pooch
    import requests

    # Its own words would come between ours and the progress bar.
    pooch.get_logger().setLevel(logging.CRITICAL)
    meter = _Meter(progress) if progress else False
    downloader = pooch.HTTPDownloader(progressbar=meter, timeout=TIMEOUT)
    again = f"try `chargpt data get {entry.name}` again later"
    try:
        found = pooch.retrieve(
            entry.url, entry.known_hash, fname="part", path=folder, downloader=downloader
        )
    except requests.exceptions.HTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        cause = f"{entry.url} answered {status}"
    except requests.exceptions.ChunkedEncodingError:
        cause = f"the transfer from {entry.url} broke off"
    except requests.exceptions.Timeout:
        cause = f"{entry.url} did not answer within {TIMEOUT} seconds"
    except requests.exceptions.ConnectionError as error:
        if "timed out" in str(error):  # in the middle of the text, requests calls it this
            cause = f"{entry.url} fell silent for {TIMEOUT} seconds"
        else:
            cause = f"{entry.url} cannot be reached"
            again = "check the network, or bring the file by hand and name it as TEXT"
    except requests.exceptions.RequestException as error:
        cause = f"{entry.url} could not be fetched ({type(error).__name__})"
    except ValueError:
        cause = f"{entry.url} sent a file whose checksum is not the one that its publisher states"
    else:
        return Path(found)
    raise DownloadError(f"{entry.name} was not fetched: {cause}; {again}")


def _extract(entry: Entry, archive: Path, target: Path) -> Path:
    """Unpack the one member, never more bytes than the entry states, and check it."""
    assert entry.member is not None
    try:
        with (
            zipfile.ZipFile(archive) as unpacked,
            unpacked.open(entry.member) as member,
            open(target, "wb") as file,
        ):
            left = entry.size + 1  # one more, to notice that there is more
            while left > 0 and (chunk := member.read(min(CHUNK_BYTES, left))):
                file.write(chunk)
                left -= len(chunk)
        intact = _has_content(target, entry)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError):
        intact = False
    if not intact:
        raise DownloadError(
            f"{entry.name} was not fetched: the archive at {entry.url} does not hold the text "
            "that its publisher states; try again later"
        )
    return target
