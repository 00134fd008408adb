"""Attention step by step on a text and a model: averaging, queries and keys, mask, scaling.

Every number is computed when it is asked for, by the explicit form of attention. The inputs that
teaching notebooks use (tests/test_notebooks.py names them) give the outputs that they print. The
prose is in `pages/explain/`.
Shapes in this file: B = batch, T = tokens, D = head size, H = heads, C = n_embd.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor, nn

from chargpt.analysis import plots
from chargpt.config import Config, ModelConfig
from chargpt.errors import ConfigError, TextError
from chargpt.models.gpt import GPT, PREVIOUS_TOKEN_LAYERS
from chargpt.models.gpt2 import GPT2
from chargpt.models.kernels import (
    attention_scores,
    causal_mask,
    explicit_attention,
    uniform_weights,
)
from chargpt.store.run import Run
from chargpt.text.corpus import Corpus, Split
from chargpt.text.display import REPLACEMENT, display_char, display_text
from chargpt.text.tokenizer import CharTokenizer, Tokens

MAX_LINE = 40  # characters of a line that is drawn
SEARCHED = 20_000  # tokens that are searched for a line
MIN_VARIETY = 0.25  # different characters of a line, as a fraction of its length
MAX_MAPS = 12  # layers, and heads of a layer, that a plot has room for
SHOWN = 8  # characters of the line in tables
HEAD_SIZES = (1, 4, 16, 64, 256)
SCORES = (0.1, -0.2, 0.3, -0.2, 0.5)  # the notebooks' example of a softmax

Weights = npt.NDArray[np.float32]

templates = Environment(
    loader=PackageLoader("chargpt.analysis", "pages/explain"),
    undefined=StrictUndefined,
    trim_blocks=True,
)


@dataclass(frozen=True)
class Table:
    """A table; its template gives the caption."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of heads on a text: (H, T, T), with a title per head."""

    text: str
    weights: Weights
    titles: Sequence[str]
    caption: str = ""
    name: str = "heads"  # unique in a page

    @property
    def svgs(self) -> list[Markup]:
        """The heads as SVG, one each, which a page can wrap."""
        heads = zip(self.weights, self.titles, strict=True)
        figures = (plots.attention(head[None], self.text, [title]) for head, title in heads)
        return [plots.inline(each, f"{self.name}-{i}") for i, each in enumerate(figures, 1)]


