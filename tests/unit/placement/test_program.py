"""Programs of all ranks, simulated together: numbered elements are sent, delivered and patched."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from megatron_muon.matrices import Block, SplitMode
from megatron_muon.placement import Plan, Region, Run, Share
from megatron_muon.placement.program import (
    FlatPiece,
    Message,
    WaveProgram,
    compile_wave,
)
from megatron_muon.placement.schemes import SOURCE, UPDATE
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import (
    UNBOUNDED,
    Stage,
    numbered,
    random_stage,
    stage_of,
    stored,
    whole_matrices,
    with_waves,
)

LAYOUTS = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1), (2, 3), (8, 1), (1, 7)]
EVERY_LAYOUT = pytest.mark.parametrize(("tp", "dp"), LAYOUTS)


def _stage(tp: int, dp: int, split: SplitMode = "parts") -> Stage:
    return random_stage(10 * tp + dp, tp=tp, dp=dp, parameters=7 + tp * dp, split=split)


# Elements per owner and wave: one matrix, a few, all in one wave.
EVERY_CAP = pytest.mark.parametrize("cap", [1, 900, UNBOUNDED])


def _waved(stage: Stage, cap: int) -> Plan:
    """A plan with waves of at most so many elements per owner."""
    plan = with_waves(stage.plan(), cap)
    waves = plan.main.waves
    assert len(waves) == 1 if cap == UNBOUNDED else len(waves) > 1 or cap > 1
    return plan


def _programs(plan: Plan, wave: Sequence[int]) -> list[WaveProgram]:
    return [compile_wave(plan, wave, rank) for rank in range(plan.group.size)]


def _delivered(messages: list[Message], sent: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an all-to-all-v delivers: one part for every rank, in the order of the senders."""
    parts = [buffer.split(m.sent_counts) for m, buffer in zip(messages, sent, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(messages))]


def _tiles(spans: Sequence[tuple[int, int]], length: int) -> bool:
    """Whether spans (start, numel) cover 0 … length exactly once."""
    covered = [element for start, numel in spans for element in range(start, start + numel)]
    return sorted(covered) == list(range(length))


@EVERY_CAP
@EVERY_LAYOUT
def test_both_ends_of_every_message_agree_on_counts(tp: int, dp: int, cap: int) -> None:
    plan = _waved(_stage(tp, dp), cap)
    for wave in plan.main.waves:
        programs = _programs(plan, wave)
        for where in (SOURCE, UPDATE):
            messages = [program.messages[where] for program in programs]
            for a, sender in enumerate(messages):
                for b, receiver in enumerate(messages):
                    assert sender.sent_counts[b] == receiver.received_counts[a]


@EVERY_CAP
@EVERY_LAYOUT
def test_pieces_and_patches_fill_their_buffers(tp: int, dp: int, cap: int) -> None:
    plan = _waved(_stage(tp, dp), cap)
    for wave in plan.main.waves:
        for program in _programs(plan, wave):
            for pieces, counts in (
                (program.held_elements[SOURCE], program.messages[SOURCE].sent_counts),
                (program.held_elements[UPDATE], program.messages[UPDATE].received_counts),
            ):
                assert _tiles([(p.offset, p.numel) for p in pieces], sum(counts))
            for patches, counts in (
                (program.computed_elements[SOURCE], program.messages[SOURCE].received_counts),
                (program.computed_elements[UPDATE], program.messages[UPDATE].sent_counts),
            ):
                assert _tiles([(p.offset, p.region.numel) for p in patches], sum(counts))


def _region(target: torch.Tensor, region: Region) -> torch.Tensor:
    return target[region.row_slice, region.col_slice]


def _packed(pieces: Sequence[FlatPiece], plan: Plan, own: dict[str, torch.Tensor]) -> torch.Tensor:
    buffer = torch.full((sum(p.numel for p in pieces),), -1)
    for piece in pieces:
        values = own[plan.parameters[piece.parameter].name][piece.start :][: piece.numel]
        buffer[piece.offset : piece.offset + piece.numel] = values
    return buffer


