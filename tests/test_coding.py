"""Compression is lossless, and its size agrees with the model's loss."""

import contextlib
import functools
import math
import os
import tracemalloc
import zlib
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from conftest import REPOSITORY, Cli, refusal
from formula import logits_of_long_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noisy_run
from threadpoolctl import threadpool_info

from chargpt.errors import ChargptError, OperationError, TextError, UnknownCharacterError
from chargpt.inference import coding
from chargpt.inference.coding import (
    ArithmeticDecoder,
    ArithmeticEncoder,
    compress,
    decompress,
    read_header,
)
from chargpt.inference.decoders import build_decoder
from chargpt.models import LanguageModel
from chargpt.text.tokenizer import CharTokenizer

LETTERS = "\n abcdefghijklmnopqrstuvwxyzäж😀"
TOKENIZER = CharTokenizer.fit(LETTERS)


RUN = noisy_run(TOKENIZER)
CONTENT = b"a text that is long enough to be damaged somewhere"
PACKED = compress(RUN, CONTENT)


def total_nats(model: LanguageModel, tokens: npt.NDArray[np.int64]) -> float:
    """Return the summed loss of all characters but the first in nats, by the formula."""
    logits = logits_of_long_text(model, torch.from_numpy(tokens)[None])
    return float(F.cross_entropy(logits[0, :-1], torch.from_numpy(tokens[1:]), reduction="sum"))


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=LETTERS, max_size=120))
@example("")
def test_any_text_of_the_vocabulary_is_restored(text: str) -> None:
    assert decompress(RUN, compress(RUN, text.encode())) == text.encode()


@pytest.mark.parametrize(
    "changes", [{}, {"kind": "bigram"}, {"attention": "average"}], ids=["gpt", "bigram", "average"]
)
def test_the_compressed_size_is_the_loss_over_the_lanes(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "MIN_LANE_TOKENS", 300)
    run = noisy_run(TOKENIZER, **changes)
    count = 3 * coding.MIN_LANE_TOKENS + 123
    tokens = np.random.default_rng(0).integers(0, len(LETTERS), count)
    content = run.tokenizer.decode(tokens).encode()
    packed = compress(run, content)
    lanes = np.array_split(tokens, range(len(tokens) // 3 + 1, len(tokens), len(tokens) // 3 + 1))
    assert len(lanes) == 3
    nats = sum(map(functools.partial(total_nats, run.model), lanes))
    expected_bytes = nats / math.log(2) / 8
    assert expected_bytes < len(packed) <= 1.001 * expected_bytes + 64
    assert decompress(run, packed) == content


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**30), st.integers(0, 2**30), st.integers(0, 2**30))))
@example([(2, 2**30 - 1, 2**30 - 1)] * 4 + [(1, 1, 0)])  # a carry through many bytes of 255
def test_the_coder_restores_every_interval_at_the_cost_of_its_probability(
    intervals: list[tuple[int, int, int]],
) -> None:
    encoder = ArithmeticEncoder()
    probability = Fraction(1)
    for size, before, after in intervals:
        encoder.encode(before, before + size, before + size + after)
        probability *= Fraction(size, before + size + after)
    content = encoder.finish()
    bits = math.log2(probability.denominator / probability.numerator)
    assert 8 * len(content) <= bits + 16 + len(intervals) / 99
    decoder = ArithmeticDecoder(content)
    for size, before, after in intervals:
        assert before <= decoder.decode(before + size + after) < before + size
        decoder.consume(before, before + size)


def test_certain_characters_cost_nothing_but_expansion_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coding, "MAX_TOKENS_PER_BYTE", 500)
    run = noisy_run(TOKENIZER, kind="bigram")
    with torch.no_grad():
        next(run.model.parameters()).zero_()[:, 5] = 200
    letter = run.tokenizer.characters[5]
    packed = compress(run, letter.encode() * 100_000)
    assert len(packed) - coding.HEADER.size == 100_000 // 500
    assert decompress(run, packed) == letter.encode() * 100_000
    with pytest.raises(ChargptError, match="too short for its text"):
        decompress(run, packed[: coding.HEADER.size + 2])


def test_whatever_changes_rounding_changes_the_platform_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, slow = {coding._platform_key()}, coding.onednn_is_faster()
    with monkeypatch.context() as patched:
        patched.setattr(coding, "onednn_is_faster", lambda: not slow)
        keys.add(coding._platform_key())
    library = {"user_api": "blas", "internal_api": "openblas"}
    monkeypatch.setattr(coding, "threadpool_info", lambda: [library])
    for library["architecture"] in ("Zen", "SkylakeX"):
        keys.add(coding._platform_key())
    assert len(keys) == 4


def test_texts_and_models_that_cannot_be_compressed_are_rejected() -> None:
    diverged = noisy_run(TOKENIZER)
    with torch.no_grad():
        next(diverged.model.parameters()).fill_(math.nan)
    for run, text, error, message in (
        (diverged, b"abc", OperationError, "not finite numbers"),
        (RUN, b"Queen", UnknownCharacterError, "Q"),
        (RUN, b"\xff", TextError, "not UTF-8"),
    ):
        with pytest.raises(error, match=message):
            compress(run, text)


