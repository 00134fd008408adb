"""Fitting the gate of a mixture to text that neither the GPT nor the n-gram models have seen.

Shapes in this file: B = batch, T = tokens, N = characters, K = number of orders of both n-gram
models.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from chargpt.errors import NOT_FINITE, ChargptError, OperationError
from chargpt.inference.evaluation import block_windows, gather_rows
from chargpt.log import logger
from chargpt.models import KVCache
from chargpt.models.gpt import GPT
from chargpt.models.mixture import Gate, Mixture
from chargpt.store.mixture import save_mixture
from chargpt.store.run import Run
from chargpt.text.corpus import MIN_MIXTURE_CHARACTERS, Corpus
from chargpt.text.tokenizer import CharTokenizer, Tokens
from chargpt.training.optim import AdamW

STEPS, BATCH_SIZE, LR = 100, 2048, 0.1
L2 = 1.0  # penalty on the squared weights, divided by the number of characters
INITIAL_SCALE = 0.3  # of the default initial weights: nearly equal weights for all components
STD_EPSILON = 0.1  # added to that of each gate input, so that noise is not scaled up
FORWARD_BATCH_SIZE = 16


def try_add_mixture(run: Run, corpus: Corpus) -> Run | None:
    """Fit the mixture of a run's GPT to the mixture split and save it with the run.

    Returns:
        The run with the mixture in place of its GPT; None if it is no GPT, its mixture split is
        shorter than MIN_MIXTURE_CHARACTERS, or an error was logged: the run itself is complete and
        saved.
    """
    train, held_out = corpus.split("train"), corpus.split("mixture")
    if not isinstance(run.model, GPT) or len(held_out) < MIN_MIXTURE_CHARACTERS:
        return None
    try:
        mixture = fit_mixture(run.model, run.tokenizer, train, held_out)
        save_mixture(run, mixture)
    except ChargptError as error:
        logger.warning(str(error))
        return None
    return replace(run, model=mixture)


def fit_mixture(gpt: GPT, tokenizer: CharTokenizer, train: Tokens, held_out: Tokens) -> Mixture:
    """Return the mixture of a GPT and the n-gram models of its training split, on its device.

    `held_out` is text that is not in the training split, at least 2 characters.

    Raises:
        OperationError: the GPT's predictions are not finite.
    """
    mixture = Mixture(gpt, train, tokenizer).to(gpt.device).eval()
    parts = []
    with torch.no_grad():
        for starts, length, *_ in block_windows(len(held_out) - 1, gpt.block_size):
            rows = gather_rows(held_out, starts - mixture.lookback, mixture.lookback + length)
            n_rows = max(1, min(FORWARD_BATCH_SIZE, mixture.max_tokens_per_pass() // length))
            for batch in torch.split(torch.from_numpy(rows), n_rows):
                data = iter_gate_data(mixture, batch.to(gpt.device))
                parts += [[tensor.flatten(0, 1).cpu() for tensor in part] for part in data]
    inputs, log_probs = map(torch.cat, zip(*parts, strict=True))
    if not inputs.isfinite().all():
        raise OperationError(NOT_FINITE)
    fit_gate(mixture.gate, inputs, log_probs)
    return mixture


def iter_gate_data(mixture: Mixture, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `gate_data` of consecutive parts of rows (B, lookback + T + 1), in bounded memory."""
    n_before, n_tokens = mixture.lookback, mixture.max_tokens_per_pass() // len(rows)
    cache = mixture.new_cache(len(rows)) if rows.size(1) - n_before - 1 > n_tokens else None
    for start in range(0, rows.size(1) - n_before - 1, n_tokens):
        yield gate_data(mixture, rows[:, start : start + n_before + n_tokens + 1], cache)


def gate_data(
    mixture: Mixture, rows: Tensor, cache: KVCache | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gate's inputs, (B, T, 1 + 2 K), and the log-probabilities, (B, T, 1 + K).

    The log-probabilities are the components', of the tokens that follow in rows
    (B, lookback + T + 1), and only the GPT's have a gradient. A cache is that of the GPT.
    """
    n_before = mixture.lookback
    tokens, targets = rows[:, n_before:-1], rows[:, n_before + 1 :, None]
    with torch.no_grad():
        contexts = mixture.contexts(tokens, rows[:, :n_before])
        parts = [
            torch.cat([probs.gather(-1, part).log() for probs in mixture.iter_probs(ids)], dim=-1)
            for ids, part in mixture.split(contexts, targets)
        ]  # (B T, K) in all
    position = 0 if cache is None else cache.length
    log_probs = mixture.gpt(tokens, cache).float().log_softmax(dim=-1)  # (B, T, V)
    inputs = mixture.gate_inputs(log_probs.detach(), contexts, position)
    columns = torch.cat(parts).view(*tokens.shape, -1)
    return inputs, torch.cat([log_probs.gather(-1, targets), columns], dim=-1)


def fit_gate(gate: Gate, inputs: Tensor, log_probs: Tensor) -> None:
    """Fit each network of a gate, in place, to the loss of its own mixture on these characters.

    Inputs are (N, 1 + 2 K), `log_probs` of each component for the next character (N, 1 + K).
    """
    mean, std = inputs.mean(dim=0), inputs.std(dim=0, correction=0) + STD_EPSILON
    device, n_characters = gate.bias.device, len(inputs)
    gate.cpu()  # so that the fit is bitwise identical on every device
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (gate.hidden.weight, gate.output):
            bound = INITIAL_SCALE / weight.size(1) ** 0.5  # of the number of inputs
            weight.uniform_(-bound, bound, generator=generator)
        gate.hidden.bias.zero_()
        gate.bias.zero_()
    standardized = (inputs - mean) / std
    parameters = dict(gate.named_parameters())
    optimizer = AdamW(parameters, LR, weight_decay=0.0)
    for step in range(STEPS):
        batch = torch.randint(n_characters, (BATCH_SIZE,), generator=generator)
        # (BATCH_SIZE, networks, 1 + K)
        log_weights = gate.logits(standardized[batch]).log_softmax(dim=-1)
        mixed = torch.logsumexp(log_weights + log_probs[batch, None], dim=-1)
        squares = torch.stack([parameter.square().sum() for parameter in parameters.values()])
        gate.zero_grad()
        objective = L2 / n_characters * squares.sum() - mixed.sum(dim=-1).mean()
        objective.backward()  # type: ignore[no-untyped-call]
        optimizer.step(step, 1 - step / STEPS)
    gate.zero_grad()
    with torch.no_grad():  # the standardization becomes part of the first layer
        gate.hidden.weight.div_(std)
        gate.hidden.bias.sub_(gate.hidden.weight @ mean)
    gate.to(device).requires_grad_(False)
