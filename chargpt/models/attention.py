"""Masked scaled dot-product attention, twice: as the papers write it, and fast.

    softmax(mask(q k^T / sqrt(D))) v            (Vaswani et al. 2017, section 3.2.1)

The explicit form can return its weights: pictures and lessons use it. The fused form is what
models run. A test holds the two equal. Here too are the three equivalent ways to average the past
that lead up to attention.

Shapes in this file: B = batch, H = heads, T = queries, S = keys (S >= T), D = head size,
C = channels. Queries are the last T of the S positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 1024  # bytes of a row of scores up to which plain products beat the fused kernel on a CPU


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return bool (T, S), true where a query may look: at itself and at what came before."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attention_scores(q: Tensor, k: Tensor, *, scaled: bool = True) -> Tensor:
    """Return q k^T, over sqrt(D) if `scaled`: (..., T, D), (..., S, D) -> (..., T, S).

    For unit Gaussian q and k the unscaled scores have variance D; the scaled ones have 1, which
    keeps the softmax from turning into a hard choice.
    """
    scores = q @ k.transpose(-2, -1)
    return scores / math.sqrt(q.size(-1)) if scaled else scores


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the mixed values (..., T, D) and the weights (..., T, S), whose rows sum to 1."""
    scores = attention_scores(q, k, scaled=scaled)
    if causal:
        mask = causal_mask(q.size(-2), k.size(-2), q.device)
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v, weights


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scaled: bool = True
) -> Tensor:
    """Return what `explicit_attention` mixes, (B, H, T, D), without keeping the weights."""
    queries, keys = q.size(-2), k.size(-2)
    if q.device.type == "cpu" and queries == keys and keys * q.itemsize <= SHORT:
        return _attention_by_products(q, k, v, causal=causal, scaled=scaled)
    mask = None
    if causal and 1 < queries < keys:
        mask = causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and queries == keys,
        scale=None if scaled else 1.0,
    )


def _attention_by_products(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scaled: bool
) -> Tensor:
    """Return the same, on a CPU and at short lengths sooner than the fused kernel does."""
    length = q.size(-2)
    bias = q.new_full((length, length), -math.inf if causal else 0.0).triu(1)  # (T, T)
    scale = 1 / math.sqrt(q.size(-1)) if scaled else 1.0
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)  # (B H, T, T)
    return (scores.softmax(dim=-1) @ v.flatten(0, 1)).view_as(q)


def average_weights(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return (T, S) weights that spread each query evenly over its past and itself."""
    mask = causal_mask(queries, keys, device)
    return mask / mask.sum(dim=-1, keepdim=True)


def average_by_loop(x: Tensor) -> Tensor:
    """Return the mean of each position and all before it, (B, T, C), one position at a time."""
    return torch.stack([x[:, : t + 1].mean(dim=1) for t in range(x.size(1))], dim=1)


def average_by_matrix(x: Tensor) -> Tensor:
    """The same as one product with a normalised lower triangle of ones."""
    return average_weights(x.size(1), x.size(1), x.device).to(x.dtype) @ x


def average_by_softmax(x: Tensor) -> Tensor:
    """The same as attention whose scores are all equal: mask, softmax, product."""
    steps = x.size(1)
    nothing_to_compare = x.new_zeros(1, steps, 1)
    mixed, _ = explicit_attention(nothing_to_compare, nothing_to_compare, x)
    return mixed
