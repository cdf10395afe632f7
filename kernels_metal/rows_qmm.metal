// y = x W^T for the few rows of a verify pass: each weight is read and unpacked once for all rows.
//
// x [M, K] of T, w [N, K * BITS / 32] of uint32, scales and biases [N, K / GS] of ST, y [M, N] of OT.
// Limits: M <= 8 MT <= 32; BITS 4 or 8; GS 32, 64 or 128; K a multiple of GS; any N; 32 SK SN threads.
// A threadgroup has SN strips of 8 NT weight rows and cuts k into SK slices, one SIMD-group for each pair.
// Grid: (32 SK SN * ceil(N / (8 NT SN)), 1, 1).
  constexpr int WIDTH = 8 * NT * SN;
  threadgroup float partial[SK * MT * 8 * WIDTH];

  const int M = x_shape[0];
  const int K = x_shape[1];
  const int N = w_shape[0];
  const int lane = thread_index_in_simdgroup;
  const int slice = int(simdgroup_index_in_threadgroup) % SK;
  const int strip = int(simdgroup_index_in_threadgroup) / SK;
  const int n0 = int(threadgroup_position_in_grid.x) * WIDTH;

  simdgroup_matrix<float, 8, 8> sums[NT * MT];
  UNROLLED
  for (int i = 0; i < NT * MT; i++) {
    sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  accumulate<T, ST, GS, BITS, MT, NT, SK>(
      sums, x, w, scales, biases, M, N, K, n0 + strip * 8 * NT, slice, lane);
  lay_down<MT, NT>(partial + slice * MT * 8 * WIDTH + strip * 8 * NT, sums, WIDTH, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = thread_index_in_threadgroup; i < MT * 8 * WIDTH; i += 32 * SK * SN) {
    const int m = i / WIDTH;
    const int n = n0 + i % WIDTH;
    if (m < M && n < N) {
      float total = partial[i];
      for (int s = 1; s < SK; s++) {
        total += partial[s * MT * 8 * WIDTH + i];
      }
      y[m * N + n] = OT(total);
    }
  }
