"""Flat ranges of the distributed optimizer, against the owner of every single element."""

from __future__ import annotations

import random
import re

import pytest

from megatron_muon.matrices import WHOLE, ShardedParameter, data_parallel_ranges

DP_SIZES = (1, 2, 3, 4, 5, 7)


def _buffer(
    seed: int, dp: int, bucket_size: int, alignment: int
) -> list[tuple[int, int, int, int]]:
    """(start, stop, bucket start, bucket numel) of parameters of many sizes, as Megatron pads them.

    Every parameter starts at a multiple of ``alignment``, every bucket ends at one of ``dp`` times
    that.
    """
    rng = random.Random(seed)
    places: list[tuple[int, int, int, int]] = []
    bucket: list[tuple[int, int]] = []
    position = bucket_start = 0
    for number in range(14):
        position = -(-position // alignment) * alignment
        numel = rng.choice([1, 2, rng.randint(3, 40), rng.randint(40, 400)])
        bucket.append((position, position + numel))
        position += numel
        if position - bucket_start >= bucket_size or number == 13:
            unit = dp * alignment
            end = bucket_start + -(-(position - bucket_start) // unit) * unit
            places += [(low, high, bucket_start, end - bucket_start) for low, high in bucket]
            position = bucket_start = end
            bucket = []
    return places


@pytest.mark.parametrize("dp", DP_SIZES)
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("bucket_size", [1, 150, 10**6])
def test_ranges_are_those_of_every_element(dp: int, alignment: int, bucket_size: int) -> None:
    for seed in range(5):
        places = _buffer(seed, dp, bucket_size, alignment)
        assert bucket_size == 10**6 or len({place[2] for place in places}) > 1
        for start, stop, bucket_start, bucket_numel in places:
            elements: list[list[int]] = [[] for _ in range(dp)]
            for element in range(start, stop):
                elements[(element - bucket_start) * dp // bucket_numel].append(element - start)
            ranges = data_parallel_ranges(
                start=start,
                stop=stop,
                bucket_start=bucket_start,
                bucket_numel=bucket_numel,
                dp=dp,
            )
            assert [list(range(*r)) for r in ranges] == elements
            assert all(r == (0, 0) for r, owned in zip(ranges, elements, strict=True) if not owned)


@pytest.mark.parametrize("dp", DP_SIZES)
def test_ranges_are_accepted_by_a_parameter(dp: int) -> None:
    for start, stop, bucket_start, bucket_numel in _buffer(1, dp, 150, 16):
        ShardedParameter(
            name="w",
            global_shape=(1, stop - start),
            tp_dim=None,
            tp=1,
            ranges=data_parallel_ranges(
                start=start,
                stop=stop,
                bucket_start=bucket_start,
                bucket_numel=bucket_numel,
                dp=dp,
            ),
        )


def _parameter(
    ranges: tuple[tuple[int, int], ...], *, tp_dim: int | None = None, tp: int = 1
) -> ShardedParameter:
    return ShardedParameter(
        name="layers.0.w", global_shape=(4, 6), tp_dim=tp_dim, tp=tp, ranges=ranges
    )


@pytest.mark.parametrize(
    "ranges",
    [
        ((0, 10), (11, 24)),
        ((0, 10), (9, 24)),
        ((0, 24), (0, 24)),
        ((1, 24),),
        ((0, 23),),
        ((0, 25),),
        ((0, 12), (12, 23), (0, 0)),
        ((0, 0), (0, 0)),
        (),
    ],
    ids=str,
)
def test_gaps_and_overlaps_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=rf"layers\.0\.w: DP ranges {re.escape(str(ranges))}"):
        _parameter(ranges)


@pytest.mark.parametrize(
    "ranges", [((0, 24),), ((0, 0), (0, 24), (0, 0)), ((0, 5), (5, 6), (6, 24))], ids=str
)
def test_an_exact_cover_is_accepted(ranges: tuple[tuple[int, int], ...]) -> None:
    assert _parameter(ranges).ranges == ranges


@pytest.mark.parametrize(
    ("tp_dim", "tp", "shard"),
    [(0, 2, (2, 6)), (1, 3, (4, 2)), (None, 2, (4, 6)), (None, 1, (4, 6))],
)
def test_ranges_cover_the_shard_not_the_whole(
    tp_dim: int | None, tp: int, shard: tuple[int, int]
) -> None:
    numel = shard[0] * shard[1]
    parameter = _parameter(((0, numel),), tp_dim=tp_dim, tp=tp)
    assert parameter.shard_shape == shard
    assert parameter.replicated is (tp_dim is None)
    assert parameter.packing == WHOLE
    with pytest.raises(ValueError, match=f"cover {numel - 1} of {numel} elements"):
        _parameter(((0, numel - 1),), tp_dim=tp_dim, tp=tp)
