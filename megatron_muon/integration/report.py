"""The table printed once at start: what goes where, what it costs, what is worth knowing.

Every exchange group is summarized by its first rank; rank 0 merges the summaries, so the table
tells of the whole model, whatever stages and experts rank 0 holds itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.plan_warnings import family_name, plan_warnings
from megatron_muon.integration.routes import RoutedParameter
from megatron_muon.optim import MatrixRule
from megatron_muon.optim.rule import dtype_name
from megatron_muon.placement import Plan

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class MatrixFamily:
    """Matrices that differ in their layer or expert only.

    Attributes:
        name: Name with a star for the numbers of layers, experts and heads.
        shape: Global (m, n).
        cut: How TP cuts them.
        split: What the parameter was cut into.
        scale: Factor of the orthogonal update.
        rank: Rank of the update, None where it has no bound.
    """

    name: str
    shape: tuple[int, int]
    cut: str
    split: str
    scale: float
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one exchange group tells of itself; plain values, to be gathered.

    Attributes:
        domain: ``dense`` or ``expert``.
        group: (TP, DP) sizes of the exchange group.
        routes: (optimizer, why) to (number of parameters, elements over all TP ranks).
        families: Matrix family to (number of matrices, ranks that compute one).
        reached: Parameters that each of the user's rules reaches.
        balance: A line on work and placement, empty without matrices.
        traffic: A line on bytes and buffers, empty without matrices.
        warnings: What a careful user would want to know.
        rule: A line on the update.
    """

    domain: str
    group: tuple[int, int]
    routes: dict[tuple[str, str], tuple[int, int]]
    families: dict[MatrixFamily, tuple[int, int]]
    reached: tuple[int, ...]
    balance: str
    traffic: str
    warnings: tuple[str, ...]
    rule: str


def summarize(
    settings: MatrixConfig,
    plan: Plan,
    rule: MatrixRule,
    routed: Sequence[RoutedParameter],
    *,
    domain: str,
    buffers: Sequence[Any],
) -> Summary:
    """Summary of one domain of one pipeline stage.

    Args:
        settings: The user's settings.
        plan: The domain's plan.
        rule: The update rule.
        routed: The domain's parameters.
        domain: ``dense`` or ``expert``.
        buffers: The domain's gradient buffers, for what AdamW's traffic would be.
    """
    return Summary(
        domain=domain,
        group=(plan.group.tp, plan.group.dp),
        routes=_routes(settings, routed),
        families=_families(settings, plan, rule, routed),
        reached=tuple(
            sum(fnmatchcase(r.parameter.rule_name, wish.pattern) for r in routed)
            for wish in settings.rules
        ),
        balance=_balance(settings, plan) if plan.matrices else "",
        traffic=_traffic(settings, plan, buffers) + _kept(plan, rule) if plan.matrices else "",
        warnings=tuple(plan_warnings(settings, plan, domain)),
        rule=rule.description,
    )


def startup_report(settings: MatrixConfig, summaries: Sequence[Summary]) -> str:
    """Text of the table.

    Args:
        settings: The user's settings.
        summaries: Those of all exchange groups.
    """
    lines = [f"megatron_muon {settings.optimizer}: parameters of the model"]
    lines += _table(
        ("optimizer", "parameters", "elements", "why"),
        [
            (optimizer, str(count), f"{numel:,}", why)
            for (optimizer, why), (count, numel) in sorted(
                _summed(s.routes for s in summaries).items(), key=lambda item: -item[1][1]
            )
        ],
    )
    lines += _wishes(settings, summaries)
    with_matrices = [s for s in summaries if s.families]
    if not with_matrices:
        lines.append("no parameter goes to the matrix optimizer: all are trained with Adam")
        return "\n".join(lines)
    lines += _family_table(with_matrices)
    lines.append(with_matrices[0].rule)
    lines += _each_once(
        [
            f"{s.domain}, TP {s.group[0]} x DP {s.group[1]}: {s.balance}; {s.traffic}"
            for s in with_matrices
        ]
    )
    lines += _each_once([f"warning: {text}" for s in summaries for text in s.warnings])
    return "\n".join(lines)


def _each_once(lines: Sequence[str]) -> list[str]:
    """The lines without repetition, each with the number of groups that it holds for."""
    return [
        line if count == 1 else f"{line} (the same in {count} exchange groups)"
        for line, count in Counter(lines).items()
    ]


