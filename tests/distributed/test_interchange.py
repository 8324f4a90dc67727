"""import and export: checkpoints of real runs against the weights on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.source_state import param_groups
from tests.distributed.interchange import (
    FFN,
    GROUPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Ranks,
    Runs,
    Saved,
    as_stored,
    exported,
    like,
    same,
    tool,
    trained,
    unpadded,
)
from tests.distributed.pretraining import VOCAB
from tests.distributed.test_pretrain import DMUON
from tests.reference.muon import gate_up_parts, unit_parts

# ---- weights and states by name ---------------------------------------------------------------


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_weights_equal_those_on_the_ranks(runs: Runs, tmp_path: Path, model: str) -> None:
    saved, _ = runs(model, "dmuon")
    content = exported(saved, tmp_path / "plain.pt")
    weights = as_stored(saved.weights)
    same(content["model"], unpadded(weights) if model == "dense" else weights)
    states = content["state"]
    assert content["optimizer"] == "dmuon" and content["step"] == 2
    for name, weight in content["model"].items():
        # In fp32 the weights are the masters.
        assert torch.equal(states[name]["fp32_param"], weight)
        is_adam = "momentum_buffer" not in states[name]
        assert is_adam == ({"exp_avg", "exp_avg_sq"} < states[name].keys())
        assert is_adam == (weight.dim() == 1 or any(p in name for p in ("emb", "out", "router")))


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_fused_weights_are_taken_apart(runs: Runs, tmp_path: Path, model: str) -> None:
    """Return the split by query groups, gate before up, independently of the package."""
    saved, _ = runs(model, "dmuon")
    found = exported(saved, tmp_path / "hf.pt", "--names", "hf")["model"]
    sizes = (HEADS // GROUPS * HEAD_DIM, HEAD_DIM, HEAD_DIM)
    for layer in range(2):
        before, after = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = saved.weights[before + "self_attention.linear_qkv.weight"]
        for label, rows in zip("qkv", unit_parts(sizes, len(qkv)), strict=True):
            assert torch.equal(found[f"{after}self_attn.{label}_proj.weight"], qkv[rows])
        proj = saved.weights[before + "self_attention.linear_proj.weight"]
        assert torch.equal(found[after + "self_attn.o_proj.weight"], proj)
        feeds = {"mlp.": ("mlp.", FFN)}
        if model == "experts":
            feeds = {f"mlp.experts.local_experts.{e}.": (f"mlp.experts.{e}.", 40) for e in range(4)}
            router = saved.weights[before + "mlp.router.weight"]
            assert torch.equal(found[after + "mlp.gate.weight"], router)
        for inner, (outer, size) in feeds.items():
            fc1 = saved.weights[f"{before}{inner}linear_fc1.weight"]
            gate, up = gate_up_parts(size)
            assert torch.equal(found[f"{after}{outer}gate_proj.weight"], fc1[gate])
            assert torch.equal(found[f"{after}{outer}up_proj.weight"], fc1[up])
            fc2 = saved.weights[f"{before}{inner}linear_fc2.weight"]
            assert torch.equal(found[f"{after}{outer}down_proj.weight"], fc2)
        norm = saved.weights[before + "pre_mlp_layernorm.weight"]
        assert torch.equal(found[after + "post_attention_layernorm.weight"], norm)
    rows = 62 if model == "dense" else VOCAB
    assert found["model.embed_tokens.weight"].shape == (rows, HIDDEN)
    assert found["lm_head.weight"].shape == (rows, HIDDEN)
    per_layer = 4 + 2 + (3 if model == "dense" else 1 + 4 * 3)
    assert len(found) == 3 + 2 * per_layer


@pytest.mark.parametrize("names", ["megatron", "hf"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("dense", "dmuon"), ("dense", "orth_dion"), ("experts", "dmuon")],
)
def test_back_again_everything_has_the_same_bits(
    runs: Runs,
    ranks: Ranks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    optimizer: str,
    names: str,
) -> None:
    """Import into the form of a run with another seed, all of whose values differ."""
    saved, other = runs(model, optimizer)
    exported(saved, tmp_path / "file.pt", "--names", names)
    assert tool("verify", saved.folder, other.folder) == 1
    arguments = (*like(other), "--names", names)
    assert tool("import", tmp_path / "file.pt", tmp_path / "back", *arguments) == 0
    assert "start at zero" not in capsys.readouterr().out
    _same_but_for_padding(saved.folder, tmp_path / "back")


def _same_but_for_padding(one: Path, other: Path) -> None:
    first, second = Checkpoint(one), Checkpoint(other)
    assert first.tensors.keys() == second.tensors.keys()
    for key in first.tensors:
        a, b = first.read(key), second.read(key)
        if "word_embeddings" in key or "output_layer" in key:
            a, b = a[:62], b[:62]
        assert torch.equal(a, b), key


def test_padding_rows_come_back_as_zeros(runs: Runs, tmp_path: Path) -> None:
    saved, other = runs("dense", "dmuon")
    exported(saved, tmp_path / "file.pt")
    assert tool("import", tmp_path / "file.pt", tmp_path / "back", *like(other)) == 0
    found = Checkpoint(tmp_path / "back").read("embedding.word_embeddings.weight")
    assert found.shape == (64, HIDDEN) and not found[62:].any() and found[:62].any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_megatron_continues_from_an_import(
    runs: Runs, ranks: Ranks, tmp_path: Path, layout: tuple[int, int]
) -> None:
    """Without padding: its rows contribute to the loss, and are restored as zeros."""
    saved, other = runs("no padding", "orth_dion")
    exported(saved, tmp_path / "file.pt", "--names", "hf")
    arguments = (*like(other), "--names", "hf")
    assert tool("import", tmp_path / "file.pt", tmp_path / "back", *arguments) == 0
    losses = []
    for folder in (saved.folder, tmp_path / "back"):
        run = (folder, tmp_path / "next", *layout, 4, saved.flags)
        losses.append([lost for lost, _ in ranks(2, trained, *run, init_process_group=False)])
    straight, imported = losses
    for a, b in zip(straight, imported, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


# ---- other optimizers' state ------------------------------------------------------------------


def _grads(parameters: Mapping[str, torch.Tensor]) -> None:
    for number, parameter in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_torchs_muon_continues_and_returns(runs: Runs, tmp_path: Path) -> None:
    """Its momentum after a step is the checkpoint's with a further gradient."""
    saved, other = runs("dense", "dmuon")
    flags = ("--format", "torch-muon", "--names", "hf")
    content = exported(saved, tmp_path / "torch.pt", *flags)
    matrices = {
        n: torch.nn.Parameter(content["model"][n])
        for n in content["muon"]["param_groups"][0]["param_names"]
    }
    scalars = {
        n: torch.nn.Parameter(content["model"][n])
        for n in content["adamw"]["param_groups"][0]["param_names"]
    }
    assert set(matrices) | set(scalars) == set(content["model"])
    muon = torch.optim.Muon(matrices.items())
    adamw = torch.optim.AdamW(scalars.items())
    muon.load_state_dict(content["muon"])
    adamw.load_state_dict(content["adamw"])
    beta = muon.param_groups[0]["momentum"]
    assert beta == 0.9
    before = {n: muon.state[p]["momentum_buffer"].clone() for n, p in matrices.items()}
    assert all(buffer.any() for buffer in before.values())
    _grads(matrices | scalars)
    muon.step()
    adamw.step()
    model = {n: p.detach() for n, p in (matrices | scalars).items()}
    stepped = {"model": model, "muon": muon.state_dict(), "adamw": adamw.state_dict()}
    torch.save(stepped, tmp_path / "stepped.pt")
    arguments = (*like(other), "--names", "hf")
    assert tool("import", tmp_path / "stepped.pt", tmp_path / "back", *arguments) == 0
    back = exported(
        Saved(folder=tmp_path / "back", weights={}, flags=saved.flags),
        tmp_path / "b.pt",
        "--names",
        "hf",
    )
    same(back["model"], model)
    assert back["step"] == 3
    for name, parameter in matrices.items():
        found = back["state"][name]["momentum_buffer"]
        assert torch.equal(found, muon.state[parameter]["momentum_buffer"])
        assert parameter.grad is not None
        expected = torch.lerp(before[name], parameter.grad, 1 - beta)
        torch.testing.assert_close(found, expected)
    for name, parameter in scalars.items():
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(back["state"][name][state], adamw.state[parameter][state])


