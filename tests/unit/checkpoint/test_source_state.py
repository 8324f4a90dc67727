"""Optimizer state of a distributed checkpoint in an unknown form is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_muon.offline.command import main
from tests.unit.checkpoint.small_run import ADAM_GROUP, SHAPES, save_run

WEIGHT = "decoder.layers.mlp.linear_fc2.weight"
SGD_GROUP = {"lr": 1e-3, "wd_mult": 1.0, "momentum": 0.9, "dampening": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"more": {f"optimizer.state.preconditioner.{WEIGHT}": SHAPES[WEIGHT]}},
            f"holds optimizer.state.preconditioner.{WEIGHT}, state of an unknown",
        ),
        (
            {"more": {f"chained_1.optimizer.state.max_exp_avg_sq.{WEIGHT}": SHAPES[WEIGHT]}},
            f"holds chained_1.optimizer.state.max_exp_avg_sq.{WEIGHT}, state of an unknown",
        ),
        (
            {"states": ("fp32_param", "exp_avg")},
            "has exp_avg of embedding.word_embeddings.weight without exp_avg_sq, like Lion's state",
        ),
        ({"states": ("momentum_buffer",), "groups": (SGD_GROUP,)}, "was saved by SGD"),
    ],
    ids=["another state", "in a chain", "Lion", "SGD"],
)
@pytest.mark.parametrize("command", ["convert", "import", "export"])
def test_state_of_an_unknown_optimizer_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    """It was once copied silently, or mistaken for Adam's or Muon's."""
    run, known = save_run(tmp_path / "run", **changes), save_run(tmp_path / "known")
    assert main(["export", str(known), str(tmp_path / "known.pt")]) == 0
    before = {path.name for path in tmp_path.iterdir()}
    arguments = {
        "convert": [str(run), str(tmp_path / "new"), "--to", "dmuon"],
        "import": [str(tmp_path / "known.pt"), str(tmp_path / "new"), "--like", str(run)],
        "export": [str(run), str(tmp_path / "new.pt")],
    }
    capsys.readouterr()
    assert main([command, *arguments[command]]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_inspect_shows_unknown_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = f"optimizer.state.preconditioner.{WEIGHT}"
    run = save_run(tmp_path / "run", groups=(ADAM_GROUP,), more={key: SHAPES[WEIGHT]})
    assert main(["inspect", str(run)]) == 0
    (line,) = (li for li in capsys.readouterr().out.splitlines() if "(unknown)" in li)
    assert line.split()[:5] == ["state", "preconditioner", "(unknown)", "float32", "1"]
