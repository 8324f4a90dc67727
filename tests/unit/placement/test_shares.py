"""Padded shares cut into pieces: every element once, where it lies."""

import pytest

from megatron_muon.matrices import Block
from megatron_muon.placement import Run, Share


def share_of(cols: int, *runs: tuple[int, int]) -> Share:
    """A share whose runs have so many (elements before them in their first row, elements)."""
    found, row, shard_row = [], 7, 3
    for before, numel in runs:
        rows = -(-(before + numel) // cols)
        block = Block(tp_rank=0, shard_row=shard_row, rows=rows, row=row, col=2, cols=cols)
        found.append(Run(start=shard_row * cols + before, numel=numel, block=block))
        row, shard_row = row + rows + 2, shard_row + rows + 1
    return Share(rank=0, runs=tuple(found), is_source=True)


CASES = [
    (4, [(0, 12)]),
    (4, [(3, 1)]),
    (4, [(1, 2)]),
    (4, [(3, 9)]),
    (4, [(2, 13)]),
    (1, [(0, 3)]),
    (5, [(0, 10), (4, 7), (0, 3)]),
]


@pytest.mark.parametrize(("cols", "runs"), CASES)
def test_padded_pieces_are_the_runs_element_by_element(cols, runs):
    share = share_of(cols, *runs)
    expected, first = {}, 0
    for run, (before, numel) in zip(share.runs, runs, strict=True):
        rows = -(-(before + numel) // cols)
        for i in range(numel):
            row, col = divmod(before + i, cols)
            expected[run.start + i] = (first + row, col)
        first += rows
    assert share.rows == first
    found = {}
    for piece in share.padded_pieces():
        for i in range(piece.numel):
            row, col = divmod(i, piece.cols)
            assert piece.start + i not in found
            found[piece.start + i] = (piece.row + row, piece.col + col)
    assert found == expected


@pytest.mark.parametrize(("cols", "runs"), CASES)
def test_a_run_has_at_most_three_pieces(cols, runs):
    share = share_of(cols, *runs)
    assert len(list(share.padded_pieces())) <= 3 * len(share.runs)


def test_dense_is_one_run_of_whole_rows():
    assert share_of(4, (0, 12)).is_dense
    assert not share_of(4, (1, 11)).is_dense
    assert not share_of(4, (0, 11)).is_dense
    assert not share_of(4, (0, 8), (0, 4)).is_dense
