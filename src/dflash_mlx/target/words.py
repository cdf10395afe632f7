"""The matrix at the end of a model's own forward, and that forward with other rows in its place.

In: a model and its trunk. Out: the layer whose rows make the logits, logits of some words. What comes after the
product (scale, soft-cap) stays the model's. The caller holds the model's lock.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.table import Table
from dflash_mlx.target import taps

Product = Callable[[mx.array], mx.array]


def last_layer(
    model: nn.Module, trunk: nn.Module, vocab_size: int, hidden: mx.array
) -> tuple[nn.Module, Table] | None:
    """The layer that makes logits of normed rows [S, D], and its table; None where it cannot be told.

    A model that multiplies with its matrix outside of a layer, or does more with the product than can be done word
    by word, is found out by the products of a few words.
    """
    called: list[nn.Module] = []
    found = [
        (layer, table)
        for _, layer in model.named_modules()
        if (table := Table.of(layer)) is not None and table.rows == vocab_size
    ]
    with taps.returning(trunk, hidden[None]):
        logits = model(mx.zeros((1, hidden.shape[0]), mx.int32))[0]
        for layer, _ in found:
            with multiplying(layer, functools.partial(_marked, called, layer, vocab_size)):
                model(mx.zeros((1, hidden.shape[0]), mx.int32))
    if len(called) != 1:
        return None
    layer, table = next(entry for entry in found if entry[0] is called[0])
    few = mx.array(sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1}))
    try:
        with taps.returning(trunk, hidden[None]), multiplying(layer, table.take(few).product):
            some = model(mx.zeros((1, hidden.shape[0]), mx.int32))[0]
    except ValueError:  # an array for the whole vocabulary does not fit a few words
        return None
    wanted = logits[:, few]
    bound = (1e-4 if logits.dtype == mx.float32 else 3e-2) * mx.abs(logits).max()
    if some.shape != wanted.shape or not mx.all(mx.abs(some - wanted) <= bound).item():
        return None
    return layer, table


@contextmanager
def multiplying(layer: nn.Module, product: Product) -> Iterator[None]:
    """Let the layer, called as a head, give `product` of its rows."""
    object.__setattr__(layer, "_product", product)
    try:
        with taps.swapped([(layer, _multiplier)]):
            yield
    finally:
        layer.__dict__.pop("_product", None)


def _marked(called: list[nn.Module], layer: nn.Module, width: int, rows: mx.array) -> mx.array:
    called.append(layer)
    return mx.zeros((*rows.shape[:-1], width), rows.dtype)


@functools.cache
def _multiplier(base: type[nn.Module]) -> type[nn.Module]:
    def product(self: Any, rows: mx.array) -> mx.array:
        made: mx.array = self._product(rows)
        return made

    name = "as_linear" if issubclass(base, nn.Embedding | nn.QuantizedEmbedding) else "__call__"
    return taps.named_like(base, **{name: product})
