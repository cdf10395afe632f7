#include "arena.h"

#include <string.h>

#include "array.h"
#include "machine.h"
#include "shadow.h"

namespace {

constexpr u32 LIMIT = 32 * 1024;  // of every Apple GPU
constexpr u32 RED_ZONE = 256;     // bytes of poison around each variable

struct Variable {
  u64 offset, bytes;
  u32 id;
  const char* name;
};
char arena[256 * 1024] __attribute__((aligned(256)));
u64 used;
Array<Variable> variables;

}  // namespace

void arena_begin() {
  used = 0;
  variables.clear();
}

void arena_enter_threadgroup() { memset(arena, machine.launch->poison & 0xff, used ? used + RED_ZONE : sizeof arena); }

void arena_check_red_zones() {
  const unsigned char poison = machine.launch->poison & 0xff;
  for (const Variable& variable : variables) {
    const char* zone = arena + variable.offset + variable.bytes;
    for (u32 k = 0; k < RED_ZONE; ++k) {
      if ((unsigned char)zone[k] == poison) {
        continue;
      }
      return fail("write past the end of threadgroup variable %s (size %llu bytes)", variable.name,
                  (unsigned long long)variable.bytes);
    }
  }
}

// Called by kernels: the variable `id`, the same memory for all threads of a threadgroup.
EXPORTED void* emu_threadgroup_variable(u32 id, u64 bytes, u64 alignment, const char* name) {
  for (const Variable& variable : variables) {
    if (variable.id == id) {
      return arena + variable.offset;
    }
  }
  Launch& launch = *machine.launch;
  launch.threadgroup_bytes += bytes;
  if (launch.threadgroup_bytes > LIMIT) {
    fail("threadgroup memory: %llu bytes with %s exceed the limit of %u", (unsigned long long)launch.threadgroup_bytes,
         name, LIMIT);
    leave();
  }
  const u64 step = alignment < 16 ? 16 : alignment, offset = (used + RED_ZONE + step - 1) / step * step;
  if (offset + bytes + RED_ZONE > sizeof arena) {
    fail("too many threadgroup variables for the emulator");
    leave();
  }
  used = offset + bytes;
  variables.push({offset, bytes, id, name});
  if (launch.check) {
    shadow_add_variable(arena + offset, bytes, alignment < 4 ? alignment : 4, name);
  }
  return arena + offset;
}
