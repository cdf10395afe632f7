// metal_limits.
#pragma once
#include "msl/traits.h"

namespace metal {
template <class T>
struct numeric_limits {
  static constexpr T max() { return is_signed<T>::value ? (T)((((ulong)1) << (sizeof(T) * 8 - 1)) - 1) : (T) ~(T)0; }
  static constexpr T min() { return is_signed<T>::value ? (T)(((ulong)1) << (sizeof(T) * 8 - 1)) : (T)0; }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<float> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
};
template <>
struct numeric_limits<half> {
  static constexpr half max() { return (half)65504.0f; }
  static constexpr half min() { return (half)6.103515625e-05f; }
  static constexpr half lowest() { return (half)-65504.0f; }
  static constexpr half infinity() { return (half)__builtin_inff(); }
  static constexpr half quiet_NaN() { return (half)__builtin_nanf(""); }
  static constexpr half epsilon() { return (half)0.0009765625f; }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return (bfloat)3.3895313892515355e38f; }
  static constexpr bfloat min() { return (bfloat)1.1754943508222875e-38f; }
  static constexpr bfloat lowest() { return (bfloat)-3.3895313892515355e38f; }
  static constexpr bfloat infinity() { return (bfloat)__builtin_inff(); }
  static constexpr bfloat quiet_NaN() { return (bfloat)__builtin_nanf(""); }
  static constexpr bfloat epsilon() { return (bfloat)0.0078125f; }
};

}  // namespace metal
