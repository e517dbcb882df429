/* Values that every rank knows of every other: constant inputs to draw calls from, and what reductions of them must give.
 *
 * A rank has a pool of bytes for each kind of value. Calls read from anywhere in a pool, so nothing is uploaded for a call, and
 * the reference reads the other ranks' pools. Integers are any bits. Floats are of two kinds: exact ones, whose sums, products and
 * averages over 2, 4 or 8 ranks have no rounding in any order, among them zeros of both signs; and real ones, whose results may differ from the exact
 * one by what the roundings of ranks' additions, in the type itself and in any order, can come to. Under WINDLASS_ORDER=fixed or strict
 * reductions of real ones must be the fold in rank order, to the bit. */
#ifndef WINDLASS_CTESTS_VALUES_H
#define WINDLASS_CTESTS_VALUES_H

#include "reference.h"

/* Where elements are: of which type and kind, from which byte of a pool on, a multiple of the type's size. */
struct source { ncclDataType_t type; bool real; size_t at; };

/* What a reduction is made of: `ranks` inputs of `count` elements each. */
struct reduction { ncclDataType_t type; ncclRedOp_t op; bool real; int ranks; size_t count; const void* inputs[RANKS_MAX]; };

/* Makes room for all ranks' pools of `bytes` each, a multiple of 8: once, before ranks start. */
void values_share(size_t bytes);
/* Of a pool. */
size_t values_bytes(void);
/* Fills a rank's pools from a seed; the others may be read after a barrier. */
void values_fill(int rank, uint64_t seed);
/* All pools of a rank, one after another, and how many bytes they are. */
const void* values_all(int rank);
size_t values_all_bytes(void);
/* Where a source lies in them, in bytes. */
size_t values_offset(struct source source);
/* The elements themselves. */
const void* values_of(int rank, struct source source);

/* Whether a type has real values. */
bool type_is_floating(ncclDataType_t type);
/* The first element of a result that is not as it must be; `count` if all are. Exact values are compared to the bit, but zeros
 * of either sign are one to minimum and maximum. */
size_t reduction_differs(const struct reduction* reduction, const void* seen);

#endif
