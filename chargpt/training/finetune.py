"""Fine-tuning: the weights of a run as the start of another, for another text.

Shapes in this file: V = vocabulary size, C = n_embd.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from chargpt.config import Config
from chargpt.errors import ChargptError, ConfigError
from chargpt.files import expand_user
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.log import logger
from chargpt.models import LanguageModel
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus
from chargpt.text.tokenizer import CharTokenizer
from chargpt.training.planner import fitting_block_size, with_unless_fixed

LR_FRACTION = 0.1  # of the learning rates of a new run


def config_from_base_run(base_run: Run, config: Config, fixed_keys: Collection[str]) -> Config:
    """Return the config of a run that starts from another run's weights.

    It has that run's model, characters, documents and batch size, and lower learning rates. The
    user has set the dotted keys `fixed_keys`.

    Raises:
        ConfigError: the user has set another model.
    """
    base, given = base_run.config.flatten(), config.flatten()
    model = {key: value for key, value in base.items() if key.startswith("model.")}
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
    if documents == "files" and path is not None and os.path.isfile(expand_user(path)):
        documents = None  # one file cannot be split
    values = {
        **model,
        "text.documents": documents,
        "train.batch_size": base["train.batch_size"],
        "optim.lr": LR_FRACTION * config.optim.lr,
        "optim.matrix_lr": LR_FRACTION * config.optim.matrix_lr,
    }
    characters = sorted({*config.text.extra_characters, *base_run.tokenizer.characters})
    config = config.with_values({"text.extra_characters": "".join(characters)})
    return with_unless_fixed(config, values, fixed_keys)


def config_for_text(
    base_run: Run, config: Config, corpus: Corpus, fixed_keys: Collection[str]
) -> Config:
    """Return the config with a block size that fits the text; log how many tokens are new."""
    vocab_size = corpus.tokenizer.vocab_size
    n_known = len(shared_tokens(base_run.tokenizer, corpus.tokenizer)[0])
    logger.info(
        f"starting from {base_run.folder}, step {base_run.step:,}: {n_known:,} of the "
        f"{vocab_size:,} tokens are known, {vocab_size - n_known:,} new"
    )
    if config.model.kind != "gpt":
        return config
    block_size = fitting_block_size(config.model.block_size, corpus)
    return with_unless_fixed(config, {"model.block_size": block_size}, fixed_keys)


@torch.no_grad()
def copy_weights(model: LanguageModel, tokenizer: CharTokenizer, run: Run) -> None:
    """Copy a run's weights to a model of the same sizes, matching rows of tokens by character.

    The rows of new tokens are the mean of all others.
    """
    old, new = shared_tokens(run.tokenizer, tokenizer)
    source = dict(run.model.named_parameters())
    for name, parameter in model.named_parameters():
        values = source[name].to(parameter.device)
        if name == "table.weight":  # (V, V) of the bigram model: its columns are tokens too
            columns = values.mean(dim=1, keepdim=True).repeat(1, len(parameter))
            columns[:, new] = values[:, old]
            values = columns
        if name in ("embedding.weight", "head.weight", "table.weight"):  # (V, C) or (V, V)
            parameter[:] = values.mean(dim=0)
            parameter[new] = values[old]
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

    def describe(self, base_run: Run) -> str:
        """Return the losses in a sentence."""
        unknown = ""
        if self.n_unknown:
            unknown = f", without {self.n_unknown:,} that this run does not know"
        return (
            f"On {base_run.state.text_name}, the text of {base_run.folder}: "
            f"{self.before:.3f} nats per character before training, {self.after:.3f} after it "
            f"(on {self.characters:,} characters of its validation split{unknown})."
        )


def forgetting(base_run: Run, run: Run) -> Forgetting | None:
    """Return what a fine-tuned run has forgotten; None if the base run has no text."""
    try:
        whole = base_run.tokenizer.decode(base_run.corpus().split("val"))
    except ChargptError:
        return None
    base_run.model.to(run.model.device)
    text = run.tokenizer.decode(run.tokenizer.encode(whole, "skip"))
    # so that both score the same blocks
    span = max(each.model.block_size for each in (base_run, run))
    score = partial(evaluate_tokens, max_tokens=run.config.train.evaluation_tokens, span=span)
    before, after = (
        score(each.model, each.tokenizer.encode(text, "skip")) for each in (base_run, run)
    )
    return Forgetting(
        before.nats_per_char, after.nats_per_char, after.characters, len(whole) - len(text)
    )
