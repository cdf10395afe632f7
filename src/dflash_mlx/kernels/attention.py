"""Attention of one block over injected context: the definition in MLX ops, and two passes of Metal over split keys.

In: the block's queries, the context buffers with their length, the block's own keys and values. Out: attended
rows. Knows nothing of caches: a buffer comes whole, or as a stock cache's slice, and is never copied.
"""

import math
from typing import Literal, NamedTuple

import mlx.core as mx

from dflash_mlx.kernels.source import Factory, Kernel, usable

Form = Literal["matrix", "vector"]

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
MAX_ROWS = 32
MAX_GROUP = 8

_MODES = {"full": 0, "causal": 1, "ancestors": 2}
_INPUTS = ("q", "context_k", "context_v", "block_k", "block_v", "ancestors", "params", "scale")
_FIRST_PASS: dict[Form, Kernel] = {
    form: Kernel(
        f"block_attention_{form}",
        f"block_attention_{form}.metal",
        _INPUTS,
        ("o_part", "stats"),
        header="block_attention_common.metal",
        contiguous=False,
    )
    for form in ("matrix", "vector")
}
_MERGE = Kernel(
    "block_attention_merge", "block_attention_merge.metal", ("o_part", "stats", "splits"), ("out",)
)
KERNELS = (*_FIRST_PASS.values(), _MERGE)


class Plan(NamedTuple):
    """How one call is laid over the GPU."""

    form: Form
    keys: int  # keys that any row can see: from the first that a window leaves to the block's last
    splits: int  # parts of the keys; the second pass runs only when there is more than one
    tile: int  # keys staged at once (matrix) or in flight (vector) in a threadgroup
    simdgroups: int  # in a threadgroup
    row_groups: int  # threadgroups that share a kv head's G*S query rows; each reads all its keys

    def threadgroups(self, kv_heads: int) -> int:
        """Of the first pass."""
        return self.row_groups * kv_heads * self.splits


def supports(
    q: mx.array, context_k: mx.array, context_v: mx.array, block_k: mx.array, block_v: mx.array
) -> bool:
    """Whether the Metal form covers these shapes and dtypes; `block_attention` takes the reference otherwise."""
    arrays = (q, context_k, context_v, block_k, block_v)
    if any(a.ndim != 4 or a.shape[0] != 1 or a.dtype != q.dtype for a in arrays):
        return False
    heads, rows, head_dim = q.shape[1:]
    kv_heads, capacity = context_k.shape[1:3]
    return (
        q.dtype in DTYPES
        and head_dim in HEAD_DIMS
        and 1 <= rows <= MAX_ROWS
        and capacity > 0
        and kv_heads > 0
        and heads % kv_heads == 0
        and 1 <= heads // kv_heads <= MAX_GROUP
        and block_k.shape == block_v.shape == (1, kv_heads, rows, head_dim)
        and context_v.shape == context_k.shape == (1, kv_heads, capacity, head_dim)
    )


