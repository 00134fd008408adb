"""Operations of the transformer, each in a plain and a fast form, which tests compare.

On a CPU the operations between the matrix products take as long as the products: autograd makes
many passes over memory, most of them in the backward pass. The custom autograd functions here make
the fewest. Other devices and `torch.compile` run the plain forms. Attention is

    softmax(mask(q k^T / sqrt(D))) v            (Vaswani et al. 2017, section 3.2.1)

whose explicit form can return its weights, for plots and `explain`; models run the fast form.

Shapes in this file: B = batch, T = tokens (queries), S = keys (S >= T), C = n_embd, H = n_head,
D = C / H, F = MLP width. Unless a mask says otherwise, queries are the last T of the S positions.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from chargpt.config import NORM_EPS
from chargpt.device import onednn_is_faster

# On a CPU, matrix products are faster than the fused kernel for rows of scores up to this size.
MAX_PRODUCT_ROW_BYTES = 1024


def uses_custom_autograd(x: Tensor) -> bool:
    """Return whether the custom autograd functions process x, rather than the plain forms."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, without a weight."""
    if uses_custom_autograd(x):
        return cast("Tensor", _RMSNorm.apply(x))  # type: ignore[no-untyped-call]
    if not torch.is_autocast_enabled(x.device.type):  # whose regions PyTorch exports slowly
        return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)
    with torch.autocast(x.device.type, enabled=False):  # it would compute in float32
        return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) * self.weight.to(x.dtype)


def _inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dimension, (..., 1), computed in float32."""
    precise = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
    return norm.square_().div_(x.size(-1)).add_(NORM_EPS).rsqrt_().to(x.dtype)


class _RMSNorm(Function):
    """u = x / rms(x), with dx = (du - u mean(du * u)) / rms(x).

    dx is the gradient of the loss with respect to x, in all formulas of this file. It follows from
    the derivative of u_i by x_j, (delta_ij - u_i u_j / C) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inverse = _inverse_rms(x)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        unit, inverse = ctx.saved_tensors
        minus_mean = (grad * unit).sum(dim=-1, keepdim=True).div_(-unit.size(-1))
        return torch.addcmul(grad, unit, minus_mean).mul_(inverse)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, (..., outputs), of x (..., C) and weight (outputs, C)."""
    if (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
    ):
        return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    return F.linear(x, weight)


def norm_linear(x: Tensor, norm: RMSNorm, *linears: nn.Linear) -> Tensor:
    """Return the outputs of all `linears` on norm(x), concatenated: (..., C) -> (..., outputs).

    With u = x / rms(x) and the norm's weight g, W norm(x) = W (g * u) = (W * g) u. So g is folded
    into the concatenated weights, (outputs, C): one product, and one pass less over activations.
    """
    weights = [layer.weight for layer in linears]
    joined = torch.cat(weights) if len(weights) > 1 else weights[0]  # (outputs, C)
    return linear(rms_norm(x), joined * norm.weight)


def rotary_tables(n_positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta^(-2i/D), (n_positions, D) each.

    The D/2 angles are repeated for the second half of D, as `rotate_half` pairs i with i + D/2.
    """
    frequencies = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=-1)  # (n_positions, D)
    return angles.cos().float(), angles.sin().float()


def rotate_half(x: Tensor) -> Tensor:
    """Return (-second, first) of x = (first, second), halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., T, D) rotated by its position's angles (Su et al. 2021, eq. 34)."""
    return x * cos + rotate_half(x) * sin


