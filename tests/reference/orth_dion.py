"""Orth-Dion and Dion on whole matrices, in one process, in float64: the reference of all layouts.

Written from the papers' boxes alone. Imports nothing of ``megatron_muon``, so that a mistake cannot
be on both sides of a comparison; slow and plain on purpose. Only for what the boxes define: B is
zero or B V has full rank.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.muon import Rate, rate_of, scale_of


def gram_schmidt(columns: Tensor) -> Tensor:
    """Orthonormal columns in order, by the textbook, twice: R_ii > 0 because R_ii is a length."""
    result = torch.zeros_like(columns)
    for index in range(columns.shape[1]):
        column = columns[:, index].clone()
        for _ in range(2):
            for earlier in range(index):
                column -= (result[:, earlier] @ column) * result[:, earlier]
        length = column.norm()
        if length <= 1e-12 * columns[:, index].norm():
            raise ValueError("the reference does not say what happens below full rank")
        result[:, index] = column / length
    return result


def polar(matrix: Tensor) -> Tensor:
    """The polar factor of one matrix, all singular values set to 1."""
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


def right_factor(w: Tensor, kind: str) -> Tensor:
    """V of one W (n, r): ``qr``, ``polar`` or ``colnorm``."""
    if kind == "qr":
        return gram_schmidt(w)
    if kind == "polar":
        return polar(w)
    if kind == "colnorm":
        return torch.stack([column / column.norm() for column in w.T], dim=1)
    raise ValueError(f"unknown right factor {kind}")


def orth_dion_step(
    momentum_matrix: Tensor, grad: Tensor, v: Tensor, *, momentum: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """New M, U and V of one matrix (m, n) with m ≥ n and V (n, r)."""
    b = momentum_matrix + grad
    if not b.any():
        return b, torch.zeros(b.shape[0], v.shape[1], dtype=b.dtype), v
    u = gram_schmidt(b @ v)
    w = b.T @ u
    return b - (1.0 - momentum) * (u @ w.T), u, right_factor(w, kind)


def plain_dion_step(
    momentum_matrix: Tensor, grad: Tensor, v: Tensor, *, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for Dion of github.com/microsoft/dion: QR of raw signs, an epsilon."""
    b = momentum_matrix + grad
    u = torch.linalg.qr(b @ v)[0]
    r = b.T @ u
    return b - (1.0 - momentum) * (u @ r.T), u, r / (r.norm(dim=0, keepdim=True) + 1e-8)


def raw_sign_step(
    momentum_matrix: Tensor, grad: Tensor, v: Tensor, *, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the known mistake: both factors from QR, whose diagonal has arbitrary signs."""
    b = momentum_matrix + grad
    u = torch.linalg.qr(b @ v)[0]
    w = b.T @ u
    return b - (1.0 - momentum) * (u @ w.T), u, torch.linalg.qr(w)[0]


class ReferenceOrthDion:
    """Orth-Dion with decoupled weight decay, one logical matrix at a time.

    B = M + G; U = orth(B V); W = BᵀU; M = B − (1−μ)UWᵀ; V = right factor of W;
    X = (1 − ηλ)X − η·extra·s(m, n)·UVᵀ, on the transpose where m < n.

    ``start`` gives the first V (n, r) of a logical matrix, n the smaller side: it is called with
    the parameter's name, and for logical matrix i of several with ``name[i]``. Its shape is the
    rank. With ``rank_compensation`` the update is multiplied by √(min(m, n)/r).
    """

    def __init__(
        self,
        lr: float,
        momentum: float,
        weight_decay: float,
        scale_mode: str,
        extra_scale_factor: float,
        right_factor: str,
        start: Callable[[str], Tensor],
        rank_compensation: bool = False,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.right_factor = right_factor
        self.start = start
        self.rank_compensation = rank_compensation
        # By logical matrix, oriented so that m ≥ n.
        self.momenta: dict[str, Tensor] = {}
        self.right_factors: dict[str, Tensor] = {}

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
        updates = {}
        for name, weight in params.items():
            eta = rate_of(lr, name, self.lr)
            decay = rate_of(weight_decay, name, self.weight_decay)
            grad = grads[name].double()
            old = weight.clone()
            matrices = {name: torch.arange(weight.shape[0])}
            if name in parts:
                matrices = {f"{name}[{i}]": rows for i, rows in enumerate(parts[name])}
            for label, rows in matrices.items():
                direction = self._direction(label, grad[rows])
                weight[rows] = (1.0 - eta * decay) * old[rows] - eta * direction
            updates[name] = weight - old
        return updates

    def _direction(self, label: str, grad: Tensor) -> Tensor:
        """Return extra·s·UVᵀ of one logical matrix and update its state."""
        rows, columns = grad.shape
        tall = grad if rows >= columns else grad.T
        if label not in self.momenta:
            self.momenta[label] = torch.zeros_like(tall)
            self.right_factors[label] = self.start(label).double()
        before = self.right_factors[label]
        self.momenta[label], u, v = orth_dion_step(
            self.momenta[label], tall, before, momentum=self.momentum, kind=self.right_factor
        )
        self.right_factors[label] = v
        factor = self.extra_scale_factor * scale_of(self.scale_mode, rows, columns)
        if self.rank_compensation:
            factor *= math.sqrt(min(rows, columns) / v.shape[1])
        update = factor * (u @ v.T)
        return update if rows >= columns else update.T
