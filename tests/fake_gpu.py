"""A fake GPU device: the CPU computes, but tensors must be moved to the device first.

It rejects operations that mix devices (CPU indices too, which a real GPU would copy) and records
host-device syncs. It covers what MPS runs, and what CUDA runs without CUDA graphs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
CPU, GPU = torch.device("cpu"), torch.device("gpu", 0)
COPYING = {"aten._to_copy.default", "aten.copy_.default"}
WAITING = {  # for a number of the device, or for a shape that hangs on one
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.masked_select.default",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten._unique2.default",
}
waits: list[str] = []  # what the program has waited in


class OnGPU(Tensor):
    """A tensor that says that it lies on the fake GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGPU":
        made: OnGPU = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        """Return the numbers; torch itself does not, of wrapper tensors."""
        waits.append("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(function, args, kwargs or {})


class Dispatch(TorchDispatchMode):
    """Sees also what makes a tensor out of nothing, or out of the CPU's."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(function, args, kwargs or {})


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the CPU; what it makes lies where it would have lain."""
    name = str(function)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    placed = [x.device == GPU for x in tensors]
    asked = kwargs.get("device")
    if name in COPYING:
        on_gpu = placed[0] if asked is None else torch.device(asked).type == GPU.type
        waited = placed[-1] and not on_gpu
    else:
        # single numbers of the CPU may come along where each element is worked out by itself
        single = torch.Tag.pointwise in function.tags
        fitting = (
            there or (single and not x.dim()) for x, there in zip(tensors, placed, strict=True)
        )
        assert not any(placed) or all(fitting), f"{name} meets tensors of two devices"
        on_gpu = any(placed) or (asked is not None and torch.device(asked).type == GPU.type)
        waited = any(placed) and name in WAITING
    if waited:
        waits.append(name)
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    bare_args, bare_kwargs = tree_map_only(OnGPU, lambda x: x.inner, (args, kwargs))
    result = function(*bare_args, **bare_kwargs)
    if on_gpu:
        result = tree_map_only(Tensor, OnGPU, result)
        return return_and_correct_aliasing(function, args, kwargs, result)
    return result


@contextlib.contextmanager
def fake_gpu_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Enable the fake device."""
    # torch refuses inference mode to wrapper tensors
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(torch.inference_mode, name, getattr(torch.no_grad, name))
    waits.clear()
    with Dispatch():
        yield GPU
