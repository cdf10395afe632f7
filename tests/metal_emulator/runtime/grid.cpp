// A launch from end to end: the grid cut into threadgroups, run one after another.
#include <link.h>

#include "arena.h"
#include "array.h"
#include "faults.h"
#include "order.h"
#include "shadow.h"
#include "threadgroup.h"

namespace {

struct Extent {
  u32 x, y, z;
  u32 count() const { return x * y * z; }
};
u32 least(u32 a, u32 b) { return a < b ? a : b; }
u32 pieces(u32 whole, u32 piece) { return (whole + piece - 1) / piece; }
void set3(u32 (&target)[3], u32 x, u32 y, u32 z) {
  target[0] = x;
  target[1] = y;
  target[2] = z;
}

ThreadContext context_of(u32 index, Extent group, Extent groups, Extent size, Extent here) {
  const u32(&grid)[3] = machine.launch->grid;
  const u32 x = index % here.x, y = index / here.x % here.y, z = index / here.x / here.y;
  ThreadContext t = {};
  set3(t.position_in_grid, group.x * size.x + x, group.y * size.y + y, group.z * size.z + z);
  set3(t.position_in_threadgroup, x, y, z);
  set3(t.threadgroup_position, group.x, group.y, group.z);
  set3(t.threadgroups_per_grid, groups.x, groups.y, groups.z);
  set3(t.threads_per_grid, grid[0], grid[1], grid[2]);
  set3(t.threads_per_threadgroup, here.x, here.y, here.z);
  set3(t.dispatch_threads_per_threadgroup, size.x, size.y, size.z);
  set3(t.grid_size, grid[0], grid[1], grid[2]);
  t.index_in_threadgroup = index;
  t.lane = index % SIMD_WIDTH;
  t.simdgroup = index / SIMD_WIDTH;
  t.simdgroups_per_threadgroup = pieces(here.count(), SIMD_WIDTH);
  t.dispatch_simdgroups_per_threadgroup = pieces(size.count(), SIMD_WIDTH);
  t.threads_per_simdgroup = t.execution_width = SIMD_WIDTH;
  t.index_in_quadgroup = index % 4;
  t.quadgroup = index / 4;
  t.quadgroups_per_threadgroup = pieces(here.count(), 4);
  t.dispatch_quadgroups_per_threadgroup = pieces(size.count(), 4);
  return t;
}

void run_threadgroup(u32 index, Extent groups, Extent size) {
  const u32(&grid)[3] = machine.launch->grid;
  const Extent group = {index % groups.x, index / groups.x % groups.y, index / groups.x / groups.y};
  const Extent here = {least(size.x, grid[0] - group.x * size.x), least(size.y, grid[1] - group.y * size.y),
                       least(size.z, grid[2] - group.z * size.z)};  // groups at the edge are partial
  const u32 threads = here.count();
  machine.threadgroup = index;
  shadow_enter_threadgroup();
  arena_enter_threadgroup();
  for (u32 i = 0; i < threads; ++i) { threadgroup_set(i, context_of(i, group, groups, size, here)); }
  threadgroup_run(threads);
}

int find_code(struct dl_phdr_info* info, size_t, void* entry) {
  u64 low = ~0ull, high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) {
      continue;
    }
    const u64 start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
    low = start < low ? start : low;
    high = end > high ? end : high;
  }
  if ((u64)entry < low || (u64)entry >= high) {
    return 0;
  }
  machine.code_low = low;
  machine.code_high = high;
  machine.code_base = info->dlpi_addr;
  return 1;
}

void run_grid() {
  const Launch& launch = *machine.launch;
  const Extent size = {least(launch.threadgroup[0], launch.grid[0]), least(launch.threadgroup[1], launch.grid[1]),
                       least(launch.threadgroup[2], launch.grid[2])};
  const Extent groups = {pieces(launch.grid[0], size.x), pieces(launch.grid[1], size.y),
                         pieces(launch.grid[2], size.z)};
  if (!threadgroup_prepare(size.count())) {
    return fail("no memory for the stacks of %u threads", size.count());
  }
  arena_begin();
  static Array<void*> pointers;
  pointers.clear();
  for (u32 i = 0; i < launch.buffer_count; ++i) { pointers.push(launch.buffers[i].data); }
  machine.buffers = pointers.begin();
  static Array<u32> order;
  fill_in_order(order, groups.count());
  shuffle(order);
  for (u32 i = 0; i < order.size() && !machine.stopped; ++i) { run_threadgroup(order[i], groups, size); }
}

}  // namespace

// ---- called by launch.py

EXPORTED void emu_launch(Launch* launch) {
  launch->finding_count = 0;
  launch->simd_operations = launch->barriers = launch->threadgroup_bytes = 0;
  launch->error[0] = 0;
  machine.launch = launch;
  machine.stopped = false;
  order_begin(launch->seed);
  dl_iterate_phdr(find_code, (void*)launch->entry);
  if (launch->check) {
    shadow_begin(*launch);
  }
  faults_catch();
  if (launch->grid[0] && launch->grid[1] && launch->grid[2]) {
    run_grid();
  }
  faults_release();
  machine.current = nullptr;
  if (launch->check && !machine.stopped) {
    shadow_report_unwritten();
  }
  machine.launch = nullptr;
}
EXPORTED u32 emu_struct_bytes(u32 which) {
  return which == 0 ? sizeof(Launch) : which == 1 ? sizeof(Buffer) : sizeof(Finding);
}
