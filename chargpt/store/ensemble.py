"""Several runs as one, whose next-character probabilities are their weighted average."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NoReturn

from chargpt.errors import ConfigError, RunError
from chargpt.models.ensemble import Ensemble
from chargpt.store.run import Run, as_run
from chargpt.text.corpus import JoinedCorpus, joined, translated
from chargpt.text.display import display_char
from chargpt.text.tokenizer import Tokens

MAX_ERROR = 1e-6  # of the sum of the weights


@dataclass(frozen=True, repr=False)
class MixedRun(Run):
    """Several runs as one, which `mix` returns; folder, config and step are those of the first."""

    parts: tuple[Run, ...] = ()
    weights: tuple[float, ...] = ()

    def __repr__(self) -> str:
        pairs = zip(self.weights, self.parts, strict=True)
        return f"MixedRun({' + '.join(f'{weight:g} {part!r}' for weight, part in pairs)})"

    def _repr_html_(self) -> str:
        return html.escape(repr(self))

    @property
    def metrics(self) -> NoReturn:
        """Raise RunError: a mixed run was not trained."""
        raise RunError("a mixed run has no training curves; take those of one of its `parts`")

    def corpus(self) -> JoinedCorpus:
        """Return the texts of all runs as one, each split after the other; RunError as of a run."""
        return joined([part.corpus() for part in self.parts], self.tokenizer)

    def texts(self) -> list[Tokens]:
        """Return the text of each run in the mixed vocabulary; RunError as of a run."""
        corpora = [part.corpus() for part in self.parts]
        return [translated(each, each.tokens, self.tokenizer) for each in corpora]


def mix(runs: Sequence[Run | str | Path], weights: Sequence[float] | None = None) -> Run:
    """Return several runs as one, whose next-character probabilities are their weighted average.

        mixed = chargpt.mix(["runs/dickens", "runs/austen"], weights=[0.7, 0.3])
        print(chargpt.sample(mixed, prompt="It was")[0])

    The result is used like any run to sample, score and evaluate. Its vocabulary is the union of
    theirs: a character that one run lacks has probability 0 in it, and its replacement token in its
    context. Its settings are those of the first run, its text is theirs together.

    Args:
        runs: runs from `train`, `load_run` or `with_mixture`, or their folders. Their texts are all
            lists of documents with the same EOS token, or none is.
        weights: of each run, 0 to 1, with the sum 1; equal by default. A run of weight 0 is left
            out, and a single one that remains is returned as it is.

    Raises:
        ConfigError: there is no run, or the weights are not such.
        RunError: a run cannot be loaded, or the runs cannot be mixed.
    """
    if not isinstance(runs, list | tuple) or not runs:
        raise ConfigError("expected a list of runs; write chargpt.mix([first, second])")
    if weights is None:
        weights = [1 / len(runs)] * len(runs)
    if not isinstance(weights, list | tuple) or len(weights) != len(runs):
        raise ConfigError(
            f"expected the weights of {len(runs)} runs (they are {weights!r:.100}); give a list "
            "with one for each"
        )
    are_numbers = all(isinstance(weight, Real) for weight in weights)
    if not (are_numbers and min(weights) >= 0 and abs(math.fsum(weights) - 1) <= MAX_ERROR):
        raise ConfigError(
            f"the weights {weights!r:.100} are not all 0 or more with the sum 1; change them, as "
            "in [0.7, 0.3]"
        )
    pairs = [(as_run(run), weight) for run, weight in zip(runs, weights, strict=True) if weight]
    (first, _), *others = pairs
    if not others:
        return first
    for other, _ in others:
        require_same_documents(first, other)
    parts, fractions = zip(*pairs, strict=True)
    model = Ensemble([part.model for part in parts], [part.tokenizer for part in parts], fractions)
    return MixedRun(
        folder=first.folder,
        config=first.config,
        tokenizer=model.tokenizer,
        model=model.eval(),
        step=first.step,
        state=first.state,
        parts=parts,
        weights=fractions,
    )


def require_same_documents(first: Run, other: Run) -> None:
    """Raise RunError unless the texts of both runs, or none, are documents with one EOS token."""
    if first.tokenizer.eos_token == other.tokenizer.eos_token:
        return
    kinds = [
        f"a list of documents ended by {display_char(eos_token)}" if eos_token else "plain text"
        for eos_token in (first.tokenizer.eos_token, other.tokenizer.eos_token)
    ]
    raise RunError(
        f"cannot mix {first.folder} and {other.folder}: the text of one is {kinds[0]}, that of the "
        f"other {kinds[1]}; mix runs that were trained with the same text.documents"
    )
