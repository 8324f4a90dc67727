"""Schemes: how one matrix is communicated and where it is computed.

``Whole``    its elements go to one owner, the update comes back
``Factors``  products with low-rank factors go to one owner, factors come back (Orth-Dion)
``Panels``   several ranks compute it together, each a panel of its longer side (dmuon)

A scheme says in which rounds messages are sent, how many elements each carries between two ranks,
and what memory it needs there. Waves, programs, byte counts and memory bounds know no more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from megatron_muon.placement.factor_shape import FactorShape
from megatron_muon.placement.regions import Region, Share, even_cuts, panels


class Round(NamedTuple):
    """One message of a wave; rounds are sent in ascending order.

    Attributes:
        order: Place among the rounds of a wave.
        kind: What it carries; the element size is that of its kind (``Plan.itemsizes``).
    """

    order: int
    kind: str


WARM = Round(0, "warm")
"""Owner to holders: the right factor V."""

SOURCE = Round(1, "source")
"""Holders to owner: elements, or B V."""

BASIS = Round(2, "basis")
"""Owner to holders: the left factor U."""

RESPONSE = Round(3, "response")
"""Holders to owner: Bᵀ U."""

UPDATE = Round(1 << 20, "update")
"""Owner to holders: elements of the update, or its factors."""


def request(number: int) -> Round:
    """Among the ranks that compute the panels of one matrix: their request of this number."""
    return Round(10 + number, "squares" if number else "scalars")


Messages = Mapping[Round, tuple[tuple[int, int, int], ...]]
"""For every round (source, target, elements) of each message, a rank's to itself included."""


class Scheme(Protocol):
    """How one matrix is communicated and where it is computed."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """What each rank holds of it."""

    @property
    def factors(self) -> FactorShape | None:
        """Shape of its factors where the update has low rank."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that compute it, ascending; the first one counts as its owner."""

    @property
    def flops(self) -> tuple[int, ...]:
        """Floating-point operations of each of them."""

    @property
    def costs(self) -> tuple[int, ...]:
        """Estimated time of each of them."""

    @property
    def messages(self) -> Messages:
        """What is sent in every round."""

    def sends_elements(self, where: Round) -> bool:
        """True where a message carries the elements of a share, in the order of ``pieces``."""

    def region(self, number: int) -> Region:
        """What rank number ``number`` of ``ranks`` computes."""

    def kept_elements(self) -> Iterator[tuple[int, int]]:
        """(rank, elements) held from the first message of the wave to the last."""

    def computed_elements(self) -> Iterator[tuple[int, int]]:
        """(rank, elements) held while the matrices of a wave are computed."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One owner assembles the matrix and sends back what every holder needs of the update.

    Attributes:
        shape: (m, n).
        shares: What each rank holds.
        owner: The rank that computes it.
        work: (operations, estimated time).
        factors: Set where the update has low rank: a holder then gets its rows of U, V and the
            core, or its elements of U Vᵀ and U Wᵀ, whichever is less.
    """

    shape: tuple[int, int]
    shares: tuple[Share, ...]
    owner: int
    work: tuple[int, int]
    factors: FactorShape | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner."""
        return (self.owner,)

    @property
    def flops(self) -> tuple[int, ...]:
        """Operations of the owner."""
        return self.work[:1]

    @property
    def costs(self) -> tuple[int, ...]:
        """Estimated time of the owner."""
        return self.work[1:]

    @cached_property
    def messages(self) -> Messages:
        """Elements to the owner, the update back."""
        return {
            SOURCE: tuple((s.rank, self.owner, s.numel) for s in self.shares if s.is_source),
            UPDATE: tuple((self.owner, s.rank, self._returned(s)) for s in self.shares),
        }

    def _returned(self, share: Share) -> int:
        if self.factors is None:
            return share.numel
        return min(2 * share.numel, self.factors.factor_elements(share))

    def sends_elements(self, where: Round) -> bool:
        """Both ways, but for a low-rank update."""
        return where == SOURCE or (where == UPDATE and self.factors is None)

    def region(self, number: int) -> Region:
        """All of it."""
        return Region(row=0, rows=self.shape[0], col=0, cols=self.shape[1])

    def kept_elements(self) -> Iterator[tuple[int, int]]:
        """Nothing."""
        yield from ()

    def computed_elements(self) -> Iterator[tuple[int, int]]:
        """The matrix, on its owner; of a low-rank update also its products with the factors."""
        numel, factors = self.shape[0] * self.shape[1], self.factors
        if factors is None:
            yield self.owner, numel
            return
        yield self.owner, numel + factors.product_elements
        for share in self.shares:
            if not factors.returns_elements(share):
                yield share.rank, share.rows * factors.rank


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Holders keep their elements; five messages carry products with the factors.

    With B = M + G on the holders::

        WARM      owner -> holders   V, the holder's rows of it
        SOURCE    holders -> owner   their part of B V
        BASIS     owner -> holders   U, the holder's rows of it
        RESPONSE  holders -> owner   their part of Bᵀ U
        UPDATE    owner -> holders   the new V and the r x r core C, with W = V C

    Further copies of a parameter that is replicated over TP send nothing and receive the same.

    Attributes:
        shares: What each rank holds.
        owner: The rank that computes the factors.
        work: (operations, estimated time).
        factors: Their shape.
    """

    shares: tuple[Share, ...]
    owner: int
    work: tuple[int, int]
    factors: FactorShape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner."""
        return (self.owner,)

    @property
    def flops(self) -> tuple[int, ...]:
        """Operations, all counted as the owner's."""
        return self.work[:1]

    @property
    def costs(self) -> tuple[int, ...]:
        """Estimated time, all counted as the owner's."""
        return self.work[1:]

    @cached_property
    def messages(self) -> Messages:
        """The five messages."""
        shape, owner = self.factors, self.owner
        r = shape.rank
        sources = [share for share in self.shares if share.is_source]
        return {
            WARM: tuple((owner, s.rank, shape.v_rows(s) * r) for s in sources),
            SOURCE: tuple((s.rank, owner, shape.u_rows(s) * r) for s in sources),
            BASIS: tuple((owner, s.rank, shape.u_rows(s) * r) for s in self.shares),
            RESPONSE: tuple((s.rank, owner, shape.v_rows(s) * r) for s in sources),
            UPDATE: tuple((owner, s.rank, (shape.v_rows(s) + r) * r) for s in self.shares),
        }

    def sends_elements(self, where: Round) -> bool:
        """Never."""
        return False

    def region(self, number: int) -> Region:
        """All of it."""
        return self.factors.region

    def kept_elements(self) -> Iterator[tuple[int, int]]:
        """B padded to whole rows, where it is not dense."""
        for share in self.shares:
            if share.is_source and not share.is_dense:
                yield share.rank, share.rows * share.cols

    def computed_elements(self) -> Iterator[tuple[int, int]]:
        """The factors, on their owner; one of them times the core, on each holder."""
        yield self.owner, self.factors.product_elements
        for share in self.shares:
            yield share.rank, share.rows * self.factors.rank


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Several ranks compute the matrix together; what is square is cut by block rows.

    Attributes:
        shape: (m, n).
        shares: What each rank holds.
        ranks: The ranks; number J of them has panel J and block row J.
        flops: Operations of each.
        costs: Estimated time of each.
        requests: Kinds of the messages among them, in order: ``scalars`` first and once, then
            ``partials`` and ``rows``.
    """

    shape: tuple[int, int]
    shares: tuple[Share, ...]
    ranks: tuple[int, ...]
    flops: tuple[int, ...]
    costs: tuple[int, ...]
    requests: tuple[str, ...]

    @property
    def factors(self) -> None:
        """Full rank."""
        return

    @cached_property
    def panels(self) -> tuple[Region, ...]:
        """The panel of every rank."""
        return panels(self.shape, len(self.ranks))

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the block row of every rank, of what is square."""
        return even_cuts(min(self.shape), len(self.ranks))

    @cached_property
    def messages(self) -> Messages:
        """Panels to their ranks, requests among them, the updates of the panels back."""
        by_kind = {kind: tuple(self._request(kind)) for kind in set(self.requests)}
        found = {request(number): by_kind[kind] for number, kind in enumerate(self.requests)}
        inside = [
            (share, rank, elements)
            for share in self.shares
            for rank, panel in zip(self.ranks, self.panels, strict=True)
            if (elements := share.elements_in(panel))
        ]
        found[SOURCE] = tuple((s.rank, rank, n) for s, rank, n in inside if s.is_source)
        found[UPDATE] = tuple((rank, s.rank, n) for s, rank, n in inside)
        return found

    def _request(self, kind: str) -> Iterator[tuple[int, int, int]]:
        short = min(self.shape)
        for source, sender in enumerate(self.ranks):
            for target, receiver in enumerate(self.ranks):
                start, end = self.rows[target if kind == "partials" else source]
                if sender != receiver:
                    yield sender, receiver, 2 if kind == "scalars" else (end - start) * short

    def sends_elements(self, where: Round) -> bool:
        """Both ways, but not in the requests."""
        return where in (SOURCE, UPDATE)

    def region(self, number: int) -> Region:
        """Its panel."""
        return self.panels[number]

    def kept_elements(self) -> Iterator[tuple[int, int]]:
        """Each rank its panel."""
        for rank, panel in zip(self.ranks, self.panels, strict=True):
            yield rank, panel.numel

    def computed_elements(self) -> Iterator[tuple[int, int]]:
        """Nothing more."""
        yield from ()


