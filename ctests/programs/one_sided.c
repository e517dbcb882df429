/* Holds that a put (NCCL 2.29.2) reads what an earlier all-reduce of its communicator has written, although nothing joins the
 * streams of the two. Ranks take turns at being late. Runs on the simulator with newer_nccl.c, where a window is an address. */
#include "../support/harness.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { COUNT = 200, LATE_US = 40000 };

static atomic_bool is_late;

static void be_late(void* nothing) {
  (void)nothing;
  if (atomic_load(&is_late)) usleep(LATE_US);
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  int32_t host[COUNT], seen[COUNT];
  void *reduced = device_alloc(sizeof host), *put = device_alloc(sizeof host);
  CUstream other = new_stream();
  for (int round = 0; round < 2 * self->ranks; round++) {
    for (int i = 0; i < COUNT; i++) host[i] = (self->rank + 1) * i;
    upload(reduced, host, sizeof host);
    device_fill(put, 0, sizeof host);
    atomic_store(&is_late, round % self->ranks == self->rank);
    CUDA(cuLaunchHostFunc(self->stream, be_late, NULL));
    NCCL(ncclAllReduce(reduced, reduced, COUNT, ncclInt32, ncclSum, communicator, as_cuda(self->stream)));
    NCCL(ncclPutSignal(reduced, sizeof host, ncclUint8, self->rank, (ncclWindow_t)put, 0, 0, 0, 0, communicator, as_cuda(other)));
    wait_for(other);
    download(seen, put, sizeof seen);
    wait_for(self->stream);
    for (int i = 0; i < COUNT; i++) {
      if (!EQUAL(seen[i], self->ranks * (self->ranks + 1) / 2 * i)) break;
    }
    record(self, seen, sizeof seen);
  }
  CUDA(cuStreamDestroy_v2(other));
  device_free(reduced);
  device_free(put);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("one_sided", 60);
  run_ranks("processes", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
