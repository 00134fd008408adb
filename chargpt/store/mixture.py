"""The mixture of a run's GPT with n-gram models, in one file of the run folder.

`mixture.safetensors` holds the gate's weights. It belongs to one checkpoint, whose step and
fingerprint it holds. The n-grams are counted again from the run's text: that takes no longer than
reading all counts would. Files of earlier versions hold the counted tokens themselves, and no
checksum.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch

from chargpt.errors import RunError, reason_of
from chargpt.files import exists, read_regular, write_atomically
from chargpt.models.gpt import GPT
from chargpt.models.mixture import MIXTURE_ORDER, Gate, Mixture
from chargpt.models.ngram import MAX_TOKENS
from chargpt.store.ensemble import MixedRun, mix
from chargpt.store.folder import RunFolder
from chargpt.store.layout import MIXTURE_FILE
from chargpt.store.run import Run, as_run
from chargpt.store.tensors import MALFORMED
from chargpt.text.tokenizer import Tokens

Array = npt.NDArray[Any]
MAX_BYTES = 4 * MAX_TOKENS + 1_000_000
UNUSABLE = (OSError, *MALFORMED)


class OtherCheckpointError(RunError):
    """The mixture belongs to another checkpoint."""


def save_mixture(run: Run, mixture: Mixture) -> None:
    """Write the mixture that `fit_mixture` returned for a run's checkpoint.

    Raises:
        RunError: it cannot be written, or would replace that of a checkpoint that is kept.
    """
    kept = _kept_step(run)
    if kept not in (None, run.step):
        raise RunError(
            f"step {run.step:,} of {run.folder} has no mixture: that of step {kept:,} is kept, as "
            "`compress --keep` asked"
        )
    arrays = {name: tensor.cpu().numpy() for name, tensor in mixture.gate.state_dict().items()}
    arrays["step"] = np.array([run.step])
    arrays["fingerprint"] = np.frombuffer(run.fingerprint(), np.uint8)
    arrays["sha256"] = _sha256(arrays)
    folder = run.writable_folder()
    try:
        write_atomically(folder.path / MIXTURE_FILE, safetensors.numpy.save(arrays))
    except OSError as error:
        raise RunError(
            f"the mixture of {run.folder} cannot be saved ({reason_of(error)}); free some "
            "space, then train again"
        ) from None


def _sha256(arrays: Mapping[str, Array]) -> Array:
    """Return the SHA-256 of a file of arrays, (32,)."""
    content = safetensors.numpy.save(dict(arrays))  # sorted by type and name
    return np.frombuffer(hashlib.sha256(content).digest(), np.uint8)


def _kept_step(run: Run) -> int | None:
    """Return the step of the run's present mixture if that checkpoint is kept, else None."""
    try:
        content = read_regular(run.folder / MIXTURE_FILE, MAX_BYTES)
        step = int(safetensors.numpy.load(content)["step"].item())
    except UNUSABLE:
        return None
    return step if RunFolder(run.folder).is_kept(step) else None


def has_mixture(run: Run) -> bool:
    """Return whether a run has a mixture, even if it is that of another checkpoint."""
    return exists(run.folder / MIXTURE_FILE)


def find_mixture_run(run: Run) -> Run | None:
    """Return the run with the mixture in place of its GPT, None if there is none to use."""
    try:
        return with_mixture(run)
    except RunError:
        return None


def with_mixture(run: Run | str | Path) -> Run:
    """Return a run, or that of a folder, with the mixture in place of its GPT.

    Of a run that `mix` returned, it is that of each part.
    Its n-grams are counted, which takes up to two seconds.

    Raises:
        RunError: it has none, or that of another checkpoint, or the file is damaged.
    """
    run = as_run(run)
    if isinstance(run, MixedRun):
        return mix([with_mixture(part) for part in run.parts], run.weights)
    if isinstance(run.model, Mixture):
        return run
    tokens, gate = read_mixture(run)
    assert isinstance(run.model, GPT)
    mixture = Mixture(run.model, tokens, run.tokenizer)
    mixture.gate = gate
    return replace(run, model=mixture.to(run.model.device).eval())


def read_mixture(run: Run) -> tuple[Tokens, Gate]:
    """Return the tokens that a run's mixture counts, and its gate; errors of `with_mixture`."""
    path = run.folder / MIXTURE_FILE
    if isinstance(run.model, GPT) and run.config.text.mixture_characters and not has_mixture(run):
        raise RunError(
            f"{path} is missing: it was deleted, or training was stopped before it was written; "
            "train the run to its end, or use the run without its mixture"
        )
    if not has_mixture(run) or not isinstance(run.model, GPT):
        raise RunError(
            f"{run.folder} has no mixture with n-gram models: it was trained without a --budget, "
            "or its budget or text was too short, as training then says; train one with a longer "
            "--budget, or with -s text.mixture_characters=20000, to its end"
        )
    try:
        arrays = safetensors.numpy.load(read_regular(path, MAX_BYTES))
        checksum = arrays.pop("sha256", None)
        if checksum is not None and not np.array_equal(checksum, _sha256(arrays)):
            raise ValueError("it has changed since it was saved")
        step, tokens = arrays.pop("step").item(), arrays.pop("tokens", None)
        fingerprint = arrays.pop("fingerprint")
        if tokens is None:
            tokens = run.corpus().split("train")[-MAX_TOKENS:]
        is_valid = tokens.ndim == 1 and tokens.dtype == run.tokenizer.dtype
        is_valid = is_valid and MIXTURE_ORDER <= len(tokens) <= MAX_TOKENS
        if not (is_valid and tokens.max() < run.model.vocab_size):
            raise ValueError("its tokens are not those of the run's text")
        if any(array.dtype != np.float32 for array in arrays.values()):
            raise ValueError("a weight of its gate is not of float32")
        gate = Gate()
        gate.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        if not all(parameter.isfinite().all() for parameter in gate.parameters()):
            raise ValueError("a weight of its gate is not finite")
    except UNUSABLE as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"{path} cannot be used ({reason:.200}); use the run without its mixture"
        ) from None
    if fingerprint.tobytes() != run.fingerprint():
        if step == run.step:
            raise OtherCheckpointError(
                f"the mixture of {run.folder} is that of another model, also of step {step:,}; "
                "use the run without its mixture"
            )
        has_newer_best = step < (run.state.best_step or 0)  # that of an unfinished run
        raise OtherCheckpointError(
            f"the mixture of {run.folder} is that of step {step:,}, not of step {run.step:,}; use "
            f"that checkpoint{', or train the run to its end' if has_newer_best else ''}"
        )
    return tokens, gate
