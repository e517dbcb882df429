/* Holds that memory from ncclMemAlloc, registered buffers and symmetric windows are accepted, that collectives on them give the
 * same results, and that they can be deregistered and freed. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

enum { BYTES = 4 << 20, COUNT = 100003 };

static int version;

/* An all-reduce from the first half of `memory` into the second. */
static void reduce_within(struct rank* self, ncclComm_t communicator, char* memory, uint64_t key) {
  size_t bytes = COUNT * sizeof(float);
  char* host = malloc(bytes);
  char* wanted = malloc(bytes);
  input_fill(host, key, self->rank, 0, COUNT, ncclFloat, ncclSum);
  upload(memory, host, bytes);
  NCCL(ncclAllReduce(memory, memory + BYTES / 2, COUNT, ncclFloat, ncclSum, communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  download(host, memory + BYTES / 2, bytes);
  reduced_fill(wanted, key, self->ranks, 0, COUNT, ncclFloat, ncclSum, 1);
  CHECK(memcmp(host, wanted, bytes) == 0);
  record(self, host, bytes);
  free(host);
  free(wanted);
}

static void allocated(struct rank* self, ncclComm_t communicator) {
  void* memory = NULL;
  NCCL(ncclMemAlloc(&memory, BYTES));
  CHECK(memory != NULL);
  reduce_within(self, communicator, memory, 1);
  NCCL(ncclMemFree(memory));
  NCCL(ncclMemFree(NULL));
}

static void registered(struct rank* self, ncclComm_t communicator) {
  void *memory = NULL, *handle = NULL;
  NCCL(ncclMemAlloc(&memory, BYTES));
  NCCL(ncclCommRegister(communicator, memory, BYTES, &handle));
  reduce_within(self, communicator, memory, 2);
  reduce_within(self, communicator, memory, 3);
  meet(self); /* a peer may still be reading this buffer when this rank's stream is done */
  NCCL(ncclCommDeregister(communicator, handle));
  reduce_within(self, communicator, memory, 4);
  NCCL(ncclMemFree(memory));
}

static void in_a_window(struct rank* self, ncclComm_t communicator) {
  void* memory = NULL;
  ncclWindow_t window = NULL;
  NCCL(ncclMemAlloc(&memory, BYTES));
  NCCL(ncclCommWindowRegister(communicator, memory, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
  reduce_within(self, communicator, memory, 5);
  meet(self);
  /* Where the machine supports no windows the library returns success and no window. */
  if (window) NCCL(ncclCommWindowDeregister(communicator, window));
  reduce_within(self, communicator, memory, 6);
  NCCL(ncclMemFree(memory));
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  ncclComm_t communicator = world(self, 0);
  allocated(self, communicator);
  registered(self, communicator);
  if (version >= 22703) in_a_window(self, communicator);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("registration", 60);
  run_ranks("registration", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
