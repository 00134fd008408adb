"""Initial weights of the GPT.

Shapes in this file: C = n_embd, D = head size.
"""

import torch
from torch import nn

from chargpt.config import ModelConfig
from chargpt.models.kernels import rotary_tables

# of `init_previous_token_heads`, found by experiment; the loss depends little on any of them
PREVIOUS_TOKEN_LAYERS = 3  # layers with such heads, from the first on
SHARED_VALUE = 0.25  # of channel 0 of every embedding, in units of sqrt(C)
N_PAIRS = 8  # rotary pairs used per head, highest frequencies first
NOISE_SCALE = 0.3  # factor on the random initial weights of query and key


def init_weights(model: nn.Module, config: ModelConfig) -> None:
    """Initialise a GPT so that every layer is the identity and every logit is zero.

    Matrices are uniform with standard deviation 1/sqrt(inputs). The last matrix of each residual
    branch and the output head are zero, so the first loss is exactly ln V.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight", "head.weight")):
            nn.init.zeros_(parameter)
        elif name == "embedding.weight":
            nn.init.normal_(parameter)
        elif parameter.dim() == 2:
            bound = (3 / parameter.size(1)) ** 0.5
            nn.init.uniform_(parameter, -bound, bound)
    if config.attention == "full" and config.qk_norm:
        init_previous_token_heads(model, config)


@torch.no_grad()
def init_previous_token_heads(model: nn.Module, config: ModelConfig) -> None:
    """Make head h of layer l attend at first to the token l + h + 1 positions before.

    Learning this from random weights takes hundreds of steps. Channel 0 of the embedding is set to
    one value for all tokens, and it dominates queries and keys. A query is then the same vector at
    every position, and a key is that vector rotated by l + h + 1 positions. The rotary embedding
    rotates both by their own position, so the two agree only at that distance.
    """
    model.get_parameter("embedding.weight")[:, 0] = SHARED_VALUE * config.n_embd**0.5
    head_size, half = config.head_size, config.head_size // 2
    n_distances = PREVIOUS_TOKEN_LAYERS + config.n_head
    cos, sin = rotary_tables(n_distances, head_size, config.rope_theta)  # (n_distances, D)
    # pairs of low frequency hardly distinguish nearby positions
    used = torch.arange(half) < N_PAIRS  # (D / 2,)
    for layer in range(min(PREVIOUS_TOKEN_LAYERS, config.n_layer)):
        query = model.get_parameter(f"blocks.{layer}.attention.query.weight")  # (C, C)
        key = model.get_parameter(f"blocks.{layer}.attention.key.weight")  # (C, C)
        query.mul_(NOISE_SCALE)
        key.mul_(NOISE_SCALE)
        for head in range(config.n_head):
            rows, distance = slice(head * head_size, (head + 1) * head_size), layer + head + 1
            query[rows, 0] = torch.cat((used, torch.zeros(half)))
            key[rows, 0] = torch.cat((cos[distance, :half] * used, sin[distance, :half] * used))
