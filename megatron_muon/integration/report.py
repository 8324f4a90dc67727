"""The table printed once at start: what goes where, what it costs, what is worth knowing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.matrices import LogicalMatrix, Route, Rule
from megatron_muon.placement import Plan

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class RoutedParameter:
    """A parameter and all that was decided of it.

    Attributes:
        parameter: The parameter.
        route: The optimizer that it goes to, and why.
        rule: The user's wishes for it.
        split: True when a packed parameter is split into its parts.
    """

    parameter: ModelParameter
    route: Route
    rule: Rule
    split: bool


def startup_report(
    settings: MatrixConfig, routed: Sequence[RoutedParameter], optimizer: Any
) -> str:
    """Text of the table.

    Args:
        settings: The user's settings.
        routed: Every trainable parameter of this pipeline stage.
        optimizer: The built ``MatrixChainedOptimizer``.
    """
    lines = [f"megatron_muon {settings.optimizer}: parameters of this pipeline stage (TP shards)"]
    lines += _table(
        ("optimizer", "parameters", "elements", "why"),
        [
            (where, str(len(entries)), f"{_numel(entries):,}", why)
            for (where, why), entries in sorted(
                _grouped(routed, settings).items(), key=lambda item: -_numel(item[1])
            )
        ],
    )
    lines += _wishes(settings, routed)
    for child in optimizer.chained_optimizers:
        plan: Plan | None = child.plan
        if plan is None:
            continue
        if not plan.matrices:
            lines.append("no parameter goes to the matrix optimizer: all are trained with Adam")
            continue
        lines += _matrix_families(plan)
        lines.append(
            f"update: {child.rule.scale_mode} scale x {child.rule.extra_scale_factor:g}, "
            f"{len(child.rule.schedule)} Newton-Schulz steps ({settings.coefficient_type}), "
            f"computed in {_dtype_name(child.rule.compute_dtype)}, exchanged in fp32; momentum "
            f"{child.rule.momentum:g}{' (Nesterov)' if child.rule.nesterov else ''}"
        )
        lines += _balance(plan, settings, child)
    return "\n".join(lines)


def _wishes(settings: MatrixConfig, routed: Sequence[RoutedParameter]) -> list[str]:
    """What the user asked for, and how many parameters each rule reaches."""
    lines = []
    for rule in settings.rules:
        wanted = [
            f"{field.name}={value}"
            for field in fields(rule)
            if field.name != "pattern" and (value := getattr(rule, field.name)) is not None
        ]
        reached = sum(fnmatchcase(r.parameter.rule_name, rule.pattern) for r in routed)
        lines.append(f"rule {rule.pattern}: {', '.join(wanted)}; reaches {reached} parameters here")
    apart = [
        f"{what} {value:g}"
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


def _grouped(
    routed: Sequence[RoutedParameter], settings: MatrixConfig
) -> dict[tuple[str, str], list[RoutedParameter]]:
    grouped: dict[tuple[str, str], list[RoutedParameter]] = defaultdict(list)
    for entry in routed:
        where = settings.optimizer if entry.route.optimizer == "matrix" else "adam"
        grouped[where, entry.route.reason].append(entry)
    return grouped


def _numel(entries: Iterable[RoutedParameter]) -> int:
    return sum(entry.parameter.tensor.numel() for entry in entries)


def _family(name: str) -> str:
    """Name with layer numbers replaced, so that equal matrices of all layers are one row."""
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def _matrix_families(plan: Plan) -> list[str]:
    families: dict[tuple[str, tuple[int, int], str], list[LogicalMatrix]] = defaultdict(list)
    cuts = {
        p.name: "copy on every TP rank" if p.replicated else ("rows", "columns")[p.tp_dim or 0]
        for p in plan.parameters
    }
    for matrix in plan.matrices:
        cut = cuts[matrix.parameter] if plan.group.tp > 1 else "not cut"
        families[_family(matrix.name), matrix.shape, cut].append(matrix)
    return _table(
        ("matrices", "shape", "count", "TP cuts"),
        [
            (name, f"{shape[0]}x{shape[1]}", str(len(members)), cut)
            for (name, shape, cut), members in families.items()
        ],
    )


def _balance(plan: Plan, settings: MatrixConfig, child: Any) -> list[str]:
    reached, bound = plan.balance
    loads = plan.loads
    idle = sum(load.matrices == 0 for load in loads)
    sent = max(load.sent_bytes for load in loads)
    peak = max(load.peak_buffer_bytes for load in loads)
    adam = adam_traffic_bytes(child)
    owners = Counter(plan.owners)
    lines = [
        (
            f"{len(plan.matrices)} matrices, {plan.group.size} owners (TP {plan.group.tp} x DP "
            f"{plan.group.dp}), waves: {len(plan.waves)}; owner load max/mean {reached:.3f}, best "
            f"possible {bound:.3f}; busiest owner has {max(owners.values())} matrices, "
            f"{max(load.flops for load in loads) / 1e9:.3g} GFLOP a step"
        ),
        (
            f"exchange: at most {sent / MIB:.2f} MiB sent by a rank and step"
            + (f" ({sent / adam:.2f} x what AdamW's reduce and gather send)" if adam else "")
            + f"; buffers at most {peak / MIB:.2f} MiB of "
            f"--dmuon-exchange-buffer-mb {settings.exchange_buffer_mb:g}"
        ),
    ]
    if idle:
        lines.append(
            f"warning: {idle} of {plan.group.size} owners have no matrix, there are fewer matrices "
            "than ranks"
        )
    if bound > 1.05:
        largest = max(zip(plan.costs, plan.matrices, strict=True), key=lambda pair: pair[0])[1]
        lines.append(
            f"warning: {largest.name} ({largest.shape[0]}x{largest.shape[1]}) alone takes "
            f"{bound:.2f} x the mean load of an owner and dominates the balance"
        )
    return lines


def adam_traffic_bytes(child: Any) -> int:
    """Bytes that a rank sends in Megatron's reduce-scatter of gradients and gather of parameters.

    By the ring: (d - 1) / d of the buffer each way, in the dtypes of the buffers.
    """
    d = child.data_parallel_group.size()
    total = sum(
        buffer.numel * (buffer.grad_dtype.itemsize + buffer.param_dtype.itemsize)
        for buffer in child.buffers
    )
    return int(total * (d - 1) // d)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rendered = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return [rendered[0], "  " + "-" * (len(rendered[0]) - 2), *rendered[1:]]
