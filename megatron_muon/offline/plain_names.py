"""One tensor for each weight of an unfused model, and the rows of Megatron's parameter it has.

Megatron stacks layers and experts, and fuses q, k and v, gate and up. Outside it every weight has a
name of its own: Megatron's own (``decoder.layers.3.mlp.linear_fc2.weight``, fused weights as they
are) or that of Llama, Qwen, Mixtral and DeepSeek models in Hugging Face's form
(``model.layers.3.mlp.down_proj.weight``, fused weights taken apart).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_muon.matrices import WHOLE, Packing, intervals
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.parameters import StoredParameter

Names = Literal["megatron", "hf"]

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class PlainTensor:
    """One tensor outside Megatron.

    Attributes:
        name: Its name there.
        parameter: The parameter that it is part of.
        part: Which of the fused parts, as ``q`` or ``gate``; empty for all of it.
        rows: Half-open intervals of the parameter's rows, in the order in which they stack.
        shape: Its shape.
    """

    name: str
    parameter: StoredParameter
    part: str
    rows: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @property
    def matrix(self) -> str:
        """Name under which a right factor of it is stored."""
        return f"{self.parameter.name}[{self.part}]" if self.part else self.parameter.name

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Its rows of the parameter."""
        if self.rows == ((0, len(whole)),):
            return whole
        return torch.cat([whole[start:stop] for start, stop in self.rows])

    def put(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Write its rows into the parameter."""
        first = 0
        for start, stop in self.rows:
            whole[start:stop] = values[first : first + stop - start]
            first += stop - start


def plain_tensors(
    parameters: Mapping[str, Sequence[StoredParameter]], names: Names, vocabulary: int | None
) -> tuple[PlainTensor, ...]:
    """All tensors outside Megatron, in the order of the checkpoint's keys.

    Args:
        parameters: Those of the model part, by key.
        names: Whose names.
        vocabulary: Rows of embeddings and output layer that are no padding, None for all.

    Raises:
        CheckpointError: A parameter has no name there, or its parts are unknown.
    """
    every = [parameter for found in parameters.values() for parameter in found]
    packings = {p.name: p.packing for p in every}
    is_mla = any("linear_kv_up_proj" in p.name for p in every)
    found: list[PlainTensor] = []
    nameless = []
    for parameter in every:
        try:
            found += _of_parameter(parameter, names, packings, vocabulary, is_mla=is_mla)
        except KeyError:
            nameless.append(parameter.name)
    if nameless:
        more = f" and {len(nameless) - 1} more" if len(nameless) > 1 else ""
        raise CheckpointError(
            f"{nameless[0]}{more} has no name in Hugging Face's form; type --names megatron."
        )
    return tuple(found)


def _of_parameter(
    parameter: StoredParameter,
    names: Names,
    packings: Mapping[str, Packing],
    vocabulary: int | None,
    *,
    is_mla: bool,
) -> Iterator[PlainTensor]:
    shape = parameter.facts.shape
    if parameter.name in _VOCABULARY and vocabulary is not None:
        if vocabulary > shape[0]:
            raise CheckpointError(
                f"{parameter.name} has {shape[0]} rows, fewer than the vocabulary of {vocabulary}; "
                "correct --vocab-size."
            )
        shape = (vocabulary, *shape[1:])
    parts = {"": [(0, shape[0])]} if shape else {"": []}
    if names == "hf":
        weight = re.sub(r"\.bias(\d*)$", r".weight\1", parameter.name)
        packing = packings.get(weight, WHOLE)
        # The parts of multi-latent attention are one weight there, too.
        if not is_mla or ".linear_fc1." in parameter.name:
            if parameter.problem:
                raise CheckpointError(f"{parameter.name}: {parameter.problem}.")
            if shape and packing is not WHOLE:
                parts = intervals(packing, shape[0], "parts")
    for part, rows in parts.items():
        name = parameter.name if names == "megatron" else hf_name(parameter.name, part, is_mla)
        height = sum(stop - start for start, stop in rows)
        yield PlainTensor(
            name=name,
            parameter=parameter,
            part=part,
            rows=tuple(rows),
            shape=(height, *shape[1:]) if shape else (),
        )


_TOP = {
    "embedding.word_embeddings": "model.embed_tokens",
    "embedding.position_embeddings": "model.embed_positions",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
_LAYER = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_qkv[q]": "self_attn.q_proj",
    "self_attention.linear_qkv[k]": "self_attn.k_proj",
    "self_attention.linear_qkv[v]": "self_attn.v_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    # Where Transformer Engine fuses a norm into the linear layer after it.
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
}
_LATENT = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}
_FEED_FORWARD = {
    "linear_fc1[gate]": "gate_proj",
    "linear_fc1[up]": "up_proj",
    "linear_fc1": "up_proj",
    "linear_fc2": "down_proj",
}


def hf_name(name: str, part: str, is_mla: bool) -> str:
    """Name of a part of a parameter in Hugging Face's form.

    Args:
        name: Name in Megatron's model, experts one by one.
        part: Fused part, empty for the whole.
        is_mla: Whether the model has multi-latent attention.

    Raises:
        KeyError: It has none.
    """
    grouped = re.fullmatch(r"(.+\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)", name)
    if grouped:
        name = f"{grouped[1]}.local_experts.{grouped[4]}.{grouped[2]}.{grouped[3]}"
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    table = _TOP if layer is None else _LAYER | (_LATENT if is_mla else {})
    inner = name if layer is None else layer[2]
    before = "" if layer is None else f"model.layers.{layer[1]}."
    suffix = f"[{part}]" if part else ""
    if inner in table:
        return before + table[inner]
    module, _, leaf = inner.rpartition(".")
    if leaf not in ("weight", "bias"):
        raise KeyError(name)
    if module + suffix in table:
        return f"{before}{table[module + suffix]}.{leaf}"
    inside = re.fullmatch(r"mlp\.((?:shared_experts|experts\.local_experts\.\d+)\.)?(\w+)", module)
    if layer is None or inside is None:
        raise KeyError(name)
    where = (inside[1] or "").replace("local_experts.", "")
    return f"{before}mlp.{where}{_FEED_FORWARD[inside[2] + suffix]}.{leaf}"
