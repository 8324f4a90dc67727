"""Models and layouts for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tests.reference.muon import gate_up_parts, unit_parts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes; ``dp`` is what data parallelism has for itself, without context parallel."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    instances: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp * self.cp

    def __str__(self) -> str:
        sizes = {
            "TP": self.tp,
            "PP": self.pp,
            "VPP": self.vpp or 1,
            "CP": self.cp,
            "DP": self.dp,
            "EP": self.ep,
            "ETP": self.etp or 0,
            "instances ": self.instances if self.instances > 1 else 0,
        }
        shown = [
            f"{name}{size}"
            for name, size in sizes.items()
            if size > 1 or (name in ("TP", "DP") and size) or (name == "ETP" and size)
        ]
        return "·".join(shown)


MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "query_groups": 8,
    "plain_attention": True,
    "duplicated_down": True,
}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 40,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


WIDE = {"layers": 2, "hidden": 128, "heads": 4, "query_groups": 2, "ffn": 192}

SIZES = {"layers": 2, "hidden": 32, "heads": 8, "query_groups": 4, "ffn": 48}
"""Of every model that does not say else."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A kind of model.

    Attributes:
        options: Of ``tests.tiny_gpt.build_gpt``.
        what: A few words for the table of what was tested.
    """

    what: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def option(self, name: str, default: Any = None) -> Any:
        """One of the options, or that of ``build_gpt``."""
        return self.options.get(name, SIZES.get(name, default))

    def parts(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """Return rows of every logical matrix of a parameter, independently of the package.

        Returns:
            What follows the parameter's name (``[q]``; nothing for a single matrix) to row indices.
        """
        units = self._units().get(name.split(".")[-2], {})
        if name.split(".")[-2] == "linear_fc1" and self.option("swiglu", True):
            labels, rows = ["gate", "up"], gate_up_parts(shape[0] // 2)
        elif units:
            labels, rows = list(units), unit_parts(tuple(units.values()), shape[0])
        else:
            return {"": torch.arange(shape[0])}
        return {f"[{label}]": part for label, part in zip(labels, rows, strict=True)}

    def _units(self) -> dict[str, dict[str, int]]:
        """Rows of the parts of one query group or head, for every fused linear layer."""
        head_dim = self.option("kv_channels", self.option("hidden") // self.option("heads"))
        query = self.option("heads") // self.option("query_groups") * head_dim
        gate = {"gate": query} if self.option("attention_output_gate") else {}
        nope, rope = self.option("qk_head_dim"), self.option("qk_pos_emb_head_dim")
        return {
            "linear_qkv": {"q": query, **gate, "k": head_dim, "v": head_dim},
            "linear_q_proj": {"nope": nope, "rope": rope},
            "linear_q_up_proj": {"nope": nope, "rope": rope},
            "linear_kv_up_proj": {"k": nope, "v": self.option("v_head_dim")},
            "linear_kv_down_proj": {"latent": self.option("kv_lora_rank"), "rope": rope},
        }


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Return True for a matrix, independently of the package."""
    adam = ("embedding", "output_layer", "router", "gate_weight")
    return tensor.dim() == 2 and not any(part in name for part in adam)


MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        "gpt": TinyModel(what="GPT, grouped queries, SwiGLU"),
        "gpt-tied": TinyModel(what="GPT, tied embeddings", options={"tied": True}),
        "gpt-mha-bias": TinyModel(
            what="GPT, plain attention, QKV bias, GELU",
            options={
                "query_groups": 8,
                "add_qkv_bias": True,
                "swiglu": False,
                "position_embedding_type": "learned_absolute",
            },
        ),
        "gpt-mqa": TinyModel(what="GPT, one query group", options={"query_groups": 1}),
        "gpt-gated-attention": TinyModel(
            what="GPT, gated attention", options={"attention_output_gate": True}
        ),
        "gpt-cp": TinyModel(
            what="GPT, attention over a context-parallel group (stand-in)",
            options={"plain_attention": True},
        ),
        "moe": TinyModel(what="mixture of experts", options=MOE),
        "moe-shared": TinyModel(
            what="mixture of experts, shared expert, one expert without tokens",
            options={**MOE, "moe_shared_expert_intermediate_size": 24, "idle_expert": 3},
        ),
        "mla": TinyModel(what="multi-latent attention (stand-in core attention)", options=MLA),
        "mla-local": TinyModel(
            what="multi-latent attention, down-projections cut as by Megatron's local layers",
            options={**MLA, "duplicated_down": False},
        ),
        "mla-moe": TinyModel(
            what="multi-latent attention with experts, no query compression",
            options={**MLA, **MOE, "q_lora_rank": None},
        ),
        "mtp": TinyModel(what="multi-token prediction", options={"mtp_num_layers": 1}),
    }
)

ALL_MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        **MODELS,
        "fp8": TinyModel(what="GPT with sides that FP8 blocks fit", options=WIDE),
        "fp8-moe": TinyModel(
            what="mixture of experts with such sides",
            options={**WIDE, **MOE, "moe_ffn_hidden_size": 64},
        ),
        "fp8-mla": TinyModel(
            what="multi-latent attention with such sides",
            options={
                **WIDE,
                **MLA,
                "q_lora_rank": 64,
                "kv_lora_rank": 64,
                "qk_head_dim": 32,
                "qk_pos_emb_head_dim": 32,
                "v_head_dim": 32,
                "query_groups": 4,
            },
        ),
    }
)
"""Those whose sides FP8 blocks fit too; they are not trained at every layout."""
