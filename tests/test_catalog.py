"""The catalog of named texts: downloads from a local HTTP server, and settings."""

import hashlib
import io
import logging
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from chargpt.config import TextConfig
from chargpt.errors import ConfigError, DownloadError, TextError
from chargpt.text import catalog
from chargpt.text.catalog import CATALOG, Entry, built_in_text, fetch, resolve_settings
from chargpt.text.prepare import load_corpus

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 5000


def zip_of(content: bytes, member: str = "text8") -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(member, content)
    return archive.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.requested.append(self.path)
        name, _, fault = self.path.partition("-")
        if name not in server.bodies:
            self.send_error(404)
            return
        body = server.bodies[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "slow":
            server.stopped.wait(10)
        else:
            with suppress(ConnectionError):  # the client may hang up first
                self.wfile.write(body[: len(body) // 2] if fault == "broken" else body)
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[str] = []
        self.bodies = {"/text": TEXT, "/zip": zip_of(TEXT)}
        self.stopped = threading.Event()

    def entry(self, path: str = "/text") -> Entry:
        """Return a catalog entry, with correct checksums, for one of the server's files."""
        body = self.bodies.get(path.partition("-")[0], b"")
        return Entry(
            "sample",
            "a text",
            f"http://127.0.0.1:{self.server_port}{path}",
            f"sha256:{hashlib.sha256(body).hexdigest()}",
            content_hash=f"md5:{hashlib.md5(TEXT).hexdigest()}",
            size=len(TEXT),
            member="text8" if path.startswith("/zip") else None,
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.stopped.set()
        running.shutdown()
        thread.join()


def error_message(entry: Entry, folder: Path) -> str:
    """Fail to fetch without changing the folder, and return the error message."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(DownloadError) as caught:
        fetch(entry, folder)
    assert sorted(folder.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 1
    return message


@pytest.mark.parametrize("path", ["/text", "/zip"])
def test_a_text_is_downloaded_once_and_verified(server: Server, tmp_path: Path, path: str) -> None:
    reports: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "data"
    found = fetch(server.entry(path), folder, lambda *report: reports.append(report))
    assert found == folder / "sample.txt"
    assert found.read_bytes() == TEXT
    assert [file.name for file in folder.iterdir()] == ["sample.txt"]
    size = len(server.bodies[path])
    assert reports[-1] == ("fetching", size, size)
    assert all(name == "fetching" and done <= total for name, done, total in reports)
    assert fetch(server.entry(path), folder) == found
    assert server.requested == [path]


@pytest.mark.parametrize("content", [b"x" * len(TEXT), TEXT[:-1]])
def test_a_file_of_the_name_with_other_content_stays(
    server: Server, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "sample.txt"
    path.write_bytes(content)
    with pytest.raises(TextError, match=r"is not the published sample; rename or delete it, or"):
        fetch(server.entry(), tmp_path)
    assert path.read_bytes() == content
    path.unlink()
    with pytest.raises(ConfigError, match=r"sample\.txt exists"):
        fetch(server.entry(), tmp_path, lambda *_: path.write_bytes(content))
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["sample.txt"]


def test_a_folder_with_a_name_like_a_temporary_one_stays(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".fetching-mythings").mkdir()
    (tmp_path / ".fetching-mythings" / "a").touch()
    fetch(server.entry(), tmp_path)
    assert (tmp_path / ".fetching-mythings" / "a").exists()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/text", TEXT[::-1]),
        ("/zip", b"no archive"),
        ("/zip", zip_of(b"\0" * 50_000_000)),
    ],
    ids=["text", "no archive", "a bomb"],
)
def test_a_text_with_a_wrong_checksum_is_neither_written_nor_unzipped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    entry = server.entry(path)
    server.bodies[path] = body
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert "with another checksum than the published one" in error_message(entry, tmp_path)
    assert logging.getLogger("pooch").level in (logging.NOTSET, logging.CRITICAL)


@pytest.mark.parametrize("path", ["/text-broken", "/text-slow"])
def test_an_interrupted_transfer_is_rejected(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(catalog, "TIMEOUT", 0.2)
    assert "cannot be reached: " in error_message(server.entry(path), tmp_path)


def test_a_server_or_folder_that_cannot_be_used_is_rejected(server: Server, tmp_path: Path) -> None:
    assert "/none answered 404" in error_message(server.entry("/none"), tmp_path)
    (tmp_path / "data").write_text("a file in the way")
    assert "cannot be written to" in error_message(server.entry(), tmp_path / "data" / "texts")
    with socket.socket() as unused:  # bound and not listening: every connection is refused
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        entry = Entry("sample", "", f"http://127.0.0.1:{port}/", "md5:0", size=1)
        assert "check the network" in error_message(entry, tmp_path)


def test_the_built_in_text_is_long_and_cannot_be_fetched(tmp_path: Path) -> None:
    corpus = load_corpus()
    assert corpus.name == "python-docs"
    assert corpus.n_characters > 300_000
    assert corpus.key == load_corpus().key
    with pytest.raises(TextError, match="built in"):
        fetch(CATALOG["python-docs"], tmp_path)


@pytest.mark.parametrize("facts", [{}, {"topics": {}}])
def test_a_python_without_its_documentation_names_another_text(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object]
) -> None:
    empty = SimpleNamespace(**facts)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", empty)
    monkeypatch.setattr("pydoc_data.topics", empty, raising=False)
    with pytest.raises(TextError, match="chargpt data get tinyshakespeare"):
        built_in_text()


def test_named_texts_have_valid_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("tinyshakespeare", "text8", "enwik8"):
        with pytest.raises(TextError, match=f"`chargpt data get {name}`"):
            resolve_settings(name)
        (tmp_path / "data" / f"{name}.txt").write_text("abc")
        text = resolve_settings(name)[0].text  # every one of them is a setting
        assert text.path == str(tmp_path / "data" / f"{name}.txt")
        assert text.val_fraction == (0.1 if name == "tinyshakespeare" else 0.05)


def test_a_named_text_takes_precedence_over_that_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text_of(path: str, config: str | None = "mine.yaml") -> TextConfig:
        return resolve_settings(path, config)[0].text

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/tinyshakespeare.txt").write_text("abc")
    Path("mine.yaml").write_text("text:\n  path: novel.txt\n  val_fraction: 0.3\n")
    text = text_of("tinyshakespeare")
    assert (text.path, text.val_fraction) == (str(tmp_path / "data/tinyshakespeare.txt"), 0.3)
    assert text_of("python-docs").path is None
    assert text_of("novel.txt").path == str(tmp_path / "novel.txt")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert text_of("~/novel.txt", None).path == str(tmp_path / "home" / "novel.txt")


def test_a_download_that_is_longer_than_the_text_is_cut_off(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MAX_SLACK", 1000)
    entry = server.entry()
    server.bodies["/text"] = TEXT * 50
    done: list[int] = []
    with pytest.raises(DownloadError, match="another checksum than the published one"):
        fetch(entry, tmp_path, lambda _, size, __: done.append(size))
    assert max(done) < 2 * len(TEXT)
    assert list(tmp_path.iterdir()) == []
