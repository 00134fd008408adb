"""Every decoder against the attention formula, on texts longer than the block size."""

import math

import pytest
import torch
from formula import logits_of_long_text
from noise import RUNGS, fill_with_noise, noisy_model, random_tokens

from chargpt.inference.decoders import (
    MIN_SEQUENCES,
    GraphDecoder,
    ModelDecoder,
    NumpyDecoder,
    ParallelDecoder,
    build_decoder,
    is_supported,
)
from chargpt.models.gpt import GPT
from chargpt.models.ngram import BigramLM, NGramLM

DECODERS = {"numpy": NumpyDecoder, "graph": GraphDecoder, "model": ModelDecoder}


def decode(decoder, tokens):
    """Return the logits after each of the tokens (N, L), (N, L, V)."""
    return torch.stack([torch.tensor(decoder.step(ids)) for ids in tokens.numpy().T], dim=1)


def assert_close(logits, expected, tolerance=1e-4):
    assert expected.std() > 0.1
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(("size", "known"), [(1, 0), (2, 0), (12, 0), (12, 1), (12, 5), (12, 12)])
@pytest.mark.parametrize(("scaled", "scale"), [(True, 1), (False, 30)])  # the exp may overflow
@torch.inference_mode()
def test_every_decoder_gives_the_logits_of_the_formula_also_from_the_cache_of_one_sequence(
    kind, sequences, size, known, scaled, scale
):
    model = noisy_model(block_size=size, n_layer=3, scale_attn_weights=scaled)
    model.blocks[1].attention.query_norm.weight.mul_(scale)
    tokens, cache = random_tokens(sequences, steps=40), None
    if known:
        tokens[:, :known] = tokens[0, :known].clone()
        cache = model.new_cache(1)
        model(tokens[:1, :known], cache)
    decoder = DECODERS[kind](model, sequences, cache)
    expected = logits_of_long_text(model, tokens)[:, known:]
    assert_close(decode(decoder, tokens[:, known:]), expected, 1e-4 if scale == 1 else 1e-3)


@pytest.mark.parametrize(
    "model",
    [
        *(noisy_model(**rung) for rung in RUNGS),
        fill_with_noise(BigramLM(11, block_size=4)),
        NGramLM.fit(random_tokens(1, 300).numpy()[0], 11, block_size=7),
    ],
)
@pytest.mark.parametrize("sequences", [1, 3])
def test_every_model_is_decoded_to_the_logits_of_the_formula(model, sequences):
    tokens = random_tokens(sequences, steps=40)
    expected = logits_of_long_text(model, tokens)
    assert_close(decode(build_decoder(model, sequences), tokens), expected)
    if isinstance(model, GPT):
        assert_close(decode(GraphDecoder(model, sequences), tokens), expected)


@torch.no_grad()
def test_sequences_divided_over_threads_give_the_logits_of_the_formula():
    model, tokens = noisy_model(), random_tokens(2 * MIN_SEQUENCES + 1, steps=40)
    prompt, rest = tokens[:1, :5], tokens[:, 5:]
    tokens[:, :5] = prompt
    cache = model.new_cache(1)
    model(prompt, cache)
    decoder = build_decoder(model, len(tokens), cache, max_threads=9)
    assert [len(each.keys[0]) for each in decoder.decoders] == [33, 32]
    assert_close(decode(decoder, rest), logits_of_long_text(model, tokens)[:, 5:])
    assert isinstance(build_decoder(model, len(tokens)), NumpyDecoder)
    assert not isinstance(build_decoder(model, 2 * MIN_SEQUENCES - 1, None, 9), ParallelDecoder)


@pytest.mark.parametrize("sequences", [1, 3])
@torch.no_grad()
def test_the_numpy_decoder_copies_the_weights(sequences):
    model, tokens = noisy_model(), random_tokens(sequences)
    expected = logits_of_long_text(model, tokens)
    decoder = NumpyDecoder(model, sequences)
    for parameter in model.parameters():
        parameter.add_(1)
    assert_close(decode(decoder, tokens), expected)


@pytest.mark.parametrize("sequences", [1, 3])
@torch.no_grad()
def test_gates_that_overflow_are_closed_without_a_warning(sequences, recwarn):
    model, tokens = noisy_model(), random_tokens(sequences)
    for block in model.blocks:
        block.mlp.gate.weight.mul_(300)  # exp(-gate) overflows
    assert_close(decode(NumpyDecoder(model, sequences), tokens), model(tokens), 1e-2)
    assert not recwarn.list


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", ["embedding", "blocks.0.attention.key", "blocks.1.mlp.gate"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_non_finite_weights_give_non_finite_logits(sequences, name, value):
    model = noisy_model()
    model.get_submodule(name).weight[3] = value
    logits = decode(NumpyDecoder(model, sequences), torch.full((sequences, 2), 3))
    assert not logits.isfinite().any()


def test_only_supported_architectures_use_the_numpy_decoder():
    assert isinstance(build_decoder(noisy_model(), 1), NumpyDecoder)
    for other in ({"attention": "average"}, {"qk_norm": False}, {"mlp": "none"}):
        assert isinstance(build_decoder(noisy_model(**other), 1), ModelDecoder)
    assert not is_supported(BigramLM(5, block_size=4))
