// Conversions: vector constructors, element-wise static_cast, as_type.
#pragma once
#include "msl/traits.h"

namespace metal {
template <class A>
constexpr int msl_components = msl_vec_info<A>::n == 0 ? 1 : msl_vec_info<A>::n;

template <class V, class A>
METAL_FUNC void msl_append(V& v, int& at, A a) {
  typedef typename msl_vec_info<V>::elem E;
  if constexpr (msl_vec_info<A>::n == 0) {
    v[at++] = (E)a;
  } else {
    for (int i = 0; i < msl_vec_info<A>::n; ++i) { v[at++] = (E)a[i]; }
  }
}

// float4(a, b, ...): scalars and vectors joined, one scalar repeated, or one vector converted.
template <class V, class... A>
METAL_FUNC V msl_make(A... a) {
  constexpr int components = (0 + ... + msl_components<A>);
  V v = {};
  int at = 0;
  if constexpr (sizeof...(A) == 1 && components == 1) {
    for (int i = 0; i < msl_vec_info<V>::n; ++i) { (msl_append(v, at, a), ...); }
  } else if constexpr (sizeof...(A) > 0) {
    static_assert(components == msl_vec_info<V>::n, "vector constructor: the number of components does not match");
    (msl_append(v, at, a), ...);
  }
  return v;
}

// A static_cast between vectors converts element by element; C++ would reject or reinterpret it.
template <class To, class From>
METAL_FUNC constexpr To msl_static_cast(From&& x) {
  typedef msl_plain_t<From> F;
  if constexpr (msl_vec_info<To>::n > 0 && msl_vec_info<F>::n > 0) {
    static_assert(msl_vec_info<To>::n == msl_vec_info<F>::n, "static_cast: the number of components does not match");
    return __builtin_convertvector((F)x, To);
  } else if constexpr (is_same<To, bfloat>::value && is_same<F, half>::value) {
    return (bfloat)(float)x;
  } else if constexpr (is_same<To, half>::value && is_same<F, bfloat>::value) {
    return (half)(float)x;
  } else {
    return (To)x;
  }
}

template <class To, class From>
METAL_FUNC To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes do not match");
  return __builtin_bit_cast(To, x);
}
}  // namespace metal
using metal::as_type;
