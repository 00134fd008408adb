"""The training loop. It yields a report a step; callers print, plot and stop.

    for report in trainer.steps():
        ...

A step's samples, dropout and learning rate are pure functions of (seed, step), so a resumed run
equals the uninterrupted one bit for bit and no generator's state is stored.
Shapes in this file: B = sequences of a micro-batch, T = block size, V = vocabulary.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from chargpt.config import Config
from chargpt.device import (
    World,
    capture,
    choose_device,
    choose_dtype,
    dtype_name,
    keep_freed_memory,
    make_deterministic,
    require_memory,
)
from chargpt.errors import ConfigError, DivergedError
from chargpt.inference.evaluation import Evaluation, counted_ngram, evaluate_tokens
from chargpt.inference.sampling import stream
from chargpt.models import LanguageModel, build_model
from chargpt.models.ngram import NGramLM
from chargpt.store.run import RunFolder
from chargpt.store.saved import Saved
from chargpt.store.tensors import fill
from chargpt.text.batches import Batches
from chargpt.text.corpus import Corpus, Split
from chargpt.training.estimate import memory_bytes
from chargpt.training.optim import Optimizer
from chargpt.training.schedule import rate_at

METRICS_EVERY = 10  # steps between writes of metrics, each of which waits for the device
SAMPLE_LENGTH = 200  # characters of a sample along the way


@dataclass
class Report:
    """What one step did. `loss` and `grad_norm` stay on the device until someone looks."""

    step: int
    rate: float = 0.0
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    validation: Evaluation | None = None
    is_best: bool = False
    sample: str | None = None
    saved: Path | None = None
    note: str | None = None  # what the user should hear of


@dataclass
class Progress:
    """How far a run is: what a checkpoint's state keeps beside the tensors."""

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float = math.inf
    evaluations_since_best: int = 0
    stopped_early: bool = False
    rollbacks: int = 0
    pending: list[tuple[int, float, Tensor, Tensor]] = field(default_factory=list)


