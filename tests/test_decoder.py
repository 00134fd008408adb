"""The CPU's fast path against the model itself."""

import numpy as np
import pytest
import torch
from noise import noisy_model

from chargpt.inference import sampling
from chargpt.inference.decoder import Decoder
from chargpt.models.bigram import BigramLM


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
@torch.inference_mode()
def test_every_step_gives_the_models_logits(scaled, streams):
    model = noisy_model(block_size=12, n_layer=3, scaled=scaled)
    tokens = torch.randint(11, (streams, 12), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    cache = model.new_cache(streams)
    model(tokens[:, :4], cache)
    decoder = Decoder(model, cache)
    for place in range(4, 12):
        logits = torch.from_numpy(decoder.step(tokens[:, place].numpy()))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected[:, place], rtol=1e-4, atol=1e-4)
    assert cache.length == 12
    assert float(expected.std()) > 0.1


@torch.inference_mode()
def test_the_model_goes_on_from_what_a_step_has_stored():
    model = noisy_model(block_size=8)
    tokens = torch.arange(6)[None]
    expected = model(tokens)[:, -1]
    cache = model.new_cache(1)
    decoder = Decoder(model, cache)
    for token in range(5):
        decoder.step(np.array([token]))
    logits = model(tokens[:, 5:], cache)[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_only_the_shape_it_is_written_for_takes_the_fast_path():
    assert Decoder.fits(noisy_model())
    for other in ({"attention": "average"}, {"qk_norm": False}, {"mlp": "none"}):
        assert not Decoder.fits(noisy_model(**other))
    assert not Decoder.fits(BigramLM(5, block_size=4))
    assert not Decoder.fits(noisy_model().to("meta"))


def test_sampling_takes_the_fast_path(monkeypatch):
    taken = []
    monkeypatch.setattr(
        Decoder, "step", lambda self, tokens: taken.append(1) or np.zeros((1, 11), np.float32)
    )
    window = sampling._Window(noisy_model(), np.array([1, 2]), 1, use_cache=True)
    window.logits()
    window.append(torch.tensor([3]))
    window.logits()
    assert len(taken) == 1
