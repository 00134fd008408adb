"""Measurements for the first runs on a GPU, which print as they go.

    python scripts/bench/bench_gpu.py TEXT [--parts steps ranks profile variants epochs]
        [--steps 100] [--json benchmarks/gpu-parts.json] [-s KEY=VALUE]...

steps      a training step of three sizes: eager and as a CUDA graph, and the optimizer's share
ranks      a training step of one process, and of a rank that is alone in its process group (NCCL on
           a GPU) with CUDA graphs and with DistributedDataParallel: losses in float32, and times;
           fails if losses differ by 1e-5, or the time with CUDA graphs is 3% longer
profile    the kernels of a training step that take the longest
variants   the norm and attention in each implementation, forward and backward
epochs     validation loss after 10, 20 and 40 epochs with three batch sizes

TEXT is a file. -s changes settings of all parts but `variants`; small models try this script
on a CPU. The JSON is written after each measurement.
"""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from record import provenance, save_record
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel

from chargpt.config import Config, load_config
from chargpt.device import choose_device, choose_dtype, synchronize
from chargpt.distributed import RankGroup
from chargpt.models.kernels import RMSNorm
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training.learner import Learner
from chargpt.training.planner import Size, config_of_size, length_values
from chargpt.training.trainer import Trainer

SIZES = (Size(4, 128), Size(6, 384), Size(12, 768))
BATCHES = (16, 32, 64)  # sequences
EPOCHS = (10, 20, 40)
LONG = 10_000_000  # characters: block and batch size of such a run
ROUNDS = 5  # of timing each way to train in turn
COMPARED_STEPS = 10  # rounding is amplified later


class Measurements:
    """What was measured so far, printed and saved after each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.values: dict[str, dict[str, Any]] = {}

    def add(self, part: str, name: str, value: object) -> None:
        """Record, print and save a value."""
        print(f"{part:9} {name}: {value}", flush=True)
        self.values.setdefault(part, {})[name] = value
        save_record({**provenance(), **self.values}, self.path)


def milliseconds(function: Callable[[], object], device: torch.device, number: int) -> float:
    """Return the mean time of a call, after a tenth as many as a warm-up."""
    for _ in range(max(3, number // 10)):
        function()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(number):
        function()
    synchronize(device)
    return round(1000 * (time.perf_counter() - start) / number, 4)


def run_step(learner: Learner, step: int = 0, lr_factor: float = 0.001) -> Tensor:
    """Run one training step; return its loss."""
    loss = learner.accumulate_gradients(step)
    learner.clip_gradients()
    learner.apply_update(step, lr_factor)
    return loss


def measure_steps(configs: list[Config], corpus: Corpus, number: int, found: Measurements) -> None:
    """Measure the gradients of a step, eager and captured, and the rest of it."""
    for config in configs:
        trainer = Trainer(config, corpus)
        learner, device = trainer.learner, trainer.device
        name = f"{config.model.n_layer} x {config.model.n_embd}"
        if learner.capture_error:
            found.add("steps", f"{name}, capture", learner.capture_error)
        block = learner.batches.at(0).to(device)
        eager = milliseconds(lambda: learner.forward_backward(block), device, number)  # noqa: B023
        found.add("steps", f"{name}, eager gradients (ms)", eager)
        if (replay := learner.captured_forward_backward) is not None:
            captured = milliseconds(lambda: replay(block), device, number)  # noqa: B023
            found.add("steps", f"{name}, captured gradients (ms)", captured)
        whole = milliseconds(partial(run_step, learner), device, number)
        found.add("steps", f"{name}, whole step (ms)", whole)
        characters = round(1000 * config.tokens_per_step / whole)
        found.add("steps", f"{name}, characters per second", characters)


class SingleRank(RankGroup):
    """A rank that communicates with itself, as one of several does with the others."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing is communicated."""
        return False


def measure_ranks(
    configs: list[Config], corpus: Corpus, number: int, found: Measurements
) -> list[str]:
    """Measure a step with and without a process group; return what differs too much."""
    eager = patch("chargpt.training.learner.can_capture", return_value=False)
    ways: dict[str, tuple[RankGroup, AbstractContextManager[object]]] = {
        "one process": (RankGroup(), nullcontext()),
        "one rank, CUDA graphs": (SingleRank(), nullcontext()),
        "one rank, DistributedDataParallel": (SingleRank(), eager),
    }
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    failures = []

    def learners(config: Config) -> dict[str, Learner]:
        made = {}
        for name, (group, context) in ways.items():
            with context:
                made[name] = Trainer(config, corpus, group=group).learner
        return made

    for config in configs:
        losses = {}
        for name, learner in learners(config.with_values({"dtype": "float32"})).items():
            steps = [run_step(learner, step, 0.1) for step in range(COMPARED_STEPS)]
            losses[name] = torch.stack(steps)
            learner.unwrap_ddp()
        timed = learners(config)
        times = dict.fromkeys(ways, math.inf)
        for _ in range(ROUNDS):
            for name, learner in timed.items():
                step = partial(run_step, learner)
                times[name] = min(times[name], milliseconds(step, learner.device, number))
        for name, learner in timed.items():
            learner.unwrap_ddp()
            difference = float((losses[name] - losses["one process"]).abs().max())
            ratio = times[name] / times["one process"]
            value = f"{times[name]:8.3f} ms, {ratio:.3f} times, losses within {difference:.1e}"
            if learner.capture_error is not None:
                value += f", {learner.capture_error}"
            size = f"{config.model.n_layer} x {config.model.n_embd}"
            found.add("ranks", f"{size:8}, {name:33}", value)
            is_slow = learner.captured_update is not None and ratio > 1.03
            if difference > 1e-5 or is_slow or learner.capture_error is not None:
                failures.append(f"{size}, {name}: {value}")
    dist.destroy_process_group()
    return failures


