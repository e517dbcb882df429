/* One collective call from input to verified output: prepare, launch, verify, clear, release. */
#ifndef WINDLASS_CTESTS_COLLECTIVE_H
#define WINDLASS_CTESTS_COLLECTIVE_H

#include "reference.h"

enum collective {
  ALL_REDUCE, REDUCE, BROADCAST, BCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER,
  COLLECTIVES, /* their number */
  COLLECTIVES_OF_2_18 = ALL_TO_ALL,
};

struct transfer {
  /* Set by the caller. */
  enum collective which;
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;
  int root, rank, ranks;
  bool in_place;
  uint64_t key; /* chooses the inputs: equal on all ranks, different in every call */
  /* Set by transfer_prepare. */
  void *input, *output; /* device memory; no input if in place */
  const void* send;
  void* receive;
  size_t send_bytes, receive_bytes;
};

/* How many collectives the library has, from its version. */
int collectives_known(void);
const char* collective_name(enum collective which);
bool collective_reduces(enum collective which);
bool collective_can_be_in_place(enum collective which);
/* Whether an average over `ranks` ranks is exact in `type`. */
bool average_is_exact(ncclDataType_t type, int ranks);

void transfer_prepare(struct transfer* transfer);
void transfer_launch(const struct transfer* transfer, ncclComm_t communicator, CUstream stream);
/* Compares the output with the host reference and checks that nothing else was written. Adds the output to the rank's digest. */
void transfer_verify(const struct transfer* transfer, struct rank* self);
/* Before another run: clears the output as `transfer_prepare` did, unless it is the input, too. */
void transfer_clear(const struct transfer* transfer);
void transfer_release(struct transfer* transfer);
/* Prepares, launches, waits, verifies and releases, on the rank's stream. */
void transfer_run(struct transfer* transfer, ncclComm_t communicator, struct rank* self);

#endif
