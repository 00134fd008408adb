"""Named texts: the built-in one, and others to download, with their checksums."""

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chargpt.config import Config, merge_settings
from chargpt.distributed import is_main_rank
from chargpt.errors import DownloadError, MissingTextError, TextError, reason_of
from chargpt.files import exists, expand_user, place
from chargpt.text import TextProgress

BUILT_IN = "python-docs"
DATA = Path("data")  # where named texts are fetched to
TIMEOUT = 30  # seconds without a byte
MAX_SLACK = 1_000_000  # bytes that a download may have beyond the text: a ZIP header, a chunk


@dataclass(frozen=True)
class Entry:
    """A named text.

    Attributes:
        name, description: as `chargpt data list` prints them.
        url: None for the built-in text.
        download_hash: checksum of the file at `url`, as `algorithm:hexadecimal`.
        size: bytes of the text itself.
        member, content_hash: of a ZIP archive, the name and the checksum of the text in it.
        settings: the `text.*` settings usual for it.
    """

    name: str
    description: str
    url: str | None = None
    download_hash: str = ""
    size: int = 0
    member: str = ""
    content_hash: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


_HUNDRED_MB: dict[str, object] = {"text.val_fraction": 0.05, "text.test_fraction": 0.05}

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(BUILT_IN, "Python's language reference, which comes with it: no download"),
        Entry(
            "tinyshakespeare",
            "plays of Shakespeare: 1.1 million characters, 65 distinct",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            size=1_115_394,
        ),
        Entry(
            "text8",
            "English Wikipedia, letters and spaces: 100 million, 27 distinct",
            "https://mattmahoney.net/dc/text8.zip",
            "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            content_hash="md5:3bea1919949baf155f99411df5fada7e",
            size=100_000_000,
            member="text8",
            settings=_HUNDRED_MB,
        ),
        Entry(
            "enwik8",
            "English Wikipedia as XML: 100 million bytes, 205 distinct",
            "https://mattmahoney.net/dc/enwik8.zip",
            "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            content_hash="md5:a1fa5ffddb56f4953e226637dabbb36a",
            size=100_000_000,
            member="enwik8",
            # It is usually modelled by bytes; latin-1 decodes each to one character.
            settings={"text.encoding": "latin-1", **_HUNDRED_MB},
        ),
    )
}


def built_in_text() -> str:
    """Return the built-in text: the topics of Python's language reference.

    They are sorted by the ends of their names, since in alphabetical order the topics on types make
    up the validation split, which then differs from the training split.

    Raises:
        MissingTextError: this Python lacks it.
    """
    with suppress(ImportError):  # some distributions leave it out
        from pydoc_data.topics import topics

        if topics:
            return "\n".join(topics[name] for name in sorted(topics, key=lambda name: name[::-1]))
    raise MissingTextError(
        "this Python lacks its documentation, which is the default text; "
        "fetch another with `chargpt data get tinyshakespeare`"
    )


def resolve_settings(
    path: str | None = None,
    config: str | Config | None = None,
    settings: Mapping[str, object] | None = None,
) -> tuple[Config, frozenset[str]]:
    """Return the config of a run, and the dotted keys of the settings that are fixed.

    Args:
        path: a file, folder, glob, name in the catalog, or `-`, made absolute in the config; None:
            what the config names, or the built-in text.
        config: a shipped config's name, a YAML file or a Config; `gpt` by default, which fixes
            nothing.
        settings: values by dotted key, which take precedence over the config.

    Raises:
        ConfigError: a key or value is wrong.
        TextError: the path of a text is empty or not Unicode, or a named text is not there.
    """
    settings = dict(settings or {})
    for key in ("text.val_path", "text.test_path"):
        if isinstance(held_out := settings.get(key), str):
            settings[key] = _absolute(held_out)
    if path is None:
        return merge_settings(config, settings)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise TextError(
            f"the path {path} is not {sys.getfilesystemencoding()}; rename the text, or set "
            "PYTHONUTF8=1 if its name is right"
        ) from None
    value: str | None = _absolute(path)
    defaults: Mapping[str, object] = {}
    if path in CATALOG and not os.path.exists(path):
        defaults, fetched = CATALOG[path].settings, DATA / f"{path}.txt"
        value = None if path == BUILT_IN else str(fetched.absolute())
        if value and is_main_rank() and not fetched.is_file():  # other ranks read no text
            raise TextError(f"{path} is not in {DATA} yet; fetch it with `chargpt data get {path}`")
    return merge_settings(config, {"text.path": value, **settings}, defaults)


def _absolute(path: str) -> str:
    if not path:
        raise TextError("the path of the text is empty; name a file, a folder or a pattern")
    return path if path == "-" else str(expand_user(path).absolute())


class _Meter:
    """The methods of a tqdm bar that pooch's downloader calls; it bounds the download."""

    def __init__(self, on_progress: TextProgress | None, max_bytes: int) -> None:
        self.on_progress, self.max_bytes = on_progress, max_bytes
        self.done = self.total = 0

    def update(self, size: int) -> None:
        self.done += size
        if self.done > self.max_bytes:
            raise ValueError
        if self.on_progress:
            self.on_progress("fetching", min(self.done, self.total or self.done), self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def fetch(entry: Entry, folder: Path = DATA, on_progress: TextProgress | None = None) -> Path:
    """Download a named text to FOLDER/NAME.txt and verify it, unless it is there already.

    Raises:
        DownloadError: the download failed; the folder is unchanged.
        TextError: the text is built in, so there is nothing to download, or another file has its
            name.
        ConfigError: such a file was made during the download.
    """
    if entry.url is None:
        raise TextError(f"{entry.name} is built in; train on it with `chargpt train` without TEXT")
    # imported here, since they delay every command
    import pooch
    from pooch.hashes import hash_matches
    from requests import RequestException

    pooch.get_logger().setLevel(logging.CRITICAL)  # its lines would break the progress bar
    target = folder / f"{entry.name}.txt"
    meter = _Meter(on_progress, entry.size + MAX_SLACK)
    try:
        is_complete = target.is_file() and target.stat().st_size == entry.size
        if is_complete and hash_matches(target, entry.content_hash or entry.download_hash):
            return target
        if exists(target):
            raise TextError(
                f"{target} exists and is not the published {entry.name}; rename or delete it, or "
                "download to another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as temporary:
            found = pooch.retrieve(  # verifies the checksum before unpacking
                entry.url,
                entry.download_hash,
                fname="download",
                path=temporary,
                processor=pooch.Unzip([entry.member]) if entry.member else None,
                downloader=pooch.HTTPDownloader(progressbar=meter, timeout=TIMEOUT),
            )
            file = found[0] if entry.member else found
            os.chmod(file, 0o644)
            place(Path(file), target)
        return target
    except RequestException as error:
        status = getattr(error.response, "status_code", None)
        problem = f"answered {status}" if status else f"cannot be reached: {type(error).__name__}"
    except ValueError:
        problem = "sent a file with another checksum than the published one"
    except OSError as error:
        raise DownloadError(
            f"{entry.name} cannot be written to {folder} ({reason_of(error)}); "
            "make room or choose another folder"
        ) from None
    raise DownloadError(
        f"cannot fetch {entry.name} ({entry.url} {problem}); check the network and try again "
        "later, or download it yourself and pass its path as TEXT"
    )
