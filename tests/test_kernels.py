"""Custom autograd functions against the plain forms, values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chargpt.models import kernels
from chargpt.models.kernels import (
    Dropout,
    RMSNorm,
    apply_rotary,
    linear,
    norm_linear,
    rms_norm,
    rotary_tables,
    rotate_half,
    split_heads_qk_norm_rope,
    swiglu,
)

BATCH, STEPS, HEADS, SIZE = 2, 5, 3, 8


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def norm_with(weight: Tensor) -> RMSNorm:
    """Return an RMSNorm whose weight is that tensor, with its gradient."""
    norm = RMSNorm(weight.numel())
    del norm.weight
    norm.weight = weight
    return norm


def heads_of(qkv: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
    cos, sin = (table.to(qkv.dtype) for table in rotary_tables(STEPS, SIZE, 100.0))
    norms = norm_with(query_weight), norm_with(key_weight)
    return torch.stack(split_heads_qk_norm_rope(qkv, norms, cos, sin, HEADS))


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (rms_norm, [(BATCH, STEPS, 6)]),
    "split_heads_qk_norm_rope": (
        heads_of,
        [(BATCH, STEPS, 3 * HEADS * SIZE), (SIZE,), (SIZE,)],
    ),
    "swiglu": (swiglu, [(BATCH, STEPS, 8)]),
}


def results(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the output, then the gradient of every input for a random gradient of the output."""
    function, shapes = CASES[name]
    inputs = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    for x in inputs:
        x.requires_grad_()
    output = function(*inputs)
    output.backward(randn(*output.shape, dtype=dtype, seed=9))
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_custom_autograd_functions_equal_the_plain_forms(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom = results(name, dtype)
    monkeypatch.setattr(kernels, "uses_custom_autograd", lambda x: False)
    plain = results(name, dtype)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for one, two in zip(custom, plain, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def test_autocast_does_not_apply_to_the_plain_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    # on CUDA, newer torch would compute it in float32
    monkeypatch.setattr(kernels, "uses_custom_autograd", lambda x: False)
    compute = torch.nn.functional.rms_norm

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", checked)
    with torch.autocast("cpu", torch.bfloat16):
        assert RMSNorm(8)(randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("outputs", [[5], [5, 7, 5]])
def test_norm_linear_equals_the_norm_and_then_each_layer(outputs: list[int]) -> None:
    x, norm = randn(BATCH, STEPS, 6).requires_grad_(), RMSNorm(6).double()
    torch.nn.init.normal_(norm.weight)
    linears = [torch.nn.Linear(6, n, bias=False).double() for n in outputs]
    parameters = [x, norm.weight, *(layer.weight for layer in linears)]
    plain = torch.cat([layer(norm(x)) for layer in linears], dim=-1)
    found, expected = (
        (output, *torch.autograd.grad(output.square().sum(), parameters))
        for output in (norm_linear(x, norm, *linears), plain)
    )
    torch.testing.assert_close(found, expected)


def test_rms_norm_is_the_formula() -> None:
    x, norm = randn(BATCH, STEPS, 6), RMSNorm(6).double()
    torch.nn.init.normal_(norm.weight)
    expected = norm.weight * x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_rotary_embedding_rotates_pairs_by_complex_numbers() -> None:
    cos, sin = (table.double() for table in rotary_tables(STEPS, SIZE, 100.0))
    x = randn(BATCH, STEPS, SIZE)
    pairs = torch.complex(x[..., : SIZE // 2], x[..., SIZE // 2 :])
    rotated = pairs * torch.complex(cos, sin)[:, : SIZE // 2]
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected)
    torch.testing.assert_close(rotate_half(rotate_half(x)), -x)


@pytest.mark.parametrize("custom", [True, False])
def test_the_gradient_at_zero_is_finite(custom: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "uses_custom_autograd", lambda x: custom)
    x = torch.zeros(1, 4, requires_grad=True)
    rms_norm(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_a_fraction_p_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(7, 14287, dtype=dtype, requires_grad=True)  # 100,009: no multiple of four
    result = Dropout(p)(x)
    is_zero = (result == 0).float()
    assert is_zero.mean().item() == pytest.approx(p, abs=0.01)
    assert result.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.005)
    # elements are independent: no correlation at any distance
    spectrum = torch.fft.rfft(is_zero.flatten().double() - p)
    correlation = torch.fft.irfft(spectrum.abs() ** 2) / is_zero.numel()
    assert correlation[1:].abs().max() < 0.05 * p * (1 - p)
    result.backward(torch.full_like(x, 3.0))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * result.detach(), rtol=0.01, atol=0)
    assert not Dropout(p)(x).equal(result)
    torch.manual_seed(0)
    assert Dropout(p)(x).equal(result)
    assert Dropout(1 - 1e-7)(x).count_nonzero() < 10


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (2, 5, 6), (2, 0, 6), (65, 7, 6)])
def test_onednn_computes_products_without_gradient_to_the_same_values(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = randn(*shape, dtype=torch.float32), randn(9, 6, dtype=torch.float32, seed=1)
    expected = torch.nn.functional.linear(x, weight)
    calls = []
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *args: calls.append(1) or product(*args)
    )
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), expected, rtol=1e-5, atol=1e-5)
        assert calls == [1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        assert linear(x.double(), weight.double()).dtype == torch.float64
    assert linear(x, weight.requires_grad_()).requires_grad
    assert calls == [1]
