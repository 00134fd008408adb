"""What a file of someone else may cost is bounded before it is paid."""

import gzip
import json
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import chargpt
import chargpt.models
from chargpt.config import Config, ModelConfig
from chargpt.device import lazy_zeros
from chargpt.errors import ConfigError, RunError, TextError
from chargpt.files import parse_json, parse_yaml, read_regular, to_json
from chargpt.inference.decoders import ModelDecoder
from chargpt.inference.evaluation import evaluate_tokens, iter_losses, sliding_windows
from chargpt.inference.sampling import prefill
from chargpt.models import LanguageModel, build_model, rotary_bytes
from chargpt.models.ensemble import Ensemble
from chargpt.models.gpt import GPT
from chargpt.models.mixture import Mixture
from chargpt.text.prepare import prepare, read_prepared
from chargpt.text.source import find_text, read_text
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training import mixing
from chargpt.training.trainer import StepReport

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24}
TOKENIZER = CharTokenizer("\n abcdef")
TOKENS = np.random.default_rng(0).integers(0, 8, 200).astype(np.uint8)


def noisy(**values: object) -> LanguageModel:
    config = ModelConfig(**{**SIZES, **values})  # type: ignore[arg-type]
    return fill_with_noise(build_model(config, TOKENIZER.vocab_size)).eval()


def models() -> dict[str, LanguageModel]:
    gpt = noisy()
    return {
        "gpt": gpt,
        "average": noisy(attention="average"),
        "gpt2": noisy(kind="gpt2"),
        "bigram": noisy(kind="bigram"),
        "mixture": Mixture(gpt, TOKENS, TOKENIZER).eval(),  # type: ignore[arg-type]
        "ensemble": Ensemble([gpt, noisy(block_size=8)], [TOKENIZER] * 2, [0.7, 0.3]).eval(),
    }


