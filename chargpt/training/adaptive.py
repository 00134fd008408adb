"""Dynamic evaluation: a mixture that learns from the text that it predicts (Krause et al. 2018).

After each half block, the GPT takes an optimizer step on what was just predicted, at a small
fraction of the run's learning rates, and the gate a step of gradient descent; the n-grams are
counted again from time to time. So every prediction depends only on the characters before it, and a
decoder can repeat it. The run stays as it is.

Shapes in this file: L = lanes, N = tokens so far, T = block size, V = vocabulary size.
"""

import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chargpt.device import require_memory
from chargpt.inference.decoders import ModelDecoder
from chargpt.inference.evaluation import OnProgress
from chargpt.models.mixture import NO_TOKEN, Mixture
from chargpt.store.run import Run
from chargpt.text.tokenizer import Floats, Tokens
from chargpt.training.mixing import gate_data
from chargpt.training.optim import Optimizer

LR_FRACTION = 0.03  # of the run's learning rates
GATE_LR = 0.02
N_COPIES = 4  # of the widest activation, while the model learns
COUNT_EVERY = 0.005  # fraction of the counted tokens: after so many new ones, all are counted again


class AdaptiveMixture:
    """A copy of a run's mixture that learns."""

    def __init__(self, run: Run) -> None:
        assert isinstance(run.model, Mixture)
        self.model = copy.deepcopy(run.model).eval()  # without dropout, which would be random
        self.model.requires_grad_(True)
        optim = run.config.optim
        rates = {"lr": LR_FRACTION * optim.lr, "matrix_lr": LR_FRACTION * optim.matrix_lr}
        slow = optim.model_copy(update={**rates, "weight_decay": 0.0})
        self.optimizer = Optimizer(self.model.gpt, slow)
        self.training_tokens = self.model.tokens
        self.stride = max(1, self.model.block_size // 2)
        self.n_updates = self.n_counted = 0

    def learn(self, history: Tokens) -> Tensor:
        """Learn from the last `stride` tokens; return the log-probabilities that they had.

        These are (L, up to `stride`), without the very first token. `history` is all tokens so far,
        (L, N), where N is a multiple of the stride except at the end of the text.
        """
        n_tokens = history.shape[1]
        n_new = min((n_tokens - 1) % self.stride + 1, n_tokens - 1)  # nothing predicts the first
        if not n_new:
            return torch.zeros(len(history), 0)
        if not self.n_updates:
            n_values = len(history) * min(n_tokens, self.model.block_size) * self.model.width
            require_memory(
                4 * N_COPIES * n_values,
                "learning from a text with this block and vocabulary",
                self.model.device,
                "score it without learning",
            )
        inputs, log_probs = gate_data(self.model, self.window(history, self.model.block_size + 1))
        inputs, log_probs = inputs[:, -n_new:], log_probs[:, -n_new:]
        loss = -log_probs[..., 0].mean()  # of the GPT
        weights: Tensor = self.model.gate(inputs)
        mixed = (weights * log_probs.detach().exp()).sum(dim=-1).log()  # (L, n_new)
        self.model.zero_grad()
        (loss - mixed.mean()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(self.n_updates, 1.0)
        with torch.no_grad():
            for parameter in self.model.gate.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=GATE_LR)
        self.n_updates += 1
        if history.size - self.n_counted > COUNT_EVERY * len(self.model.tokens):
            self.n_counted = history.size
            self.model.fit_counts(np.concatenate((self.training_tokens, history.ravel())))
        return mixed.detach()

    def window(self, history: Tokens, length: int) -> Tensor:
        """Return the last `length` tokens after `lookback` others (NO_TOKEN: there is none)."""
        recent = history[:, -self.model.lookback - length :]
        n_missing = self.model.lookback + min(length, history.shape[1]) - recent.shape[1]
        rows = np.pad(recent, ((0, 0), (n_missing, 0)), constant_values=NO_TOKEN)
        return torch.from_numpy(rows).to(self.model.device)


class AdaptiveDecoder:
    """Decoder of a run's mixture that learns from the tokens of its L lanes."""

    def __init__(self, run: Run, num_lanes: int) -> None:
        self.mixture = AdaptiveMixture(run)
        self.history = np.zeros((num_lanes, 0), dtype=np.int64)  # all whole half blocks
        self.columns: list[Tokens] = []  # since then, (L,) each
        self.decoder = ModelDecoder(self.mixture.model, num_lanes)

    def step(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Append one token a lane, (L,); return the logits of the next ones, (L, V)."""
        self.columns.append(tokens)
        if len(self.columns) < self.mixture.stride:
            return self.decoder.step(tokens)
        self.history = np.hstack((self.history, np.stack(self.columns, axis=1)))
        self.columns.clear()
        self.mixture.learn(self.history)
        # a new cache, filled with half a block, is full just before the mixture learns again: the
        # context is that of `learn`
        model = self.mixture.model
        rows = self.mixture.window(self.history, model.block_size - self.mixture.stride + 1)
        self.decoder = ModelDecoder(model, len(rows))
        self.decoder.cache.tokens = rows[:, : model.lookback]
        with torch.inference_mode():
            for logits in model.iter_parts(rows[:, model.lookback :], self.decoder.cache):
                last: npt.NDArray[np.float32] = logits[:, -1].cpu().numpy()
        return last


def adaptive_losses(run: Run, tokens: Tokens, on_progress: OnProgress = lambda *_: None) -> Floats:
    """Return the loss of each token but the first in nats, (tokens - 1,), by a run's mixture."""
    mixture, found = AdaptiveMixture(run), []
    history = tokens[None].astype(np.int64)
    for end in range(mixture.stride, len(tokens) + mixture.stride, mixture.stride):
        found.append(-mixture.learn(history[:, :end])[0].cpu().double().numpy())
        on_progress(min(end, len(tokens)), len(tokens))
    return np.concatenate(found)