def plan(
    *,
    group: int,
    rows: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    context_length: int,
    window: int | None = None,
    form: Form | None = None,
    splits: int | None = None,
) -> Plan:
    """The layout for `rows` block rows of `group` query heads a kv head, elements of `itemsize` bytes."""
    stacked = group * rows
    form = form or ("matrix" if stacked >= 8 else "vector")
    keys = context_length - _first_seen(context_length, window) + rows
    if form == "matrix":
        tile = min(32, max(8, 8192 // (head_dim * itemsize) // 8 * 8))  # two tiles in about 17 KiB
        fragments = math.ceil(stacked / 8)
        row_groups = math.ceil(fragments / 12)  # 384 threads run whatever the registers a thread takes
        simdgroups = math.ceil(fragments / row_groups)
    else:
        tile = simdgroups = 8
        row_groups = math.ceil(stacked / _vector_rows(stacked, head_dim))
    if splits is None:
        splits = _splits(keys, stacked, kv_heads * row_groups)
    return Plan(form, keys, splits, tile, simdgroups, row_groups)


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
    factory: Factory | None = None,
) -> mx.array:
    """Each of S block rows attends over the context and over its block.

    Row i stands at position context_length + i and sees every context key, or with a `window` those less than
    `window` positions back; of the block it sees all rows, or rows 0..i under `causal`, or those its ancestor
    mask names. The window does not cut the block. Softmax is taken in fp32.

    Args:
        q: [1, G*Hk, S, D].
        context_k, context_v: [1, Hk, capacity, D] in order of position, of which `context_length` rows are
            valid. A strided view is read in place; only its last axis should be contiguous for speed.
        block_k, block_v: [1, Hk, S, D].
        scale: multiplies the scores.
        window: None for all of the context.
        ancestors: uint32 [S]; bit j of entry i lets row i see block row j (itself it sees always), and row i
            stands at position context_length + the number of its ancestors. Takes the place of `causal`.
        form, splits: fix what `plan` would choose; for races and tests.
        factory: stands in for `mx.fast.metal_kernel`; without it a machine without Metal, and every shape
            outside `supports`, runs `block_attention_reference`.

    Returns:
        [1, G*Hk, S, D] in the dtype of q.
    """
    build = usable(factory)
    arrays = (q, context_k, context_v, block_k, block_v)
    if build is None or not supports(*arrays):
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
    heads, rows, head_dim = q.shape[1:]
    kv_heads, capacity = context_k.shape[1:3]
    assert 0 <= context_length <= capacity, f"context_length {context_length} in a buffer of {capacity} rows"
    assert window is None or window > 0, f"window {window} leaves nothing to see"
    group = heads // kv_heads
    layout = plan(
        group=group,
        rows=rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=q.dtype.size,
        context_length=context_length,
        window=window,
        form=form,
        splits=splits,
    )
    template: list[tuple[str, mx.Dtype | int | bool]] = [("T", q.dtype), ("D", head_dim), ("G", group)]
    template.append(("MODE", _MODES[_mode(causal, ancestors)]))
    if layout.form == "matrix":
        template.append(("BK", layout.tile))
    else:
        template += [("RB", _vector_rows(group * rows, head_dim)), ("NSG", layout.simdgroups)]
    threads = 32 * layout.simdgroups
    stacked = heads * rows
    part, stats = _FIRST_PASS[layout.form].build(build)(
        inputs=[
            *arrays,
            mx.zeros(1, mx.uint32) if ancestors is None else ancestors,
            mx.array([context_length, window or 0, rows], mx.int32),
            scale * math.log2(math.e),
        ],
        template=template,
        grid=(threads * layout.row_groups, kv_heads, layout.splits),
        threadgroup=(threads, 1, 1),
        output_shapes=[(stacked, layout.splits, head_dim), (stacked, layout.splits, 2)],
        output_dtypes=[q.dtype, mx.float32],
    )
    if layout.splits == 1:
        return part.reshape(q.shape)
    (out,) = _MERGE.build(build)(
        inputs=[part, stats, layout.splits],
        template=[("T", q.dtype), ("D", head_dim)],
        grid=(32, stacked, 1),
        threadgroup=(32, min(8, stacked), 1),
        output_shapes=[(1, heads, rows, head_dim)],
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
    first = _first_seen(context_length, window)
    k = mx.concatenate([context_k[..., first:context_length, :], block_k], axis=2)
    v = mx.concatenate([context_v[..., first:context_length, :], block_v], axis=2)
    rows = q.shape[2]
    mask = _mask(rows, context_length - first, causal=causal, window=window, ancestors=ancestors)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def _mask(
    rows: int, context: int, *, causal: bool, window: int | None, ancestors: mx.array | None
) -> mx.array | Literal["causal"] | None:
    """Boolean [S, context + S], or its short name."""
    mode = _mode(causal, ancestors)
    cuts = window is not None and context + rows > window  # some row looks back past the window
    if not cuts and mode == "full":
        return None
    if not cuts and mode == "causal":
        return "causal"
    row = mx.arange(rows)[:, None]
    depth = row
    block = mx.ones((rows, rows), mx.bool_)
    if mode == "causal":
        block = row >= row.T
    elif ancestors is not None:
        named = (ancestors[:, None] >> mx.arange(rows, dtype=mx.uint32)) & 1
        block = (named == 1) | (row == row.T)
        depth = block.sum(axis=1, keepdims=True) - 1
    back = context + depth - mx.arange(context)  # [S, context]
    seen = mx.ones((rows, context), mx.bool_) if window is None else back < window
    return mx.concatenate([seen, block], axis=1)


def _mode(causal: bool, ancestors: mx.array | None) -> str:
    if ancestors is not None:
        return "ancestors"
    return "causal" if causal else "full"


def _first_seen(context_length: int, window: int | None) -> int:
    """The first context key that any row sees; row 0 looks furthest back."""
    return 0 if window is None else min(context_length, max(0, context_length - window + 1))


def _vector_rows(stacked: int, head_dim: int) -> int:
    """Query rows a threadgroup of the vector form keeps in registers: a power of two, few variants to compile."""
    most = 8 if head_dim <= 128 else 4
    return min(most, 1 << (stacked - 1).bit_length())


def _splits(keys: int, stacked: int, threadgroups_per_split: int) -> int:
    """Enough splits to occupy a large GPU, or more where their partial results stay under 1/16 of the keys read."""
    fill = math.ceil(64 / threadgroups_per_split)
    cheap = min(keys // (16 * stacked), math.ceil(256 / threadgroups_per_split))
    return max(1, min(max(fill, cheap), keys // 128))
