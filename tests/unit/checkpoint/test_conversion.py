"""convert on small runs created without Megatron: supported and refused inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.command import main
from megatron_muon.offline.reading import Checkpoint
from tests.unit.checkpoint.small_run import ADAM_GROUP, HIDDEN, LAYERS, SHAPES, STEP, save_run

WITHOUT_STEP = {key: value for key, value in ADAM_GROUP.items() if key != "step"}
MOMENTS = ("exp_avg", "exp_avg_sq")


def convert(run: Path, target: Path, to: str, *flags: str) -> Checkpoint:
    assert main(["convert", str(run), str(target), "--to", to, *flags]) == 0
    return Checkpoint(target)


@pytest.mark.parametrize("nested", [True, False])
def test_the_step_count_of_torchs_adam_is_found(tmp_path: Path, nested: bool) -> None:
    """Without Transformer Engine and Apex it is not in the groups, and not nested for fp32."""
    inner = {"param_groups": [WITHOUT_STEP], "state": {"common_step": torch.tensor(float(STEP))}}
    run = save_run(
        tmp_path / "run", states=MOMENTS, optimizer={"optimizer": inner} if nested else inner
    )
    groups = convert(run, tmp_path / "dmuon", "dmuon").common.value["optimizer"]["optimizer"]
    assert [group["step"] for group in groups["param_groups"]] == [STEP, STEP]
    (matrices, adam) = convert(run, tmp_path / "muon", "muon").common.value["optimizer"].values()
    assert adam["state"]["common_step"].equal(torch.tensor(float(STEP)))
    assert not any("step" in group for group in (*adam["param_groups"], *matrices["param_groups"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": [WITHOUT_STEP]}, "has no step count of Adam"),
        (
            {"states": MOMENTS, "dtype": torch.bfloat16},
            "the checkpoint has no fp32 masters (none of embedding.word_embeddings.weight)",
        ),
    ],
    ids=["steps", "masters"],
)
def test_missing_settings_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    run = save_run(tmp_path / "run", **changes)
    assert main(["convert", str(run), str(tmp_path / "new"), "--to", "dmuon"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_reasons_without_any_matrix_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run")
    flags = ("--matrix-min-dim", "65", "--matrix-rule", "*.linear_fc2.weight:optimizer=adam")
    assert main(["convert", str(run), str(tmp_path / "new"), "--to", "dmuon", *flags]) == 2
    reasons = "6 a side shorter than 65, 2 embedding or output layer, 2 rule, 1 norm or bias"
    assert f"dmuon to train: {reasons} (--matrix-min-dim is 65)." in capsys.readouterr().err


def test_masters_are_the_weights_of_a_target_without_masters(tmp_path: Path) -> None:
    """The masters were trained; the weights may be rounded."""
    run = save_run(tmp_path / "run")
    there, source = convert(run, tmp_path / "muon", "muon"), Checkpoint(run)
    for key in SHAPES:
        assert there.read(key).equal(source.read(f"optimizer.state.param.{key}"))
        assert not source.read(key).equal(there.read(key))
    assert not any("param." in key for key in there.tensors)


@pytest.mark.parametrize("some", [False, True])
def test_parameters_without_masters_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], some: bool
) -> None:
    """megatron-core's optimizer of 16-bit weights has no masters of fp32 weights."""
    lacking = SHAPES if not some else ["decoder.final_layernorm.weight"]
    states = {key: MOMENTS if key in lacking else ("param", *MOMENTS) for key in SHAPES}
    convert(save_run(tmp_path / "run", states=states), tmp_path / "new", "dmuon")
    of = " of 1 parameters (decoder.final_layernorm.weight, …)" if some else ""
    assert f"saved no fp32 masters{of}: its fp32 weights become" in capsys.readouterr().out


def test_other_files_are_copied_or_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run")
    source = Checkpoint(run).folder
    for name in ("notes.txt", "train_state.pt", "integrity.json", "half.distcp"):
        (source / name).write_text(name)
    (source / "tokenizer").mkdir()
    folder = convert(run, tmp_path / "new", "dmuon").folder
    message = capsys.readouterr().out
    assert f"copied unchanged from {source}: notes.txt, train_state.pt\n" in message
    assert f"not copied from {source}: tokenizer; copy them yourself" in message
    assert (folder / "notes.txt").read_text() == "notes.txt"
    assert not any((folder / name).exists() for name in ("integrity.json", "half.distcp"))
    assert main(["inspect", str(folder), "--hashes"]) == 0
    convert(run, tmp_path / "new", "dmuon", "--overwrite")
    (folder / "more.txt").write_text("of somebody else")
    command = ["convert", str(run), str(tmp_path / "new"), "--to", "dmuon", "--overwrite"]
    assert main(command) == 2
    assert "holds more.txt, which is not part of a checkpoint" in capsys.readouterr().err


def test_adapters_use_adam_and_wrapped_weights_keep_their_split(tmp_path: Path) -> None:
    """As in training (``matrices.adapters``), at a rank that is not the short side."""
    qkv = "decoder.layers.self_attention.linear_qkv"
    weights = {key.replace(qkv, f"{qkv}.to_wrap"): shape for key, shape in SHAPES.items()}
    weights |= {
        f"{qkv}.adapter.linear_in.weight": (LAYERS, HIDDEN, HIDDEN),
        f"{qkv}.adapter.linear_out.weight": (LAYERS, 2 * HIDDEN, HIDDEN),
    }
    runs = save_run(tmp_path / "bare"), save_run(tmp_path / "adapted", weights=weights)
    flags = ("--orth-dion-rank-fraction", "0.5")
    bare, adapted = (convert(r, tmp_path / f"{r.name} to", "orth_dion", *flags) for r in runs)
    here, there = ({k for k in c.tensors if ".right_factor." in k} for c in (bare, adapted))
    assert here == there and any("[" in key for key in here)
    assert f"optimizer.state.momentum_buffer.{qkv}.to_wrap.weight" in adapted.tensors
    assert f"optimizer.state.exp_avg_sq.{qkv}.adapter.linear_out.weight" in adapted.tensors
    rule = ("--matrix-rule", "*.adapter.linear_out.weight:optimizer=matrix")
    ruled = convert(runs[1], tmp_path / "ruled", "dmuon", *rule)
    assert f"optimizer.state.momentum_buffer.{qkv}.adapter.linear_out.weight" in ruled.tensors