SchemeFunction = Callable[[tuple[int, int], tuple[Share, ...], int, tuple[int, int]], Scheme]
"""Scheme of a matrix with one owner, from shape, shares, owner, (operations, time)."""

FactorChoice = Literal["auto", "factors", "matrix"]


def whole_scheme(
    shape: tuple[int, int], shares: tuple[Share, ...], owner: int, work: tuple[int, int]
) -> Scheme:
    """The scheme of dmuon: the owner gets the elements and returns those of the update."""
    return Whole(shape=shape, shares=shares, owner=owner, work=work)


def factor_scheme(rank: Callable[[int, int], int], choice: FactorChoice) -> SchemeFunction:
    """The scheme of a low-rank update.

    Args:
        rank: r of an (m, n) matrix.
        choice: ``auto`` takes for each matrix what sends fewer elements, the matrix where equal.
    """

    def scheme(
        shape: tuple[int, int], shares: tuple[Share, ...], owner: int, work: tuple[int, int]
    ) -> Scheme:
        factors = FactorShape.of(shape, rank(*shape))
        by_factors: Scheme = Factors(shares=shares, owner=owner, work=work, factors=factors)
        by_matrix: Scheme = Whole(
            shape=shape, shares=shares, owner=owner, work=work, factors=factors
        )
        if choice == "auto":
            return min(by_matrix, by_factors, key=sent_elements)
        return by_factors if choice == "factors" else by_matrix

    return scheme


def sent_elements(scheme: Scheme) -> int:
    """Elements that cross between ranks in one step."""
    return sum(
        elements
        for messages in scheme.messages.values()
        for source, target, elements in messages
        if source != target
    )
