"""What a user can set: each setting once, with its default, its help and its flags.

The command line, its checks, the flags of the offline ``convert`` and ``docs/flags.md`` are made
from this table by ``flags.py``. The defaults are those of megatron-core's Python API; where a flag
has another one (``--muon-momentum`` keeps Megatron's 0.9) it stands with the flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args

from megatron_muon.matrices import Family, Packing, RowPacking, Rule, SplitMode

OPTIMIZERS = ("dmuon", "orth_dion")
"""Values that we add to ``--optimizer``."""


SCALE_MODE = {"dmuon": "spectral", "orth_dion": "shape_scaling"}
"""Scale modes that the optimizers' learning rates are usually given for."""

ExchangeChoice = Literal["auto", "factors", "matrix"]

_TAKERS = {
    "matrix": OPTIMIZERS,
    "muon": ("dmuon",),
    "dmuon": ("dmuon",),
    "orth": ("orth_dion",),
}
"""First word of a flag to the optimizers that take it."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers that a setting can have.

    Attributes:
        kind: ``int`` or ``float``.
        words: The range, as it follows "it must be".
        holds: Whether a number is inside.
        shown: Format of a number that is not.
        or_auto: Whether ``auto`` can be typed instead, which is None.
    """

    kind: type[int] | type[float]
    words: str
    holds: Callable[[Any], bool]
    shown: str = ""
    or_auto: bool = False


COUNT = Range(kind=int, words="an integer >= 1", holds=lambda n: n >= 1)
BELOW_ONE = Range(kind=float, words=">= 0 and < 1", holds=lambda x: 0.0 <= x < 1.0)
NOT_NEGATIVE = Range(kind=float, words="a number >= 0", holds=lambda x: 0.0 <= x < inf)
FRACTION = Range(kind=float, words="> 0 and <= 1", holds=lambda x: 0.0 < x <= 1.0, shown=".15g")
MEBIBYTES = Range(
    kind=float,
    words="a number > 0, or auto",
    holds=lambda mb: 0.0 < mb * 2**20 < inf,
    shown=".15g",
    or_auto=True,
)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of the command line; ``flags.FLAGS`` has all of them, complete.

    Attributes:
        name: As it is typed. The first word says which optimizers take the flag; ``--muon-…`` are
            Megatron's own. With ``no`` in it, it turns its setting off.
        field: Field of ``MatrixConfig``.
        help: For ``--help`` and ``docs/flags.md``.
        default: Without the flag; ``...`` for the setting's.
        values: The range of a number, or the choices of a text: all of them, or the name of what
            holds them in ``linalg``, which imports torch as this module must not.
        takers: Optimizers that take the flag, where its name does not say it.
        python_only: Optimizers that have the setting, but not by this flag.
        metavar: What stands for the value in ``--help``.
        offline: Whether ``convert`` takes the flag.
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
        """Optimizers that take the flag."""
        return self.takers or _TAKERS[self.name.split("-")[2]]

    @property
    def setting_of(self) -> tuple[str, ...]:
        """Optimizers that have the setting."""
        return self.optimizers + self.python_only

    @property
    def is_megatrons(self) -> bool:
        """Whether the flag is one of Megatron's, which its own parser has."""
        return self.name.startswith("--muon-")

    def problem(self, value: Any) -> str | None:
        """The sentence about a value that is not allowed, None for one that is."""
        values = (True, False) if isinstance(self.default, bool) else self.values
        if values is None or (value is None and self.default is None):
            return None
        if not isinstance(values, Range):
            listed = ", ".join(map(str, values))
            return None if value in values else f"{self.name} is '{value}'; supported are {listed}"
        if isinstance(value, Integral if values.kind is int else Real) and values.holds(value):
            return None
        shown = format(value, values.shown) if isinstance(value, Real) else repr(value)
        return f"{self.name} is {shown}; it must be {values.words}"


def setting[T](default: T, help: str, *flags: Flag) -> T:
    """A field of ``MatrixConfig``.

    Args:
        default: In Python.
        help: Of its flags that have none of their own.
        flags: Those that set it.
    """
    return field(default=default, metadata={"help": help, "flags": flags})


