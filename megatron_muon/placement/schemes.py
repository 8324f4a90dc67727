"""Schemes: how one matrix is communicated and where it is computed.

``Whole``    its elements go to one owner, the update comes back
``Factors``  products with low-rank factors go to one owner, factors come back (Orth-Dion)
``Panels``   several ranks compute it together, each a panel of its longer side (dmuon)

A scheme says in which rounds messages are sent, and how many elements each carries between two
ranks. Waves, programs and byte counts know no more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from megatron_muon.linalg import RequestKind, Team
from megatron_muon.placement.factor_shape import FactorShape
from megatron_muon.placement.regions import Region, Run, Share, panels


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

CAPTURED = Round((1 << 20) + 1, "captured")
"""Owner to holders: elements of U Wᵀ, where the update came as elements."""


def request(number: int) -> Round:
    """Among the ranks that compute the panels of one matrix: their request of this number."""
    return Round(10 + number, "squares" if number else "scalars")


Messages = Mapping[Round, tuple[tuple[int, int, int], ...]]
"""For every round (source, target, elements) of each message."""

Work = tuple[int, int, int]
"""(rank, floating-point operations, estimated time)."""


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
        """The ranks that compute it; the first one counts as its owner."""

    @property
    def work(self) -> tuple[Work, ...]:
        """What each rank computes for it; a rank may be listed more than once."""

    @property
    def messages(self) -> Messages:
        """What is sent in every round.

        The elements that a rank holds of what it computes are not sent; other messages may be of a
        rank to itself.
        """

    @property
    def assembles(self) -> bool:
        """Whether elements are brought together, not products with them."""

    def carries_elements(self, where: Round, share: Share) -> bool:
        """True where a message carries the elements of a share, in the order of ``pieces``."""

    def region(self, number: int) -> Region:
        """What rank number ``number`` of ``ranks`` computes."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One owner assembles the matrix and sends back what every holder needs of the update.

    Attributes:
        shape: (m, n).
        shares: What each rank holds.
        owner: The rank that computes it.
        cost: (operations, estimated time).
        factors: Set where the update has low rank: a holder then gets its rows of U, V and the
            core, or its elements of U Vᵀ and, in a message of its own, of U Wᵀ, whichever is less.
    """

    shape: tuple[int, int]
    shares: tuple[Share, ...]
    owner: int
    cost: tuple[int, int]
    factors: FactorShape | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner."""
        return (self.owner,)

    @property
    def work(self) -> tuple[Work, ...]:
        """All of it, on the owner."""
        return ((self.owner, *self.cost),)

    @cached_property
    def messages(self) -> Messages:
        """Elements to the owner, the update back."""
        others = [share for share in self.shares if share.rank != self.owner]
        found = {
            SOURCE: tuple((s.rank, self.owner, s.numel) for s in others if s.is_source),
            UPDATE: tuple((self.owner, s.rank, self._returned(s)) for s in others),
        }
        if self.factors is not None:
            found[CAPTURED] = tuple(
                (self.owner, s.rank, s.numel) for s in others if self.carries_elements(UPDATE, s)
            )
        return found

    def _returned(self, share: Share) -> int:
        if self.factors is None or self.carries_elements(UPDATE, share):
            return share.numel
        return self.factors.factor_elements(share)

    @property
    def assembles(self) -> bool:
        """Yes."""
        return True

    def carries_elements(self, where: Round, share: Share) -> bool:
        """Both ways, unless factors of a low-rank update are fewer.

        A copy of what the owner holds gets elements too: products that two ranks compute from
        factors in other ways differ in their last bits.
        """
        return (
            where == SOURCE
            or self.factors is None
            or self.factors.returns_elements(share)
            or share.runs == self._own_runs
        )

    @cached_property
    def _own_runs(self) -> tuple[Run, ...]:
        return next((share.runs for share in self.shares if share.rank == self.owner), ())

    def region(self, number: int) -> Region:
        """All of it."""
        return Region(row=0, rows=self.shape[0], col=0, cols=self.shape[1])


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
        work: Products on the holders, factors on the owner.
        factors: Their shape.
    """

    shares: tuple[Share, ...]
    owner: int
    work: tuple[Work, ...]
    factors: FactorShape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The owner."""
        return (self.owner,)

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

    @property
    def assembles(self) -> bool:
        """No."""
        return False

    def carries_elements(self, where: Round, share: Share) -> bool:
        """Never."""
        return False

    def region(self, number: int) -> Region:
        """All of it."""
        return self.factors.region


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Several ranks compute the matrix together; what is square is cut by block rows.

    Attributes:
        shape: (m, n).
        shares: What each rank holds.
        ranks: The ranks; number J of them is worker J of the team and has panel J.
        team: Their block rows, and on how many nodes they are.
        work: What each computes.
        requests: Kinds of the messages among them, in order: ``scalars`` first and once.
    """

    shape: tuple[int, int]
    shares: tuple[Share, ...]
    ranks: tuple[int, ...]
    team: Team
    work: tuple[Work, ...]
    requests: tuple[RequestKind, ...]

    @property
    def factors(self) -> None:
        """Full rank."""
        return

    @cached_property
    def panels(self) -> tuple[Region, ...]:
        """The panel of every rank."""
        return panels(self.shape, len(self.ranks))

    @cached_property
    def messages(self) -> Messages:
        """Panels to their ranks, requests among them, the updates of the panels back."""
        by_kind = {kind: tuple(self._request(kind)) for kind in set(self.requests)}
        found = {request(number): by_kind[kind] for number, kind in enumerate(self.requests)}
        inside = [
            (share, rank, elements)
            for share in self.shares
            for rank, panel in zip(self.ranks, self.panels, strict=True)
            if rank != share.rank and (elements := share.elements_in(panel))
        ]
        found[SOURCE] = tuple((s.rank, rank, n) for s, rank, n in inside if s.is_source)
        found[UPDATE] = tuple((rank, s.rank, n) for s, rank, n in inside)
        return found

    def _request(self, kind: RequestKind) -> Iterator[tuple[int, int, int]]:
        """What every rank sends to every rank, itself included."""
        team, short = self.team, min(self.shape)
        for source, sender in enumerate(self.ranks):
            for target in team.partners(kind, source):
                elements = 2 if kind == "scalars" else team.rows_sent(kind, source, target) * short
                yield sender, self.ranks[target], elements

    @property
    def assembles(self) -> bool:
        """Yes, panel by panel."""
        return True

    def carries_elements(self, where: Round, share: Share) -> bool:
        """Both ways, but not in the requests."""
        return where in (SOURCE, UPDATE)

    def region(self, number: int) -> Region:
        """Its panel."""
        return self.panels[number]


SchemeFunction = Callable[[tuple[int, int], tuple[Share, ...], int, tuple[int, int]], Scheme]
"""Scheme of a matrix with one owner, from shape, shares, owner, (operations, time) as a whole."""

FactorChoice = Literal["auto", "factors", "matrix"]


def whole_scheme(
    shape: tuple[int, int], shares: tuple[Share, ...], owner: int, cost: tuple[int, int]
) -> Scheme:
    """The scheme of dmuon: the owner gets the elements and returns those of the update."""
    return Whole(shape=shape, shares=shares, owner=owner, cost=cost)


def factor_scheme(
    rank: Callable[[int, int], int], of_factors: Callable[[int, int], int], choice: FactorChoice
) -> SchemeFunction:
    """The scheme of a low-rank update.

    Args:
        rank: r of an (m, n) matrix.
        of_factors: Of its operations those on the factors alone, which the owner does.
        choice: ``auto`` takes for each matrix what sends fewer elements, the matrix where equal.
    """

    def scheme(
        shape: tuple[int, int], shares: tuple[Share, ...], owner: int, cost: tuple[int, int]
    ) -> Scheme:
        factors = FactorShape.of(shape, rank(*shape))
        own = of_factors(*shape)
        # Four products with factors for each element, on whoever holds it.
        products = tuple((s.rank, c := 8 * s.rows * s.cols * factors.rank, c) for s in shares)
        by_factors: Scheme = Factors(
            shares=shares, owner=owner, work=(*products, (owner, own, own)), factors=factors
        )
        by_matrix: Scheme = Whole(
            shape=shape, shares=shares, owner=owner, cost=cost, factors=factors
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
