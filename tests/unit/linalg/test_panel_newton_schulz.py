"""One matrix on several workers: against the float64 formula, equal bits, counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.linalg import (
    PanelRequest,
    PanelWork,
    Segments,
    Team,
    Workspace,
    carried_segments,
    coefficient_schedule,
    newton_schulz,
    orthogonalize_panel_,
    panel_bytes,
    panel_flops,
    panel_requests,
    standard_segments,
)
from tests.reference.muon import QUINTIC, orthogonalize

SHAPES = [(1, 1), (3, 8), (5, 5), (7, 31), (12, 64), (2, 9), (130, 300)]
TEAMS = [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (9, 3)]
"""(workers, nodes)."""
FORMS = {"carried": carried_segments, "standard": standard_segments}


def cuts(length: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return equal cuts up to one row; some are empty with fewer rows than workers."""
    ends = [length * i // count for i in range(count + 1)]
    return tuple(itertools.pairwise(ends))


def exchange(requests: Sequence[PanelRequest], team: Team, m: int) -> None:
    """Simulate the network; worker J is number J // N of node J % N."""
    (kind,) = {request.kind for request in requests}
    everyone, nodes = range(len(requests)), team.nodes

    def are_partners(one: int, other: int) -> bool:
        if kind in ("partials", "rows"):
            return one % nodes == other % nodes
        return kind == "scalars" or one // nodes == other // nodes

    def size(sender: int, receiver: int) -> int:
        if kind == "scalars":
            return 2
        owner = sender if kind in ("blocks", "rows") else receiver
        rows = [
            end - start
            for number, (start, end) in enumerate(team.rows)
            if number == owner
            or (kind in ("partials", "rows") and number // nodes == owner // nodes)
        ]
        return sum(rows) * m

    arrived: list[list[torch.Tensor]] = [[] for _ in everyone]
    for sender, request in enumerate(requests):
        receivers = [other for other in everyone if are_partners(sender, other)]
        parts = request.sent.clone().split([size(sender, other) for other in receivers])
        for receiver, part in zip(receivers, parts, strict=True):
            arrived[receiver].append(part)
    for request, parts in zip(requests, arrived, strict=True):
        torch.cat(parts, out=request.received)


def shared(
    x: torch.Tensor,
    workers: int,
    segments: Segments,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    nodes: int = 1,
) -> tuple[torch.Tensor, list[str]]:
    """The result of all workers together, and the kinds of their requests."""
    m, n = x.shape
    team = Team(rows=cuts(m, workers), nodes=nodes)
    spaces = [Workspace() for _ in range(workers)]
    works = [PanelWork(team=team, number=number) for number in range(workers)]
    panels = cuts(n, workers)
    running = [
        orthogonalize_panel_(
            x[:, start:end].clone(memory_format=torch.contiguous_format),
            work,
            segments,
            compute_dtype=dtype,
            scale=scale,
            workspace=space,
        )
        for work, space, (start, end) in zip(works, spaces, panels, strict=True)
    ]
    planned = [
        panel_bytes(m, end - start, work, segments, x.device, held=x.dtype, compute=dtype)
        for work, (start, end) in zip(works, panels, strict=True)
    ]
    requests, kinds = [next(worker) for worker in running], []
    while True:
        for space, steps in zip(spaces, planned, strict=True):
            assert space.nbytes == steps[len(kinds)][1]
        kinds.append(requests[0].kind)
        exchange(requests, team, m)
        if kinds[-1] == "rows":
            squares = [request.received for request in requests]
            assert all(
                torch.equal(squares[0], square) or squares[0].isnan().any() for square in squares
            )
        done: list[torch.Tensor] = []
        following = []
        for worker in running:
            try:
                following.append(next(worker))
            except StopIteration as stopped:
                done.append(stopped.value)
        if done:
            assert len(done) == workers
            for space, steps in zip(spaces, planned, strict=True):
                assert space.nbytes == steps[-1][1] and len(steps) == len(kinds) + 1
            return torch.cat(done, dim=1), kinds
        requests = following


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("workers", "nodes"), TEAMS)
def test_result_and_requests_match_the_formula(
    shape: tuple[int, int], workers: int, nodes: int, form: str
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    segments = FORMS[form](coefficient_schedule("quintic", 5))
    found, kinds = shared(x, workers, segments, dtype=torch.float64, scale=3.0, nodes=nodes)
    expected = 3.0 * orthogonalize(x, QUINTIC)
    assert (found - expected).norm() <= 1e-10 * expected.norm()
    team = Team(rows=cuts(min(shape), workers), nodes=nodes)
    assert tuple(kinds) == panel_requests(segments, team)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 7e-2)],
    ids=str,
)
@pytest.mark.parametrize(("workers", "nodes"), [(2, 1), (3, 1), (8, 1), (8, 2), (9, 3)])
def test_no_less_precise_than_one_worker(
    dtype: torch.dtype, bound: float, workers: int, nodes: int
) -> None:
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(2))
    schedule = coefficient_schedule("quintic", 5)
    form = standard_segments if dtype == torch.bfloat16 else carried_segments
    expected = orthogonalize(x.double(), QUINTIC)
    found, _ = shared(x, workers, form(schedule), dtype=dtype, nodes=nodes)
    assert found.dtype == dtype
    off = (found.double() - expected).norm() / expected.norm()
    alone = newton_schulz(x, schedule, compute_dtype=dtype, segments=form(schedule))
    assert off < bound
    assert off < 2 * (alone.double() - expected).norm() / expected.norm()


def test_one_after_another_is_not_a_matrix() -> None:
    """A wrong order of panels has a large error: the test above can fail."""
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    segments = carried_segments(coefficient_schedule("quintic", 5))
    alone, _ = shared(x[:, :16].contiguous(), 1, segments, dtype=torch.float64)
    together, _ = shared(x, 2, segments, dtype=torch.float64)
    assert (alone - together[:, :16]).norm() > 1e-2 * alone.norm()


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-42, 1e30])
def test_no_magnitude_matters(factor: float) -> None:
    """Tiny panels beside large ones, zero panels, and a matrix of zeros."""
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(4))
    segments = carried_segments(coefficient_schedule("quintic", 5))
    plain, _ = shared(x, 3, segments, dtype=torch.float32)
    found, _ = shared(x * factor, 3, segments, dtype=torch.float32)
    bound = 1e-4 if factor > 1e-40 else 1e-1
    assert (found - plain * (factor > 0)).norm() <= bound * plain.norm()
    x[:, 8:] *= factor
    expected = orthogonalize(x.double(), QUINTIC)
    found, _ = shared(x, 3, segments, dtype=torch.float32)
    assert (found.double() - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_reach_every_worker(value: float) -> None:
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(5))
    x[2, 20] = value
    segments = carried_segments(coefficient_schedule("quintic", 5))
    found, _ = shared(x, 3, segments, dtype=torch.float32)
    assert found.isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [2, 3])
def test_operations_are_as_counted(workers: int, form: str) -> None:
    m, n = 140, 301
    segments = FORMS[form](coefficient_schedule("quintic", 5))
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(6))
    with FlopCounterMode(display=False) as counter:
        shared(x, workers, segments, dtype=torch.float32)
    expected = sum(
        panel_flops(m, stop - start, end - first, segments)
        for (start, stop), (first, end) in zip(cuts(n, workers), cuts(m, workers), strict=True)
    )
    assert counter.get_total_flops() == expected
