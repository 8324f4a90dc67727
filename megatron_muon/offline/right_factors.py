"""Computes Orth-Dion's right factors for a checkpoint without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_muon.checkpoint.names import RIGHT_FACTOR, state_key
from megatron_muon.linalg import full_precision_matmul, gram
from megatron_muon.matrices import intervals, merged_rule
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.outputs import Box, OutTensor, Shape, copied, in_one_chunk
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.settings import ConvertSettings, no_split_flag
from megatron_muon.optim.dion_rule import OrthDionRule, seeded_right_factor

EXACT_SIDE = 256
"""Largest short side for which the eigenvectors of the Gram matrix are computed."""

ITERATIONS = 3
"""Subspace iterations above it, from the seeded V; they need not converge, as every step of
Orth-Dion is a further one."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """V of one logical matrix, given by rows of its parameter.

    V is the leading right singular subspace of ``momentum``, the parameter's up to a factor; the
    seeded V of a new run if that is None.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    momentum: Box | None

    def tensor(self, source: Checkpoint | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Compute V (short side, rank); the seeded V for a zero momentum."""
        if self.momentum is None:
            return seeded_right_factor(self.name, shape[0], shape[1], dtype=dtype)
        start = seeded_right_factor(self.name, shape[0], shape[1])
        whole = self.momentum.tensor(source, self.shape, torch.float32)
        matrix = torch.cat([whole[first:last] for first, last in self.rows])
        del whole
        return leading_right_subspace(matrix, start).to(dtype)


def leading_right_subspace(matrix: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return a basis (short side, rank) of the leading right singular subspace, in fp32.

    A matrix with m < n is transposed first, as in Orth-Dion. The result is ``start``, of the same
    shape, if the matrix is zero or not finite.
    """
    m, n = matrix.shape
    tall = matrix if m >= n else matrix.T
    size = tall.abs().max()
    if not torch.isfinite(size) or size == 0:
        return start
    tall = tall / size
    with full_precision_matmul():
        if tall.shape[1] <= EXACT_SIDE:
            _, vectors = torch.linalg.eigh(tall.T.double() @ tall.double())
            leading: torch.Tensor = vectors[:, -start.shape[1] :].flip(1).float()
            return leading.contiguous()
        # One symmetric product is cheaper than two tall products in every iteration.
        side = tall.shape[1]
        gram32 = tall.new_empty(side, side)
        gram(tall.T.contiguous().unsqueeze(0), out=gram32.unsqueeze(0))
        basis = start
        for _ in range(ITERATIONS):
            basis = torch.linalg.qr(gram32 @ basis).Q
        return basis.contiguous()


def factor_tensors(
    parameter: StoredParameter,
    settings: ConvertSettings,
    momentum: Box | None,
    kept: Mapping[str, TensorInfo],
) -> Iterator[OutTensor]:
    """Yield the right factors of all matrices of a parameter, named as by ``logical_matrices``.

    A factor in ``kept`` of matching shape and dtype is copied; momentum None is zero.
    """
    matrix = settings.matrix
    rule = merged_rule(matrix.rules, parameter.name)
    split = matrix.split_of(parameter.family, parameter.packing, rule)
    if parameter.problem and split != "none":
        raise CheckpointError(
            f"{parameter.name} cannot be split into its matrices: {parameter.problem}; or treat "
            f"each such weight as one matrix with {no_split_flag(parameter.family)}, or assign it "
            f"to Adam with --matrix-rule '{parameter.name}:optimizer=adam', also in training."
        )
    ranks = OrthDionRule(
        rank_fraction=matrix.rank_fraction,
        rank_multiple_of=matrix.rank_multiple_of,
        scale_mode=matrix.scale_mode,
    )
    height, n = parameter.facts.shape
    for part, rows in intervals(parameter.packing, height, split).items():
        name = f"{parameter.name}[{part}]" if part else parameter.name
        m = sum(stop - start for start, stop in rows)
        shape = (min(m, n), ranks.rank(m, n))
        key, known = state_key(RIGHT_FACTOR, name), kept.get(name)
        if known is not None and known.shape == shape and known.dtype == settings.v_dtype:
            yield copied(known, key, "V, copied")
            continue
        is_seeded = momentum is None or settings.right_factor == "seeded"
        value = Factor(
            name=name,
            rows=tuple(rows),
            shape=parameter.facts.shape,
            momentum=None if is_seeded else momentum,
        )
        words = "seeded" if is_seeded else "leading right subspace of the momentum"
        yield in_one_chunk(key, shape, settings.v_dtype, f"V, {words}", value)
