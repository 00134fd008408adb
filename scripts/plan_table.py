"""Print what `chargpt train --budget` would choose on faster machines and longer texts.

    python scripts/plan_table.py [--text-megabytes 1 100 10000] [--budgets 180 3600]
        [--faster 1 10 100 1000]

The speed of each size is measured on this machine, up to MEASURED_PARAMETERS; beyond that it falls
as 1 / parameters. A machine N times faster runs every size N times faster. Prints a Markdown table.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np

from chargpt.config import Config, TextConfig, load_config
from chargpt.models import count_parameters
from chargpt.text.prepare import load_corpus
from chargpt.training import planner
from chargpt.training.budget import Trials
from chargpt.training.deadline import Deadline

DATA = Path(__file__).parent.parent / "data" / "lighthouse.txt"
MEASURED_PARAMETERS = 5_000_000
HEADER = "faster | text | budget | model | parameters | block | batch | characters | epochs | ratio"


class IdleDeadline(Deadline):
    """A deadline from which trials take no time."""

    @property
    def remaining(self) -> float:
        return self.seconds


def main() -> None:
    """Measure speeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text-megabytes", type=float, nargs="+", default=[1, 100, 10_000])
    parser.add_argument("--budgets", type=float, nargs="+", default=[180, 3600])
    parser.add_argument("--faster", type=float, nargs="+", default=[1, 10, 100, 1000])
    arguments = parser.parse_args()
    corpus = load_corpus(TextConfig(path=str(DATA)))
    base, trials, speeds = load_config("gpt"), Trials(corpus), dict[int, float]()
    for size in planner.SIZES:
        config = base.with_values(planner.size_values(size, planner.INITIAL_TOKENS, corpus))
        parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
        if parameters <= MEASURED_PARAMETERS:
            speeds[parameters] = max(trials(config) for _ in range(3))
            print(f"{parameters:,} parameters: {speeds[parameters]:,.0f} characters/s\n")

    def speed(config: Config, _: float) -> float:
        parameters = count_parameters(config.model, corpus.tokenizer.vocab_size)
        known = min(parameters, max(speeds))
        return faster * speeds[known] * known / parameters

    print(f"| {HEADER} |\n|" + "---|" * len(HEADER.split(" | ")))
    with mock.patch.object(planner, "memory_limit", return_value=80 * 10**9):
        for faster, megabytes, seconds in product(
            arguments.faster, arguments.text_megabytes, arguments.budgets
        ):
            tokens = np.broadcast_to(np.uint8(0), (int(megabytes * 1e6),))  # takes no memory
            long = replace(corpus, tokens=tokens)
            config = planner.plan(base, long, IdleDeadline(seconds, 0.0), (), speed).config
            model = config.model
            parameters = count_parameters(model, corpus.tokenizer.vocab_size)
            read = config.train.max_steps * config.tokens_per_step
            cells = (
                *(f"{faster:g}", f"{megabytes:,g} MB", f"{seconds:g} s"),
                *(f"{model.n_layer} x {model.n_embd}", f"{parameters / 1e6:.1f}M"),
                *(model.block_size, config.train.batch_size, f"{read / 1e6:,.1f}M"),
                *(f"{read / len(long.split('train')):.2g}", f"{read / parameters:.2g}"),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
