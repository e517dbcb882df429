// The one list of collectives' kernels: collective.cu makes them, host/collective_object.cpp and the stand-in driver's library make
// the same ones for the host, tests compare it with what src/collectives/kernel.rs launches.
//
// X(name, family, reducer, ranks, groups, threads_max). `ranks`: the most of them, 3 ranks use the kernel for 4. `groups`: half units
// that make a unit of lines, 0 of pairs. `threads_max`: of a block, its launch bound.
// WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups) is the entry point, of collective_kernels.cuh.
#pragma once

#define WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups) WINDLASS_COLLECTIVE_ENTRY_##family(reducer, ranks, groups)
#define WINDLASS_COLLECTIVE_ENTRY_pairs(reducer, ranks, groups) run_pairs<reducer, ranks>
#define WINDLASS_COLLECTIVE_ENTRY_lines(reducer, ranks, groups) run_lines<reducer, ranks, groups>
#define WINDLASS_COLLECTIVE_ENTRY_all_reduce(reducer, ranks, groups) run_all_reduce<reducer, ranks>

// R: the reducer in kernels' names. Four groups of 8 ranks would not fit into the registers.
#define WINDLASS_COLLECTIVE_KERNELS_OF(X, R, reducer)        \
  X(ncclWindlass_LL_##R##_2, pairs, reducer, 2, 0, 512)      \
  X(ncclWindlass_LL_##R##_4, pairs, reducer, 4, 0, 512)      \
  X(ncclWindlass_LL_##R##_8, pairs, reducer, 8, 0, 512)      \
  X(ncclWindlass_LL128x2_##R##_2, lines, reducer, 2, 2, 512) \
  X(ncclWindlass_LL128x2_##R##_4, lines, reducer, 4, 2, 512) \
  X(ncclWindlass_LL128x2_##R##_8, lines, reducer, 8, 2, 512) \
  X(ncclWindlass_LL128x4_##R##_2, lines, reducer, 2, 4, 512) \
  X(ncclWindlass_LL128x4_##R##_4, lines, reducer, 4, 4, 512)

// 8 warps of each of three roles; of 8 ranks 5, as a warp holds a line of each.
#define WINDLASS_COLLECTIVE_ALL_REDUCE_KERNELS_OF(X, R, reducer)      \
  X(ncclWindlass_AllReduce_##R##_2, all_reduce, reducer, 2, 2, 768)   \
  X(ncclWindlass_AllReduce_##R##_4, all_reduce, reducer, 4, 2, 768)   \
  X(ncclWindlass_AllReduce_##R##_8, all_reduce, reducer, 8, 2, 512)

#define WINDLASS_COLLECTIVE_KERNELS(X)                          \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, Copy, Copy)                 \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, SumF32, SumF32)             \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, SumF16, SumF16)             \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, SumBf16, SumBf16)           \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, Any, AnyReduction)          \
  WINDLASS_COLLECTIVE_ALL_REDUCE_KERNELS_OF(X, SumF32, SumF32)  \
  WINDLASS_COLLECTIVE_ALL_REDUCE_KERNELS_OF(X, SumF16, SumF16)  \
  WINDLASS_COLLECTIVE_ALL_REDUCE_KERNELS_OF(X, SumBf16, SumBf16) \
  WINDLASS_COLLECTIVE_ALL_REDUCE_KERNELS_OF(X, Any, AnyReduction)
