"""What a policy answers, and the policy that asks nothing."""

from collections.abc import Sequence
from typing import NamedTuple


class Plan(NamedTuple):
    """What the next round does."""

    verify: int  # proposed tokens that the target sees; 0: nothing is drafted
    look: bool = False  # read the block's confidences first, and let `choose` say how many
    steps: int = 1  # plain tokens until the policy is asked again, where nothing is drafted


class WholeBlock:
    """Verify everything that was drafted."""

    def plan(self, *, depth: int, most: int) -> Plan:
        """What to do after `depth` tokens, when at most `most` proposals can be verified."""
        return Plan(most)

    def choose(self, confidences: Sequence[float]) -> int:
        """All of them; no plan looks."""
        return len(confidences)

    def observe(self, verified: int, accepted: int) -> None:
        """Nothing is learnt."""
