/* All-gathers large enough to gain by registered buffers (8 MiB in total and more), from input to verified output, in the
 * caller's memory. Inputs are cheap patterns. Every byte is compared, also before and behind the output. */
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
  int from;     /* rank r gives the input of rank r + from, for chains in which each passes on what it got before */
  bool guarded; /* GUARD_BYTES of the caller's are before and behind the output */
};

/* The elements of one byte that each rank gives for GATHER_BYTES in total, and `more` for each rank. */
size_t gather_count(const struct rank* self, size_t more);
/* Bytes of an output and its guards, for `count` bytes a rank. */
size_t gather_room(const struct rank* self, size_t count);
/* A gather of bytes from `send` into `memory`, behind a guard at `offset`; in place if `send` is NULL. */
struct gather gather_into(const struct rank* self, const char* send, const struct memory* memory, size_t offset, size_t count,
                          uint64_t key);

/* Overwrites the output and its guards, then writes the input. Waits for all work of the device. */
void gather_prepare(const struct gather* gather);
void gather_launch(const struct gather* gather, ncclComm_t communicator, CUstream stream);
/* Compares the output and adds it to the rank's digest. */
void gather_verify(const struct gather* gather, struct rank* self);
/* Holds that nothing was written since `gather_prepare`. */
void gather_untouched(const struct gather* gather);
/* Prepares, launches, waits and verifies. */
void gather_run(struct rank* self, ncclComm_t communicator, const struct gather* gather);

#endif
