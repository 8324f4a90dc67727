"""Load balance of known models: the requirement of the project, and the table in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.balance import BalanceRow, balance_lines, balance_table


@pytest.fixture(scope="module")
def rows() -> list[BalanceRow]:
    return balance_table()


def test_every_model_is_within_five_percent_or_at_the_lower_bound(rows: list[BalanceRow]) -> None:
    """At the bound except for parts that differ by one row; not split if that gains less than 10 %.

    And two rows where parts do not fill nodes: those of a matrix are on one, unlike in the bound;
    and four of DeepSeek-V3, of which two nodes would make the busiest owner faster by 3 %.
    """
    assert len(rows) == 40
    missed = [row for row in rows if row.reached > max(1.05, 1.001 * row.bound)]
    near = [row for row in missed if row.shared and row.reached < 1.1 * row.bound]
    whole = [row for row in missed if not row.shared and 0.9 * row.whole < row.bound]
    assert (len(near), len(whole), len(missed)) == (6, 3, 9)
    assert sum(row.name == "DeepSeek-V3, dense" for row in near) == 4


def test_sharing_makes_no_busiest_owner_slower(rows: list[BalanceRow]) -> None:
    assert all(row.faster >= 1 for row in rows)
    assert all(row.reached > row.bound - 1e-9 for row in rows)


def test_the_documented_table_is_printed_by_the_benchmark(rows: list[BalanceRow]) -> None:
    path = Path(__file__).parents[2] / "docs" / "owner-balance.md"
    printed = balance_lines(rows)
    _, header, after = path.read_text(encoding="utf-8").partition(printed[0])
    assert [line for line in (header + after).splitlines() if line[:1] == "|"] == printed
