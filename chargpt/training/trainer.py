"""The training loop. It yields a report a step; callers print, plot and stop.

for report in trainer.steps():
    ...
"""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from chargpt.config import Config
from chargpt.device import (
    ProcessGroup,
    choose_device,
    choose_dtype,
    dtype_name,
    make_deterministic,
    require_memory,
    tune_malloc,
)
from chargpt.errors import DivergedError
from chargpt.inference.evaluation import Evaluation, evaluate_tokens
from chargpt.inference.sampling import stream
from chargpt.store.checkpoint import Checkpoint
from chargpt.store.folder import TENSORBOARD, RunFolder
from chargpt.store.metrics import VALIDATION
from chargpt.store.state import RunState
from chargpt.text.corpus import Corpus, Split
from chargpt.training.estimate import memory_bytes
from chargpt.training.learner import Learner, micro_batch_size
from chargpt.training.progress import Progress, Report
from chargpt.training.schedule import rate_at
from chargpt.training.tracking import Tracker

METRICS_EVERY = 10  # steps between writes of metrics, each of which waits for the device
SAMPLE_LENGTH = 200  # characters of a sample along the way


class Trainer:
    """One training run of one model on one corpus.

    Args:
        config: resolved or not; `device` and `dtype` are resolved here and kept in `self.config`.
        corpus: the text; its splits must hold a block each.
        folder: where checkpoints and metrics go; None keeps nothing.
        saved: a checkpoint to go on from.
        group: the ranks that train together.

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
        saved: Checkpoint | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group = group or ProcessGroup()
        self.device, self.device_reason = choose_device(config.device)
        dtype, self.dtype_reason = choose_dtype(self.device, config.dtype)
        # ranks may measure different speeds: rank 0's choice is everyone's
        bfloat16 = self.group.broadcast(float(dtype == torch.bfloat16))
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # graphs are captured on the current one
        device_name = self.device.type if config.device == "auto" else config.device
        self.config = config.with_values({"device": device_name, "dtype": dtype_name(self.dtype)})
        self.corpus = corpus
        self.folder = folder if self.group.is_main else None
        self.progress = Progress()
        self.saved_step: int | None = None
        self.unsaved_config = False
        self.best_before: tuple[float, int | None] = (math.inf, None)
        self.trouble: str | None = None
        self.tracker: Tracker | None = None
        if self.folder is not None and config.track.tensorboard:
            self.tracker = Tracker(self.folder.path / TENSORBOARD, self.progress.step)
        corpus.require_blocks(self.config.model.block_size)
        micro_batch = micro_batch_size(self.config.train, self.group)
        wanted = memory_bytes(self.config, corpus.tokenizer.vocab_size, micro_batch)
        require_memory(wanted, "a model and batches of these sizes", self.device)
        if self.config.deterministic:
            make_deterministic(self.device)
        if self.device.type == "cpu":
            tune_malloc()
        self.learner = Learner(self.config, corpus, self.group, self.device, saved)
        self.model = self.learner.model
        if saved is not None:
            self._restore_progress(saved.state)
        self.started = time.perf_counter() - self.progress.seconds

    # -- the loop ---------------------------------------------------------------------------

    def steps(self) -> Iterator[Report]:
        """Yield a report after each step, the first (of a new run) before any update."""
        self.started = time.perf_counter() - self.progress.seconds
        self.learner.count_targets()
        if self.progress.step == 0:
            report = Report(0)
            self.evaluate(report)
            yield report
        while not self.finished:
            try:
                report = self.advance()
            except DivergedError as error:
                spent = self.progress.rollbacks >= self.config.train.rollbacks
                alone = self.folder is not None and self.group.size == 1
                if spent or not alone or self.saved_step is None:
                    raise
                report = self.roll_back(error.step)
            yield report
        if self.tracker is not None:
            self.tracker.close()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or patience ran out."""
        return self.progress.stopped_early or self.progress.step >= self.config.train.max_steps

    def advance(self) -> Report:
        """Do one step and what falls due after it."""
        train, step = self.config.train, self.progress.step
        report = Report(step + 1, rate_at(step, self.config.schedule, train.max_steps))
        report.loss = self.learner.accumulate_gradients(step)
        report.grad_norm = self.learner.clip_gradients()
        self.require_finite(report)
        self.learner.apply_update(step, report.rate)
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
            if report.sample is not None:
                self._record({"step": report.step, "sample": report.sample})
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
        self.learner.restore(saved, self.config.optim)
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
            loss = report.loss.item() if self.group.size == 1 else 0.0
            self._require_numbers(loss, report.grad_norm.item(), report.step, report.rate)

    def require_finite_weights(self, report: Report) -> None:
        """Check every weight.

        Raises:
            DivergedError: one is not finite.
        """
        if not self.learner.has_finite_weights():
            raise self._diverged("weights", report.step, report.rate)

    # -- what falls due ---------------------------------------------------------------------

    def evaluate(self, report: Report) -> None:
        """Measure the validation loss and note whether it is the best, or patience ran out."""
        self.write_metrics()
        if self.group.is_main:
            report.validation = self.measure("val", self.config.train.evaluate_characters)
            self._record({"step": report.step, VALIDATION: report.validation.nats_per_char})
        loss = report.validation.nats_per_char if report.validation else math.nan
        shared = self.group.broadcast(loss)
        progress = self.progress
        if report.step == 0:
            return  # what has learnt nothing is no candidate
        if not math.isfinite(shared):
            raise self._diverged("weights", report.step, report.rate)
        before = progress.best_loss, progress.best_step
        report.is_best = progress.note(report.step, shared, self.config.train.patience)
        if report.is_best:
            self.best_before = before

    def measure(self, split: Split, max_characters: int | None) -> Evaluation:
        """Return the loss on a split, of the averaged weights if there is an average."""
        with self.learner.averaged_weights():
            return evaluate_tokens(
                self.model,
                self.corpus.split(split),
                split=split,
                max_characters=max_characters,
                dtype=self.dtype,
            )

    def sample(self) -> str | None:
        """Return a short text drawn with the run's sampling settings."""
        if not self.group.is_main:
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
        with self.learner.averaged_weights():
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
        rows = self.group.all_reduce_mean(values).tolist()
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
        model, optimizer = self.learner.tensors()
        with self.tolerating_a_full_disk():
            folder = self.folder.save(
                config=self.config,
                tokenizer=self.corpus.tokenizer,
                state=self.state(),
                model=model,
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
        kept = (tensor for part in self.learner.tensors() for tensor in part.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def state(self) -> RunState:
        """Return the state that a checkpoint saves."""
        return RunState(
            **self.progress.facts(),
            corpus=self.corpus.key,
            text=self.corpus.name,
            threads=torch.get_num_threads(),
            world_size=self.group.size,
            torch=str(torch.__version__),
        )

    def _restore_progress(self, state: RunState) -> None:
        self.progress = Progress.of(state)
        self.saved_step = self.progress.step
        if self.folder is not None:
            with self.tolerating_a_full_disk():
                self.folder.metrics.truncate_after(self.progress.step)
            if self.tracker is not None:
                self.tracker.close()
                self.tracker = Tracker(self.tracker.folder, self.progress.step)

    def _record(self, record: dict[str, object]) -> None:
        if self.folder is not None:
            elapsed = round(time.perf_counter() - self.started, 3)
            with self.tolerating_a_full_disk():
                self.folder.metrics.append({**record, "seconds": elapsed})
            if self.tracker is not None:
                self.tracker.add(record)

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
