"""MLX's own Metal kernels, from the headers in its wheel: the emulator gives what MLX's CPU back-end gives.

They were written for GPUs and know nothing of this project, so they prove the shim and the scheduler.
"""

from typing import Any

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.headers import MLX_INCLUDE, MLX_KERNELS, adapt

SDPA_VECTOR = """
  const size_t head_stride = sizes[2], row_stride = sizes[3];
  sdpa_vector<T, D, D>(q, k, v, out, sizes[0], sizes[1], head_stride, row_stride, head_stride, row_stride, scale,
      nullptr, nullptr, 0, 0, 0, nullptr, 0, threadgroup_position_in_grid, threadgroups_per_grid,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
STEEL_ATTENTION = """
  AttnParams p;
  p.B = 1; p.H = sizes[0]; p.D = D; p.qL = sizes[1]; p.kL = sizes[2]; p.gqa_factor = sizes[3]; p.scale = scale;
  p.NQ = ceildiv(p.qL, BQ); p.NK = ceildiv(p.kL, BK); p.NQ_aligned = p.qL / BQ; p.NK_aligned = p.kL / BK;
  p.qL_rem = p.qL - p.NQ_aligned * BQ; p.kL_rem = p.kL - p.NK_aligned * BK; p.qL_off = p.kL - p.qL;
  const int kv_heads = p.H / p.gqa_factor;
  p.Q_strides[0] = p.H * p.qL * D; p.Q_strides[1] = p.qL * D; p.Q_strides[2] = D;
  p.K_strides[0] = kv_heads * p.kL * D; p.K_strides[1] = p.kL * D; p.K_strides[2] = D;
  for (int i = 0; i < 3; i++) { p.V_strides[i] = p.K_strides[i]; p.O_strides[i] = p.Q_strides[i]; }
  align_Q = p.qL_rem == 0; align_K = p.kL_rem == 0;
  AttnMaskParams mask;
  attention<T, BQ, BK, D, D, WM, 1, bool, float>(q, k, v, out, &p, &mask, nullptr, nullptr, nullptr,
      thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threadgroup_position_in_grid,
      thread_position_in_threadgroup);
"""
QUANTISED_PRODUCT = """
  threadgroup T x_tile[32 * (32 + 16 / sizeof(T))];
  threadgroup T w_tile[32 * (32 + 16 / sizeof(T))];
  qmm_t_impl<T, GROUP, 4, true, T, 32, 32, 32>(w, scales, biases, x, out, x_tile, w_tile, sizes[0], sizes[1], sizes[2],
      sizes[0], threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
"""


def headers(*names: str) -> str:
    texts = [(MLX_INCLUDE / MLX_KERNELS / name).read_text() for name in names]
    return "".join(adapt(text).replace("#pragma once", "") for text in texts)


def run(
    source: str, header: str, inputs: dict[str, Any], mode: emulator.Mode, seed: int = 1, **call: Any
) -> mx.array:
    kernel = emulator.factory(mode=mode, seed=seed, strict_text=False)(
        name="mlx_own", input_names=list(inputs), output_names=["out"], source=source, header=header
    )
    (out,) = kernel(inputs=list(inputs.values()), **call)
    return out


def attention_inputs(rows: int, keys: int, dtype: mx.Dtype) -> dict[str, Any]:
    shapes = {"q": (4, rows, 64), "k": (2, keys, 64), "v": (2, keys, 64)}
    return {
        name: mx.random.normal(s, key=mx.random.key(len(name) + keys)).astype(dtype)
        for name, s in shapes.items()
    }


def exact_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    q, k, v = (a.astype(mx.float32)[None] for a in (q, k, v))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)[0]


def distance(a: mx.array, b: mx.array) -> float:
    return mx.abs(a.astype(mx.float32) - b).max().item()


@pytest.mark.parametrize("mode", ["fast", pytest.param("check", marks=pytest.mark.slow)])
def test_attention_of_vectors(mode: emulator.Mode) -> None:
    arrays = attention_inputs(rows=2, keys=131, dtype=mx.float16)
    out = run(
        SDPA_VECTOR,
        headers("sdpa_vector.h"),
        {**arrays, "sizes": mx.array([2, 131, 131 * 64, 64], mx.int32), "scale": 64**-0.5},
        mode,
        template=[("T", mx.float16), ("D", 64)],
        grid=(1024 * 4, 2, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[(4, 2, 64)],
        output_dtypes=[mx.float16],
    )
    assert distance(out, exact_attention(**arrays)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.float16, 3e-3)], ids=str)
def test_steel_attention_on_matrices(dtype: mx.Dtype, tolerance: float) -> None:
    arrays = attention_inputs(rows=37, keys=70, dtype=dtype)
    out = run(
        STEEL_ATTENTION,
        headers("steel/attn/kernels/steel_attention.h"),
        {**arrays, "sizes": mx.array([4, 37, 70, 2], mx.int32), "scale": 64**-0.5},
        "fast",
        template=[("T", dtype), ("D", 64), ("BQ", 32), ("BK", 32), ("WM", 4)],
        grid=(32 * 2, 4 * 4, 1),
        threadgroup=(32, 4, 1),
        output_shapes=[(4, 37, 64)],
        output_dtypes=[dtype],
    )
    assert distance(out, exact_attention(**arrays)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("group", [32, 64])
def test_quantised_product(mode: emulator.Mode, group: int) -> None:
    rows, inner, columns = 16, 128, 96
    x = mx.random.normal((rows, inner), key=mx.random.key(1)).astype(mx.float16)
    weight = mx.random.normal((columns, inner), key=mx.random.key(2)).astype(mx.float16)
    w, scales, biases = mx.quantize(weight, group, 4)
    sizes = mx.array([inner, columns, rows], mx.int32)
    out = run(
        QUANTISED_PRODUCT,
        headers("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"),
        {"w": w, "scales": scales, "biases": biases, "x": x, "sizes": sizes},
        mode,
        template=[("T", mx.float16), ("GROUP", group)],
        grid=(128 * columns // 32, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[mx.float16],
    )
    weight = mx.dequantize(w, scales, biases, group, 4).astype(mx.float32)
    assert distance(out, x.astype(mx.float32) @ weight.T) < 0.1
