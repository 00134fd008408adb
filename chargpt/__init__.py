"""Train, sample and measure character-level GPT models.

    import chargpt
    run = chargpt.train("novel.txt", budget="3m")
    print(chargpt.sample(run, prompt="It was")[0])
    print(chargpt.evaluate(run).bits_per_char)

Names are imported when they are first used, so `import chargpt` is quick.
"""

from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chargpt.analysis.compare import compare as compare
    from chargpt.config import Config as Config
    from chargpt.config import load_config as load_config
    from chargpt.errors import ChargptError as ChargptError
    from chargpt.inference.evaluation import evaluate as evaluate
    from chargpt.inference.generation import sample as sample
    from chargpt.inference.generation import stream as stream
    from chargpt.inference.infill import infill as infill
    from chargpt.inference.scoring import score as score
    from chargpt.inference.suggestions import suggest as suggest
    from chargpt.models.gpt import GPT as GPT
    from chargpt.models.ngram import BigramLM as BigramLM
    from chargpt.models.ngram import NGramLM as NGramLM
    from chargpt.store.ensemble import mix as mix
    from chargpt.store.mixture import with_mixture as with_mixture
    from chargpt.store.run import Run as Run
    from chargpt.store.run import load_run as load_run
    from chargpt.text.corpus import Corpus as Corpus
    from chargpt.text.prepare import load_corpus as load_corpus
    from chargpt.text.tokenizer import CharTokenizer as CharTokenizer
    from chargpt.training.api import train as train
    from chargpt.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_MODULES = {
    "GPT": "chargpt.models.gpt",
    "BigramLM": "chargpt.models.ngram",
    "CharTokenizer": "chargpt.text.tokenizer",
    "ChargptError": "chargpt.errors",
    "Config": "chargpt.config",
    "Corpus": "chargpt.text.corpus",
    "NGramLM": "chargpt.models.ngram",
    "Run": "chargpt.store.run",
    "Trainer": "chargpt.training.trainer",
    "compare": "chargpt.analysis.compare",
    "evaluate": "chargpt.inference.evaluation",
    "infill": "chargpt.inference.infill",
    "load_config": "chargpt.config",
    "load_run": "chargpt.store.run",
    "load_corpus": "chargpt.text.prepare",
    "mix": "chargpt.store.ensemble",
    "sample": "chargpt.inference.generation",
    "score": "chargpt.inference.scoring",
    "stream": "chargpt.inference.generation",
    "suggest": "chargpt.inference.suggestions",
    "train": "chargpt.training.api",
    "with_mixture": "chargpt.store.mixture",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'chargpt' has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    if not isinstance(found, type):
        found = _with_argument_checks(found)
    globals()[name] = found
    return found


def _with_argument_checks(function: Any) -> Any:
    """Return a function that checks its arguments, and names them in errors instead of options."""
    from chargpt.config import with_checks
    from chargpt.log import arguments_named

    checked = wraps(function)(arguments_named()(with_checks(function)))
    checked.__module__ = "chargpt"  # where pickle finds it
    return checked


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
