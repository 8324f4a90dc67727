"""Measured times of orthogonalizations: which one is taken, and what is no such table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.placement import CostTable, MeasuredCost, load_cost_table, write_cost_table


def flops(m: int, n: int) -> int:
    return min(m, n) ** 2 * max(m, n)


def entry(short: int, long: int, batch: int, nanoseconds: int) -> MeasuredCost:
    return MeasuredCost(short=short, long=long, batch=batch, nanoseconds=nanoseconds)


TABLE = CostTable(
    device="one",
    dtype="bfloat16",
    steps=5,
    measured=(entry(10, 20, 1, 900), entry(10, 20, 8, 300), entry(100, 100, 1, 50_000)),
)


@pytest.mark.parametrize("shape", [(10, 20), (20, 10)])
@pytest.mark.parametrize(
    ("batch", "expected"), [(1, 900), (2, 900), (3, 300), (4, 300), (8, 300), (99, 300)]
)
def test_the_nearest_batch_is_taken(shape: tuple[int, int], batch: int, expected: int) -> None:
    """By ratio: three is nearer to eight than to one."""
    assert TABLE.cost(*shape, batch=batch, flops=flops) == expected


def test_a_shape_that_was_not_measured_has_the_rate_of_the_nearest() -> None:
    assert TABLE.cost(10, 40, batch=1, flops=flops) == 1800
    assert TABLE.cost(200, 50, batch=8, flops=flops) == 50_000 * flops(50, 200) // flops(100, 100)
    assert TABLE.cost(1, 1, batch=1, flops=flops) == 1
    assert TABLE.lacks([(20, 10), (200, 50), (50, 200)]) == [(50, 200)]


def test_written_and_read_again(tmp_path: Path) -> None:
    write_cost_table(TABLE, tmp_path / "costs.json")
    assert load_cost_table(tmp_path / "costs.json") == TABLE


def _content() -> dict[str, Any]:
    measured = [{"short": 1, "long": 2, "batch": 1, "nanoseconds": 5}]
    about = {"format": "megatron_muon cost table 1", "device": "one", "dtype": "bfloat16"}
    return {**about, "steps": 5, "measured": measured}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "another"}, "its format is not"),
        ({"measured": []}, "it has no measurement"),
        ({"measured": [5]}, "an entry has 5 and should have"),
        ({"measured": [["batch", "long", "nanoseconds", "short"]]}, "an entry has ['batch'"),
        ({"measured": [{"short": 1}]}, "an entry has ['short'] and should have"),
        ({"measured": [{"short": 3, "long": 2, "batch": 1, "nanoseconds": 5}]}, "above long"),
        ({"measured": [{"short": 1, "long": 2, "batch": 0, "nanoseconds": 5}]}, "batch is 0"),
        ({"measured": [{"short": 1, "long": 2, "batch": 1, "nanoseconds": 0.5}]}, "is 0.5"),
        ({"measured": [{"short": 1, "long": 2, "batch": 1, "nanoseconds": True}]}, "is True"),
        ({"measured": 5}, "is no table of costs"),
        ({"steps": "many"}, "steps is 'many' and should be an integer from 1"),
        ({"steps": math.inf}, "steps is inf"),
        ({"steps": 5.5}, "steps is 5.5"),
        ({"measured": [{"short": 1, "long": 2, "batch": 10**400, "nanoseconds": 5}]}, "batch is 1"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(_content()))
    assert load_cost_table(path).measured == (entry(1, 2, 1, 5),)
    path.write_text(json.dumps(_content() | change))
    with pytest.raises(ValueError) as refused:
        load_cost_table(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"--dmuon-cost-table {path} is no table of costs")
    assert "--cost-table" in str(refused.value)


@pytest.mark.parametrize("key", ["device", "dtype", "steps", "measured"])
def test_what_a_table_lacks_is_told(tmp_path: Path, key: str) -> None:
    content = _content()
    del content[key]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"it lacks {key}"):
        load_cost_table(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "\0", "[" * 200_000])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no JSON"):
        load_cost_table(path)
    with pytest.raises(ValueError, match="cannot be read \\(Is a directory\\)"):
        load_cost_table(tmp_path)
