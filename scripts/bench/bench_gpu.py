"""Measurements for the first runs on a GPU, which print as they go.

    python scripts/bench/bench_gpu.py TEXT [--parts steps variants ...] [--steps 100]
        [--json benchmarks/gpu-parts.json] [-s KEY=VALUE]...

steps      a training step of three sizes: eager and as a CUDA graph, and the optimizer's share
starts     seconds to the first step of the three sizes, with and without torch.compile, whose cache
           TORCHINDUCTOR_CACHE_DIR names: of a cold start if it is empty. The first size also
           imports the compiler
variants   variants of a training step beside it as it is, in turn: seconds to start, time, losses
           of ten steps (fails if they differ by 0.02), and from how many steps on a slower start
           pays. In one process with `starts`, what that has compiled is used again
table      step time and MFU for three sizes, block sizes and numbers of tokens per step
ranks      a training step of one process, and of a rank that is alone in its process group (NCCL on
           a GPU) with CUDA graphs and with DistributedDataParallel: losses in float32, and times;
           fails if losses differ by 1e-5, or the time with CUDA graphs is 3% longer
profile    the kernels of a training step that take the longest
kernels    the norm and attention in each implementation, forward and backward
epochs     validation loss after 10, 20 and 40 epochs with three batch sizes

TEXT is a file. -s changes settings of all parts but `kernels`; small models try this script
on a CPU. The JSON is written after each measurement.
"""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from record import provenance, save_record
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel

from chargpt.analysis.doctor import matmul_flops
from chargpt.config import Config, ModelConfig, load_config
from chargpt.device import choose_device, choose_dtype, synchronize
from chargpt.distributed import RankGroup
from chargpt.errors import ChargptError
from chargpt.inference.evaluation import Baselines
from chargpt.models import LanguageModel, build_model
from chargpt.models.gpt import GPT
from chargpt.models.kernels import RMSNorm
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training.learner import Learner
from chargpt.training.optim import MOMENTUM, Muon, as_wide, orthogonalize
from chargpt.training.planner import Size, config_of_size, length_values
from chargpt.training.trainer import Trainer

SIZES = (Size(4, 128), Size(6, 384), Size(12, 768))
BATCHES = (16, 32, 64)  # sequences
EPOCHS = (10, 20, 40)
BLOCKS = (256, 512, 1024)
TOKENS_PER_STEP = (2048, 8192, 32768)
LONG = 10_000_000  # characters: block and batch size of such a run
ROUNDS = 5  # of timing each way to train in turn
COMPARED_STEPS = 10  # rounding is amplified later

Train = partial[Trainer]  # on the text
Contexts = dict[str, tuple[RankGroup, AbstractContextManager[object]]]


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


def measure_steps(
    configs: dict[str, Config], train: Train, number: int, found: Measurements
) -> None:
    """Measure the gradients of a step, eager and captured, and the rest of it."""
    for name, config in configs.items():
        trainer = train(config)
        learner, device = trainer.learner, trainer.device
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


class LowPrecisionCopyLearner(Learner):
    """The forward and backward pass use a model in `dtype`, which each update refreshes.

    As it is, autocast converts the float32 weights in every forward pass.
    """

    @cached_property
    def low_precision(self) -> nn.Module:
        """The copy; from its creation on, steps of the optimizer refresh it."""
        copy, step = deepcopy(self.model).to(self.dtype), self.optimizer.step
        weights, copies = list[Tensor](self.model.parameters()), list[Tensor](copy.parameters())

        @torch.no_grad()
        def step_and_refresh(number: int | Tensor, factor: float | Tensor) -> None:
            step(number, factor)
            torch._foreach_copy_(copies, weights)

        self.optimizer.step = step_and_refresh  # type: ignore[method-assign,assignment]
        return copy

    def _capture(self) -> None:
        self.ddp_model = self.low_precision
        super()._capture()

    def _wrap_for_ddp(self) -> nn.Module:
        return self.low_precision

    def forward_backward(self, micro_batch: Tensor) -> Tensor:
        self.low_precision.zero_grad(set_to_none=True)
        loss = super().forward_backward(micro_batch)
        gradients = [torch.empty_like(parameter) for parameter in self.model.parameters()]
        low = [p.grad for p in self.low_precision.parameters() if p.grad is not None]
        torch._foreach_copy_(gradients, low)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return loss


