"""``verify``: compares the values of two checkpoints of any layouts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch

from megatron_muon.checkpoint.names import (
    MASTER,
    MASTER_OF_ADAM,
    RIGHT_FACTOR,
    split_state_key,
)
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.outputs import Box, whole
from megatron_muon.offline.parameters import model_tensors, stored_parameters
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.source_state import BUCKETS, RESHARD, has_buckets

HELP = "compare the values of two checkpoints, tensor by tensor, across layouts"
PARTS = ("all", "weights", "optimizer")
_MAX_SHOWN = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``verify``."""
    parser.add_argument("first", help="a checkpoint")
    parser.add_argument("second", help="another one")
    parser.add_argument("--first-step", type=int, help="iteration of the first")
    parser.add_argument("--second-step", type=int, help="iteration of the second")
    parser.add_argument("--part", choices=PARTS, default="all", help="the part to compare")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest difference relative to the largest value of a tensor; default 0: equal",
    )


def run(options: argparse.Namespace) -> int:
    """Print a table of differences; return 1 if there are any."""
    tolerance = options.tolerance
    if not 0.0 <= tolerance < math.inf:
        raise CheckpointError(f"--tolerance is {tolerance}; it must be at least 0.")
    first = Checkpoint(options.first, options.first_step)
    second = Checkpoint(options.second, options.second_step)
    compared, differences = 0, []
    for name, difference in compare(first, second, tolerance, part=options.part):
        compared += 1
        if difference is not None:
            differences.append((name, difference))
    if not compared:
        what = "anything" if options.part == "all" else f"any {options.part}"
        raise CheckpointError(
            f"neither {first.folder} nor {second.folder} holds {what}: there is nothing to compare."
        )
    if not differences:
        print(f"{compared} tensors compared: equal")
        return 0
    width = max(len(name) for name, _ in differences[:_MAX_SHOWN])
    for name, difference in differences[:_MAX_SHOWN]:
        print(f"{name:{width}}  {difference}")
    if len(differences) > _MAX_SHOWN:
        print(f"and {len(differences) - _MAX_SHOWN} more")
    print(f"{compared} tensors compared: {len(differences)} differ")
    return 1


def compare(
    first: Checkpoint, second: Checkpoint, tolerance: float, *, part: str = "all"
) -> Iterator[tuple[str, str | None]]:
    """Yield every name and a description of its difference, None without one.

    Layers that only one of them stacks are compared as well, and states for which megatron-core has
    several keys. ``tolerance`` is relative to the tensor's largest value.
    """
    if part != "weights" and has_buckets(first) != has_buckets(second):
        one = first if has_buckets(first) else second
        raise CheckpointError(
            f"{one.folder} {BUCKETS}, unlike the other one: type --part weights, or {RESHARD}."
        )
    ours, theirs = dict(_entries(first, part)), dict(_entries(second, part))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield name, "only in the first"
        elif name not in ours:
            yield name, "only in the second"
        else:
            (box, shape), (other, other_shape) = ours[name], theirs[name]
            if shape != other_shape:
                yield name, f"shape {shape} and {other_shape}"
                continue
            a = box.tensor(first, shape, box.info.dtype)
            b = other.tensor(second, shape, other.info.dtype)
            yield name, _difference(a, b, tolerance)


def _entries(
    checkpoint: Checkpoint, part: str
) -> Iterator[tuple[str, tuple[Box, tuple[int, ...]]]]:
    """Yield names, boxes, and their shapes without the unit axes of layer and expert."""
    model = model_tensors(checkpoint)
    has_state = any(split_state_key(key) for key in checkpoint.tensors)
    parameters = stored_parameters(model, checkpoint.common) if has_state else {}
    for key, info in checkpoint.tensors.items():
        is_weight = key in model and ".gbuf_idx_" not in key
        if part != "all" and is_weight != (part == "weights"):
            continue
        state, name = split_state_key(key) or ("", "")
        state = MASTER if state == MASTER_OF_ADAM else state
        if not state:
            yield key, (whole(info), info.shape)
        elif state == RIGHT_FACTOR or name not in parameters:  # V is named by its matrix
            yield f"{state} of {name}", (whole(info), info.shape)
        else:
            for parameter in parameters[name]:
                entry = parameter.box(info), parameter.facts.shape
                yield f"{state} of {parameter.name}", entry


def _difference(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str | None:
    if a.dtype == b.dtype and torch.equal(a, b):
        return None
    exact = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(exact), b.to(exact)
    unlike = ~((a == b) | (a.isnan() & b.isnan()))
    if not unlike.any():
        return None
    finite = a.isfinite() & b.isfinite()
    odd = int((unlike & ~finite).sum())
    if odd:
        return f"{odd} elements are inf or nan in one of them"
    apart = float((a - b)[unlike].abs().max())
    largest = float(a[finite].abs().max())
    if apart <= tolerance * largest:
        return None
    return f"largest difference {apart:.3g} (largest value {largest:.3g})"
