"""Compares published numbers with predictions of dry runs: ``python -m benchmarks.published``.

Prints the table of ``docs/planning.md``. What a publication does not say (layout, batch) is assumed
here, in the command; nothing is fitted to the published numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from megatron_muon.dry_run.command import main as plan

_COMMON = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --train-iters 20 --lr 4e-3 "
    "--lr-decay-style constant --tokenizer-type NullTokenizer --mock-data --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--matrix-exchange-buffer-mb 4096"
)
_EXPERTS = "--moe-router-topk 8 --moe-token-dispatcher-type alltoall"
_LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256"
)
_QWEN_7B = (
    "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 "
    "--group-query-attention --num-query-groups 4 --vocab-size 152064 --add-qkv-bias"
)
_QWEN_30B = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm "
    "--vocab-size 151936 --num-experts 128 "
    f"--moe-ffn-hidden-size 768 {_EXPERTS} --expert-model-parallel-size 8"
)
_KIMI_K2 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 "
    "--vocab-size 163840 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 384 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    f"--moe-layer-freq ([0]*1+[1]*60) {_EXPERTS} --pipeline-model-parallel-size 4 "
    "--decoder-last-pipeline-num-layers 13 --expert-model-parallel-size 64"
)
_A800 = {"node_gb_per_s": 160.0}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published number.

    Attributes:
        what: Its source and quantity.
        value: The number.
        unit: ``ms`` of the optimizer, or ``%`` of throughput relative to AdamW.
        optimizer: Key of the compared prediction.
        gpu: Device.
        ranks: (number of GPUs, number linked by NVLink).
        batch: Sequences of a global batch, assumed.
        command: Model and layout.
        rates: Overrides of the device's rates.
    """

    what: str
    value: float
    unit: str
    optimizer: str
    gpu: str
    ranks: tuple[int, int]
    batch: int
    command: str
    rates: dict[str, float] = field(default_factory=dict)


PUBLISHED = (
    Published(
        what="NVIDIA Muon, Kimi-K2, 256 GB300: throughput",
        value=-2.1,
        unit="%",
        optimizer="muon_distributed",
        gpu="gb300",
        ranks=(256, 64),
        batch=4096,
        command=_KIMI_K2,
    ),
    Published(
        what="NVIDIA Muon, Qwen3-30B-A3B, 8 GB300: throughput",
        value=-3.8,
        unit="%",
        optimizer="muon_distributed",
        gpu="gb300",
        ranks=(8, 8),
        batch=512,
        command=_QWEN_30B,
    ),
    Published(
        what="DMuon, Qwen2.5-7B, 8 A800: optimizer",
        value=188.8,
        unit="ms",
        optimizer="ours",
        gpu="a100",
        ranks=(8, 8),
        batch=128,
        command=_QWEN_7B,
        rates=_A800,
    ),
    Published(
        what="DMuon, Llama-3.1-8B, 8 A800: optimizer",
        value=260.4,
        unit="ms",
        optimizer="ours",
        gpu="a100",
        ranks=(8, 8),
        batch=128,
        command=_LLAMA_8B,
        rates=_A800,
    ),
    Published(
        what="DMuon, Qwen2.5-7B, 256 A800: optimizer",
        value=22,
        unit="ms",
        optimizer="ours",
        gpu="a100",
        ranks=(256, 8),
        batch=512,
        command=_QWEN_7B,
        rates=_A800,
    ),
    Published(
        what="DMuon, Qwen2.5-7B, 256 A800: throughput",
        value=-0.2,
        unit="%",
        optimizer="ours",
        gpu="a100",
        ranks=(256, 8),
        batch=512,
        command=_QWEN_7B,
        rates=_A800,
    ),
)


def predicted(one: Published) -> float:
    """Return the prediction of a published number by a dry run, in its unit."""
    with tempfile.TemporaryDirectory() as folder:
        rates, report = Path(folder, "rates.json"), Path(folder, "report.json")
        rates.write_text(json.dumps(one.rates), encoding="utf-8")
        ranks, node = one.ranks
        command = [
            *("--world-size", str(ranks), "--ranks-per-node", str(node), "--gpu", one.gpu),
            *("--cost-table", str(rates), "--json", str(report)),
            *("examples/pretrain_gpt_small.py", *one.command.split(), *_COMMON.split()),
            *("--global-batch-size", str(one.batch), "--optimizer", "dmuon"),
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            if code := plan(command):
                raise RuntimeError(f"{one.what}: the dry run ended with {code}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["prediction"]
    if one.unit == "ms":
        return float(found["optimizer_ms"][one.optimizer])
    return float(100 / (1 + found["percent_over_adamw"][one.optimizer] / 100) - 100)


def main() -> int:
    """Print the table."""
    rows = []
    for one in PUBLISHED:
        ours = predicted(one)
        error = f"{100 * (ours / one.value - 1):+.0f} %"
        rows.append((one.what, f"{one.value:g} {one.unit}", f"{ours:.2f} {one.unit}", error))
        print(rows[-1], file=sys.stderr, flush=True)
    rows.append(
        ("NVIDIA layer-sharded Muon, 32 GB300", "632 → 157 ms", "not predicted: no model named", "")
    )
    print("\n".join(table(("published", "number", "predicted", "error"), rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
