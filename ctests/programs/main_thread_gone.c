/* Holds that communicators are made as ever once the main thread has ended by pthread_exit: its folder in /proc is then that of a dead
 * thread. */
#include "../support/collective.h"

#include <pthread.h>
#include <stdlib.h>

struct life { pthread_t main_thread; struct rank* self; };

static void reduces(struct rank* self, ncclComm_t communicator, size_t count) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = count, .rank = self->rank,
                              .ranks = self->ranks, .key = count};
  transfer_run(&transfer, communicator, self);
}

static void* rest(void* argument) {
  struct life* life = argument;
  struct rank* self = life->self;
  CHECK(pthread_join(life->main_thread, NULL) == 0);
  use_device(self->device);
  for (int round = 0; round < 2; round++) {
    ncclComm_t communicator = NULL, child = NULL;
    ncclUniqueId id = share_id(self, 0, round);
    NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
    reduces(self, communicator, 5003);
    NCCL(ncclCommSplit(communicator, 0, self->rank, &child, NULL));
    reduces(self, child, 7001);
    meet(self);
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommDestroy(communicator));
  }
  wait_for(self->stream);
  CUDA(cuStreamDestroy_v2(self->stream));
  exit(0);
}

static void body(struct rank* self) {
  static struct life life;
  pthread_t thread;
  life = (struct life){pthread_self(), self};
  CHECK(pthread_create(&thread, NULL, rest, &life) == 0);
  pthread_exit(NULL);
}

int main(void) {
  begin("main_thread_gone", 60);
  run_ranks("main thread gone", PROCESSES, rank_count(4), body, NULL);
  return finish();
}
