"""Names and rows of weights outside Megatron.

Megatron stacks layers and experts, and fuses q, k and v, gate and up. Outside it every weight has
its own name: Megatron's (``decoder.layers.3.mlp.linear_fc2.weight``, weights stay fused) or that of
Llama, Qwen, Mixtral and DeepSeek models in Hugging Face's form
(``model.layers.3.mlp.down_proj.weight``, fused weights are split). A model wrapped by DDP,
``torch.compile`` or FSDP has further pieces in its names.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

import torch

from megatron_muon.matrices import WHOLE, Packing, intervals
from megatron_muon.offline.errors import CheckpointError, and_more
from megatron_muon.offline.foreign import Foreign
from megatron_muon.offline.outputs import Shape
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.reading import Checkpoint

Names = Literal["megatron", "hf"]

_VOCABULARY: Final = ("embedding.word_embeddings.weight", "output_layer.weight")


def add_name_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``import`` and ``export`` on names outside Megatron."""
    parser.add_argument(
        "--names",
        choices=("megatron", "hf"),
        default="megatron",
        help="names of weights in the file: Megatron's, with separate layers and experts, or those "
        "of Llama, Qwen, Mixtral and DeepSeek models, with fused weights split",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of embeddings and output layer without padding, which the file does not "
        "contain; default: the file contains all rows",
    )


def vocabulary(options: argparse.Namespace) -> int | None:
    """Return the vocabulary's rows without padding, None for all.

    Megatron's saved ``vocab_size`` is not used: a tokenizer may add further rows.
    """
    requested: int | None = options.vocab_size
    if requested is not None and requested < 1:
        raise CheckpointError(f"--vocab-size is {requested}; it must be at least 1.")
    return requested


# ---- tensors outside Megatron -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlainTensor:
    """One tensor outside Megatron.

    Attributes:
        name: Its name.
        parameter: The parameter to which it belongs.
        part: The fused part, such as ``q`` or ``gate``; empty for the whole parameter.
        rows: Half-open intervals of the parameter's rows, in stacking order.
        shape: Its shape.
    """

    name: str
    parameter: StoredParameter
    part: str
    rows: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @property
    def matrix(self) -> str:
        """Name under which its right factor is stored."""
        return f"{self.parameter.name}[{self.part}]" if self.part else self.parameter.name

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return its rows of the parameter."""
        if not whole.dim() or self.rows == ((0, len(whole)),):
            return whole
        return torch.cat([whole[start:stop] for start, stop in self.rows])

    def put(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Write its rows into the parameter."""
        if not whole.dim():
            whole.copy_(values)
        first = 0
        for start, stop in self.rows:
            whole[start:stop] = values[first : first + stop - start]
            first += stop - start


def plain_tensors(
    parameters: Mapping[str, Sequence[StoredParameter]], names: Names, vocabulary: int | None
) -> tuple[PlainTensor, ...]:
    """Return all tensors outside Megatron, in the order of the checkpoint's keys.

    ``vocabulary`` is the number of vocabulary rows without padding, None for all.
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
        raise CheckpointError(
            f"{and_more(nameless)} has no name in Hugging Face's form; type --names megatron."
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
        # The parts of multi-latent attention are one weight in Hugging Face's form as well.
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
    # Transformer Engine may fuse a norm into the following linear layer.
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
    """Return the Hugging Face name of a part of a parameter, empty for the whole parameter.

    Raises:
        KeyError: There is no such name.
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


# ---- values of a file -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """A whole parameter (or its state) from the plain tensors of a file.

    Attributes:
        path: The file.
        parts: Every plain tensor of the parameter with its values; None for a tensor that is a
            whole state (a right factor).
        factor: Multiplied with all values.
    """

    path: Path
    parts: tuple[tuple[PlainTensor | None, torch.Tensor], ...]
    factor: float = 1.0

    def tensor(self, source: Checkpoint | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Assemble the elements; rows in no plain tensor (padding) are zero."""
        whole: torch.Tensor | None = None
        for plain, values in self.parts:
            if self.factor != 1.0:
                exact = torch.promote_types(values.dtype, torch.float32)
                values = values.to(exact) * self.factor
            if plain is None:
                return values.to(dtype).reshape(shape).contiguous()
            _require_range(values, dtype, f"{plain.name} of {self.path}")
            if whole is None:
                whole = torch.zeros(plain.parameter.facts.shape, dtype=dtype)
            plain.put(whole, values.to(dtype))
        assert whole is not None
        return whole.reshape(shape)


def _require_range(values: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Refuse finite values that overflow to inf in a narrower dtype."""
    both = dtype.is_floating_point and values.dtype.is_floating_point
    if not both or not values.numel():
        return
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > largest:
        finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
        if float(finite.max()) > largest:
            raise CheckpointError(f"{what} has {float(finite.max()):g}, which is inf as {dtype}.")


# ---- wrapped models ---------------------------------------------------------------------------

_ANYWHERE: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Pieces that wrappers of single layers add to names, and that no bare model has."""


def without_wrappers(foreign: Foreign, known: Collection[str]) -> tuple[Foreign, str]:
    """Return a file's content under the known names of the bare model, and the removed pieces.

    A prefix is removed if all weights (or all states) have it: ``module.``, or any other without
    which all names are known.
    """
    (weights, removed), (states, more) = (
        _bare(n, known) for n in (foreign.weights, foreign.states)
    )
    for names in (weights, states):
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise CheckpointError(
                f"{foreign.path} has {twice[0]} twice, of a wrapped model and of a bare model."
            )
    renamed = replace(
        foreign,
        weights={weights[name]: weight for name, weight in foreign.weights.items()},
        states={states[name]: kept for name, kept in foreign.states.items()},
        momenta={states[name]: kept for name, kept in foreign.momenta.items()},
    )
    return renamed, ", ".join(sorted(f"'{piece}.'" for piece in removed | more))


def _bare(names: Iterable[str], known: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """Return the new names by the old ones, and the removed pieces and prefix."""
    split = {name: [piece for piece in name.split(".") if piece not in _ANYWHERE] for name in names}
    columns = zip(*(pieces[:-1] for pieces in split.values()), strict=False)
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    depth = next((i for i, piece in enumerate(shared) if piece != "module"), len(shared))
    for length in range(len(shared) + 1):
        if all(".".join(pieces[length:]) in known for pieces in split.values()):
            depth = length
            break
    removed = {piece for name in split for piece in name.split(".") if piece in _ANYWHERE}
    removed |= {".".join(shared[:depth])} if depth else set()
    return {name: ".".join(pieces[depth:]) for name, pieces in split.items()}, removed


def explain_kept_prefix(strange: Iterable[str], foreign: Foreign, known: Collection[str]) -> str:
    """Explain why a prefix of unknown names was not removed; empty if there is no prefix."""
    for dotted in strange:
        pieces = dotted.split(".")
        length = next((i for i in range(1, len(pieces)) if ".".join(pieces[i:]) in known), 0)
        if length:
            prefix = ".".join(pieces[:length]) + "."
            other = next((n for n in sorted(foreign.names) if not n.startswith(prefix)), None)
            if other is not None:
                return (
                    f"; the prefix '{prefix}' is removed only if all names have it, and {other} "
                    "does not"
                )
    return ""
