// The one list of the collectives' kernels: collective.cu defines them, host/collective_object.cpp and the simulator's library define
// the same ones for the host, and tests compare the list with the kernels that src/collectives/kernel.rs launches.
//
// X(name, family, reducer, ranks, groups, threads_max, straight). `ranks`: the most of them, 3 ranks use the kernel for 4. `groups`: half
// packets that make a packet of LL128, 0 of LL. `threads_max`: of a block, its launch bound. `straight`: see channel.cuh and ll.cuh.
// WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups, straight) is the entry point, of collective_kernels.cuh.
#pragma once

#define WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups, straight) WINDLASS_COLLECTIVE_ENTRY_##family(reducer, ranks, groups, straight)
#define WINDLASS_COLLECTIVE_ENTRY_ll(reducer, ranks, groups, straight) run_ll<reducer, ranks, straight>
#define WINDLASS_COLLECTIVE_ENTRY_one_shot(reducer, ranks, groups, straight) run_one_shot<reducer, ranks, groups, straight, false>
#define WINDLASS_COLLECTIVE_ENTRY_one_shot_parts(reducer, ranks, groups, straight) run_one_shot<reducer, ranks, groups, straight, reducer::reduces>
#define WINDLASS_COLLECTIVE_ENTRY_batch(reducer, ranks, groups, straight) run_batch<reducer, ranks, straight>
#define WINDLASS_COLLECTIVE_ENTRY_ll128(reducer, ranks, groups, straight) run_ll128<reducer, ranks, groups, straight, OneCall>
#define WINDLASS_COLLECTIVE_ENTRY_batch_ll128(reducer, ranks, groups, straight) run_ll128<reducer, ranks, groups, straight, CallsOfBatch<false>>
#define WINDLASS_COLLECTIVE_ENTRY_simple(reducer, ranks, groups, straight) run_simple<reducer, ranks, straight>
#define WINDLASS_COLLECTIVE_ENTRY_simple_all_reduce(reducer, ranks, groups, straight) run_simple_all_reduce<reducer, ranks, straight>
#define WINDLASS_COLLECTIVE_ENTRY_all_reduce(reducer, ranks, groups, straight) run_all_reduce<reducer, ranks, groups, straight, OneCall>
#define WINDLASS_COLLECTIVE_ENTRY_batch_all_reduce(reducer, ranks, groups, straight) run_all_reduce<reducer, ranks, groups, straight, CallsOfBatch<true>>

// The type of a kernel's one parameter.
#define WINDLASS_COLLECTIVE_PARAMETER(family) WINDLASS_COLLECTIVE_PARAMETER_##family
#define WINDLASS_COLLECTIVE_PARAMETER_ll WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_one_shot WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_one_shot_parts WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_ll128 WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_simple WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_simple_all_reduce WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_all_reduce WindlassCollectiveLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_batch WindlassBatchLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_batch_ll128 WindlassBatchLaunch
#define WINDLASS_COLLECTIVE_PARAMETER_batch_all_reduce WindlassBatchLaunch

