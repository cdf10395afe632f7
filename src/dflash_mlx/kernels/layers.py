"""A model's quantised layers, made to run `rows_qmm` where it was chosen: on the instance and nowhere else.

In: a module and the choices. Out: the same module, some of its layers of a subclass of their own class. The
parameter tree, names, pickling and every class of mlx stay as they are. Knows no model.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.choice import Choices, Contest
from dflash_mlx.kernels.quantised import Quantised
from dflash_mlx.kernels.rows_qmm import contest, rows_qmm, shape_class, supports


def give_products(module: nn.Module, choices: Choices) -> None:
    """Let the quantised layers below `module` run the chosen products."""
    makers = {nn.QuantizedLinear: _linear, nn.QuantizedEmbedding: _embedding}
    made = {base: make(choices) for base, make in makers.items()}
    for layer in quantised_layers(module):
        layer.__class__ = made[stock_class(layer)]


def restore(module: nn.Module) -> None:
    """Give every layer below `module` the class it was made with."""
    for layer in _modules(module):
        if stock_class(layer) is not type(layer):
            layer.__class__ = stock_class(layer)


def contests(module: nn.Module, rows: Iterable[int], dtype: mx.Dtype) -> Iterator[Contest]:
    """One for each class of product of activations of `dtype` and these row counts."""
    seen = set()
    counts = list(rows)
    for layer in quantised_layers(module):
        weight = _weight(layer)
        for count in counts:
            x = mx.zeros((count, weight.words.shape[-1] * 32 // weight.bits), dtype)  # read for its shape
            if supports(x, weight) and (name := shape_class(x, weight)) not in seen:
                seen.add(name)
                yield contest(count, weight, dtype)


def quantised_layers(module: nn.Module) -> list[nn.Module]:
    """The stock layers whose products the kernel may take; an embedding's is that of a tied head."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return [layer for layer in _modules(module) if stock_class(layer) in kinds and layer.mode == "affine"]


def stock_class(layer: nn.Module) -> type[nn.Module]:
    """The class that the layer was made with."""
    stock: type[nn.Module] = type(layer).__dict__.get("stock_class", type(layer))
    return stock


def like(base: type[nn.Module], **methods: Any) -> type[nn.Module]:
    """A subclass for single instances: named and pickled like `base`, which it remembers as `stock_class`."""

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = base.__reduce_ex__(self, max(protocol, 2))
        return dict.__new__, (base,), *reduced[2:]  # a module is a dict; pickle finds the stock class alone

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "stock_class": base}
    return type(base.__name__, (base,), {**names, "__reduce_ex__": reduce, **methods})


def _linear(choices: Choices) -> type[nn.Module]:
    def call(self: Any, x: mx.array) -> mx.array:
        y = rows_qmm(x, _weight(self), choices=choices)
        return y + self["bias"] if "bias" in self else y

    return like(nn.QuantizedLinear, __call__=call)


def _embedding(choices: Choices) -> type[nn.Module]:
    return like(nn.QuantizedEmbedding, as_linear=lambda self, x: rows_qmm(x, _weight(self), choices=choices))


def _weight(layer: Any) -> Quantised:
    return Quantised(layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits)


def _modules(module: nn.Module) -> list[nn.Module]:
    return [layer for _, layer in module.named_modules()]
