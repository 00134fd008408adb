"""Tests that need a CUDA GPU; skipped elsewhere."""

import re
from pathlib import Path

import pytest
import torch
from noise import noisy_model, noisy_run_on, random_tokens

from chargpt.analysis.doctor import TOLERANCE, decoding_error, gradient_error
from chargpt.config import SampleConfig, load_config
from chargpt.device import capture_graph
from chargpt.inference import decoders
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.generation import sample, stream_pieces
from chargpt.inference.suggestions import suggest
from chargpt.models import StaticKVCache
from chargpt.models.ngram import NGramLM
from chargpt.store.folder import RunFolder
from chargpt.store.run import load_run
from chargpt.text.corpus import Corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.trainer import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

CUDA = torch.device("cuda")
TINY = {
    "model.n_layer": 2, "model.n_embd": 64, "model.block_size": 32, "train.batch_size": 8,
    "train.max_steps": 20, "train.evaluate_every": 10, "train.save_every": 10,
    "train.sample_every": 10, "sample.length": 20,
}  # fmt: skip


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The id of the CUDA graph of each replay."""
    ids = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (ids.append(id(graph)), replay(graph))
    )
    return ids


@pytest.fixture
def no_cpu_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode on the GPU, even what a CPU decodes faster."""
    monkeypatch.setattr(decoders, "MAX_CPU_WORK", 0)


def losses(corpus: Corpus, folder: Path | None = None, **values: object) -> list[float]:
    config = load_config("gpt").with_values({**TINY, **values})
    run = None if folder is None else RunFolder(folder)
    trainer = Trainer(config, corpus, folder=run)
    if run is not None:
        RunFolder(run.path).create(trainer.config, corpus.tokenizer)
    return [float(report.loss) for report in trainer.steps() if report.loss is not None]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gradients_of_a_step_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    assert gradient_error(CUDA, dtype) < TOLERANCE[dtype]


def test_decoding_past_the_block_size_equals_that_of_the_cpu() -> None:
    assert decoding_error(CUDA) < TOLERANCE[torch.float32]


def test_training_losses_are_close_to_those_of_the_cpu(corpus: Corpus) -> None:
    on_cpu = losses(corpus, device="cpu", dtype="float32")
    on_gpu = losses(corpus, device="cuda", dtype="float32")
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)
    assert losses(corpus, device="cuda") == pytest.approx(on_cpu, abs=0.1)  # bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_replays_two_cuda_graphs(
    dropout: float, corpus: Corpus, replays: list[int]
) -> None:
    config = load_config("gpt").with_values({**TINY, "device": "cuda", "model.dropout": dropout})
    trainer = Trainer(config, corpus)
    assert trainer.learner.capture_error is None
    replays.clear()
    for _ in range(20):
        trainer.train_step()
    gradients, update = replays[:2]
    assert replays.count(gradients) == replays.count(update) == 20


def test_a_captured_step_has_the_gradients_of_an_eager_one(corpus: Corpus) -> None:
    learner = Trainer(load_config("gpt").with_values({**TINY, "device": "cuda"}), corpus).learner
    block = learner.batches.at(3).to(learner.device)
    assert learner.captured_forward_backward is not None
    loss = learner.captured_forward_backward(block)
    captured = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad(set_to_none=True)
    torch.testing.assert_close(learner.forward_backward(block), loss, atol=1e-3, rtol=1e-3)
    eager = [p.grad for p in learner.model.parameters() if p.grad is not None]
    torch.testing.assert_close(captured, eager, atol=1e-2, rtol=1e-2)


def test_a_captured_update_gives_the_weights_of_an_eager_one(corpus: Corpus) -> None:
    one, other = (
        Trainer(load_config("gpt").with_values({**TINY, "device": "cuda"}), corpus).learner
        for _ in range(2)
    )
    other.captured_update = None
    for step in range(3):
        for learner in (one, other):
            learner.accumulate_gradients(step)
            learner.apply_update(step, 0.5)
    weights = [dict(learner.model.named_parameters()) for learner in (one, other)]
    torch.testing.assert_close(*weights, atol=3e-4, rtol=1e-2)


