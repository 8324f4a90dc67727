"""The table of layouts in docs/support.md lists the trained test cases."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.layouts import CASES
from tests.tiny_models import MODELS
from tools.support_matrix import BEGIN, END, shown, table

ROOT = Path(__file__).parents[2]


def test_the_table_of_layouts_is_that_of_the_tests() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    expected = table({case.name: {"matrix": 0.0} for case in CASES}).splitlines()
    assert [row.split("|")[:3] for row in written] == [row.split("|")[:3] for row in expected]


def test_every_model_and_layout_is_in_the_table() -> None:
    rows = table({case.name: {"matrix": 3.14e-6} for case in CASES}).splitlines()[2:]
    assert len(rows) == len(MODELS)
    assert sum(row.count("TP") for row in rows) == sum(shown(case).count("TP") for case in CASES)
    assert all(row.endswith("| 3e-06 |") for row in rows)
