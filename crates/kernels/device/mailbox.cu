// The kernel as the driver loads it. At most 18 warps: 112 registers a thread.
#include "group.cuh"

extern "C" __global__ void __launch_bounds__(576) ncclWindlassMail(const __grid_constant__ WindlassMailLaunch launch) {
  run_group(launch);
}
