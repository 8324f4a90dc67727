"""Megatron and our step at the size of the users' models, on fake tensors (``dry_run``).

``figures.json`` holds exact counts, all of them; ``python -m tests.scale.update`` rewrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scale.bars import BARS, OFF_PLAN, Bar, counted_ranks
from tests.scale.figures import BUSY, differences, read_figures
from tests.scale.measure import SECONDS, measure
from tests.scale.models import CASES, Case

GOLDEN = read_figures()


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Figures of a case that this session tests: measured in the background, in their order."""
    names = [
        item.callspec.params["case"].name  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == Path(__file__) and "measured" in item.fixturenames  # type: ignore[attr-defined]
    ]
    running = measure(names)
    arrived: dict[str, Any] = {}

    def wait_for(name: str) -> Any:
        while name not in arrived:
            arrived[names[len(arrived)]] = next(running)
        return arrived[name]

    yield wait_for
    running.close()  # type: ignore[attr-defined]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if case.is_fast else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_step_costs_match_the_golden_figures(case: Case, measured: Callable[[str], Any]) -> None:
    found = measured(case.name)
    assert "error" not in found, found["error"]
    changed = differences(GOLDEN.get(case.name, {}), found)
    assert not changed, (
        "\n".join(changed) + f"\nIf that is meant: python -m tests.scale.update '{case.name}'"
    )


def test_every_case_has_golden_figures_and_no_other() -> None:
    assert list(GOLDEN) == list(CASES)


@pytest.mark.parametrize("case", GOLDEN)
def test_a_step_sends_and_computes_what_was_planned(case: str) -> None:
    for domain in GOLDEN[case].values():
        for found in (domain[rank] for rank in BUSY):
            assert found["sent_bytes"] == found["planned_sent_bytes"]
            assert found["received_bytes"] == found["planned_received_bytes"]
            if "dmuon" in case:
                assert found["flops"] == found["planned_flops"]
            else:
                # Decompositions are planned by a formula and hold products that are not counted.
                assert 0 < found["flops"] <= found["planned_flops"]


@pytest.mark.parametrize("case", [name for name in GOLDEN if "dmuon" in name])
def test_dmuon_never_waits_for_a_value(case: str) -> None:
    assert {d[rank]["host_reads"] for d in GOLDEN[case].values() for rank in BUSY} == {0}


def _marked(what: str, unmet: str, value: float, *, reached: Any) -> Any:
    """A case expected to fail strictly, if a reason is given."""
    reason = f"{value:.2f} is reached: {unmet}"
    marks = [pytest.mark.xfail(strict=True, reason=reason, raises=AssertionError)] if unmet else []
    return pytest.param(reached, id=what, marks=marks)


@pytest.mark.parametrize(
    "bar", [_marked(bar.what, bar.unmet, bar.value(GOLDEN), reached=bar) for bar in BARS]
)
def test_a_step_costs_no_more_than_its_bar(bar: Bar) -> None:
    assert bar.value(GOLDEN) <= bar.most


@pytest.mark.parametrize(
    "ratio",
    [
        _marked(name, OFF_PLAN.get(name, ""), ratio, reached=ratio)
        for name, ratio in counted_ranks(GOLDEN)
    ],
)
def test_planned_memory_is_within_a_tenth_of_what_a_step_takes(ratio: float) -> None:
    assert 0.9 <= ratio <= 1.1


def test_every_excuse_is_of_a_rank_that_was_counted() -> None:
    assert set(OFF_PLAN) <= {name for name, _ in counted_ranks(GOLDEN)}
