// Threadgroup memory: the variables of the running threadgroup, with red zones between them.
#pragma once

void arena_begin();              // a launch
void arena_enter_threadgroup();  // fresh memory is poison
void arena_check_red_zones();
