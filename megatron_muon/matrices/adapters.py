"""Detects low-rank adapters (LoRA and its variants) by names and shapes of parameters.

Names as in Megatron-Bridge and NeMo (``linear_qkv.adapter.linear_in``, ``….adapter.adapter_q.…``,
``….adapters.0.…``), ModelOpt (``lora_a``) and Hugging Face PEFT (``lora_A.default``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_LORA = re.compile(r"lora_(a|b|down|up|embedding_a|embedding_b|magnitude_vector)", re.IGNORECASE)
_MODULE = re.compile(r"adapter|(^|_)(?P<lora>lora)(_|$)", re.IGNORECASE)
_WEIGHT = re.compile(r"(.+)\.weight\d*")
_WRAPPERS = ("to_wrap", "base_layer", "_orig_mod")
"""Names that adapters and ``torch.compile`` insert between a module and the wrapped layer."""


def unwrapped(path: str) -> str:
    """Return a module's path or a parameter's name without the pieces of wrappers."""
    pieces = [piece for piece in path.split(".") if piece not in _WRAPPERS]
    while pieces and pieces[0] == "module":
        del pieces[0]
    return ".".join(pieces)


def adapter_parameters(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Return the names of the parameters of low-rank adapters, of any rank.

    ``lora_A`` is detected by name. ``linear_in`` (r x in) and ``linear_out`` (out x r) are common
    names: a pair of matching shapes is an adapter if it is next to the adapted weight, or narrow
    and in a module named adapter. All other parameters of such a module (a magnitude, a core, a
    norm) belong to the adapter as well. Shapes are global and include frozen parameters.
    """
    layers = {found[1] for name in shapes if (found := _WEIGHT.fullmatch(name))}
    roots = {root for name in shapes for root in _roots(name, shapes, layers)}
    return frozenset(name for name in shapes if any(start in roots for start in _starts(name)))


def _starts(name: str) -> Iterator[str]:
    pieces = name.split(".")
    return (".".join(pieces[:end]) for end in range(1, len(pieces) + 1))


def _roots(
    name: str, shapes: Mapping[str, tuple[int, ...]], layers: Collection[str]
) -> Iterator[str]:
    """Yield the adapters' paths that can be derived from one parameter."""
    pieces = name.split(".")
    for index, piece in enumerate(pieces):
        if _LORA.fullmatch(piece):
            yield ".".join(pieces[: index + 1])
        if piece != "linear_in":
            continue
        down = shapes[name]
        up = shapes.get(".".join([*pieces[:index], "linear_out", *pieces[index + 1 :]]), ())
        if len(down) < 2 or len(up) < 2 or down[-2] != up[-1]:
            continue
        adapted = _without_adapter_modules(pieces[:index])
        beside = ".".join(adapted)
        if len(adapted) == index:
            if shapes.get(f"{beside}.weight") == (up[-2], down[-1]):
                yield from (f"{beside}.linear_in", f"{beside}.linear_out")
        elif (
            beside in layers
            or down[-2] < min(down[-1], up[-2])
            or any(
                found["lora"]
                for module in pieces[len(adapted) : index]
                if (found := _MODULE.search(module))
            )
        ):
            yield ".".join(pieces[: len(adapted) + 1])


def _without_adapter_modules(path: list[str]) -> list[str]:
    """Return a path without trailing modules named adapter, or numbered inside one."""
    end = len(path)
    while end and (_MODULE.search(path[end - 1]) or path[end - 1].isdecimal()):
        end -= 1
    while end < len(path) and path[end].isdecimal():
        end += 1
    return path[:end]
