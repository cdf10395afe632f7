// The token of each row and how many proposed tokens agree with the rows before them.
//
// best [S, parts] of float and id [S, parts] of int32 from greedy_walk_rows.metal, proposal [S - 1] of int32.
// Out: walk [S + 1] of int32 = (accepted, token of row 0, ..., token of row S - 1).
// Limits: S 2..32. Grid: (32 S, 1, 1) in one threadgroup, one SIMD-group a row.
  threadgroup int token[32];

  const int S = id_shape[0];
  const int parts = id_shape[1];
  const int row = simdgroup_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  float top = Limits<float>::min;
  int top_id = 2147483647;
  for (int p = lane; p < parts; p += 32) {
    const float value = best[row * parts + p];
    if (value > top) {  // ids rise with p, so a tie never replaces
      top = value;
      top_id = id[row * parts + p];
    }
  }
  const float row_top = simd_max(top);
  const int row_id = simd_min(top == row_top ? top_id : 2147483647);
  if (lane == 0) {
    token[row] = row_id == 2147483647 ? 0 : row_id;  // nothing above -inf: all tie, or all are NaN
    walk[1 + row] = token[row];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row == 0 && lane == 0) {
    int accepted = 0;
    while (accepted < S - 1 && token[accepted] == proposal[accepted]) {
      accepted++;
    }
    walk[0] = accepted;
  }
