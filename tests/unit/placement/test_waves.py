"""Waves: what is in them, what they need, and that the bound on buffers is kept."""

from __future__ import annotations

import math
import random
import re

import pytest

from megatron_muon.placement import Plan, buffer_bytes_of, make_plan
from megatron_muon.placement.buffer_bound import rounded_up, typed
from megatron_muon.placement.memory import Phase, wave_uses
from megatron_muon.placement.method import MIN_WAVE_ELEMENTS, TARGET_WAVES
from megatron_muon.placement.waves import cut_by_owner, initial_cap
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import (
    phases,
    random_stage,
    stage_of,
    whole_method,
    with_waves,
)

LAYOUTS = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 2)]


@pytest.mark.parametrize("seed", range(30))
def test_every_matrix_is_in_one_wave_in_its_owners_order_and_within_the_cap(seed: int) -> None:
    rng = random.Random(seed)
    count, ranks, cap = rng.randint(1, 40), rng.randint(1, 5), rng.randint(1, 60)
    owners = [rng.randrange(ranks) for _ in range(count)]
    numels = [rng.randint(1, 50) for _ in range(count)]
    waves = cut_by_owner(owners=owners, numels=numels, cap=cap)
    assert sorted(i for wave in waves for i in wave) == list(range(count))
    assert all(wave and list(wave) == sorted(wave) for wave in waves)
    for rank in range(ranks):
        order = [i for wave in waves for i in wave if owners[i] == rank]
        assert order == [i for i in range(count) if owners[i] == rank]
        shares = [[numels[i] for i in wave if owners[i] == rank] for wave in waves]
        for number, share in enumerate(shares):
            assert sum(share) <= cap or len(share) == 1
            if number and share:
                # No wave was opened that was not needed.
                assert sum(shares[number - 1]) + share[0] > cap


def test_a_matrix_above_the_cap_is_alone() -> None:
    waves = cut_by_owner(owners=[0, 0, 0, 1], numels=[3, 100, 3, 4], cap=10)
    assert waves == ((0, 3), (1,), (2,))


def test_nothing_to_cut() -> None:
    assert cut_by_owner(owners=[], numels=[], cap=1) == ()


