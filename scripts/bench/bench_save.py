"""Benchmark of saving: a committed checkpoint beside plain files of the same tensors.

    python scripts/bench/bench_save.py TEXT [--config gpt-baby] [--repeats 9]
        [--json benchmarks/save.json]

Each way in turn, in one folder: `safetensors.save_file` of weights and optimizer; the same, then
flushed to disk; and `RunFolder.save` with checksums, flushes and manifest, which deletes
an older checkpoint at the end (plain files replace the ones before).
"""

import argparse
import dataclasses
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import provenance, write_record
from safetensors.torch import save_file

from chargpt.config import load_config
from chargpt.store.folder import RunFolder
from chargpt.text.prepare import load_corpus
from chargpt.training.trainer import Trainer


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--config", default="gpt-baby")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    settings = {"text.path": given.text, "device": "cpu", "dtype": "float32"}
    config = load_config(given.config, settings)
    corpus = load_corpus(config.text)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = RunFolder(Path(folder) / "run")
        trainer = Trainer(config, corpus, folder=run)
        run.create(trainer.config, corpus.tokenizer)
        model, optimizer = trainer.model.state_dict(), trainer.learner.optimizer.state_dict()
        optimizer = {name: tensor.contiguous() for name, tensor in optimizer.items()}
        plain = [Path(folder) / name for name in ("model.safetensors", "optimizer.safetensors")]

        def save_plainly() -> None:
            for path, tensors in zip(plain, (model, optimizer), strict=True):
                save_file(tensors, path)

        def save_and_flush() -> None:
            save_plainly()
            for path in plain:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        def save_ours() -> None:
            trainer.state = dataclasses.replace(trainer.state, step=trainer.state.step + 1)
            assert trainer.save() is not None, trainer.writer.errors

        ways: dict[str, Callable[[], None]] = {
            "plain": save_plainly,
            "plain, flushed": save_and_flush,
            "ours": save_ours,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.repeats):
            for name, save in ways.items():
                start = time.perf_counter()
                save()
                seconds[name].append(round(time.perf_counter() - start, 4))
        content = b"".join(path.read_bytes() for path in plain)
        start = time.perf_counter()
        hashlib.sha256(content)
        summing = time.perf_counter() - start
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        record = {
            **provenance(),
            "parameters": trainer.model.num_parameters(),
            "bytes": trainer.checkpoint_bytes(),
            "seconds": medians,
            "sha256_on_one_core": round(summing, 4),
            "ours_over_plain": round(medians["ours"] / medians["plain"], 3),
            "ours_over_plain_flushed": round(medians["ours"] / medians["plain, flushed"], 3),
            "all": seconds,
        }
    write_record(record, given.json)


if __name__ == "__main__":
    main()