class Trainer:
    """One training run of one model on one corpus.

    Args:
        config: resolved or not; `device` and `dtype` are resolved here and kept in `self.config`.
        corpus: the text; its splits must hold a block each.
        folder: where checkpoints and metrics go; None keeps nothing.
        saved: a checkpoint to go on from.
        world: the ranks that train together.

    Raises:
        ConfigError: the batch does not divide over ranks and micro-batches.
        TextError: a split is shorter than a block.
        DeviceError: the device asked for is not there, or has too little memory.

    Attributes:
        saved_step: of the newest checkpoint.
        trouble: why the disk refused the last thing that was to be written, if it did. Training
            goes on without, and tries again when the next save is due.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        *,
        folder: RunFolder | None = None,
        saved: Saved | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.device, self.device_reason = choose_device(config.device)
        dtype, self.dtype_reason = choose_dtype(self.device, config.dtype)
        # ranks may measure different speeds: rank 0's choice is everyone's
        bfloat16 = self.world.from_main(float(dtype == torch.bfloat16))
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # graphs are captured on the current one
        device_name = self.device.type if config.device == "auto" else config.device
        self.config = config.with_values({"device": device_name, "dtype": dtype_name(self.dtype)})
        self.corpus = corpus
        self.folder = folder if self.world.is_main else None
        self.progress = Progress()
        self.saved_step: int | None = None
        self.unsaved_config = False
        self.best_before: tuple[float, int | None] = (math.inf, None)
        self.trouble: str | None = None
        self.micro_batch = self._micro_batch_size()
        corpus.require_blocks(self.config.model.block_size)
        vocab_size = corpus.tokenizer.vocab_size
        wanted = memory_bytes(self.config, vocab_size, self.micro_batch)
        require_memory(wanted, "a model and batches of these sizes", self.device)
        if self.config.deterministic:
            make_deterministic(self.device)
        if self.device.type == "cpu":
            keep_freed_memory()

        torch.manual_seed(self.config.seed)
        model = build_model(self.config.model, vocab_size)
        if saved is not None:
            fill(model, saved.model, saved.folder)  # with an average, the raw ones stand apart
            fill(model, saved.raw_model, saved.folder)
        self.model: LanguageModel = model.to(self.device)
        self.optimizer = Optimizer(self.model, self.config.optim)
        self.average = self._start_average(saved)
        if saved is not None:
            self._restore_progress(saved.state)
            self.optimizer.load_tensors(saved.optimizer)
        self.counted: NGramLM | None = None  # until the steps begin: counting takes a moment
        self.replica = self._replicate()
        train = self.config.train
        self.batches = Batches(
            corpus.split("train"), self.model.block_size, train.batch_size, self.config.seed
        )
        if self.device.type != "cpu":
            self.batches.keep_on(self.device)
        if self.device.type == "cuda" and self.world.size == train.accumulate == 1:
            capture(self.model, self.batches.at(0)[:, :-1].to(self.device), self.dtype)
        self.started = time.perf_counter() - self.progress.seconds

    # -- the loop ---------------------------------------------------------------------------

    def steps(self) -> Iterator[Report]:
        """Yield a report after each step, the first (of a new run) before any update."""
        self.started = time.perf_counter() - self.progress.seconds
        if self.config.train.ngram_targets:
            self.counted = counted_ngram(self.corpus).to(self.device)
        if self.progress.step == 0:
            report = Report(0)
            self.evaluate(report)
            yield report
        while not self.finished:
            try:
                report = self.advance()
            except DivergedError as error:
                spent = self.progress.rollbacks >= self.config.train.rollbacks
                alone = self.folder is not None and self.world.size == 1
                if spent or not alone or self.saved_step is None:
                    raise
                report = self.roll_back(error.step)
            yield report

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or patience ran out."""
        return self.progress.stopped_early or self.progress.step >= self.config.train.max_steps

    def advance(self) -> Report:
        """Do one step and what falls due after it."""
        train, step = self.config.train, self.progress.step
        report = Report(step + 1, rate_at(step, self.config.schedule, train.max_steps))
        report.loss = self.accumulate_gradients(step)
        report.grad_norm = self.clip_gradients()
        self.require_finite(report)
        self.apply_update(step, report.rate)
        self.progress.step += 1
        self.progress.pending.append((step + 1, report.rate, report.loss, report.grad_norm))
        if self.due(METRICS_EVERY):
            self.write_metrics()
        if self.due(train.evaluate_every):
            self.evaluate(report)
        if report.is_best or self.unsaved_config or self.due(train.save_every):
            report.saved = self.save(is_best=report.is_best)
        if train.sample_every and self.due(train.sample_every):
            self.write_metrics()  # which finds a loss that went bad
            self.require_finite_weights(report)
            report.sample = self.sample()
        return report

    def change_config(self, config: Config) -> None:
        """Go on with another length or other rates, which the run's folder is told."""
        self.config = config
        self.unsaved_config = True  # until the next step: resuming goes by the checkpoint's config
        if self.folder is not None:
            with self.tolerating_a_full_disk():
                self.folder.write_config(config)

    def conclude(self) -> None:
        """Evaluate and save now, as the last step does, though steps are left."""
        if self.saved_step != self.progress.step:
            report = Report(self.progress.step)
            self.evaluate(report)
            self.save(is_best=report.is_best)

    def roll_back(self, failed: int) -> Report:
        """Return to the last checkpoint and go on from there at half the learning rates.

        Args:
            failed: the step whose numbers were bad.
        """
        assert self.folder is not None
        rollbacks = self.progress.rollbacks + 1
        saved, _ = self.folder.load("latest")
        rates = {
            "optim.lr": self.config.optim.lr / 2,
            "optim.matrix_lr": self.config.optim.matrix_lr / 2,
        }
        self.change_config(self.config.with_values(rates))
        fill(self.model, saved.raw_model, saved.folder)
        self.model.zero_grad(set_to_none=True)
        self.average = self._start_average(saved)
        self.optimizer = Optimizer(self.model, self.config.optim)
        self.optimizer.load_tensors(saved.optimizer)
        self._restore_progress(saved.state)
        self.progress.rollbacks = rollbacks
        step = self.progress.step
        self._record({"step": step, "rolled_back_from": failed, **rates})
        return Report(
            step,
            note=f"numbers went bad at step {failed:,}: back to step {step:,}, at half the rates "
            f"(optim.lr {self.config.optim.lr:.3g}, matrix_lr {self.config.optim.matrix_lr:.3g})",
        )

    def due(self, every: int) -> bool:
        """Return whether something done every so many steps is due now; the last step always."""
        return self.progress.step % every == 0 or self.finished

    def accumulate_gradients(self, step: int) -> Tensor:
        """Run the step's micro-batches forward and backward; return this rank's mean loss."""
        accumulate = self.config.train.accumulate
        first = self.world.rank * accumulate * self.micro_batch
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
            expected = self.counted.shares(block[:, :-1])  # (B, T, V)
        counted = -(expected * guesses).sum(dim=-1).mean()
        share = self.config.train.ngram_targets
        return (1 - share) * nats + share * counted, nats

    def clip_gradients(self) -> Tensor:
        """Bound the gradient's norm; return what it was."""
        clip = self.config.train.clip_norm or math.inf
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)

    def require_finite(self, report: Report) -> None:
        """Stop before an update would carry what is no number into the weights.

        Elsewhere than on a CPU a look would stall the device, so there it is `write_metrics` that
        looks: a few steps later, yet before anything is saved.

        Raises:
            DivergedError: the loss or the gradient is not finite.
        """
        assert report.loss is not None
        assert report.grad_norm is not None
        if self.device.type == "cpu":
            # among several ranks only the norm is everyone's, so that all stop or none does
            loss = report.loss.item() if self.world.size == 1 else 0.0
            self._require_numbers(loss, report.grad_norm.item(), report.step, report.rate)

    def require_finite_weights(self, report: Report) -> None:
        """Check every weight.

        Raises:
            DivergedError: one is not finite.
        """
        norms = torch._foreach_norm(list(self.model.parameters()))
        if not math.isfinite(torch.stack(norms).sum().item()):
            raise self._diverged("weights", report.step, report.rate)

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
            place = f"{self.config.seed}/{step}/{self.world.rank}/{micro}"
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

    # -- what falls due ---------------------------------------------------------------------

    def evaluate(self, report: Report) -> None:
        """Measure the validation loss and note whether it is the best, or patience ran out."""
        self.write_metrics()
        if self.world.is_main:
            report.validation = self.measure("val", self.config.train.evaluate_characters)
            self._record(
                {"step": report.step, "val_nats_per_char": report.validation.nats_per_char}
            )
        loss = report.validation.nats_per_char if report.validation else math.nan
        shared = self.world.from_main(loss)
        progress = self.progress
        if report.step == 0:
            return  # what has learnt nothing is no candidate
        if not math.isfinite(shared):
            raise self._diverged("weights", report.step, report.rate)
        if shared < progress.best_loss:
            self.best_before = progress.best_loss, progress.best_step
            progress.best_loss, progress.best_step = shared, report.step
            progress.evaluations_since_best = 0
            report.is_best = True
        else:
            progress.evaluations_since_best += 1
            patience = self.config.train.patience
            progress.stopped_early = (
                patience is not None and progress.evaluations_since_best >= patience
            )

    def measure(self, split: Split, max_characters: int | None) -> Evaluation:
        """Return the loss on a split, of the averaged weights if there is an average."""
        with self.averaged_weights():
            return evaluate_tokens(
                self.model,
                self.corpus.split(split),
                split=split,
                max_characters=max_characters,
                dtype=self.dtype,
            )

    def sample(self) -> str | None:
        """Return a short text drawn with the run's sampling settings."""
        if not self.world.is_main:
            return None
        options = self.config.sample.model_copy(
            update={
                "length": min(SAMPLE_LENGTH, self.config.sample.length),
                "num_samples": 1,
                "seed": self.config.seed,
            }
        )
        tokenizer = self.corpus.tokenizer
        prompt = tokenizer.encode(options.prompt, unknown="replace")
        unigram = self.corpus.token_counts("train")
        with self.averaged_weights():
            pieces = stream(self.model, tokenizer, prompt, options, unigram=unigram)
            return options.prompt + "".join(piece for (piece,) in pieces)

    def write_metrics(self) -> None:
        """Write a line for each step since the last time.

        Raises:
            DivergedError: a loss or a gradient is not finite.
        """
        pending = self.progress.pending
        if not pending:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, _, loss, norm in pending])
        rows = self.world.mean(values).tolist()
        for (step, rate, _, _), (loss, norm) in zip(pending, rows, strict=True):
            self._require_numbers(loss, norm, step, rate)
            self._record({"step": step, "loss": loss, "grad_norm": norm, "rate": rate})
        pending.clear()

    def save(self, *, is_best: bool = False) -> Path | None:
        """Commit a checkpoint of this moment; None if nothing is kept, or it is there already.

        Raises:
            DivergedError: a number in the weights is not finite: they are not saved.
        """
        self.write_metrics()
        if self.folder is None or self.saved_step == self.progress.step:
            return None
        self.unsaved_config = False  # if the disk refuses, the next save that is due will do
        self.progress.seconds = time.perf_counter() - self.started
        self.require_finite_weights(Report(self.progress.step))
        raw = dict(self.model.state_dict())
        optimizer = self.optimizer.state_tensors()
        weights = raw
        if self.average is not None:
            optimizer |= {f"raw.{name}": tensor for name, tensor in raw.items()}
            weights = self.average
        with self.tolerating_a_full_disk():
            folder = self.folder.save(
                config=self.config,
                tokenizer=self.corpus.tokenizer,
                state=self.state(),
                model=weights,
                optimizer=optimizer,
                is_best=is_best,
            )
            self.saved_step, self.trouble = self.progress.step, None
            return folder
        if is_best:  # it is lost, so the one before it is the best that there is
            self.progress.best_loss, self.progress.best_step = self.best_before
        return None

    @contextlib.contextmanager
    def tolerating_a_full_disk(self) -> Iterator[None]:
        """Go on without what the disk refuses, but remember that it did."""
        try:
            yield
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def checkpoint_bytes(self) -> int:
        """Return how much of the disk a checkpoint takes, nearly."""
        kept = [*self.model.state_dict().values(), *self.optimizer.state_tensors().values()]
        kept += (self.average or {}).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def state(self) -> dict[str, Any]:
        """Return the plain facts that a checkpoint keeps."""
        progress = self.progress
        return {
            "step": progress.step,
            "seconds": round(progress.seconds, 3),
            "best_step": progress.best_step,
            "best_nats_per_char": progress.best_loss if progress.best_step is not None else None,
            "evaluations_since_best": progress.evaluations_since_best,
            "stopped_early": progress.stopped_early,
            "rollbacks": progress.rollbacks,
            "corpus": self.corpus.key,
            "text": self.corpus.name,
            "threads": torch.get_num_threads(),
            "world_size": self.world.size,
            "torch": str(torch.__version__),
        }

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the moving average in the model's place for a while."""
        if self.average is None:
            yield
            return
        raw = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._set_weights(self.average)
        try:
            yield
        finally:
            self._set_weights(raw)

    # -- before the loop --------------------------------------------------------------------

    def _micro_batch_size(self) -> int:
        train = self.config.train
        parts = train.accumulate * self.world.size
        if train.batch_size % parts:
            raise ConfigError(
                f"train.batch_size {train.batch_size} does not divide over {self.world.size} "
                f"processes x {train.accumulate} micro-batches; make it a multiple of {parts}"
            )
        return train.batch_size // parts

    def _start_average(self, saved: Saved | None) -> dict[str, Tensor] | None:
        if not self.config.train.ema:
            return None
        own = dict(self.model.named_parameters())
        source = saved.model if saved is not None else own
        # in the model's own order: the update walks both side by side
        return {name: source[name].detach().clone().to(self.device) for name in own}

    def _restore_progress(self, state: dict[str, Any]) -> None:
        best = state.get("best_nats_per_char")
        self.progress = Progress(
            step=int(state["step"]),
            seconds=float(state.get("seconds", 0)),
            best_step=state.get("best_step"),
            best_loss=math.inf if best is None else float(best),
            evaluations_since_best=int(state.get("evaluations_since_best", 0)),
            rollbacks=int(state.get("rollbacks", 0)),
        )
        self.saved_step = self.progress.step
        if self.folder is not None:
            with self.tolerating_a_full_disk():
                self.folder.metrics.forget_after(self.progress.step)

    def _replicate(self) -> torch.nn.Module:
        if self.world.size == 1:
            return self.model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(self.model, device_ids=devices, broadcast_buffers=False)

    @torch.no_grad()
    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])

    def _record(self, record: dict[str, object]) -> None:
        if self.folder is not None:
            elapsed = round(time.perf_counter() - self.started, 3)
            with self.tolerating_a_full_disk():
                self.folder.metrics.append({**record, "seconds": elapsed})

    def _require_numbers(self, loss: float, norm: float, step: int, rate: float) -> None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._diverged("gradient" if math.isfinite(loss) else "loss", step, rate)

    def _diverged(self, what: str, step: int, rate: float) -> DivergedError:
        """Return the error that says where numbers went bad, and what to do."""
        optim = self.config.optim
        kept = (
            "there is no checkpoint yet, so start again with"
            if self.saved_step is None
            else f"the last good checkpoint is step {self.saved_step:,}; --resume the run with"
        )
        are = "are" if what == "weights" else "is"
        words = (
            f"the {what} {are} no longer finite at step {step:,} (rates {optim.lr:g} and "
            f"{optim.matrix_lr:g}, times {rate:.3g}), and nothing of that was saved: {kept} lower "
            f"rates, such as -s optim.lr={optim.lr / 4:g} -s optim.matrix_lr="
            f"{optim.matrix_lr / 4:g}, or with -s train.rollbacks=3 to have that done by itself"
        )
        return DivergedError(words, step)
