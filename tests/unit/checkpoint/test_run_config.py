"""Checkpoints without Megatron's arguments: missing settings are named, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.command import main
from megatron_muon.offline.common_state import read_run_config
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.reading import Checkpoint
from tests.unit.checkpoint.small_run import (
    ADAM,
    ADAM_GROUP,
    ARGS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    SHAPES,
    save_run,
)

FIELDS = f"""gated_linear_unit: true, hidden_size: {HIDDEN}, num_attention_heads: {HEADS},
  num_query_groups: {GROUPS}, kv_channels: null, moe_grouped_gemm: true"""
FLAT = f"model: {{{FIELDS}}}\noptimizer: {{lr: 0.25, weight_decay: 0.5, muon_momentum: 0.75}}\n"
NESTED = f"model: {{vocab_size: 128, transformer: {{{FIELDS}}}}}\noptimizer: {{lr: 0.25}}\n"
EXPERTS = {
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, 2, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.router.weight": (LAYERS, 2, HIDDEN),
}
FRACTION = ("--orth-dion-rank-fraction", "0.5")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize("text", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize("how", ["beside the checkpoint", "named"])
def test_right_factors_are_those_of_a_run_with_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, how: str
) -> None:
    bare, known = save_run(tmp_path / "bare", args=None), save_run(tmp_path / "known")
    file = (Checkpoint(bare).folder if how != "named" else tmp_path) / "run_config.yaml"
    convert = ("convert", bare, tmp_path / "c", "--to", "orth_dion", *FRACTION)
    assert "--run-config" in refused(capsys, *convert)
    assert not (tmp_path / "c").exists()
    file.write_text(text)
    flags = ("--run-config", file) if how == "named" else ()
    assert main([str(part) for part in (*convert, *flags)]) == 0
    assert (main(["convert", str(known), str(tmp_path / "k"), "--to", "orth_dion", *FRACTION])) == 0
    there, expected = Checkpoint(tmp_path / "c"), Checkpoint(tmp_path / "k")
    assert there.tensors.keys() == expected.tensors.keys()
    factors = [key for key in there.tensors if ".right_factor." in key]
    assert len(factors) == LAYERS * (3 + 1 + 2 + 1)
    assert all(there.read(key).equal(expected.read(key)) for key in factors)


@pytest.mark.parametrize("flag", ["--muon-no-split-qkv", "--matrix-no-split-gate-up"])
def test_a_flag_may_say_that_nothing_is_cut(tmp_path: Path, flag: str) -> None:
    """The other family is configured, and split."""
    bare = save_run(tmp_path / "bare", args=None)
    fields = {"--muon-no-split-qkv": "gated_linear_unit: true"}
    other = f"num_attention_heads: {HEADS}, num_query_groups: {GROUPS}, hidden_size: {HIDDEN}"
    (tmp_path / "c.yaml").write_text(f"model: {{{fields.get(flag, other)}}}")
    more = ("--run-config", str(tmp_path / "c.yaml"), flag, *FRACTION)
    assert main(["convert", str(bare), str(tmp_path / "c"), "--to", "orth_dion", *more]) == 0
    whole = "linear_qkv.weight" if flag == "--muon-no-split-qkv" else "linear_fc1.weight"
    keys = [key for key in Checkpoint(tmp_path / "c").tensors if ".right_factor." in key]
    assert sum(key.endswith(whole) for key in keys) == LAYERS
    assert len(keys) == LAYERS * (3 + (2 if "qkv" in flag else 3))


def test_names_of_experts_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One linear layer has all weights, or each its own: rules and factors use the name."""
    bare = save_run(tmp_path / "bare", args=None, weights=SHAPES | EXPERTS)
    for command in (
        ("convert", bare, tmp_path / "c", "--to", "dmuon"),
        ("export", bare, tmp_path / "c.pt"),
        ("import", tmp_path / "known.pt", tmp_path / "c", "--like", bare),
    ):
        torch.save({"model": {"x": torch.ones(1)}}, tmp_path / "known.pt")
        assert "does not say moe_grouped_gemm (there are neither" in refused(capsys, *command)
    (tmp_path / "c.yaml").write_text(FLAT)
    command = ("export", bare, tmp_path / "c.pt", "--run-config", tmp_path / "c.yaml")
    assert main([str(part) for part in command]) == 0
    names = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight0" in names


MUON_GROUP = {**ADAM_GROUP, "matrix_optimizer": "dmuon"}
DION_GROUP = {**ADAM_GROUP, "matrix_optimizer": "orth_dion"}
PLAIN_GROUP = {key: value for key, value in ADAM_GROUP.items() if key not in ("betas", "eps")}
MATRICES = {
    key: ("fp32_param", "momentum_buffer") if "linear" in key else ("fp32_param", *ADAM[1:])
    for key in SHAPES
}


