"""A few rows times an affine-quantised weight, each weight read and unpacked once for all rows.

In: activations [..., K] of 2 to 32 rows, a quantised weight [N, K]. Out: [..., N]. The definition is MLX's
own `quantized_matmul`, which is also what runs outside the limits. Knows no layer and no model. There is no
separate vector form: two rows cost the arithmetic of eight, still less than the time that reading the
weights takes.
"""

import mlx.core as mx

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.quantised import (
    BOUNDS,
    MAX_ROWS,
    Quantised,
    describe,
    launch,
    random_weight,
    row_band,
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
    rows = x.size // max(x.shape[-1], 1)
    return weight.words.ndim == 2 and 2 <= rows <= MAX_ROWS and weight.fits(x)


def rows_qmm_reference(x: mx.array, weight: Quantised) -> mx.array:
    """The definition: x [..., K] times the weight transposed, [..., N]."""
    words, scales, biases, group_size, bits = weight
    return mx.quantized_matmul(x, words, scales, biases, transpose=True, group_size=group_size, bits=bits)


def rows_qmm_exact(x: mx.array, weight: Quantised) -> mx.array:
    """The product computed in fp32 and rounded once: what the kernel is held to."""
    return rows_qmm_reference(x.astype(mx.float32), weight.widened()).astype(weight.result_type(x))


def rows_qmm_kernel(x: mx.array, weight: Quantised, *, factory: Factory | None = None) -> mx.array:
    """`rows_qmm_reference` by the Metal kernel; the caller has asked `supports`."""
    rows = x.reshape(-1, x.shape[-1])
    assert weight.biases is not None
    inputs = [rows, weight.words, weight.scales, weight.biases]
    y = launch(ROWS, inputs, rows, weight, shared_rows=len(rows), factory=factory)
    return y.reshape(*x.shape[:-1], weight.columns)


def rows_qmm(x: mx.array, weight: Quantised, *, choices: Choices = NO_KERNELS) -> mx.array:
    """Rows x [..., K] times the weight transposed, [..., N], by whatever was chosen for this class."""
    if supports(x, weight):
        factory = choices.factory_for(ROWS.name, shape_class(x, weight))
        if factory is not None:
            return rows_qmm_kernel(x, weight, factory=factory)
    return rows_qmm_reference(x, weight)


def shape_class(x: mx.array, weight: Quantised) -> str:
    """The class that one measurement stands for: a band of row counts, all else exact."""
    low, high = row_band(x.size // x.shape[-1])
    return f"m{low}-{high} {describe(x, weight)}"


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
