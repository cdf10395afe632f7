"""Recurrent state and short convolutions, mlx-lm's ArraysCache: the kept rows are run again, and nothing else is.

A recurrence writes new arrays and leaves the old ones alone, so what was there before a pass is a matter of
references, and so is everything that it left when all rows are kept. For a part of them the inputs that the
layers took in are needed, see `recurrence`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.target.recurrence import Intake


class Replay:
    """The arrays before and after one pass, and what made the one of the other."""

    def __init__(self, layer: Any, rows: int):
        self._rows = rows
        self._before: list[mx.array | None] = list(layer.cache)
        self._after: list[mx.array | None] = []
        self.intakes: Sequence[Intake] = ()

    @property
    def slots(self) -> int:
        """Arrays that the cache holds."""
        return len(self._before)

    def fits(self, layer: Any) -> bool:
        """Whether the pass has written every array."""
        self._after = list(layer.cache)
        return all(array is not None for array in self._after)

    def keep(self, layer: Any, rows: int) -> None:
        """Put back what was there before, or what the first `rows` rows make of it."""
        if rows == 0:
            kept = self._before
        elif rows == self._rows:
            kept = self._after
        else:
            kept = self.replayed(rows)
        layer.cache = list(kept)
        # Another thread may go on from here.
        mx.async_eval([array for array in kept if array is not None])

    def replayed(self, rows: int) -> list[mx.array | None]:
        """The arrays after the first `rows` rows."""
        assert self.intakes, (
            f"a part of a pass of {self._rows} rows cannot be kept: its inputs were not recorded"
        )
        return [intake.state(rows, self._rows) for intake in self.intakes]

    def is_faithful(self) -> bool:
        """Whether running all rows again gives the very arrays that the pass left."""
        again = self.replayed(self._rows)
        return all(
            old is not None and new is not None and bool(mx.array_equal(old, new).item())
            for old, new in zip(self._after, again, strict=True)
        )


class Recurrent(NamedTuple):
    """The kind of ArraysCache."""

    def before(self, layer: Any, rows: int) -> Replay:
        """Hold on to the arrays."""
        return Replay(layer, rows)

    def snapshot(self, layer: Any) -> list[mx.array | None]:
        """The arrays; no one writes into them."""
        return list(layer.cache)

    def restore(self, layer: Any, saved: list[mx.array | None]) -> None:
        """Put them back."""
        layer.cache = list(saved)


def hand_out(undos: Sequence[Any], intakes: Sequence[Intake]) -> bool:
    """Give each recurrent cache the intakes that made its arrays, in the order in which the layers ran.

    Returns:
        False where there are too few or too many; none at all is the sign of a pass that was not recorded.
    """
    replays = [undo for undo in undos if isinstance(undo, Replay)]
    if not intakes:
        return True
    if len(intakes) != sum(replay.slots for replay in replays):
        return False
    first = 0
    for replay in replays:
        replay.intakes = intakes[first : first + replay.slots]
        first += replay.slots
    return True


RECURRENT = Recurrent()
