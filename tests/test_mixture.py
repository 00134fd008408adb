"""The mixture of a GPT with n-gram models: its formula, its fit, its file, and the commands."""

import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import REPOSITORY, Cli, refusal
from noise import noisy_model
from shared_runs import MIXED_SETTINGS

import chargpt
from chargpt.config import Config, TextConfig
from chargpt.errors import RunError
from chargpt.inference.decoders import build_decoder
from chargpt.inference.evaluation import evaluate_tokens, even_spans
from chargpt.models.gpt import GPT
from chargpt.models.mixture import (
    BACKOFF_ORDER,
    LOOKBACK,
    Mixture,
    WordContextModel,
    word_token_mask,
)
from chargpt.models.ngram import NGramLM
from chargpt.store.layout import MIXTURE_FILE
from chargpt.store.mixture import save_mixture, with_mixture
from chargpt.store.run import Run, load_run
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.budget import with_mixture_split
from chargpt.training.deadline import COUNTING_SECONDS, GATE_SECONDS, Deadline, mixture_seconds
from chargpt.training.mixing import fit_mixture, gate_data

TOKENIZER = CharTokenizer(" .abcdefghij")
VOCAB_SIZE, BLOCK_SIZE = TOKENIZER.vocab_size, 16
WORDS = [word for key, value in MIXED_SETTINGS.items() for word in ("-s", f"{key}={value}")]


def make_gpt() -> GPT:
    gpt = noisy_model(VOCAB_SIZE, block_size=BLOCK_SIZE)
    assert isinstance(gpt, GPT)
    return gpt


def random_mixture() -> tuple[Mixture, np.ndarray]:
    """Return a mixture with a random gate, and the text that its n-grams were counted from."""
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 300) // 3
    mixture = Mixture(make_gpt(), text, TOKENIZER, order=4).eval()
    for parameter in mixture.gate.parameters():
        torch.nn.init.normal_(parameter)
    return mixture, text


@pytest.fixture
def run(mixed_run: Path, tmp_path: Path) -> Run:
    return chargpt.load_run(mixed_run, device="cpu")


@pytest.fixture
def copy(mixed_run: Path, cli: Cli) -> Path:
    """A copy of the run, called `run`, beside which commands run."""
    return Path(shutil.copytree(mixed_run, "run"))


@torch.inference_mode()
def test_probabilities_are_the_gate_s_average_of_all_components() -> None:
    mixture, text = random_mixture()
    tokens = torch.from_numpy(text[None, :BLOCK_SIZE])
    log_probs = mixture.gpt(tokens).log_softmax(-1)
    contexts = mixture.contexts(tokens)
    weights = mixture.gate(mixture.gate_inputs(log_probs, contexts))
    expected = weights[..., :1] * log_probs.exp()
    for k in range(1, 5):
        # an order's own model: the n-gram model cut off after that order
        lower = NGramLM(VOCAB_SIZE, BLOCK_SIZE, list(mixture.ngram.orders[:k]))
        expected += weights[..., k : k + 1] * lower.probs(tokens)
    assert k < BACKOFF_ORDER, "the word n-grams back off to the longest n-gram"
    probs = lower.probs(tokens)
    for k, order in enumerate(mixture.word_model.orders, 5):
        order.interpolate(probs.view(-1, VOCAB_SIZE), contexts[k - 1].flatten())
        expected += weights[..., k : k + 1] * probs
    probs = mixture(tokens).exp()
    assert torch.allclose(probs, expected, atol=1e-6)
    assert torch.allclose(probs.sum(-1), torch.ones(1, BLOCK_SIZE))


@torch.inference_mode()
def test_parts_that_stay_in_a_cache_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, text = random_mixture()
    tokens = torch.from_numpy(text[: 3 * BLOCK_SIZE].reshape(3, BLOCK_SIZE))
    rows = torch.from_numpy(text[: 2 * 60].reshape(2, 60))
    whole, data = mixture(tokens), gate_data(mixture, rows[:, : LOOKBACK + BLOCK_SIZE])
    monkeypatch.setattr("chargpt.models.mixture.CACHED_BYTES", 4 * VOCAB_SIZE * 7)  # seven rows
    assert torch.equal(mixture(tokens), whole)
    for part, expected in zip(
        gate_data(mixture, rows[:, : LOOKBACK + BLOCK_SIZE]), data, strict=True
    ):
        assert torch.equal(part, expected)


