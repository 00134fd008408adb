"""Plans on paper: time, communication and memory of a run on GPUs that are not here.

The planner chooses as in `train`, but from a step time that is computed:

    seconds = 0.45 ms * layers + FLOPs / (20% of the peak) + bytes sent / bandwidth

The FLOPs are 6 N + 12 L C T per token (Chowdhery et al. 2022, appendix B) and those of Muon. Both
constants are fitted to the steps of one H200 in benchmarks/LOG.md, which they give within 20%; for
other cards and larger models they are assumed. Left out are soft targets, the latency of
communication, and its overlap with the backward pass.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise

import numpy as np

from chargpt.config import Config, TextConfig
from chargpt.models import count_parameters
from chargpt.text.corpus import MIN_BLOCK_SIZE, Corpus, Split
from chargpt.text.prepare import load_corpus
from chargpt.text.source import CHUNK_BYTES, Places, find_text, opened, split_source, text_pieces
from chargpt.text.tokenizer import Tokens
from chargpt.training.deadline import Deadline, work_of
from chargpt.training.learner import training_bytes
from chargpt.training.optim import COEFFICIENTS
from chargpt.training.planner import USABLE_MEMORY, Planner, predicted_loss, useful_ranks

LAYER_SECONDS = 0.45e-3  # of a step: its kernels in CUDA graphs
UTILISATION = 0.2  # of the peak FLOP/s
HOST_GPUS = 8
MAX_READ_BYTES = 50_000_000  # of a text; of a longer one a sample is read
SAMPLED_PIECES = 32  # of which the first is the sample; gzip files are read some way ahead
VALUE_BYTES = 4  # gradients and updates are exchanged in float32
MIN_EFFICIENCY = 0.2  # of additional GPUs: twice as many have to compute 1.2 times as fast


@dataclass(frozen=True)
class Gpu:
    """A card, by its data sheet.

    Attributes:
        name: for tables.
        flops: peak of dense matrix products in the dtype of training, in FLOP/s.
        memory: in bytes.
        link: bandwidth between the cards of a host, in bytes/s in one direction.
        network: bandwidth between hosts of 8 cards, in bytes/s in one direction.
    """

    name: str
    flops: float
    memory: float
    link: float
    network: float

    def bandwidth(self, n_gpus: int) -> float:
        """Return the bandwidth of a ring of GPUs, which crosses each host's network once."""
        return self.link if n_gpus <= HOST_GPUS else min(self.link, self.network)


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("T4", 65e12, 16e9, 16e9, 12.5e9),  # in float16
        Gpu("A100", 312e12, 80e9, 300e9, 200e9),
        Gpu("H100", 989e12, 80e9, 450e9, 400e9),
        Gpu("H200", 989e12, 141e9, 450e9, 400e9),
    )
}


@dataclass(frozen=True)
class ScaledCorpus(Corpus):
    """A text of which only a sample is read: its splits are `scale` times as long."""

    scale: float = 1.0

    def split(self, name: Split) -> Tokens:
        """Return as many zeros as the split has tokens; they take no memory."""
        return np.broadcast_to(np.uint8(0), (round(self.scale * len(super().split(name))),))


def sample_corpus(settings: TextConfig, characters: float | None = None) -> Corpus:
    """Return a text, or a sample that stands for a long one or for one of `characters`.

    Raises:
        TextError: as for `load_corpus`.
    """
    source = find_text(settings)
    n_bytes = sum(file.size for file in source.files)
    largest = max(source.files, key=lambda file: file.size, default=None)
    if n_bytes <= MAX_READ_BYTES or largest is None or largest.size < CHUNK_BYTES:
        corpus, scale = load_corpus(settings), 1.0
    else:
        plain, places = settings.model_copy(update={"documents": None}), Places()
        with opened(replace(source, files=(largest,)), settings) as each:
            segment = split_source(each, "train", plain)[0]
            pieces = list(islice(text_pieces(segment, plain, places), SAMPLED_PIECES))
        corpus = replace(load_corpus(settings, text=pieces[0]), name=source.name)
        scale = n_bytes / places.n_stored * sum(map(len, pieces)) / len(pieces[0])
    if characters is not None:
        scale = characters / corpus.n_characters
    values = {each.name: getattr(corpus, each.name) for each in fields(corpus)}
    return corpus if scale == 1 else ScaledCorpus(**values, scale=scale)


@dataclass(frozen=True)
class PlannedRun:
    """A run that a budget gives.

    Attributes:
        gpus: that train together.
        useful_gpus: more get less than a sequence each of the batch that is best.
        characters: read in training, repeats included.
        memory_bytes: of a device.
        step_seconds: of a step, communication included.
        communication_bytes: that each GPU sends in a step.
        communication_seconds: of a step.
        nats_per_character: predicted loss.
        notes: of the planner.
    """

    config: Config
    gpus: int
    useful_gpus: int
    parameters: int
    characters: float
    epochs: float
    memory_bytes: int
    step_seconds: float
    nats_per_character: float
    communication_bytes: float = 0.0
    communication_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return work_of(self.config, 0, self.config.train.max_steps) * self.step_seconds

    @property
    def speed(self) -> float:
        """The computation per second, to compare runs of other sizes or lengths by."""
        return self.parameters * self.characters / self.seconds


