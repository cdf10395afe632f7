// Words of the Metal language that C++ lacks, in the two builds that the emulator makes.
//
// Run builds: address spaces mean nothing on a CPU and expand to nothing.
// Lint builds (MSL_LINT, syntax check only): they become clang address spaces, so that a mixed-up pointer is the
// compile error that it is in Metal. `thread` is the default address space in both.
#pragma once
#define __METAL__ 1
#define __METAL_VERSION__ 310

#ifdef MSL_LINT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
#define kernel

#define METAL_FUNC inline __attribute__((always_inline))
// Where threads meet: two calls are two places, which the compiler must not make one.
#define MSL_MEETING inline __attribute__((always_inline, convergent, nomerge))
// Code of the emulator inside a kernel: its memory accesses are not the kernel's.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
