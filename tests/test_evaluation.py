"""Exact losses under each protocol, and the baselines."""

import gzip
import hashlib
import math
import shutil
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import bigram_of_counts, fill_with_noise, noisy_model, noisy_run_on

from chargpt.config import TextConfig
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, RunError, TextError, UnknownCharacterError
from chargpt.inference import evaluation
from chargpt.inference.evaluation import (
    Baselines,
    Evaluation,
    evaluate,
    evaluate_tokens,
    loss_values,
)
from chargpt.models.ngram import BIGRAM_ALPHA, BigramLM, bigram_log_probs
from chargpt.store.checkpoint import RunState
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.learner import Batches

T = 12  # the noisy model's block size


def random_tokens(count, vocab_size=11, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(vocab_size, size=count).astype(dtype)


@torch.no_grad()
def assert_scored(result, model, tokens, context_of):
    """Compare with the losses and predictions of each character, with a given context."""
    losses, correct = [], []
    for index in range(1, len(tokens)):
        context = tokens[index - context_of(index) : index].astype(np.int64)
        log_probs = model(torch.from_numpy(context)[None])[0, -1].double().log_softmax(0)
        losses.append(-float(log_probs[int(tokens[index])]))
        correct.append(int(log_probs.argmax()) == int(tokens[index]))
    assert result.characters == len(tokens) - 1
    assert result.nats_per_char == pytest.approx(np.mean(losses), abs=1e-5)
    assert result.accuracy == pytest.approx(np.mean(correct))


@pytest.mark.parametrize("count", [2, 5, T, T + 1, T + 2, 2 * T + 1, 5 * T + 4])
def test_full_scores_every_character_but_the_first_once(count):
    model, tokens = noisy_model(), random_tokens(count)
    result = evaluate_tokens(model, tokens)
    assert_scored(result, model, tokens, lambda index: (index - 1) % T + 1)
    assert (result.protocol, result.split, result.block_size) == ("blocks", "val", T)


@given(count=st.integers(2, 50), stride=st.none() | st.integers(1, T))
@settings(max_examples=20, deadline=None)
def test_sliding_scores_every_character_but_the_first_once_with_enough_context(count, stride):
    model, tokens = noisy_model(n_layer=1), random_tokens(count)
    result = evaluate_tokens(model, tokens, protocol="sliding", stride=stride)
    step = stride or T // 2

    def context(index):
        if index <= T:
            return index
        if index > T + (count - 1 - T) // step * step:  # the rest: the last window
            return T - (count - 1 - index)
        return T - step + (index - T - 1) % step + 1

    assert all(context(index) > T - step for index in range(T - step + 1, count))
    assert_scored(result, model, tokens, context)


def test_nanogpt_is_the_mean_of_200_random_batches(monkeypatch):
    monkeypatch.setattr(evaluation, "NANOGPT_BLOCK", 5)
    model, tokens = fill_with_noise(BigramLM(11, block_size=8)), random_tokens(300)
    result = evaluate_tokens(model, tokens, protocol="nanogpt", seed=7)
    batches, means = Batches(tokens, 5, 64, 7), []
    for index in range(200):
        rows = batches.at(index)
        with torch.no_grad():
            logits = model(rows[:, :-1]).flatten(0, 1)
        means.append(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item())
    assert result.nats_per_char == pytest.approx(np.mean(means), abs=1e-5)
    assert result.characters == 200 * 64 * 5
    assert result.block_size == 5
    assert result != evaluate_tokens(model, tokens, protocol="nanogpt", seed=8)
    monkeypatch.undo()
    monkeypatch.setattr(evaluation, "NANOGPT_EVAL_ITERS", 2)
    longer = evaluate_tokens(BigramLM(11, block_size=1000), tokens, protocol="nanogpt")
    assert (longer.block_size, longer.characters) == (256, 2 * 64 * 256)  # at most 256 of context


@pytest.mark.parametrize("limit", [1, 5, T, T + 1, 3 * T, 20 * T + 6, 10**9])
def test_a_limit_scores_whole_blocks_up_to_it_spread_over_the_split(limit):
    model, tokens = noisy_model(n_layer=1), random_tokens(20 * T + 7)
    result = evaluate_tokens(model, tokens, max_tokens=limit)
    assert limit > 20 * T or result.characters == (limit // T * T or limit)
    assert limit < 20 * T or result == evaluate_tokens(model, tokens)
    starts, length = evaluation.even_spans(999, span=10, max_tokens=40)
    assert (starts.tolist(), length) == ([120, 370, 610, 860], 10)  # 99 whole blocks' four middles


@pytest.mark.parametrize("count", [5, T + 2, 20 * T + 7])
@pytest.mark.parametrize("limit", [1, 4, 5, 3 * T, 10**6])
def test_a_limit_scores_evenly_spread_parts_of_sliding_windows(count, limit):
    model, tokens = noisy_model(n_layer=1), random_tokens(count)
    result = evaluate_tokens(model, tokens, protocol="sliding", stride=5, max_tokens=limit)
    assert max(1, min(limit, count - 1) - 9) <= result.characters <= min(limit, count - 1)
    windows = evaluation.sliding_windows(20 * T, T, 5, max_tokens=4 * 5)
    assert [each.starts.tolist() for each in windows] == [[30, 85, 145, 200]]
    assert windows[0][1:] == (T, T - 5)


def test_a_stopped_evaluation_is_that_of_random_blocks(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_CPU_CALL_TOKENS", 100 * T)
    model, tokens = fill_with_noise(BigramLM(11, block_size=T)), np.zeros(600 * T + 1, np.uint8)
    tokens[300 * T :] = random_tokens(300 * T + 1)  # its start is no fair part
    whole, first = evaluate_tokens(model, tokens), evaluate_tokens(model, tokens[: 100 * T + 1])
    part = evaluate_tokens(model, tokens, is_stopped=lambda: True)
    assert part.characters == 100 * T
    distance = abs(part.nats_per_char - whole.nats_per_char)
    assert distance < 3 * part.standard_error < abs(first.nats_per_char - whole.nats_per_char)
    unstopped = evaluate_tokens(model, tokens, is_stopped=lambda: False)
    for name in ("nats_per_char", "accuracy", "characters", "standard_error"):
        assert getattr(unstopped, name) == pytest.approx(getattr(whole, name), rel=1e-9)


@pytest.mark.parametrize("protocol", ["blocks", "sliding", "nanogpt"])
def test_the_batch_size_of_a_forward_pass_does_not_matter(protocol, monkeypatch):
    monkeypatch.setattr(evaluation, "NANOGPT_EVAL_ITERS", 2)
    model, tokens = noisy_model(n_layer=1), random_tokens(10 * T + 3)
    large = evaluate_tokens(model, tokens, protocol=protocol)
    monkeypatch.setattr(evaluation, "MAX_LOGITS_BYTES", 4 * 11 * T * 3)
    small = evaluate_tokens(model, tokens, protocol=protocol)
    assert small.nats_per_char == pytest.approx(large.nats_per_char, abs=1e-6)
    assert small.standard_error == pytest.approx(large.standard_error, abs=1e-6)
    assert (small.accuracy, small.characters) == (large.accuracy, large.characters)


@pytest.mark.parametrize(("vocab_size", "rows"), [(2, 256), (5000, 200)])
def test_the_logits_of_a_forward_pass_stay_small_for_every_vocabulary(vocab_size, rows):
    calls: list[int] = []

    class Counter(BigramLM):
        def forward(self, tokens, cache=None):
            calls.append(len(tokens))
            return torch.zeros(1, 1, 1).expand(*tokens.shape, vocab_size)

    model = Counter(1, block_size=16)
    model.vocab_size = model.first_continuation_id = vocab_size
    evaluate_tokens(model, np.zeros(16 * 300 + 1, dtype=np.uint8))
    assert max(calls) == rows
    assert rows * 16 * vocab_size * 4 <= 64_000_000


def test_the_standard_error_is_cluster_robust():
    """Repeated characters within a block: blocks are the clusters, not characters."""
    model = BigramLM(2, block_size=4)
    model.table.weight.data = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    tokens = np.array([0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0], dtype=np.uint8)
    low, high = -math.log(0.9), -math.log(0.1)
    sums, sizes = np.array([4 * low, 4 * high, 2 * low]), np.array([4, 4, 2])
    mean = sums.sum() / 10
    result = evaluate_tokens(model, tokens)
    assert result.nats_per_char == pytest.approx(mean, rel=1e-6)
    expected = math.sqrt(((sums - sizes * mean) ** 2).sum()) / 10
    assert result.standard_error == pytest.approx(expected, rel=1e-5)
    mixed = evaluate_tokens(model, tokens[2:7])  # low, low, high, high in one block
    assert mixed.standard_error == pytest.approx((high - low) / 2 / math.sqrt(4), rel=1e-5)


def test_the_errors_of_a_loss_and_of_a_difference_are_their_spread_over_random_texts():
    """Two models that err on the same characters: far below the errors of their losses."""
    first, second = (fill_with_noise(BigramLM(11, block_size=8)) for _ in range(2))
    second.table.weight.data = first.table.weight + 0.1 * second.table.weight
    pairs = [
        [evaluate_tokens(model, random_tokens(801, seed=seed)) for model in (first, second)]
        for seed in range(200)
    ]
    spread = np.std([one.nats_per_char - other.nats_per_char for one, other in pairs])
    estimated = np.mean([one.difference_error(other) for one, other in pairs])
    assert estimated == pytest.approx(spread, rel=0.2)
    of_each = np.mean([one.standard_error for one, _ in pairs])
    assert of_each == pytest.approx(np.std([one.nats_per_char for one, _ in pairs]), rel=0.2)
    assert estimated < of_each / 2
    first.block_size = 16  # other blocks: the errors of two independent losses
    one, other = evaluate_tokens(first, random_tokens(801, seed=0)), pairs[0][1]
    expected = math.hypot(one.standard_error, other.standard_error)
    assert one.difference_error(other) == pytest.approx(expected)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_is_without_dropout_and_restores_the_mode(training):
    model, tokens = noisy_model(dropout=0.5).train(training), random_tokens(100)
    result = evaluate_tokens(model, tokens)
    assert result == evaluate_tokens(noisy_model(), tokens)
    with pytest.raises(IndexError):
        evaluate_tokens(model, np.full(20, 200, dtype=np.uint8))
    assert model.training is training
    assert model.blocks[0].dropout.training is training
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    assert model.embedding.weight.grad is not None


def test_mixed_precision_is_used_only_on_request():
    model, tokens = noisy_model(), random_tokens(300)
    exact = evaluate_tokens(model, tokens)
    assert evaluate_tokens(model, tokens, dtype=torch.float32) == exact
    mixed = evaluate_tokens(model, tokens, dtype=torch.bfloat16)
    assert mixed.nats_per_char != exact.nats_per_char
    assert mixed.nats_per_char == pytest.approx(exact.nats_per_char, rel=0.02)


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {}, "val split is shorter than 2 characters"),
        (1, {}, "val split is shorter than 2 characters"),
        (0, {"split": "test"}, r"test split is shorter.*with -s text\.test_fraction=0\.1"),
        (T, {"protocol": "nanogpt"}, "use the protocol blocks"),
        (50, {"protocol": "sliding", "stride": 0}, "choose 1 to 12"),
        (50, {"protocol": "sliding", "stride": T + 1}, "choose 1 to 12"),
    ],
)
def test_short_texts_and_invalid_strides_are_rejected(count, options, message):
    with pytest.raises((TextError, ConfigError), match=message):
        evaluate_tokens(noisy_model(n_layer=1), random_tokens(count), **options)


