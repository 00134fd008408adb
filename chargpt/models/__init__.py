"""Token ids in, logits out. `build_model` is the one way from a config to a model."""

from chargpt.config import ModelConfig
from chargpt.errors import ConfigError
from chargpt.models.base import LanguageModel
from chargpt.models.bigram import BigramLM
from chargpt.models.gpt import GPT

__all__ = [
    "GPT",
    "BigramLM",
    "LanguageModel",
    "build_model",
    "count_parameters",
    "rotary_bytes",
]

MAX_PARAMETERS = 20_000_000_000


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Return how many numbers `build_model` would train, without allocating any."""
    if config.kind == "bigram":
        return vocab_size**2
    width = config.n_embd
    layer = 0
    if config.attention == "full":
        layer += width + 4 * width**2  # norm; query, key, value, output
        layer += 2 * (width // config.n_head) * config.qk_norm
    elif config.attention == "average":
        layer += width + 2 * width**2  # norm; value, output
    if config.mlp == "swiglu":
        layer += width + 3 * width * config.mlp_width  # norm; gate, up, down
    return config.n_layer * layer + width + 2 * vocab_size * width  # norm; embedding, head


def rotary_bytes(config: ModelConfig) -> int:
    """Return how much memory the making of a model's rotary tables takes."""
    return 28 * config.block_size * (config.n_embd // config.n_head) * (config.kind == "gpt")


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return a fresh model for `vocab_size` characters, on the CPU, in float32.

    Raises:
        ConfigError: the sizes asked for are beyond any one machine.
    """
    if config.kind == "bigram":
        return BigramLM(vocab_size, config.block_size)
    parameters = count_parameters(config, vocab_size)
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"this model would have {parameters:,} parameters, and {MAX_PARAMETERS:,} are the "
            "most that are supported; lower model.n_layer, model.n_embd or model.n_mlp"
        )
    return GPT(config, vocab_size)
