"""The bigram baseline: a table, trained or estimated from counts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from noise import fill_with_noise

from chargpt.config import ModelConfig
from chargpt.errors import ConfigError, TextError
from chargpt.models import build_model, count_parameters
from chargpt.models.bigram import BigramLM
from chargpt.text.corpus import PairCounts, count_pairs
from chargpt.text.tokenizer import CharTokenizer


def test_logits_are_the_last_characters_row_of_the_table():
    model = fill_with_noise(BigramLM(5, block_size=4))
    assert torch.equal(model(torch.tensor([[3, 0, 3]]))[0], model.table.weight[[3, 0, 3]])
    with pytest.raises(TextError, match=r"write tokens\[None\]"):
        model(torch.tensor([3, 0, 3]))
    assert model(np.zeros((1, 9), np.uint8)).shape == (1, 9, 5)  # longer than a block


def test_from_counts_gives_smoothed_frequencies():
    pairs = PairCounts(np.array([0, 0, 2]), np.array([1, 2, 0]), np.array([3, 1, 5]), 3)
    probs = BigramLM.from_counts(pairs, 4, alpha=0.5).table.weight.exp()
    expected = [[0.5 / 5.5, 3.5 / 5.5, 1.5 / 5.5], [1 / 3] * 3, [5.5 / 6.5, 0.5 / 6.5, 0.5 / 6.5]]
    torch.testing.assert_close(probs, torch.tensor(expected))


def test_the_model_from_counts_is_a_minimum_of_the_loss_on_its_text(verse):
    text = verse.read_text(encoding="utf-8")
    tokens = CharTokenizer.fit(text).encode(text)
    pairs = count_pairs(tokens, int(tokens.max()) + 1)
    model = BigramLM.from_counts(pairs, 8, 1e-9)
    inputs, targets = (torch.from_numpy(t.astype(np.int64)) for t in (tokens[:-1], tokens[1:]))
    F.cross_entropy(model(inputs[None])[0], targets).backward()
    assert model.table.weight.grad.abs().max() < 1e-6


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
