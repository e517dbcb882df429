// Copies what a rank sends to itself. The last blocks of the grid do this alone: they wait for no block and no block waits for
// them, so they need not be resident beside the others. A message to oneself costs no launch of its own.
#pragma once
#include "job.cuh"

constexpr uint32_t copied_at_once = 4;

// Copies this thread's share of a message. If both addresses have the same offset within 16 bytes: the bytes before the first whole
// vector one by one, then vectors. Else by narrower pieces.
WINDLASS_DEVICE void copy_message(const Message& to, const Message& from, uint64_t thread,
                              uint64_t threads) {
  const bool alike = ((to.address ^ from.address) & 15) == 0;
  const uint64_t before = (0 - to.address) & 15;
  const uint64_t head = !alike ? 0 : before < to.bytes ? before : to.bytes;
  char* const out = reinterpret_cast<char*>(to.address + head);
  const char* const in = reinterpret_cast<const char*>(from.address + head);
  const uint64_t bytes = to.bytes - head, vectors = (bytes + 15) / 16;
  const uint32_t load_width = access_width(from.address + head), store_width = access_width(to.address + head);
  if (head && thread == 0) store_narrow(out - head, load_narrow(in - head, (uint32_t)head, 1), (uint32_t)head, 1);
  for (uint64_t first = thread; first < vectors; first += threads * copied_at_once) {
    Vector v[copied_at_once];
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < copied_at_once; ++i) {
      const uint64_t at = (first + i * threads) * 16;
      if (at >= bytes) break;
      v[i] = alike && at + 16 <= bytes ? load_input(in + at)
                                       : load_narrow(in + at, (uint32_t)(bytes - at < 16 ? bytes - at : 16), load_width);
    }
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < copied_at_once; ++i) {
      const uint64_t at = (first + i * threads) * 16;
      if (at >= bytes) break;
      if (alike && at + 16 <= bytes)
        store_output(out + at, v[i]);
      else
        store_narrow(out + at, v[i], (uint32_t)(bytes - at < 16 ? bytes - at : 16), store_width);
    }
  }
}

WINDLASS_DEVICE void run_copies(const Group& group, uint32_t block) {
  const WindlassP2pLaunch& launch = group.launch;
  const uint64_t thread = (uint64_t)block * thread_count() + thread_index();
  const uint64_t threads = (uint64_t)launch.copy_blocks * thread_count();
  for (uint32_t copy = 0; copy < launch.copies; ++copy) {
    const uint32_t at = launch.operations + 2 * copy;
    copy_message(group.message(at), group.message(at + 1), thread, threads);
  }
}
