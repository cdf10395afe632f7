"""What a round costs: seconds measured at a few row counts and depths in, seconds at any of them out.

More rows never cost less; nothing else is assumed of the curve (a convex fit was tried, `benchmarks/LOG.md`). Knows
no clock and no model; `calibration` measures.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

_WORTH = 1.03  # how much faster a drafter that is always right must be, for any to be tried


class Depth(NamedTuple):
    """What was measured with so many tokens in the cache. All in seconds."""

    tokens: int
    plain: float  # one step of pipelined plain decoding
    draft: float  # one block drafted, its context rows included
    look: float  # more, where the confidences are read before the verify pass is begun
    verify: Mapping[int, float]  # rows of the pass (the anchor is one of them) to the rest of the round


class Costs(NamedTuple):
    """Seconds at one depth, for every row count of a block."""

    plain: float
    draft: float
    look: float
    verify: tuple[float, ...]  # [block_size]; entry n verifies n proposed tokens, n + 1 rows

    def round(self, n: int) -> float:
        """A round that drafts and verifies n proposed tokens."""
        return self.draft + self.verify[n]

    @property
    def can_pay(self) -> bool:
        """Whether a drafter that is always right would be faster than plain decoding, by more than a hair."""
        return any((n + 1) * self.plain > _WORTH * self.round(n) for n in range(1, len(self.verify)))


class CostCurve:
    """Seconds by depth and rows, interpolated between what was measured.

    A pass costs at most what one of more rows does: where 8 rows take less time than 5 (OpenBLAS: 98 and 110 ms),
    8 are verified. The fit is no closer than this and not convex: measured curves bend down as often as up (8.5,
    13.5, 15.6, 20.7, 28.1 ms for 1, 2, 3, 5, 8 rows of a MoE on an M5 Max), and a convex one would make the second
    row of that one a third too cheap.
    """

    def __init__(self, depths: Sequence[Depth], block_size: int) -> None:
        assert depths and all(depth.verify for depth in depths), "a curve needs measurements"
        self.measured = tuple(sorted(depths, key=lambda depth: depth.tokens))
        self.block_size = block_size
        self._whole = [_every_row(depth, block_size) for depth in self.measured]

    def can_pay_after(self, depth: int) -> bool:
        """Whether drafting could pay with `depth` tokens in the cache, or at a place measured beyond."""
        beyond = (w.can_pay for m, w in zip(self.measured, self._whole, strict=True) if m.tokens > depth)
        return self.at(depth).can_pay or any(beyond)

    def at(self, depth: int) -> Costs:
        """Costs with `depth` tokens in the cache; past the deepest measurement the last slope goes on."""
        tokens = [measured.tokens for measured in self.measured]
        if len(tokens) == 1 or depth <= tokens[0]:
            return self._whole[0]
        right = min(max(bisect_right(tokens, depth), 1), len(tokens) - 1)
        share = (depth - tokens[right - 1]) / (tokens[right] - tokens[right - 1])
        return _between(self._whole[right - 1], self._whole[right], share)


def _every_row(depth: Depth, block_size: int) -> Costs:
    rows = sorted(depth.verify)
    seconds = rising([depth.verify[row] for row in rows])
    verify = tuple(interpolated(rows, seconds, row) for row in range(1, block_size + 1))
    return Costs(depth.plain, depth.draft, max(depth.look, 0.0), verify)


def rising(values: Sequence[float]) -> list[float]:
    """The same where they rise; where a later value is smaller, that one: what comes after is to be had instead."""
    return list(accumulate(reversed(values), min))[::-1]


def interpolated(rows: Sequence[int], seconds: Sequence[float], row: int) -> float:
    """Seconds at a row count between those of `rows`; beyond the last the slope goes on."""
    if row <= rows[0] or len(rows) == 1:
        return seconds[0]
    right = min(bisect_right(rows, row), len(rows) - 1)
    share = (row - rows[right - 1]) / (rows[right] - rows[right - 1])
    return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def _between(near: Costs, far: Costs, share: float) -> Costs:
    """Past the far end (share above 1) costs go on growing, and never shrink below what was measured."""

    def blend(a: float, b: float) -> float:
        return a + share * (b - a) if share <= 1 else b + (share - 1) * max(b - a, 0.0)

    verify = rising([blend(a, b) for a, b in zip(near.verify, far.verify, strict=True)])
    return Costs(
        blend(near.plain, far.plain),
        blend(near.draft, far.draft),
        blend(near.look, far.look),
        tuple(verify),
    )
