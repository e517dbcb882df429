// The kernel of the p2p transport, for the simulator's module.
#include "../device/group.cuh"
#include "module.h"

extern "C" void SIM_KERNEL(ncclWindlassMail)(const SimLaunch* launch, void** parameters) {
  host::run_grid<WindlassP2pLaunch>(launch, parameters, 512, run_group);
}
