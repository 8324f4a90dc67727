"""Offline conversion of checkpoints of real runs, and real runs that continue from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.offline.command import main
from megatron_muon.offline.reading import Checkpoint
from tests.distributed.offline import (
    ADAM,
    ADAM_BUCKETS,
    ADAM_PLAIN,
    MUON,
    MUON_PLAIN,
    OF,
    RANK,
    STEPS,
    TARGET,
    Saves,
    convert,
    different,
    digest,
    refused,
    train,
    without_arguments,
)
from tests.distributed.test_checkpoint_saving import tensors_in
from tests.distributed.test_pretrain import DMUON, ORTH_DION

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("saved"))


def test_tensors_equal_those_read_by_torch(saved: Saves) -> None:
    checkpoint = Checkpoint(saved(*DMUON))
    whole = tensors_in(checkpoint.folder)
    assert whole.keys() == checkpoint.tensors.keys()
    assert all(checkpoint.read(key).equal(tensor) for key, tensor in whole.items())


def test_adam_to_dmuon_and_back(ranks: Ranks, saved: Saves, tmp_path: Path) -> None:
    """Through a run of dmuon at another layout, which loads and saves."""
    adam = saved(*ADAM)
    there = convert(adam, tmp_path / "dmuon", "dmuon")
    assert different(adam, there, "fp32_param of ") == []
    assert different(adam, there, "decoder.") == []
    whole, moments = tensors_in(there.folder), tensors_in(Checkpoint(adam).folder)
    name = "decoder.layers.mlp.linear_fc1.weight"
    momentum = whole[f"optimizer.state.momentum_buffer.{name}"]
    assert momentum.equal(moments[f"optimizer.state.exp_avg.{name}"]) and momentum.any()
    train(ranks, tmp_path / "dmuon", tmp_path / "saved", DMUON, tp=2, steps=2)
    assert different(there, tmp_path / "saved", "") == []
    back = convert(tmp_path / "saved", tmp_path / "adam", "adam")
    assert different(adam, back, "fp32_param of ") == []
    assert different(adam, back, "exp_avg of embedding") == []
    assert back.tensors.keys() == Checkpoint(adam).tensors.keys()
    after = train(ranks, tmp_path / "adam", tmp_path / "on", ADAM, pp=2)
    assert any(after)


def test_two_other_layouts_continue_equally(ranks: Ranks, saved: Saves, tmp_path: Path) -> None:
    convert(saved(*ADAM), tmp_path / "c", "orth_dion", *RANK)
    for name, sizes in (("tp", {"tp": 2}), ("pp", {"pp": 2})):
        train(ranks, tmp_path / "c", tmp_path / name, ORTH_DION, **sizes)
    assert different(tmp_path / "tp", tmp_path / "pp", "fp32_param of ", tolerance=1e-5) == []
    moved = different(tmp_path / "tp", saved(*ADAM), "fp32_param of decoder", tolerance=1e-5)
    assert len(moved) > 8


@pytest.mark.parametrize(
    "direction", ["muon to dmuon", pytest.param("dmuon to muon", marks=pytest.mark.slow)]
)
def test_upstream_muon_and_dmuon_continue_equally(
    ranks: Ranks, saved: Saves, tmp_path: Path, direction: str
) -> None:
    """The same momentum bit for bit, and the same next update up to the order of sums."""
    flags = (*DMUON[:2], "--bf16", *LIKE_UPSTREAM)
    here, there = ((*MUON, *PRECISE), flags)[:: 1 if direction == "muon to dmuon" else -1]
    assert _continue_equally(ranks, saved, tmp_path, (here, there), ("fp32_param of ",)) > 8


@pytest.mark.parametrize("direction", ["muon to dmuon", "dmuon to muon", "muon to muon"])
def test_upstream_muon_without_masters_and_dmuon_continue_equally(
    ranks: Ranks, saved: Saves, tmp_path: Path, direction: str
) -> None:
    """fp32 weights are the masters of megatron-core's muon, whose groups are nested otherwise."""
    flags = {"muon": (*MUON_PLAIN, *PRECISE), "dmuon": (*DMUON[:2], *LIKE_UPSTREAM)}
    here, there = (flags[name] for name in direction.split(" to "))
    weights = ("decoder.", "embedding.", "output_layer.")
    assert _continue_equally(ranks, saved, tmp_path, (here, there), weights) > 4
    masters = [key for key in Checkpoint(tmp_path / "c").tensors if ".fp32_param." in key]
    assert bool(masters) == (there[1] == "dmuon")


