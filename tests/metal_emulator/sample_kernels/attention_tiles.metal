// Attention of one draft block (L query tokens, GQA) over [context cache | the block's own K/V].
// Split-K in two passes. Bidirectional inside the block; optional sliding window over the context.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

template <typename T, int D>
inline void load_kv_tile(threadgroup T* dst, const device T* ctx, const device T* blk,
                         int key0, int nkeys, int ctx_len, int total, int lid, int nthreads) {
  for (int e = lid; e < nkeys * D; e += nthreads) {
    int j = key0 + e / D;
    int d = e % D;
    T v = T(0);
    if (j < ctx_len) {
      v = ctx[j * D + d];
    } else if (j < total) {
      v = blk[(j - ctx_len) * D + d];
    }
    dst[e] = v;
  }
}

// may query `qi` (0..L-1 in the block) see key `j` (context keys first, then the block)?
inline bool visible(int j, int qi, int ctx_len, int total, int window) {
  if (j >= total) {
    return false;
  }
  return j >= ctx_len || window <= 0 || (ctx_len + qi) - j < window;
}

