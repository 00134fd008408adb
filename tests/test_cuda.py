"""What only a GPU can show. Elsewhere every test here is reported as skipped."""

from pathlib import Path

import pytest
import torch
from noise import noisy_model

from chargpt.analysis.doctor import TOLERANCE, gradient_error
from chargpt.config import SampleConfig, TextConfig, load_config
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.inference.sampling import stream
from chargpt.models.ngram import NGramLM
from chargpt.store.run import RunFolder, load_run
from chargpt.text.corpus import Corpus, load_corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.trainer import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
]

CUDA = torch.device("cuda")
TINY = {
    "model.n_layer": 2, "model.n_embd": 64, "model.block_size": 32, "train.batch_size": 8,
    "train.max_steps": 20, "train.evaluate_every": 10, "train.save_every": 10,
    "train.sample_every": 10, "sample.length": 20,
}  # fmt: skip


@pytest.fixture
def corpus(verse: Path) -> Corpus:
    return load_corpus(TextConfig(path=str(verse)))


def losses(corpus: Corpus, folder: Path | None = None, **values: object) -> list[float]:
    config = load_config("gpt").with_values({**TINY, **values})
    run = None if folder is None else RunFolder(folder)
    trainer = Trainer(config, corpus, folder=run)
    if run is not None:
        RunFolder(run.path).create(trainer.config, corpus.tokenizer, force=False)
    return [float(report.loss) for report in trainer.steps() if report.loss is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_steps_gradients_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    assert gradient_error(CUDA, dtype) < TOLERANCE[dtype]


def test_training_goes_as_on_the_cpu(corpus: Corpus) -> None:
    on_cpu = losses(corpus, device="cpu", dtype="float32")
    on_gpu = losses(corpus, device="cuda", dtype="float32")
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)
    assert losses(corpus, device="cuda") == pytest.approx(on_cpu, abs=0.1)  # bfloat16


def test_a_deterministic_run_gives_the_same_losses_twice(corpus: Corpus) -> None:
    one, two = (losses(corpus, device="cuda", deterministic=True) for _ in range(2))
    assert one == two


def test_a_run_is_saved_loaded_and_scored_alike_on_both_devices(
    corpus: Corpus, tmp_path: Path
) -> None:
    losses(corpus, tmp_path / "run", device="cuda")
    scores = [
        evaluate_tokens(
            load_run(tmp_path / "run", "latest", device).model, corpus.split("val")
        ).nats_per_char
        for device in ("cpu", "cuda")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize("streams", [1, 3])
def test_the_likeliest_text_is_the_same_on_both_devices(streams: int) -> None:
    tokenizer = CharTokenizer("abcdefghijk")
    options = SampleConfig(length=40, temperature=0, seed=1, num_samples=streams)
    texts = []
    for device in ("cpu", "cuda"):
        model = noisy_model().to(device)
        steps = list(stream(model, tokenizer, tokenizer.encode("a"), options))
        texts.append(["".join(pieces) for pieces in zip(*steps, strict=True)])
    assert texts[0] == texts[1]


def test_a_character_is_drawn_by_replaying_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))
    )
    tokenizer = CharTokenizer("abcdefghijk")
    for _ in stream(
        noisy_model().to(CUDA), tokenizer, tokenizer.encode("a"), SampleConfig(length=40, seed=1)
    ):
        pass
    assert len(replays) >= 39  # the prompt is not
    assert len(set(map(id, replays))) == 1


def test_the_counted_model_expects_the_same_on_both_devices(corpus: Corpus) -> None:
    tokens = torch.from_numpy(corpus.split("val")[:200].astype("int64"))[None]
    model = NGramLM.fit(corpus.split("train"), corpus.tokenizer.vocab_size, 256)
    on_cpu = model.shares(tokens)
    torch.testing.assert_close(model.to(CUDA).shares(tokens.to(CUDA)).cpu(), on_cpu)
