"""Upper limits of a step's cost at full scale, for the golden figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.scale.figures import BUSY, Figures, largest, mean_flops

MIB = 2**20
TERA = 10**12

Value = Callable[[Figures], float]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The upper limit of a figure.

    Attributes:
        what: The figure.
        value: It, of the golden figures.
        most: The bar.
        unmet: Why it is not met; empty where it is.
    """

    what: str
    value: Value
    most: float
    unmet: str = ""


def _largest(case: str, what: str, *, unit: int = 1, domain: str | None = None) -> Value:
    return lambda figures: (
        max(largest(d, what) for name, d in figures[case].items() if domain in (None, name)) / unit
    )


def _imbalance(case: str) -> Value:
    def value(figures: Figures) -> float:
        dense = figures[case]["dense"]
        return float(dense["most_flops"]["planned_flops"] / mean_flops(dense))

    return value


def _bytes_over(case: str, other: str) -> Value:
    def value(figures: Figures) -> float:
        sent = sum(domain["all_sent_bytes"] for domain in figures[case].values())
        # Of whole matrices: split ones are sent several times, which would flatter.
        return float(sent / sum(domain["all_whole_bytes"] for domain in figures[other].values()))

    return value


def _transient(case: str, most: int, unmet: str = "") -> Bar:
    return Bar(
        what=f"{case}: MiB of transient memory",
        value=_largest(case, "transient_bytes", unit=MIB),
        most=most,
        unmet=unmet,
    )


def _launches(case: str, most: int, unmet: str = "", domain: str = "dense") -> Bar:
    return Bar(
        what=f"{case}: launches of {domain} matrices",
        value=_largest(case, "launches", domain=domain),
        most=most,
        unmet=unmet,
    )


def _teraflops(case: str, most: float, unmet: str = "") -> Bar:
    return Bar(
        what=f"{case}: TFLOP of the busiest rank, dense matrices",
        value=_largest(case, "flops", unit=TERA, domain="dense"),
        most=most,
        unmet=unmet,
    )


def _ratio(setup: str, optimizer: str, most: float, unmet: str = "") -> Bar:
    case = f"{setup}: {optimizer}"
    return Bar(
        what=f"{case}: bytes sent over those of whole matrices by dmuon",
        value=_bytes_over(case, f"{setup}: dmuon"),
        most=most,
        unmet=unmet,
    )


def _experts(what: str, most: int, unmet: str = "") -> Bar:
    case = "qwen3-30b-a3b on 64: orth_dion"
    return Bar(
        what=f"{case}: {what.replace('_', ' ')} of experts",
        value=_largest(case, what, domain="expert"),
        most=most,
        unmet=unmet,
    )


BARS = (
    _transient("llama3-8b on 64: dmuon", 700),
    _transient("llama3-8b on 64 tp2: dmuon", 700),
    _transient("llama3-70b on 512 tp8: dmuon", 1500),
    _transient("llama3-405b on 8192 tp8: dmuon", 2000),
    Bar(
        what="llama3-405b on 8192 tp8: dmuon: FLOPs max/mean",
        value=_imbalance("llama3-405b on 8192 tp8: dmuon"),
        most=1.2,
    ),
    # One owner to a matrix: 44 and 22.63 TFLOP.
    _teraflops("llama3-70b on 16384 tp8: dmuon", 44 / 8),
    _teraflops("deepseek-v3 on 16384: dmuon", 22.63 / 8),
    _teraflops("deepseek-v3 on 16384, first stage: dmuon", 22.63 / 8),
    _transient("llama3-8b on 64: orth_dion", 1000),
    _ratio(
        "llama3-8b on 64",
        "orth_dion",
        0.9,
        unmet="a matrix lies on 22 to 38 ranks: 1.46 is the least (docs/orth-dion.md)",
    ),
    _ratio(
        "llama3-8b on 64",
        "orth_dion 1/16",
        0.35,
        unmet="a matrix lies on 22 to 38 ranks: 0.86 is the least (docs/orth-dion.md)",
    ),
    _ratio("llama3-70b on 512 tp8", "orth_dion 1/16", 0.35),
    _transient("llama3-405b on 8192 tp8: orth_dion", 4000),
    _launches("llama3-8b on 64: dmuon", 400),
    _launches("llama3-8b on 64: dmuon with symmetric kernel", 400),
    _launches("llama3-8b on 64 tp2: dmuon", 400),
    _launches("llama3-70b on 512 tp8: dmuon", 400),
    _launches("llama3-70b on 16384 tp8: dmuon", 400),
    _launches("llama3-405b on 8192 tp8: dmuon", 400),
    _launches("deepseek-v3 on 2048: dmuon", 400),
    _launches("deepseek-v3 on 2048, first stage: dmuon", 400),
    _launches("qwen3-30b-a3b on 64: dmuon", 1000, domain="expert"),
    _launches(
        "qwen3-30b-a3b on 64: dmuon with symmetric kernel",
        1000,
        domain="expert",
    ),
    _experts("launches", 1000),
    _experts("host_reads", 2),
    _experts("messages", 12),
)

OFF_PLAN: dict[str, str] = {}
"""Counted ranks of which planned memory is more than a tenth off, and how."""


def counted_ranks(figures: Figures) -> list[tuple[str, float]]:
    """Of every rank that was counted a name, and planned memory over what its step takes."""
    return [
        (f"{case}, {domain}, {rank}", d[rank]["planned_bytes"] / d[rank]["transient_bytes"])
        for case, domains in figures.items()
        for domain, d in domains.items()
        for rank in BUSY
    ]
