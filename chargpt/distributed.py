"""Data-parallel training: the ranks that `torchrun` starts, and their process group.

The command line imports this module before it knows whether it needs torch.
"""

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chargpt.errors import DeviceError

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train one model together. Without `torchrun` it is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def all_reduce_mean(self, value: "torch.Tensor") -> "torch.Tensor":
        """Return the mean of a tensor over all ranks (all-reduce)."""
        if self.world_size > 1:
            import torch.distributed as dist

            value = value.clone()
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.all_reduce_mean(self._scalar(flag)) > 0)

    def broadcast(self, number: float) -> float:
        """Return rank 0's number on every rank."""
        if self.world_size == 1:
            return number
        import torch.distributed as dist

        tensor = self._scalar(number)
        dist.broadcast(tensor, src=0)
        return float(tensor)

    def _scalar(self, number: float) -> "torch.Tensor":
        # on the CPU, which has a backend of its own: on a GPU each number would synchronise
        import torch

        return torch.tensor(float(number), dtype=torch.float64)


def init_process_group(device: "torch.device") -> RankGroup:
    """Join the process group of `torchrun`, if it started this process, or raise DeviceError."""
    size = world_size()
    is_main_rank()  # checks the variable
    if size == 1:
        return RankGroup()
    if device.type == "mps":
        raise DeviceError(
            "an Apple GPU trains with one process; start without torchrun, or set device to cpu"
        )
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(iter(rendezvous("env://")))
        # ranks restarted by `--max-restarts` find the same store (pytorch issue 135712), with the
        # addresses of the previous attempt: a prefix per attempt separates them. The restart count
        # may differ between machines, so this applies on a single machine only.
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"cannot connect the {size} processes ({str(error).splitlines()[0]}); "
            "start them with `torchrun`"
        ) from None
    return RankGroup(dist.get_rank(), dist.get_world_size())


def is_lost_rank_error(error: Exception) -> bool:
    """Return whether an error means that the connection to another rank was lost."""
    message = repr(error)
    is_network_error = re.search(LOST_RANK, message) and "out of memory" not in message
    return world_size() > 1 and bool(is_network_error)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
