/* Holds that communicators may be made in groups as NCCL allows: all ranks of a process by one thread, and several communicators
 * in one group, in another order on every rank. With the argument `faults`, and where ranks meet at init: a rank that dies or is
 * aborted before all have met makes the others' inits fail at once, and later inits work. */
#define _GNU_SOURCE
#include "../support/one_thread.h"

#include <pthread.h>
#include <unistd.h>

static void works(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 519, .rank = self->rank,
                              .ranks = self->ranks, .key = key};
  transfer_prepare(&transfer);
  together(self);
  transfer_launch(&transfer, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
}

/* Three communicators are made in one group. Every rank begins with another one, and ends them in that order, too. */
static void in_any_order(struct rank* self) {
  ncclComm_t communicators[3] = {NULL, NULL, NULL};
  ncclUniqueId ids[3];
  for (int i = 0; i < 3; i++) ids[i] = share_id(self, i, i % self->ranks);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupStart());
  for (int i = 0; i < 3; i++) {
    int which = (i + self->rank) % 3;
    NCCL(ncclCommInitRank(&communicators[which], self->ranks, ids[which], self->rank));
  }
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupEnd());
  for (int i = 0; i < 3; i++) works(self, communicators[i], 10 + (uint64_t)i);
  ncclComm_t ends[3];
  for (int i = 0; i < 3; i++) ends[i] = communicators[(i + self->rank) % 3];
  destroy_each(ends, 3);
}

/* A late rank is waited for; a destroy right after an init harms no other rank. */
static void late_and_short(struct rank* self) {
  for (uint64_t round = 0; round < 8; round++) {
    if (self->rank == (int)round % self->ranks) usleep(30000);
    ncclComm_t communicator = world(self, 3);
    if (round % 2) works(self, communicator, 20 + round);
    NCCL(ncclCommDestroy(communicator));
  }
}

/* The order of these parts matters: at the first communicator the counters move into shared memory, and what another thread
 * counts at that moment may be lost. */
static void all(struct rank* self) {
  RUN_PART(late_and_short, self);
  RUN_PART(in_any_order, self);
}

/* Rank 1 makes two communicators in one group, the others make them one after the other. */
static void in_turn(struct rank* self) {
  ncclComm_t communicators[2] = {NULL, NULL};
  ncclUniqueId ids[2] = {share_id(self, 0, 0), share_id(self, 1, 0)};
  if (self->rank == 1) NCCL(ncclGroupStart());
  /* The group has them in the opposite order. */
  for (int i = 0; i < 2; i++) {
    int which = self->rank == 1 ? 1 - i : i;
    NCCL(ncclCommInitRank(&communicators[which], self->ranks, ids[which], self->rank));
  }
  if (self->rank == 1) NCCL(ncclGroupEnd());
  for (int i = 0; i < 2; i++) works(self, communicators[i], 60 + (uint64_t)i);
  for (int i = 0; i < 2; i++) NCCL(ncclCommDestroy(communicators[i]));
}

/* All ranks of one process are made by one thread in one group, each with its own device current. */
static void by_one_thread(int ranks) {
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
  one_thread_runs(&all, (struct transfer){.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 5003, .key = 90},
                  communicators, NULL);
  one_thread_end_streams(&all);
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  one_thread_print(&all, "one-thread");
}

/* The thread of the rank that must be waiting. */
static pid_t waits;

static void* die_soon(void* argument) {
  (void)argument;
  await_sleep(waits);
  _exit(0);
}

/* Rank 2 reports and dies while the others wait for rank 3, which does not come. Rank 2 leaves no report, so its calls are not
 * counted. */
static void a_rank_dies(struct rank* self) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  if (self->rank == 2) {
    pthread_t thread;
    waits = gettid();
    if (pthread_create(&thread, NULL, die_soon, NULL)) return;
    ncclCommInitRank(&communicator, self->ranks, id, self->rank);
    _exit(1);
  }
  if (self->rank == 3) return;
  CODE(ncclCommInitRank(&communicator, self->ranks, id, self->rank), ncclRemoteError);
}

static void* abort_it(void* argument) {
  await_sleep(waits);
  NCCL(ncclCommAbort((ncclComm_t)argument));
  return NULL;
}

/* Rank 1 is aborted while it waits for rank 0, which comes later. */
static void a_rank_is_aborted(struct rank* self) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  if (self->rank == 1) {
    pthread_t thread;
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
    waits = gettid();
    if (pthread_create(&thread, NULL, abort_it, communicator)) return;
    CODE(ncclGroupEnd(), ncclInternalError);
    pthread_join(thread, NULL);
    meet(self);
  } else {
    if (self->rank == 0) meet(self);
    CODE(ncclCommInitRank(&communicator, self->ranks, id, self->rank), ncclRemoteError);
    if (self->rank != 0) meet(self);
  }
  communicator = world(self, 1);
  works(self, communicator, 30);
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** words) {
  begin("inits", 100);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("faults")) {
    if (ranks < 4) skip("needs four ranks");
    run_ranks("aborted", PROCESSES, ranks, a_rank_is_aborted, NULL);
    run_ranks("dies", PROCESSES, ranks, a_rank_dies, NULL);
    return finish();
  }
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("in_turn")) run_ranks("in turn", PROCESSES, ranks, in_turn, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  if (is_section_chosen("one_thread")) by_one_thread(ranks);
  return finish();
}
