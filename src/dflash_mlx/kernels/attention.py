"""Attention of one block over injected context: in MLX ops, and in two passes of Metal over split keys.

In: the block's queries, the context buffers with their length, the block's own keys and values. Out: attended
rows. Knows nothing of caches: a buffer comes whole, or as a stock cache's slice, and is never copied.
"""

import functools
import math
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels.attention_plan import (
    Form,
    bands,
    class_name,
    first_seen,
    plan,
    raced_rows,
    shape_class,
    supports,
    vector_rows,
)
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.source import Factory, Kernel, usable

_MODES = {"full": 0, "causal": 1, "ancestors": 2}
_INPUTS = ("q", "context_k", "context_v", "block_k", "block_v", "ancestors", "params", "scale")
_HEADER = "block_attention_common.metal"
_FIRST_PASS: dict[Form, Kernel] = {
    form: Kernel(
        f"block_attention_{form}",
        f"block_attention_{form}.metal",
        _INPUTS,
        ("o_part", "stats"),
        header=_HEADER,
        contiguous=False,
    )
    for form in ("matrix", "vector")
}
_MERGE = Kernel(
    "block_attention_merge",
    "block_attention_merge.metal",
    ("o_part", "stats", "splits"),
    ("out",),
    header=_HEADER,
)
NAME = "block_attention"
# Largest difference to the definition, relative to its largest entry, by dtype.
BOUNDS = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}


class _Sight(NamedTuple):
    """What a row sees."""

    causal: bool
    window: int | None
    ancestors: mx.array | None

    @property
    def mode(self) -> str:
        """Of the block."""
        if self.ancestors is not None:
            return "ancestors"
        return "causal" if self.causal else "full"


def block_attention(
    q: mx.array,
    context_k: mx.array,
    context_v: mx.array,
    context_length: int,
    block_k: mx.array,
    block_v: mx.array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    ancestors: mx.array | None = None,
    form: Form | None = None,
    splits: int | None = None,
    choices: Choices | None = None,
    factory: Factory | None = None,
) -> mx.array:
    """Each of S block rows attends over the context and over its block.

    Row i stands at position context_length + i and sees every context key, or with a `window` those less than
    `window` positions back; of the block it sees all rows, or rows 0..i under `causal`, or those its ancestor
    mask names. The window does not cut the block. Softmax is taken in fp32.

    Args:
        q: [1, G*Hk, S, D].
        context_k: [1, Hk, capacity, D] in order of position; a strided view is read in place, fastest
            when its last axis is contiguous.
        context_v: as context_k.
        context_length: how many rows of the buffers are valid; the others are not read.
        block_k: [1, Hk, S, D].
        block_v: as block_k.
        scale: multiplies the scores.
        causal: whether a row sees only the block rows up to itself.
        window: None for all of the context.
        ancestors: uint32 [S]; bit j of entry i lets row i see block row j (itself it sees always), and row i
            stands at position context_length + the number of its ancestors. Takes the place of `causal`.
        form: fixes what `plan` would choose; for races and tests.
        splits: fixes what `plan` would choose; for races and tests.
        choices: what was chosen for this machine; unset, the kernel runs wherever it can.
        factory: stands in for `mx.fast.metal_kernel` where there are no choices; without it a machine without
            Metal, and every shape outside `supports`, runs `block_attention_reference`.

    Returns:
        [1, G*Hk, S, D] in the dtype of q.
    """
    arrays = (q, context_k, context_v, block_k, block_v)
    build = _chosen(arrays, context_length, window, choices, factory)
    if build is None:
        return block_attention_reference(
            q,
            context_k,
            context_v,
            context_length,
            block_k,
            block_v,
            scale=scale,
            causal=causal,
            window=window,
            ancestors=ancestors,
        )
    sight = _Sight(causal, window, ancestors)
    return _launch(build, arrays, context_length, scale, sight, form, splits)


