"""The run that is harmed: of one tiny model, on the project's own text."""

import contextlib
import functools
import hashlib
import shutil
from pathlib import Path

from chargpt.errors import ChargptError
from chargpt.store import commit
from chargpt.store.run import RunFolder
from fault_injection.processes import Ended, run_forked

REPOSITORY = Path(__file__).parents[3]
TEXT = REPOSITORY / "data" / "lighthouse.txt"
STEPS, SAVE_EVERY = 100, 4
TINY: dict[str, object] = {
    "device": "cpu",
    "text.path": str(TEXT),
    "model.n_layer": 1,
    "model.n_head": 1,
    "model.n_embd": 16,
    "model.block_size": 16,
    "model.dropout": 0.1,
    "train.max_steps": STEPS,
    "train.batch_size": 4,
    "train.accumulate": 2,
    "train.ema": 0.9,
    "train.evaluate_every": 20,
    "train.evaluate_characters": 200,
    "train.save_every": SAVE_EVERY,
    "train.sample_every": 0,
}


def train_words(**changes: object) -> list[str]:
    """Return the words that train the tiny model into R, from wherever it stands."""
    settings = {**TINY, **changes}
    text = str(settings.pop("text.path"))
    written = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return ["train", text, "--out", "R", "--resume", *written]


RESUME = ["train", "--resume", "R"]


def fresh(folder: Path) -> Path:
    """Return the folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def sums(run: Path) -> list[str]:
    """Return the sha256 of the weights and of the optimizer in the latest checkpoint."""
    folder = commit.resolve_pointer(run / "checkpoints", "latest")
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


@functools.cache
def reference(work: Path) -> tuple[list[str], float]:
    """Return the sums of a run that nothing happened to, and the seconds that it took."""
    folder = fresh(work / "reference")
    ended = run_forked(train_words(), folder)
    assert ended.code == 0, ended.err
    return sums(folder / "R"), ended.seconds


def done(run: Path) -> bool:
    """Return whether the run's last step is saved."""
    with contextlib.suppress(ChargptError):
        return commit.resolve_pointer(run / "checkpoints", "latest").name.endswith(f"{STEPS:08}")
    return False


def sentences(ended: Ended) -> list[str]:
    """Return the error sentences that a process printed."""
    return [line for line in ended.err.splitlines() if line.startswith("chargpt: ")]


def refused(ended: Ended) -> str | None:
    """Return what is wrong with how a process refused its input: exit 2, one sentence."""
    if "Traceback" in ended.err:
        return f"a traceback: {ended.err[-500:]}"
    if ended.code != 2 or len(sentences(ended)) != 1:
        return f"exit {ended.code} with {sentences(ended)} {ended.err[-300:]!r}"
    return None


def kept(run: Path, acknowledged: Path) -> str | None:
    """Return what is wrong with what a run has on disk, after the saves that were acknowledged."""
    lines = acknowledged.read_text().split() if acknowledged.exists() else []
    if not lines:
        return None
    try:
        saved, skipped = RunFolder(run).load("latest")
    except ChargptError as error:
        return f"step {lines[-1]} was saved, and the run is lost: {error}"
    if saved.state["step"] < int(lines[-1]):
        return f"step {lines[-1]} was saved, and {saved.state['step']} is what is left"
    return f"saved checkpoints are damaged: {skipped}" if skipped else None
