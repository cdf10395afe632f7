"""Caches in which row i is token i, quantised or not, and mlx-lm's chunked one: a rejected tail is written over.

Rows beyond `offset` are never read, so undoing sets a number. A chunked cache drops rows from its front before a
pass, judged by what was committed, and counts on: undoing leaves its front alone.
"""

from typing import Any, NamedTuple

from mlx.utils import tree_map


class Trim(NamedTuple):
    """Where a pass began."""

    base: int
    rows: int

    def fits(self, layer: Any) -> bool:
        """Whether the pass has added its rows."""
        return bool(layer.offset == self.base + self.rows)

    def keep(self, layer: Any, rows: int) -> None:
        """The rows beyond are written over later."""
        layer.offset = self.base + rows


class Rows(NamedTuple):
    """A kind whose state is `keys`, `values` and some numbers."""

    numbers: tuple[str, ...]

    def before(self, layer: Any, rows: int) -> Trim:
        """Note the length."""
        return Trim(layer.offset, rows)

    def snapshot(self, layer: Any) -> tuple[Any, ...]:
        """The buffers, shared, and the numbers."""
        return shared(layer.keys), shared(layer.values), *(getattr(layer, name) for name in self.numbers)

    def restore(self, layer: Any, saved: tuple[Any, ...]) -> None:
        """Share the buffers again, so that the snapshot stays valid."""
        keys, values, *numbers = saved
        layer.keys, layer.values = shared(keys), shared(values)
        for name, number in zip(self.numbers, numbers, strict=True):
            setattr(layer, name, number)


def shared(buffers: Any) -> Any:
    """New array objects over the same data: a cache assigns into its own objects, and whoever holds them sees it."""
    return tree_map(lambda array: None if array is None else array[...], buffers)


PLAIN = Rows(("offset",))
CHUNKED = Rows(("offset", "start_position"))
