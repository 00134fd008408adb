"""A fake GPU device: the CPU computes, but tensors must be moved to the device first.

It rejects operations that mix devices (CPU indices too, which a real GPU would copy) and records
host-device syncs. Fake CUDA graphs repeat the captured operations on the same memory, and capture
fails as on CUDA: at a sync, or at a copy from the CPU. First calls can be slow, as on a GPU.
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

from chargpt.analysis import doctor
from chargpt.inference import decoders
from chargpt.inference.decoders import model_decoder
from chargpt.training import learner


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


class Clock:
    """The time that operations on the fake device take, by their count: the first of a name more.

    Args:
        first_seconds: of the first call of an operation; every call takes a microsecond.
    """

    def __init__(self, first_seconds: float) -> None:
        self.first_seconds = first_seconds
        self.now = 0.0
        self.warm: set[str] = set()

    def run(self, name: str) -> None:
        """Let the time of a call pass."""
        self.now += 1e-6 if name in self.warm else self.first_seconds
        self.warm.add(name)


clock: Clock | None = None


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
    if on_gpu and clock is not None:
        clock.run(name)
    if FakeGraph.capturing is not None:
        from_cpu = on_gpu and name in COPYING and not is_on_gpu[-1] and tensors[-1].dim()
        if synchronises or from_cpu:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
    if target is not None:
        kwargs = {**kwargs, "device": CPU}
    bare_args, bare_kwargs = tree_map_only(OnGPU, lambda x: x.inner, (args, kwargs))
    result = function(*bare_args, **bare_kwargs)
    if on_gpu and FakeGraph.capturing is not None:
        FakeGraph.capturing.operations.append((function, bare_args, bare_kwargs, result))
    if on_gpu:
        result = tree_map_only(Tensor, OnGPU, result)
        return return_and_correct_aliasing(function, args, kwargs, result)
    return result


class FakeGraph:
    """A CUDA graph: the operations of a capture, with their memory."""

    capturing: "FakeGraph | None" = None
    replays = 0

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def clear(self) -> None:
        """Fill new tensors with NaN: on CUDA, capture computes nothing."""
        for _, args, kwargs, result in self.operations:
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.is_floating_point() and _memory(x) not in given:
                    x.detach().fill_(torch.nan)

    def replay(self) -> None:
        """Repeat the operations and write their results into the same memory."""
        FakeGraph.replays += 1
        for function, args, kwargs, result in self.operations:
            repeated = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeStream:
    def wait_stream(self, other: "FakeStream") -> None:
        """Do nothing: operations run in order."""


class FakeGenerator:
    """The part of a CUDA generator that a failed capture leaves behind."""

    is_capturing = False

    def clone_state(self) -> "FakeGenerator":
        return FakeGenerator()

    def graphsafe_set_state(self, state: "FakeGenerator") -> None:
        self.is_capturing = state.is_capturing


class FakeCuda:
    """The functions of `torch.cuda` that capture uses."""

    CUDAGraph, Stream = FakeGraph, FakeStream

    def __init__(self) -> None:
        self.stream_now = FakeStream()
        self.default_generators = [FakeGenerator()]
        FakeGraph.replays = 0

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> FakeStream:
        return self.stream_now

    def set_stream(self, stream: FakeStream) -> None:
        self.stream_now = stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        """Record the operations; after an error the stream and the generator stay as they were."""
        (generator,) = self.default_generators
        generator.is_capturing, FakeGraph.capturing = True, graph
        try:
            with self.stream(FakeStream()):
                yield
        finally:
            FakeGraph.capturing = None
        generator.is_capturing = False
        graph.clear()


@contextlib.contextmanager
def fake_gpu_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Enable the fake device."""
    # torch does not support wrapper tensors in inference mode
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(torch.inference_mode, name, getattr(torch.no_grad, name))
    syncs.clear()
    with Dispatch():
        yield GPU


def enable_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Give the fake device CUDA graphs."""
    cuda = FakeCuda()
    for name in (
        *("CUDAGraph", "Stream", "default_generators", "device", "current_device"),
        *("current_stream", "set_stream", "stream", "graph"),
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for module in (learner, decoders, model_decoder, doctor):
        monkeypatch.setattr(module, "can_capture", lambda device: device == GPU)
    return cuda


def slow_first_calls(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Clock:
    """Replace `time.perf_counter` by a clock of a device whose first calls take `seconds`."""
    slow = Clock(seconds)
    monkeypatch.setattr("fake_gpu.clock", slow)
    monkeypatch.setattr("time.perf_counter", lambda: slow.now)
    return slow
