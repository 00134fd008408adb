"""Attention step by step, on your own text: averaging, queries and keys, the mask, the scale.

Every figure is computed when it is asked for, by the explicit form of attention, which tests hold
equal to the fast one. Where the inputs are those of the notebooks that teach it, so are the figures
that come out.
Shapes in this file: T = characters, D = head size, H = heads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chargpt.analysis.averages import average_by_loop, average_by_matrix, average_by_softmax
from chargpt.analysis.heads import LINE, attention_on_line, head_words, typical_line
from chargpt.analysis.plots import visible
from chargpt.config import Config, ModelConfig
from chargpt.errors import ConfigError, TextError
from chargpt.models.attention import attention_scores, causal_mask, explicit_attention
from chargpt.models.gpt import GPT, Attention, Block
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus, Split

SHOWN = 8  # characters of a line that the tables show
HEAD_SIZES = (1, 4, 16, 64, 256)
SCORES = (0.1, -0.2, 0.3, -0.2, 0.5)  # the notebooks' five


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, with what they show."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Maps:
    """How heads attend over a text: weights (H, T, T), one title a head."""

    caption: str
    text: str
    weights: Any
    titles: Sequence[str]


@dataclass(frozen=True)
class Section:
    """One stop of the tour: sentences, tables and pictures in order, and its plain figures."""

    name: str
    title: str
    parts: Sequence[str | Table | Maps]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """What the tour is about: a line of a text, and a model, trained or fresh.

    Attributes:
        line: at most LINE characters.
        ids: of its characters, (T,).
        model: with full attention.
        run: what the model is from; None of a fresh one.
        corpus: the text.
    """

    line: str
    ids: npt.NDArray[Any]
    model: GPT
    run: Run | None
    corpus: Corpus

    @property
    def tokens(self) -> Tensor:
        """The line's ids as the model takes them, (1, T)."""
        return torch.from_numpy(self.ids.astype(np.int64))[None].to(self.model.device)

    @property
    def characters(self) -> list[str]:
        """The characters that tables show, visibly."""
        return [visible(character) for character in self.line[:SHOWN]]


def subject_of(corpus: Corpus, run: Run | None) -> Subject:
    """Return what to explain: a run on a line that it never saw, or a fresh GPT on a text.

    A run whose model has no queries and keys lends its text alone.

    Raises:
        TextError: there is no line to take.
    """
    block = run.config.model.block_size if run else LINE
    part: Split = "val" if run else "train"
    ids = typical_line(corpus.tokenizer, corpus.split(part), min(LINE, block))
    if not len(ids):
        raise TextError(f"{corpus.name} is too short to explain anything on; give a longer text")
    line = corpus.tokenizer.decode(ids)
    if run is not None and isinstance(run.model, GPT) and run.model.config.attention == "full":
        run.model.eval()
        return Subject(line, ids, run.model, run, corpus)
    torch.manual_seed(Config().seed)
    fresh = GPT(ModelConfig(block_size=len(line)), corpus.tokenizer.vocab_size).eval()
    return Subject(line, ids, fresh, None, corpus)