def split_heads_qk_norm_rope(
    qkv: Tensor, norms: tuple[RMSNorm, RMSNorm] | None, cos: Tensor, sin: Tensor, n_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (B, H, T, D) each, of a joint projection (B, T, 3C).

    Queries and keys are normalised over D by `norms` (Dehghani et al. 2023; None for no QK-norm),
    then rotated by the angles of cos and sin, (T, D) each.
    """
    by_head = qkv.view(*qkv.shape[:2], 3, n_head, -1)  # (B, T, 3, H, D)
    if norms is not None and uses_custom_autograd(qkv):
        weights = torch.stack((norms[0].weight, norms[1].weight))  # (2, D)
        return _QKNormRope.apply(by_head, weights, cos, sin).unbind()  # type: ignore[no-any-return,no-untyped-call]
    q, k, v = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


class _QKNormRope(Function):
    """y = R (g * u) for queries and keys, u = x / rms(x), R the rotation; values are copied.

    R is orthogonal, so with w = g * u and dw = R^T dy the gradients are dg = sum of dw * u over B,
    H and T, and dx = (g * dw - u mean(g * dw * u)) / rms(x), as in `_RMSNorm`.
    From (B, T, 3, H, D) to (3, B, H, T, D).
    """

    @staticmethod
    def forward(ctx: Any, by_head: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result = by_head.permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        qk = result[:2]  # (2, B, H, T, D)
        weights = weights.to(by_head.dtype)[:, None, None, None]  # (2, 1, 1, 1, D)
        inverse = _inverse_rms(qk)
        unit = qk * inverse
        _apply_rotary(unit, cos * weights, sin * weights, _rotate_half_matrix(cos), out=qk)
        ctx.save_for_backward(unit, inverse, weights, cos, sin)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        unit, inverse, weights, cos, sin = ctx.saved_tensors
        _, batch, n_head, length, size = unit.shape
        unrotated = torch.empty_like(unit)  # R^T dy, (2, B, H, T, D)
        _apply_rotary(grad[:2], cos, sin, _rotate_half_matrix(cos).mT, out=unrotated)
        product = (unrotated * unit).view(2, -1, size)  # (2, B H T, D)
        # a product with ones sums over B, H and T faster than `sum`
        weights_grad = product.new_ones(2, 1, product.size(1)) @ product  # (2, 1, D)
        minus_mean = (product @ weights.view(2, size, 1)).div_(-size).view_as(inverse)
        qk_grad = unrotated.mul_(weights).addcmul_(unit, minus_mean).mul_(inverse)
        result = grad.new_empty(batch, length, 3, n_head, size)
        by_part = result.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        by_part[:2] = qk_grad
        by_part[2] = grad[2]
        return result, weights_grad[:, 0], None, None


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write x cos + (x sin) matrix into `out`, (..., T, D).

    `rotate_half` would copy memory in runs of D/2 numbers; a (D, D) matrix product is faster.
    """
    size = x.size(-1)
    torch.mul(x, cos, out=out)
    out.view(-1, size).addmm_((x * sin).reshape(-1, size), matrix)  # (... T, D)


def _rotate_half_matrix(like: Tensor) -> Tensor:
    """Return the (D, D) matrix R with x R = rotate_half(x)."""
    return rotate_half(torch.eye(like.size(-1), dtype=like.dtype, device=like.device))


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., F), of their joint projection (..., 2F) (Shazeer 2020)."""
    if uses_custom_autograd(gate_up):
        return cast("Tensor", _SwiGLU.apply(gate_up))  # type: ignore[no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)  # (..., F) each
    return F.silu(gate) * up


class _SwiGLU(Function):
    """y = silu(gate) * up, with dup = dy * silu(gate) and dgate = dy * up * silu'(gate).

    silu'(z) = s(z) (1 + z (1 - s(z))), s being the logistic function.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)  # (..., F) each
        activation = F.silu(gate)
        ctx.save_for_backward(gate_up, activation)
        return activation * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, activation = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)  # (..., F) each
        result = torch.empty_like(gate_up)  # (..., 2F)
        gate_grad, up_grad = result.chunk(2, dim=-1)
        torch.mul(grad, activation, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return result


class Dropout(nn.Dropout):
    """`nn.Dropout` with a custom autograd function (Srivastava et al. 2014)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if uses_custom_autograd(x):
            return cast("Tensor", _Dropout.apply(x, self.p))  # type: ignore[no-untyped-call]
        return F.dropout(x, self.p)


class _Dropout(Function):
    """y = x * mask / (1 - p), with dx = dy * mask / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        # 16 random bits an element; torch's dropout draws a 64-bit number for each
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        uniform = bits.view(torch.int16)[: x.numel()].view(x.shape)
        threshold = min(round(p * 2**16) - 2**15, 2**15 - 1)  # the maximum of int16
        mask = (uniform >= threshold).to(x.dtype)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None


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
