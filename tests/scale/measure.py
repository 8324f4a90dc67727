"""Counts one step of cases, each in its own process with Megatron imported.

    python -m tests.scale.measure 'llama3-8b on 64: dmuon' …

prints a line of JSON for each case, in their order: its figures, or a traceback. It is a process
apart from the tests' own, in which Megatron runs on CPU stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.scale.models import CASES, Case

PROCESSES = 2
SECONDS = 240
"""That the figures of one case may take."""

_ROOT = Path(__file__).resolve().parents[2]


def measure(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Figures of each case, in their order, from a process of their own."""
    command = [sys.executable, "-m", "tests.scale.measure", *names]
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    # A session of its own: its end takes the forks with it.
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for _ in names:
                line = process.stdout.readline()
                yield json.loads(line or '{"error": "the measuring process has ended"}')
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _print_all(names: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    _import_megatron()
    # A process is one rank of one world for its whole life.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(PROCESSES, initializer=_be_quiet, maxtasksperchild=1) as pool:
        waiting = [pool.apply_async(_count, (CASES[name],)) for name in names]
        for result in waiting:
            try:
                found = result.get(timeout=SECONDS)
            except Exception:
                found = {"error": traceback.format_exc()}
            print(json.dumps(found), flush=True)


def _import_megatron() -> None:
    from megatron_muon.dry_run import fake_cuda

    # First: Megatron asks for a device while it is imported.
    fake_cuda.install()
    for name in (
        "megatron.training.training",
        "megatron_muon.dry_run.step",
        "megatron_muon.integration.builder",
        "torch._dynamo",
    ):
        importlib.import_module(name)


def _be_quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _count(case: Case) -> dict[str, Any]:
    """Figures of every exchange domain of the stage."""
    import torch

    from megatron_muon.dry_run.script import build
    from megatron_muon.linalg import products
    from megatron_muon.linalg.kernels import SymmetricKernel

    # Neither that the package is installed nor its check is part of a step.
    kernel = SymmetricKernel(name="one launch", function=_symmetric_product)
    products.symmetric_kernel = lambda device, dtype: kernel if case.has_kernel else None
    built = build(case.command, world_size=case.layout.world_size, rank=case.rank)
    with built.mode:
        return {
            part.setup.domain.name: _domain(part.plan, part.rule, torch.device("cuda"))
            for part in built.optimizer.chained_optimizers
            if getattr(part, "plan", None) is not None
        }


def _symmetric_product(a: Any, c: Any, *, alpha: float, beta: float) -> Any:
    """A Triton kernel to the counters: one launch and a new matrix."""
    return a @ a.mT


def _domain(plan: Any, rule: Any, device: Any) -> dict[str, Any]:
    ranks, loads = range(plan.group.size), plan.loads
    by_memory = max(ranks, key=lambda rank: loads[rank].peak_buffer_bytes)
    by_flops = max(ranks, key=lambda rank: loads[rank].flops)
    return {
        "ranks": plan.group.size,
        "matrices": len(plan.matrices),
        "split_matrices": sum(len(scheme.ranks) > 1 for scheme in plan.schemes),
        "waves": len(plan.main.waves) + len(plan.split.waves),
        "all_flops": sum(load.flops for load in loads),
        "all_sent_bytes": sum(load.sent_bytes for load in loads),
        "all_whole_bytes": sum(plan.whole_matrix_bytes()),
        "most_sent_bytes": max(load.sent_bytes for load in loads),
        "most_memory": _rank(plan, rule, by_memory, device),
        "most_flops": _rank(plan, rule, by_flops, device),
    }


def _rank(plan: Any, rule: Any, rank: int, device: Any) -> dict[str, int]:
    from megatron_muon.dry_run.step import count_step

    counted, planned = count_step(plan, rule, rank, device), plan.loads[rank]
    return {
        "rank": rank,
        "transient_bytes": counted.transient_bytes,
        "planned_bytes": planned.peak_buffer_bytes,
        "flops": counted.flops,
        "planned_flops": planned.flops,
        "sent_bytes": counted.sent_bytes,
        "planned_sent_bytes": planned.sent_bytes,
        "received_bytes": counted.received_bytes,
        "planned_received_bytes": planned.received_bytes,
        "launches": counted.launches,
        "slow_tensors": sum(counted.slow.values()),
        "host_reads": counted.host_reads,
        "messages": counted.messages,
    }


if __name__ == "__main__":
    _print_all(sys.argv[1:])
