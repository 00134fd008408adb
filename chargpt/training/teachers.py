"""Teachers: runs whose mean probabilities are soft targets of another run, their student.

Distillation (Hinton et al. 2015), here from an ensemble of language models (Kim et al. 2025).
Shapes in this file: B = sequences, T = tokens, V = vocabulary size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chargpt.config import TextConfig
from chargpt.distributed import RankGroup
from chargpt.errors import ConfigError, RunError
from chargpt.models.ensemble import Member
from chargpt.store.mirror import shared_run
from chargpt.text.corpus import Corpus
from chargpt.text.display import display_char

SPLIT_SETTINGS = ("documents", "seed", "val_fraction", "test_fraction", "mixture_characters")


@dataclass(frozen=True)
class Teachers:
    """Models with the tokens of one text.

    Attributes:
        models: they return log(probability / number of teachers).
        fingerprint: a hash of their weights, in hex.
        foreign: those that were trained on another text, or with other settings of it.
    """

    models: tuple[Member, ...]
    fingerprint: str
    foreign: tuple[str, ...]

    def probs(self, tokens: Tensor) -> Tensor:
        """Return the mean probabilities of the next token, (B, T, V), after tokens (B, T)."""
        probs: Tensor = self.models[0](tokens).exp()
        for model in self.models[1:]:
            probs += model(tokens).exp()
        return probs


def load_teachers(paths: Sequence[str], corpus: Corpus, group: RankGroup) -> Teachers:
    """Return the runs in these folders as the teachers of a run on a text, on the CPU.

    Raises:
        RunError: a run cannot be loaded.
        ConfigError: a run lacks characters of the training split.
    """
    models, foreign, digest = list[Member](), list[str](), hashlib.sha256()
    occurs = torch.from_numpy(np.asarray(corpus.token_counts("train")) > 0)
    for path in paths:
        try:
            run = shared_run(group, path)
        except RunError as error:
            raise RunError(f"a run of train.teachers cannot be loaded: {error}") from None
        model = Member(run.model, run.tokenizer, corpus.tokenizer, 1 / len(paths))
        if missing := torch.nonzero(occurs & ~model.is_known).flatten().tolist():
            shown = " ".join(display_char(corpus.tokenizer.token_text(t)) for t in missing[:5])
            raise ConfigError(
                f"{path} of train.teachers lacks characters of the text, such as {shown}; train it "
                "on the same text"
            )
        is_same = run.state.corpus_key == corpus.key
        if not (is_same and _splits(run.config.text) == _splits(corpus.settings)):
            foreign.append(path)
        digest.update(run.fingerprint())
        models.append(model.eval())
    return Teachers(tuple(models), digest.hexdigest()[:16], tuple(foreign))


def _splits(text: TextConfig) -> list[object]:
    return [getattr(text, name) for name in SPLIT_SETTINGS]