def build_compiled_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Build a model of which each block is compiled; the blocks share their code."""
    model = build_model(config, vocab_size)
    assert isinstance(model, GPT)
    # a CPU only tries this script, and there the default compiler takes minutes
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    for block in model.blocks:
        compiled = torch.compile(block.forward, dynamic=False, backend=backend)
        block.forward = compiled  # type: ignore[method-assign]
    return model


class ForeachMuon(Muon):
    """Adds updates to all weights of a shape by one call, whose kernel needs equal strides."""

    @torch.no_grad()
    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply an update at `factor` times the learning rate."""
        for names, buffer in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            gradient = torch.stack([as_wide(w.grad) for w in weights if w.grad is not None])
            buffer.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalize(gradient.lerp_(buffer, MOMENTUM), self.dtype)
            rate = self.lr * factor
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            if isinstance(rate, Tensor):
                update, rate = update.mul_(rate), 1.0
            for shape in {weight.shape for weight in weights}:
                is_tall = shape[0] > shape[1]
                changes = (update.mT.contiguous() if is_tall else update).unbind()
                own = [n for n, weight in enumerate(weights) if weight.shape == shape]
                torch._foreach_add_(
                    [weights[n] for n in own],
                    [changes[n] for n in own],
                    alpha=-rate * max(1, shape[0] / shape[1]) ** 0.5,
                )


VARIANTS: Contexts = {
    "as it is": (RankGroup(), nullcontext()),
    "low-precision copies of the weights": (
        RankGroup(),
        patch("chargpt.training.trainer.Learner", LowPrecisionCopyLearner),
    ),
    "compiled blocks": (
        RankGroup(),
        patch("chargpt.training.learner.build_model", build_compiled_model),
    ),
    "foreach addition in Muon": (RankGroup(), patch("chargpt.training.optim.Muon", ForeachMuon)),
}


def timed_learner(
    train: Train,
    config: Config,
    group: RankGroup = RankGroup(),
    context: AbstractContextManager[object] = nullcontext(),
) -> tuple[Learner, float]:
    """Return a learner that has run a step, and the seconds that both took."""
    start = time.perf_counter()
    with context:
        learner = train(config, group=group).learner
        run_step(learner, lr_factor=0.0)  # without CUDA graphs, blocks are compiled here
    synchronize(learner.device)
    return learner, time.perf_counter() - start


def measure_starts(configs: dict[str, Config], train: Train, found: Measurements) -> None:
    """Measure the seconds to the first step, without and with compiled blocks."""
    for size, config in configs.items():
        timed_learner(train, config)  # warm-up
        for name in ("as it is", "compiled blocks"):
            _, seconds = timed_learner(train, config, *VARIANTS[name])
            found.add("starts", f"{size}, {name} (s)", round(seconds, 2))


def compare_steps(
    part: str,
    contexts: Contexts,
    configs: dict[str, Config],
    train: Train,
    number: int,
    found: Measurements,
    *,
    max_difference: float,
    max_ratio: float = math.inf,
    **checked: object,
) -> list[str]:
    """Measure steps in each context, in turn; return what differs too much from the first one.

    Args:
        max_difference: of the losses of the first steps, in nats.
        max_ratio: of the times, for steps that are captured.
        checked: settings of the runs whose losses are compared.
    """
    failures = []
    for size, config in configs.items():

        def learners(config: Config) -> dict[str, tuple[Learner, float]]:
            timed_learner(train, config)  # warm-up
            return {name: timed_learner(train, config, *way) for name, way in contexts.items()}

        timed, losses = learners(config.with_values(checked)), {}
        for name, (learner, _) in timed.items():
            steps = [run_step(learner, step, 0.1) for step in range(COMPARED_STEPS)]
            losses[name] = torch.stack(steps)
            if checked:
                learner.unwrap_ddp()
        if checked:
            timed = learners(config)
        times = dict.fromkeys(contexts, math.inf)
        for _ in range(ROUNDS):
            for name, (learner, _) in timed.items():
                step = partial(run_step, learner)
                times[name] = min(times[name], milliseconds(step, learner.device, number))
        first = next(iter(contexts))
        for name, (learner, seconds) in timed.items():
            learner.unwrap_ddp()
            gain, delay = times[first] - times[name], seconds - timed[first][1]
            ratio = round(times[name] / times[first], 3)
            difference = float((losses[name] - losses[first]).abs().max())
            value = {
                "ms": times[name],
                "ratio": ratio,
                "loss_difference": difference,
                "start_seconds": round(seconds, 2),
                "pays_from_step": round(1000 * max(0.0, delay) / gain) if gain > 0 else None,
                "capture_error": learner.capture_error,
            }
            found.add(part, f"{size}, {name}", value)
            is_slow = learner.captured_update is not None and ratio > max_ratio
            # a difference of NaN fails, too
            if not difference <= max_difference or is_slow or learner.capture_error is not None:
                failures.append(f"{size}, {name}: {value}")
    return failures