def test_a_loss_is_reported_in_three_units():
    result = Evaluation(math.log(8), 0.5, 10, 0.1, "blocks", "val", 16).as_dict()
    assert (result["bits_per_char"], result["perplexity"]) == pytest.approx((3, 8))
    assert Evaluation(1e4, 0, 10, 0.1, "blocks", "val", 16).perplexity == math.inf
    assert loss_values(1e4)["perplexity"] == math.inf


TEXT = "the sea, the sea; and all the ships upon it.\nno wind, no cloud, no bird.\n" * 12


def corpus_of(text=TEXT, val_fraction=0.2):
    tokenizer = CharTokenizer.fit(text)
    key = hashlib.sha256(text.encode()).hexdigest()
    settings = TextConfig(val_fraction=val_fraction)
    return Corpus("verse", key, tokenizer, tokenizer.encode(text), settings)


def val_losses(corpus):
    return Baselines(corpus).losses(corpus.split("val"))


@pytest.mark.parametrize("alpha", [BIGRAM_ALPHA, 1.0])
def test_the_sparse_bigram_has_the_loss_of_the_dense_one(alpha):
    corpus = corpus_of(TEXT[:300] + "a few quite different words, judged by nobody")
    fitted, val = corpus.pair_counts("train"), corpus.split("val").astype(np.int64)
    dense = evaluate_tokens(bigram_of_counts(fitted, 16, alpha), val).nats_per_char
    sparse = -bigram_log_probs(fitted, val[:-1], val[1:], alpha).mean()
    assert sparse == pytest.approx(dense, abs=1e-6)
    assert alpha != BIGRAM_ALPHA or val_losses(corpus)["bigram"] == sparse


