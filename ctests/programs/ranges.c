/* Holds that calls that Windlass runs have NVTX ranges in NCCL's domain, with NCCL's payloads, and that calls that NCCL runs have none of
 * Windlass. CTESTS_NVTX names the library of support/nvtx_injection.c. */
#include "../support/nvtx_injection.h"
#include "../support/team.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int (*faults)(void), (*count)(void);
static struct range (*at)(int);

static void next_is(int* index, const char* name, uint64_t bytes, int first, int second) {
  if (!CHECK(*index < count())) return;
  struct range range = at((*index)++), before = at(0);
  CHECK(!strcmp(range.name, name));
  EQUAL(range.bytes, bytes);
  EQUAL(range.more[0], first);
  EQUAL(range.more[1], second);
  CHECK(range.communicator && range.communicator == before.communicator);
}

static void body(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  void* library = dlopen(getenv("CTESTS_NVTX"), RTLD_NOW);
  if (!CHECK(library)) return;
  *(void**)&faults = dlsym(library, "nvtx_faults");
  *(void**)&count = dlsym(library, "nvtx_ranges");
  *(void**)&at = dlsym(library, "nvtx_range");
  size_t large = 6 << 20;
  float* buffer = device_alloc(large);
  cudaStream_t stream = as_cuda(self->stream);
  int last = self->ranks - 1, next = (self->rank + 1) % self->ranks, before = (self->rank + last) % self->ranks, index = 0;
  device_fill(buffer, 0, large);
  EQUAL(count(), 0);
  NCCL(ncclAllReduce(buffer, buffer, 100, ncclFloat, ncclMax, communicator, stream));
  NCCL(ncclReduce(buffer, buffer, 10, ncclFloat, ncclSum, last, communicator, stream));
  NCCL(ncclAllReduce(buffer, buffer, large / 4, ncclFloat, ncclSum, communicator, stream));
  NCCL(ncclBroadcast(buffer, buffer, 20, ncclInt8, 1, communicator, stream));
  NCCL(ncclGroupStart());
  NCCL(ncclSend(buffer, 30, ncclFloat, next, communicator, stream));
  NCCL(ncclRecv(buffer + 100, 30, ncclFloat, before, communicator, stream));
  NCCL(ncclAllGather(buffer + 200, buffer + 300, 5, ncclFloat, communicator, stream));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  next_is(&index, "ncclAllReduce", 400, ncclMax, 0);
  next_is(&index, "ncclReduce", 40, last, ncclSum);
  next_is(&index, "ncclBroadcast", 20, 1, 0);
  next_is(&index, "ncclSend", 120, next, 0);
  next_is(&index, "ncclRecv", 120, before, 0);
  next_is(&index, "ncclAllGather", 20, 0, 0);
  EQUAL(count(), index);
  EQUAL(faults(), 0);
  device_free(buffer);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("ranges", 60);
  run_ranks("processes", PROCESSES, rank_count(4), body, NULL);
  return finish();
}
