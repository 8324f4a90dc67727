"""Invalid inputs are refused by the launcher: a sentence, code 2 on every rank, no hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

SCRIPT = """
import os, sys
from pathlib import Path
from tests.distributed.pretraining import pretrain

folder = Path(__file__).parent
pretrain(int(os.environ["RANK"]), folder, folder, 1, 1, 1, tuple(sys.argv[1:]))
"""


def launch(rank: int, script: str, flags: list[str]) -> tuple[int, str]:
    """Exit code and standard error of the launcher on one rank."""
    import contextlib
    import io

    from megatron_muon.integration.launcher import main

    message = io.StringIO()
    with contextlib.redirect_stderr(message):
        code = main(["--cpu", script, *flags])
    return code, message.getvalue()


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (
            "--muon-coefficient-type septic --muon-num-ns-steps 5",
            ["--muon-coefficient-type", "septic", "quintic"],
        ),
        ("--muon-num-ns-steps 0", ["--muon-num-ns-steps"]),
        ("--matrix-rule *:optimiser=adam", ["--matrix-rule", "optimiser", "optimizer"]),
        ("--matrix-rules /nowhere/rules.json", ["--matrix-rules /nowhere/rules.json"]),
        (
            "--matrix-rule decoder.*.no_such.weight:lr_mult=2",
            ["rule 'decoder.*.no_such.weight'", "matches no trainable parameter"],
        ),
        (
            "--matrix-exchange-buffer-mb 0.001",
            ["--matrix-exchange-buffer-mb 0.001 is too small", "linear_fc1.weight"],
        ),
        (
            "--use-precision-aware-optimizer --matrix-min-dim 0 --muon-tp-mode duplicated",
            ["--use-precision-aware-optimizer", "--matrix-min-dim", "--muon-tp-mode", "3 conf"],
        ),
    ],
)
def test_wrong_flags(ranks: Ranks, tmp_path: Path, flags: str, sentences: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["--optimizer", "dmuon", *flags.split()]
    began = time.monotonic()
    results = ranks(2, launch, str(script), arguments, init_process_group=False, timeout=90)
    assert time.monotonic() - began < 60
    assert [code for code, _ in results] == [2, 2]
    for sentence in sentences:
        assert sentence in results[0][1]
    # Said once, by the first rank.
    assert results[1][1] == ""


def test_no_distributed_optimizer_at_dp2(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from megatron.training.arguments import parse_and_validate_args as parse\nparse()\n"
    )
    flags = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2"]
    flags += ["--optimizer", "dmuon"]
    results = ranks(2, launch, str(script), flags, init_process_group=False)
    assert [code for code, _ in results] == [2, 2]
    assert "data-parallel size 2" in results[0][1]
    assert "add --use-distributed-optimizer" in results[0][1]
