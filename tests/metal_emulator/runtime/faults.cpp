#include "faults.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "fiber.h"
#include "machine.h"

static struct sigaction previous_segv, previous_bus;
static stack_t previous_stack;
static pthread_t launching_thread;
static char handler_stack[65536];

static void describe(const siginfo_t& info, u64 code) {
  const u64 address = (u64)info.si_addr;
  if (info.si_code == SI_KERNEL) {  // no address: the processor refused the instruction
    return fail("misaligned vector access at %s, %s", CodeMark(code).text, Place().text);
  }
  if (address - (u64)machine.stacks < machine.stacks_bytes) {
    return fail("thread stack overflow (private arrays too large for the emulator) at %s, %s", CodeMark(code).text,
                Place().text);
  }
  const Buffer* nearest = nullptr;
  u64 least = ~0ull;
  for (u32 i = 0; i < machine.launch->buffer_count; ++i) {
    const Buffer& buffer = machine.launch->buffers[i];
    const u64 low = (u64)buffer.data, distance = address < low ? low - address : address - low;
    if (distance < least) {
      least = distance;
      nearest = &buffer;
    }
  }
  if (!nearest) {
    return fail("memory fault at %s, %s", CodeMark(code).text, Place().text);
  }
  fail("memory fault at buffer %s %+lld (size %llu bytes) at %s, %s", nearest->name,
       (long long)(address - (u64)nearest->data), (unsigned long long)nearest->bytes, CodeMark(code).text,
       Place().text);
}

static void on_fault(int signal, siginfo_t* info, void* context) {
  if (!machine.current || machine.stopped || !pthread_equal(pthread_self(), launching_thread)) {
    sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);  // not ours: happens again
    return;
  }
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  describe(*info, (u64)registers[REG_RIP] + 1);
  // Return into the scheduler, as the tail of fiber_switch would.
  const FiberFrame* frame = (const FiberFrame*)machine.scheduler;
  registers[REG_R15] = frame->r15;
  registers[REG_R14] = frame->r14;
  registers[REG_R13] = frame->r13;
  registers[REG_R12] = frame->r12;
  registers[REG_RBX] = frame->rbx;
  registers[REG_RBP] = frame->rbp;
  registers[REG_RIP] = frame->return_address;
  registers[REG_RSP] = (greg_t)(frame + 1);
}

void faults_catch() {
  launching_thread = pthread_self();
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

void faults_release() {
  sigaction(SIGSEGV, &previous_segv, nullptr);
  sigaction(SIGBUS, &previous_bus, nullptr);
  sigaltstack(&previous_stack, nullptr);
}
