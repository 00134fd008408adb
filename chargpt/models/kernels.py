"""The transformer's small operations, each twice: as the formula, and as the CPU likes it.

On a CPU these cost as much as the matrix products between them: torch works them out, and above all
their derivatives, in many passes over memory. The second forms have derivatives written by hand and
make the fewest passes. Tests hold both forms equal, values and gradients. Elsewhere, and under the
compiler, the plain forms are the fast ones.
Shapes in this file: B = batch, T = characters, C = n_embd, H = n_head, D = C / H, F = MLP width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from chargpt.config import NORM_EPS
from chargpt.device import onednn_is_faster


def by_hand(x: Tensor) -> bool:
    """Return whether the forms with derivatives by hand are the faster ones for x."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T: (..., C) and (outputs, C) to (..., outputs)."""
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


def unit_rms(x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Gains are left to the caller, who multiplies them into the matrix that comes next.
    """
    if by_hand(x):
        return cast("Tensor", _UnitRMS.apply(x))  # type: ignore[no-untyped-call]
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def _inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dimension, which stays as 1."""
    precise = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
    return norm.square_().div_(x.size(-1)).add_(NORM_EPS).rsqrt_().to(x.dtype)


class _UnitRMS(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inverse = _inverse_rms(x)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # d/dx = (g - u mean(g u)) / rms
        unit, inverse = ctx.saved_tensors
        shared = (gradient * unit).sum(dim=-1, keepdim=True).div_(-unit.size(-1))
        return torch.addcmul(gradient, unit, shared).mul_(inverse)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x (..., T, D) by its position's angle; cos, sin (T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def heads(
    qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, n_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v, each (B, H, T, D), of their joint projection (B, T, 3C).

    q and k are brought to unit RMS over D and multiplied by their `gains`, (2, D), if there are
    any, then rotated (Su et al. 2021, eq. 34, in the half-split layout).
    """
    by_head = qkv.view(*qkv.shape[:2], 3, n_head, -1)  # (B, T, 3, H, D)
    if gains is not None and by_hand(qkv):
        return _Heads.apply(by_head, gains, cos, sin).unbind()  # type: ignore[no-any-return,no-untyped-call]
    q, k, v = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
    if gains is not None:
        q, k = unit_rms(q) * gains[0].to(q.dtype), unit_rms(k) * gains[1].to(k.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class _Heads(Function):
    """(B, T, 3, H, D) to (3, B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, by_head: Tensor, gains: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result = by_head.permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
        rotated = result[:2]  # (2, B, H, T, D)
        gains = gains.to(by_head.dtype)[:, None, None, None]  # (2, 1, 1, 1, D)
        inverse = _inverse_rms(rotated)
        unit = rotated * inverse
        _rotate(unit, cos * gains, sin * gains, _quarter_turn(cos), out=rotated)
        ctx.save_for_backward(unit, inverse, gains, cos, sin)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        unit, inverse, gains, cos, sin = ctx.saved_tensors
        _, batch, n_head, steps, size = unit.shape
        turned_back = torch.empty_like(unit)
        _rotate(gradient[:2], cos, sin, _quarter_turn(cos).mT, out=turned_back)
        product = (turned_back * unit).view(2, -1, size)  # (2, B H T, D)
        # a product with ones sums over all places faster than `sum` does
        by_gain = product.new_ones(2, 1, product.size(1)) @ product  # (2, 1, D)
        shared = (product @ gains.view(2, size, 1)).div_(-size).view_as(inverse)
        turned_back.mul_(gains).addcmul_(unit, shared).mul_(inverse)
        result = gradient.new_empty(batch, steps, 3, n_head, size)
        by_place = result.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        by_place[:2] = turned_back
        by_place[2] = gradient[2]
        return result, by_gain[:, 0], None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor, out: Tensor) -> None:
    """Write x cos + (x sin) turn into `out`.

    `chunk` and `cat` would go over memory in runs of D/2 numbers; one more product is sooner done.
    """
    size = x.size(-1)
    torch.mul(x, cos, out=out)
    out.view(-1, size).addmm_((x * sin).reshape(-1, size), turn)


def _quarter_turn(like: Tensor) -> Tensor:
    """Return the (D, D) matrix that takes (first, second) half to (-second, first)."""
    size = like.size(-1)
    one = torch.eye(size, dtype=like.dtype, device=like.device)
    return torch.cat((-one[:, size // 2 :], one[:, : size // 2]), dim=1)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., F), of their joint projection (..., 2F) (Shazeer 2020)."""
    if by_hand(gate_up):
        return cast("Tensor", _SwiGLU.apply(gate_up))  # type: ignore[no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gate_up, opened = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, dim=-1)
        torch.mul(gradient, opened, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result


def dropout(x: Tensor, share: float) -> Tensor:
    """Return x with `share` of it zero, the rest over 1 - share (Srivastava et al. 2014)."""
    if by_hand(x):
        return cast("Tensor", _Dropout.apply(x, share))  # type: ignore[no-untyped-call]
    return F.dropout(x, share)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        # four draws from each random number: torch's own takes one, and a logarithm, for each
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        drawn = bits.view(torch.int16)[: x.numel()].view(x.shape)
        kept = (drawn >= round(share * 2**16) - 2**15).to(x.dtype)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / (1 - share)
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return (gradient * kept).mul_(ctx.scale), None