def measure_table(
    configs: dict[str, Config],
    changes: dict[str, object],
    train: Train,
    number: int,
    found: Measurements,
) -> None:
    """Measure step time and MFU for block sizes and tokens per step, without soft targets.

    Operations of a step: 6 a parameter (the embedding is looked up, not multiplied) and 12 L C T
    for attention, each a token (Chowdhery et al. 2022, appendix B).
    """
    first = next(iter(configs.values()))
    device = choose_device(first.device)[0]
    peak = matmul_flops(device, choose_dtype(device, first.dtype)[0])
    for size, base in configs.items():
        for block_size in BLOCKS:
            for tokens in TOKENS_PER_STEP:
                config = base.with_values(
                    {
                        "model.block_size": block_size,
                        "train.batch_size": tokens // block_size,
                        "train.ngram_target_weight": 0.0,
                        **changes,
                    }
                )
                model, n_tokens = config.model, config.tokens_per_step
                name = f"{size}, block {model.block_size}, {n_tokens:,} tokens"
                if name in found.values.get("table", {}):
                    continue
                try:
                    trainer = train(config)
                    run = partial(run_step, trainer.learner)
                    ms = milliseconds(run, trainer.device, number)
                except (ChargptError, RuntimeError) as error:  # too little text or memory
                    found.add("table", name, str(error).partition("\n")[0][:100])
                    continue
                embedding = trainer.corpus.tokenizer.vocab_size * model.n_embd
                operations = 6 * (trainer.model.num_parameters() - embedding)
                operations += 12 * model.n_layer * model.n_embd * model.block_size
                mfu = operations * n_tokens / (ms / 1000) / peak
                found.add("table", name, {"ms": ms, "mfu": round(mfu, 4)})


class SingleRank(RankGroup):
    """A rank that communicates with itself, as one of several does with the others."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing is communicated."""
        return False


def measure_ranks(
    configs: dict[str, Config], train: Train, number: int, found: Measurements
) -> list[str]:
    """Measure a step with and without a process group; return what differs too much."""
    eager = patch("chargpt.training.learner.can_capture", return_value=False)
    contexts: Contexts = {
        "one process": (RankGroup(), nullcontext()),
        "one rank, CUDA graphs": (SingleRank(), nullcontext()),
        "one rank, DistributedDataParallel": (SingleRank(), eager),
    }
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    failures = compare_steps(
        *("ranks", contexts, configs, train, number, found),
        max_difference=1e-5,
        max_ratio=1.03,
        dtype="float32",
    )
    dist.destroy_process_group()
    return failures


def profile_step(config: Config, train: Train, found: Measurements) -> None:
    """Print the kernels of an eager step that take the longest."""
    trainer = train(config)
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


def measure_kernels(device: torch.device, number: int, found: Measurements) -> None:
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
            found.add("kernels", f"norm {width}, {name} (ms)", both(norm, [x], device, number))
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
            found.add("kernels", name, seconds)


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
    parts = ("starts", "steps", "variants", "table", "ranks", "profile", "kernels", "epochs")
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
    corpus, number = load_corpus(base.text), arguments.steps
    sized = [config_of_size(base, size, LONG, corpus).with_values(changes) for size in SIZES]
    configs = {f"{each.model.n_layer} x {each.model.n_embd}": each for each in sized}
    train = partial(Trainer, corpus=corpus, baselines=Baselines(corpus))
    found, failures = Measurements(arguments.json), list[str]()
    shared = (configs, train, number, found)
    if "starts" in arguments.parts:
        measure_starts(configs, train, found)
    if "steps" in arguments.parts:
        measure_steps(*shared)
    if "variants" in arguments.parts:
        failures += compare_steps("variants", VARIANTS, *shared, max_difference=0.02)
    if "table" in arguments.parts:
        measure_table(configs, changes, train, math.ceil(number / 5), found)
    if "ranks" in arguments.parts:
        failures += measure_ranks(*shared)
    if "profile" in arguments.parts:
        profile_step(sized[1], train, found)
    if "kernels" in arguments.parts:
        measure_kernels(choose_device(base.device)[0], number, found)
    if "epochs" in arguments.parts:
        measure_epochs(sized[1], corpus, found)
    if failures:
        raise SystemExit("\n".join(["differs too much:", *failures]))


if __name__ == "__main__":
    main()
