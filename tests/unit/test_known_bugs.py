"""Every listed report names an existing test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.known_bugs import REPORTS, UNTESTABLE

ROOT = Path(__file__).parents[2]


def _tests_of(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + m.name for m in members if isinstance(m, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_has_a_test_or_a_reason(report: str) -> None:
    assert REPORTS[report]
    for named in REPORTS[report]:
        if named.startswith(UNTESTABLE):
            assert len(named) > len(UNTESTABLE)
            continue
        path, _, test = named.partition("::")
        assert test in _tests_of(ROOT / path), f"{named} does not exist"
