"""Check of an export: what a runtime makes of the file, beside what the run's own model gives.

Shapes in this file: T = tokens, V = vocabulary size.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from chargpt.errors import ConfigError, OperationError
from chargpt.inference.generation import sample
from chargpt.models import GPT, LanguageModel
from chargpt.store.run import Run
from chargpt.text.tokenizer import CharTokenizer

N_PROMPTS = 64
N_GREEDY = 200  # tokens of greedy text
MAX_DIFFERENCE = 5e-3  # of a log-probability in float32: rounding stays far below
SEED = 1337

Logits = npt.NDArray[np.floating]  # or log-probabilities


class Runtime(Protocol):
    """An exported model as another program reads it."""

    name: str  # of the program

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def logits(self, tokens: list[int]) -> Logits:
        """Return logits or log-probabilities after each of the last N >= 1 tokens, (N, V)."""

    def greedy(self, tokens: list[int], length: int) -> list[int]:
        """Return `length` greedily decoded tokens after these."""


@dataclass(frozen=True)
class ExportCheck:
    """Result of a check.

    Attributes:
        runtime: name of the program that read the export.
        difference: the largest difference of a log-probability.
        divergence: mean Kullback-Leibler divergence of the export's predictions from the run's
            after the prompts, in nats.
        n_greedy: number of tokens of greedy text that are the same.
    """

    runtime: str
    difference: float
    divergence: float
    n_greedy: int = 0

    def describe(self) -> str:
        """Return the result in a sentence."""
        greedy = f"; the same greedy text of {self.n_greedy} tokens" if self.n_greedy else ""
        return (
            f"checked with {self.runtime}: the same tokens for {N_PROMPTS} prompts, "
            f"log-probabilities within {self.difference:.1e}, "
            f"mean Kullback-Leibler divergence {self.divergence:.1e} nats{greedy}"
        )


class ModelRuntime:
    """The part of a `Runtime` whose model is one of this package, with the exported weights."""

    model: LanguageModel

    def logits(self, tokens: list[int]) -> Logits:
        return logits(self.model, tokens)

    def greedy(self, tokens: list[int], length: int) -> list[int]:
        return greedy(self.model, tokens, length)


def require_package(name: str, target: str) -> None:
    """Check that the package with which a format is written is installed, else ConfigError."""
    if find_spec(name) is None:
        raise ConfigError(
            f"{target} needs a package that is not installed; run pip install '.[export]' in "
            "chargpt's folder"
        )


@contextmanager
def temporary_export(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; unless the block fails, what is written there replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        temporary.replace(path)


def exportable_model(run: Run, target: str) -> GPT:
    """Return the GPT of a run, if the architecture of Qwen3 can hold it, else ConfigError.

    The message names the format, `target`, and the setting that it cannot hold.
    """
    model, config = run.model, run.config.model
    wanted = {
        "kind": "gpt",
        "attention": "full",
        "scale_attn_weights": True,
        "qk_norm": True,
        "mlp": "swiglu",
    }
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise ConfigError(
                f"{target} cannot hold a model with model.{key}={getattr(config, key)}; export a "
                f"run that was trained with model.{key}={value}"
            )
    assert isinstance(model, GPT), "a mixture is not exported"
    return model


def check_export(
    run: Run, runtime: Runtime, *, max_divergence: float | None = None, remedy: str = ""
) -> ExportCheck:
    """Compare an export with its run: tokens, log-probabilities and greedy text.

    Args:
        run: whose model was exported.
        runtime: of the export.
        max_divergence: in nats, of an export whose weights are rounded: its log-probabilities
            and greedy text may differ. None for float32.
        remedy: what the OperationError advises if it is more.
    """
    difference, divergences, texts = 0.0, [], prompts(run)
    for text in texts:
        tokens = encode(run.tokenizer, text)
        if runtime.encode(text) != tokens:
            raise _differs(runtime, f"it encodes {text!r:.60} to other tokens")
        theirs = log_softmax(runtime.logits(tokens))
        ours = log_softmax(logits(run.model, tokens))[-len(theirs) :]
        if ours.shape != theirs.shape or not np.isfinite(theirs).all():
            raise _differs(runtime, "its logits are not finite, or not as many")
        difference = max(difference, float(np.abs(ours - theirs).max()))
        divergences.append(float((np.exp(ours) * (ours - theirs)).sum(axis=-1).mean()))
    check = ExportCheck(runtime.name, difference, float(np.mean(divergences)))
    if max_divergence is not None:
        if check.divergence > max_divergence:
            raise OperationError(
                f"rounding the weights changes the model by {check.divergence:.2g} nats (mean "
                f"Kullback-Leibler divergence), and {max_divergence:g} is the limit; {remedy}"
            )
        return check
    if difference > MAX_DIFFERENCE:
        raise _differs(runtime, f"a log-probability differs by {difference:.2g}")
    n_greedy = 0
    for tokens, length in greedy_prompts(run, texts):
        if runtime.greedy(tokens, length) != greedy(run.model, tokens, length):
            raise _differs(runtime, "its greedy text differs")
        n_greedy += length
    return replace(check, n_greedy=n_greedy)


def _differs(runtime: Runtime, cause: str) -> OperationError:
    return OperationError(
        f"the export does not read back as the run with {runtime.name}: {cause}; nothing was "
        "written: please report it with what `chargpt doctor` prints"
    )


def prompts(run: Run) -> list[str]:
    """Return texts of 1 to `block_size` - 1 tokens: random characters, and sampled text, in turn.

    llama.cpp wants room for one more token.
    """
    generator = np.random.default_rng(SEED)
    size = max(1, run.model.block_size - 1)
    sampled = sample(run, num_samples=N_PROMPTS // 2, length=size, prompt="", stop=(), seed=SEED)
    found = []
    alphabet = run.tokenizer.characters
    if run.tokenizer.has_bytes or run.tokenizer.has_unknown:
        alphabet += "é\u200dяक字😀\0\ufffd"
    for number in range(N_PROMPTS):
        length = int(generator.integers(1, size, endpoint=True))
        text = "".join(alphabet[i] for i in generator.integers(len(alphabet), size=length))
        if number % 2 and sampled[number // 2]:
            text = sampled[number // 2][:length]
        while len(encode(run.tokenizer, text)) > size:  # characters that bytes spell
            text = text[: len(text) // 2]
        found.append(text or alphabet[0])
    return found


def encode(tokenizer: CharTokenizer, text: str) -> list[int]:
    """Return the tokens of a text; other characters are replaced, or spelled as bytes."""
    tokens: list[int] = tokenizer.encode(text, unknown="replace").tolist()
    return tokens


def look_up(text: str, ids: Mapping[str, int], unknown: str | None = None) -> list[int]:
    """Return the id of each character; of one without, that of `unknown`, or those of its bytes."""
    found = []
    for character in text:
        if character in ids:
            found.append(ids[character])
        elif unknown:
            found.append(ids[unknown])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in character.encode()]
    return found


def greedy_prompts(run: Run, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
    """Yield prompts that begin the texts, and lengths, N_GREEDY tokens in all.

    Each prompt with its continuation is at most a block.
    """
    remaining, size = N_GREEDY, run.model.block_size
    for text in texts:
        tokens = encode(run.tokenizer, text)[: max(1, size // 4)]
        length = min(remaining, size - len(tokens))
        if length > 0:
            yield tokens, length
        remaining -= length
        if remaining <= 0:
            return


@torch.inference_mode()
def logits(model: LanguageModel, tokens: Sequence[int]) -> Logits:
    """Return a model's logits after each of the tokens, (T, V)."""
    found: Logits = model(torch.tensor([tokens], device=model.device))[0].float().cpu().numpy()
    return found


@torch.inference_mode()
def greedy(model: LanguageModel, tokens: Sequence[int], length: int) -> list[int]:
    """Return `length` greedily decoded tokens after some tokens."""
    cache, found = model.new_cache(1), list[int]()
    given = torch.tensor([tokens], device=model.device)
    for _ in range(length):
        given = model(given, cache)[:, -1].argmax(dim=-1, keepdim=True)
        found.append(int(given))
    return found


def log_softmax(logits: Logits) -> Logits:
    """Return log-probabilities in float64, of the shape of the logits (N, V)."""
    return torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