@dataclass(frozen=True, kw_only=True)
class MatrixConfig:
    """Settings of the matrix optimizer.

    Each field has the help of its flag beside it (all are listed in ``docs/flags.md``); a flag with
    ``no`` in its name turns the field off. ``optimizer`` is ``dmuon`` or ``orth_dion``; a setting
    whose flags are those of one of them is refused with the other.
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
        "split=default|none|parts|heads, lr_mult=X, wd_mult=X. May be repeated; the later rule "
        "wins. A rule that matches nothing is an error.",
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
        "Orthogonalize every projection of multi-latent attention as one matrix, not its content "
        "and rotary queries, its keys and its values apart.",
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
        "Orthogonalize every attention head of the QKV and MLA projections on its own.",
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
            help="Share of the captured part that the momentum keeps (error feedback).",
            values=BELOW_ONE,
            offline=True,
        ),
    )
    nesterov: bool = setting(
        False, "Orthogonalize βM + (1−β)G instead of M.", Flag(name="--muon-nesterov")
    )
    momentum_dtype: str = setting(
        "fp32",
        "Element type in which the momentum of dmuon is kept; bf16, rounded to nearest, saves 2 "
        "bytes of memory an element. Orth-Dion's carries what a step leaves out, and is fp32.",
        Flag(name="--matrix-momentum-dtype", values="STATE_DTYPES", takers=("dmuon",)),
    )
    scale_mode: str = setting(
        "",
        "Scale of the update by the matrix's global shape. spectral: √max(m, n); unit_rms_norm: "
        "√(m/n); shape_scaling: √max(1, m/n); match_rms_adamw: 0.2·√max(m, n).",
        Flag(name="--muon-scale-mode", default=SCALE_MODE["dmuon"], values="SCALE_MODES"),
        Flag(name="--orth-dion-scale-mode", default=SCALE_MODE["orth_dion"], values="SCALE_MODES"),
    )
    extra_scale_factor: float = setting(
        1.0,
        "Further factor on the update. That of Orth-Dion can be set in Python only.",
        Flag(name="--muon-extra-scale-factor", values=NOT_NEGATIVE, python_only=("orth_dion",)),
    )
    coefficient_type: str = setting(
        "quintic",
        "Newton-Schulz coefficients: simple, quintic, polar_express, cans (not in bf16), aol (at "
        "most 4 steps), deepseekv4 (made for 10 steps), custom.",
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
        "Element type of the Newton-Schulz iteration; auto takes bf16 where it is fast, else "
        "fp32. fp16 is 3 to 8 times nearer to the exact result than bf16, and takes the cheaper "
        "Gram form.",
        Flag(name="--dmuon-compute-dtype", values="COMPUTE_POLICIES"),
    )
    exchange_dtype: str = setting(
        "auto",
        "Element type of what travels; auto is bf16 where the iteration has 16 bits.",
        Flag(name="--dmuon-exchange-dtype", values="EXCHANGE_POLICIES"),
        Flag(
            name="--orth-dion-exchange-dtype",
            help="Element type of what travels; M, V and all products stay in fp32. auto is bf16 "
            "for a model that trains in bf16 where the device is fast in it, else fp32.",
            values="EXCHANGE_POLICIES",
        ),
    )
    split_ranks: int | None = setting(
        None,
        "Most owners among which one matrix is split: ranks of one node, or all of several; auto: "
        "16. Split is what makes the busiest owner faster by a tenth, or what would not fit in "
        "memory otherwise.",
        Flag(
            name="--dmuon-split-ranks",
            values=replace(COUNT, words=f"{COUNT.words}, or auto, and 1 splits none", or_auto=True),
        ),
    )
    split_min_gflop: float = setting(
        137.0,
        "Matrices that take fewer operations than this are not split.",
        Flag(name="--dmuon-split-min-gflop", values=replace(NOT_NEGATIVE, shown=".15g")),
    )
    cost_table: str | None = setting(
        None,
        "Measured times to balance owners by, from python -m megatron_muon.benchmark "
        "--cost-table FILE. Default: counted operations.",
        Flag(name="--dmuon-cost-table", metavar="FILE"),
    )
    ranks_per_node: int | None = setting(
        None,
        "Neighbouring ranks on one node; owners are chosen on the node of a matrix where that "
        "costs no time, and ranks that split a matrix on one, or on whole ones. Default: what "
        "torchrun says; where it says nothing, all are on one, and auto splits among 8.",
        Flag(name="--matrix-ranks-per-node", values=COUNT),
    )
    exchange_buffer_mb: float | None = setting(
        None,
        "Bound on all memory that a rank takes for a step, in MiB: messages, assembled matrices "
        "and what they are computed in. auto: the least that slows nothing down.",
        Flag(name="--matrix-exchange-buffer-mb", values=MEBIBYTES),
    )
    rank_fraction: float = setting(
        0.25,
        "Rank over the smaller side of a matrix, above 0, at most 1.",
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
        "one of full rank.",
        Flag(name="--orth-dion-rank-compensation"),
    )
    exchange: ExchangeChoice = setting(  # noqa: RUF009 (it makes a field)
        "auto",
        "What travels; auto takes for each matrix what moves fewer bytes.",
        Flag(name="--orth-dion-exchange", values=get_args(ExchangeChoice)),
    )
    state_dtype: str = setting(
        "fp32",
        "Element type in which V is kept between steps. bf16 leaves it orthonormal to 1e-3 only.",
        Flag(name="--orth-dion-state-dtype", values="STATE_DTYPES", offline=True),
    )

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