@torch.inference_mode()
def test_the_gate_sees_how_much_the_counts_know_and_how_certain_the_gpt_is() -> None:
    text = np.array([0, 1, 0, 1, 0, 2, 3, 3])  # after 0: 1, 1, 2; 01 is followed by 0 alone
    mixture = Mixture(make_gpt(), text, TOKENIZER, order=3)
    tokens = torch.tensor([[0, 1, 7]])
    log_probs = mixture.gpt(tokens).log_softmax(-1)
    inputs = mixture.gate_inputs(log_probs, mixture.contexts(tokens))[0]
    probs = log_probs[0].double().exp()
    assert inputs[:, 0].tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    later = mixture.gate_inputs(log_probs, mixture.contexts(tokens), position=4)[0]
    assert later[:, 0].tolist() == pytest.approx([1 / 5, 1 / 6, 1 / 7])
    assert inputs[:, 1].tolist() == pytest.approx((-(probs * probs.log()).sum(-1)).tolist())
    assert inputs[:, 2].tolist() == pytest.approx(log_probs[0].amax(-1).tolist())
    # by position, n-gram order and number of words: distinct tokens after the context
    followers = inputs[:, 3::2].exp() - 1
    assert followers.round().tolist() == [[2, 0, 2, 2, 2], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert inputs[2, 4::2].tolist() == [1] * 5, "an unseen context backs off entirely"


@pytest.mark.parametrize("num_sequences", [1, 3])
@torch.inference_mode()
def test_decoding_predicts_what_the_forward_pass_does(num_sequences: int) -> None:
    mixture, text = random_mixture()
    cache, prompt = mixture.new_cache(1), torch.from_numpy(text[None, :5])
    assert torch.allclose(mixture(prompt, cache), mixture(prompt), atol=1e-5)
    decoder = build_decoder(mixture, num_sequences, cache)
    streams = np.stack([text[5 + i : 16 + i] for i in range(num_sequences)])
    stepped = np.stack([decoder.step(column) for column in streams.T], axis=1)
    rows = torch.from_numpy(np.hstack([np.tile(text[:5], (num_sequences, 1)), streams]))
    assert np.allclose(stepped, mixture(rows)[:, 5:].numpy(), atol=1e-4)


def test_the_counts_keep_their_context_when_the_cache_is_full() -> None:
    mixture, text = random_mixture()
    with torch.no_grad():
        for parameter in mixture.gate.parameters():
            parameter.zero_()
        mixture.gate.bias[:, 1:] = 100.0  # the counts alone, which do not depend on the GPT
    decoder = build_decoder(mixture, 1)
    stepped = [decoder.step(text[t : t + 1])[0] for t in range(3 * BLOCK_SIZE)]
    contexts = mixture.contexts(torch.from_numpy(text[None, : 3 * BLOCK_SIZE]))
    expected = np.mean([probs[0].numpy().copy() for probs in mixture.iter_probs(contexts)], axis=0)
    assert np.allclose(np.exp(stepped), expected, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 64])
@torch.inference_mode()
def test_counts_keep_the_context_before_a_block(limit: int | None) -> None:
    mixture, text = random_mixture()
    tokens, n_before, losses = text[:150], mixture.lookback, []
    padded = torch.from_numpy(np.concatenate(([-1] * n_before, tokens)))
    firsts = range(0, len(tokens) - 1, BLOCK_SIZE)
    for first in even_spans(len(tokens) - 1, BLOCK_SIZE, limit)[0] if limit else firsts:
        before = padded[first : first + n_before][None]
        block = padded[first + n_before :][: BLOCK_SIZE + 1][None]
        log_probs = mixture(block[:, :-1], before=before)
        losses += (-log_probs.gather(-1, block[:, 1:, None])).flatten().tolist()
    measured = evaluate_tokens(mixture, tokens, max_tokens=limit)
    assert measured.characters == len(losses) == (limit or len(tokens) - 1)
    assert measured.nats_per_char == pytest.approx(np.mean(losses), abs=1e-5)
    mixture.lookback = 0
    without = evaluate_tokens(mixture, tokens, max_tokens=limit)
    assert without.nats_per_char != pytest.approx(np.mean(losses), abs=1e-3)


