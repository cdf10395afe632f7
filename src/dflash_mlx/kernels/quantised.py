"""An affine-quantised weight as the product kernels see it: its arrays, its limits, how a product is cut.

In: arrays in the layout of `mx.quantize`. Out: whether the kernels take them, the cut, the template, the
name of the shape class, random weights for contests. Launches nothing.
"""

import functools
import math
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.kernels.source import Factory, Kernel

MAX_ROWS = 32
# Largest difference to the product in fp32, relative to its largest entry, by the dtype of the result. The
# kernels round once, at the end; the rest is room for another order of the sums.
BOUNDS = {mx.float32: 1e-4, mx.float16: 1e-3, mx.bfloat16: 8e-3}

_SHORT = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}
_ROW_BANDS = ((1, 1), (2, 3), (4, 5), (6, 8), (9, 12), (13, 16), (17, 24), (25, MAX_ROWS))
_PARTIAL_BYTES = 16 << 10
_SIMD_GROUPS_WANTED = 1024  # some twenty for each core of a large GPU, so that enough loads are in flight


class Quantised(NamedTuple):
    """One weight [N, K], or one for each expert [E, N, K]; w = scales * quants + biases by groups of K."""

    words: mx.array  # [..., N, K * bits / 32] uint32, low bits first
    scales: mx.array  # [..., N, K / group_size]
    biases: mx.array | None  # as scales; None in the formats that have none
    group_size: int
    bits: int

    @property
    def columns(self) -> int:
        """N, the columns of the product."""
        return self.words.shape[-2]

    def result_type(self, x: mx.array) -> mx.Dtype:
        """The dtype of the product, as MLX promotes: two different floats of 16 or 32 bits give 32."""
        return _result_type(x.dtype, self.scales.dtype)

    def widened(self) -> "Quantised":
        """The same weight with its scales and biases in fp32."""
        biases = None if self.biases is None else self.biases.astype(mx.float32)
        return self._replace(scales=self.scales.astype(mx.float32), biases=biases)