// R: the reducer in kernels' names. Four groups of 8 ranks would not fit into the registers. Two groups of 4 ranks are for copies and fixed order alone:
// what else reduces there goes in one shot, or was as fast with four.
#define WINDLASS_ONE_PHASE_KERNELS_OF(X, R, reducer, suffix, straight)                 \
  X(ncclWindlass_LL128x2_##R##_2##suffix, ll128, reducer, 2, 2, 640, straight)         \
  X(ncclWindlass_LL128x2_##R##_8##suffix, ll128, reducer, 8, 2, 512, straight)
#define WINDLASS_COLLECTIVE_KERNELS_OF(X, R, reducer, suffix, straight)                \
  X(ncclWindlass_LL_##R##_2##suffix, ll, reducer, 2, 0, 512, straight)                 \
  X(ncclWindlass_LL_##R##_4##suffix, ll, reducer, 4, 0, 512, straight)                 \
  X(ncclWindlass_LL_##R##_8##suffix, ll, reducer, 8, 0, 512, straight)                 \
  WINDLASS_ONE_PHASE_KERNELS_OF(X, R, reducer, suffix, straight)                       \
  X(ncclWindlass_LL128x4_##R##_2##suffix, ll128, reducer, 2, 4, 640, straight)         \
  X(ncclWindlass_LL128x4_##R##_4##suffix, ll128, reducer, 4, 4, 512, straight)         \
  WINDLASS_ONE_SHOT_PARTS_KERNELS_OF(X, R, reducer, suffix, straight)

// Middle sizes in one shot: all-reduces, and all-gathers and reduce-scatters (parts). With 2 ranks they have as many warps
// as registers allow, so that 1 MiB goes in one round of them. With more ranks they have few channels, so few warps, which then hardly spill.
#define WINDLASS_ONE_SHOT_KERNELS_OF(X, R, reducer, suffix, straight)                                \
  X(ncclWindlass_OneShot_##R##_2##suffix, one_shot, reducer, 2, 4, 768, straight)                    \
  X(ncclWindlass_OneShot_##R##_4##suffix, one_shot, reducer, 4, 4, 512, straight)
#define WINDLASS_ONE_SHOT_PARTS_KERNELS_OF(X, R, reducer, suffix, straight)                          \
  X(ncclWindlass_OneShotParts_##R##_2##suffix, one_shot_parts, reducer, 2, 4, 768, straight)         \
  X(ncclWindlass_OneShotParts_##R##_4##suffix, one_shot_parts, reducer, 4, 4, 384, straight)
// Those of 8 ranks serve few sizes, and have one form.
#define WINDLASS_ONE_SHOT_KERNELS_OF_8(X, R, reducer)                                                \
  X(ncclWindlass_OneShot_##R##_8, one_shot, reducer, 8, 2, 384, false)                               \
  X(ncclWindlass_OneShotParts_##R##_8, one_shot_parts, reducer, 8, 2, 384, false)

// All-reduces in two phases. There is room for 8 warps of each of three roles; with 8 ranks for 5, as a warp holds lines of each rank. `groups`:
// of 2 ranks. Sums have larger packets there, so that more bytes are under way.
#define WINDLASS_ALL_REDUCE_KERNELS_OF(X, R, reducer, suffix, straight, groups)                      \
  X(ncclWindlass_AllReduce_##R##_2##suffix, all_reduce, reducer, 2, groups, 768, straight)           \
  X(ncclWindlass_AllReduce_##R##_4##suffix, all_reduce, reducer, 4, 2, 768, straight)                \
  X(ncclWindlass_AllReduce_##R##_8##suffix, all_reduce, reducer, 8, 2, 512, straight)

// Reductions of large buffers: as many warps of each role as were fastest with 24 blocks, and the signal warp. With more of them the kernels spill
// or are slower.
#define WINDLASS_SIMPLE_KERNELS_OF(X, R, reducer, suffix, straight)                                         \
  X(ncclWindlass_Simple_##R##_2##suffix, simple, reducer, 2, 4, 544, straight)                              \
  X(ncclWindlass_Simple_##R##_4##suffix, simple, reducer, 4, 4, 544, straight)                              \
  X(ncclWindlass_SimpleAllReduce_##R##_2##suffix, simple_all_reduce, reducer, 2, 4, 608, straight)          \
  X(ncclWindlass_SimpleAllReduce_##R##_4##suffix, simple_all_reduce, reducer, 4, 4, 416, straight)

#define WINDLASS_SUM_KERNELS_OF(X, R, suffix, straight)                                \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, R, R, suffix, straight)                            \
  WINDLASS_ONE_SHOT_KERNELS_OF(X, R, R, suffix, straight)                              \
  WINDLASS_ALL_REDUCE_KERNELS_OF(X, R, R, suffix, straight, 4)                         \
  WINDLASS_SIMPLE_KERNELS_OF(X, R, R, suffix, straight)
#define WINDLASS_SINGLE_KERNELS_FOR(X, suffix, straight)                               \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, Copy, Copy, suffix, straight)                      \
  X(ncclWindlass_LL128x2_Copy_4##suffix, ll128, Copy, 4, 2, 512, straight)             \
  WINDLASS_SUM_KERNELS_OF(X, SumF32, suffix, straight)                                 \
  WINDLASS_SUM_KERNELS_OF(X, SumF16, suffix, straight)                                 \
  WINDLASS_SUM_KERNELS_OF(X, SumBf16, suffix, straight)                                \
  WINDLASS_COLLECTIVE_KERNELS_OF(X, Any, AnyReduction, suffix, straight)               \
  WINDLASS_ONE_SHOT_KERNELS_OF(X, Any, AnyReduction, suffix, straight)                 \
  WINDLASS_ALL_REDUCE_KERNELS_OF(X, Any, AnyReduction, suffix, straight, 2)

// Kernels that run one collective. Reductions that run here in fixed order only have two kernels for each number of ranks: they are rare, and each
// kernel is in every image.
#define WINDLASS_SINGLE_KERNELS(X)                                                     \
  WINDLASS_SINGLE_KERNELS_FOR(X, _whole, true)                                         \
  WINDLASS_SINGLE_KERNELS_FOR(X, , false)                                              \
  X(ncclWindlass_OneShotParts_Copy_8, one_shot_parts, Copy, 8, 2, 384, false)          \
  WINDLASS_ONE_SHOT_KERNELS_OF_8(X, SumF32, SumF32)                                    \
  WINDLASS_ONE_SHOT_KERNELS_OF_8(X, SumF16, SumF16)                                    \
  WINDLASS_ONE_SHOT_KERNELS_OF_8(X, SumBf16, SumBf16)                                  \
  WINDLASS_ONE_SHOT_KERNELS_OF_8(X, Any, AnyReduction)                                 \
  WINDLASS_ONE_PHASE_KERNELS_OF(X, Ordered, OrderedReduction, , false)                 \
  X(ncclWindlass_LL128x2_Ordered_4, ll128, OrderedReduction, 4, 2, 512, false)         \
  WINDLASS_ALL_REDUCE_KERNELS_OF(X, Ordered, OrderedReduction, , false, 2)

// Kernels that run a batch of small collectives.
#define WINDLASS_BATCH_KERNELS_OF(X, R, reducer, suffix, straight)                \
  X(ncclWindlass_LLBatch_##R##_2##suffix, batch, reducer, 2, 0, 512, straight)    \
  X(ncclWindlass_LLBatch_##R##_4##suffix, batch, reducer, 4, 0, 512, straight)    \
  X(ncclWindlass_LLBatch_##R##_8##suffix, batch, reducer, 8, 0, 512, straight)
#define WINDLASS_BATCH_KERNELS_FOR(X, suffix, straight)                \
  WINDLASS_BATCH_KERNELS_OF(X, Copy, Copy, suffix, straight)           \
  WINDLASS_BATCH_KERNELS_OF(X, SumF32, SumF32, suffix, straight)       \
  WINDLASS_BATCH_KERNELS_OF(X, SumF16, SumF16, suffix, straight)       \
  WINDLASS_BATCH_KERNELS_OF(X, SumBf16, SumBf16, suffix, straight)     \
  WINDLASS_BATCH_KERNELS_OF(X, Any, AnyReduction, suffix, straight)

// Kernels that run a batch of larger collectives. None is straight: fetching instructions is little of their time, and each kernel is in
// every image.
#define WINDLASS_LARGER_BATCH_KERNELS_OF(X, R, reducer)                       \
  X(ncclWindlass_LL128Batch_##R##_2, batch_ll128, reducer, 2, 4, 640, false)  \
  X(ncclWindlass_LL128Batch_##R##_4, batch_ll128, reducer, 4, 4, 512, false)  \
  X(ncclWindlass_LL128Batch_##R##_8, batch_ll128, reducer, 8, 2, 512, false)
#define WINDLASS_BATCH_ALL_REDUCE_KERNELS_OF(X, R, reducer)                            \
  X(ncclWindlass_AllReduceBatch_##R##_2, batch_all_reduce, reducer, 2, 2, 768, false)  \
  X(ncclWindlass_AllReduceBatch_##R##_4, batch_all_reduce, reducer, 4, 2, 768, false)  \
  X(ncclWindlass_AllReduceBatch_##R##_8, batch_all_reduce, reducer, 8, 2, 512, false)
#define WINDLASS_LARGER_BATCH_KERNELS(X)                            \
  WINDLASS_LARGER_BATCH_KERNELS_OF(X, Copy, Copy)                   \
  WINDLASS_LARGER_BATCH_KERNELS_OF(X, SumF32, SumF32)               \
  WINDLASS_LARGER_BATCH_KERNELS_OF(X, SumF16, SumF16)               \
  WINDLASS_LARGER_BATCH_KERNELS_OF(X, SumBf16, SumBf16)             \
  WINDLASS_LARGER_BATCH_KERNELS_OF(X, Any, AnyReduction)            \
  WINDLASS_BATCH_ALL_REDUCE_KERNELS_OF(X, SumF32, SumF32)           \
  WINDLASS_BATCH_ALL_REDUCE_KERNELS_OF(X, SumF16, SumF16)           \
  WINDLASS_BATCH_ALL_REDUCE_KERNELS_OF(X, SumBf16, SumBf16)         \
  WINDLASS_BATCH_ALL_REDUCE_KERNELS_OF(X, Any, AnyReduction)

#define WINDLASS_BATCH_KERNELS(X)              \
  WINDLASS_BATCH_KERNELS_FOR(X, _whole, true)  \
  WINDLASS_BATCH_KERNELS_FOR(X, , false)       \
  WINDLASS_LARGER_BATCH_KERNELS(X)

#define WINDLASS_COLLECTIVE_KERNELS(X) \
  WINDLASS_SINGLE_KERNELS(X)           \
  WINDLASS_BATCH_KERNELS(X)
