"""Masked scaled dot-product attention in an explicit and a fast form.

    softmax(mask(q k^T / sqrt(D))) v            (Vaswani et al. 2017, section 3.2.1)

The explicit form can return its weights, for plots and `explain`; models run the fast form. Tests
compare the two.

Shapes in this file: B = batch, H = heads, T = queries, S = keys (S >= T), D = head size. Unless a
mask says otherwise, queries are the last T of the S positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# On a CPU, matrix products are faster than the fused kernel for rows of scores up to this size.
MAX_PRODUCT_ROW_BYTES = 1024


def causal_mask(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Return bool (T, S), true where a query sees a key: its own position and earlier ones."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


def attention_scores(q: Tensor, k: Tensor, *, scaled: bool = True) -> Tensor:
    """Return q k^T, over sqrt(D) if `scaled`: (..., T, D), (..., S, D) -> (..., T, S).

    For unit Gaussian q and k the scaled scores have variance 1, so that the softmax is not
    saturated.
    """
    scores = q @ k.transpose(-2, -1)  # (..., T, S)
    return scores / math.sqrt(q.size(-1)) if scaled else scores


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scaled: bool = True,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention outputs (..., T, D) and weights (..., T, S), whose rows sum to 1.

    Queries are (..., T, D), keys and values (..., S, D). `mask`, bool (T, S), is true where a query
    sees a key; without one, `causal` hides later positions. `scaled` divides scores by sqrt(D).
    """
    scores = attention_scores(q, k, scaled=scaled)  # (..., T, S)
    if mask is None and causal:
        mask = causal_mask(q.size(-2), k.size(-2), q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v, weights


def fast_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scaled: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Return the outputs of `explicit_attention`, causal or masked, by the fastest kernel."""
    n_queries, n_keys = q.size(-2), k.size(-2)
    is_square = mask is None and n_queries == n_keys
    if q.device.type == "cpu" and is_square and n_keys * q.itemsize <= MAX_PRODUCT_ROW_BYTES:
        bias = q.new_full((n_keys, n_keys), -math.inf).triu(1)  # (T, T)
        factor = 1 / math.sqrt(q.size(-1)) if scaled else 1.0
        # (B H, T, T)
        scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=factor)
        return (scores.softmax(dim=-1) @ v.flatten(0, 1)).view_as(q)
    if mask is None and 1 < n_queries < n_keys:
        mask = causal_mask(n_queries, n_keys, q.device)
    scale = None if scaled else 1.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_square, scale=scale)


def uniform_weights(mask: Tensor) -> Tensor:
    """Return (T, S) weights that are equal over the keys that each query sees under `mask`."""
    return mask / mask.sum(dim=-1, keepdim=True)
