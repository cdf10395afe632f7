// One threadgroup: a fiber for each thread, and Metal's meetings. A meeting that not all threads reach is an error.
#pragma once
#include "machine.h"

constexpr u32 SIMD_WIDTH = 32;

bool threadgroup_prepare(u32 threads);              // room for so many fibers; false: no memory
void threadgroup_set(u32 i, const ThreadContext&);  // thread i starts at the kernel's entry
void threadgroup_run(u32 threads);                  // to the end of all, or until the launch is stopped
