"""The target's caches: which kinds a rejected tail can be undone in, and how. A cache is mlx-lm's list of them."""

from typing import Any, NamedTuple

from mlx.utils import tree_map

from dflash_mlx.errors import UnsupportedError

Cache = list[Any]  # of mlx-lm's cache objects, which carry no types
CacheSnapshot = list[tuple[Any, Any, int]]


class Tape(NamedTuple):
    """What undoing needs of one pass: rows `base` to `base + rows` are its own."""

    base: int
    rows: int


def check_kinds(caches: list[Any], model_type: str) -> None:
    """Refuse a model with a cache in which a rejected tail cannot be undone.

    Raises:
        UnsupportedError: naming the kinds found.
    """
    found = sorted({type(c).__name__ for c in caches} - {"KVCache", "QuantizedKVCache"})
    if found or not caches:
        raise UnsupportedError(
            f"A target of type '{model_type}' keeps its state in {', '.join(found) or 'no cache'}; rejected tokens "
            "can be undone in KVCache and QuantizedKVCache only. Try a target with plain attention in every layer."
        )


def commit(cache: Cache, tape: Tape, keep: int) -> None:
    """Let every layer hold the rows before the pass and its first `keep`; the others are written over later."""
    assert 0 <= keep <= tape.rows, f"cannot keep {keep} of {tape.rows} rows"
    for layer in cache:
        layer.offset = tape.base + keep


def length(cache: Cache) -> int:
    """Tokens that the cache holds."""
    return int(cache[0].offset)


def snapshot(cache: Cache) -> CacheSnapshot:
    """The buffers as they are now, shared until the next pass writes to them (which copies)."""
    return [(_shared(layer.keys), _shared(layer.values), layer.offset) for layer in cache]


def restore(cache: Cache, saved: CacheSnapshot) -> None:
    """Bring back what `snapshot` saw."""
    for layer, (keys, values, offset) in zip(cache, saved, strict=True):
        layer.keys, layer.values, layer.offset = _shared(keys), _shared(values), offset


def _shared(buffers: Any) -> Any:
    """New array objects over the same data: a cache assigns into its own objects, and whoever holds them sees it."""
    return tree_map(lambda array: None if array is None else array[...], buffers)
