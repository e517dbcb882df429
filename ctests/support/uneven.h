/* All-gathers and reduce-scatters of parts of different sizes, from input to verified output: as a group of broadcasts or
 * reduces with a root each, or by Windlass's own functions. */
#ifndef WINDLASS_CTESTS_UNEVEN_H
#define WINDLASS_CTESTS_UNEVEN_H

#include "reference.h"

struct uneven {
  /* Set by the caller. */
  bool reduces;           /* a reduce-scatter-v, else an all-gather-v */
  size_t counts[RANKS_MAX]; /* elements of each rank's part */
  ncclDataType_t type;
  ncclRedOp_t op;
  bool in_place, packed;  /* packed: parts are adjacent, in the order of ranks; else the last rank's first, with gaps */
  bool backwards;         /* the last rank's call comes first */
  int rank, ranks;
  uint64_t key;           /* chooses the inputs: equal on all ranks, different in every call */
  /* Set by uneven_prepare: one allocation. */
  unsigned char* memory;
  size_t bytes, displacements[RANKS_MAX], own; /* in elements from the beginning (displacements, own) */
};

void uneven_prepare(struct uneven* uneven);
/* Launches as a group of NCCL's calls, also inside an open group. */
void uneven_launch(const struct uneven* uneven, ncclComm_t communicator, CUstream stream);
/* Launches by Windlass's function where there is one, else as above. */
void uneven_launch_whole(const struct uneven* uneven, ncclComm_t communicator, CUstream stream);
/* Writes the inputs, and guard bytes where no call may write. */
void uneven_fill(const struct uneven* uneven);
/* Compares every byte and adds all to the rank's digest. */
void uneven_verify(const struct uneven* uneven, struct rank* self);
void uneven_release(struct uneven* uneven);

/* Elements of all parts; the number of parts that are not empty. */
size_t uneven_total(const struct uneven* uneven);
int uneven_parts(const struct uneven* uneven);

/* The address of a function of Windlass, or NULL. */
void* windlass_function(const char* name);

#endif
