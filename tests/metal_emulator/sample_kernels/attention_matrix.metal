// Same contract with 8x8 matrix units: one SIMD-group per 8 query rows, NSG = G * L / 8.
constexpr int ND = D / 8;
constexpr int NK = BK / 8;
threadgroup T k_tile[BK * D];
threadgroup T v_tile[BK * D];
threadgroup float s_tile[NSG][8 * BK];
threadgroup T p_tile[NSG][8 * BK];

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
constexpr int ROWS = G * L;
// lane -> (row, first column) of its two elements in an 8x8 fragment, as in MLX's steel/gemm/mma.h
const int fm = ((lane / 4) & 4) + (lane / 2) % 4;

simdgroup_matrix<T, 8, 8> qf[ND];
for (int i = 0; i < ND; i++) {
  simdgroup_load(qf[i], q + (hkv * ROWS + sg * 8) * D + i * 8, D);
}
simdgroup_matrix<float, 8, 8> of[ND];
for (int i = 0; i < ND; i++) {
  of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
// four lanes share a row in the softmax step: lane = 4 * row + part
const int srow = lane / 4;
const int part = lane % 4;
float m = Limits<float>::finite_min;
float l = 0;

for (int t = tile0; t < tile1; t++) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_kv_tile<T, D>(k_tile, k_ctx + hkv * cap * D, k_blk + hkv * L * D, t * BK, BK, ctx_len, total, lid, 32 * NSG);
  load_kv_tile<T, D>(v_tile, v_ctx + hkv * cap * D, v_blk + hkv * L * D, t * BK, BK, ctx_len, total, lid, 32 * NSG);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int kk = 0; kk < NK; kk++) {
    simdgroup_matrix<float, 8, 8> sf = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int i = 0; i < ND; i++) {
      simdgroup_matrix<T, 8, 8> kf;
      simdgroup_load(kf, k_tile + kk * 8 * D + i * 8, D, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sf, qf[i], kf, sf);
    }
    simdgroup_store(sf, &s_tile[sg][kk * 8], BK);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float s[BK / 4];
  float mx = Limits<float>::finite_min;
  for (int i = 0; i < BK / 4; i++) {
    const int c = part * (BK / 4) + i;
    s[i] = visible(t * BK + c, (sg * 8 + srow) % L, ctx_len, total, window) ? s_tile[sg][srow * BK + c] * scale : Limits<float>::finite_min;
    mx = max(mx, s[i]);
  }
  mx = max(mx, simd_shuffle_xor(mx, ushort(1)));
  mx = max(mx, simd_shuffle_xor(mx, ushort(2)));
  const float new_m = max(m, mx);
  const float factor = metal::fast::exp(m - new_m);
  float sum = 0;
  for (int i = 0; i < BK / 4; i++) {
    const float p = s[i] > Limits<float>::finite_min ? metal::fast::exp(s[i] - new_m) : 0.0f;
    sum += p;
    p_tile[sg][srow * BK + part * (BK / 4) + i] = T(p);
  }
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(2));
  l = l * factor + sum;
  m = new_m;
  simdgroup_barrier(mem_flags::mem_threadgroup);

  const float rescale = simd_shuffle(factor, ushort(4 * fm));
  for (int i = 0; i < ND; i++) {
    of[i].thread_elements() *= rescale;
  }
  for (int kk = 0; kk < NK; kk++) {
    simdgroup_matrix<T, 8, 8> pf;
    simdgroup_load(pf, &p_tile[sg][kk * 8], BK);
    for (int i = 0; i < ND; i++) {
      simdgroup_matrix<T, 8, 8> vf;
      simdgroup_load(vf, v_tile + kk * 8 * D + i * 8, D);
      simdgroup_multiply_accumulate(of[i], pf, vf, of[i]);
    }
  }
}

const int out0 = (hkv * ROWS + sg * 8) * splits + split;
for (int i = 0; i < ND; i++) {
  simdgroup_store(of[i], o_part + out0 * D + i * 8, splits * D);
}
if (part == 0) {
  m_part[out0 + srow * splits] = m;
  l_part[out0 + srow * splits] = l;
}

