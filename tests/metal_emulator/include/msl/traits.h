// metal_type_traits, plus what the emulator asks of a type.
#pragma once
#include "msl/types.h"

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator value_type() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr constant bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_cv {
  typedef T type;
};
template <class T>
struct remove_cv<const T> {
  typedef T type;
};
template <class T>
struct remove_cv<volatile T> {
  typedef T type;
};
template <class T>
struct remove_cv<const volatile T> {
  typedef T type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_pointer {
  typedef T type;
};
template <class T>
struct remove_pointer<T*> {
  typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <class T>
struct remove_addrspace {
  typedef T type;
};
#ifdef MSL_LINT
template <class T>
struct remove_addrspace<T __attribute__((address_space(1)))> {
  typedef T type;
};
template <class T>
struct remove_addrspace<T __attribute__((address_space(2)))> {
  typedef T type;
};
template <class T>
struct remove_addrspace<T __attribute__((address_space(3)))> {
  typedef T type;
};
#endif
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
// lvalue of possibly address-space-qualified, cv-qualified type -> plain value type
template <class T>
using msl_plain_t = remove_cv_t<remove_addrspace_t<remove_cv_t<remove_reference_t<T>>>>;
template <class From, class To>
struct is_convertible : bool_constant<__is_convertible_to(From, To)> {};
template <class From, class To>
constexpr constant bool is_convertible_v = is_convertible<From, To>::value;
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr constant bool is_integral_v = is_integral<T>::value;
template <class T>
struct is_floating_point
    : bool_constant<is_same<T, float>::value || is_same<T, half>::value || is_same<T, bfloat>::value> {};
template <class T>
constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_signed : bool_constant<is_floating_point<T>::value || __is_signed(T)> {};
template <class T>
constexpr constant bool is_signed_v = is_signed<T>::value;
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
constexpr constant bool is_unsigned_v = is_unsigned<T>::value;
template <class... B>
struct _disjunction : false_type {};
template <class B1, class... Bn>
struct _disjunction<B1, Bn...> : conditional_t<bool(B1::value), B1, _disjunction<Bn...>> {};

template <class T>
struct msl_vec_info {
  static constexpr int n = 0;
  typedef T elem;
};
template <class T, int N>
struct msl_vec_info<vec<T, N>> {
  static constexpr int n = N;
  typedef T elem;
};
}  // namespace metal
