"""The run folder: one training, one folder, and the one way back to a model.

runs/<name>/config.yaml  tokenizer.json  metrics.jsonl  checkpoints/
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from chargpt.config import Config, validate
from chargpt.device import choose_device
from chargpt.errors import RunError
from chargpt.files import write_atomically
from chargpt.models import LanguageModel, build_model
from chargpt.store import checkpoint
from chargpt.text.tokenizer import CharTokenizer
from chargpt.yaml_reader import parse_yaml

CONFIG, TOKENIZER, METRICS, CHECKPOINTS = (
    "config.yaml",
    "tokenizer.json",
    "metrics.jsonl",
    "checkpoints",
)
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Saved:
    """What one checkpoint holds.

    `state` keeps the plain facts: step, best validation, corpus key, seconds of training.
    """

    folder: Path
    config: Config
    tokenizer: CharTokenizer
    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A trained model with all that is needed to use it."""

    folder: Path
    config: Config
    tokenizer: CharTokenizer
    model: LanguageModel
    step: int
    state: dict[str, Any]


class RunFolder:
    """The paths of one run on disk, and the writing of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise RunError if a new run at `path` would overwrite something."""
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise RunError(
                f"{path} exists; continue it with --resume, replace it with --force, "
                "or name another folder with --out"
            )

    @classmethod
    def create(
        cls, path: Path, config: Config, tokenizer: CharTokenizer, *, force: bool
    ) -> "RunFolder":
        """Make a new run folder.

        Raises:
            RunError: something stands there already and `force` is false, or it cannot be made.
        """
        if not force:
            cls.check_free(path)
        elif path.exists():
            if not is_run(path):
                raise RunError(f"{path} is not a run, so --force leaves it alone; name another")
            shutil.rmtree(path)
        run = cls(path)
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(path / TOKENIZER, tokenizer.to_json().encode())
            run.write_config(config)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written ({error.strerror}); name another folder with --out"
            ) from None
        return run

    def write_config(self, config: Config) -> None:
        """Record the resolved settings."""
        write_atomically(self.path / CONFIG, config.to_yaml().encode())

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """Add one line to `metrics.jsonl`."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the recorded lines in order, skipping any that a crash cut short."""
        try:
            lines = (self.path / METRICS).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        records = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
        return records

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines of steps that a resumed run will do again."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path / METRICS, text.encode())

    def save(
        self,
        *,
        config: Config,
        tokenizer: CharTokenizer,
        state: Mapping[str, Any],
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        is_best: bool,
    ) -> Path:
        """Commit a checkpoint of `state["step"]`, move the pointers, then prune."""
        folder = checkpoint.commit(
            self.checkpoints,
            state["step"],
            {
                MODEL: _pack(model),
                OPTIMIZER: _pack(optimizer),
                CONFIG: config.to_yaml().encode(),
                TOKENIZER: tokenizer.to_json().encode(),
                STATE: checkpoint.to_json(state),
            },
        )
        checkpoint.point(self.checkpoints, "latest", folder)
        if is_best:
            checkpoint.point(self.checkpoints, "best", folder)
        try:
            best = [checkpoint.follow(self.checkpoints, "best")]
        except RunError:
            best = []
        checkpoint.prune(self.checkpoints, best, config.train.keep_last)
        return folder

    def find(self, which: str) -> tuple[Path, list[str]]:
        """Return the folder of `best`, `latest` or a step, and what was passed over on the way.

        Raises:
            RunError: there is no such checkpoint, or none at all.
        """
        if which not in ("best", "latest"):
            steps = {path.name: path for path in checkpoint.committed(self.checkpoints)}
            name = checkpoint.folder_name(int(which)) if which.isdigit() else which
            if name not in steps:
                have = ", ".join(str(int(name[5:])) for name in steps) or "none"
                raise RunError(
                    f"{self.path} has no checkpoint {which!r}; it has best, latest and steps {have}"
                )
            return steps[name], []
        skipped = []
        try:
            return checkpoint.follow(self.checkpoints, which), []
        except RunError as error:
            skipped.append(str(error))
        candidates = checkpoint.committed(self.checkpoints)
        if not candidates:
            raise RunError(
                f"{self.path} holds no checkpoint yet; train it first, or name another run"
            )
        return candidates[-1], skipped

    def load(self, which: str) -> tuple[Saved, list[str]]:
        """Return a checkpoint, every byte checked; a damaged one gives way to the newest whole one.

        Returns:
            What was saved, and one sentence for each checkpoint that was skipped.

        Raises:
            RunError: no checkpoint can be trusted.
        """
        folder, skipped = self.find(which)
        others = [
            path for path in reversed(checkpoint.committed(self.checkpoints)) if path != folder
        ]
        for candidate in [folder, *(others if which in ("best", "latest") else [])]:
            try:
                return _unpack(candidate, checkpoint.read(candidate)), skipped
            except RunError as error:
                skipped.append(str(error))
        raise RunError(
            skipped[0] if len(skipped) == 1 else "no checkpoint is whole: " + "; ".join(skipped)
        )


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(plain)


