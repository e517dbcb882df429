// The p2p transport kernel as the driver loads it. At most 16 warps: with 18 a thread has 96 registers and spills, into an L1 that
// acquire loads invalidate all the time.
#include "group.cuh"

extern "C" __global__ void __launch_bounds__(512) ncclWindlassMail(const __grid_constant__ WindlassP2pLaunch launch) {
  run_group(launch);
}
