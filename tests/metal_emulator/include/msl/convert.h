// Conversions: vector constructors, element-wise static_cast, as_type.
#pragma once
#include "msl/traits.h"

namespace metal {
template <class V>
struct msl_maker {
  typedef typename msl_vec_info<V>::elem E;
  static constexpr int N = msl_vec_info<V>::n;
  template <class A>
  static inline void put(V& r, int& i, A a) {
    if constexpr (msl_vec_info<A>::n == 0) {
      r[i++] = (E)a;
    } else {
      for (int j = 0; j < msl_vec_info<A>::n; ++j) r[i++] = (E)a[j];
    }
  }
  template <class A>
  static constexpr int count() {
    return msl_vec_info<A>::n == 0 ? 1 : msl_vec_info<A>::n;
  }
};
template <class V, class... A>
inline __attribute__((always_inline)) V msl_make(A... a) {
  typedef msl_maker<V> M;
  if constexpr (sizeof...(A) == 0) {
    V r = {};
    return r;
  } else if constexpr (sizeof...(A) == 1 && (M::template count<A>() + ...) == 1) {
    V r = {};
    for (int i = 0; i < M::N; ++i) r[i] = (typename M::E)(a, ...);
    return r;
  } else if constexpr (sizeof...(A) == 1) {
    static_assert((M::template count<A>() + ...) == M::N, "vector constructor: component count mismatch");
    return (__builtin_convertvector(a, V), ...);
  } else {
    static_assert((M::template count<A>() + ...) == M::N, "vector constructor: component count mismatch");
    V r = {};
    int i = 0;
    (M::put(r, i, a), ...);
    return r;
  }
}
// static_cast between vectors converts element-wise in MSL; clang would reject or reinterpret it.
template <class To, class From>
inline __attribute__((always_inline)) constexpr To msl_static_cast(From&& f) {
  typedef msl_plain_t<From> F;
  if constexpr (msl_vec_info<To>::n > 0 && msl_vec_info<F>::n > 0) {
    static_assert(msl_vec_info<To>::n == msl_vec_info<F>::n, "vector static_cast: component count mismatch");
    return __builtin_convertvector((F)f, To);
  } else if constexpr (is_same<To, bfloat>::value && is_same<F, half>::value) {
    return (bfloat)(float)f;
  } else if constexpr (is_same<To, half>::value && is_same<F, bfloat>::value) {
    return (half)(float)f;
  } else {
    return (To)f;
  }
}

// ---------------------------------------------------------------- as_type
template <class To, class From>
inline __attribute__((always_inline)) To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: size mismatch");
  return __builtin_bit_cast(To, x);
}
}  // namespace metal
using metal::as_type;
