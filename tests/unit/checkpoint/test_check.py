"""Errors of a mismatched checkpoint, from its keys and shapes only."""

from __future__ import annotations

import pytest

from megatron_muon.checkpoint.check import checkpoint_problems, optimizer_of

FC1, NORM = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_norm.weight"
FACTOR = "optimizer.state.right_factor.decoder.layers.0."
DMUON = {
    f"optimizer.state.fp32_param.{FC1}": (2, 64, 32),
    f"optimizer.state.momentum_buffer.{FC1}": (2, 64, 32),
    f"optimizer.state.fp32_param.{NORM}": (64,),
    f"optimizer.state.exp_avg.{NORM}": (64,),
    f"optimizer.state.exp_avg_sq.{NORM}": (64,),
}
ORTH_DION = DMUON | {f"{FACTOR}mlp.linear_fc1.weight[gate]": (32, 8)}
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0."
ADAM_BUCKETS = {f"{BUCKET}exp_avg": (9,)}
ADAM = {f"optimizer.state.exp_avg.{FC1}": (2, 64, 32)}
MUON = {f"chained_0.{key}": shape for key, shape in DMUON.items()}

Keys = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (DMUON, "dmuon"),
        (ORTH_DION, "orth_dion"),
        (ADAM_BUCKETS, "Megatron's Adam with the distributed optimizer"),
        (ADAM, "Megatron's Adam"),
        (MUON, "megatron-core's muon"),
        ({"optimizer.state.exp_inf.x": (1,)}, "another optimizer"),
        ({"decoder.layers.0.mlp.linear_fc1.weight": (64, 64)}, ""),
        ({}, ""),
    ],
)
def test_who_wrote_a_checkpoint(keys: Keys, name: str) -> None:
    assert optimizer_of(keys) == name


@pytest.mark.parametrize(("wanted", "optimizer"), [(DMUON, "dmuon"), (ORTH_DION, "orth_dion")])
def test_matching_state_has_no_problems(wanted: Keys, optimizer: str) -> None:
    assert checkpoint_problems(wanted, wanted | {"optimizer.more": (1,)}, optimizer) == []
    assert checkpoint_problems({}, wanted, optimizer) == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "holds no optimizer state: --no-load-optim restarts"),
        (ADAM, "state of Megatron's Adam, and this run uses --optimizer dmuon: convert its state"),
        (
            MUON,
            "optimizer state of megatron-core's muon, and this run uses --optimizer dmuon",
        ),
        (
            ORTH_DION,
            "optimizer state of orth_dion, and this run uses --optimizer dmuon: type",
        ),
        (
            ORTH_DION,
            (
                "type --optimizer orth_dion to continue with it, convert its state with python -m "
                "megatron_muon.checkpoint convert FOLDER NEW --to dmuon, and load NEW, or --no-load"
            ),
        ),
    ],
)
def test_another_optimizers_checkpoint(found: Keys, message: str) -> None:
    (problem,) = checkpoint_problems(DMUON, found, "dmuon")
    assert message in problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{FACTOR}mlp.linear_fc1.weight[gate]": (32, 4)}, "--orth-dion-rank-fraction 0.125"),
        (
            {f"optimizer.state.fp32_param.{FC1}": (4, 64, 32)},
            "has shape 4x64x32 in the checkpoint and 2x64x32 here",
        ),
    ],
)
def test_another_size(changes: Keys, message: str) -> None:
    (problem,) = checkpoint_problems(ORTH_DION, ORTH_DION | changes, "orth_dion")
    assert message in problem
    assert "mlp.linear_fc1.weight" in problem


def test_a_parameter_that_a_rule_moved() -> None:
    found = {k: s for k, s in DMUON.items() if k != f"optimizer.state.momentum_buffer.{FC1}"}
    found |= {
        f"optimizer.state.exp_avg.{FC1}": (2, 64, 32),
        "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight": (2, 32, 64),
    }
    (problem,) = checkpoint_problems(DMUON, found, "dmuon")
    assert (
        "mlp.linear_fc1.weight was trained with Adam in the checkpoint and is with the" in problem
    )
    assert "--matrix-rule" in problem


def test_a_parameter_that_is_not_there() -> None:
    found = {key.replace("layers.mlp", "layers.7.mlp"): shape for key, shape in DMUON.items()}
    (problem,) = checkpoint_problems(DMUON, found, "dmuon")
    assert "decoder.layers.mlp.linear_fc1.weight has no optimizer state" in problem


def test_each_kind_of_problem_is_reported_once() -> None:
    found = {key: (shape[0] // 2, *shape[1:]) for key, shape in DMUON.items()}
    assert len(checkpoint_problems(DMUON, found, "dmuon")) == 1


def test_the_advised_command_exists() -> None:
    from megatron_muon.checkpoint.check import convert_advice
    from megatron_muon.offline.command import build_parser

    for optimizer in ("dmuon", "orth_dion"):
        message = convert_advice(optimizer).removesuffix(", and load NEW")
        _, _, command = message.partition("python -m megatron_muon.checkpoint ")
        options = build_parser().parse_args(command.split())
        assert (options.source, options.target, options.to) == ("FOLDER", "NEW", optimizer)
