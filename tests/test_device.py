"""Choice of device, dtype and CPU threads, memory settings, and the process group."""

import platform
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from torch.distributed import HashStore

from chargpt import device as device_module
from chargpt.config import TextConfig, load_config
from chargpt.device import (
    ThreadTuner,
    choose_device,
    choose_dtype,
    choose_threads,
    default_threads,
    dtype_name,
    measure_threads,
    memory_limit,
    tune_malloc,
)
from chargpt.distributed import (
    RankGroup,
    destroy_process_group,
    init_process_group,
    is_lost_rank_error,
)
from chargpt.errors import DeviceError, is_out_of_memory
from chargpt.store.run import load_run
from chargpt.text.prepare import load_corpus
from chargpt.training import trainer as trainer_module
from chargpt.training.trainer import Trainer

CPU = torch.device("cpu")
TINY = {"model.n_layer": 1, "model.n_embd": 16, "model.block_size": 16, "threads": 1}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    before, caches = torch.get_num_threads(), (device_module._try_kernel, default_threads)
    for cached in caches:
        cached.cache_clear()
    yield
    torch.set_num_threads(before)
    for cached in caches:
        cached.cache_clear()


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", count: int = 2, **of_module: object
) -> MagicMock:
    """Let torch find GPUs, whose kernels work; return the fake `torch.cuda` or `torch.xpu`."""
    module = MagicMock()
    module.configure_mock(
        **{"is_available.return_value": True, "device_count.return_value": count},
        **{"get_device_name.return_value": "a GPU", **of_module},
    )
    gpu = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "ones", MagicMock())
    return module


def test_auto_uses_an_apple_gpu_or_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == (CPU, "no GPU found")
    fake_gpus(monkeypatch, "mps", 1)
    assert choose_device("auto") == (torch.device("mps"), "found an Apple GPU")
    assert choose_device("mps") == (torch.device("mps"), "")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_auto_uses_one_gpu_per_local_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, kind)
    assert choose_device("auto") == (torch.device(kind, 0), "found a GPU")
    assert choose_device("cpu") == (CPU, "")
    for rank, index in (("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert choose_device("auto")[0] == choose_device(kind)[0] == torch.device(kind, index)
        name = load_config("gpt").with_values({"device": f"{kind}:1"}).device
        assert choose_device(name)[0] == torch.device(kind, 1)
    with pytest.raises(DeviceError, match=f"'{kind}:2' is not available; .* cpu, {kind}:0, {kind}"):
        choose_device(f"{kind}:2")


@pytest.mark.parametrize("name", [*"cuda cuda:0 xpu mps tpu cuda: cuda:x CPU".split(), ""])
def test_an_unavailable_or_unknown_device_is_rejected(name: str) -> None:
    with pytest.raises(DeviceError, match=r"is not available; set it to auto or one of cpu$"):
        choose_device(name)


NO_KERNEL = "no kernel image is available for execution on the device\nCompile with `TORCH_USE"
OLD_BUILD = r"pytorch.org/get-started/locally \(CUDA 12.6\)$"


@pytest.mark.parametrize(
    ("capability", "error", "reason"),
    [
        ((6, 0), f"CUDA error: {NO_KERNEL}", f"P100 has no kernels in torch .*: {OLD_BUILD}"),
        ((12, 0), f"CUDA error: {NO_KERNEL}", "P100 has no kernels in torch .*/locally$"),
        (None, "HIP error: invalid device function\n", "P100 has no kernels in torch .*/locally$"),
        ((9, 0), "CUDA error: out of memory\nSearch", r"P100 does not start \(.* memory\); end "),
    ],
)
def test_a_gpu_that_runs_no_kernel_is_refused_and_auto_uses_the_cpu(
    capability: object, error: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake_gpus(monkeypatch)
    cuda.get_device_name.side_effect = lambda _: warnings.warn("old", stacklevel=1) or "P100"
    monkeypatch.setattr(torch.version, "cuda", capability and "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    kernel = MagicMock(side_effect=torch.AcceleratorError(error))
    monkeypatch.setattr(torch, "ones", kernel)
    with warnings.catch_warnings(action="error"):
        device, why = choose_device("auto")
    assert device == CPU
    assert re.match(reason, why)
    with pytest.raises(DeviceError, match=f"^cannot use cuda:0: {reason}") as caught:
        choose_device("cuda")
    assert "\n" not in str(caught.value)
    assert kernel.call_count == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 12040). Please update",
            f"the NVIDIA driver is too old for torch .*: {OLD_BUILD}",
        ),
        (
            "CUDA unknown error - this may be due to an incorrect environment, e.g. changing env",
            r"the GPU does not start \(CUDA unknown error\); .*restart the machine",
        ),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some? Error 804: no such HW",
            r"the GPU does not start \(Error 804: no such HW\); ",
        ),
        ("No CUDA GPUs are available", ""),
        ("Found no NVIDIA driver on your system. Please check", ""),
    ],
)
def test_a_driver_that_does_not_start_is_told_from_no_gpu(
    error: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake_gpus(monkeypatch, count=0)
    cuda.is_available.side_effect = lambda: bool(warnings.warn(error, stacklevel=1))
    cuda.init.side_effect = RuntimeError(error)
    with warnings.catch_warnings(action="error"):
        assert choose_device("cpu") == (CPU, "")
        device, why = choose_device("auto")
    assert device == CPU
    assert re.match(reason or "no GPU found$", why)
    expected = f"cannot use cuda: {reason}" if reason else "'cuda' is not available"
    with pytest.raises(DeviceError, match=expected):
        choose_device("cuda")


def test_training_computes_on_the_gpu_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, verse: Path
) -> None:
    current = MagicMock()
    monkeypatch.setattr(torch.accelerator, "set_device_index", current)
    for index in (None, 0):  # Apple's has none
        device = torch.device("cpu") if index is None else torch.device("cpu", index)
        monkeypatch.setattr(trainer_module, "choose_device", lambda _, device=device: (device, ""))
        Trainer(load_config().with_values(TINY), load_corpus(TextConfig(path=str(verse))))
    current.assert_called_once_with(0)


