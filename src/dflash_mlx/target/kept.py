"""Caches that outlive a generation: how long and how large they are, how they go back to an earlier place.

In: a target's cache between two passes. Out: the same cache cut short, another one with its beginning, or named
arrays for a file. Caches that keep every row by position go back anywhere. Of all others only what `snapshot`
noted at a place brings that place back; so that a mixture holds each row once, a snapshot has nothing of the
layers that are by position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.target import caches
from dflash_mlx.target.caches import KINDS, Cache

Snapshot = list[Any]
"""A state for each cache object, mixtures taken apart; None for those that a length says everything about."""

_BY_POSITION = ("KVCache", "QuantizedKVCache")  # row i is token i


def length(cache: Cache) -> int | None:
    """Tokens that the cache holds; None where no layer counts them."""
    try:
        return caches.length(cache)
    except StopIteration:
        return None


def nbytes(cache: Cache, snapshots: Iterable[Snapshot | None] = ()) -> int:
    """Bytes of the buffers, room for more rows included, and of the snapshots."""
    noted = [leaf for _, leaf in _leaves(list(snapshots)) if isinstance(leaf, mx.array)]
    return sum(int(layer.nbytes) for layer in caches.parts(cache)) + sum(array.nbytes for array in noted)


def compact(cache: Cache) -> None:
    """Let no array that was cut out of a larger one keep all of that in memory; evaluates what it copies."""
    for layer in caches.parts(cache):
        if isinstance(layer, ArraysCache):
            layer.cache = [None if array is None else mx.contiguous(array) for array in layer.cache]
            mx.eval([array for array in layer.cache if array is not None])


def goes_back(cache: Cache) -> bool:
    """Whether a length alone brings any earlier place of this cache back."""
    return all(_by_position(layer) for layer in caches.parts(cache))


def snapshot(cache: Cache) -> Snapshot:
    """This place, for `rewind`, `fork` and `arrays`; valid while the cache goes on from here."""
    return [
        None if _by_position(layer) else KINDS[type(layer)].snapshot(layer) for layer in caches.parts(cache)
    ]


def rewind(cache: Cache, count: int, place: Snapshot) -> None:
    """Let the cache hold only its first `count` tokens, those it held when `place` was noted."""
    for layer, state in _beside(cache, place):
        if _by_position(layer):
            assert count <= layer.offset, (count, layer.offset)
            layer.offset = count
        else:
            KINDS[type(layer)].restore(layer, state)


def fork(cache: Cache, empty: Cache, count: int, place: Snapshot) -> None:
    """Fill an empty cache of the same target with copies of the first `count` tokens."""
    for (old, state), new in zip(_beside(cache, place), caches.parts(empty), strict=True):
        if _by_position(old):
            new.keys, new.values = tree_map(mx.contiguous, _rows(old, count))
            new.offset = count
        else:
            KINDS[type(new)].restore(new, state)
    caches.settle(empty)


def arrays(cache: Cache, count: int, places: Sequence[Snapshot]) -> dict[str, mx.array]:
    """The first `count` tokens of a cache, named, for a file.

    `{layer}.rows` is what stands by position; any other layer has `{layer}.{place}` for each of the places, the
    first of which is that of `count` tokens. Layers are those of `Snapshot`, numbers become arrays.
    """
    named: dict[str, mx.array] = {}
    for i, layer in enumerate(caches.parts(cache)):
        trees = (
            {"rows": _rows(layer, count)}
            if _by_position(layer)
            else {str(n): place[i] for n, place in enumerate(places)}
        )
        for name, tree in trees.items():
            for path, leaf in _leaves(tree):
                named[f"{i}.{name}.{path}"] = leaf if isinstance(leaf, mx.array) else mx.array(leaf, mx.int32)
    return named


def fill(empty: Cache, named: Mapping[str, mx.array], count: int, places: int) -> list[Snapshot]:
    """Put what `arrays` gave into an empty cache of the same target; gives the places.

    Raises:
        ValueError, KeyError, IndexError: it has other layers.
    """
    stored: Any = tree_unflatten(list(named.items()))
    layers = list(caches.parts(empty))
    if len(stored) != len(layers):
        raise ValueError(f"{len(stored)} layers, expected {len(layers)}")
    found: list[Snapshot] = [[] for _ in range(places)]
    for layer, states in zip(layers, stored, strict=True):
        if _by_position(layer):
            rows = [tuple(tree) if isinstance(tree, list) else tree for tree in states["rows"]]
            layer.keys, layer.values = rows
            layer.offset = count
        for n, place in enumerate(found):
            place.append(None if _by_position(layer) else tree_map(_number, states[n]))
        if not _by_position(layer):
            KINDS[type(layer)].restore(layer, found[0][-1])
    return found


def _by_position(layer: Any) -> bool:
    return type(layer).__name__ in _BY_POSITION


def _beside(cache: Cache, place: Snapshot) -> Iterator[tuple[Any, Any]]:
    return zip(caches.parts(cache), place, strict=True)


def _rows(layer: Any, count: int) -> list[Any]:
    rows: list[Any] = tree_map(lambda array: array[..., :count, :], [layer.keys, layer.values])
    return rows


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves: Any = tree_flatten(tree)
    return list(leaves)


def _number(array: mx.array) -> Any:
    return array.item() if array.ndim == 0 else array
