"""Rows that each name an expert, times that expert's affine-quantised weight.

In: activations [R, K], the expert of each row, a quantised weight [E, N, K]. Out: [R, N]. The definition is
MLX's `gather_qmm`. Rows that stand together and go to one expert share one reading of its weight, so the
caller sorts them; unsorted rows are right and slow. Knows no router and no layer.
"""

import functools

import mlx.core as mx

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.quantised import (
    BOUNDS,
    MAX_ROWS,
    Product,
    Quantised,
    launch,
    random_weight,
    row_band,
    settings,
)
from dflash_mlx.kernels.source import Factory, Kernel

GATHERED = Kernel(
    name="rows_qmm_gathered",
    file="rows_qmm_gathered.metal",
    header="rows_qmm.h.metal",
    inputs=("x", "experts", "w", "scales", "biases"),
    outputs=("y",),
)


def supports(x: mx.array, experts: mx.array, weight: Quantised) -> bool:
    """Whether the kernel takes this product: the limits of `rows_qmm_gathered.metal`."""
    listed = experts.shape == x.shape[:1] and experts.dtype in (mx.int32, mx.uint32)
    return listed and _class_of(Product.of(x, weight), 1) is not None


def gathered_qmm_reference(
    x: mx.array, experts: mx.array, weight: Quantised, *, in_order: bool = True
) -> mx.array:
    """The definition: row r of x [R, K] times weight[experts[r]] transposed, [R, N].

    Args:
        x: [R, K].
        experts: [R] int32 or uint32.
        weight: [E, N, K].
        in_order: whether `experts` is sorted; MLX counts on it when it is told so.
    """
    words, scales, biases, group_size, bits = weight
    rows = mx.gather_qmm(
        x[:, None],
        words,
        scales,
        biases,
        rhs_indices=experts,
        transpose=True,
        group_size=group_size,
        bits=bits,
        sorted_indices=in_order,
    )
    return rows[:, 0]


def gathered_qmm_exact(x: mx.array, experts: mx.array, weight: Quantised) -> mx.array:
    """The product computed in fp32 and rounded once: what the kernel is held to."""
    wide = gathered_qmm_reference(x.astype(mx.float32), experts, weight.widened(), in_order=False)
    return wide.astype(weight.result_type(x))


def gathered_qmm_kernel(
    x: mx.array, experts: mx.array, weight: Quantised, *, rows_per_expert: int, factory: Factory | None = None
) -> mx.array:
    """`gathered_qmm_reference` by the Metal kernel; the caller has asked `supports`.

    Room for `rows_per_expert` rows to a tile would be padding for the most part where experts are many; a tile
    has room for twice the average, at least eight, and an expert with more rows reads its weight again.
    """
    product = Product.of(x, weight)
    average = -(-product.rows // product.words[0])
    shared = min(rows_per_expert, product.rows, MAX_ROWS, max(8, 2 * average))
    assert weight.biases is not None
    inputs = [x, experts, weight.words, weight.scales, weight.biases]
    return launch(GATHERED, inputs, settings(product, shared), factory)


def gathered_qmm(
    x: mx.array,
    experts: mx.array,
    weight: Quantised,
    *,
    rows_per_expert: int,
    in_order: bool = True,
    choices: Choices = NO_KERNELS,
) -> mx.array:
    """Row r of x [R, K] times weight[experts[r]] transposed, [R, N], by whatever was chosen for this class.

    Args:
        x: [R, K].
        experts: [R] int32 or uint32.
        weight: [E, N, K].
        rows_per_expert: the most rows that one expert may get: the rows of the verify pass.
        in_order: whether `experts` is sorted.
        choices: what was chosen before the generation.
    """
    if choices.chosen and supports(x, experts, weight):
        name = shape_class(x, weight, rows_per_expert)
        factory = choices.factory_for(GATHERED.name, name)
        if factory is not None:
            return gathered_qmm_kernel(x, experts, weight, rows_per_expert=rows_per_expert, factory=factory)
    return gathered_qmm_reference(x, experts, weight, in_order=in_order)


def shape_class(x: mx.array, weight: Quantised, rows_per_expert: int) -> str:
    """The class that one measurement stands for: bands of row counts, all else exact.

    Raises:
        ValueError: the kernel does not take this product.
    """
    name = _class_of(Product.of(x, weight), rows_per_expert)
    if name is None:
        raise ValueError(f"{GATHERED.name} does not take rows {x.shape} times words {weight.words.shape}.")
    return name


@functools.lru_cache(maxsize=4096)
def _class_of(product: Product, rows_per_expert: int) -> str | None:
    if len(product.x) != 2 or product.rows < 1 or len(product.words) != 3 or not product.fits():
        return None
    low, high = row_band(rows_per_expert)
    chosen = -(-product.rows // rows_per_expert)  # experts of a row
    return f"m{low}-{high} x{chosen} of {product.words[0]} {product.describe()}"


def contest(rows: int, chosen: int, weight: Quantised, dtype: mx.Dtype) -> Contest:
    """What `Chooser.prepare` needs to try this class.

    Args:
        rows: of the pass, any of its band; the lowest is raced.
        chosen: experts that each row goes to.
        weight: read for its shapes and dtypes only.
        dtype: of the activations.
    """
    depth = weight.words.shape[-1] * 32 // weight.bits
    total_experts = len(weight.words)
    raced = row_band(rows)[0]

    def inputs(seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 3)
        x = mx.random.normal((raced * chosen, depth), key=keys[0]).astype(dtype)
        # the experts of one row are different ones, as a router chooses them
        ranks = mx.argsort(mx.random.uniform(shape=(raced, total_experts), key=keys[1]), axis=-1)
        experts = mx.sort(ranks[:, :chosen].reshape(-1)).astype(mx.uint32)
        words, scales, biases, *_ = random_weight(
            (total_experts, weight.columns),
            depth,
            group_size=weight.group_size,
            bits=weight.bits,
            dtype=weight.scales.dtype,
            key=keys[2],
        )
        assert biases is not None
        return x, experts, words, scales, biases

    def packed(words: mx.array, scales: mx.array, biases: mx.array) -> Quantised:
        return Quantised(words, scales, biases, weight.group_size, weight.bits)

    def candidate(factory: Factory, x: mx.array, experts: mx.array, *arrays: mx.array) -> list[mx.array]:
        return [gathered_qmm_kernel(x, experts, packed(*arrays), rows_per_expert=raced, factory=factory)]

    x = mx.zeros((rows * chosen, depth), dtype)
    return Contest(
        kernel=GATHERED.name,
        digest=GATHERED.digest,
        shape_class=shape_class(x, weight, rows),
        bound=BOUNDS[weight.result_type(x)],
        bytes=weight.words.nbytes * min(total_experts, raced * chosen) // total_experts,
        inputs=inputs,
        reference=lambda x, ids, *arrays: [gathered_qmm_reference(x, ids, packed(*arrays))],
        exact=lambda x, ids, *arrays: [gathered_qmm_exact(x, ids, packed(*arrays))],
        candidate=candidate,
    )
