/* Values of each rank that every other rank knows: constant inputs from which calls are drawn, and the results of reductions of
 * them.
 *
 * A rank has a pool of bytes for each kind of value. Calls read from anywhere in a pool, so nothing is uploaded for a call, and
 * the reference reads the other ranks' pools. Integers are any bits. Floats are of two kinds. Sums, products and averages of
 * exact ones over 2, 4 or 8 ranks have no rounding in any order; zeros of both signs are among them. Results of real ones may
 * differ from the exact result by the roundings of the ranks' additions, in the type itself and in any order. Under
 * WINDLASS_ORDER=fixed or strict reductions of real ones must be the fold in rank order, to the bit. */
#ifndef WINDLASS_CTESTS_VALUES_H
#define WINDLASS_CTESTS_VALUES_H

#include "reference.h"

/* Where elements are: their type and kind, and their first byte in the pool, a multiple of the type's size. */
struct source { ncclDataType_t type; bool real; size_t at; };

/* A reduction: `ranks` inputs of `count` elements each. */
struct reduction { ncclDataType_t type; ncclRedOp_t op; bool real; int ranks; size_t count; const void* inputs[RANKS_MAX]; };

/* Maps the pools of all ranks, of `bytes` bytes each, a multiple of 8. Call it once, before ranks start. */
void values_share(size_t bytes);
/* The bytes of one pool. */
size_t values_bytes(void);
/* Fills a rank's pools from a seed; the others may be read after a barrier. */
void values_fill(int rank, uint64_t seed);
/* All pools of a rank, one after the other; their bytes. */
const void* values_all(int rank);
size_t values_all_bytes(void);
/* The offset of a source in these pools, in bytes. */
size_t values_offset(struct source source);
/* The elements of a source. */
const void* values_of(int rank, struct source source);

/* Whether a type has a pool of real values. */
bool type_is_floating(ncclDataType_t type);
/* The first wrong element of a result; `count` if all are right. Exact values are compared to the bit, but minimum and maximum
 * may give a zero of either sign. */
size_t reduction_differs(const struct reduction* reduction, const void* seen);

#endif
