"""Rare characters as byte tokens: nothing is unknown, and everything is per character."""

import json
import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Cli
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noise import noisy_run

from chargpt.analysis import plots
from chargpt.analysis.report import curves
from chargpt.config import Config, ModelConfig, SampleConfig, TextConfig
from chargpt.inference.coding import compress, decompress
from chargpt.inference.evaluation import Baselines, evaluate_tokens
from chargpt.inference.generation import stream_pieces
from chargpt.inference.scoring import score
from chargpt.text import corpus as corpus_module
from chargpt.text.display import REPLACEMENT
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.learner import Batches
from chargpt.training.trainer import Trainer

TOKENIZER = CharTokenizer.fit("hello world\n" * 3 + "é€😀", min_count=3)
TEXT = "hello é world €😀\nwell, 😀 or\n é lo" * 3
EDGES = b"\xe0\xed\xf0\xf4\x80\x8f\x90\x9f\xa0\xbf"  # of the ranges that UTF-8 restricts
QUICK = ("-s", "train.max_steps=6", "-s", "model.n_layer=1", "-s", "model.n_embd=16")


def utf8_error(content: bytes) -> str:
    """Return why bytes are no valid UTF-8, by Python's decoder, or nothing."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.reason
    return ""


@given(st.binary(max_size=5) | st.lists(st.sampled_from(EDGES)).map(bytes))
def test_valid_tokens_are_those_of_valid_utf8(content: bytes) -> None:
    valid, state, is_valid = TOKENIZER.valid_tokens, 0, True
    token_of = dict(zip(TOKENIZER.bytes_, range(len(TOKENIZER.characters), 10**6), strict=False))
    token_of |= {ord(character): i for i, character in enumerate(TOKENIZER.characters)}
    for byte in content:
        token = token_of.get(byte)  # none of the bytes that UTF-8 never uses
        is_valid = is_valid and token is not None and bool(valid.allowed[state, token])
        state = int(valid.next_state[state, token]) if is_valid else 0
    reason = utf8_error(content)
    assert is_valid == (reason in ("", "unexpected end of data"))
    assert not is_valid or (state == 0) == (not reason)


def test_sampled_texts_have_their_length_and_no_broken_character() -> None:
    run = noisy_run(TOKENIZER)
    options = SampleConfig(length=25, num_samples=200, temperature=2.0, seed=1)
    steps = stream_pieces(run.model, TOKENIZER, TOKENIZER.encode("€"), options)
    texts = ["".join(each.text for each in pieces) for pieces in zip(*steps, strict=True)]
    assert {len(text) for text in texts} == {25}
    rare = set("".join(texts)) - set(TOKENIZER.characters)
    assert len(rare) > 100
    assert REPLACEMENT not in rare
    for text in texts:
        assert text.encode().decode() == text


def test_a_stop_string_of_rare_characters_ends_a_text() -> None:
    run = noisy_run(TOKENIZER)
    options = SampleConfig(length=300, temperature=2.0, seed=1)
    text = "".join(piece.text for (piece,) in stream_pieces(run.model, TOKENIZER, [], options))
    stop = next(c for c in text if ord(c) > 0x800)
    stopped = options.model_copy(update={"stop": (stop,)})
    pieces = stream_pieces(run.model, TOKENIZER, [], stopped)
    assert "".join(piece.text for (piece,) in pieces) == text[: text.index(stop)]


@pytest.mark.parametrize("protocol", ["blocks", "sliding"])
def test_losses_are_per_character(protocol) -> None:
    run = noisy_run(TOKENIZER, kind="bigram", block_size=8)
    tokens = torch.from_numpy(TOKENIZER.encode(TEXT).astype(np.int64))
    logits = run.model.table.weight.detach()[tokens[:-1]]
    losses = F.cross_entropy(logits, tokens[1:], reduction="none")
    right = (logits.argmax(dim=1) == tokens[1:]).tolist()
    n_right, place = 0, 0
    for character in TEXT[1:]:
        n_tokens = len(TOKENIZER.encode(character))
        n_right += all(right[place : place + n_tokens])
        place += n_tokens
    result = evaluate_tokens(run.model, tokens.numpy(), protocol=protocol)
    assert result.characters == len(TEXT) - 1 < len(tokens) - 1
    assert result.nats_per_char == pytest.approx(float(losses.sum()) / (len(TEXT) - 1))
    assert result.accuracy == pytest.approx(n_right / (len(TEXT) - 1), abs=2 / len(TEXT))
    scored = score(run, TEXT)
    assert (scored.text, scored.n_unknown) == (TEXT, 0)
    place = TEXT.index("€")  # after é, which takes two bytes
    expected = losses[place : place + 3].sum() / math.log(2)
    assert scored.bits[place] == pytest.approx(float(expected), rel=1e-5)


def test_the_standard_error_of_one_block_is_that_of_characters() -> None:
    run = noisy_run(TOKENIZER, kind="bigram", block_size=8)
    run.model.block_size = 1000
    text = "\n" + TEXT
    nats = score(run, TEXT).bits * math.log(2)
    result = evaluate_tokens(run.model, TOKENIZER.encode(text))
    assert result.characters == len(TEXT)
    assert result.standard_error == pytest.approx(nats.std() / math.sqrt(len(TEXT)), rel=1e-4)


def test_the_speed_in_a_report_is_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    run = noisy_run(TOKENIZER, block_size=8)
    corpus = load_corpus(TextConfig(min_count=100), text=TEXT * 30)
    draw = Mock(side_effect=plots.optimization_curves)
    monkeypatch.setattr(plots, "optimization_curves", draw)
    losses = {"bigram": 2.0, "6-gram": 2.0}
    scores = Mock(baseline_losses=losses, evaluations={"val": Mock(nats_per_char=2.0)})
    curves(run, corpus, scores, [{"step": 1, "loss": 1.0}])
    characters_per_token = len(TEXT) / len(corpus.tokenizer.encode(TEXT))
    assert characters_per_token < 0.95
    expected = run.config.tokens_per_step * characters_per_token
    assert draw.call_args.args[1] == pytest.approx(expected, rel=0.01)


def test_the_training_loss_is_per_character(tmp_path: Path) -> None:
    corpus = load_corpus(TextConfig(min_count=100), text=TEXT * 30)
    values = {"kind": "gpt", "n_layer": 1, "n_embd": 16, "n_head": 1, "block_size": 8}
    config = Config(model=ModelConfig(**values), device="cpu", dtype="float32")
    config = config.with_values({"train.max_steps": 1, "train.sample_every": 0})
    reports = list(Trainer(config, corpus).steps())
    per_token = math.log(corpus.tokenizer.vocab_size)  # the logits of an untrained model are 0
    assert corpus.characters_per_token < 0.95
    assert reports[1].loss is not None
    assert float(reports[1].loss) == pytest.approx(per_token / corpus.characters_per_token)


def test_the_baselines_are_per_character() -> None:
    corpus = load_corpus(TextConfig(min_count=100), text=TEXT * 20)
    assert corpus.tokenizer.has_bytes
    val = corpus.split("val")
    tokens = val[1:].astype(np.int64)
    per_character = len(tokens) / (len(corpus.tokenizer.decode(val)) - 1)
    losses = Baselines(corpus).losses(val)
    counts = corpus.token_counts("train") + 1
    expected = -np.log(counts / counts.sum())[tokens].mean() * per_character
    assert losses["unigram"] == pytest.approx(expected)
    assert losses["uniform"] == pytest.approx(math.log(len(counts)) * per_character)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_splits_hold_whole_characters_and_fractions_of_them(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(corpus_module, "CHUNK", chunk)
    shared = {"val_fraction": 0.21, "test_fraction": 0.13, "mixture_characters": 30}
    corpus, plain = (
        load_corpus(TextConfig(min_count=n, **shared), text=TEXT * 20) for n in (100, None)
    )
    assert corpus.tokens.size > corpus.n_characters == plain.n_characters == len(TEXT * 20)
    for name in ("mixture", "train", "val", "test"):
        text = corpus.tokenizer.decode(corpus.split(name))
        assert text == plain.tokenizer.decode(plain.split(name))


def test_no_block_of_a_batch_begins_inside_a_character() -> None:
    tokens = TOKENIZER.encode(TEXT * 5)
    for seed in range(20):
        batches = Batches(tokens, 12, 16, seed, TOKENIZER.first_continuation_id)
        assert (batches.at(3)[:, 0].numpy() < TOKENIZER.first_continuation_id).all()
    unaware = Batches(tokens, 12, 16, 0).at(3)[:, 0].numpy()
    assert (unaware >= TOKENIZER.first_continuation_id).any()


@settings(max_examples=30)
@given(st.text(max_size=40))
@example("\x07\0")  # UTF-16 of one character, and UTF-8 of two
def test_every_text_is_compressed_without_loss(text: str) -> None:
    run = noisy_run(TOKENIZER)
    assert decompress(run, compress(run, text.encode())) == text.encode()


def test_a_run_with_rare_characters_knows_every_character(cli: Cli) -> None:
    text = TEXT * 30 + "".join(chr(0x4E00 + i) for i in range(300)) + TEXT * 30
    Path("text.txt").write_text(text, encoding="utf-8")
    done = cli("train", "text.txt", *QUICK, "-s", "text.min_count=50", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "% of the text, are spelled as bytes" in done.stderr
    # lengths are those of characters, not of tokens
    n_val = math.ceil(len(text) / 10)
    assert f"({len(text) - n_val:,} train, {n_val:,} val)" in done.stderr
    assert f" of {n_val:,} validation characters" in done.stdout
    info = json.loads(cli("data", "info", "text.txt", "--json").stdout)
    assert info["characters"] == len(text)
    assert info["rare_fraction"] == 0  # 1e-5 of the text is less than one character
    report = json.loads(cli("evaluate", "run", "--json").stdout)
    assert report["characters"] == n_val - 1
    Path("other.txt").write_text("жук\x01𐍈" * 30, encoding="utf-8")
    for command in (
        *(["evaluate", "run", "--text", "other.txt"], ["score", "run", "other.txt"]),
        *(["report", "run"], ["compress", "run", "text.txt", "text.packed"]),
    ):
        done = cli(*command)
        assert done.returncode == 0, (command, done.stderr)
    sampled = cli("sample", "run", "--prompt", "漢字", "--length", "20", "--seed", "1").stdout
    assert sampled.startswith("漢字")
    assert REPLACEMENT not in sampled
