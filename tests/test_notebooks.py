"""Numbers that teaching notebooks print, reproduced with the package's modules.

They are those of the lecture "Let's build GPT" (Karpathy 2023, gpt-dev.ipynb) and of chapter 3 of
"Build a Large Language Model (From Scratch)" (Raschka 2024).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chargpt.analysis.explain import average_by_loop, average_by_matrix, average_by_softmax
from chargpt.models.kernels import attention_scores, explicit_attention, fast_attention
from chargpt.models.ngram import BigramLM
from chargpt.text.tokenizer import CharTokenizer

SIX_INPUTS = torch.tensor([
    [0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33], [0.77, 0.25, 0.10], [0.05, 0.80, 0.55],
])  # fmt: skip


def six_token_heads():
    torch.manual_seed(123)
    return [SIX_INPUTS @ torch.rand(3, 2) for _ in ("query", "key", "value")]


def assert_printed(actual, printed):
    """The notebooks print four decimals."""
    torch.testing.assert_close(actual, torch.tensor(printed), atol=6e-5, rtol=0)


def test_unmasked_attention_over_six_tokens_gives_the_printed_context_vectors():
    output, weights = explicit_attention(*six_token_heads(), causal=False)
    printed = "0.2996 0.8053 0.3061 0.8210 0.3058 0.8203 0.2948 0.7939 0.2927 0.7891 0.2990 0.8040"
    assert_printed(output.flatten(), [float(number) for number in printed.split()])
    assert_printed(weights[0], [0.1551, 0.2104, 0.2059, 0.1413, 0.1074, 0.1799])
    q, k, v = (x[None, None] for x in six_token_heads())
    fused = fast_attention(q, k, v, mask=torch.ones(6, 6, dtype=torch.bool))[0, 0]
    torch.testing.assert_close(fused, output)


@pytest.mark.parametrize("average", [average_by_loop, average_by_matrix, average_by_softmax])
def test_each_average_of_the_past_gives_the_printed_rows(average):
    torch.manual_seed(42)
    x = torch.rand(4, 8, 2)
    printed = [[0.8823, 0.9150], [0.6326, 0.9372], [0.5519, 0.8251]]
    assert_printed(average(x)[0, :3], printed)


@pytest.mark.parametrize(
    ("factor", "printed"),
    [
        (1.0, [0.1925, 0.1426, 0.2351, 0.1426, 0.2872]),
        (8.0, [0.0326, 0.0030, 0.1615, 0.0030, 0.8000]),
    ],
)
def test_larger_scores_saturate_the_softmax(factor, printed):
    keys = torch.tensor([[0.1], [-0.2], [0.3], [-0.2], [0.5]])
    query = torch.tensor([[factor]])
    _, weights = explicit_attention(query, keys, keys, causal=False, scaled=False)
    assert_printed(weights[0], printed)


@pytest.mark.parametrize(
    ("seed", "printed"),
    [(1337, [1.0449, 1.0700, 17.4690, 1.0918]), (3, [0.9535, 1.0524, 15.1501, 0.9469])],
)
def test_scaling_brings_the_variance_of_the_scores_back_to_one(seed, printed):
    torch.manual_seed(seed)
    torch.randn(4, 8, 32)  # the notebooks sample an input and three layers before k and q
    for _ in ("key", "query", "value"):
        nn.Linear(32, 16, bias=False)
    k, q = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    raw, scaled = attention_scores(q, k, scaled=False), attention_scores(q, k)
    assert_printed(torch.stack([x.var() for x in (k, q, raw, scaled)]), printed)


def test_a_unit_normal_bigram_starts_half_a_nat_above_uniform():
    """E[ln sum exp] = ln V + 1/2 but for terms of order 1/V, and the target's logit averages 0."""
    losses = []
    for seed in range(10):
        torch.manual_seed(seed)
        model = BigramLM(87, block_size=8, init_std=1.0)
        tokens = torch.randint(87, (32, 64), generator=torch.Generator().manual_seed(seed))
        targets = tokens.roll(-1, dims=1)
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item())
    assert sum(losses) / len(losses) == pytest.approx(math.log(87) + 0.5, abs=0.04)


def test_the_notebooks_sentence_encodes_to_the_printed_ids():
    sentence = "But they were all of them deceived."
    tokenizer = CharTokenizer.fit(sentence)
    ids = tokenizer.encode(sentence)
    assert tokenizer.vocab_size == 19
    assert ids.tolist() == [
        *(2, 15, 14, 0, 14, 8, 6, 18, 0, 17, 6, 13, 6, 0, 3, 10, 10, 0),
        *(12, 7, 0, 14, 8, 6, 11, 0, 5, 6, 4, 6, 9, 16, 6, 5, 1),
    ]
    assert tokenizer.decode(ids) == sentence
