"""Settings given in Python: used, or refused by the same table as on the command line."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.flags import FLAGS
from megatron_muon.integration import refusals
from megatron_muon.integration.refusals import REFUSALS, USED, Refusal
from megatron_muon.integration.support import (
    MUON_FLAGS,
    config_problems,
    model_problems,
    settings_of,
)

FLAGS_ONLY = {
    *("use_torch_fsdp2", "freeze_all_layers", "perform_rl_step", "vision_pretraining_type"),
    *(
        "bert_load",
        "ict_load",
        "moe_use_upcycling",
        "flextron",
        "ckpt_format",
        "non_persistent_ckpt_type",
    ),
    "ckpt_convert_format",
}
"""Rows that no configuration has: what they do is seen in the model, or is not in a loop of one's
own."""


@pytest.fixture(scope="module")
def configs(megatron: Any) -> dict[str, Any]:
    """Megatron's three configurations, as they pass."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return {
        "optimizer": OptimizerConfig(lr=1e-2, use_distributed_optimizer=True),
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
        "model": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2),
    }


def _problems(
    configs: dict[str, Any], settings: MatrixConfig | None = None, **changed: Any
) -> list[str]:
    """What is refused of the configurations with these fields changed, as after construction."""
    copies = {name: replace(config) for name, config in configs.items()}
    for config in copies.values():
        for name, value in changed.items():
            if hasattr(config, name):
                setattr(config, name, value)
    chunk = SimpleNamespace(ddp_config=copies["ddp"], config=copies["model"])
    config = copies["optimizer"]
    return config_problems(config, settings_of(config, settings), [chunk])


def _wrong(row: Refusal) -> Any:
    """A value that is refused."""
    first = row.allowed[0]
    if isinstance(first, bool):
        return not first
    if first is None:
        return 4
    return torch.bfloat16 if isinstance(first, torch.dtype) else type(first)(7)


def test_the_defaults_are_accepted(configs: dict[str, Any]) -> None:
    assert _problems(configs) == []
    assert _problems(configs, MatrixConfig(optimizer="orth_dion")) == []


WITH_QUANTIZED_WEIGHTS = {"fp8_recipe": "custom", "moe_single_grouped_weight": True}
"""Fields of the model's configuration that are refused beside ``fp8_param``, and the value."""

BY_TRANSFORMER_ENGINE = "reuse_grad_buf_for_mxfp8_param_ag"
"""What it refuses itself, when the model is wrapped; our sentence is that of the command line."""


@pytest.mark.parametrize("name", WITH_QUANTIZED_WEIGHTS)
def test_what_does_not_go_with_quantized_weights_is_refused_by_api(
    configs: dict[str, Any], name: str
) -> None:
    wrong = {name: WITH_QUANTIZED_WEIGHTS[name]}
    assert _problems(configs, **wrong) == []
    (problem,) = _problems(configs, **wrong, fp8_param=True)
    assert problem.startswith(f"TransformerConfig.{name} is {wrong[name]!r}; it ")


