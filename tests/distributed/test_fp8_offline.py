"""The offline tool on checkpoints that FP8 runs of Megatron's ``pretrain`` saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.command import main
from megatron_muon.offline.reading import Checkpoint
from tests.distributed.interchange import as_stored
from tests.distributed.offline import ADAM, RANK, convert, different, digest
from tests.distributed.test_fp8_pretrain import fp8_flags, fp8_pretrain
from tests.distributed.test_pretrain import DMUON, ORTH_DION

Ranks = Callable[..., list[Any]]
Saved = tuple[Path, dict[str, torch.Tensor]]

KINDS = [
    "delayed",
    "mxfp8",
    pytest.param("tensorwise", marks=pytest.mark.slow),
    pytest.param("blockwise", marks=pytest.mark.slow),
]


def _train(ranks: Ranks, load: Path, save: Path, steps: int, flags: Any, tp: int = 1) -> Any:
    arguments = (load, save, tp, 1, steps, flags)
    return ranks(2, fp8_pretrain, *arguments, init_process_group=False)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """(folder, whole masters) of a run of two steps at DP2, once for each recipe."""
    made: dict[str, Saved] = {}

    def of(recipe: str) -> Saved:
        if recipe not in made:
            folder = tmp_path_factory.mktemp(recipe)
            (_, told), _ = _train(ranks, folder, folder, 2, fp8_flags(recipe))
            made[recipe] = folder, told["masters"]
        return made[recipe]

    return of


@pytest.mark.parametrize("recipe", KINDS)
def test_it_reads_what_an_fp8_run_saves(
    saved: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str
) -> None:
    """inspect, verify and export; masters to the bit, and weights as they were quantized."""
    folder, masters = saved(recipe)
    before = digest(folder)
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "dmuon" in said and "optimizer.state.fp32_param.decoder.layers" in said
    assert main(["verify", str(folder), str(folder)]) == 0
    assert main(["export", str(folder), str(tmp_path / "plain.pt")]) == 0
    assert digest(folder) == before
    content = torch.load(tmp_path / "plain.pt", weights_only=True)
    exact = as_stored(masters)
    assert content["state"].keys() == content["model"].keys() == exact.keys()
    rounded = 0
    for name, master in exact.items():
        assert torch.equal(content["state"][name]["fp32_param"], master), name
        weight = content["model"][name].float()
        if not torch.equal(weight, master.bfloat16().float()):
            rounded += 1
            # Half a unit of e4m3's three bits; a delayed scale also cuts what has grown.
            bound = master.abs().max() / (4 if recipe == "delayed" else 16)
            assert (weight - master).abs().max() < bound, name
    assert rounded == (4 if recipe == "tensorwise" else 8)


@pytest.mark.parametrize(
    ("recipe", "to", "flags", "extra"),
    [
        ("mxfp8", "orth_dion", ORTH_DION, RANK),
        ("delayed", "adam", ADAM, ()),
        pytest.param("blockwise", "orth_dion", ORTH_DION, RANK, marks=pytest.mark.slow),
        pytest.param("tensorwise", "adam", ADAM, (), marks=pytest.mark.slow),
    ],
)
def test_a_converted_checkpoint_goes_on_in_fp8(
    ranks: Ranks, saved: Any, tmp_path: Path, recipe: str, to: str, flags: Any, extra: Any
) -> None:
    """At another layout, by the other optimizer, and back; the masters are the same bits."""
    source, masters = saved(recipe)
    there = convert(source, tmp_path / "there", to, *extra)
    assert different(source, there, "fp32_param of ") == []
    assert different(source, there, "decoder.") == []
    loaded = _train(
        ranks, tmp_path / "there", tmp_path / "loaded", 2, fp8_flags(recipe, optimizer=flags), tp=2
    )
    for name, value in loaded[0][1]["masters"].items():
        assert torch.equal(value, masters[name]), name
    back = convert(tmp_path / "loaded", tmp_path / "back", "dmuon")
    assert different(source, back, "fp32_param of ") == []
    ((losses, _), _) = _train(
        ranks, tmp_path / "back", tmp_path / "on", 3, fp8_flags(recipe, optimizer=DMUON)
    )
    assert len(losses) == 2
    name = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight"
    stepped = Checkpoint(tmp_path / "on").read(name) - back.read(name)
    assert stepped.abs().max() > 0


def test_differences_between_recipes_are_told_and_those_of_masters_are_none(
    ranks: Ranks, saved: Any, tmp_path: Path
) -> None:
    """The same masters, saved again in another recipe: only weights of the model part differ."""
    source, _ = saved("mxfp8")
    _train(ranks, source, tmp_path / "other", 2, fp8_flags("blockwise"))
    assert main(["verify", str(source), str(tmp_path / "other")]) == 1
    told = different(source, tmp_path / "other", "")
    assert told and all(line.startswith("decoder.layers.") for line in told)
    assert different(source, tmp_path / "other", "momentum_buffer of ") == []
