// metal_math, metal_integer, metal_common: computed in float for the 16-bit types, as MLX's overloads do.
#pragma once
#include "msl/traits.h"

extern "C" {
float expf(float);
float exp2f(float);
float exp10f(float);
float logf(float);
float log2f(float);
float log10f(float);
float powf(float, float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float fmodf(float, float);
float ldexpf(float, int);
float rintf(float);
float roundf(float);
}

namespace metal {
#define MSL_UNARY(name, expr)                         \
  METAL_FUNC float name(float x) { return expr; }     \
  METAL_FUNC half name(half x_) {                     \
    float x = (float)x_;                              \
    return (half)(expr);                              \
  }                                                   \
  METAL_FUNC bfloat name(bfloat x_) {                 \
    float x = (float)x_;                              \
    return (bfloat)(expr);                            \
  }                                                   \
  template <class T, int N>                           \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {            \
    vec<T, N> r = {};                                 \
    for (int i = 0; i < N; ++i) r[i] = name((T)v[i]); \
    return r;                                         \
  }
#define MSL_BINARY(name, expr)                                 \
  METAL_FUNC float name(float x, float y) { return expr; }     \
  METAL_FUNC half name(half x_, half y_) {                     \
    float x = (float)x_, y = (float)y_;                        \
    return (half)(expr);                                       \
  }                                                            \
  METAL_FUNC bfloat name(bfloat x_, bfloat y_) {               \
    float x = (float)x_, y = (float)y_;                        \
    return (bfloat)(expr);                                     \
  }                                                            \
  template <class T, int N>                                    \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {        \
    vec<T, N> r = {};                                          \
    for (int i = 0; i < N; ++i) r[i] = name((T)a[i], (T)b[i]); \
    return r;                                                  \
  }
#define MSL_TRANSCENDENTAL                                                                                          \
  MSL_UNARY(exp, expf(x))                                                                                           \
  MSL_UNARY(exp2, exp2f(x))                                                                                         \
  MSL_UNARY(exp10, exp10f(x))                                                                                       \
  MSL_UNARY(log, logf(x)) MSL_UNARY(log2, log2f(x)) MSL_UNARY(log10, log10f(x)) MSL_UNARY(sqrt, __builtin_sqrtf(x)) \
      MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) MSL_UNARY(sin, sinf(x)) MSL_UNARY(cos, cosf(x))                   \
          MSL_UNARY(tan, tanf(x)) MSL_UNARY(asin, asinf(x)) MSL_UNARY(acos, acosf(x)) MSL_UNARY(atan, atanf(x))     \
              MSL_UNARY(sinh, sinhf(x)) MSL_UNARY(cosh, coshf(x)) MSL_UNARY(tanh, tanhf(x))                         \
                  MSL_UNARY(asinh, asinhf(x)) MSL_UNARY(acosh, acoshf(x)) MSL_UNARY(atanh, atanhf(x))               \
                      MSL_BINARY(atan2, atan2f(x, y)) MSL_BINARY(pow, powf(x, y)) MSL_BINARY(powr, powf(x, y))      \
                          MSL_BINARY(fmod, fmodf(x, y)) MSL_BINARY(divide, x / y) MSL_UNARY(recip, 1.0f / x)
MSL_TRANSCENDENTAL
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
MSL_UNARY(round, roundf(x)) MSL_UNARY(rint, rintf(x)) MSL_UNARY(fabs, __builtin_fabsf(x))
    MSL_UNARY(fract, x - __builtin_floorf(x)) MSL_UNARY(sign, (float)((x > 0) - (x < 0)))
        MSL_UNARY(saturate, x < 0.0f ? 0.0f : (x > 1.0f ? 1.0f : x)) MSL_BINARY(copysign, __builtin_copysignf(x, y))
            MSL_BINARY(step, y < x ? 0.0f : 1.0f) MSL_BINARY(fmax, __builtin_fmaxf(x, y))
                MSL_BINARY(fmin, __builtin_fminf(x, y)) namespace precise {
  MSL_TRANSCENDENTAL
}
namespace fast {
MSL_TRANSCENDENTAL
}
#define MSL_PREDICATE(name, expr)                \
  METAL_FUNC bool name(float x) { return expr; } \
  METAL_FUNC bool name(half x_) {                \
    float x = (float)x_;                         \
    return expr;                                 \
  }                                              \
  METAL_FUNC bool name(bfloat x_) {              \
    float x = (float)x_;                         \
    return expr;                                 \
  }
MSL_PREDICATE(isnan, __builtin_isnan(x))
MSL_PREDICATE(isinf, __builtin_isinf(x))
MSL_PREDICATE(isfinite, __builtin_isfinite(x))
MSL_PREDICATE(signbit, __builtin_signbit(x)) METAL_FUNC float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
METAL_FUNC half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return (bfloat)__builtin_fmaf((float)a, (float)b, (float)c); }
template <class T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r = {};
  for (int i = 0; i < N; ++i) r[i] = fma((T)a[i], (T)b[i], (T)c[i]);
  return r;
}
METAL_FUNC float ldexp(float x, int k) { return ldexpf(x, k); }

