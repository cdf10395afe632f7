#include "threadgroup.h"

#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "array.h"
#include "fiber.h"
#include "order.h"
#include "shadow.h"

namespace {

constexpr u32 STACK_BYTES = 256 * 1024;

Array<Fiber> fibers;
Array<u32> lane_order, simdgroup_order;

void fiber_main() {
  Fiber* fiber = machine.current;
  machine.launch->entry(machine.buffers, &fiber->thread);
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
  const char* what = at.state == AT_SIMD ? at.what : "simdgroup_barrier";
  fail("divergent SIMD-group: %s at %s reached by %d of %u lanes (%u exited, %u at a threadgroup_barrier); %s", what,
       CodeMark((u64)at.site).text, __builtin_popcount(mask), lanes, exited, at_barrier, Place().text);
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
          break;  // let another SIMD-group go first
        }
      }
    }
  }
}

}  // namespace

// Each stack has an inaccessible page below it.
bool threadgroup_prepare(u32 threads) {
  if (fibers.size() >= threads) {
    return true;
  }
  const u64 page = sysconf(_SC_PAGESIZE);
  if (machine.stacks) {
    munmap(machine.stacks, machine.stacks_bytes);
  }
  machine.stack_stride = STACK_BYTES + page;
  machine.stacks_bytes = machine.stack_stride * threads;
  void* mapped =
      mmap(nullptr, machine.stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  machine.stacks = mapped == MAP_FAILED ? nullptr : (char*)mapped;
  fibers.reset(machine.stacks ? threads : 0);
  for (u32 i = 0; i < fibers.size(); ++i) { mprotect(machine.stacks + i * machine.stack_stride, page, PROT_NONE); }
  return machine.stacks != nullptr;
}

void threadgroup_set(u32 i, const ThreadContext& thread) {
  Fiber& fiber = fibers[i];
  fiber.index = i;
  fiber.state = READY;
  fiber.thread = thread;
  fiber.context = fiber_prepare(machine.stacks + (i + 1) * machine.stack_stride, fiber_main);
}

void threadgroup_run(u32 threads) {
  fill_in_order(simdgroup_order, (threads + SIMD_WIDTH - 1) / SIMD_WIDTH);
  do { run_to_barrier(threads); } while (!machine.stopped && complete_threadgroup_barrier(threads));
  if (!machine.stopped) {
    arena_check_red_zones();
  }
}

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
