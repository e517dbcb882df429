// All entry points of collectives.
#pragma once
#include "all_reduce.cuh"
#include "lines.cuh"
#include "pairs.cuh"
