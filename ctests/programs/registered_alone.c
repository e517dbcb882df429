/* Holds that large all-gathers are right where one rank alone does something: stages calls on two streams in turn, registers a
 * buffer of its own, or (only with the word `without`) has WINDLASS_REGISTER=off. In the latter two ranks stop registering, and
 * the runner checks that in the reports. Ranks are processes, then threads; words as `choose` has them. */
#include "../support/gathers.h"

#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20 };

/* Slots of share_id. */
enum { FIRST };

static void gathers_in(struct rank* self, ncclComm_t communicator, const struct memory* memory, int calls, uint64_t key) {
  size_t count = gather_count(self, 0);
  for (int call = 0; call < calls; call++) {
    struct gather gather = gather_into(self, NULL, memory, 0, count, key + (uint64_t)call);
    gather_run(self, communicator, &gather);
    meet(self);
  }
}

/* One rank is last to calls on two streams in turn, some of which have memory that cannot be registered. The copy staged for a
 * call must stay until it is read, whichever stream the next call is on. */
static void turns(struct rank* self) {
  enum { CALLS = 6 };
  static const struct { int stream; bool is_bad; } plan[CALLS] = {{0, true}, {1, false}, {1, true}, {0, false}, {0, true}, {1, true}};
  ncclComm_t communicator = world(self, FIRST);
  CUstream streams[] = {self->stream, new_stream()};
  size_t large = gather_count(self, 0) * 4, small = gather_count(self, 0), room = gather_room(self, large);
  struct memory good[CALLS], plain[CALLS];
  for (int i = 0; i < CALLS; i++) {
    good[i] = memory_alloc(self, i % 2 ? MAPPED : NCCLS, room);
    plain[i] = memory_alloc(self, PLAIN, room);
  }
  for (uint64_t round = 0; round < 3; round++) {
    bool is_last = self->rank == (int)round % self->ranks;
    struct gather gathers[CALLS];
    for (uint64_t i = 0; i < CALLS; i++) {
      gathers[i] = gather_into(self, NULL, &good[i], 0, large, 10 * round + i);
      gather_prepare(&gathers[i]);
    }
    together(self);
    /* Enough calls that the ranks register these sizes. */
    for (int again = 0; again < 2; again++) {
      for (int i = 0; i < CALLS; i++) gather_launch(&gathers[i], communicator, streams[0]);
    }
    wait_for(streams[0]);
    together(self);
    for (uint64_t i = 0; i < CALLS; i++) {
      const struct memory* memory = is_last && plan[i].is_bad ? &plain[i] : &good[i];
      gathers[i] = gather_into(self, NULL, memory, 0, plan[i].is_bad ? large : small, 100 + 10 * round + i);
      gather_prepare(&gathers[i]);
    }
    meet(self);
    /* Launches of one process may wait for its kernels: see `together`. */
    bool runs_ahead = self->kind == PROCESSES || !on_gpus();
    if (is_last && runs_ahead) meet(self);
    for (int i = 0; i < CALLS; i++) gather_launch(&gathers[i], communicator, streams[plan[i].stream]);
    if (!is_last && runs_ahead) meet(self);
    for (int i = 0; i < 2; i++) wait_for(streams[i]);
    together(self);
    for (int i = 0; i < CALLS; i++) gather_verify(&gathers[i], self);
  }
  for (int i = 0; i < CALLS; i++) {
    memory_free(self, &good[i]);
    memory_free(self, &plain[i]);
  }
  CUDA(cuStreamDestroy_v2(streams[1]));
  NCCL(ncclCommDestroy(communicator));
}

/* Rank 1 registers memory that no gather uses; other ranks do not know. */
static void own(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, gather_room(self, gather_count(self, 0))), other = memory_alloc(self, NCCLS, MIB);
  void* handle = NULL;
  gathers_in(self, communicator, &memory, 6, 300);
  if (self->rank == 1) NCCL(ncclCommRegister(communicator, other.at, other.bytes, &handle));
  meet(self);
  gathers_in(self, communicator, &memory, 20, 310);
  if (self->rank == 1) NCCL(ncclCommDeregister(communicator, handle));
  memory_free(self, &memory);
  memory_free(self, &other);
  NCCL(ncclCommDestroy(communicator));
}

/* The variable is set before the first call of the process. */
static void without(struct rank* self) {
  if (self->rank == 1) setenv("WINDLASS_REGISTER", "off", 1);
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, gather_room(self, gather_count(self, 0)));
  gathers_in(self, communicator, &memory, 12, 400);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  RUN_PART(turns, self);
  RUN_PART(own, self);
}

int main(int count, char** words) {
  begin("registered_alone", 280);
  int ranks = rank_count(4);
  if (count > 1 && !strcmp(words[1], "without")) {
    run_ranks("without", PROCESSES, ranks, without, NULL);
    return finish();
  }
  choose(count, words);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
