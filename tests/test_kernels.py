"""Forms with derivatives written by hand against the plain formulas, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chargpt.models import kernels
from chargpt.models.gpt import rotary_tables
from chargpt.models.kernels import dropout, heads, linear, swiglu, unit_rms

BATCH, STEPS, HEADS, SIZE = 2, 5, 3, 8


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def joint_heads(qkv: Tensor, gains: Tensor) -> Tensor:
    cos, sin = rotary_tables(STEPS, SIZE, 100.0)
    return torch.stack(heads(qkv, gains, cos.to(qkv.dtype), sin.to(qkv.dtype), HEADS))


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "unit_rms": (unit_rms, [(BATCH, STEPS, 6)]),
    "heads": (joint_heads, [(BATCH, STEPS, 3 * HEADS * SIZE), (2, SIZE)]),
    "swiglu": (swiglu, [(BATCH, STEPS, 8)]),
}


def results(name: str, dtype: torch.dtype) -> list[Tensor]:
    """The output, then the gradient of every input for some gradient of the output."""
    function, shapes = CASES[name]
    inputs = [drawn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    for x in inputs:
        x.requires_grad_()
    output = function(*inputs)
    output.backward(drawn(*output.shape, dtype=dtype, seed=9))
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_by_hand_are_those_of_the_formula(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = results(name, dtype)
    monkeypatch.setattr(kernels, "by_hand", lambda x: False)
    plain = results(name, dtype)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for one, two in zip(fast, plain, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_by_hand_are_those_of_small_differences(name: str) -> None:
    function, shapes = CASES[name]
    inputs = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, inputs)


def test_the_forms_by_hand_are_what_a_cpu_runs() -> None:
    assert kernels.by_hand(torch.zeros(1))
    assert not kernels.by_hand(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_row_of_zeros_stays_finite(by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "by_hand", lambda x: by_hand)
    x = torch.zeros(1, 4, requires_grad=True)
    unit_rms(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_leaves_out_a_share_and_keeps_the_mean(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(7, 14287, dtype=dtype, requires_grad=True)  # 100,009: no multiple of four
    result = dropout(x, share)
    left_out = (result == 0).float()
    assert left_out.mean().item() == pytest.approx(share, abs=0.01)
    assert result.unique().tolist() == pytest.approx([0, 1 / (1 - share)], rel=0.005)
    # each is drawn for itself, however far apart: no correlation at any distance
    spectrum = torch.fft.rfft(left_out.flatten().double() - share)
    correlation = torch.fft.irfft(spectrum.abs() ** 2) / left_out.numel()
    assert correlation[1:].abs().max() < 0.05 * share * (1 - share)
    result.backward(torch.full_like(x, 3.0))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * result.detach(), rtol=0.01, atol=0)


def test_dropout_draws_again_each_time_and_the_same_from_the_same_seed() -> None:
    x = torch.ones(1000)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    assert dropout(x, 0.5).equal(first)
    assert not first.equal(second)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (2, 5, 6), (2, 0, 6), (65, 7, 6)])
def test_onednn_takes_products_that_need_no_derivative_to_the_same_numbers(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = drawn(*shape, dtype=torch.float32), drawn(9, 6, dtype=torch.float32, seed=1)
    expected = torch.nn.functional.linear(x, weight)
    taken = []
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *args: taken.append(1) or product(*args)
    )
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), expected, rtol=1e-5, atol=1e-5)
        assert taken == [1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        assert linear(x.double(), weight.double()).dtype == torch.float64
    assert linear(x, weight.requires_grad_()).requires_grad
    assert taken == [1]
