"""Checks of this machine: device, threads, speed, numerical correctness, disk space, torch."""

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

MATRIX_SIZE = 1024  # rows and columns of the matrices in the speed measurement
MIN_SECONDS = 0.3  # of the speed measurement
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative error of a gradient
MIN_FREE_BYTES = 1_000_000_000  # on disk: several checkpoints of a model of 10M parameters


@dataclass(frozen=True)
class Check:
    """Result of one check; `advice` is empty if it passed."""

    name: str
    value: str
    advice: str = ""


def run_checks(device_name: str = "auto", folder: Path = Path()) -> list[Check]:
    """Run all checks.

    Args:
        device_name: `auto`, `cpu`, `cuda` or `mps`.
        folder: of future runs, whose disk is checked.

    Raises:
        DeviceError: the device is not available.
    """
    device, reason = choose_device(device_name)
    dtype, dtype_reason = choose_dtype(device, "auto")
    checks = [
        Check("device", f"{device.type} ({reason})"),
        Check("number format", f"{dtype_name(dtype)} ({dtype_reason})"),
    ]
    if device.type == "cpu":
        checks.append(_threads())
    for kind in TOLERANCE:
        flops = matmul_flops(device, kind)
        checks.append(Check(f"{dtype_name(kind)} matmul", f"{flops / 1e9:,.0f} GFLOP/s"))
    return [*checks, _training_step(device, dtype), *_disk(folder), _torch()]


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    left = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    best, end = math.inf, time.perf_counter() + MIN_SECONDS
    while best == math.inf or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        left @ left
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / best


def gradient_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative error (L2 norm) of a step's gradients against float64 on the CPU."""
    exact = _gradients(torch.device("cpu"), torch.float64)
    difference = _gradients(device, dtype) - exact
    return float(difference.norm() / exact.norm())


def _gradients(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the concatenated gradients of a small model's loss, float64 on the CPU."""
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


def _training_step(device: torch.device, dtype: torch.dtype) -> Check:
    error, tolerance = gradient_error(device, dtype), TOLERANCE[dtype]
    advice = "" if error < tolerance else "gradients are wrong: update torch or use --device cpu"
    return Check("one training step", f"gradient error {error:.1e} (tolerance {tolerance})", advice)


def _threads() -> Check:
    used, cores = torch.get_num_threads(), os.cpu_count() or 1
    advice = ""
    if used > cores:
        advice = f"unset OMP_NUM_THREADS: {used} threads compete for {cores} cores"
    elif used * 4 < cores:
        advice = f"set OMP_NUM_THREADS to the number of physical cores (at most {cores})"
    return Check("threads", f"{used} of {cores} cores", advice)


def _disk(folder: Path) -> list[Check]:
    checks = []
    for name, path in (("disk for runs", folder.absolute()), ("disk for texts", cache_folder())):
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        advice = "" if free > MIN_FREE_BYTES else f"free disk space at {existing}"
        checks.append(Check(name, f"{free / 1e9:,.1f} GB free at {path}", advice))
    return checks


def _torch() -> Check:
    compiler = next((name for name in ("c++", "g++", "clang", "cl") if shutil.which(name)), None)
    return Check("torch", f"{torch.__version__}, C++ compiler: {compiler or 'none'}")