def _unpack(folder: Path, files: Mapping[str, bytes]) -> Saved:
    missing = {MODEL, OPTIMIZER, CONFIG, TOKENIZER, STATE} - set(files)
    if missing:
        raise RunError(f"{folder} lacks {', '.join(sorted(missing))}; use another checkpoint")
    try:
        tree, lines = parse_yaml(files[CONFIG].decode(), str(folder / CONFIG))
        state = json.loads(files[STATE])
        model = safetensors.torch.load(files[MODEL])
        optimizer = safetensors.torch.load(files[OPTIMIZER])
    except (ValueError, safetensors.SafetensorError) as error:
        raise RunError(f"{folder} does not hold a checkpoint ({error}); use another") from None
    return Saved(
        folder,
        validate(tree, str(folder / CONFIG), lines),
        CharTokenizer.from_json(files[TOKENIZER].decode(), str(folder / TOKENIZER)),
        state,
        model,
        optimizer,
    )


def is_run(path: Path) -> bool:
    """Return whether a folder is a run."""
    return (path / CONFIG).is_file()


def newest_run(parent: Path = Path("runs")) -> Path:
    """Return the run under `parent` whose checkpoints changed last.

    Raises:
        RunError: there is none.
    """
    found = [
        (pointer.stat().st_mtime_ns, pointer.parent.parent)
        for depth in ("*", "*/*")
        for pointer in parent.glob(f"{depth}/{CHECKPOINTS}/latest.json")
    ]
    if not found:
        raise RunError(f"there is no run under {parent}/ yet; train one with `chargpt train`")
    return max(found)[1]


def open_run(path: str | Path) -> RunFolder:
    """Return an existing run's folder.

    Raises:
        RunError: it is not a run.
    """
    path = Path(path)
    if not is_run(path):
        what = "there is no folder" if not path.exists() else "there is no run in"
        raise RunError(f"{what} {path}; train one with `chargpt train`, or name another")
    return RunFolder(path)


def fill(model: LanguageModel, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Copy saved weights into a model of the same shape.

    Raises:
        RunError: names or shapes differ, or a weight is not a finite number.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if wanted != given:
        odd = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
        raise RunError(
            f"the weights in {origin} are not those of its config (first at {odd[0]}); "
            "use another checkpoint"
        )
    for name, tensor in tensors.items():
        if not math.isfinite(tensor.double().abs().sum().item()):
            raise RunError(f"{name} in {origin} is not finite; use an earlier checkpoint")
    model.load_state_dict(dict(tensors))


def load_run(path: str | Path, checkpoint: str = "best", device: str = "auto") -> Run:
    """Return a trained model from its run folder: the one way back from disk.

    Args:
        path: the run's folder.
        checkpoint: `best`, `latest`, or a step's number.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.

    Raises:
        RunError: there is no such run or checkpoint, or it is damaged.
        DeviceError: the device is not there.
    """
    run = open_run(path)
    saved, skipped = run.load(checkpoint)
    target, _ = choose_device(device)
    model = build_model(saved.config.model, saved.tokenizer.vocab_size)
    fill(model, saved.model, saved.folder)
    state = {**saved.state, "skipped": skipped, "checkpoint": saved.folder.name}
    step = int(state.get("step", 0))
    model = model.to(target).eval()
    return Run(run.path, saved.config, saved.tokenizer, model, step, state)