class Product(NamedTuple):
    """The shapes and dtypes of one product: all that its limits, its cut and its class depend on.

    What follows from it is remembered: a pass has hundreds of products, each again in every round.
    """

    x: tuple[int, ...]
    x_type: mx.Dtype
    words: tuple[int, ...]
    words_type: mx.Dtype
    scales: tuple[int, ...]
    scales_type: mx.Dtype
    biases: tuple[int, ...] | None
    biases_type: mx.Dtype | None
    group_size: int
    bits: int

    @classmethod
    def of(cls, x: mx.array, weight: Quantised) -> "Product":
        """The product of rows x [..., K] and a weight."""
        words, scales, biases, group_size, bits = weight
        biases_shape, biases_type = (None, None) if biases is None else (biases.shape, biases.dtype)
        return cls(
            x.shape,
            x.dtype,
            words.shape,
            words.dtype,
            scales.shape,
            scales.dtype,
            biases_shape,
            biases_type,
            group_size,
            bits,
        )

    @property
    def rows(self) -> int:
        """Activation rows, whatever dimensions they come in."""
        return math.prod(self.x[:-1])

    def fits(self) -> bool:
        """Whether the kernels take these dtypes, bits, groups and sizes."""
        depth = self.x[-1]
        return (
            self.bits in (4, 8)
            and self.group_size in (32, 64, 128)
            and depth % self.group_size == 0
            and self.words_type == mx.uint32
            and self.words[-1] * 32 == depth * self.bits
            and self.words[-2] * self.words[-1] < 2**31
            and self.x_type in BOUNDS
            and self.scales_type in BOUNDS
            and math.prod(self.scales) >= 8  # fewer come as `constant`, which the body does not take
            and self.biases_type == self.scales_type
            and self.biases == self.scales == (*self.words[:-1], depth // self.group_size)
        )

    def describe(self) -> str:
        """The part of a shape class that the weight and the dtypes make."""
        types = [_SHORT[self.x_type]] + [_SHORT[self.scales_type]] * (self.x_type != self.scales_type)
        return f"n{self.words[-2]} k{self.x[-1]} {self.bits} bit g{self.group_size} {'/'.join(types)}"


class Plan(NamedTuple):
    """How one product is cut; `threads` threads work on `width` columns."""

    row_tiles: int  # MT: activation rows in eights
    column_tiles: int  # NT: columns of one SIMD-group, in eights
    slices: int  # SK: SIMD-groups that share a column's sum
    strips: int  # SN: strips of 8 NT columns in a threadgroup

    @property
    def width(self) -> int:
        """Columns of one threadgroup."""
        return 8 * self.column_tiles * self.strips

    @property
    def threads(self) -> int:
        """Threads of one threadgroup."""
        return 32 * self.slices * self.strips


def plan(rows: int, columns: int, depth: int, bits: int) -> Plan:
    """Cut a product of `rows` x `depth` by `depth` x `columns`.

    Four column tiles halve the loads of activations; narrow weights have too few columns for that. Slices
    of the depth give a narrow weight enough SIMD-groups, as long as each still has four turns of work and the
    partial sums leave room for a second threadgroup on a core.
    """
    row_tiles = -(-rows // 8)
    column_tiles = 4 if columns >= 2048 else 2 if columns >= 256 else 1
    strips = -(-columns // (8 * column_tiles))
    turns = -(-depth // (512 // bits))
    most = min(8, _PARTIAL_BYTES // (4 * 8 * row_tiles * 8 * column_tiles))
    slices = 1
    while 2 * slices <= most and strips * slices < _SIMD_GROUPS_WANTED and slices * 8 <= turns:
        slices *= 2
    return Plan(row_tiles, column_tiles, slices, max(1, 4 // slices))


class Settings(NamedTuple):
    """How one product is launched."""

    template: list[tuple[str, mx.Dtype | int | bool]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shape: tuple[int, int]
    dtype: mx.Dtype


@functools.lru_cache(maxsize=4096)
def settings(product: Product, shared_rows: int) -> Settings:
    """The launch of a product of which `shared_rows` rows share one reading of the weight."""
    columns = product.words[-2]
    cut = plan(shared_rows, columns, product.x[-1], product.bits)
    out_type = _result_type(product.x_type, product.scales_type)
    return Settings(
        template=[
            ("T", product.x_type),
            ("ST", product.scales_type),
            ("OT", out_type),
            ("GS", product.group_size),
            ("BITS", product.bits),
            ("MT", cut.row_tiles),
            ("NT", cut.column_tiles),
            ("SK", cut.slices),
            ("SN", cut.strips),
        ],
        grid=(cut.threads * -(-columns // cut.width), 1, product.rows if len(product.words) == 3 else 1),
        threadgroup=(cut.threads, 1, 1),
        shape=(product.rows, columns),
        dtype=out_type,
    )


def launch(kernel: Kernel, inputs: list[mx.array], how: Settings, factory: Factory | None) -> mx.array:
    """Run one of the two product kernels: [M, N]."""
    return kernel.build(factory)(
        inputs=[*inputs],
        template=how.template,
        grid=how.grid,
        threadgroup=how.threadgroup,
        output_shapes=[how.shape],
        output_dtypes=[how.dtype],
    )[0]


def row_band(rows: int) -> tuple[int, int]:
    """The band of row counts that share a verdict; its lowest is raced, where the kernel gains least."""
    return next((band for band in _ROW_BANDS if rows <= band[1]), _ROW_BANDS[-1])


def random_weight(
    leading: tuple[int, ...], depth: int, *, group_size: int, bits: int, dtype: mx.Dtype, key: mx.array
) -> Quantised:
    """Uniform quants about zero; made without the floats that quantising would need in memory first."""
    # by halves of a word: over its whole range `randint` leaves the low bits zero
    halves = mx.random.randint(0, 1 << 16, (*leading, depth * bits // 16), dtype=mx.uint16, key=key)
    scales = mx.random.uniform(0.5, 1.5, (*leading, depth // group_size), key=key) / (2**bits * depth**0.5)
    biases = scales * (-(2**bits - 1) / 2)
    return Quantised(halves.view(mx.uint32), scales.astype(dtype), biases.astype(dtype), group_size, bits)


def _result_type(x_type: mx.Dtype, scales_type: mx.Dtype) -> mx.Dtype:
    return x_type if x_type == scales_type else mx.float32
