"""The shape of low-rank factors, and what of them a share needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.placement.regions import Region, Share


@dataclass(frozen=True, kw_only=True)
class FactorShape:
    """A matrix in the orientation of its factors: U on its longer side, V on its shorter.

    Attributes:
        long: Longer side, that of U.
        short: Shorter side, that of V.
        rank: r.
        transposed: True when the rows are the shorter side; decided on the global shape.
    """

    long: int
    short: int
    rank: int
    transposed: bool

    @classmethod
    def of(cls, shape: tuple[int, int], rank: int) -> FactorShape:
        """Orientation of an (m, n) matrix: V lies on the columns unless there are fewer rows."""
        m, n = shape
        return cls(long=max(m, n), short=min(m, n), rank=rank, transposed=m < n)

    @property
    def region(self) -> Region:
        """The whole matrix in its own orientation."""
        rows, cols = (self.short, self.long) if self.transposed else (self.long, self.short)
        return Region(row=0, rows=rows, col=0, cols=cols)

    def u_rows(self, share: Share) -> int:
        """Rows of U that a share meets."""
        return share.cols if self.transposed else share.rows

    def v_rows(self, share: Share) -> int:
        """Rows of V that a share meets."""
        return share.rows if self.transposed else share.cols

    def factor_elements(self, share: Share) -> int:
        """Elements of the rows of U and V that a share meets, and of the r x r core."""
        return (self.u_rows(share) + self.v_rows(share) + self.rank) * self.rank

    def returns_elements(self, share: Share) -> bool:
        """True where both products of a whole matrix have fewer elements than their factors.

        A share of few rows needs nearly the whole factor of the other side. Hence a matrix never
        needs more than 1.5 times the elements that it needs in Muon, at any number of ranks.
        """
        return 2 * share.numel < self.factor_elements(share)
