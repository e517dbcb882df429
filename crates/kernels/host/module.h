// Runs the kernels of the simulator's module: crates/sim/cuda/src/lib.rs says what such a module exports. Grids of any streams run
// beside each other; every warp has a thread.
#pragma once
#include "../device/machine.cuh"

struct SimLaunch {
  uint32_t grid[3], block[3], shared_bytes, cooperative, cluster[3];
  int32_t device;
  uint64_t stream_id;
};

// Rust's list of exports hides the symbols compiled here, so crates/sim/kernels/src/lib.rs exports each kernel by another name.
#define SIM_KERNEL(name) windlass_host_##name

namespace host {

inline Machine& shared_machine() {
  // Never destroyed: a process may end, or fork, while a kernel waits for a peer, and must not wait for that kernel.
  static Machine& machine = *[] {
    // Tests of the kernel want delays everywhere; whole programs should end soon.
    const char* rarity = std::getenv("WINDLASS_SIM_DELAY_RARITY");
    delay_rarity = rarity ? (uint32_t)std::strtoul(rarity, nullptr, 10) : 4096;
    return new Machine;
  }();
  return machine;
}

// Runs `kernel` on the launch's grid, with its one parameter. More threads than `threads_max`, the launch bound, would fail on a GPU.
template <class Parameter>
void run_grid(const SimLaunch* launch, void** parameters, uint32_t threads_max, void (*kernel)(const Parameter&)) {
  static std::atomic<uint64_t> launches{0};
  if (launch->block[0] > threads_max) {
    std::fprintf(stderr, "a block of %u threads for a kernel of at most %u\n", launch->block[0], threads_max);
    std::abort();
  }
  const auto& given = *static_cast<const Parameter*>(parameters[0]);
  shared_machine().launch(launch->grid[0], launch->block[0], launch->shared_bytes, ++launches, [&] { kernel(given); });
}

}  // namespace host
