#include "shadow.h"

#include <string.h>

#include "array.h"
#include "machine.h"

namespace {

enum RegionKind { INPUT_BUFFER, OUTPUT_BUFFER, THREADGROUP_VARIABLE };

struct Write {
  u64 code;
  u32 threadgroup, thread, epoch, simd_epoch;
  bool any;
};

// All reads since the last write that a later write could race with. Within one epoch it is enough to know which
// SIMD-groups read and, for the group that read last, which lanes did in its latest SIMD epoch: as soon as two groups
// have read, a writer races with one of them whatever the lanes were.
struct Reads {
  u64 code;
  u32 threadgroup, thread, epoch, simd_epoch;
  u32 simdgroups, lanes;
  bool any, plain, by_other_threadgroups;
};

struct Cell {
  u32 generation;  // threadgroup variables: the threadgroup this state belongs to, plus one
  bool initialised;
  Write plain_write;
  Write atomic_write;  // since the last plain one
  Reads reads;
};

struct Region {
  u64 low, high;
  u32 granule;  // bytes a cell stands for
  RegionKind kind;
  const char* name;
  Cell* cells;
  u64 cell_count;
};

// Counts of the barriers passed that order one kind of memory.
struct Clock {
  u32 epoch, simd_epoch[32];
};

Array<Region> regions;
size_t last_region;  // where the previous access fell
Clock device_clock, threadgroup_clock;

Region& add_region(u64 low, u64 bytes, u32 granule, RegionKind kind, const char* name) {
  const u64 cells = kind == INPUT_BUFFER ? 0 : (bytes + granule - 1) / granule;
  return regions.push(
      Region{low, low + bytes, granule, kind, name, cells ? (Cell*)calloc(cells, sizeof(Cell)) : nullptr, cells});
}

bool contains(const Region& region, u64 address) { return address >= region.low && address < region.high; }

Region* find(u64 address) {
  if (last_region < regions.size() && contains(regions[last_region], address)) {
    return &regions[last_region];
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    if (contains(regions[i], address)) {
      last_region = i;
      return &regions[i];
    }
  }
  return nullptr;
}

const Region* nearest(u64 address) {
  const Region* best = nullptr;
  u64 least = ~0ull;
  for (const Region& region : regions) {
    const u64 distance = contains(region, address) ? 0
                         : address < region.low    ? region.low - address
                                                   : address - region.high;
    if (distance < least) {
      least = distance;
      best = &region;
    }
  }
  return best;
}

// The current fiber's coordinates in the order of events, for one kind of memory.
struct Now {
  u32 threadgroup, thread, simdgroup, lane_bit, epoch, simd_epoch;
  explicit Now(const Clock& clock)
      : threadgroup(machine.threadgroup),
        thread(machine.current->index),
        simdgroup(thread / 32),
        lane_bit(1u << (thread % 32)),
        epoch(clock.epoch),
        simd_epoch(clock.simd_epoch[simdgroup]) {}
};

bool ordered(const Write& write, const Now& now) {
  if (write.threadgroup != now.threadgroup) {
    return false;
  }
  if (write.thread == now.thread || write.epoch < now.epoch) {
    return true;
  }
  return write.thread / 32 == now.simdgroup && write.simd_epoch < now.simd_epoch;
}

bool ordered(const Reads& reads, const Now& now) {
  if (reads.by_other_threadgroups || reads.threadgroup != now.threadgroup) {
    return false;
  }
  if (reads.epoch < now.epoch) {
    return true;
  }
  if (reads.simdgroups != 1u << now.simdgroup) {
    return false;
  }
  return reads.simd_epoch < now.simd_epoch || reads.lanes == now.lane_bit;
}

void remember_read(Reads& reads, const Now& now, bool plain, u64 code) {
  const bool same_threadgroup = reads.any && reads.threadgroup == now.threadgroup;
  if (reads.any && !same_threadgroup) {
    reads.by_other_threadgroups = true;
  }
  if (!same_threadgroup || reads.epoch != now.epoch) {
    reads.simdgroups = 0;
  }
  if (reads.simdgroups != 1u << now.simdgroup || reads.simd_epoch != now.simd_epoch) {
    reads.lanes = 0;
  }
  reads.simdgroups |= 1u << now.simdgroup;
  reads.lanes |= now.lane_bit;
  reads.threadgroup = now.threadgroup;
  reads.thread = now.thread;
  reads.epoch = now.epoch;
  reads.simd_epoch = now.simd_epoch;
  reads.plain |= plain;
  reads.any = true;
  reads.code = code;
}

void report_after_write(const Region& region, u64 offset, bool writes, const Write& earlier, u32 threadgroup,
                        u64 code) {
  report(RACE, code, earlier.code, "data race on %s +%llu: %s by %s after unsynchronised write by thread %u%s",
         region.name, (unsigned long long)offset, writes ? "write" : "read", Place().text, earlier.thread,
         earlier.threadgroup != threadgroup ? " of another threadgroup" : "");
}

void report_after_read(const Region& region, u64 offset, const Reads& earlier, u32 threadgroup, u64 code) {
  report(RACE, code, earlier.code, "data race on %s +%llu: write by %s after unsynchronised read, last by thread %u%s",
         region.name, (unsigned long long)offset, Place().text, earlier.thread,
         earlier.threadgroup != threadgroup ? " of another threadgroup" : "");
}

void touch(Cell& cell, const Region& region, u64 offset, const Now& now, Access access, u64 code) {
  const bool reads = access == READ || access == ATOMIC_LOAD || access == ATOMIC_UPDATE;
  const bool writes = access == WRITE || access == ATOMIC_STORE || access == ATOMIC_UPDATE;
  const bool atomic = access != READ && access != WRITE;
  if (reads && !cell.initialised) {
    report(UNINITIALISED, code, 0, "read of uninitialised %s %s +%llu, %s",
           region.kind == THREADGROUP_VARIABLE ? "threadgroup memory" : "output", region.name,
           (unsigned long long)offset, Place().text);
    cell.initialised = true;
  }
  if (cell.plain_write.any && !ordered(cell.plain_write, now)) {
    report_after_write(region, offset, writes, cell.plain_write, now.threadgroup, code);
  } else if (!atomic && cell.atomic_write.any && !ordered(cell.atomic_write, now)) {
    report_after_write(region, offset, writes, cell.atomic_write, now.threadgroup, code);
  }
  if (!writes) {
    return remember_read(cell.reads, now, !atomic, code);
  }
  if (cell.reads.any && (!atomic || cell.reads.plain) && !ordered(cell.reads, now)) {
    report_after_read(region, offset, cell.reads, now.threadgroup, code);
  }
  const Write write{code, now.threadgroup, now.thread, now.epoch, now.simd_epoch, true};
  cell.initialised = true;
  if (atomic) {
    cell.atomic_write = write;
  } else {
    cell.plain_write = write;
    cell.atomic_write = Write{};
    cell.reads = Reads{};
  }
}

[[noreturn]] void out_of_bounds(u64 address, u32 bytes, Access access, u64 code) {
  const Region* region = nearest(address);
  const char* verb = access == READ || access == ATOMIC_LOAD ? "read" : "write";
  if (!region) {
    report(OUT_OF_BOUNDS, code, 0, "%s of memory that belongs to no buffer, %s", verb, Place().text);
  } else {
    report(OUT_OF_BOUNDS, code, 0, "out-of-bounds %s of %u bytes at %s %+lld (size %llu bytes), %s", verb, bytes,
           region->name, (long long)(address - region->low), (unsigned long long)(region->high - region->low),
           Place().text);
  }
  leave();
}

}  // namespace

