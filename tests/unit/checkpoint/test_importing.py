"""import into the form of a small run that was made without Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.reading import Checkpoint
from tests.unit.checkpoint.small_run import ADAM, HIDDEN, LAYERS, SHAPES, save_run

ROUTER, BIAS = "decoder.layers.mlp.router.weight", "decoder.layers.mlp.router.expert_bias"


def tool(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def exported(run: Path, file: Path, *flags: str) -> dict[str, Any]:
    assert tool("export", run, file, *flags) == 0
    content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


@pytest.mark.parametrize("names", ["megatron", "hf"])
def test_weights_that_nobody_trains_are_not_left_out_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    """A router's correction bias has no optimizer state."""
    run = save_run(
        tmp_path / "run",
        weights={**SHAPES, ROUTER: (LAYERS, 4, HIDDEN), BIAS: (LAYERS, 4)},
        states=dict.fromkeys((*SHAPES, ROUTER), ADAM),
    )
    content = exported(run, tmp_path / "whole.pt", "--names", names)
    lost = [name for name in content["model"] if "bias" in name]
    assert len(lost) == LAYERS
    for name in lost:
        del content["model"][name]
    torch.save(content, tmp_path / "file.pt")
    arguments = (tmp_path / "file.pt", tmp_path / "new", "--like", run, "--names", names)
    capsys.readouterr()
    assert tool("import", *arguments) == 2
    assert f"lacks the weight {lost[0]} and 1 more; type --partial" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert tool("import", *arguments, "--partial") == 0
    assert "weight of decoder.layers.1.mlp.router.expert_bias" in capsys.readouterr().out
    assert Checkpoint(tmp_path / "new").read(BIAS).equal(Checkpoint(run).read(BIAS))
