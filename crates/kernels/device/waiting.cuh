// What a warp of a collective does between two looks in vain.
#pragma once
#include "collective.h"
#include "machine.cuh"

struct Waiting {
  uint32_t idle = 0;

  // Shall the warp give up?
  MAIL_DEVICE bool ends(const WindlassCollectiveLaunch& launch) {
    pause_thread();
    return MAIL_SELDOM(++idle % rounds_between_looks == 0) && any_of_warp(load_control(launch.control) != WINDLASS_CONTROL_RUN);
  }
};
