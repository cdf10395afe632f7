  // Block attention, second pass: the splits of a query row become one, a SIMD-group a row.
  // o_part [rows, splits, D] holds each split's own normalised output, stats [rows, splits, 2] its (max, sum) in
  // units of log2; a split without a seen key has sum 0. out [rows, D].
  // Template: T float/half/bfloat; D any. splits >= 1. Grid: (32, rows, 1). Math mode: safe.
  constexpr int PER = (D + 31) / 32;
  const int row = thread_position_in_grid.y;
  const int lane = thread_index_in_simdgroup;

  float best = Limits<float>::finite_min;
  for (int s = 0; s < splits; s++) {
    best = max(best, stats[(row * splits + s) * 2]);
  }
  float o[PER];
  UNROLL
  for (int i = 0; i < PER; i++) {
    o[i] = 0;
  }
  float sum = 0;
  for (int s = 0; s < splits; s++) {
    const int part = row * splits + s;
    const float weight = stats[part * 2 + 1] * fast::exp2(stats[part * 2] - best);
    sum += weight;
    UNROLL
    for (int i = 0; i < PER; i++) {
      const int d = i * 32 + lane;
      if (d < D) {
        o[i] += weight * float(o_part[part * D + d]);
      }
    }
  }
  UNROLL
  for (int i = 0; i < PER; i++) {
    const int d = i * 32 + lane;
    if (d < D) {
      out[row * D + d] = T(o[i] / sum);
    }
  }
