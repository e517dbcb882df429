// The kernel on threads of this host as a shared object that the stand-in driver loads as a module: crates/sim/cuda/src/lib.rs
// says what one exports. Grids of any streams run beside each other; every warp has a thread.
#include "../device/group.cuh"

namespace {
// Never destroyed: a process may end, or fork, while a kernel waits for a peer, and nobody should wait for that.
host::Machine& machine = *new host::Machine;
std::atomic<uint64_t> launches{0};
// Tests of the kernel want delays everywhere; whole programs are to end soon.
const bool delays_set = [] {
  const char* rarity = std::getenv("WINDLASS_SIM_DELAY_RARITY");
#if defined(HOST_DELAY_RARITY)
  host::delay_rarity = HOST_DELAY_RARITY;
#endif
  if (rarity) host::delay_rarity = (uint32_t)std::strtoul(rarity, nullptr, 10);
  return true;
}();
}  // namespace

struct SimLaunch {
  uint32_t grid[3], block[3], shared_bytes, cooperative, cluster[3];
  int32_t device;
  uint64_t stream_id;
};

extern "C" {
extern const struct {
  uint32_t count, bytes[1];
} ncclWindlassMail_params;
const decltype(ncclWindlassMail_params) ncclWindlassMail_params = {1, {WINDLASS_LAUNCH_BYTES}};

void ncclWindlassMail(const SimLaunch* launch, void** parameters) {
  const auto& given = *static_cast<const WindlassMailLaunch*>(parameters[0]);
  machine.launch(launch->grid[0], launch->block[0], launch->shared_bytes, ++launches, [&given] { run_group(given); });
}
}
