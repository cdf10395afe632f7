// What crosses the border of the runtime: one launch in, its findings out. Mirrored by ctypes structures in launch.py.
#pragma once
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64;

// One GPU thread's attributes; the same fields in the same order as msl_thread in include/msl/entry.h.
struct ThreadContext {
  u32 position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3], threadgroups_per_grid[3],
      threads_per_grid[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3], grid_origin[3],
      grid_size[3];
  u32 index_in_threadgroup, lane, simdgroup, simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup,
      threads_per_simdgroup, execution_width, index_in_quadgroup, quadgroup, quadgroups_per_threadgroup,
      dispatch_quadgroups_per_threadgroup;
};

enum BufferFlags : u32 { OUTPUT = 1, INITIALISED = 2 };
struct Buffer {
  void* data;
  u64 bytes;
  u32 item_bytes;
  u32 flags;
  const char* name;
};

enum FindingKind : u32 { OUT_OF_BOUNDS = 1, RACE, UNINITIALISED, INPUT_WRITTEN, UNDEFINED, NEVER_WRITTEN };
struct Finding {
  u32 kind;
  u32 times;
  u64 code;        // address of the instruction inside the kernel's shared object, 0: none
  u64 other_code;  // the earlier access of a race
  char text[360];
};

struct Launch {
  void (*entry)(void** buffers, const ThreadContext*);
  u32 grid[3], threadgroup[3];  // in threads
  Buffer* buffers;
  u32 buffer_count;
  u32 check;   // 1: the kernel was built with access hooks
  u64 seed;    // 0: everything in order; else lanes, SIMD-groups and threadgroups are shuffled
  u32 poison;  // the byte that fresh threadgroup memory holds
  u32 finding_room;
  Finding* findings;
  // results
  u32 finding_count;
  u32 reserved;
  u64 simd_operations, barriers, threadgroup_bytes;
  char error[1024];  // why the launch ended early, empty: it ran to its end
};
