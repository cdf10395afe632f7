#include "fiber.h"

asm(R"(
.text
.globl fiber_switch
.hidden fiber_switch
.type fiber_switch,@function
fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fiber_switch,.-fiber_switch
)");

void* fiber_prepare(char* stack_top, void (*start)()) {
  // rsp % 16 must be 8 at the entry of a function, as if it had been called: 8 bytes above the frame.
  char* aligned = (char*)((uintptr_t)stack_top & ~(uintptr_t)63) - 8;
  FiberFrame* frame = (FiberFrame*)aligned - 1;
  *frame = FiberFrame{0, 0, 0, 0, 0, 0, (uint64_t)start};
  return frame;
}
