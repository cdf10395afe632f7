// one SIMD-group per query row; o_part [rows, S, D]
constexpr int PER = D / 32;
const int row = threadgroup_position_in_grid.y;
const int lane = thread_index_in_simdgroup;
float mx = Limits<float>::finite_min;
for (int s = lane; s < S; s += 32) {
  mx = max(mx, m_part[row * S + s]);
}
mx = simd_max(mx);
float denom = 0;
for (int s = lane; s < S; s += 32) {
  denom += l_part[row * S + s] * metal::fast::exp(m_part[row * S + s] - mx);
}
denom = simd_sum(denom);
float o[PER] = {0};
for (int s = 0; s < S; s++) {
  const float w = metal::fast::exp(m_part[row * S + s] - mx);
  for (int i = 0; i < PER; i++) {
    o[i] += w * o_part[(row * S + s) * D + lane * PER + i];
  }
}
for (int i = 0; i < PER; i++) {
  out[row * D + lane * PER + i] = T(denom > 0 ? o[i] / denom : 0.0f);
}
