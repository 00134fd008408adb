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
@pytest.mark.parametrize("prompt", [1, 4, 12])
@pytest.mark.parametrize("loudness", [1, 30])  # scores that exp can and cannot take as they are
@torch.inference_mode()
def test_a_prompt_and_every_step_after_it_give_the_models_logits(scaled, streams, prompt, loudness):
    model = noisy_model(block_size=12, n_layer=3, scaled=scaled)
    model.blocks[1].attention.query_norm.weight.mul_(loudness)
    tokens = torch.randint(11, (streams, 12), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    assert float(expected.std()) > 0.1
    decoder = Decoder(model, streams)
    for _ in range(2):  # what was held before does not matter
        decoder.clear()
        first = 0
        for last in range(prompt - 1, 12):
            logits = torch.from_numpy(decoder.step(tokens[:, first : last + 1].numpy()))
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected[:, last], rtol=1e-4, atol=1e-4)
            first = last + 1
        assert decoder.length == 12


@pytest.mark.parametrize("streams", [1, 3])
def test_the_step_that_a_gpu_replays_gives_the_same_at_every_place(streams):
    model = noisy_model(block_size=12, n_layer=3)
    tokens = torch.randint(11, (streams, 12), generator=torch.Generator().manual_seed(1)).numpy()
    plain, replaying = Decoder(model, streams), Decoder(model, streams)
    replaying.replays, replaying.single = True, False
    for decoder in (plain, replaying):
        decoder.step(tokens[:, :4])
    for place in range(4, 12):
        logits = [decoder.step(tokens[:, place : place + 1]) for decoder in (plain, replaying)]
        np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert replaying.again is not None


def test_the_models_weights_stay_as_they_are():
    model = noisy_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = Decoder(model, 1)
    for _ in range(3):
        decoder.step(np.array([[1]]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_only_the_shape_it_is_written_for_takes_the_fast_path():
    assert Decoder.fits(noisy_model())
    for other in ({"attention": "average"}, {"qk_norm": False}, {"mlp": "none"}):
        assert not Decoder.fits(noisy_model(**other))
    assert not Decoder.fits(BigramLM(5, block_size=4))
    assert not Decoder.fits(noisy_model().to("meta"))


def test_sampling_takes_the_fast_path(monkeypatch):
    taken = []
    monkeypatch.setattr(
        Decoder,
        "step",
        lambda self, tokens: taken.append(tokens.tolist()) or np.zeros((1, 11), np.float32),
    )
    monkeypatch.setattr(Decoder, "length", property(lambda self: 2 * len(taken)), raising=False)
    monkeypatch.setattr(Decoder, "__init__", lambda *_: None)
    window = sampling._Window(noisy_model(), np.array([1, 2]), 1, use_cache=True)
    window.logits()
    window.append(np.array([3]))
    window.logits()
    assert taken == [[[1, 2]], [[3]]]
