"""What commands write and print: files of others, devices, links, encodings, control characters."""

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from conftest import REPOSITORY, Cli, refusal, run_here, skip_on_windows, start_cli
from PIL import Image
from saving import failing, rewrite

from chargpt.analysis import plots
from chargpt.analysis.page import encoded, render
from chargpt.cli import console, tables
from chargpt.distributed import is_main_rank, world_size
from chargpt.errors import ConfigError, DeviceError, OperationError, TextError, reason_of
from chargpt.files import place, quoted
from chargpt.outputs import MARK, is_unchanged_output, with_digest, write_new, write_output
from chargpt.text.display import UNSAFE, display_text

TINY = (
    "-s train.max_steps=4 -s train.batch_size=4 -s model.n_layer=1 -s model.n_embd=16 "
    "-s model.block_size=16 --device cpu -s dtype=float32"
).split()
PAGE = with_digest(f'<meta name="generator" content="{MARK}">'.encode())


# -- files -------------------------------------------------------------------------------------


def write_ours(path: Path) -> None:
    """Write a page or a plot as the commands do."""
    if path.suffix == ".html":
        page = render("explain.html", title="content=", version="1", sections=[])
        write_output(path, encoded(page))
    else:
        plots.save(plots.loss_curves({"gpt": [(0, 4.0), (9, 2.0)]}, {}, "novel"), path)


@pytest.mark.parametrize("name", ["page.html", "plot.svg", "plot.png"])
def test_a_page_or_plot_is_replaced_until_somebody_edits_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    for _ in range(2):
        write_ours(path)
    written = path.read_bytes()
    assert is_unchanged_output(written)
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.verify()  # the CRC of every chunk
    middle, zeros = len(written) // 2, MARK.encode()
    mark = re.search(rb"chargpt sha256:\w{64}", written)
    assert mark is not None
    for edited in (
        *(b" " + written, written + b" ", written[:-1]),
        written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :],
        written.replace(mark[0], zeros),
        written.replace(mark[0], b"chargpt"),  # as earlier versions marked theirs
    ):
        path.write_bytes(edited)
        assert not is_unchanged_output(edited)
        with pytest.raises(ConfigError, match=r"edited or is of an earlier version; name another"):
            write_ours(path)
        assert path.read_bytes() == edited
    path.write_bytes(b"")
    write_ours(path)
    assert path.read_bytes() == written


def test_a_page_that_only_names_chargpt_is_somebodys_own(tmp_path: Path) -> None:
    for content in (
        '<meta name="description" content="chargpt, a review">',
        f'<meta name="generator" content="{MARK}">my own',
        "model,seed,nats_per_char,my notes",
        "a novel",
    ):
        (tmp_path / "blog.html").write_text(content)
        with pytest.raises(ConfigError, match=r"blog\.html exists and was not made by chargpt"):
            write_ours(tmp_path / "blog.html")
        assert (tmp_path / "blog.html").read_text() == content


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_many_writers_one_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr("os.link", failing(errno.EPERM))
    sources = [tmp_path / str(i) for i in range(8)]
    for source in sources:
        if kind == "folder":
            source.mkdir()
        (source / "x" if kind == "folder" else source).write_text(source.name)
    path, start = tmp_path / "name", threading.Barrier(len(sources))

    def try_to_place(source: Path) -> str:
        start.wait()
        with suppress(ConfigError):
            place(source, path)
            return source.name
        return ""

    with ThreadPoolExecutor(len(sources)) as pool:
        [winner] = filter(None, pool.map(try_to_place, sources))
    assert (path / "x" if kind == "folder" else path).read_text() == winner


