"""A sliding window's ring, mlx-lm's RotatingKVCache. Its own `trim` is never called: once wrapped it does nothing.

A pass of several rows leaves a new buffer in temporal order, `max_size - 1` rows from before at most and then its
own: what is rejected is cut off the end. A pass of one row may write over the oldest row where it stands. That
row need not come back: it is outside the window of the token that took its place, and of every later one, and
the next pass, whatever its length, overwrites or drops exactly this row before it reads.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.target.caches.rows import Rows


class State(NamedTuple):
    """A ring's buffers [1, H, L, D] and where it stands in them."""

    keys: mx.array | None
    values: mx.array | None
    offset: int  # tokens seen
    place: int  # where the next row goes

    def put(self, layer: Any) -> None:
        """Let the ring stand here."""
        layer.keys, layer.values, layer.offset, layer._idx = self


class Cut:
    """The ring before and after one pass."""

    def __init__(self, layer: Any, rows: int):
        self._rows = rows
        self._before = self._after = _state(layer)

    def fits(self, layer: Any) -> bool:
        """Whether the pass's rows are the last of the buffer."""
        self._after = after = _state(layer)
        if after.keys is None or after.offset != self._before.offset + self._rows:
            return False
        return self._rows == 1 or after.place == after.keys.shape[2] >= self._rows

    def keep(self, layer: Any, rows: int) -> None:
        """Cut the others off the end."""
        if rows == 0:
            self._before.put(layer)
            return
        keys, values, offset, index = self._after
        assert keys is not None and values is not None
        if rows < self._rows:
            drop = self._rows - rows
            keys, values = keys[..., : index - drop, :], values[..., : index - drop, :]
            offset, index = offset - drop, index - drop
            # Another thread may go on from here.
            mx.async_eval(keys, values)
        State(keys, values, offset, index).put(layer)


class Ring(Rows):
    """The kind of RotatingKVCache."""

    def before(self, layer: Any, rows: int) -> Cut:  # type: ignore[override]  # the same protocol
        """Note where the ring stands; its buffers are not copied."""
        return Cut(layer, rows)


def _state(layer: Any) -> State:
    return State(layer.keys, layer.values, layer.offset, layer._idx)


RING = Ring(("offset", "_idx"))
