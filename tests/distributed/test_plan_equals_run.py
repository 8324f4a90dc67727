"""``python -m megatron_muon.plan`` predicts the counts of four gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import flags, pretrain_with_our_hooks

ROOT = Path(__file__).parents[2]
FP32 = ("--dmuon-compute-dtype", "fp32", "--dmuon-exchange-dtype", "fp32")
"""The dtype on a CPU; a GPU would use bf16."""


def _counters(rank: int, *args: Any) -> list[tuple[int, int, int]]:
    """(bytes sent, peak, messages) of a rank in a step, for each of its exchanges."""
    _, optimizer = pretrain_with_our_hooks(rank, *args)
    return [
        (c.sent_bytes, c.peak_buffer_bytes, c.messages)
        for c in (
            child.exchange.counters
            for child in optimizer.chained_optimizers
            if getattr(child, "exchange", None) is not None
        )
    ]


@pytest.mark.parametrize(
    ("tp", "pp", "extra"),
    [
        (2, 1, ("--optimizer", "dmuon", *FP32)),
        (1, 2, ("--optimizer", "dmuon", *FP32)),
        (2, 1, ("--optimizer", "orth_dion")),
    ],
    ids=["dmuon-tp2-dp2", "dmuon-dp2-pp2", "orth_dion-tp2-dp2"],
)
def test_bytes_messages_and_memory_are_those_that_ranks_count(
    ranks: Callable[..., list[Any]], tmp_path: Path, tp: int, pp: int, extra: tuple[str, ...]
) -> None:
    from megatron_muon import cpu

    fully = ("--dist-ckpt-optim-fully-reshardable", "--hidden-size", "128")
    command = flags(tmp_path, tmp_path, tp, pp, 1, (*fully, *extra))[len(cpu.default_flags()) :]
    subprocess.run(
        [
            *(sys.executable, "-m", "megatron_muon.plan", "--world-size", "4"),
            *("--json", str(tmp_path / "plan.json"), "examples/pretrain_gpt_small.py", *command),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=200,
    )
    stages = json.loads((tmp_path / "plan.json").read_text())["stages"]
    counted = ranks(
        4, _counters, tmp_path, tmp_path, tp, pp, 1, (*fully, *extra), init_process_group=False
    )
    assert len(stages) == pp
    for number, stage in enumerate(stages):
        [group] = stage["groups"]
        mine = [of_rank[0] for of_rank in counted[number * 4 // pp : (number + 1) * 4 // pp]]
        assert group["sent_bytes"] == max(sent for sent, _, _ in mine) > 0
        assert group["messages"] == max(messages for _, _, messages in mine)
        assert abs(group["counted_against_plan"]["memory_percent"]) < 10
        if "dmuon" in extra:
            # Orth-Dion's ranks do not count what QR and products take beside their factors.
            peak = max(peak for _, peak, _ in mine)
            assert group["memory"]["step"] == pytest.approx(peak, rel=0.1)
