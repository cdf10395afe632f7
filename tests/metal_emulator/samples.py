"""Kernels to try the emulator on: attention of a block in two passes, once with vectors and once with 8x8 matrices.

They stand for what the project's kernels do (tiles in threadgroup memory, SIMD-group reductions, partial results of
splits) but are not those: a change there shall not change what these tests promise. Body and call fit each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

Form = Literal["vector", "matrix"]

_FOLDER = Path(__file__).parent / "sample_kernels"


@dataclass(frozen=True)
class Sample:
    """A kernel's declaration with its text."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""

    def build(self, factory: Callable[..., Any]) -> Callable[..., list[mx.array]]:
        """The kernel, by MLX's factory or the emulator's."""
        kernel: Callable[..., list[mx.array]] = factory(
            name=self.name,
            input_names=list(self.input_names),
            output_names=list(self.output_names),
            source=self.source,
            header=self.header,
        )
        return kernel


def _first_pass(form: Form) -> Sample:
    return Sample(
        f"attention_{form}",
        ("q", "k_ctx", "v_ctx", "k_blk", "v_blk", "params", "scale"),
        ("o_part", "m_part", "l_part"),
        (_FOLDER / f"attention_{form}.metal").read_text(),
        (_FOLDER / "attention_tiles.metal").read_text(),
    )


FIRST_PASS: dict[Form, Sample] = {"vector": _first_pass("vector"), "matrix": _first_pass("matrix")}
MERGE = Sample(
    "attention_merge",
    ("o_part", "m_part", "l_part"),
    ("out",),
    (_FOLDER / "attention_merge.metal").read_text(),
)


@dataclass(frozen=True)
class Attention:
    """One problem: queries of a block over `context` rows of a longer buffer, and over the block itself."""

    q: mx.array  # [Hq, L, D]
    k_ctx: mx.array  # [Hkv, capacity, D]
    v_ctx: mx.array
    k_blk: mx.array  # [Hkv, L, D]
    v_blk: mx.array
    context: int
    window: int = 0  # context rows seen by each query, 0: all

    @classmethod
    def random(
        cls, *, context: int = 90, window: int = 0, head_dim: int = 64, dtype: mx.Dtype = mx.float16
    ) -> "Attention":
        """4 query heads on 2 key heads, 16 rows, ten unused rows in the context buffer."""
        keys = mx.random.split(mx.random.key(context), 5)
        shapes = [(4, 16, head_dim), *[(2, context + 10, head_dim)] * 2, *[(2, 16, head_dim)] * 2]
        q, k_ctx, v_ctx, k_blk, v_blk = (
            mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)
        )
        return cls(q, k_ctx, v_ctx, k_blk, v_blk, context, window)

    def run(
        self, form: Form, factory: Callable[..., Any], *, first_pass: Sample | None = None, splits: int = 3
    ) -> mx.array:
        """Both passes; [Hq, L, D] in the dtype of the queries."""
        heads, rows, head_dim = self.q.shape
        kv_heads, capacity, _ = self.k_ctx.shape
        grouped = heads // kv_heads
        simdgroups = 8 if form == "vector" else grouped * rows // 8
        template = [("T", self.q.dtype), ("D", head_dim), ("G", grouped), ("L", rows), ("NSG", simdgroups)]
        if form == "matrix":
            template.append(("BK", 32 if head_dim <= 128 else 16))  # tiles of 32 KB at most
        partial = (first_pass or FIRST_PASS[form]).build(factory)(
            inputs=[
                *(self.q, self.k_ctx, self.v_ctx, self.k_blk, self.v_blk),
                mx.array([self.context, self.window, capacity], mx.int32),
                head_dim**-0.5,
            ],
            template=template,
            grid=(32 * simdgroups, kv_heads, splits),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(heads * rows, splits, head_dim), (heads * rows, splits), (heads * rows, splits)],
            output_dtypes=[mx.float32] * 3,
        )
        (out,) = MERGE.build(factory)(
            inputs=partial,
            template=[("T", self.q.dtype), ("D", head_dim), ("S", splits)],
            grid=(32, heads * rows, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[self.q.shape],
            output_dtypes=[self.q.dtype],
        )
        return out

    def reference(self) -> mx.array:
        """By MLX, in float32."""
        exact = replace(
            self,
            **{n: getattr(self, n).astype(mx.float32) for n in ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")},
        )
        keys = mx.concatenate([exact.k_ctx[:, : self.context], exact.k_blk], axis=1)
        values = mx.concatenate([exact.v_ctx[:, : self.context], exact.v_blk], axis=1)
        key_at = mx.arange(keys.shape[1])[None]
        query_at = self.context + mx.arange(self.q.shape[1])[:, None]
        seen = (key_at >= self.context) | (self.window == 0) | (query_at - key_at < self.window)
        return mx.fast.scaled_dot_product_attention(
            exact.q[None], keys[None], values[None], scale=self.q.shape[-1] ** -0.5, mask=seen
        )[0]

    def error(self, out: mx.array) -> float:
        """Largest difference to the reference."""
        return float(mx.abs(out.astype(mx.float32) - self.reference()).max())
