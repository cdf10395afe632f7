// CPU-shim stand-in: one pointer_element for all address spaces (they collapse on the CPU).
#pragma once
#include <metal_stdlib>
namespace metal {
template <typename T>
struct is_empty : metal::bool_constant<__is_empty(T)> {};
template <typename T>
constexpr constant bool is_empty_v = is_empty<T>::value;
template <typename... Ts>
struct make_void {
  typedef void type;
};
template <typename... Ts>
using void_t = typename make_void<Ts...>::type;
template <class T>
struct is_static : metal::bool_constant<is_empty<remove_cv_t<T>>::value> {};
template <typename T>
struct pointer_element {};
template <typename T>
struct pointer_element<T*> {
  using type = remove_cv_t<remove_addrspace_t<remove_cv_t<T>>>;
};
template <typename T>
using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
