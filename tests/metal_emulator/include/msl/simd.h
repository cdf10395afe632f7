// metal_simdgroup: every operation is a meeting of the SIMD-group's lanes, resolved once for all of them.
//
// A lane leaves its operand in a struct on its own stack and hands the pointer to the scheduler; when all lanes have
// arrived, `resolve` sees 32 pointers (null for absent lanes) and the mask of the lanes that take part.
#pragma once
#include "msl/math.h"

extern "C" {
typedef void (*msl_resolve)(void** operands, uint mask, uint first_lane);
__attribute__((convergent, nomerge)) void emu_simd(void* operand, msl_resolve resolve, const char* what);
void emu_fail(const char* message);
uint emu_lane();
}

namespace metal {
template <class T>
struct msl_operand {
  T in;
  T out;
  uint source;
};
template <class T>
using msl_lanes = msl_operand<T>**;
MSL_UNCHECKED inline bool msl_takes_part(uint mask, int lane) { return (mask >> lane) & 1; }

template <class T>
struct msl_sum {
  static MSL_UNCHECKED T of(T a, T b) { return (T)(a + b); }
  static constexpr T empty = (T)0;
};
template <class T>
struct msl_product {
  static MSL_UNCHECKED T of(T a, T b) { return (T)(a * b); }
  static constexpr T empty = (T)1;
};
template <class T>
struct msl_min {
  static MSL_UNCHECKED T of(T a, T b) { return min(a, b); }
};
template <class T>
struct msl_max {
  static MSL_UNCHECKED T of(T a, T b) { return max(a, b); }
};
template <class T>
struct msl_and {
  static MSL_UNCHECKED T of(T a, T b) { return (T)(a & b); }
};
template <class T>
struct msl_or {
  static MSL_UNCHECKED T of(T a, T b) { return (T)(a | b); }
};
template <class T>
struct msl_xor {
  static MSL_UNCHECKED T of(T a, T b) { return (T)(a ^ b); }
};

// A butterfly tree, so that rounding is that of hardware and not of a left-to-right sum.
template <class T, class Op>
MSL_UNCHECKED void msl_reduce(void** operands, uint mask, uint) {
  msl_lanes<T> lanes = (msl_lanes<T>)operands;
  T value[32];
  bool have[32];
  for (int i = 0; i < 32; ++i) {
    have[i] = msl_takes_part(mask, i);
    if (have[i])
      value[i] = lanes[i]->in;
  }
  for (int width = 1; width < 32; width *= 2) {
    for (int i = 0; i < 32; i += 2 * width) {
      if (have[i] && have[i + width]) {
        value[i] = Op::of(value[i], value[i + width]);
      } else if (have[i + width]) {
        value[i] = value[i + width];
        have[i] = true;
      }
    }
  }
  for (int i = 0; i < 32; ++i) {
    if (msl_takes_part(mask, i)) {
      lanes[i]->out = value[0];
    }
  }
}

template <class T, class Op, bool Inclusive>
MSL_UNCHECKED void msl_prefix(void** operands, uint mask, uint) {
  msl_lanes<T> lanes = (msl_lanes<T>)operands;
  T total = Op::empty;
  for (int i = 0; i < 32; ++i) {
    if (!msl_takes_part(mask, i)) {
      continue;
    }
    T before = total;
    total = Op::of(total, lanes[i]->in);
    lanes[i]->out = Inclusive ? total : before;
  }
}

// Shuffles up or down past the end are unspecified in Metal; a lane then gets its own value back.
constexpr constant uint msl_own_value = 0xffffffffu;

template <class T>
MSL_UNCHECKED void msl_gather(void** operands, uint mask, uint) {
  msl_lanes<T> lanes = (msl_lanes<T>)operands;
  for (int i = 0; i < 32; ++i) {
    if (!msl_takes_part(mask, i)) {
      continue;
    }
    uint source = lanes[i]->source;
    if (source == msl_own_value) {
      lanes[i]->out = lanes[i]->in;
      continue;
    }
    if (source >= 32) {
      emu_fail("shuffle from a lane index >= 32");
      return;
    }
    if (!msl_takes_part(mask, source)) {
      emu_fail("shuffle from an inactive lane (its value is undefined)");
      return;
    }
    lanes[i]->out = lanes[source]->in;
  }
}

template <class T>
MSL_UNCHECKED void msl_from_first(void** operands, uint mask, uint first_lane) {
  msl_lanes<T> lanes = (msl_lanes<T>)operands;
  for (int i = 0; i < 32; ++i) {
    if (msl_takes_part(mask, i)) {
      lanes[i]->out = lanes[first_lane]->in;
    }
  }
}

MSL_UNCHECKED inline void msl_ballot(void** operands, uint mask, uint) {
  msl_lanes<ulong> lanes = (msl_lanes<ulong>)operands;
  uint votes = 0;
  for (int i = 0; i < 32; ++i) {
    if (msl_takes_part(mask, i) && lanes[i]->in) {
      votes |= 1u << i;
    }
  }
  for (int i = 0; i < 32; ++i) {
    if (msl_takes_part(mask, i)) {
      lanes[i]->out = votes;
      lanes[i]->source = mask;
    }
  }
}

template <class T>
MSL_MEETING T msl_meet(T x, uint source, msl_resolve resolve, const char* what) {
  msl_operand<T> operand;
  operand.in = x;
  operand.source = source;
  emu_simd(&operand, resolve, what);
  return operand.out;
}

#define MSL_REDUCTION(name, Op)                                  \
  template <class T>                                             \
  MSL_MEETING T simd_##name(T x) {                               \
    return msl_meet(x, 0, &msl_reduce<T, Op<T>>, "simd_" #name); \
  }
MSL_REDUCTION(sum, msl_sum)
MSL_REDUCTION(product, msl_product)
MSL_REDUCTION(min, msl_min)
MSL_REDUCTION(max, msl_max)
MSL_REDUCTION(and, msl_and)
MSL_REDUCTION(or, msl_or)
MSL_REDUCTION(xor, msl_xor)
#undef MSL_REDUCTION

#define MSL_PREFIX(name, Op, inclusive)                                            \
  template <class T>                                                               \
  MSL_MEETING T simd_prefix_##name(T x) {                                          \
    return msl_meet(x, 0, &msl_prefix<T, Op<T>, inclusive>, "simd_prefix_" #name); \
  }
MSL_PREFIX(inclusive_sum, msl_sum, true)
MSL_PREFIX(exclusive_sum, msl_sum, false)
MSL_PREFIX(inclusive_product, msl_product, true)
MSL_PREFIX(exclusive_product, msl_product, false)
#undef MSL_PREFIX

#define MSL_SHUFFLE(name, source_lane)                      \
  template <class T>                                        \
  MSL_MEETING T name(T x, ushort k) {                       \
    const uint lane = emu_lane();                           \
    (void)lane;                                             \
    return msl_meet(x, source_lane, &msl_gather<T>, #name); \
  }
MSL_SHUFFLE(simd_shuffle, (uint)k)
MSL_SHUFFLE(simd_broadcast, (uint)k)
MSL_SHUFFLE(simd_shuffle_xor, lane ^ (uint)k)
MSL_SHUFFLE(simd_shuffle_up, lane >= k ? lane - k : msl_own_value)
MSL_SHUFFLE(simd_shuffle_down, lane + k < 32 ? lane + k : msl_own_value)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane + 32 - (k & 31)) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + k) & 31)
MSL_SHUFFLE(quad_shuffle, (lane & ~3u) | (k & 3))
MSL_SHUFFLE(quad_broadcast, (lane & ~3u) | (k & 3))
MSL_SHUFFLE(quad_shuffle_xor, (lane & ~3u) | ((lane ^ k) & 3))
MSL_SHUFFLE(quad_shuffle_up, (lane & 3) >= k ? lane - k : msl_own_value)
MSL_SHUFFLE(quad_shuffle_down, (lane & 3) + k < 4 ? lane + k : msl_own_value)
#undef MSL_SHUFFLE

