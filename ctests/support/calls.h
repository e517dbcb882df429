/* A call drawn from a seed: what it gives and gets, where each rank reads and writes, the call itself, and whether its output
 * is right. Inputs are values that all ranks know (values.h), so every rank can say what any other gives. */
#ifndef WINDLASS_CTESTS_CALLS_H
#define WINDLASS_CTESTS_CALLS_H

#include "collective.h"
#include "values.h"

enum { SHIFT = COLLECTIVES }; /* every rank sends to the one `root` further on; in groups alone */
/* What buffers are aligned to, or not, in bytes; and room for that and for what must stay as it was. */
enum { LINE = 256, SLACK = 2 * LINE };

/* A communicator: which ranks of the section it has, in its own order. Of a place of two halves, each rank's own half. */
struct place { int ranks, members[RANKS_MAX]; ncclComm_t communicator; int own; /* -1: not a member */ };

struct call {
  int which; /* enum collective, or SHIFT */
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;
  int root;
  bool in_place, real;
  uint64_t key; /* chooses where each rank reads and writes */
  size_t area;  /* where its place in the received bytes begins */
};

/* Blocks of `count` elements that a rank gives, and gets. */
size_t blocks_given(const struct call* call, int ranks);
size_t blocks_gotten(const struct call* call, int ranks);
size_t block_bytes(const struct call* call);
/* Of a rank's larger buffer. */
size_t larger_bytes(const struct call* call, int ranks);
bool call_reduces(const struct call* call);
/* Whether the output of a rank is written at all. */
bool call_writes(const struct call* call, int own);
/* Whether this rank's input and output are one buffer. */
bool shares_buffer(const struct call* call, int own);

/* Where a rank's input lies: half begin at a multiple of LINE, the rest at any element. */
struct source source_of(const struct call* call, int rank, int ranks);
/* Where a rank's output begins, or in place its buffer. */
size_t output_of(const struct call* call, int rank);

/* Issues one rank's call; `values` are its own on the device, `received` where outputs go. */
void call_issue(const struct call* call, const struct place* place, int rank, char* values, char* received, CUstream stream);
/* The first byte of an output of `bytes` that is not as it must be; `bytes` if all are. */
size_t call_differs(const struct call* call, const struct place* place, const unsigned char* seen, size_t bytes);
/* For standard error: the call in words. */
void call_tell(const struct call* call, const struct place* place);

#endif
