"""Benchmark of ensembles and students where a text is short: one run, several, and their student.

    python scripts/bench/bench_ensemble.py TEXT [TEXT ...] [--json benchmarks/ensemble.json]

Of each text, 100,000 characters from its middle are trained on, and 60,000 before and after them
are scored. All models have the size 4 x 64, blocks of 128 and the other settings that the planner
gives runs of their length. Compared are runs of 10 and of 40 epochs, the most that a budget plans;
the mean probabilities of four and of two of them; a student of each of these; one run that takes
as long as the two and their student together; and runs of several models of 10 and 40 epochs, each
a student of the one before, as budgets plan. Each GPT is also scored in a mixture with
n-grams, as a run with a budget is.

Before that, a forward and backward pass of several models in one batched step (`torch.func.vmap`)
is compared with a loop over them.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from record import provenance, save_record, write_record
from torch import Tensor

import chargpt
from chargpt.config import ModelConfig, load_config
from chargpt.inference.evaluation import evaluate_tokens
from chargpt.models import build_model, count_parameters, kernels
from chargpt.store.ensemble import mix
from chargpt.store.mixture import with_mixture
from chargpt.store.run import Run
from chargpt.training.planner import length_values, with_students

TRAINED, SCORED = 100_000, 60_000  # characters, the latter on each side
LONGEST = 40  # epochs
TEACHERS, STUDENTS = ((4, 10), (2, LONGEST)), (20, LONGEST)  # number and epochs; epochs
STUDENTS_IN_TURN = ((2, 10), (3, 10), (2, 20), (3, 20), (3, LONGEST))  # models, and epochs of each
SIZE = {
    "model.n_layer": 4,
    "model.n_head": 1,
    "model.n_embd": 64,
    "model.block_size": 128,
    "train.batch_size": 16,
    "text.mixture_characters": 10_000,
    "threads": 1,
}


class Case:
    """A part of a text to train on, and the text around it to score."""

    def __init__(self, text: Path, folder: Path) -> None:
        content = text.read_text(encoding="utf-8")
        assert len(content) >= TRAINED + 2 * SCORED, f"{text} is too short"
        begin = (len(content) - TRAINED) // 2
        self.around = content[begin - SCORED : begin], content[begin + TRAINED :][:SCORED]
        self.text, self.folder, self.seconds = folder / text.name, folder, dict[str, float]()
        self.text.write_text(content[begin : begin + TRAINED], encoding="utf-8")

    def train(
        self, name: str, epochs: float, seed: int, n_models: int = 1, **settings: object
    ) -> Run:
        """Train models with the settings of the planner for this many epochs; note the time."""
        config, vocab_size = load_config("gpt", SIZE), len(set(self.text.read_text("utf-8"))) + 1
        n_train = int(0.9 * TRAINED)
        n_parameters = count_parameters(config.model, vocab_size)
        values = length_values(config, epochs * n_train, n_train, n_parameters)
        start = time.perf_counter()
        run = chargpt.train(
            self.text,
            config=with_students(
                config.with_values({**values, "schedule.cooldown": 0.6}), n_models
            ),
            settings={"seed": seed, **settings},
            out=self.folder / f"{self.text.stem}-{name}",
        )
        self.seconds[name] = time.perf_counter() - start
        return run

    def losses(self, run: Run) -> dict[str, float]:
        """Return the loss around the text, in nats per character, of a run and of its mixture."""
        found = {}
        for name, scored in (("gpt", run), ("mixture", with_mixture(run))):
            parts = []
            for text in self.around:
                tokens = run.tokenizer.encode(text, "skip")
                parts.append(evaluate_tokens(scored.model, tokens, span=128).nats_per_char)
            found[name] = round(statistics.mean(parts), 4)
        return found


def measure(text: Path) -> list[dict[str, Any]]:
    """Train all models of a text and return their losses and times."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(text, Path(folder))
        rows: list[dict[str, Any]] = []

        def add(model: str, run: Run, *names: str) -> None:
            seconds = round(sum(case.seconds[name] for name in names), 1)
            rows.append({"text": text.stem, "model": model, **case.losses(run), "s": seconds})

        groups = {
            f"{n} of {epochs} epochs": {
                f"{epochs}-{seed}": case.train(f"{epochs}-{seed}", epochs, seed)
                for seed in range(n)
            }
            for n, epochs in TEACHERS
        }
        for (_, epochs), runs in zip(TEACHERS, groups.values(), strict=True):
            for name, run in runs.items():
                add(f"one of {epochs} epochs", run, name)
        for (what, runs), epochs in zip(groups.items(), STUDENTS, strict=True):
            given: dict[str, Any] = {
                "train.teachers": [run.folder for run in runs.values()],
                "model.dropout": 0.0,
            }
            student = case.train(f"student of {what}", epochs, 100, **given)
            add(f"mean probabilities of {what}", mix(list(runs.values())), *runs)
            add(f"student of {what}, {epochs} epochs", student, *runs, f"student of {what}")
        epochs = round(LONGEST * rows[-1]["s"] / case.seconds[f"{LONGEST}-0"])
        add(f"one of {epochs} epochs", case.train("long", epochs, 0), "long")
        for n_models, epochs in STUDENTS_IN_TURN:
            name = f"{n_models} of {epochs} epochs, each a student of the one before"
            add(name, case.train(name, epochs, 0, n_models), name)
    return rows


