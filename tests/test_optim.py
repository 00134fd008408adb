"""Muon and AdamW: fast forms against plain ones, parameter groups, and saved state."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import run_python
from torch import Tensor, nn

from chargpt.config import ModelConfig, OptimConfig
from chargpt.errors import RunError
from chargpt.models import build_model
from chargpt.training.optim import BETAS, COEFFICIENTS, AdamW, Muon, Optimizer, orthogonalize

SHAPES = {"tall": (3, 48, 16), "wide": (3, 16, 48), "square": (3, 24, 24), "row": (2, 1, 7)}
VOCAB = 11


def conditioned(count: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random matrices with singular values from 0.05 to 1."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, rows, columns, generator=generator)
    left, values, right = torch.linalg.svd(raw, full_matrices=False)
    return left * torch.linspace(1, 0.05, values.size(-1)) @ right


def slow_orthogonalize(matrix: Tensor) -> Tensor:
    """Apply the polynomials to the singular values of one matrix."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values.square().sum().sqrt() * 1.02 + 1e-7)
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return (left * values @ right).float()


def small_model(seed: int = 0, **values: object) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, **values}
    model = build_model(ModelConfig(**sizes), VOCAB)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def descend(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (4, 9), generator=generator)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step(step, 1 / (1 + step))
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_orthogonalising_a_stack_applies_the_polynomials_to_the_singular_values_of_each(
    shape: tuple[int, ...],
) -> None:
    stack = conditioned(*shape)
    stack[0] *= 1e3  # a neighbour's size must not matter
    before = stack.clone()
    slow = torch.stack([slow_orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), slow, rtol=1e-3, atol=1e-3)
    assert stack.equal(before)
    for dtype in (torch.float32, torch.bfloat16):
        result = orthogonalize(stack, dtype)
        values = torch.linalg.svdvals(result)
        assert (result.shape, result.dtype) == (shape, torch.float32)
        assert values.min() > 0.8
        assert values.max() < 1.2
    assert not orthogonalize(torch.zeros(shape)).any()


def test_in_bfloat16_only_the_products_of_muon_are_bfloat16() -> None:
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        model = small_model()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer = Optimizer(model, OptimConfig(), dtype)
        optimizer.step(0, 1.0)
        assert {t.dtype for t in optimizer.state_dict().values()} == {torch.float32}
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    rough, exact = results
    assert rough.dtype == torch.float32
    assert not rough.equal(exact)
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.05 * OptimConfig().matrix_lr)


@torch.no_grad()
def test_the_batched_step_equals_the_formula_matrix_by_matrix() -> None:
    shapes = {"a": (12, 8), "b": (8, 12), "c": (12, 8), "d": (8, 8), "e": (8, 12)}
    fast = {name: nn.Parameter(conditioned(1, *shape)[0]) for name, shape in shapes.items()}
    slow = {name: weight.detach().clone() for name, weight in fast.items()}
    buffers = {name: torch.zeros(shape) for name, shape in shapes.items()}
    muon, lr, weight_decay, beta = Muon(fast, 0.05, 0.1), 0.05, 0.1, 0.8
    assert sorted(len(names) for names, _ in muon.groups) == [1, 4]
    for step in range(4):
        rate = lr * (1 - step / 10)
        gradients = {n: conditioned(1, *shape, seed=step)[0] for n, shape in shapes.items()}
        for name, gradient in gradients.items():
            fast[name].grad = gradient.clone()
            buffers[name] = beta * buffers[name] + (1 - beta) * gradient
            update = slow_orthogonalize((1 - beta) * gradient + beta * buffers[name])
            rows, columns = shapes[name]
            slow[name] *= 1 - rate * weight_decay
            slow[name] -= rate * max(1, rows / columns) ** 0.5 * update
        muon.step(step, 1 - step / 10)
        assert all(gradients[name].equal(weight.grad) for name, weight in fast.items())
    for name in shapes:
        torch.testing.assert_close(fast[name].data, slow[name], rtol=1e-3, atol=1e-3)
        saved = muon.state_dict()[f"muon.momentum.{name}"]
        torch.testing.assert_close(saved, buffers[name], rtol=1e-5, atol=1e-6)