#define MSL_MINMAX_INT(T)                                        \
  METAL_FUNC constexpr T max(T x, T y) { return x < y ? y : x; } \
  METAL_FUNC constexpr T min(T x, T y) { return y < x ? y : x; }
MSL_MINMAX_INT(char)
MSL_MINMAX_INT(int8_t)
MSL_MINMAX_INT(uint8_t)
MSL_MINMAX_INT(int16_t) MSL_MINMAX_INT(uint16_t) MSL_MINMAX_INT(int32_t) MSL_MINMAX_INT(uint32_t)
    MSL_MINMAX_INT(int64_t) MSL_MINMAX_INT(uint64_t) METAL_FUNC float max(float x, float y) {
  return __builtin_fmaxf(x, y);
}
METAL_FUNC float min(float x, float y) { return __builtin_fminf(x, y); }
METAL_FUNC half max(half x, half y) { return (half)__builtin_fmaxf((float)x, (float)y); }
METAL_FUNC half min(half x, half y) { return (half)__builtin_fminf((float)x, (float)y); }
METAL_FUNC bfloat max(bfloat x, bfloat y) { return (bfloat)__builtin_fmaxf((float)x, (float)y); }
METAL_FUNC bfloat min(bfloat x, bfloat y) { return (bfloat)__builtin_fminf((float)x, (float)y); }
template <class T, int N>
METAL_FUNC vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r = {};
  for (int i = 0; i < N; ++i) r[i] = max((T)a[i], (T)b[i]);
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r = {};
  for (int i = 0; i < N; ++i) r[i] = min((T)a[i], (T)b[i]);
  return r;
}
template <class T>
METAL_FUNC T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
METAL_FUNC T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
METAL_FUNC T clamp(T x, T lo, T hi) {
  return min(max(x, lo), hi);
}
template <class T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T>
METAL_FUNC T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
#define MSL_ABS(T) \
  METAL_FUNC T abs(T x) { return x < (T)0 ? (T) - x : x; }
MSL_ABS(int8_t) MSL_ABS(int16_t) MSL_ABS(int32_t) MSL_ABS(int64_t) METAL_FUNC float abs(float x) {
  return __builtin_fabsf(x);
}
METAL_FUNC half abs(half x) { return (half)__builtin_fabsf((float)x); }
METAL_FUNC bfloat abs(bfloat x) { return (bfloat)__builtin_fabsf((float)x); }
template <class T, int N>
METAL_FUNC vec<T, N> abs(vec<T, N> v) {
  vec<T, N> r = {};
  for (int i = 0; i < N; ++i) r[i] = abs((T)v[i]);
  return r;
}
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T s = (T)0;
  for (int i = 0; i < N; ++i) s = (T)(s + a[i] * b[i]);
  return s;
}
template <class T, int N>
METAL_FUNC T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
METAL_FUNC uint popcount(uint x) { return (uint)__builtin_popcount(x); }
METAL_FUNC int popcount(int x) { return __builtin_popcount((uint)x); }
METAL_FUNC ulong popcount(ulong x) { return (ulong)__builtin_popcountl(x); }
METAL_FUNC uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
METAL_FUNC int clz(int x) { return x ? __builtin_clz((uint)x) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
METAL_FUNC int ctz(int x) { return x ? __builtin_ctz((uint)x) : 32; }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
METAL_FUNC uint extract_bits(uint x, uint off, uint n) {
  return n == 0 ? 0u : (x >> off) & (n >= 32 ? ~0u : ((1u << n) - 1));
}

}  // namespace metal
