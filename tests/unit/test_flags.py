"""The table of flags: valid values, and docs/flags.md generated from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig
from megatron_muon.flags import FLAGS, read_settings, value_problems
from tools.flag_reference import PAGE, page


def test_the_page_of_flags_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "type make flag-reference"


def test_every_setting_has_a_flag_with_a_help_of_its_own() -> None:
    assert {flag.field for flag in FLAGS} | {"optimizer"} == {f.name for f in fields(MatrixConfig)}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert all(flag.help.endswith(".") for flag in FLAGS)


@pytest.mark.parametrize("optimizer", ["dmuon", "orth_dion"])
def test_the_defaults_of_all_flags_are_allowed(optimizer: str) -> None:
    given = {flag.dest: flag.default for flag in FLAGS}
    settings, problems = read_settings(optimizer, given)
    assert problems == value_problems(settings) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("min_dim", "many", "--matrix-min-dim is 'many'; it must be an integer >= 1"),
        ("min_dim", 1.5, "--matrix-min-dim is 1.5; it must be an integer >= 1"),
        ("min_dim", None, "--matrix-min-dim is None; it must be an integer >= 1"),
        ("rank_fraction", "x", "--orth-dion-rank-fraction is 'x'; it must be > 0 and <= 1"),
        ("rank_fraction", 1.25, "--orth-dion-rank-fraction is 1.25; it must be > 0 and <= 1"),
        ("split_heads", "no", "--matrix-split-heads is 'no'; supported are True, False"),
        ("state_dtype", "fp8", "--orth-dion-state-dtype is 'fp8'; supported are fp32, bf16"),
        ("extra_scale_factor", -1, "--muon-extra-scale-factor is -1; it must be a number >= 0"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name: str, value: Any, sentence: str) -> None:
    """From Python, or from the arguments of a checkpoint."""
    assert value_problems(MatrixConfig(optimizer="orth_dion", **{name: value})) == [sentence]
