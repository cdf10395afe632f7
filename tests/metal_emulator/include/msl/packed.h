// Packed vectors: the alignment of one element.
#pragma once
#include "msl/types.h"

namespace metal {
template <class T, int N>
struct msl_packed {
  T elements[N];
  msl_packed() = default;
  METAL_FUNC msl_packed(vec<T, N> v) {
    for (int i = 0; i < N; ++i) { elements[i] = v[i]; }
  }
  METAL_FUNC operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; ++i) { v[i] = elements[i]; }
    return v;
  }
  METAL_FUNC thread T& operator[](int i) { return elements[i]; }
  METAL_FUNC const thread T& operator[](int i) const { return elements[i]; }
};
typedef msl_packed<float, 3> packed_float3;
typedef msl_packed<float, 4> packed_float4;
typedef msl_packed<half, 4> packed_half4;
}  // namespace metal
using metal::packed_float3;
using metal::packed_float4;
using metal::packed_half4;
