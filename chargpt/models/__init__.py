"""Token ids in, logits out. `build_model` makes every trainable model from its config.

It imports the other models when one is built, since most runs train a GPT.
"""

from chargpt.config import ModelConfig
from chargpt.errors import ConfigError
from chargpt.models.base import LanguageModel as LanguageModel
from chargpt.models.gpt import GPT as GPT

MAX_PARAMETERS = 20_000_000_000


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that `build_model` would allocate."""
    if config.kind == "bigram":
        return vocab_size**2
    width = config.n_embd
    if config.kind == "gpt2":
        from chargpt.models.gpt2 import MLP_RATIO

        matrices = (4 + 2 * MLP_RATIO) * width**2
        layer = matrices + (4 + 1 + MLP_RATIO + 4) * width  # and biases, norms
        return config.n_layer * layer + (vocab_size + config.block_size + 2) * width
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
    """Return the peak memory of computing a model's rotary tables, in bytes."""
    entry_bytes = 8 + 8 + 4 + 4  # angles and one table in float64, two tables in float32
    return entry_bytes * config.block_size * config.head_size * (config.kind == "gpt")


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return an untrained model for `vocab_size` tokens, on the CPU, in float32.

    Raises:
        ConfigError: the model has more than MAX_PARAMETERS parameters, or it is a bigram model of
            more than `ngram.MAX_BIGRAM_VOCAB_SIZE` tokens.
    """
    if config.kind == "bigram":
        from chargpt.models.ngram import BigramLM

        return BigramLM(vocab_size, config.block_size)
    n_parameters = count_parameters(config, vocab_size)
    if n_parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"the model would have {n_parameters:,} parameters, more than the maximum of "
            f"{MAX_PARAMETERS:,}; lower model.n_layer, model.n_embd or model.n_inner"
        )
    if config.kind == "gpt2":
        from chargpt.models.gpt2 import GPT2

        return GPT2(config, vocab_size)
    return GPT(config, vocab_size)