void shadow_begin(const Launch& launch) {
  for (Region& region : regions) { free(region.cells); }
  regions.clear();
  for (u32 i = 0; i < launch.buffer_count; ++i) {
    const Buffer& buffer = launch.buffers[i];
    Region& region = add_region((u64)buffer.data, buffer.bytes, buffer.item_bytes,
                                buffer.flags & OUTPUT ? OUTPUT_BUFFER : INPUT_BUFFER, buffer.name);
    for (u64 c = 0; c < region.cell_count; ++c) { region.cells[c].initialised = buffer.flags & INITIALISED; }
  }
}

void shadow_add_variable(char* start, u32 bytes, u32 granule, const char* name) {
  add_region((u64)start, bytes, granule, THREADGROUP_VARIABLE, name);
}

void shadow_enter_threadgroup() { device_clock = threadgroup_clock = Clock{}; }

void shadow_threadgroup_barrier(u32 memory_flags) {
  if (memory_flags & DEVICE_MEMORY) {
    device_clock.epoch++;
  }
  if (memory_flags & THREADGROUP_MEMORY) {
    threadgroup_clock.epoch++;
  }
}

void shadow_simdgroup_barrier(u32 simdgroup, u32 memory_flags) {
  if (memory_flags & DEVICE_MEMORY) {
    device_clock.simd_epoch[simdgroup]++;
  }
  if (memory_flags & THREADGROUP_MEMORY) {
    threadgroup_clock.simd_epoch[simdgroup]++;
  }
}

void shadow_access(u64 address, u32 bytes, Access access, u64 code) {
  if (!machine.current || address - (u64)machine.stacks < machine.stacks_bytes) {
    return;
  }
  Region* region = find(address);
  if (!region && address >= machine.code_low && address < machine.code_high) {
    return;
  }  // the kernel's own constants
  if (!region || address + bytes > region->high) {
    out_of_bounds(address, bytes, access, code);
  }
  if (region->kind == INPUT_BUFFER) {
    if (access != READ && access != ATOMIC_LOAD) {
      report(INPUT_WRITTEN, code, 0, "write to input %s +%lld, %s", region->name, (long long)(address - region->low),
             Place().text);
      leave();
    }
    return;
  }
  const Now now(region->kind == THREADGROUP_VARIABLE ? threadgroup_clock : device_clock);
  const u64 first = (address - region->low) / region->granule,
            last = (address + bytes - 1 - region->low) / region->granule;
  for (u64 i = first; i <= last; ++i) {
    Cell& cell = region->cells[i];
    if (region->kind == THREADGROUP_VARIABLE && cell.generation != machine.threadgroup + 1) {
      cell = Cell{};
      cell.generation = machine.threadgroup + 1;
    }
    touch(cell, *region, i * region->granule, now, access, code);
  }
}

void shadow_report_unwritten() {
  for (const Region& region : regions) {
    if (region.kind != OUTPUT_BUFFER) {
      continue;
    }
    u64 missing = 0, first = 0;
    for (u64 i = region.cell_count; i-- > 0;) {
      if (!region.cells[i].initialised) {
        missing++;
        first = i;
      }
    }
    if (missing) {
      report(NEVER_WRITTEN, 0, 0, "output %s: %llu of %llu elements never written (first: element %llu)", region.name,
             (unsigned long long)missing, (unsigned long long)region.cell_count, (unsigned long long)first);
    }
  }
}
