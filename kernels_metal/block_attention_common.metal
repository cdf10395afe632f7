// Shared by the block attention kernels: which keys a query row sees, and four elements at a time.
// Keys are numbered context first (0 .. context-1), then the rows of the block.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

// what is indexed by the loop stays in registers only when the loop is gone
#define UNROLL _Pragma("clang loop unroll(full)")
#define STAYS_A_LOOP _Pragma("clang loop unroll(disable)")

constant constexpr int FULL = 0;       // a row sees the whole block
constant constexpr int CAUSAL = 1;     // a row sees the block up to itself
constant constexpr int ANCESTORS = 2;  // a row sees the block rows of its bit mask, and itself

struct Sight {
  int first;  // first context key that the window leaves, at most `context`
  uint block; // bit j: block row j is seen
};

// mask is read in ANCESTORS mode only; there a row stands as deep as it has ancestors
inline Sight sight_of(int mode, int row, uint mask, int context, int window) {
  Sight s;
  s.block = 0xffffffffu;
  int depth = row;
  if (mode == CAUSAL) {
    s.block = 0xffffffffu >> (31 - row);
  } else if (mode == ANCESTORS) {
    s.block = mask | (1u << row);
    depth = int(popcount(s.block)) - 1;
  }
  s.first = window > 0 ? clamp(context + depth - window + 1, 0, context) : 0;
  return s;
}

inline bool sees(Sight s, int key, int context, int total) {
  if (key < context) {
    return key >= s.first;
  }
  return key < total && ((s.block >> (key - context)) & 1u) != 0;
}

// Elements d .. d+3 of a row whose elements lie `step` apart; rows start at multiples of four elements.
template <typename T>
inline vec<T, 4> four(const device T* row, int d, int step) {
  if (step == 1) {
    return *reinterpret_cast<const device vec<T, 4>*>(row + d);
  }
  return vec<T, 4>(row[d * step], row[(d + 1) * step], row[(d + 2) * step], row[(d + 3) * step]);
}

// The same widened to float, and zero from element `length` on.
template <typename T>
inline float4 wide(const device T* row, int d, int step, int length) {
  float4 r = 0.0f;
  if (d < length) {
    const vec<T, 4> x = four(row, d, step);
    r = float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
  }
  return r;
}

// A lane's two elements of each of N fragments, from element d of its query row on; zero where there is no row.
template <typename T, int N>
inline void load_queries(thread simdgroup_matrix<T, 8, 8> (&qf)[N], const device T* row, int d, int step, bool real) {
  UNROLL
  for (int i = 0; i < N; i++) {
    qf[i].thread_elements()[0] = real ? row[(d + i * 8) * step] : T(0);
    qf[i].thread_elements()[1] = real ? row[(d + i * 8 + 1) * step] : T(0);
  }
}
