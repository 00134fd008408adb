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
from conftest import REPOSITORY, Cli, refusal, run_here

import chargpt
from chargpt.config import Config, ModelConfig, TextConfig
from chargpt.inference.decoders import build_decoder
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.windows import even_spans
from chargpt.models import GPT
from chargpt.models.mixture import Mixture
from chargpt.models.ngram import NGramLM
from chargpt.models.word_context import BACKOFF_ORDER, WordContextModel, word_token_mask
from chargpt.store.layout import MIXTURE_FILE
from chargpt.store.mixture import save_mixture, with_mixture
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.budget import with_mixture_split
from chargpt.training.deadline import RESERVE, Deadline, mixture_seconds
from chargpt.training.mixing import fit_mixture

TOKENIZER = CharTokenizer(" .abcdefghij")
VOCAB_SIZE, BLOCK_SIZE = TOKENIZER.vocab_size, 16
SETTINGS = {
    "text.mixture_characters": 800,
    "train.max_steps": 40,
    "train.batch_size": 4,
    "train.evaluate_every": 20,
    "train.save_every": 20,
    "train.evaluation_tokens": 1000,
    "model.n_layer": 1,
    "model.n_embd": 32,
    "model.block_size": 32,
    "train.sample_every": 0,
    "device": "cpu",
    "dtype": "float32",
}
WORDS = [word for key, value in SETTINGS.items() for word in ("-s", f"{key}={value}")]


def random_gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=BLOCK_SIZE)
    gpt = GPT(config, VOCAB_SIZE).eval()
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return gpt


def random_mixture() -> tuple[Mixture, np.ndarray]:
    """Return a mixture with a random gate, and the text that its n-grams were counted from."""
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 300) // 3
    mixture = Mixture(random_gpt(), text, word_token_mask(TOKENIZER), order=4).eval()
    for parameter in mixture.gate.parameters():
        torch.nn.init.normal_(parameter)
    return mixture, text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small run with a mixture once for all the tests that only read it."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "novel.txt")
    run_here("train", "novel.txt", *WORDS, "--out", "run", cwd=folder)
    return folder / "run"


