  // Block attention, first pass, matrix form: eight query rows a SIMD-group on 8x8 matrix units.
  // q [1, G*Hk, S, D] attends over context_k/v [1, Hk, cap, D] (params[0] rows valid) and block_k/v [1, Hk, S, D],
  // all with any strides; rows are four-element aligned. params = {context length, window or 0, S}.
  // scale is the softmax scale times log2(e). o_part [Hk*G*S, splits, D], stats [Hk*G*S, splits, 2] = (max, sum).
  // Template: T float/half/bfloat; D multiple of 16, <= 256; G query heads a kv head; BK keys a tile, multiple of 8;
  // QF query fragments in registers, a divisor of D / 8; MODE of sight. S <= 32.
  // Grid: (32 * fragments, Hk, splits), one threadgroup a (row group, kv head, split).
  // Threadgroup memory: 2 * BK * (D * sizeof(T) + 16) bytes. Math mode: safe.
  // Registers (32 bits) of a thread, by estimate: D / 4 + (QF + 1) * sizeof(T) / 2 + BK / 4 + 26.
  constexpr int LD = D + 16 / int(sizeof(T));  // padded so that the rows of a tile start in different banks
  constexpr int ND = D / 8;
  constexpr int NK = BK / 8;
  threadgroup T k_tile[BK * LD];
  threadgroup T v_tile[BK * LD];

  const int context = params[0];
  const int window = params[1];
  const int S = params[2];
  const int total = context + S;
  const int rows = G * S;
  const int kv_head = threadgroup_position_in_grid.y;
  const int split = threadgroup_position_in_grid.z;
  const int splits = threadgroups_per_grid.z;
  const int lane = thread_index_in_simdgroup;

  // where this lane's two elements of an 8x8 fragment stand, as MLX's own matrix kernels assume
  const int quad = lane / 4;
  const int fragment_row = (quad & 4) + (lane / 2) % 4;
  const int fragment_column = (quad & 2) * 2 + (lane % 2) * 2;

  const int fragment = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
  const int row = fragment * 8 + fragment_row;  // of the G*S rows that share this kv head
  const bool real = row < rows;
  const int block_row = real ? row % S : 0;
  const uint mask = MODE == ANCESTORS ? ancestors[block_row] : 0u;
  const Sight sight = sight_of(MODE, block_row, mask, context, window);

  const int head = kv_head * G + (real ? row / S : 0);
  const device T* q_row = q + ulong(head) * q_strides[1] + ulong(block_row) * q_strides[2];
  const int q_step = int(q_strides[3]);
  simdgroup_matrix<T, 8, 8> qf[QF];
  if (QF == ND) {
    load_queries(qf, q_row, fragment_column, q_step, real);
  }
  simdgroup_matrix<float, 8, 8> of[ND];
  UNROLL
  for (int i = 0; i < ND; i++) {
    of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  float best = Limits<float>::finite_min;
  float sum = 0;

  const device T* ck = context_k + ulong(kv_head) * context_k_strides[1];
  const device T* cv = context_v + ulong(kv_head) * context_v_strides[1];
  const device T* bk = block_k + ulong(kv_head) * block_k_strides[1];
  const device T* bv = block_v + ulong(kv_head) * block_v_strides[1];

  const int origin = window > 0 ? clamp(context - window + 1, 0, context) : 0;  // no row sees keys before it
  const int tiles = (total - origin + BK - 1) / BK;
  const int share = (tiles + splits - 1) / splits;
  const int last = min(tiles, (split + 1) * share);
  for (int t = split * share; t < last; t++) {
    const int key0 = origin + t * BK;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = thread_index_in_threadgroup; e < BK * D / 4; e += threads_per_threadgroup.x) {
      const int j = e / (D / 4);
      const int d = e % (D / 4) * 4;
      const int key = key0 + j;
      vec<T, 4> k = T(0);
      vec<T, 4> v = T(0);
      if (key < context) {
        k = four(ck + ulong(key) * context_k_strides[2], d, int(context_k_strides[3]));
        v = four(cv + ulong(key) * context_v_strides[2], d, int(context_v_strides[3]));
      } else if (key < total) {
        k = four(bk + ulong(key - context) * block_k_strides[2], d, int(block_k_strides[3]));
        v = four(bv + ulong(key - context) * block_v_strides[2], d, int(block_v_strides[3]));
      }
      *reinterpret_cast<threadgroup vec<T, 4>*>(k_tile + j * LD + d) = k;
      *reinterpret_cast<threadgroup vec<T, 4>*>(v_tile + j * LD + d) = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_matrix<float, 8, 8> sf[NK];
    UNROLL
    for (int n = 0; n < NK; n++) {
      sf[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    // Where registers cannot hold the queries beside the output, every tile reads them again, from a cache.
    // Unrolled, the same loads in all tiles would be moved out of the loop over tiles, and held after all.
    STAYS_A_LOOP
    for (int i0 = 0; i0 < ND; i0 += QF) {
      if (QF < ND) {
        load_queries(qf, q_row, i0 * 8 + fragment_column, q_step, real);
      }
      UNROLL
      for (int i = 0; i < QF; i++) {
        UNROLL
        for (int n = 0; n < NK; n++) {
          simdgroup_matrix<T, 8, 8> kf;
          simdgroup_load(kf, k_tile + n * 8 * LD + (i0 + i) * 8, LD, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(sf[n], qf[i], kf, sf[n]);
        }
      }
    }

    float score[NK][2];
    float tile_best = Limits<float>::finite_min;
    UNROLL
    for (int n = 0; n < NK; n++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        const bool seen = sees(sight, key0 + n * 8 + fragment_column + e, context, total);
        score[n][e] = seen ? sf[n].thread_elements()[e] * scale : Limits<float>::finite_min;
        tile_best = max(tile_best, score[n][e]);
      }
    }
    // a fragment row lies in four lanes, which differ in bits 0 and 3
    tile_best = max(tile_best, simd_shuffle_xor(tile_best, ushort(1)));
    tile_best = max(tile_best, simd_shuffle_xor(tile_best, ushort(8)));
    const float new_best = max(best, tile_best);
    const float factor = fast::exp2(best - new_best);
    best = new_best;

    float tile_sum = 0;
    simdgroup_matrix<T, 8, 8> pf[NK];
    UNROLL
    for (int n = 0; n < NK; n++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        // where nothing is seen yet, best is finite_min too: the weight must be 0, not exp2(0)
        const float p = score[n][e] > Limits<float>::finite_min ? fast::exp2(score[n][e] - best) : 0.0f;
        tile_sum += p;
        pf[n].thread_elements()[e] = T(p);
      }
    }
    tile_sum += simd_shuffle_xor(tile_sum, ushort(1));
    tile_sum += simd_shuffle_xor(tile_sum, ushort(8));
    sum = sum * factor + tile_sum;

    UNROLL
    for (int i = 0; i < ND; i++) {
      of[i].thread_elements()[0] *= factor;
      of[i].thread_elements()[1] *= factor;
      UNROLL
      for (int n = 0; n < NK; n++) {
        simdgroup_matrix<T, 8, 8> vf;
        simdgroup_load(vf, v_tile + n * 8 * LD + i * 8, LD);
        simdgroup_multiply_accumulate(of[i], pf[n], vf, of[i]);
      }
    }
  }

  if (real) {
    const int out = (kv_head * rows + row) * splits + split;
    const float share_of_one = sum > 0 ? 1.0f / sum : 0.0f;
    UNROLL
    for (int i = 0; i < ND; i++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        o_part[out * D + i * 8 + fragment_column + e] = T(of[i].thread_elements()[e] * share_of_one);
      }
    }
    if (fragment_column == 0) {
      stats[out * 2] = best;
      stats[out * 2 + 1] = sum;
    }
  }
