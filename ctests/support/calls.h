/* A collective drawn from a seed: its parameters, where each rank reads and writes, the call itself, and the check of its
 * output. Inputs are values that all ranks know (values.h), so every rank can compute what any other gives. */
#ifndef WINDLASS_CTESTS_CALLS_H
#define WINDLASS_CTESTS_CALLS_H

#include "collective.h"
#include "values.h"

enum { SHIFT = COLLECTIVES }; /* every rank sends to the one `root` further on; in groups alone */
/* Alignment of buffers in bytes; and room for an unaligned start and for bytes that the call must not write. */
enum { LINE = 256, SLACK = 2 * LINE };

/* A communicator and its members, as ranks of the section. A place of two halves holds each rank's own half. */
struct place { int ranks, members[RANKS_MAX]; ncclComm_t communicator; int own; /* -1: not a member */ };

struct call {
  int which; /* enum collective, or SHIFT */
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;
  int root;
  bool in_place, real;
  uint64_t key; /* chooses where each rank reads and writes */
  size_t area;  /* where its part of the received bytes begins */
};

/* Blocks of `count` elements of a rank's input and output. */
size_t blocks_given(const struct call* call, int ranks);
size_t blocks_gotten(const struct call* call, int ranks);
size_t block_bytes(const struct call* call);
/* Bytes of a rank's larger buffer. */
size_t larger_bytes(const struct call* call, int ranks);
bool call_reduces(const struct call* call);
/* Whether the call writes the output of rank `own`. */
bool call_writes(const struct call* call, int own);
/* Whether input and output of rank `own` are one buffer. */
bool shares_buffer(const struct call* call, int own);

/* Where a rank's input begins: half of all at a multiple of LINE, the rest at any element. */
struct source source_of(const struct call* call, int rank, int ranks);
/* Where a rank's output begins, or its buffer if the call is in place. */
size_t output_of(const struct call* call, int rank);

/* Makes one rank's call. `values` are its own inputs on the device; outputs go into `received`. */
void call_issue(const struct call* call, const struct place* place, int rank, char* values, char* received, CUstream stream);
/* The first wrong byte of an output of `bytes` bytes; `bytes` if all are right. */
size_t call_differs(const struct call* call, const struct place* place, const unsigned char* seen, size_t bytes);
/* Prints the call to standard error. */
void call_tell(const struct call* call, const struct place* place);

#endif
