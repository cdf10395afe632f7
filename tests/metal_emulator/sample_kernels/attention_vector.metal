// q [Hq, L, D]; k_ctx, v_ctx [Hkv, CAP, D] of which params[0] rows are valid; k_blk, v_blk [Hkv, L, D]
// grid: (32 * NSG, Hkv, SPLITS); one threadgroup per (kv head, split); params = {ctx_len, window, cap}
constexpr int BK = 32;
constexpr int PER = D / 32;
threadgroup T k_tile[BK * D];
threadgroup T v_tile[BK * D];

const int ctx_len = params[0];
const int window = params[1];
const int cap = params[2];
const int total = ctx_len + L;
const int hkv = threadgroup_position_in_grid.y;
const int split = threadgroup_position_in_grid.z;
const int splits = threadgroups_per_grid.z;
const int lid = thread_index_in_threadgroup;
const int sg = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int ntiles = ceildiv(total, BK);
const int per_split = ceildiv(ntiles, splits);
const int tile0 = split * per_split;
const int tile1 = min(ntiles, tile0 + per_split);
constexpr int ROWS = G * L;              // query rows served by this kv head
constexpr int RPS = (ROWS + NSG - 1) / NSG;  // rows per SIMD-group

float m[RPS];
float l[RPS];
float o[RPS][PER];
for (int r = 0; r < RPS; r++) {
  m[r] = Limits<float>::finite_min;
  l[r] = 0;
  for (int i = 0; i < PER; i++) {
    o[r][i] = 0;
  }
}

for (int t = tile0; t < tile1; t++) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_kv_tile<T, D>(k_tile, k_ctx + hkv * cap * D, k_blk + hkv * L * D, t * BK, BK, ctx_len, total, lid, 32 * NSG);
  load_kv_tile<T, D>(v_tile, v_ctx + hkv * cap * D, v_blk + hkv * L * D, t * BK, BK, ctx_len, total, lid, 32 * NSG);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < RPS; r++) {
    const int row = sg * RPS + r;
    if (row >= ROWS) {
      break;
    }
    const device T* qr = q + (hkv * ROWS + row) * D;  // [Hq, L, D] with Hq = Hkv * G
    float s = 0;
    for (int d = 0; d < D; d++) {
      s += float(qr[d]) * float(k_tile[lane * D + d]);
    }
    s = visible(t * BK + lane, row % L, ctx_len, total, window) ? s * scale : Limits<float>::finite_min;
    const float new_m = max(m[r], simd_max(s));
    const float factor = metal::fast::exp(m[r] - new_m);
    // a tile without a visible key leaves new_m at finite_min: its probabilities must be 0, not 1
    const float p = s > Limits<float>::finite_min ? metal::fast::exp(s - new_m) : 0.0f;
    l[r] = l[r] * factor + simd_sum(p);
    for (int i = 0; i < PER; i++) {
      o[r][i] *= factor;
    }
    for (int j = 0; j < BK; j++) {
      const float pj = simd_shuffle(p, ushort(j));
      for (int i = 0; i < PER; i++) {
        o[r][i] += pj * float(v_tile[j * D + lane * PER + i]);
      }
    }
    m[r] = new_m;
  }
}

for (int r = 0; r < RPS; r++) {
  const int row = sg * RPS + r;
  if (row >= ROWS) {
    break;
  }
  const int out = (hkv * ROWS + row) * splits + split;
  for (int i = 0; i < PER; i++) {
    o_part[out * D + lane * PER + i] = o[r][i];
  }
  if (lane == 0) {
    m_part[out] = m[r];
    l_part[out] = l[r];
  }
}

