"""The quantised experts of a stock mixture model: their products by the kernel where it was chosen.

In: a model, how many experts each row goes to, the choices. Out: the same model, the expert layers of a subclass
of their own class. Only sorted calls are taken, as mlx-lm makes them from 64 pairs of row and expert on.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from dflash_mlx.kernels import layers
from dflash_mlx.kernels.choice import Choices, Contest
from dflash_mlx.kernels.gathered_qmm import contest, gathered_qmm, shape_class, supports
from dflash_mlx.kernels.quantised import MAX_ROWS, Quantised

_SORTED_FROM = 64  # pairs of row and expert; mlx-lm does not sort fewer

PerRow = dict[int, int]
"""By the id of a layer: how many experts a row goes to."""


def watch(model: nn.Module, rows: int, found: PerRow) -> None:
    """Let a forward over `rows` rows fill `found`; the caller gives the layers their classes back."""

    def call(self: Any, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        found[id(self)] = indices.size // rows
        return QuantizedSwitchLinear.__call__(self, x, indices, *args, **kwargs)

    watching = layers.like(QuantizedSwitchLinear, __call__=call)
    for layer in _expert_layers(model):
        layer.__class__ = watching


def give(model: nn.Module, per_row: PerRow, choices: Choices) -> None:
    """Let the expert layers run the chosen products."""
    made = {
        count: layers.like(QuantizedSwitchLinear, __call__=_call(count, choices))
        for count in per_row.values()
    }
    for layer in _expert_layers(model):
        if id(layer) in per_row:
            layer.__class__ = made[per_row[id(layer)]]


def contests(model: nn.Module, per_row: PerRow, *, block_size: int, dtype: mx.Dtype) -> Iterator[Contest]:
    """One for each class of product in passes of 2 to `block_size` rows."""
    seen = set()
    for layer in _expert_layers(model):
        weight, chosen = _weight(layer), per_row.get(id(layer), 0)
        for rows in range(2, min(block_size, MAX_ROWS) + 1):
            if rows * chosen < _SORTED_FROM:
                continue
            x = mx.zeros(
                (rows * chosen, weight.words.shape[-1] * 32 // weight.bits), dtype
            )  # read for its shape
            if not supports(x, mx.zeros(len(x), mx.uint32), weight):
                continue
            if (name := shape_class(x, weight, rows)) not in seen:
                seen.add(name)
                yield contest(rows, chosen, weight, dtype)


def _call(chosen: int, choices: Choices) -> Callable[..., mx.array]:
    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        # Sorted, mlx-lm gives x as [rows * chosen, 1, K].
        rows, rest = divmod(indices.size, chosen)
        if not sorted_indices or rest or x.shape[:-1] != (indices.size, 1) or not 2 <= rows <= MAX_ROWS:
            return QuantizedSwitchLinear.__call__(self, x, indices, sorted_indices)
        y = gathered_qmm(x[:, 0], indices, _weight(self), rows_per_expert=rows, choices=choices)[:, None]
        return y + self["bias"][indices][:, None] if "bias" in self else y

    return call


def _expert_layers(model: nn.Module) -> list[Any]:
    return [
        layer
        for _, layer in model.named_modules()
        if layers.stock_class(layer) is QuantizedSwitchLinear
        and layer.mode == "affine"
        and layer.global_scale is None
    ]


def _weight(layer: Any) -> Quantised:
    return Quantised(layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits)
