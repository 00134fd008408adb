"""The transformer: causal, cached, and the same as another implementation of its family."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import RUNGS, fill_with_noise, noisy_model, random_tokens

from chargpt.config import ModelConfig
from chargpt.errors import ConfigError
from chargpt.models import GPT, build_model, count_parameters, gpt
from chargpt.models.attention import average_weights, explicit_attention
from chargpt.models.kernels import NORM_EPS


@pytest.mark.parametrize("rung", RUNGS)
def test_future_characters_never_change_past_logits(rung):
    model = noisy_model(**rung)
    tokens = random_tokens()
    logits = model(tokens)
    for place in range(1, 12):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 1) % 11
        again = model(changed)
        assert torch.equal(again[:, :place], logits[:, :place])
        assert not torch.equal(again[:, place], logits[:, place])


@pytest.mark.parametrize("rung", [{}, {"attention": "average"}])
def test_every_past_character_changes_the_last_logits(rung):
    model = noisy_model(**rung)
    tokens = random_tokens(batch=1)
    last = model(tokens)[0, -1]
    for place in range(12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        assert (model(changed)[0, -1] - last).abs().max() > 1e-4


def weights_of_attention(model, tokens, monkeypatch):
    """Return each layer's attention weights, (B, H, T, T)."""
    seen = []

    def noted(q, k, v, **how):
        mixed, weights = explicit_attention(q, k, v, **how)
        seen.append(weights)
        return mixed

    monkeypatch.setattr(gpt, "fused_attention", noted)
    with torch.no_grad():
        model(tokens)
    return seen


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layer": 4, "n_head": 2, "n_embd": 128},
        {"n_layer": 2, "n_head": 1, "n_embd": 64},
        {"n_layer": 4, "n_head": 2, "n_embd": 128, "rope_theta": 500_000.0},
        {"n_layer": 3, "n_head": 4, "n_embd": 48},
    ],
)
def test_fresh_heads_look_at_one_of_the_last_characters(sizes, monkeypatch):
    torch.manual_seed(2)
    model = GPT(ModelConfig(block_size=40, **sizes), vocab_size=11)
    tokens = random_tokens(batch=8, steps=40)
    for layer, weights in enumerate(weights_of_attention(model, tokens, monkeypatch)):
        for head in range(sizes["n_head"]):
            back = [weights[:, head].diagonal(-n, -2, -1)[:, -20:].mean().item() for n in range(15)]
            looked_at = max(range(15), key=back.__getitem__)
            if layer < 3:
                assert looked_at == layer + head + 1
            else:
                assert max(back) < 0.1  # later layers start without a place of their own


def test_the_first_loss_is_ln_v_though_heads_look_back():
    model = GPT(ModelConfig(block_size=12), vocab_size=11)
    assert torch.equal(model(random_tokens()), torch.zeros(2, 12, 11))


def test_without_attention_only_the_last_character_counts():
    model = noisy_model(attention="none")
    tokens = random_tokens(batch=1)
    changed = tokens.clone()
    changed[:, :-1] = (changed[:, :-1] + 1) % 11
    assert torch.equal(model(changed)[0, -1], model(tokens)[0, -1])


def test_the_order_of_the_past_matters_to_attention_and_not_to_the_average():
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    for attention, is_blind in (("full", False), ("average", True)):
        model = noisy_model(attention=attention, n_layer=1)
        difference = (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max().item()
        assert (difference < 1e-5) is is_blind


@given(cuts=st.sets(st.integers(1, 11)), rung=st.sampled_from(RUNGS), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_cached_logits_equal_uncached_ones_however_the_text_is_cut(cuts, rung, seed):
    model = noisy_model(seed=seed, **rung)
    tokens = random_tokens(seed=seed)
    cache = model.new_cache(2)
    bounds = [0, *sorted(cuts), 12]
    parts = [model(tokens[:, a:b], cache) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert cache.length == cache.capacity == 12


def test_only_of_a_full_cache_half_or_more_is_dropped():
    model, cache = noisy_model(), noisy_model().new_cache(2)
    model(random_tokens(steps=11), cache)
    with pytest.raises(AssertionError):
        model.forget(cache)
    model(random_tokens(steps=1), cache)
    with pytest.raises(AssertionError):
        cache.drop(5)
    model.forget(cache)
    assert cache.length == 6


@pytest.mark.parametrize("scaled", [True, False])
def test_the_model_runs_what_the_explicit_form_says(scaled, monkeypatch):
    model, tokens = noisy_model(scaled=scaled), random_tokens()
    fast = model(tokens)

    def slow(q, k, v, **how):
        return explicit_attention(q, k, v, **how)[0]

    monkeypatch.setattr(gpt, "fused_attention", slow)
    torch.testing.assert_close(model(tokens), fast, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"scaled": False},
        {"qk_norm": False},
        {"mlp": "none"},
        {"attention": "none"},
        {"attention": "average"},
        {"rope_theta": 10.0},
        {"n_head": 4},
    ],
)
def test_each_setting_of_the_model_changes_its_logits(change):
    tokens = random_tokens()
    plain, other = noisy_model(), noisy_model(**change)
    shared = {
        name: tensor
        for name, tensor in plain.state_dict().items()
        if name in other.state_dict() and other.state_dict()[name].shape == tensor.shape
    }
    other.load_state_dict(shared, strict=False)
    assert (plain(tokens) - other(tokens)).abs().max() > 1e-3


def test_the_average_rung_mixes_values_by_a_normalised_triangle():
    model = noisy_model(attention="average", n_layer=1, mlp="none")
    tokens = random_tokens()
    layer = model.blocks[0]
    x = model.embedding(tokens)
    triangle = torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]
    torch.testing.assert_close(average_weights(12, 12), triangle)

    def norm(x, gain):
        return torch.nn.functional.rms_norm(x, (x.size(-1),), gain.weight, NORM_EPS)

    seen = layer.attention.value(norm(x, layer.attention_norm))
    x = x + layer.attention.output(triangle @ seen)
    logits = model.head(norm(x, model.norm))
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("vocab_size", [1, 65, 3000])
def test_a_fresh_model_loses_ln_v(rung, vocab_size):
    model = build_model(
        ModelConfig(**{"n_layer": 1, "n_embd": 32, "block_size": 12} | rung), vocab_size
    )
    tokens = random_tokens(vocab_size=vocab_size, steps=13)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(vocab_size), rel=0.01, abs=1e-6)


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
    heads=st.integers(1, 3),
    half=st.integers(1, 4),
    n_mlp=st.none() | st.integers(1, 9),
    attention=st.sampled_from(["full", "average", "none"]),
    qk_norm=st.booleans(),
    mlp=st.sampled_from(["swiglu", "none"]),
    vocab_size=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_the_formula_counts_the_parameters(heads, half, vocab_size, **choice):
    config = ModelConfig(n_head=heads, n_embd=2 * half * heads, block_size=4, **choice)
    expected = build_model(config, vocab_size).parameter_count()
    assert count_parameters(config, vocab_size) == expected


