// The kernels of collectives as the driver loads them.
#include "collective_kernels.cuh"
#include "collective_list.h"

#define KERNEL(name, family, reducer, ranks, groups, threads, straight)                                                                  \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ WINDLASS_COLLECTIVE_PARAMETER(family) launch) { \
    WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups, straight)(launch);                                                           \
  }
WINDLASS_COLLECTIVE_KERNELS(KERNEL)