@pytest.mark.parametrize("scale", [1, 100])
def test_the_busiest_owner_gets_enough_waves_but_none_that_is_tiny(scale: int) -> None:
    numels = [scale * MIN_WAVE_ELEMENTS // 10] * 25
    cap = initial_cap(owners=[0] * 20 + [1] * 5, numels=numels)
    assert cap == max(MIN_WAVE_ELEMENTS, sum(numels[:20]) // TARGET_WAVES)
    assert initial_cap(owners=[], numels=[]) == MIN_WAVE_ELEMENTS
    assert initial_cap(owners=[0] * 20 + [1] * 5, numels=numels, least=cap + 1) == cap + 1


def _alive_at_once(plan: Plan, rank: int) -> int:
    """While wave k is computed, k+1 is on its way to the owners and k-1 on its way home."""
    nothing = [Phase(peak=0, held=0)] * 3
    waves = [nothing]
    for wave in plan.main.waves:
        uses = wave_uses([plan.schemes[i] for i in wave], plan.itemsizes, alone=False)
        waves.append(list(phases(uses[rank], 4)) if rank in uses else nothing)
    waves.append(nothing)
    alive = [waves[1][0].peak]
    for before, here, after in zip(waves, waves[1:], waves[2:], strict=False):
        around = before[1].held + after[0].held
        alive += [around + here[0].held, around + here[1].peak, after[0].held + here[1].held]
    return max(alive)


@pytest.mark.parametrize("seed", range(12))
def test_the_peak_is_that_of_three_waves_under_way(seed: int) -> None:
    stage = random_stage(seed, tp=2, dp=2, parameters=12)
    plan = with_waves(stage.plan(), 400)
    assert len(plan.main.waves) > 2
    assert list(plan.peak_bytes) == [_alive_at_once(plan, rank) for rank in range(4)]


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_bound_is_kept_or_the_model_refused(tp: int, dp: int, seed: int) -> None:
    stage = random_stage(seed, tp=tp, dp=dp, parameters=12)
    free = max(load.peak_buffer_bytes for load in stage.plan().loads)
    kept = refused = 0
    waves = 0
    for percent in (100, 80, 60, 45, 30, 20, 5):
        limit = free * percent // 100
        try:
            plan = stage.plan(buffer_bytes=limit)
        except ValueError:
            refused += 1
            continue
        assert not refused, "a smaller bound was accepted after a larger one was refused"
        kept += 1
        assert max(load.peak_buffer_bytes for load in plan.loads) <= limit
        assert len(plan.main.waves) >= waves
        waves = len(plan.main.waves)
        assert sorted(i for wave in plan.main.waves for i in wave) == list(
            range(len(plan.matrices))
        )
    assert kept and refused


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_too_small_a_buffer_names_flag_matrix_and_a_value_that_works(
    tp: int, dp: int, seed: int
) -> None:
    stage = random_stage(seed, tp=tp, dp=dp, parameters=12)
    # Elements of 64 KiB, so that the value, of three digits, is exact to a few elements.
    itemsize = 1 << 16
    with pytest.raises(ValueError) as error:
        stage.plan(buffer_bytes=1 << 20, itemsize=itemsize)
    text = str(error.value)
    assert text.startswith("--matrix-exchange-buffer-mb 1 is too small")
    largest = max(stage.matrices, key=lambda m: m.numel)
    named = re.search(r"largest matrix is (\S+) \((\d+)x(\d+)\)", text)
    assert named
    assert int(named[2]) * int(named[3]) == largest.numel
    assert named[1] in {m.name for m in stage.matrices if m.numel == largest.numel}
    asked = re.search(r"needs (\S+) MiB at least; type --matrix-exchange-buffer-mb (\S+)$", text)
    assert asked and asked[1] == asked[2]
    bound = buffer_bytes_of(float(asked[1]))
    plan = stage.plan(buffer_bytes=bound, itemsize=itemsize)
    assert max(load.peak_buffer_bytes for load in plan.loads) <= bound
    # One less in the third digit will not do.
    less = float(asked[1]) - 10.0 ** (math.floor(math.log10(float(asked[1]))) - 2)
    with pytest.raises(ValueError, match="too small"):
        stage.plan(buffer_bytes=buffer_bytes_of(less), itemsize=itemsize)


@pytest.mark.parametrize(
    "mebibytes", ["0.3", "0.001", "0.7", "512", "500", "64.5", "1e-05", "0.369"]
)
def test_a_bound_is_said_as_it_was_typed(mebibytes: str) -> None:
    """0.3 MiB are no whole bytes: said from the bytes it was 0.299999."""
    assert typed(buffer_bytes_of(float(mebibytes))) == mebibytes


@pytest.mark.parametrize(
    ("needed", "advised"),
    [
        (1 << 20, "1"),
        ((1 << 20) + 1, "1.01"),
        (386_000, "0.369"),
        (1, "0.000000954"),
        (1000 << 20, "1000"),
        ((1000 << 20) + 1, "1010"),
        (123_456 << 20, "124000"),
    ],
)
def test_advice_has_three_digits_and_is_rounded_up(needed: int, advised: str) -> None:
    assert rounded_up(needed) == advised
    assert buffer_bytes_of(float(advised)) >= needed


def test_small_models_go_in_one_wave_and_large_ones_overlap() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(64, 64), tp_dim=0) for i in range(12)]
    small = stage_of(entries, tp=2, dp=1)
    assert small.plan().main.waves == (tuple(range(12)),)
    large = [Whole(name=f"layers.{i}.w", shape=(512, 1024), tp_dim=0) for i in range(16)]
    stage = stage_of(large, tp=2, dp=1)
    plan = make_plan(
        group=stage.group,
        parameters=stage.parameters,
        matrices=stage.matrices,
        method=whole_method(),
        buffer_bytes=1 << 40,
    )
    assert len(plan.main.waves) == TARGET_WAVES


def test_waves_follow_the_forward() -> None:
    """The first wave holds the first layers, so that their parameters can be gathered first."""
    entries = [Whole(name=f"layers.{i}.w", shape=(16, 16), tp_dim=0) for i in range(12)]
    plan = stage_of(entries, tp=2, dp=1).plan(buffer_bytes=5_000)
    assert len(plan.main.waves) > 2
    firsts = [min(wave) for wave in plan.main.waves]
    assert firsts == sorted(firsts)
    assert 0 in plan.main.waves[0] and 11 in plan.main.waves[-1]