def test_the_baselines_equal_losses_computed_by_hand():
    corpus = corpus_of("ab" * 8 + "abba", val_fraction=0.2)  # train (ab) x 8, val abba
    result = val_losses(corpus)
    assert list(result) == ["uniform", "unigram", "bigram", "6-gram"]
    assert (result["uniform"], result["unigram"]) == pytest.approx((math.log(2), math.log(2)))
    pairs = {"ab": 8.1 / 8.2, "bb": 0.1 / 7.2, "ba": 7.1 / 7.2}
    assert result["bigram"] == pytest.approx(-sum(map(math.log, pairs.values())) / 3)
    lopsided = corpus_of("aaaaaaab" + "bb", val_fraction=0.2)
    assert val_losses(lopsided)["unigram"] == pytest.approx(-math.log(2 / 10))


def test_a_large_vocabulary_needs_no_table():
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))) * 2
    result = val_losses(corpus_of(text, val_fraction=0.5))
    assert result["uniform"] == pytest.approx(math.log(20_000))
    assert result["bigram"] == pytest.approx(-math.log(1.1 / 2001), rel=1e-4)


def test_baselines_of_an_empty_split_are_rejected():
    corpus = corpus_of()
    with pytest.raises(TextError, match="shorter than 2 characters"):
        Baselines(corpus).losses(corpus.split("test"))


