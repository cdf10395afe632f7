// Where a kernel meets the scheduler: threadgroup variables and the thread's coordinates.
#pragma once
#include "msl/types.h"

extern "C" void* emu_threadgroup_variable(uint id, size_t bytes, size_t alignment, const char* name);

// The translation turns `threadgroup T a[N];` into a reference to one of these.
template <class T>
METAL_FUNC threadgroup T* msl_threadgroup_variable(uint id, const char* name) {
#ifdef MSL_LINT
  return (threadgroup T*)0;
#else
  return (T*)emu_threadgroup_variable(id, sizeof(T), alignof(T), name);
#endif
}

// One thread's attributes; the same fields in the same order as ThreadContext in runtime/launch.h.
struct msl_thread {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3],
      threadgroups_per_grid[3], threads_per_grid[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3],
      grid_origin[3], grid_size[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width,
      thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup,
      dispatch_quadgroups_per_threadgroup;
};
MSL_UNCHECKED inline uint3 msl_attribute(const uint (&v)[3]) { return uint3{v[0], v[1], v[2]}; }
MSL_UNCHECKED inline uint msl_attribute(const uint& v) { return v; }
