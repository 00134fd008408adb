"""A model that learns: batch, gradients, optimizer, moving average of the weights, validation.

The batch of a step is a pure function of (seed, step), its learning rate of (config, step), its
dropout of seed, step, rank and micro-batch. So on a CPU a resumed run is bitwise identical
to the uninterrupted one, and no generator state is stored.
Shapes in this file: B = sequences of a micro-batch, T = block size, V = vocabulary size.
"""

import contextlib
import gc
import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from chargpt.config import Config, OptimConfig, SampleConfig
from chargpt.device import (
    DTYPES,
    autocast,
    can_capture,
    capture_graph,
    choose_device,
    memory_limit,
    require_memory,
)
from chargpt.distributed import RankGroup
from chargpt.errors import CaptureError, ConfigError, DeviceError, RunError, is_out_of_memory
from chargpt.files import quoted
from chargpt.inference.evaluation import Baselines, Evaluation, evaluate_tokens
from chargpt.log import logger
from chargpt.models import LanguageModel, build_model, count_parameters, rotary_bytes
from chargpt.models.kernels import MAX_PRODUCT_ROW_BYTES
from chargpt.models.ngram import NGramLM
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.run import Run
from chargpt.store.tensors import load_weights
from chargpt.text.corpus import Corpus, Split, block_offsets
from chargpt.text.display import end_sign
from chargpt.text.tokenizer import Tokens
from chargpt.training.optim import LossScaler, Optimizer

if TYPE_CHECKING:
    from chargpt.training.teachers import Teachers

SAMPLE_LENGTH = 200  # characters
N_DOCUMENTS = 5  # per sample, of a list of documents
MAX_RESIDENT_BYTES = 2**31  # of tokens on a GPU
MAX_PARTS = 10_000  # micro-batches that are advised: a batch may have billions of sequences
# to which copies need not synchronise; others may read the source after it is freed
ASYNC_DEVICES = ("cuda", "xpu")
# PyTorch's, of the whole process: what a thread draws from it follows from the seed that it has set
_generator = threading.Lock()