@pytest.mark.parametrize("write", [write_new, write_output])
def test_a_file_that_is_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]
) -> None:
    path, sync = tmp_path / "a.html", os.fsync
    monkeypatch.setattr("os.fsync", lambda number: (sync(number), path.write_text("my own")))
    with pytest.raises(ConfigError, match=r"a\.html exists"):
        write(path, PAGE)
    assert path.read_text() == "my own"
    assert os.listdir(tmp_path) == ["a.html"]
    with pytest.raises(ConfigError, match=r"a\.html exists"):
        write(path, PAGE)
    monkeypatch.undo()
    write(path, PAGE, force=True)
    assert path.read_bytes() == PAGE


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.ENOSPC, None), "No space left on device"),
        (OSError("a library's\nown words"), "a library's own words"),
        (OSError(None, None), "OSError"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("it is larger than 3 bytes"), "it is larger than 3 bytes"),
    ],
)
def test_every_error_has_a_reason(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason_of(error) == reason
    if isinstance(error, OSError):
        monkeypatch.setattr("os.fsync", Mock(side_effect=error))
        with pytest.raises(ConfigError) as caught:
            write_output(tmp_path / "a", b"")
        assert f"a cannot be written ({reason}); name another" in str(caught.value)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_a_file_on_a_memory_disk_is_replaced_not_appended_to() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for _ in range(2):
            write_output(Path(folder, "page.html"), PAGE)
        assert Path(folder, "page.html").read_bytes() == PAGE


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_output(link, PAGE)
    assert link.is_symlink()
    target.chmod(0o600)
    write_output(link, PAGE + PAGE)
    assert target.read_bytes() == PAGE + PAGE
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, received = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    write_output(path, b"x" * 100_000)
    reader.join()
    assert received == [b"x" * 100_000]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may")
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    path = tmp_path / "null"
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    write_output(path, PAGE)
    assert stat.S_ISCHR(path.stat().st_mode)


# -- streams -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def russian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a Russian text."""
    folder = tmp_path_factory.mktemp("russian")
    (folder / "t.txt").write_text("Буря мглою небо кроет, вихри снежные крутя; " * 60, "utf-8")
    run_here("train", "t.txt", *TINY, "--out", "r", cwd=folder)
    return folder / "r"


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command in which $CHARGPT is the program."""
    if os.name != "posix":
        skip_on_windows()
    own = {"CHARGPT": f"{sys.executable} -m chargpt", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=cwd,
        env={**os.environ, **own, **environment},
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_bytes_that_are_not_utf_8_are_no_error_of_ours(russian: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (russian.parent / name).write_text("Буря мглою", "utf-8")
    done = shell("$CHARGPT score r $'caf\\xe9.txt'", russian.parent, PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    done = shell("printf 'caf\\xe9\\n' | $CHARGPT sample r -i", russian.parent, PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    assert "U+FFFD" in done.stderr.decode()


@pytest.mark.slow
def test_json_is_right_and_text_an_error_where_stdout_lacks_the_characters(russian: Path) -> None:
    words = "$CHARGPT sample r --length 50 --seed 1"
    right = shell(f"{words} --json", russian.parent, PYTHONIOENCODING="utf-8")
    samples = json.loads(right.stdout)["samples"]
    assert not samples[0].isascii()
    done = shell(f"{words} --json", russian.parent, PYTHONIOENCODING="latin-1")
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["samples"] == samples
    done = shell(f"{words} > f", russian.parent, PYTHONIOENCODING="latin-1")
    assert done.returncode == 2
    assert b"the output is written as iso8859-1, which lacks U+04" in done.stderr
    assert (russian.parent / "f").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("$CHARGPT sample r --length 50 2>&-", 0),
        ("$CHARGPT sample r --length 50 >&-", 0),
        ("$CHARGPT data info t.txt | true && $CHARGPT evaluate r | true", 0),
        ("$CHARGPT runs . | true", 0),
        ("$CHARGPT train - <&-", 2),
        ("$CHARGPT score r <&-", 2),
        ("$CHARGPT sample r -i <&-", 2),
        ("$CHARGPT compress r - out <&-", 2),
    ],
)
def test_closed_streams_are_no_error_of_ours(russian: Path, command: str, code: int) -> None:
    done = shell(command, russian.parent)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_is_no_error_of_an_export(russian: Path) -> None:
    done = shell("$CHARGPT export html r /dev/stdout | true", russian.parent)
    assert done.returncode != 2  # that of a user's error
    assert b"exporting" in done.stderr
    assert b"cannot be written" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = "import os; from chargpt.cli.main import open_streams as o; o(); open('f', 'w').fileno()"
    check = f"{code}; file = open('g', 'w'); assert file.fileno() > 2; file.write('x')"
    done = shell(f'{sys.executable} -c "{check}" <&- >&- 2>&-', tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "g").read_text() == "x"


def test_a_text_is_compressed_and_restored_through_pipes(russian: Path) -> None:
    pack, unpack = "$CHARGPT compress r - -", "$CHARGPT decompress r - -"
    done = shell(f"head -c 399 t.txt | {pack} | {unpack}", russian.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (russian.parent / "t.txt").read_bytes()[:399]


# -- names and encodings -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["😀.txt", "d[/b].txt", "x[abridged].txt", 'a"\\b'])
def test_any_name_of_a_text_is_trained_on_resumed_and_shown(
    cli: Cli, verse: Path, name: str
) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    shutil.copy(verse, name)
    done = cli("train", name, *TINY, "--out", "r")
    assert done.returncode == 0, done.stderr
    assert cli("train", "--resume", "r", "-s", "train.max_steps=6").returncode == 0
    done = cli("evaluate", "r", "--text", name)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


def test_a_name_that_is_not_unicode_is_one_sentence(cli: Cli, verse: Path) -> None:
    name = os.fsdecode(b"t\xff.txt")
    shutil.copy(verse, name)
    assert "rename the text, or set PYTHONUTF8=1" in refusal(cli("train", name, *TINY))
    assert not Path("runs").exists()
    run = os.fsdecode(b"r\xff")
    assert cli("train", verse, *TINY, "--out", run).returncode == 0
    done = cli("report", run)
    assert done.returncode == 0, done.stderr


def test_nothing_printed_controls_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "a\x1b[2J\x9b31m\x07\r\udcff"
    console.say(hostile)
    console.out(hostile)
    console.out_sentence(hostile)
    console.out_json({hostile: hostile})
    console.print_error(hostile)
    tables.table([hostile], [[hostile]], title=hostile)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tables.table(["text"], [[hostile]], text_column=0, clean=console.text_cell)
    tables.panel(hostile, hostile)
    printed = re.sub("\x1b\\[[0-9;]*m", "", "".join(capsys.readouterr()))  # rich's colours
    assert printed.count("\N{REPLACEMENT CHARACTER}") > 10
    assert printed.count("\N{SYMBOL FOR ESCAPE}") > 5
    assert not set(printed) & set("\x1b\x9b\x07\r\udcff")
    assert json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def test_spaces_and_joiners_of_every_script_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\u00a0b\u3000c\u2009d\u200ce\u200df\u00adg\u200b\u200f\u06dd\U000e0067\ufeff"
    console.out(text)
    assert capsys.readouterr().out == text + "\n"
    code = "def f():\n\treturn 1  \n\n  # done"  # of a sample
    console.say(*code.split("\n"))
    assert capsys.readouterr().err == code + "\n"
    odd = "\u202e\u2028\x85\r\n\x1b[1m"
    console.say(odd, is_sample=True)  # into a file
    assert capsys.readouterr().err == odd + "\n"
    console.out("\u202e\x85a\r\nb\rc\u2028d")  # may reorder a line; line ends of every kind
    assert capsys.readouterr().out == "\ufffd\ufffda\N{SYMBOL FOR CARRIAGE RETURN}⏎b␍c\ufffdd\n"


FORGED = "chargpt: all is well"
FORGING = "x" + "".join(f"{line_end}{FORGED}" for line_end in "\n\r\u2028\x85")
FORGING += "\x1b[2J\x9b\u202e\u202e\u0301\uffff"


def test_no_name_forges_a_message_or_reaches_a_page_or_plot_raw(
    trained: Path, cli: Cli, tmp_path: Path
) -> None:
    run = tmp_path / f"{FORGING}\udcff"
    shutil.copytree(trained, run)
    for checkpoint in (run / "checkpoints").iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        rewrite(checkpoint, "state.json", json.dumps({**state, "text_name": FORGING}).encode())
    for words in (
        *(("runs", "."), ("evaluate", run), ("verify", run), ("report", run), ("play", run)),
        *(("compare", run, "--plot", "a.svg"), ("compare", run, trained, "--plot", "a.png")),
        *(("compare", run, "--csv", "-"), ("sample", run, "-n", 9), ("export", "hf", run, "hf")),
        *(("compress", run, run, "x"), ("sample", run, "--checkpoint", "7"), ("sample", run / "x")),
        *(("train", "--resume", run), ("export", "html", run, tmp_path)),
    ):
        options = ["--no-open"] if words[0] == "play" else []
        done = cli(*words, *options)
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 2), done.stderr
        lines = re.split("[\r\n\x85\u2028]", done.stdout + done.stderr)
        assert not [line for line in lines if line.startswith(FORGED)], words
    for path in (run / "report.html", run / "play.html", Path("a.svg"), Path("hf", "README.md")):
        content = path.read_text("utf-8")
        assert not UNSAFE.search(content), path
        if path.suffix != ".html":
            assert "all is well" in content
    ElementTree.parse("a.svg")
    svgs = re.findall("(?s)<svg.*?</svg>", (run / "report.html").read_text("utf-8"))
    assert svgs
    for svg in svgs:
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "name",
    [
        *("url(#p)", "100%", "$x$", r"\$x$ $", "_hidden", "a<b>&\"'", "]]>-->", "", "\0", "\ufffe"),
        'ink #000000 id="x".txt',
        *("a\u200d\uffff", "\u202e\u0301", "\udcff", "\ud800", "1\n2\r3\u20284\x85"),
    ],
)
def test_a_plot_shows_any_name(name: str, tmp_path: Path) -> None:
    curves = {name: [(0, 4.0), (9, 2.0)], "other": [(0, 4.0), (9, 3.0)]}
    shown = display_text(name, keep_spaces=True)
    svg = plots.inline(plots.loss_curves(curves, {"bigram": 2.5}, name), name)
    for root in (ElementTree.fromstring(svg.replace("xlink:", "")),):
        texts = ["".join(text.itertext()).strip() for text in root.iter() if "text" in text.tag]
        assert texts[-2:] == [f"{shown}: 2.000", "other: 3.000"]
        assert name == "" or shown in texts[:-2]
        ids = {node.get("id") for node in root.iter()}
        links = re.findall(r"""(?:url\(|href=")#([^)"]+)""", re.sub(">[^<]*<", "><", svg))
        assert {*links} <= ids
    for kind in ("svg", "png"):
        plots.save(plots.loss_curves(curves, {}, name), tmp_path / f"a.{kind}")
    ElementTree.parse(tmp_path / "a.svg")


@pytest.mark.parametrize(
    "word", ["a b", "a\nb", "it's \x1b\\x", os.fsdecode(b"r\xff0"), "\u2028\x85é'", "", "$x"]
)
def test_a_shell_reads_a_quoted_word_as_it_was(word: str) -> None:
    quoted_word = quoted(word)
    assert not UNSAFE.search(quoted_word)
    done = subprocess.run(["bash", "-c", f"printf %s {quoted_word}"], capture_output=True)
    assert done.stdout == os.fsencode(word)


def test_texts_in_boxes_and_tables_are_the_same_in_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = "a\u202ab\u202c \u2066c\u2069 \x85\x1b[1m"
    for text in (odd, f"{odd}\a\f\r\n \u2028"):
        tables.panel("sample of run", text)
        assert capsys.readouterr().out == f"-- sample of run --\n{text}\n"
    odd = odd.removesuffix("\x85\x1b[1m")  # control characters would break a table
    tables.table(["x", "y"], [["1", f"{odd}\a"]], text_column=1, clean=console.text_cell)
    assert f" 1  {odd}\N{SYMBOL FOR BELL} " in capsys.readouterr().out


def test_json_has_no_numbers_that_are_none() -> None:
    with pytest.raises(OperationError, match="NaN or infinite"):
        console.out_json({"loss": float("nan")})


def test_a_terminal_gets_a_question_mark_and_a_file_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "f", "w", encoding="latin-1", errors="replace") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(TextError, match=r"lacks U\+0436"):
            console.out_text("ж")
        monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
        console.out_text("ж")
    assert (tmp_path / "f").read_text("latin-1") == "?"


# -- ranks -------------------------------------------------------------------------------------


def test_a_rank_in_the_environment_silences_only_training(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("1", "2", ""):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", size)
        assert "python-docs" in cli("data", "list").stdout


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_rank_that_is_no_number_is_one_sentence(
    cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, "x")
    assert f"the environment variable {name} is 'x'" in refusal(cli("train", verse, *TINY))


def test_empty_variables_mean_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("RANK", "")
    assert world_size() == 1
    assert is_main_rank()
    monkeypatch.setenv("WORLD_SIZE", "9" * 5000)
    with pytest.raises(DeviceError):
        world_size()


@pytest.mark.slow
def test_several_trainings_at_once_each_get_a_folder(verse: Path, tmp_path: Path) -> None:
    processes = [start_cli("train", verse, *TINY, cwd=tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["lighthouse-gpt", "lighthouse-gpt-2"]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 7, ["one two", "three"]),
        ("a word-that-is-longer than it", 10, ["a", "word-that-is-longer", "than it"]),
        ("two  spaces", 20, ["two  spaces"]),
    ],
)
def test_a_paragraph_is_broken_at_spaces_only(
    text: str, width: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for indent in ("", "  "):
        columns = width + len(indent)
        monkeypatch.setattr(console, "terminal_width", lambda _, columns=columns: columns)
        shown = console.wrapped(text, sys.stdout, indent).split("\n")
        assert shown == [f"{indent}{line}" for line in lines]