Element = Table | AttentionMaps
# Of a section: its numbers for `--json`, its elements by key, further values of its template
Content = tuple[dict[str, Any], dict[str, Element], dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """A section: paragraphs and elements in order, and its numbers for `--json`."""

    name: str
    title: str
    parts: Sequence[str | Element]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """What is explained."""

    line: str  # of the text, at most `MAX_LINE` characters
    ids: Tokens  # of the line, (T,)
    model: GPT | GPT2  # with full attention
    run: Run | None  # of the model; None of an untrained one
    corpus: Corpus

    @property
    def tokens(self) -> Tensor:
        """The line as the model's input, (1, T)."""
        return torch.from_numpy(self.ids.astype(np.int64))[None].to(self.model.device)

    @property
    def characters(self) -> list[str]:
        """The characters that tables show, in visible form."""
        return [display_char(character) for character in self.line[:SHOWN]]

    @property
    def has_previous_token_init(self) -> bool:
        """Whether the first layers began as heads that attend to the previous characters."""
        return isinstance(self.model, GPT) and self.model.config.qk_norm

    @torch.no_grad()
    def first_head(self, n_tokens: int | None = SHOWN) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of layer 1, head 1 on the first tokens, (T, D) each."""
        qkv = self.model.first_layer_qkv(self.tokens[:, :n_tokens])  # (1, H, T, D) each
        q, k, v = (part[0, 0].float().cpu() for part in qkv)  # (T, D) each
        return q, k, v


def choose_subject(corpus: Corpus, run: Run | None) -> Subject:
    """Return a run with a line of its validation split, or an untrained GPT with a line of a text.

    If the run's model has no queries and keys, an untrained GPT and the run's text are used.

    Raises:
        TextError: the text has no line.
    """
    split: Split = "val" if run else "train"
    most = min(MAX_LINE, run.config.model.block_size) if run else MAX_LINE
    ids = typical_line(corpus.tokenizer, corpus.split(split), most)
    if not len(ids):
        raise TextError(f"{corpus.name} is too short to explain anything on; give a longer text")
    line = corpus.tokenizer.decode(ids)
    model = run.model if run else None
    if isinstance(model, GPT | GPT2) and model.config.attention == "full":
        return Subject(line, ids, model.eval(), run, corpus)
    torch.manual_seed(Config().seed)
    untrained = GPT(ModelConfig(block_size=len(line)), corpus.tokenizer.vocab_size).eval()
    return Subject(line, ids, untrained, None, corpus)


def explain(subject: Subject, names: Sequence[str] = ()) -> list[Section]:
    """Return the named sections, or all.

    Raises:
        ConfigError: there is no such section.
    """
    for name in names:
        if name not in SECTIONS:
            raise ConfigError(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    chosen = dict.fromkeys(names) or SECTIONS
    return [fill_template(name, subject, *SECTIONS[name](subject)) for name in chosen]


def fill_template(
    name: str,
    subject: Subject,
    data: dict[str, Any],
    elements: Mapping[str, Element],
    values: Mapping[str, Any],
) -> Section:
    """Return a section from its template: a title, then paragraphs and elements as `[key] caption`.

    The template reads the subject, the section's data and further values.
    """
    text = templates.get_template(f"{name}.txt").render(
        {**data, **values, "subject": subject, "quoted": quoted}
    )
    title, *paragraphs = (part.strip() for part in text.split("\n\n") if part.strip())

    def part(paragraph: str) -> str | Element:
        key, _, caption = paragraph.removeprefix("[").partition("] ")
        return replace(elements[key], caption=caption) if key in elements else paragraph

    return Section(name, title.removeprefix("# "), [*map(part, paragraphs)], data)


def average_by_loop(x: Tensor) -> Tensor:
    """Return the mean of each position and all earlier ones, (B, T, C), position by position."""
    return torch.stack([x[:, : t + 1].mean(dim=1) for t in range(x.size(1))], dim=1)  # (B, T, C)


def average_by_matrix(x: Tensor) -> Tensor:
    """Compute `average_by_loop` as a product with a normalised lower triangle of ones."""
    mask = causal_mask(x.size(1), x.size(1), x.device)  # (T, T)
    return uniform_weights(mask).to(x.dtype) @ x


def average_by_softmax(x: Tensor) -> Tensor:
    """Compute `average_by_loop` as attention with equal scores."""
    zeros = x.new_zeros(1, x.size(1), 1)  # (1, T, 1)
    output, _ = explicit_attention(zeros, zeros, x)
    return output


def explain_averaging(subject: Subject) -> Content:
    """Average the past in three equivalent ways."""
    characters = subject.characters
    distinct = sorted(set(characters))
    one_hot = torch.tensor([[[float(c == d) for d in distinct] for c in characters]])
    torch.manual_seed(42)
    notebook = torch.rand(4, 8, 2)
    embedded = subject.model.embedding(subject.tokens).detach()  # (1, T, C)
    gaps = {
        name: max(
            float((average(x) - average_by_loop(x)).abs().max())
            for x in (one_hot, notebook, embedded)
        )
        for name, average in (("matrix", average_by_matrix), ("softmax", average_by_softmax))
    }
    means = average_by_matrix(one_hot)[0]  # (T, kinds)
    table = value_table(["after", *distinct], characters, means)
    first_means = average_by_loop(notebook)[0, :3].tolist()
    return {"largest_difference": gaps, "notebook_means": first_means}, {"means": table}, {}


def explain_queries(subject: Subject) -> Content:
    """Show queries, keys, values and the scores between them."""
    q, k, v = subject.first_head()  # (T, D) each
    size, scaled = q.size(-1), subject.model.config.scale_attn_weights
    scores = attention_scores(q, k, scaled=scaled)  # (T, T)
    characters = subject.characters
    best = scores.masked_fill(~causal_mask(len(q), len(q)), -math.inf).argmax(dim=-1).tolist()
    data = {"head_size": size, "scores": scores.tolist(), "line": subject.line}
    elements: dict[str, Element] = {
        "vectors": vector_table(characters, query=q, key=k, value=v),
        "scores": value_table(["", *characters], characters, scores, "{:+.2f}"),
    }
    values = {
        "scaled": scaled,
        "root": math.sqrt(size),
        "is_rotated": isinstance(subject.model, GPT),
        "best": [(i + 1, characters[i], j + 1, characters[j]) for i, j in enumerate(best)][-3:],
    }
    return data, elements, values


def explain_mask(subject: Subject) -> Content:
    """Show the weights under the causal mask, the outputs, and what the future would get."""
    q, k, v = subject.first_head()
    scaled = subject.model.config.scale_attn_weights
    outputs, weights = explicit_attention(q, k, v, scaled=scaled)  # (T, D), (T, T)
    _, unmasked = explicit_attention(*subject.first_head(None), causal=False, scaled=scaled)
    future = float(unmasked.triu(1).sum() / max(1, len(unmasked) - 1))  # the last row has none
    characters = subject.characters
    elements: dict[str, Element] = {
        "weights": value_table(["", *characters], characters, weights),
        "outputs": vector_table(characters, value=v, output=outputs),
    }
    last = " + ".join(f"{weight:.2f} v{j}" for j, weight in enumerate(weights[-1].tolist(), 1))
    data = {"weights": weights.tolist(), "outputs": outputs.tolist(), "future_without_mask": future}
    return data, elements, {"last": last}


def explain_scaling(subject: Subject) -> Content:
    """Measure the variance of scores and the saturation of the softmax by head size."""
    measured = {size: score_statistics(size) for size in HEAD_SIZES}
    q, k, _ = subject.first_head(None)
    own = [float(attention_scores(q, k, scaled=s).var(correction=0)) for s in (False, True)]
    forms = {"variance": ".2f", "variance_scaled": ".2f"}
    forms |= {"largest_weight": ".1%", "largest_weight_scaled": ".1%"}
    rows = [
        [str(size), *(format(each[name], form) for name, form in forms.items())]
        for size, each in measured.items()
    ]
    columns = ["D", "variance", "scaled", "largest weight", "weight, scaled"]
    data = {
        "by_head_size": measured,
        **notebook_scaling(),
        "own_variance": own[0],
        "own_variance_scaled": own[1],
    }
    return data, {"variances": Table(columns, rows)}, {"inputs": SCORES, "size": q.size(-1)}


def explain_attention(subject: Subject) -> Content:
    """Show the attention weights of a trained model's heads."""
    if subject.run is None:
        return {}, {}, {"heads": []}
    layers = attention_maps(subject.model, subject.ids)
    heads = describe_layers(layers)
    data: dict[str, Any] = {"line": subject.line, "heads": heads, "untrained_heads": []}
    if subject.has_previous_token_init and subject.run.config.train.from_run is None:
        torch.manual_seed(subject.run.config.seed)
        fresh = GPT(subject.model.config, subject.corpus.tokenizer.vocab_size)
        first_layers = attention_maps(fresh, subject.ids)[:PREVIOUS_TOKEN_LAYERS]
        data["untrained_heads"] = describe_layers(first_layers)
    titles = [
        f"layer {layer}, head {head}"
        for layer, weights in enumerate(layers, 1)
        for head in range(1, len(weights) + 1)
    ]
    return data, {"maps": AttentionMaps(subject.line, np.concatenate(layers), titles)}, {}


SECTIONS: dict[str, Callable[[Subject], Content]] = {
    "averaging": explain_averaging,
    "queries": explain_queries,
    "mask": explain_mask,
    "scaling": explain_scaling,
    "attention": explain_attention,
}


def quoted(line: str) -> str:
    """Return a line in quotation marks, for a paragraph, which wraps at its single spaces."""
    visible = re.sub(r"^ | $|  +", lambda found: display_char(" ") * len(found[0]), line)
    return f'"{display_text(visible, keep_spaces=True)}"'


def score_statistics(size: int) -> dict[str, float]:
    """Return variance and largest weights for 64 sets of 64 random queries and keys."""
    generator = torch.Generator().manual_seed(Config().seed)
    q, k = (torch.randn(64, 64, size, generator=generator) for _ in range(2))
    data = {}
    for suffix, scaled in (("", False), ("_scaled", True)):
        scores = attention_scores(q, k, scaled=scaled)
        data[f"variance{suffix}"] = float(scores.var())
        data[f"largest_weight{suffix}"] = float(scores.softmax(-1).max(-1).values.mean())
    return data


def notebook_scaling() -> dict[str, list[float]]:
    """Return the notebooks' variances (of k, q, scores, scaled scores) and two softmaxes."""
    torch.manual_seed(1337)
    torch.randn(4, 8, 32)  # the notebooks first sample an input and initialise three layers
    for _ in range(3):
        nn.Linear(32, 16, bias=False)
    k, q = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    raw, scaled = attention_scores(q, k, scaled=False), attention_scores(q, k)
    scores = torch.tensor(SCORES)
    return {
        "notebook_variances": [float(x.var()) for x in (k, q, raw, scaled)],
        "softmax": scores.softmax(-1).tolist(),
        "softmax_of_eight_times": (8 * scores).softmax(-1).tolist(),
    }


def vector_table(characters: list[str], **vectors: Tensor) -> Table:
    """Return vectors, (T, D) each, as a table of their first three components by character."""
    columns = (
        [" ".join(f"{value:+.2f}" for value in vector[:3]) for vector in each.tolist()]
        for each in vectors.values()
    )
    return Table(["character", *vectors], [*zip(characters, *columns, strict=True)])


def value_table(
    columns: list[str], characters: list[str], values: Tensor, form: str = "{:.2f}"
) -> Table:
    """Return a matrix as a table with a character before each row."""
    pairs = zip(characters, values.tolist(), strict=True)
    return Table(columns, [[name, *map(form.format, row)] for name, row in pairs])


def typical_line(tokenizer: CharTokenizer, tokens: Tokens, max_length: int) -> Tokens:
    """Return the first tokens of the first whole line that is not short, unindented and varied.

    Without one, the tokens are those of the text's start. Each is a character: byte tokens are left
    out of the start, and no line has them. The line before the first line end may be cut.
    """
    text = tokenizer.decode(tokens[:SEARCHED])
    known = {*tokenizer.characters, *("" if tokenizer.has_bytes else REPLACEMENT)}
    lines = (line.lstrip(" \t")[:max_length] for line in text.split("\n")[1:-1])
    typical = (
        line
        for line in lines
        if len(line) >= max(1, max_length // 2)
        and len(set(line)) > MIN_VARIETY * len(line)
        and known.issuperset(line)
    )
    start = "".join(filter(known.__contains__, text))[:max_length]
    return tokenizer.encode(next(typical, start), unknown="replace")


def attention_maps(model: GPT | GPT2, line: Tokens) -> list[Weights]:
    """Return the attention weights of the first layers and heads on (T,) tokens: (H, T, T) each."""
    model.eval()
    tokens = torch.from_numpy(line.astype(np.int64))[None].to(model.device)  # (1, T)
    layers = model.attention_weights(tokens)[:MAX_MAPS]
    return [layer[0, :MAX_MAPS].float().cpu().numpy() for layer in layers]


def describe_heads(weights: Weights) -> list[str]:
    """Return a sentence per head of (H, T, T): the distance that it attends to most, on average."""
    positions = np.arange(weights.shape[-1])
    distance = positions[:, None] - positions[None]
    considered = positions[: max(1, 3 * len(positions) // 4)]  # few rows have larger distances
    sentences = []
    for number, head in enumerate(weights, 1):
        fractions = [float(head[distance == d].mean()) for d in considered]
        best = int(np.argmax(fractions))
        names = {0: "its own position", 1: "the previous character"}
        target = names.get(best, f"{best} characters back")
        verb = "attends to" if fractions[best] >= 0.5 else "is spread out, most on"
        sentences.append(f"head {number} {verb} {target} ({fractions[best]:.0%})")
    return sentences


def describe_layers(layers: Sequence[Weights]) -> list[str]:
    """Return a sentence per layer: the distance that each head attends to most."""
    return [
        f"layer {layer}: {'; '.join(describe_heads(weights))}"
        for layer, weights in enumerate(layers, 1)
    ]
