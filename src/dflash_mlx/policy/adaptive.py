"""How many proposed tokens to verify: what pays by the measured costs and what was accepted so far.

Counts of accepted tokens in, small integers out. Looks at no clock: with the same curve and the same text the
choices are the same. Knows no model and no arrays.
"""

from collections import deque
from collections.abc import Sequence

from dflash_mlx.policy.costs import CostCurve
from dflash_mlx.policy.odds import Odds, expected_tokens
from dflash_mlx.policy.plan import Plan

_MARGIN = 0.01  # another length must be better by this much
_FIRST_LOSS, _LATER_LOSS = 1.6, 0.5  # tokens that drafting may fall behind plain decoding before it stops
_FIRST_REST, _LONGEST_REST = 8, 512  # plain tokens before drafting is tried again
_GROWTH = 1.4  # of the rest after a try that lost
_REST_FOR_LOSS = 36  # plain tokens, at least, for each token lost
_REMEMBERED = 16  # blocks whose confidences are kept, to judge whether looking pays
_ENOUGH = 4  # blocks that this takes
_GLANCE = 24  # rounds without a look before one is taken again


class Adaptive:
    """Verify as many proposals as pay, and draft only while that beats plain decoding.

    A drafter that loses rests for a number of plain tokens that grows each time, then gets the round or two
    that its estimate needs to fall again, or to rise if the text has changed. Where even a drafter that is always
    right would lose, nothing is ever drafted.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._costs = curve.at(0)
        self._most = 0
        self._odds = Odds(curve.block_size - 1)
        self._drafting = True
        self._length = 0  # chosen last for blocks that are not looked at
        self._rate = 0.0  # tokens a second, as expected of the last plan
        self._listening = False  # to confidences: they have been seen to pay
        self._unlooked = 0  # rounds since the last look
        self._confidences: Sequence[float] | None = None  # of the block in hand, where they were read
        self._blocks: deque[Sequence[float]] = deque(maxlen=_REMEMBERED)
        self._rest = _FIRST_REST // 2
        self._gained = 0.0  # tokens ahead of plain decoding since drafting began or began again
        self._behind = 0.0  # tokens behind it since it was last ahead
        self._may_lose = _FIRST_LOSS

    def plan(self, *, depth: int, most: int) -> Plan:
        """What to do after `depth` tokens, when at most `most` proposals can be verified."""
        self._costs, self._most = self.curve.at(depth), most
        if most < 1 or not self._costs.can_pay:
            return Plan(0, steps=_LONGEST_REST)
        if not self._drafting:
            self._begin_again()
        length, rate = self._best_length()
        gain = self._gain_of_looking()
        self._listening = gain is not None and gain > (1.0 if self._listening else 1 + _MARGIN)
        self._rate = rate * max(gain or 1.0, 1.0)
        if self._rate * self._costs.plain < 1.0 and self._behind >= self._may_lose:
            return self._stop()
        self._length = length
        return Plan(length, look=self._listening or gain is None or self._unlooked >= _GLANCE)

    def choose(self, confidences: Sequence[float]) -> int:
        """How many to verify of the block that was planned and is drafted, 0 included."""
        self._confidences = tuple(confidences)
        self._blocks.append(self._confidences)
        if not self._listening:
            return self._length  # this look was for learning what confidences mean
        return self._length_for(expected_tokens(self._odds.by_confidence(confidences)))

    def observe(self, verified: int, accepted: int) -> None:
        """Learn from the round that was planned: of `verified` proposals the first `accepted` were right."""
        looked = self._confidences is not None
        self._odds.observe(verified, accepted, self._confidences)
        seconds = self._costs.round(verified) + (self._costs.look if looked else 0.0)
        gained = 1 + accepted - seconds / self._costs.plain
        self._gained += gained
        self._behind = max(self._behind - gained, 0.0)
        self._unlooked = 0 if looked else self._unlooked + 1
        self._confidences = None

    def _best_length(self) -> tuple[int, float]:
        """The length that suits blocks like the past ones, all treated alike, and its tokens a second."""
        tokens = expected_tokens(self._odds.by_position())
        rates = [tokens[n] / self._costs.round(n) for n in range(self._most + 1)]
        best = max(range(1, self._most + 1), key=lambda n: rates[n])
        if 0 < self._length <= self._most and rates[best] < (1 + _MARGIN) * rates[self._length]:
            best = self._length
        return best, rates[best]

    def _gain_of_looking(self) -> float | None:
        """How much faster the remembered blocks would go if each got its own length; None: too few are known."""
        if len(self._blocks) < _ENOUGH:
            return None
        blocks = [expected_tokens(self._odds.by_confidence(block)) for block in self._blocks]
        lengths = range(1, min(self._most, len(blocks[0]) - 1) + 1)
        alike = max(sum(block[n] for block in blocks) / self._costs.round(n) for n in lengths)
        tokens = seconds = 0.0
        for block in blocks:
            n = self._length_for(block)
            tokens += block[n]
            seconds += self._costs.round(n) + self._costs.look
        return len(blocks) * tokens / (seconds * alike)

    def _length_for(self, tokens: Sequence[float]) -> int:
        """Each row must bring the tokens that its seconds would bring elsewhere (Dinkelbach's rule for ratios)."""
        rate = max(self._rate, 1 / self._costs.plain)
        lengths = range(min(self._most, len(tokens) - 1) + 1)
        return max(lengths, key=lambda n: tokens[n] - rate * self._costs.verify[n])

    def _stop(self) -> Plan:
        self._drafting = False
        if self._gained > 0:
            self._rest = _FIRST_REST
        else:
            longer = max(_GROWTH * self._rest, _REST_FOR_LOSS * self._behind)
            self._rest = min(int(longer), _LONGEST_REST)
        return Plan(0, steps=self._rest)

    def _begin_again(self) -> None:
        self._drafting = True
        self._may_lose = _LATER_LOSS
        self._gained = self._behind = 0.0
        self._length, self._rate = 0, 0.0
        self._odds.forget_positions()
        self._blocks.clear()
