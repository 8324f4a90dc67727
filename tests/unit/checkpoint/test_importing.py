"""import into the form of a small run created without Megatron."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.command import main
from megatron_muon.offline.reading import Checkpoint
from tests.unit.checkpoint.small_run import ADAM, HIDDEN, LAYERS, SHAPES, STEP, save_run

ROUTER, BIAS = "decoder.layers.mlp.router.weight", "decoder.layers.mlp.router.expert_bias"


def tool(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def exported(run: Path, file: Path, *flags: str) -> dict[str, Any]:
    assert tool("export", run, file, *flags) == 0
    content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


@pytest.mark.parametrize("names", ["megatron", "hf"])
def test_missing_untrained_weights_are_reported(
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


def _renamed(content: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    return content | {
        part: {rename(name): kept for name, kept in content[part].items()}
        for part in ("model", "state")
    }


def _compiled_layers(name: str) -> str:
    return re.sub(r"(layers\.\d+)", r"\1._orig_mod", name)


def _checkpointed(name: str) -> str:
    return re.sub(r"(\.mlp)\.", r"\1._checkpoint_wrapped_module.", name)


@pytest.mark.parametrize("names", ["megatron", "hf"])
@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("module.{}".format, "'module.' was removed"),
        ("_orig_mod.{}".format, "'_orig_mod.' was removed"),
        ("module._orig_mod.{}".format, "'_orig_mod.', 'module.' was removed"),
        ("_orig_mod.module.{}".format, "'_orig_mod.', 'module.' was removed"),
        ("_forward_module.model.{}".format, "'_forward_module.model.' was removed"),
        (_compiled_layers, "'_orig_mod.' was removed"),
        (lambda n: f"module.{_checkpointed(n)}", "'_checkpoint_wrapped_module.', 'module.' was"),
    ],
    ids=["DDP", "compiled", "DDP of compiled", "compiled DDP", "Lightning", "layers", "inside"],
)
def test_names_of_a_wrapped_model_are_those_of_the_bare_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rename: Callable[[str], str],
    message: str,
    names: str,
) -> None:
    run = save_run(tmp_path / "run")
    content = exported(run, tmp_path / "bare.pt", "--names", names)
    torch.save(_renamed(content, rename), tmp_path / "wrapped.pt")
    for file in ("bare", "wrapped"):
        capsys.readouterr()
        arguments = ("--like", run, "--names", names)
        assert tool("import", tmp_path / f"{file}.pt", tmp_path / file, *arguments) == 0
        output = capsys.readouterr().out
        assert output.count("names in the file are those of a wrapped model") == (file == "wrapped")
        assert (message in output) == (file == "wrapped")
        assert tool("verify", run, tmp_path / file) == 0


def test_a_prefix_of_only_some_names_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run")
    weights = exported(run, tmp_path / "bare.pt")["model"]
    name = "output_layer.weight"
    mixed = {n if n == name else f"module.{n}": t for n, t in weights.items()}
    torch.save(mixed, tmp_path / "mixed.pt")
    capsys.readouterr()
    assert tool("import", tmp_path / "mixed.pt", tmp_path / "new", "--like", run) == 2
    hint = f"the prefix 'module.' is removed only if all names have it, and {name} does not"
    assert hint in capsys.readouterr().err
    torch.save(mixed | {"a.b": weights[name]}, tmp_path / "strange.pt")
    assert tool("import", tmp_path / "strange.pt", tmp_path / "new", "--like", run) == 2
    message = capsys.readouterr().err
    assert "has a.b and" in message and "the prefix 'module.' is removed" in message
    torch.save(
        {f"module.{n}": t for n, t in weights.items()} | {"module.x": weights[name]},
        tmp_path / "more.pt",
    )
    assert tool("import", tmp_path / "more.pt", tmp_path / "new", "--like", run) == 2
    assert "more.pt has x, which" in capsys.readouterr().err
    torch.save(
        {f"{prefix}{name}": weights[name] for prefix in ("", "_orig_mod.")}, tmp_path / "twice.pt"
    )
    assert tool("import", tmp_path / "twice.pt", tmp_path / "new", "--like", run) == 2
    assert f"has {name} twice, of a wrapped model" in capsys.readouterr().err


def test_masters_of_a_file_are_the_weights_of_a_run_without_masters(tmp_path: Path) -> None:
    """megatron-core's optimizers of fp32 weights have none; the file's weights are rounded."""
    content = exported(save_run(tmp_path / "run"), tmp_path / "whole.pt")
    content["model"] = {name: weight.bfloat16() for name, weight in content["model"].items()}
    content["step"] = 7
    torch.save(content, tmp_path / "file.pt")
    inner = {"param_groups": [{"betas": (0.9, 0.95)}], "state": {"common_step": torch.tensor(2.0)}}
    like = save_run(tmp_path / "like", states=ADAM[1:], optimizer=inner)
    assert tool("import", tmp_path / "file.pt", tmp_path / "new", "--like", like) == 0
    new = Checkpoint(tmp_path / "new")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    stacked = new.read(name.replace(".1.", "."))
    assert stacked[1].equal(content["state"][name]["fp32_param"])
    assert new.common.value["optimizer"]["state"]["common_step"].equal(torch.tensor(7.0))


@pytest.mark.parametrize(
    ("steps", "count", "message"),
    [
        ((3, 3), 3, ""),
        ((None, None), STEP, "the file has no step count of Adam: the count is"),
        ((3, 8), 8, "Adam has made between 3 and 8 steps on the parameters of the file: the count"),
    ],
)
def test_different_or_missing_step_counts_of_adam_are_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    steps: tuple[int | None, int | None],
    count: int,
    message: str,
) -> None:
    run = save_run(tmp_path / "run")
    content = exported(run, tmp_path / "whole.pt")
    states = {
        name: {"step": steps[i > 0], **{k: v for k, v in kept.items() if k != "fp32_param"}}
        for i, (name, kept) in enumerate(content["state"].items())
    }
    groups = [{"params": list(states)}]
    whole = {"model": content["model"], "optimizer": {"state": states, "param_groups": groups}}
    torch.save(whole, tmp_path / "file.pt")
    capsys.readouterr()
    assert tool("import", tmp_path / "file.pt", tmp_path / "new", "--like", run) == 0
    output = capsys.readouterr().out
    assert message in output and ("the count is" in output) == bool(message)
    groups = Checkpoint(tmp_path / "new").common.value["optimizer"]["optimizer"]["param_groups"]
    assert [group["step"] for group in groups] == [count]
