// Switching between stacks (x86-64, System V): callee-saved registers on the stack, the stack pointer in a variable.
#pragma once
#include <stdint.h>

// Saves the running context in *from and continues the one saved in `to`.
extern "C" void fiber_switch(void** from, void* to);
// A context that calls `start` when first switched to. `start` must not return.
void* fiber_prepare(char* stack_top, void (*start)());

// What fiber_switch leaves on a stack, lowest address first.
struct FiberFrame {
  uint64_t r15, r14, r13, r12, rbx, rbp, return_address;
};
