// The operations that a thread of any kernel here uses: loads, stores, fences, votes, asynchronous copies. Two builds implement
// them and share every other file: machine_gpu.cuh in PTX, ../host/machine_host.h on threads of this host.
//
// What both guarantee (README.md "LL128 channels" says on which assumptions, A1 and A2):
//   store_half / load_lines    128-byte lines, each written by eight neighbouring lanes at once; a reader that finds a
//                              line's tag has the payload that was written with it. ONLY directly after sync_warp,
//                              on both sides: a diverged warp writes or reads a line in pieces
//   store_half_if / load_lines_if, found_lines   the same for several peers, without branches
//   store_ll_if / load_ll_if  16 bytes of one thread: a reader that finds the tag has the payload. No sync_warp needed
//   load_word_*, store_word    64-bit words that peers read and write: relaxed, or acquire where the name says so
//   fence_system               orders this thread's earlier accesses, and those that `told` acquired, before its later stores
//   tell / told                a counter in shared memory: release store and acquire load, for the block
//   raise / set_bits           the same counters, changed by several threads: acquire and release; the value before is returned
//   bulk_*, wait_*, barrier_*  asynchronous copies of one thread, global -> shared -> global
#pragma once
#include "p2p.h"

struct alignas(16) Vector {
  uint64_t x, y;
};

#if defined(__CUDACC__)
#include "machine_gpu.cuh"
#else
#include "../host/machine_host.h"
#endif