def test_orth_dion_as_microsofts_dion(runs: Runs, tmp_path: Path) -> None:
    """Its fields are momentum and Q, (n, r) or, of a wide matrix, (m, r)."""
    saved, other = runs("dense", "orth_dion")
    content = exported(saved, tmp_path / "dion.pt", "--format", "dion", "--names", "hf")
    groups = content["optimizer"]["param_groups"]
    assert [group["algorithm"] for group in groups] == ["dion", "adamw"]
    assert groups[0]["mu"] == 0.95 and groups[0]["step"] == 2
    for number, name in zip(groups[0]["params"], groups[0]["param_names"], strict=True):
        kept = content["optimizer"]["state"][number]
        short = min(content["model"][name].shape)
        assert kept["Q"].shape == (short, short // 2)
        assert kept["momentum"].shape == content["model"][name].shape
    arguments = (*like(other), "--names", "hf")
    assert tool("import", tmp_path / "dion.pt", tmp_path / "back", *arguments) == 0
    _same_but_for_padding(saved.folder, tmp_path / "back")


def test_dmuon_as_microsofts_muon_is_a_sum(runs: Runs, tmp_path: Path) -> None:
    saved, other = runs("dense", "dmuon")
    plain = exported(saved, tmp_path / "plain.pt")["state"]
    content = exported(saved, tmp_path / "dion.pt", "--format", "dion")["optimizer"]
    (group, _) = content["param_groups"]
    assert (group["algorithm"], group["mu"]) == ("muon", 0.9)
    for number, name in zip(group["params"], group["param_names"], strict=True):
        average = plain[name]["momentum_buffer"].double()
        torch.testing.assert_close(
            content["state"][number]["momentum"].double(), average / 0.1, rtol=1e-6, atol=0.0
        )
    assert tool("import", tmp_path / "dion.pt", tmp_path / "b", *like(other)) == 0
    again = exported(
        Saved(folder=tmp_path / "b", weights={}, flags=saved.flags), tmp_path / "again.pt"
    )
    for name, kept in plain.items():
        for state, value in kept.items():
            torch.testing.assert_close(again["state"][name][state], value, rtol=1e-6, atol=0.0)


def test_a_sum_is_declared_by_the_user(runs: Runs, tmp_path: Path) -> None:
    """Heavy ball, S = M / (1 - β)."""
    saved, other = runs("dense", "dmuon")
    content = exported(saved, tmp_path / "torch.pt", "--format", "torch-muon")
    for kept in content["muon"]["state"].values():
        kept["momentum_buffer"] /= 1 - 0.75
    torch.save(content, tmp_path / "sum.pt")
    arguments = (*like(other), "--heavy-ball", "0.75")
    assert tool("import", tmp_path / "sum.pt", tmp_path / "back", *arguments) == 0
    key = "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight"
    expected, found = (Checkpoint(f).read(key) for f in (saved.folder, tmp_path / "back"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Flatten as in torch's ``get_optimizer_state_dict``."""
    names = dict(
        pair
        for g in state["param_groups"]
        for pair in zip(g["params"], g["param_names"], strict=True)
    )
    found = {
        f"state.{names[i]}.{k}": v for i, kept in state["state"].items() for k, v in kept.items()
    }
    for group in state["param_groups"]:
        for name in group["param_names"]:
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            found |= {f"param_groups.{name}.{k}": v for k, v in options.items()}
    return found


def test_optimizers_in_other_containers_are_restored(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of them, the flattened form, and the keys of torch's tutorials."""
    saved, other = runs("dense", "dmuon")
    content = exported(saved, tmp_path / "torch.pt", "--format", "torch-muon")
    weights, muon, adamw = (content[key] for key in ("model", "muon", "adamw"))
    forms: dict[str, Any] = {
        "list": {"model": weights, "optimizers": [adamw, muon]},
        "flat": {"model": weights, "optimizer": _flat(muon) | _flat(adamw)},
        "tutorial": {
            "epoch": 1,
            "model_state_dict": weights,
            "optimizer_state_dict": {"muon": muon, "adamw": adamw},
        },
    }
    for form, whole in forms.items():
        torch.save(whole, tmp_path / f"{form}.pt")
        capsys.readouterr()
        assert tool("import", tmp_path / f"{form}.pt", tmp_path / form, *like(other)) == 0
        message = capsys.readouterr().out
        assert "start at zero" not in message
        assert ("unused entries of the file: epoch\n" in message) == (form == "tutorial")
        _same_but_for_padding(saved.folder, tmp_path / form)


def test_numbered_parameters_are_named_by_a_file(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, other = runs("dense", "dmuon")
    content = exported(saved, tmp_path / "torch.pt", "--format", "torch-muon")
    names = content["muon"]["param_groups"][0].pop("param_names")
    bare = {"model": content["model"], "optimizer": content["muon"]}
    torch.save(bare, tmp_path / "bare.pt")
    arguments = (tmp_path / "bare.pt", tmp_path / "back", *like(other))
    assert tool("import", *arguments) == 2
    assert "name a file with --param-names" in capsys.readouterr().err
    (tmp_path / "names.txt").write_text("\n".join(names))
    assert tool("import", *arguments, "--param-names", tmp_path / "names.txt") == 0
    message = capsys.readouterr().out
    assert "states are not in the file (or only one of Adam's two) and start at zero" in message
    assert "  exp_avg of embedding.word_embeddings.weight" in message
    for state, is_zero in (("momentum_buffer", False), ("exp_avg", True)):
        owner = "decoder.layers.mlp.linear_fc2" if not is_zero else "decoder.final_layernorm"
        found = Checkpoint(tmp_path / "back").read(f"optimizer.state.{state}.{owner}.weight")
        assert bool(found.any()) is not is_zero


def test_weights_alone(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's state dict: masters are its weights, other states start at zero and are listed."""
    saved, other = runs("dense", "dmuon")
    weights = exported(saved, tmp_path / "hf.pt", "--names", "hf")["model"]
    torch.save({n: t.bfloat16() for n, t in weights.items()}, tmp_path / "weights.pt")
    arguments = (*like(other), "--names", "hf")
    assert tool("import", tmp_path / "weights.pt", tmp_path / "back", *arguments) == 0
    message = capsys.readouterr().out
    assert "momentum_buffer of decoder.layers.0.mlp.linear_fc1.weight" in message
    assert "its step count starts at 0" in message
    back = Checkpoint(tmp_path / "back")
    assert _steps(Checkpoint(other.folder)) == {2} and _steps(back) == {0}
    key = "decoder.layers.mlp.linear_fc1.weight"
    expected = Checkpoint(saved.folder).read(key).bfloat16().float()
    assert torch.equal(back.read(key), expected)
    assert torch.equal(back.read(f"optimizer.state.fp32_param.{key}"), expected)
    assert not back.read(f"optimizer.state.momentum_buffer.{key}").any()


def _steps(checkpoint: Checkpoint) -> set[int]:
    """Step counts of all parameter groups."""
    return {group["step"] for group in param_groups(checkpoint.common) if "step" in group}


def test_states_without_a_counterpart_are_listed(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, _ = runs("dense", "orth_dion")
    _, other = runs("dense", "dmuon")
    content = exported(saved, tmp_path / "dion.pt")
    capsys.readouterr()
    assert tool("import", tmp_path / "dion.pt", tmp_path / "back", *like(other)) == 0
    message = capsys.readouterr().out
    factors = sum(s.startswith("right_factor") for kept in content["state"].values() for s in kept)
    assert f"{factors} states of the file are left out, as --like" in message
    assert "multiplied by" in message and "0 states" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--add-qkv-bias",),
        ("--bf16",),
        ("--matrix-rule", "decoder.layers.1.mlp.linear_fc1.weight:optimizer=adam"),
    ],
    ids=["bias", "bf16", "a rule on one layer"],
)
def test_other_runs_come_back_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    for seed in ("1", "2"):
        more = (*DMUON, *flags, "--seed", seed)
        arguments = (tmp_path / seed, tmp_path / seed, 2, 1, 2, more)
        ranks(2, trained, *arguments, init_process_group=False)
    hf = ("--names", "hf")
    for form in ("plain", "torch-muon"):  # the latter holds masters in place of weights
        file, back = tmp_path / f"{form}.pt", tmp_path / form
        assert tool("export", tmp_path / "1", file, "--format", form, *hf) == 0
        assert tool("import", file, back, "--like", tmp_path / "2", *hf) == 0
        assert tool("verify", tmp_path / "1", back) == 0
