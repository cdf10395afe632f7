#include "order.h"

static bool shuffling;
static u64 random_state;

void order_begin(u64 seed) {
  shuffling = seed != 0;
  random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
}

u32 random_below(u32 n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (u32)((random_state >> 33) % n);
}

void fill_in_order(Array<u32>& order, u32 n) {
  order.clear();
  for (u32 i = 0; i < n; ++i) { order.push(i); }
}
void shuffle(Array<u32>& order) {
  if (!shuffling) {
    return;
  }
  for (u32 i = order.size(); i > 1; --i) {
    const u32 j = random_below(i), kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}
