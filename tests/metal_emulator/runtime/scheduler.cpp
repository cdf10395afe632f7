// Runs a launch: threadgroup after threadgroup, each thread a fiber, with Metal's meetings of SIMD-groups and
// threadgroups. A meeting that not all threads reach is an error.
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "array.h"
#include "faults.h"
#include "fiber.h"
#include "machine.h"
#include "shadow.h"

namespace {

constexpr u32 SIMD_WIDTH = 32;
constexpr u32 STACK_BYTES = 256 * 1024;
constexpr u32 THREADGROUP_MEMORY_LIMIT = 32 * 1024;  // of every Apple GPU
constexpr u32 RED_ZONE = 256;                        // between threadgroup variables, holds poison

// ---- the shuffled order

u64 random_state;
u32 random_below(u32 n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (u32)((random_state >> 33) % n);
}

void fill_in_order(Array<u32>& order, u32 n) {
  order.clear();
  for (u32 i = 0; i < n; ++i) { order.push(i); }
}
void shuffle(Array<u32>& order) {
  if (!machine.launch->seed) {
    return;
  }
  for (u32 i = order.size(); i > 1; --i) {
    const u32 j = random_below(i), kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}

// ---- threadgroup memory

struct Variable {
  u32 id, offset, bytes;
  const char* name;
};
char arena[256 * 1024] __attribute__((aligned(256)));
u32 arena_used;
Array<Variable> variables;

void* threadgroup_variable(u32 id, u32 bytes, u32 alignment, const char* name) {
  for (const Variable& variable : variables) {
    if (variable.id == id) {
      return arena + variable.offset;
    }
  }
  Launch& launch = *machine.launch;
  launch.threadgroup_bytes += bytes;
  if (launch.threadgroup_bytes > THREADGROUP_MEMORY_LIMIT) {
    fail("threadgroup memory: %llu bytes with %s exceed the limit of %u", (unsigned long long)launch.threadgroup_bytes,
         name, THREADGROUP_MEMORY_LIMIT);
    leave();
  }
  const u32 step = alignment < 16 ? 16 : alignment, offset = (arena_used + RED_ZONE + step - 1) / step * step;
  if (offset + bytes + RED_ZONE > sizeof arena) {
    fail("too many threadgroup variables for the emulator");
    leave();
  }
  arena_used = offset + bytes;
  variables.push({id, offset, bytes, name});
  if (launch.check) {
    shadow_add_variable(arena + offset, bytes, alignment < 4 ? alignment : 4, name);
  }
  return arena + offset;
}

void check_red_zones() {
  const unsigned char poison = machine.launch->poison & 0xff;
  for (const Variable& variable : variables) {
    const char* zone = arena + variable.offset + variable.bytes;
    for (u32 k = 0; k < RED_ZONE; ++k) {
      if ((unsigned char)zone[k] == poison) {
        continue;
      }
      return fail("write past the end of threadgroup variable %s (size %u bytes)", variable.name, variable.bytes);
    }
  }
}

// ---- one threadgroup

Array<Fiber> fibers;
Array<u32> lane_order, simdgroup_order;
void** buffer_pointers;

void fiber_main() {
  Fiber* fiber = machine.current;
  machine.launch->entry(buffer_pointers, &fiber->thread);
  fiber->state = DONE;
  fiber_switch(&fiber->context, machine.scheduler);
  __builtin_unreachable();
}

void wait_for_others(Fiber* fiber, FiberState state, void* site) {
  fiber->state = state;
  fiber->site = site;
  fiber_switch(&fiber->context, machine.scheduler);
}

// Runs the ready lanes of a SIMD-group until each waits or is done; false: none was ready.
bool run_lanes(u32 first, u32 lanes) {
  bool ran = false;
  fill_in_order(lane_order, lanes);
  shuffle(lane_order);
  for (u32 i = 0; i < lanes && !machine.stopped; ++i) {
    Fiber& fiber = fibers[first + lane_order[i]];
    if (fiber.state != READY) {
      continue;
    }
    ran = true;
    machine.current = &fiber;
    fiber_switch(&machine.scheduler, fiber.context);
  }
  return ran;
}

void fail_divergent(const Fiber& at, u32 first, u32 lanes, u32 mask) {
  u32 exited = 0, at_barrier = 0;
  for (u32 i = first; i < first + lanes; ++i) {
    exited += fibers[i].state == DONE;
    at_barrier += fibers[i].state == AT_THREADGROUP_BARRIER;
  }
  fail(
      "divergent SIMD-group: %s at %s reached by %d of %u lanes (mask %08x; %u exited, %u at a threadgroup_barrier); "
      "%s",
      at.state == AT_SIMD ? at.what : "simdgroup_barrier", CodeMark((u64)at.site).text, __builtin_popcount(mask), lanes,
      mask, exited, at_barrier, Place().text);
}

// Completes the operation that the waiting lanes of a SIMD-group have met at; false: no lane waits at one.
bool complete_simd_operation(u32 simdgroup, u32 first, u32 lanes) {
  Fiber* at = nullptr;
  u32 mask = 0, first_lane = 0;
  void* operands[SIMD_WIDTH] = {};
  for (u32 lane = 0; lane < lanes; ++lane) {
    Fiber& fiber = fibers[first + lane];
    if (fiber.state != AT_SIMD && fiber.state != AT_SIMD_BARRIER) {
      continue;
    }
    if (!at) {
      at = &fiber;
      first_lane = lane;
    }
    if (fiber.site == at->site) {
      mask |= 1u << lane;
      operands[lane] = fiber.operand;
    }
  }
  if (!at) {
    return false;
  }
  machine.current = at;
  if ((u32)__builtin_popcount(mask) != lanes) {
    fail_divergent(*at, first, lanes, mask);
    return false;
  }
  if (at->state == AT_SIMD) {
    machine.launch->simd_operations++;
    at->resolve(operands, mask, first_lane);
    if (machine.stopped) {
      return false;
    }
  } else {
    shadow_simdgroup_barrier(simdgroup, at->memory_flags);
  }
  for (u32 i = first; i < first + lanes; ++i) { fibers[i].state = READY; }
  return true;
}

// Completes the threadgroup_barrier that all threads have met at; false: the threadgroup is finished (or stopped).
bool complete_threadgroup_barrier(u32 threads) {
  u32 exited = 0;
  Fiber *at = nullptr, *elsewhere = nullptr;
  for (u32 i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.state == DONE) {
      exited++;
    } else if (!at) {
      at = &fiber;
    } else if (fiber.site != at->site) {
      elsewhere = &fiber;
    }
  }
  if (!at) {
    return false;
  }
  machine.current = at;
  if (elsewhere) {
    fail("divergent threadgroup_barrier: threads wait at different barriers, %s and %s; %s",
         CodeMark((u64)at->site).text, CodeMark((u64)elsewhere->site).text, Place().text);
    return false;
  }
  if (exited) {
    fail("threadgroup_barrier at %s reached by %u of %u threads (the others returned); %s",
         CodeMark((u64)at->site).text, threads - exited, threads, Place().text);
    return false;
  }
  shadow_threadgroup_barrier(at->memory_flags);
  machine.launch->barriers++;
  for (u32 i = 0; i < threads; ++i) { fibers[i].state = READY; }
  return true;
}

// Runs every SIMD-group up to the next threadgroup_barrier or its end.
void run_to_barrier(u32 threads) {
  bool any = true;
  while (any && !machine.stopped) {
    any = false;
    shuffle(simdgroup_order);
    for (u32 simdgroup : simdgroup_order) {
      const u32 first = simdgroup * SIMD_WIDTH, lanes = threads - first < SIMD_WIDTH ? threads - first : SIMD_WIDTH;
      for (bool more = true; more && !machine.stopped;) {
        any |= run_lanes(first, lanes);
        more = !machine.stopped && complete_simd_operation(simdgroup, first, lanes);
        any |= more;
        if (machine.launch->seed && random_below(4) == 0) {
          break;
        }  // let another SIMD-group go first
      }
    }
  }
}

// ---- the grid

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
  memset(arena, machine.launch->poison & 0xff, arena_used ? arena_used + RED_ZONE : sizeof arena);
  for (u32 i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.index = i;
    fiber.state = READY;
    fiber.thread = context_of(i, group, groups, size, here);
    fiber.context = fiber_prepare(machine.stacks + (i + 1) * machine.stack_stride, fiber_main);
  }
  fill_in_order(simdgroup_order, pieces(threads, SIMD_WIDTH));
  do { run_to_barrier(threads); } while (!machine.stopped && complete_threadgroup_barrier(threads));
  if (!machine.stopped) {
    check_red_zones();
  }
}

