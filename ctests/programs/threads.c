/* Holds: many ranks live in one process: each on its own thread, all on one thread in groups, and inits grouped on
 * one thread, each with the device that was current when it was called. */
#include "../support/collective.h"

static void on_own_thread(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  for (int round = 0; round < 40; round++) {
    struct transfer transfer = {.which = (enum collective)(round % COLLECTIVES_OF_2_18), .type = ncclFloat,
                                .op = ncclSum, .count = 1 + 97 * (size_t)round, .root = round % self->ranks,
                                .rank = self->rank, .ranks = self->ranks, .key = 1000 + (uint64_t)round};
    transfer_prepare(&transfer);
    transfer_launch(&transfer, communicator, self->stream);
    wait_for(self->stream);
    transfer_verify(&transfer, self);
    transfer_release(&transfer);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

static void on_one_thread(int ranks) {
  ncclComm_t communicators[RANKS_MAX];
  CUcontext contexts[RANKS_MAX];
  CUstream streams[RANKS_MAX];
  struct transfer transfers[RANKS_MAX];
  struct rank all = {.ranks = ranks};
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < ranks; rank++) {
    contexts[rank] = use_device(rank);
    streams[rank] = new_stream();
    NCCL(ncclCommInitRank(&communicators[rank], ranks, id, rank));
  }
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < ranks; rank++) {
    int device = -1;
    NCCL(ncclCommCuDevice(communicators[rank], &device));
    EQUAL(device, rank);
  }
  for (int round = 0; round < 20; round++) {
    for (int rank = 0; rank < ranks; rank++) {
      CUDA(cuCtxSetCurrent(contexts[rank]));
      transfers[rank] = (struct transfer){.which = (enum collective)(round % COLLECTIVES_OF_2_18), .type = ncclInt32,
                                          .op = ncclMax, .count = 1 + 31 * (size_t)round, .root = round % ranks,
                                          .rank = rank, .ranks = ranks, .key = 2000 + (uint64_t)round};
      transfer_prepare(&transfers[rank]);
    }
    NCCL(ncclGroupStart());
    for (int rank = 0; rank < ranks; rank++) transfer_launch(&transfers[rank], communicators[rank], streams[rank]);
    NCCL(ncclGroupEnd());
    for (int rank = 0; rank < ranks; rank++) {
      CUDA(cuCtxSetCurrent(contexts[rank]));
      wait_for(streams[rank]);
      transfer_verify(&transfers[rank], &all);
      transfer_release(&transfers[rank]);
    }
  }
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < ranks; rank++) CUDA(cuStreamDestroy_v2(streams[rank]));
  printf("one thread digest %016llx\n", (unsigned long long)all.digest);
}

int main(void) {
  begin("threads", 60);
  int ranks = rank_count(4);
  run_ranks("own threads", THREADS, ranks, on_own_thread, NULL);
  on_one_thread(ranks);
  return finish();
}
