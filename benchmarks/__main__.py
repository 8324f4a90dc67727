"""Compares AdamW, megatron-core's muon, dmuon and Orth-Dion: time, bytes, FLOPs, memory, error.

    make benchmark    (or: .venv/bin/python -m benchmarks [--quick] [--out FOLDER] [--device cuda])

Real megatron-core on four ranks of this machine, at TP4 and at TP2 x DP2, fp32, one thread per
rank. Within a layout all optimizers have a copy of the same model in the same processes, receive
the same gradients before every step, and alternate in every round. Writes benchmark.md,
benchmark.json and benchmark.png.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Before torch starts its thread pools, which do not survive a fork and slow down ranks per core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch

from megatron_muon import cpu
from megatron_muon.benchmark import report_progress
from tests.ranks import run_ranks

RANKS = 4
LAYOUTS = {"TP4": 4, "TP2·DP2": 2}
LIMIT_S = 900.0


def main() -> int:
    """Measure, print and write the results."""
    found_devices = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small model, two rounds: 2 minutes")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if found_devices >= RANKS else "cpu",
        help="cuda requires four devices",
    )
    options = parser.parse_args()
    if options.device == "cuda" and found_devices < RANKS:
        parser.error(f"--device cuda requires {RANKS} devices, found {found_devices}")
    # Before the first import of Megatron, which the forked ranks inherit.
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.device == "cpu":
        cpu.enable()
    from benchmarks import report

    started = time.monotonic()
    found = _measure(options.device, quick=options.quick)
    text = report.page(found, options.device, RANKS, time.monotonic() - started)
    report.write(options.out, text, found)
    print(text)
    print(f"written to {options.out}/benchmark.{{md,json,png}}")
    return 0


def _measure(kind: str, *, quick: bool) -> dict[str, Any]:
    from benchmarks.balance import balance_table
    from benchmarks.models import ModelSize
    from benchmarks.steps import measure_optimizer_steps, measure_training_steps

    def on_ranks(number: int, body: Any, *args: Any) -> Any:
        return run_ranks(number, body, kind, *args, timeout=LIMIT_S, init_process_group=False)[0]

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
    layers = 2 if quick else 4
    narrow = replace(llama, layers=layers, hidden=256, ffn=1024, heads=8, sequence=512)
    micro_batches = 4 if quick else 32
    # In a fork as well: a process that has used CUDA cannot fork ranks that use it.
    found: dict[str, Any] = on_ranks(1, _measure_alone, rounds)
    found["balance"] = balance_table((8, 32) if quick else (8, 32, 128))
    found["steps"], found["owners"] = {}, {}
    for name, tp in LAYOUTS.items():
        report_progress(f"optimizer steps at {name}")
        found["steps"][name], found["owners"][name] = on_ranks(
            RANKS, measure_optimizer_steps, tp, llama, rounds
        )
    report_progress("whole training steps at TP2·DP2")
    training_rounds = 2 if quick else 5
    found["training"] = on_ranks(
        RANKS, measure_training_steps, 2, narrow, training_rounds, micro_batches
    )
    found["sizes"] = {"steps": asdict(llama), "training": asdict(narrow)}
    found["tokens"] = 2 * micro_batches * narrow.sequence
    return found


def _measure_alone(rank: int, kind: str, rounds: int) -> dict[str, Any]:
    from benchmarks.kernels import error_table, kernel_table
    from benchmarks.report import machine

    device = torch.device(kind)
    found: dict[str, Any] = {"about": machine(device)}
    report_progress("orthogonalization alone")
    found["kernels"] = kernel_table(device, rounds)
    report_progress("errors of every form and coefficient set")
    found["errors"] = error_table()
    return found


if __name__ == "__main__":
    sys.exit(main())
