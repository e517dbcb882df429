/* Holds that communicators can be made and ended in every way that NCCL has, and that each works. Cases: init, with a
 * configuration, with several ids, split (no color, keys, nested), shrink, finalize, destroy, abort from another thread. */
#include "../support/one_thread.h"

#include <pthread.h>

static int version;

/* One all-reduce on a communicator of `ranks` ranks, in which this rank is `rank`. */
static void works(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  int seen_rank = -1, seen_ranks = -1, seen_device = -1;
  ncclResult_t state = ncclInternalError;
  NCCL(ncclCommUserRank(communicator, &seen_rank));
  NCCL(ncclCommCount(communicator, &seen_ranks));
  NCCL(ncclCommCuDevice(communicator, &seen_device));
  NCCL(ncclCommGetAsyncError(communicator, &state));
  EQUAL(seen_rank, rank);
  EQUAL(seen_ranks, ranks);
  EQUAL(seen_device, self->device);
  EQUAL(state, ncclSuccess);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 771, .rank = rank,
                              .ranks = ranks, .key = key};
  transfer_run(&transfer, communicator, self);
}

static void plain(struct rank* self) {
  for (int round = 0; round < 3; round++) {
    ncclComm_t communicator = world(self, 0);
    works(self, communicator, self->rank, self->ranks, 1 + (uint64_t)round);
    NCCL(ncclCommFinalize(communicator));
    NCCL(ncclCommDestroy(communicator));
  }
}

static void with_configuration(struct rank* self) {
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 1;
  configuration.minCTAs = 1;
  configuration.maxCTAs = 4;
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 1, self->ranks - 1);
  NCCL(ncclCommInitRankConfig(&communicator, self->ranks, id, self->rank, &configuration));
  works(self, communicator, self->rank, self->ranks, 10);
  NCCL(ncclCommDestroy(communicator));
}

static void with_several_ids(struct rank* self) {
  ncclUniqueId ids[2] = {share_id(self, 2, 0), share_id(self, 3, 1)};
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  ncclComm_t communicator = NULL;
  if (version < 22304) return;
  NCCL(ncclCommInitRankScalable(&communicator, self->ranks, self->rank, 2, ids, &configuration));
  works(self, communicator, self->rank, self->ranks, 20);
  NCCL(ncclCommDestroy(communicator));
}

/* Keys reverse the order of the ranks. */
static void split_by_key(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  NCCL(ncclCommSplit(parent, 0, -self->rank, &child, NULL));
  works(self, child, self->ranks - 1 - self->rank, self->ranks, 30);
  works(self, parent, self->rank, self->ranks, 31);
  NCCL(ncclCommDestroy(child));
}

/* Rank 0 has no color; the others split once more. */
static void split_without_color(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = (ncclComm_t)(uintptr_t)1, grandchild = NULL;
  NCCL(ncclCommSplit(parent, self->rank == 0 ? NCCL_SPLIT_NOCOLOR : 7, self->rank, &child, NULL));
  if (self->rank == 0) {
    CHECK(child == NULL);
    return;
  }
  works(self, child, self->rank - 1, self->ranks - 1, 40);
  NCCL(ncclCommSplit(child, self->rank % 2, 0, &grandchild, NULL));
  int ranks = 0;
  for (int rank = 1; rank < self->ranks; rank++) ranks += rank % 2 == self->rank % 2;
  works(self, grandchild, (self->rank - 1) / 2, ranks, 41);
  NCCL(ncclCommDestroy(grandchild));
  NCCL(ncclCommDestroy(child));
}

/* A child outlives its parent. */
static void child_outlives_parent(struct rank* self) {
  ncclComm_t parent = world(self, 4), child = NULL;
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.splitShare = 1;
  NCCL(ncclCommSplit(parent, self->rank / 2, self->rank, &child, &configuration));
  NCCL(ncclCommDestroy(parent));
  int ranks = self->ranks - self->rank / 2 * 2;
  works(self, child, self->rank % 2, ranks < 2 ? ranks : 2, 50);
  NCCL(ncclCommDestroy(child));
}

static void shrink(struct rank* self, ncclComm_t parent) {
  ncclComm_t smaller = NULL;
  int excluded = 0;
  if (version < 22703) return;
  if (self->rank != excluded) {
    NCCL(ncclCommShrink(parent, &excluded, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
    works(self, smaller, self->rank - 1, self->ranks - 1, 60);
    NCCL(ncclCommDestroy(smaller));
  }
  meet(self);
}

static void* abort_it(void* argument) {
  struct rank* self = argument;
  CUDA(cuCtxSetCurrent(self->context));
  NCCL(ncclCommAbort((ncclComm_t)self->argument));
  return NULL;
}

/* Rank 0 starts an all-reduce that no other rank joins. An abort from another thread ends it. */
static void abort_from_another_thread(struct rank* self) {
  struct rank aborting = *self;
  pthread_t thread;
  aborting.argument = world(self, 5);
  works(self, aborting.argument, self->rank, self->ranks, 70);
  void* buffer = device_alloc(4096);
  if (self->rank == 0) {
    NCCL(ncclAllReduce(buffer, buffer, 1024, ncclFloat, ncclSum, aborting.argument, as_cuda(self->stream)));
  }
  if (pthread_create(&thread, NULL, abort_it, &aborting)) return;
  pthread_join(thread, NULL);
  cuStreamSynchronize(self->stream); /* it returns; its result is not guaranteed */
  device_free(buffer);
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(plain, self);
  RUN_PART(with_configuration, self);
  RUN_PART(with_several_ids, self);
  ncclComm_t parent = world(self, 6);
  RUN_PART(split_by_key, self, parent);
  RUN_PART(split_without_color, self, parent);
  RUN_PART(child_outlives_parent, self);
  RUN_PART(shrink, self, parent);
  works(self, parent, self->rank, self->ranks, 80);
  NCCL(ncclCommDestroy(parent));
  RUN_PART(abort_from_another_thread, self);
}

/* All communicators of one process are made by one call; each collective of all ranks is one group. */
static void init_all(int ranks) {
  struct one_thread all = one_thread_begin("init all", ranks);
  ncclComm_t communicators[RANKS_MAX];
  NCCL(ncclCommInitAll(communicators, ranks, NULL));
  one_thread_runs(&all, (struct transfer){.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 5003, .key = 90},
                  communicators, NULL);
  one_thread_end_streams(&all);
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  one_thread_print(&all, "init-all");
}

int main(int count, char** words) {
  begin("lifecycle", 90);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("lifecycle", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("one_thread")) init_all(ranks);
  return finish();
}
