"""Choice of device and dtype, memory settings, and the process group."""

import os
import platform
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from chargpt import device as device_module
from chargpt.device import choose_device, choose_dtype, dtype_name
from chargpt.distributed import (
    RankGroup,
    destroy_process_group,
    init_process_group,
    is_lost_rank_error,
)
from chargpt.errors import DeviceError

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent / "golden" / "0.1.0" / "run"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.usefixtures("no_gpu")
def test_auto_uses_an_apple_gpu_or_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == (CPU, "no GPU found")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto")[0] == choose_device("mps")[0] == torch.device("mps")


@pytest.mark.usefixtures("two_gpus")
def test_auto_uses_one_gpu_per_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == (torch.device("cuda", 0), "found a GPU")
    assert choose_device("cpu") == (CPU, "")
    for rank, index in (("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert choose_device("auto")[0] == choose_device("cuda")[0] == torch.device("cuda", index)
        assert choose_device("cuda:1")[0] == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="cuda:2 is not available; use one of cuda:0 to cuda:1"):
        choose_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cuda", "cuda:0", "mps"), "GPU is available; set device to auto or cpu"),
        (("tpu", "cuda:", "cuda:x", "CPU", ""), "is not one of auto, cpu, cuda, cuda:N, mps"),
    ],
)
def test_an_unavailable_or_unknown_device_is_rejected(names: tuple[str, ...], message: str) -> None:
    for name in names:
        with pytest.raises(DeviceError, match=message):
            choose_device(name)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_configured_dtype_is_used(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_dtype(torch.device(device), dtype_name(dtype)) == (dtype, "")


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [
        ("cuda", (9, 0), torch.bfloat16),
        ("cuda", (8, 0), torch.bfloat16),
        ("cuda", (7, 5), torch.float32),
        ("mps", None, torch.float32),
    ],
)
def test_auto_uses_bfloat16_only_on_gpus_that_support_it(
    device: str, capability: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype(torch.device(device), "auto")[0] == dtype


@pytest.mark.parametrize(
    ("native", "gain", "dtype"),
    [(True, 10.0, torch.bfloat16), (True, 1.1, torch.float32), (False, 10.0, torch.float32)],
)
def test_auto_uses_bfloat16_on_a_cpu_only_if_native_and_measured_faster(
    native: bool, gain: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "avx512f avx512_bf16" if native else "avx512f"
    monkeypatch.setattr(device_module, "_cpu_info", lambda: flags)
    monkeypatch.setattr(device_module, "_bfloat16_gain", lambda: gain)
    assert choose_dtype(CPU, "auto")[0] == dtype


def test_interruptions_of_single_products_do_not_change_the_measured_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock says 3 ms for float32, 1 ms for bfloat16, and 50 ms more four times in a row."""
    durations = [3.0, 1.0] * device_module.N_TIMINGS
    for interrupted in range(0, len(durations), 5):
        slow = [n in range(interrupted, interrupted + 4) for n in range(len(durations))]
        times = [0.0]
        for duration, is_slow in zip(durations, slow, strict=True):
            times += [times[-1] + duration + 50.0 * is_slow] * 2
        clock = iter(times)
        monkeypatch.setattr(device_module.time, "perf_counter", lambda clock=clock: next(clock))
        assert device_module._bfloat16_gain() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("facts", "capability", "mkl", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True, True),
        ("vendor_id : GenuineIntel", "AVX512", True, False),
        ("vendor_id : AuthenticAMD", "AVX2", True, False),
        ("vendor_id : AuthenticAMD", "AVX512", False, False),
    ],
)
def test_onednn_is_chosen_on_amd_cpus_with_avx512(
    facts: str, capability: str, mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_cpu_info", lambda: facts)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert device_module.onednn_is_faster.__wrapped__() is expected


def test_a_single_rank_reduces_and_broadcasts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = init_process_group(CPU)
    assert group == RankGroup(0, 1)
    value = torch.tensor([1.0, 2.0])
    assert group.all_reduce_mean(value) is value
    assert [group.all_reduce_any(each) for each in (True, False)] == [True, False]
    assert group.broadcast("x") == "x"
    destroy_process_group()  # no group: does nothing
    assert [RankGroup(rank, 3).is_main for rank in range(3)] == [True, False, False]


def test_a_missing_rendezvous_address_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DeviceError, match=r"cannot connect the 2 processes .*torchrun") as caught:
        init_process_group(CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_importing_the_package_prepares_cublas_for_deterministic_algorithms() -> None:
    # cuBLAS reads the variable once, at its first call
    words = "import os, chargpt.device; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    for given, expected in ((None, ":4096:8"), (":16:8", ":16:8")):
        environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
        if given:
            environment["CUBLAS_WORKSPACE_CONFIG"] = given
        done = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True)
        assert done.stdout.decode().strip() == expected


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [::1]:2917",
        "NCCL error in: ProcessGroupNCCL.cpp:3763, remote process exited or there was a network "
        "error, NCCL version 2.28.8\nncclRemoteError: A call failed possibly",
        "NCCL communicator was aborted on rank 1.  Original reason for failure was: timeout",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    ],
)
def test_the_errors_of_a_lost_rank_are_known(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(message)
    assert not is_lost_rank_error(error)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost_rank_error(error)
    assert not is_lost_rank_error(RuntimeError("CUDA out of memory"))
    assert not is_lost_rank_error(RuntimeError("NCCL error: unhandled cuda error: out of memory"))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_a_loaded_run_reuses_freed_memory_without_page_faults() -> None:
    script = """
import resource, sys, torch
from chargpt import load_run
load_run(sys.argv[1], device="cpu")
def page_faults():
    tensors = [torch.zeros(4, 1 << 20) for _ in range(4)]  # 64 MiB
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = page_faults()
for _ in range(20):
    last = page_faults()
print(last - first)
"""
    command = [sys.executable, "-c", script, str(GOLDEN)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # fresh memory costs 4,096 pages for each of the 80 tensors; one may be fragmented
    assert int(done.stdout) < 2 * 4096


def test_ranks_on_gpus_agree_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(rendezvous, "rendezvous", lambda _: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    group = init_process_group(torch.device("cuda", 0))
    assert backends == ["cpu:gloo,cuda:nccl"]
    assert group._scalar(1).device == CPU
