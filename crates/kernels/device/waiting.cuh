// What a warp of a collective does after an unsuccessful poll: every 1024th time it reads the abort word.
#pragma once
#include "collective.h"
#include "machine.cuh"

struct Waiting {
  uint32_t idle = 0;

  // Whether the warp must leave: on an abort, or when the host asks who waits. Called by the whole warp.
  WINDLASS_DEVICE bool ends(const WindlassCollectiveLaunch& launch) {
    pause_thread();
    return WINDLASS_SELDOM(++idle % rounds_between_looks == 0) && any_of_warp(load_control(launch.control) != WINDLASS_CONTROL_RUN);
  }
  // The same for a warp that waits for warps of its own kernel alone: it has nothing to report, so only an abort ends it.
  WINDLASS_DEVICE bool ends_with_all(const WindlassCollectiveLaunch& launch) {
    pause_thread();
    return WINDLASS_SELDOM(++idle % rounds_between_looks == 0) && any_of_warp(load_control(launch.control) == WINDLASS_CONTROL_ABORT);
  }
};
