"""The optimizer of a model, AdamW or Muon and AdamW, and its learning rate over the steps.

Muon (Jordan et al. 2024) is momentum with orthogonalised updates. Matrices of the same shape, or
its transpose, are stacked and orthogonalised by batched products, which is much faster for many
small matrices.
Shapes in this file: N = stacked matrices, R x C = their shape, R <= C.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from chargpt.config import OptimConfig, ScheduleConfig
from chargpt.distributed import RankGroup
from chargpt.errors import RunError

EMBEDDING_LR_FACTOR = 4  # with Muon; measured
BETAS = (0.9, 0.95)
EPSILON = 1e-8
COSINE_FLOOR = 0.1  # factor that the cosine approaches

# Polar Express (Amsel et al. 2025): (a, b, c) of the iterations x <- a x + b (x x^T) x +
# c (x x^T)^2 x.
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2_000  # those of torch.amp.GradScaler
MOMENTUM = 0.8  # 0.95, common with far larger batches, was worse in every run


class AdamW:
    """AdamW for named parameters; weight decay applies to matrices, not to norm weights.

    Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2) by torch's fused
    kernel. `torch.optim.AdamW` is avoided: it imports torch's compiler, which takes two seconds.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], lr: float, weight_decay: float) -> None:
        self.parameters = parameters
        self.lr = lr
        matrices = [name for name, p in parameters.items() if p.dim() >= 2]
        vectors = [name for name, p in parameters.items() if p.dim() < 2]
        groups = ((matrices, weight_decay), (vectors, 0.0))
        self.groups = [(names, decay) for names, decay in groups if names]
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.step_tensor = torch.zeros((), device=next(iter(parameters.values())).device)

    @torch.no_grad()
    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply update `step` (0, 1, ...) at `factor` times the learning rate."""
        self.step_tensor.fill_(step + 1)  # for the bias correction
        for names, decay in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            torch._fused_adamw_(
                weights,
                [w.grad for w in weights if w.grad is not None],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.step_tensor] * len(names),
                lr=self.lr * factor,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments of every parameter under its name."""
        first = {f"adamw.exp_avg.{name}": tensor for name, tensor in self.exp_avg.items()}
        return first | {f"adamw.exp_avg_sq.{name}": t for name, t in self.exp_avg_sq.items()}


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T, approximately, (N, R, C).

    Args:
        matrices: float32, (N, R, C) with R <= C.
        dtype: of the products; its rounding is far below the error of the iteration.
    """
    # the iteration needs singular values of at most 1: a margin for the rounding of `dtype`
    x: Tensor = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def as_wide(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transposed view if it has more rows than columns."""
    return matrix.mT if matrix.size(0) > matrix.size(1) else matrix


class Muon:
    """Muon for named matrices; the products of the orthogonalisation run in `dtype`.

    Each rank of `group` updates its part of every stack; then they `gather` the new weights.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
        group: RankGroup = RankGroup(),
    ) -> None:
        self.parameters = parameters
        self.lr = lr
        self.weight_decay = weight_decay
        self.dtype = dtype
        self.group = group
        shapes: dict[torch.Size, list[str]] = {}
        for name, parameter in parameters.items():
            shapes.setdefault(as_wide(parameter).shape, []).append(name)
        self.groups = [
            (names, torch.stack([torch.zeros_like(as_wide(parameters[name])) for name in names]))
            for names in shapes.values()
        ]

    @torch.no_grad()
    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply an update at `factor` times the learning rate."""
        for names, buffer in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            gradient = torch.stack([as_wide(w.grad) for w in weights if w.grad is not None])
            buffer.lerp_(gradient, 1 - MOMENTUM)
            nesterov = gradient.lerp_(buffer, MOMENTUM)
            own = self._own(len(names))
            update = orthogonalize(nesterov[own], self.dtype)
            rate = self.lr * factor
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            if isinstance(rate, Tensor):  # `alpha` cannot be one
                update, rate = update.mul_(rate), 1.0
            for weight, change in zip(weights[own], update.unbind(), strict=True):
                scale = max(1, weight.size(0) / weight.size(1)) ** 0.5
                as_wide(weight).add_(change, alpha=-rate * scale)

    def _own(self, number: int) -> slice:
        """Return which matrices of a stack of `number` this rank updates."""
        n_own = math.ceil(number / self.group.world_size)
        return slice(self.group.rank * n_own, (self.group.rank + 1) * n_own)

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the weights that each rank has updated to the others."""
        if self.group.is_alone:
            return
        for names, _ in self.groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            own = self._own(len(names))
            # all parts have the same size: the last ones end with matrices that are cut off
            part = [weights[n % len(names)].flatten() for n in range(own.start, own.stop)]
            rows = self.group.all_gather(torch.stack(part))[: len(names)]
            pairs = zip(rows, weights, strict=True)
            torch._foreach_copy_(weights, [row.view_as(weight) for row, weight in pairs])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum of every matrix under its name."""
        return {
            f"muon.momentum.{name}": row if row.shape == self.parameters[name].shape else row.mT
            for names, buffer in self.groups
            for name, row in zip(names, buffer.unbind(), strict=True)
        }