def cached_block_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    ancestors: mx.array | None = None,
    choices: Choices | None = None,
    factory: Factory | None = None,
) -> mx.array:
    """`block_attention` where the cache already holds the block's own rows, as its last.

    Args:
        q: [1, G*Hk, S, D].
        keys: [1, Hk, context + S, D], the view that a stock cache returns from its update; not copied.
        values: as keys.
        scale: as in `block_attention`, and so are the other options.
        causal: see there.
        window: see there.
        ancestors: see there.
        choices: see there.
        factory: see there.

    Returns:
        [1, G*Hk, S, D] in the dtype of q.
    """
    context_length = keys.shape[2] - q.shape[2]
    build = None
    if choices is not NO_KERNELS:
        arrays = (q, keys, values, keys[..., context_length:, :], values[..., context_length:, :])
        build = _chosen(arrays, context_length, window, choices, factory)
    if build is None:
        return cached_block_attention_reference(
            q, keys, values, scale=scale, causal=causal, window=window, ancestors=ancestors
        )
    return _launch(build, arrays, context_length, scale, _Sight(causal, window, ancestors))


def _chosen(
    arrays: tuple[mx.array, ...],
    context_length: int,
    window: int | None,
    choices: Choices | None,
    factory: Factory | None,
) -> Factory | None:
    """What to build the kernels with; None where the reference is to run."""
    assert window is None or window > 0, f"window {window} leaves nothing to see"
    if not supports(*arrays):
        return None
    if choices is None:
        return usable(factory)
    return choices.factory_for(NAME, shape_class(arrays[0], arrays[1], context_length, window))


