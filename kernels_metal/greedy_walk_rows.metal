// The largest logit of each part of each row, and the lowest id that has it.
//
// logits [S, V] of any float. Out: best [S, parts] of float, id [S, parts] of int32.
// Limits: S V below 2^31; threadgroups of 256. A part without a logit above -inf has id 2^31 - 1.
// Grid: (256 * parts, S, 1); part p has the ids p * SPAN .. + SPAN - 1, and only the last may be short.
  threadgroup float group_best[8];
  threadgroup int group_id[8];

  const int V = logits_shape[1];
  const int part = threadgroup_position_in_grid.x;
  const int parts = threadgroups_per_grid.x;
  const int row = threadgroup_position_in_grid.y;
  const int from = part * SPAN;
  const int to = min(from + SPAN, V);

  float top = Limits<float>::min;
  int top_id = 2147483647;
  // ids rise within a thread, so a tie never replaces
  for (int i = from + int(thread_index_in_threadgroup); i < to; i += 256) {
    const float value = float(logits[row * V + i]);
    if (value > top) {
      top = value;
      top_id = i;
    }
  }
  const float simd_top = simd_max(top);
  const int simd_id = simd_min(top == simd_top ? top_id : 2147483647);
  if (thread_index_in_simdgroup == 0) {
    group_best[simdgroup_index_in_threadgroup] = simd_top;
    group_id[simdgroup_index_in_threadgroup] = simd_id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index_in_threadgroup == 0) {
    for (int g = 1; g < 8; g++) {
      if (group_best[g] > group_best[0] || (group_best[g] == group_best[0] && group_id[g] < group_id[0])) {
        group_best[0] = group_best[g];
        group_id[0] = group_id[g];
      }
    }
    best[row * parts + part] = group_best[0];
    id[row * parts + part] = group_id[0];
  }