def test_adamw_equals_torch_optim_adamw() -> None:
    ours, theirs = small_model(), small_model()
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    judge = torch.optim.AdamW(groups, lr=0.01, betas=BETAS)
    adamw = AdamW(dict(ours.named_parameters()), 0.01, 0.3)
    for step in range(5):
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape)
            two.grad = one.grad.clone()
        for group in judge.param_groups:
            group["lr"] = 0.01 / (1 + step)
        adamw.step(step, 1 / (1 + step))
        judge.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_update_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    program = """
import sys, torch
from chargpt.config import ModelConfig, OptimConfig
from chargpt.models import build_model
from chargpt.training.optim import Optimizer
from chargpt.training.trainer import Trainer
model = build_model(ModelConfig(n_layer=1, n_embd=16, block_size=8), 5)
model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
Optimizer(model, OptimConfig()).step(0, 1.0)
assert 'torch._dynamo' not in sys.modules
"""
    done = run_python(program, tmp_path)
    assert done.returncode == 0, done.stderr


def test_muon_updates_only_the_matrices_of_the_blocks() -> None:
    embedding, muon, adamw = Optimizer(small_model(), OptimConfig(name="muon")).optimizers
    matrices = {"query", "key", "value", "output", "gate", "up", "down"}
    assert {name.split(".")[-2] for name in muon.parameters} == matrices
    assert set(embedding.parameters) == {"embedding.weight"}
    assert {"head.weight", "norm.weight"} <= set(adamw.parameters)
    names = [*embedding.parameters, *muon.parameters, *adamw.parameters]
    assert sorted(names) == sorted(name for name, _ in small_model().named_parameters())


@pytest.mark.parametrize("kind", ["gpt", "bigram"])
def test_adamw_updates_everything_if_chosen_or_if_there_are_no_blocks(kind: str) -> None:
    model = small_model(kind=kind)
    optimizer = Optimizer(model, OptimConfig(name="adamw" if kind == "gpt" else "muon"))
    (adamw,) = optimizer.optimizers
    assert isinstance(adamw, AdamW)
    assert set(adamw.parameters) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_applies_to_matrices_and_not_to_norm_weights(name: str) -> None:
    model = small_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = OptimConfig(name=name, lr=0.01, matrix_lr=0.02, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = Optimizer(model, config)
    optimizer.step(0, 0.5)
    for n, parameter in model.named_parameters():
        rate = config.lr
        if name == "muon" and n == "embedding.weight":
            rate = 4 * config.lr
        elif name == "muon" and n.startswith("blocks.") and parameter.dim() == 2:
            rate = config.matrix_lr
        kept = 1 - rate * 0.5 * 0.5 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[n] * kept, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_continues_bit_for_bit(name: str) -> None:
    config = OptimConfig(name=name)
    model, other = small_model(), small_model(seed=1)
    optimizer = Optimizer(model, config)
    descend(model, optimizer, range(4))
    other.load_state_dict(model.state_dict())
    tensors = {n: t.clone() for n, t in optimizer.state_dict().items()}
    given = copy.deepcopy(tensors)
    descend(model, optimizer, range(4, 8))
    restored = Optimizer(other, config)
    restored.load_state_dict(given)
    descend(other, restored, range(4, 8))
    assert all(given[n].equal(t) for n, t in tensors.items()), "they were not copied"
    for (n, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.equal(two), n
    again = restored.state_dict()
    assert set(again) == set(tensors)
    assert all(again[n].equal(t) for n, t in optimizer.state_dict().items())


@pytest.mark.parametrize("prefix", ["adamw.exp_avg.", "adamw.exp_avg_sq.", "muon.momentum."])
@pytest.mark.parametrize("shape", [None, (3, 5), (1,)], ids=["missing", "other", "would stretch"])
def test_a_state_of_other_names_or_shapes_is_rejected(
    prefix: str, shape: tuple[int, ...] | None
) -> None:
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())
    descend(model, optimizer, range(1))
    tensors = dict(optimizer.state_dict())
    name = next(n for n in tensors if n.startswith(prefix))
    tensors[name] = torch.zeros(shape or 1)
    if shape is None:
        del tensors[name]
    with pytest.raises(RunError, match=f"does not fit this model.*{name}|{name}.* does not fit"):
        Optimizer(small_model(), OptimConfig()).load_state_dict(tensors)