def profile_step(config: Config, corpus: Corpus, found: Measurements) -> None:
    """Print the kernels of an eager step that take the longest."""
    trainer = Trainer(config, corpus)
    learner = trainer.learner
    activities = [torch.profiler.ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    block = learner.batches.at(0).to(trainer.device)
    for name, forward_backward in {
        "eager": learner.forward_backward, "captured": learner.captured_forward_backward
    }.items():  # fmt: skip
        if forward_backward is None:
            continue
        forward_backward(block)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):
                forward_backward(block)
                learner.clip_gradients()
                learner.apply_update(0, 0.001)
            synchronize(trainer.device)
        averages = profile.key_averages()
        order = f"self_{'device' if len(activities) > 1 else 'cpu'}_time_total"
        print(averages.table(sort_by=order, row_limit=15, max_name_column_width=50), flush=True)
        times = {event.key[:80]: round(getattr(event, order) / 5) for event in averages}
        largest = sorted(times, key=times.__getitem__, reverse=True)[:15]
        kernels = {name: times[name] for name in largest}
        found.add("profile", f"{name}: microseconds of a step", kernels)


def measure_variants(device: torch.device, number: int, found: Measurements) -> None:
    """Measure implementations of the norm and of attention."""
    dtype, _ = choose_dtype(device, "auto")
    for width in (size.n_embd for size in SIZES):
        x = torch.randn(16, 256, width, device=device, dtype=dtype, requires_grad=True)
        weight = RMSNorm(width).to(device, dtype).weight
        variants = {
            "F.rms_norm": lambda x=x, w=weight: F.rms_norm(x, (x.size(-1),), eps=1e-6) * w,
            "F.rms_norm with weight": lambda x=x, w=weight: F.rms_norm(x, (x.size(-1),), w, 1e-6),
            "written out": lambda x=x, w=weight: (
                x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype) * w
            ),
        }
        for name, norm in variants.items():
            found.add("variants", f"norm {width}, {name} (ms)", both(norm, [x], device, number))
        heads = width // 64
        q, k, v = (
            torch.randn(16, heads, 256, 64, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
        for backend in (*backends, SDPBackend.CUDNN_ATTENTION):
            name = f"attention {width}, {backend.name.lower()} (ms)"
            try:
                with sdpa_kernel(backend):
                    seconds: object = both(
                        partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
                        [q, k, v],
                        device,
                        number,
                    )
            except RuntimeError as error:
                seconds = str(error).partition("\n")[0][:100]
            found.add("variants", name, seconds)


def both(
    function: Callable[[], Tensor], inputs: list[Tensor], device: torch.device, number: int
) -> float:
    """Return the time of a function's forward and backward pass."""
    gradient = torch.randn_like(function())
    return milliseconds(lambda: torch.autograd.grad(function(), inputs, gradient), device, number)


def measure_epochs(config: Config, corpus: Corpus, found: Measurements) -> None:
    """Train for several numbers of epochs with several batch sizes."""
    train_tokens = len(corpus.split("train"))
    for batch_size in BATCHES:
        for epochs in EPOCHS:
            sized = config.with_values({"train.batch_size": batch_size})
            start, trainer = time.perf_counter(), Trainer(sized, corpus)
            settings = length_values(
                sized, epochs * train_tokens, train_tokens, trainer.model.num_parameters()
            )
            trainer = Trainer(sized.with_values({**settings, "train.sample_every": 0}), corpus)
            validation = [r.validation for r in trainer.steps() if r.validation is not None]
            value = {
                "nats_per_char": round(trainer.learner.evaluate("val").nats_per_char, 4),
                "lowest": round(min(each.nats_per_char for each in validation), 4),
                "seconds": round(time.perf_counter() - start, 1),
            }
            found.add("epochs", f"{epochs} epochs, batch {batch_size}", value)


def main() -> None:
    """Run the chosen parts."""
    parts = ("steps", "ranks", "profile", "variants", "epochs")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-s", "--set", action="append", default=[])
    arguments = parser.parse_args()
    pairs = (each.partition("=") for each in arguments.set)
    changes = {key: yaml.safe_load(value) for key, _, value in pairs}
    base = load_config("gpt").with_values({"text.path": str(arguments.text)})
    corpus = load_corpus(base.text)
    configs = [config_of_size(base, size, LONG, corpus).with_values(changes) for size in SIZES]
    device, found = choose_device(base.device)[0], Measurements(arguments.json)
    if "steps" in arguments.parts:
        measure_steps(configs, corpus, arguments.steps, found)
    failures = []
    if "ranks" in arguments.parts:
        failures = measure_ranks(configs, corpus, arguments.steps, found)
    if "profile" in arguments.parts:
        profile_step(configs[1], corpus, found)
    if "variants" in arguments.parts:
        measure_variants(device, arguments.steps, found)
    if "epochs" in arguments.parts:
        measure_epochs(configs[1], corpus, found)
    if failures:
        raise SystemExit("\n".join(["differs too much:", *failures]))


if __name__ == "__main__":
    main()
