"""Derives from name and config how Megatron packs several matrices into one parameter's rows.

Sources, all in megatron-core 0.19: ``SelfAttention.get_query_key_value_tensors``,
``CrossAttention``, ``MLASelfAttention``, ``MLP``, ``TEGroupedMLP``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from megatron_muon.matrices.packing import WHOLE, Packing, RowPacking, RowPart

Family = Literal["qkv", "gate_up", "mla", "ssm", ""]
"""The setting that determines whether a packed parameter is split; empty for an unpacked one."""


def packing_by_name(name: str, config: Any, rows: int) -> tuple[Family, Packing] | None:
    """Return family and packing of a linear layer with a known name; None for any other.

    ``config`` is Megatron's model configuration, or an object with the same fields; ``rows`` are
    those of the whole weight.
    """
    if name not in _BY_NAME:
        return None
    family, pack = _BY_NAME[name]
    packing = pack(config, rows)
    return (family, packing) if packing.parts else ("", WHOLE)


def family_by_name(name: str) -> Family:
    """Return the family of a packed linear layer of this name; empty for an unknown name."""
    return _BY_NAME[name][0] if name in _BY_NAME else ""


def _qkv(config: Any, rows: int) -> Packing:
    heads = config.num_attention_heads // config.num_query_groups
    query = heads * config.kv_channels
    gate = (("gate", query, heads),) if getattr(config, "attention_output_gate", False) else ()
    return _units(
        ("q", query, heads), *gate, ("k", config.kv_channels, 1), ("v", config.kv_channels, 1)
    )


def _cross_kv(config: Any, rows: int) -> Packing:
    return _units(("k", config.kv_channels, 1), ("v", config.kv_channels, 1))


def _gate_up(config: Any, rows: int) -> Packing:
    if not config.gated_linear_unit:
        return WHOLE
    halves = (RowPart(name="gate", rows=rows // 2), RowPart(name="up", rows=rows // 2))
    return Packing(rows=RowPacking.BLOCKS, parts=halves)


def _mla_query(config: Any, rows: int) -> Packing:
    return _units(("nope", config.qk_head_dim, 1), ("rope", config.qk_pos_emb_head_dim, 1))


def _mla_kv_up(config: Any, rows: int) -> Packing:
    return _units(("k", config.qk_head_dim, 1), ("v", config.v_head_dim, 1))


def _mla_kv_down(config: Any, rows: int) -> Packing:
    # One unit instead of blocks: TP, if it applies, cuts the rows through both parts.
    return _units(("latent", config.kv_lora_rank, 1), ("rope", config.qk_pos_emb_head_dim, 1))


def _mla_qkv_down(config: Any, rows: int) -> Packing:
    return _units(
        ("q_latent", config.q_lora_rank, 1),
        ("latent", config.kv_lora_rank, 1),
        ("rope", config.qk_pos_emb_head_dim, 1),
    )


_BY_NAME: dict[str, tuple[Family, Callable[[Any, int], Packing]]] = {
    "linear_qkv": ("qkv", _qkv),
    "linear_kv": ("qkv", _cross_kv),
    "linear_fc1": ("gate_up", _gate_up),
    "linear_q_proj": ("mla", _mla_query),
    "linear_q_up_proj": ("mla", _mla_query),
    "linear_kv_up_proj": ("mla", _mla_kv_up),
    "linear_kv_down_proj": ("mla", _mla_kv_down),
    "linear_qkv_down_proj": ("mla", _mla_qkv_down),
}


def _units(*parts: tuple[str, int, int]) -> Packing:
    """Return a packing with parts (name, rows, heads) per unit; parts without rows are omitted."""
    return Packing(
        rows=RowPacking.UNITS,
        parts=tuple(
            RowPart(name=name, rows=rows, heads=heads) for name, rows, heads in parts if rows
        ),
    )
