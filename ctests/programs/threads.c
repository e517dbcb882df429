/* Holds that many ranks can live in one process. Cases: each on its own thread, all on one thread in groups, and inits grouped
 * on one thread, each with the device that was current at its call. */
#include "../support/one_thread.h"

static void on_own_thread(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  for (int round = 0; round < 40; round++) {
    struct transfer transfer = {.which = (enum collective)(round % COLLECTIVES_OF_2_18), .type = ncclFloat,
                                .op = ncclSum, .count = 1 + 97 * (size_t)round, .root = round % self->ranks,
                                .rank = self->rank, .ranks = self->ranks, .key = 1000 + (uint64_t)round};
    transfer_run(&transfer, communicator, self);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

static void on_one_thread(int ranks) {
  struct one_thread all = one_thread_begin("one thread", ranks);
  ncclComm_t communicators[RANKS_MAX];
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < ranks; rank++) {
    one_thread_use(&all, rank);
    NCCL(ncclCommInitRank(&communicators[rank], ranks, id, rank));
  }
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < ranks; rank++) {
    int device = -1;
    NCCL(ncclCommCuDevice(communicators[rank], &device));
    EQUAL(device, rank);
  }
  for (int round = 0; round < 20; round++) {
    struct transfer what = {.which = (enum collective)(round % COLLECTIVES_OF_2_18), .type = ncclInt32, .op = ncclMax,
                            .count = 1 + 31 * (size_t)round, .root = round % ranks, .key = 2000 + (uint64_t)round};
    one_thread_runs(&all, what, communicators, NULL);
  }
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  NCCL(ncclGroupEnd());
  one_thread_end_streams(&all);
  one_thread_print(&all, "one thread");
}

int main(void) {
  begin("threads", 60);
  int ranks = rank_count(4);
  run_ranks("own threads", THREADS, ranks, on_own_thread, NULL);
  on_one_thread(ranks);
  return finish();
}