def test_a_fitted_mixture_is_better_than_each_of_its_components_and_is_saved(run: Run) -> None:
    corpus = run.corpus()
    assert isinstance(run.model, GPT)
    mixture = fit_mixture(run.model, run.tokenizer, corpus.split("train"), corpus.split("mixture"))
    val = corpus.split("val")
    losses = [
        evaluate_tokens(model, val).nats_per_char for model in (mixture, run.model, mixture.ngram)
    ]
    assert losses[0] < min(losses[1:]) - 0.01
    train, in_words = corpus.split("train"), word_token_mask(run.tokenizer)
    words = WordContextModel(train, run.model.vocab_size, in_words)
    for one, other in zip(mixture.word_model.buffers(), words.buffers(), strict=True):
        assert torch.equal(one, other)
    saved = with_mixture(run).model  # the fit of the training gave the same bits
    tokens = torch.from_numpy(val[None, :32].astype(np.int64))
    with torch.inference_mode():
        assert torch.equal(mixture(tokens), saved(tokens))


@pytest.mark.parametrize("informed", ["gpt", "counts"])
def test_the_gate_trusts_the_component_that_predicts_the_tune_split(informed: str) -> None:
    generator = np.random.default_rng(1)
    known, other = (np.tile(generator.permutation(VOCAB_SIZE), 60) for _ in range(2))
    gpt = make_gpt()
    if informed == "gpt":  # an untrained one is uniform: better than counts of another text
        torch.nn.init.zeros_(gpt.head.weight)
    counted = other if informed == "gpt" else known
    mixture = fit_mixture(gpt, TOKENIZER, counted, known[:200])
    with torch.inference_mode():
        tokens = torch.from_numpy(known[None, 100 : 100 + BLOCK_SIZE])
        contexts = mixture.contexts(tokens)
        inputs = mixture.gate_inputs(mixture.gpt(tokens).log_softmax(-1), contexts)
        weights = mixture.gate(inputs)[0, 8:].mean(0)
    n_uniform = 2  # components: the GPT, and the counts of order 1
    assert weights[:n_uniform].sum() > 0.8 if informed == "gpt" else weights[0] < 0.1


def test_the_tune_split_is_the_start_of_the_text_and_is_not_trained_on(verse: Path) -> None:
    plain, corpus, longest = (
        load_corpus(TextConfig(path=str(verse), mixture_characters=n)) for n in (0, 500, 10**6)
    )
    tune, train = corpus.split("mixture"), corpus.split("train")
    assert np.array_equal(np.concatenate((tune, train)), plain.split("train"))
    assert np.array_equal(corpus.split("val"), plain.split("val"))
    lengths = [len(each.split("mixture")) for each in (plain, corpus, longest)]
    assert lengths == [0, 500, int(0.03 * corpus.tokens.size)]


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "not finite": lambda arrays: arrays["hidden.weight"].fill(math.nan),
    "of another shape": lambda arrays: arrays.update(bias=arrays["bias"][:, :3]),
    "without a key": lambda arrays: arrays.pop("fingerprint"),
    **{
        f"{name} tokens": lambda arrays, change=change: arrays.update(
            tokens=np.ascontiguousarray(change(arrays["tokens"]))
        )
        for name, change in {
            "too large": lambda tokens: tokens + 200,
            "no": lambda tokens: tokens[:0],
            "one of the": lambda tokens: tokens[:1],
            "square": lambda tokens: tokens[:100].reshape(10, 10),
            "float": lambda tokens: tokens.astype(np.float32),
            "negative": lambda tokens: -1 - tokens.astype(np.int64),
        }.items()
    },
}


def test_a_damaged_mixture_is_one_sentence(copy: Path, cli: Cli) -> None:
    path, tokens = copy / MIXTURE_FILE, load_run(copy).corpus().split("train")
    whole = path.read_bytes()
    for content in (whole[:1000], b"", b"x" * 50_000_000):
        path.write_bytes(content)
        assert "mixture.safetensors" in refusal(cli("score", "run", path, "--mixture"))
    for name, damage in DAMAGES.items():
        arrays = safetensors.numpy.load(whole)
        arrays["tokens"] = tokens.copy()  # as earlier versions wrote them
        damage(arrays)
        path.write_bytes(safetensors.numpy.save(arrays))
        message = refusal(cli("sample", "run", "--mixture"))
        assert "mixture.safetensors" in message, name
        assert "without its mixture" in message, name
    assert cli("sample", "run", "-n", 20).returncode == 0
    shown = cli("evaluate", "run")
    assert (shown.returncode, "gram" in shown.stdout) == (0, False)
    assert "mixture.safetensors" in shown.stderr
    verified = cli("verify", "run")
    assert verified.returncode != 0
    assert "mixture.safetensors" in verified.stdout + verified.stderr


