"""FP8 weights on a machine without Transformer Engine: fake tensors of its classes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor

from megatron_muon.integration.quantized import is_quantized

ASSUMED = "2.20.2"
"""Version of Transformer Engine where none is installed."""

FIRST_CAPABILITY = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""First compute capability that has products of a recipe."""


class QuantizedTensor(FakeTensor):
    """A fake tensor that Megatron and we take for one of Transformer Engine; never made, become."""


class Float8Tensor(QuantizedTensor):
    """Of ``delayed`` and ``tensorwise``."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """Of ``blockwise``."""


class MXFP8Tensor(QuantizedTensor):
    """Of ``mxfp8``."""


_CLASSES: dict[str, type[QuantizedTensor]] = {
    "delayed": Float8Tensor,
    "tensorwise": Float8Tensor,
    "blockwise": Float8BlockwiseQTensor,
    "mxfp8": MXFP8Tensor,
}


def asked_for(command: Sequence[str]) -> bool:
    """Whether a command has a flag on FP8 or FP4."""
    return any(word.startswith(("--fp8", "--fp4")) for word in command)


@dataclass(kw_only=True)
class StandIns:
    """What is told of FP8 weights, filled in while the model is built.

    Attributes:
        said: Sentences on what stands for what.
        problems: Sentences of a refusal; what raises while a layer is built, Megatron words anew.
    """

    said: list[str] = field(default_factory=list)
    problems: set[str] = field(default_factory=set)


def install(capability: tuple[int, int]) -> StandIns:
    """Let Megatron believe in a Transformer Engine, and quantize what it would quantize.

    Args:
        capability: Compute capability of the GPUs.
    """
    import megatron.core.fp8_utils as fp8_utils
    import megatron.core.utils as megatron_utils

    found = StandIns()
    if megatron_utils.get_te_version() == Version("0.0.0"):
        megatron_utils.get_te_version = lambda: Version(ASSUMED)
        found.said.append(f"Transformer Engine is not installed, {ASSUMED} is assumed")
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, QuantizedTensor
    fp8_utils.HAVE_TE_MXFP8TENSOR, fp8_utils.MXFP8Tensor = True, MXFP8Tensor
    fp8_utils._modify_underlying_storage_impl = lambda tensor, raw: None
    _quantize_what_is_made(fp8_utils, capability, found)
    return found


def _quantize_what_is_made(fp8_utils: Any, capability: tuple[int, int], found: StandIns) -> None:
    """Quantize linear weights that are made where Megatron enters ``fp8_model_init``."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    recipes: list[str] = []

    @contextmanager
    def quantizing(recipe: str) -> Iterator[None]:
        recipes.append(recipe)
        try:
            yield
        finally:
            recipes.pop()

    def context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        recipe = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
        for text in _sentences(config, recipe, capability):
            if text not in found.said:
                found.said.append(text)
        is_bf16 = fp8_utils.is_first_last_bf16_layer(config, layer_no)
        if not is_init or not config.fp8_param or is_bf16 or recipe not in _CLASSES:
            return nullcontext()
        return quantizing(recipe)

    def quantize(layer: Any) -> None:
        if recipes and layer.weight is not None:
            if (problem := _size_problem(recipes[-1], layer.weight.shape)) is not None:
                found.problems.add(problem)
            layer.weight.__class__ = _CLASSES[recipes[-1]]
            layer.weight.bytes_of_fp8 = weight_bytes(recipes[-1], layer.weight.shape, capability)

    theirs = fp8_utils.get_fp8_context
    for module in list(sys.modules.values()):
        if getattr(module, "get_fp8_context", None) is theirs:
            module.get_fp8_context = context  # type: ignore[attr-defined]
    for kind in (ColumnParallelLinear, RowParallelLinear):
        _after_init(kind, quantize)


def _size_problem(recipe: str, shape: Sequence[int]) -> str | None:
    """The sentence where Transformer Engine could not quantize a weight, or not multiply by it."""
    rows, columns = (32, 32) if recipe == "mxfp8" else (8, 16)
    if shape[0] % rows == 0 and shape[1] % columns == 0:
        return None
    return (
        f"a linear weight is {shape[0]}x{shape[1]} on a rank, and --fp8-recipe {recipe} needs "
        f"multiples of {rows} and {columns}: change --hidden-size, --ffn-hidden-size or "
        "--tensor-model-parallel-size, or remove --fp8-param-gather"
    )


def _after_init(kind: Any, then: Callable[[Any], None]) -> None:
    init = kind.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        then(self)

    kind.__init__ = made


def _sentences(config: Any, recipe: str, capability: tuple[int, int]) -> Iterator[str]:
    """What stands for what."""
    if config.fp8_param:
        yield (
            f"weights of linear layers under --fp8-param-gather are fake {recipe} tensors: their "
            "bytes are counted, no code is made"
        )
    else:
        dtype = str(config.params_dtype).removeprefix("torch.")
        yield f"FP8 products (--fp8-recipe {recipe}) are not counted, and weights are {dtype}"
    if capability < (least := FIRST_CAPABILITY.get(recipe, (0, 0))):
        yield (
            f"--fp8-recipe {recipe} needs GPUs of compute capability {least[0]}.{least[1]}, and "
            f"--gpu names one of {capability[0]}.{capability[1]}: choose another of the two"
        )


def weight_bytes(recipe: str, shape: Sequence[int], capability: tuple[int, int]) -> int:
    """Codes, scales and transposed copy of a weight.

    Args:
        recipe: Megatron's name of the recipe.
        shape: Shape on this rank.
        capability: Of the GPUs; from 10.0 on, but for 12.x, nothing is transposed for products of
            weights with one scale.
    """
    rows, columns = shape[-2], shape[-1]
    numel = rows * columns
    if recipe in ("delayed", "tensorwise"):
        needs_copy = not (10, 0) <= capability < (12, 0) and capability < (13, 0)
        return numel * (1 + needs_copy) + 4
    if recipe == "blockwise":
        # Of 128 x 128 values, in rows of a multiple of four, for each of two orientations.
        high, wide = -(-rows // 128), -(-columns // 128)
        return 2 * numel + 4 * (high * _up(wide, 4) + wide * _up(high, 4))
    # Of 32 values in a row or in a column, in tiles of 128 x 4.
    across = _up(rows, 128) * _up(-(-columns // 32), 4)
    down = _up(-(-rows // 32), 4) * _up(columns, 128)
    return 2 * numel + across + down


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def buffer_bytes(buffers: Iterable[Any]) -> dict[str, int]:
    """Bytes of weights, of gradients, and of what Megatron gathers, of Megatron's buffers.

    FP8 codes in rows lie in the buffer, which has padding; the rest of an FP8 weight lies beside
    it, and all of it where the buffer is the one of the gradients.
    """
    found = {"weights": 0, "gradients": 0, "gathered": 0}
    for buffer in buffers:
        own = sum(p.bytes_of_fp8 for p in buffer.params if is_quantized(p))
        in_rows = sum(p.numel() for p in buffer.params if is_quantized(p))
        gathered = buffer.numel * buffer.param_data.dtype.itemsize
        through_gradients = buffer.param_data.dtype != buffer.param_dtype
        found["weights"] += own if through_gradients else gathered + own - in_rows
        found["gradients"] += buffer.numel * buffer.grad_dtype.itemsize
        found["gathered"] += gathered
    return found
