"""The scripts for a GPU, in miniature on a CPU."""

import ast
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
from conftest import POSIX, REPOSITORY

from chargpt.inference.evaluation import EvaluationProtocol
from chargpt.training.planner import unique_token_equivalents

SCRIPTS = REPOSITORY / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable}


@POSIX
@pytest.mark.slow
def test_the_gpu_suite_runs_the_parts_asked_for_and_gathers_their_records(
    verse: Path, tmp_path: Path
) -> None:
    command = [SCRIPTS / "gpu_suite.sh", tmp_path, verse]

    def run(parts: str) -> "subprocess.CompletedProcess[str]":
        environment = {**ENVIRONMENT, "CHARGPT_SUITE_PARTS": parts, "CHARGPT_SUITE_SECONDS": "8"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    unknown = run("doctor nanogpt")  # which needs a checkout
    assert unknown.returncode == 2
    assert "cannot run nanogpt: choose from doctor tests" in unknown.stderr
    parts = "doctor ranks steps starts variants table train sample"
    done = run(parts)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["exit_codes"] == dict.fromkeys(parts.split(), "0")
    assert found["doctor"]["checks"]
    assert found["steps"]["steps"]["1 x 32, characters per second"] > 0
    assert found["steps"]["profile"]["eager: microseconds of a step"]
    assert all(each["loss_difference"] == 0 for each in found["ranks"]["ranks"].values())
    assert found["starts"]["starts"]["1 x 32, compiled blocks (s)"] > 0
    differences = [each["loss_difference"] for each in found["variants"]["variants"].values()]
    assert len(differences) == 4
    assert max(differences) < 1e-5  # in float32, here
    assert found["table"]["table"]["1 x 32, block 16, 32 tokens"]["mfu"] > 0
    assert found["train"]["results"]["chargpt train --budget 8s"]["steps"] > 0
    assert found["sample"]["characters_per_second"]["64 sequences"] > 0


@POSIX
@pytest.mark.slow
def test_the_gpu_suite_writes_its_record_also_when_it_is_stopped(
    verse: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [SCRIPTS / "gpu_suite.sh", out, verse],
        env={
            **ENVIRONMENT,
            "CHARGPT_SUITE_PARTS": "doctor train",
            "CHARGPT_SUITE_SECONDS": "300",
        },
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    log = out / "gpu.txt"
    while "== train" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    found = json.loads((out / "gpu.json").read_text())
    assert found["exit_codes"] == {"doctor": "0"}
    assert found["doctor"]["checks"]
    assert found["train"] is None


@pytest.mark.parametrize("page", ["scripts/gpu_suite.sh", "docs/gpu.md"])
def test_the_benchmark_commands_for_a_gpu_have_valid_options(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"(bench_\w+\.py) ([^`;|\n]*)", text)
    assert len(commands) >= 3
    for script, words in commands:
        source = (SCRIPTS / "bench" / script).read_text(encoding="utf-8")
        for option in re.findall(r"(?<= )--[a-z-]+", words):
            assert f'"{option}"' in source, f"{script} has no {option}"
        if "--protocols" in words:
            protocols = words.partition("--protocols ")[2].partition(" --")[0].split()
            assert set(protocols) <= set(get_args(EvaluationProtocol))


def test_a_record_names_commit_and_gpu_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS / "bench")
    record = import_module("record")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H100, 580.1, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "bench" / "bench_gpu.py"), "text.txt"])
    assert record.provenance()["commit"] == "unknown"
    monkeypatch.setenv("CHARGPT_COMMIT", "abc1234")
    facts = record.provenance()
    assert facts["commit"] == "abc1234"
    assert "name H100, driver version 580.1" in facts["gpu"]


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that fits the scaling law."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("fit_scaling_law")


def test_the_compute_optimal_ratio_is_where_the_loss_is_lowest(scaling: ModuleType) -> None:
    law = {"a": 189.0, "p": 0.6, "b": 127.0, "q": 0.5}
    sizes = np.geomspace(1e6, 1e10, 4001)
    product = 1e17  # of parameters and characters
    losses = law["a"] * sizes ** -law["p"] + law["b"] * (product / sizes) ** -law["q"]
    best = sizes[losses.argmin()]
    assert scaling.optimal_ratio(law, best) == pytest.approx(product / best**2, rel=0.02)


def test_the_law_of_two_texts_is_found_from_their_losses(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "S_VALUES", np.array([1.0, 2.0]))
    monkeypatch.setattr(scaling, "TOLERANCE", 1.0)
    law = {"a": 180.0, "p": 0.6, "b": 120.0, "q": 0.5, "r": 32.0, "s": 2.0}
    texts = {"plays": (900_000, 1.3, 1.0), "novels": (20_000_000, 1.1, 1.4)}
    runs = []
    for text, (train_tokens, floor, scale) in texts.items():
        for n, c in itertools.product((2e5, 1e6, 5e6), (3e5, 1.2e6, 4.8e6, 9.6e6)):
            unique = unique_token_equivalents(int(n), c, train_tokens, law)
            terms = law["a"] * n ** -law["p"] + law["b"] * unique ** -law["q"]
            loss = floor + scale * terms
            runs.append({"text": text, "parameters": n, "characters": c, "nats_per_char": loss})
    found, by_text = scaling.fit(runs, {text: each[0] for text, each in texts.items()})
    assert {name: found[name] for name in "pqrs"} == {name: law[name] for name in "pqrs"}
    assert found["a"] / found["b"] == pytest.approx(1.5, rel=0.02)  # of a grid
    assert found["rms_error"] < 1e-3
    for text, (_, floor, scale) in texts.items():
        assert by_text[text]["floor"] == pytest.approx(floor, abs=2e-3)
        assert by_text[text]["scale"] == pytest.approx(scale, rel=0.02)


def test_runs_that_are_recorded_are_not_trained_again(scaling: ModuleType) -> None:
    jobs = scaling.missing_jobs("plays", 65, [])
    assert max(job[0] for job in jobs) <= scaling.MAX_WORK
    assert {job[2] for job in jobs} >= set(range(6))  # sizes
    run = {"text": "plays", "n_layer": 4, "n_embd": 64, "characters": 149_504}
    assert len(scaling.missing_jobs("plays", 65, [run])) == len(jobs) - 1
    assert scaling.missing_jobs("novels", 65, [run]) == [
        (job[0], "novels", *job[2:]) for job in jobs
    ]


def test_programs_within_scripts_import_what_they_use(tmp_path: Path) -> None:
    for script in SCRIPTS.rglob("*.py"):
        for number, node in enumerate(ast.walk(ast.parse(script.read_text("utf-8")))):
            is_program = isinstance(node, ast.Constant) and "\n" in str(node.value).strip()
            if is_program and "\nimport " in f"\n{node.value}":
                path = tmp_path / f"{script.stem}-{number}.py"
                path.write_text(str(node.value), "utf-8")
    assert len(list(tmp_path.iterdir())) >= 4
    command = [sys.executable, "-m", "ruff", "check", "--select", "F821", "--isolated", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
