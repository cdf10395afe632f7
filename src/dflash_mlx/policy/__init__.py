"""How many proposed tokens to verify: measured costs and counts in, small integers out; no arrays, no clock."""

from dflash_mlx.policy.adaptive import Adaptive
from dflash_mlx.policy.costs import CostCurve, Costs, Depth
from dflash_mlx.policy.dearer import Dearer
from dflash_mlx.policy.plan import Plan, WholeBlock

__all__ = ["Adaptive", "CostCurve", "Costs", "Dearer", "Depth", "Plan", "WholeBlock"]
