"""New K/V rows of a drafter layer made ready in one pass: key norm, rotation, layout head by head.

In: the rows as the projections give them, context before block, and what rotates them. Out: rows for
`slice_update` into the context buffer and for the block. Knows neither the buffer nor which rows are which.
"""

import functools

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.source import Factory, Kernel, usable

MAX_HEAD_DIM = 256

_KERNEL = Kernel(
    "context_rows",
    "context_rows.metal",
    ("k", "v", "norm_weight", "inverse_frequencies", "offset", "eps", "amplitude"),
    ("k_out", "v_out"),
    contiguous=False,
)
NAME = _KERNEL.name
# Largest difference to the definition, relative to its largest entry, by dtype.
BOUNDS = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@functools.lru_cache(maxsize=32)
def inverse_frequencies(head_dim: int, base: float) -> mx.array:
    """Those of plain RoPE, float32 [head_dim / 2]: base ** (-2i / head_dim), computed in float64."""
    return mx.array((1.0 / base ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32))


def supports(k: mx.array, v: mx.array, heads: int) -> bool:
    """Whether the Metal form covers these shapes and dtypes; `context_rows` takes the reference otherwise."""
    if k.ndim != 2 or k.shape != v.shape or k.dtype != v.dtype:
        return False
    head_dim, rest = divmod(k.shape[1], heads)
    return k.shape[0] > 0 and rest == 0 and covers(head_dim, k.dtype)


def covers(head_dim: int, dtype: mx.Dtype) -> bool:
    """Whether the Metal form covers heads of this kind, whatever the rows."""
    return dtype in BOUNDS and 16 <= head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0


def is_chosen(k: mx.array, v: mx.array, heads: int, choices: Choices) -> bool:
    """Whether the kernel is to make these rows [S, heads*D] ready; if not, a drafter runs MLX's fast operations."""
    return (
        choices is not NO_KERNELS
        and supports(k, v, heads)
        and choices.factory_for(NAME, shape_class(k, heads)) is not None
    )


def context_rows(
    k: mx.array,
    v: mx.array,
    *,
    heads: int,
    norm_weight: mx.array | None,
    eps: float,
    inverse_frequencies: mx.array,
    offset: int,
    amplitude: float = 1.0,
    choices: Choices | None = None,
    factory: Factory | None = None,
) -> tuple[mx.array, mx.array]:
    """Keys normed and rotated, keys and values laid out for attention.

    A key row of a head becomes rope(rms_norm(row) * norm_weight) * amplitude, in fp32 up to its storing.
    The rotation is half-split over the whole head: element i pairs with i + D/2 and turns by
    position * inverse_frequencies[i]; row s stands at position offset + s.

    Args:
        k: [S, heads*D], context rows first and block rows after them, as their positions go; may be a strided
            view of a fused projection.
        v: as k.
        heads: of k and v.
        norm_weight: [D], or None for a drafter without key norm.
        eps: of the norm.
        inverse_frequencies: float32 [D/2]; `inverse_frequencies(D, base)` for plain RoPE.
        offset: position of row 0.
        amplitude: YaRN's factor on the rotated keys.
        choices: what was chosen for this machine; unset, the kernel runs wherever it can.
        factory: stands in for `mx.fast.metal_kernel` where there are no choices; without it a machine without
            Metal, and every shape outside `supports`, runs `context_rows_reference`.

    Returns:
        Two arrays [1, heads, S, D] in the dtype of k.
    """
    build = None
    if supports(k, v, heads):
        build = usable(factory) if choices is None else choices.factory_for(NAME, shape_class(k, heads))
    if build is None:
        return context_rows_reference(
            k,
            v,
            heads=heads,
            norm_weight=norm_weight,
            eps=eps,
            inverse_frequencies=inverse_frequencies,
            offset=offset,
            amplitude=amplitude,
        )
    rows, head_dim = k.shape[0], k.shape[1] // heads
    weight = inverse_frequencies if norm_weight is None else norm_weight  # some array: not read
    k_out, v_out = _KERNEL.build(build)(
        inputs=[k, v, weight, inverse_frequencies, offset, float(eps), float(amplitude)],
        template=[("T", k.dtype), ("D", head_dim), ("NORM", norm_weight is not None)],
        grid=(32, rows, 2 * heads),
        threadgroup=(32, min(8, rows), 1),
        output_shapes=[(1, heads, rows, head_dim)] * 2,
        output_dtypes=[k.dtype] * 2,
    )
    return k_out, v_out


