"""What a careful user would want to know of a plan; printed below the table at start."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_muon.config import MatrixConfig
from megatron_muon.placement import Plan, load_cost_table


def family_name(name: str) -> str:
    """Name with the numbers of layers, experts and heads replaced."""
    starred = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    starred = re.sub(r"(?<=\.weight)\d+(?=$|\[)", "*", starred)
    parameter, bracket, part = starred.partition("[")
    return parameter + bracket + re.sub(r"\d+", "*", part)


def plan_warnings(settings: MatrixConfig, plan: Plan, domain: str) -> list[str]:
    """Sentences on idle owners, a matrix that dominates, shapes not measured, and thin parts.

    Args:
        settings: The user's settings.
        plan: The plan of a domain.
        domain: ``dense`` or ``expert``.
    """
    if not plan.matrices:
        if domain != "dense":
            return []
        return [f"a pipeline stage has no matrix: its {plan.group.size} ranks own none"]
    found = []
    idle = sum(load.cost == 0 for load in plan.loads)
    if idle:
        found.append(
            f"{idle} of {plan.group.size} {domain} owners have no matrix, there are fewer matrices "
            "than ranks"
        )
    found += _dominating(settings, plan)
    found += _not_measured(settings, plan)
    thin = sorted(
        {
            f"{family_name(m.name)} ({m.shape[0]}x{m.shape[1]})"
            for m in plan.matrices
            if min(m.shape) < settings.min_dim
        }
    )
    if thin:
        found.append(
            f"a side shorter than --matrix-min-dim {settings.min_dim}, and orthogonalized all the "
            f"same as part of a wider parameter or by a rule: {', '.join(thin)}"
        )
    return found


def _dominating(settings: MatrixConfig, plan: Plan) -> list[str]:
    """A matrix that takes longer alone than an owner has to do on average."""
    whole = (i for i, scheme in enumerate(plan.schemes) if len(scheme.ranks) == 1)
    index = max(whole, key=lambda i: plan.costs[i], default=None)
    mean = sum(load.cost for load in plan.loads) / plan.group.size
    if index is None or plan.costs[index] <= 1.05 * mean:
        return []
    largest = plan.matrices[index]
    advice = (
        "; --dmuon-split-ranks auto would split it among owners where that is faster"
        if settings.optimizer == "dmuon"
        and settings.split_ranks == 1
        and plan.flops[index] >= settings.split_min_gflop * 1e9
        else ""
    )
    return [
        (
            f"{largest.name} ({largest.shape[0]}x{largest.shape[1]}) alone takes "
            f"{plan.costs[index] / mean:.2f} x the mean load of an owner and dominates the "
            f"balance{advice}"
        )
    ]


def _not_measured(settings: MatrixConfig, plan: Plan) -> list[str]:
    """Shapes whose time is only estimated, and how to measure them."""
    if settings.cost_table is None:
        return []
    table = load_cost_table(settings.cost_table)
    shapes = [matrix.shape for matrix in plan.matrices]
    lacking = table.lacks(shapes)
    if not lacking:
        return []
    # The benchmark writes the table anew: what it has is to be measured again.
    wanted = sorted({*lacking, *((entry.short, entry.long) for entry in table.measured)})
    return [
        (
            f"--dmuon-cost-table {settings.cost_table} lacks {_listed(lacking)}, taken at the rate "
            "of what is nearest in operations; measure with python -m megatron_muon.benchmark "
            f"--cost-table {settings.cost_table} --cost-shapes "
            f"{_listed(wanted, ',')} --cost-dtype {table.dtype} "
            f"--cost-steps {table.steps}"
        )
    ]


def _listed(shapes: Sequence[tuple[int, int]], comma: str = ", ") -> str:
    return comma.join(f"{m}x{n}" for m, n in shapes)
