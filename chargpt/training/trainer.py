"""The training loop. It yields a report after each step; the caller prints, plots and stops.

for report in trainer.steps():
    ...
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from chargpt.config import Config
from chargpt.device import choose_device, choose_dtype, configure, default_threads, dtype_name
from chargpt.distributed import RankGroup
from chargpt.errors import DeviceError, DivergedError, RunError, UnsavedError
from chargpt.files import expand_user, quoted
from chargpt.inference.evaluation import Baselines, Evaluation
from chargpt.log import logger
from chargpt.store.checkpoint import Checkpoint, RunState
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import VALIDATION
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus
from chargpt.training.deadline import NOTED_CHANGE, PLANNED_KEYS, Pace, with_max_steps
from chargpt.training.learner import Learner
from chargpt.training.optim import lr_factor_at
from chargpt.training.writer import RunWriter

if TYPE_CHECKING:
    from chargpt.training.teachers import Teachers

METRICS_EVERY = 10  # steps between writes of the metrics
METRICS_SECONDS = 0.5  # least time between two writes on a GPU, where reading them synchronises
SPEED_SECONDS = 1.0  # over which the speed is measured
# training time that a crash may cost, in seconds and in times that saving takes (under a hundredth)
SAVE_SECONDS, SAVE_RATIO = 60, 100
MAX_SKIPPED = 30  # steps in a row, in float16: by then even a loss scale of 2^-14 overflows


@dataclass
class StepReport:
    """The results of one step. `loss` and `grad_norm` stay on the device until they are read."""

    step: int  # number of updates done
    max_steps: int  # planned updates in all
    lr_factor: float = 0.0  # on the learning rates in this step
    loss: Tensor | None = None  # mean over this rank's part of the batch, in nats per character
    grad_norm: Tensor | None = None  # before clipping; -1 if float16 skips the step
    speed: float = 0.0  # characters per second of training; 0 until it is measured
    validation: Evaluation | None = None  # of the validation split, if it was due
    validation_seconds: float = 0.0  # that it took
    is_best: bool = False  # whether that is the lowest validation loss so far
    sample: str | None = None  # generated text, if it was due


class Trainer:
    """A training run: a learner (model, optimizer, batches) and a writer.

    Args:
        config: `device`, `dtype` and the paths of teachers are resolved here; the result is
            `self.config`.
        corpus: the text; its training and validation splits must hold a block.
        folder: of checkpoints and metrics; None writes nothing.
        saved: a checkpoint to continue from.
        group: the ranks that train together.
        baselines: those of the text, if already fitted; their n-gram model makes soft targets.
        base_run: the run that `train.from_run` names.
        teachers: those of `train.teachers`, if already loaded.

    Raises:
        ConfigError: the batch does not divide over ranks and micro-batches, or TensorBoard is not
            installed.
        RunError: the checkpoint is of another model, or its metrics cannot be continued.
        TextError: a split is shorter than a block.
        DeviceError: the device is missing, or has too little memory.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        *,
        folder: RunFolder | None = None,
        saved: Checkpoint | None = None,
        group: RankGroup | None = None,
        baselines: Baselines | None = None,
        base_run: Run | None = None,
        teachers: "Teachers | None" = None,
    ) -> None:
        self.group = group or RankGroup()
        self.device, self.device_reason = choose_device(config.device)
        self._require_same_device()
        configure(self.device, deterministic=config.deterministic)
        if self.device.index is not None:
            # CUDA graphs are captured on the current device
            torch.accelerator.set_device_index(self.device.index)
        dtype, self.dtype_reason = choose_dtype(self.device, config.dtype)
        # each rank measures its own speed: rank 0 decides
        resolved = {
            "device": self.device.type if config.device == "auto" else config.device,
            "dtype": self.group.broadcast_text(dtype_name(dtype)),
            "train.teachers": [str(expand_user(p).absolute()) for p in config.train.teachers],
        }
        self.config = config.with_values(resolved)
        self.corpus = corpus
        corpus.require_blocks(config.model.block_size)
        if self.device.type == "cpu" and config.threads is not None:
            default_threads()  # before it is changed
            torch.set_num_threads(config.threads)
        self.folder = folder if self.group.is_main else None
        self.learner = Learner(
            self.config, corpus, self.group, self.device, saved, baselines, base_run, teachers
        )
        if self.folder is not None and (used := self.learner.teachers) and used.foreign:
            logger.warning(
                f"{' and '.join(used.foreign)} of train.teachers had another text, or other "
                "settings of it, and may know the validation split, whose loss is then too low"
            )
        self.model, self.dtype = self.learner.model, self.learner.dtype
        self.writer = RunWriter(self.folder, tensorboard=self.config.track.tensorboard)
        base = base_run.fingerprint().hex() if base_run and config.optim.l2_sp else None
        self.state = RunState(
            step=0,
            metrics_have_checksums=True,
            base_fingerprint=base,
            teacher_fingerprint=self.learner.teacher_fingerprint,
        )
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []  # metrics still on the device
        self.metrics_written = -math.inf  # time
        self.saved_at = math.inf  # time; `steps` sets it
        self.saving_seconds = 0.0  # for which the last save kept the training waiting
        self.last_loss: float | None = None  # of the last step whose loss was read
        self.n_skipped = self.n_skipped_in_a_row = 0  # steps whose gradients overflowed float16
        self.last_validation: StepReport | None = None
        self.config_is_unsaved = False
        self.stopped_by: Literal["deadline", "signal"] | None = None  # before the last step
        if saved is not None:
            self._continue_from(saved, saved.state)
            if (error := self.writer.errors.get("metrics")) is not None:
                raise RunError(  # appending now would repeat steps
                    f"the metrics of the run cannot be continued ({error}); check the disk and the "
                    "permissions, then try again"
                )
        self.first_step, self.first_config = self.state.step, self.config  # as started or resumed
        self.started = time.perf_counter() - self.state.seconds
        self.speed = 0.0
        self.speed_since = self.state.step, self.started

    def _require_same_device(self) -> None:
        """Raise DeviceError unless all ranks have devices of one kind, which can communicate."""
        if self.device.type == "mps" and self.group.world_size > 1:
            raise DeviceError(
                "an Apple GPU trains with one process; start without torchrun, or set device to cpu"
            )
        kind = self.group.broadcast_text(self.device.type)
        if self.group.all_reduce_any(kind != self.device.type):
            raise DeviceError(
                f"the processes have different devices, such as {kind} of rank 0; set device, or "
                "see what is wrong with a GPU by `chargpt doctor`"
            )

    # -- the loop ---------------------------------------------------------------------------

    def steps(
        self, pace: Pace | None = None, should_stop: Callable[[StepReport], bool] = lambda _: False
    ) -> Iterator[StepReport]:
        """Yield a report after each step; in a new run, first one before any update.

        Args:
            pace: re-plans the run from its measured speed and stops it at the deadline.
            should_stop: called with each report. If it returns true on any rank, the run is saved
                and the iteration ends.

        Raises:
            DivergedError: the loss, a gradient or a weight is not finite.
            UnsavedError: the last checkpoint, also that of a stop, or the metrics could not be
                written.
        """
        self.started = time.perf_counter() - self.state.seconds
        self.saved_at = time.perf_counter()
        self.speed_since = self.state.step, self.saved_at
        if pace is not None:
            pace.start(self.config, self.state.step)
        had_errors = False
        self.learner.warn_of_failed_capture()
        try:
            for report in self._reports():
                has_moved = self.folder is not None and self.folder.moved_from is not None
                stops, now = self.group.agree(should_stop(report) or has_moved, time.perf_counter())
                if pace is not None and self.group.world_size > 1:
                    pace.set_time(now)
                if stops and not self.finished:
                    self.stopped_by = "signal"
                    self._save()
                elif not self.finished and pace is not None:
                    self._replan_or_stop(pace, report)
                is_last = self.finished or self.stopped_by is not None
                if is_last:
                    self._finish_saving()
                errors = self.writer.errors.copy()
                if errors and not had_errors and not is_last:
                    what, error = next(iter(errors.items()))
                    logger.warning(
                        f"cannot write the {what} of the run at step {report.step:,} ({error}); "
                        f"{self.last_checkpoint}; training continues: free some space or correct "
                        "the permissions"
                    )
                had_errors = bool(errors)
                report.max_steps = self.config.train.max_steps
                self._measure_speed(report)
                yield report
                if self.stopped_by is not None:
                    break
        finally:
            self._finish_saving()
        self.writer.close()
        if self.n_skipped and self.group.is_main:
            logger.info(
                f"steps skipped, as their gradients overflowed float16: {self.n_skipped:,}; a few "
                "at the start, and one in a thousand later, are normal"
            )
        self._require_saved()

    def _reports(self) -> Iterator[StepReport]:
        if self.state.step == 0 and self.state.best_step is None:
            report = StepReport(0, self.config.train.max_steps)
            self.validate(report)
            yield report
        while not self.finished:
            try:
                report = self.train_step()
            except DivergedError as error:
                if not self._can_roll_back():
                    raise
                report = self.roll_back(error.step)
            yield report

    @property
    def finished(self) -> bool:
        """Whether all steps are done or early stopping ended the run."""
        return self.state.stopped_early or self.state.step >= self.config.train.max_steps

    def train_step(self) -> StepReport:
        """Run one step and whatever is due after it."""
        train, step = self.config.train, self.state.step
        lr_factor = lr_factor_at(step, self.config.schedule, train.max_steps)
        report = StepReport(step + 1, train.max_steps, lr_factor, speed=self.speed)
        if step in train.students:
            self.learner.start_student(train.students.index(step) + 1, self.config.optim)
        loss_per_token = self.learner.accumulate_gradients(step)
        report.loss = loss_per_token / self.corpus.characters_per_token
        report.grad_norm = self.learner.clip_gradients()
        if self.device.type == "cpu":
            # elsewhere reading them would synchronise; `write_metrics` checks before each save
            loss, norm = report.loss.item(), report.grad_norm.item()
            # with several ranks only the norm, which is the same on all: they stop together
            self._require_finite(loss if self.group.world_size == 1 else 0.0, norm, step + 1)
            self.last_loss = loss
        self.learner.apply_update(step - self.config.model_start(step + 1), lr_factor)
        self.state = replace(self.state, step=step + 1)
        self.pending.append((step + 1, lr_factor, report.loss, report.grad_norm))
        if self._is_due(METRICS_EVERY) and self._may_synchronize():
            self.write_metrics()
        if self._is_due(train.evaluate_every):
            self.validate(report)
        is_due = report.is_best or self.config_is_unsaved or self._is_due(train.save_every)
        if is_due or self._is_long_unsaved():
            self._save()
        if train.sample_every and self._is_due(train.sample_every):
            self._sample(report)
        return report

    def _is_long_unsaved(self) -> bool:
        """Return, the same on all ranks, whether to save for the time since the last save."""
        if self.group.world_size > 1 and not self._is_due(METRICS_EVERY):
            return False
        waited = time.perf_counter() - self.saved_at
        is_long = waited >= max(SAVE_SECONDS, SAVE_RATIO * self.saving_seconds)
        return self.group.all_reduce_any(is_long and self.folder is not None)

    def _may_synchronize(self) -> bool:
        """Return, the same on all ranks, whether the metrics may be read from the device now."""
        waited = time.perf_counter() - self.metrics_written
        return self.device.type == "cpu" or self.group.all_reduce_any(waited >= METRICS_SECONDS)

    def change_config(self, config: Config) -> None:
        """Continue with another number of steps or threads, or other learning rates."""
        self.config = config
        # resuming reads the checkpoint's config: save it next step
        self.config_is_unsaved = True
        self.writer.write_config(config)

    def _replan_or_stop(self, pace: Pace, report: StepReport) -> None:
        """Stop at the deadline, or adjust the run to its speed where that is due."""
        if report.step:  # the first validation is a warm-up
            pace.observe_validation(report.validation_seconds)
        if not pace.deadline.is_over(report.step):
            config = pace.adjusted(self.config, report.step, self.speed)
            if config is not self.config:
                self.change_config(config)
            if not self.finished:  # it is if there is no time for a student
                return
        else:
            self.stopped_by = "deadline"
            step, max_steps = report.step, self.config.train.max_steps
            is_nearly_done = step >= (1 - NOTED_CHANGE) * max_steps
            if is_nearly_done and self.config.schedule.kind == "wsd":
                self.change_config(with_max_steps(self.config, step, step))
            else:
                logger.warning(
                    f"the machine slowed down: stopped at step {step:,} of {max_steps:,}; resume "
                    "the run, or give a longer budget"
                )
        if report.validation is None:
            self.validate(report)
        self._save()

    def _measure_speed(self, report: StepReport) -> None:
        """Add the speed, over the last second or more, to a report."""
        now = time.perf_counter()
        step, since = self.speed_since
        if now - since >= SPEED_SECONDS and report.step > step:
            n_tokens = (report.step - step) * self.config.tokens_per_step
            self.speed = n_tokens * self.corpus.characters_per_token / (now - since)
            self.speed_since = report.step, now
        report.speed = self.speed

    def _is_due(self, every: int) -> bool:
        """Return whether work done every `every` steps is due; after a model's last one it is."""
        step, config = self.state.step, self.config
        is_last = self.finished or step in config.train.students
        return (step - config.model_start(step)) % every == 0 or is_last

    # -- validation -------------------------------------------------------------------------

    def validate(self, report: StepReport) -> None:
        """Evaluate the validation split; note whether it is the best, and whether to stop."""
        self._finish_saving()
        self.write_metrics()
        max_tokens, started = self.config.train.evaluation_tokens, time.perf_counter()
        report.validation = self.learner.evaluate("val", max_tokens)
        self.last_validation = report
        report.validation_seconds = self.group.broadcast(time.perf_counter() - started)
        nats = report.validation.nats_per_char
        self._record({"step": report.step, VALIDATION: nats})
        if not math.isfinite(nats):
            raise self._diverged("weights are", report.step)
        if report.step == 0:  # a checkpoint is the best only if it beats the weights at the start
            self.state = replace(self.state, best_step=0, best_nats_per_char=nats)
            return
        best, patience = self.state.best_nats_per_char, self.config.train.patience
        # only rank 0 knows which checkpoints were saved
        report.is_best = bool(self.group.broadcast(float(best is None or nats < best)))
        waited = 0 if report.is_best else self.state.evaluations_since_best + 1
        stops = patience is not None and waited >= patience
        self.state = replace(self.state, evaluations_since_best=waited, stopped_early=stops)

    def float32_validation(self, step: int) -> Evaluation | None:
        """Return the validation after a step, if it was the last one and ran in float32."""
        last = self.last_validation
        if self.dtype != torch.float32 or last is None or last.step != step:
            return None
        return last.validation

    def _sample(self, report: StepReport) -> None:
        """Add a generated text to a report and to the metrics."""
        self.write_metrics()  # checks the losses so far
        self._require_finite_weights(report.step)
        if self.group.is_main:
            report.sample = self.learner.sample(self.config.sample)
            self._record({"step": report.step, "sample": report.sample})

    # -- metrics and checkpoints ------------------------------------------------------------

    def write_metrics(self) -> None:
        """Write the pending metrics of each step.

        Raises:
            DivergedError: a loss or a gradient norm is not finite.
        """
        self.metrics_written = time.perf_counter()
        if not self.pending:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, _, loss, norm in self.pending])
        rows = (self.group.all_reduce_sum(values) / self.group.world_size).tolist()
        records: list[dict[str, object]] = []
        try:
            for (step, factor, _, _), (loss, norm) in zip(self.pending, rows, strict=True):
                if is_skipped := norm < 0:
                    norm, factor, self.n_skipped = 0.0, 0.0, self.n_skipped + 1
                self.n_skipped_in_a_row = self.n_skipped_in_a_row + 1 if is_skipped else 0
                if self.n_skipped_in_a_row == MAX_SKIPPED:
                    norm = math.inf
                self._require_finite(loss, norm, step)
                records.append({"step": step, "loss": loss, "grad_norm": norm, "lr_factor": factor})
                self.last_loss = loss
        finally:
            self._record(*records)
        self.pending.clear()

    def save(self) -> Path | None:
        """Commit a checkpoint of this step, between steps.

        Returns:
            Its folder; None if the write failed, or another rank writes it.

        Raises:
            RunError: the trainer has no folder, or the text of a resumed run is damaged.
            DivergedError: a weight is not finite; nothing is saved.
        """
        if self.folder is None and self.group.is_main:
            raise RunError("this trainer has no folder to save in; create it with folder=")
        self._save()
        self._finish_saving()
        self.writer.record()
        return self.writer.newest if self.writer.saved_step == self.state.step else None

    def _save(self) -> None:
        """Commit a checkpoint of this step; its validation, if it had one, decides the best.

        From a GPU it is written in the background. Raises what `save` does.
        """
        began = time.perf_counter()
        self._finish_saving()
        self.write_metrics()
        state, last = self.state, self.last_validation
        if last is not None and (last.step, last.is_best) == (state.step, True):
            assert last.validation is not None
            nats = last.validation.nats_per_char
            state = replace(state, best_step=state.step, best_nats_per_char=nats)
        is_new_best = state.best_step != self.state.best_step
        is_new = self.writer.saved_step != state.step or is_new_best or self.config_is_unsaved
        self.config_is_unsaved = False  # if the disk refuses, the next due save will include it
        if self.folder is None or not is_new:
            self.state = state
            return
        self._require_finite_weights(state.step)
        self.corpus.require_intact()
        state = replace(
            state,
            seconds=self._seconds(),
            corpus_key=self.corpus.key,
            text_name=self.corpus.name,
            threads=torch.get_num_threads(),
            world_size=self.group.world_size,
            torch=str(torch.__version__),
        )
        tensors, tokenizer = self.learner.state_dicts(), self.corpus.tokenizer
        self.writer.save(self.config, tokenizer, state, tensors)
        self.saved_at = time.perf_counter()
        self.saving_seconds = self.saved_at - began

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written."""
        saved = self.writer.finish()
        if saved is not None:  # a best that was not saved is not the best
            self.state = replace(
                self.state,
                seconds=saved.seconds,
                best_step=saved.best_step,
                best_nats_per_char=saved.best_nats_per_char,
            )

    @property
    def save_failure(self) -> str | None:
        """Why the checkpoint of this step or the metrics could not be written, in a phrase."""
        step, errors = self.state.step, self.writer.errors
        if self.folder is not None and "checkpoint" in errors and self.writer.saved_step != step:
            return f"cannot save step {step:,} of {self.folder.path} ({errors['checkpoint']})"
        if self.folder is not None and "metrics" in errors:
            return f"cannot write the metrics of {self.folder.path} ({errors['metrics']})"
        return None

    def _require_saved(self) -> None:
        """Raise an UnsavedError if the last checkpoint or metrics could not be written."""
        if "metrics" in self.writer.errors:
            self.writer.record()  # the error may have been one of the moment
        if self.folder is None or (failure := self.save_failure) is None:
            return
        remedy, saved_step = "free some space or correct the permissions", self.writer.saved_step
        if saved_step == self.state.step:
            raise UnsavedError(
                f"{failure}, so that its curves lack the last steps; its checkpoint of step "
                f"{saved_step:,} is saved: {remedy} before it is trained on"
            )
        again = "train again"
        if saved_step is not None:
            again = f"resume with\n  chargpt train --resume {quoted(self.folder.path)}"
        raise UnsavedError(f"{failure}; {self.last_checkpoint}; {remedy}, then {again}")

    @property
    def last_checkpoint(self) -> str:
        """The step of the newest checkpoint, in a phrase."""
        step = self.writer.saved_step
        return "there is no checkpoint" if step is None else f"the last checkpoint is step {step:,}"

    def checkpoint_bytes(self) -> int:
        """Return the approximate size of a checkpoint in bytes."""
        tensors = (tensor for part in self.learner.state_dicts() for tensor in part.values())
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.config.train.students and self.learner.teacher is None:  # later ones hold a teacher
            n_bytes += sum(parameter.nbytes for parameter in self.model.parameters())
        return n_bytes

    def _seconds(self) -> float:
        """Return the training time so far, earlier sessions included."""
        return round(time.perf_counter() - self.started, 3)

    def _record(self, *records: dict[str, object]) -> None:
        """Add records to the metrics, with the time now."""
        if records:
            seconds = self._seconds()
            self.writer.record(*({**record, "seconds": seconds} for record in records))

    # -- continuing and diverging -----------------------------------------------------------

    def _continue_from(self, saved: Checkpoint, state: RunState) -> None:
        self.state = replace(state, stopped_early=False)
        self.pending.clear()
        self.n_skipped_in_a_row = 0
        self.writer.continue_from(saved.folder)

    def _can_roll_back(self) -> bool:
        has_checkpoint = self.folder is not None and self.writer.saved_step is not None
        is_allowed = self.state.rollbacks < self.config.train.max_rollbacks
        return is_allowed and has_checkpoint and self.group.world_size == 1

    def roll_back(self, failed_step: int) -> StepReport:
        """Continue from the last checkpoint at half the learning rates, after a non-finite step."""
        assert self.folder is not None
        rollbacks = self.state.rollbacks + 1
        saved = self.folder.load("latest")
        optim, step = self.config.optim, saved.state.step
        # resuming may have changed the plan that the checkpoint was saved with
        values = (self.first_config if step == self.first_step else saved.config).flatten()
        rates = {"optim.lr": optim.lr / 2, "optim.matrix_lr": optim.matrix_lr / 2}
        planned = {key: values[key] for key in PLANNED_KEYS}  # what was re-planned later is undone
        self.change_config(self.config.with_values({**rates, **planned}))
        self.learner.restore(saved, self.config.optim)
        self._continue_from(saved, replace(saved.state, rollbacks=rollbacks))
        self.speed_since = step, time.perf_counter()
        self._record({"step": step, "rolled_back_from": failed_step, **rates})
        logger.warning(
            f"non-finite values at step {failed_step:,}: rolled back to step {step:,} at half the "
            "learning rates"
        )
        return StepReport(step, self.config.train.max_steps)

    def _require_finite(self, loss: float, grad_norm: float, step: int) -> None:
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            what = "gradient is" if math.isfinite(loss) else "loss is"
            raise self._diverged(what, step)

    def _require_finite_weights(self, step: int) -> None:
        if not self.learner.has_finite_weights():
            raise self._diverged("weights are", step)

    def _diverged(self, what: str, step: int) -> DivergedError:
        """Return the error that names the step and the remedy."""
        self._finish_saving()
        has_checkpoint = self.writer.saved_step is not None
        message = (
            f"the {what} no longer finite at step {step:,}, and nothing of that was saved; "
            f"{self.last_checkpoint}; {'--resume' if has_checkpoint else 'start again'} with lower "
            f"learning rates, such as {self.config.optim.lower_rates()}"
        )
        if self.dtype == torch.float16:
            message += ", or with -s dtype=float32"
        may_roll_back = self.group.world_size == 1 and not self.config.train.max_rollbacks
        if has_checkpoint and may_roll_back:
            message += ", or with -s train.max_rollbacks=3 to roll back automatically"
        return DivergedError(message, step)
