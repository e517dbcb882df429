/* All ranks of a communicator in one process, on one thread: the calls of all of them stand in one group. */
#ifndef WINDLASS_CTESTS_ONE_THREAD_H
#define WINDLASS_CTESTS_ONE_THREAD_H

#include "collective.h"

struct one_thread {
  int ranks;
  CUcontext contexts[RANKS_MAX]; /* of devices 0, 1, ... */
  CUstream streams[RANKS_MAX];   /* one for each context */
  struct rank all;               /* holds the digest of all ranks' results */
};

/* Makes contexts and streams; leaves the last device current. */
struct one_thread one_thread_begin(const char* section, int ranks);
void one_thread_use(const struct one_thread* self, int device);
/* Runs one collective and verifies it on all ranks. `communicators` are in the order of devices. `what` has all but the ranks.
 * `places` gives each device's rank; NULL if that is the device's number. */
void one_thread_runs(struct one_thread* self, struct transfer what, const ncclComm_t* communicators, const int* places);
void one_thread_end_streams(struct one_thread* self);
/* Prints the digest. */
void one_thread_print(const struct one_thread* self, const char* section);

#endif
