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

NORM_EPS = 1e-6


def by_hand(x: Tensor) -> bool:
    """Return whether the forms with derivatives by hand are the faster ones for x."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


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
        batch, steps, _, n_head, size = by_head.shape
        half = size // 2
        inverse = _inverse_rms(by_head[:, :, :2])
        unit = by_head[:, :, :2] * inverse  # (B, T, 2, H, D)
        result = by_head.new_empty(3, batch, n_head, steps, size)
        result[2] = by_head[:, :, 2].transpose(1, 2)
        rotated = result[:2].permute(1, 3, 0, 2, 4)  # (B, T, 2, H, D)
        gains = gains.to(by_head.dtype)[:, None]  # (2, 1, D)
        angles = cos[:, None, None, :half], sin[:, None, None, :half]  # (T, 1, 1, D/2)
        _turn(rotated, unit, gains, angles)
        ctx.save_for_backward(unit, inverse, gains, *angles)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        unit, inverse, gains, cos, sin = ctx.saved_tensors
        batch, steps, _, n_head, size = unit.shape
        result = gradient.new_empty(batch, steps, 3, n_head, size)
        result[:, :, 2] = gradient[2].transpose(1, 2)
        turned_back = result[:, :, :2]  # (B, T, 2, H, D)
        _turn(turned_back, gradient[:2].permute(1, 3, 0, 2, 4), None, (cos, -sin))
        product = turned_back * unit
        # a product with ones sums over all places faster than `sum` does
        ones = product.new_ones(1, batch * steps)
        by_gain = (ones @ product.view(batch * steps, -1)).view(2, n_head, size).sum(dim=1)
        shared = (product @ gains.mT).div_(-size)  # (B, T, 2, H, 1)
        turned_back.mul_(gains).addcmul_(unit, shared).mul_(inverse)
        return result, by_gain, None, None


def _turn(out: Tensor, x: Tensor, gains: Tensor | None, angles: tuple[Tensor, Tensor]) -> None:
    """Write x, times its gains, turned by its angles, into `out`; all (B, T, 2, H, D)."""
    (cos, sin), half = angles, x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    if gains is None:
        of_first = of_second = cos, sin
    else:
        one, two = gains[..., :half], gains[..., half:]
        of_first, of_second = (cos * one, sin * one), (cos * two, sin * two)
    torch.mul(first, of_first[0], out=out[..., :half]).addcmul_(second, of_second[1], value=-1)
    torch.mul(second, of_second[0], out=out[..., half:]).addcmul_(first, of_first[1])


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