@pytest.mark.parametrize(("n_blocks", "is_paired"), [(7, False), (8, True), (17, True)])
def test_differences_are_paired_by_eight_blocks_or_more(n_blocks, is_paired):
    rng = np.random.default_rng(n_blocks)
    sizes, blocks = np.full(n_blocks, 100.0), rng.normal(200, 30, n_blocks)
    gains = rng.normal(10, 1, n_blocks)  # nats per block
    first, second = (
        Evaluation(
            losses.sum() / sizes.sum(), 0.5, 100 * n_blocks, 0.05, "blocks", "val", 100,
            clusters=np.stack((losses, sizes)),
        )
        for losses in (blocks - gains, blocks)
    )  # fmt: skip
    # 95% of Student's t is within twice its standard deviation, nearly
    paired = np.std(gains, ddof=1) / math.sqrt(n_blocks) / 100
    t = {7: 2.447, 8: 2.365, 17: 2.120}[n_blocks] / 2
    expected = t * paired if is_paired else math.hypot(0.05, 0.05)
    assert first.difference_error(second) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("limit", [1, 100, 400, 10**6])
@pytest.mark.parametrize("block_size", [5, 8])
def test_baselines_and_models_score_the_same_characters(limit, block_size):
    corpus = corpus_of(TEXT * 6)
    fitted, val = Baselines(corpus), corpus.split("val")
    bigram = bigram_of_counts(fitted.pair_counts, block_size, BIGRAM_ALPHA)
    span = 16  # the same characters for any block size
    own = evaluate_tokens(bigram, val, max_tokens=limit, span=span)
    bigram_loss = fitted.evaluate(val, max_tokens=limit, span=span)["bigram"]
    # a bigram needs no context but the character before, so blocks do not matter to it
    assert bigram_loss.nats_per_char == pytest.approx(own.nats_per_char, abs=1e-6)
    if limit >= 400 and span % block_size == 0:  # 20 spans or more: the errors are paired
        assert own.difference_error(bigram_loss) == pytest.approx(0, abs=1e-6)
        assert bigram_loss.standard_error == pytest.approx(own.standard_error, rel=0.2)
    assert own.characters <= min(limit, len(val) - 1)


