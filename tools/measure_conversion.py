"""Measures speed and peak memory of a conversion against a plain copy of the same checkpoint.

    python tools/measure_conversion.py [--gigabytes 2] [--folder FOLDER] [--to dmuon …]

Writes a checkpoint of that size with the shapes of a Llama-like GPT and the state of Megatron's
Adam, copies it (with fsync, like the tool), converts it, and prints one line each. All files are
removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from megatron_muon.checkpoint.names import ADAM_STATES, MASTER_OF_ADAM, state_key
from megatron_muon.offline.outputs import OutChunk, Output, OutTensor
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.writing import write_checkpoint, write_tracker

HIDDEN, FFN, HEADS, GROUPS, VOCAB = 1024, 2816, 16, 4, 32000
BYTES_PER_PARAMETER = 14  # bf16 weight, fp32 master and two moments
KIB = 1024


@dataclass(frozen=True)
class Noise:
    """A value of standard normal elements."""

    seed: int

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(dtype)


def shapes(layers: int, hidden: int = HIDDEN, ffn: int = FFN) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model by key, with stacked layers."""
    head = hidden // HEADS
    return {
        "embedding.word_embeddings.weight": (VOCAB * hidden // HIDDEN, hidden),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, hidden),
        "decoder.layers.self_attention.linear_qkv.weight": (
            layers,
            hidden + 2 * GROUPS * head,
            hidden,
        ),
        "decoder.layers.self_attention.linear_proj.weight": (layers, hidden, hidden),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, hidden),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 2 * ffn, hidden),
        "decoder.layers.mlp.linear_fc2.weight": (layers, hidden, ffn),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (VOCAB * hidden // HIDDEN, hidden),
    }


def make_checkpoint(root: Path, gigabytes: float, hidden: int = HIDDEN, ffn: int = FFN) -> None:
    """Write a checkpoint of Megatron's Adam (fully_reshardable), one chunk per layer."""

    def numel(layers: int) -> int:
        return sum(torch.Size(shape).numel() for shape in shapes(layers, hidden, ffn).values())

    fixed, layer = numel(0), numel(1) - numel(0)
    layers = max(1, round((gigabytes * 2**30 / BYTES_PER_PARAMETER - fixed) / layer))
    tensors = []
    for key, shape in shapes(layers, hidden, ffn).items():
        tensors.append(_tensor(key, shape, torch.bfloat16))
        tensors += [
            _tensor(state_key(state, key), shape, torch.float32)
            for state in (MASTER_OF_ADAM, *ADAM_STATES)
        ]
    group = {
        "is_expert_parallel": False,
        "wd_mult": 1.0,
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "step": 100,
    }
    args = argparse.Namespace(
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=hidden // HEADS,
        swiglu=True,
    )
    output = Output(
        tensors=tuple(tensors),
        blobs={},
        common={
            "iteration": 100,
            "args": args,
            "optimizer": {"optimizer": {"param_groups": [group]}},
        },
        common_in_file=False,
        backend={"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    )
    write_checkpoint(root / "iter_0000100", output)
    write_tracker(root, 100)


def _tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> OutTensor:
    stacked = ".layers." in key
    pieces = shape[0] if stacked else 1
    chunks = tuple(
        OutChunk(
            offset=(piece if stacked else 0, *(0 for _ in shape[1:])),
            shape=(1, *shape[1:]) if stacked else shape,
            value=Noise(piece),
        )
        for piece in range(pieces)
    )
    return OutTensor(key=key, shape=shape, dtype=dtype, chunks=chunks, rule="noise")


def copy_seconds(source: Path, target: Path) -> float:
    """Return the seconds of a plain copy, with fsync."""
    start = time.monotonic()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    return time.monotonic() - start


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Measured:
    """Measurements of a run of the tool; the baseline is a process that only imports it.

    Attributes:
        seconds: Wall time of the process.
        start_seconds: Wall time of the baseline.
        peak: Peak of the sampled memory of all its processes (proportional set size), in bytes.
        start_peak: The same of the baseline.
        grown: Difference of the peak of its largest process from that of the baseline, in bytes,
            as recorded by the system, not sampled.
    """

    seconds: float
    start_seconds: float
    peak: int
    start_peak: int
    grown: int


def measure(arguments: list[str]) -> Measured:
    """Run ``python -m megatron_muon.checkpoint`` and measure it."""
    module = ["-m", "megatron_muon.checkpoint"]
    start_seconds, start_peak, start_alone = _watch([*module, "inspect", "--help"])
    seconds, peak, alone = _watch([*module, *arguments])
    return Measured(
        seconds=seconds,
        start_seconds=start_seconds,
        peak=peak,
        start_peak=start_peak,
        grown=alone - start_alone,
    )


_BETWEEN = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(ended.returncode)
"""
"""Runs a command and prints its peak; processes inherit that of a parent, which must be small."""


def _watch(arguments: list[str]) -> tuple[float, int, int]:
    """Run Python and return its seconds, its peak memory with children, and that of the largest."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    between = [sys.executable, "-I", "-S", "-c", _BETWEEN]
    start, peak = time.monotonic(), 0
    with subprocess.Popen(
        [*between, sys.executable, "-W", "ignore", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None:
            peak = max(peak, sum(_memory(pid) for pid in _descendants(process.pid)))
            time.sleep(0.03)
        assert process.stdout is not None and process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
    if process.returncode:
        raise RuntimeError(errors)
    return time.monotonic() - start, peak, int(output) * KIB


def _descendants(pid: int) -> list[int]:
    """Return all processes started by one, directly or indirectly."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [found for child in text.split() for found in (int(child), *_descendants(int(child)))]


def _memory(pid: int) -> int:
    """Return the proportional set size, in which shared memory is counted once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="output folder; default: a temporary folder")
    parser.add_argument("--to", nargs="+", default=["dmuon", "orth_dion", "adam"])
    parser.add_argument("--workers", help="--workers of the tool")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        root = Path(made)
        make_checkpoint(root / "source", options.gigabytes)
        infos = Checkpoint(root / "source").tensors.values()
        total, largest = sum(i.nbytes for i in infos), max(i.nbytes for i in infos)
        print(f"{total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB")
        flags = ["--workers", options.workers] if options.workers else []
        for to in options.to:
            ratios = []
            # Alternating, because other processes and the page cache change the disk's speed.
            for _ in range(options.rounds):
                drop_from_page_cache(root)
                copied = copy_seconds(root / "source", root / "copy")
                shutil.rmtree(root / "copy")
                drop_from_page_cache(root)
                target = str(root / "converted")
                found = measure(["convert", str(root / "source"), target, "--to", to, *flags])
                written = sum(p.stat().st_size for p in Path(target).rglob("*") if p.is_file())
                shutil.rmtree(target)
                work = found.seconds - found.start_seconds
                ratios.append((total + written) / 2 / work / (total / copied))
                print(
                    f"to {to:10} plain copy {copied:5.1f} s {total / copied / 1e6:5.0f} MB/s; "
                    f"conversion {work:5.1f} s (plus {found.start_seconds:.1f} s to start) "
                    f"{total / work / 1e6:5.0f} MB/s read {written / work / 1e6:5.0f} MB/s "
                    f"written; peak {found.peak / 1e6:.0f} MB ({found.start_peak / 1e6:.0f} MB "
                    "at start)",
                    flush=True,
                )
            print(f"to {to:10} median of conversion / copy speed: {median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
