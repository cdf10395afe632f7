"""Caches whose keys and values are quantised from the first token on, where mlx-lm has a quantised kind.

In: a model and 4 or 8 bits. Out: its caches, every KVCache a QuantizedKVCache. Rings and recurrent states stay as
they are: they do not grow.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from dflash_mlx.errors import UnsupportedError, UsageError

_GROUPS = (64, 32)  # numbers that share a scale; the first that divides every head


def check_bits(bits: int | None) -> None:
    """Refuse any `kv_bits` but 4, 8 and None; before any file is read.

    Raises:
        UsageError: for another number.
    """
    if bits is not None and (not isinstance(bits, int) or bits not in (4, 8)):
        raise UsageError(f"kv_bits {bits}: 4, 8 or none.")


def empty(model: nn.Module, bits: int, group_size: int) -> list[Any]:
    """An empty cache of the model, quantised where it can be."""
    return [_quantised(layer, bits, group_size) for layer in make_prompt_cache(model)]


def group_size(model: nn.Module, bits: int, name: str) -> int:
    """How many numbers share a scale, after a pass that shows that the model's attention reads quantised keys.

    Args:
        model: runs one pass of two tokens; nothing is evaluated.
        bits: 4 or 8.
        name: what messages call it.

    Raises:
        UnsupportedError: the model cannot use such a cache.
    """
    ids, plain = mx.array([[0, 1]]), make_prompt_cache(model)
    model(ids, cache=plain)
    widths = {rows.shape[-1] for layer in _growing(plain) for rows in (layer.keys, layer.values)}
    if not widths:
        raise UnsupportedError(f"{name} keeps no cache that kv_bits could quantise; leave kv_bits unset.")
    groups = [group for group in _GROUPS if all(width % group == 0 for width in widths)]
    if not groups:
        raise UnsupportedError(
            f"kv_bits needs heads whose width is a multiple of 32; those of {name} are {sorted(widths)} wide. "
            "Leave kv_bits unset."
        )
    try:
        model(ids, cache=empty(model, bits, groups[0]))
    except (ValueError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"The attention of {name} does not read a quantised cache in this version of mlx-lm ({_brief(error)}); "
            "leave kv_bits unset."
        ) from error
    return groups[0]


def _quantised(layer: Any, bits: int, group: int) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_quantised(inner, bits, group) for inner in layer.caches))
    return QuantizedKVCache(group, bits) if type(layer) is KVCache else layer


def _growing(cache: Any) -> Iterator[Any]:
    for layer in cache:
        if type(layer) is CacheList:
            yield from _growing(layer.caches)
        elif type(layer) is KVCache and layer.keys is not None:
            yield layer


def _brief(error: Exception) -> str:
    """The first sentence; mlx lists all signatures after it."""
    return str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
