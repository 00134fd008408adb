"""The bigram baseline: a trained table, and probabilities from counts."""

import numpy as np
import pytest
import torch
from noise import bigram_of_counts, fill_with_noise

from chargpt.config import ModelConfig
from chargpt.errors import ConfigError, TextError
from chargpt.models import build_model, count_parameters
from chargpt.models.ngram import BigramLM, bigram_log_probs
from chargpt.text.corpus import PairCounts


def test_logits_are_the_last_characters_row_of_the_table():
    model = fill_with_noise(BigramLM(5, block_size=4))
    assert torch.equal(model(torch.tensor([[3, 0, 3]]))[0], model.table.weight[[3, 0, 3]])
    with pytest.raises(TextError, match=r"\(3,\) are not \(batch, tokens\): write tokens\[None\]"):
        model(torch.tensor([3, 0, 3]))
    assert model(np.zeros((1, 9), np.uint8)).shape == (1, 9, 5)  # longer than a block


def test_counts_give_smoothed_frequencies():
    pairs = PairCounts(np.array([0, 0, 2]), np.array([1, 2, 0]), np.array([3, 1, 5]), 3)
    expected = [[0.5 / 5.5, 3.5 / 5.5, 1.5 / 5.5], [1 / 3] * 3, [5.5 / 6.5, 0.5 / 6.5, 0.5 / 6.5]]
    first, second = np.indices((3, 3)).reshape(2, 9)
    probs = np.exp(bigram_log_probs(pairs, first, second, alpha=0.5))
    np.testing.assert_allclose(probs.reshape(3, 3), expected)
    torch.testing.assert_close(
        bigram_of_counts(pairs, 4, alpha=0.5).table.weight.exp(), torch.tensor(expected)
    )


def test_a_cached_bigram_gives_the_same_logits_and_updates_the_cache_length():
    model = fill_with_noise(BigramLM(7, block_size=6))
    tokens = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2)
    parts = [model(part, cache) for part in tokens.split([3, 2, 1], dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), model(tokens))
    assert cache.length == cache.capacity == 6
    model.evict_oldest_half(cache)
    assert cache.length == 3
    assert torch.equal(model(tokens[:, :3], cache), model(tokens[:, :3]))
    with pytest.raises(TextError, match="7 tokens exceed the block size 6"):
        model(tokens[:, :1], cache)


def test_a_vocabulary_too_large_for_a_table_is_rejected_before_allocation():
    with pytest.raises(ConfigError, match=r"40,000,000,000 bytes; raise text\.min_count"):
        BigramLM(100_000, block_size=8)


def test_the_config_builds_a_bigram_of_zeros():
    model = build_model(ModelConfig(kind="bigram", block_size=8), vocab_size=9)
    assert isinstance(model, BigramLM)
    assert model.block_size == 8
    assert model.vocab_size == 9
    assert not model.table.weight.any()
    assert model.num_parameters() == count_parameters(ModelConfig(kind="bigram"), 9) == 81
