// y[r] = x[r] W[expert[r]]^T: rows that stand together and go to the same expert share its weights.
//
// x [R, K] of T, experts [R] (sorted, or the sharing is lost; the values must be below E),
// w [E, N, K * BITS / 32] of uint32, scales and biases [E, N, K / GS] of ST, y [R, N] of OT.
// Limits: those of rows_qmm.metal, but any R; a run of more than 8 MT rows reads the weights once for each 8 MT.
// Grid: (32 SK SN * ceil(N / (8 NT SN)), 1, R); of the R threadgroups in z those that start a tile work.
  constexpr int WIDTH = 8 * NT * SN;
  threadgroup float partial[SK * MT * 8 * WIDTH];

  const int R = x_shape[0];
  const int K = x_shape[1];
  const int N = w_shape[1];
  const int row0 = threadgroup_position_in_grid.z;
  const uint expert = experts[row0];
  int run = 0;
  while (run < row0 && uint(experts[row0 - run - 1]) == expert) {
    run++;
  }
  if (run % (8 * MT) != 0) {
    return;
  }
  int rows = 1;
  while (rows < 8 * MT && row0 + rows < R && uint(experts[row0 + rows]) == expert) {
    rows++;
  }

  const int lane = thread_index_in_simdgroup;
  const int slice = int(simdgroup_index_in_threadgroup) % SK;
  const int strip = int(simdgroup_index_in_threadgroup) / SK;
  const int n0 = int(threadgroup_position_in_grid.x) * WIDTH;
  const ulong weight_row = ulong(expert) * ulong(N);

  simdgroup_matrix<float, 8, 8> sums[NT * MT];
  UNROLLED
  for (int i = 0; i < NT * MT; i++) {
    sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  accumulate<T, ST, GS, BITS, MT, NT, SK>(
      sums, x + row0 * K, w + weight_row * ulong(K / 32 * BITS), scales + weight_row * ulong(K / GS),
      biases + weight_row * ulong(K / GS), rows, N, K, n0 + strip * 8 * NT, slice, lane);
  lay_down<MT, NT>(partial + slice * MT * 8 * WIDTH + strip * 8 * NT, sums, WIDTH, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = thread_index_in_threadgroup; i < MT * 8 * WIDTH; i += 32 * SK * SN) {
    const int m = i / WIDTH;
    const int n = n0 + i % WIDTH;
    if (m < rows && n < N) {
      float total = partial[i];
      for (int s = 1; s < SK; s++) {
        total += partial[s * MT * 8 * WIDTH + i];
      }
      y[(row0 + m) * N + n] = OT(total);
    }
  }