def test_a_model_beyond_any_machine_is_refused_before_it_is_made():
    config = ModelConfig(n_layer=256, n_embd=65536)
    with pytest.raises(ConfigError, match=r"parameters.*lower model\.n_layer"):
        build_model(config, 65)


def test_only_the_given_number_of_characters_fits_the_block():
    model = noisy_model()
    with pytest.raises(AssertionError):
        model(random_tokens(steps=13))
    cache = model.new_cache(2)
    model(random_tokens(steps=12), cache)
    with pytest.raises(AssertionError):
        model(random_tokens(steps=1), cache)


def test_dropout_changes_training_and_not_evaluation():
    model, tokens = noisy_model(dropout=0.5), random_tokens()
    assert torch.equal(model(tokens), noisy_model()(tokens))
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(tokens), model(tokens))


def test_dropout_acts_on_the_embedding_and_on_both_branches_of_a_layer():
    model = noisy_model(dropout=0.5).train()
    shapes = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, given, __: shapes.append(given[0].shape))
    model(random_tokens())
    assert shapes == [(2, 12, 16)] * (1 + 2 * 2)


@pytest.mark.parametrize("rung", RUNGS)
def test_mixed_precision_stays_near_float32_with_and_without_a_cache(rung):
    model, tokens = noisy_model(**rung), random_tokens()
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(tokens)
        cache = model.new_cache(2)
        cached = torch.cat((model(tokens[:, :7], cache), model(tokens[:, 7:], cache)), dim=1)
    assert rough.dtype == torch.bfloat16
    spread = exact.std().item()
    assert (rough.float() - exact).abs().mean().item() < 0.05 * spread
    assert (cached.float() - exact).abs().mean().item() < 0.05 * spread


def test_one_seed_gives_one_fresh_model():
    def weights(seed):
        torch.manual_seed(seed)
        return build_model(ModelConfig(n_layer=1), 20).state_dict()

    assert all(
        torch.equal(a, b) for a, b in zip(weights(1).values(), weights(1).values(), strict=True)
    )
    assert not torch.equal(weights(1)["embedding.weight"], weights(2)["embedding.weight"])


def as_qwen3(model: GPT):
    """Return the same model as another project builds it: our weights under its names."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    judge = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=model.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_head,
            head_dim=config.n_embd // config.n_head,
            max_position_embeddings=config.block_size,
            rms_norm_eps=1e-6,
            rope_theta=config.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attention_bias=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    ).eval()
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    renamed = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for index, block in enumerate(model.blocks):
        for ours, theirs in names.items():
            weight = block.get_parameter(f"{ours}.weight")
            renamed[f"model.layers.{index}.{theirs}.weight"] = weight
    judge.load_state_dict(renamed, strict=True)
    return judge


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_head": 1},
        {"n_head": 4, "n_embd": 48, "n_mlp": 40, "rope_theta": 500.0, "n_layer": 3},
    ],
)
def test_another_implementation_gives_the_same_logits(sizes):
    model = noisy_model(block_size=32, **sizes)
    judge = as_qwen3(model)
    tokens = random_tokens(steps=32)
    with torch.no_grad():
        ours, theirs = model(tokens), judge(tokens).logits
        cache = model.new_cache(2)
        past, cached_ours, cached_theirs = None, [], []
        for part in tokens.split([20, 1, 1, 10], dim=1):
            output = judge(part, past_key_values=past, use_cache=True)
            past = output.past_key_values
            cached_theirs.append(output.logits)
            cached_ours.append(model(part, cache))
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(cached_theirs, 1), theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(cached_ours, 1), theirs, atol=1e-5, rtol=0)


def test_noise_reaches_every_parameter():
    """The helper that the tests above rely on."""
    model = build_model(ModelConfig(n_layer=1), 20)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fill_with_noise(model)
    for name, tensor in model.state_dict().items():
        assert (tensor != fresh[name]).all(), name
