"""The table of measured times that ``--dmuon-cost-table`` reads; one process, one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from megatron_muon.benchmark.timing import median_ms
from megatron_muon.linalg import Workspace, coefficient_schedule, orthogonalize_
from megatron_muon.placement import CostTable, MeasuredCost

BATCHES = (1, 4, 16)
SIDES = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096, 8192)}
MOST_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}


def default_shapes(device: torch.device) -> tuple[tuple[int, int], ...]:
    """Squares, and matrices twice and four times as long as wide."""
    return tuple((side, side * ratio) for side in SIDES[device.type] for ratio in (1, 2, 4))


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """``4096x14336,1024x4096`` as shapes.

    Raises:
        ValueError: Another form; says which.
    """
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", item)
        if match is None:
            raise ValueError(f"'{item}' is no shape: type for example 4096x14336,1024x4096")
        found.append((int(match[1]), int(match[2])))
    return tuple(found)


def measure_costs(
    shapes: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    steps: int,
    device: torch.device,
    rounds: int,
    say: Callable[[str], None],
) -> CostTable:
    """Medians of every shape and batch that fits.

    Args:
        shapes: (m, n); a shape and its transpose are measured once.
        dtype: Element type of the iteration.
        steps: Newton-Schulz steps, of the quintic set.
        device: Where.
        rounds: Times that each is measured.
        say: Tells of the progress.
    """
    # The numbers do not change the time.
    schedule = coefficient_schedule("quintic", 5)
    schedule = tuple(schedule[step % len(schedule)] for step in range(steps))
    measured = []
    for short, long in sorted({(min(shape), max(shape)) for shape in shapes}):
        for batch in BATCHES:
            if batch > 1 and batch * short * long > MOST_ELEMENTS[device.type]:
                continue
            x = torch.randn(batch, short, long, device=device).to(dtype)
            work, space = torch.empty_like(x), Workspace()

            def run(
                x: torch.Tensor = x, work: torch.Tensor = work, space: Workspace = space
            ) -> None:
                orthogonalize_(work.copy_(x), schedule, compute_dtype=dtype, workspace=space)

            nanoseconds = max(1, round(median_ms(run, device, rounds) * 1e6 / batch))
            measured.append(
                MeasuredCost(short=short, long=long, batch=batch, nanoseconds=nanoseconds)
            )
            say(f"{short}x{long}, {batch} at once: {nanoseconds / 1e6:.3f} ms each")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return CostTable(
        device=name,
        dtype=str(dtype).removeprefix("torch."),
        steps=steps,
        measured=tuple(measured),
    )
