"""User settings: each is declared once, with its default, help and flags.

The command line, its checks, the flags of the offline ``convert`` and ``docs/flags.md`` are
generated from this table by ``flags.py``. Defaults are those of megatron-core's Python API; a
different default of a flag (``--muon-momentum`` keeps Megatron's 0.9) is declared with the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args

from megatron_muon.matrices import Family, Packing, RowPacking, Rule, SplitMode

OPTIMIZERS = ("dmuon", "orth_dion")
"""Values added to ``--optimizer``."""


SCALE_MODE = {"dmuon": "spectral", "orth_dion": "shape_scaling"}
"""Scale modes for which learning rates of the optimizers are usually reported."""

ExchangeChoice = Literal["auto", "factors", "matrix"]

_TAKERS = {
    "matrix": OPTIMIZERS,
    "muon": ("dmuon",),
    "dmuon": ("dmuon",),
    "orth": ("orth_dion",),
}
"""First word of a flag to the optimizers that support it."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Valid numbers of a setting.

    Attributes:
        kind: ``int`` or ``float``.
        words: The range, to follow "it must be".
        contains: Returns True for a valid number.
        number_format: Format of an invalid number in the error.
        or_auto: True to also accept ``auto``, which is None.
    """

    kind: type[int] | type[float]
    words: str
    contains: Callable[[Any], bool]
    number_format: str = ""
    or_auto: bool = False


COUNT = Range(kind=int, words="an integer >= 1", contains=lambda n: n >= 1)
BELOW_ONE = Range(kind=float, words=">= 0 and < 1", contains=lambda x: 0.0 <= x < 1.0)
NOT_NEGATIVE = Range(kind=float, words="a number >= 0", contains=lambda x: 0.0 <= x < inf)
FRACTION = Range(
    kind=float, words="> 0 and <= 1", contains=lambda x: 0.0 < x <= 1.0, number_format=".15g"
)
MEBIBYTES = Range(
    kind=float,
    words="a number > 0, or auto",
    contains=lambda mb: 0.0 < mb * 2**20 < inf,
    number_format=".15g",
    or_auto=True,
)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of the command line; ``flags.FLAGS`` has all of them, completed.

    Attributes:
        name: The flag. Its first word names the optimizers that support it; ``--muon-…`` are
            Megatron's own. A name with ``no`` turns its setting off.
        field: Field of ``MatrixConfig``.
        help: Text of ``--help`` and ``docs/flags.md``.
        default: Value without the flag; ``...`` for the setting's default.
        values: The range of a number, or the choices of a string: a tuple, or its name in
            ``linalg``, which imports torch, unlike this module.
        takers: Optimizers that support the flag, if its name does not determine them.
        python_only: Optimizers that have the setting, but not the flag.
        metavar: Placeholder of the value in ``--help``.
        offline: True if ``convert`` has the flag.
    """

    name: str
    field: str = ""
    help: str = ""
    default: Any = ...
    values: Range | tuple[str, ...] | str | None = None
    takers: tuple[str, ...] = ()
    python_only: tuple[str, ...] = ()
    metavar: str | None = None
    offline: bool = False

    @property
    def dest(self) -> str:
        """Attribute of the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_").replace("_no_split", "_split")

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Optimizers that support the flag."""
        return self.takers or _TAKERS[self.name.split("-")[2]]

    @property
    def setting_of(self) -> tuple[str, ...]:
        """Optimizers that have the setting."""
        return self.optimizers + self.python_only

    @property
    def is_megatron_flag(self) -> bool:
        """True for a flag of Megatron's own parser."""
        return self.name.startswith("--muon-")

    def problem(self, value: Any) -> str | None:
        """Return the error for an invalid value, None for a valid one."""
        values = (True, False) if isinstance(self.default, bool) else self.values
        if values is None or (value is None and self.default is None):
            return None
        if not isinstance(values, Range):
            listed = ", ".join(map(str, values))
            return None if value in values else f"{self.name} is '{value}'; supported are {listed}"
        if isinstance(value, Integral if values.kind is int else Real) and values.contains(value):
            return None
        shown = format(value, values.number_format) if isinstance(value, Real) else repr(value)
        return f"{self.name} is {shown}; it must be {values.words}"


def setting[T](default: T, help: str, *flags: Flag) -> T:
    """Declare a field of ``MatrixConfig``.

    Args:
        default: Default in Python.
        help: Help of its flags that have no help of their own.
        flags: The flags that set it.
    """
    return field(default=default, metadata={"help": help, "flags": flags})