def test_another_model_platform_or_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = compress(RUN, b"some words")
    assert read_header(packed) == (RUN.step, "plain")
    assert zlib.crc32(b"some words").to_bytes(4, "little") == packed[30:34]
    for run, content, message in (
        (noisy_run(TOKENIZER, seed=1), packed, r"another model \(step 1, weights [0-9a-f]{16}\)"),
        (RUN, b"PK\x03\x04" + packed[4:], "not made by `chargpt compress`"),
        (RUN, packed[:10], "not made by"),
        (RUN, packed[:4] + b"\x09" + packed[5:], "version 9"),
    ):
        with pytest.raises(ChargptError, match=message):
            decompress(run, content)
    monkeypatch.setattr(np, "__version__", "0.1")
    with pytest.raises(ChargptError, match="rounds differently"):
        decompress(RUN, packed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 8 * len(PACKED) - 1))
def test_damage_is_detected_or_harmless(bit: int) -> None:
    packed = bytearray(PACKED)
    packed[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(ChargptError):
        assert decompress(RUN, bytes(packed)) == CONTENT  # if only the thread count changed


def test_decompression_divides_the_lanes_as_compression_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = Mock(side_effect=build_decoder)
    monkeypatch.setattr(coding, "MIN_LANE_TOKENS", 10)
    monkeypatch.setattr(coding, "build_decoder", build)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    content = 64 * b"some words"
    packed = compress(RUN, content)
    assert packed[5] == 2  # magic, version, threads
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert decompress(RUN, packed) == content
    assert build.mock_calls == [call(RUN.model, 64, max_threads=2)] * 2


def test_compression_runs_torch_and_the_blas_on_one_thread_and_restores_both() -> None:
    def blas_threads() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before, blas_before = torch.get_num_threads(), blas_threads()
    try:
        torch.set_num_threads(before + 1)
        with coding._single_threaded_inference(RUN.model):
            assert (torch.get_num_threads(), set(blas_threads())) == (1, {1})
        assert (torch.get_num_threads(), blas_threads()) == (before + 1, blas_before)
    finally:
        torch.set_num_threads(before)


def test_memory_is_bounded_by_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "MIN_LANE_TOKENS", 64)  # few steps: both sizes have 64 lanes
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # threads allocate at other times in each run
    sizes, peaks = (4_096, 24_000), []  # the smaller text shows what does not depend on the length
    for size in sizes:
        text = b"a" * size
        tracemalloc.start()
        try:
            packed = compress(RUN, text)
            _, compressing = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert decompress(RUN, packed) == text
            _, decompressing = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        peaks.append((compressing, decompressing))
    growth = np.diff(peaks, axis=0) / np.diff(sizes)
    assert (growth < coding.BYTES_PER_CHARACTER).all()
    assert (growth > 1).all()  # it was measured
    monkeypatch.setattr("chargpt.device.memory_limit", lambda _: 1000)
    with pytest.raises(ChargptError, match="a text of 24,000 characters would need"):
        decompress(RUN, packed)


def test_the_checkpoint_of_a_compressed_file_can_be_kept(cli: Cli, verse: Path) -> None:
    tiny = (
        "-s train.max_steps=4 -s train.batch_size=4 -s model.n_layer=1 -s model.n_embd=16 "
        "-s model.block_size=16 -s train.keep_last=1 --device cpu -s dtype=float32"
    ).split()
    assert cli("train", verse, *tiny, "--out", "r").returncode == 0
    Path("t.txt").write_text(verse.read_text(encoding="utf-8")[:300])
    assert "--keep protects it" in cli("compress", "r", "t.txt", "a").stderr
    assert "--keep" not in cli("compress", "r", "t.txt", "a", "--keep", "--force").stderr
    for max_steps, is_kept in ((60, True), (120, False)):
        resumed = cli("train", "--resume", "r", "-s", f"train.max_steps={max_steps}")
        assert resumed.returncode == 0
        done = cli("decompress", "r", "a", "b", "--force")
        assert (done.returncode == 0) == is_kept
        if is_kept:
            assert Path("b").read_text() == Path("t.txt").read_text()
            Path("r/checkpoints/step-00000004/keep").unlink()
    assert "a was compressed with step 4 of a run, but r has no checkpoint '4'" in refusal(done)


def test_a_pipe_or_a_folder_is_not_compressed(cli: Cli) -> None:
    run = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    os.mkfifo("pipe")
    assert "pipe cannot be read (it is not a regular file)" in refusal(
        cli("compress", run, "pipe", "out")
    )
    assert "is a folder; name a file in it" in refusal(cli("compress", run, __file__, "."))
    with open("sparse", "wb") as file:
        file.truncate(10**12)
    assert "sparse cannot be read (it is larger than" in refusal(
        cli("compress", run, "sparse", "out")
    )