template <class T>
MSL_MEETING T simd_broadcast_first(T x) {
  return msl_meet(x, 0, &msl_from_first<T>, "simd_broadcast_first");
}
template <class T>
MSL_MEETING T quad_sum(T x) {
  x = (T)(x + quad_shuffle_xor(x, (ushort)1));
  return (T)(x + quad_shuffle_xor(x, (ushort)2));
}
template <class T>
MSL_MEETING T quad_max(T x) {
  x = max(x, quad_shuffle_xor(x, (ushort)1));
  return max(x, quad_shuffle_xor(x, (ushort)2));
}
template <class T>
MSL_MEETING T quad_min(T x) {
  x = min(x, quad_shuffle_xor(x, (ushort)1));
  return min(x, quad_shuffle_xor(x, (ushort)2));
}
template <class T>
MSL_MEETING T simd_shuffle_and_fill_up(T x, T fill, ushort k) {
  T shifted = simd_shuffle_up(x, k);
  T filled = simd_shuffle(fill, (ushort)((32 + emu_lane() - k) & 31));
  return emu_lane() >= k ? shifted : filled;
}
template <class T>
MSL_MEETING T simd_shuffle_and_fill_down(T x, T fill, ushort k) {
  T shifted = simd_shuffle_down(x, k);
  T filled = simd_shuffle(fill, (ushort)((emu_lane() + k) & 31));
  return emu_lane() + k < 32 ? shifted : filled;
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  uint active;
  explicit constexpr simd_vote(vote_t v = 0, uint active_lanes = 0xffffffffu) : votes(v), active(active_lanes) {}
  explicit constexpr operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == active; }
  constexpr bool any() const { return votes != 0; }
};
MSL_MEETING simd_vote simd_ballot(bool vote) {
  msl_operand<ulong> operand;
  operand.in = vote;
  emu_simd(&operand, &msl_ballot, "simd_ballot");
  return simd_vote(operand.out, operand.source);
}
MSL_MEETING bool simd_any(bool vote) { return simd_ballot(vote).any(); }
MSL_MEETING bool simd_all(bool vote) { return simd_ballot(vote).all(); }
MSL_MEETING simd_vote simd_active_threads_mask() { return simd_ballot(true); }
MSL_MEETING bool simd_is_first() { return (uint)__builtin_ctzl(simd_ballot(true).votes) == emu_lane(); }
}  // namespace metal
