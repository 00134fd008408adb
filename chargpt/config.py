"""The configuration of a run: a frozen, validated `Config`, read from YAML.

A YAML file contains only what differs from the defaults in this file. `load_config` reads it by
name (`gpt`) or path, applies settings, and reports all errors at once, each
with its line and the most similar valid key. YAML lists become tuples.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from chargpt.errors import ConfigError, most_similar, reason_of
from chargpt.files import MAX_YAML_CHARACTERS, dump_yaml, parse_yaml, quoted

RESERVED = tuple("%@`#*,]}")  # no YAML value begins with these
MAX_PROBLEMS = 20  # listed in one message
# What words of other tools mean here: the name of an option, keyword or setting, with the value if
# it is not the one given, or a sentence with such names in braces; the first of several (|) that
# applies. VALUE is what was given, and {RUN} or {TEXT} a command's first argument.
OTHER_NAMES = {
    word: meant
    for words, meant in {
        "batch": "train.batch_size",
        "checkpoint_path ckpt": "checkpoint|from_run|{from=RUN} starts from the weights of a run, "
        "--resume RUN continues it|give {RUN}",
        "continue init_from resume_from resume_from_checkpoint": "resume=RUN",
        "run": "from_run|{from=RUN} starts from the weights of a run, "
        "--resume RUN continues it|give {RUN}",
        "context context_length seq_len": "model.block_size",
        "cpu": "device=cpu",
        "cuda gpu": "device=cuda",
        "data dataset file input text": "path|text|{prompt=TEXT} or {prompt_file=FILE} is a prompt|"
        "give {TEXT}|give {FILE}",
        "dim d_model embd hidden_size": "model.n_embd",
        "duration time": "budget",
        "epochs num_epochs num_train_epochs": "there are no epochs: give {train.max_steps=500} or "
        "{budget=10m}",
        "eval_interval": "train.evaluate_every",
        "eval_iters": "train.evaluation_tokens",
        "grad_clip": "train.clip_norm",
        "gradient_accumulation_steps": "train.micro_batches",
        "heads num_heads": "model.n_head",
        "iters iterations max_iters num_steps steps": "train.max_steps",
        "layers num_layers": "model.n_layer",
        "learning_rate": "optim.lr",
        "length_penalty": "there is no length penalty: {sample.length=300} gives the length",
        "max_chars": "max_characters|sample.length",
        "max_length max_new_tokens max_tokens tokens": "sample.length",
        "model": "config|give {RUN}",
        "minutes": "budget=VALUEm",
        "n": "num_samples",
        "name": "out=runs/VALUE",
        "nsamples num_return_sequences": "sample.num_samples",
        "output output_dir out_dir": "out|the result goes to standard output: add > FILE",
        "prefix start": "sample.prompt",
        "repetition_penalty": "there is no repetition penalty: {sample.temperature=1} repeats less",
        "seeds": "num_samples|`chargpt compare TEXT --seeds VALUE` trains a model with each seed",
        "temp": "sample.temperature",
        "v verbose": "progress=true|there is no verbose mode: all messages are printed",
        "warmup_iters warmup_steps": "schedule.warmup",
    }.items()
    for word in words.split()
}
NOT_SEPARATORS = ("line", "file", "none", "null", "paragraph")  # singular; typed as if choices
REWORDED = {  # in pydantic's messages
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    str(2**63): "2^63",
}
MESSAGES = {  # by pydantic's error type, where its own message is in Python's words
    "string_pattern_mismatch": "expected one of auto, cpu, cuda, cuda:N, xpu, xpu:N, mps",
    "model_type": "expected a section with `key: value` lines",
    "tuple_type": "expected a list",
    "callable_type": "expected a function",
    "missing": "expected a pair",
    "too_long": "expected a pair",
}
NORM_EPS = 1e-6  # of every RMSNorm
MAX_BLOCK_SIZE = 65_536
MAX_SAMPLES = 4096
MAX_SAMPLED = 10**9  # characters of a sample
MAX_NUMBER = 2**63  # of any setting, so that numpy and PyTorch can compute with it

UnitInterval = Annotated[float, Field(gt=0, le=1)]


def unescape(text: str) -> str:
    """Return a typed text with `\\n`, `\\r` and `\\t` as line ends and tabs."""
    return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


class Settings(BaseModel):
    """A group of settings: immutable, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def reject_wrong_type(cls, value: object, info: ValidationInfo) -> object:
        """Reject `"5"` or `true` as a number, and `"yes"` or 1 as a boolean.

        A string in place of a list of strings becomes a list of one.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = get_args(annotation) or (annotation,)
        if bool in types and not isinstance(value, bool):
            raise ValueError("expected true or false")
        if (int in types or float in types) and isinstance(value, bool | str):
            raise ValueError("expected a number")
        if isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise ValueError("expected less than 2^63")
        if types == (str, ...) and isinstance(value, str):
            return (value,)
        return value


class TextConfig(Settings):
    """The training text, its encoding, and its splits."""

    path: str | None = None
    """A file, folder or glob, or `-` for standard input; null: the built-in text."""
    val_path: str | None = None
    """A text of its own for the validation split; `val_fraction` is then not used."""
    test_path: str | None = None
    """A text of its own for the test split. Of a folder whose files are named train, valid (or val,
    dev) and test, `val_path` and `test_path` need not be set."""
    encoding: str = "auto"
    """`auto`: UTF-8, or what a byte order mark states."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Bytes that do not decode are an error, or each becomes U+FFFD."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".gz")
    """Which files of a folder are read, by their endings: `.py,.txt`."""

    exclude: tuple[str, ...] = ()
    """Files of a folder or glob that are not read: patterns of their names, or of their paths in
    it: `LICENSE.txt,drafts/*`."""

    @field_validator("suffixes", "exclude")
    @classmethod
    def split_lists(cls, texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Accept several in one text, suffixes also as `.py .md`, and `drafts/` for a folder."""
        separator = r"[,\s]+" if info.field_name == "suffixes" else ","
        parts = [part.strip() for each in texts for part in re.split(separator, each)]
        split = tuple(part.removesuffix("/") for part in parts if part)
        if info.field_name == "suffixes" and not split:
            raise ValueError("expected an ending of file names, such as .txt")
        return split

    newlines: Literal["keep", "lf"] = "keep"
    """`lf`: line ends of every kind (CR LF, CR, U+2028, U+2029) become LF."""
    documents: str | None = "auto"
    """For a text made of items, such as names or poems: `lines`, `files`, or what separates them,
    in which a line end stands for one of any kind, and line ends alone for as many or more. The
    items are shuffled and never split. Null: one text in its order. `auto`: `lines`, or separators
    such as `%`, where the start of the text leaves no doubt, else null."""
    seed: int = Field(1337, ge=0, lt=2**63)
    """Seed of the order of the documents."""

    @field_validator("documents", mode="after")
    @classmethod
    def unescape_separator(cls, documents: str | None) -> str | None:
        """Accept `\\n` for a line end, and a line end for `lines`; make line ends LF."""
        if documents is None:
            return None
        separator = re.sub("\r\n?", "\n", unescape(documents))
        is_word = separator.strip().lower().removesuffix("s") in NOT_SEPARATORS
        if not separator or (is_word and separator not in ("lines", "files")):
            raise ValueError(r"expected `auto`, `lines`, `files`, null or a separator such as \n\n")
        return "lines" if separator == "\n" else separator

    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the text in the validation split, after the training split."""
    test_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of the text in the test split, at the end of the text."""
    mixture_characters: int = Field(0, ge=0)
    """Characters at the start of the text, at most 3% of it, that are left out of training to fit
    the mixture of GPT and n-gram models; 0: no mixture. --budget chooses it."""
    rare: Literal["bytes", "keep", "unknown"] = "bytes"
    """Characters rarer than `min_count`: spelled as the bytes of their UTF-8 form, kept in the
    vocabulary, or all one unknown token."""
    min_count: int | None = Field(None, ge=1)
    """Count from which a character is in the vocabulary; null: 1, which keeps all, if the text has
    at most 256 different characters, else its length / 100,000, rounded."""
    extra_characters: str = ""
    """Characters that are in the vocabulary whether the text has them or not."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """How prompts and other texts treat characters that cannot be encoded."""

    @model_validator(mode="after")
    def require_training_split(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                "val_fraction + test_fraction must be less than 1, or the training split is empty"
            )
        if self.val_path is not None and self.test_fraction and self.test_path is None:
            raise ValueError("with val_path, give the test split by test_path, not test_fraction")
        return self


class ModelConfig(Settings):
    """The model. A bigram has only `kind` and `block_size`; gpt2 also `n_layer`, `n_head`, `n_embd`
    and `dropout`."""

    kind: Literal["gpt", "gpt2", "bigram"] = "gpt"
    """The architecture: a transformer, that of GPT-2 (for imported models), or a table of bigram
    logits."""
    n_layer: int = Field(4, ge=1, le=256)
    """Transformer blocks."""
    n_head: int = Field(2, ge=1, le=256)
    """Attention heads of a block."""
    n_embd: int = Field(128, ge=2, le=65536)
    """Embedding width, a multiple of 2 * n_head; of gpt2, of n_head."""
    n_inner: int | None = Field(None, ge=1, le=262144)
    """Hidden width of the MLP; null is 8/3 of n_embd, rounded up to a multiple of 64."""
    block_size: int = Field(128, ge=1, le=MAX_BLOCK_SIZE)
    """Context length in tokens; a token is a character, or a byte of a rare one."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropout on embeddings and the outputs of attention and MLP."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary embedding's wavelengths."""
    attention: Literal["full", "average", "none"] = "full"
    """`full`: causal self-attention; `average`: the mean of the current and past values; `none`:
    left out."""
    scale_attn_weights: bool = True
    """Divide attention scores by sqrt(head size)."""
    qk_norm: bool = True
    """Normalise queries and keys by RMSNorm."""
    mlp: Literal["swiglu", "none"] = "swiglu"
    """The MLP of a block; `none`: left out."""

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return self.n_inner or 64 * math.ceil(self.n_embd * 8 / 3 / 64)

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.n_embd // self.n_head

    @model_validator(mode="after")
    def require_head_divisibility(self) -> Self:
        words, factor = ("n_head", 1) if self.kind == "gpt2" else ("2 * n_head", 2)
        divisor = factor * self.n_head
        if self.kind != "bigram" and self.n_embd % divisor:
            raise ValueError(f"n_embd {self.n_embd} must be divisible by {words} = {divisor}")
        return self


class TrainConfig(Settings):
    """The training loop. Intervals are in steps."""

    from_run: str | None = None
    """The run whose best weights training starts from, with its model settings and vocabulary;
    null: random weights. --from sets it."""
    max_steps: int = Field(650, ge=1)
    """Number of updates (optimizer steps) in all, those before a resume included."""
    batch_size: int = Field(16, ge=1)
    """Sequences per update, over all ranks and micro-batches."""
    micro_batches: int = Field(1, ge=1)
    """Micro-batches per update on each rank (gradient accumulation)."""
    evaluate_every: int = Field(65, ge=1)
    """Interval of evaluations on the validation split."""
    evaluation_tokens: int = Field(30_000, ge=1)
    """Each evaluation in training and at its end scores at most this many tokens of a split, in
    evenly spread blocks."""
    save_every: int = Field(65, ge=1)
    """Interval of checkpoints, of which there is one a minute as well, if saving takes less than a
    hundredth of the time; a new best is saved at once."""
    sample_every: int = Field(325, ge=0)
    """Interval of samples printed during training; 0: none."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep; the best one is kept as well."""
    patience: int | None = Field(None, ge=1)
    """Stop early after this many evaluations without a new best loss; null: never."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient; null: no clipping."""
    max_rollbacks: int = Field(0, ge=0, le=20)
    """Maximum returns to the last checkpoint, at half the learning rates, on non-finite values; in
    one process only."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of the exponential moving average of weights to evaluate and save; 0: none. After n
    steps it is at most (1 + n) / (10 + n): the initial weights soon count little."""
    ngram_target_weight: float = Field(0.0, ge=0, le=1)
    """Weight of the n-gram baseline's probabilities in the training targets (soft targets)."""
    teachers: tuple[str, ...] = ()
    """Runs whose mean probabilities are part of the training targets (distillation)."""
    teacher_weight: float = Field(0.9, ge=0, le=1)
    """Weight of the teachers' mean probabilities in the training targets; the rest is as without
    teachers."""
    students: tuple[PositiveInt, ...] = ()
    """Steps at which training starts again from random weights, without dropout: the new model is a
    student of the one before, its only teacher. Each is also a step of schedule.restarts."""

    @model_validator(mode="after")
    def require_usable_students(self) -> Self:
        if any(later <= step for step, later in pairwise(self.students)):
            raise ValueError("students: the steps must be strictly increasing")
        if self.students and self.from_run is not None:
            raise ValueError(
                "students start from random weights, not from those of from_run; give students or "
                "from_run"
            )
        if self.students and self.patience is not None:
            raise ValueError(
                "patience would stop at the high loss with which students start; give "
                "students or patience"
            )
        return self


class OptimConfig(Settings):
    """The optimizer."""

    name: Literal["adamw", "muon"] = "muon"
    """`muon`: Muon for the matrices of the blocks, AdamW for all other parameters."""
    lr: float = Field(0.02, gt=0)
    """AdamW's learning rate; with `muon`, the embedding of a transformer uses four times this."""
    matrix_lr: float = Field(0.05, gt=0)
    """Muon's learning rate."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of all matrices, embedding and head included, times the learning
    rate."""
    l2_sp: float = Field(0.0, ge=0, lt=1)
    """L2-SP: fraction of the distance to the weights of `train.from_run` that each update removes,
    times the schedule's factor; a higher one forgets less of the old text."""

    def lower_rates(self) -> str:
        """Return options for lower learning rates, at most the defaults, after a divergence."""
        names = ("lr", "matrix_lr") if self.name == "muon" else ("lr",)
        rates = {name: min(getattr(self, name) / 4, getattr(OptimConfig(), name)) for name in names}
        return " ".join(f"-s optim.{name}={rate:g}" for name, rate in rates.items())


# settings that planning and runs change
REPLANNED = ("train.students", "schedule.decay_points", "schedule.restarts")


class ScheduleConfig(Settings):
    """The learning rate over the steps."""

    kind: Literal["wsd", "cosine"] = "wsd"
    """`wsd`: warmup, stable, decay (cooldown); `cosine`: warmup and cosine decay to a tenth."""
    warmup: int = Field(5, ge=0)
    """Steps of linear warmup."""
    cooldown: float = Field(0.9, ge=0, le=1)
    """Fraction of all steps in which `wsd` decays towards zero; 0 keeps the rate constant."""
    decay_points: tuple[tuple[NonNegativeInt, PositiveInt], ...] = ()
    """How a budget or a resume moved the end of the decay, one pair (step, end) per move: up to
    `step`, counted from 0, the rate fell on a line that would reach zero at `end`. After the last
    pair the line reaches zero at train.max_steps. The decay begins at (1 - `cooldown`) of the first
    end."""
    restarts: tuple[tuple[PositiveInt, UnitInterval], ...] = ()
    """Students, and resumed runs with more steps: pairs (step, fraction of the peak). At that step
    the rate warms up to this fraction again, then decays linearly to zero."""

    @field_validator("decay_points", "restarts")
    @classmethod
    def require_rising_steps(
        cls, pairs: tuple[tuple[int, float], ...], info: ValidationInfo
    ) -> tuple[tuple[int, float], ...]:
        """Reject pairs whose steps do not rise, or a decay point that is not before its end."""
        if info.field_name == "decay_points" and any(end <= step for step, end in pairs):
            raise ValueError("each step must be less than its end")
        if any(later <= step for (step, _), (later, _) in pairwise(pairs)):
            raise ValueError("the steps must be strictly increasing")
        return pairs


class SampleConfig(Settings):
    """How text is sampled from the model."""

    prompt: str = ""
    """Text to continue. Empty: generation starts after the EOS token, if the text is a list of
    documents, or after a newline; if the vocabulary has neither, with a character sampled by its
    frequency."""
    length: int = Field(500, ge=1, le=MAX_SAMPLED)
    """Characters to sample."""
    temperature: float = Field(0.8, ge=0)
    """0: always the most probable character (greedy)."""
    top_k: int | None = Field(None, ge=1)
    """Sample from the k most likely characters; null: from all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of most likely characters with total probability p or more;
    null: from all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample from characters with at least p times the highest probability; null: from all."""
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Number of samples."""
    new: bool = False
    """Only whole documents that the run's text does not have in any split."""
    distinct: bool = False
    """No continuation twice."""
    best: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    """Only the k samples of the lowest mean surprisal, lowest first; null: all."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """null: a new seed each time."""
    stop: tuple[str, ...] = ()
    """End a text before any of these."""
    match: str | None = None
    """Regular expression that the whole text matches, as of Python's `re`, without lookaround and
    backreferences; null: none."""
    only: str | None = None
    """The only letters that are sampled, in either case; null: all."""
    without: str | None = None
    """Characters that are not sampled, in either case; null: none."""
    word: tuple[str, ...] = ()
    """Words that the text contains, in either case; may be repeated."""
    lines: int | None = Field(None, ge=1, le=MAX_SAMPLED)
    """Number of lines, none of them blank; null: any."""
    acrostic: tuple[str, ...] = ()
    """Beginnings of the lines: the characters of a text, or one text a line if repeated."""
    end: str | None = None
    """What each line ends with, in either case, but for punctuation; null: anything."""
    max_chars: int | None = Field(None, ge=1, le=MAX_SAMPLED)
    """At most so many characters, in place of the length; a text that is not over by then ends
    after its last whole sentence, or else line; null: the length counts."""
    no_copy: int | None = Field(None, ge=1, le=1_000_000)
    """Longest stretch of the run's text that may be copied, in characters; null: any."""
    whole: bool = False
    """Apply `match` and the other constraints to the prompt, too, as the start of the text."""

    @property
    def limit(self) -> int:
        """Characters that are sampled at most."""
        return self.max_chars or self.length

    @field_validator("match", "only", "without", "end", "word", "acrostic", "stop")
    @classmethod
    def reject_empty_texts(
        cls, texts: str | tuple[str, ...] | None, info: ValidationInfo
    ) -> str | tuple[str, ...] | None:
        if texts == "" or (isinstance(texts, tuple) and "" in texts):
            is_stop = info.field_name == "stop"
            what = "a stop string is empty and would stop at once" if is_stop else "a text is empty"
            raise ValueError(f"{what}; give it a character")
        return texts

    @field_validator("acrostic")
    @classmethod
    def split_single_text(cls, acrostic: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(acrostic[0]) if len(acrostic) == 1 else acrostic

    @model_validator(mode="after")
    def require_enough_samples(self) -> Self:
        if self.best is not None and self.best > self.num_samples:
            raise ValueError(
                f"sample.best {self.best} is of sample.num_samples {self.num_samples}; raise "
                "sample.num_samples, or lower sample.best"
            )
        return self


class TrackConfig(Settings):
    """Where metrics are logged in addition to `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard files into the run's folder; needs `pip install '.[track]'`."""


class Config(Settings):
    """All settings of a run."""

    seed: int = Field(1337, ge=0, lt=2**63)
    """Seed of initial weights, batches and dropout."""
    device: str = Field("auto", pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$")
    """`auto`, `cpu`, `cuda`, `cuda:N`, `xpu`, `xpu:N` or `mps`; `auto`: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matrix products (autocast); weights stay float32. `auto`: bfloat16 on CUDA, ROCm and
    Intel GPUs that have it, float16 on V100 and T4; either on Apple GPUs, and bfloat16 on x86 CPUs,
    where it is measured as over 1.5 times as fast. float16 scales the loss."""
    deterministic: bool = False
    """Bitwise reproducible results on CUDA, at some cost in speed."""
    threads: int | None = Field(None, ge=1, le=4096)
    """PyTorch's threads on a CPU; null: measured at the start, unless OMP_NUM_THREADS is set."""
    text: TextConfig = TextConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sample: SampleConfig = SampleConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="after")
    def require_consistent_settings(self) -> Self:
        if self.optim.l2_sp and self.train.from_run is None:
            raise ValueError(
                "optim.l2_sp pulls towards the weights of train.from_run; set that too"
            )
        restarts = dict(self.schedule.restarts)
        if missing := [step for step in self.train.students if step not in restarts]:
            raise ValueError(
                f"train.students names step {missing[0]}, at which the learning rate must restart; "
                f"add [{missing[0]}, 1] to schedule.restarts"
            )
        if self.train.batch_size % self.train.micro_batches:
            raise ValueError(
                f"train.batch_size {self.train.batch_size} must be divisible by "
                f"train.micro_batches {self.train.micro_batches}"
            )
        return self

    def model_start(self, step: int) -> int:
        """Return after how many steps the model that step `step` (1, 2, ...) trains was started."""
        return max((at for at in self.train.students if at < step), default=0)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that an update reads."""
        return self.train.batch_size * self.model.block_size

    def with_values(self, values: Mapping[str, object]) -> "Config":
        """Return a validated copy with the values of dotted keys replaced.

        Raises:
            ConfigError: a key is unknown or a value is invalid.
        """
        tree = self.model_dump()
        for key, value in values.items():
            set_dotted(tree, key, value)
        return validate(tree)

    def differing_keys(self, other: "Config") -> list[str]:
        """Return the dotted keys of the settings that differ from another config's."""
        own, others = self.flatten(), other.flatten()
        return [key for key in DEFAULTS if own[key] != others[key]]

    def flatten(self) -> dict[str, Any]:
        """Return the value of every setting by its dotted key, and each section as a dict."""
        values = {}
        for name, value in self.model_dump().items():
            values[name] = value
            if isinstance(value, dict):
                values |= {f"{name}.{key}": each for key, each in value.items()}
        return values

    def to_yaml(self) -> str:
        """Return every setting as YAML, from which `load_config` reads an equal Config."""
        return dump_yaml(self.model_dump(mode="json"))


DEFAULTS = {k: each for k, each in Config().flatten().items() if not isinstance(each, dict)}
TEXTS = {  # the settings that are a text
    f"{section}.{name}"
    for section, kind in (("text", TextConfig), ("sample", SampleConfig))
    for name, field in kind.model_fields.items()
    if field.annotation in (str, str | None)
}
SWEPT = {  # the settings of which `chargpt compare` takes several values
    key
    for key, default in DEFAULTS.items()
    if key.startswith(("model.", "train.", "optim.", "schedule.")) and type(default) is not tuple
} - {"train.from_run"}


def set_dotted(tree: dict[str, Any], key: str, value: object) -> None:
    """Set tree["a"]["b"] for key "a.b"."""
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key} is not a setting: {section} is not a section")
    tree[last] = {**value} if isinstance(value, dict) else value  # a copy: later keys modify it


def describe_unknown_key(key: str) -> str:
    """Return '; did you mean ...?' for an unknown dotted key, or a list of the valid keys."""
    known = Config().flatten()
    section, _, last = key.rpartition(".")
    if key in known:
        return f"; write {last} on a separate line, indented under `{section}:`"
    meant = OTHER_NAMES.get(last, "")
    if meant.partition("=")[0] in known:
        return f"; did you mean {meant}?"
    options = ("set", "budget", "out")
    if (meant or last in options) and (form := right_form(last, "", options)):
        return f"; {form}"
    inside = [name for name in known if name.startswith(f"{section}.")]
    for names in (inside, known):
        by_name = {name.split(".")[-1]: name for name in names}
        longer = [name for name in by_name if name.startswith(f"{last}_")]
        if near := longer or difflib.get_close_matches(last, by_name):
            return f"; did you mean {by_name[near[0]]}?"
    return "; the keys are " + ", ".join(inside) if inside else "; `chargpt config` lists all"


def right_form(word: str, value: object, names: Collection[str], *, is_python: bool = False) -> str:
    """Return what an unknown option or keyword is here: "--lr 0.1 is -s optim.lr=0.1", or "".

    Args:
        word: an option with its dashes, or a keyword.
        value: what was given for it; of an option a word of the shell, "" if there is none.
        names: of the options, without dashes and with _ for -, or of the keywords. Those named
            `set` and `settings` take any setting. A command's first argument is RUN or TEXT.
        is_python: whether to write keywords instead of options.
    """

    def write(meant: str) -> str:
        name, chosen = parse_override(meant) if "=" in meant else (meant, value)
        last, shown = name.rpartition(".")[2], f"{chosen!r:.60}" if is_python else chosen
        if name.isupper():
            return f"the {name.lower()} as an argument" if name in names else ""
        if last == "checkpoint" and not re.fullmatch(r"best|latest|\d+", str(chosen)):
            return ""
        if last in names:
            return f"{last}={shown}" if is_python else f"--{last.replace('_', '-')} {shown}"
        if name not in DEFAULTS or ("settings" if is_python else "set") not in names:
            return ""
        return f"settings={{{name!r}: {shown}}}" if is_python else f"-s {name}={shown or 'VALUE'}"

    by_last = {key.rpartition(".")[2]: key for key in reversed(DEFAULTS)}  # of two, the first
    by_last |= OTHER_NAMES | {name: name for name in names}
    plain = word.lstrip("-").replace("-", "_").lower().rpartition(".")[2]
    near = most_similar(plain, by_last) or ""
    for meant in by_last.get(near, "").split("|"):
        is_sentence = " " in meant
        parts = re.split("[{}]", meant if is_sentence else f"{{{meant}}}")
        parts[1::2] = map(write, parts[1::2])
        if not all(parts[1::2]):
            continue
        form = "".join(parts).rstrip().replace("VALUE", str(value) or "VALUE")
        if is_sentence:
            return form
        given = f"{word}={value!r:.60}" if is_python else word
        uses_value = "=" not in meant or "VALUE" in meant
        given += f" {value}" if value and uses_value and not is_python else ""
        return f"{given} is {form}" if near == plain else f"{given}: did you mean {form}?"
    return ""


def reject_keywords(given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ConfigError for a keyword that is not known, with what it is here."""
    for name, value in given.items():
        if name not in known:
            if name == "mixture" and "run" in known:
                raise ConfigError("there is no mixture=; give chargpt.with_mixture(run) as the run")
            form = right_form(name, value, known, is_python=True)
            raise ConfigError(form or f"{name} is not an argument; there are {', '.join(known)}")


def with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises ConfigError for an unknown keyword or a wrong argument.

    By its signature, these are checked: integers (at least 1; a seed at least 0), literals and
    functions.
    """
    parameters, fields = signature(function).parameters, dict[str, Any]()
    for name, hint in get_type_hints(function).items():
        kinds = get_args(hint | None)
        if int in kinds:
            fields[name] = (hint, Field(None, ge=0 if name == "seed" else 1, lt=2**63))
        elif {get_origin(kind) or kind for kind in kinds} <= {Callable, Literal, type(None)}:
            fields[name] = (hint, None)
    model = create_model("Arguments", __base__=Settings, **fields)

    def call(*args: Any, **given: Any) -> Any:
        reject_keywords(given, parameters)
        named = {**dict(zip(parameters, args, strict=False)), **given}
        try:
            values = model.model_validate({key: named[key] for key in fields if key in named})
        except ValidationError as error:
            problems = [_problem(detail, "", {}) for detail in error.errors()]
            raise ConfigError("; ".join(problems)) from None
        return function(*args, **{**given, **{key: each for key, each in values if key in given}})

    return call


def validate(
    tree: dict[str, Any], origin: str = "", lines: Mapping[str, int] | None = None
) -> Config:
    """Return the Config of a dict, or raise a ConfigError that names every invalid setting.

    Args:
        tree: the settings.
        origin: the file or program that they are from.
        lines: of the file, by dotted key; settings without one are from elsewhere.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem(detail, origin, lines or {}) for detail in details[:MAX_PROBLEMS]]
        if origin and lines is None:
            problems[0] = f"{origin}: {problems[0]}"
        raise ConfigError("; ".join(problems)) from None


def _problem(detail: Mapping[str, Any], origin: str, lines: Mapping[str, int]) -> str:
    """Return the message for one invalid setting, with its file and line if it has one."""
    keys = [str(part) for part in detail["loc"] if not isinstance(part, int)]
    dotted = ".".join(keys)
    where = f"{origin}: line {lines[dotted]}: " if dotted in lines else ""
    key = dotted if dotted.isprintable() else ascii(dotted)
    if detail["type"] == "extra_forbidden":
        return f"{where}{key:.100} is not a setting{describe_unknown_key(dotted[:100])}"
    message = MESSAGES.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
    for words, shorter in REWORDED.items():
        message = message.replace(words, shorter)
    value = detail["input"]
    is_section = detail["type"] == "value_error" and isinstance(value, dict | BaseModel)
    if not is_section:
        in_yaml = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
        message += f" (it is {in_yaml:.60})"
    if dotted in SWEPT and isinstance(value, str) and "," in value:
        form = f"`chargpt compare TEXT -s {dotted}={value:.60}` trains a model with each"
        if isinstance(DEFAULTS[dotted], float) and re.fullmatch(r"0,\d+|\d+,0\d*", value):
            form = f"write {value.replace(',', '.'):.60}"
        elif re.fullmatch(r"\d+,|\d{1,3}(,\d{3})*,000", value):
            form = f"write {value.replace(',', ''):.60}"
        elif re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            form = f"write {value.replace(',', ''):.60} if it is one; {form}"
        message += f"; {form}"
    return f"{where}{key}{': ' if key else ''}{message}"


def shipped_configs() -> dict[str, Path]:
    """Return the paths of the configs in the package, by name."""
    package = Path(__file__).parent
    wheel, source_tree = package / "configs", package.parent / "configs"
    folder = wheel if wheel.is_dir() else source_tree
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_config_tree(
    source: str | os.PathLike[str] | Config,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a shipped config (by name), YAML file or Config sets, and its keys' lines."""
    if isinstance(source, Config):
        return source.model_dump(exclude_unset=True), {}
    shipped = shipped_configs()
    path = shipped.get(str(source), Path(str(source)))
    if not os.path.isfile(path):  # unlike Path.is_file, False for invalid names
        near = most_similar(str(source), shipped)
        if os.path.isfile(path / "config.yaml"):  # of a run
            near = str(path / "config.yaml")
        hint = f"did you mean {near}?" if near else f"the shipped ones are {', '.join(shipped)}"
        raise ConfigError(f"there is no config {str(source)!r:.200}; {hint}")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_YAML_CHARACTERS + 1)  # parse_yaml rejects more
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 text ({reason_of(error)}); name another"
        ) from None
    return parse_yaml(text, str(path))


