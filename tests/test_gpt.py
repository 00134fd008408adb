"""The transformer: causality, caches, initialisation, and parity with transformers' Qwen3."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import RUNGS, noisy_model, random_tokens

from chargpt.config import ModelConfig
from chargpt.errors import DeviceError, TextError
from chargpt.export.huggingface import qwen3_config, qwen3_weights
from chargpt.models import build_model, count_parameters, gpt
from chargpt.models.gpt import GPT
from chargpt.models.kernels import NORM_EPS, causal_mask, explicit_attention, uniform_weights


@pytest.mark.parametrize("rung", RUNGS)
def test_future_characters_never_change_past_logits(rung):
    model = noisy_model(**rung)
    tokens = random_tokens()
    logits = model(tokens)
    for position in range(1, 12):
        changed = tokens.clone()
        changed[:, position:] = (changed[:, position:] + 1) % 11
        changed_logits = model(changed)
        assert torch.equal(changed_logits[:, :position], logits[:, :position])
        assert not torch.equal(changed_logits[:, position], logits[:, position])


@pytest.mark.parametrize("rung", [{}, {"attention": "average"}])
def test_every_past_character_changes_the_last_logits(rung):
    model = noisy_model(**rung)
    tokens = random_tokens(batch=1)
    last = model(tokens)[0, -1]
    for position in range(12):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 11
        assert (model(changed)[0, -1] - last).abs().max() > 1e-4


def record_attention_weights(model, tokens, monkeypatch):
    """Return each layer's attention weights, (B, H, T, T), recorded in the forward pass."""
    recorded = []

    def recording_attention(q, k, v, **kwargs):
        output, weights = explicit_attention(q, k, v, **kwargs)
        recorded.append(weights)
        return output

    monkeypatch.setattr(gpt, "fast_attention", recording_attention)
    with torch.no_grad():
        model(tokens)
    return recorded


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layer": 4, "n_head": 2, "n_embd": 128},
        {"n_layer": 2, "n_head": 1, "n_embd": 64},
        {"n_layer": 4, "n_head": 2, "n_embd": 128, "rope_theta": 500_000.0},
        {"n_layer": 3, "n_head": 4, "n_embd": 48},
    ],
)
def test_heads_of_the_first_layers_start_as_previous_token_heads(sizes, monkeypatch):
    torch.manual_seed(2)
    model = GPT(ModelConfig(block_size=40, **sizes), vocab_size=11)
    tokens = random_tokens(batch=8, steps=40)
    for layer, weights in enumerate(record_attention_weights(model, tokens, monkeypatch)):
        for head in range(sizes["n_head"]):
            by_distance = [
                weights[:, head].diagonal(-n, -2, -1)[:, -20:].mean().item() for n in range(15)
            ]
            if layer < 3:
                assert max(range(15), key=by_distance.__getitem__) == layer + head + 1
            else:
                assert max(by_distance) < 0.1  # later layers start without a preferred distance


