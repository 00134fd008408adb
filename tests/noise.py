"""Random weights for tests: the logits of an untrained model are all zero and prove nothing."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chargpt.config import Config, ModelConfig
from chargpt.models import LanguageModel, build_model
from chargpt.models.ngram import BigramLM
from chargpt.store.checkpoint import RunState
from chargpt.store.run import Run
from chargpt.text.corpus import PairCounts
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import CharTokenizer

RUNGS: list[dict[str, Any]] = [  # the ladder's models and other settings
    {},
    {"attention": "average"},
    {"attention": "none"},
    {"mlp": "none"},
    {"scale_attn_weights": False},
    {"qk_norm": False},
    {"n_head": 1, "n_layer": 1, "mlp": "none", "qk_norm": False},
    {"n_head": 4, "n_inner": 24, "rope_theta": 100.0},
]


def fill_with_noise(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Fill every parameter so that each layer's output has unit scale; check that logits vary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                noise = 1 + noise / 2  # weight of a norm
            elif name not in ("embedding.weight", "table.weight"):
                noise /= parameter.size(1) ** 0.5
            parameter.copy_(noise)
    tokens = torch.arange(model.vocab_size)[: model.block_size][None]
    assert model.vocab_size == 1 or model.eval()(tokens).std().item() > 0.3
    return model


def noisy_model(vocab_size: int = 11, seed: int = 0, **settings: object) -> LanguageModel:
    """Return a small model in evaluation mode with noise for weights."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12}
    return fill_with_noise(build_model(ModelConfig(**(sizes | settings)), vocab_size), seed).eval()


def bigram_of_counts(pairs: PairCounts, block_size: int, alpha: float) -> BigramLM:
    """Return a bigram model with the smoothed frequencies of pairs, by a table of all of them."""
    model = BigramLM(pairs.vocab_size, block_size)
    probs = torch.full((pairs.vocab_size, pairs.vocab_size), alpha, dtype=torch.float64)
    probs[pairs.first, pairs.second] += torch.from_numpy(pairs.counts)
    model.table.weight.data = (probs / probs.sum(dim=1, keepdim=True)).log().float()
    return model


def noisy_run(tokenizer: CharTokenizer, seed: int = 0, **settings: object) -> Run:
    """Return a run of one step with a small noisy model, which is not saved."""
    model = noisy_model(tokenizer.vocab_size, seed, **settings)
    model.first_continuation_id = tokenizer.first_continuation_id
    config = Config().with_values({f"model.{key}": value for key, value in settings.items()})
    return Run(Path("run"), config, tokenizer, model, 1, RunState(1))


def noisy_run_on(folder: Path, text: str, **values: object) -> Run:
    """Return a run with a small noisy model and a text, which is stored in its folder."""
    path = folder / "sea.txt"
    path.write_text(text, encoding="utf-8", newline="")
    config = Config().with_values({"text.path": str(path), **values})
    shutil.rmtree(folder / "text", ignore_errors=True)
    corpus = prepare(find_text(config.text), config.text, folder / "text")
    model = noisy_model(vocab_size=corpus.tokenizer.vocab_size)
    return Run(folder, config, corpus.tokenizer, model, 5, RunState(5, corpus_key=corpus.key))


def random_tokens(batch: int = 2, steps: int = 12, vocab_size: int = 11, seed: int = 1) -> Tensor:
    """Return random token ids, (B, T)."""
    return torch.randint(vocab_size, (batch, steps), generator=torch.Generator().manual_seed(seed))