def explain(subject: Subject, names: Sequence[str] = ()) -> list[Section]:
    """Return the sections of the tour that are named, or all.

    Raises:
        ConfigError: there is no such section.
    """
    for name in names:
        if name not in SECTIONS:
            raise ConfigError(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    return [SECTIONS[name](subject) for name in dict.fromkeys(names) or SECTIONS]


def averaging(subject: Subject) -> Section:
    """The past as one number: three ways to average it, and that they are equal."""
    characters = subject.characters
    distinct = sorted(set(characters))
    ones = torch.tensor([[[float(c == d) for d in distinct] for c in characters]])  # (1, T, kinds)
    torch.manual_seed(42)
    notebook = torch.rand(4, 8, 2)
    embedded = subject.model.embedding(subject.tokens).detach()  # (1, T, C)
    gaps = {
        name: max(
            float((way(x) - average_by_loop(x)).abs().max()) for x in (ones, notebook, embedded)
        )
        for name, way in (("matrix", average_by_matrix), ("softmax", average_by_softmax))
    }
    means = average_by_matrix(ones)[0]  # (T, kinds)
    rows = average_by_loop(notebook)[0, :3]
    return Section(
        "averaging",
        "Averaging the past, three ways",
        [
            "The simplest way to let a character know of those before it is to hand it their "
            "average. If each character is a vector of a one and zeros, the average of the past "
            "is how often each has come so far:",
            Table(
                "the mean of each character's past and itself",
                ["after", *distinct],
                [
                    [character, *(f"{share:.2f}" for share in row)]
                    for character, row in zip(characters, means.tolist(), strict=True)
                ],
            ),
            "A loop over positions computes that; so does one product with a lower triangle of "
            "ones whose rows are divided by their sums; so does a softmax over scores that are all "
            "zero, with the future masked out. On these characters, on this model's embedding of "
            "the whole line and on the notebooks' random input, matrix and loop differ by at most "
            f"{gaps['matrix']:.1e}, softmax and loop by at most {gaps['softmax']:.1e}: rounding.",
            "The notebooks' input (torch.manual_seed(42); torch.rand(4, 8, 2)) begins with the "
            "means " + ", ".join(f"({a:.4f}, {b:.4f})" for a, b in rows.tolist()) + ".",
            "The third way is attention already, only that it cannot choose: every score is zero.",
        ],
        {"largest_difference": gaps, "notebook_means": rows.tolist()},
    )


def queries(subject: Subject) -> Section:
    """What each character asks, what it offers, and how well the two meet."""
    q, k, v = project(subject)  # (T, D) each
    size, scaled = q.size(-1), subject.model.config.scaled
    scores = attention_scores(q, k, scaled=scaled)  # (T, T)
    characters = subject.characters

    def numbers(row: Tensor) -> str:
        return " ".join(f"{value:+.2f}" for value in row[:3].tolist())

    best = scores.masked_fill(~causal_mask(len(q), len(q)), -math.inf).argmax(dim=-1)
    whose = "of your run" if subject.run else "of a fresh model"
    return Section(
        "queries",
        "Queries, keys and values",
        [
            "To choose what to look at, every character makes three vectors of its embedding: a "
            "query (what it looks for), a key (what it can be found by) and a value (what it hands "
            f"on). Here are the first 3 of {size} numbers of each, in layer 1, head 1 {whose}:",
            Table(
                "queries and keys, turned by their places, and values",
                ["character", "query", "key", "value"],
                [
                    [character, numbers(q[i]), numbers(k[i]), numbers(v[i])]
                    for i, character in enumerate(characters)
                ],
            ),
            "A score is the product of one character's query and another's key"
            + (f", divided by sqrt({size}) = {math.sqrt(size):.2f}" if scaled else "")
            + ": the higher, the better they meet. "
            "Of those that it may see, "
            + ", ".join(
                f"{character} scores {characters[int(j)]} highest"
                for character, j in zip(characters[-3:], best[-3:], strict=True)
            )
            + ".",
            matrix("scores: rows ask, columns answer", characters, scores, "{:+.2f}"),
        ],
        {"head_size": size, "scores": scores.tolist(), "line": subject.line},
    )


def mask(subject: Subject) -> Section:
    """Why no character sees the future, and what the softmax makes of the scores."""
    q, k, v = project(subject)
    scaled = subject.model.config.scaled
    _, weights = explicit_attention(q, k, v, scaled=scaled)  # (T, T)
    _, open_weights = explicit_attention(q, k, v, causal=False, scaled=scaled)
    characters = subject.characters
    leaked = float(open_weights.triu(1).sum() / max(1, len(weights) - 1))  # the last has no later
    return Section(
        "mask",
        "The mask",
        [
            "A model that predicts the next character must not see it. So the scores above the "
            "diagonal are set to minus infinity before the softmax, which turns each row into "
            "weights that sum to 1 and gives those exactly 0:",
            matrix("weights: how much of each column goes into each row", characters, weights),
            f"Without the mask, {leaked:.0%} of an average row would have gone to what comes "
            "later, and training would learn to copy instead of to guess.",
        ],
        {"weights": weights.tolist(), "future_without_mask": leaked},
    )


def scaling(subject: Subject) -> Section:
    """Why scores are divided by sqrt(D): their variance, and how sharp the softmax grows."""
    measured = {size: scores_of_random(size) for size in HEAD_SIZES}
    notebook, five, eight = notebook_scaling()
    own_q, own_k, _ = project(subject, whole=True)
    own = [float(attention_scores(own_q, own_k, scaled=s).var(correction=0)) for s in (False, True)]
    return Section(
        "scaling",
        "Why 1/sqrt(head size)",
        [
            "The product of two vectors of D independent numbers of variance 1 has variance D. "
            "Larger heads would so give larger scores, and a softmax over larger scores turns into "
            "a hard choice of one character, through which nearly nothing can be learnt. Measured "
            "on random queries and keys, 64 of them to choose from:",
            Table(
                "variance of the scores, and the largest weight of a row on average",
                ["head size D", "variance", "over sqrt(D)", "largest weight", "over sqrt(D)"],
                [
                    [
                        str(size),
                        *(f"{m[name]:.2f}" for name in ("variance", "variance_scaled")),
                        *(f"{m[name]:.1%}" for name in ("largest_weight", "largest_weight_scaled")),
                    ]
                    for size, m in measured.items()
                ],
            ),
            "The notebooks' example (torch.manual_seed(1337), D = 16): k has variance "
            f"{notebook[0]:.4f}, q {notebook[1]:.4f}; their scores {notebook[2]:.4f}, and "
            f"{notebook[3]:.4f} once divided by 4.",
            f"The softmax of {', '.join(f'{s:g}' for s in SCORES)} is {words_of(five)}; of eight "
            f"times those, {words_of(eight)}.",
            f"In layer 1, head 1 here, over the whole line: {own[0]:.2f} before, "
            f"{own[1]:.2f} after (D = {own_q.size(-1)}).",
        ],
        {
            "by_head_size": measured,
            "notebook_variances": notebook,
            "softmax": five,
            "softmax_of_eight_times": eight,
            "own_variance": own[0],
            "own_variance_scaled": own[1],
        },
    )


def scores_of_random(size: int) -> dict[str, float]:
    """Return how 64 random queries and keys of one head size score, as they are and scaled."""
    generator = torch.Generator().manual_seed(Config().seed)
    q, k = (torch.randn(64, 64, size, generator=generator) for _ in range(2))
    facts = {}
    for name, scaled in (("", False), ("_scaled", True)):
        scores = attention_scores(q, k, scaled=scaled)
        facts[f"variance{name}"] = float(scores.var())
        facts[f"largest_weight{name}"] = float(scores.softmax(-1).max(-1).values.mean())
    return facts


def notebook_scaling() -> tuple[list[float], list[float], list[float]]:
    """Return the notebooks' variances (of k, q, scores, scaled scores) and two softmaxes."""
    torch.manual_seed(1337)
    torch.randn(4, 8, 32)  # they draw an input and three layers before k and q
    for _ in range(3):
        nn.Linear(32, 16, bias=False)
    k, q = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    raw, scaled = attention_scores(q, k, scaled=False), attention_scores(q, k)
    five = torch.tensor(SCORES)
    return (
        [float(x.var()) for x in (k, q, raw, scaled)],
        five.softmax(-1).tolist(),
        (8 * five).softmax(-1).tolist(),
    )


def attention(subject: Subject) -> Section:
    """What the heads of a trained model look at."""
    title = "What your model looks at"
    if subject.run is None:
        return Section(
            "attention",
            title,
            [
                "A fresh model has learnt nothing to look at. Train one on this text, and explain "
                "the run: `chargpt train TEXT --out RUN`, then `chargpt explain RUN`."
            ],
        )
    layers = attention_on_line(subject.model, subject.ids)
    words = [
        f"layer {number}: {'; '.join(head_words(weights))}"
        for number, weights in enumerate(layers, 1)
    ]
    titles = [
        f"layer {layer}, head {head}"
        for layer, weights in enumerate(layers, 1)
        for head in range(1, len(weights) + 1)
    ]
    return Section(
        "attention",
        title,
        [
            f"On a line of the validation part, {subject.line!r}, averaged over its characters:",
            *words,
            Maps(
                "rows look, columns are looked at; the darker, the more",
                subject.line,
                np.concatenate(layers),
                titles,
            ),
        ],
        {"line": subject.line, "heads": words},
    )


SECTIONS: dict[str, Callable[[Subject], Section]] = {
    "averaging": averaging,
    "queries": queries,
    "mask": mask,
    "scaling": scaling,
    "attention": attention,
}


@torch.no_grad()
def project(subject: Subject, *, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of layer 1, head 1, (T, D) each."""
    model, tokens = subject.model, subject.tokens if whole else subject.tokens[:, :SHOWN]
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert isinstance(block.attention, Attention)
    x, context = model.embedding(tokens), model.context(tokens.size(1))  # (1, T, C)
    heads = block.attention.project(x, block.attention_norm, context)  # (1, H, T, D) each
    q, k, v = (part[0, 0].float().cpu() for part in heads)  # (T, D) each
    return q, k, v


def matrix(caption: str, characters: Sequence[str], values: Tensor, form: str = "{:.2f}") -> Table:
    """Return a (T, T) matrix as a table with characters on both sides."""
    rows = [
        [character, *(form.format(value) for value in row)]
        for character, row in zip(characters, values.tolist(), strict=True)
    ]
    return Table(caption, ["", *characters], rows)


def words_of(values: Sequence[float]) -> str:
    """Return numbers with the four decimals that the notebooks print."""
    return ", ".join(f"{value:.4f}" for value in values)
