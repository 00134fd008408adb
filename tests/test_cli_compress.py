"""`chargpt compress` and `chargpt decompress`."""

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
