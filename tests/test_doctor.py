"""`chargpt doctor`: results of the checks, and their advice."""

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Cli

from chargpt.analysis import doctor
from chargpt.analysis.doctor import describe_gpu, gradient_error, matmul_flops, run_checks
from chargpt.inference.decoders import NumpyDecoder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "MATRIX_SIZE", 64)
    monkeypatch.setattr(doctor, "GPU_MATRIX_SIZE", 128)


def advice(name: str) -> str:
    return next(finding.advice for finding in run_checks("cpu") if finding.name == name)


def test_gradient_error_is_within_the_precision_of_the_dtype() -> None:
    assert gradient_error(CPU, torch.float64) == 0
    assert 1e-9 < gradient_error(CPU, torch.float32) < 1e-5
    assert 1e-4 < gradient_error(CPU, torch.bfloat16) < 0.1
    assert 1e-4 < gradient_error(CPU, torch.float16) < 0.02


@pytest.mark.parametrize("name", ["gradient", "decoding"])
def test_a_device_with_wrong_gradients_or_decoding_is_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    assert advice(name) == ""
    exact = doctor.gradient_function

    def wrong(device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        gradient = exact(device, dtype)
        return gradient if dtype == torch.float64 else lambda: gradient() * 1.2

    if name == "gradient":
        monkeypatch.setattr(doctor, "gradient_function", wrong)
    else:  # keys and values of the newer half are not moved to the front
        monkeypatch.setattr(
            NumpyDecoder, "_evict_oldest_half", lambda self: setattr(self, "length", 32)
        )
    assert f"{name} is wrong" in advice(name)
    for words in ((), ("--json",)):
        done = cli("doctor", "--device", "cpu", *words)
        assert done.returncode == 1
        assert f"{name} is wrong" in done.stdout


def test_an_unusable_gpu_gives_advice_and_a_missing_format_has_no_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speed(device: torch.device, dtype: torch.dtype) -> float:
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return 1e9

    monkeypatch.setattr(doctor, "matmul_flops", speed)
    monkeypatch.setattr(doctor, "choose_device", lambda name: (CPU, "a P100 has no kernels"))
    checks = run_checks()
    assert checks[0].advice == "a P100 has no kernels"
    assert [each.name for each in checks if "matmul" in each.name] == ["float32 matmul"]


def test_speed_is_floating_point_operations_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 2.0])  # the deadline, then one product from 1.0 to 1.5
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    assert matmul_flops(CPU, torch.float32) == 2 * 64**3 / 0.5


def test_too_many_and_too_few_threads_give_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    # of a machine that has more, eight cores are this process's
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 64)
    words = "unset OMP_NUM_THREADS, or set it to the number of physical cores, 8 at most"
    for threads, expected in ((16, words), (9, words), (1, words), (2, ""), (8, "")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert advice("threads") == expected


def test_a_full_disk_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    assert "free some space" in advice("disk for runs")


def test_the_command_prints_all_checks_as_text_and_json(cli: Cli) -> None:
    done = cli("doctor", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    for word in ("device", "dtype", "threads", "float32 matmul", "gradient", "disk"):
        assert word in done.stdout
    assert "GFLOP/s" in done.stdout
    checks = json.loads(cli("doctor", "--device", "cpu", "--json").stdout)["checks"]
    assert [check["name"] for check in checks][:2] == ["device", "dtype"]
    assert str(Path.cwd()) in next(c["value"] for c in checks if c["name"] == "disk for runs")


def test_the_gpu_is_described_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_gpu() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H100, 580.1, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W'\n")
    program.chmod(0o755)
    assert describe_gpu() == (
        "name H100, driver version 580.1, clocks.sm 345 MHz, clocks.max.sm 1980 MHz, "
        "clocks.mem 2619 MHz, power.limit 700.00 W"
    )
    program.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert describe_gpu() is None
