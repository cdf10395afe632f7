// metal_simdgroup_matrix: 8x8 matrices held by a SIMD-group, two neighbouring elements of a row in each lane.
//
// Which lane holds which element is not specified by Metal; this is the layout that MLX's own kernels rely on.
#pragma once
#include "msl/simd.h"

namespace metal {
METAL_FUNC uint msl_fragment_row(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
METAL_FUNC uint msl_fragment_column(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

template <class T, int R, int C>
struct simdgroup_matrix;
template <class T>
struct simdgroup_matrix<T, 8, 8> {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint row = msl_fragment_row(emu_lane()), column = msl_fragment_column(emu_lane());
    for (uint j = 0; j < 2; ++j) { elements[j] = row == column + j ? diagonal : (T)0; }
  }
  METAL_FUNC thread vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const thread vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> m;
  m.elements[0] = x;
  m.elements[1] = x;
  return m;
}

// Takes both spellings of an origin: a ulong2 and the pair that `0` converts to.
struct msl_origin {
  ulong x, y;
  constexpr msl_origin(ulong2 v) : x(v.x), y(v.y) {}
  constexpr msl_origin(ulong x_, ulong y_) : x(x_), y(y_) {}
};
METAL_FUNC ulong msl_element(uint j, ulong per_row, msl_origin origin, bool transpose) {
  const uint row = msl_fragment_row(emu_lane()), column = msl_fragment_column(emu_lane()) + j;
  return transpose ? (origin.y + column) * per_row + origin.x + row : (origin.y + row) * per_row + origin.x + column;
}
template <class M, class P>
METAL_FUNC void simdgroup_load(thread M& m, P source, ulong per_row = 8, msl_origin origin = msl_origin(0, 0),
                               bool transpose = false) {
  for (uint j = 0; j < 2; ++j) { m.elements[j] = source[msl_element(j, per_row, origin, transpose)]; }
}
template <class M, class P>
METAL_FUNC void simdgroup_store(const thread M& m, P target, ulong per_row = 8, msl_origin origin = msl_origin(0, 0),
                                bool transpose = false) {
  for (uint j = 0; j < 2; ++j) { target[msl_element(j, per_row, origin, transpose)] = m.elements[j]; }
}

template <class D, class A, class B, class C>
struct msl_product_operand {
  vec<D, 2> d;
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};
template <class D, class A, class B, class C>
MSL_UNCHECKED void msl_multiply_accumulate(void** operands, uint mask, uint) {
  if (mask != 0xffffffffu) {
    emu_fail("simdgroup_multiply(_accumulate) needs all 32 lanes active");
    return;
  }
  typedef msl_product_operand<D, A, B, C> Operand;
  Operand** lanes = (Operand**)operands;
  float a[8][8], b[8][8], c[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    const uint row = msl_fragment_row(lane), column = msl_fragment_column(lane);
    for (uint j = 0; j < 2; ++j) {
      a[row][column + j] = (float)lanes[lane]->a[j];
      b[row][column + j] = (float)lanes[lane]->b[j];
      c[row][column + j] = (float)lanes[lane]->c[j];
    }
  }
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < 8; ++j) { c[i][j] += a[i][k] * b[k][j]; }
    }
  }
  for (uint lane = 0; lane < 32; ++lane) {
    const uint row = msl_fragment_row(lane), column = msl_fragment_column(lane);
    for (uint j = 0; j < 2; ++j) { lanes[lane]->d[j] = (D)c[row][column + j]; }
  }
}
template <class D, class A, class B, class C>
MSL_MEETING void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                               const thread simdgroup_matrix<A, 8, 8>& a,
                                               const thread simdgroup_matrix<B, 8, 8>& b,
                                               const thread simdgroup_matrix<C, 8, 8>& c) {
  msl_product_operand<D, A, B, C> operand;
  operand.a = a.elements;
  operand.b = b.elements;
  operand.c = c.elements;
  emu_simd(&operand, &msl_multiply_accumulate<D, A, B, C>, "simdgroup_multiply_accumulate");
  d.elements = operand.d;
}
template <class D, class A, class B>
MSL_MEETING void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
                                    const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}
}  // namespace metal
