"""A sliding window's ring, mlx-lm's RotatingKVCache. Its own `trim` is never called: once wrapped it does nothing.

A pass of several rows leaves a new buffer in temporal order, `max_size - 1` rows from before at most and then its
own: what is rejected is cut off the end. A pass of one row may write over the oldest row where it stands. That
row need not come back: it is outside the window of the token that took its place, and of every later one, and
the next pass, whatever its length, overwrites or drops exactly this row before it reads. Where two passes of one
row are in flight and both are undone, the second one's row is needed, and is kept for that.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.target.caches.rows import Rows, shared


class State(NamedTuple):
    """A ring's buffers [1, H, L, D] and where it stands in them."""

    keys: mx.array | None
    values: mx.array | None
    offset: int  # tokens seen
    place: int  # where the next row goes

    def put(self, layer: Any) -> None:
        """Let the ring stand here."""
        layer.keys, layer.values, layer.offset, layer._idx = self


class Row(NamedTuple):
    """What stands at one place of a ring, key and value [1, H, 1, D]."""

    place: int
    key: mx.array
    value: mx.array


class Cut:
    """The ring before and after one pass."""

    def __init__(self, layer: Any, rows: int):
        self._rows = rows
        self._before = self._after = _state(layer)
        self._next = _overwritten_next(layer) if rows == 1 else None
        layer.furthest = layer.offset + rows  # of the last pass that began, undone or not

    def fits(self, layer: Any) -> bool:
        """Whether the pass's rows are the last of the buffer."""
        self._after = after = _state(layer)
        if after.keys is None or after.offset != self._before.offset + self._rows:
            return False
        return self._rows == 1 or after.place == after.keys.shape[2] >= self._rows

    def keep(self, layer: Any, rows: int) -> None:
        """Cut the others off the end."""
        if rows == 0:
            another_began = layer.furthest > self._after.offset
            (self._mended() if another_began else self._before).put(layer)
            return
        keys, values, offset, place = self._after
        assert keys is not None and values is not None
        if rows < self._rows:
            drop = self._rows - rows
            keys, values = keys[..., : place - drop, :], values[..., : place - drop, :]
            offset, place = offset - drop, place - drop
            # Another thread may go on from here.
            mx.async_eval(keys, values)
        State(keys, values, offset, place).put(layer)

    def _mended(self) -> State:
        """The state before the pass, with the row that a second pass, enqueued ahead, has written over."""
        keys, values, offset, place = self._before
        if keys is None or values is None or self._next is None:
            return self._before
        keys, values = shared(keys), shared(values)
        at = self._next.place
        keys[..., at : at + 1, :], values[..., at : at + 1, :] = self._next.key, self._next.value
        mx.async_eval(keys, values)
        return State(keys, values, offset, place)


def _overwritten_next(layer: Any) -> Row | None:
    """A copy of the row that the pass after a pass of one row will overwrite, if that is one in use."""
    if layer.keys is None or layer.keys.shape[2] != layer.max_size or layer.offset + 1 < layer.max_size:
        return None
    first = layer.keep if layer._idx == layer.max_size else layer._idx
    place = layer.keep if first + 1 == layer.max_size else first + 1
    key, value = (mx.contiguous(a[..., place : place + 1, :]) for a in (layer.keys, layer.values))
    # Evaluated now: a lazy slice would hold the buffer, and the next write would copy all of it.
    mx.async_eval(key, value)
    return Row(place, key, value)


class Ring(Rows):
    """The kind of RotatingKVCache."""

    def before(self, layer: Any, rows: int) -> Cut:  # type: ignore[override]  # the same protocol
        """Note where the ring stands; its buffers are not copied."""
        return Cut(layer, rows)


def _state(layer: Any) -> State:
    return State(layer.keys, layer.values, layer.offset, layer._idx)


RING = Ring(("offset", "_idx"))