@pytest.fixture
def run_of(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trained run."""
    return trained


# -- the model ----------------------------------------------------------------------------------


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
    words = mixture.word_model.iter_probs(lower.probs(tokens), contexts[4:])
    for k, probs in enumerate(words, 5):
        expected += weights[..., k : k + 1] * probs
    probs = mixture(tokens).exp()
    assert torch.allclose(probs, expected, atol=1e-6)
    assert torch.allclose(probs.sum(-1), torch.ones(1, BLOCK_SIZE))


@torch.inference_mode()
def test_the_gate_sees_how_much_the_counts_know_and_how_certain_the_gpt_is() -> None:
    text = np.array([0, 1, 0, 1, 0, 2, 3, 3])  # after 0: 1, 1, 2; 01 is followed by 0 alone
    mixture = Mixture(random_gpt(), text, word_token_mask(TOKENIZER), order=3)
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
def test_decoding_predicts_what_the_forward_pass_does(num_sequences: int) -> None:
    mixture, text = random_mixture()
    with torch.inference_mode():
        cache = mixture.new_cache(1)
        prompt = torch.from_numpy(text[None, :5])
        first = mixture(prompt, cache)
        assert torch.allclose(first, mixture(prompt), atol=1e-5)
        decoder = build_decoder(mixture, num_sequences, cache)
        streams = np.stack([text[5 + i : 16 + i] for i in range(num_sequences)])
        stepped = np.stack([decoder.step(streams[:, t]) for t in range(11)], axis=1)
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
    expected = np.mean([p.numpy() for p in _order_probs(mixture, text[: 3 * BLOCK_SIZE])], axis=0)
    assert np.allclose(np.exp(stepped), expected, atol=1e-5)


def _order_probs(mixture: Mixture, text: np.ndarray) -> list[torch.Tensor]:
    contexts = mixture.contexts(torch.from_numpy(text[None]))
    return [probs[0].clone() for probs in mixture.iter_probs(contexts)]


@pytest.mark.parametrize("limit", [None, 64])
@torch.inference_mode()
def test_counts_keep_the_context_before_a_block(limit: int | None) -> None:
    mixture, text = random_mixture()
    tokens = text[:150]
    n_before, spacing = mixture.lookback, BLOCK_SIZE
    firsts = range(0, len(tokens) - 1, spacing)
    if limit is not None:
        firsts = (even_spans(len(tokens) - 1, spacing, limit)[0]).tolist()
        assert len(firsts) == limit // BLOCK_SIZE
    losses = []
    for first in firsts:
        before = [-1] * max(0, n_before - first) + list(tokens[max(0, first - n_before) : first])
        block = torch.tensor(tokens[first : first + spacing + 1])[None]
        log_probs = mixture(block[:, :-1], before=torch.tensor([before]))
        losses += (-log_probs.gather(-1, block[:, 1:, None])).flatten().tolist()
    measured = evaluate_tokens(mixture, tokens, max_tokens=limit)
    assert measured.characters == len(losses)
    assert measured.nats_per_char == pytest.approx(np.mean(losses), abs=1e-5)
    mixture.lookback = 0
    assert evaluate_tokens(mixture, tokens).nats_per_char != pytest.approx(
        np.mean(losses), abs=1e-3
    )


# -- the fit ------------------------------------------------------------------------------------


def test_a_fitted_mixture_is_better_than_each_of_its_components(run_of: Path) -> None:
    run = chargpt.load_run(run_of, device="cpu")
    corpus = run.corpus()
    assert isinstance(run.model, GPT)
    mixture = fit_mixture(run.model, run.tokenizer, corpus.split("train"), corpus.split("mixture"))
    val = corpus.split("val")
    losses = [
        evaluate_tokens(model, val).nats_per_char for model in (mixture, run.model, mixture.ngram)
    ]
    assert losses[0] < min(losses[1:]) - 0.01
    again = fit_mixture(run.model, run.tokenizer, corpus.split("train"), corpus.split("mixture"))
    for one, other in zip(mixture.gate.parameters(), again.gate.parameters(), strict=True):
        assert torch.equal(one, other), "the fit does not repeat"
    words = WordContextModel(
        corpus.split("train"), run.model.vocab_size, word_token_mask(run.tokenizer)
    )
    for one, other in zip(mixture.word_model.buffers(), words.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("informed", ["gpt", "counts"])
def test_the_gate_trusts_the_component_that_predicts_the_tune_split(informed: str) -> None:
    generator = np.random.default_rng(1)
    known, other = (np.tile(generator.permutation(VOCAB_SIZE), 60) for _ in range(2))
    gpt = random_gpt()
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
    settings = TextConfig(path=str(verse), mixture_characters=500)
    corpus, plain = load_corpus(settings), load_corpus(TextConfig(path=str(verse)))
    tune, train = corpus.split("mixture"), corpus.split("train")
    assert np.array_equal(np.concatenate((tune, train)), plain.split("train"))
    assert len(tune) == 500
    assert np.array_equal(corpus.split("val"), plain.split("val"))
    assert len(plain.split("mixture")) == 0
    longest = load_corpus(TextConfig(path=str(verse), mixture_characters=10**6))
    assert len(longest.split("mixture")) == int(0.03 * corpus.tokens.size)


# -- the file -----------------------------------------------------------------------------------


def test_a_saved_mixture_predicts_the_same_bits(run_of: Path) -> None:
    run = chargpt.load_run(run_of, device="cpu")
    corpus = run.corpus()
    assert isinstance(run.model, GPT)
    fitted = fit_mixture(run.model, run.tokenizer, corpus.split("train"), corpus.split("mixture"))
    loaded = with_mixture(run).model
    tokens = torch.from_numpy(corpus.split("val")[None, :32].astype(np.int64))
    with torch.inference_mode():
        assert torch.equal(fitted(tokens), loaded(tokens))


def change_gate(arrays: dict[str, Any]) -> None:
    arrays["hidden.weight"] *= math.nan


def change_tokens(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"] + 200


def drop_tokens(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"][:0]


def square_tokens(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"][:100].reshape(10, 10)


def float_tokens(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"].astype(np.float32)


def negative_tokens(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = -1 - arrays["tokens"].astype(np.int64)


def change_shape(arrays: dict[str, Any]) -> None:
    arrays["bias"] = arrays["bias"][:, :3]


def drop_key(arrays: dict[str, Any]) -> None:
    del arrays["fingerprint"]


def keep_one_token(arrays: dict[str, Any]) -> None:
    arrays["tokens"] = arrays["tokens"][:1]


@pytest.mark.parametrize(
    "damage",
    [
        *(change_gate, change_tokens, drop_tokens, square_tokens, float_tokens, negative_tokens),
        *(change_shape, drop_key, keep_one_token),
    ],
)
def test_a_damaged_mixture_is_one_sentence(
    run_of: Path, cli: Cli, damage: Callable[[dict[str, Any]], None]
) -> None:
    shutil.copytree(run_of, "run")
    path = Path("run", MIXTURE_FILE)
    arrays = safetensors.numpy.load(path.read_bytes())
    damage(arrays)
    path.write_bytes(safetensors.numpy.save(arrays))
    message = refusal(cli("sample", "run", "--mixture"))
    assert "mixture.safetensors" in message
    assert "without --mixture" in message
    assert cli("sample", "run", "-n", 20).returncode == 0
    shown = cli("evaluate", "run")
    assert shown.returncode == 0
    assert "mixture.safetensors" in shown.stderr
    assert "gram" not in shown.stdout
    verified = cli("verify", "run")
    assert verified.returncode != 0
    assert "mixture.safetensors" in verified.stdout + verified.stderr


def test_a_truncated_or_foreign_mixture_is_one_sentence(run_of: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "run")
    path = Path("run", MIXTURE_FILE)
    for content in (path.read_bytes()[:1000], b"", b"x" * 50_000_000):
        path.write_bytes(content)
        assert "mixture.safetensors" in refusal(cli("score", "run", path, "--mixture"))


def test_the_mixture_belongs_to_one_checkpoint(run_of: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "run")
    message = refusal(cli("sample", "run", "--mixture", "--checkpoint", "20"))
    assert "is that of step 40, not of step 20" in message
    assert cli("verify", "run").returncode == 0
    resumed = cli("train", "--resume", "run", "-s", "train.max_steps=60")
    assert resumed.returncode == 0, resumed.stderr
    assert "did not lower" not in resumed.stdout
    best = json.loads(cli("evaluate", "run", "--json").stdout)
    assert best["step"] == 60, "the run no longer improved: the test needs another length"
    assert best["mixture"]["nats_per_char"] < best["nats_per_char"]


def test_after_steps_in_vain_the_best_checkpoint_keeps_the_mixture(run_of: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "run")
    rates = ("-s", "optim.lr=1", "-s", "optim.matrix_lr=1")
    resumed = cli("train", "--resume", "run", "-s", "train.max_steps=45", *rates)
    assert "The 5 further steps did not lower the validation loss." in resumed.stdout
    shown = cli("evaluate", "run", "--checkpoint", "latest").stderr
    assert "is that of step 40, not of step 45; use that checkpoint\n" in shown


def test_a_run_without_a_mixture_says_how_to_get_one(verse: Path, cli: Cli) -> None:
    words = [word.replace("mixture_characters=800", "mixture_characters=0") for word in WORDS]
    done = cli("train", verse, *words, "--out", "plain")
    assert done.returncode == 0, done.stderr
    assert "gram" in done.stdout
    assert "gpt + n-grams" not in done.stdout
    assert not Path("plain", MIXTURE_FILE).exists()
    message = refusal(cli("sample", "plain", "--mixture"))
    assert "text.mixture_characters" in message
    bigram = cli("train", verse, *WORDS, "-c", "bigram", "--out", "bigram")
    assert bigram.returncode == 0, bigram.stderr
    assert "has no mixture" in refusal(cli("sample", "bigram", "--mixture"))


def test_a_deleted_mixture_is_noticed(run_of: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "copy")
    Path("copy", "mixture.safetensors").unlink()
    assert "mixture.safetensors is missing: it was deleted" in refusal(
        cli("sample", "copy", "--mixture")
    )
    report = json.loads(cli("verify", "copy", "--json").stdout)
    assert report["intact"]
    assert any("so the run has no mixture" in note for note in report["notes"])


def test_replacing_a_run_removes_its_mixture(run_of: Path, verse: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "run")
    words = [word.replace("mixture_characters=800", "mixture_characters=0") for word in WORDS]
    assert cli("train", verse, *words, "--out", "run", "--force").returncode == 0
    assert not Path("run", MIXTURE_FILE).exists()


# -- the commands -------------------------------------------------------------------------------


def test_evaluate_and_compare_show_the_mixture_beside_the_gpt(run_of: Path, cli: Cli) -> None:
    shown = cli("evaluate", run_of)
    rows = [line for line in shown.stdout.splitlines() if "gpt" in line]
    assert len(rows) == 2
    assert "gpt + n-grams" in rows[1]
    assert "with the mixture on cpu" in shown.stdout
    assert "n-grams" not in cli("evaluate", run_of, "--no-mixture").stdout
    without = cli("evaluate", REPOSITORY / "tests" / "golden" / "0.1.0" / "run", "--mixture")
    assert (without.returncode, without.stdout) == (2, "")
    assert "has no mixture with n-gram models" in without.stderr
    train = cli("evaluate", run_of, "--split", "train", "--json")
    assert "mixture" not in json.loads(train.stdout)  # its n-grams were counted on that text
    assert "without gpt + n-grams" in train.stderr
    measured = json.loads(cli("evaluate", run_of, "--json").stdout)
    assert f"{measured['mixture']['nats_per_char']:.4f}" in rows[1]
    assert f"{measured['nats_per_char']:.4f}" in rows[0], "the GPT's own figure is not in its place"
    compared = json.loads(cli("compare", run_of, "--json").stdout)["rows"]
    compared = [row for row in compared if row["run"]]
    assert [row["model"] for row in compared] == ["run", "run + n-grams"]
    assert compared[1]["nats_per_char"] == pytest.approx(measured["mixture"]["nats_per_char"])
    assert [row["parameters"] is None for row in compared] == [False, True]  # counts are none


def test_a_text_from_standard_input_is_read_once_for_both(
    run_of: Path, verse: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(verse.read_bytes())))
    done = cli("evaluate", run_of, "--text", "-")
    assert done.returncode == 0, done.stderr
    again = cli("evaluate", run_of, "--text", verse)

    def losses(shown: str) -> list[str]:
        return [line for line in shown.splitlines() if line.lstrip().startswith("gpt")]

    assert losses(done.stdout) == losses(again.stdout)
    assert len(losses(done.stdout)) == 2


def test_a_hostile_mixture_does_not_end_a_training(run_of: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of, tmp_path / "copy")
    path = tmp_path / "copy" / MIXTURE_FILE
    arrays = safetensors.numpy.load(path.read_bytes())
    path.write_bytes(safetensors.numpy.save({**arrays, "step": np.array([math.inf])}))
    run = chargpt.load_run(tmp_path / "copy", device="cpu")
    mixture = with_mixture(run_of).model
    assert isinstance(mixture, Mixture)
    save_mixture(run, mixture)
    assert with_mixture(run).model


@pytest.mark.slow
def test_the_mixture_samples_scores_and_compresses_better(run_of: Path, cli: Cli) -> None:
    mixed = with_mixture(chargpt.load_run(run_of, device="cpu"))
    assert with_mixture(mixed) is mixed
    assert chargpt.sample(mixed, length=50, seed=3) == chargpt.sample(mixed, length=50, seed=3)
    sampled = json.loads(cli("sample", run_of, "--mixture", "--seed", 3, "-n", 50, "--json").stdout)
    assert sampled["samples"] == chargpt.sample(mixed, length=50, seed=3)
    text = run_of.parent / "novel.txt"
    chapter = Path("chapter.txt")
    chapter.write_text(text.read_text(encoding="utf-8")[-500:], encoding="utf-8")
    bits = [
        json.loads(cli("score", run_of, chapter, *option, "--json").stdout)["bits_per_char"]
        for option in ([], ["--mixture"])
    ]
    assert bits[1] < bits[0] - 0.2
    for option, name in (([], "plain.cgpt"), (["--mixture"], "mixed.cgpt")):
        assert cli("compress", run_of, chapter, name, *option).returncode == 0
        assert cli("decompress", run_of, name, "back.txt", "--force").returncode == 0
        assert Path("back.txt").read_bytes() == chapter.read_bytes()
    assert Path("mixed.cgpt").stat().st_size < 0.95 * Path("plain.cgpt").stat().st_size


def test_a_kept_mixture_is_not_replaced_when_the_run_goes_on(run_of: Path, cli: Cli) -> None:
    shutil.copytree(run_of, "run")
    Path("t.txt").write_text("the sea and the light")
    more = ("train", "--resume", "run", "-s")
    for keep in ([], ["--keep"]):
        done = cli("compress", "run", "t.txt", "t.cgpt", "--mixture", "--force", *keep)
        assert ("--keep protects it" in done.stderr) == (not keep)
    step = chargpt.load_run("run").step
    done = cli(*more, f"train.max_steps={step + 40}")
    assert done.returncode == 0, done.stderr
    assert f"that of step {step} is kept" in done.stderr
    assert cli("decompress", "run", "t.cgpt", "back.txt").returncode == 0
    assert Path("back.txt").read_text() == "the sea and the light"
    arrays = safetensors.numpy.load_file(Path("run", MIXTURE_FILE))
    arrays["fingerprint"] = arrays["fingerprint"][::-1].copy()  # as if it were another checkpoint's
    safetensors.numpy.save_file(arrays, Path("run", MIXTURE_FILE))
    lost = refusal(cli("decompress", "run", "t.cgpt", "c.txt"))
    assert f"compressed with the mixture of step {step}, which has been replaced since" in lost


@pytest.mark.slow
def test_a_budget_leaves_characters_for_the_mixture(verse: Path, cli: Cli) -> None:
    done = cli("train", verse, "--budget", "10s", "--out", "run", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "gpt + n-grams" in done.stdout
    assert "--mixture uses it" in " ".join(done.stdout.split())
    assert chargpt.load_run("run").config.text.mixture_characters == 20_000
    plain = cli(
        "train", verse, "--budget", "10s", "-s", "text.mixture_characters=0", "--out", "plain"
    )
    assert plain.returncode == 0, plain.stderr
    assert "gpt + n-grams" not in plain.stdout


def test_a_budget_with_too_little_time_left_has_no_mixture(verse: Path, notes: list[str]) -> None:
    corpus = load_corpus(TextConfig(path=str(verse)))
    seconds = mixture_seconds(corpus)
    counted = RESERVE.counting_seconds * len(corpus.split("train")) / 1e6
    assert seconds == pytest.approx(RESERVE.gate_seconds + counted)

    def mixture_characters(corpus: Corpus, left: float) -> int:
        deadline = Deadline(left, 0.0, lambda: 0.0)
        deadline = replace(deadline, started=left - deadline.remaining)
        return with_mixture_split(Config(), corpus, deadline, frozenset()).text.mixture_characters

    least = seconds / 0.2
    assert mixture_characters(corpus, 1.01 * least)
    assert not notes
    assert not mixture_characters(corpus, 0.99 * least)
    assert "without a mixture: fitting one would take" in notes[-1]
    short = load_corpus(TextConfig(), text="The sea, the light.\n" * 150)
    assert not mixture_characters(short, 10.0)
    assert "without a mixture: 3% of the text is too little" in notes[-1]
    pieces = "the sea, the light, the lamp. " * 4000 + "|"
    long = load_corpus(TextConfig(documents="|"), text=pieces * 6)
    assert not mixture_characters(long, 100.0)
    assert "its split, of whole documents, would be over 6%" in notes[-1]
    fixed = Config().with_values({"text.mixture_characters": 300})
    keys = frozenset({"text.mixture_characters"})
    assert with_mixture_split(fixed, corpus, Deadline(1.0, 0.0), keys) == fixed


def test_train_in_python_fits_the_mixture(verse: Path, tmp_path: Path) -> None:
    run = chargpt.train(verse, settings=SETTINGS, out=tmp_path / "run")
    mixed = chargpt.with_mixture(run)
    gain = chargpt.evaluate(run).nats_per_char - chargpt.evaluate(mixed).nats_per_char
    assert gain > 0.2
