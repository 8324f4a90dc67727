"""Imports Transformer Engine's Python without its CUDA extension, and shows it to Megatron.

The folders are made by ``tools/setup_env.sh`` from ``requirements/side.txt``. What is imported is
taken out of ``sys.modules`` again until ``use``: Megatron must not find it in other tests.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.te import extension

SIDE = Path(__file__).parents[2] / "build" / "side"
VERSIONS = ("2.19.0", "2.20.2")

_imported: dict[str, dict[str, types.ModuleType]] = {}


def folder(name: str) -> Path:
    """A folder of ``requirements/side.txt``."""
    found = SIDE / name
    assert found.is_dir(), f"{found} is missing: run `make setup`"
    return found


def import_te(version: str) -> None:
    """Import the modules of quantized tensors; several seconds, once in a process.

    Args:
        version: One of ``VERSIONS``.
    """
    if version in _imported:
        return
    root, needs = folder(f"te-{version}") / "transformer_engine", folder("te-needs")
    hidden = _take_out()
    sys.modules["transformer_engine_torch"] = extension
    sys.path.insert(0, str(needs))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else it loads libraries of CUDA
    try:
        # Their own __init__ would import every layer, and with them the whole extension.
        package = _bare("transformer_engine", root)
        package.__version__ = version  # type: ignore[attr-defined]
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        _bare("transformer_engine.pytorch", root / "pytorch")
        importlib.import_module("transformer_engine.pytorch.tensor.utils")
    finally:
        sys.path.remove(str(needs))
        del os.environ["NVTE_PROJECT_BUILDING"]
        _imported[version] = _take_out()
        sys.modules.update(hidden)


def _take_out() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.startswith("transformer_engine")]
    return {name: sys.modules.pop(name) for name in names}


def _bare(name: str, path: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def use(version: str) -> None:
    """Let Megatron find Transformer Engine's quantized tensors in this process, for good.

    Megatron decided when it was imported; what it would have decided is put in its place.
    """
    import_te(version)
    sys.modules.update(_imported[version])
    import megatron.core.fp8_utils as fp8_utils
    import megatron.core.utils as megatron_utils
    from transformer_engine.pytorch import utils as te_utils
    from transformer_engine.pytorch.tensor import QuantizedTensor
    from transformer_engine.pytorch.tensor import utils as tensor_utils
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

    def quantize_shards(models: Any, mains: Any, starts: Any, group: Any, fsdp: Any = None) -> None:
        extension.calls.append("cast_master_weights_to_fp8")
        if models:
            tensor_utils.cast_master_weights_to_fp8(
                models, mains, starts, group, manual_post_all_gather_processing=True
            )

    def after_gather(weights: Any) -> None:
        extension.calls.append("post_all_gather_processing")
        tensor_utils.post_all_gather_processing(weights)

    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, QuantizedTensor
    fp8_utils.HAVE_TE_MXFP8TENSOR, fp8_utils.MXFP8Tensor = True, MXFP8Tensor
    fp8_utils.te_post_all_gather_processing = after_gather
    fp8_utils._modify_underlying_storage_impl = lambda t, raw: tensor_utils.replace_raw_data(t, raw)
    fp8_utils._quantize_param_shard_impl = quantize_shards
    megatron_utils.get_te_version = lambda: Version(version)
    # As on Hopper, where products need transposed copies.
    tensor_utils.is_non_tn_fp8_gemm_supported = lambda: False
    te_utils.is_non_tn_fp8_gemm_supported = lambda: False
    _dequantize_mxfp8_here()


def _dequantize_mxfp8_here() -> None:
    """Let the one class that moves itself to a GPU to be dequantized stay."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import _FromMXFP8Func

    def forward(ctx: Any, tensor: Any, dtype: Any) -> Any:
        return tex.dequantize(tensor, TE_DType[dtype])

    _FromMXFP8Func.forward = staticmethod(forward)
