// All entry points of collectives.
#pragma once
#include "all_reduce.cuh"
#include "one_phase.cuh"
#include "one_shot.cuh"
#include "ll.cuh"
