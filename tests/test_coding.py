"""Compressed texts come back exactly, and are as long as the model's own loss says."""

import contextlib
import functools
import math
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from formula import logits_of_long_text
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import fill_with_noise
from threadpoolctl import threadpool_info

from chargpt.config import Config, ModelConfig
from chargpt.errors import ChargptError, TextError, UnknownCharacterError, WorkError
from chargpt.inference import coding
from chargpt.inference.coding import Decoding, Encoder, compress, decompress
from chargpt.models import LanguageModel, build_model
from chargpt.store.run import Run
from chargpt.store.state import RunState
from chargpt.text.tokenizer import CharTokenizer

LETTERS = "\n abcdefghijklmnopqrstuvwxyzäж😀"
SMALL: dict[str, object] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 16}


def run_of(seed: int = 0, **changes: object) -> Run:
    """Return a run with noise for weights, as after training no prediction is near another."""
    config = Config(model=ModelConfig(**{**SMALL, **changes}))  # type: ignore[arg-type]
    tokenizer = CharTokenizer.fit(LETTERS)
    model = fill_with_noise(build_model(config.model, tokenizer.vocab_size), seed).eval()
    return Run(Path("run"), config, tokenizer, model, 1, RunState(1))


RUN = run_of()


def nats_of(model: LanguageModel, tokens: npt.NDArray[np.int64]) -> float:
    """Return the nats of all characters but the first, by the formula."""
    logits = logits_of_long_text(model, torch.from_numpy(tokens)[None])
    return float(F.cross_entropy(logits[0, :-1], torch.from_numpy(tokens[1:]), reduction="sum"))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=LETTERS, max_size=120))
def test_any_text_of_the_vocabulary_comes_back(text: str) -> None:
    assert decompress(RUN, compress(RUN, text.encode())) == text.encode()


@pytest.mark.parametrize(
    "changes", [{}, {"kind": "bigram"}, {"attention": "average"}], ids=["gpt", "bigram", "average"]
)
def test_a_long_text_takes_what_the_loss_over_its_lanes_says(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "LANE", 700)
    run = run_of(**changes)
    count = 3 * coding.LANE + 123
    tokens = np.random.default_rng(0).integers(0, len(LETTERS), count)
    content = run.tokenizer.decode(tokens).encode()
    packed = compress(run, content)
    lanes = np.array_split(tokens, range(len(tokens) // 3 + 1, len(tokens), len(tokens) // 3 + 1))
    assert len(lanes) == 3
    nats = sum(map(functools.partial(nats_of, run.model), lanes))
    promised = nats / math.log(2) / 8
    assert promised < len(packed) <= 1.001 * promised + 64
    assert decompress(run, packed) == content


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**30), st.integers(0, 2**30), st.integers(0, 2**30))))
def test_the_coder_gives_back_every_part_at_the_price_of_its_share(
    parts: list[tuple[int, int, int]],
) -> None:
    encoder = Encoder()
    whole = Fraction(1)
    for size, before, after in parts:
        encoder.add(before, before + size, before + size + after)
        whole *= Fraction(size, before + size + after)
    content = encoder.finish()
    assert 8 * len(content) <= math.log2(whole.denominator / whole.numerator) + 16 + len(parts) / 99
    decoder = Decoding(content)
    for size, before, after in parts:
        assert before <= decoder.aim(before + size + after) < before + size
        decoder.take(before, before + size)


def test_a_carry_runs_through_all_bytes_that_it_has_to() -> None:
    encoder = Encoder()
    for _ in range(40):
        encoder.add(2**20 - 1, 2**20, 2**20)
    encoder.add(0, 1, 2**20)
    assert encoder.bytes[:8] == b"\xff" * 8
    encoder.low += coding.TOP - 1
    encoder._carry()
    assert encoder.bytes[-1] == 0


def test_what_the_model_finds_certain_takes_next_to_nothing_and_no_file_is_a_bomb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coding, "MOST_A_BYTE", 500)
    run = run_of(kind="bigram")
    with torch.no_grad():
        next(run.model.parameters()).zero_()[:, 5] = 200
    letter = run.tokenizer.characters[5]
    packed = compress(run, letter.encode() * 100_000)
    assert len(packed) - coding.HEADER.size == 100_000 // 500
    assert decompress(run, packed) == letter.encode() * 100_000
    with pytest.raises(ChargptError, match="too short for its text"):
        decompress(run, packed[: coding.HEADER.size + 2])


def test_an_empty_text_comes_back() -> None:
    assert decompress(RUN, compress(RUN, b"")) == b""


def test_whatever_rounds_another_way_is_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {coding._platform_key()}
    slow = coding.onednn_is_faster()
    with monkeypatch.context() as patched:
        patched.setattr(coding, "onednn_is_faster", lambda: not slow)
        keys.add(coding._platform_key())
    for architecture in ("Zen", "SkylakeX"):
        library = {"user_api": "blas", "internal_api": "openblas", "architecture": architecture}
        monkeypatch.setattr(coding, "threadpool_info", lambda library=library: [library])
        keys.add(coding._platform_key())
    assert len(keys) == 4


def test_what_cannot_be_compressed_is_told() -> None:
    astray = run_of()
    with torch.no_grad():
        next(astray.model.parameters()).fill_(math.nan)
    with pytest.raises(WorkError, match="not finite numbers"):
        compress(astray, b"abc")
    with pytest.raises(UnknownCharacterError, match="Q"):
        compress(RUN, b"Queen")
    with pytest.raises(TextError, match="not UTF-8"):
        compress(RUN, b"\xff")


def test_another_model_platform_or_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = compress(RUN, b"some words to keep")
    with pytest.raises(ChargptError, match="another model"):
        decompress(run_of(seed=1), packed)
    with pytest.raises(ChargptError, match="no file that `chargpt compress` has made"):
        decompress(RUN, b"PK\x03\x04" + packed[4:])
    with pytest.raises(ChargptError, match="no file that"):
        decompress(RUN, packed[:10])
    with pytest.raises(ChargptError, match="version 9"):
        decompress(RUN, packed[:4] + b"\x09" + packed[5:])
    monkeypatch.setattr(np, "__version__", "0.1")
    with pytest.raises(ChargptError, match="rounds another way"):
        decompress(RUN, packed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_noticed_or_does_no_harm(data: st.DataObject) -> None:
    content = b"a text that is long enough to be damaged somewhere"
    packed = bytearray(compress(RUN, content))
    place = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[place // 8] ^= 1 << place % 8
    with contextlib.suppress(ChargptError):
        assert decompress(RUN, bytes(packed)) == content  # as where only the threads are others


def test_the_number_of_threads_is_that_of_the_one_who_compressed() -> None:
    def blas_threads() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before, of_numpy = torch.get_num_threads(), blas_threads()
    packed = compress(RUN, b"some words")
    assert packed[5] == min(before, 255)
    try:
        torch.set_num_threads(before + 1)
        assert decompress(RUN, packed) == b"some words"
        assert torch.get_num_threads() == before + 1
        for threads in (1, 2):
            with coding._steady(RUN.model, threads):
                assert set(blas_threads()) == {threads}
        assert blas_threads() == of_numpy
    finally:
        torch.set_num_threads(before)
    assert zlib.crc32(b"some words").to_bytes(4, "little") == packed[22:26]
