"""AdamW, megatron-core's muon, dmuon and Orth-Dion side by side: time, bytes, FLOPs, memory, error.

    python -m megatron_muon.benchmark [--quick] [--out FOLDER] [--device cpu|cuda]
    python -m megatron_muon.benchmark --cost-table FILE [--cost-shapes 4096x14336,1024x4096]

Real megatron-core on four ranks of this machine, as TP4 and as TP2 x DP2, fp32, one thread a rank.
Within a layout every optimizer has a copy of the same model in the same processes, gets the same
gradients before every step, and takes its turn in every round. Writes benchmark.md, benchmark.json
and benchmark.png. With --cost-table it measures the orthogonalization alone, on one device, and
writes the table for the flag --dmuon-cost-table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before torch starts its thread pools: they neither survive a fork nor help several ranks a core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch

RANKS = 4
LAYOUTS = {"TP4": 4, "TP2·DP2": 2}
TRAINING_KEYS = ("adamw", "dmuon", "orth_dion_4")
LIMIT_S = 900.0


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small model, two rounds: 2 minutes")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.device_count() >= RANKS else "cpu",
        help="cuda needs four devices",
    )
    parser.add_argument("--cost-table", type=Path, metavar="FILE", help="table to write")
    parser.add_argument(
        "--cost-shapes", metavar="MxN,…", help="what to measure for it; a grid by default"
    )
    parser.add_argument(
        "--cost-dtype",
        choices=("bfloat16", "float16", "float32", "float64"),
        help="of the iteration: bfloat16 on cuda, else float32, by default",
    )
    parser.add_argument("--cost-steps", type=int, default=5, help="Newton-Schulz steps")
    options = parser.parse_args()
    if options.cost_table is not None:
        return _write_costs(parser, options)
    if options.cost_shapes is not None:
        parser.error("--cost-shapes has no effect without --cost-table FILE")
    if options.device == "cuda" and torch.cuda.device_count() < RANKS:
        parser.error(f"--device cuda needs {RANKS} devices, found {torch.cuda.device_count()}")
    _prepare(options.device)
    started = time.monotonic()
    found = _measure(options.device, quick=options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    text = _markdown(found, options.device, time.monotonic() - started)
    _write(options.out, text, found)
    print(text)
    print(f"written to {options.out}/benchmark.{{md,json,png}}")
    return 0


def _write_costs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from megatron_muon.benchmark.costs import default_shapes, measure_costs, parse_shapes
    from megatron_muon.placement import write_cost_table

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.cost_steps < 1:
        parser.error(f"--cost-steps is {options.cost_steps}; it must be >= 1")
    if not options.cost_table.parent.is_dir() or options.cost_table.is_dir():
        parser.error(f"--cost-table {options.cost_table} is no file in a folder that exists")
    try:
        shapes = None if options.cost_shapes is None else parse_shapes(options.cost_shapes)
    except ValueError as error:
        parser.error(f"--cost-shapes: {error}")
    dtype = options.cost_dtype or ("bfloat16" if device.type == "cuda" else "float32")
    table = measure_costs(
        shapes or default_shapes(device),
        dtype=getattr(torch, dtype),
        steps=options.cost_steps,
        device=device,
        rounds=3 if options.quick else 7,
        say=_say,
    )
    write_cost_table(table, options.cost_table)
    print(f"written to {options.cost_table}; train with --dmuon-cost-table {options.cost_table}")
    return 0


def _prepare(device: str) -> None:
    """What has to come before anything imports Megatron, which the ranks then have as forks."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if device == "cpu":
        from megatron_muon import cpu

        cpu.enable()


def _measure(device: str, *, quick: bool) -> dict[str, Any]:
    from megatron_muon.benchmark.balance import balance_table
    from megatron_muon.benchmark.kernels import error_table, kernel_table
    from megatron_muon.benchmark.ranks import run_ranks
    from megatron_muon.benchmark.report import machine
    from megatron_muon.benchmark.steps import measure_optimizer_steps, measure_training_steps
    from megatron_muon.integration.contenders import ModelSize

    rounds = 2 if quick else 7
    llama = ModelSize(
        layers=1 if quick else 4,
        hidden=512,
        ffn=2048,
        heads=16,
        query_groups=4,
        vocab=512,
        sequence=128,
    )
    narrow = ModelSize(
        layers=2 if quick else 4,
        hidden=256,
        ffn=1024,
        heads=8,
        query_groups=4,
        vocab=512,
        sequence=512,
    )
    micro_batches = 4 if quick else 32
    found: dict[str, Any] = {"about": machine(torch.device(device))}
    _say("orthogonalization alone")
    found["kernels"] = kernel_table(torch.device(device), rounds)
    _say("errors of every form and coefficient set")
    found["errors"] = error_table()
    found["balance"] = balance_table((8, 32) if quick else (8, 32, 128))
    found["steps"] = {}
    for name, tp in LAYOUTS.items():
        _say(f"optimizer steps at {name}")
        found["steps"][name] = run_ranks(
            RANKS, measure_optimizer_steps, tp, llama, rounds, device=device, limit_s=LIMIT_S
        )
    _say("whole training steps at TP2·DP2")
    found["training"] = run_ranks(
        RANKS,
        measure_training_steps,
        2,
        narrow,
        2 if quick else 5,
        micro_batches,
        TRAINING_KEYS,
        device=device,
        limit_s=LIMIT_S,
    )
    found["sizes"] = {"steps": asdict(llama), "training": asdict(narrow)}
    found["tokens"] = 2 * micro_batches * narrow.sequence
    return found


def _markdown(found: dict[str, Any], device: str, seconds: float) -> str:
    from megatron_muon.benchmark import report
    from megatron_muon.benchmark.balance import balance_lines

    about, steps, training = found["about"], found["sizes"]["steps"], found["sizes"]["training"]
    where = "one thread a rank, gloo" if device == "cpu" else "NCCL"
    lines = [
        (
            f"{about['device']}, {about['cores']} cores (load {about['load_at_start']} at the "
            f"start), {where}; torch {about['torch']}, megatron-core {about['megatron-core']}, "
            f"emerging-optimizers {about['emerging-optimizers']}. Everything in fp32; "
            f"{seconds:.0f} s in all."
        ),
        "",
        (
            f"**Optimizer step** on {RANKS} ranks: {steps['layers']} Llama-shaped layers, h = "
            f"{steps['hidden']}, FFN {steps['ffn']} (gated), {steps['query_groups']} of "
            f"{steps['heads']} heads for k and v; median (min–max), the slowest rank of each step."
        ),
    ]
    for name, results in found["steps"].items():
        lines += ["", f"*{name}*", "", *report.optimizer_table(results)]
    lines += [
        "",
        (
            f"**Whole training step**, TP2·DP2, {training['layers']} layers, h = "
            f"{training['hidden']}, {found['tokens']:,} tokens a step:"
        ),
        "",
        *report.training_table(found["training"]),
        "",
        "**Orthogonalization alone**, one process, five quintic steps:",
        "",
        *report.kernels_table(found["kernels"]),
        "",
        (
            "**Error of every form**, 192×512 matrices of three spectra, relative (Frobenius), "
            "against the polynomial on the singular values and the polar factor, in float64:"
        ),
        "",
        *report.errors_table(found["errors"]),
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


def _write(folder: Path, text: str, found: dict[str, Any]) -> None:
    from megatron_muon.benchmark import report

    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    (folder / "benchmark.json").write_text(
        json.dumps(report.as_json(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    report.plot(found["steps"], folder / "benchmark.png")


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