def test_the_n_gram_has_all_of_its_context_in_every_span():
    corpus = corpus_of(TEXT * 3)
    fitted, val = Baselines(corpus), corpus.split("val")
    of_each = fitted.ngram.losses(val[None])[0]  # of every character but the first
    assert fitted.losses(val)["6-gram"] == pytest.approx(of_each.mean(), abs=1e-6)
    for limit in (8, 100, 400):
        starts, length = evaluation.even_spans(len(val) - 1, 16, limit)
        expected = np.mean([of_each[start : start + length] for start in starts])
        losses = fitted.losses(val, max_tokens=limit, span=16)
        assert losses["6-gram"] == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def make_run(tmp_path):
    return lambda unknown="error": noisy_run_on(tmp_path, TEXT, **{"text.unknown": unknown})


def test_a_run_is_evaluated_on_its_own_text(make_run):
    run = make_run()
    corpus = load_corpus(run.config.text)
    for split in ("train", "val"):
        expected = evaluate_tokens(run.model, corpus.split(split), split=split)
        assert evaluate(run, split) == expected
    with pytest.raises(TextError, match="test split"):
        evaluate(run, "test")
    sliding = evaluate(run, protocol="sliding", stride=3)
    assert sliding.protocol == "sliding"
    assert sliding == evaluate_tokens(run.model, corpus.split("val"), protocol="sliding", stride=3)


def test_a_run_is_evaluated_on_the_text_it_was_trained_on_and_reads_no_other(make_run, tmp_path):
    run = make_run()
    before = evaluate(run)
    (tmp_path / "sea.txt").write_text(TEXT.replace("sea", "ash") + "!?")
    assert evaluate(run) == before
    shutil.rmtree(tmp_path / "text")
    with pytest.raises(RunError, match="an earlier version of chargpt has trained"):
        evaluate(run)
    with pytest.raises(RunError, match="was imported without its text"):
        evaluate(replace(run, state=RunState(run.step)))


@pytest.mark.parametrize("name", ["other.txt", "other.txt.gz"])
def test_another_text_is_scored_completely(name, make_run, tmp_path):
    run, path = make_run(), tmp_path / name
    content = "no ship, no sea, no bird" * 3
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    result = evaluate(run, path=path)
    tokens = run.tokenizer.encode(content)
    assert result == evaluate_tokens(run.model, tokens, split="all")
    assert result.characters == len(content) - 1


def test_unknown_characters_of_another_text_follow_the_policy(make_run, tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("no sea ÉÉÉ", encoding="utf-8")
    with pytest.raises(UnknownCharacterError, match=r"U\+00C9"):
        evaluate(make_run(), path=path)
    for policy, characters in (("skip", 6), ("replace", 9)):
        result = evaluate(make_run(policy), path=path)
        assert (result.characters, result.n_unknown) == (characters, 3)
        assert evaluate(make_run(), path=path, unknown=policy) == result
    path.write_text("ÉÉ", encoding="utf-8")
    with pytest.raises(TextError, match="the text is shorter than 2 characters"):
        evaluate(make_run("skip"), path=path)


class Part(RankGroup):
    """A rank that keeps its sums, and goes on as if the others had added nothing."""

    def all_reduce_sum(self, value):
        parts.append(value)
        return value


parts = []


@pytest.mark.parametrize("protocol", ["blocks", "sliding"])
def test_ranks_together_score_what_one_process_does_to_the_last_digit(protocol, monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_CPU_CALL_TOKENS", 4 * T)  # of a forward pass
    model, tokens, scored = noisy_model(), random_tokens(500), []
    for world_size in (1, 2, 3, 60):  # of the last, some score nothing
        parts.clear()
        for rank in range(world_size):
            with suppress(TextError):
                evaluate_tokens(model, tokens, protocol=protocol, group=Part(rank, world_size))
        scored.append(torch.stack(parts).sum(dim=0))
    assert all(torch.equal(each, scored[0]) for each in scored)
    assert scored[0][1].sum() == 499