// Stacks for n fibers, each with an inaccessible page below it.
bool prepare_stacks(u32 n) {
  if (fibers.size() >= n) {
    return true;
  }
  const u64 page = sysconf(_SC_PAGESIZE);
  if (machine.stacks) {
    munmap(machine.stacks, machine.stacks_bytes);
  }
  machine.stack_stride = STACK_BYTES + page;
  machine.stacks_bytes = machine.stack_stride * n;
  void* mapped =
      mmap(nullptr, machine.stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  machine.stacks = mapped == MAP_FAILED ? nullptr : (char*)mapped;
  fibers.reset(machine.stacks ? n : 0);
  for (u32 i = 0; i < fibers.size(); ++i) { mprotect(machine.stacks + i * machine.stack_stride, page, PROT_NONE); }
  return machine.stacks != nullptr;
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
  if (!prepare_stacks(size.count())) {
    return fail("no memory for the stacks of %u threads", size.count());
  }
  arena_used = 0;
  variables.clear();
  static Array<void*> pointers;
  pointers.clear();
  for (u32 i = 0; i < launch.buffer_count; ++i) { pointers.push(launch.buffers[i].data); }
  buffer_pointers = pointers.begin();
  static Array<u32> order;
  fill_in_order(order, groups.count());
  shuffle(order);
  for (u32 i = 0; i < order.size() && !machine.stopped; ++i) { run_threadgroup(order[i], groups, size); }
}

}  // namespace