PRECISE = ("--muon-fp32-matmul-prec", "high")
LIKE_UPSTREAM = ("--matrix-no-split-gate-up", "--dmuon-compute-dtype", "fp32")


def _continue_equally(
    ranks: Ranks,
    saved: Saves,
    tmp_path: Path,
    flags: tuple[tuple[str, ...], tuple[str, ...]],
    weights: tuple[str, ...],
) -> int:
    """Count weights whose change in a step is 1000 times the difference of the two runs."""
    here, there = flags
    source = saved(*here)
    converted = convert(source, tmp_path / "c", there[1])
    states = (*weights, "momentum_buffer of ", "exp_avg of ", "exp_avg_sq of ")
    for state in states:
        assert different(source, converted, state) == []
    train(ranks, source, tmp_path / "here", here)
    train(ranks, tmp_path / "c", tmp_path / "there", there)
    for state in states:
        assert different(tmp_path / "here", tmp_path / "there", state, 1e-5) == []
    return sum(len(different(tmp_path / "here", source, w, 1e-2)) for w in weights)


@pytest.mark.parametrize("to", ["dmuon", "orth_dion", "adam", "muon"])
def test_fp32_adam_without_masters_continues(
    ranks: Ranks, saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """megatron-core's plain optimizer saves no masters; no weight was a matrix."""
    source = saved(*ADAM_PLAIN)
    capsys.readouterr()
    there = convert(source, tmp_path / "c", to, *OF.get(to, ()))
    message = "this run saved no fp32 masters: its fp32 weights become the masters"
    assert (message in capsys.readouterr().out) == (to != "muon")
    assert different(source, there, "decoder.") == []
    if to != "muon":
        for name in ("decoder.layers.mlp.linear_fc1.weight", "output_layer.weight"):
            key = f"optimizer.state.{'param' if to == 'adam' else 'fp32_param'}.{name}"
            assert there.read(key).equal(Checkpoint(source).read(name))
    flags = MUON_PLAIN if to == "muon" else TARGET[to]
    train(ranks, tmp_path / "c", tmp_path / "loaded", flags, steps=STEPS)
    assert different(there, tmp_path / "loaded", "") == []
    train(ranks, tmp_path / "loaded", tmp_path / "on", flags)
    assert len(different(tmp_path / "on", there, "decoder.", 1e-3)) > 3


RUN_CONFIG = """\
_target_: megatron.bridge.training.config.ConfigContainer
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  use_distributed_optimizer: true
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  gated_linear_unit: true
  hidden_size: 32
  kv_channels: null
  moe_grouped_gemm: false
  num_attention_heads: 4
  num_query_groups: 2
  pipeline_model_parallel_size: 1
  tensor_model_parallel_size: 1
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  lr: 0.01
  optimizer: adam
"""
"""Lines of Megatron-Bridge's file, for the model of these runs."""


def test_without_arguments_run_config_defines_fused_weights(
    ranks: Ranks, saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is guessed: once 8 right factors of unsplit weights were written instead of 14."""
    bare = without_arguments(saved(*ADAM), tmp_path / "bare")
    command = ("convert", str(bare), str(tmp_path / "c"), "--to", "orth_dion", *RANK)
    for flags, weight, field, whole in (
        ((), "self_attention.linear_qkv", "num_attention_heads", "--muon-no-split-qkv"),
        (
            ("--muon-no-split-qkv",),
            "mlp.linear_fc1",
            "gated_linear_unit",
            "--matrix-no-split-gate-up",
        ),
    ):
        message = refused(capsys, *command, *flags)
        assert f"decoder.layers.0.{weight}.weight cannot be split into its matrices" in message
        assert f"{field} (there are neither saved arguments nor a run_config.yaml)" in message
        assert f"--run-config that has 'model: {{{field}: …}}'" in message and whole in message
    folder = Checkpoint(bare).folder
    (folder / "run_config.yaml").write_text(RUN_CONFIG)
    (folder / "train_state.pt").write_bytes(b"not read")
    (folder / "tokenizer").mkdir()
    there = convert(bare, tmp_path / "c", "orth_dion", *RANK)
    message = capsys.readouterr().out
    assert "copied unchanged" in message and "run_config.yaml, train_state.pt" in message
    assert "not copied" in message and "tokenizer; copy" in message
    assert (there.folder / "run_config.yaml").read_text() == RUN_CONFIG
    assert main(["inspect", str(tmp_path / "c"), "--hashes"]) == 0
    with_args = convert(saved(*ADAM), tmp_path / "with", "orth_dion", *RANK)
    assert sum(".right_factor." in key for key in there.tensors) == 14
    assert there.tensors.keys() == with_args.tensors.keys()
    assert different(there, with_args, "") == []
    convert(bare, tmp_path / "c", "orth_dion", *RANK, "--overwrite")
    train(ranks, tmp_path / "c", tmp_path / "loaded", ORTH_DION, steps=STEPS)
    assert different(there, tmp_path / "loaded", "") == []
    for name in ("c", "with"):
        train(ranks, tmp_path / name, tmp_path / f"{name}_on", ORTH_DION)
    assert different(tmp_path / "c_on", tmp_path / "with_on", "") == []
    assert len(different(there, tmp_path / "c_on", "fp32_param of decoder", 1e-3)) > 8


def test_right_factors_have_the_names_of_training(saved: Saves, tmp_path: Path) -> None:
    there = convert(saved(*DMUON), tmp_path / "c", "orth_dion", *RANK)
    real = Checkpoint(saved(*ORTH_DION))
    shapes = [
        {key: info.shape for key, info in checkpoint.tensors.items()}
        for checkpoint in (there, real)
    ]
    assert shapes[0] == shapes[1]


def test_a_restarted_adam_restarts_its_step_count(saved: Saves, tmp_path: Path) -> None:
    """Bias correction of zero state belongs to step 0, not to a warm first moment."""
    anew = convert(saved(*DMUON), tmp_path / "adam", "adam")
    groups = anew.common.value["optimizer"]["optimizer"]["param_groups"]
    assert [group["step"] for group in groups] == [0, 0]
    assert not any("matrix_optimizer" in group for group in groups)
    name = "decoder.layers.mlp.linear_fc1.weight"
    for state in ("exp_avg", "exp_avg_sq"):
        assert not anew.read(f"optimizer.state.{state}.{name}").any()
    warm = convert(saved(*ADAM), tmp_path / "dmuon", "dmuon")
    groups = warm.common.value["optimizer"]["optimizer"]["param_groups"]
    assert [group["step"] for group in groups] == [2, 2, 2]
    assert [group.get("matrix_optimizer") for group in groups] == [None, None, "dmuon"]
    assert warm.common.argument("matrix_optimizer") == "dmuon"


def test_layers_that_follow_other_rules(ranks: Ranks, saved: Saves, tmp_path: Path) -> None:
    """A rule on one layer: its states are stored under its own name, and back again."""
    rule = ("--matrix-rule", "*.layers.0.mlp.linear_fc2.weight:optimizer=adam")
    there = convert(saved(*ADAM), tmp_path / "dmuon", "dmuon", *rule)
    key = "optimizer.state.exp_avg_sq.decoder.layers.0.mlp.linear_fc2.weight"
    assert there.tensors[key].shape == (32, 48)
    train(ranks, tmp_path / "dmuon", tmp_path / "saved", (*DMUON, *rule), tp=2, steps=2)
    assert different(there, tmp_path / "saved", "") == []
    back = convert(tmp_path / "saved", tmp_path / "adam", "adam")
    assert different(saved(*ADAM), back, "fp32_param of ") == []
    assert back.tensors.keys() == Checkpoint(saved(*ADAM)).tensors.keys()


def test_both_homes_of_the_common_state(ranks: Ranks, saved: Saves, tmp_path: Path) -> None:
    old = convert(saved(*DMUON), tmp_path / "old", "dmuon", "--megatron-version", "0.18")
    assert old.common.in_file and (old.folder / "common.pt").exists()
    train(ranks, tmp_path / "old", tmp_path / "on", DMUON)
    again = convert(tmp_path / "old", tmp_path / "new", "dmuon", "--megatron-version", "0.19.2")
    assert not again.common.in_file and not (again.folder / "common.pt").exists()
    assert main(["verify", str(tmp_path / "old"), str(tmp_path / "new")]) == 0


def test_inspect_shows_the_content(saved: Saves, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        ADAM: "adam",
        ADAM_BUCKETS: "adam",
        MUON: "muon",
        DMUON: "dmuon",
        ORTH_DION: "orth_dion",
    }
    for flags, name in known.items():
        capsys.readouterr()
        assert main(["inspect", str(saved(*flags)), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["optimizer"], found["step"]) == (name, 2)
        assert found["layout"]["TP"] == 1 and found["layout"]["DP"] == 2
    assert main(["inspect", str(saved(*DMUON))]) == 0
    assert "decoder.layers.mlp.linear_fc1.weight  2x96x32  float32" in capsys.readouterr().out


def test_verify_finds_a_difference(
    saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(saved(*ADAM)), str(saved(*DMUON)), "--part", "weights"]) == 1
    table = capsys.readouterr().out
    assert "decoder.layers.mlp.linear_fc1.weight" in table and "largest difference" in table
    assert main(["verify", str(saved(*ADAM)), str(saved(*ADAM))]) == 0
    loose = ["--part", "weights", "--tolerance", "1"]
    assert main(["verify", str(saved(*ADAM)), str(saved(*DMUON)), *loose]) == 0


def test_dry_run_writes_nothing(
    saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    target = str(tmp_path / "c")
    assert main(["convert", str(saved(*DMUON)), target, "--to", "adam", "--dry-run"]) == 0
    message = capsys.readouterr().out
    key = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"
    assert f"{key}  2x96x32  float32  exp_avg_sq starts at zero" in message
    assert "exp_avg_sq of decoder.layers.1.mlp.linear_fc1.weight" in message
    assert not (tmp_path / "c").exists()


def test_buckets_are_refused_with_the_way_out(
    saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(
        capsys, "convert", str(saved(*ADAM_BUCKETS)), str(tmp_path / "c"), "--to", "dmuon"
    )
    assert "dp_reshardable" in message and "--dist-ckpt-optim-fully-reshardable" in message


def _truncate(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    """A byte of a tensor's data that conversion must compute with."""
    checkpoint = Checkpoint(folder)
    name = "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight"
    place = checkpoint.tensors[name].chunks[0].place
    path = folder / place.file
    data = bytearray(path.read_bytes())
    data[place.start + place.length // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "flags", "sentence"),
    [
        (_truncate, (), "bytes, and its index says"),
        (_flip, (), "Bad CRC-32"),
        (lambda f: (f / "__0_0.distcp").unlink(), (), "its file __0_0.distcp is missing"),
        (lambda f: (f / "metadata.json").write_text("[1"), (), "cannot be read as JSON"),
        (lambda f: (f / ".metadata").write_bytes(b"cos\nsystem\n."), (), "foreign pickle"),
        (None, ("--matrix-rule", "*.nothing:optimizer=adam"), "matches no trainable parameter"),
        (None, ("--matrix-rule", "nonsense"), "a rule needs a pattern"),
        (None, ("--step", "7"), "there is no iter_0000007"),
        (None, ("--matrix-min-dim", "4096"), "no parameter is a matrix"),
        (None, ("--orth-dion-rank-fraction", "2"), "must be > 0 and <= 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unsupported_conversions_are_refused(
    saved: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any] | None,
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved(*DMUON), source)
    if damage is not None:
        damage(next(source.glob("iter_*")))
    before = digest(source)
    command = ("convert", str(source), str(tmp_path / "c"), "--to", "orth_dion", *flags)
    assert sentence in refused(capsys, *command)
    assert digest(source) == before
    assert not (tmp_path / "c").exists()


def test_nothing_is_overwritten(
    saved: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(saved(*ADAM), tmp_path / "c", "dmuon")
    before = digest(tmp_path / "c")
    command = ("convert", str(saved(*ADAM)), str(tmp_path / "c"), "--to", "adam")
    assert "type --overwrite" in refused(capsys, *command)
    assert digest(tmp_path / "c") == before
    convert(saved(*ADAM), tmp_path / "c", "adam", "--overwrite")
    onto_itself = ("convert", str(tmp_path / "c"), str(tmp_path / "c"), "--to", "dmuon")
    assert "is the source itself" in refused(capsys, *onto_itself, "--overwrite")
