"""How likely proposed tokens are accepted: what was accepted so far in, probabilities by position out.

Two estimates, both learnt while decoding: by position alone, and by the draft's own confidence in this block.
Both start from a modest guess and forget slowly. Pure arithmetic on small lists; knows no costs.
"""

from bisect import bisect_right
from collections.abc import Sequence

_GUESS = 0.7  # published drafters have 0.6 (prose) to 0.9 (code)
_GUESS_WEIGHT = 1.5  # proposed tokens that the guess counts for
_POOL_WEIGHT = 20.0  # rounds that the mean of all positions counts for in each
_FORGET = 0.985  # share of the evidence that is left after a round: the last 65 rounds count
_EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.88, 0.96)  # between classes of confidence
_CLASS_GUESS = (0.07, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
_CLASS_WEIGHT = 2.0
_TRUST = 8.0  # tokens of a class after which its meaning is half believed


class Odds:
    """Acceptance of each position of a block, given that those before it were accepted."""

    def __init__(self, positions: int) -> None:
        self._hits = [0.0] * positions
        self._seen = [0.0] * positions
        self._class_hits = [0.0] * len(_CLASS_GUESS)
        self._class_seen = [0.0] * len(_CLASS_GUESS)

    def by_position(self) -> list[float]:
        """A position that was rarely reached takes after the mean of all."""
        pool = (sum(self._hits) + _GUESS_WEIGHT * _GUESS) / (sum(self._seen) + _GUESS_WEIGHT)
        return [
            (hits + _POOL_WEIGHT * pool) / (seen + _POOL_WEIGHT)
            for hits, seen in zip(self._hits, self._seen, strict=True)
        ]

    def by_confidence(self, confidences: Sequence[float]) -> list[float]:
        """What confidences like these turned out to mean."""
        return [self._class_chance(bisect_right(_EDGES, confidence)) for confidence in confidences]

    def _class_chance(self, i: int) -> float:
        hits, seen = self._class_hits[i], self._class_seen[i]
        return (hits + _CLASS_WEIGHT * _CLASS_GUESS[i]) / (seen + _CLASS_WEIGHT)

    def observe(self, verified: int, accepted: int, confidences: Sequence[float] | None) -> None:
        """Learn from one round.

        Positions that were not verified because of low confidence count as what their confidence means; without
        this, only blocks that looked good would be learnt from.
        """
        for i in range(len(self._hits)):
            self._hits[i] *= _FORGET
            self._seen[i] *= _FORGET
        for i in range(min(accepted + 1, verified)):
            self._count(i, 1.0, float(i < accepted))
            if confidences is not None:
                kind = bisect_right(_EDGES, confidences[i])
                self._class_seen[kind] += 1.0
                self._class_hits[kind] += i < accepted
        if confidences is None or accepted < verified:
            return
        reached = 1.0
        for i in range(verified, len(confidences)):
            kind = bisect_right(_EDGES, confidences[i])
            chance, seen = self._class_chance(kind), self._class_seen[kind]
            self._count(i, reached * seen / (seen + _TRUST), chance)
            reached *= chance

    def _count(self, position: int, weight: float, chance: float) -> None:
        self._seen[position] += weight
        self._hits[position] += weight * chance

    def forget_positions(self) -> None:
        """Start again with positions; what confidences mean is kept."""
        self._hits = [0.0] * len(self._hits)
        self._seen = [0.0] * len(self._seen)


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Entry n: tokens that a round emits on average when n proposals are verified, its own token included."""
    tokens, reached = [1.0], 1.0
    for chance in chances:
        reached *= chance
        tokens.append(tokens[-1] + reached)
    return tokens
