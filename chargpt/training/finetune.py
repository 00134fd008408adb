"""Fine-tuning: the weights of a run as the start of another, for another text.

Shapes in this file: V = vocabulary size, C = n_embd.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ChargptError, ConfigError
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import LanguageModel
from chargpt.store.run import Run, load_run
from chargpt.text.tokenizer import CharTokenizer

LR_FRACTION = 0.1  # of the learning rates of a new run


def load_base_run(config: Config) -> Run | None:
    """Return the run that `train.from_run` names, None if there is none.

    Raises:
        RunError: there is no such run, or it is damaged.
    """
    path = config.train.from_run
    return None if path is None else load_run(Path(path), device="cpu")


def config_from_base_run(base_run: Run, config: Config, fixed_keys: Collection[str]) -> Config:
    """Return the config of a run that starts from another run's weights.

    It has that run's model, characters, documents and batch size, and lower learning rates. The
    user has set the dotted keys `fixed_keys`.

    Raises:
        ConfigError: the user has set another model.
    """
    model = {f"model.{name}": value for name, value in base_run.config.model.model_dump().items()}
    given = {f"model.{name}": value for name, value in config.model.model_dump().items()}
    may_differ = {"model.dropout"}  # from the base run
    if base_run.config.model.kind != "gpt2":  # which learns a vector for each position
        may_differ.add("model.block_size")
    for key in sorted(set(fixed_keys) & set(model) - may_differ):
        if given[key] != model[key]:
            raise ConfigError(
                f"{key} is {model[key]} in {base_run.folder}, whose weights are the start; drop "
                f"-s {key}={given[key]}"
            )
    documents, path = base_run.config.text.documents, config.text.path
    if documents == "files" and path is not None and os.path.isfile(os.path.expanduser(path)):
        documents = None  # one file cannot be split
    values = {
        **model,
        "text.documents": documents,
        "train.batch_size": base_run.config.train.batch_size,
        "optim.lr": LR_FRACTION * config.optim.lr,
        "optim.matrix_lr": LR_FRACTION * config.optim.matrix_lr,
    }
    values = {key: value for key, value in values.items() if key not in fixed_keys}
    characters = sorted({*config.text.extra_characters, *base_run.tokenizer.characters})
    return config.with_values({**values, "text.extra_characters": "".join(characters)})


def describe_base_run(run: Run, config: Config, tokenizer: CharTokenizer) -> str:
    """Return which weights are the start, and how many tokens are new, in a sentence."""
    n_known = len(shared_tokens(run.tokenizer, tokenizer)[0])
    sentence = (
        f"starting from {run.folder}, step {run.step:,}: {n_known:,} of the "
        f"{tokenizer.vocab_size:,} tokens are known, {tokenizer.vocab_size - n_known:,} new"
    )
    if run.tokenizer.has_bytes and not tokenizer.has_bytes:
        sentence += (
            "; the byte tokens are dropped, as this text has no rare characters: with "
            "-s text.min_count=2 those that occur once are rare"
        )
    documents = config.text.documents
    if documents is not None and documents == run.config.text.documents:
        sentence += f"; text.documents={documents!r}, as there"
    return sentence


@torch.no_grad()
def copy_weights(model: LanguageModel, tokenizer: CharTokenizer, run: Run) -> None:
    """Copy a run's weights to a model of the same sizes, matching rows of tokens by character.

    The rows of new tokens are the mean of all others.
    """
    old, new = shared_tokens(run.tokenizer, tokenizer)
    source = dict(run.model.named_parameters())
    for name, parameter in model.named_parameters():
        values = source[name].to(parameter.device)
        if name in ("embedding.weight", "head.weight"):  # (V, C)
            parameter[:] = values.mean(dim=0)
            parameter[new] = values[old]
        elif name == "table.weight":  # (V, V) of the bigram model
            rows = values.mean(dim=1, keepdim=True).repeat(1, len(parameter))
            rows[:, new] = values[:, old]
            parameter[:] = rows.mean(dim=0)
            parameter[new] = rows[old]
        else:
            parameter.copy_(values)


def shared_tokens(first: CharTokenizer, second: CharTokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the tokens that two vocabularies share, in each of them."""
    ids = {second.token_text(token): token for token in range(second.vocab_size)}
    names = map(first.token_text, range(first.vocab_size))
    pairs = [(token, ids[name]) for token, name in enumerate(names) if name in ids]
    old, new = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(dim=1)
    return old, new


@dataclass(frozen=True)
class Forgetting:
    """Loss on the base run's own text, in nats per character."""

    before: float  # training
    after: float
    characters: int  # of its validation split that were scored
    n_unknown: int  # characters of the split that the new vocabulary lacks; left out


def forgetting(base_run: Run, run: Run) -> Forgetting | None:
    """Return what a fine-tuned run has forgotten; None if the base run has no text."""
    try:
        whole = base_run.tokenizer.decode(base_run.corpus().split("val"))
    except ChargptError:
        return None
    base_run.model.to(run.model.device)
    text = run.tokenizer.decode(run.tokenizer.encode(whole, "skip"))
    n_scored = run.config.train.evaluation_tokens
    before, after = (
        evaluate_tokens(each.model, each.tokenizer.encode(text, "skip"), max_tokens=n_scored)
        for each in (base_run, run)
    )
    return Forgetting(
        before.nats_per_char, after.nats_per_char, after.characters, len(whole) - len(text)
    )
