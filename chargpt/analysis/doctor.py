"""What this machine is to chargpt: what was found, how fast it is, whether it computes rightly."""

import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.config import ModelConfig
from chargpt.device import choose_device, choose_dtype, dtype_name, synchronize
from chargpt.models import build_model
from chargpt.text.cache import cache_folder

SIDE = 1024  # of the square matrices that are multiplied
MEASURED_SECONDS = 0.3
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a gradient, relative
LEAST_FREE = 1_000_000_000  # bytes of disk: some checkpoints of a model of ten million parameters


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `advice` is empty if nothing is to be done."""

    name: str
    value: str
    advice: str = ""


def examine(device_name: str = "auto", folder: Path = Path()) -> list[Finding]:
    """Return what was found out, in the order that a reader wants it.

    Args:
        device_name: as in a config.
        folder: where runs will go.

    Raises:
        DeviceError: that device is not here.
    """
    device, reason = choose_device(device_name)
    dtype, dtype_reason = choose_dtype(device, "auto")
    findings = [
        Finding("device", f"{device.type} ({reason})"),
        Finding("format", f"{dtype_name(dtype)} ({dtype_reason})"),
    ]
    if device.type == "cpu":
        findings.append(_threads())
    for kind in (torch.float32, torch.bfloat16):
        speed = matrix_speed(device, kind)
        findings.append(Finding(f"{dtype_name(kind)} products", f"{speed / 1e9:,.0f} GFLOP/s"))
    return [*findings, _training_step(device, dtype), *_disk(folder), _torch()]


def matrix_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of large matrix products."""
    left = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    best, end = math.inf, time.perf_counter() + MEASURED_SECONDS
    while best == math.inf or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        left @ left
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best


def gradient_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return how far one training step's gradients are from float64 ones worked out on the CPU.

    The norm of the difference over the norm, of all parameters together.
    """
    exact = _gradients(torch.device("cpu"), torch.float64)
    difference = _gradients(device, dtype) - exact
    return float(difference.norm() / exact.norm())


def _gradients(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return all gradients of a small model's loss, one after another, float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=64), 65)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 4 if parameter.dim() == 1 else noise / 8)
    tokens = torch.randint(65, (4, 65), generator=generator).to(device)
    model.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(tokens[:, :-1])
    if dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).cpu().double()


def _training_step(device: torch.device, dtype: torch.dtype) -> Finding:
    error, most = gradient_error(device, dtype), TOLERANCE[dtype]
    advice = "" if error < most else "it computes wrongly: update torch or use --device cpu"
    return Finding("one training step", f"{error:.1e} from float64 (at most {most})", advice)


def _threads() -> Finding:
    used, cores = torch.get_num_threads(), os.cpu_count() or 1
    advice = ""
    if used > cores:
        advice = f"unset OMP_NUM_THREADS: {used} threads wait for each other on {cores} cores"
    elif used * 4 < cores:
        advice = f"set OMP_NUM_THREADS to the number of physical cores, {cores} at most"
    return Finding("threads", f"{used} of {cores} cores", advice)


def _disk(folder: Path) -> list[Finding]:
    findings = []
    for name, place in (("disk for runs", folder.absolute()), ("disk for texts", cache_folder())):
        existing = next(p for p in (place, *place.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        advice = "" if free > LEAST_FREE else f"free some space at {existing}"
        findings.append(Finding(name, f"{free / 1e9:,.1f} GB free at {place}", advice))
    return findings


def _torch() -> Finding:
    compiler = next((name for name in ("c++", "g++", "clang", "cl") if shutil.which(name)), None)
    return Finding("torch", f"{torch.__version__}, C++ compiler: {compiler or 'none found'}")