@pytest.mark.parametrize(
    "row",
    [row for row in REFUSALS if row.name not in (*WITH_QUANTIZED_WEIGHTS, BY_TRANSFORMER_ENGINE)],
    ids=lambda row: row.name,
)
def test_every_refusal_by_flag_is_one_by_api(
    configs: dict[str, Any], row: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    owners = [config for config in configs.values() if hasattr(config, row.name)]
    assert bool(owners) is (row.name not in FLAGS_ONLY)
    if not owners:
        assert row.holds(SimpleNamespace(**{row.name: _wrong(row), "save": "x", "load": None}))
        return
    problems = _problems(configs, **{row.name: _wrong(row)})
    assert len(problems) == len(owners)
    for owner, problem in zip(owners, problems, strict=True):
        assert problem.startswith(f"{type(owner).__name__}.{row.name} is {_wrong(row)!r}; it ")
        assert problem.endswith(f"set it to {row.allowed[0]!r}")


def test_every_field_of_both_configurations_is_used_or_refused(configs: dict[str, Any]) -> None:
    named = {f.name for kind in ("optimizer", "ddp") for f in fields(configs[kind])}
    refused = {row.name for row in REFUSALS}
    assert not USED & refused
    assert named == (USED | refused) & named
    assert named >= USED
    # The defaults of the table are Megatron's.
    for row in REFUSALS:
        for kind in ("optimizer", "ddp"):
            default = {f.name: f.default for f in fields(configs[kind])}.get(row.name)
            assert row.name not in named or default is None or default in row.allowed


def test_a_field_of_a_later_megatron_must_have_its_default(configs: dict[str, Any]) -> None:
    import dataclasses

    later = dataclasses.make_dataclass(
        "OptimizerConfig",
        [("warm_start", bool, dataclasses.field(default=False))],
        bases=(type(configs["optimizer"]),),
    )
    config = later(lr=1e-2, use_distributed_optimizer=True)
    chunk = SimpleNamespace(ddp_config=configs["ddp"])
    assert config_problems(config, MatrixConfig(), [chunk]) == []
    config.warm_start = True  # type: ignore[attr-defined]
    (problem,) = config_problems(config, MatrixConfig(), [chunk])
    assert problem.startswith("OptimizerConfig.warm_start is True; it is not known")


MUON = {
    "muon_momentum": 0.5,
    "muon_nesterov": True,
    "muon_scale_mode": "unit_rms_norm",
    "muon_extra_scale_factor": 3.0,
    "muon_coefficient_type": "simple",
    "muon_num_ns_steps": 4,
    "muon_split_qkv": False,
}


MUON_FIELDS = {flag.dest: flag.field for flag in MUON_FLAGS}


def test_megatrons_settings_of_muon_are_used(configs: dict[str, Any]) -> None:
    config = replace(configs["optimizer"], **MUON)
    assert _problems(configs, **MUON) == []
    settings = settings_of(config, None)
    assert settings == MatrixConfig(**{MUON_FIELDS[name]: value for name, value in MUON.items()})
    assert set(MUON) == set(MUON_FIELDS)
    assert settings_of(config, MatrixConfig(momentum=0.7)) == MatrixConfig(momentum=0.7)


@pytest.mark.parametrize("name", MUON)
def test_two_settings_of_one_thing_are_refused(configs: dict[str, Any], name: str) -> None:
    ours, value = MUON_FIELDS[name], MUON[name]
    (problem,) = _problems(configs, MatrixConfig(), **{name: value})
    assert problem.startswith(f"OptimizerConfig.{name} is {value!r} and MatrixConfig.{ours} is ")
    assert _problems(configs, MatrixConfig(**{ours: value}), **{name: value}) == []
    (problem,) = _problems(configs, MatrixConfig(optimizer="orth_dion"), **{name: value})
    assert problem.startswith(f"OptimizerConfig.{name} is {value!r}")


def test_all_that_is_wrong_is_said_together(configs: dict[str, Any]) -> None:
    """The example of the report: muon's settings that are not ours, and what is refused by flag."""
    wrong = {"muon_scalar_optimizer": "lion", "muon_tp_mode": "duplicated", "qk_clip": True}
    wrong |= {"fp4_param_gather": True, "muon_num_ns_steps": 9}
    assert len(_problems(configs, **wrong)) == len(wrong)


OF_OTHERS = {
    "dmuon": {
        "rank_fraction": 0.5,
        "rank_multiple_of": 8,
        "right_factor": "polar",
        "rank_compensation": True,
        "exchange": "matrix",
        "state_dtype": "bf16",
    },
    "orth_dion": {
        "nesterov": True,
        "coefficient_type": "simple",
        "num_ns_steps": 4,
        "coefficients": ((1.0, 2.0, 3.0),),
        "compute_dtype": "bf16",
        "momentum_dtype": "bf16",
        "split_ranks": 8,
        "split_min_gflop": 1.0,
        "cost_table": "",
    },
}


@pytest.mark.parametrize(
    ("optimizer", "name"), [(o, name) for o, values in OF_OTHERS.items() for name in values]
)
def test_settings_of_the_other_optimizer_are_refused(
    configs: dict[str, Any], optimizer: str, name: str
) -> None:
    settings = MatrixConfig(optimizer=optimizer, **{name: OF_OTHERS[optimizer][name]})
    problems = _problems(configs, settings)
    assert problems[-1].startswith(f"MatrixConfig.{name} has no effect with {optimizer}: leave it")


def test_every_setting_of_one_optimizer_has_a_case_above() -> None:
    for optimizer, other in (("dmuon", "orth_dion"), ("orth_dion", "dmuon")):
        names = {flag.field for flag in FLAGS if flag.optimizers == (other,)}
        both = {"momentum", "scale_mode", "extra_scale_factor", "exchange_dtype"}
        assert names - both == set(OF_OTHERS[optimizer])


def test_an_optimizer_that_does_not_exist_is_refused_with_what_both_refuse(
    configs: dict[str, Any],
) -> None:
    problems = _problems(configs, MatrixConfig(optimizer="muon", min_dim=0, nesterov=True))
    assert problems == [
        "--matrix-min-dim is 0; it must be an integer >= 1",
        "MatrixConfig.optimizer is 'muon'; supported are dmuon, orth_dion",
    ]


def test_a_threshold_without_splitting_is_refused(configs: dict[str, Any]) -> None:
    (problem,) = _problems(configs, MatrixConfig(split_min_gflop=1.0, split_ranks=1))
    assert problem.startswith("--dmuon-split-min-gflop has no effect with --dmuon-split-ranks 1")


class Quantized(torch.nn.Parameter):
    """As Transformer Engine's quantized tensors: a parameter of another class."""


def test_parameters_and_modules_of_unknown_kinds_are_refused() -> None:
    model = torch.nn.Module()
    model.plain = torch.nn.Linear(4, 4)
    model.half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    assert model_problems([model]) == []
    model.frozen = torch.nn.Linear(4, 4, dtype=torch.float16).requires_grad_(False)
    assert model_problems([model]) == []
    model.quantized = Quantized(torch.zeros(4, 4))
    model.fp64 = torch.nn.Linear(4, 4, dtype=torch.float64)
    model.masked = type("SparseLinear", (torch.nn.Linear,), {"__module__": "modelopt.torch"})(4, 4)
    problems = model_problems([model])
    assert len(problems) == 3
    for what in (
        "parameter quantized is a Quantized of torch.float32",
        "parameter fp64.weight is a Parameter of torch.float64",
        "module masked is a SparseLinear of NVIDIA ModelOpt",
    ):
        assert any(problem.startswith(what) for problem in problems)
