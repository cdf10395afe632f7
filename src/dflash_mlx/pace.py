"""How many tokens of a prompt go into one pass: times in, a number out. Knows no model and no clock.

A pass is computed in a few parts, none of which can be interrupted: the longest is what a Ctrl-C waits for.
"""

import math

_LIMIT = 0.5  # seconds that one part of a pass may take
_FIRST = 64  # tokens, before anything is known; the first pass also pays for what is done once
_LEAST = 16


class Pace:
    """Doubles while passes are short, and falls at once where one took too long.

    Args:
        most: tokens in one pass, however fast.

    Attributes:
        tokens: for the next pass.
    """

    def __init__(self, most: int):
        self._most = most
        self.tokens = min(_FIRST, most)

    def took(self, tokens: int, seconds: float) -> None:
        """The longest part of a pass over so many tokens took so long; fewer than was said tell nothing."""
        if tokens < self.tokens:
            return
        if seconds > _LIMIT:
            halvings = math.ceil(math.log2(seconds / _LIMIT))
            self.tokens = max(min(_LEAST, self._most), self.tokens >> halvings)
        elif seconds < 0.4 * _LIMIT:
            self.tokens = min(2 * self.tokens, self._most)
