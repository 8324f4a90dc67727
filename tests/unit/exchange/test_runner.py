"""The runner on all ranks of one process: one thread a rank, messages late and out of order.

The mailbox keeps no buffer alive, delivers at random moments, may deliver a later message first,
and leaves garbage in a received buffer until then; like a network, and unlike gloo on one machine.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_muon.exchange import Exchange, ExchangeCounters, Flight, Mailbox, WaveFunction
from megatron_muon.linalg import MemoryPool
from megatron_muon.placement import Plan
from megatron_muon.placement.program import FlatPiece, compile_wave
from megatron_muon.placement.schemes import SOURCE, UPDATE
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import (
    Stage,
    numbered,
    random_stage,
    stage_of,
    stored,
    whole_matrices,
    with_waves,
)

LAYOUTS = [(2, 1), (1, 3), (2, 2), (4, 2), (1, 7)]
EVERY_LAYOUT = pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
GARBAGE = float("nan")
PATIENCE_S = 20.0
CAP = 450
"""Elements per owner and wave."""


@dataclass(kw_only=True)
class _Post:
    """One rank's side of one all-to-all-v; buffers are only watched, not kept alive."""

    received: weakref.ref[torch.Tensor]
    sent: weakref.ref[torch.Tensor]
    received_counts: tuple[int, ...]
    sent_counts: tuple[int, ...]
    copy: torch.Tensor
    waits: int = 0


