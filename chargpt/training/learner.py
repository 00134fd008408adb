"""What one update is made of: batches, gradients, the optimizer, the moving average of weights.

A step's samples, dropout and learning rate are pure functions of (seed, step), so a resumed run
equals the uninterrupted one bit for bit and no generator's state is stored.
Shapes in this file: B = sequences of a micro-batch, T = block size, V = vocabulary.
"""

import contextlib
import gc
import hashlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from chargpt.config import Config, OptimConfig, TrainConfig
from chargpt.device import ProcessGroup, capture_training_graph
from chargpt.errors import ConfigError
from chargpt.inference.baselines import fit_ngram
from chargpt.models import LanguageModel, build_model
from chargpt.models.ngram import NGramLM
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.tensors import load_weights
from chargpt.text.batches import Batches
from chargpt.text.corpus import Corpus
from chargpt.training.optim import Optimizer


class Learner:
    """A model, and all that changes it.

    Args:
        config: resolved. Its learning rates count until `restore` gives others.
        corpus: the text.
        group: the ranks that train together.
        device: that it happens on.
        saved: a checkpoint to go on from.

    Raises:
        RunError: the checkpoint is another model's.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        group: ProcessGroup,
        device: torch.device,
        saved: Checkpoint | None = None,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.group = group
        self.device = device
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.micro_batch = micro_batch_size(config.train, group)
        torch.manual_seed(config.seed)
        model = build_model(config.model, corpus.tokenizer.vocab_size)
        self.model: LanguageModel = model.to(device)
        if saved is None:
            self.optimizer = Optimizer(self.model, config.optim, self.dtype)
            self.average = self._start_average(dict(self.model.named_parameters()))
        else:
            self.restore(saved, config.optim)
        self.counted: NGramLM | None = None
        self.replica = self._replicate()
        train = config.train
        self.batches = Batches(
            corpus.split("train"), self.model.block_size, train.batch_size, config.seed
        )
        if device.type != "cpu":
            self.batches.to_device(device)
        if device.type == "cuda" and group.size == train.accumulate == 1:
            capture_training_graph(self.model, self.batches.at(0)[:, :-1].to(device), self.dtype)

    def count_targets(self) -> None:
        """Count the n-gram that has a share in the targets, if one has. It takes a moment."""
        if self.config.train.ngram_target_weight:
            self.counted = fit_ngram(self.corpus).to(self.device)
            self.counted.build_table()

    def restore(self, saved: Checkpoint, optim: OptimConfig) -> None:
        """Become what was saved, to go on at the learning rates of `optim`.

        Raises:
            RunError: it is another model's.
        """
        load_weights(
            self.model, saved.model, saved.folder
        )  # with an average, the raw ones stand apart
        load_weights(self.model, saved.raw_model, saved.folder)
        self.model.zero_grad(set_to_none=True)
        self.average = self._start_average(saved.model)
        self.optimizer = Optimizer(self.model, optim, self.dtype)
        self.optimizer.load_tensors(saved.optimizer)

    def leave_others(self) -> None:
        """Let go of the other ranks, before the process group is destroyed.

        If what copies gradients among them went after it, it would be the last to hold the group,
        whose threads and Python then wait for each other for ever.
        """
        self.replica = self.model
        gc.collect()

    # -- one update -------------------------------------------------------------------------

    def accumulate_gradients(self, step: int) -> Tensor:
        """Run the step's micro-batches forward and backward; return this rank's mean loss."""
        accumulate = self.config.train.accumulate
        first = self.group.rank * accumulate * self.micro_batch
        rows = slice(first, first + accumulate * self.micro_batch)
        # elsewhere than on CUDA a copy that is not waited for may read what is gone already
        cuda = self.device.type == "cuda"
        blocks = self.batches.at(step, rows).to(self.device, non_blocking=cuda)
        total = torch.zeros((), device=self.device)
        for micro, block in enumerate(torch.split(blocks, self.micro_batch)):  # (B, T + 1)
            self.seed_dropout(step, micro)
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else self.without_sync():
                objective, nats = self.objective(block)
                (objective / accumulate).backward()  # type: ignore[no-untyped-call]
            total += nats.detach() / accumulate
        return total

    def objective(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is minimised, and the mean loss in nats, of a (B, T + 1) block.

        The two differ if the counted n-gram has a share in the targets (Hinton et al. 2015,
        section 2): all that might have followed teaches more than the one character that did.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = self.replica(block[:, :-1])  # (B, T, V)
        guesses = logits.float().log_softmax(dim=-1)
        nats = F.nll_loss(guesses.flatten(0, 1), block[:, 1:].flatten())
        if self.counted is None:
            return nats, nats
        with torch.no_grad():
            expected = self.counted.probs(block[:, :-1])  # (B, T, V)
        counted = -(expected * guesses).sum(dim=-1).mean()
        share = self.config.train.ngram_target_weight
        return (1 - share) * nats + share * counted, nats

    def clip_gradients(self) -> Tensor:
        """Bound the gradient's norm; return what it was."""
        clip = self.config.train.clip_norm or math.inf
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)

    def apply_update(self, step: int, rate: float) -> None:
        """Update the weights and move their average."""
        self.optimizer.step(step, rate)
        self.model.zero_grad(set_to_none=True)
        if self.average is not None:
            # a short memory at first, lest the random start stay in it
            decay = min(self.config.train.ema, (1 + step) / (10 + step))
            torch._foreach_lerp_(
                list(self.average.values()), list(self.model.parameters()), 1 - decay
            )

    def seed_dropout(self, step: int, micro: int) -> None:
        """Make this micro-batch's dropout a function of its place alone."""
        if self.config.model.dropout:
            place = f"{self.config.seed}/{step}/{self.group.rank}/{micro}"
            digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
            number = int.from_bytes(digest) >> 1
            if self.device.type == "cpu":
                # torch.manual_seed notes each call for GPUs that may yet turn up, and keeps it
                torch.default_generator.manual_seed(number)
            else:
                torch.manual_seed(number)

    def without_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Leave gradients on their rank until the step's last micro-batch."""
        if isinstance(self.replica, DistributedDataParallel):
            return self.replica.no_sync()
        return contextlib.nullcontext()

    # -- what came of it --------------------------------------------------------------------

    def has_finite_weights(self) -> bool:
        """Return whether every weight is a finite number."""
        norms = torch._foreach_norm(list(self.model.parameters()))
        return math.isfinite(torch.stack(norms).sum().item())

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint keeps: the weights to use, and all else to go on with.

        They are the tensors themselves: the next update changes them.
        """
        raw, optimizer = dict(self.model.state_dict()), self.optimizer.state_tensors()
        if self.average is None:
            return raw, optimizer
        return self.average, optimizer | {f"raw.{name}": tensor for name, tensor in raw.items()}

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the moving average, if there is one, in the model's place for a while."""
        if self.average is None:
            yield
            return
        raw = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._set_weights(self.average)
        try:
            yield
        finally:
            self._set_weights(raw)

    def _start_average(self, source: dict[str, Tensor]) -> dict[str, Tensor] | None:
        if not self.config.train.ema:
            return None
        # in the model's own order: the update walks both side by side
        names = dict(self.model.named_parameters())
        return {name: source[name].detach().clone().to(self.device) for name in names}

    def _replicate(self) -> torch.nn.Module:
        if self.group.size == 1:
            return self.model
        devices = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # its later name is not in every torch that we run on
            warnings.filterwarnings("ignore", "`?broadcast_buffers", FutureWarning)
            return DistributedDataParallel(self.model, device_ids=devices, broadcast_buffers=False)

    @torch.no_grad()
    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


def micro_batch_size(train: TrainConfig, group: ProcessGroup) -> int:
    """Return how many sequences go through the model at once on one rank.

    Raises:
        ConfigError: the batch does not divide over ranks and micro-batches.
    """
    parts = train.accumulate * group.size
    if train.batch_size % parts:
        raise ConfigError(
            f"train.batch_size {train.batch_size} does not divide over {group.size} "
            f"processes x {train.accumulate} micro-batches; make it a multiple of {parts}"
        )
    return train.batch_size // parts
