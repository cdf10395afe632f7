// The gated delta rule run again over the first count[b] of T kept rows, and the convolution window there.
//
// For each row: S = decay S; d = beta (v - S key); S = S + d key^T. Inputs of row t stand as in the pass:
// key [B, T, Hk, DK], v [B, T, Hv, DV], decay [B, T, Hv] (with VECTOR [B, T, Hv, DK]) and beta [B, T, Hv] of any
// float, state [B, Hv, DV, DK] of float, conv [B, taps + T, C] of anything, count [B] of int32.
// Out: new_state as state, window [B, taps, C] as conv: its rows count .. count + taps - 1.
// Limits: DK a multiple of 32 up to 256; Hv a multiple of Hk; any DV, T and C; count outside 0..T is clamped.
// Four lanes share a value row, eight value rows a SIMD-group. A lane keeps DK / 4 elements of its row in
// registers. Sums are taken in 32 chains of DK / 32 neighbours, then pairwise, which is the order of a
// SIMD-group that gives each lane one chain: the state of the stock step kernels comes out.
// Grid: (32, ceil(DV / 8), B * Hv).
  constexpr int CHAIN = DK / 32;
  constexpr int PER = DK / 4;

  const int T = key_shape[1];
  const int Hk = key_shape[2];
  const int Hv = v_shape[2];
  const int lane = thread_index_in_simdgroup;
  const int part = lane % 4;
  const int bh = thread_position_in_grid.z;
  const int b = bh / Hv;
  const int hv = bh % Hv;
  const int hk = hv / (Hv / Hk);
  const int row = int(thread_position_in_grid.y) * 8 + lane / 4;
  const int dv = min(row, DV - 1);
  const int rows = clamp(int(count[b]), 0, T);

  const ulong own = (ulong(bh) * DV + dv) * DK + part * PER;
  float s[PER];
  for (int i = 0; i < PER; i++) {
    s[i] = state[own + i];
  }

  for (int t = 0; t < rows; t++) {
    const int key_at = ((b * T + t) * Hk + hk) * DK + part * PER;
    const int head_at = (b * T + t) * Hv + hv;
    const float common = float(decay[VECTOR ? 0 : head_at]);
    float chain[8];
    for (int c = 0; c < 8; c++) {
      chain[c] = 0;
      for (int i = c * CHAIN; i < (c + 1) * CHAIN; i++) {
        s[i] *= VECTOR ? float(decay[head_at * DK + part * PER + i]) : common;
        chain[c] += s[i] * float(key[key_at + i]);
      }
    }
    float recalled = ((chain[0] + chain[1]) + (chain[2] + chain[3])) + ((chain[4] + chain[5]) + (chain[6] + chain[7]));
    recalled += simd_shuffle_xor(recalled, ushort(1));
    recalled += simd_shuffle_xor(recalled, ushort(2));
    const float change = (float(v[head_at * DV + dv]) - recalled) * float(beta[head_at]);
    for (int i = 0; i < PER; i++) {
      s[i] += float(key[key_at + i]) * change;
    }
  }

  if (row < DV) {
    for (int i = 0; i < PER; i++) {
      new_state[own + i] = s[i];
    }
  }

  // all threads of a batch entry together copy its window
  const int C = conv_shape[2];
  const int taps = conv_shape[1] - T;
  const int threads = 32 * int(threads_per_grid.y) * Hv;
  const int id = (hv * int(threads_per_grid.y) + int(thread_position_in_grid.y)) * 32 + lane;
  for (int i = id; i < taps * C; i += threads) {
    window[b * taps * C + i] = conv[(b * (taps + T) + rows) * C + i];
  }
