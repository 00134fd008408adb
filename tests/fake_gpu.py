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
    """The functions that torch requires of a device module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
CPU, GPU = torch.device("cpu"), torch.device("gpu", 0)
COPYING = {"aten._to_copy.default", "aten.copy_.default"}
SYNCHRONISING = {  # they return a value, or a shape that depends on values
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.masked_select.default",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten._unique2.default",
}
syncs: list[str] = []  # names of the operations that synchronised


class OnGPU(Tensor):
    """A CPU tensor that reports the fake GPU as its device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGPU":
        wrapper: OnGPU = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        wrapper.inner = inner
        return wrapper

    def tolist(self) -> Any:
        """Return the values, which torch does not do for wrapper tensors."""
        syncs.append("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(function, args, kwargs or {})


class Dispatch(TorchDispatchMode):
    """Intercepts factory functions and operations on CPU tensors as well."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(function, args, kwargs or {})


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU; its result has the device that it would have had."""
    name = str(function)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    is_on_gpu = [x.device == GPU for x in tensors]
    target = kwargs.get("device")
    if name in COPYING:
        on_gpu = is_on_gpu[0] if target is None else torch.device(target).type == GPU.type
        synchronises = is_on_gpu[-1] and not on_gpu
    else:
        # pointwise operations accept scalar CPU tensors
        is_pointwise = torch.Tag.pointwise in function.tags
        accepted = (
            on_device or (is_pointwise and not x.dim())
            for x, on_device in zip(tensors, is_on_gpu, strict=True)
        )
        assert not any(is_on_gpu) or all(accepted), f"{name} mixes tensors of two devices"
        on_gpu = any(is_on_gpu) or (target is not None and torch.device(target).type == GPU.type)
        synchronises = any(is_on_gpu) and name in SYNCHRONISING
    if synchronises:
        syncs.append(name)
    if target is not None:
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
    # torch does not support wrapper tensors in inference mode
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(torch.inference_mode, name, getattr(torch.no_grad, name))
    syncs.clear()
    with Dispatch():
        yield GPU
