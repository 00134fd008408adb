"""Every decoder against the formula, far past the block size."""

import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from formula import first_cached_position, logits_of_long_text
from noise import RUNGS, fill_with_noise, noisy_model, random_tokens

from chargpt.inference import decoder as decoders
from chargpt.inference.compiled_decoder import COLUMNS, CompiledDecoder, panels_of
from chargpt.inference.decoder import (
    GraphDecoder,
    ModelDecoder,
    decoder_for,
    decoders_for,
    has_fast_decoder,
    memory_of,
    weights_of,
)
from chargpt.inference.numpy_decoder import NumpyDecoder
from chargpt.models.bigram import BigramLM
from chargpt.models.ngram import NGramLM

CPU = torch.device("cpu")
SORTS = {
    "numpy": lambda model, streams: NumpyDecoder(weights_of(model), streams),
    "compiled": lambda model, streams: CompiledDecoder(panels_of(weights_of(model)), streams),
    "graph": lambda model, streams: GraphDecoder(weights_of(model), streams, CPU),
    "model": lambda model, streams: ModelDecoder(model, streams, None),
}


def decoded(decoder, tokens):
    """Return the logits after each of (N, L) characters, (N, L, V)."""
    return torch.stack([torch.tensor(decoder.step(ids)) for ids in tokens.numpy().T], dim=1)


def assert_close(logits, expected, tolerance=1e-4):
    assert expected.std() > 0.1
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_what_is_held_is_a_whole_block_at_most_and_more_than_half_of_it():
    for block in (1, 2, 3, 12):
        held = [place + 1 - first_cached_position(place, block) for place in range(40)]
        assert max(held) == block
        assert min(held[block:]) == block // 2 + 1
        assert held[:block] == [place + 1 for place in range(block)]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("loudness", [1, 30])  # scores that exp can and cannot take as they are
@torch.no_grad()
def test_every_decoder_says_what_the_formula_says(sort, streams, block_size, scaled, loudness):
    model = noisy_model(block_size=block_size, n_layer=3, scaled=scaled)
    model.blocks[1].attention.query_norm.weight.mul_(loudness)
    tokens = random_tokens(streams, steps=40)
    logits = decoded(SORTS[sort](model, streams), tokens)
    assert_close(logits, logits_of_long_text(model, tokens), 1e-4 if loudness == 1 else 1e-3)


@pytest.mark.parametrize("streams", [1, 9])
@pytest.mark.parametrize("size", [8, COLUMNS, COLUMNS + 10])  # of a head
@torch.no_grad()
def test_compiled_steps_are_right_beyond_a_panel_and_a_tile(streams, size):
    block_size, vocab_size = COLUMNS + 5, COLUMNS + 3
    sizes = {"n_embd": 2 * size, "n_mlp": size + 3, "block_size": block_size}
    model = noisy_model(vocab_size, n_layer=1, **sizes)
    tokens = random_tokens(streams, 2 * block_size, vocab_size)
    logits = decoded(SORTS["compiled"](model, streams), tokens)
    assert_close(logits, logits_of_long_text(model, tokens))


def test_a_compiled_streams_bits_are_the_same_whatever_stands_beside_it():
    model, tokens = noisy_model(), random_tokens(6, 40)
    together = decoded(SORTS["compiled"](model, 6), tokens)
    for streams in (1, 3, 5):
        assert torch.equal(
            decoded(SORTS["compiled"](model, streams), tokens[-streams:]), together[-streams:]
        )


@pytest.mark.slow
def test_compiled_steps_are_right_on_processors_without_avx512():
    code = (
        "import llvmlite.binding, pytest, sys; llvmlite.binding.get_host_cpu_features = dict; "
        "from chargpt.inference import compiled_decoder; assert compiled_decoder.COLUMNS == 16; "
        "sys.exit(pytest.main(['-q', '-k', 'compiled', 'tests/test_decoder.py']))"
    )
    variables = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("streams", [1, 3])
def test_every_rung_is_decoded_as_the_formula_says(rung, streams):
    model = noisy_model(**rung)
    tokens = random_tokens(streams, steps=40)
    assert_close(decoded(decoder_for(model, streams), tokens), logits_of_long_text(model, tokens))


@pytest.mark.parametrize(
    "model",
    [
        fill_with_noise(BigramLM(11, block_size=4)),
        NGramLM.fit(random_tokens(1, 300).numpy()[0], 11, block_size=7),
    ],
)
def test_counts_are_decoded_as_the_formula_says(model):
    tokens = random_tokens(2, steps=30)
    assert_close(decoded(decoder_for(model, 2), tokens), logits_of_long_text(model, tokens))


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("prompt", [1, 5, 12])
@torch.inference_mode()
def test_every_stream_goes_on_from_what_one_cache_holds(sort, prompt):
    model, tokens = noisy_model(n_layer=3), random_tokens(3, steps=30)
    tokens[:, :prompt] = tokens[0, :prompt]
    held = model.new_cache(1)
    model(tokens[:1, :prompt], held)
    if sort == "model":
        decoder = ModelDecoder(model, 3, held)
    else:
        decoder = SORTS[sort](model, 3)
        decoder.step(np.array([4, 5, 6]))  # what was held before does not matter
        decoder.remember(*memory_of(held))
    expected = logits_of_long_text(model, tokens)[:, prompt:]
    assert_close(decoded(decoder, tokens[:, prompt:]), expected)


