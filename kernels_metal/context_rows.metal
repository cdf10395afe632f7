  // New K/V rows of a drafter layer, ready for its context buffer and its block: keys are normed (RMSNorm over the
  // head) and rotated (half-split RoPE) in fp32, both are laid out head by head. A SIMD-group takes one row of one head.
  // k, v [S, Hk*D] with any strides; norm_weight [D] of any float type (read under NORM only);
  // inverse_frequencies float [D/2]. Row s stands at position `offset` + s; amplitude multiplies the rotated keys.
  // k_out, v_out [Hk, S, D].
  // Template: T float/half/bfloat; D even, <= 256; NORM whether keys are normed.
  // Grid: (32, S, 2 * Hk), heads of k first, then those of v. Math mode: safe; angles grow large, so precise sin and cos.
  constexpr int HALF = D / 2;
  constexpr int PER = (HALF + 31) / 32;  // pairs a lane
  const int s = thread_position_in_grid.y;
  const int S = threads_per_grid.y;
  const int heads = threads_per_grid.z / 2;
  const int lane = thread_index_in_simdgroup;
  const bool rotates = int(thread_position_in_grid.z) < heads;
  const int head = int(thread_position_in_grid.z) % heads;
  const int out = (head * S + s) * D;

  if (!rotates) {
    const ulong row = ulong(s) * v_strides[0] + ulong(head * D) * v_strides[1];
    for (int d = lane; d < D; d += 32) {
      v_out[out + d] = v[row + ulong(d) * v_strides[1]];
    }
    return;
  }

  const ulong row = ulong(s) * k_strides[0] + ulong(head * D) * k_strides[1];
  float low[PER];   // element p of the first half
  float high[PER];  // its partner in the second
  float squares = 0;
  _Pragma("clang loop unroll(full)")
  for (int i = 0; i < PER; i++) {
    const int p = i * 32 + lane;
    low[i] = p < HALF ? float(k[row + ulong(p) * k_strides[1]]) : 0.0f;
    high[i] = p < HALF ? float(k[row + ulong(p + HALF) * k_strides[1]]) : 0.0f;
    squares += low[i] * low[i] + high[i] * high[i];
  }
  const float norm = NORM ? rsqrt(simd_sum(squares) / D + eps) : 1.0f;
  _Pragma("clang loop unroll(full)")
  for (int i = 0; i < PER; i++) {
    const int p = i * 32 + lane;
    if (p < HALF) {
      const float a = NORM ? low[i] * norm * float(norm_weight[p]) : low[i];
      const float b = NORM ? high[i] * norm * float(norm_weight[p + HALF]) : high[i];
      const float angle = float(offset + s) * inverse_frequencies[p];
      const float c = precise::cos(angle) * amplitude;
      const float r = precise::sin(angle) * amplitude;
      k_out[out + p] = T(a * c - b * r);
      k_out[out + p + HALF] = T(a * r + b * c);
    }
  }
