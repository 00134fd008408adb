"""Device, dtype, CPU threads, memory limits and CUDA graphs."""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import re
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
LAZY_BYTES = 64_000_000  # from which an array takes memory by small pages
MAX_CPU_INFO = 10_000  # characters of /proc/cpuinfo: the first processor and more
NO_GPU = "no GPU found"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device for `auto`, `cpu`, `cuda[:N]`, `xpu[:N]` or `mps`, and why `auto` chose it.

    `auto` is a GPU that can run a kernel, or else the CPU.

    Raises:
        DeviceError: it is none of these, or this machine has no such device or cannot use it.
    """
    if name == "cpu":
        return torch.device("cpu"), ""
    is_auto, (kind, count, fault) = name == "auto", _find_gpus()
    gpus = [kind if kind == "mps" else f"{kind}:{index}" for index in range(count)]
    if gpus and name in ("auto", kind):
        name = gpus[rank_variable("LOCAL_RANK") % count]
    if name in gpus:
        device = torch.device(name)
        found, fault = _try_kernel(device)
        if not fault:
            return device, f"found {found}" if is_auto else ""
    if is_auto:
        return torch.device("cpu"), fault or NO_GPU
    if fault and name.partition(":")[0] == kind:
        raise DeviceError(f"cannot use {name}: {fault}")
    choices = ", ".join(["cpu", *gpus])
    raise DeviceError(f"device {name!r} is not available; set it to auto or one of {choices}")


def _find_gpus() -> tuple[str, int, str]:
    """Return the type and the number of GPUs, and what keeps their driver from starting."""
    built_for = torch.accelerator.current_accelerator()
    kind = built_for.type if built_for else ""
    if kind not in ("cuda", "xpu", "mps"):
        return "", 0, ""
    module = torch.get_device_module(kind)
    with warnings.catch_warnings(action="ignore"):  # of the driver: `init` raises the same
        count = module.device_count() if module.is_available() else 0
        try:
            if not count and kind == "cuda":
                module.init()
        except RuntimeError as error:
            if not re.match("Found no NVIDIA driver|No (CUDA|HIP) GPUs", str(error)):
                return kind, 0, _fault("the GPU", error, is_old=True)
    return kind, count, ""


@functools.cache
def _try_kernel(device: torch.device) -> tuple[str, str]:
    """Return a GPU's name, and why it cannot run a kernel or an empty string."""
    name, is_old = "an Apple GPU" if device.type == "mps" else "the GPU", False
    try:
        with warnings.catch_warnings(action="ignore"):  # of old cards: the error says the same
            if device.type != "mps":
                name = torch.get_device_module(device).get_device_name(device)
            if torch.version.cuda:
                is_old = torch.cuda.get_device_capability(device) < (7, 5)
            torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return name, _fault(name, error, is_old=is_old)
    return name, ""


def _fault(name: str, error: Exception, *, is_old: bool) -> str:
    """Return why a GPU cannot be used, with the remedy for its error.

    Old cards and drivers need torch's build for CUDA 12.6: later ones have no kernels for compute
    capability 7.0 and less.
    """
    version, message = torch.__version__.partition("+")[0], str(error)
    source = f"pytorch.org/get-started/locally{' (CUDA 12.6)' * is_old}"
    if re.search("no kernel image|invalid device function", message):  # of CUDA, of HIP
        return f"{name} has no kernels in torch {version}; install a build that has them: {source}"
    if "driver on your system is too old" in message:
        remedy = f"update it, or install a build for it: {source}"
        return f"the NVIDIA driver is too old for torch {version}; {remedy}"
    cause = re.split(r"[\n]|[.] (?=[A-Z])| - ", re.sub(r".*(?=Error \d)", "", message))[0]
    remedy = "end what else uses it, restart the machine or update its driver"
    return f"{name} does not start ({cause:.200}); {remedy}"


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

    Weights stay float32. `auto` takes bfloat16 where torch says that a CUDA, ROCm or Intel GPU has
    it, float16 on CUDA from compute capability 7.0 (V100, T4), and either, on other GPUs, or
    bfloat16, on an x86 CPU with instructions for it, if measured as over 1.5 times as fast.
    """
    if name != "auto":
        return DTYPES[name], ""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        with module.device(device):  # the next call asks the current device
            if module.is_bf16_supported(including_emulation=False):
                return torch.bfloat16, "this GPU computes in it natively"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (7, 0):
            return torch.float16, "this GPU computes in it natively, but not in bfloat16"
        return torch.float32, "this GPU has no faster format"
    dtypes = [torch.bfloat16, torch.float16]
    if device.type == "cpu":
        if not re.search("avx512_bf16|amx_bf16", _cpu_info()):
            return torch.float32, "this device has no faster format"
        dtypes.pop()
    gains = _gains(device, dtypes)
    fast = [dtype for dtype in dtypes if gains[dtype] > 1.5]
    if not fast:
        return torch.float32, "no 16-bit format is over 1.5 times as fast here"
    # float16 only if it is clearly faster, because it needs loss scaling
    dtype = fast[-1] if gains[fast[-1]] > MIN_GAIN * gains[fast[0]] else fast[0]
    return dtype, f"{gains[dtype]:.1f} times as fast here"


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


def _gains(device: torch.device, dtypes: list[torch.dtype]) -> dict[torch.dtype, float]:
    """Return how many times as fast as float32 each dtype multiplies matrices; 0 if it cannot.

    The matrices have the size of a small GPT's on a CPU. On a GPU these would time kernel launches.

    Other processes interrupt single products for a few milliseconds. In alternation an
    interruption spoils few of the timings, of which the fastest count.
    """
    rows, inner, columns = (1024, 128, 384) if device.type == "cpu" else (2048, 2048, 2048)
    seconds = dict.fromkeys([torch.float32, *dtypes], math.inf)
    for _ in range(N_TIMINGS):
        for dtype in seconds:
            with contextlib.suppress(RuntimeError, TypeError):  # macOS before 14 has no bfloat16
                left = torch.ones(rows, inner, dtype=dtype, device=device)
                right = torch.ones(inner, columns, dtype=dtype, device=device)
                synchronize(device)
                start = time.perf_counter()
                left @ right
                synchronize(device)
                seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return {dtype: seconds[torch.float32] / seconds[dtype] for dtype in dtypes}


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
    """Return the bytes of memory of a GPU that this process may use, or of the machine or cgroup.

    On CUDA and Intel GPUs these are free or already reserved by this process.
    """
    if device is not None and device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        with contextlib.suppress(RuntimeError):  # an integrated Intel GPU uses the machine's memory
            return int(module.mem_get_info(device)[0] + module.memory_reserved(device))
    if device is not None and device.type == "mps":
        return torch.mps.recommended_max_memory()
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


def lazy_zeros(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return zeros that take memory only where they are written.

    In huge pages, as numpy asks for, a few bytes of each layer of a long KV cache would take most
    of it.
    """
    n_bytes = 4 * math.prod(shape)
    if n_bytes < LAZY_BYTES or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, np.float32)
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


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
            # on the stream of the warm-up: libraries have workspaces of each stream
            with torch.cuda.graph(graph, stream=side_stream):
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
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")
