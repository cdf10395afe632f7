// Barriers and metal_atomic.
//
// Atomics need no lock: one OS thread runs all GPU threads. In check builds each announces itself to the race detector.
#pragma once
#include "msl/traits.h"

extern "C" {
__attribute__((convergent, nomerge)) void emu_barrier(int whole_threadgroup, uint memory_flags);
void emu_atomic_load(const void* address, uint bytes);
void emu_atomic_store(const void* address, uint bytes);
void emu_atomic_update(const void* address, uint bytes);
}

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
MSL_MEETING void threadgroup_barrier(mem_flags flags) { emu_barrier(1, (uint)flags); }
MSL_MEETING void simdgroup_barrier(mem_flags flags) { emu_barrier(0, (uint)flags); }

typedef enum memory_order { memory_order_relaxed = 0 } memory_order;
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
// A is an atomic<T> with its address space and qualifiers.
template <class A>
using msl_atomic_value = decltype(msl_plain_t<A>().value);

#ifdef MSL_CHECK
#define MSL_ANNOUNCE(kind, object) emu_atomic_##kind((const void*)(object), sizeof(*(object)))
#else
#define MSL_ANNOUNCE(kind, object) ((void)0)
#endif
template <class A>
MSL_UNCHECKED inline msl_atomic_value<A> msl_peek(A* object) {
  return object->value;
}
template <class A>
MSL_UNCHECKED inline void msl_poke(A* object, msl_atomic_value<A> x) {
  object->value = x;
}

template <class A>
METAL_FUNC msl_atomic_value<A> atomic_load_explicit(A* object, memory_order) {
  MSL_ANNOUNCE(load, object);
  return msl_peek(object);
}
template <class A>
METAL_FUNC void atomic_store_explicit(A* object, msl_atomic_value<A> x, memory_order) {
  MSL_ANNOUNCE(store, object);
  msl_poke(object, x);
}
#define MSL_ATOMIC_UPDATE(name, expression)                                                                 \
  template <class A>                                                                                        \
  METAL_FUNC msl_atomic_value<A> atomic_##name##_explicit(A* object, msl_atomic_value<A> y, memory_order) { \
    MSL_ANNOUNCE(update, object);                                                                           \
    msl_atomic_value<A> x = msl_peek(object);                                                               \
    msl_poke(object, (msl_atomic_value<A>)(expression));                                                    \
    return x;                                                                                               \
  }
MSL_ATOMIC_UPDATE(fetch_add, x + y)
MSL_ATOMIC_UPDATE(fetch_sub, x - y)
MSL_ATOMIC_UPDATE(fetch_and, x& y)
MSL_ATOMIC_UPDATE(fetch_or, x | y)
MSL_ATOMIC_UPDATE(fetch_xor, x ^ y)
MSL_ATOMIC_UPDATE(fetch_min, y < x ? y : x)
MSL_ATOMIC_UPDATE(fetch_max, x < y ? y : x)
MSL_ATOMIC_UPDATE(exchange, y)
#undef MSL_ATOMIC_UPDATE
template <class A>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(A* object, thread msl_atomic_value<A>* expected,
                                                      msl_atomic_value<A> wanted, memory_order, memory_order) {
  MSL_ANNOUNCE(update, object);
  msl_atomic_value<A> x = msl_peek(object);
  if (__builtin_memcmp(&x, expected, sizeof(x)) == 0) {
    msl_poke(object, wanted);
    return true;
  }
  *expected = x;
  return false;
}
#undef MSL_ANNOUNCE
}  // namespace metal