def test_the_mixture_belongs_to_one_checkpoint(copy: Path, cli: Cli) -> None:
    message = refusal(cli("sample", "run", "--mixture", "--checkpoint", "20"))
    assert "is that of step 40, not of step 20" in message
    rates = ("-s", "optim.lr=1", "-s", "optim.matrix_lr=1")
    resumed = cli("train", "--resume", "run", "-s", "train.max_steps=45", *rates)
    assert "The steps after 40 did not lower the validation loss." in resumed.stdout
    shown = cli("evaluate", "run", "--checkpoint", "latest").stderr
    assert "is that of step 40, not of step 45; use that checkpoint\n" in shown


def test_the_mixture_of_another_model_of_the_same_step_is_refused(run: Run) -> None:
    with_mixture(run)
    with torch.no_grad():
        next(run.model.parameters()).add_(1)
    with pytest.raises(RunError, match="that of another model, also of step 40; use the run"):
        with_mixture(run)


def test_a_run_that_goes_on_gets_a_mixture_of_its_new_best(copy: Path, cli: Cli) -> None:
    resumed = cli("train", "--resume", "run", "-s", "train.max_steps=60")
    assert resumed.returncode == 0, resumed.stderr
    best = json.loads(cli("evaluate", "run", "--json").stdout)
    assert best["step"] == 60, "the run no longer improved: the test needs another length"
    assert best["mixture"]["nats_per_char"] < best["nats_per_char"]


def test_a_run_without_a_mixture_says_how_to_get_one(copy: Path, verse: Path, cli: Cli) -> None:
    plain = ("-s", "text.mixture_characters=0", "--out", "run", "--force")
    done = cli("train", verse, *WORDS, *plain)
    assert done.returncode == 0, done.stderr
    assert "gpt + n-grams" not in done.stdout
    assert not (copy / MIXTURE_FILE).exists()  # that of the run it replaced
    assert "text.mixture_characters" in refusal(cli("sample", "run", "--mixture"))
    bigram = cli("train", verse, *WORDS, "-c", "bigram", "--out", "bigram")
    assert bigram.returncode == 0, bigram.stderr
    assert "has no mixture" in refusal(cli("sample", "bigram", "--mixture"))


def test_a_deleted_mixture_is_noticed(copy: Path, cli: Cli) -> None:
    (copy / MIXTURE_FILE).unlink()
    message = refusal(cli("sample", "run", "--mixture"))
    assert "mixture.safetensors is missing: it was deleted" in message
    report = json.loads(cli("verify", "run", "--json").stdout)
    assert report["intact"]
    assert any("so the run has no mixture" in note for note in report["notes"])


def test_evaluate_and_compare_show_the_mixture_beside_the_gpt(copy: Path, cli: Cli) -> None:
    measured = json.loads(cli("evaluate", "run", "--json").stdout)
    shown = cli("evaluate", "run").stdout
    rows = [line for line in shown.splitlines() if "gpt" in line]
    assert [f"{measured['nats_per_char']:.4f}" in row for row in rows] == [True, False]
    assert f"{measured['mixture']['nats_per_char']:.4f}" in rows[1]
    assert "gpt + n-grams" in rows[1]
    assert "n-grams" not in cli("evaluate", "run", "--no-mixture").stdout
    golden = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    assert "has no mixture with n-gram models" in refusal(cli("sample", golden, "--mixture"))
    train = cli("evaluate", "run", "--split", "train", "--json")
    assert "mixture" not in json.loads(train.stdout)  # its n-grams were counted on that text
    assert "without gpt + n-grams" in train.stderr
    compared = json.loads(cli("compare", "run", "--json").stdout)["rows"]
    compared = [row for row in compared if row["run"]]
    assert [row["model"] for row in compared] == ["run", "run + n-grams"]
    assert compared[1]["nats_per_char"] == pytest.approx(measured["mixture"]["nats_per_char"])
    assert [row["parameters"] is None for row in compared] == [False, True]  # counts are none


def test_a_text_from_standard_input_is_read_once_for_both(
    copy: Path, verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(verse.read_bytes())))
    rows = []
    for text in ("-", verse):
        shown = cli("evaluate", "run", "--text", text).stdout
        rows.append([line for line in shown.splitlines() if line.lstrip().startswith("gpt")])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2


def test_a_hostile_mixture_does_not_end_a_training(copy: Path, mixed_run: Path) -> None:
    path = copy / MIXTURE_FILE
    arrays = safetensors.numpy.load(path.read_bytes())
    path.write_bytes(safetensors.numpy.save({**arrays, "step": np.array([math.inf])}))
    run, mixture = chargpt.load_run(copy, device="cpu"), with_mixture(mixed_run).model
    assert isinstance(mixture, Mixture)
    save_mixture(run, mixture)
    assert with_mixture(run).model


