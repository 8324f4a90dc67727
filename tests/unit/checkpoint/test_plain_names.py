"""Names of weights outside Megatron."""

from __future__ import annotations

import pytest

from megatron_muon.matrices import Packing, ParameterFacts, RowPacking, RowPart
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.plain_names import hf_name, plain_tensors

# Megatron's name, fused part, whether attention is multi-latent, the name in Hugging Face's form.
NAMES = [
    ("embedding.word_embeddings.weight", "", False, "model.embed_tokens.weight"),
    ("embedding.position_embeddings.weight", "", False, "model.embed_positions.weight"),
    ("output_layer.weight", "", False, "lm_head.weight"),
    ("decoder.final_layernorm.weight", "", False, "model.norm.weight"),
    ("decoder.final_layernorm.bias", "", False, "model.norm.bias"),
    ("L.input_layernorm.weight", "", False, "H.input_layernorm.weight"),
    ("L.self_attention.linear_qkv.layer_norm_weight", "", False, "H.input_layernorm.weight"),
    ("L.self_attention.linear_qkv.layer_norm_bias", "", False, "H.input_layernorm.bias"),
    ("L.mlp.linear_fc1.layer_norm_weight", "", False, "H.post_attention_layernorm.weight"),
    ("L.pre_mlp_layernorm.weight", "", False, "H.post_attention_layernorm.weight"),
    ("L.self_attention.linear_qkv.weight", "q", False, "H.self_attn.q_proj.weight"),
    ("L.self_attention.linear_qkv.bias", "k", False, "H.self_attn.k_proj.bias"),
    ("L.self_attention.linear_proj.weight", "", False, "H.self_attn.o_proj.weight"),
    ("L.self_attention.q_layernorm.weight", "", False, "H.self_attn.q_norm.weight"),
    ("L.self_attention.q_layernorm.weight", "", True, "H.self_attn.q_a_layernorm.weight"),
    ("L.self_attention.linear_q_up_proj.weight", "", True, "H.self_attn.q_b_proj.weight"),
    (
        "L.self_attention.linear_kv_down_proj.weight",
        "",
        True,
        "H.self_attn.kv_a_proj_with_mqa.weight",
    ),
    ("L.mlp.linear_fc1.weight", "gate", False, "H.mlp.gate_proj.weight"),
    ("L.mlp.linear_fc1.weight", "up", False, "H.mlp.up_proj.weight"),
    ("L.mlp.linear_fc1.weight", "", False, "H.mlp.up_proj.weight"),
    ("L.mlp.linear_fc2.bias", "", False, "H.mlp.down_proj.bias"),
    ("L.mlp.router.weight", "", False, "H.mlp.gate.weight"),
    ("L.mlp.router.expert_bias", "", False, "H.mlp.gate.e_score_correction_bias"),
    (
        "L.mlp.experts.local_experts.17.linear_fc1.weight",
        "gate",
        False,
        "H.mlp.experts.17.gate_proj.weight",
    ),
    ("L.mlp.experts.linear_fc2.weight5", "", False, "H.mlp.experts.5.down_proj.weight"),
    ("L.mlp.shared_experts.linear_fc2.weight", "", False, "H.mlp.shared_experts.down_proj.weight"),
    ("L.mlp.shared_experts.gate_weight", "", False, "H.mlp.shared_expert_gate.weight"),
]


@pytest.mark.parametrize(("name", "part", "is_mla", "expected"), NAMES)
def test_names(name: str, part: str, is_mla: bool, expected: str) -> None:
    there = name.replace("L.", "decoder.layers.31.", 1) if name.startswith("L.") else name
    here = expected.replace("H.", "model.layers.31.", 1)
    assert hf_name(there, part, is_mla) == here


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.eh_proj.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.mlp.linear_fc1.scale",
        "decoder.layers.0.mlp.linear_fc3.weight",
        "decoder.layers.0.self_attention.linear_q_up_proj.weight",
    ],
)
def test_parameters_without_hf_names(name: str) -> None:
    with pytest.raises(KeyError):
        hf_name(name, "", False)


def _parameter(name: str, shape: tuple[int, ...], packing: Packing) -> StoredParameter:
    facts = ParameterFacts(
        name=name,
        shape=shape,
        is_linear_weight=True,
        is_embedding_or_output=False,
        is_router=False,
        is_tied=False,
    )
    return StoredParameter(key=name, index=(), facts=facts, packing=packing)


def test_a_bias_is_taken_apart_like_its_weight() -> None:
    parts = tuple(RowPart(name=name, rows=rows) for name, rows in (("q", 4), ("k", 2), ("v", 2)))
    packing = Packing(rows=RowPacking.UNITS, parts=parts)
    at = "decoder.layers.0.self_attention.linear_qkv"
    parameters = {
        "w": [_parameter(f"{at}.weight", (16, 3), packing)],
        "b": [_parameter(f"{at}.bias", (16,), Packing())],
    }
    found = {
        plain.name.removeprefix("model.layers.0.self_attn."): plain
        for plain in plain_tensors(parameters, "hf", None)
    }
    for label, rows in (("q", ((0, 4), (8, 12))), ("k", ((4, 6), (12, 14)))):
        for kind, rest in (("weight", (3,)), ("bias", ())):
            plain = found[f"{label}_proj.{kind}"]
            assert plain.rows == rows
            assert plain.shape == (sum(b - a for a, b in rows), *rest)


def test_parameters_without_names_are_listed_together() -> None:
    parameters = {
        str(i): [_parameter(f"decoder.layers.{i}.mixer.in_proj.weight", (4, 4), Packing())]
        for i in range(3)
    }
    assert len(plain_tensors(parameters, "megatron", None)) == 3
    with pytest.raises(CheckpointError, match=r"0\.mixer\.in_proj\.weight and 2 more has no name"):
        plain_tensors(parameters, "hf", None)
