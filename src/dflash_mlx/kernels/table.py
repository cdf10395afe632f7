"""A matrix with one row for each word of a vocabulary, as a layer holds it: plain or packed.

In: a linear layer or an embedding. Out: some of its rows, packed as they were, and their products. Knows no words.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

_LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


class Table(NamedTuple):
    """Rows of a head: `weight` alone, or packed words with their scales."""

    weight: mx.array  # [V, D], or [V, D * bits / 32] of packed words
    scales: mx.array | None = None  # [V, D / group_size]; None: not packed
    biases: mx.array | None = None  # as scales; None in the packings that have none
    bias: mx.array | None = None  # [V], added to the products
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"

    @classmethod
    def of(cls, layer: nn.Module) -> "Table | None":
        """The table that a layer multiplies with; None where it is no layer of MLX's own."""
        if not isinstance(layer, _LAYERS):
            return None
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            return cls(
                layer["weight"],
                layer["scales"],
                layer.get("biases"),
                layer.get("bias"),
                layer.group_size,
                layer.bits,
                layer.mode,
            )
        return cls(layer["weight"], bias=layer.get("bias"))

    @property
    def rows(self) -> int:
        """V."""
        return int(self.weight.shape[0])

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The arrays by name; each has a row for each word."""
        named = {"weight": self.weight, "scales": self.scales, "biases": self.biases, "bias": self.bias}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def take(self, ids: mx.array) -> "Table":
        """The rows of these ids, in this order; packed rows stay packed."""
        return self.holding({name: array[ids] for name, array in self.arrays.items()})

    def first(self, count: int) -> "Table":
        """The first rows, without a copy."""
        return self.holding({name: array[:count] for name, array in self.arrays.items()})

    def holding(self, arrays: Mapping[str, mx.array]) -> "Table":
        """Other arrays, packed alike, by the names of `arrays`."""
        weight, scales = arrays["weight"], arrays.get("scales")
        return self._replace(
            weight=weight, scales=scales, biases=arrays.get("biases"), bias=arrays.get("bias")
        )

    def product(self, x: mx.array) -> mx.array:
        """Rows [..., D] to logits [..., V], as the layer makes them."""
        if self.scales is None:
            y = x @ self.weight.T
        else:
            y = mx.quantized_matmul(
                x,
                self.weight,
                self.scales,
                self.biases,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        return y if self.bias is None else y + self.bias
