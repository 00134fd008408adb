"""Trial steps and forward passes that measure the speed of a model on this machine."""

import math
import time

import numpy as np

from chargpt.config import Config
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.text.corpus import Corpus
from chargpt.training.cost import measure_step_seconds
from chargpt.training.learner import Learner
from chargpt.training.trainer import Trainer

TRIAL_STEPS = 3  # that measure a size's speed
TIMED_TOKENS = 8_000  # scored to measure the speed of scoring


class Trials:
    """Measures configs on a text; the planner calls it for each size that it considers."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.learner: Learner | None = None  # of the last trial

    def __call__(self, config: Config, max_seconds: float = math.inf) -> float:
        """Return the tokens per second of trial steps, without n-gram soft targets.

        Soft targets cost a tenth or less, which re-planning takes into account. If one step takes
        over `max_seconds`, it is the only one.
        """
        fresh = {"train.ngram_target_weight": 0.0, "train.from_run": None, "optim.l2_sp": 0.0}
        self.learner = None  # its memory is free for the next one
        self.learner = Trainer(config.with_values(fresh), self.corpus).learner
        seconds = measure_step_seconds(
            self.learner, TRIAL_STEPS, update=True, max_seconds=max_seconds
        )
        return config.tokens_per_step / seconds

    def measure_scoring(self) -> float:
        """Return the seconds per token of scoring with the model of the last trial; drop it."""
        assert self.learner is not None
        # a short split is repeated: a single forward pass says little about the time of many
        val = self.corpus.split("val")
        tokens = np.resize(val[: TIMED_TOKENS + 1], TIMED_TOKENS + 1)
        model, self.learner = self.learner.model, None
        # the first call is a warm-up: a GPU loads its kernels
        for n_timed in (model.block_size, TIMED_TOKENS):
            start = time.perf_counter()
            timed = evaluate_tokens(model, tokens, max_tokens=n_timed)
        per_character = (time.perf_counter() - start) / timed.characters
        return per_character * self.corpus.characters_per_token
