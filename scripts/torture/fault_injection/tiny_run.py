"""The training run under test: a tiny model on `data/lighthouse.txt`, and checks of its state."""

import functools
import hashlib
import shutil
import time
from pathlib import Path

from chargpt.errors import ChargptError
from chargpt.store.checkpoint import list_checkpoints, load_checkpoint
from fault_injection.processes import ProcessResult, run_forked

REPOSITORY = Path(__file__).parents[3]
TEXT = REPOSITORY / "data" / "lighthouse.txt"
STEPS, SAVE_EVERY = 100, 4
TINY: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",  # "auto" measures, so that two runs need not have the same weights
    "text.path": str(TEXT),
    "model.n_layer": 1,
    "model.n_head": 1,
    "model.n_embd": 16,
    "model.block_size": 16,
    "model.dropout": 0.1,
    "train.max_steps": STEPS,
    "train.batch_size": 4,
    "train.micro_batches": 2,
    "train.ema": 0.9,
    "train.evaluate_every": 20,
    "train.evaluation_tokens": 200,
    "train.save_every": SAVE_EVERY,
    "train.sample_every": 0,
}


def train_arguments(**changes: object) -> list[str]:
    """Return the arguments that start or resume training the tiny model in the folder R."""
    settings = {**TINY, **changes}
    text = str(settings.pop("text.path"))
    overrides = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return ["train", text, "--out", "R", "--resume", *overrides]


RESUME = ["train", "--resume", "R"]


def empty_folder(folder: Path) -> Path:
    """Create an empty folder, deleting an existing one; return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def checkpoint_digests(run: Path) -> list[str]:
    """Return the sha256 of the weights and of the optimizer in the latest checkpoint."""
    folder = list_checkpoints(run / "checkpoints")[-1]
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


@functools.cache
def uninterrupted_run(work: Path) -> tuple[list[str], float]:
    """Return the checkpoint digests and the duration (s) of an uninterrupted run."""
    folder = empty_folder(work / "uninterrupted")
    result = run_forked(train_arguments(), folder)
    assert result.code == 0, result.err
    return checkpoint_digests(folder / "R"), result.seconds


def is_finished(run: Path) -> bool:
    """Return whether the run's last step is saved."""
    return (run / "checkpoints" / f"step-{STEPS:08}").exists()


def wait_for(run: Path, pattern: str) -> None:
    """Wait until a training process has made a file or folder whose path in the run matches."""
    for _ in range(3000):
        if any(run.glob(pattern)):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} after 30 s")


def error_lines(result: ProcessResult) -> list[str]:
    """Return the error lines that a process printed."""
    return [line for line in result.err.splitlines() if line.startswith("chargpt: ")]


def check_rejection(result: ProcessResult) -> str | None:
    """Return an error unless the process exited with code 2 and printed one error line."""
    if "Traceback" in result.err:
        return f"a traceback: {result.err[-500:]}"
    if result.code != 2 or len(error_lines(result)) != 1:
        return f"exit {result.code} with {error_lines(result)} {result.err[-300:]!r}"
    return None


def check_saves(run: Path, save_log: Path) -> str | None:
    """Return an error unless every save in the log can be read from the run folder."""
    lines = save_log.read_text().split() if save_log.exists() else []
    if not lines:
        return None
    try:
        saved, skipped = load_checkpoint(run / "checkpoints", "latest")
    except ChargptError as error:
        return f"step {lines[-1]} was saved, but the run cannot be read: {error}"
    if saved.state.step < int(lines[-1]):
        return f"step {lines[-1]} was saved, but the latest is {saved.state.step}"
    return f"saved checkpoints are corrupted: {skipped}" if skipped else None
