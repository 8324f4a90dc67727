"""Files of scripts: the same state is found in any container, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.foreign import Foreign, read_foreign

MATRIX, VECTOR = "layer.weight", "layer.bias"


class Trained:
    """A layer after two steps of torch.optim.Muon on its matrix and of AdamW on its bias."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 3)})
        named = dict(self.model.named_parameters())
        self.muon = torch.optim.Muon([(MATRIX, named[MATRIX])], momentum=0.9)
        self.adamw = torch.optim.AdamW([(VECTOR, named[VECTOR])])
        for _ in range(2):
            self.model["layer"](torch.randn(5, 4)).square().sum().backward()
            self.muon.step()
            self.adamw.step()
        self.weights = dict(self.model.state_dict())
        kept = self.adamw.state[named[VECTOR]]
        self.states = {
            MATRIX: {"momentum_buffer": self.muon.state[named[MATRIX]]["momentum_buffer"]},
            VECTOR: {state: kept[state] for state in ("exp_avg", "exp_avg_sq")},
        }

    def dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(AdamW's, Muon's)."""
        return copy.deepcopy(self.adamw.state_dict()), copy.deepcopy(self.muon.state_dict())

    def of_torch(self, *, flat: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        both = (self.muon, self.adamw)
        return dict(get_optimizer_state_dict(self.model, both, options=options))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


def _bare(state: dict[str, Any]) -> dict[str, Any]:
    for group in state["param_groups"]:
        del group["param_names"]
    return state


FORMS: dict[str, Callable[[Trained], Any]] = {
    "optimizers": lambda t: {"model": t.weights, "optimizers": list(t.dicts()), "iter": 7},
    "optimizers by name": lambda t: {
        "model": t.weights,
        "optimizers": dict(zip(("adamw", "muon"), t.dicts(), strict=True)),
    },
    "flattened": lambda t: {"model": t.weights, "optimizer": t.of_torch(flat=True)},
    "keyed by name": lambda t: {"model": t.weights, "optimizer": t.of_torch(flat=False)},
    "torch's tutorials": lambda t: {
        "epoch": 3,
        "model_state_dict": t.weights,
        "optimizer_state_dict": t.of_torch(flat=False),
        "loss": torch.tensor(0.5),
    },
    "Lightning": lambda t: {
        "state_dict": t.weights,
        "optimizer_states": list(t.dicts()),
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [0.1]}],
        "rng": torch.get_rng_state(),
    },
    "DeepSpeed": lambda t: {"module": t.weights, "optimizer": list(t.dicts())},
    "one level deeper": lambda t: {"app": {"model": t.weights, "optimizer": t.of_torch(flat=True)}},
    "chained": lambda t: {
        "model": t.weights,
        "optimizer": {i: {"optimizer": s} for i, s in enumerate(t.dicts())},
    },
}


def _assert_is(found: Foreign, trained: Trained, *, weights: bool = True) -> None:
    expected = trained.weights if weights else {}
    assert found.weights.keys() == expected.keys()
    assert all(found.weights[name].equal(expected[name]) for name in expected)
    assert found.states.keys() == trained.states.keys()
    for name, states in trained.states.items():
        assert found.states[name].keys() == states.keys()
        for state, value in states.items():
            assert value.any() and found.states[name][state].equal(value)
    assert found.steps == {2}
    kept = found.momenta[MATRIX]
    assert (kept.kind, kept.factor) == ("average", 0.9)


@pytest.mark.parametrize("form", FORMS)
def test_state_is_found_in_every_container(tmp_path: Path, trained: Trained, form: str) -> None:
    torch.save(FORMS[form](trained), tmp_path / "file.pt")
    _assert_is(read_foreign(tmp_path / "file.pt"), trained)


@pytest.mark.parametrize("form", ["flat", "list"])
def test_state_dicts_may_be_the_whole_file(tmp_path: Path, trained: Trained, form: str) -> None:
    whole = trained.of_torch(flat=True) if form == "flat" else list(trained.dicts())
    torch.save(whole, tmp_path / "file.pt")
    _assert_is(read_foreign(tmp_path / "file.pt"), trained, weights=False)


def test_unused_entries_are_listed(tmp_path: Path, trained: Trained) -> None:
    content = FORMS["Lightning"](trained)
    content["state_dict"] = content["state_dict"] | {
        "layer._extra_state": torch.zeros(3, dtype=torch.uint8)
    }
    content["optimizer_states"][0]["grad_scaler"] = {"scale": 2.0}
    torch.save(content, tmp_path / "file.pt")
    found = read_foreign(tmp_path / "file.pt")
    assert sorted(found.unread) == [
        "lr_schedulers",
        "optimizer_states[0].grad_scaler",
        "rng",
        "state_dict.layer._extra_state",
    ]
    _assert_is(found, trained)


def test_optimizers_that_number_their_parameters_have_a_list_of_names_each(
    tmp_path: Path, trained: Trained
) -> None:
    """Both count from 0."""
    content = {"model": trained.weights, "optimizers": [_bare(s) for s in trained.dicts()]}
    torch.save(content, tmp_path / "file.pt")
    _assert_is(read_foreign(tmp_path / "file.pt", names=[[VECTOR], [MATRIX]]), trained)
    for names in ((), ([VECTOR, MATRIX],)):
        message = r"2 optimizers \(optimizers\[0\], optimizers\[1\]\), each from 0"
        with pytest.raises(CheckpointError, match=message):
            read_foreign(tmp_path / "file.pt", names=names)
    torch.save(FORMS["flattened"](trained), tmp_path / "named.pt")
    with pytest.raises(CheckpointError, match="--param-names has no effect"):
        read_foreign(tmp_path / "named.pt", names=[[VECTOR, MATRIX]])


def _without_groups(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"] = {"state": trained.of_torch(flat=False)["state"]}


def _partly_flat(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"] = trained.of_torch(flat=True) | {"version": 1}


def _masters(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"] = {
        "optimizer": trained.of_torch(flat=False),
        "fp32_from_fp16_params": [[torch.ones(3, 4)]],
    }


def _partitions(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"] = {"single_partition_of_fp32_groups": [torch.ones(15)]}


def _average(content: dict[str, Any], trained: Trained) -> None:
    content["ema"] = trained.weights


def _without_options(content: dict[str, Any], trained: Trained) -> None:
    flat = trained.of_torch(flat=True)
    content["optimizer"] = {key: flat[key] for key in flat if key.startswith("state.")}


def _twice(content: dict[str, Any], trained: Trained) -> None:
    content["state_dict"] = trained.weights


def _odd_field(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"]["state"][MATRIX]["scale"] = 2.0


def _shampoo(content: dict[str, Any], trained: Trained) -> None:
    content["optimizer"] = {"state.layer.weight.factors.0": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_groups, r"the tensor optimizer\.state\.layer\.weight\.momentum_buffer, which"),
        (_partly_flat, r"the tensor optimizer\.state\.layer\.weight\.momentum_buffer, which"),
        (
            _masters,
            r"the tensor optimizer\.fp32_from_fp16_params\[0\]\[0\], which belongs neither to",
        ),
        (_partitions, r"the tensor optimizer\.single_partition_of_fp32_groups\[0\], which"),
        (_average, r"the tensor ema\.layer\.weight, which belongs neither to weights"),
        (_without_options, r"of layer\.weight does not say .* as momentum; type --heavy-ball BETA"),
        (_twice, r"weights as model and as state_dict"),
        (_odd_field, r"state of layer\.weight has the fields momentum_buffer, scale, which"),
        (_shampoo, r"state of layer\.weight\.factors has the fields 0, which"),
    ],
)
def test_state_in_an_unknown_form_is_refused_by_name(
    tmp_path: Path, trained: Trained, change: Callable[..., None], message: str
) -> None:
    """It was once mistaken for missing state."""
    content = FORMS["keyed by name"](trained)
    change(content, trained)
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=message):
        read_foreign(tmp_path / "file.pt")


def test_momentum_of_sgd_is_a_sum(tmp_path: Path) -> None:
    """SGD and Muon have the same field: M ← β M + G, against β M + (1 − β) G."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    sgd = torch.optim.SGD([(MATRIX, parameter)], lr=0.1, momentum=0.75)
    for size in (1.0, 2.0):
        parameter.grad = torch.full((2, 2), size)
        sgd.step()
    torch.save(sgd.state_dict(), tmp_path / "file.pt")
    found = read_foreign(tmp_path / "file.pt")
    kept = found.momenta[MATRIX]
    assert (kept.kind, kept.factor) == ("sum", 0.75)
    assert found.states[MATRIX]["momentum_buffer"].eq(2.0 + 0.75 * 1.0).all()
    sgd.param_groups[0]["dampening"] = 0.5
    torch.save(sgd.state_dict(), tmp_path / "damped.pt")
    with pytest.raises(CheckpointError, match=r"dampening 0\.5"):
        read_foreign(tmp_path / "damped.pt")
