"""What a user can set: one frozen dataclass, made from flags or in Python.

The defaults are those of megatron-core's Python API; on the command line ``--muon-momentum`` keeps
Megatron's default of 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_muon.matrices import Family, Packing, RowPacking, Rule, SplitMode

OPTIMIZERS = ("dmuon", "orth_dion")
"""Values that we add to ``--optimizer``."""


SCALE_MODE = {"dmuon": "spectral", "orth_dion": "shape_scaling"}
"""Scale modes that the optimizers' learning rates are usually given for."""


@dataclass(frozen=True, kw_only=True)
class MatrixConfig:
    """Settings of the matrix optimizer.

    Settings that name the flag of one optimizer only have no effect on the other.

    Attributes:
        optimizer: ``dmuon`` or ``orth_dion``.
        momentum: dmuon's β of the exponential moving average (``--muon-momentum``), or Orth-Dion's
            μ (``--orth-dion-momentum``).
        nesterov: Nesterov momentum (``--muon-nesterov``).
        scale_mode: Scale of the update by the matrix's global shape (``--muon-scale-mode``,
            ``--orth-dion-scale-mode``); empty for the optimizer's own, see ``SCALE_MODE``.
        extra_scale_factor: Further factor on the update, of both optimizers; dmuon's is
            ``--muon-extra-scale-factor``, Orth-Dion's can be set here only.
        coefficient_type: Newton-Schulz coefficient set (``--muon-coefficient-type``).
        coefficients: The set itself when ``coefficient_type`` is ``custom``
            (``--dmuon-coefficients``).
        num_ns_steps: Newton-Schulz steps (``--muon-num-ns-steps``).
        split_qkv: Fused QKV as three matrices (off with ``--muon-no-split-qkv``).
        split_gate_up: Gate and up of a gated MLP as two matrices
            (off with ``--matrix-no-split-gate-up``).
        split_mla: The projections of multi-latent attention as the matrices of the paper, content
            and rotary queries, keys and values each (off with ``--matrix-no-split-mla``).
        split_ssm: The packed input projection of Mamba and gated delta-net layers as its parts
            (off with ``--matrix-no-split-ssm``).
        split_heads: Every attention head of the split QKV and MLA projections as a matrix of its
            own (``--matrix-split-heads``).
        min_dim: Matrices with a shorter side go to Adam (``--matrix-min-dim``).
        compute_dtype: ``auto``, ``fp64``, ``fp32``, ``fp16`` or ``bf16``
            (``--dmuon-compute-dtype``).
        exchange_dtype: What travels in dmuon's exchange: ``auto``, ``fp32`` or ``bf16``
            (``--dmuon-exchange-dtype``).
        exchange_buffer_mb: Bound on exchange buffers and assembled matrices, MiB a rank
            (``--matrix-exchange-buffer-mb``).
        rank_fraction: Orth-Dion's rank over the smaller side (``--orth-dion-rank-fraction``).
        rank_multiple_of: The rank is rounded up to a multiple of it
            (``--orth-dion-rank-multiple-of``).
        right_factor: How V is made orthonormal: ``qr``, ``polar`` or ``colnorm``
            (``--orth-dion-right-factor``).
        rank_compensation: Update times √(min(m, n) / r) (``--orth-dion-rank-compensation``).
        exchange: What travels: ``factors``, ``matrix``, or for each matrix what is cheaper,
            ``auto`` (``--orth-dion-exchange``).
        state_dtype: Element type in which V is kept between steps, ``fp32`` or ``bf16``
            (``--orth-dion-state-dtype``).
        split_ranks: Most owners among which one matrix is split where that balances the load
            better; 1 splits none (``--dmuon-split-ranks``).
        split_min_gflop: Matrices that take fewer operations are not split
            (``--dmuon-split-min-gflop``).
        cost_table: File of measured times that owners are balanced by, None for counted
            operations (``--dmuon-cost-table``).
        ranks_per_node: Neighbouring ranks on one node, None for what torchrun says
            (``--matrix-ranks-per-node``).
        lr: Maximum learning rate of matrices, None for Adam's (``--matrix-lr``).
        min_lr: Minimum learning rate of matrices, None for Adam's (``--matrix-min-lr``).
        weight_decay: Weight decay of matrices, None for Adam's (``--matrix-weight-decay``).
        rules: The user's rules (``--matrix-rule``, ``--matrix-rules``).
    """

    optimizer: str = "dmuon"
    momentum: float = 0.95
    nesterov: bool = False
    scale_mode: str = ""
    extra_scale_factor: float = 1.0
    coefficient_type: str = "quintic"
    coefficients: tuple[tuple[float, float, float], ...] | None = None
    num_ns_steps: int = 5
    split_qkv: bool = True
    split_gate_up: bool = True
    split_mla: bool = True
    split_ssm: bool = True
    split_heads: bool = False
    min_dim: int = 32
    compute_dtype: str = "auto"
    exchange_dtype: str = "auto"
    exchange_buffer_mb: float = 512.0
    rank_fraction: float = 0.25
    rank_multiple_of: int = 1
    right_factor: str = "qr"
    rank_compensation: bool = False
    exchange: Literal["auto", "factors", "matrix"] = "auto"
    state_dtype: str = "fp32"
    split_ranks: int = 1
    split_min_gflop: float = 137.0
    cost_table: str | None = None
    ranks_per_node: int | None = None
    lr: float | None = None
    min_lr: float | None = None
    weight_decay: float | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if not self.scale_mode:
            object.__setattr__(self, "scale_mode", SCALE_MODE.get(self.optimizer, "spectral"))

    def split_of(self, family: Family, packing: Packing, rule: Rule) -> SplitMode:
        """What the rows of a parameter are cut into; the user's rule comes first."""
        if packing.rows is RowPacking.WHOLE:
            return "none"
        if rule.split is not None and rule.split != "default":
            return rule.split
        wanted = {
            "qkv": self.split_qkv,
            "gate_up": self.split_gate_up,
            "mla": self.split_mla,
            "ssm": self.split_ssm,
            "": False,
        }[family]
        if not wanted:
            return "none"
        by_heads = self.split_heads and packing.rows is RowPacking.UNITS
        return "heads" if by_heads else "parts"
