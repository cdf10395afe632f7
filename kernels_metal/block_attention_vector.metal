  // Block attention, first pass, vector form: a SIMD-group takes one key at a time, its lanes the head dimension.
  // For few query rows. q [1, G*Hk, S, D] attends over context_k/v [1, Hk, cap, D] (params[0] rows valid) and
  // block_k/v [1, Hk, S, D], all with any strides; rows are four-element aligned.
  // params = {context length, window or 0, S}. scale is the softmax scale times log2(e).
  // o_part [Hk*G*S, splits, D], stats [Hk*G*S, splits, 2] = (max, sum).
  // Template: T float/half/bfloat; D multiple of 4, <= 256; G query heads a kv head; RB rows a threadgroup, <= 8;
  // NSG SIMD-groups a threadgroup; MODE of sight. S <= 32.
  // Grid: (32 * NSG * ceil(G*S / RB), Hk, splits). Threadgroup memory: NSG * (4 * D + 8 * RB) bytes. Math mode: safe.
  constexpr int QUADS = D / 4;               // four elements each
  constexpr int CH = (QUADS + 31) / 32;      // quads a lane
  threadgroup float best_tile[NSG * RB];
  threadgroup float sum_tile[NSG * RB];
  threadgroup float4 o_tile[NSG * QUADS];

  const int context = params[0];
  const int window = params[1];
  const int S = params[2];
  const int total = context + S;
  const int rows = G * S;
  const int row0 = threadgroup_position_in_grid.x * RB;
  const int kv_head = threadgroup_position_in_grid.y;
  const int split = threadgroup_position_in_grid.z;
  const int splits = threadgroups_per_grid.z;
  const int group = simdgroup_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;

  float4 query[RB][CH];
  float4 o[RB][CH];
  float best[RB];
  float sum[RB];
  Sight sight[RB];
  UNROLL
  for (int r = 0; r < RB; r++) {
    const int row = min(row0 + r, rows - 1);  // rows past the last repeat it and are not written
    const int block_row = row % S;
    const uint mask = MODE == ANCESTORS ? ancestors[block_row] : 0u;
    sight[r] = sight_of(MODE, block_row, mask, context, window);
    best[r] = Limits<float>::finite_min;
    sum[r] = 0;
    const device T* q_row = q + ulong(kv_head * G + row / S) * q_strides[1] + ulong(block_row) * q_strides[2];
    UNROLL
    for (int c = 0; c < CH; c++) {
      const int d = (c * 32 + lane) * 4;
      query[r][c] = wide(q_row, d, int(q_strides[3]), D);
      o[r][c] = 0.0f;
    }
  }

  const device T* ck = context_k + ulong(kv_head) * context_k_strides[1];
  const device T* cv = context_v + ulong(kv_head) * context_v_strides[1];
  const device T* bk = block_k + ulong(kv_head) * block_k_strides[1];
  const device T* bv = block_v + ulong(kv_head) * block_v_strides[1];

  const int origin = window > 0 ? clamp(context - window + 1, 0, context) : 0;  // no row sees keys before it
  const int share = (total - origin + splits - 1) / splits;
  const int last = min(total, origin + (split + 1) * share);
  for (int key = origin + split * share + group; key < last; key += NSG) {
    const bool injected = key < context;
    const int at = injected ? key : key - context;
    const device T* k_row = injected ? ck + ulong(at) * context_k_strides[2] : bk + ulong(at) * block_k_strides[2];
    const device T* v_row = injected ? cv + ulong(at) * context_v_strides[2] : bv + ulong(at) * block_v_strides[2];
    const int k_step = int(injected ? context_k_strides[3] : block_k_strides[3]);
    const int v_step = int(injected ? context_v_strides[3] : block_v_strides[3]);
    float4 k[CH];
    float4 v[CH];
    UNROLL
    for (int c = 0; c < CH; c++) {
      const int d = (c * 32 + lane) * 4;
      k[c] = wide(k_row, d, k_step, D);
      v[c] = wide(v_row, d, v_step, D);
    }
    UNROLL
    for (int r = 0; r < RB; r++) {
      if (!sees(sight[r], key, context, total)) {  // the same in all lanes
        continue;
      }
      float part = 0;
      UNROLL
      for (int c = 0; c < CH; c++) {
        part += dot(query[r][c], k[c]);
      }
      const float score = simd_sum(part) * scale;
      const float new_best = max(best[r], score);
      const float factor = fast::exp2(best[r] - new_best);
      const float p = fast::exp2(score - new_best);
      best[r] = new_best;
      sum[r] = sum[r] * factor + p;
      UNROLL
      for (int c = 0; c < CH; c++) {
        o[r][c] = o[r][c] * factor + v[c] * p;
      }
    }
  }

  // the SIMD-groups saw different keys: join them, one row after the other
  if (lane == 0) {
    UNROLL
    for (int r = 0; r < RB; r++) {
      best_tile[group * RB + r] = best[r];
      sum_tile[group * RB + r] = sum[r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < RB; r++) {
    if (row0 + r >= rows) {
      break;
    }
    float row_best = Limits<float>::finite_min;
    for (int g = 0; g < NSG; g++) {
      row_best = max(row_best, best_tile[g * RB + r]);
    }
    float row_sum = 0;
    for (int g = 0; g < NSG; g++) {
      row_sum += sum_tile[g * RB + r] * fast::exp2(best_tile[g * RB + r] - row_best);
    }
    const float factor = row_sum > 0 ? fast::exp2(best[r] - row_best) / row_sum : 0.0f;
    UNROLL
    for (int c = 0; c < CH; c++) {
      const int at = c * 32 + lane;
      if (at < QUADS) {
        o_tile[group * QUADS + at] = o[r][c] * factor;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int out = (kv_head * rows + row0 + r) * splits + split;
    for (int at = thread_index_in_threadgroup; at < QUADS; at += 32 * NSG) {
      float4 joined = 0.0f;
      for (int g = 0; g < NSG; g++) {
        joined += o_tile[g * QUADS + at];
      }
      for (int e = 0; e < 4; e++) {
        o_part[out * D + at * 4 + e] = T(joined[e]);
      }
    }
    if (thread_index_in_threadgroup == 0) {
      stats[out * 2] = row_best;
      stats[out * 2 + 1] = row_sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
