"""Make the golden run of this release, `tests/golden/VERSION/`, which later releases must load.

    python scripts/make_golden.py

It is made once per release and never changed. See tests/golden/README.md.
"""

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

from chargpt.config import Config
from chargpt.store.folder import RunFolder
from chargpt.store.layout import LOCK
from chargpt.store.run import load_run
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.training.trainer import Trainer

REPOSITORY = Path(__file__).parent.parent


def main() -> None:
    """Train the run and save the logits of its model for some tokens."""
    release = REPOSITORY / "tests" / "golden" / version("chargpt")
    if release.exists():
        raise SystemExit(f"{release} exists and must not change; increase the version first")
    config = Config().with_values(
        {
            "device": "cpu",
            "dtype": "float32",
            "text.path": "lighthouse.txt",
            "model.n_layer": 2,
            "model.n_embd": 16,
            "model.block_size": 32,
            "train.max_steps": 20,
            "train.ema": 0.9,
            "train.keep_last": 1,
            "train.evaluate_every": 20,
            "train.save_every": 20,
            "train.sample_every": 0,
        }
    )
    # not read from a file, so that no path of this machine is written
    source = find_text(config.text, (REPOSITORY / "data" / "lighthouse.txt").read_text("utf-8"))
    with (
        tempfile.TemporaryDirectory() as folder,
        RunFolder(Path(folder) / "run").locked(is_new=True) as run,
    ):
        corpus = prepare(source, config.text, run.new_text)
        trainer = Trainer(config, corpus, folder=run)
        run.create(trainer.config, corpus.tokenizer, corpus.folder)
        for _ in trainer.steps():
            pass
        shutil.copytree(run.path, release / "run", ignore=shutil.ignore_patterns(LOCK))
    tokens = torch.randint(corpus.tokenizer.vocab_size, (2, 32))
    with torch.no_grad():
        logits = load_run(release / "run", device="cpu").model(tokens)
    save_file({"tokens": tokens, "logits": logits.contiguous()}, release / "logits.safetensors")


if __name__ == "__main__":
    main()