@dataclass(frozen=True, kw_only=True)
class MatrixConfig:
    """Settings of the matrix optimizer.

    Each field is followed by the help of its flag (all are listed in ``docs/flags.md``); a flag
    with ``no`` in its name turns the field off. ``optimizer`` is ``dmuon`` or ``orth_dion``; a
    setting whose flags belong to one of them is refused with the other.
    """

    optimizer: str = "dmuon"
    lr: float | None = setting(
        None,
        "Maximum learning rate of matrices. Default: --lr.",
        Flag(name="--matrix-lr", values=NOT_NEGATIVE),
    )
    min_lr: float | None = setting(
        None,
        "Minimum learning rate of matrices. Default: --min-lr.",
        Flag(name="--matrix-min-lr", values=NOT_NEGATIVE),
    )
    weight_decay: float | None = setting(
        None,
        "Weight decay of matrices, constant. Default: as for the other parameters.",
        Flag(name="--matrix-weight-decay", values=NOT_NEGATIVE),
    )
    rules: tuple[Rule, ...] = setting(
        (),
        "Rule for the parameters whose name matches GLOB: optimizer=matrix|adam, "
        "split=default|none|parts|heads, lr_mult=X, wd_mult=X. May be repeated; later rules take "
        "precedence. A rule that matches nothing is an error.",
        Flag(name="--matrix-rule", default=[], metavar="GLOB:KEY=VALUE,…", offline=True),
        Flag(
            name="--matrix-rules",
            default=None,
            help="JSON list of rules: objects with 'pattern' and the keys of --matrix-rule.",
            metavar="FILE",
            offline=True,
        ),
    )
    split_qkv: bool = setting(
        True,
        "Orthogonalize the fused QKV weight as one matrix.",
        Flag(name="--muon-no-split-qkv", takers=OPTIMIZERS, offline=True),
    )
    split_gate_up: bool = setting(
        True,
        "Orthogonalize gate and up of a gated MLP as one matrix.",
        Flag(name="--matrix-no-split-gate-up", offline=True),
    )
    split_mla: bool = setting(
        True,
        "Orthogonalize every projection of multi-latent attention as one matrix, instead of "
        "separating content and rotary queries, keys and values.",
        Flag(name="--matrix-no-split-mla", offline=True),
    )
    split_ssm: bool = setting(
        True,
        "Orthogonalize the packed input projection of a Mamba or gated delta-net layer as one "
        "matrix.",
        Flag(name="--matrix-no-split-ssm", offline=True),
    )
    split_heads: bool = setting(
        False,
        "Orthogonalize every attention head of the QKV and MLA projections separately.",
        Flag(name="--matrix-split-heads", offline=True),
    )
    min_dim: int = setting(
        32,
        "Matrices with a side shorter than this are trained with Adam.",
        Flag(name="--matrix-min-dim", values=COUNT, offline=True),
    )
    momentum: float = setting(
        0.95,
        "β of the momentum M ← βM + (1−β)G.",
        Flag(name="--muon-momentum", default=0.9, values=BELOW_ONE),
        Flag(
            name="--orth-dion-momentum",
            help="Fraction of the captured part that the momentum retains (error feedback).",
            values=BELOW_ONE,
            offline=True,
        ),
    )
    nesterov: bool = setting(
        False, "Orthogonalize βM + (1−β)G instead of M.", Flag(name="--muon-nesterov")
    )
    momentum_dtype: str = setting(
        "fp32",
        "Dtype of dmuon's stored momentum; bf16, rounded to nearest, saves 2 bytes per element. "
        "Orth-Dion's momentum accumulates the residual of each step, and is fp32.",
        Flag(name="--matrix-momentum-dtype", values="STATE_DTYPES", takers=("dmuon",)),
    )
    scale_mode: str = setting(
        "",
        "Scale of the update by global shape. spectral: √max(m, n); unit_rms_norm: √(m/n); "
        "shape_scaling: √max(1, m/n); match_rms_adamw: 0.2·√max(m, n).",
        Flag(name="--muon-scale-mode", default=SCALE_MODE["dmuon"], values="SCALE_MODES"),
        Flag(name="--orth-dion-scale-mode", default=SCALE_MODE["orth_dion"], values="SCALE_MODES"),
    )
    extra_scale_factor: float = setting(
        1.0,
        "Additional factor on the update. Orth-Dion's can be set in Python only.",
        Flag(name="--muon-extra-scale-factor", values=NOT_NEGATIVE, python_only=("orth_dion",)),
    )
    coefficient_type: str = setting(
        "quintic",
        "Newton-Schulz coefficients: simple, quintic, polar_express, cans (not in bf16), aol (at "
        "most 4 steps), deepseekv4 (designed for 10 steps), custom.",
        Flag(name="--muon-coefficient-type"),
    )
    coefficients: tuple[tuple[float, float, float], ...] | None = setting(
        None,
        "Newton-Schulz coefficients for --muon-coefficient-type custom. Set --muon-num-ns-steps "
        "to their number.",
        Flag(name="--dmuon-coefficients", metavar="a,b,c;a,b,c;…"),
    )
    num_ns_steps: int = setting(5, "Newton-Schulz steps.", Flag(name="--muon-num-ns-steps"))
    compute_dtype: str = setting(
        "auto",
        "Dtype of the Newton-Schulz iteration; auto selects bf16 where it is fast, else fp32. fp16 "
        "has a 3 to 8 times smaller error than bf16, and uses the cheaper Gram form.",
        Flag(name="--dmuon-compute-dtype", values="COMPUTE_POLICIES"),
    )
    exchange_dtype: str = setting(
        "auto",
        "Dtype of communicated elements; auto is bf16 if the iteration has 16 bits, else fp32.",
        Flag(name="--dmuon-exchange-dtype", values="EXCHANGE_POLICIES"),
        Flag(
            name="--orth-dion-exchange-dtype",
            help="Dtype of communicated elements; M, V and all products stay in fp32. auto is bf16 "
            "for a model that trains in bf16 on a device with fast bf16, else fp32.",
            values="EXCHANGE_POLICIES",
        ),
    )
    split_ranks: int | None = setting(
        None,
        "Maximum number of owners that share one matrix: ranks of one node, or all of several; "
        "auto: 16. A matrix is split if that makes the busiest owner faster by a tenth, or if it "
        "would not fit in memory otherwise.",
        Flag(
            name="--dmuon-split-ranks",
            values=replace(COUNT, words=f"{COUNT.words}, or auto; 1 splits none", or_auto=True),
        ),
    )
    split_min_gflop: float = setting(
        137.0,
        "Matrices with fewer floating-point operations than this are not split.",
        Flag(name="--dmuon-split-min-gflop", values=replace(NOT_NEGATIVE, number_format=".15g")),
    )
    cost_table: str | None = setting(
        None,
        "Measured times for balancing owners, from python -m megatron_muon.benchmark "
        "--cost-table FILE. Default: counted FLOPs.",
        Flag(name="--dmuon-cost-table", metavar="FILE"),
    )
    ranks_per_node: int | None = setting(
        None,
        "Consecutive ranks on one node; an owner is chosen on the node of its matrix if that "
        "costs no time, and ranks that share a matrix on one node, or on whole nodes. Default: "
        "torchrun's value; without one, all ranks are on one node, and auto splits among 8.",
        Flag(name="--matrix-ranks-per-node", values=COUNT),
    )
    exchange_buffer_mb: float | None = setting(
        None,
        "Upper bound on a rank's memory for a step, in MiB: messages, assembled matrices and "
        "workspace. auto: the smallest without loss of speed.",
        Flag(name="--matrix-exchange-buffer-mb", values=MEBIBYTES),
    )
    rank_fraction: float = setting(
        0.25,
        "Rank relative to the smaller side of a matrix, above 0, at most 1.",
        Flag(name="--orth-dion-rank-fraction", values=FRACTION, offline=True),
    )
    rank_multiple_of: int = setting(
        1,
        "The rank is rounded up to a multiple of this, but not above the smaller side.",
        Flag(name="--orth-dion-rank-multiple-of", values=COUNT, offline=True),
    )
    right_factor: str = setting(
        "qr",
        "qr: QR with positive diagonal (the paper's); polar: polar factor (at full rank exactly "
        "Muon's direction); colnorm: Dion (columns of length 1).",
        Flag(name="--orth-dion-right-factor", values="RIGHT_FACTORS"),
    )
    rank_compensation: bool = setting(
        False,
        "Multiply the update by sqrt(smaller side / rank), which gives it the root mean square of "
        "a full-rank update.",
        Flag(name="--orth-dion-rank-compensation"),
    )
    exchange: ExchangeChoice = setting(  # noqa: RUF009 (it returns a field)
        "auto",
        "What is communicated; auto selects for each matrix whichever needs fewer bytes.",
        Flag(name="--orth-dion-exchange", values=get_args(ExchangeChoice)),
    )
    state_dtype: str = setting(
        "fp32",
        "Dtype of V between steps. In bf16 it is orthonormal to 1e-3 only.",
        Flag(name="--orth-dion-state-dtype", values="STATE_DTYPES", offline=True),
    )

    def __post_init__(self) -> None:
        if not self.scale_mode:
            object.__setattr__(self, "scale_mode", SCALE_MODE.get(self.optimizer, "spectral"))

    def split_of(self, family: Family, packing: Packing, rule: Rule) -> SplitMode:
        """Return the split of a parameter's rows; the user's rule takes precedence."""
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