class _Mailbox:
    """All messages of all ranks, by the number of the call on each rank."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.posts: list[list[_Post | None]] = []
        self.delivered: set[int] = set()
        self.changed = threading.Condition()
        self.events: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]
        self.exchanges: list[Exchange] = []
        self._random = random.Random(seed)

    def post(self, rank: int, post: _Post) -> int:
        with self.changed:
            number = sum(event[0] == "start" for event in self.events[rank])
            while len(self.posts) <= number:
                self.posts.append([None] * self.size)
            self.posts[number][rank] = post
            self.events[rank].append(("start", number))
            self.changed.notify_all()
            return number

    def stir(self) -> None:
        """Perhaps deliver some of the messages that all ranks have started, last ones first."""
        with self.changed:
            for number in range(len(self.posts) - 1, -1, -1):
                if self._complete(number) and self._random.random() < 0.3:
                    self._deliver(number)

    def wait(self, rank: int, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self._complete(number), PATIENCE_S)
            self._deliver(number)
            post = self.posts[number][rank]
            assert post is not None
            post.waits += 1
            self.events[rank].append(("wait", number))
            sent = post.sent()
            assert sent is not None, "the sent buffer was freed before the wait"
            assert torch.equal(sent, post.copy), "the sent buffer was changed before the wait"

    def _complete(self, number: int) -> bool:
        return None not in self.posts[number]

    def _deliver(self, number: int) -> None:
        if number in self.delivered:
            return
        self.delivered.add(number)
        posts = [post for post in self.posts[number] if post is not None]
        parts = []
        for post in posts:
            sent = post.sent()
            assert sent is not None, "a sent buffer was freed before the message was delivered"
            parts.append(sent.split(list(post.sent_counts)))
        for rank, post in enumerate(posts):
            received = post.received()
            assert received is not None, "a received buffer was freed before the delivery"
            assert received.isnan().all(), "a received buffer was written before the delivery"
            assert post.received_counts == tuple(len(part[rank]) for part in parts)
            torch.cat([part[rank] for part in parts], out=received)


@dataclass(kw_only=True)
class _Pending:
    mailbox: _Mailbox
    rank: int
    number: int

    def wait(self) -> None:
        self.mailbox.wait(self.rank, self.number)


class _Transport:
    """One rank's way into the mailbox."""

    def __init__(self, mailbox: _Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self._rank = rank

    def all_to_all(
        self,
        *,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> _Pending:
        received.fill_(GARBAGE)
        assert received.numel() == sum(received_counts) and sent.numel() == sum(sent_counts)
        post = _Post(
            received=weakref.ref(received),
            sent=weakref.ref(sent),
            received_counts=tuple(received_counts),
            sent_counts=tuple(sent_counts),
            copy=sent.clone(),
        )
        number = self._mailbox.post(self._rank, post)
        self._mailbox.stir()
        return _Pending(mailbox=self._mailbox, rank=self._rank, number=number)


def _update(batch: torch.Tensor) -> torch.Tensor:
    """Needs the whole matrix, and its right orientation."""
    return batch.cumsum(1).cumsum(2)


@dataclass(kw_only=True)
class _Result:
    """What one run left."""

    mailbox: _Mailbox
    updates: list[dict[str, torch.Tensor]]
    counters: list[ExchangeCounters]
    exchanges: list[Exchange]


def _plan(stage: Stage) -> Plan:
    """Several waves, in some of which an owner has several matrices."""
    return with_waves(stage.plan(itemsize=8), CAP)


def _wave_of(pack: Any, compute: Any, apply: Any, fill: Any, land: Any) -> WaveFunction:
    """A rule of callbacks: per wave, per wave and shape, per wave; two for what stays here."""

    def wave(mail: Mailbox) -> Iterator[Flight]:
        pack(*mail.packed(SOURCE))
        yield from mail.exchange(SOURCE)
        batches = mail.assemble()
        mail.close(SOURCE)
        for batch, matrices in batches:
            places = dict(zip(batch.matrices, matrices, strict=True))
            fill(*mail.local(places, only_sources=True))
            updates = dict(zip(batch.matrices, compute(matrices), strict=True))
            mail.give_back(UPDATE, updates)
            land(*mail.local(updates))
            mail.memory.release(matrices)
        yield from mail.exchange(UPDATE)
        apply(*mail.applied(UPDATE))

    return wave


def _nothing(*_: Any) -> None:
    """What a rule may do with its pieces."""


def _dtypes(dtype: torch.dtype = torch.float64) -> dict[str, torch.dtype]:
    return dict.fromkeys(("source", "update", "scalars", "squares"), dtype)


def _run(
    stage: Stage,
    plan: Plan,
    *,
    seed: int = 0,
    steps: int = 1,
    in_place: bool = False,
    small_side_first: bool = False,
    observe: Callable[[_Mailbox, int, str, int], None] = lambda *_: None,
) -> _Result:
    """Run all ranks. ``observe(mailbox, rank, what, wave)`` is called from every callback."""
    size = stage.group.size
    wholes = {name: whole.double() for name, whole in numbered(stage.entries).items()}
    mailbox = _Mailbox(size, seed)
    own = [stored(stage, wholes, rank) for rank in range(size)]
    updates = [{n: torch.zeros_like(part) for n, part in parts.items()} for parts in own]
    exchanges = [
        Exchange(
            plan,
            rank=rank,
            transport=_Transport(mailbox, rank),
            dtypes=_dtypes(),
            device=torch.device("cpu"),
            small_side_first=small_side_first,
        )
        for rank in range(size)
    ]

    mailbox.exchanges = exchanges

    def body(rank: int) -> None:
        calls = {"pack": 0, "apply": 0}

        def note(what: str) -> None:
            number = calls[what]
            calls[what] += 1
            mailbox.events[rank].append((what, number))
            mailbox.stir()
            observe(mailbox, rank, what, number)

        def at(pieces: Sequence[FlatPiece], parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            return [
                parts[plan.parameters[p.parameter].name][p.start : p.start + p.numel]
                for p in pieces
            ]

        def pack(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
            note("pack")
            fill(pieces, views)

        def fill(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
            for view, values in zip(views, at(pieces, own[rank]), strict=True):
                view.copy_(values.view_as(view))

        def compute(batch: torch.Tensor) -> torch.Tensor:
            # The wave is the one whose message to the owners was waited for last.
            wave = next(k for k, n in enumerate(_out_numbers(plan)) if n == _last_out(rank))
            mailbox.events[rank].append(("compute", wave))
            mailbox.stir()
            observe(mailbox, rank, "compute", wave)
            assert not batch.isnan().any()
            return batch.copy_(_update(batch)) if in_place else _update(batch)

        def _last_out(rank: int) -> int:
            outs = set(_out_numbers(plan))
            return max(n for what, n in mailbox.events[rank] if what == "wait" and n in outs)

        def apply(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
            note("apply")
            land(pieces, views)

        def land(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
            for view, target in zip(views, at(pieces, updates[rank]), strict=True):
                target += view.reshape(target.shape)

        for _ in range(steps):
            exchanges[rank].run(_wave_of(pack, compute, apply, fill, land))

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(body, rank) for rank in range(size)]:
            future.result(timeout=3 * PATIENCE_S)
    return _Result(
        mailbox=mailbox,
        updates=updates,
        counters=[exchange.counters for exchange in exchanges],
        exchanges=exchanges,
    )


def _schedule(plan: Plan) -> list[tuple[str, int]]:
    """The messages in the order that every rank starts them: out 0, then out k+1 and back k."""
    waves = len(plan.main.waves)
    order = [("out", 0)] if waves else []
    for k in range(waves):
        order += [("out", k + 1), ("back", k)] if k + 1 < waves else [("back", k)]
    return order


def _out_numbers(plan: Plan) -> list[int]:
    return [n for n, (direction, _) in enumerate(_schedule(plan)) if direction == "out"]


def _stage(tp: int, dp: int) -> Stage:
    return random_stage(3 * tp + dp, tp=tp, dp=dp, parameters=6 + 2 * tp * dp)


@EVERY_LAYOUT
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("in_place", [False, True])
def test_every_holder_gets_the_update_of_the_whole_matrix(
    tp: int, dp: int, seed: int, in_place: bool
) -> None:
    stage = _stage(tp, dp)
    plan = _plan(stage)
    assert len(plan.main.waves) > 2
    shares = [Counter(plan.owners[i] for i in wave) for wave in plan.main.waves]
    assert max(max(share.values()) for share in shares) > 1
    result = _run(stage, plan, seed=seed, in_place=in_place)
    expected = {
        name: torch.empty(whole.shape, dtype=torch.float64)
        for name, whole in numbered(stage.entries).items()
    }
    places = whole_matrices(stage, numbered(stage.entries))
    offsets = {name: int(whole[0, 0]) for name, whole in numbered(stage.entries).items()}
    for name, place in places.items():
        target = expected[name.partition("[")[0]].view(-1)
        values = _update(place.double()[None])[0]
        target[place.reshape(-1) - offsets[name.partition("[")[0]]] = values.reshape(-1)
    for rank, parts in enumerate(result.updates):
        for name, part in stored(stage, expected, rank).items():
            assert torch.equal(parts[name], part), (rank, name)


@EVERY_LAYOUT
def test_every_message_is_waited_for_once_and_all_have_been(tp: int, dp: int) -> None:
    stage = _stage(tp, dp)
    plan = _plan(stage)
    result = _run(stage, plan, steps=2)
    assert len(result.mailbox.posts) == 2 * 2 * len(plan.main.waves)
    assert all(post and post.waits == 1 for posts in result.mailbox.posts for post in posts)


@EVERY_LAYOUT
def test_every_rank_starts_the_same_messages_in_the_same_order(tp: int, dp: int) -> None:
    stage = _stage(tp, dp)
    plan = _plan(stage)
    mailbox = _run(stage, plan).mailbox
    for rank in range(stage.group.size):
        programs = [compile_wave(plan, wave, rank) for wave in plan.main.waves]
        counts = [
            programs[k].messages[SOURCE if way == "out" else UPDATE].sent_counts
            for way, k in _schedule(plan)
        ]
        posts = [posts[rank] for posts in mailbox.posts]
        assert [post.sent_counts for post in posts if post] == counts


@EVERY_LAYOUT
def test_two_waves_are_on_their_way_while_one_is_computed(tp: int, dp: int) -> None:
    """When wave k is computed, k+1 is on its way to the owners and k-1 on its way home."""
    stage = _stage(tp, dp)
    plan = _plan(stage)
    schedule = _schedule(plan)
    seen: list[tuple[int, int]] = []

    def observe(mailbox: _Mailbox, rank: int, what: str, wave: int) -> None:
        if what != "compute":
            return
        events = mailbox.events[rank]
        started = {schedule[n] for name, n in events if name == "start"}
        waited = {schedule[n] for name, n in events if name == "wait"}
        following = {("out", wave + 1)} if wave + 1 < len(plan.main.waves) else set()
        previous = {("back", wave - 1)} if wave else set()
        assert started - waited == following | previous
        assert waited == {("out", k) for k in range(wave + 1)} | {
            ("back", k) for k in range(wave - 1)
        }
        seen.append((rank, wave))

    _run(stage, plan, observe=observe)
    assert {rank for rank, _ in seen} == set(plan.owners)
    assert {wave for _, wave in seen} == set(range(len(plan.main.waves)))


@EVERY_LAYOUT
def test_the_next_wave_has_left_before_this_one_is_waited_for(tp: int, dp: int) -> None:
    """On every rank, whether it computes or not; and the previous one is landed after the next."""
    stage = _stage(tp, dp)
    plan = _plan(stage)
    schedule = _schedule(plan)
    for events in _run(stage, plan).mailbox.events:
        at = {(name, *schedule[n]): i for i, (name, n) in enumerate(events) if name in _MESSAGES}
        for k in range(1, len(plan.main.waves)):
            assert at["start", "out", k] < at["wait", "out", k - 1]
            assert at["start", "back", k] < at["wait", "back", k - 1] < at["wait", "back", k]


_MESSAGES = ("start", "wait")


@EVERY_LAYOUT
def test_callbacks_come_once_a_wave_and_in_order(tp: int, dp: int) -> None:
    """Also on ranks that hold nothing."""
    stage = _stage(tp, dp)
    plan = _plan(stage)
    waves = list(range(len(plan.main.waves)))
    for events in _run(stage, plan).mailbox.events:
        for what in ("pack", "apply"):
            assert [number for name, number in events if name == what] == waves


@EVERY_LAYOUT
def test_counters_are_the_prediction_and_start_anew_each_run(tp: int, dp: int) -> None:
    stage = _stage(tp, dp)
    plan = _plan(stage)
    for steps in (1, 2):
        result = _run(stage, plan, steps=steps)
        for rank, (counters, load) in enumerate(zip(result.counters, plan.loads, strict=True)):
            posts = [
                p
                for posts in result.mailbox.posts[-2 * len(plan.main.waves) :]
                if (p := posts[rank])
            ]
            crossing = sum(n for p in posts for r, n in enumerate(p.sent_counts) if r != rank)
            assert counters.sent_bytes == load.sent_bytes == 8 * crossing
            crossing = sum(n for p in posts for r, n in enumerate(p.received_counts) if r != rank)
            assert counters.received_bytes == load.received_bytes == 8 * crossing
            assert counters.matrices == load.matrices
            assert counters.messages == 2 * len(plan.main.waves)
            assert counters.peak_buffer_bytes == load.peak_buffer_bytes
        assert sum(c.matrices for c in result.counters) == len(plan.matrices)


@EVERY_LAYOUT
def test_buffers_are_those_counted_and_stay_from_step_to_step(tp: int, dp: int) -> None:
    """What the flag bounds is memory: all of it is allocated in the first step."""
    stage = _stage(tp, dp)
    plan = _plan(stage)
    alive: list[list[int]] = [[] for _ in range(stage.group.size)]

    def observe(mailbox: _Mailbox, rank: int, what: str, wave: int) -> None:
        alive[rank].append(mailbox.exchanges[rank].memory.alive)

    once = _run(stage, plan)
    result = _run(stage, plan, steps=3, observe=observe)
    for rank, (seen, peak) in enumerate(zip(alive, plan.peak_bytes, strict=True)):
        assert 0 < max(seen) <= peak
        memory = result.exchanges[rank].memory
        assert memory.alive == 0
        assert memory.peak == peak
        # Everything was released, and used again by the next step.
        assert _kept(memory) == _kept(once.exchanges[rank].memory)


def _kept(memory: MemoryPool) -> dict[int, int]:
    """Number of released buffers of each size."""
    return {size: len(blocks) for size, blocks in memory._free.items() if size}


@pytest.mark.parametrize("small_side_first", [False, True])
def test_tall_matrices_are_contiguous_or_turned(small_side_first: bool) -> None:
    shapes = [(3, 5), (5, 3), (4, 4)]
    stage = stage_of(
        [Whole(name=f"w{i}", shape=shape, tp_dim=None) for i, shape in enumerate(shapes)],
        tp=1,
        dp=1,
        bucket=3,
    )
    exchange = Exchange(
        _plan(stage),
        rank=0,
        transport=_NoTransport(),
        dtypes=_dtypes(),
        device=torch.device("cpu"),
        small_side_first=small_side_first,
    )
    seen = {}

    def compute(batch: torch.Tensor) -> torch.Tensor:
        seen[tuple(batch.shape[1:])] = batch.is_contiguous(), batch.mT.is_contiguous()
        return batch

    exchange.run(_wave_of(_nothing, compute, _nothing, _nothing, _nothing))
    assert seen[3, 5] == (True, False)
    assert seen[5, 3] == (not small_side_first, small_side_first)
    assert seen[4, 4][0]


@pytest.mark.parametrize("small_side_first", [False, True])
def test_updates_are_the_same_however_tall_matrices_lie(small_side_first: bool) -> None:
    stage = _stage(2, 2)
    plan = _plan(stage)
    turned = _run(stage, plan, small_side_first=small_side_first)
    for mine, other in zip(_run(stage, plan).updates, turned.updates, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_ranks_that_hold_nothing_enter_every_message() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(3, 5), tp_dim=None) for i in range(2)]
    stage = stage_of(entries, tp=1, dp=7, bucket=1)
    plan = _plan(stage)
    result = _run(stage, plan)
    idle = [rank for rank in range(7) if not any(p.numel() for p in result.updates[rank].values())]
    assert set(idle) - set(plan.owners), "no rank has neither an element nor a matrix"
    assert all(counters.messages == 2 * len(plan.main.waves) for counters in result.counters)
    for rank in set(idle) - set(plan.owners):
        assert result.counters[rank] == ExchangeCounters(messages=2 * len(plan.main.waves))


class _NoTransport:
    def all_to_all(self, **_: Any) -> Any:
        raise AssertionError("one rank has nobody to send to")


def _alone(plan: Plan, dtype: torch.dtype = torch.float64) -> Exchange:
    return Exchange(
        plan, rank=0, transport=_NoTransport(), dtypes=_dtypes(dtype), device=torch.device("cpu")
    )


def test_one_rank_sends_nothing() -> None:
    stage = _stage(1, 1)
    plan = _plan(stage)
    own = stored(stage, numbered(stage.entries), 0)
    applied = {name: torch.zeros(part.shape) for name, part in own.items()}

    def fill(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
        for piece, view in zip(pieces, views, strict=True):
            values = own[plan.parameters[piece.parameter].name][piece.start :][: piece.numel]
            view.copy_(values.view_as(view))

    def land(pieces: Sequence[FlatPiece], views: Sequence[torch.Tensor]) -> None:
        for piece, view in zip(pieces, views, strict=True):
            name = plan.parameters[piece.parameter].name
            applied[name][piece.start : piece.start + piece.numel] += view.flatten()

    exchange = _alone(plan)
    exchange.run(_wave_of(_nothing, lambda batch: batch.mul_(-2), _nothing, fill, land))
    for name, part in own.items():
        assert torch.equal(applied[name], -2.0 * part)
    assert exchange.counters.messages == exchange.counters.sent_bytes == 0
    assert exchange.counters.matrices == len(plan.matrices)
    assert 0 < exchange.counters.peak_buffer_bytes <= plan.loads[0].peak_buffer_bytes


def test_a_plan_without_matrices_does_nothing() -> None:
    exchange = _alone(stage_of([], tp=1, dp=1).plan(itemsize=8))

    def never(*_: Any) -> Any:
        raise AssertionError("there is nothing to do")

    exchange.run(_wave_of(never, never, never, never, never))
    assert exchange.counters == ExchangeCounters()


def test_another_element_size_than_the_plans_is_refused() -> None:
    plan = _stage(1, 1).plan(itemsize=4)
    with pytest.raises(ValueError, match="plan counts 4 bytes an element"):
        _alone(plan, torch.bfloat16)
    assert _alone(plan, torch.float32).counters == ExchangeCounters()