def test_the_models_weights_stay_as_they_are():
    model = noisy_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoded(decoder_for(model, 1), random_tokens(1, 30))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("sort", ["numpy", "compiled", "graph"])
@torch.no_grad()
def test_what_training_does_to_the_weights_meanwhile_is_not_seen(sort, streams):
    model, tokens = noisy_model(), random_tokens(streams)
    expected = logits_of_long_text(model, tokens)
    decoder = SORTS[sort](model, streams)
    for parameter in model.parameters():
        parameter.add_(1)
    assert_close(decoded(decoder, tokens), expected)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("sort", ["numpy", "compiled"])
@torch.no_grad()
def test_gates_that_are_shut_beyond_floats_are_shut_without_a_word(sort, streams, recwarn):
    model, tokens = noisy_model(), random_tokens(streams)
    for block in model.blocks:
        block.mlp.gate.weight.mul_(300)  # exp(-gate) overflows
    assert_close(decoded(SORTS[sort](model, streams), tokens), model(tokens), 1e-2)
    assert not recwarn.list


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("sort", ["numpy", "compiled"])
@pytest.mark.parametrize("name", ["embedding", "blocks.0.attention.key", "blocks.1.mlp.gate"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@torch.no_grad()
def test_weights_that_are_not_finite_are_seen_in_the_logits(sort, streams, name, number):
    model = noisy_model()
    model.get_submodule(name).weight[3] = number
    logits = decoded(SORTS[sort](model, streams), torch.full((streams, 2), 3))
    assert not logits.isfinite().any()


@pytest.mark.parametrize(
    ("parameters", "streams", "length", "compiled"),
    [
        (870_000, 1, 500, False),
        (870_000, 1, 10_000, False),
        (870_000, 1, 12_000, True),
        (870_000, 64, 500, False),
        (870_000, 64, 1000, True),
        (10_700_000, 1, 10**9, False),  # as slow: it waits for its weights
        (10_700_000, 64, 500, True),
        (57_000_000, 1, 10**9, False),
        (57_000_000, 5, 500, True),
    ],
)
def test_what_takes_long_enough_without_is_compiled(parameters, streams, length, compiled):
    assert decoders.is_worth_compiling(parameters, streams, length) == compiled


def test_a_compiled_job_is_shared_out_among_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for streams, rows in ((32, [8] * 4), (64, [16] * 4), (15, [8] * 3), (8, [4] * 2)):
        found = decoders_for(noisy_model(), streams, compiled=True)
        assert [len(decoder.memory.x) for decoder in found] == rows, streams
        assert sum(decoder.memory.keys.shape[1] for decoder in found) == streams
    for other in (BigramLM(5, block_size=4), noisy_model(mlp="none")):
        assert [type(one) for one in decoders_for(other, 64, compiled=True)] == [ModelDecoder]
    assert [type(one) for one in decoders_for(noisy_model(), 64, compiled=False)] == [NumpyDecoder]


@pytest.mark.slow
def test_compiled_steps_are_kept_and_taken_without_where_that_fails(tmp_path):
    code = (
        "import numpy as np; from noise import noisy_model; "
        "from chargpt.inference import compiled_decoder as here, decoder; "
        "panels = here.panels_of(decoder.weights_of(noisy_model())); "
        "logits = here.CompiledDecoder(panels, 1).step(np.array([3])); "
        "print(); print(here.__file__, *logits.ravel())"
    )
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", REPOSITORY, "chargpt")
    plain = tmp_path / "plain"
    no_bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "chargpt", plain / "chargpt", ignore=no_bytecode)
    (plain / "chargpt" / "inference" / "__pycache__").touch()  # so no folder can stand there

    def drawn(folder, package=archive):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(package), str(REPOSITORY / "tests"))),
                "XDG_CACHE_HOME": str(folder),
                "NUMBA_DEBUG_CACHE": "1",
            },
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        source, *logits = done.stdout.splitlines()[-1].split()
        assert source.startswith(str(package))
        return logits, "data loaded" in done.stdout

    logits, loaded = drawn(tmp_path)
    assert not loaded
    assert drawn(tmp_path) == (logits, True)
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(b"damaged")
    assert drawn(tmp_path) == (logits, False)
    assert drawn("/dev/null") == (logits, False)
    assert drawn("/dev/null", plain) == (logits, False)


def test_a_machine_without_numba_draws_long_texts_by_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "chargpt.inference.compiled_decoder")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert [type(one) for one in decoders_for(noisy_model(), 64, compiled=True)] == [NumpyDecoder]


def test_only_the_shape_they_are_written_for_takes_the_fast_decoders():
    assert isinstance(decoder_for(noisy_model(), 1), NumpyDecoder)
    for other in ({"attention": "average"}, {"qk_norm": False}, {"mlp": "none"}):
        assert isinstance(decoder_for(noisy_model(**other), 1), ModelDecoder)
    assert not has_fast_decoder(BigramLM(5, block_size=4))
    assert not has_fast_decoder(noisy_model().to("meta"))
