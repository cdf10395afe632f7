"""The adaptive policy where a draft costs more at times: two curves, and somebody who says which one holds.

In: measured costs, what a dear draft costs more. Out: what `Adaptive` answers. Knows no shortlist.
"""

from collections.abc import Callable

from dflash_mlx.policy.adaptive import Adaptive
from dflash_mlx.policy.costs import CostCurve
from dflash_mlx.policy.plan import Plan


class Dearer(Adaptive):
    """Decide each round by the costs that its draft will have.

    Args:
        curve: costs with the usual draft.
        extra: seconds that a dear one takes more.
        is_dear: whether the next one is dear; asked before each plan.
    """

    def __init__(self, curve: CostCurve, *, extra: float, is_dear: Callable[[], bool]) -> None:
        super().__init__(curve)
        dear = [depth._replace(draft=depth.draft + extra) for depth in curve.measured]
        self._usual, self._dear = curve, CostCurve(dear, curve.block_size)
        self._is_dear = is_dear

    def plan(self, *, depth: int, most: int) -> Plan:
        """What to do after `depth` tokens, when at most `most` proposals can be verified."""
        self.curve = self._dear if self._is_dear() else self._usual
        return super().plan(depth=depth, most=most)
