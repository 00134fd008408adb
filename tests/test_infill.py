"""Infill: the middle is chosen by what comes after it."""

import functools
import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli
from noise import noisy_model, noisy_run_on
from torch import Tensor

import chargpt
from chargpt.config import SampleConfig
from chargpt.errors import ConfigError, TextError
from chargpt.inference.infill import infill, losses_after
from chargpt.models import KVCache, LanguageModel
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

PAIRS = {"cat": "mat", "dog": "log", "frog": "pond", "owl": "oak"}
TEXT = "".join(f"the {animal} sat on the {place}.\n" for animal, place in PAIRS.items()) * 3


class ByHeart(LanguageModel):
    """Predicts what follows the longest end of the context that the text has, and little else."""

    def __init__(self, tokenizer: CharTokenizer) -> None:
        super().__init__(tokenizer.vocab_size, block_size=64)
        self.tokenizer = tokenizer
        self.register_buffer("weight", torch.zeros(1))

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        before = tokens[:, :0]
        if cache is not None:
            before, cache.tokens = cache.tokens, torch.cat((cache.tokens, tokens), dim=1)
            cache.advance(tokens.size(1))
        rows = torch.cat((before, tokens), dim=1).numpy()
        return torch.stack(
            [
                torch.stack([self.log_probs(self.tokenizer.decode(row[: n + 1])) for n in ends])
                for row in rows
                for ends in [range(before.size(1), rows.shape[1])]
            ]
        )

    @functools.cache  # noqa: B019
    def log_probs(self, context: str) -> Tensor:
        counts = torch.full((self.vocab_size,), 1e-6)
        while context and context not in TEXT[:-1]:
            context = context[1:]
        for found in re.finditer(f"(?={re.escape(context)})", TEXT[: -1 - len(context)]):
            counts[self.tokenizer.encode(TEXT[found.start() + len(context)]).item()] += 1
        return (counts / counts.sum()).log()

    def new_cache(self, batch_size: int) -> KVCache:
        return KVCache((1, batch_size, 1, 64, 1), torch.float32, torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose model has the text by heart."""
    noisy = noisy_run_on(tmp_path, TEXT)
    return replace(noisy, model=ByHeart(noisy.tokenizer))


@pytest.mark.parametrize("animal", PAIRS)
def test_the_middle_is_the_one_that_what_follows_needs(run: Run, animal: str) -> None:
    after = f" sat on the {PAIRS[animal]}."
    settings = {"length": 8, "temperature": 1.0}
    plain = [
        chargpt.infill(run, "the ", after, candidates=1, seed=seed, **settings)[0].middle
        for seed in range(8)
    ]
    assert plain.count(animal) < 6
    for seed in range(8):
        (found,) = chargpt.infill(run, "the ", after, candidates=64, seed=seed, **settings)
        assert found.middle == animal
        assert found.text == f"the {animal}{after}"
        nats = losses_after(run.model, [run.tokenizer.encode("the " + animal)], encode(run, after))
        assert found.bits_per_char == pytest.approx(nats[0] / math.log(2) / len(after))


def test_the_surprisal_is_that_of_the_characters_that_were_weighed(run: Run) -> None:
    after = f" sat on the {PAIRS['cat']}.\n" + TEXT  # of which half a block counts
    (found,) = infill(run, "the ", after, seed=1, length=8, temperature=1.0)
    start, weighed = run.tokenizer.encode("the " + found.middle), encode(run, after[:32])
    nats = losses_after(run.model, [start], weighed)
    assert found.bits_per_char == pytest.approx(nats[0] / math.log(2) / 32)


def encode(run: Run, text: str) -> np.ndarray:
    return run.tokenizer.encode(text)


def test_several_infills_are_different_and_end_no_word_in_its_midst(run: Run) -> None:
    found = infill(run, "the cat", ".\n", num_samples=5, seed=3, length=30, temperature=1.0)
    middles = [each.middle for each in found]
    assert len(set(middles)) == len(middles) == 5
    assert all(1 <= len(middle) <= 30 for middle in middles)
    for middle in middles:  # of texts of the model, whole words
        assert set((middle + ".").replace(".", " ").split()) <= {*TEXT.replace(".", " ").split()}


def test_losses_of_what_follows_are_those_of_one_forward_pass_each() -> None:
    model = noisy_model(vocab_size=11, block_size=12)
    generator = np.random.default_rng(1)
    starts = [generator.integers(0, 11, size) for size in (1, 5, 5, 9, 40)]
    after = generator.integers(0, 11, 6)
    for start, nats in zip(starts, losses_after(model, starts, after), strict=True):
        row = np.append(start, after)[-13:]
        logits = model(row[None, :-1]).detach()[0, -6:].log_softmax(dim=-1)
        expected = -sum(float(logits[i, token]) for i, token in enumerate(row[-6:].tolist()))
        assert nats == pytest.approx(expected, rel=1e-5)


def test_the_end_of_a_document_is_no_part_of_a_middle(tmp_path: Path) -> None:
    text = "anna\nberta\ncarla\n" * 30
    run = noisy_run_on(tmp_path, text, **{"text.documents": "lines"})
    found = infill(run, "", "a", num_samples=10, seed=1, length=9)
    assert len(found) == 10
    for each in found:
        assert "\n" not in each.middle
    (within,) = infill(run, "ca", "la", seed=1, length=3)  # a word
    assert within.text == "ca" + within.middle + "la"


def test_an_empty_end_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="no text after the gap; give it in after"):
        chargpt.infill(run, "the", "")


def test_an_end_of_unknown_characters_alone_is_refused(run: Run) -> None:
    with pytest.raises(TextError, match="the text after the gap has no character of the vocab"):
        infill(run, "the ", "ЖЖ", unknown="skip")


def test_what_a_cut_may_break_is_not_asked_of_the_middles(run: Run) -> None:
    options = SampleConfig(word=("zebra",), lines=3)
    found, plain = (
        infill(run, "the ", " sat", each, seed=1, length=8) for each in (options, SampleConfig())
    )
    assert [each.middle for each in found] == [each.middle for each in plain]


def test_characters_spelled_by_bytes_are_whole(tmp_path: Path) -> None:
    tokenizer = CharTokenizer.fit("the sea \n" * 3 + "é€😀", min_count=3)
    model = noisy_model(vocab_size=tokenizer.vocab_size)
    model.first_continuation_id = tokenizer.first_continuation_id
    run = replace(noisy_run_on(tmp_path, TEXT), model=model, tokenizer=tokenizer)
    for each in infill(run, "the €", "😀 sea", num_samples=5, seed=1, length=6, candidates=8):
        assert each.text == "the €" + each.middle + "😀 sea"


def test_the_command_prints_the_whole_text(
    trained: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before.txt").write_text("The light ", encoding="utf-8")
    (tmp_path / "after.txt").write_text(" the sea.\n", encoding="utf-8")
    ends = ["--before", tmp_path / "before.txt", "--after", tmp_path / "after.txt"]
    options = ["-n", "12", "--seed", "1", "--candidates", "8"]
    printed = cli("sample", trained, *ends, *options)
    assert printed.returncode == 0, printed.stderr
    as_json = json.loads(cli("sample", trained, *ends, *options, "--json").stdout)
    (found,) = as_json["infills"]
    assert printed.stdout.strip("\n") == (found["before"] + found["middle"] + found["after"]).strip(
        "\n"
    )
    lines = cli("sample", trained, *ends, *options, "--format", "jsonl", "--num-samples", "2")
    assert json.loads(lines.stdout.splitlines()[0]) == found
    assert len(lines.stdout.splitlines()) == 2
    for path in ends[1::2]:
        path.write_bytes(path.read_text("utf-8").encode("utf-16"))
    encoded = cli("sample", trained, *ends, *options, "--encoding", "utf-16")
    assert encoded.stdout == printed.stdout
    (tmp_path / "after.txt").write_text(" the sea.\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The light ")))
    assert cli("sample", trained, *ends[2:], *options, "--before", "-").stdout == printed.stdout
