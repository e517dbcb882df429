// The kernels of collectives, for the simulator's module.
#include "../device/collective_kernels.cuh"
#include "../device/collective_list.h"
#include "module.h"

#define KERNEL(name, family, reducer, ranks, groups, threads_max, straight)                 \
  extern "C" void SIM_KERNEL(name)(const SimLaunch* launch, void** parameters) {            \
    host::run_grid<WINDLASS_COLLECTIVE_PARAMETER(family)>(launch, parameters, threads_max,  \
                                             WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups, straight)); \
  }
WINDLASS_COLLECTIVE_KERNELS(KERNEL)