@EVERY_CAP
@EVERY_LAYOUT
@pytest.mark.parametrize("split", ["parts", "none"])
def test_owners_assemble_the_matrix_and_every_holder_gets_its_elements_back(
    tp: int, dp: int, split: SplitMode, cap: int
) -> None:
    """Out go the numbers; back come their negatives, to be written where the numbers were."""
    stage = _stage(tp, dp, split)
    plan = _waved(stage, cap)
    wholes = numbered(stage.entries)
    expected = whole_matrices(stage, wholes)
    own = [stored(stage, wholes, rank) for rank in range(stage.group.size)]
    applied = [{name: torch.zeros_like(part) for name, part in parts.items()} for parts in own]
    computed: list[int] = []
    for wave in plan.main.waves:
        programs = _programs(plan, wave)
        out = [
            _packed(program.held_elements[SOURCE], plan, own[r])
            for r, program in enumerate(programs)
        ]
        back = []
        delivered = _delivered([p.messages[SOURCE] for p in programs], out)
        for rank, (program, received) in enumerate(zip(programs, delivered, strict=True)):
            matrices = {i: torch.full(b.shape, -1) for b in program.batches for i in b.matrices}
            for patch in program.computed_elements[SOURCE]:
                target = _region(matrices[patch.matrix], patch.region)
                assert (target == -1).all()
                target.copy_(received[patch.offset :][: patch.region.numel].view_as(target))
            for piece in program.local:
                name = plan.parameters[piece.parameter].name
                target = _region(matrices[piece.matrix], piece.region)
                # A copy of what another rank sends is not filled in.
                assert (target == -1).all() == piece.is_source
                if piece.is_source:
                    target.copy_(own[rank][name][piece.start :][: piece.numel].view_as(target))
                applied[rank][name][piece.start : piece.start + piece.numel] -= target.flatten()
            computed += matrices
            for index, matrix in matrices.items():
                assert torch.equal(matrix, expected[plan.matrices[index].name])
            sent = torch.zeros(sum(program.messages[UPDATE].sent_counts), dtype=torch.int64)
            for patch in program.computed_elements[UPDATE]:
                values = _region(-matrices[patch.matrix], patch.region)
                sent[patch.offset : patch.offset + values.numel()] = values.reshape(-1)
            back.append(sent)
        for rank, (program, received) in enumerate(
            zip(programs, _delivered([p.messages[UPDATE] for p in programs], back), strict=True)
        ):
            for piece in program.held_elements[UPDATE]:
                name = plan.parameters[piece.parameter].name
                applied[rank][name][piece.start : piece.start + piece.numel] += received[
                    piece.offset : piece.offset + piece.numel
                ]
    assert sorted(computed) == list(range(len(plan.matrices)))
    for rank, parts in enumerate(own):
        for name, part in parts.items():
            assert torch.equal(applied[rank][name], -part)


@EVERY_LAYOUT
def test_matrices_of_one_shape_are_one_batch(tp: int, dp: int) -> None:
    stage = stage_of(
        [
            Whole(name=f"l.{i}.w", shape=(8 * (1 + i % 3), 8 * (5 - i % 5)), tp_dim=0)
            for i in range(30)
        ],
        tp=tp,
        dp=dp,
    )
    plan = stage.plan()
    for wave in plan.main.waves:
        for rank, program in enumerate(_programs(plan, wave)):
            shapes = [batch.shape for batch in program.batches]
            assert shapes == sorted(set(shapes))
            for batch in program.batches:
                assert list(batch.matrices) == sorted(batch.matrices)
                assert all(plan.matrices[i].shape == batch.shape for i in batch.matrices)
                assert all(plan.owners[i] == rank for i in batch.matrices)


def test_a_rank_with_nothing_has_an_empty_program() -> None:
    stage = stage_of([Whole(name="w", shape=(3, 5), tp_dim=None)], tp=1, dp=4, bucket=1)
    plan = stage.plan()
    ((start, stop),) = {r for p in plan.parameters for r in p.ranges if r == (0, 0)}
    assert start == stop
    idle = next(r for r in range(4) if plan.parameters[0].ranges[r] == (0, 0))
    program = compile_wave(plan, plan.main.waves[0], idle)
    nothing = Message(sent_counts=(0,) * 4, received_counts=(0,) * 4, sent={}, received={})
    assert program == WaveProgram(
        held=(),
        batches=(),
        factored=(),
        part=None,
        messages={SOURCE: nothing, UPDATE: nothing},
        local=(),
        held_elements={SOURCE: (), UPDATE: ()},
        computed_elements={SOURCE: (), UPDATE: ()},
    )


@pytest.mark.parametrize("seed", range(60))
def test_pieces_tile_a_run_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    width, rows, shard_row = rng.randint(1, 7), rng.randint(1, 6), rng.randint(0, 4)
    block = Block(
        tp_rank=0,
        shard_row=shard_row,
        rows=rows,
        row=rng.randint(0, 9),
        col=rng.randint(0, 9),
        cols=width,
    )
    first = rng.randint(0, rows * width - 1)
    numel = rng.randint(1, rows * width - first)
    run = Run(start=shard_row * width + first, numel=numel, block=block)
    cut = list(_share(run).pieces())
    assert len(cut) <= 3
    start = run.start
    places = []
    for piece in cut:
        assert (piece.start, piece.stride) == (start, width)
        start += piece.numel
        places += [
            (piece.row + i, piece.col + j) for i in range(piece.rows) for j in range(piece.cols)
        ]
    assert places == [
        (block.row + element // width, block.col + element % width)
        for element in range(first, first + numel)
    ]


def _share(run: Run) -> Share:
    return Share(rank=0, runs=(run,), is_source=True)


def test_whole_rows_are_one_piece() -> None:
    block = Block(tp_rank=0, shard_row=2, rows=5, row=10, col=3, cols=4)
    whole = list(_share(Run(start=8, numel=20, block=block)).pieces())
    assert [(r.rows, r.cols, r.row, r.col) for r in whole] == [(5, 4, 10, 3)]
    ragged = list(_share(Run(start=9, numel=13, block=block)).pieces())
    assert [(r.rows, r.cols, r.row, r.col) for r in ragged] == [
        (1, 3, 10, 4),
        (2, 4, 11, 3),
        (1, 2, 13, 3),
    ]
