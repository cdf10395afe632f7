"""How block attention is laid over the GPU: limits, form, splits, and the class a measurement stands for.

In: shapes and dtypes. Out: numbers. Computes no attention and builds no kernel.
"""

import functools
import math
from typing import Literal, NamedTuple

import mlx.core as mx

Form = Literal["matrix", "vector"]

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = {mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32"}
MAX_ROWS = 32
MAX_GROUP = 8
# Apple GPUs hold 208 KiB of registers a core: 128 of 32 bits in each of 384 threads, 104 in each of 512.
_ALWAYS_RUNS = 12  # SIMD-groups in a threadgroup, whatever the registers of a thread
_MOST_SIMDGROUPS = 16


class Plan(NamedTuple):
    """How one call is laid over the GPU."""

    form: Form
    keys: int  # keys that any row can see: from the first that a window leaves to the block's last
    splits: int  # parts of the keys; the second pass runs only when there is more than one
    tile: int  # keys staged at once (matrix) or in flight (vector) in a threadgroup
    query_fragments: (
        int  # matrix: of a SIMD-group's queries, in registers; fewer than all: read for every tile
    )
    simdgroups: int  # in a threadgroup
    row_groups: int  # threadgroups that share a kv head's G*S query rows; each reads all its keys

    def threadgroups(self, kv_heads: int) -> int:
        """Of the first pass."""
        return self.row_groups * kv_heads * self.splits


def supports(
    q: mx.array, context_k: mx.array, context_v: mx.array, block_k: mx.array, block_v: mx.array
) -> bool:
    """Whether the Metal forms cover these shapes and dtypes; the reference runs otherwise."""
    arrays = (q, context_k, context_v, block_k, block_v)
    return _fits(tuple(a.shape for a in arrays), tuple(a.dtype for a in arrays))


@functools.lru_cache(maxsize=4096)
def _fits(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[mx.Dtype, ...]) -> bool:
    """Remembered: the layers of a pass ask the same."""
    if any(len(shape) != 4 or shape[0] != 1 for shape in shapes) or any(d != dtypes[0] for d in dtypes):
        return False
    q, context_k, context_v, block_k, block_v = shapes
    heads, rows, head_dim = q[1:]
    kv_heads, capacity = context_k[1:3]
    return (
        covers(heads, kv_heads, head_dim, dtypes[0])
        and 1 <= rows <= MAX_ROWS
        and capacity > 0
        and block_k == block_v == (1, kv_heads, rows, head_dim)
        and context_v == context_k == (1, kv_heads, capacity, head_dim)
    )


def covers(heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> bool:
    """Whether the Metal forms cover attention of this kind, whatever its rows and keys."""
    return (
        dtype in DTYPES
        and head_dim in HEAD_DIMS
        and kv_heads > 0
        and heads % kv_heads == 0
        and 1 <= heads // kv_heads <= MAX_GROUP
    )


@functools.lru_cache(maxsize=4096)
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
    keys = context_length - first_seen(context_length, window) + rows
    if form == "matrix":
        row_groups, simdgroups = _row_groups(stacked)
        query_fragments, tile = head_dim // 8, _tile(8192, head_dim, itemsize)  # two tiles in about 17 KiB
        if registers(head_dim, itemsize, query_fragments, tile) > register_limit(simdgroups):
            query_fragments, tile = 4, _tile(12288, head_dim, itemsize)  # fewer tiles read queries less often
    else:
        query_fragments, tile, simdgroups = 0, 8, 8
        row_groups = math.ceil(stacked / vector_rows(stacked, head_dim))
    if splits is None:
        splits = _splits(keys, stacked, kv_heads * row_groups, simdgroups)
    return Plan(form, keys, splits, tile, query_fragments, simdgroups, row_groups)


def registers(head_dim: int, itemsize: int, query_fragments: int, tile: int) -> int:
    """Of 32 bits in a thread of the matrix form while it scores; an estimate from its text, no compiler's count.

    Of each 8x8 fragment a thread has two elements: the output and the tile's scores are fp32, the queries and
    one fragment of keys as they come. Running maximum and sum, sight, loop, positions and pointers take 26.
    """
    return head_dim // 4 + (query_fragments + 1) * itemsize // 2 + tile // 4 + 26


def register_limit(simdgroups: int) -> int:
    """Registers of 32 bits that a thread may take in a threadgroup of so many SIMD-groups, up to 16."""
    return 128 if simdgroups <= _ALWAYS_RUNS else 104


def raced_rows(row_band: int, group: int) -> int:
    """The block rows on which the class of `row_band` is tried, so that its verdict is the same for every call.

    The fewest, where a kernel gains least; but where a larger threadgroup may be more than registers allow, the
    fewest that take the largest: if those run, all do.
    """
    fewest = row_band // 2 + 1
    threadgroup = {rows: _row_groups(group * rows)[1] for rows in range(fewest, row_band + 1)}
    largest = max(threadgroup, key=threadgroup.__getitem__)
    return largest if threadgroup[largest] > _ALWAYS_RUNS else fewest


def shape_class(q: mx.array, context_k: mx.array, context_length: int, window: int | None) -> str:
    """The class that one measurement stands for: bands of block rows and of visible keys, all else exact."""
    _, heads, rows, head_dim = q.shape
    keys = context_length - first_seen(context_length, window) + rows
    return class_name(rows, heads, context_k.shape[1], head_dim, keys, q.dtype)


@functools.lru_cache(maxsize=4096)
def class_name(rows: int, heads: int, kv_heads: int, head_dim: int, keys: int, dtype: mx.Dtype) -> str:
    """As `shape_class`, from the numbers."""
    row_band, key_band = bands(rows, keys)
    return f"s{row_band} h{heads}/{kv_heads} d{head_dim} keys {key_band} {DTYPES[dtype]}"


def bands(rows: int, keys: int) -> tuple[int, int]:
    """The most rows and the most keys of the class that these belong to: powers of two."""
    return 1 << (rows - 1).bit_length(), max(1024, 1 << (keys - 1).bit_length())


def row_bands(most: int) -> list[int]:
    """The bands of 2 to `most` block rows, by the most rows of each."""
    return sorted({bands(rows, 1)[0] for rows in range(2, min(most, MAX_ROWS) + 1)})


def key_bands(most: int) -> list[int]:
    """The bands of up to `most` visible keys, by the most keys of each."""
    last = bands(2, most)[1]
    return [1 << power for power in range(10, last.bit_length())]


def first_seen(context_length: int, window: int | None) -> int:
    """The first context key that any row sees; row 0 looks furthest back."""
    return 0 if window is None else min(context_length, max(0, context_length - window + 1))


def vector_rows(stacked: int, head_dim: int) -> int:
    """Query rows in the registers of a vector threadgroup: a power of two, few variants to compile."""
    most = 8 if head_dim <= 128 else 4
    return min(most, 1 << (stacked - 1).bit_length())


def _row_groups(stacked: int) -> tuple[int, int]:
    """Threadgroups over the query rows of a kv head, and the SIMD-groups of each, eight rows to a SIMD-group."""
    fragments = math.ceil(stacked / 8)
    row_groups = math.ceil(fragments / _MOST_SIMDGROUPS)
    return row_groups, math.ceil(fragments / row_groups)


def _tile(nbytes: int, head_dim: int, itemsize: int) -> int:
    """Keys of a tile: as many eights as fit in so many bytes, one at least and four at most."""
    return min(32, max(8, nbytes // (head_dim * itemsize) // 8 * 8))


def _splits(keys: int, stacked: int, threadgroups_per_split: int, simdgroups: int) -> int:
    """Enough splits to fill a large GPU; more where the partial results stay under 1/16 of the keys read."""
    alone = simdgroups > _ALWAYS_RUNS  # on its core, by its registers; and it has more to do for a key
    fill = math.ceil((40 if alone else 64) / threadgroups_per_split)
    cheap = min(keys // (16 * stacked), math.ceil(256 / threadgroups_per_split))
    return max(1, min(max(fill, cheap), keys // (64 if alone else 128)))
