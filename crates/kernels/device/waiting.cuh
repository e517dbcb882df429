// What a warp of a collective does between two looks in vain.
#pragma once
#include "collective.h"
#include "machine.cuh"

struct Waiting {
  uint32_t idle = 0;

  // Shall the warp give up?
  WINDLASS_DEVICE bool ends(const WindlassCollectiveLaunch& launch) {
    pause_thread();
    return WINDLASS_SELDOM(++idle % rounds_between_looks == 0) && any_of_warp(load_control(launch.control) != WINDLASS_CONTROL_RUN);
  }
  // The same for a warp that waits for warps of its own kernel alone: where it is asked who waits, it has nothing to say.
  WINDLASS_DEVICE bool ends_with_all(const WindlassCollectiveLaunch& launch) {
    pause_thread();
    return WINDLASS_SELDOM(++idle % rounds_between_looks == 0) && any_of_warp(load_control(launch.control) == WINDLASS_CONTROL_ABORT);
  }
};
