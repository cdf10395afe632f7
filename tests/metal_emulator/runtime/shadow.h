// What check builds know of memory: the bounds of each buffer and threadgroup variable, and for each element who
// wrote and read it last and under which barriers.
//
// Two accesses of one element, at least one a write and not both atomic, race unless a barrier lies between them:
// a threadgroup_barrier, or a simdgroup_barrier for lanes of one SIMD-group, and only one whose mem_flags name the
// kind of memory. Threadgroups of a launch are never ordered.
#pragma once
#include "launch.h"

enum Access { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };

void shadow_begin(const Launch& launch);
void shadow_add_variable(char* start, u32 bytes, u32 granule, const char* name);
void shadow_enter_threadgroup();
void shadow_threadgroup_barrier(u32 memory_flags);
void shadow_simdgroup_barrier(u32 simdgroup, u32 memory_flags);
void shadow_access(u64 address, u32 bytes, Access access, u64 code);
void shadow_report_unwritten();