def test_training_goes_on_after_a_failed_capture(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    values = {"device": "cuda", "dtype": "float32"}
    captured = losses(corpus, **values)
    replays.clear()
    stream = torch.cuda.current_stream()
    monkeypatch.setattr("chargpt.models.ngram.MAX_TABLE_ENTRIES", 0)  # look-ups then synchronise
    config = load_config("gpt").with_values({**TINY, **values, "train.sample_every": 0})
    trainer = Trainer(config, corpus)
    assert "capture failed" in str(trainer.learner.capture_error)
    assert torch.cuda.current_stream() == stream
    torch.rand(4, device="cuda")  # the generator works
    eager = [float(report.loss) for report in trainer.steps() if report.loss is not None]
    assert not replays
    assert eager == pytest.approx(captured, abs=0.02)


def test_a_deterministic_run_is_reproducible(corpus: Corpus) -> None:
    one, two = (losses(corpus, device="cuda", deterministic=True) for _ in range(2))
    assert one == two


def test_a_saved_run_has_the_same_loss_on_both_devices(corpus: Corpus, tmp_path: Path) -> None:
    losses(corpus, tmp_path / "run", device="cuda")
    scores = [
        evaluate_tokens(
            load_run(tmp_path / "run", "latest", device).model, corpus.split("val")
        ).nats_per_char
        for device in ("cpu", "cuda")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.usefixtures("no_cpu_decoder")
def test_greedy_text_is_the_same_on_both_devices(sequences: int) -> None:
    tokenizer = CharTokenizer("abcdefghijk")
    options = SampleConfig(length=40, temperature=0, seed=1, num_samples=sequences)
    texts = []
    for device in ("cpu", "cuda"):
        model = noisy_model().to(device)
        steps = list(stream_pieces(model, tokenizer, tokenizer.encode("a"), options))
        texts.append([[piece.text for piece in pieces] for pieces in zip(*steps, strict=True)])
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("no_cpu_decoder")
def test_constraints_hold_on_a_gpu(tmp_path: Path) -> None:
    text = "the sea, the light\n" * 30
    run = noisy_run_on(tmp_path, text)
    run.model.to(CUDA)
    options = {"match": "[a-z ]+sea", "no_copy": 6, "num_samples": 8, "length": 30, "seed": 1}
    for each in sample(run, temperature=1.0, **options):
        assert re.fullmatch("[a-z ]+sea", each)
        assert not any(each[i : i + 7] in text for i in range(len(each) - 6))
    assert len(suggest(run, "the ", 5)) == 5


@pytest.mark.usefixtures("no_cpu_decoder")
def test_decoding_replays_one_cuda_graph(replays: list[int]) -> None:
    tokenizer = CharTokenizer("abcdefghijk")
    for _ in stream_pieces(
        noisy_model().to(CUDA), tokenizer, tokenizer.encode("a"), SampleConfig(length=40, seed=1)
    ):
        pass
    assert len(replays) >= 39  # the prefill is not a replay
    assert len(set(replays)) == 1


@pytest.mark.parametrize("sequences", [1, 3])
@torch.inference_mode()
def test_a_captured_step_with_a_static_cache_gives_the_logits_of_a_cache(sequences: int) -> None:
    model = noisy_model().to(CUDA)
    tokens = random_tokens(batch=sequences, steps=40).to(CUDA)
    cache, static = model.new_cache(sequences), model.new_cache(sequences, StaticKVCache)
    token = tokens[:, :1].clone()

    def step() -> torch.Tensor:
        return model(token, static)

    replay = capture_graph(step, CUDA)
    for each in tokens.split(1, dim=1):
        for used in (cache, static):
            if used.length == model.block_size:
                model.evict_oldest_half(used)
        token.copy_(each)
        torch.testing.assert_close(replay(), model(each, cache), atol=1e-4, rtol=1e-4)
        static.set_length(static.length + 1)


def test_ngram_probs_are_the_same_on_both_devices(corpus: Corpus) -> None:
    tokens = torch.from_numpy(corpus.split("val")[:200].astype("int64"))[None]
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 256)
    on_cpu = model.probs(tokens)
    torch.testing.assert_close(model.to(CUDA).probs(tokens.to(CUDA)).cpu(), on_cpu)
