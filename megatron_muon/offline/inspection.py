"""``inspect``: shows the content of a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from megatron_muon.checkpoint.names import split_state_key, unknown_state
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.manifest import MANIFEST_FILE, manifest_problems
from megatron_muon.offline.reading import COMMON_FILE, Checkpoint
from megatron_muon.offline.source_state import has_buckets, optimizer_of, param_groups

HELP = "show the content of a checkpoint: optimizer, layout, step, groups, tensors"

_LAYOUT: Final = {
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
    """Add the flags of ``inspect``."""
    parser.add_argument("checkpoint", help="folder of an iteration, or that a run saves into")
    parser.add_argument("--step", type=int, help="iteration; default: the last one")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--hashes", action="store_true", help="check the files against the manifest's hashes"
    )


def run(options: argparse.Namespace) -> int:
    """Print the content; return 1 when a file differs from the manifest."""
    checkpoint = Checkpoint(options.checkpoint, options.step)
    problems = list(manifest_problems(checkpoint.folder)) if options.hashes else []
    found = _description(checkpoint) | ({"hashes": problems} if options.hashes else {})
    if options.json:
        print(json.dumps(found, indent=1, default=str))
        return 1 if problems else 0
    print(*_lines(found), *(f"damaged: {problem}" for problem in problems), sep="\n")
    if options.hashes and not problems:
        has_manifest = (checkpoint.folder / MANIFEST_FILE).exists()
        print("all files match the manifest" if has_manifest else "there is no manifest")
    return 1 if problems else 0


def _description(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything that ``inspect`` shows, as plain values."""
    tensors = {
        key: {
            "shape": list(info.shape),
            "dtype": str(info.dtype).removeprefix("torch."),
            "bytes": info.nbytes,
            "chunks": len(info.chunks),
        }
        for key, info in sorted(checkpoint.tensors.items())
    }
    common = _common(checkpoint)
    about: dict[str, Any] = {
        "optimizer": "unknown",
        "sharding": None,
        "layout": {},
        "step": None,
        "common_state": "missing",
        "groups": [],
        "unknown_names": [],
    }
    if common is not None:
        metadata = common.value.get("content_metadata") or {}
        sharding = metadata.get("distrib_optim_sharding_type")
        sizes = {short: common.argument(name) for short, name in _LAYOUT.items()}
        groups = param_groups(common)
        about = {
            "optimizer": optimizer_of(checkpoint),
            "sharding": "dp_reshardable" if has_buckets(checkpoint) else sharding,
            "layout": {short: int(size) for short, size in sizes.items() if isinstance(size, int)},
            "step": common.value.get("iteration"),
            "common_state": COMMON_FILE if common.in_file else "inside DCP",
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "unknown_names": common.loaded.foreign,
        }
    return {
        "folder": str(checkpoint.folder),
        **about,
        "summary": _summary(tensors),
        "tensors": tensors,
        "others": sorted(checkpoint.blobs),
    }


def _common(checkpoint: Checkpoint) -> CommonState | None:
    """Return the common state; None without one, as in a checkpoint of weights only."""
    try:
        return checkpoint.common
    except CheckpointError:
        if (checkpoint.folder / COMMON_FILE).exists():
            raise
        return None


def _summary(tensors: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Count tensors and bytes by part of the checkpoint and dtype."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for key, info in tensors.items():
        counts[_part_of(key), info["dtype"]] += 1
        sizes[_part_of(key), info["dtype"]] += info["bytes"]
    return [
        {"part": part, "dtype": dtype, "tensors": count, "bytes": sizes[part, dtype]}
        for (part, dtype), count in sorted(counts.items())
    ]


def _part_of(key: str) -> str:
    known, unknown = split_state_key(key), unknown_state(key)
    if known:
        return f"state {known[0]}"
    if ".gbuf_idx_" in key:
        return f"state {key.rpartition('.')[2]} (buckets)"
    return "weights" if unknown is None else f"state {unknown} (unknown)"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    layout = " ".join(f"{name}{size}" for name, size in found["layout"].items())
    sharding = f" ({found['sharding']})" if found["sharding"] else ""
    yield f"{found['folder']}"
    yield f"  optimizer    {found['optimizer']}{sharding}"
    yield f"  step         {found['step']}"
    yield f"  saved at     {layout or 'unknown'}"
    yield f"  common state {found['common_state']}"
    if found["unknown_names"]:
        yield f"  refers to    {', '.join(found['unknown_names'])} (not executed)"
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