@pytest.mark.parametrize("name", models())
def test_a_window_in_parts_has_the_losses_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with leading targets that are not scored, and after a prompt."""
    model = models()[name]
    windows = sliding_windows(len(TOKENS) - 1, 24, 5)
    expected = [*iter_losses(model, TOKENS, windows, model.lookback)]
    last, cache = prefill(model, TOKENIZER, TOKENS[:21])
    largest = 0
    forward = type(model).forward

    def recorded(
        self: LanguageModel, tokens: torch.Tensor, *args: object, **more: object
    ) -> object:
        nonlocal largest
        largest = max(largest, tokens.numel()) if self is model else largest
        return forward(self, tokens, *args, **more)

    monkeypatch.setattr(type(model), "forward", recorded)
    monkeypatch.setattr(chargpt.models, "MAX_PASS_BYTES", 7 * 4 * max(model.width, 24))
    found = [*iter_losses(model, TOKENS, windows, model.lookback)]
    assert largest == 7
    assert sum(each.shape[1] for each in found) == sum(each.shape[1] for each in expected)
    joined, whole = (np.concatenate([e.reshape(3, -1) for e in x], 1) for x in (found, expected))
    np.testing.assert_allclose(joined, whole, atol=2e-5)
    again, other = prefill(model, TOKENIZER, TOKENS[:21])
    assert other.length == cache.length == 21
    np.testing.assert_allclose(again, last, atol=2e-5)


def test_a_mixture_is_fitted_in_parts_to_the_predictions_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture = models()["mixture"]
    assert isinstance(mixture, Mixture)
    assert isinstance(mixture.gpt, GPT)
    held_out = np.random.default_rng(2).integers(0, TOKENIZER.vocab_size, 200)
    fitted, sizes = [], []
    probabilities = Mixture.iter_probs

    def recorded(self: Mixture, contexts: list[torch.Tensor]) -> object:
        sizes.append(contexts[0].numel())
        return probabilities(self, contexts)

    monkeypatch.setattr(Mixture, "iter_probs", recorded)
    monkeypatch.setattr(mixing, "fit_gate", lambda _, *data: fitted.append(data))
    for max_tokens in (10**6, 7):
        monkeypatch.setattr(chargpt.models, "MAX_PASS_BYTES", max_tokens * 4 * mixture.width)
        mixing.fit_mixture(mixture.gpt, TOKENIZER, TOKENS, held_out)
    assert max(sizes[:1]) > max(sizes[-20:]) == 7
    for whole, in_parts in zip(*fitted, strict=True):
        torch.testing.assert_close(in_parts, whole, atol=2e-5, rtol=0)


def test_the_widest_activation_counts() -> None:
    assert noisy(n_inner=100_000).width == 200_000
    assert noisy(attention="average", block_size=65_536).width == 65_536
    assert noisy(n_head=8, block_size=256).width == 2048
    assert noisy(n_embd=400).width == max(1200, 2 * 1088)


def test_a_model_without_queries_and_keys_has_no_rotary_tables() -> None:
    config = ModelConfig(n_embd=8192, n_head=1, attention="none", mlp="none", block_size=65_536)
    assert rotary_bytes(config) == 0
    model = build_model(config, 2)
    assert model.num_parameters() == 5 * 8192
    assert model.new_cache(1).keys.numel() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_long_cache_takes_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    array = lazy_zeros((1000, 65_536, 8))  # of 2 GB
    array[:, 0] = 1
    assert array[:, :2].sum() == 8000
    assert resident() - before < 300_000_000
    del array
    model = noisy(n_layer=64, n_embd=128, block_size=65_536, n_inner=1)  # of 4 GB
    before = resident()
    cache = prefill(model, TOKENIZER, TOKENS)[1]
    ModelDecoder(model, 1, cache)
    assert resident() - before < 300_000_000


def test_a_small_file_that_expands_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(b"a" * 1_000_000)
    with pytest.raises(TextError, match="expands to over 100 times its size"):
        read_text(path)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"a" * 60_000_000)
    assert len(read_text(path)) == 60_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_of_proc_is_not_read() -> None:
    """It states a size of 0, and some, such as /proc/kmsg, have no end."""
    assert read_text("/proc/self/status") == ""
    assert read_regular(Path("/proc/self/status"), 1000) == b""


@pytest.mark.parametrize("value", [b"[]", b'{"":0}', b'"ab"'])
def test_json_that_would_take_gigabytes_is_refused_before_it_is_parsed(value: bytes) -> None:
    files = b'{"files":[%s0]}'
    with pytest.raises(ValueError, match="it has too many values"):
        parse_json(files % (10_000_000 * (value + b",")))
    named = parse_json(files % (1_000_000 * b'["/home/me/texts/1, 2.txt",1000,1000,1000],'))
    assert len(named["files"]) == 1_000_001


@pytest.mark.parametrize(
    "forged", [{"files": [[]] * 1000}, {"held_out": dict.fromkeys(map(str, range(1000)), 0)}]
)
def test_the_errors_of_forged_metadata_do_not_grow_with_it(
    forged: dict[str, object], tmp_path: Path, verse: Path
) -> None:
    """Each takes up to 3 kB."""
    settings = Config().with_values({"text.path": str(verse)}).text
    corpus = prepare(find_text(settings), settings, tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text("utf-8")) | forged
    del meta["crc32"]
    meta["crc32"] = zlib.crc32(to_json(meta))
    (tmp_path / "meta.json").write_bytes(to_json(meta))
    with pytest.raises(RunError, match=r"is damaged \(\d validation errors? for meta\.json\)"):
        read_prepared(tmp_path, settings, corpus.tokenizer)


@pytest.mark.parametrize(("key", "n_levels"), [("x" * 1000, 95), ("x" * 90_000, 1), ("x", 101)])
def test_a_long_or_deep_key_of_a_config_is_refused(key: str, n_levels: int) -> None:
    """All keys below it are stored together with it: 200 kB would take gigabytes."""
    with pytest.raises(ConfigError, match="a key is too long, or nested too deep"):
        parse_yaml(f"{{? {key} : " * n_levels + "0" + "}" * n_levels, "c.yaml")
    assert parse_yaml("{a: {b: {c: 0}}}", "c.yaml")[1] == {"a": 1, "a.b": 1, "a.b.c": 1}


@pytest.mark.parametrize("key", ["length", "lines", "max_chars", "no_copy", "num_samples", "top_k"])
def test_a_setting_beyond_what_can_be_computed_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"sample.{key}"):
        Config().with_values({f"sample.{key}": 10**30})


def test_a_short_text_outlives_its_file(tmp_path: Path, verse: Path) -> None:
    """Reading a map of a truncated file would end the process by SIGBUS."""
    settings = Config().with_values({"text.path": str(verse)}).text
    prepared = prepare(find_text(settings), settings, tmp_path)
    corpus = read_prepared(tmp_path, settings, prepared.tokenizer)
    text = corpus.tokenizer.decode(corpus.tokens)
    os.truncate(tmp_path / "tokens.bin", 0)
    for each in (prepared, corpus):
        assert each.tokenizer.decode(each.tokens) == text
        assert evaluate_tokens(build_model(ModelConfig(**SIZES), 80), each.tokens[:50])  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="texts are read into memory there")
def test_a_truncated_file_of_a_long_text_ends_training_and_evaluation_with_a_message(
    verse: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading it would end the process by SIGBUS."""
    monkeypatch.setattr("chargpt.text.prepare.MAX_HELD_BYTES", 0)
    settings = {f"model.{name}": value for name, value in SIZES.items()}
    steps = {"train.max_steps": 9, "train.evaluate_every": 9}

    def truncate(report: StepReport) -> None:
        if report.step == 4:
            os.truncate(tmp_path / "run" / "text" / "tokens.bin", 1000)

    message = "text/tokens.bin of the run became shorter while it was in use; restore it"
    with pytest.raises(RunError, match=message):
        chargpt.train(verse, settings=settings | steps, out=tmp_path / "run", on_report=truncate)
    run = chargpt.train(verse, settings=settings | steps, out=tmp_path / "other")
    split = run.corpus().split("train")
    os.truncate(tmp_path / "other" / "text" / "tokens.bin", 1000)
    with pytest.raises(RunError, match=message):
        evaluate_tokens(run.model, split)