class Optimizer:
    """AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest.

    Weights and state are float32; Muon's products run in `dtype`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        dtype: torch.dtype = torch.float32,
        group: RankGroup = RankGroup(),
    ) -> None:
        named = dict(model.named_parameters())
        hidden = {}
        if config.name == "muon":
            hidden = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
        others = {name: p for name, p in named.items() if name not in hidden}
        self.optimizers: list[AdamW | Muon] = []
        if hidden:
            embedding = {"embedding.weight": others.pop("embedding.weight")}
            rate = EMBEDDING_LR_FACTOR * config.lr
            self.optimizers.append(AdamW(embedding, rate, config.weight_decay))
            self.optimizers.append(
                Muon(hidden, config.matrix_lr, config.weight_decay, dtype, group)
            )
        self.optimizers.append(AdamW(others, config.lr, config.weight_decay))

    def step(self, step: int | Tensor, factor: float | Tensor) -> None:
        """Apply update `step` with every learning rate multiplied by `factor`; then call `gather`.

        In a CUDA graph both are tensors on the device, since numbers would be constants there.
        """
        for optimizer in self.optimizers:
            optimizer.step(step, factor)

    def gather(self) -> None:
        """Copy the weights that each rank has updated to the others."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.gather()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the complete state of the optimizer."""
        return {n: t for each in self.optimizers for n, t in each.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            RunError: a tensor is missing or has another shape.
        """
        for name, tensor in self.state_dict().items():
            saved = tensors.get(name)
            if saved is None or saved.shape != tensor.shape:  # copy_ would broadcast it
                raise RunError(
                    f"the saved optimizer does not fit this model (first at {name}); resume from "
                    "another checkpoint"
                )
            tensor.copy_(saved)


class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    Gradients that float16 would round to zero are representable once the loss is multiplied by
    `scale`. A step whose gradients overflow is skipped and halves the scale; `GROWTH_INTERVAL`
    steps in a row without overflow double it. Nothing is read from the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), device=device)  # 1.0 if the last gradients overflowed

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale, or set all to zero if one is not finite.

        The means over the ranks are the same on each, and so is what follows from them.
        """
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, self.found_inf, self.scale.reciprocal()
        )
        is_skipped = self.found_inf.bool()
        for gradient in gradients:
            gradient.masked_fill_(is_skipped, 0.0)

    def update(self) -> None:
        """Adapt the scale to whether the last gradients overflowed."""
        torch._amp_update_scale_(
            self.scale, self.growth_tracker, self.found_inf, 2.0, 0.5, GROWTH_INTERVAL
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run continues with."""
        tracker = self.growth_tracker.float()  # checkpoints hold float32
        return {"scaler.scale": self.scale, "scaler.growth_tracker": tracker}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned, if a run of this dtype has saved it."""
        limits = {"scale": (2.0**-40, 2.0**40), "growth_tracker": (0, GROWTH_INTERVAL)}
        for name, (low, high) in limits.items():  # a scale of 0, NaN or infinity would never change
            saved = tensors.get(f"scaler.{name}")
            if saved is not None and not saved.dim() and low <= saved <= high:
                getattr(self, name).copy_(saved)


def lr_factor_at(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the factor on every learning rate in update `step` (0, 1, ...), in (0, 1].

    The factor warms up linearly over `warmup` steps. With `wsd` (warmup, stable, decay) it then
    stays at 1 and decays linearly towards 0 over the last `cooldown` fraction of all steps,
    re-planned at each of `decay_points`. With `cosine` it falls to a tenth along a half cosine
    (Loshchilov and Hutter 2017, section 3, one cycle). Both end at `max_steps`, or at the first of
    `restarts`. After each restart the factor warms up to the restart's fraction and decays linearly
    towards 0 at the next one or the end, re-planned like the decay of `wsd`.
    """
    start, peak = 0, 1.0
    for at, fraction in schedule.restarts:
        if step < at:
            max_steps = at
            break
        start, peak = at, fraction
    warmup = min(1.0, (step - start + 1) / (schedule.warmup + 1))
    if schedule.kind == "cosine" and not start:
        span = max(1, max_steps - schedule.warmup)
        progress = min(1.0, max(0, step - schedule.warmup) / span)
        amplitude = (1 - COSINE_FLOOR) / 2
        return warmup * (COSINE_FLOOR + amplitude * (1 + math.cos(math.pi * progress)))
    points = [point for point in schedule.decay_points if start <= point[0] < max_steps]
    decay = _decay_factor(step, start or decay_start(schedule, max_steps) - 1, points, max_steps)
    return peak * min(warmup, decay)


def decay_start(schedule: ScheduleConfig, max_steps: int) -> int:
    """Return the number of steps before the decay of `wsd` begins."""
    planned = next((end for until, end in schedule.decay_points if until < max_steps), max_steps)
    return planned - round(schedule.cooldown * planned)


def _decay_factor(
    step: int, start: int, points: Sequence[tuple[int, int]], max_steps: int
) -> float:
    """Return the factor of a linear decay that begins after step `start`."""
    if step <= start:
        return 1.0
    factor = 1.0
    # each pair is a straight line towards zero at `end`, followed up to the step `until`
    for until, end in (*points, (max_steps, max_steps)):
        if step <= until:
            return factor * (end - step) / (end - start)
        factor *= (end - until) / (end - start)
        start = until
    return 0.0
