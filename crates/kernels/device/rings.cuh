// Which of a receiver's rings a source writes. A receiver has one for each other rank, in order of ranks: none for itself.
#pragma once
#include "machine.cuh"

WINDLASS_DEVICE uint32_t ring_of(uint32_t source, uint32_t receiver) { return source - (source > receiver); }
