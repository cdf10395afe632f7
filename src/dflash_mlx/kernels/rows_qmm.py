"""A few rows times an affine-quantised weight, each weight read and unpacked once for all rows.

In: activations [..., K] of 2 to 32 rows, a quantised weight [N, K]. Out: [..., N]. The definition is MLX's
own `quantized_matmul`, which is also what runs outside the limits. Knows no layer and no model. There is no
separate vector form: two rows cost the arithmetic of eight, still less than the time that reading the
weights takes.
"""

import functools
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.quantised import (
    BOUNDS,
    MAX_ROWS,
    Product,
    Quantised,
    Settings,
    launch,
    random_weight,
    row_band,
    settings,
)
from dflash_mlx.kernels.source import Factory, Kernel

ROWS = Kernel(
    name="rows_qmm",
    file="rows_qmm.metal",
    header="rows_qmm.h.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
)


def supports(x: mx.array, weight: Quantised) -> bool:
    """Whether the kernel takes this product: the limits of `rows_qmm.metal`."""
    return _known(Product.of(x, weight)) is not None


def rows_qmm_reference(x: mx.array, weight: Quantised) -> mx.array:
    """The definition: x [..., K] times the weight transposed, [..., N]."""
    words, scales, biases, group_size, bits = weight
    return mx.quantized_matmul(x, words, scales, biases, transpose=True, group_size=group_size, bits=bits)


def rows_qmm_exact(x: mx.array, weight: Quantised) -> mx.array:
    """The product computed in fp32 and rounded once: what the kernel is held to."""
    return rows_qmm_reference(x.astype(mx.float32), weight.widened()).astype(weight.result_type(x))


def rows_qmm_kernel(x: mx.array, weight: Quantised, *, factory: Factory | None = None) -> mx.array:
    """`rows_qmm_reference` by the Metal kernel; the caller has asked `supports`."""
    known = _known(Product.of(x, weight))
    assert known is not None
    return _run(known.how, x, weight, factory)


def rows_qmm(x: mx.array, weight: Quantised, *, choices: Choices = NO_KERNELS) -> mx.array:
    """Rows x [..., K] times the weight transposed, [..., N], by whatever was chosen for this class."""
    known = _known(Product.of(x, weight)) if choices.chosen else None
    factory = choices.factory_for(ROWS.name, known.name) if known else None
    if known is None or factory is None:
        return rows_qmm_reference(x, weight)
    return _run(known.how, x, weight, factory)


def _run(how: Settings, x: mx.array, weight: Quantised, factory: Factory | None) -> mx.array:
    assert weight.biases is not None
    rows = x if x.ndim == 2 else x.reshape(how.shape[0], -1)
    y = launch(ROWS, [rows, weight.words, weight.scales, weight.biases], how, factory)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], how.shape[1])


def shape_class(x: mx.array, weight: Quantised) -> str:
    """The class that one measurement stands for: a band of row counts, all else exact.

    Raises:
        ValueError: the kernel does not take this product.
    """
    known = _known(Product.of(x, weight))
    if known is None:
        raise ValueError(f"{ROWS.name} does not take rows {x.shape} times words {weight.words.shape}.")
    return known.name


class _Known(NamedTuple):
    name: str  # of the class
    how: Settings


@functools.lru_cache(maxsize=4096)
def _known(product: Product) -> _Known | None:
    if len(product.words) != 2 or not 2 <= product.rows <= MAX_ROWS or not product.fits():
        return None
    low, high = row_band(product.rows)
    return _Known(f"m{low}-{high} {product.describe()}", settings(product, product.rows))


def contest(rows: int, weight: Quantised, dtype: mx.Dtype) -> Contest:
    """What `Chooser.prepare` needs to try this class.

    Args:
        rows: any of its band; the lowest is raced.
        weight: read for its shapes and dtypes only.
        dtype: of the activations.
    """
    depth = weight.words.shape[-1] * 32 // weight.bits

    def inputs(seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 2)
        x = mx.random.normal((row_band(rows)[0], depth), key=keys[0]).astype(dtype)
        words, scales, biases, *_ = random_weight(
            (weight.columns,),
            depth,
            group_size=weight.group_size,
            bits=weight.bits,
            dtype=weight.scales.dtype,
            key=keys[1],
        )
        assert biases is not None
        return x, words, scales, biases

    def packed(words: mx.array, scales: mx.array, biases: mx.array) -> Quantised:
        return Quantised(words, scales, biases, weight.group_size, weight.bits)

    x = mx.zeros((rows, depth), dtype)
    return Contest(
        kernel=ROWS.name,
        digest=ROWS.digest,
        shape_class=shape_class(x, weight),
        bound=BOUNDS[weight.result_type(x)],
        bytes=weight.words.nbytes,
        inputs=inputs,
        reference=lambda x, *arrays: [rows_qmm_reference(x, packed(*arrays))],
        exact=lambda x, *arrays: [rows_qmm_exact(x, packed(*arrays))],
        candidate=lambda factory, x, *arrays: [rows_qmm_kernel(x, packed(*arrays), factory=factory)],
    )
