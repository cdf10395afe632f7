// What compiled kernels call behind the programmer's back: the callbacks of -fsanitize=thread and
// -fsanitize=undefined (their meaning here is our own, no sanitizer runtime is linked), and bfloat rounding.
#include <string.h>

#include "machine.h"
#include "shadow.h"

// ---- memory accesses

#define ACCESS_HOOKS(bytes)                                                                           \
  EXPORTED void __tsan_read##bytes(void* p) { shadow_access((u64)p, bytes, READ, CALLER); }           \
  EXPORTED void __tsan_write##bytes(void* p) { shadow_access((u64)p, bytes, WRITE, CALLER); }         \
  EXPORTED void __tsan_unaligned_read##bytes(void* p) { shadow_access((u64)p, bytes, READ, CALLER); } \
  EXPORTED void __tsan_unaligned_write##bytes(void* p) { shadow_access((u64)p, bytes, WRITE, CALLER); }
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

EXPORTED void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  if (bytes) {
    shadow_access((u64)source, bytes, READ, CALLER);
    shadow_access((u64)target, bytes, WRITE, CALLER);
  }
  return memcpy(target, source, bytes);
}
EXPORTED void* __tsan_memmove(void* target, const void* source, size_t bytes) {
  if (bytes) {
    shadow_access((u64)source, bytes, READ, CALLER);
    shadow_access((u64)target, bytes, WRITE, CALLER);
  }
  return memmove(target, source, bytes);
}
EXPORTED void* __tsan_memset(void* target, int byte, size_t bytes) {
  if (bytes) {
    shadow_access((u64)target, bytes, WRITE, CALLER);
  }
  return memset(target, byte, bytes);
}
EXPORTED void __tsan_init() {}

EXPORTED void emu_atomic_load(const void* p, u32 bytes) { shadow_access((u64)p, bytes, ATOMIC_LOAD, CALLER); }
EXPORTED void emu_atomic_store(const void* p, u32 bytes) { shadow_access((u64)p, bytes, ATOMIC_STORE, CALLER); }
EXPORTED void emu_atomic_update(const void* p, u32 bytes) { shadow_access((u64)p, bytes, ATOMIC_UPDATE, CALLER); }

// ---- undefined behaviour; the data of every check starts with its place in the source

struct SourceLocation {
  const char* file;
  u32 line, column;
};

static void undefined(const char* what, const void* data, u64 code) {
  const SourceLocation& at = *(const SourceLocation*)data;
  report(UNDEFINED, code, 0, "undefined behaviour (%s) at %s:%u:%u, %s", what, at.file, at.line, at.column,
         Place().text);
}
// After these there is no value to go on with.
static void undefined_and_leave(const char* what, const void* data, u64 code) {
  undefined(what, data, code);
  leave();
}

#define UNDEFINED_HOOK(name, what, handler, ...) \
  EXPORTED void __ubsan_handle_##name(void* data __VA_ARGS__) { handler(what, data, CALLER); }
UNDEFINED_HOOK(out_of_bounds, "array index out of bounds", undefined_and_leave, , u64)
UNDEFINED_HOOK(divrem_overflow, "integer division by zero or overflow", undefined_and_leave, , u64, u64)
UNDEFINED_HOOK(builtin_unreachable, "unreachable code reached", undefined_and_leave)
UNDEFINED_HOOK(missing_return, "missing return", undefined_and_leave)
UNDEFINED_HOOK(shift_out_of_bounds, "shift amount out of range", undefined, , u64, u64)
UNDEFINED_HOOK(add_overflow, "signed integer overflow (add)", undefined, , u64, u64)
UNDEFINED_HOOK(sub_overflow, "signed integer overflow (subtract)", undefined, , u64, u64)
UNDEFINED_HOOK(mul_overflow, "signed integer overflow (multiply)", undefined, , u64, u64)
UNDEFINED_HOOK(negate_overflow, "signed integer overflow (negate)", undefined, , u64)
UNDEFINED_HOOK(float_cast_overflow, "float to integer conversion out of range", undefined, , u64)
EXPORTED void __ubsan_handle_type_mismatch_v1(void* data, u64 pointer) {
  undefined(pointer ? "misaligned access" : "null pointer access", data, CALLER);
}

// ---- float to bfloat, round to nearest even: a function of the compiler's library, which is not linked

EXPORTED __bf16 __truncsfbf2(float x) {
  u32 bits = __builtin_bit_cast(u32, x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_bit_cast(__bf16, (uint16_t)bits);
}
