"""Ranks of one machine for a measurement: forks of a parent that has imported Megatron."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_muon.exchange.measuring import join_world


def run_ranks(size: int, body: Callable[..., Any], *args: Any, device: str, limit_s: float) -> Any:
    """Call ``body(device, *args)`` on every rank; what rank 0 returned.

    Args:
        size: Number of ranks.
        body: Called on every rank, after the process group is there.
        *args: Passed on.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL, rank i on device i).
        limit_s: Seconds after which the ranks are killed.

    Raises:
        RuntimeError: A rank failed or took too long; with the first traceback.
    """
    # CUDA is not initialized in the parent, so forks are safe there too.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, device, body, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(limit_s)
            if process.exitcode != 0:
                for other in ranks:
                    other.kill()
                errors = [p.read_text() for p in sorted(Path(folder).glob("error_*"))]
                raise RuntimeError(errors[0] if errors else f"ranks took more than {limit_s:g} s")
        return pickle.loads(Path(folder, "outcome").read_bytes())


def _rank(
    rank: int, size: int, folder: str, device: str, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    status = 1
    try:
        where = torch.device("cpu")
        if device == "cuda":
            where = torch.device("cuda", rank)
            torch.cuda.set_device(where)
        join_world(
            rank=rank,
            size=size,
            store=f"{folder}/store",
            backend="nccl" if device == "cuda" else "gloo",
        )
        outcome = body(where, *args)
        if rank == 0:
            Path(folder, "outcome").write_bytes(pickle.dumps(outcome))
        status = 0
    except BaseException:
        Path(folder, f"error_{rank}").write_text(traceback.format_exc())
    finally:
        # Threads of gloo and of the autograd engine do not survive a fork's normal exit.
        os._exit(status)
