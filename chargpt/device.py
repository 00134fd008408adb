"""Device, dtype, CPU threads, memory limits and CUDA graphs."""

import contextlib
import ctypes
import functools
import math
import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chargpt.distributed import rank_variable
from chargpt.errors import CaptureError, DeviceError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_MMAP_THRESHOLD = 32 * 2**20  # bytes; glibc rejects more
N_TIMINGS = 20  # of each dtype
N_ROUNDS = 16  # of timing numbers of threads
ROUNDS_BEFORE_DROPPING = 5  # after which slow numbers of threads are not tried again
MIN_GAIN = 1.25  # by which more threads must be faster: on a busy machine their speed varies
MIN_SPEED = 0.5  # fraction of the highest speed: below it, threads are chosen again
RETRY_SECONDS = 20.0  # after which more threads are tried again
TYPICAL_BYTES = 250_000_000  # of memory after imports
MAX_CPU_INFO = 10_000  # characters of /proc/cpuinfo: the first processor and more
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`, and why `auto` chose it.

    Raises:
        DeviceError: it is none of these, or this machine has no such device.
    """
    local_rank, is_auto = rank_variable("LOCAL_RANK"), name == "auto"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = ["cpu", "mps"] if torch.backends.mps.is_available() else ["cpu"]
    available += [f"cuda:{index}" for index in range(count)]
    if count and name in ("auto", "cuda"):
        name = f"cuda:{local_rank % count}"
    elif is_auto:
        name = available[-1]
    if name not in available:
        choices = ", ".join(available)
        raise DeviceError(f"device {name!r} is not available; set it to auto or one of {choices}")
    device = torch.device(name)
    if count and is_auto:
        return device, f"found {torch.cuda.get_device_name(device)}"
    reason = "found an Apple GPU" if name == "mps" else "no GPU found"
    return device, reason if is_auto else ""


def configure(device: torch.device, *, deterministic: bool = False) -> None:
    """Set what training and running a model on a device needs in the whole process."""
    if device.type == "cuda":
        # deterministic algorithms require it, and cuBLAS reads it only once, at its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # cuDNN's attention takes a second to plan each new shape; flash attention does not
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cpu":
        tune_malloc()
    if deterministic:
        torch.use_deterministic_algorithms(True)  # an operation that has none raises


def choose_dtype(device: torch.device, name: str) -> tuple[torch.dtype, str]:
    """Return the dtype of matrix products (autocast), and why `auto` chose it.

    Weights stay float32. `auto` takes bfloat16 on CUDA from compute capability 8.0, float16 from
    7.0 (V100, T4), on an x86 CPU with bfloat16 instructions bfloat16 if it is measured as over 1.5
    times as fast; else float32.
    """
    if name != "auto":
        return DTYPES[name], ""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return torch.bfloat16, "this GPU computes in it natively"
        if capability >= (7, 0):
            return torch.float16, "this GPU computes in it natively, but not in bfloat16"
        return torch.float32, "this GPU has no faster format"
    if device.type == "cpu" and re.search("avx512_bf16|amx_bf16", _cpu_info()):
        gain = _bfloat16_gain()
        if gain > 1.5:
            return torch.bfloat16, f"{gain:.1f} times as fast here"
        return torch.float32, "bfloat16 is not over 1.5 times as fast here"
    return torch.float32, "this device has no faster format"


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context of mixed precision in `dtype`; None and float32 leave out autocast."""
    is_mixed = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype if is_mixed else None, enabled=is_mixed)


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than MKL on this CPU.

    MKL does not use AVX-512 on AMD processors.
    """
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not both or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    return "AuthenticAMD" in (_cpu_info() or platform.processor())


def _cpu_info() -> str:
    """Return the start of /proc/cpuinfo, or an empty string."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return file.read(MAX_CPU_INFO)
    return ""


def _bfloat16_gain() -> float:
    """Return how many times as fast as float32 bfloat16 multiplies matrices of a small GPT's size.

    Other processes interrupt single products for a few milliseconds. In alternation an
    interruption spoils few of the timings, of which the fastest count.
    """
    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(N_TIMINGS):
        for dtype in seconds:
            left, right = torch.ones(1024, 128, dtype=dtype), torch.ones(128, 384, dtype=dtype)
            start = time.perf_counter()
            left @ right
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def tune_malloc() -> bool:
    """Make glibc's malloc keep freed memory for reuse; return whether it does.

    By default it returns large blocks to the system, and each new one costs page faults: thousands
    in every training step on a CPU, and up to half of the time of an evaluation. Other C libraries
    have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, 2**31 - 1))
    accepted = [mallopt(name, value) for name, value in settings]
    return accepted == [1, 1]


def release_memory() -> None:
    """Return what glibc's malloc keeps for reuse to the system, after work with large arrays."""
    if os.name == "posix" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def one_blas_thread() -> AbstractContextManager[object]:
    """Return a context in which the BLAS uses one thread."""
    context: AbstractContextManager[object] = _libraries().limit(limits=1, user_api="blas")
    return context


@functools.cache
def _libraries() -> Any:
    """Return the libraries with threads, which take 0.5 ms to find."""
    from threadpoolctl import ThreadpoolController  # training does not need it

    return ThreadpoolController()


def choose_threads(max_threads: int) -> int:
    """Time small operations with `max_threads` threads, half as many, ..., 1; set the best number.

    OpenMP's threads spin while they wait for each other. If another process takes one of their
    cores, every parallel operation waits for the delayed thread, and two threads can be ten times
    slower than one. PyTorch can change the number of threads at any time, but not how they wait.

    Starting at one thread, a larger number replaces the chosen one if it is MIN_GAIN times as fast.
    Returns the chosen number. This takes about 0.1 s on an idle machine.
    """
    x, weight = torch.ones(2048, 128), torch.ones(128, 512)
    seconds = {max_threads >> n: 0.0 for n in range(max_threads.bit_length())}
    for number in range(N_ROUNDS):
        for threads in seconds:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            F.silu(x @ weight)
            x.softmax(dim=-1)
            if number:  # the first round is a warm-up
                seconds[threads] += time.perf_counter() - start
        if number >= ROUNDS_BEFORE_DROPPING:
            limit = 2 * min(seconds.values())
            seconds = {threads: total for threads, total in seconds.items() if total <= limit}
    best = min(seconds)
    for threads in sorted(seconds):
        if seconds[threads] * MIN_GAIN < seconds[best]:
            best = threads
    torch.set_num_threads(best)
    return best


@functools.cache
def default_threads() -> int:
    """Return PyTorch's number of threads at the first call, before a run has set another."""
    return torch.get_num_threads()


def tune_threads(device: torch.device) -> None:
    """Set the fastest number of threads, unless this process has measured or set it before."""
    if not default_threads.cache_info().currsize:
        measure_threads(device)


def measure_threads(device: torch.device) -> int | None:
    """Set the fastest number of threads and return it; None if it does not matter or is set."""
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return choose_threads(default_threads())


class ThreadTuner:
    """Chooses threads again when the speed of training falls, and later tries more of them."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self.highest_speed = 0.0
        self.checked = time.perf_counter()

    def update(self, speed: float) -> int | None:
        """Choose again if that is due at a measured speed; return the number if it changed."""
        self.highest_speed = max(self.highest_speed, speed)
        before, now = torch.get_num_threads(), time.perf_counter()
        may_gain = before < self.max_threads and now - self.checked > RETRY_SECONDS
        if speed > MIN_SPEED * self.highest_speed and not may_gain:
            return None
        self.highest_speed, self.checked = speed, now
        threads = choose_threads(self.max_threads)
        return None if threads == before else threads


def memory_limit(device: torch.device | None = None) -> int:
    """Return the bytes of memory on a CUDA device, or else of this machine or its cgroup."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if not hasattr(os, "sysconf"):
        return 2**63  # unknown: Windows has no sysconf
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # the file may hold `max`
            limit = min(limit, int(path.read_text(encoding="ascii")))
    return limit


def require_memory(
    wanted: int, what: str, device: torch.device | None = None, remedy: str = "make it smaller"
) -> None:
    """Raise DeviceError if the memory has fewer bytes than are `wanted` for `what`."""
    limit = memory_limit(device)
    if wanted > limit:
        raise DeviceError(
            f"{what} would need about {wanted / 1e9:,.1f} GB of memory, and there are "
            f"{limit / 1e9:,.1f} GB; {remedy}"
        )


def used_memory() -> int:
    """Return the bytes of memory that this process uses, without files that it maps.

    Where the system does not say, a typical number after imports is returned.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
    return TYPICAL_BYTES


def can_capture(device: torch.device) -> bool:
    """Return whether the device has CUDA graphs."""
    return device.type == "cuda"


def capture_graph(
    step: Callable[[], Tensor], device: torch.device, *, is_random: bool = False
) -> Callable[[], Tensor]:
    """Return a function that replays `step` as a CUDA graph.

    A small model is launch-bound: launching its kernels one by one takes longer than running them,
    and a graph launches all of them at once.

    Args:
        step: runs the same operations on the same tensors each time; called several times here.
        device: with CUDA graphs.
        is_random: whether the results of two calls differ, because of dropout.

    Raises:
        CaptureError: capture failed, or the replayed result differs; `step` itself can be used.
    """
    with torch.cuda.device(device):  # capture uses the current device
        stream = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator_state = generator.clone_state()
        try:
            side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side_stream.wait_stream(stream)
            with torch.cuda.stream(side_stream):  # warm-up: first calls allocate memory
                for _ in range(3):
                    expected = step().clone()
            stream.wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = step()
            graph.replay()
            is_equal = is_random or torch.allclose(result, expected, rtol=1e-3, atol=1e-3)
        except RuntimeError as error:
            # a failed capture leaves the current stream and the generator in capture mode
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(generator_state)
            reason = str(error).partition("\n")[0]
            raise CaptureError(f"CUDA graph capture failed ({reason:.200})") from None
    if not is_equal:
        raise CaptureError("a replayed CUDA graph gave another result")

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work (host-device sync), for timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")
