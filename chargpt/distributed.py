"""Data-parallel training: the ranks that `torchrun` starts, and their process group."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from chargpt.errors import DeviceError
from chargpt.ranks import is_main_rank, world_size

LOST_RANK = (  # in the messages of gloo, NCCL and NCCL's watchdog
    "gloo",
    "remote process exited",
    "Connection closed by",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train one model together. Without `torchrun` it is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks (all-reduce)."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world_size == 1:
            return flag
        return bool(self.all_reduce_mean(self._scalar(flag)) > 0)

    def broadcast(self, number: float) -> float:
        """Return rank 0's number on every rank."""
        if self.world_size == 1:
            return number
        tensor = self._scalar(number)
        dist.broadcast(tensor, src=0)
        return float(tensor)

    def _scalar(self, number: float) -> Tensor:
        # on the CPU, which has a backend of its own: on a GPU each number would synchronise
        return torch.tensor(float(number), dtype=torch.float64)


def init_process_group(device: torch.device) -> RankGroup:
    """Join the process group of `torchrun`, if it started this process, or raise DeviceError."""
    size = world_size()
    is_main_rank()  # checks the variable
    if size == 1:
        return RankGroup()
    if device.type == "mps":
        raise DeviceError(
            "an Apple GPU trains with one process; start without torchrun, or set device to cpu"
        )
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
    is_network_error = isinstance(error, dist.DistNetworkError) or any(
        words in str(error) for words in LOST_RANK
    )
    return world_size() > 1 and is_network_error and "out of memory" not in str(error)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
