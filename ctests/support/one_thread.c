/* All ranks on one thread: see one_thread.h. */
#include "one_thread.h"

struct one_thread one_thread_begin(const char* section, int ranks) {
  struct one_thread self = {.ranks = ranks, .all = {.ranks = ranks}};
  section_begins(section);
  for (int device = 0; device < ranks; device++) {
    self.contexts[device] = use_device(device);
    self.streams[device] = new_stream();
  }
  return self;
}

void one_thread_use(const struct one_thread* self, int device) { CUDA(cuCtxSetCurrent(self->contexts[device])); }

void one_thread_runs(struct one_thread* self, struct transfer what, const ncclComm_t* communicators, const int* places) {
  struct transfer transfers[RANKS_MAX];
  for (int device = 0; device < self->ranks; device++) {
    one_thread_use(self, device);
    transfers[device] = what;
    transfers[device].rank = places ? places[device] : device;
    transfers[device].ranks = self->ranks;
    transfer_prepare(&transfers[device]);
  }
  NCCL(ncclGroupStart());
  for (int device = 0; device < self->ranks; device++) {
    transfer_launch(&transfers[device], communicators[device], self->streams[device]);
  }
  NCCL(ncclGroupEnd());
  for (int device = 0; device < self->ranks; device++) {
    one_thread_use(self, device);
    wait_for(self->streams[device]);
    transfer_verify(&transfers[device], &self->all);
    transfer_release(&transfers[device]);
  }
}

void one_thread_end_streams(struct one_thread* self) {
  for (int device = 0; device < self->ranks; device++) {
    one_thread_use(self, device);
    CUDA(cuStreamDestroy_v2(self->streams[device]));
  }
}

void one_thread_print(const struct one_thread* self, const char* section) {
  printf("%s digest %016llx\n", section, (unsigned long long)self->all.digest);
  fflush(stdout);
}