def context_rows_reference(
    k: mx.array,
    v: mx.array,
    *,
    heads: int,
    norm_weight: mx.array | None,
    eps: float,
    inverse_frequencies: mx.array,
    offset: int,
    amplitude: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """What `context_rows` computes, in MLX ops; any even head dimension and dtype."""
    rows = k.shape[0]
    split = (1, rows, heads, -1)
    keys = k.reshape(split).swapaxes(1, 2).astype(mx.float32)  # [1, heads, S, D]
    if norm_weight is not None:
        keys = mx.fast.rms_norm(keys, norm_weight.astype(mx.float32), eps)
    positions = mx.arange(offset, offset + rows, dtype=mx.float32)
    angles = positions[:, None] * inverse_frequencies
    cos, sin = mx.cos(angles) * amplitude, mx.sin(angles) * amplitude
    low, high = mx.split(keys, 2, axis=-1)
    rotated = mx.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)
    return rotated.astype(k.dtype), v.reshape(split).swapaxes(1, 2)


def digest() -> str:
    """Over the text of the kernel."""
    return _KERNEL.digest


def shape_class(k: mx.array, heads: int) -> str:
    """The class that one measurement stands for: a band of row counts, all else exact."""
    return _class_name(k.shape[0], heads, k.shape[1] // heads, k.dtype)


def _class_name(rows: int, heads: int, head_dim: int, dtype: mx.Dtype) -> str:
    kind = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}[dtype]
    return f"s{1 << (rows - 1).bit_length()} h{heads} d{head_dim} {kind}"


def contest(rows: int, *, heads: int, head_dim: int, dtype: mx.Dtype) -> Contest:
    """What `Chooser.prepare` needs to try this class, with a key norm.

    Held to the definition, raced against MLX's fast norm and rotation, which is what a drafter runs otherwise.
    """
    frequencies = inverse_frequencies(head_dim, 1e6)

    def inputs(seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 3)
        k, v = (mx.random.normal((rows, heads * head_dim), key=key).astype(dtype) for key in keys[:2])
        return k, v, mx.random.uniform(0.5, 1.5, (head_dim,), key=keys[2]).astype(dtype)

    def make(factory: Factory | None, k: mx.array, v: mx.array, weight: mx.array) -> tuple[mx.array, ...]:
        if factory is None:
            return context_rows_reference(
                k, v, heads=heads, norm_weight=weight, eps=1e-6, inverse_frequencies=frequencies, offset=4000
            )
        return context_rows(
            k,
            v,
            heads=heads,
            norm_weight=weight,
            eps=1e-6,
            inverse_frequencies=frequencies,
            offset=4000,
            factory=factory,
        )

    def stock(k: mx.array, v: mx.array, weight: mx.array) -> tuple[mx.array, ...]:
        split = (1, rows, heads, head_dim)
        keys = mx.fast.rms_norm(k.reshape(split), weight, 1e-6).swapaxes(1, 2)
        keys = mx.fast.rope(keys, head_dim, traditional=False, base=1e6, scale=1.0, offset=4000)
        return keys, v.reshape(split).swapaxes(1, 2)

    return Contest(
        kernel=NAME,
        digest=digest(),
        shape_class=_class_name(rows, heads, head_dim, dtype),
        bound=BOUNDS[dtype],
        bytes=4 * rows * heads * head_dim * dtype.size,
        inputs=inputs,
        reference=stock,
        candidate=make,
        exact=lambda *arrays: make(None, *arrays),
    )
