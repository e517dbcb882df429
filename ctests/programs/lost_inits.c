/* Holds that the resources of an init are freed as soon as NCCL has returned that there is no communicator, and not only when
 * its handle is aborted. Cases: alone and in groups, by one thread, for splits. On request the simulator lets inits 2, 4, 5 and
 * 6 of every process fail. Earlier and later communicators work. A group that NCCL will not run, because a call in it was wrong,
 * waits for no other rank. */
#include "../support/collective.h"

#include <time.h>
#include <unistd.h>

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void works(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 519, .rank = self->rank,
                              .ranks = self->ranks, .key = key};
  transfer_run(&transfer, communicator, self);
}

static size_t free_bytes(void) {
  size_t bytes = 0, all = 0;
  CUDA(cuMemGetInfo_v2(&bytes, &all));
  return bytes;
}

/* Waits up to ten seconds: the other ranks may take a moment to release memory. */
static bool comes_back(size_t bytes) {
  double began = seconds();
  while (free_bytes() < bytes && seconds() - began < 10) usleep(1000);
  return free_bytes() >= bytes;
}

static void give_up(ncclComm_t communicator) {
  if (communicator != NULL) NCCL(ncclCommAbort(communicator));
}

static void lost(struct rank* self) {
  size_t before = free_bytes();
  ncclComm_t first = world(self, 0), parent, last, communicator = NULL;
  works(self, first, 1);
  NCCL(ncclCommDestroy(first));
  CHECK(comes_back(before));

  ncclUniqueId id = share_id(self, 1, 0);
  NCCL(ncclGroupStart());
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  CODE(ncclGroupEnd(), ncclRemoteError);
  CHECK(comes_back(before));
  give_up(communicator);

  parent = world(self, 2);
  works(self, parent, 2);
  size_t with_parent = free_bytes();
  communicator = NULL;
  NCCL(ncclGroupStart());
  NCCL(ncclCommSplit(parent, 7, self->rank, &communicator, NULL));
  CODE(ncclGroupEnd(), ncclRemoteError);
  CHECK(communicator == NULL);
  CODE(ncclCommSplit(parent, 8, self->rank, &communicator, NULL), ncclRemoteError);
  CHECK(communicator == NULL);
  CHECK(comes_back(with_parent));
  works(self, parent, 3);

  id = share_id(self, 3, 0);
  CODE(ncclCommInitRank(&communicator, self->ranks, id, self->rank), ncclRemoteError);
  CHECK(comes_back(with_parent));
  give_up(communicator);
  last = world(self, 4);
  works(self, last, 4);
  works(self, parent, 5);
  NCCL(ncclCommDestroy(last));
  NCCL(ncclCommDestroy(parent));
  CHECK(comes_back(before));
}

/* Two inits by one thread, by one call and in a group: the second of each two fails. */
static void by_one_thread(void) {
  CUcontext contexts[2];
  size_t before[2];
  for (int rank = 0; rank < 2; rank++) {
    contexts[rank] = use_device(rank);
    CUDA(cuCtxSetCurrent(contexts[rank]));
    before[rank] = free_bytes();
  }
  for (int round = 0; round < 3; round++) {
    ncclComm_t communicators[2] = {NULL, NULL};
    if (round == 0) {
      CODE(ncclCommInitAll(communicators, 2, NULL), ncclRemoteError);
    } else {
      ncclUniqueId id;
      if (round == 1) NCCL(ncclGetUniqueId(&id));
      NCCL(ncclGroupStart());
      if (round == 2) NCCL(ncclCommInitAll(communicators, 2, NULL));
      for (int rank = 0; round == 1 && rank < 2; rank++) {
        CUDA(cuCtxSetCurrent(contexts[rank]));
        NCCL(ncclCommInitRank(&communicators[rank], 2, id, rank));
      }
      CODE(ncclGroupEnd(), ncclRemoteError);
    }
    for (int rank = 0; rank < 2; rank++) {
      CUDA(cuCtxSetCurrent(contexts[rank]));
      CHECK(comes_back(before[rank]));
    }
    for (int rank = 0; rank < 2; rank++) give_up(communicators[rank]);
  }
}

/* Rank 0 makes a wrong call in its group, and rank 1 never comes. */
static void a_wrong_group(struct rank* self) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  if (self->rank == 0) {
    double began = seconds();
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
    CODE(ncclCommInitRank(NULL, self->ranks, id, self->rank), ncclInvalidArgument);
    CODE(ncclGroupEnd(), ncclInvalidArgument);
    CHECK(seconds() - began < 10);
    give_up(communicator);
  }
  meet(self);
}

int main(int count, char** parts) {
  begin("lost inits", 60);
  int ranks = rank_count(3);
  if (is_wanted(count, parts, "lost")) run_ranks("lost", PROCESSES, ranks, lost, NULL);
  if (is_wanted(count, parts, "wrong")) run_ranks("a wrong group", PROCESSES, 2, a_wrong_group, NULL);
  if (is_wanted(count, parts, "one_thread")) by_one_thread();
  return finish();
}
