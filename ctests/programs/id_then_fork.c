/* Holds that workers forked after their launcher has made an id, have communicators as if it had made none, also where a worker
 * forks another process before it makes a communicator. The launcher makes no call of CUDA. */
#include "../support/collective.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void work(struct rank* self, ncclUniqueId id, uint64_t key) {
  ncclComm_t communicator = NULL, half = NULL;
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  NCCL(ncclCommSplit(communicator, self->rank / 2, self->rank, &half, NULL));
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 5003, .rank = self->rank,
                              .ranks = self->ranks, .key = key};
  transfer_run(&transfer, communicator, self);
  meet(self);
  NCCL(ncclCommDestroy(half));
  NCCL(ncclCommDestroy(communicator));
}

static void by_launcher(struct rank* self) { work(self, *(const ncclUniqueId*)self->argument, 1); }
static void by_worker(struct rank* self) { work(self, share_id(self, 0, 1), 2); }

/* An id of a process that makes no communicator itself, so no report counts the call. */
static ncclUniqueId uncounted_id(void) {
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id) == ncclSuccess);
  return id;
}

/* Does not use the harness's ranks, which use the GPU before they run this: each worker makes an id, and then forks the rank. */
static void in_turn(int ranks, const ncclUniqueId* id) {
  pid_t workers[RANKS_MAX];
  int status = -1;
  section_begins("in turn");
  fflush(NULL);
  for (int rank = 0; rank < ranks; rank++) {
    if ((workers[rank] = fork())) continue;
    uncounted_id();
    pid_t child = fork();
    if (!child) {
      ncclComm_t communicator = NULL;
      int count = 0;
      use_device(rank);
      NCCL(ncclCommInitRank(&communicator, ranks, *id, rank));
      NCCL(ncclCommCount(communicator, &count));
      EQUAL(count, ranks);
      NCCL(ncclCommDestroy(communicator));
      exit(0);
    }
    _exit(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  for (int rank = 0; rank < ranks; rank++) {
    CHECK(waitpid(workers[rank], &status, 0) == workers[rank] && WIFEXITED(status) && !WEXITSTATUS(status));
  }
}

int main(void) {
  begin("id_then_fork", 60);
  int ranks = rank_count(4);
  ncclUniqueId id = uncounted_id(), other = uncounted_id();
  run_ranks("id of the launcher", PROCESSES, ranks, by_launcher, &id);
  run_ranks("id of a worker", PROCESSES, ranks, by_worker, NULL);
  in_turn(ranks, &other);
  return finish();
}
