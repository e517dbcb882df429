/* Holds that where ranks cannot reduce in fixed order, reductions that round go to NCCL and are counted, or with
 * WINDLASS_ORDER=strict (the word `strict`) are refused, alone and in a group. Calls that have only one order run as ever:
 * integers, maxima, copies, no elements, one rank. */
#include "../support/harness.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1000, BYTES = 8 * COUNT };

static bool is_strict;

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0), alone = NULL;
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclCommInitRank(&alone, 1, id, 0));
  void* buffer = device_alloc(BYTES);
  device_fill(buffer, 0, BYTES);
  cudaStream_t stream = as_cuda(self->stream);
  /* Reductions that round. */
  ncclResult_t lost = is_strict ? ncclInvalidUsage : ncclSuccess;
  CODE(ncclAllReduce(buffer, buffer, COUNT, ncclFloat, ncclSum, communicator, stream), lost);
  CODE(ncclReduce(buffer, buffer, COUNT, ncclHalf, ncclProd, 0, communicator, stream), lost);
  CODE(ncclReduceScatter(buffer, buffer, 10, ncclDouble, ncclAvg, communicator, stream), lost);
  NCCL(ncclGroupStart());
  CODE(ncclAllReduce(buffer, buffer, COUNT, ncclBfloat16, ncclSum, communicator, stream), lost);
  CODE(ncclGroupEnd(), lost);
  /* The first call, too, of a communicator that Windlass did not see made. */
  ncclComm_t unseen = NULL;
  if (getenv("NCCL_P2P_DISABLE")) {
    void* real = dlopen(getenv("WINDLASS_NCCL"), RTLD_NOW);
    ncclResult_t (*split)(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) = NULL;
    *(void**)&split = real ? dlsym(real, "ncclCommSplit") : NULL;
    CHECK(split != NULL);
    if (split) EQUAL(split(communicator, 0, self->rank, &unseen, NULL), ncclSuccess);
    CODE(ncclAllReduce(buffer, buffer, COUNT, ncclFloat, ncclSum, unseen, stream), lost);
  }
  /* Calls that do not round. */
  NCCL(ncclAllReduce(buffer, buffer, COUNT, ncclInt32, ncclSum, communicator, stream));
  NCCL(ncclAllReduce(buffer, buffer, COUNT, ncclFloat, ncclMax, communicator, stream));
  NCCL(ncclBroadcast(buffer, buffer, COUNT, ncclFloat, 0, communicator, stream));
  NCCL(ncclAllReduce(buffer, buffer, 0, ncclFloat, ncclSum, communicator, stream));
  NCCL(ncclAllReduce(buffer, buffer, COUNT, ncclFloat, ncclSum, alone, stream));
  wait_for(self->stream);
  ncclResult_t state = ncclInternalError;
  NCCL(ncclCommGetAsyncError(communicator, &state));
  EQUAL(state, ncclSuccess);
  device_free(buffer);
  if (unseen) NCCL(ncclCommDestroy(unseen));
  NCCL(ncclCommDestroy(alone));
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** arguments) {
  is_strict = count > 1 && strcmp(arguments[1], "strict") == 0;
  begin("order lost", 60);
  run_ranks("processes", PROCESSES, rank_count(2), all, NULL);
  return finish();
}
