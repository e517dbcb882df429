/* All-gathers and reduce-scatters whose ranks have parts of different sizes: as a group of broadcasts or reduces with a root
 * each, or by Windlass's own functions; from input to verified output. */
#ifndef WINDLASS_CTESTS_UNEVEN_H
#define WINDLASS_CTESTS_UNEVEN_H

#include "reference.h"

struct uneven {
  /* What is asked for. */
  bool reduces;           /* a reduce-scatter-v, else an all-gather-v */
  size_t counts[RANKS_MAX]; /* elements of each rank's part */
  ncclDataType_t type;
  ncclRedOp_t op;
  bool in_place, packed;  /* packed: parts lie one behind the other, in the order of ranks; else the last rank's first, with gaps */
  bool backwards;         /* the last rank's call comes first */
  int rank, ranks;
  uint64_t key;           /* chooses the inputs: equal on all ranks, different in every call */
  /* What prepare makes: one allocation. */
  unsigned char* memory;
  size_t bytes, displacements[RANKS_MAX], own; /* elements from the beginning */
};

void uneven_prepare(struct uneven* uneven);
/* As NCCL has it: within an open group, or in one of its own. */
void uneven_launch(const struct uneven* uneven, ncclComm_t communicator, CUstream stream);
/* By Windlass's function, where there is one; else as above. */
void uneven_launch_whole(const struct uneven* uneven, ncclComm_t communicator, CUstream stream);
/* Writes the inputs again, and what no call may touch. */
void uneven_fill(const struct uneven* uneven);
/* Compares every byte; adds them to the rank's digest. */
void uneven_verify(const struct uneven* uneven, struct rank* self);
void uneven_release(struct uneven* uneven);

/* Elements of all parts, and how many are not empty. */
size_t uneven_total(const struct uneven* uneven);
int uneven_parts(const struct uneven* uneven);

/* A function of Windlass's, or null. */
void* windlass_function(const char* name);

#endif
