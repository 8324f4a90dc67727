"""``inspect``: what is in a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from megatron_muon.checkpoint.names import split_state_key, unknown_state
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.manifest import MANIFEST_FILE, manifest_problems
from megatron_muon.offline.reading import COMMON_FILE, Checkpoint
from megatron_muon.offline.safe_pickle import Inert
from megatron_muon.offline.source_state import optimizer_of, param_groups

HELP = "what is in a checkpoint: optimizer, layout, step, groups, tensors"

_LAYOUT = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "DP": "data_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "ranks": "world_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``inspect``."""
    parser.add_argument("checkpoint", help="folder of an iteration, or that a run saves into")
    parser.add_argument("--step", type=int, help="iteration; default: the last one")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument(
        "--hashes", action="store_true", help="compare the files with the manifest's hashes"
    )


def run(options: argparse.Namespace) -> int:
    """Print; 1 when a file is not as the manifest says."""
    checkpoint = Checkpoint(options.checkpoint, options.step)
    problems = list(manifest_problems(checkpoint.folder)) if options.hashes else []
    found = description(checkpoint) | ({"hashes": problems} if options.hashes else {})
    if options.json:
        print(json.dumps(found, indent=1, default=_plain))
    else:
        print("\n".join(_lines(found)))
        for problem in problems:
            print(f"damaged: {problem}")
        if options.hashes and not problems:
            has_some = (checkpoint.folder / MANIFEST_FILE).exists()
            print("all files are as the manifest says" if has_some else "there is no manifest")
    return 1 if problems else 0


def description(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that ``inspect`` tells, as plain values."""
    common = _common(checkpoint)
    groups = () if common is None else param_groups(common)
    return {
        "folder": str(checkpoint.folder),
        "optimizer": optimizer_of(checkpoint) if common is not None else "unknown",
        "sharding": None if common is None else _sharding(common, checkpoint),
        "layout": {} if common is None else _layout(common),
        "step": None if common is None else common.value.get("iteration"),
        "common_state": _home(common),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "summary": _summary(checkpoint),
        "tensors": {
            key: {
                "shape": list(info.shape),
                "dtype": _dtype(info),
                "bytes": info.nbytes,
                "chunks": len(info.chunks),
            }
            for key, info in sorted(checkpoint.tensors.items())
        },
        "others": sorted(checkpoint.blobs),
        "unknown_names": [] if common is None else common.loaded.foreign,
    }


def _common(checkpoint: Checkpoint) -> CommonState | None:
    """The common state; None where there is none, as in a checkpoint of weights alone."""
    try:
        return checkpoint.common
    except CheckpointError:
        if (checkpoint.folder / COMMON_FILE).exists():
            raise
        return None


def _home(common: CommonState | None) -> str:
    if common is None:
        return "missing"
    return COMMON_FILE if common.in_file else "inside DCP"


def _sharding(common: CommonState, checkpoint: Checkpoint) -> str | None:
    if any(".gbuf_idx_" in key for key in checkpoint.tensors):
        return "dp_reshardable"
    found = (common.value.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    return None if found is None else str(found)


def _layout(common: CommonState) -> dict[str, int]:
    sizes = {short: common.argument(name) for short, name in _LAYOUT.items()}
    return {short: int(size) for short, size in sizes.items() if isinstance(size, int)}


def _summary(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Number and bytes of tensors by what they are and their element type."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, info in checkpoint.tensors.items():
        known = split_state_key(key)
        part = f"state {known[0]}" if known else _part_of(key)
        entry = sums[part, _dtype(info)]
        entry[0] += 1
        entry[1] += info.nbytes
    return [
        {"part": part, "dtype": dtype, "tensors": count, "bytes": size}
        for (part, dtype), (count, size) in sorted(sums.items())
    ]


def _part_of(key: str) -> str:
    if ".gbuf_idx_" in key:
        return f"state {key.rpartition('.')[2]} (buckets)"
    unknown = unknown_state(key)
    return "weights" if unknown is None else f"state {unknown} (not known)"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    layout = " ".join(f"{name}{size}" for name, size in found["layout"].items())
    yield f"{found['folder']}"
    yield f"  optimizer    {found['optimizer']}" + (
        f" ({found['sharding']})" if found["sharding"] else ""
    )
    yield f"  step         {found['step']}"
    yield f"  saved at     {layout or 'not said'}"
    yield f"  common state {found['common_state']}"
    if found["unknown_names"]:
        yield f"  refers to    {', '.join(found['unknown_names'])} (not run)"
    for number, group in enumerate(found["groups"]):
        words = " ".join(f"{key}={value}" for key, value in sorted(group.items()))
        yield f"  group {number}      {words}"
    for entry in found["summary"]:
        yield (
            f"  {entry['part']:24} {entry['dtype']:9} {entry['tensors']:6} tensors "
            f"{entry['bytes']:16,} bytes"
        )
    for key, info in found["tensors"].items():
        shape = "x".join(str(size) for size in info["shape"]) or "scalar"
        yield f"    {key}  {shape}  {info['dtype']}  {info['chunks']} chunks"


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, Inert) else str(value)