def test_a_configured_dtype_is_used() -> None:
    for device, dtype in (("mps", torch.bfloat16), ("cuda", torch.float32)):
        assert choose_dtype(torch.device(device), dtype_name(dtype)) == (dtype, "")


@pytest.mark.parametrize(
    ("device", "capability", "flags", "gains", "expected"),
    [
        ("cuda", (9, 0), "", (), torch.bfloat16),  # also ROCm, where torch says so of all cards
        ("cuda", (8, 0), "", (), torch.bfloat16),
        ("cuda", (7, 5), "", (), torch.float16),
        ("cuda", (7, 0), "", (), torch.float16),
        ("cuda", (6, 1), "", (), torch.float32),
        ("xpu", (8, 0), "", (), torch.bfloat16),
        ("xpu", (0, 0), "", (1.0, 1.8), torch.float16),
        ("mps", None, "", (1.4, 1.4), torch.float32),
        ("mps", None, "", (1.6, 1.9), torch.bfloat16),
        ("mps", None, "", (1.6, 2.1), torch.float16),
        ("mps", None, "", (0.0, 1.6), torch.float16),  # before macOS 14
        ("cpu", None, "avx512f avx512_bf16", (10.0,), torch.bfloat16),
        ("cpu", None, "avx512f avx512_bf16", (1.1,), torch.float32),
        ("cpu", None, "avx512f", (10.0,), torch.float32),
    ],
)
def test_auto_uses_a_16_bit_format_where_it_is_native_or_measured_as_faster(
    device: str,
    capability: Any,
    flags: str,
    gains: tuple[float, ...],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = fake_gpus(monkeypatch, device)
    gpu.is_bf16_supported = lambda *, including_emulation: capability >= (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(device_module, "_cpu_info", lambda: flags)
    monkeypatch.setattr(
        device_module, "_gains", lambda _, dtypes: dict(zip(dtypes, gains, strict=True))
    )
    assert choose_dtype(torch.device(device), "auto")[0] == expected


def test_the_gain_of_a_format_that_the_device_does_not_have_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones = torch.ones

    def without_bfloat16(*size: int, dtype: torch.dtype, **_: object) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return ones(8, 8)

    monkeypatch.setattr(torch, "ones", without_bfloat16)
    gains = device_module._gains(CPU, [torch.bfloat16, torch.float16])
    assert gains[torch.bfloat16] == 0 < gains[torch.float16]


def test_the_memory_of_a_gpu_is_what_is_free_or_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpus(monkeypatch)
    gpu.mem_get_info.return_value, gpu.memory_reserved.return_value = (3, 80), 4
    assert [memory_limit(torch.device(kind, 0)) for kind in ("cuda", "xpu")] == [7, 7]
    gpu.mem_get_info.side_effect = RuntimeError("doesn't support querying the free memory")
    assert memory_limit(torch.device("xpu", 0)) == memory_limit()  # an integrated GPU
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 5)
    assert memory_limit(torch.device("mps")) == 5


@pytest.mark.parametrize("missing", [None, "AMD", "AVX512", "MKL"])
def test_onednn_is_chosen_on_amd_cpus_with_avx512(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = "GenuineIntel" if missing == "AMD" else "AuthenticAMD"
    capability = "AVX2" if missing == "AVX512" else "AVX512"
    monkeypatch.setattr(device_module, "_cpu_info", lambda: f"vendor_id : {vendor}")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: missing != "MKL")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert device_module.onednn_is_faster.__wrapped__() is (missing is None)


def test_a_single_rank_reduces_and_broadcasts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = init_process_group()
    assert group == RankGroup(0, 1)
    value = torch.tensor([1.0, 2.0])
    assert group.all_reduce_sum(value) is value
    assert [group.all_reduce_any(each) for each in (True, False)] == [True, False]
    assert group.broadcast("x") == "x"
    assert group.broadcast_text("caf\udce9") == "caf\udce9"  # a path that is not UTF-8
    destroy_process_group()  # no group: does nothing
    assert [RankGroup(rank, 3).is_main for rank in range(3)] == [True, False, False]


def test_a_missing_rendezvous_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DeviceError, match=r"cannot connect the 2 processes .*torchrun") as caught:
        init_process_group()
    assert "\n" not in str(caught.value)


