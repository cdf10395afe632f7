// The order in which threads run: as numbered, or shuffled by the launch's seed.
#pragma once
#include "array.h"
#include "launch.h"

void order_begin(u64 seed);  // 0: nothing is shuffled
u32 random_below(u32 n);
void fill_in_order(Array<u32>& order, u32 n);
void shuffle(Array<u32>& order);