class Learner:
    """A model with its batches, optimizer and moving average of weights (EMA).

    The arguments are those of `Trainer`, but `config.dtype` is resolved, and `base_run.model` has
    the sizes of `config.model`.

    Attributes:
        teacher: of a student of `train.students`; None of the first model.
        ddp_model: the model, in DistributedDataParallel if several ranks train without CUDA graphs.
        captured_forward_backward: `forward_backward` as a CUDA graph, and the mean of the gradients
            over the ranks; None on other devices, with several micro-batches, or if capture failed.
        captured_update: `optimizer.step` as a CUDA graph; None wherever the other one is.
        capture_error: why capture failed, on this rank or another.

    Raises:
        ConfigError: the batch does not divide over ranks and micro-batches, or a teacher lacks
            characters of the text.
        DeviceError: the device has too little memory.
        RunError: the checkpoint belongs to another model or had other teachers, or one cannot be
            loaded.
    """

    teacher: LanguageModel | None = None

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        group: RankGroup,
        device: torch.device,
        saved: Checkpoint | None = None,
        baselines: Baselines | None = None,
        base_run: Run | None = None,
        teachers: "Teachers | None" = None,
    ) -> None:
        train = config.train
        self.seed, self.model_config, self.train_config = config.seed, config.model, train
        self.dropout = config.model.dropout
        self.corpus, self.group, self.device = corpus, group, device
        self.dtype = DTYPES[config.dtype]
        parts = train.micro_batches * group.world_size
        if train.batch_size % parts:
            raise ConfigError(
                f"train.batch_size {train.batch_size} does not divide over {group.world_size} "
                f"processes x {train.micro_batches} micro-batches; make it a multiple of {parts}"
            )
        self.micro_batch_size = train.batch_size // parts  # sequences, on one rank
        n_bytes = training_bytes(config, corpus.tokenizer.vocab_size, self.micro_batch_size)
        remedy = memory_remedy(config, corpus.tokenizer.vocab_size, group.world_size, device)
        require_memory(n_bytes, "a model and batches of these sizes", device, remedy)
        self.captured_forward_backward: Callable[[Tensor], Tensor] | None = None
        self.captured_update: Callable[[int, float | Tensor], object] | None = None
        self.capture_error: str | None = None
        with _generator:
            torch.manual_seed(config.seed)
            model = build_model(config.model, corpus.tokenizer.vocab_size)
        model.first_continuation_id = corpus.tokenizer.first_continuation_id
        self.model: LanguageModel = model.to(device)
        self.scaler = LossScaler(device) if self.dtype == torch.float16 else None
        self.l2_sp, self.initial_weights = config.optim.l2_sp, list[Tensor]()
        if base_run is not None:
            from chargpt.training.finetune import copy_weights  # most runs do not need it

            copy_weights(self.model, corpus.tokenizer, base_run)
            if self.l2_sp:
                self.initial_weights = [p.detach().clone() for p in self.model.parameters()]
        if saved is None:
            self._start_optimizer(config.optim)
        else:
            self.restore(saved, config.optim)
        self.baselines, self.teachers = baselines, teachers
        if train.teachers and teachers is None:
            from chargpt.training.teachers import load_teachers  # most runs have none

            self.teachers = load_teachers(train.teachers, corpus, group)
        for teacher in self.teachers.models if self.teachers else ():
            teacher.to(device)  # those of another trial may be on another one
        if saved is not None and saved.state.teacher_fingerprint != self.teacher_fingerprint:
            raise RunError(
                "the runs of train.teachers are not those that the run was started with; restore "
                "them, name them where they are now, or start a new run"
            )
        self.ddp_model: torch.nn.Module = self.model
        self.batches = Batches(
            corpus.split("train"),
            self.model.block_size,
            train.batch_size,
            config.seed,
            self.model.first_continuation_id,
        )
        if device.type != "cpu":
            self.batches.to_device(device)
        if can_capture(device) and train.micro_batches == 1:
            self._capture()
        self.ddp_model = self._wrap_for_ddp()

    @cached_property
    def ngram(self) -> NGramLM | None:
        """The n-gram model of the soft targets, on the device; None if they have no weight."""
        if not self.train_config.ngram_target_weight:
            return None
        train, vocab_size = self.corpus.split("train"), self.corpus.tokenizer.vocab_size
        ngram = self.baselines.ngram if self.baselines else NGramLM.fit(train, vocab_size)
        if ngram.n_tabulated == 1:
            ngram.build_table()  # before it is moved: scattered additions may be slow on a GPU
        return ngram.to(self.device)

    @property
    def teacher_fingerprint(self) -> str | None:
        """The fingerprint of the teachers; None without any."""
        return None if self.teachers is None else self.teachers.fingerprint

    def restore(self, saved: Checkpoint, optim: OptimConfig) -> None:
        """Load a checkpoint and continue with the learning rates of `optim`.

        Raises:
            RunError: it belongs to another model.
        """
        for tensors in (saved.model, saved.raw_weights):  # with EMA: the averages are only checked
            load_weights(self.model, tensors, saved.folder)
        self.model.zero_grad(set_to_none=True)
        self.ema_weights = self._start_ema(saved.model)
        self.optimizer = Optimizer(self.model, optim, self.dtype, self.group)
        self.optimizer.load_state_dict(saved.optimizer)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved.optimizer)
        teacher = None
        if saved.teacher_weights is not None:
            teacher = deepcopy(self.model)
            load_weights(teacher, saved.teacher_weights, saved.folder)
        self._set_teacher(teacher)
        self._capture_again()

    def start_student(self, number: int, optim: OptimConfig) -> None:
        """Start from random weights again, as student `number` (1, 2, ...), of the model so far.

        Born-again networks (Furlanello et al. 2018): a student of its teacher's size has a lower
        loss, since the teacher's probabilities keep it from over-fitting.
        """
        with self.with_ema_weights():
            self._set_teacher(deepcopy(self.model))
        with _generator:
            torch.manual_seed(self.seed + number)
            model = build_model(self.model_config, self.model.vocab_size)
        self.model.load_state_dict(model.state_dict())
        self._share_weights()
        self._start_optimizer(optim)
        self._capture_again()

    def _start_optimizer(self, optim: OptimConfig) -> None:
        self.optimizer = Optimizer(self.model, optim, self.dtype, self.group)
        self.ema_weights = self._start_ema(dict(self.model.named_parameters()))

    def _set_teacher(self, teacher: LanguageModel | None) -> None:
        """Use a model as the only teacher, if not None, of a student, which has no dropout."""
        self.teacher = teacher and teacher.eval().requires_grad_(requires_grad=False)
        self.dropout = 0.0 if teacher else self.model_config.dropout
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = self.dropout

    def _share_weights(self) -> None:
        """Take the weights of rank 0: another kind of CPU may have initialised other ones."""
        if not self.group.is_alone:
            for parameter in self.model.parameters():
                dist.broadcast(parameter.detach(), src=0)

    def unwrap_ddp(self) -> None:
        """Drop the data-parallel wrapper before the process group is destroyed.

        The wrapper would be the last to hold the group, whose threads and Python would then wait
        for each other forever.
        """
        self.ddp_model = self.model
        gc.collect()

    # -- one update -------------------------------------------------------------------------

    def accumulate_gradients(self, step: int) -> Tensor:
        """Run the step's micro-batches forward and backward; return this rank's mean loss."""
        n_rows = self.train_config.micro_batches * self.micro_batch_size
        rows = slice(self.group.rank * n_rows, (self.group.rank + 1) * n_rows)
        non_blocking = self.device.type in ASYNC_DEVICES
        batch = self.batches.at(step, rows).to(self.device, non_blocking=non_blocking)
        total = torch.zeros((), device=self.device)
        for number, micro_batch in enumerate(torch.split(batch, self.micro_batch_size)):
            is_last = number == self.train_config.micro_batches - 1
            if isinstance(self.ddp_model, DistributedDataParallel):
                self.ddp_model.require_backward_grad_sync = is_last  # average over the ranks
            with _generator if self.dropout else contextlib.nullcontext():
                self.seed_dropout(step, number)
                loss = (self.captured_forward_backward or self.forward_backward)(micro_batch)
            total += loss / self.train_config.micro_batches
        return total

    def forward_backward(self, micro_batch: Tensor) -> Tensor:
        """Accumulate the gradients of a micro-batch (B, T + 1); return its mean loss."""
        objective, loss = self.objective(micro_batch)
        if self.scaler is not None:
            objective = objective * self.scaler.scale
        (objective / self.train_config.micro_batches).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _capture_again(self) -> None:
        """Replace CUDA graphs, if there are any, which are of another optimizer."""
        if self.captured_update is None:
            return
        self._capture()
        self.ddp_model = self._wrap_for_ddp()  # if that failed
        self.warn_of_failed_capture()

    def warn_of_failed_capture(self) -> None:
        """Log, on rank 0, why there are no CUDA graphs, if capture failed."""
        if self.group.is_main and (error := self.capture_error) is not None:
            logger.warning(f"{error}: training works, but a small model trains more slowly")

    def _capture(self) -> None:
        """Capture the forward and backward pass and the update as CUDA graphs.

        The captured functions do not refer to `self`: in a cycle, the memory of trial models would
        wait for the garbage collector. What ranks communicate is in no graph, so that each captures
        and checks its graphs alone, and NCCL's timeouts and shutdown are as without graphs.
        """
        self.captured_forward_backward = self.captured_update = None
        parameters, optimizer, group = list(self.model.parameters()), self.optimizer, self.group
        state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
        static_batch = self.batches.at(0, slice(self.micro_batch_size)).to(self.device)
        # learning rates of zero leave the weights as they are
        static_step, static_factor = torch.zeros(2, device=self.device).unbind()

        def forward_backward() -> Tensor:
            self.model.zero_grad(set_to_none=True)  # so that the graph writes into new gradients
            return self.forward_backward(static_batch)

        def update() -> Tensor:
            optimizer.step(static_step, static_factor)
            return static_factor

        try:
            replay_step = capture_graph(forward_backward, self.device, is_random=self.dropout > 0)
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_zero_(gradients)  # infinity, of float16, times a rate of zero is NaN
            replay_update = capture_graph(update, self.device)
        except CaptureError as error:
            self.capture_error = str(error)
        finally:
            optimizer.load_state_dict(state)
            self.model.zero_grad(set_to_none=True)
        if group.all_reduce_any(self.capture_error is not None):  # with DDP they would not match
            self.capture_error = self.capture_error or "CUDA graph capture failed on another rank"
            return
        self._share_weights()  # as DDP does

        def captured_forward_backward(micro_batch: Tensor) -> Tensor:
            static_batch.copy_(micro_batch)
            loss = replay_step()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            group.average(gradients)
            return loss

        def captured_update(step: int, factor: float | Tensor) -> None:
            static_step.fill_(step)
            static_factor.fill_(factor)
            replay_update()

        self.captured_forward_backward = captured_forward_backward
        self.captured_update = captured_update

    def objective(self, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective and the mean loss in nats of a micro-batch (B, T + 1).

        They differ with soft targets, of n-grams or teachers (distillation, Hinton et al. 2015,
        section 2): these hold a probability for every token that may follow, not only for the one
        that did.
        """
        with autocast(self.device, self.dtype):
            logits = self.ddp_model(micro_batch[:, :-1])  # (B, T, V)
        log_probs = logits.float().log_softmax(dim=-1)
        loss = F.nll_loss(log_probs.flatten(0, 1), micro_batch[:, 1:].flatten())
        objective = loss
        for weight, probs in self.soft_targets(micro_batch[:, :-1]):
            soft_loss = -(probs * log_probs).sum(dim=-1).mean()
            objective = (1 - weight) * objective + weight * soft_loss
        return objective, loss

    @torch.no_grad()
    def soft_targets(self, inputs: Tensor) -> list[tuple[float, Tensor]]:
        """Return soft targets for inputs (B, T), (B, T, V), each with its weight in the targets.

        The targets before it have the rest of the weight.
        """
        found = []
        if self.ngram is not None:
            found.append((self.train_config.ngram_target_weight, self.ngram.probs(inputs)))
        with autocast(self.device, self.dtype):
            if self.teacher is not None:
                probs = self.teacher(inputs).float().softmax(dim=-1)
                found.append((self.train_config.teacher_weight, probs))
            elif self.teachers is not None:
                found.append((self.train_config.teacher_weight, self.teachers.probs(inputs)))
        return found

    def clip_gradients(self) -> Tensor:
        """Clip the norm of all gradients; return the norm before, or -1: the step is skipped."""
        parameters = list(self.model.parameters())
        if self.scaler is not None:
            self.scaler.unscale([p.grad for p in parameters if p.grad is not None])
        max_norm = self.train_config.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm if self.scaler is None else norm - self.scaler.found_inf

    @torch.no_grad()
    def apply_update(self, step: int, lr_factor: float) -> None:
        """Update the weights and their moving average."""
        factor: float | Tensor = lr_factor
        if self.scaler is not None:  # of a step that is skipped, 0
            factor = lr_factor * (1 - self.scaler.found_inf)
            self.scaler.update()
        (self.captured_update or self.optimizer.step)(step, factor)
        self.optimizer.gather()
        self.model.zero_grad(set_to_none=True)
        weights = list[Tensor](self.model.parameters())
        if self.initial_weights:  # L2-SP (Li, Grandvalet and Davoine 2018), decoupled
            pull = self.l2_sp * factor  # of a step that is skipped, 0
            pulls = [pull] * len(weights) if isinstance(pull, Tensor) else pull
            torch._foreach_lerp_(weights, self.initial_weights, pulls)
        if self.ema_weights is not None:
            # a smaller decay at first, so that the random initial weights are soon forgotten
            decay = min(self.train_config.ema, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(self.ema_weights.values()), weights, 1 - decay)

    def seed_dropout(self, step: int, micro: int) -> None:
        """Seed the generator of dropout from (seed, step, rank, micro-batch)."""
        if not self.dropout:
            return
        key = f"{self.seed}/{step}/{self.group.rank}/{micro}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
        if self.device.type == "cpu":
            # torch.manual_seed would record each call for GPUs that are not initialised yet
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    # -- validation -------------------------------------------------------------------------

    def evaluate(self, split: Split, max_tokens: int | None = None) -> Evaluation:
        """Return the loss on a split, or on evenly spread blocks of `max_tokens` in all.

        It is that of the averaged weights, if there is an EMA, as are the samples.
        """
        with self.with_ema_weights():
            return evaluate_tokens(
                self.model,
                self.corpus.split(split),
                split=split,
                max_tokens=max_tokens,
                dtype=self.dtype,
                group=self.group,
            )

    def sample(self, options: SampleConfig) -> str:
        """Return a short text, or some documents, generated with the run's sampling settings."""
        from chargpt.inference.generation import PLAIN, stream_pieces  # long after the first step

        tokenizer = self.corpus.tokenizer
        options = options.model_copy(
            update={
                "length": min(SAMPLE_LENGTH, options.length),
                "num_samples": N_DOCUMENTS if tokenizer.eos_token else 1,
                "seed": self.seed,
                **PLAIN,
            }
        )
        prompt = tokenizer.encode(tokenizer.eos_token + options.prompt, unknown="replace")
        with self.with_ema_weights():
            steps = stream_pieces(
                self.model,
                tokenizer,
                prompt,
                options,
                unigram=lambda: self.corpus.token_counts("train"),
            )
            sequences = list(zip(*steps, strict=True))
        return "\n".join(
            options.prompt
            + "".join(piece.text for piece in pieces)
            + end_sign(pieces[-1].ended, tokenizer.eos_token)
            for pieces in sequences
        )

    # -- weights ----------------------------------------------------------------------------

    def has_finite_weights(self) -> bool:
        """Return whether every weight is finite."""
        norms = torch._foreach_norm(list(self.model.parameters()))
        return math.isfinite(torch.stack(norms).sum().item())

    def state_dicts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the model's and the optimizer's tensors for a checkpoint, without a copy.

        With EMA the model's are the averages, and the raw weights are with the optimizer's.
        """
        raw, optimizer = dict(self.model.state_dict()), self.optimizer.state_dict()
        if self.scaler is not None:
            optimizer |= self.scaler.state_dict()
        if self.teacher is not None:
            weights = self.teacher.state_dict()
            optimizer |= {f"teacher.{name}": tensor for name, tensor in weights.items()}
        if self.ema_weights is None:
            return raw, optimizer
        return self.ema_weights, optimizer | {f"raw.{name}": tensor for name, tensor in raw.items()}

    @contextlib.contextmanager
    def with_ema_weights(self) -> Iterator[None]:
        """Use the moving average, if there is one, as the model's weights in a `with` block."""
        if self.ema_weights is None:
            yield
            return
        raw = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.load_state_dict(self.ema_weights)
        try:
            yield
        finally:
            self.model.load_state_dict(raw)

    def _start_ema(self, source: dict[str, Tensor]) -> dict[str, Tensor] | None:
        if not self.train_config.ema:
            return None
        # in the order of the parameters, as `apply_update` pairs them
        names = dict(self.model.named_parameters())
        return {name: source[name].detach().clone().to(self.device) for name in names}

    def _wrap_for_ddp(self) -> torch.nn.Module:
        if self.group.is_alone or self.captured_update is not None:
            return self.model
        with warnings.catch_warnings():
            # the argument's new name is missing from older supported versions
            warnings.filterwarnings("ignore", "`?broadcast_buffers", FutureWarning)
            return DistributedDataParallel(self.model, broadcast_buffers=False)


@dataclass
class Batches:
    """Blocks of T + 1 consecutive tokens at the random offsets of `block_offsets`.

    There is no iterator state: any rank can compute its rows of any step's batch.
    """

    tokens: Tokens
    block_size: int
    batch_size: int
    seed: int
    first_continuation_id: int = 1 << 32
    resident: tuple[Tensor, Tensor] | None = None  # tokens and 0 .. T, on a device

    def to_device(self, device: torch.device) -> None:
        """Copy the tokens to a device, if they are small, and gather batches there from now on."""
        # torch cannot index unsigned integers wider than bytes
        narrow = np.dtype(np.uint8 if self.tokens.dtype == np.uint8 else np.int32)
        if len(self.tokens) * narrow.itemsize <= MAX_RESIDENT_BYTES:
            tokens = torch.from_numpy(self.tokens.astype(narrow))
            self.resident = tokens.to(device), torch.arange(self.block_size + 1, device=device)

    def at(self, step: int, rows: slice = slice(None)) -> Tensor:
        """Return the blocks of a step, or some rows of them, as int64 (B, T + 1).

        They are on the CPU, or on the device of `to_device`.
        """
        size, first_id = self.block_size, self.first_continuation_id
        offsets = block_offsets(self.tokens, size, self.batch_size, self.seed, step, first_id)
        offsets = offsets[rows, None]  # (B, 1)
        if self.resident is not None:
            tokens, index = self.resident
            first = torch.from_numpy(offsets)
            is_async = tokens.device.type in ASYNC_DEVICES
            if is_async:  # a copy from pinned memory does not synchronise
                first = first.pin_memory()
            return tokens[first.to(tokens.device, non_blocking=is_async) + index].long()
        positions = offsets + np.arange(self.block_size + 1)  # (B, T + 1)
        return torch.from_numpy(self.tokens[positions].astype(np.int64))


def training_bytes(
    config: Config, vocab_size: int, n_sequences: int, device: str | None = None
) -> int:
    """Return the approximate memory of training with micro-batches of `n_sequences`, in bytes.

    `device` is the device's type where that of the config is `auto`.
    """
    model = config.model
    activations = 3 * vocab_size  # saved for the backward pass, values per token
    if model.kind != "bigram":
        activations += model.n_layer * (14 * model.n_embd + 5 * model.mlp_width)
        row_bytes = model.block_size * (2 if config.dtype.endswith("float16") else 4)
        # attention that stores no scores
        has_flash = (device or config.device).startswith(("cuda", "xpu"))
        if model.attention == "full" and not has_flash and row_bytes <= MAX_PRODUCT_ROW_BYTES:
            activations += 2 * model.n_layer * model.n_head * model.block_size  # scores, weights
    masks = model.block_size**2 if model.attention == "average" else 0
    if config.train.students:
        activations += vocab_size  # probabilities of the teacher
    # weights, gradients, up to two moments of the optimizer, EMA, teacher
    copies = 4 + bool(config.train.ema) + bool(config.train.students)
    weights = copies * count_parameters(model, vocab_size)
    n_values = weights + n_sequences * model.block_size * activations + masks
    return 4 * n_values + rotary_bytes(model)


def memory_remedy(
    config: Config, vocab_size: int, n_ranks: int, device: torch.device, run: Path | None = None
) -> str:
    """Return what lets training go on in less memory, by the same command or by resuming `run`."""
    n_sequences, limit = config.train.batch_size // n_ranks, memory_limit(device)
    fitting = (
        number
        for number in range(2 * config.train.micro_batches, min(n_sequences, MAX_PARTS) + 1)
        if n_sequences % number == 0
        and training_bytes(config, vocab_size, n_sequences // number) <= limit
    )
    remedies = []
    if number := next(fitting, None):
        remedies += [(f"-s train.micro_batches={number}", "for the same batches in smaller parts")]
    if device.type != "cpu":
        remedies += [("-s device=cpu", "to train on the CPU")]
    if run is not None:
        setting, purpose = (*remedies, ("", "once other programs have ended"))[0]
        return f"resume, {purpose}, with\n  chargpt train --resume {quoted(run)} {setting}".rstrip()
    if not remedies:
        return "end other programs, or make the model, its block or its batch smaller"
    return f"give {', or '.join(map(' '.join, remedies))}"


@contextlib.contextmanager
def explained_memory_errors(
    config: Config,
    corpus: Corpus,
    group: RankGroup,
    saved_run: Callable[[], Path | None] = lambda: None,
) -> Iterator[None]:
    """Raise DeviceError with a remedy where memory runs out.

    `saved_run` returns the run if training has saved a checkpoint of it with its settings.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sizes = corpus.tokenizer.vocab_size, group.world_size
        remedy = memory_remedy(config, *sizes, choose_device(config.device)[0], saved_run())
        raise DeviceError(f"there is not enough memory for training; {remedy}") from None