def _launch(
    factory: Factory,
    arrays: tuple[mx.array, ...],
    context_length: int,
    scale: float,
    sight: _Sight,
    form: Form | None = None,
    splits: int | None = None,
) -> mx.array:
    q, context_k = arrays[:2]
    _, heads, rows, head_dim = q.shape
    kv_heads, capacity = context_k.shape[1:3]
    assert 0 <= context_length <= capacity, f"context_length {context_length} in a buffer of {capacity} rows"
    group, stacked = heads // kv_heads, heads * rows
    layout = plan(
        group=group,
        rows=rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=q.dtype.size,
        context_length=context_length,
        window=sight.window,
        form=form,
        splits=splits,
    )
    template: list[tuple[str, mx.Dtype | int | bool]] = [("T", q.dtype), ("D", head_dim)]
    shared = [*template, ("G", group), ("MODE", _MODES[sight.mode])]
    if layout.form == "matrix":
        own: list[tuple[str, mx.Dtype | int | bool]] = [("BK", layout.tile), ("QF", layout.query_fragments)]
    else:
        own = [("RB", vector_rows(group * rows, head_dim)), ("NSG", layout.simdgroups)]
    threads = 32 * layout.simdgroups
    part, stats = _FIRST_PASS[layout.form].build(factory)(
        inputs=[
            *arrays,
            mx.array([0], mx.uint32) if sight.ancestors is None else sight.ancestors,
            mx.array([context_length, sight.window or 0, rows], mx.int32),
            scale * math.log2(math.e),  # the body works with exp2
        ],
        template=shared + own,
        grid=(threads * layout.row_groups, kv_heads, layout.splits),
        threadgroup=(threads, 1, 1),
        output_shapes=[(stacked, layout.splits, head_dim), (stacked, layout.splits, 2)],
        output_dtypes=[q.dtype, mx.float32],
    )
    if layout.splits == 1:
        return part.reshape(q.shape)
    (out,) = _MERGE.build(factory)(
        inputs=[part, stats, layout.splits],
        template=template,
        grid=(32, stacked, 1),
        threadgroup=(32, min(8, stacked), 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )
    return out


def block_attention_reference(
    q: mx.array,
    context_k: mx.array,
    context_v: mx.array,
    context_length: int,
    block_k: mx.array,
    block_v: mx.array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    ancestors: mx.array | None = None,
) -> mx.array:
    """What `block_attention` computes, in MLX ops; any batch, head dimension and dtype."""
    k = mx.concatenate([context_k[..., :context_length, :], block_k], axis=2)
    v = mx.concatenate([context_v[..., :context_length, :], block_v], axis=2)
    return cached_block_attention_reference(
        q, k, v, scale=scale, causal=causal, window=window, ancestors=ancestors
    )


def cached_block_attention_reference(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    ancestors: mx.array | None = None,
) -> mx.array:
    """What `cached_block_attention` computes, in MLX ops; any batch, head dimension and dtype."""
    rows = q.shape[2]
    context = keys.shape[2] - rows
    first = first_seen(context, window)
    if first > 0:
        keys, values = keys[..., first:, :], values[..., first:, :]
    mask = _mask(rows, context - first, _Sight(causal, window, ancestors))
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def _mask(rows: int, context: int, sight: _Sight) -> mx.array | Literal["causal"] | None:
    """Boolean [S, context + S], or its short name; no row sees keys before this context."""
    cuts = (
        sight.window is not None and context + rows > sight.window
    )  # the last row looks back past the window
    if not cuts and sight.mode == "full":
        return None
    if not cuts and sight.mode == "causal":
        return "causal"
    if sight.ancestors is None:
        assert sight.window is not None
        return _window_mask(rows, context, sight.window, sight.causal)
    row = mx.arange(rows)[:, None]
    named = (sight.ancestors[:, None] >> mx.arange(rows, dtype=mx.uint32)) & 1
    block = (named == 1) | (row == row.T)
    depth = block.sum(axis=1, keepdims=True) - 1
    back = context + depth - mx.arange(context)  # [S, context]
    seen = mx.ones((rows, context), mx.bool_) if sight.window is None else back < sight.window
    return mx.concatenate([seen, block], axis=1)


@functools.lru_cache(maxsize=16)
def _window_mask(rows: int, context: int, window: int, causal: bool) -> mx.array:
    """Boolean [S, context + S], whole in memory: layers, rounds and threads share it.

    A context that fills its window has one length for all rounds.
    """
    row = np.arange(rows)[:, None]
    seen = context + row - np.arange(context) < window
    block = row >= row.T if causal else np.ones((rows, rows), np.bool_)
    return mx.array(np.concatenate([seen, block], axis=1))


def digest() -> str:
    """Over the text of both forms and of the second pass."""
    return "-".join(kernel.digest for kernel in (*_FIRST_PASS.values(), _MERGE))


def contest(rows: int, *, heads: int, kv_heads: int, head_dim: int, keys: int, dtype: mx.Dtype) -> Contest:
    """What `Chooser.prepare` needs to try the class of `rows` block rows and `keys` visible keys, block included.

    Raced as a verify pass is, over a cache that holds the block, on the rows of `raced_rows` and the middle length:
    whichever call of a class comes first, its verdict is the same.
    """
    row_band, key_band = bands(rows, keys)
    rows, length = raced_rows(row_band, heads // kv_heads), 3 * key_band // 4

    def inputs(seed: int) -> tuple[mx.array, ...]:
        shapes = [(1, heads, rows, head_dim), *[(1, kv_heads, length, head_dim)] * 2]
        seeds = mx.random.split(mx.random.key(seed), 3)
        return tuple(
            mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, seeds, strict=True)
        )

    def reference(*arrays: mx.array) -> list[mx.array]:
        return [cached_block_attention_reference(*arrays, scale=head_dim**-0.5, causal=True)]

    def candidate(factory: Factory, *arrays: mx.array) -> list[mx.array]:
        return [cached_block_attention(*arrays, scale=head_dim**-0.5, causal=True, factory=factory)]

    return Contest(
        kernel=NAME,
        digest=digest(),
        shape_class=class_name(rows, heads, kv_heads, head_dim, length, dtype),
        bound=BOUNDS[dtype],
        bytes=2 * kv_heads * length * head_dim * dtype.size,
        inputs=inputs,
        reference=reference,
        candidate=candidate,
    )
