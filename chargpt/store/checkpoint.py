"""What one checkpoint holds, and the reading of it: no byte is believed that was not checked."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from chargpt.config import Config, validate
from chargpt.device import require_memory
from chargpt.errors import RunError
from chargpt.models import count_parameters, rotary_bytes
from chargpt.store import commit
from chargpt.store.state import RunState
from chargpt.store.tensors import deserialize
from chargpt.text.tokenizer import CharTokenizer
from chargpt.yaml_reader import parse_yaml

CONFIG, TOKENIZER, STATE = "config.yaml", "tokenizer.json", "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
MAX_TEXT_BYTES = 64_000_000  # of a config, a vocabulary, a state
OPTIMIZER_COPIES = 4  # numbers that it keeps for each parameter, with some to spare
MAX_TENSOR_HEADER = 400  # bytes that name, kind, shape and place of one tensor take


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint."""

    folder: Path
    config: Config
    tokenizer: CharTokenizer
    state: RunState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # empty where it was not asked for

    @property
    def raw_model(self) -> dict[str, Tensor]:
        """The weights that training goes on from; with a moving average they stand apart."""
        raw = {n[4:]: t for n, t in self.optimizer.items() if n.startswith("raw.")}
        return raw or self.model


def read_checkpoint(folder: Path, *, optimizer: bool = True) -> Checkpoint:
    """Return what one checkpoint holds, after checking all of it.

    The small files come first: they say how large the others can be.

    Raises:
        ChargptError: something in it is missing, damaged, or at odds with the rest.
    """
    texts = commit.read(folder, dict.fromkeys((CONFIG, TOKENIZER, STATE), MAX_TEXT_BYTES))
    try:
        tree, lines = parse_yaml(texts[CONFIG].decode(), str(folder / CONFIG))
        tokenizer = CharTokenizer.from_json(texts[TOKENIZER].decode(), str(folder / TOKENIZER))
    except UnicodeDecodeError as error:
        raise RunError(f"{folder} does not hold a checkpoint ({error}); use another") from None
    config = validate(tree, str(folder / CONFIG), lines)
    weights = 4 * count_parameters(config.model, tokenizer.vocab_size)
    header = MAX_TENSOR_HEADER * (12 * config.model.n_layer + 8)
    most = {MODEL: weights + header}
    if optimizer:
        most[OPTIMIZER] = OPTIMIZER_COPIES * (weights + header)
    # the files' bytes, and their tensors beside them
    wanted = 2 * sum(most.values()) + rotary_bytes(config.model)
    require_memory(wanted, f"the checkpoint {folder}")
    tensors = commit.read(folder, most)
    return Checkpoint(
        folder,
        config,
        tokenizer,
        _read_state(folder, texts[STATE]),
        deserialize(folder / MODEL, tensors[MODEL]),
        deserialize(folder / OPTIMIZER, tensors[OPTIMIZER]) if optimizer else {},
    )


def _read_state(folder: Path, content: bytes) -> RunState:
    """Return the state of a checkpoint.

    Raises:
        RunError: it is malformed, or another step's.
    """
    try:
        state = RunState.from_json(content)
    except ValueError:
        state = None
    if state is None or state.step != commit.step_of(folder):
        raise RunError(f"{folder / STATE} is not the state of that step; use another checkpoint")
    return state
