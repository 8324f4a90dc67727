"""Muon and AdamW on whole matrices, in one process, in float64: the reference of all layouts.

Written from the formulas alone. Imports nothing of ``megatron_muon``, so that a mistake cannot be
on both sides of a comparison; slow and plain on purpose.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]

# F. L. Cesista, leloykun.github.io/ponder/muon-opt-coeffs.
QUINTIC: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel et al., arXiv:2505.16932, degree k divided by 1.01 to the power k.
POLAR_EXPRESS: Coefficients = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)


def orthogonalize(matrix: Tensor, coefficients: Coefficients) -> Tensor:
    """Newton-Schulz of one float64 matrix (m, n): X ← aX + b(XXᵀ)X + c(XXᵀ)²X from X = M/‖M‖_F."""
    norm = math.sqrt(float((matrix * matrix).sum()))
    if norm == 0.0:
        return torch.zeros_like(matrix)
    x = matrix / norm
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for a, b, c in coefficients:
        first = x @ x.T @ x
        second = x @ x.T @ first
        x = a * x + b * first + c * second
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def scale_of(mode: str, rows: int, columns: int) -> float:
    """The factor of the orthogonalized matrix, from its whole shape."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    if mode == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f"unknown scale mode {mode}")


Rate = float | Mapping[str, float] | None
"""One for all parameters, or by name; None, and names that it lacks, for the constructor's."""


def rate_of(rate: Rate, name: str, default: float) -> float:
    """A learning rate or weight decay of one parameter."""
    if isinstance(rate, Mapping):
        return rate.get(name, default)
    return default if rate is None else rate


class ReferenceMuon:
    """Muon with EMA momentum and decoupled weight decay, one logical matrix at a time.

    M ← βM + (1−β)G; N = (1−β)G + βM with Nesterov, N = M without;
    W ← (1 − ηλ)W − η·extra·s(m, n)·orthogonalize(N) for each logical matrix of W.
    """

    def __init__(
        self,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        scale_mode: str,
        extra_scale_factor: float,
        coefficients: Coefficients,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.coefficients = coefficients
        self.momenta: dict[str, Tensor] = {}

    def step(
        self,
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        parts: dict[str, list[Tensor]],
        *,
        lr: Rate = None,
        weight_decay: Rate = None,
    ) -> dict[str, Tensor]:
        """Updates the parameters in place and returns new − old.

        Args:
            params: Name → whole float64 matrix (m, n).
            grads: Name → gradient of the whole matrix, for each parameter.
            parts: Name → row indices of each logical matrix; a missing name is one matrix.
            lr: η of this step, if not the constructor's.
            weight_decay: λ of this step, if not the constructor's.
        """
        beta = self.momentum
        updates = {}
        for name, weight in params.items():
            eta = rate_of(lr, name, self.lr)
            decay = rate_of(weight_decay, name, self.weight_decay)
            grad = grads[name].double()
            if name not in self.momenta:
                self.momenta[name] = torch.zeros_like(weight)
            ema = beta * self.momenta[name] + (1.0 - beta) * grad
            self.momenta[name] = ema
            direction = (1.0 - beta) * grad + beta * ema if self.nesterov else ema
            old = weight.clone()
            for rows in parts.get(name, [torch.arange(weight.shape[0])]):
                matrix = direction[rows]
                scale = scale_of(self.scale_mode, matrix.shape[0], matrix.shape[1])
                factor = self.extra_scale_factor * scale
                orthogonal = orthogonalize(matrix, self.coefficients)
                weight[rows] = (1.0 - eta * decay) * old[rows] - eta * factor * orthogonal
            updates[name] = weight - old
        return updates


class ReferenceAdamW:
    """AdamW with bias correction and decoupled weight decay, as Megatron's Adam.

    W ← (1 − ηλ)W − η·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε).
    """

    def __init__(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def step(
        self,
        params: dict[str, Tensor],
        grads: dict[str, Tensor],
        *,
        lr: Rate = None,
        weight_decay: Rate = None,
    ) -> dict[str, Tensor]:
        """Updates float64 parameters of any shape in place and returns new − old.

        Args:
            params: Name → float64 tensor.
            grads: Name → gradient, for each parameter.
            lr: η of this step, if not the constructor's.
            weight_decay: λ of this step, if not the constructor's.
        """
        self.steps += 1
        beta1, beta2 = self.betas
        updates = {}
        for name, weight in params.items():
            eta = rate_of(lr, name, self.lr)
            decay = rate_of(weight_decay, name, self.weight_decay)
            grad = grads[name].double()
            first = self.first.get(name, torch.zeros_like(weight))
            second = self.second.get(name, torch.zeros_like(weight))
            self.first[name] = first = beta1 * first + (1.0 - beta1) * grad
            self.second[name] = second = beta2 * second + (1.0 - beta2) * grad * grad
            mean = first / (1.0 - beta1**self.steps)
            spread = torch.sqrt(second / (1.0 - beta2**self.steps)) + self.eps
            old = weight.clone()
            weight.copy_((1.0 - eta * decay) * old - eta * mean / spread)
            updates[name] = weight - old
        return updates


def unit_parts(sizes: Sequence[int], rows: int) -> list[Tensor]:
    """Rows of each part where units of these parts follow one another (heads, query groups)."""
    unit = torch.arange(rows).view(-1, sum(sizes))
    return [part.reshape(-1) for part in unit.split(list(sizes), dim=1)]


def qkv_parts(query_groups: int, heads: int, head_dim: int) -> list[Tensor]:
    """Rows of Q, of K and of V in Megatron's ``linear_qkv`` weight.

    The weight is packed by query group: the queries of the group's heads, its key, its value. Q, K
    and V are one logical matrix each, over all groups, as in megatron-core's Muon.
    """
    queries = heads // query_groups * head_dim
    return unit_parts((queries, head_dim, head_dim), query_groups * (queries + 2 * head_dim))


def gate_up_parts(ffn: int) -> list[Tensor]:
    """Rows of the gate and of the up projection in a gated ``linear_fc1`` weight, gate first."""
    return [torch.arange(ffn), torch.arange(ffn, 2 * ffn)]


def global_norm(grads: Iterable[Tensor]) -> float:
    """Euclidean norm over all entries of all gradients."""
    return math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads))


def clip(grads: dict[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], float]:
    """Megatron's clipping: factor max_norm/(norm + 1e-6), applied only if below 1.

    Returns:
        The gradients in float64, scaled or not, and the norm before clipping.
    """
    norm = global_norm(grads.values())
    factor = max_norm / (norm + 1e-6)
    if factor >= 1.0:
        factor = 1.0
    return {name: grad.double() * factor for name, grad in grads.items()}, norm
