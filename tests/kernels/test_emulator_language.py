"""The Metal language as the shim gives it: values of its functions, types and attributes against NumPy's."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tests import metal_emulator as emulator

LANES = np.arange(32, dtype=np.int32)


def run(
    source: str, x: mx.array, *, dtype: mx.Dtype | None = None, size: int | None = None, **call: Any
) -> np.ndarray:
    header = call.pop("header", "")
    kernel = emulator.factory(mode=call.pop("mode", "check"), seed=1)(
        name="language",
        input_names=["x"],
        output_names=["o"],
        source="const uint i = thread_index_in_threadgroup;\n" + source,
        header=header,
        atomic_outputs=call.pop("atomic_outputs", False),
    )
    (out,) = kernel(
        inputs=[x],
        grid=call.pop("grid", (32, 1, 1)),
        threadgroup=call.pop("threadgroup", (32, 1, 1)),
        output_shapes=[(size or x.size,)],
        output_dtypes=[dtype or x.dtype],
        **call,
    )
    return np.array(out.astype(mx.float32) if out.dtype == mx.bfloat16 else out)


def several(source: str, functions: list[str], x: mx.array, **call: Any) -> np.ndarray:
    """One kernel for many functions, [function, lane]: `F` in the source is each in turn."""
    body = "\n".join(f"o[{32 * k} + i] = {source.replace('F', name)};" for k, name in enumerate(functions))
    return run(body, x, size=32 * len(functions), **call).reshape(len(functions), 32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_math_functions_round_once_to_their_type(dtype: mx.Dtype) -> None:
    names = "exp exp2 log log2 sqrt rsqrt sin cos tanh floor ceil rint trunc abs".split()
    numpy = [np.exp, np.exp2, np.log, np.log2, np.sqrt, lambda v: 1 / np.sqrt(v), np.sin, np.cos, np.tanh]
    numpy += [np.floor, np.ceil, np.rint, np.trunc, np.abs]
    x = (mx.arange(32) / 8 + 0.3).astype(dtype)
    got = several("F(x[i])", names, x)
    exact = np.array(x.astype(mx.float32), np.float64)
    tolerance = {mx.float32: 3e-7, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    for name, function, row in zip(names, numpy, got, strict=True):
        np.testing.assert_allclose(row, function(exact), rtol=tolerance, atol=tolerance / 4, err_msg=name)


def test_math_on_vectors_is_element_by_element() -> None:
    calls = [
        "exp(v)",
        "fma(v, v, v)",
        "max(v, float4(2))",
        "min(v, w)",
        "abs(-v)",
        "pow(v, w)",
        "metal::fast::exp2(v)",
    ]
    stores = "".join(f"if (i == {k}) {{ r = {call}; }}\n" for k, call in enumerate(calls))
    source = f"float4 v = float4(1, 2, 3, 0.5), w = v.wzyx, r = 0;\n{stores}((device float4*)o)[i] = r;"
    got = run(source, mx.ones(128))[: 4 * len(calls)].reshape(-1, 4)
    v = np.array([1, 2, 3, 0.5])
    w = v[::-1]
    expected = [np.exp(v), v * v + v, np.maximum(v, 2), np.minimum(v, w), v, v**w, 2**v]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_fast_and_precise_namespaces_exist() -> None:
    got = several("F(x[i])", ["metal::fast::exp", "metal::precise::exp", "metal::exp"], mx.zeros(32))
    assert (got == 1).all()


def test_simd_reductions_prefixes_and_votes() -> None:
    x = mx.array((LANES * 7) % 13 + 1)
    v = np.array(x)
    names = [
        "sum",
        "min",
        "max",
        "and",
        "or",
        "xor",
        "prefix_inclusive_sum",
        "prefix_exclusive_sum",
        "broadcast_first",
    ]
    got = several("simd_F(x[i])", names, x)
    expected = [
        v.sum(),
        v.min(),
        v.max(),
        np.bitwise_and.reduce(v),
        np.bitwise_or.reduce(v),
        np.bitwise_xor.reduce(v),
    ]
    for row, value in zip(got, [*expected, v.cumsum(), v.cumsum() - v, v[0]], strict=True):
        np.testing.assert_array_equal(row, np.broadcast_to(value, 32))
    votes = several("F", ["simd_any(x[i] == 13)", "simd_all(x[i] > 0)", "int(ulong(simd_ballot(i < 5)))"], x)
    np.testing.assert_array_equal(votes, np.repeat([[1], [1], [31]], 32, axis=1))


def test_shuffles() -> None:
    x = mx.array(LANES * 10)
    calls = {
        "simd_shuffle(x[i], ushort(31 - i))": 31 - LANES,
        "simd_broadcast(x[i], ushort(6))": np.full(32, 6),
        "simd_shuffle_xor(x[i], ushort(5))": LANES ^ 5,
        "simd_shuffle_up(x[i], ushort(3))": np.where(LANES >= 3, LANES - 3, LANES),
        "simd_shuffle_down(x[i], ushort(3))": np.where(LANES < 29, LANES + 3, LANES),
        "simd_shuffle_rotate_down(x[i], ushort(3))": (LANES + 3) % 32,
        "quad_shuffle_xor(x[i], ushort(1))": LANES ^ 1,
        "quad_broadcast(x[i], ushort(2))": LANES // 4 * 4 + 2,
        "simd_shuffle_and_fill_up(x[i], x[i], ushort(2))": (LANES - 2) % 32,
        "simd_shuffle_and_fill_down(x[i], x[i], ushort(2))": (LANES + 2) % 32,
    }
    np.testing.assert_array_equal(several("F", list(calls), x), np.array(list(calls.values())) * 10)
    quads = several("quad_F(x[i])", ["sum", "max", "min"], x) / 10
    first = LANES // 4 * 4
    np.testing.assert_array_equal(quads, [first * 4 + 6, first + 3, first])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_matrices_of_eight_by_eight(dtype: mx.Dtype) -> None:
    source = """
    simdgroup_matrix<T, 8, 8> a, b;
    simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
    simdgroup_load(a, x, 8);
    simdgroup_load(b, x + 64, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, o, 8);
    if (i == 0) { o[64] = a.thread_elements()[1]; }
    """
    x = mx.random.normal((130,), key=mx.random.key(1)).astype(dtype)
    out = run(source, x, dtype=mx.float32, size=65, template=[("T", dtype)])
    a, b = (np.array(x[k : k + 64].astype(mx.float32)).reshape(8, 8) for k in (0, 64))
    np.testing.assert_allclose(out[:64].reshape(8, 8), a @ b.T + 0.5, rtol=1e-5, atol=1e-5)
    assert out[64] == a[0, 1]


def test_vectors_convert_and_swizzle() -> None:
    source = """
    float4 v = float4(x[0], float2(x[1]), 7);
    half4 h = half4(v);
    vec<T, 4> w = vec<T, 4>(v * 2);
    threadgroup float4 shared[1];
    if (i == 0) { shared[0] = v.wzyx; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = i < 4 ? v[i] : i < 8 ? float(h[i - 4]) : i < 12 ? float(w[i - 8]) : i < 16 ? shared[0][i - 12] :
        i == 16 ? dot(v, v) : i == 17 ? float(as_type<uint>(1.0f) >> 23) : i == 18 ? float(0.1h) - float(half(0.1)) :
        i == 19 ? float(static_cast<bfloat>(1.01f)) : 0;
    """
    out = run(source, mx.array([1.0, 2.0] * 16), template=[("T", mx.bfloat16)])
    assert out[:16].tolist() == [1, 2, 2, 7, 1, 2, 2, 7, 2, 4, 4, 14, 7, 2, 2, 1]
    assert out[16:19].tolist() == [58, 127, 0]
    assert out[19] == np.array(mx.array(1.01).astype(mx.bfloat16).astype(mx.float32))


def test_bfloat_arithmetic_rounds_to_nearest_even() -> None:
    x = mx.array([1.0, 1.00390625, 1.01171875, float("inf"), float("nan"), 3.3895e38, 1e-40, -2.5] * 4)
    out = run("o[i] = bfloat(x[i]) * 1.0bf;", x, dtype=mx.bfloat16)
    np.testing.assert_array_equal(out, np.array(x.astype(mx.bfloat16).astype(mx.float32)))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bit_arithmetic_rounds_after_every_operation(dtype: mx.Dtype) -> None:
    x = mx.random.uniform(1, 2, (32,), key=mx.random.key(5)).astype(dtype)
    out = run("o[i] = x[i] * x[i] * x[i];", x)
    np.testing.assert_array_equal(out, np.array((x * x * x).astype(mx.float32)))


def test_literals_without_suffix_are_float() -> None:
    source = "o[i] = sizeof(1.0) == 4 && 0.1 * x[i] == 0.1f * x[i] && is_same_v<decltype(1.0 * x[i]), float>;"
    assert run(source, mx.ones(32)).all()


def test_thread_attributes_of_a_three_dimensional_grid() -> None:
    source = """
    const uint3 g = thread_position_in_grid;
    const uint at = (g.z * threads_per_grid.y + g.y) * threads_per_grid.x + g.x;
    const uint3 p = threadgroup_position_in_grid * dispatch_threads_per_threadgroup + thread_position_in_threadgroup;
    o[at] = i * 1000000 + thread_index_in_simdgroup * 10000 + simdgroup_index_in_threadgroup * 100
        + simdgroups_per_threadgroup * 10 + uint(all(p.xy == g.xy) && p.z == g.z);
    """
    header = "inline bool all(uint2 v) { return v.x && v.y; }\n"
    source = source.replace("all(p.xy == g.xy)", "p.x == g.x && p.y == g.y")
    grid, group = (6, 5, 4), (4, 5, 3)
    out = run(
        source, mx.ones(8), dtype=mx.int64, size=math.prod(grid), grid=grid, threadgroup=group, header=header
    )
    for at, value in enumerate(out.tolist()):
        x, y, z = at % 6, at // 6 % 5, at // 30
        width, depth = (4 if x < 4 else 2), (3 if z < 3 else 1)
        index = (z % 3 * 5 + y) * width + x % 4
        groups = -(-width * 5 * depth // 32)
        assert value == index * 1000000 + index % 32 * 10000 + index // 32 * 100 + groups * 10 + 1


def test_atomics_of_every_kind() -> None:
    source = """
    atomic_fetch_add_explicit(&o[0], int(i), memory_order_relaxed);
    atomic_fetch_max_explicit(&o[1], x[i], memory_order_relaxed);
    atomic_fetch_min_explicit(&o[2], x[i], memory_order_relaxed);
    atomic_fetch_or_explicit(&o[3], 1 << i, memory_order_relaxed);
    atomic_fetch_sub_explicit(&o[4], 1, memory_order_relaxed);
    int expected = 0;
    constexpr memory_order relaxed = memory_order_relaxed;
    if (i == 3) { atomic_compare_exchange_weak_explicit(&o[5], &expected, 9, relaxed, relaxed); }
    if (i == 4) { atomic_exchange_explicit(&o[6], 8, memory_order_relaxed); }
    if (i == 5) { atomic_store_explicit(&o[7], 7, memory_order_relaxed); }
    """
    x = mx.array(LANES * 3 - 40)
    out = run(source, x, size=8, atomic_outputs=True, init_value=0)
    assert out.tolist() == [496, 53, -40, -1, -32, 9, 8, 7]


def test_threadgroup_variables_in_every_spelling() -> None:
    source = """
    threadgroup float a[4], b[2][3], c;
    threadgroup array_of<float>
        wide[8];
    threadgroup float* p = &b[1][0];  // a pointer, not a variable
    if (i == 0) {
      for (int k = 0; k < 4; k++) { a[k] = k; }
      for (int k = 0; k < 6; k++) { b[k / 3][k % 3] = 10 + k; }
      for (int k = 0; k < 8; k++) { wide[k] = 20 + k; }
      c = 30;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = i < 4 ? a[i] : i < 7 ? p[i - 4] : i < 15 ? wide[i - 7] : c;
    """
    header = "template <typename T> using array_of = T;\n"
    out = run(source, mx.ones(32), header=header)
    assert out.tolist() == [0, 1, 2, 3, 13, 14, 15, *range(20, 28), *[30] * 17]


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_every_seed_and_mode_gives_the_same_sum(mode: str) -> None:
    source = """
    threadgroup float partial[4];
    const float s = simd_sum(x[i]);
    if (thread_index_in_simdgroup == 0) { partial[simdgroup_index_in_threadgroup] = s; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = partial[0] + partial[1] + partial[2] + partial[3];
    """
    out = run(source, mx.arange(128).astype(mx.float32), grid=(128, 1, 1), threadgroup=(128, 1, 1), mode=mode)
    assert (out == 8128).all()