def test_attention_weights_are_those_of_the_forward_pass(monkeypatch):
    model, tokens = noisy_model(), random_tokens()
    returned = model.attention_weights(tokens)
    recorded = record_attention_weights(model, tokens, monkeypatch)
    for one, other in zip(returned, recorded, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rung", RUNGS)
def test_initial_logits_are_zero(rung):
    model = build_model(ModelConfig(**{"n_layer": 1, "n_embd": 32, "block_size": 12} | rung), 11)
    assert torch.equal(model(random_tokens()), torch.zeros(2, 12, 11))


def test_without_attention_only_the_last_character_matters():
    model = noisy_model(attention="none")
    tokens = random_tokens(batch=1)
    changed = tokens.clone()
    changed[:, :-1] = (changed[:, :-1] + 1) % 11
    assert torch.equal(model(changed)[0, -1], model(tokens)[0, -1])


@given(cuts=st.sets(st.integers(1, 11)), rung=st.sampled_from(RUNGS), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_cached_logits_equal_uncached_ones_for_any_split_of_the_text(cuts, rung, seed):
    model = noisy_model(seed=seed, **rung)
    tokens = random_tokens(seed=seed)
    cache = model.new_cache(2)
    bounds = [0, *sorted(cuts), 12]
    parts = [model(tokens[:, a:b], cache) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert cache.length == cache.capacity == 12


@pytest.mark.parametrize("change", [*RUNGS[1:], {"rope_theta": 10.0}, {"n_head": 4}])
def test_each_setting_of_the_model_changes_its_logits(change):
    tokens = random_tokens()
    plain, other = noisy_model(), noisy_model(**change)
    sizes = {name: tensor.shape for name, tensor in other.state_dict().items()}
    weights = plain.state_dict()
    shared = {name: weights[name] for name in weights if weights[name].shape == sizes.get(name)}
    other.load_state_dict(shared, strict=False)
    assert (plain(tokens) - other(tokens)).abs().max() > 1e-3


def test_average_attention_multiplies_values_by_a_normalised_triangle():
    model = noisy_model(attention="average", n_layer=1, mlp="none")
    tokens = random_tokens()
    layer = model.blocks[0]
    x = model.embedding(tokens)
    triangle = torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]
    torch.testing.assert_close(uniform_weights(causal_mask(12, 12)), triangle)

    def norm(x, module):
        return F.rms_norm(x, (x.size(-1),), module.weight, NORM_EPS)

    values = layer.attention.value(norm(x, layer.attention_norm))
    x = x + layer.attention.output(triangle @ values)
    logits = model.head(norm(x, model.norm))
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_parameter_gets_a_gradient(rung):
    model = noisy_model(**rung)
    tokens = random_tokens()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-6, name


@given(
    n_layer=st.integers(1, 3),
    n_head=st.integers(1, 3),
    half_head_size=st.integers(1, 4),
    n_inner=st.none() | st.integers(1, 9),
    attention=st.sampled_from(["full", "average", "none"]),
    qk_norm=st.booleans(),
    mlp=st.sampled_from(["swiglu", "none"]),
    vocab_size=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_count_parameters_equals_the_built_models_count(
    n_head, half_head_size, vocab_size, **choice
):
    n_embd = 2 * half_head_size * n_head
    config = ModelConfig(n_head=n_head, n_embd=n_embd, block_size=4, **choice)
    expected = build_model(config, vocab_size).num_parameters()
    assert count_parameters(config, vocab_size) == expected


def test_more_tokens_than_the_block_size_or_the_memory_are_rejected():
    model = noisy_model()
    cache = model.new_cache(2)
    model(random_tokens(steps=12), cache)
    for n_tokens, cached in ((13, None), (1, cache)):
        with pytest.raises(TextError, match="13 tokens exceed the block size 12; give the last"):
            model(random_tokens(steps=n_tokens), cached)
    with pytest.raises(DeviceError, match=r"a KV cache of 1,000,000,000,000 x 12 tokens .* GB"):
        model.new_cache(10**12)


def test_dropout_applies_in_training_to_the_embedding_and_both_branches_of_each_layer():
    model, tokens = noisy_model(dropout=0.5), random_tokens()
    assert torch.equal(model(tokens), noisy_model()(tokens))
    shapes = []
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    assert not torch.allclose(model(tokens), model(tokens))
    assert shapes == [(2, 12, 16)] * (1 + 2 * 2) * 2


@pytest.mark.parametrize("rung", RUNGS)
def test_mixed_precision_stays_near_float32_with_and_without_a_cache(rung):
    model, tokens = noisy_model(**rung), random_tokens()
    exact, cache = model(tokens), model.new_cache(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached = torch.cat([model(part, cache) for part in tokens.split([7, 5], dim=1)], dim=1)
        for logits in (model(tokens), cached):
            assert logits.dtype == torch.bfloat16
            assert (logits.float() - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_head": 1},
        {"n_head": 4, "n_embd": 48, "n_inner": 40, "rope_theta": 500.0, "n_layer": 3},
    ],
)
def test_qwen3_of_transformers_gives_the_same_logits(sizes):
    model = noisy_model(block_size=32, **sizes)
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**qwen3_config(model), attn_implementation="eager")
    reference = transformers.Qwen3ForCausalLM(config).eval()
    reference.load_state_dict(qwen3_weights(model), strict=True)
    tokens = random_tokens(steps=32)
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
        cache = model.new_cache(2)
        past, cached_ours, cached_theirs = None, [], []
        for part in tokens.split([20, 1, 1, 10], dim=1):
            output = reference(part, past_key_values=past, use_cache=True)
            past = output.past_key_values
            cached_theirs.append(output.logits)
            cached_ours.append(model(part, cache))
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(cached_theirs, 1), theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(cached_ours, 1), theirs, atol=1e-5, rtol=0)
