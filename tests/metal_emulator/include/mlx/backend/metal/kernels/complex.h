// CPU-shim stand-in for MLX's complex.h (its constructors are overloaded on address space).
#pragma once
#include <metal_stdlib>
#include "mlx/backend/metal/kernels/bf16.h"
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T r = T(0), T i = T(0)) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
