"""Caches that outlive a generation: how long they are, how large, whether and how they go back to a length.

Comes in: a target's cache between two passes. Goes out: the same cache cut short, or another one with its first
tokens. Caches that keep every row by position can go back anywhere; of all others only a snapshot brings an
earlier state back.
"""

from collections.abc import Mapping

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from dflash_mlx.target import caches
from dflash_mlx.target.caches import Cache

_BY_POSITION = ("KVCache", "QuantizedKVCache")  # row i is token i, so a length says it all


def length(cache: Cache) -> int | None:
    """Tokens that the cache holds; None where no layer counts them."""
    try:
        return caches.length(cache)
    except StopIteration:
        return None


def nbytes(cache: Cache) -> int:
    """Bytes of the buffers, room for more rows included."""
    return sum(int(layer.nbytes) for layer in cache)


def goes_back(cache: Cache) -> bool:
    """Whether `rewind` and `fork` work for this cache, at any length."""
    return all(type(layer).__name__ in _BY_POSITION for layer in cache)


def rewind(cache: Cache, count: int) -> None:
    """Let the cache hold only its first `count` tokens."""
    assert goes_back(cache) and count <= caches.length(cache)
    for layer in cache:
        layer.offset = count


def fork(cache: Cache, empty: Cache, count: int) -> None:
    """Fill an empty cache of the same target with copies of the first `count` tokens."""
    assert goes_back(cache) and count <= caches.length(cache)
    for old, new in zip(cache, empty, strict=True):
        new.keys, new.values = tree_map(
            lambda rows: mx.contiguous(rows[..., :count, :]), (old.keys, old.values)
        )
        new.offset = count
    mx.eval([layer.state for layer in empty])


def arrays(cache: Cache) -> dict[str, mx.array]:
    """The rows of a cache that `goes_back`, named, for a file."""
    assert goes_back(cache)
    count = caches.length(cache)
    rows = [tree_map(lambda a: a[..., :count, :], [layer.keys, layer.values]) for layer in cache]
    named: dict[str, mx.array] = dict(tree_flatten(rows))
    return named


def fill(empty: Cache, named: Mapping[str, mx.array], count: int) -> None:
    """Put what `arrays` gave into an empty cache of the same target.

    Raises:
        ValueError: it has other layers or other shapes.
    """
    rows = tree_unflatten(list(named.items()))
    if len(rows) != len(empty):
        raise ValueError(f"{len(rows)} layers, expected {len(empty)}")
    for layer, (keys, values) in zip(empty, rows, strict=True):
        layer.keys, layer.values, layer.offset = keys, values, count