def compare_with_batched(n_models: int = 4) -> dict[str, float]:
    """Return the largest differences of a batched step from a loop, and the time of both in ms."""
    config = ModelConfig(n_layer=4, n_head=1, n_embd=64, block_size=128)
    models = []
    for seed in range(n_models):
        torch.manual_seed(seed)
        models.append(build_model(config, 65))
    batch = torch.randint(65, (n_models, 16, 129))
    params, buffers = torch.func.stack_module_state(models)
    template = models[0]

    def loss_of(weights: dict[str, Tensor], state: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = torch.func.functional_call(template, (weights, state), (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def batched() -> tuple[dict[str, Tensor], Tensor]:
        return torch.func.vmap(torch.func.grad_and_value(loss_of))(params, buffers, batch)

    def loop() -> list[tuple[dict[str, Tensor], Tensor]]:
        found = []
        for model, tokens in zip(models, batch, strict=True):
            model.zero_grad(set_to_none=True)
            loss = loss_of(dict(model.named_parameters()), dict(model.named_buffers()), tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append((gradients, loss.detach()))
        return found

    times: dict[str, list[float]] = {"batched": [], "loop": []}
    for _ in range(6):
        # the custom autograd functions have no batching rules
        with mock.patch.object(kernels, "uses_custom_autograd", return_value=False):
            start = time.perf_counter()
            gradients, values = batched()
            times["batched"].append(time.perf_counter() - start)
        start = time.perf_counter()
        one_by_one = loop()
        times["loop"].append(time.perf_counter() - start)
    gaps = [
        (gradients[name][number] - gradient).abs().max().item()
        for number, (own, _) in enumerate(one_by_one)
        for name, gradient in own.items()
    ]
    losses = torch.stack([loss for _, loss in one_by_one])
    return {
        "models": n_models,
        "largest_difference_of_losses": (values - losses).abs().max().item(),
        "largest_difference_of_gradients": max(gaps),
        **{f"{name}_ms": round(1e3 * statistics.median(each), 1) for name, each in times.items()},
    }


def main() -> None:
    """Measure every text and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {**provenance(), "batched_step": compare_with_batched(), "rows": []}
    for text in args.texts:
        record["rows"] += measure(text)
        print(*record["rows"][-10:], sep="\n", file=sys.stderr, flush=True)
        save_record(record, args.json)
    write_record(record, args.json)


if __name__ == "__main__":
    main()
