"""How Megatron packs several matrices into the rows of one parameter, told from module and config.

What ``partition_stride`` says is not used: it is always 1 on experts, gated or not. Sources, in
megatron-core 0.19: ``MambaMixer.__init__``, ``_GDNBase``, and those of ``matrices.known_packings``.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_muon.matrices import (
    WHOLE,
    Family,
    Packing,
    RowPacking,
    RowPart,
    packing_by_name,
)

MAMBA_PARTS = ("z", "x", "B", "C", "dt")


def packing_of(
    module_path: str, parameter: torch.nn.Parameter, parent: Any, *, cut: int
) -> tuple[Family, Packing]:
    """Family and packing of the weight of a linear layer.

    Args:
        module_path: Path of the linear layer, its name last.
        parameter: The weight as this rank stores it.
        parent: The module that the linear layer belongs to, which knows the configuration.
        cut: Number of TP ranks that its rows are cut over.
    """
    name = module_path.rpartition(".")[2]
    config = getattr(parent, "config", None)
    rows = parameter.shape[-2] * cut
    known = None if config is None else packing_by_name(name, config, rows)
    if known is not None:
        return known
    sizes = getattr(parameter, "partition_sizes", None)
    if sizes is not None:
        names = MAMBA_PARTS if len(sizes) == len(MAMBA_PARTS) else _numbers(len(sizes))
        return "ssm", _blocks(names, sizes, cut)
    if name == "in_proj" and hasattr(parent, "in_proj_split_sections"):
        names = tuple(parent.in_proj_split_names)
        return "ssm", _blocks(names, parent.in_proj_split_sections, cut)
    return "", WHOLE


def _blocks(names: tuple[str, ...], local_rows: Any, cut: int) -> Packing:
    """Parts of which every TP rank stores so many rows."""
    return Packing(
        rows=RowPacking.BLOCKS,
        parts=tuple(
            RowPart(name=name, rows=int(rows) * cut)
            for name, rows in zip(names, local_rows, strict=True)
        ),
    )


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(f"part{number}" for number in range(count))
