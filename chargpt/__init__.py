"""Train, sample and measure character-level GPT models.

    import chargpt
    run = chargpt.train("novel.txt", budget="3m")
    print(chargpt.sample(run, prompt="It was")[0])
    print(chargpt.evaluate(run).bits_per_char)

Names are imported when they are first used, so `import chargpt` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chargpt.analysis.compare import compare
    from chargpt.config import Config, load_config
    from chargpt.errors import ChargptError
    from chargpt.inference.evaluation import evaluate
    from chargpt.inference.sampling import sample
    from chargpt.models.bigram import BigramLM
    from chargpt.models.gpt import GPT
    from chargpt.models.ngram import NGramLM
    from chargpt.store.run import load_run
    from chargpt.text.corpus import Corpus, load_corpus
    from chargpt.text.tokenizer import CharTokenizer
    from chargpt.training.api import train
    from chargpt.training.trainer import Trainer

__all__ = [
    "GPT",
    "BigramLM",
    "CharTokenizer",
    "ChargptError",
    "Config",
    "Corpus",
    "NGramLM",
    "Trainer",
    "compare",
    "evaluate",
    "load_config",
    "load_corpus",
    "load_run",
    "sample",
    "train",
]

_MODULES = {
    "GPT": "chargpt.models.gpt",
    "BigramLM": "chargpt.models.bigram",
    "CharTokenizer": "chargpt.text.tokenizer",
    "ChargptError": "chargpt.errors",
    "Config": "chargpt.config",
    "Corpus": "chargpt.text.corpus",
    "NGramLM": "chargpt.models.ngram",
    "Trainer": "chargpt.training.trainer",
    "compare": "chargpt.analysis.compare",
    "evaluate": "chargpt.inference.evaluation",
    "load_config": "chargpt.config",
    "load_run": "chargpt.store.run",
    "load_corpus": "chargpt.text.corpus",
    "sample": "chargpt.inference.sampling",
    "train": "chargpt.training.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'chargpt' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
