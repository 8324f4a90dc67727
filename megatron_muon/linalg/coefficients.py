"""Coefficient sets of the quintic Newton-Schulz iteration, and schedules made from them.

One step maps every singular value σ of a matrix to ``p(σ) = aσ + bσ³ + cσ⁵`` and preserves the
singular vectors. A set is a list of triples ``(a, b, c)``; a schedule has one triple per executed
step. All sets assume initial singular values in [0, 1], which the Frobenius norm guarantees.

The range to which a whole set maps the singular values in [0.02, 1], and its largest slope on
[0, 1], which amplifies rounding errors (computed in float64; the tests recompute both):

=============  =====  ===============  =============  ============================================
set            steps  range            largest slope  more steps than the set has
=============  =====  ===============  =============  ============================================
simple         1      [0.069, 1.202]   3.4            any (5 steps: [0.682, 1.134], slope 485)
quintic        5      [0.978, 1.032]   493            whole passes only: 10, 15, ...
polar_express  8      [1.000, 1.000]   6.4e3          the last triple is repeated
cans           5      [0.884, 1.120]   4.9e4 (at 1)   the last triple is repeated; not in 16 bits
aol            4      [-1.084, 1.084]  130            none; negative for σ > 0.8837, see its row
deepseekv4     10     [1.000, 1.001]   7.9e4          the last triple is repeated
custom         --     --               --             whole passes only
=============  =====  ===============  =============  ============================================

With fewer steps than the set has, its first triples are used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

type Triple = tuple[float, float, float]
type Schedule = tuple[Triple, ...]

CUSTOM: Final = "custom"


@dataclass(frozen=True, kw_only=True)
class CoefficientSet:
    """Triples of one published iteration, and how they are repeated."""

    name: str
    """Value of ``--muon-coefficient-type``."""

    steps: Schedule
    """Triples (a, b, c) in order of application; empty for ``custom``."""

    source: str
    """Where the numbers were published."""

    repeats: Literal["whole", "last", "never"]
    """With more steps than triples: repeat the whole set, or its last triple, or refuse."""

    stable_in_16_bits: bool = True
    """False if rounding in bf16 or fp16 can make the iteration diverge."""


_SIMPLE_TRIPLE: Final[Triple] = (3.4445, -4.7750, 2.0315)

_ROWS: Final = (
    CoefficientSet(
        name="simple",
        steps=(_SIMPLE_TRIPLE,),
        source="K. Jordan, Muon: github.com/KellerJordan/Muon",
        repeats="whole",
    ),
    CoefficientSet(
        name="quintic",
        steps=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="F. L. Cesista: leloykun.github.io/ponder/muon-opt-coeffs, as in "
        "github.com/KellerJordan/modded-nanogpt (train_gpt_medium.py)",
        # The first triple maps 1 to 0.117, so a partial second pass would undo the first one.
        repeats="whole",
    ),
    CoefficientSet(
        name="polar_express",
        # Includes the paper's safety factor: b of degree k is divided by 1.01 to the power k.
        steps=(
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        source="Amsel et al., The Polar Express: arXiv:2505.16932",
        repeats="last",
    ),
    CoefficientSet(
        name="cans",
        steps=(
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        source="Grishina et al., CANS (Remez, adaptive interval): arXiv:2506.10935",
        repeats="last",
        # Each triple is fitted exactly to the range of the previous one, up to 1.9915 after the
        # first. Rounded to 16 bits that can be 1.9922 or more, from where later triples diverge to
        # inf: for matrices of rank one, and for other ill-conditioned ones.
        stable_in_16_bits=False,
    ),
    CoefficientSet(
        name="aol",
        # Designed for row-wise AOL rescaling. Under the Frobenius norm, which we and
        # emerging-optimizers use, the first triple is negative for σ > 0.8837: a matrix of nearly
        # rank one (1×n always) is mapped to minus its polar factor. A second pass would flip
        # every singular value, hence no repetition.
        steps=(
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        source="T. Boissin: github.com/thib-s/flash-newton-schulz",
        repeats="never",
    ),
    CoefficientSet(
        name="deepseekv4",
        steps=(_SIMPLE_TRIPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4 technical report, published with DeepSeek-V4-Pro",
        repeats="last",
    ),
    CoefficientSet(
        name=CUSTOM,
        steps=(),
        source="the user, through --dmuon-coefficients",
        repeats="whole",
    ),
)

COEFFICIENT_SETS: Final[Mapping[str, CoefficientSet]] = MappingProxyType(
    {row.name: row for row in _ROWS}
)


def coefficient_schedule(
    name: str,
    steps: int,
    custom: Sequence[Triple] | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Schedule:
    """Returns the triple of every step.

    Args:
        name: Key of ``COEFFICIENT_SETS``.
        steps: Number of iterations k, at least 1.
        custom: The triples of the ``custom`` set; None for every other set.
        compute_dtype: The dtype of the iteration, to refuse a set that diverges in it; None if
            unknown.

    Returns:
        k triples (a, b, c). Up to the length of the set, its first k; beyond, by its ``repeats``.

    Raises:
        ValueError: Unknown name, an unsupported number of steps, a compute dtype in which the set
            diverges, or custom triples that are missing, malformed or not requested. The message
            names the flag to change.
    """
    chosen = COEFFICIENT_SETS.get(name)
    if chosen is None:
        raise ValueError(
            f"--muon-coefficient-type {name} is unknown; supported are "
            f"{', '.join(COEFFICIENT_SETS)}. Type for example --muon-coefficient-type quintic."
        )
    if steps < 1:
        raise ValueError(
            f"--muon-num-ns-steps {steps} is invalid; at least 1 step is required. "
            "Type for example --muon-num-ns-steps 5."
        )
    triples = _custom_triples(custom) if name == CUSTOM else chosen.steps
    if name != CUSTOM and custom is not None:
        raise ValueError(
            f"--dmuon-coefficients is set but --muon-coefficient-type is {name}, which has its own "
            "coefficients. Type --muon-coefficient-type custom, or drop --dmuon-coefficients."
        )
    if compute_dtype in (torch.bfloat16, torch.float16) and not chosen.stable_in_16_bits:
        raise ValueError(
            f"--muon-coefficient-type {name} diverges when computed in {compute_dtype}. Type "
            "--dmuon-compute-dtype fp32, or --muon-coefficient-type polar_express."
        )
    length = len(triples)
    if steps <= length:
        return triples[:steps]
    if chosen.repeats == "last":
        return triples + (triples[-1],) * (steps - length)
    if chosen.repeats == "whole" and steps % length == 0:
        return triples * (steps // length)
    raise ValueError(_impossible_steps(chosen, steps, length))


def parse_coefficients(text: str) -> Schedule:
    """Reads the value of ``--dmuon-coefficients``.

    Args:
        text: Triples separated by semicolons, numbers separated by commas: ``a,b,c;a,b,c``.
            Blanks around numbers are ignored.

    Returns:
        The triples in order, at least one.

    Raises:
        ValueError: Anything but finite numbers in threes.
    """
    try:
        groups = [[float(number) for number in group.split(",")] for group in text.split(";")]
    except ValueError:
        raise ValueError(
            f"--dmuon-coefficients {text!r} is not a list of numbers. {_CUSTOM_FORM}"
        ) from None
    return _custom_triples(groups)


_CUSTOM_FORM: Final = (
    "It takes triples a,b,c separated by semicolons, one per step. "
    "Type for example --dmuon-coefficients '3.4445,-4.7750,2.0315;2,-1.5,0.5' with "
    "--muon-num-ns-steps 2."
)


def _custom_triples(custom: Sequence[Sequence[float]] | None) -> Schedule:
    """Checks the user's triples and returns them as tuples of floats."""
    if not custom:
        raise ValueError(
            f"--muon-coefficient-type custom requires --dmuon-coefficients, which is empty. "
            f"{_CUSTOM_FORM}"
        )
    triples: list[Triple] = []
    for position, triple in enumerate(custom, start=1):
        if len(triple) != 3 or not all(math.isfinite(number) for number in triple):
            raise ValueError(
                f"--dmuon-coefficients: entry {position} is {tuple(triple)}, not three finite "
                f"numbers. {_CUSTOM_FORM}"
            )
        a, b, c = triple
        triples.append((float(a), float(b), float(c)))
    return tuple(triples)


def _impossible_steps(chosen: CoefficientSet, steps: int, length: int) -> str:
    """Explains why the set does not support this number of steps, and what to type instead."""
    found = f"--muon-num-ns-steps {steps} does not fit --muon-coefficient-type {chosen.name}"
    if chosen.repeats == "never":
        return (
            f"{found}: it has {length} steps, and repeating them reverses the sign of the update. "
            f"Supported are 1 to {length}; type --muon-num-ns-steps {length}."
        )
    nearest = steps // length * length
    return (
        f"{found}: it has {length} steps, and an incomplete second pass moves singular values away "
        f"from 1. Supported are 1 to {length} and multiples of {length}; "
        f"type --muon-num-ns-steps {nearest}."
    )
