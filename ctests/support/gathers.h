/* All-gathers large enough that registered buffers pay, from input to verified output, in memory of the caller's: 8 MiB in
 * total and more. Inputs are cheap patterns; every byte is compared, also before and behind the output. */
#ifndef WINDLASS_CTESTS_GATHERS_H
#define WINDLASS_CTESTS_GATHERS_H

#include "memory.h"

enum { GATHER_BYTES = 8 << 20, GUARD_BYTES = 64 };

struct gather {
  const char* send;
  char* receive;
  size_t count; /* elements that each rank gives */
  ncclDataType_t type;
  uint64_t key; /* chooses the inputs: equal on all ranks, different in every call */
  int rank, ranks;
  int from;     /* whose input rank r gives: that of rank r + from, where each passes on what it got before */
  bool guarded; /* GUARD_BYTES of the caller's lie before and behind the output */
};

/* Elements of one byte that each rank gives, so that it is GATHER_BYTES in total and `more` from each. */
size_t gather_count(const struct rank* self, size_t more);
/* Bytes of a buffer for a gather of `count` bytes, its guards too. */
size_t gather_room(const struct rank* self, size_t count);
/* Out of place, from `send` into `memory` at `offset` behind a guard; in place without `send`. Elements are bytes. */
struct gather gather_into(const struct rank* self, const char* send, const struct memory* memory, size_t offset, size_t count,
                          uint64_t key);

/* Writes other bytes over the output and its guards, then the input. Waits for all work of the device. */
void gather_prepare(const struct gather* gather);
void gather_launch(const struct gather* gather, ncclComm_t communicator, CUstream stream);
/* Compares; adds the output to the rank's digest. */
void gather_verify(const struct gather* gather, struct rank* self);
/* Holds that nothing arrived since `prepare`. */
void gather_untouched(const struct gather* gather);
/* Prepare, launch, wait, verify. */
void gather_run(struct rank* self, ncclComm_t communicator, const struct gather* gather);

#endif
