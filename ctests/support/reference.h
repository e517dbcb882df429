/* The results of collectives, computed on the host.
 *
 * Inputs are small integers, so that every sum, product and average (over 2, 4 or 8 ranks) is exact in every data type whatever
 * the order of additions. Results are compared byte for byte. */
#ifndef WINDLASS_CTESTS_REFERENCE_H
#define WINDLASS_CTESTS_REFERENCE_H

#include "harness.h"

/* The types that have reductions, and how many there are. */
extern const ncclDataType_t REDUCIBLE[];
enum { REDUCIBLE_COUNT = 10 };

size_t type_bytes(ncclDataType_t type);
const char* type_name(ncclDataType_t type);
const char* op_name(ncclRedOp_t op);

/* Element `index` of the input of `rank` in the call that `key` names. */
int input_value(uint64_t key, int rank, size_t index, ncclDataType_t type, ncclRedOp_t op);
/* Writes `count` elements of a rank's input, from element `first` on. */
void input_fill(void* to, uint64_t key, int rank, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op);
/* Writes `count` elements of the reduction over `ranks` ranks, from element `first` on; each input times `factor`. */
void reduced_fill(void* to, uint64_t key, int ranks, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op,
                  int factor);

#endif
