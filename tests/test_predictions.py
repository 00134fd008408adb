"""Predictions on a text: agreement with the loss, groups, calibration, attention weights."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from noise import bigram_of_counts, fill_with_noise

import chargpt.models
from chargpt.analysis import predictions
from chargpt.config import ModelConfig
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.scoring import token_losses
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.models.kernels import rms_norm
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=24)


@pytest.fixture
def model(corpus: Corpus) -> GPT:
    model = build_model(CONFIG, corpus.tokenizer.vocab_size)
    assert isinstance(model, GPT)
    fill_with_noise(model)
    return model.eval()


def test_predictions_agree_with_the_loss_and_accuracy_of_the_protocol(
    corpus: Corpus, model: GPT
) -> None:
    tokens = corpus.split("val")[:500]
    found = predictions.predict(model, tokens, len(tokens))
    whole = evaluate_tokens(model, tokens)
    assert len(found.nll) == whole.characters == 499
    assert found.nll.mean() == pytest.approx(whole.nats_per_char, abs=1e-6)
    assert found.correct.mean() == pytest.approx(whole.accuracy)
    np.testing.assert_array_equal(found.targets, tokens[1:])
    np.testing.assert_array_equal(found.context_length[:26], [*range(1, 25), 1, 2])
    assert ((found.confidence >= 1 / corpus.tokenizer.vocab_size) & (found.confidence <= 1)).all()


def test_predictions_in_parts_of_a_window_have_the_same_contexts(
    corpus: Corpus, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = predictions.predict(model, corpus.split("val"), 200)
    monkeypatch.setattr(chargpt.models, "MAX_PASS_BYTES", 5 * 4 * model.width)
    parts = predictions.predict(model, corpus.split("val"), 200)
    assert len(whole.targets) > 100
    assert whole.context_length.tolist() == parts.context_length.tolist()
    np.testing.assert_allclose(whole.nll, parts.nll, atol=1e-5)


def test_groups_partition_the_characters(corpus: Corpus, model: GPT) -> None:
    found = predictions.predict(model, corpus.split("val")[:700], 700)
    for groups in (
        predictions.by_context(found),
        predictions.by_kind(found, corpus.tokenizer),
        predictions.calibration(found),
    ):
        assert sum(group.characters for group in groups) == len(found.nll)
        mean = sum(g.characters * g.nats for g in groups) / len(found.nll)
        assert mean == pytest.approx(found.nll.mean())
    names = [group.name for group in predictions.by_context(found)]
    assert names == ["1", "2", "3 to 4", "5 to 8", "9 to 16", "17 to 24"]
    kinds = {group.name for group in predictions.by_kind(found, corpus.tokenizer)}
    assert {"lower-case letters", "upper-case letters", "spaces", "line ends"} <= kinds


def test_a_model_of_the_texts_counts_is_calibrated_and_one_with_scaled_logits_is_not(
    corpus: Corpus,
) -> None:
    model = bigram_of_counts(corpus.pair_counts("train"), 64, alpha=0.01)
    tokens = corpus.split("train")
    fitted = predictions.calibration_error(
        predictions.calibration(predictions.predict(model, tokens, 20_000))
    )
    with torch.no_grad():
        model.table.weight.mul_(3)
    louder = predictions.calibration(predictions.predict(model, tokens, 20_000))
    assert fitted < 0.02
    assert predictions.calibration_error(louder) > 0.2
    assert sum(g.characters * (g.confidence - g.accuracy) for g in louder) > 0


def test_a_passage_has_the_surprisal_of_scoring_and_the_most_likely_characters(
    corpus: Corpus, model: GPT
) -> None:
    tokens = corpus.split("val")[:101]
    places = predictions.score_passage(model, corpus.tokenizer, tokens)
    assert "".join(place.character for place in places) == corpus.tokenizer.decode(tokens[1:])
    bits = token_losses(cast(Run, SimpleNamespace(model=model)), tokens) / np.log(2)
    np.testing.assert_allclose([place.bits for place in places], bits, rtol=1e-5)
    with torch.no_grad():
        probs = model(torch.from_numpy(tokens[None, :10].astype(np.int64)))[0, 9].softmax(-1)
    best = places[9].top
    assert len(best) == predictions.TOP_K
    assert [prob for _, prob in best] == pytest.approx(probs.topk(5).values.tolist(), rel=1e-4)
    assert best[0][0] == corpus.tokenizer.decode([int(probs.argmax())])


@pytest.mark.parametrize(
    ("character", "kind"),
    [
        ("a", "lower-case letters"),
        ("ж", "lower-case letters"),
        ("Q", "upper-case letters"),
        ("中", "letters without case (Chinese, Arabic, ...)"),
        ("\u0301", "combining marks"),
        ("7", "digits"),
        (" ", "spaces"),
        ("\t", "spaces"),
        ("\n", "line ends"),
        ("!", "punctuation and symbols"),
        ("🌊", "punctuation and symbols"),
    ],
)
def test_characters_are_grouped_by_kind(character: str, kind: str) -> None:
    assert predictions.kind_of(character) == kind


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": False}, {"scale_attn_weights": False}, {"attention": "average"}],
    ids=["full", "plain", "unscaled", "average"],
)
def test_attention_maps_are_the_weights_of_the_forward_pass(changes: dict) -> None:
    config = CONFIG.model_copy(update={"n_layer": 1, "mlp": "none", **changes})
    model = build_model(config, 11)
    assert isinstance(model, GPT)
    fill_with_noise(model)
    tokens = torch.randint(11, (2, 9))
    (weights,) = model.eval().attention_weights(tokens)
    assert weights.shape == (2, 2, 9, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 9))
    assert weights.triu(1).abs().max() == 0
    # by hand: what the heads hand on with these weights gives the model's own logits
    block = model.blocks[0]
    x = model.embedding(tokens)
    values = rms_norm(x) * block.attention_norm.weight @ block.attention.value.weight.T
    mixed = weights @ values.view(2, 9, 2, 8).transpose(1, 2)  # (B, H, T, D)
    x = x + mixed.transpose(1, 2).flatten(2) @ block.attention.output.weight.T
    logits = rms_norm(x) * model.norm.weight @ model.head.weight.T
    torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_a_model_without_attention_has_no_attention_maps() -> None:
    model = build_model(CONFIG.model_copy(update={"attention": "none"}), 11)
    assert isinstance(model, GPT)
    assert model.attention_weights(torch.zeros(1, 5, dtype=torch.int64)) == []
