// The machine under the p2p transport kernel: what a thread can do, named for what the protocol needs of it. Two builds
// share every other file: machine_gpu.cuh for CUDA, ../host/machine_host.h for threads of this host.
//
// Promises of both (README.md "What the memory must do" says what each rests on):
//   store_half / load_lines    128-byte lines, each written by eight neighbouring lanes at once; a reader that finds a
//                              line's tag finds the payload that was written with it. ONLY directly after sync_warp,
//                              on both sides: a warp that has parted writes or reads a line in pieces
//   store_half_if / load_lines_if, found_lines   the same for several peers, without branches
//   store_ll_if / load_ll_if  16 bytes of one thread, likewise: who finds the tag finds the payload. No sync_warp needed
//   load_word_*, store_word    64-bit words that peers read and write; acquire where the name says so
//   fence_system               what this thread did, or learnt of by `told`, before it is there before what it stores after
//   tell / told                a counter in shared memory, release and acquire within the block
//   raise / set_bits           the same counters, changed by several: both orders, and the value before
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
