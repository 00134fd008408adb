"""`chargpt compress` and `chargpt decompress`."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from conftest import Cli, refusal


def test_decompress_restores_a_compressed_text(trained: Path, verse: Path, cli: Cli) -> None:
    part = verse.read_bytes()[:3000].decode(errors="ignore").encode()
    Path("part.txt").write_bytes(part)
    done = cli("compress", trained, "part.txt", "part.cgpt")
    assert done.returncode == 0, done.stderr
    size = Path("part.cgpt").stat().st_size
    assert f"{len(part):,} bytes -> {size:,} bytes" in done.stdout
    assert "bits per character, with 34 bytes of header; xz -9: " in done.stdout
    assert "100% of the passages of 64 characters of part.txt occur in the training" in done.stderr
    for words in ((), ("--force",)):
        assert cli("decompress", trained, "part.cgpt", "back.txt", *words).returncode == 0
        assert Path("back.txt").read_bytes() == part
    shutil.copytree(trained, "other")
    shutil.rmtree("other/checkpoints/step-00000040")
    message = refusal(cli("decompress", "other", "part.cgpt", "x.txt"))
    assert "was compressed with step 40 of a run, but" in message
    assert not Path("x.txt").exists()


def test_compress_leaves_out_unknown_characters_only_if_asked(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("the sea Ω and the light\n" * 10)
    done = cli("compress", trained, "other.txt", "packed", "--unknown", "skip")
    assert "10 characters outside the vocabulary ('Ω' U+03A9): left out" in done.stderr
    assert "xz" not in done.stdout  # which would compress the characters left out too
    size, bits = Path("packed").stat().st_size, float(done.stdout.split(": ")[1].split()[0])
    assert bits == pytest.approx(8 * size / 230, abs=1e-3)
    assert cli("decompress", trained, "packed", "back.txt").returncode == 0
    assert Path("back.txt").read_text() == "the sea  and the light\n" * 10


@pytest.mark.parametrize(
    ("mark", "codec", "newline", "words"),
    [
        ("\ufeff", "utf-8", "\n", ""),
        ("\ufeff", "utf-16-le", "\r\n", ""),
        ("\ufeff", "utf-16-be", "\n", ""),
        ("", "cp1252", "\r\n", "--encoding windows-1252"),
        ("", "utf-8", "\r\n", ""),
    ],
)
def test_what_training_reads_is_compressed_and_the_same_bytes_restored(
    trained: Path, verse: Path, cli: Cli, mark: str, codec: str, newline: str, words: str
) -> None:
    text = verse.read_text("utf-8")[:1500]
    content = (mark + text.replace("\n", newline)).encode(codec)
    Path("a.txt").write_bytes(content)
    done = cli("compress", trained, "a.txt", "packed", *words.split())
    assert done.returncode == 0, done.stderr
    assert f"1,500 characters, {len(content):,} bytes -> " in done.stdout
    assert "with 56 bytes of header" in done.stdout
    assert "outside the vocabulary" not in done.stderr
    assert cli("decompress", trained, "packed", "back.txt").returncode == 0
    assert Path("back.txt").read_bytes() == content
    Path("plain.txt").write_text(text, "utf-8")
    for command in ("score {}", "evaluate --no-mixture --text {}", "sample -n 5 --prompt-file {}"):
        printed = [
            json.loads(cli(name, trained, *rest, *encoded, "--json").stdout)
            for path, encoded in (("plain.txt", []), ("a.txt", words.split()))
            for name, *rest in [command.replace("{}", path).split()]
        ]
        keys = {"bits_per_char", "characters", "prompt"} & printed[0].keys()
        assert keys
        assert all(printed[0][key] == printed[1][key] for key in keys)
    packed = Path("packed").read_bytes()
    for number, damage, message in (
        (35, b"\1" if newline == "\n" else b"\0", "checksum differs"),
        (35, b"\3", "is damaged"),
        (37, b"idna\0\0\0\0\0\0", "is damaged"),
        (37, b"\xff", "is damaged"),
    ):
        Path("damaged").write_bytes(packed[:number] + damage + packed[number + len(damage) :])
        assert message in cli("decompress", trained, "damaged", "x.txt").stderr


def test_line_ends_and_separators_are_those_of_training_in_every_command(cli: Cli) -> None:
    lines = [f"the sea {i % 37} and a boat {i % 11}" for i in range(900)]
    texts = {"lf": "\n".join(lines), "crlf": "\r\n".join(lines), "cr": "\r".join(lines)}
    texts["fortune"] = "\n%\n".join(f"{line}\nby me" for line in lines)
    for name, text in texts.items():
        Path(f"{name}.txt").write_bytes(text.encode())
        cli("train", f"{name}.txt", "-c", "bigram", "-s", "train.max_steps=30", "-o", name)
    scored = []
    for run, text in (("crlf", "lf"), ("crlf", "crlf"), ("cr", "lf"), ("fortune", "fortune")):
        found = json.loads(cli("score", run, f"{text}.txt", "--json").stdout)
        n_lines = 1800 if run == "fortune" else 900
        assert [len(found["lines"]), found["lines"][1]["number"]] == [n_lines, 2]
        assert "\r" not in found["lines"][0]["text"]
        scored.append(found["bits_per_char"])
        if run == text or run == "cr":
            cli("compress", run, f"{run}.txt", "packed", "--force")
            assert cli("decompress", run, "packed", "again.txt", "--force").returncode == 0
            assert Path("again.txt").read_bytes() == texts[run].encode()
    assert scored[0] == scored[1]
    for run, end in (("crlf", "\r\n"), ("cr", "\r"), ("lf", "\n")):
        sample = ("sample", run, "-p", "sea\nand\r\n", "--stop", "\\n", "-n", "2000", "--json")
        found = json.loads(cli(*sample, "--seed", "1").stdout)
        assert found["prompt"] == f"sea{end}and{end}"
        assert (found["ended"], end in found["continuations"][0]) == (["stop"], False)


def test_a_file_whose_bytes_would_not_be_restored_is_not_compressed(
    trained: Path, verse: Path, cli: Cli
) -> None:
    text = verse.read_text("utf-8")[:99]
    Path("a.gz").write_bytes(gzip.compress(text.encode()))
    Path("utf7.txt").write_bytes(b"+AGE-" + text.encode("utf-7"))
    message = refusal(cli("compress", trained, "a.gz", "packed"))
    assert "a.gz is a gzip file, whose bytes would not be restored; decompress it" in message
    message = refusal(cli("compress", trained, "utf7.txt", "packed", "--encoding", "utf-7"))
    assert "utf7.txt is read as UTF-7, which does not give the same bytes back" in message
