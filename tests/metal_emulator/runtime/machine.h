// The one running launch: who runs, who waits for what, and how a launch ends early.
//
// Each GPU thread is a fiber on one OS thread. A fiber runs until it meets a SIMD operation or a barrier, then the
// scheduler picks another, so a launch is repeatable: the seed decides the order and nothing else does.
#pragma once
#include "launch.h"

enum FiberState : uint8_t { READY, AT_SIMD, AT_SIMD_BARRIER, AT_THREADGROUP_BARRIER, DONE };
typedef void (*Resolve)(void** operands, u32 mask, u32 first_lane);

struct Fiber {
  void* context;
  FiberState state;
  u32 index;         // in its threadgroup
  void* site;        // return address of the operation it waits at
  void* operand;     // AT_SIMD: the lane's operand
  Resolve resolve;   // AT_SIMD: what computes the operation
  const char* what;  // AT_SIMD: its name
  u32 memory_flags;  // at a barrier: which memory it orders
  ThreadContext thread;
};

enum MemoryFlags : u32 { DEVICE_MEMORY = 1, THREADGROUP_MEMORY = 2 };

struct Machine {
  Launch* launch;  // null: nothing runs
  Fiber* current;
  void** buffers;   // what the kernel's entry takes
  void* scheduler;  // context that a stopped or waiting fiber switches to
  bool stopped;
  u32 threadgroup;  // index of the running one
  char* stacks;
  u64 stack_stride, stacks_bytes;
  u64 code_low, code_high, code_base;  // where the kernel's shared object is loaded
};
extern Machine machine;

// Ends the launch with an error, of which the first is kept; returns.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
// Ends the launch from within a fiber.
__attribute__((noreturn)) void leave();
// Adds a finding, or counts it if the same instructions were reported already. `code` is a return address or 0.
__attribute__((format(printf, 4, 5))) void report(FindingKind kind, u64 code, u64 other_code, const char* format, ...);

// "threadgroup (0,0,1) thread (4,0,0)" of the current fiber.
struct Place {
  char text[96];
  Place();
};
// "{code:1f40}", which the Python side turns into file and line.
struct CodeMark {
  char text[32];
  explicit CodeMark(u64 return_address);
};

#define EXPORTED extern "C" __attribute__((visibility("default"), noinline))
#define CALLER ((u64)__builtin_return_address(0) - 1)