def _summed[K](
    parts: Iterable[dict[K, tuple[int, int]]],
) -> dict[K, tuple[int, int]]:
    total: dict[K, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for part in parts:
        for key, (first, second) in part.items():
            total[key] = (total[key][0] + first, total[key][1] + second)
    return dict(total)


def _routes(
    settings: MatrixConfig, routed: Sequence[RoutedParameter]
) -> dict[tuple[str, str], tuple[int, int]]:
    return _summed(
        {
            (settings.optimizer if entry.is_matrix else "adam", entry.route.reason): (
                1,
                prod(entry.parameter.facts.shape) * len(entry.parameter.stack or (0,)),
            )
        }
        for entry in routed
    )


def _wishes(settings: MatrixConfig, summaries: Sequence[Summary]) -> list[str]:
    """What the user asked for, and how many parameters each rule reaches."""
    lines = []
    for number, rule in enumerate(settings.rules):
        wanted = [
            f"{field.name}={value}"
            for field in fields(rule)
            if field.name != "pattern" and (value := getattr(rule, field.name)) is not None
        ]
        reached = sum(summary.reached[number] for summary in summaries)
        lines.append(f"rule {rule.pattern}: {', '.join(wanted)}; reaches {reached} parameters")
    apart = [
        f"{what} {value:.15g}"
        for what, value in (
            ("learning rate", settings.lr),
            ("minimum learning rate", settings.min_lr),
            ("weight decay", settings.weight_decay),
        )
        if value is not None
    ]
    if apart:
        lines.append(f"matrices have their own {', '.join(apart)}")
    return lines


def _families(
    settings: MatrixConfig, plan: Plan, rule: MatrixRule, routed: Sequence[RoutedParameter]
) -> dict[MatrixFamily, tuple[int, int]]:
    entries = {r.parameter.name: r for r in routed}
    parameters = {p.name: p for p in plan.parameters}
    counts: Counter[MatrixFamily] = Counter()
    owners: dict[MatrixFamily, set[int]] = defaultdict(set)
    for matrix, scheme in zip(plan.matrices, plan.schemes, strict=True):
        parameter, entry = parameters[matrix.parameter], entries[matrix.parameter]
        cut = ("copy on every TP rank", "rows", "columns")[
            0 if parameter.tp_dim is None else 1 + parameter.tp_dim
        ]
        family = MatrixFamily(
            name=family_name(matrix.name),
            shape=matrix.shape,
            cut=cut if plan.group.tp > 1 else "not cut",
            split=_split_label(entry),
            scale=rule.scale(*matrix.shape),
            rank=rule.rank(*matrix.shape),
        )
        counts[family] += 1
        owners[family].update(scheme.ranks)
    return {family: (count, len(owners[family])) for family, count in counts.items()}


def _split_label(entry: RoutedParameter) -> str:
    parts = entry.parameter.packing.parts
    if not parts:
        return "-"
    names = ", ".join(part.name for part in parts)
    return {
        "none": f"kept whole ({names})",
        "parts": f"part of {names}",
        "heads": f"head of {names}",
    }[entry.split]


def _family_table(summaries: Sequence[Summary]) -> list[str]:
    total = _summed(s.families for s in summaries)
    ranks: dict[MatrixFamily, int] = defaultdict(int)
    for summary in summaries:
        for family in summary.families:
            ranks[family] += summary.group[0] * summary.group[1]
    return _table(
        ("matrices", "shape", "count", "split", "TP cuts", "scale", "computed on"),
        [
            (
                family.name,
                f"{family.shape[0]}x{family.shape[1]}"
                + ("" if family.rank is None else f", rank {family.rank}"),
                str(count),
                family.split,
                family.cut,
                f"{family.scale:.4g}",
                f"{computing} of {ranks[family]} ranks",
            )
            for family, (count, computing) in total.items()
        ],
    )


def _balance(settings: MatrixConfig, plan: Plan) -> str:
    reached, bound = plan.balance
    busiest = max(Counter(plan.owners).values())
    parts = Counter(len(scheme.ranks) for scheme in plan.schemes if len(scheme.ranks) > 1)
    split = ", ".join(f"{count} split among {ranks}" for ranks, count in sorted(parts.items()))
    return (
        f"{_count(len(plan.matrices), 'matrix', 'matrices')}{f' ({split})' if split else ''}, "
        f"{_count(plan.group.size, 'owner', 'owners')}, waves: "
        f"{len(plan.main.waves) + len(plan.split.waves)}; owner load max/mean {reached:.3f}, best "
        f"possible {bound:.3f} ({_unit(settings)}); busiest owner has "
        f"{_count(busiest, 'matrix', 'matrices')}, "
        f"{max(load.flops for load in plan.loads) / 1e9:.3g} GFLOP a step"
    )


def _unit(settings: MatrixConfig) -> str:
    if settings.cost_table is None:
        return "by operations"
    return f"by times of {settings.cost_table}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _traffic(settings: MatrixConfig, plan: Plan, buffers: Sequence[Any]) -> str:
    sent = max(load.sent_bytes for load in plan.loads)
    peak = max(load.peak_buffer_bytes for load in plan.loads)
    adam = adam_traffic_bytes(buffers, plan.group.dp)
    compared = [f"{sent / adam:.2f} x what AdamW's reduce and gather send"] if adam else []
    schemes = ""
    if any(scheme.factors for scheme in plan.schemes):
        if dmuon := max(plan.whole_matrix_bytes()):
            compared.append(f"{sent / dmuon:.2f} x what dmuon's exchange sends")
        by_factors = sum(not scheme.assembles for scheme in plan.schemes)
        schemes = f" (factors of {by_factors}, the others whole)"
    return (
        f"exchange{schemes}: at most {sent / MIB:.2f} MiB sent by a rank and step"
        + (f" ({', '.join(compared)})" if compared else "")
        + f"; memory of a step at most {peak / MIB:.2f} MiB of --matrix-exchange-buffer-mb "
        + ("auto" if (bound := settings.exchange_buffer_mb) is None else f"{bound:.15g}")
        + _waves(plan)
        + _gathered(buffers, plan.group.dp)
    )


def _kept(plan: Plan, rule: MatrixRule) -> str:
    """Memory of the momenta on the rank that holds most of them."""
    held = max(
        sum(p.ranges[dp][1] - p.ranges[dp][0] for p in plan.parameters)
        for dp in range(plan.group.dp)
    )
    size = held * rule.momentum_dtype.itemsize / MIB
    return f"; momenta take at most {size:.2f} MiB of a rank ({dtype_name(rule.momentum_dtype)})"


def _gathered(buffers: Sequence[Any], dp: int) -> str:
    """In which element types Megatron gathers the weights, and the bytes a rank sends for it.

    Of MXFP8 weights that is bf16, through the gradient buffer; of other FP8 weights the codes.
    """
    sent: Counter[str] = Counter()
    for buffer in buffers:
        dtype = buffer.param_data.dtype
        kind = "fp8" if dtype == torch.uint8 else dtype_name(dtype)
        if dtype != buffer.param_dtype:
            kind += " for mxfp8"
        sent[kind] += buffer.numel * dtype.itemsize * (dp - 1) // dp
    listed = " and ".join(f"{size / MIB:.2f} MiB {kind}" for kind, size in sent.items())
    return f"; Megatron gathers weights in {listed}" if dp > 1 else ""


def _waves(plan: Plan) -> str:
    """What the memory is made of."""
    lanes = [
        f"{_count(len(lane.waves), 'wave', 'waves')} of {kind} matrices, "
        f"{min(lane.slots, len(lane.waves))} at once"
        for lane, kind in ((plan.main, "whole"), (plan.split, "split"))
        if lane.waves
    ]
    largest = max(plan.matrices, key=lambda matrix: matrix.numel)
    size = largest.numel * plan.itemsizes["source"] / MIB
    m, n = largest.shape
    return f" ({'; '.join(lanes)}; the largest matrix, {m}x{n}, is sent in {size:.2f} MiB)"


def adam_traffic_bytes(buffers: Sequence[Any], dp: int) -> int:
    """Bytes that a rank sends in Megatron's reduce-scatter of gradients and gather of parameters.

    By the ring: (d - 1) / d of the buffer each way, in the dtypes in which they travel.
    """
    total = sum(
        buffer.numel * (buffer.grad_dtype.itemsize + buffer.param_data.dtype.itemsize)
        for buffer in buffers
    )
    return int(total * (dp - 1) // dp)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rendered = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return [rendered[0], "  " + "-" * (len(rendered[0]) - 2), *rendered[1:]]
