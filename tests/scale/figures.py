"""The golden figures: ``figures.json`` beside this file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("figures.json")
BUSY = ("most_memory", "most_flops")
"""Ranks of a domain of which a step was counted."""

Figures = Mapping[str, Mapping[str, Any]]
"""Case → exchange domain → its figures."""


def read_figures() -> dict[str, Any]:
    """All figures by the name of their case; none where there is no file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write_figures(figures: Mapping[str, Any]) -> None:
    """Replace the file."""
    FILE.write_text(json.dumps(figures, indent=1) + "\n")


def largest(domain: Mapping[str, Any], what: str) -> int:
    """The larger figure of the two ranks that were counted."""
    return max(domain[rank][what] for rank in BUSY)


def mean_flops(domain: Mapping[str, Any]) -> float:
    """FLOPs of a rank if all had the same, as planned."""
    return domain["all_flops"] / domain["ranks"]


def differences(golden: Any, found: Any, where: str = "") -> list[str]:
    """Return differences, one line per figure."""
    if not (isinstance(golden, dict) and isinstance(found, dict)):
        return [] if golden == found else [f"{where.strip('/')}: {golden} was, {found} is"]
    return [
        line
        for key in golden | found
        for line in differences(golden.get(key), found.get(key), f"{where}/{key}")
    ]


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "MiB": lambda d: f"{largest(d, 'transient_bytes') / 2**20:,.0f}",
    "plan / tracked": lambda d: " ".join(
        f"{d[rank]['planned_bytes'] / d[rank]['transient_bytes']:.2f}" for rank in BUSY
    ),
    "TFLOP max / mean": lambda d: (
        f"{d['most_flops']['planned_flops'] / 1e12:.2f} / {mean_flops(d) / 1e12:.2f}"
    ),
    "launches": lambda d: f"{largest(d, 'launches'):,}",
    "reads": lambda d: str(largest(d, "host_reads")),
    "messages": lambda d: str(largest(d, "messages")),
    "GiB sent": lambda d: f"{d['all_sent_bytes'] / 2**30:.2f}",
    "most MiB sent": lambda d: f"{d['most_sent_bytes'] / 2**20:.0f}",
    "split": lambda d: f"{d['split_matrices']} of {d['matrices']}",
}


def table(figures: Figures) -> str:
    """All figures that a bar is about, as a table in Markdown."""
    lines = [f"| case | domain | {' | '.join(_COLUMNS)} |", "|" + "---|" * (len(_COLUMNS) + 2)]
    lines += [
        f"| {name} | {domain} | {' | '.join(column(d) for column in _COLUMNS.values())} |"
        for name, domains in figures.items()
        for domain, d in domains.items()
    ]
    return "\n".join(lines)
