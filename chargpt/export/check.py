"""Check of an export: the program that it is for opens it, and its predictions are compared.

Shapes in this file: T = tokens, V = vocabulary size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from chargpt.config import ModelConfig
from chargpt.errors import ChargptError, ConfigError, OperationError
from chargpt.files import place
from chargpt.inference.generation import PLAIN, sample
from chargpt.log import logger
from chargpt.models import LanguageModel
from chargpt.models.gpt import GPT
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

N_PROMPTS, MIN_PROMPTS = 64, 4  # fewer of a large vocabulary or of many layers, which take long
# of a prompt, which is shorter than the block where these would be more
MAX_LOGITS, MAX_LAYER_TOKENS = 20_000_000, 100_000
MAX_DIFFERENCE = 5e-3  # of a log-probability in float32: rounding stays far below
SEED = 1337
OUTSIDE = "é\u200dяक字😀\0\ufffd"  # characters that few vocabularies have

Logits = npt.NDArray[np.floating]  # or log-probabilities


class Runtime(Protocol):
    """An exported model as another program opens it."""

    name: str  # of the program

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def logits(self, tokens: list[int]) -> Logits:
        """Return logits or log-probabilities after each of the last N >= 1 tokens, (N, V)."""


@dataclass(frozen=True)
class ExportCheck:
    """Result of a check."""

    runtime: str  # name of the program that opened the export
    n_prompts: int  # that were compared
    difference: float  # the largest one of a log-probability
    divergence: float  # mean Kullback-Leibler divergence from the run's predictions, in nats

    def describe(self) -> str:
        """Return the result in a sentence."""
        return (
            f"checked with {self.runtime}: the same tokens for {self.n_prompts} prompts, "
            f"log-probabilities within {self.difference:.1e}, "
            f"mean Kullback-Leibler divergence {self.divergence:.1e} nats"
        )


def exportable_model(run: Run, target: str) -> GPT:
    """Return the GPT of a run, if the architecture of Qwen3 can hold it, else ConfigError.

    It can if settings without a counterpart in Qwen3 are at their defaults.
    The message names the format, `target`, and the setting that it cannot hold.
    """
    model, config, default = run.model, run.config.model, ModelConfig()
    for key in ("kind", "attention", "scale_attn_weights", "qk_norm", "mlp"):
        value, required = getattr(config, key), getattr(default, key)
        if value != required:
            raise ConfigError(
                f"{target} cannot hold a model with model.{key}={value}; export a run that was "
                f"trained with model.{key}={required}"
            )
    assert isinstance(model, GPT), "a mixture is not exported"
    return model


def write_checked(
    run: Run,
    path: Path,
    target: str,
    write: Callable[[Path, Run, GPT], None],
    package: str,
    open_export: Callable[[Path], Runtime],
    max_divergence: float | None = None,
    *,
    force: bool | None = None,
) -> ExportCheck | None:
    """Write an export, if it does not differ from its run, to a new path.

    Args:
        run: whose model is exported.
        path: of the export.
        target: name of the format.
        write: writes the export at a path.
        package: that contains the program with which the export is checked.
        open_export: imports the package, and opens the export at a path with it.
        max_divergence: as in `compare`.
        force: replace a file at `path`; None where the command has no such option.

    Returns:
        The check, or None if the package is not installed, which is logged.

    Raises:
        ConfigError: the format cannot hold the model, the package to write it is missing, or
            something is at `path`.
        OperationError: the program cannot use the export, or it differs from the run.
        OSError: it cannot be written.
    """
    model = exportable_model(run, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary, check = Path(folder) / path.name, None
        try:
            write(temporary, run, model)
        except ImportError:
            raise ConfigError(
                f"{target} needs a package that is not installed; run pip install '.[export]' in "
                "chargpt's folder"
            ) from None
        try:
            check = compare(run, open_export(temporary), max_divergence)
        except ImportError:
            logger.info(
                "not checked: pip install -U %s to compare the next export with its run", package
            )
        except ChargptError:
            raise
        except Exception as error:  # of whatever kind: it is the answer to whether it can
            cause = " ".join(str(error).split())
            raise OperationError(f"{package} cannot use the export ({cause:.200})") from None
        place(temporary, path, force=force)
    return check


def compare(run: Run, runtime: Runtime, max_divergence: float | None = None) -> ExportCheck:
    """Compare tokens and log-probabilities of an export with those of its run.

    Args:
        run: whose model was exported.
        runtime: of the export.
        max_divergence: in nats, of an export whose weights are rounded, so that single
            log-probabilities may differ. None for float32.

    Raises:
        OperationError: they differ.
    """
    difference, divergences = 0.0, []
    for text in prompts(run):
        tokens = encode(run.tokenizer, text)
        if runtime.encode(text) != tokens:
            raise _differs(runtime, f"it encodes {text!r:.60} to other tokens")
        theirs = log_softmax(runtime.logits(tokens))
        ours = log_softmax(logits(run.model, tokens))[-len(theirs) :]
        if ours.shape != theirs.shape or not np.isfinite(theirs).all():
            raise _differs(runtime, "its logits are not finite, or not as many")
        difference = max(difference, float(np.abs(ours - theirs).max()))
        divergences.append(float((np.exp(ours) * (ours - theirs)).sum(axis=-1).mean()))
    check = ExportCheck(runtime.name, len(divergences), difference, float(np.mean(divergences)))
    if max_divergence is None and difference > MAX_DIFFERENCE:
        raise _differs(runtime, f"a log-probability differs by {difference:.2g}")
    if max_divergence is not None and check.divergence > max_divergence:
        raise OperationError(
            f"rounding the weights changes the model by {check.divergence:.2g} nats (mean "
            f"Kullback-Leibler divergence), and {max_divergence:g} is the limit; use "
            "`chargpt export gguf --precision f32`, or train with a lower optim.lr"
        )
    return check


def _differs(runtime: Runtime, cause: str) -> OperationError:
    return OperationError(
        f"the export does not read back as the run with {runtime.name}: {cause}; nothing was "
        "written: please report it with what `chargpt doctor` prints"
    )


def max_prompt_tokens(run: Run) -> int:
    """Return the length of the longest prompt, at most `block_size` - 1.

    llama.cpp wants room for one more token.
    """
    affordable = min(
        MAX_LOGITS // run.model.vocab_size, MAX_LAYER_TOKENS // run.config.model.n_layer
    )
    return max(1, min(run.model.block_size - 1, affordable))


def prompts(run: Run) -> list[str]:
    """Return texts of 1 to `max_prompt_tokens`: one half random characters, one half sampled."""
    tokenizer, size, n_layer = run.tokenizer, max_prompt_tokens(run), run.config.model.n_layer
    affordable = min(1000 * N_PROMPTS // tokenizer.vocab_size, 16 * N_PROMPTS // n_layer)
    half = max(MIN_PROMPTS, min(N_PROMPTS, affordable)) // 2
    generator = np.random.default_rng(SEED)
    alphabet = tokenizer.characters
    if tokenizer.has_bytes or tokenizer.has_unknown:
        alphabet += OUTSIDE
    rows = generator.integers(len(alphabet), size=(half, size))
    texts = ["".join(alphabet[i] for i in row) for row in rows]
    settings = {"num_samples": half, "length": size, "prompt": "", "stop": ()}
    texts += sample(run, seed=SEED, **{**PLAIN, **settings})
    lengths = generator.integers(1, size, endpoint=True, size=len(texts))
    return [_shorten(tokenizer, text, n) for text, n in zip(texts, lengths, strict=True)]


def _shorten(tokenizer: CharTokenizer, text: str, length: int) -> str:
    """Return the beginning of a text, of at least one and at most `length` tokens."""
    text = text[:length]
    while len(encode(tokenizer, text)) > length:  # characters that bytes spell
        text = text[: len(text) // 2]
    return text or tokenizer.characters[0]


def encode(tokenizer: CharTokenizer, text: str) -> list[int]:
    """Return the tokens of a text; other characters are replaced, or spelled as bytes."""
    tokens: list[int] = tokenizer.encode(text, unknown="replace").tolist()
    return tokens


@torch.inference_mode()
def logits(model: LanguageModel, tokens: Sequence[int]) -> Logits:
    """Return a model's logits after each of the tokens, (T, V)."""
    found: Logits = model(torch.tensor([tokens], device=model.device))[0].float().cpu().numpy()
    return found


def log_softmax(logits: Logits) -> Logits:
    """Return log-probabilities in float64, of the shape of the logits (N, V)."""
    return torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