// ---- called by kernels

EXPORTED u32 emu_lane() { return machine.current->thread.lane; }
EXPORTED void emu_simd(void* operand, Resolve resolve, const char* what) {
  Fiber* fiber = machine.current;
  fiber->operand = operand;
  fiber->resolve = resolve;
  fiber->what = what;
  wait_for_others(fiber, AT_SIMD, __builtin_return_address(0));
}
EXPORTED void emu_barrier(int whole_threadgroup, u32 memory_flags) {
  Fiber* fiber = machine.current;
  fiber->memory_flags = memory_flags;
  wait_for_others(fiber, whole_threadgroup ? AT_THREADGROUP_BARRIER : AT_SIMD_BARRIER, __builtin_return_address(0));
}
// From the resolution of a SIMD operation: names the place of the operation.
EXPORTED void emu_fail(const char* message) {
  fail("%s at %s, %s", message, CodeMark((u64)machine.current->site).text, Place().text);
}
EXPORTED void* emu_threadgroup_variable(u32 id, u64 bytes, u64 alignment, const char* name) {
  return threadgroup_variable(id, bytes, alignment, name);
}

// ---- called by launch.py

EXPORTED void emu_launch(Launch* launch) {
  launch->finding_count = 0;
  launch->simd_operations = launch->barriers = launch->threadgroup_bytes = 0;
  launch->error[0] = 0;
  machine.launch = launch;
  machine.stopped = false;
  random_state = launch->seed * 0x9E3779B97F4A7C15ull + 0x1234567;
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
