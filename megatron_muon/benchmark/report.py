"""Tables, JSON and plot of a benchmark run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_muon.benchmark.balance import BalanceRow
from megatron_muon.benchmark.kernels import SPECTRA, ErrorRow, KernelRow
from megatron_muon.benchmark.markdown import table
from megatron_muon.benchmark.steps import Measurement


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
    return {
        "device": model,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        **{name: _version(name) for name in ("torch", "megatron-core", "emerging-optimizers")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _spread(m: Measurement) -> str:
    return f"{m.median:.3f} ({min(m.seconds):.3f}–{max(m.seconds):.3f})"


def optimizer_table(results: Mapping[str, Measurement]) -> list[str]:
    """Time, FLOPs, bytes and memory of optimizer steps."""
    adamw, dmuon = results["adamw"], results["dmuon"]
    return table(
        [
            "optimizer",
            "step, s",
            "× dmuon",
            "GFLOP a rank",
            "MB sent a rank",
            "optimizer state, MB (× AdamW)",
            "exchange buffers, MB",
            "first update off by",
        ],
        [
            [
                m.label,
                _spread(m),
                f"{m.median / dmuon.median:.2f}",
                f"{m.gflop:.1f}",
                f"{m.sent_mb:.1f}",
                f"{m.state_mb:.1f} ({m.state_mb / adamw.state_mb:.2f})",
                f"{m.exchange_mb:.1f}",
                "–" if m.update_error is None else f"{m.update_error:.1e}",
            ]
            for m in results.values()
        ],
    )


def training_table(results: Mapping[str, Measurement]) -> list[str]:
    """Time of whole steps."""
    adamw = results["adamw"]
    return table(
        ["optimizer", "whole step, s", "× AdamW"],
        [[m.label, _spread(m), f"{m.median / adamw.median:.3f}"] for m in results.values()],
    )


def kernels_table(rows: Sequence[KernelRow]) -> list[str]:
    """Orthogonalization alone."""

    def against(row: KernelRow) -> str:
        ours = next(r for r in rows if r.batch == row.batch and r.name == "ours")
        return f"{row.milliseconds / ours.milliseconds:.2f}"

    return table(
        ["batch", "whose", "ms", "× ours", "GFLOP", "rate over a large product's", "error"],
        [
            [
                f"{row.batch[0]} of {row.batch[1]}×{row.batch[2]}",
                row.name,
                f"{row.milliseconds:.1f}",
                against(row),
                "–" if row.gflop is None else f"{row.gflop:.1f}",
                "–" if row.gemm_share is None else f"{row.gemm_share:.2f}",
                f"{row.error:.1e}",
            ]
            for row in rows
        ],
    )


def errors_table(rows: Sequence[ErrorRow]) -> list[str]:
    """Error of every form and coefficient set."""
    return table(
        [
            "coefficients",
            "form",
            *(f"polynomial, {s}" for s in SPECTRA),
            *(f"polar, {s}" for s in SPECTRA),
        ],
        [
            [
                row.coefficients,
                row.form,
                *(f"{value:.1e}" for value in row.polynomial),
                *(f"{value:.1e}" for value in row.polar),
            ]
            for row in rows
        ],
    )


def plot(layouts: Mapping[str, Mapping[str, Measurement]], path: Path) -> None:
    """Bars of the optimizer steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(layouts), figsize=(5.5 * len(layouts), 4), sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, results) in zip(axes[0], layouts.items(), strict=True):
        medians = [m.median for m in results.values()]
        spreads = [
            [m.median - min(m.seconds) for m in results.values()],
            [max(m.seconds) - m.median for m in results.values()],
        ]
        colors = ["tab:red" if key.startswith("muon_") else "tab:blue" for key in results]
        colors[0] = "tab:gray"
        labels = [m.label for m in results.values()]
        bars = axis.barh(labels, medians, xerr=spreads, color=colors, capsize=2)
        axis.bar_label(bars, [f" {median:.2f} s" for median in medians], padding=6)
        axis.margins(x=0.2)
        axis.set(title=name, xlabel="optimizer step, s (median, min–max)")
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def as_json(value: Any) -> Any:
    """Dataclasses as dictionaries, with medians."""
    if isinstance(value, Measurement):
        return asdict(value) | ({"median": value.median} if value.seconds else {})
    if isinstance(value, KernelRow | ErrorRow | BalanceRow):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(one) for one in value]
    return value
