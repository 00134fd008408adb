"""Long texts: read in segments, by several processes, and prepared further after a kill."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import chargpt
from chargpt.config import TextConfig
from chargpt.errors import OperationError, RunError, TextError
from chargpt.store import layout
from chargpt.text import prepare as module
from chargpt.text import source, workers
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import JOURNAL, UNSHUFFLED, load_corpus, prepare, read_prepared
from chargpt.text.source import find_text

LINES = "".join(f"{number} naïve lines, 字 {number * 7919 % 1009}\n" for number in range(3000))
# a program whose segments are of 4 kB, and that is killed when its journal has so many results
KILLED = """
import os, signal, sys
from chargpt.text import source, workers
source.CHUNK_BYTES, source.SEGMENT_BYTES = 1000, 4000
n_results, lines, line = int(sys.argv[1]), [], workers._line  # for each read or written
def counted(entry):
    lines.extend([entry] if entry else [])
    if len(lines) > n_results:
        os.kill(os.getpid(), signal.SIGKILL)
    return line(entry)
workers._line = counted
start = workers.Workers.__enter__
workers.Workers.__enter__ = lambda self: print(len(self.known)) or start(self)
"""
# in the folder of texts/: prepare it in text/
PREPARE = f"""{KILLED}
from pathlib import Path
from chargpt.config import TextConfig
from chargpt.text.prepare import prepare
settings = TextConfig(path="texts", documents=sys.argv[2] or None)
prepare(source.find_text(settings), settings, Path("text"))
"""
# `chargpt train texts`
TRAIN = f"""{KILLED}
sys.argv[1:] = "train texts -c bigram -s train.max_steps=3 -s model.block_size=16".split()
from chargpt.cli.main import run
run()
"""
NEVER = "1000"  # there are 42 results


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text of 32 segments, and the constants that make them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "1.txt").write_text(LINES, "utf-8")
    (folder / "2.txt").write_text("short\n" * 9, "utf-8")
    monkeypatch.setattr(source, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(source, "SEGMENT_BYTES", 4000)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 4000)
    return folder


def prepared(path: Path, folder: Path, **values: object) -> Corpus:
    settings = TextConfig.model_validate({"path": str(path), **values})
    return prepare(find_text(settings), settings, folder)


@given(
    files=st.lists(
        st.text("ab \n\r-é中\u2028", max_size=60).map(str.encode), min_size=1, max_size=4
    ),
    documents=st.sampled_from([None, "lines", "files", "\n\n", "--", "-a", "é", "%\n", "  "]),
    newlines=st.sampled_from(["keep", "lf"]),
    segment_bytes=st.integers(1, 40),
)
@example([b"ab   cd   ef"], "  ", "keep", 3)
@example([b"ab\n \n \ncd\n \n \nef"], "\n \n", "keep", 3)
@example(["ab\u2028cd\u2028ef".encode()], "\u2028", "lf", 3)
def test_the_segments_of_a_text_in_a_row_are_the_text(
    files: list[bytes], documents: str | None, newlines: str, segment_bytes: int
) -> None:
    # at the end of a file that lacks one, a line end is of the kind of its last segment
    assume(not any(b"\r\n" in each and each[-1:] not in b"\r\n" for each in files))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for number, content in enumerate(files):
            Path(folder, f"{number}.txt").write_bytes(content)
        settings = TextConfig.model_validate(
            {"path": folder, "documents": documents, "newlines": newlines}
        )
        patch.setattr(module, "MIN_SEGMENTS", 10**9)  # no processes
        try:
            whole = load_corpus(settings)
        except TextError:
            assume(False)
        patch.setattr(source, "CHUNK_BYTES", 7)
        patch.setattr(source, "SEGMENT_BYTES", segment_bytes)
        divided = load_corpus(settings)
    assert divided.tokenizer == whole.tokenizer
    assert divided.tokens.tolist() == whole.tokens.tolist()
    assert divided.files == whole.files
    if divided.lines is not None:
        assert divided.lines.tolist() == whole.lines.tolist()


@pytest.mark.parametrize("documents", [None, "lines"])
def test_several_processes_prepare_what_one_does(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: str | None
) -> None:
    several = prepared(texts, tmp_path / "several", documents=documents)
    monkeypatch.setattr(module, "MIN_SEGMENTS", 10**9)
    one = prepared(texts, tmp_path / "one", documents=documents)
    assert several.tokens.tobytes() == one.tokens.tobytes()
    assert (several.key, several.files, several.tokenizer) == (one.key, one.files, one.tokenizer)
    assert several.tokenizer.decode(np.sort(one.tokens)[:1]) == "\n"
    read = read_prepared(tmp_path / "several", several.settings, several.tokenizer)
    assert read.tokens.tobytes() == one.tokens.tobytes()


@pytest.mark.parametrize("documents", [None, "lines"])
def test_a_preparation_that_is_killed_goes_on_to_the_same_bytes(
    texts: Path, tmp_path: Path, documents: str | None
) -> None:
    folder = tmp_path / "text"
    journal, tokens = folder / JOURNAL, folder / (UNSHUFFLED[0] if documents else "tokens.bin")

    def run(n_results: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", PREPARE, n_results, documents or ""]
        return subprocess.run(command, cwd=tmp_path, capture_output=True)

    for n_results in (5, 15, 30):  # 21 are of the first pass
        killed = run(str(n_results))
        assert killed.returncode == -signal.SIGKILL
        assert b"Traceback" not in killed.stderr  # of all its processes
        assert journal.read_bytes().count(b"\n") == 1 + n_results
    results = journal.read_bytes()
    journal.write_bytes(results + b'["encoding", 3')  # cut by a kill
    with open(tokens, "r+b") as file:
        file.write(b"lost in a power cut")
    last = run(NEVER)
    assert (last.returncode, last.stdout) == (0, b"30\n")  # which are not done again
    assert journal.read_bytes().startswith(results)
    whole = prepared(texts, tmp_path / "whole", documents=documents)
    read = read_prepared(folder, whole.settings, whole.tokenizer)
    assert read.tokens.tobytes() == whole.tokens.tobytes()
    assert read.files == tuple(file._replace(path=file.path) for file in whole.files)


def test_the_size_of_all_segments_is_bounded(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_TEXT_BYTES", 50_000)
    with pytest.raises(TextError, match="the text is over 50,000 bytes"):
        prepared(texts, tmp_path / "text")


def test_a_start_that_was_killed_is_continued_by_the_same_command(
    texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "texts-bigram"
    for n_results, code in [("5", -signal.SIGKILL), (NEVER, 0)]:
        assert not run.exists() or (run / ".new" / "text" / JOURNAL).exists()
        command = [sys.executable, "-c", TRAIN, n_results]
        assert subprocess.run(command, cwd=tmp_path).returncode == code
    assert os.listdir(run.parent) == [run.name]
    assert sorted(os.listdir(run / "text")) == ["meta.json", "tokens.bin"]
    assert not (run / ".new").exists()


@pytest.mark.parametrize(
    ("name", "error"), [("entry_names", PermissionError), ("FileLock", OSError)]
)
def test_a_folder_that_cannot_be_read_or_locked_is_not_taken_for_an_abandoned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    (tmp_path / ".new").mkdir()
    (tmp_path / ".lock").touch()
    assert layout.is_abandoned(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(layout, name, fail)
    assert not layout.is_abandoned(tmp_path)


def test_a_text_that_is_large_for_the_memory_leaves_the_page_cache(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = list[int]()
    advise = lambda file, begin, size, advice: dropped.append(begin)  # noqa: E731
    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    prepared(texts, tmp_path / "short")
    assert not dropped
    monkeypatch.setattr(workers, "MAX_CACHED", 0)
    prepared(texts, tmp_path / "long")
    assert len(set(dropped)) == 20  # both files begin at 0


def test_a_journal_of_another_text_is_not_used(texts: Path, tmp_path: Path) -> None:
    prepared(texts, tmp_path / "text")
    (texts / "1.txt").write_text(LINES.replace("naïve", "other"), "utf-8")
    again = prepared(texts, tmp_path / "text")
    assert "naïve" not in again.tokenizer.decode(again.tokens)
    assert "other" in again.tokenizer.decode(again.tokens)


def test_damaged_entries_of_a_journal_are_not_used(texts: Path, tmp_path: Path) -> None:
    whole = prepared(texts, tmp_path / "text")
    journal = tmp_path / "text" / JOURNAL
    key, *lines = journal.read_text("ascii").split("\n")
    for damage in ("[" * 100_000, "5", '["reading", 0, "abcdefg"]', "[[], 0, []]", "\0"):
        lines[3] = damage
        journal.write_text("\n".join([key, *(each.replace("1", "2") for each in lines)]), "ascii")
        again = prepared(texts, tmp_path / "text")
        assert again.tokens.tobytes() == whole.tokens.tobytes()
        assert (again.key, again.files, again.tokenizer) == (
            whole.key,
            whole.files,
            whole.tokenizer,
        )


@pytest.mark.parametrize(
    ("name", "value"), [("executable", None), ("executable", ""), ("path", [*sys.path, Path("x")])]
)
def test_any_program_can_prepare_a_long_text(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value)
    assert prepared(texts, tmp_path / "text").n_characters > len(LINES)


def test_an_error_in_a_process_is_that_of_one(texts: Path, tmp_path: Path) -> None:
    content = bytearray(LINES.encode())
    for offset in (90_000, 50_000):
        content[offset : offset + 1] = b"\xff"
    (texts / "1.txt").write_bytes(content)
    with pytest.raises(TextError, match="byte 0xFF at offset 50,000"):
        prepared(texts, tmp_path / "text")


def test_a_process_that_is_killed_is_reported(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = workers.Workers.__enter__

    def start_and_kill(self: workers.Workers) -> workers.Workers:
        for process in start(self).processes:
            assert os.getpgid(process.pid) != os.getpgrp()  # Ctrl-C does not reach it
            process.kill()
        return self

    monkeypatch.setattr(workers.Workers, "__enter__", start_and_kill)
    with pytest.raises(OperationError, match="for want of memory; close other programs and start"):
        prepared(texts, tmp_path / "text")


@pytest.mark.parametrize("n_more", [0, 700])  # characters: a token has two bytes
@pytest.mark.parametrize("byte", [b"\0", b"\xff"])  # in the vocabulary or not
def test_a_long_text_that_is_damaged_ends_a_resumed_run_before_anything_is_saved(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: bytes, n_more: int
) -> None:
    monkeypatch.setattr(module, "CHECK_DELAY", 0.1)
    (texts / "2.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + n_more))), "utf-8")
    quick = {"train.max_steps": 5, "train.save_every": 5, "model.block_size": 16}
    run, more = tmp_path / "run", {"train.max_steps": 10}
    chargpt.train(texts, config="bigram", settings=quick, out=run)
    tokens = run / "text" / "tokens.bin"
    content = tokens.read_bytes()
    damaged = np.frombuffer(content, np.uint8).copy()
    damaged[::50] = byte[0]
    tokens.write_bytes(damaged.tobytes())
    with pytest.raises(RunError, match=r"the text in .* is damaged"):
        chargpt.train(out=run, start="resume", settings=more)
    assert chargpt.load_run(run, "latest").state.step == 5
    tokens.write_bytes(content)
    assert chargpt.train(out=run, start="resume", settings=more).state.step == 10