def planned_run(config: Config, corpus: Corpus, speed: float, gpus: int = 1) -> PlannedRun:
    """Return the run of a planned config at `speed` tokens per second."""
    vocab_size, train_tokens = corpus.tokenizer.vocab_size, len(corpus.split("train"))
    n_tokens = config.train.max_steps * config.tokens_per_step
    n_models = 1 + len(config.train.students)
    parameters = count_parameters(config.model, vocab_size)
    n_sequences = config.train.batch_size // (config.train.micro_batches * gpus)
    return PlannedRun(
        config,
        gpus,
        useful_ranks(config, n_tokens / n_models),
        parameters,
        characters=n_tokens * corpus.characters_per_token,
        epochs=n_tokens / train_tokens,
        memory_bytes=training_bytes(config, vocab_size, n_sequences),
        step_seconds=config.tokens_per_step / speed,
        nats_per_character=predicted_loss(parameters, n_tokens / n_models, train_tokens),
    )


def plan_on_gpus(
    config: Config,
    corpus: Corpus,
    seconds: float,
    fixed_keys: Collection[str],
    gpu: Gpu,
    n_gpus: int,
) -> PlannedRun:
    """Return the run that a budget of `seconds` gives on GPUs, the start of the command left out.

    Raises:
        TextError: the text is too short.
        OperationError: the fewest useful steps would take more than twice the budget.
    """
    corpus.require_blocks(MIN_BLOCK_SIZE)
    vocab_size, notes = corpus.tokenizer.vocab_size, list[str]()
    config = config.with_values({"device": "cuda"})

    def speed(config: Config, _: float = math.inf) -> float:
        sent = sent_bytes(config, vocab_size, n_gpus) / gpu.bandwidth(n_gpus)
        return config.tokens_per_step / (compute_seconds(config, vocab_size, gpu, n_gpus) + sent)

    deadline = Deadline.from_budget(seconds, 0.0, lambda: 0.0)
    planner = Planner(config, corpus, deadline, fixed_keys, speed, n_gpus, gpu.memory, notes.append)
    planned = planner.plan().config
    run = planned_run(planned, corpus, speed(planned), n_gpus)
    unbounded = replace(planner, memory=math.inf, warn=lambda _: None)
    best = unbounded.plan().config  # by the law
    if best != planned or run.memory_bytes > gpu.memory:
        notes.append(memory_note(best, vocab_size, gpu, n_gpus))
    n_bytes = sent_bytes(planned, vocab_size, n_gpus)
    return replace(
        run,
        communication_bytes=n_bytes,
        communication_seconds=n_bytes / gpu.bandwidth(n_gpus),
        notes=tuple(notes),
    )


def memory_note(config: Config, vocab_size: int, gpu: Gpu, n_gpus: int) -> str:
    """Return that a model does not fit into GPUs, and what helps."""
    model, parts = config.model, config.train.micro_batches * n_gpus
    least, needed = (
        training_bytes(config, vocab_size, n) / 1e9 for n in (1, config.train.batch_size // parts)
    )
    usable = USABLE_MEMORY * gpu.memory / 1e9
    remedy = "more GPUs or -s train.micro_batches=N divide its batch"
    if least > usable:
        remedy = "DDP, which holds all of it on each GPU, ends here (docs/scaling.md: torchtitan)"
    return (
        f"the best model for this time, {model.n_layer} layers x {model.n_embd:,} wide, needs "
        f"{needed:,.0f} GB of each GPU, where plans use {usable:,.0f} GB: {remedy}"
    )


def muon_stacks(config: Config) -> list[tuple[int, int, int]]:
    """Return number, rows and columns (R <= C) of the matrices that Muon updates together."""
    model = config.model
    if config.optim.name != "muon":
        return []
    width, (rows, columns) = model.n_embd, sorted((model.n_embd, model.mlp_width))
    square = {"full": 4, "average": 2, "none": 0}[model.attention]
    stacks = [(square, width, width), (3 * (model.mlp == "swiglu"), rows, columns)]
    return [(model.n_layer * each, rows, columns) for each, rows, columns in stacks if each]


def compute_seconds(config: Config, vocab_size: int, gpu: Gpu, n_gpus: int) -> float:
    """Return the time of a step without communication."""
    model = config.model
    flops = 6.0 * count_parameters(model, vocab_size)
    flops += 12 * model.n_layer * model.n_embd * model.block_size * (model.attention == "full")
    flops *= config.tokens_per_step / n_gpus
    for number, rows, columns in muon_stacks(config):  # each rank orthogonalises its part
        products = 4 * rows**2 * columns + 2 * rows**3
        flops += math.ceil(number / n_gpus) * len(COEFFICIENTS) * products
    return launch_seconds(config) + flops / (UTILISATION * gpu.flops)


def launch_seconds(config: Config) -> float:
    """Return the time that a step takes however little it computes."""
    return LAYER_SECONDS * config.model.n_layer * config.train.micro_batches


def sent_bytes(config: Config, vocab_size: int, n_gpus: int) -> float:
    """Return the bytes that each GPU sends in a step.

    They are those of a ring all-reduce of the gradients (Patarasuk and Yuan 2009), and of an
    all-gather of Muon's updates, to which each rank adds equally many matrices.
    """
    reduced = 2 * (n_gpus - 1) / n_gpus * count_parameters(config.model, vocab_size)
    gathered = sum(math.ceil(n / n_gpus) * rows * cols for n, rows, cols in muon_stacks(config))
    return VALUE_BYTES * (reduced + (n_gpus - 1) * gathered)


def n_worth_having(runs: Sequence[PlannedRun]) -> int:
    """Return how many of the runs, by rising numbers of GPUs, use their additional GPUs.

    They compute enough faster than the run before, and each GPU gets a sequence of the batch that
    is best.
    """
    for index, (fewer, run) in enumerate(pairwise(runs), start=1):
        least = 1 + MIN_EFFICIENCY * (run.gpus / fewer.gpus - 1)
        if run.gpus > run.useful_gpus or run.speed < least * fewer.speed:
            return index
    return len(runs)
