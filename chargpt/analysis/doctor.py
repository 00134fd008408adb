"""Checks of this machine: device, dtype, speed, correctness, disk."""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.config import ModelConfig
from chargpt.device import (
    NO_GPU,
    autocast,
    can_capture,
    capture_graph,
    choose_device,
    choose_dtype,
    dtype_name,
    synchronize,
)
from chargpt.errors import CaptureError
from chargpt.inference.decoders import Decoder, GraphDecoder, ModelDecoder, NumpyDecoder
from chargpt.models.gpt import GPT

MATRIX_SIZE = 1024  # rows and columns of the matrices that measure a CPU's speed
GPU_MATRIX_SIZE = 8192  # smaller products would measure kernel launches
GPU_FACTS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
MIN_MEASURED_SECONDS = 0.3
# relative error of gradients and logits
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
MIN_FREE_BYTES = 1_000_000_000  # of disk: about ten checkpoints of ten million parameters


@dataclass(frozen=True)
class Check:
    """The result of a check; `advice` is empty if nothing needs to be done."""

    name: str
    value: str
    advice: str = ""
    has_failed: bool = False  # results on this machine would be wrong


def run_checks(device_name: str = "auto") -> list[Check]:
    """Return the results of all checks, for a device as a config names it.

    Raises:
        DeviceError: the device is not available.
    """
    device, reason = choose_device(device_name)
    dtype, _ = choose_dtype(device, "auto")
    advice = reason if device.type == "cpu" and reason != NO_GPU else ""
    why = "see the advice" if advice else reason
    checks = [
        Check("device", f"{device.type} ({why or 'as asked'})", advice),
        Check("dtype", dtype_name(dtype)),
    ]
    if device.type == "cuda" and not torch.version.hip:
        checks.append(Check("GPU", describe_gpu() or "nvidia-smi does not answer"))
    if can_capture(device):
        checks.append(_check_graphs(device))
    if device.type == "cpu":
        checks.append(_check_threads())
    for kind in (torch.float32, torch.bfloat16, *[torch.float16] * (device.type != "cpu")):
        with contextlib.suppress(RuntimeError, TypeError):  # macOS before 14 has no bfloat16
            speed = matmul_flops(device, kind)
            checks.append(Check(f"{dtype_name(kind)} matmul", f"{speed / 1e9:,.0f} GFLOP/s"))
    error = gradient_error(device, dtype)
    checks.append(_check_error("gradient", error, TOLERANCE[dtype], "against float64"))
    error = decoding_error(device)
    checks.append(_check_error("decoding", error, TOLERANCE[torch.float32], "past a full KV cache"))
    return [*checks, _check_disk(), Check("torch", torch.__version__)]


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of large matrix products."""
    size = MATRIX_SIZE if device.type == "cpu" else GPU_MATRIX_SIZE
    # random, because a GPU multiplies ones and zeros faster than other numbers
    matrix = torch.randn(size, size, device=device).to(dtype)
    shortest, end = math.inf, time.perf_counter() + MIN_MEASURED_SECONDS
    while shortest == math.inf or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        matrix @ matrix
        synchronize(device)
        shortest = min(shortest, time.perf_counter() - start)
    return 2 * size**3 / shortest


def describe_gpu() -> str | None:
    """Return name, driver, clocks and power limit of the NVIDIA GPUs; None without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={GPU_FACTS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    names = GPU_FACTS.replace("_", " ").split(",")
    gpus = [zip(names, line.split(","), strict=False) for line in done.stdout.splitlines()]
    return "; ".join(", ".join(f"{name} {value.strip()}" for name, value in gpu) for gpu in gpus)


def gradient_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the relative error of a small model's gradient against float64 on the CPU."""
    exact = gradient_function(torch.device("cpu"), torch.float64)()
    difference = gradient_function(device, dtype)().cpu().double() - exact
    return float(difference.norm() / exact.norm())


def gradient_function(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that computes the gradients of a small model's loss, concatenated."""
    model, tokens = _small_model()
    tokens = tokens.to(device)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model.to(device, exact)

    def gradient() -> Tensor:
        model.zero_grad(set_to_none=True)
        with autocast(device, dtype):
            logits = model(tokens[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.to(exact).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return gradient


def _small_model() -> tuple[GPT, Tensor]:
    """Return a GPT with random weights in float32 and tokens, (4, T + 1), on the CPU."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=64), 65)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 4 if parameter.dim() == 1 else noise / 8)
    return model, torch.randint(65, (4, 65), generator=generator)


def decoding_error(device: torch.device) -> float:
    """Return the relative error of logits after the KV cache was full three times.

    They are those of the device's decoder, on a CPU that of numpy, against torch's on the CPU.
    """
    model, tokens = _small_model()
    steps = list(tokens.repeat(1, 2).mT.numpy())  # (4,) each; twice the block size and two
    exact = ModelDecoder(model, 4)
    expected = [exact.step(step) for step in steps][-1]
    kind: Callable[[GPT, int], Decoder] = GraphDecoder
    if not can_capture(device):
        kind = NumpyDecoder if device.type == "cpu" else ModelDecoder
    decoder = kind(model.to(device), 4)
    found = [decoder.step(step) for step in steps][-1]
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _check_graphs(device: torch.device) -> Check:
    """Check that the gradients of a small model can be captured as a CUDA graph."""
    try:
        capture_graph(gradient_function(device, torch.float32), device)
    except CaptureError as error:
        advice = "small models train and sample slowly: update torch"
        return Check("CUDA graphs", str(error), advice)
    return Check("CUDA graphs", "captured and replayed")


def _check_error(name: str, error: float, tolerance: float, where: str) -> Check:
    value = f"relative error {error:.1e} {where} (at most {tolerance})"
    advice = "" if error < tolerance else f"{name} is wrong: update torch or use --device cpu"
    return Check(name, value, advice, has_failed=bool(advice))


def _check_threads() -> Check:
    used = torch.get_num_threads()
    # os.cpu_count() also counts cores that this process may not use
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    remedy = f"unset OMP_NUM_THREADS, or set it to the number of physical cores, {cores} at most"
    advice = "" if used <= cores <= 4 * used else remedy
    shown = f"{used} at most, of {cores} cores; on a CPU, training measures which number is fastest"
    return Check("threads", shown, advice)


def _check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free > MIN_FREE_BYTES else f"free some space at {Path.cwd()}"
    return Check("disk for runs", f"{free / 1e9:,.1f} GB free at {Path.cwd()}", advice)
