"""Where the work runs: CUDA, MPS or CPU, in which number format, alone or among ranks."""

import contextlib
import ctypes
import functools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chargpt.errors import DeviceError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MOST_MMAP_THRESHOLD = 32 * 2**20  # it takes no larger one
CPU_FACTS = 10_000  # characters of /proc/cpuinfo: the first processor and more
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that train together. Alone, it is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        return bool(self.mean(self._number(flag)) > 0)

    def broadcast(self, number: float) -> float:
        """Return rank 0's number on every rank; the others' are not looked at."""
        if self.size == 1:
            return number
        tensor = self._number(number)
        dist.broadcast(tensor, src=0)
        return float(tensor)

    def _number(self, number: float) -> Tensor:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return torch.tensor(float(number), dtype=torch.float64, device=device)


def world_size() -> int:
    """Return how many processes `torchrun` has started to train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_rank() -> bool:
    """Return whether this process is rank 0 among those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def init_process_group(device: torch.device) -> ProcessGroup:
    """Join the processes that `torchrun` started, if it did.

    Raises:
        DeviceError: the other processes could not be met.
    """
    size = world_size()
    if size == 1:
        return ProcessGroup()
    from torch.distributed.rendezvous import rendezvous

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(iter(rendezvous("env://")))
        # processes that `--max-restarts` starts again find the same store (pytorch issue 135712):
        # the addresses that those before have left in it must not be taken for theirs. Among
        # several machines the count is not everyone's.
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"the {size} processes could not meet ({str(error).splitlines()[0]}); "
            "start them with `torchrun`"
        ) from None
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def is_lost_rank_error(error: Exception) -> bool:
    """Return whether an error says that another rank has gone."""
    told = isinstance(error, dist.DistNetworkError) or any(
        words in str(error) for words in ("gloo", "remote process exited", "Connection closed by")
    )
    return world_size() > 1 and told and "out of memory" not in str(error)


def destroy_process_group() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device that `auto`, `cpu`, `cuda`, `cuda:N` or `mps` means, and why.

    Raises:
        DeviceError: that device is not on this machine.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        if cuda:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            return device, f"found {torch.cuda.get_device_name(device)}"
        if mps:
            return torch.device("mps"), "found an Apple GPU"
        return torch.device("cpu"), "no GPU found"
    if name.startswith("cuda"):
        if not cuda:
            raise DeviceError("no CUDA GPU can be used here; leave device at auto, or set cpu")
        count = torch.cuda.device_count()
        index = int(name[5:]) if ":" in name else local_rank % count
        if index >= count:
            raise DeviceError(f"{name} is not here; this machine has cuda:0 to cuda:{count - 1}")
        return torch.device("cuda", index), "as asked"
    if name == "mps" and not mps:
        raise DeviceError("no Apple GPU can be used here; leave device at auto, or set cpu")
    return torch.device(name), "as asked"


def choose_dtype(device: torch.device, name: str) -> tuple[torch.dtype, str]:
    """Return the format that matrix products run in, and why; weights are always float32.

    `auto` takes bfloat16 only where the hardware has it and it is measurably faster.
    """
    if name != "auto":
        return (torch.bfloat16 if name == "bfloat16" else torch.float32), "as asked"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, "this GPU computes in it natively"
        return torch.float32, "this GPU has no native bfloat16"
    if device.type == "cpu" and _cpu_has_bfloat16():
        gain = _matmul_seconds(torch.float32) / _matmul_seconds(torch.bfloat16)
        if gain > 1.5:
            return torch.bfloat16, f"measured {gain:.1f} times as fast here"
        return torch.float32, "bfloat16 is no faster here"
    return torch.float32, "this device has no faster format"


def _cpu_has_bfloat16() -> bool:
    facts = _cpu_facts()
    return "avx512_bf16" in facts or "amx_bf16" in facts


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether float32 products on this CPU are sooner done by oneDNN than by MKL.

    Torch has both. MKL leaves half of an AMD processor's AVX-512 unused.
    """
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not both or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    return "AuthenticAMD" in (_cpu_facts() or platform.processor())


def _cpu_facts() -> str:
    """Return what Linux says of the processor, or nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read(CPU_FACTS)
    except OSError:
        return ""


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Return the best of a few timings of a product of the size that a small GPT makes."""
    left, right = torch.ones(4096, 128, dtype=dtype), torch.ones(128, 384, dtype=dtype)
    timings = []
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        timings.append(time.perf_counter() - start)
    return min(timings)


def make_deterministic(device: torch.device) -> None:
    """Make every operation give the same bits each time, or fail saying that it cannot."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def tune_malloc() -> bool:
    """Make the C library keep freed memory for the next tensor; return whether it does.

    By default it hands large blocks back to the system, and gets them again page by page, cleared:
    thousands of page faults in every training step on a CPU. Only glibc can be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, 2**31 - 1))
    taken = [mallopt(name, value) for name, value in settings]  # both, whatever the first says
    return taken == [1, 1]


def memory_of(device: torch.device | None = None) -> int:
    """Return how many bytes of memory this process can have at most, on a device or beside it."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if not hasattr(os, "sysconf"):
        return 2**63  # Windows does not say without help
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in CGROUP_LIMITS:
        try:
            written = limit.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if written.isdigit():
            most = min(most, int(written))
    return most


def require_memory(wanted: int, what: str, device: torch.device | None = None) -> None:
    """Check that so many bytes can be had, before anything asks for them.

    Raises:
        DeviceError: they cannot; `what` names what wants them.
    """
    most = memory_of(device)
    if wanted > most:
        raise DeviceError(
            f"{what} would take about {wanted / 1e9:,.1f} GB of memory, and this machine has "
            f"{most / 1e9:,.1f} GB; make it smaller"
        )


def capture(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> None:
    """Let a model on a CUDA GPU replay its training passes over tokens of this shape.

    A pass of a small model is hundreds of short operations, and telling the GPU of each takes
    longer than doing it: a CUDA graph tells it of all at once. Where that cannot be, all stays as
    it was.

    Args:
        model: in training mode; in evaluation it runs as ever.
        tokens: int64 (B, T), of the shape that every training pass will have.
        dtype: of matrix products.
    """
    mixed = torch.autocast(
        "cuda", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False
    )
    with mixed, contextlib.suppress(RuntimeError):
        torch.cuda.make_graphed_callables(model, (tokens,))


def capture_graph(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return what does a step again: on CUDA as one graph, for the reason that `capture` gives.

    Where that cannot be, or gives another result, it is the step itself.

    Args:
        step: always does the same to tensors that stay where they are, and may be done twice.
    """
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device):  # a graph is captured on the current one
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # first uses allocate and choose, which a graph may not
                for _ in range(3):
                    expected = step().clone()
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph):
                result = step()
        graph.replay()
    except RuntimeError:
        return step
    if not torch.allclose(result, expected, rtol=1e-3, atol=1e-3):
        return step

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told, for the sake of timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")
