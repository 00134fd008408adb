"""Data-parallel training: the ranks that `torchrun` starts, and their process group.

The command line imports this module before it knows whether it needs torch.
"""

import itertools
import os
import re
import socket
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chargpt.errors import DeviceError, is_out_of_memory

if TYPE_CHECKING:
    import torch

TIMEOUT_SECONDS = 600  # of a rank that waits for another: more than rank 0 ever needs alone
MAX_LAUNCH_SECONDS = 60  # a parent that began earlier did more than to start the ranks
_numbers = itertools.count()  # of the trainings of this process
_groups: list[Any] = []  # the process group of the last of them, until it is destroyed
LOST_RANK = (  # in errors of torch, gloo, NCCL and NCCL's watchdog
    "DistNetworkError|gloo|remote process exited|Connection closed by|ncclRemoteError|"
    "NCCL communicator was aborted|Watchdog caught collective operation timeout"
)


def world_size() -> int:
    """Return the number of ranks that `torchrun` started; 1 without it."""
    return max(1, rank_variable("WORLD_SIZE", 1))


def is_main_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return world_size() == 1 or rank_variable("RANK") == 0


def rank_variable(name: str, default: int = 0) -> int:
    """Return an environment variable of `torchrun`, or raise DeviceError if it is no number."""
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise DeviceError(
            f"the environment variable {name} is {text!r:.40}, not the number that `torchrun` "
            "sets; unset it"
        )
    return int(text)


def launch_seconds() -> float:
    """Return how long `torchrun` took to start this process; 0 of restarts and if unknown."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return 0.0
    with suppress(OSError, ValueError, IndexError, AttributeError):  # only Linux has these
        parent = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="ascii")
        ticks_at_start = int(parent.rpartition(")")[2].split()[19])
        started = ticks_at_start / os.sysconf("SC_CLK_TCK")
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        return seconds if 0 < seconds < MAX_LAUNCH_SECONDS else 0.0
    return 0.0


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train one model together. Without `torchrun` it is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, so that nothing is communicated."""
        return self.world_size == 1

    def all_reduce_sum(self, value: "torch.Tensor") -> "torch.Tensor":
        """Return the sum of a tensor over all ranks (all-reduce)."""
        if not self.is_alone:
            import torch.distributed as dist

            value = value.clone()
            dist.all_reduce(value)
        return value

    def average(self, tensors: "list[torch.Tensor]") -> None:
        """Replace tensors of one dtype by their means over all ranks, in one all-reduce."""
        if self.is_alone:
            return
        import torch
        import torch.distributed as dist

        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self.world_size)
        dist.all_reduce(flat)
        parts = zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True)
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in parts])

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.agree(flag, 0.0)[0]

    def agree(self, flag: bool, number: float) -> tuple[bool, float]:
        """Return whether the flag is set on any rank, and rank 0's number, in one all-reduce."""
        if self.is_alone:
            return flag, number
        import torch

        # on the CPU, which has a backend of its own: on a GPU each number would synchronise
        values = torch.tensor([float(flag), number if self.is_main else 0.0], dtype=torch.float64)
        n_set, of_rank_0 = self.all_reduce_sum(values).tolist()
        return n_set > 0, of_rank_0

    def all_gather(self, part: "torch.Tensor") -> "torch.Tensor":
        """Return the tensors (N, ...) of all ranks, in their order, as (world_size * N, ...)."""
        if self.is_alone:
            return part
        import torch.distributed as dist

        whole = part.new_empty((self.world_size * len(part), *part.shape[1:]))
        dist.all_gather(list(whole.chunk(self.world_size)), part.contiguous())
        return whole

    def broadcast(self, number: float) -> float:
        """Return rank 0's number on every rank."""
        return self.agree(False, number)[1]

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        content = text.encode(errors="surrogateescape")  # as of a path that is not UTF-8
        size = int(self.broadcast(len(content)))
        return self.broadcast_bytes(content, size).decode(errors="surrogateescape")

    def broadcast_bytes(self, content: bytes, size: int) -> bytes:
        """Return rank 0's bytes, `size` of them, on every rank."""
        if self.is_alone or not size:
            return content
        import torch
        import torch.distributed as dist

        tensor = torch.empty(size, dtype=torch.uint8)
        if self.is_main:
            tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()


def init_process_group() -> RankGroup:
    """Join the process group of `torchrun`, if it started this process, or raise DeviceError."""
    size = world_size()
    is_main_rank(), rank_variable("LOCAL_RANK")  # checks the variables
    if size == 1:
        return RankGroup()
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    number = next(_numbers)
    destroy_process_group()  # of a training before that failed
    if dist.is_initialized():
        raise DeviceError(
            "this program has a process group of its own; destroy it before training, with "
            "torch.distributed.destroy_process_group()"
        )
    try:
        shared, rank, size = next(iter(rendezvous("env://")))
        store = _new_store(shared, number, is_main=rank == 0)
        with warnings.catch_warnings(action="ignore"):  # `choose_device` says what they say
            gpu = torch.accelerator.current_accelerator(check_available=True)
        backends = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
        backend = backends.get(gpu.type if gpu else "cpu", "gloo")
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"cannot connect the {size} processes ({str(error).splitlines()[0]}); "
            "start them with `torchrun`"
        ) from None
    finally:
        if dist.is_initialized():
            _groups.append(dist.group.WORLD)
    return RankGroup(dist.get_rank(), dist.get_world_size())


def _new_store(shared: Any, number: int, *, is_main: bool) -> Any:
    """Return a store of these ranks alone, which rank 0 serves and names in the shared one.

    Ranks restarted by `--max-restarts` find the shared store with the addresses of the ranks before
    (pytorch issue 135712), also that of their own store, at which nobody answers any more. At that
    of an earlier training of this process somebody may, so that each `number` has its own.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, key = os.environ["MASTER_ADDR"], f"port of the ranks' store {number}"
    if is_main:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        shared.set(key, str(store.port))
        return store
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        port = int(shared.get(key))
        with suppress(OSError):
            socket.create_connection((host, port), timeout=2).close()
            return TCPStore(host, port, is_master=False)
        time.sleep(0.1)
    raise RuntimeError(f"rank 0 at {host} does not answer")


def is_lost_rank_error(error: Exception) -> bool:
    """Return whether an error means that the connection to another rank was lost."""
    is_network_error = re.search(LOST_RANK, repr(error)) and not is_out_of_memory(error)
    return world_size() > 1 and bool(is_network_error)


def destroy_process_group() -> None:
    """Destroy the process group of this process's last training, if it is still there."""
    import torch.distributed as dist

    is_own = dist.is_initialized() and dist.group.WORLD in _groups
    _groups.clear()
    if is_own:
        dist.destroy_process_group()
