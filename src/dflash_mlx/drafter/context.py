"""The injected-context cache: keys and values of committed tokens in, what a block attends to out.

Only committed rows count; the rows of the block being drafted lie behind them for the length of one pass and
are written over by the next. Buffers grow in steps, a layer of limited sight holds at most twice what it sees.
Knows neither the network nor positions: rows come rotated and in time order.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.drafter.sight import Sight

_STEP = 256


class Rows:
    """Append-only keys and values [1, H, capacity, hd] of one layer; the first `filled` rows are committed.

    The arrays are held here and nowhere else, so that MLX writes into them in place. Snapshots share this
    object and remember a length: what they saw is never written over while they live.
    """

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.filled = 0
        self.snapshots: weakref.WeakSet[LayerSnapshot] = weakref.WeakSet()

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Put rows behind the committed ones, without committing them."""
        end = self.filled + keys.shape[2]
        if self.keys is None or self.values is None or end > self.capacity:
            extra = -(-end // _STEP) * _STEP - self.filled
            self.keys, self.values = (
                self._grown(self.keys, keys, extra),
                self._grown(self.values, values, extra),
            )
        self.keys[:, :, self.filled : end] = keys
        self.values[:, :, self.filled : end] = values

    def _grown(self, old: mx.array | None, like: mx.array, extra: int) -> mx.array:
        room = mx.zeros((1, like.shape[1], extra, like.shape[3]), dtype=like.dtype)
        return room if old is None else mx.concatenate([old[:, :, : self.filled], room], axis=2)

    def copy(self, *parts: slice) -> "Rows":
        """Rows of their own, with these parts one behind the other."""
        rows = Rows()
        for part in parts:
            if part.stop > part.start and self.keys is not None and self.values is not None:
                rows.write(self.keys[:, :, part], self.values[:, :, part])
                rows.filled += part.stop - part.start
        return rows


class LayerSnapshot:
    """Rows and how many of them were committed."""

    def __init__(self, rows: Rows, filled: int) -> None:
        self.rows, self.filled = rows, filled
        rows.snapshots.add(self)


class LayerContext:
    """One layer's committed rows; with a limited sight only those that a next token can still see.

    The first `sight.sinks` rows are the first of all; the others end with the latest and have no gap.
    """

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self.rows = Rows()
        self._filled = 0  # less than rows.filled after a restore to an earlier state

    @property
    def visible(self) -> int:
        """Committed rows that the next token sees."""
        return self.sight.seen(self._filled)

    def wanted(self, count: int) -> tuple[int, int]:
        """Of `count` rows that follow, how many of the first and how many of the last ever come into sight.

        All of them where both make up `count`; else what lies between must be left out by `skip`.
        """
        most, sinks, _ = self.sight
        if most is None:
            return 0, count
        first = min(max(sinks - self._filled, 0), count)
        return first, min(count - first, most - sinks)

    def skip(self) -> None:
        """Leave out rows: of what is held only the sinks stay, since the rows to come will be all that is seen."""
        kept = min(self.sight.sinks, self._filled)
        self.rows = self.rows.copy(slice(0, kept))
        self._filled = kept

    def extend(self, keys: mx.array, values: mx.array, *, keep: int) -> tuple[mx.array, mx.array]:
        """Append rows [1, H, S, hd], commit the first `keep` of them, return what is to be attended.

        Returns:
            Keys and values of the rows visible from the first row after the kept ones, then the rest of the
            given rows (the block).
        """
        self._make_room(keys.shape[2])
        self.rows.write(keys, values)
        self._filled += keep
        self.rows.filled = self._filled
        assert self.rows.keys is not None and self.rows.values is not None
        return self._parts(self._filled + keys.shape[2] - keep)

    def _make_room(self, count: int) -> None:
        shared = any(snapshot.filled > self._filled for snapshot in self.rows.snapshots)
        most = self.sight.most
        crowded = most is not None and self._filled + count > 2 * (most + 1)
        if shared or (crowded and self._filled > self.visible):
            self.part()
        self.rows.filled = self._filled

    def part(self) -> None:
        """Copy the visible rows into buffers that nobody else holds."""
        first, latest = self._seen()
        self.rows = self.rows.copy(slice(0, first), slice(latest, self._filled))
        self._filled = self.rows.filled

    def seen(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the visible rows."""
        return self._parts(self._filled)

    def _seen(self) -> tuple[int, int]:
        """The visible rows: those before the first number, and those from the second on."""
        if self.visible == self._filled:
            return 0, 0
        return self.sight.sinks, self._filled - (self.visible - self.sight.sinks)

    def _parts(self, end: int) -> tuple[mx.array, mx.array]:
        assert self.rows.keys is not None and self.rows.values is not None
        first, latest = self._seen()
        keys, values = self.rows.keys[:, :, latest:end], self.rows.values[:, :, latest:end]
        if first == 0:
            return keys, values
        return (
            mx.concatenate([self.rows.keys[:, :, :first], keys], axis=2),
            mx.concatenate([self.rows.values[:, :, :first], values], axis=2),
        )

    def can_drop(self, count: int, left: int) -> bool:
        """Whether the rows that `left` tokens need are here without the last `count` rows."""
        return self._filled - count >= self.sight.seen(left)

    def drop(self, count: int) -> None:
        """Forget the last `count` rows."""
        self._filled -= count

    def snapshot(self) -> LayerSnapshot:
        """The state as it is; free, and valid while the layer goes on."""
        return LayerSnapshot(self.rows, self._filled)

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Bring back the state of `snapshot`; any state of this layer's past or of another branch."""
        self.rows, self._filled = snapshot.rows, snapshot.filled


class ContextSnapshot(NamedTuple):
    """The state of every layer and the number of tokens it stands for."""

    length: int
    layers: tuple[LayerSnapshot, ...]


class Context:
    """The context of all layers; `length` tokens are committed, those out of sight included."""

    def __init__(self, sights: Sequence[Sight]) -> None:
        self.layers = [LayerContext(sight) for sight in sights]
        self.length = 0

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        pairs = ((layer.rows.keys, layer.rows.values) for layer in self.layers)
        return [array for pair in pairs for array in pair if array is not None]

    def rewind(self, length: int) -> bool:
        """Go back to the first `length` tokens; False, and no change, where a window has dropped what they need."""
        count = self.length - length
        if count < 0 or not all(layer.can_drop(count, length) for layer in self.layers):
            return False
        for layer in self.layers:
            layer.drop(count)
        self.length = length
        return True

    def part(self) -> None:
        """Let every layer copy its visible rows into buffers of its own."""
        for layer in self.layers:
            layer.part()

    def snapshot(self) -> ContextSnapshot:
        """What `restore` needs; stays valid while the context goes on."""
        return ContextSnapshot(self.length, tuple(layer.snapshot() for layer in self.layers))

    def restore(self, snapshot: ContextSnapshot) -> None:
        """Bring back the state of `snapshot`."""
        self.length = snapshot.length
        for layer, saved in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(saved)
