"""Measures orthogonalizations on this device for the table of ``--dmuon-cost-table``.

    python -m megatron_muon.benchmark --cost-table FILE [--cost-shapes 4096x14336,1024x4096]

Megatron is not required. To compare optimizers, type ``make benchmark`` in a checkout.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_muon.linalg import Workspace, coefficient_schedule, orthogonalize_
from megatron_muon.placement import CostTable, MeasuredCost, write_cost_table

BATCHES = (1, 4, 16)
SIDES = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096, 8192)}
MAX_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}


def default_shapes(device: torch.device) -> tuple[tuple[int, int], ...]:
    """Return shapes with aspect ratios 1, 2 and 4."""
    return tuple((side, side * ratio) for side in SIDES[device.type] for ratio in (1, 2, 4))


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``4096x14336,1024x4096``; raise ArgumentTypeError for any other form."""
    if wrong := [s for s in text.split(",") if not re.fullmatch(r"\s*[1-9]\d*x[1-9]\d*\s*", s)]:
        raise argparse.ArgumentTypeError(
            f"'{wrong[0]}' is not a shape: type for example 4096x14336,1024x4096"
        )
    return tuple((int(m), int(n)) for m, n in re.findall(r"(\d+)x(\d+)", text))


def clock(device: torch.device) -> float:
    """Return the time in seconds after all work of the device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_ms(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time in milliseconds, after a warm-up call."""
    work()
    seconds = []
    for _ in range(rounds):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    return 1e3 * statistics.median(seconds)


def report_progress(text: str) -> None:
    """Print progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure_cost(x: torch.Tensor, steps: int, rounds: int) -> MeasuredCost:
    """Return the median time per matrix of a batch (B, short, long), in its own dtype."""
    batch, short, long = x.shape
    # The time does not depend on the coefficients.
    schedule = (coefficient_schedule("quintic", 5) * steps)[:steps]
    work, space = torch.empty_like(x), Workspace()

    def run() -> None:
        orthogonalize_(work.copy_(x), schedule, compute_dtype=x.dtype, workspace=space)

    nanoseconds = max(1, round(median_ms(run, x.device, rounds) * 1e6 / batch))
    report_progress(f"{short}x{long}, batch of {batch}: {nanoseconds / 1e6:.3f} ms each")
    return MeasuredCost(short=short, long=long, batch=batch, nanoseconds=nanoseconds)


def main() -> int:
    """Measure every shape in every feasible batch size, and write the table."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(prog="python -m megatron_muon.benchmark", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add, shapes = parser.add_argument, default_shapes(device)
    add("--cost-table", type=Path, metavar="FILE", help="table to write")
    add("--cost-shapes", type=parse_shapes, metavar="MxN,…", default=shapes, help="default: a grid")
    add(
        "--cost-dtype",
        choices=("bfloat16", "float16", "float32", "float64"),
        default="bfloat16" if device.type == "cuda" else "float32",
        help="dtype of the iteration; default here: %(default)s",
    )
    add("--cost-steps", type=int, default=5, help="Newton-Schulz steps, default: 5")
    add("--quick", action="store_true", help="three rounds instead of seven")
    options = parser.parse_args()
    path, steps, rounds = options.cost_table, options.cost_steps, 3 if options.quick else 7
    if path is None:
        parser.error("type --cost-table FILE; to compare optimizers: make benchmark in a checkout")
    if steps < 1:
        parser.error(f"--cost-steps is {steps}; it must be >= 1")
    if not path.parent.is_dir() or path.is_dir():
        parser.error(f"--cost-table {path} is not a file in an existing folder")
    measured = []
    for short, long in sorted({(min(shape), max(shape)) for shape in options.cost_shapes}):
        for batch in BATCHES:
            if batch == 1 or batch * short * long <= MAX_ELEMENTS[device.type]:
                x = torch.randn(batch, short, long, device=device)
                measured.append(
                    measure_cost(x.to(getattr(torch, options.cost_dtype)), steps, rounds)
                )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    table = CostTable(device=name, dtype=options.cost_dtype, steps=steps, measured=tuple(measured))
    write_cost_table(table, path)
    print(f"written to {path}; train with --dmuon-cost-table {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