@pytest.mark.parametrize(
    ("group", "command", "name"),
    [
        (MUON_GROUP, ("convert", "--to", "orth_dion"), "muon_momentum"),
        (DION_GROUP, ("convert", "--to", "dmuon"), "orth_dion_momentum"),
        (ADAM_GROUP, ("convert", "--to", "muon"), "muon_momentum"),
        (MUON_GROUP, ("export", "--format", "dion"), "muon_momentum"),
        (MUON_GROUP, ("export", "--format", "plain"), "muon_momentum"),
        (ADAM_GROUP, ("export", "--format", "torch-muon"), "weight_decay"),
        (PLAIN_GROUP, ("export", "--format", "torch-muon"), "adam_beta1"),
    ],
)
def test_numbers_of_the_optimizer_are_not_guessed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    group: dict[str, Any],
    command: tuple[str, ...],
    name: str,
) -> None:
    """A run configured by the API has its settings in no argument."""
    has_matrices = "matrix_optimizer" in group
    run = save_run(
        tmp_path / "run",
        args=None,
        groups=(ADAM_GROUP, group) if has_matrices else (group,),
        states=MATRICES if has_matrices else ADAM,
    )
    arguments = (command[0], run, tmp_path / "new.pt", *command[1:])
    message = refused(capsys, *arguments)
    assert f"does not say {name} (there are neither saved arguments nor a" in message
    assert f"'optimizer: {{{name}: …}}'" in message
    more = (
        "orth_dion_momentum: 0.5, muon_nesterov: true, adam_beta1: 0.9, adam_beta2: 0.95, "
        "adam_eps: 1.0e-8, muon_momentum"
    )
    text = FLAT.replace("muon_momentum", more)
    (tmp_path / "c.yaml").write_text(text)
    assert main([str(part) for part in (*arguments, "--run-config", tmp_path / "c.yaml")]) == 0


def test_the_momentum_that_is_named_is_used(tmp_path: Path) -> None:
    groups = (ADAM_GROUP, MUON_GROUP)
    run = save_run(tmp_path / "run", args=None, groups=groups, states=MATRICES)
    (tmp_path / "c.yaml").write_text(FLAT)
    more = ("--run-config", str(tmp_path / "c.yaml"), "--orth-dion-momentum", "0.5")
    assert main(["convert", str(run), str(tmp_path / "c"), "--to", "orth_dion", *more]) == 0
    key = "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight"
    average, kept = Checkpoint(run).read(key), Checkpoint(tmp_path / "c").read(key)
    torch.testing.assert_close(kept, average * 0.5 / (1 - 0.75))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "cannot be read as YAML"),
        ("model: !!python/object/apply:os.system [true]", "cannot be read as YAML"),
        ("- model", "has no section 'model'"),
        ("optimizer: {lr: 1}", "has no section 'model'"),
        ("", "has no section 'model'"),
        ("model: {gated_linear_unit: 'no'}", "gated_linear_unit is 'no' and must be true or false"),
        (
            "model: {num_query_groups: true}",
            "num_query_groups is True and must be a positive whole",
        ),
        (
            "model: {kv_channels: 0, hidden_size: [1]}",
            "hidden_size is .1. .*; kv_channels is 0 and",
        ),
        ("{model: {}, optimizer: {adam_eps: 1e-8}}", "adam_eps is '1e-8' and must be a number"),
    ],
)
def test_an_invalid_run_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_run_config(tmp_path / "run_config.yaml")
    with pytest.raises(CheckpointError, match="No such file"):
        read_run_config(tmp_path / "none.yaml")


def test_query_groups_of_another_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their rows divide those of the weight, and would split it at wrong positions."""
    bare = save_run(tmp_path / "bare", args=None)
    other = "num_attention_heads: 6, num_query_groups: 1, kv_channels: 8, gated_linear_unit: true"
    (tmp_path / "c.yaml").write_text(f"model: {{{other}}}")
    more = ("--to", "orth_dion", "--run-config", tmp_path / "c.yaml", *FRACTION)
    message = refused(capsys, "convert", bare, tmp_path / "c", *more)
    assert "128 rows are not 1 query groups (num_query_groups) of 64 rows" in message


def test_run_config_replaces_an_argument_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", args={**ARGS, "kv_channels": None, "muon_momentum": None})
    convert = ("convert", run, tmp_path / "c", "--to")
    assert "does not say muon_momentum (it is not among" in refused(capsys, *convert, "muon")
    assert "does not say kv_channels" in refused(capsys, *convert, "orth_dion", *FRACTION)
    (tmp_path / "c.yaml").write_text(FLAT)
    for to in (("muon",), ("orth_dion", *FRACTION, "--overwrite")):
        command = (*convert, *to, "--run-config", tmp_path / "c.yaml")
        assert main([str(part) for part in command]) == 0