def test_a_process_group_of_the_program_is_rejected_and_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(DeviceError, match="has a process group of its own; destroy it"):
            init_process_group()
        destroy_process_group()  # only that of a training
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "rendezvous", lambda _: iter([(HashStore(), 0, 1)]))
    for _ in range(2):  # that of a training before is replaced
        assert init_process_group() == RankGroup(0, 1)
    destroy_process_group()
    assert not dist.is_initialized()


def test_malloc_is_tuned_on_glibc_only() -> None:
    assert tune_malloc() is (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [::1]:2917",
        "NCCL error in: ProcessGroupNCCL.cpp:3763, remote process exited or there was a network",
        "NCCL communicator was aborted on rank 1.  Original reason for failure was: timeout",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    ],
)
def test_the_errors_of_a_lost_rank_are_known(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_lost_rank_error(RuntimeError(message))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost_rank_error(RuntimeError(message))
    for other in (
        "CUDA out of memory. Tried to allocate 2 GiB",
        "MPS backend out of memory (MPS allocated: 18 GiB)",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",  # Windows
        "could not create a primitive",  # oneDNN
        "NCCL error: unhandled cuda error: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(other))
        assert not is_lost_rank_error(RuntimeError(f"{other} (gloo)"))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mps", "gloo")],
)
def test_ranks_on_gpus_agree_over_gloo(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = []
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fake_gpus(monkeypatch, kind)
    monkeypatch.setattr(rendezvous, "rendezvous", lambda _: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    init_process_group()
    assert backends == [backend]


class Machine:
    """A clock that advances by the time of an operation, given for each number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(device_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(device_module.F, "silu", self.operate)

    def operate(self, x: torch.Tensor) -> torch.Tensor:
        self.now += self.seconds[torch.get_num_threads()]
        return x


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({4: 1.0, 2: 1.8, 1: 3.4}, 4),
        ({4: 9.0, 2: 1.8, 1: 3.4}, 2),  # another process uses one of the cores
        ({4: 9.0, 2: 3.1, 1: 3.4}, 1),  # a gain that is within the noise
        ({1: 3.4}, 1),
    ],
)
def test_the_fastest_number_of_threads_is_set(
    seconds: dict[int, float], fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, seconds)
    assert choose_threads(max(seconds)) == fastest == torch.get_num_threads()


def test_threads_are_chosen_again_when_the_speed_falls_and_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, {2: 1e-3, 1: 2e-3})
    torch.set_num_threads(2)
    tuner = ThreadTuner(2)
    assert tuner.update(1000.0) is None
    assert tuner.update(600.0) is None
    machine.seconds[2] = 0.1  # another process starts
    assert tuner.update(400.0) == 1
    assert tuner.update(500.0) is None
    machine.seconds[2] = 1e-3  # it ends
    assert tuner.update(500.0) is None
    machine.now += 21
    assert tuner.update(500.0) == 2


def test_the_users_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {2: 0.1, 1: 1e-3})
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert measure_threads(CPU) is None
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert measure_threads(torch.device("cuda")) is None
    assert torch.get_num_threads() == 2
    assert measure_threads(CPU) == torch.get_num_threads() == 1  # another process uses a core
    machine.seconds[2] = 1e-4
    assert measure_threads(CPU) == 2


def test_a_loaded_run_uses_the_fastest_threads_unless_training_has_set_them(
    monkeypatch: pytest.MonkeyPatch, verse: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = Machine(monkeypatch, {2: 0.1, 1: 1e-3})
    torch.set_num_threads(2)
    run = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
    load_run(run, device="cpu")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    default_threads.cache_clear()
    machine.seconds[2] = 1e-4
    config = load_config().with_values({**TINY, "device": "cpu", "dtype": "float32"})
    Trainer(config, load_corpus(TextConfig(path=str(verse))))
    assert (torch.get_num_threads(), default_threads()) == (1, 2)  # later runs may use more
    load_run(run, device="cpu")
    assert torch.get_num_threads() == 1
