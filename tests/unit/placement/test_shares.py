"""Shares cut into blocks: every element once, where it lies."""

import pytest

from megatron_muon.placement.shares import Share, SharePiece, share_blocks


def share_of(cols: int, *runs: tuple[int, int]) -> Share:
    """A share whose pieces have so many (elements before them in their first row, elements)."""
    pieces, rows, start, spans = [], 0, 5, []
    for before, numel in runs:
        count = -(-(before + numel) // cols)
        pieces.append(SharePiece(start=start, numel=numel, offset=rows * cols + before))
        spans.append((rows, count))
        rows += count
        start += numel + 3
    return Share(
        rank=0, runs=tuple(spans), rows=rows, col=0, cols=cols, pieces=tuple(pieces), is_source=True
    )


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
def test_blocks_are_the_pieces_element_by_element(cols, runs):
    share = share_of(cols, *runs)
    expected = {
        piece.start + i: divmod(piece.offset + i, cols)
        for piece in share.pieces
        for i in range(piece.numel)
    }
    found = {}
    for block in share_blocks(share):
        for i in range(block.rows * block.cols):
            row, col = divmod(i, block.cols)
            assert block.start + i not in found
            found[block.start + i] = (block.row + row, block.col + col)
    assert found == expected


@pytest.mark.parametrize(("cols", "runs"), CASES)
def test_a_piece_has_at_most_three_blocks(cols, runs):
    share = share_of(cols, *runs)
    assert len(list(share_blocks(share))) <= 3 * len(share.pieces)


def test_dense_is_one_run_of_whole_rows():
    assert share_of(4, (0, 12)).is_dense
    assert not share_of(4, (1, 11)).is_dense
    assert not share_of(4, (0, 11)).is_dense
    assert not share_of(4, (0, 8), (0, 4)).is_dense