@pytest.mark.slow
def test_the_mixture_samples_scores_and_compresses_better(
    copy: Path, verse: Path, cli: Cli
) -> None:
    mixed = with_mixture(chargpt.load_run("run", device="cpu"))
    assert with_mixture(mixed) is mixed
    expected = chargpt.sample(mixed, length=50, seed=3)
    sampled = json.loads(cli("sample", "run", "--mixture", "--seed", 3, "-n", 50, "--json").stdout)
    assert sampled["samples"] == expected == chargpt.sample(mixed, length=50, seed=3)
    chapter = Path("chapter.txt")
    chapter.write_text(verse.read_text(encoding="utf-8")[-500:], encoding="utf-8")
    bits, sizes = [], []
    for option in ([], ["--mixture"]):
        scored = cli("score", "run", chapter, *option, "--json")
        bits.append(json.loads(scored.stdout)["bits_per_char"])
        assert cli("compress", "run", chapter, "packed", "--force", *option).returncode == 0
        assert cli("decompress", "run", "packed", "back.txt", "--force").returncode == 0
        assert Path("back.txt").read_bytes() == chapter.read_bytes()
        sizes.append(Path("packed").stat().st_size)
    assert bits[1] < bits[0] - 0.2
    assert sizes[1] < 0.95 * sizes[0]


def test_a_kept_mixture_is_not_replaced_when_the_run_goes_on(copy: Path, cli: Cli) -> None:
    Path("t.txt").write_text("the sea and the light")
    for keep in ([], ["--keep"]):
        done = cli("compress", "run", "t.txt", "t.cgpt", "--mixture", "--force", *keep)
        assert ("--keep protects it" in done.stderr) == (not keep)
    done = cli("train", "--resume", "run", "-s", "train.max_steps=80")
    assert done.returncode == 0, done.stderr
    assert "that of step 40 is kept" in done.stderr
    assert cli("decompress", "run", "t.cgpt", "back.txt").returncode == 0
    assert Path("back.txt").read_text() == "the sea and the light"
    arrays = safetensors.numpy.load_file(Path("run", MIXTURE_FILE))
    arrays["fingerprint"] = arrays["fingerprint"][::-1].copy()  # as if it were another checkpoint's
    del arrays["sha256"]
    safetensors.numpy.save_file(arrays, Path("run", MIXTURE_FILE))
    lost = refusal(cli("decompress", "run", "t.cgpt", "c.txt"))
    assert "step 40 of a run, but the mixture of run is that of another model, also of" in lost


def test_a_budget_with_too_little_time_or_text_has_no_mixture(
    verse: Path, notes: list[str]
) -> None:
    def mixture_characters(corpus: Corpus, left: float) -> int:
        deadline = Deadline(left, 0.0, lambda: 0.0)
        deadline = replace(deadline, started=left - deadline.remaining)
        config = with_mixture_split(Config(), corpus, deadline, frozenset())
        return config.text.mixture_characters

    corpus = load_corpus(TextConfig(path=str(verse)))
    seconds = mixture_seconds(corpus)
    counted = COUNTING_SECONDS * len(corpus.split("train")) / 1e6
    assert seconds == pytest.approx(GATE_SECONDS + counted)
    least = seconds / 0.2
    assert mixture_characters(corpus, 1.01 * least)
    assert not notes
    assert not mixture_characters(corpus, 0.99 * least)
    deadline = Deadline(10.0, 0.0, lambda: 0.0)  # a large vocabulary takes as long to mix
    for mixing, is_fast in ((1e-6, True), (1e-4, False)):
        config = with_mixture_split(Config(), corpus, deadline, frozenset(), mixing)
        assert bool(config.text.mixture_characters) == is_fast
    pieces = "the sea, the light, the lamp. " * 4000 + "|"
    for text, documents in (("The sea, the light.\n" * 150, None), (pieces * 6, "|")):
        other = load_corpus(TextConfig(documents=documents), text=text)
        assert not mixture_characters(other, 100.0)
        assert "too short, or its documents are too long" in notes[-1]
    fixed = Config().with_values({"text.mixture_characters": 300})
    keys = frozenset({"text.mixture_characters"})
    assert with_mixture_split(fixed, corpus, Deadline(1.0, 0.0), keys) == fixed