def load_config(
    config: str | os.PathLike[str] | Config = "gpt",
    settings: Mapping[str, object] | None = None,
) -> Config:
    """Return the Config that `train` uses of a config and settings, if no budget plans it.

    Args:
        config: a shipped config's name, such as `gpt` or `bigram`, a YAML file, or a Config.
        settings: by dotted keys, as in {"train.max_steps": 500}; they take precedence.

    Raises:
        ConfigError: naming every invalid setting and its line.
    """
    return merge_settings(config, require_settings(settings))[0]


def require_settings(settings: Mapping[str, object] | None) -> dict[str, object]:
    """Return settings by dotted keys, with paths as strings; ConfigError if they are no mapping."""
    if not isinstance(settings, Mapping | None):
        raise ConfigError(
            "settings: expected a dictionary, such as {'train.max_steps': 500} (it is of type "
            f"{type(settings).__name__})"
        )
    return {key: _with_text_paths(value) for key, value in (settings or {}).items()}


def _with_text_paths(value: object) -> object:
    """Return a value, or the values of a list, with texts for paths."""
    if isinstance(value, list | tuple):
        return [_with_text_paths(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def merge_settings(
    source: str | os.PathLike[str] | Config | None,
    values: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> tuple[Config, frozenset[str]]:
    """Return a Config, and the dotted keys of the settings that the file or `values` fix.

    Args:
        source: a shipped config's name, a path or a Config; None: the shipped `gpt`, which fixes
            nothing.
        values: by dotted key; they take precedence.
        defaults: by dotted key, for settings that the file omits.

    Raises:
        ConfigError: naming every invalid setting and its line.
    """
    origin = "gpt" if source is None else source
    file_tree, lines = read_config_tree(origin)
    fixed_keys = set(values)
    tree: dict[str, Any] = {}
    for key, value in (defaults or {}).items():
        set_dotted(tree, key, value)
    for key, value in file_tree.items():
        if value is None and isinstance(getattr(Config(), key, None), Settings):
            value = {}  # all lines of the section are comments
        if source is not None:
            fixed_keys |= {f"{key}.{name}" for name in value} if isinstance(value, dict) else {key}
        is_merged = isinstance(value, dict) and isinstance(tree.get(key), dict)
        tree[key] = tree[key] | value if is_merged else value
    train, key = tree.get("train"), "train.max_steps"
    if isinstance(train, dict) and key in values and values[key] != train.get("max_steps"):
        for section, name in (each.split(".") for each in REPLANNED):
            if isinstance(tree.get(section), dict):
                tree[section].pop(name, None)
    for key, value in values.items():
        set_dotted(tree, key, value)
    replaced = [f"{key}." for key in values]
    lines = {  # of what is as in the file: neither replaced nor a section with a replaced value
        key: line
        for key, line in lines.items()
        if not any(f"{key}.".startswith(each) or each.startswith(f"{key}.") for each in replaced)
    }
    return validate(tree, str(origin), lines), frozenset(fixed_keys)


def parse_override(written: str) -> tuple[str, object]:
    """Return the dotted key and the value of `section.key=value`, or ConfigError.

    The value is read as YAML, but that of a setting which is a text as it is, unless it is quoted
    or null.
    """
    key, equals, value = written.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"-s {written!r} is not of the form section.key=value")
    begin = value.strip()[:1]
    if key in TEXTS and begin not in ("", "'", '"', "~") and value.strip() != "null":
        return key, value
    if begin in RESERVED:
        return key.strip(), value.strip()
    scalar = "'{}'".format(value.replace("'", "''"))
    remedy = f"correct it, or quote it if it is text: -s {quoted(f'{key.strip()}={scalar}')}"
    parsed, _ = parse_yaml(f"value: {value}", f"-s {written}", remedy)
    if set(parsed) != {"value"}:
        raise ConfigError(f"-s {written!r} sets more than one key; use one -s per key")
    return key.strip(), parsed["value"]


def split_values(written: str) -> list[str]:
    """Return `KEY=VALUE` for each value of `KEY=VALUE,VALUE`, if the setting is in `SWEPT`."""
    key, equals, values = written.partition("=")
    if not equals or key.strip() not in SWEPT or values.strip()[:1] in ("{", "'", '"'):
        return [written]
    found = [value.strip() for value in values.strip(" []").split(",")]
    return [f"{key.strip()}={value}" for value in found if value] or [written]
