"""Tables, JSON and plot of a benchmark run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.balance import balance_lines
from benchmarks.kernels import SPECTRA, ErrorRow, KernelRow
from benchmarks.markdown import table
from benchmarks.steps import Measurement


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine."""
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
    """Return a table of time, FLOPs, bytes and memory of optimizer steps."""
    adamw, dmuon = results["adamw"], results["dmuon"]
    return table(
        [
            "optimizer",
            "step, s",
            "× dmuon",
            "GFLOP per rank",
            "MB sent per rank",
            "optimizer state, MB (× AdamW)",
            "exchange buffers, MB",
            "error of first update",
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
    """Return a table of times of whole steps."""
    adamw = results["adamw"]
    return table(
        ["optimizer", "whole step, s", "× AdamW"],
        [[m.label, _spread(m), f"{m.median / adamw.median:.3f}"] for m in results.values()],
    )


def kernels_table(rows: Sequence[KernelRow]) -> list[str]:
    """Return a table of the orthogonalization alone."""

    def against(row: KernelRow) -> str:
        ours = next(r for r in rows if r.batch == row.batch and r.name == "ours")
        return f"{row.milliseconds / ours.milliseconds:.2f}"

    return table(
        [
            "batch",
            "implementation",
            "ms",
            "× ours",
            "GFLOP",
            "rate relative to a large product",
            "error",
        ],
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
    """Return a table of errors of every form and coefficient set."""
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
    """Plot the optimizer steps as bars."""
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


def page(found: Mapping[str, Any], device: str, ranks: int, seconds: float) -> str:
    """Return all measurements in Markdown."""
    about, steps, training = found["about"], found["sizes"]["steps"], found["sizes"]["training"]
    where = "one thread per rank, gloo" if device == "cpu" else "NCCL"
    lines = [
        (
            f"{about['device']}, {about['cores']} cores (load {about['load_at_start']} at the "
            f"start), {where}; torch {about['torch']}, megatron-core {about['megatron-core']}, "
            f"emerging-optimizers {about['emerging-optimizers']}. Everything in fp32; "
            f"{seconds:.0f} s in total."
        ),
        "",
        (
            f"**Optimizer step** on {ranks} ranks: {steps['layers']} Llama-shaped layers, h = "
            f"{steps['hidden']}, FFN {steps['ffn']} (gated), {steps['query_groups']} of "
            f"{steps['heads']} heads for k and v; median (min–max), the slowest rank of each step."
        ),
    ]
    for name, results in found["steps"].items():
        owners = found["owners"][name]
        lines += [
            *("", f"*{name}*", "", *optimizer_table(results), ""),
            (
                f"Owners of dmuon's matrices, run sequentially: "
                f"{', '.join(f'{ms:.0f}' for ms in owners.milliseconds)} ms, max/mean "
                f"{owners.measured:.3f}; planned by FLOPs {owners.planned:.3f}."
            ),
        ]
    lines += [
        "",
        (
            f"**Whole training step**, TP2·DP2, {training['layers']} layers, h = "
            f"{training['hidden']}, {found['tokens']:,} tokens per step:"
        ),
        "",
        *training_table(found["training"]),
        "",
        "**Orthogonalization alone**, one process, five quintic steps:",
        "",
        *kernels_table(found["kernels"]),
        "",
        (
            "**Error of every form**, 192×512 matrices of three spectra, relative (Frobenius), "
            "against the polynomial on the singular values and the polar factor, in float64:"
        ),
        "",
        *errors_table(found["errors"]),
        "",
        (
            "**Balance of owners** (modelled, five quintic steps in bf16 on a GPU without kernels; "
            "nothing of these sizes was run):"
        ),
        "",
        *balance_lines(found["balance"]),
        "",
    ]
    return "\n".join(lines)


def write(folder: Path, text: str, found: Mapping[str, Any]) -> None:
    """Write benchmark.md, benchmark.json and benchmark.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    (folder / "benchmark.json").write_text(
        json.dumps(found, default=_fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    plot(found["steps"], folder / "benchmark.png")


def _fields(row: Any) -> dict[str, Any]:
    return asdict(row) | ({"median": row.median} if isinstance(row, Measurement) else {})
